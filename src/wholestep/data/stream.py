"""A running stream: its batches are drawn one after the other, and the next batch can be peeked at."""

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from wholestep.data.ready import BatchStream
from wholestep.tree import Tree


class Stream:
    """The batches of a source without random access.

    `step` is the number of batches that its epoch had before. A stream that has ended restarts at step 0 only.

    Args:
        source: the source of the batches.
    """

    def __init__(self, source: BatchStream):
        self._source = source
        self._running: Iterator[Tree] | None = None
        self._peeked: Tree | None = None
        self._get_state: Callable[[], Any] | None = None
        self.state: Any = None  # of the iterator after the last batch drawn, if it has `get_state`
        self.has_ended = False  # whether the iterator was seen to end

    @property
    def begins_again(self) -> bool:
        """Whether a second epoch can be drawn."""
        return self._source.begins_again

    def known_state(self, step: int) -> Any:
        """Return the iterator's state; before the first draw, the one after the next batch, which is kept."""
        if self._running is None:
            self._begin()
        if self.state is None and self._get_state is not None:
            self.peek(step)
        return self.state

    def restart(self) -> None:
        """Restart at the next draw."""
        self._running, self._peeked = None, None

    def first(self) -> Tree:
        """Return the first batch of another pass; this pass stays unchanged."""
        return next(iter(self._source))

    def draw(self, step: int) -> Tree:
        """Return the next batch, and move on.

        Raises:
            StopIteration: the stream has ended.
        """
        if self._peeked is not None:
            batch, self._peeked = self._peeked, None
            return batch
        try:
            return self._next(step)
        except StopIteration:
            self.has_ended = True
            raise

    def skip(self, num: int) -> tuple[int, Tree]:
        """Draw the first batches of an epoch, at most `num`; return their number and the last batch."""
        last = None
        for done in range(num):
            try:
                last = self.draw(done)
            except StopIteration:
                return done, last
        return num, last

    def run_through(self, passes: int) -> Tree:
        """Draw this number of full passes; return the last batch."""
        last = None
        for _ in range(passes):
            with contextlib.suppress(StopIteration):
                for step in itertools.count():
                    last = self.draw(step)
        return last

    def peek(self, step: int) -> Tree | None:
        """Return the next batch without drawing it; None at the end."""
        if self._peeked is None:
            with contextlib.suppress(StopIteration):
                self._peeked = self._next(step)
            self.has_ended = self._peeked is None
        return self._peeked

    def go_on(self, state: object) -> None:
        """Restart from a state that the source's iterator returned."""
        self._begin(state)
        self._peeked = None

    def _next(self, step: int) -> Tree:
        if self._running is None or (self.has_ended and step == 0 and self.begins_again):
            self._begin()
        assert self._running is not None
        batch = next(self._running)
        if self._get_state is not None:
            self.state = copy.deepcopy(self._get_state())
        return batch

    def _begin(self, state: object = None) -> None:
        iterator: Any = iter(self._source.batches)
        if state is not None:
            iterator.set_state(state)
        has_state = hasattr(iterator, "get_state") and hasattr(iterator, "set_state")
        self._get_state = iterator.get_state if has_state else None
        self._running, self.has_ended, self.state = self._source.drawn_from(iterator), False, None
