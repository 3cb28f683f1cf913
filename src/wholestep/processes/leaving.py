"""End a process at once, with a message, and without waiting for other processes."""

import os
import sys
from contextlib import suppress
from typing import NoReturn


def end(message: str, code: int = 1) -> NoReturn:
    """End this process at once, with a message."""
    tell(message)
    os._exit(code)


def tell(message: str) -> None:
    """Print a message to stderr, and flush stdout."""
    with suppress(OSError):  # the reader may have closed
        print(f"wholestep: {message}", file=sys.stderr, flush=True)
        sys.stdout.flush()
