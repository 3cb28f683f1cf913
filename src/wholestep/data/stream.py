"""A stream as it runs: its batches are drawn one after the other, and the next one can be looked at before."""

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from wholestep.data.ready import BatchStream
from wholestep.tree import Tree


class Stream:
    """The batches of a source that has no numbers for them.

    What is asked for is the batch after `step` others of its epoch. A stream that has ended begins again with an epoch,
    and not before.

    Args:
        source: where the batches come from.
    """

    def __init__(self, source: BatchStream):
        self._source = source
        self._running: Iterator[Tree] | None = None
        self._peeked: Tree | None = None
        self._get_state: Callable[[], Any] | None = None
        self.state: Any = None  # of the iterator, after the batch that was drawn last, if it has `get_state`
        self.has_ended = False  # whether the last batch was drawn, and its end was seen

    @property
    def begins_again(self) -> bool:
        """Whether a second epoch can be drawn."""
        return self._source.begins_again

    def begin(self) -> None:
        """Open the source, if it is not open: from then on `state` is known. Draws nothing."""
        if self._running is None:
            self._begin()

    def restart(self) -> None:
        """Begin again with the next batch."""
        self._running, self._peeked = None, None

    def first(self) -> Tree:
        """Return the first batch of another pass, which uses nothing up of this one."""
        return next(iter(self._source))

    def draw(self, step: int) -> Tree:
        """Return the next batch, and move on.

        Raises:
            StopIteration: there is none.
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
        """Draw the first batches of an epoch; return how many there were, at most `num`, and the last one."""
        last = None
        for done in range(num):
            try:
                last = self.draw(done)
            except StopIteration:
                return done, last
        return num, last

    def run_through(self, passes: int) -> Tree:
        """Draw so many passes, each from its beginning to its end; return the last batch."""
        last = None
        for _ in range(passes):
            with contextlib.suppress(StopIteration):
                for step in itertools.count():
                    last = self.draw(step)
        return last

    def peek(self, step: int) -> Tree | None:
        """Return the next batch, and keep it; None if there is none."""
        if self._peeked is None:
            with contextlib.suppress(StopIteration):
                self._peeked = self._next(step)
            self.has_ended = self._peeked is None
        return self._peeked

    def go_on(self, state: object) -> None:
        """Begin again where an iterator of this kind stood when it returned its state."""
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
        self._running, self.has_ended = self._source.drawn_from(iterator), False
        self.state = copy.deepcopy(iterator.get_state()) if has_state else None
