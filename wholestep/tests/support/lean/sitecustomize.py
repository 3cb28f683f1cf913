"""For processes that tests start: Keras does without these where they are missing, and starts in
half the time.
"""

import sys

sys.modules["matplotlib"] = sys.modules["sklearn"] = None
