"""Batches of an iterable, drawn one after the other; the next batch can be peeked at."""

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import numpy as np

from wholestep import tree
from wholestep.checks import is_count
from wholestep.data.leaves import Transform, copied_batch
from wholestep.errors import BatchError, message, warn
from wholestep.tree import Tree


class BatchStream:
    """Ready-made batches without random access.

    `step` is the number of batches that its epoch had before. A stream that has ended restarts at
    step 0 only, and an iterator cannot restart.

    Args:
        transform: a function of every batch, after its conversion to numpy.
        prefetches: whether its batches are drawn ahead of their use, so that none depends on
            earlier updates.

    Attributes:
        begins_again: whether a second epoch can be drawn.
        state: after the last batch drawn, of an iterator with `get_state`, or of a source with
            `state_dict`.
        has_ended: whether the iterator was seen to end.
    """

    has_short_batch: ClassVar[bool] = True
    batch_shapes: ClassVar[list] = []

    def __init__(self, batches: Iterable, transform: Transform, *, prefetches: bool = False):
        self.prefetches = prefetches
        self.begins_again = not isinstance(batches, Iterator)
        self.state: Any = None
        self.has_ended = False
        self._batches = batches
        self._transform = transform
        self._running: Iterator | None = None
        self._unconverted: list = []  # the source's next batch, until it is converted
        self._has_raised = False  # and has not returned a batch since
        self._peeked: Tree | None = None
        self._get_state: Callable[[], Any] | None = None
        self._first_state: Any = None  # of a source with `state_dict`

    @property
    def num_batches(self) -> int | None:
        """The number of batches in an epoch; None if unknown."""
        try:
            return length_of(self._batches)
        except TypeError:
            return None

    def in_order(self) -> "BatchStream":
        """Return a stream of the same batches, from the first."""
        return BatchStream(self._batches, self._transform, prefetches=self.prefetches)

    def known_state(self, step: int) -> Any:
        """Return the iterator's state.

        Before the first draw, this is the state after the next batch, which is kept.
        """
        if self._running is None:
            self._begin()
        if self.state is None and self._get_state is not None:
            self.peek(step)
        return self.state

    def restart(self) -> None:
        """Restart at the next draw."""
        self._running = None
        self._peeked = None

    def first(self) -> Tree:
        """Return the first batch of another pass; this pass stays unchanged."""
        return copied_batch(next(iter(self._batches)), self._transform)

    def draw(self, step: int) -> Tree:
        """Return the next batch, and move on.

        Raises:
            StopIteration: the stream has ended.
        """
        batch = self.peek(step)
        if batch is None:
            raise StopIteration
        self._peeked = None
        return batch

    def skip(self, num: int) -> tuple[int, Tree]:
        """Draw the first batches of an epoch, at most `num`; return their number and the last."""
        last = None
        for done in range(num):
            try:
                last = self.draw(done)
            except StopIteration:
                return done, last
        return num, last

    def peek(self, step: int) -> Tree | None:
        """Return the next batch without drawing it; None at the end."""
        if self._peeked is None:
            with contextlib.suppress(StopIteration):
                self._peeked = self._next(step)
            self.has_ended = self._peeked is None
        return self._peeked

    def restore(self, state: object) -> None:
        """Restart from a state that the source's iterator returned."""
        self._begin(state)
        self._peeked = None

    def _next(self, step: int) -> Tree:
        """Return the next batch; the one that failed last, if converting it failed.

        Raises:
            StopIteration: the stream has ended.
            BatchError: it seems to have ended, but has raised an error before, and Python ends a
                generator that raises.
        """
        restarts = step == 0 and self.begins_again and (self.has_ended or self._has_raised)
        if self._running is None or restarts:
            self._begin()
        if not self._unconverted and not self.has_ended:
            self._read_next()
        if not self._unconverted:
            self._check_end(step)
            raise StopIteration
        batch = copied_batch(self._unconverted[0], self._transform)
        if self._get_state is not None:
            self.state = copy.deepcopy(self._get_state())
        self._unconverted = []
        return batch

    def _read_next(self) -> None:
        """Hold the source's next batch, if there is one."""
        assert self._running is not None
        try:
            # one call: an interrupt comes before it or after it
            self._unconverted.extend(itertools.islice(self._running, 1))
        except BaseException:
            self._has_raised = not self._unconverted
            raise
        self._has_raised = self._has_raised and not self._unconverted

    def _check_end(self, step: int) -> None:
        """Refuse the end after an error; warn if the length was not the number of batches."""
        if self._has_raised:
            must = "A source that has raised an error must be opened anew."
            attempt = "pass a new iterator."
            if self.begins_again:
                attempt = "data.seek(epoch) begins the pass again."
            raise BatchError(message(must, "its end, right after the error", attempt))
        length = self.num_batches
        if self.begins_again and not self.has_ended and length not in (None, step):
            must = "The length of the data must be the number of batches; all batches were used."
            name = type(self._batches).__name__
            received = f"{step} batches of {name}, whose length says {length}"
            warn(message(must, received, "mend its __len__, or leave it out."))

    def _begin(self, state: object = None) -> None:
        source: Any = self._batches
        # Hugging Face, torchdata
        if hasattr(source, "state_dict") and hasattr(source, "load_state_dict"):
            self._load(source, state)
            self._get_state = source.state_dict
        iterator: Any = iter(source)
        if hasattr(iterator, "get_state") and hasattr(iterator, "set_state"):
            self._get_state = iterator.get_state
            if state is not None:
                iterator.set_state(state)
        self._running = iterator
        self._unconverted = []
        self.has_ended = False
        self._has_raised = False
        self.state = None

    def _load(self, source: Any, state: object) -> None:
        """Set a source's state before a pass; None for its first state, where passes begin."""
        is_fresh = self._first_state is None
        if is_fresh:
            self._first_state = copy.deepcopy(source.state_dict())
        if state is not None or not is_fresh:
            source.load_state_dict(copy.deepcopy(self._first_state if state is None else state))


class ReplayedIterator:
    """The batches of an iterator, cached on the host: every iteration starts at the first."""

    def __init__(self, batches: Iterator):
        copies = (tree.map_leaves(np.array, batch) for batch in batches)  # as in `BatchStream`
        (self._beginning,) = itertools.tee(copies, 1)

    def __iter__(self) -> Iterator[Tree]:
        return copy.copy(self._beginning)


def length_of(source: object, ask: Callable = len) -> Any:
    """Return the length of a source, an integer from 0; None if the source says None.

    Raises:
        BatchError: the length is anything else.
    """
    must = f"The length of {type(source).__name__} must be a whole number of at least 0."
    attempt = "mend its __len__; leave it out if it is not known."
    try:
        length = ask(source)
    except (ValueError, OverflowError) as error:  # raised by Python for a length below 0
        raise BatchError(message(must, str(error), attempt)) from error
    if length is not None and not is_count(length, 0):
        raise BatchError(message(must, length, attempt))
    return length
