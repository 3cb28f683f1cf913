"""The error a user can meet, a message of three parts, and lines about long waits."""

import json
import shlex
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.metadata import distributions
from typing import Any, TypeVar
from urllib.parse import unquote

Result = TypeVar("Result")
_NOTIFIES: ContextVar[bool] = ContextVar(
    "whether a long wait is announced already", default=False
)
_LONGEST = 200  # the most characters that a message shows of a value


class SpecificationError(ValueError):
    """The model, the data, the loss or another argument is not valid. Nothing has run."""


def attempt(
    function: Callable[[], Result],
) -> tuple[Result | None, Exception | None]:
    """Return (result, error) of a function that is not our own.

    >>> attempt(lambda: 1), attempt(lambda: 1 / 0)
    ((1, None), (None, ZeroDivisionError('division by zero')))
    """
    try:
        return function(), None
    except SpecificationError:
        raise
    except Exception as error:  # theirs, of any kind
        return None, error


def message(must: str, received: object, attempt: str) -> str:
    """Return the message of an error: the expectation, the received value, the advice.

    >>> message("updates must be at least 1.", 0, "leave it out for 40.")
    'updates must be at least 1. Received: 0. Try: leave it out for 40.'
    """
    came = received if isinstance(received, str) else shown(received)
    return f"{must} Received: {came}. Try: {attempt}"


def pip_install(*wanted: str) -> str:
    """Return the command that installs distributions of the repository from where this
    one came: a clone, a repository, or an index.

    >>> pip_install("stepcheck[keras]").startswith("pip install ")
    True
    """
    found = next(iter(distributions(name="stepcheck")), None)
    file = found and found.read_text("direct_url.json")  # of PEP 610
    origin = json.loads(file or "{}")
    form = "{0}"
    if "dir_info" in origin:
        folder = unquote(origin["url"]).removeprefix("file://")
        form = folder.removesuffix("stepcheck") + form
    if "vcs_info" in origin:
        form = f"{{0}} @ {origin['vcs_info']['vcs']}+{origin['url']}#subdirectory={{1}}"
    named = [form.format(each, each.partition("[")[0]) for each in wanted]
    return f"pip install {shlex.join(named)}"


def shown(value: Any) -> str:
    """Return a value as text for a message: an array by its type and shape.

    >>> import numpy as np
    >>> shown(np.ones((40, 3)))
    'float64 of shape (40, 3)'
    """
    if shape := getattr(value, "shape", ()):
        kind = getattr(value, "dtype", type(value).__name__)
        return f"{getattr(kind, 'name', kind)} of shape {tuple(shape)}"
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def tell(line: str) -> None:
    """Print a single line on the error output."""
    text = "".join(
        each if each.isprintable() else ascii(each)[1:-1] for each in line
    )
    print(text, file=sys.stderr, flush=True)


@contextmanager
def notify_if_long(
    line: str, seconds: float, tell: Callable[[str], None] = tell
) -> Iterator[None]:
    """Print a line once if the body takes longer, unless a context around it has its
    own.
    """
    if _NOTIFIES.get():
        yield
        return
    token = _NOTIFIES.set(True)
    timer = threading.Timer(seconds, lambda: tell(line))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        _NOTIFIES.reset(token)
