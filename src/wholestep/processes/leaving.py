"""How a process ends at once: with a word to whoever reads, and without waiting for anybody."""

import os
import sys
from contextlib import suppress
from typing import NoReturn


def end(message: str, code: int = 1) -> NoReturn:
    """End this process at once, with a message."""
    tell(message)
    os._exit(code)


def tell(message: str) -> None:
    """Print a message where errors go, and let nothing that was printed before be lost."""
    with suppress(OSError):  # there may be nobody left to read it
        print(f"wholestep: {message}", file=sys.stderr, flush=True)
        sys.stdout.flush()
