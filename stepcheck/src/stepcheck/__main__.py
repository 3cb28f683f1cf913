"""`python -m stepcheck` is the command line."""

import sys

from stepcheck.cli import main

if __name__ == "__main__":
    sys.exit(main())
