"""Errors for the user, with messages of three parts; warnings, and lines about long waits."""

import itertools
import json
import shlex
import sys
import sysconfig
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.metadata import distributions
from pathlib import Path
from typing import Any
from urllib.parse import unquote

_PACKAGE = str(Path(__file__).parent)
_LIBRARIES = (
    "<frozen",
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)
_NOTIFIES: ContextVar[bool] = ContextVar("whether a long wait is announced already", default=False)
_LONGEST = 200
_MOST = 6  # the most characters, and parts of a nest, that a message shows of a value


class WholestepError(Exception):
    """The root of every error that wholestep raises on purpose."""


class SpecificationError(WholestepError, ValueError):
    """The model, the objective or an argument is not valid.

    Raised before the first update, or, where only a later batch or epoch shows it, between two
    updates: the earlier ones are kept.
    """


class BatchError(WholestepError, ValueError):
    """The data are not valid for an update. Raised before the update that would have used them."""

    def at(self, epoch: int, step: int) -> "BatchError":
        """Add the position of the batch as a note, once, and return the error."""
        place = f"batch {step} of epoch {epoch}"
        note = f"This was {place}, both counted from 0; no update has used it."
        if note not in getattr(self, "__notes__", []):
            self.add_note(note)
        return self


class NonFiniteError(WholestepError, ArithmeticError):
    """A loss, gradient or moving statistic was not finite; the update was not applied.

    The weights are the last good.

    Attributes:
        update: the number of the update that was not applied.
        rows: the numbers of the non-finite rows; empty where no row is to blame.
    """

    def __init__(self, message: str, update: int, rows: tuple[int, ...] = ()):
        super().__init__(message)
        self.update = update
        self.rows = rows


class PeerError(WholestepError, RuntimeError):
    """The processes of a run do not match, or one is lost. Raised in all that can raise."""


class CheckpointError(WholestepError, RuntimeError):
    """A checkpoint cannot be written or read. Nothing has been changed by it."""


class DamagedError(CheckpointError):
    """A checkpoint's content differs from the one written; after other errors, it may be good.

    Its message may quote the checkpoint, and is printable.
    """

    def __init__(self, text: str):
        super().__init__(printable(text))


class GoneError(DamagedError):
    """A checkpoint that was there exists no more: a writer has removed it."""


def message(must: str, received: object, attempt: str) -> str:
    """Return the message of an error: the expectation, the received value, the advice.

    >>> message("batch_size must be at least 1.", 0, "leave it out for 32.")
    'batch_size must be at least 1. Received: 0. Try: leave it out for 32.'
    """
    text = received if isinstance(received, str) else shown(received)
    return f"{must} Received: {text}. Try: {attempt}"


def pip_install(*wanted: str) -> str:
    """Return the command that installs distributions of the repository from where this one came: a
    clone, a repository, or an index.

    >>> pip_install("wholestep[jax]").startswith("pip install ")
    True
    """
    found = next(iter(distributions(name="wholestep")), None)
    origin = json.loads((found and found.read_text("direct_url.json")) or "{}")  # of PEP 610
    url = unquote(origin.get("url", ""))
    if "dir_info" in origin:
        clone = url.removeprefix("file://").removesuffix("wholestep")
        wanted = tuple(f"{clone}{each}" for each in wanted)
    if "vcs_info" in origin:
        source = f"{origin['vcs_info']['vcs']}+{url}#subdirectory="
        wanted = tuple(f"{each} @ {source}{each.partition('[')[0]}" for each in wanted)
    return f"pip install {shlex.join(wanted)}"


def invalid(must: str, received: object, attempt: str) -> SpecificationError:
    """Return the error of an argument that is not valid; see `message`."""
    return SpecificationError(message(must, received, attempt))


def warn(text: str) -> None:
    """Warn at the nearest line of the user's code."""
    frames = traceback.walk_stack(sys._getframe(1))
    files = [frame.f_code.co_filename for frame, _ in frames]
    outside = [i for i, file in enumerate(files) if not file.startswith(_PACKAGE)]
    users = (i for i in outside if not files[i].startswith(_LIBRARIES))
    level = next(users, outside[0] if outside else 0)
    warnings.warn(text, UserWarning, stacklevel=level + 2)


def tell(line: str) -> None:
    """Print a single line on the error output; see `printable`."""
    print(printable(line), file=sys.stderr, flush=True)


@contextmanager
def notify_if_long(
    line: str, seconds: float, tell: Callable[[str], None] = tell, timer: Callable = threading.Timer
) -> Iterator[None]:
    """Print a line once if the body takes longer, unless an outer context announces the wait.

    Args:
        timer: makes the thread that calls a function after a delay.
    """
    if _NOTIFIES.get():
        yield
        return
    token = _NOTIFIES.set(True)
    running = timer(seconds, lambda: tell(line))
    running.daemon = True
    running.start()
    try:
        yield
    finally:
        running.cancel()
        running.join()
        _NOTIFIES.reset(token)


def printable(text: str) -> str:
    r"""Return a text, which may quote a file, as one line without control characters and
    surrogates.

    >>> print(printable("a\nb\x1b[2J\udc80\u202e é"))
    a\nb\x1b[2J\udc80\u202e é
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def shown(value: Any) -> str:
    """Return a value as text: an array by its type and shape, a long nest by its first parts.

    >>> import numpy as np
    >>> shown({"x": np.ones((40, 3)), "y": ["a"] * 9})
    "{'x': float64 of shape (40, 3), 'y': ['a', 'a', 'a', 'a', 'a', 'a', ...]}"
    """
    if shape := getattr(value, "shape", ()):
        kind = getattr(value, "dtype", type(value).__name__)
        return f"{getattr(kind, 'name', kind)} of shape {tuple(shape)}"
    if type(value) not in (dict, list, tuple):
        text = repr(value)
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    first = list(itertools.islice(value, _MOST + 1))
    if isinstance(value, dict):
        parts = [f"{key!r}: {shown(value[key])}" for key in first]
    else:
        parts = [shown(part) for part in first]
    if len(parts) > _MOST:
        parts[_MOST] = "..."
    inner = ", ".join(parts)
    if isinstance(value, dict):
        return f"{{{inner}}}"
    if isinstance(value, list):
        return f"[{inner}]"
    return f"({inner},)" if len(parts) == 1 else f"({inner})"
