"""Ready-made batches: by number, or one after the other."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from wholestep import tree
from wholestep.checks import is_count
from wholestep.data.forks import Forks, warn_of_copies
from wholestep.data.leaves import checked, raw_batch
from wholestep.data.workers import Threads, Workers
from wholestep.errors import BatchError, message, warn
from wholestep.tree import Tree


@dataclass(frozen=True)
class IndexedBatches:
    """Ready-made batches that are loaded by number (`keras.utils.PyDataset`)."""

    batches: Any
    transform: Callable[[Tree], Tree]
    workers: Workers | None = None

    @property
    def num_batches(self) -> int | None:
        """The number of batches in an epoch; None if it is infinite."""
        return length_of(self.batches, lambda batches: batches.num_batches)

    def load(self, rows: np.ndarray) -> Tree:
        """Return one batch, by its number."""
        number = int(rows[0])
        get = self.batches.__getitem__ if self.workers is None else self.workers.take
        batch = raw_batch(read(get, number, f"batch {number}", self.num_batches))
        return checked(self.transform(tree.map_leaves(np.array, batch)))  # a copy, as in BatchStream

    def expect(self, numbers: Callable[[int], np.ndarray]) -> None:
        """Let the workers load the next batches of an epoch.

        Args:
            numbers: returns the numbers of the next n batches, given n.
        """
        if self.workers is not None:
            self.workers.expect(numbers(self.workers.most).tolist())

    def begin_epoch(self) -> None:
        """Call the data set's `on_epoch_begin`."""
        self._changes(self.batches.on_epoch_begin)

    def _changes(self, hook: Callable[[], None]) -> None:
        if self.workers is not None:
            self.workers.end()
        hook()

    def run_forward(self, epoch: int, step: int) -> None:
        """Call the data set's epoch hooks up to a position."""
        for _ in range(epoch):
            self.begin_epoch()
            self.end_epoch()
        if step:
            self.begin_epoch()

    def end_epoch(self) -> None:
        """Call the data set's `on_epoch_end`."""
        self._changes(self.batches.on_epoch_end)


@dataclass
class BatchStream:
    """Ready-made batches, one after the other. An iterator cannot restart."""

    batches: Iterable
    transform: Callable[[Tree], Tree]

    @property
    def num_batches(self) -> int | None:
        """The number of batches in an epoch; None if unknown."""
        try:
            return length_of(self.batches)
        except TypeError:
            return None

    @property
    def begins_again(self) -> bool:
        """Whether a second epoch can be drawn."""
        return not isinstance(self.batches, Iterator)

    @property
    def may_depend_on_the_loop(self) -> bool:
        """Whether a batch may depend on earlier updates, as of a generator. Loaders prefetch anyway."""
        return not is_loader(self.batches) and not type(self.batches).__module__.startswith("grain.")

    def __iter__(self) -> Iterator[Tree]:
        return self.drawn_from(iter(self.batches))

    def drawn_from(self, iterator: Iterator) -> Iterator[Tree]:
        """Yield the batches of an iterator over the source, converted and transformed."""
        told, num = self.num_batches, 0
        for batch in iterator:
            num += 1
            # A copy: a generator may fill the same arrays again while this batch waits for its turn.
            yield checked(self.transform(tree.map_leaves(np.array, raw_batch(batch))))
        if self.begins_again and told not in (None, num):
            must = "The length of the data must be the number of batches; all batches were used."
            received = f"{num} batches of {type(self.batches).__name__}, whose length says {told}"
            warn(message(must, received, "mend its __len__, or leave it out."))


class Kept:
    """The batches of an iterator, cached on the host, so that every iteration starts at the first batch."""

    def __init__(self, batches: Iterator):
        self._rest = batches
        self._kept: list = []

    def __iter__(self) -> Iterator[Tree]:
        place = 0
        while place < len(self._kept) or self._draws():
            yield self._kept[place]
            place += 1

    def _draws(self) -> bool:
        for batch in self._rest:
            # A copy, as in BatchStream.
            self._kept.append(tree.map_leaves(np.array, batch))
            return True
        return False


def workers_of(batches: keras.utils.PyDataset) -> Workers | None:
    """Return the workers of a data set that uses several threads, or processes; else None."""
    num, most, get = batches.workers, max(batches.workers, batches.max_queue_size), batches.__getitem__
    if batches.use_multiprocessing and num > 0:
        warn_of_copies(batches)
        return Workers(Forks(get, num), get, most)
    return Workers(Threads(get, num), get, most) if num > 1 else None


def is_loader(source: object) -> bool:
    """Whether this is a `tf.data.Dataset`, a torch `DataLoader` or a grain loader, which yields batches."""
    is_torch = type(source).__module__.startswith("torch.utils.data.dataloader")
    return hasattr(source, "element_spec") or is_torch or _is_batched(source)


def _is_batched(source: object) -> bool:
    """Whether this is a grain.MapDataset whose items are batches."""
    if not type(source).__module__.startswith("grain."):
        return False
    return type(source).__name__ == "BatchMapDataset" or any(map(_is_batched, getattr(source, "parents", ())))


def length_of(source: object, ask: Callable = len) -> Any:
    """Return the length of a source, an integer from 0; None if the source says None.

    Raises:
        BatchError: the length is anything else.
    """
    cause: Exception | None = None
    try:
        length = ask(source)
    except (ValueError, OverflowError) as error:  # raised by Python for a length below 0
        length, cause = str(error), error
    if cause is None and (length is None or is_count(length, 0)):
        return length
    must = f"The length of {type(source).__name__} must be a whole number of at least 0."
    raise BatchError(message(must, length, "mend its __len__; leave it out if it is not known.")) from cause


class RowError(BatchError):
    """A source lacks a row, or batch, below its length."""

    def __init__(self, what: str, length: int | None, error: Exception, place: str = ""):
        must = "A data set must have every row, or batch, below its length."
        received = f"{type(error).__name__} ({error}) from {what}{place}, where the length is {length}"
        super().__init__(message(must, received, "mend its __getitem__, or its __len__."))
        self.parts = (what, length, error)

    def at(self, epoch: int, step: int) -> "RowError":
        """Return the same error, with the position in the data."""
        return RowError(*self.parts, f" in step {step} of epoch {epoch}")


def read(get: Callable, number: int | list[int], what: str, length: int | None) -> Any:
    """Return a row, or a batch, by its number.

    Raises:
        RowError: it does not exist.
    """
    try:
        return get(number)
    except (IndexError, StopIteration) as error:
        raise RowError(what, length, error) from error
