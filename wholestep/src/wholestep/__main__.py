"""`python -m wholestep` is `wholestep`."""

import sys

from wholestep.cli import main

if __name__ == "__main__":
    sys.exit(main())
