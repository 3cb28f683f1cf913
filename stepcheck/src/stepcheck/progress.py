"""The stage that is judged at present, on stderr, where judging takes long."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from stepcheck.errors import tell

_EVERY = 10.0  # seconds between two lines


class _Progress:
    """The name of the present stage, which the stages set; another thread reads it."""

    stage = "rows"


NOW = _Progress()


@contextmanager
def shown(
    every: float = _EVERY, tell: Callable[[str], None] = tell
) -> Iterator[None]:
    """Print the present stage and the seconds so far, again and again, while the body
    runs.
    """
    begun, is_over = time.monotonic(), threading.Event()
    NOW.stage = _Progress.stage

    def show() -> None:
        while not is_over.wait(every):
            tell(
                f"stepcheck: judging for {time.monotonic() - begun:.0f} s, now {NOW.stage}."
            )

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
