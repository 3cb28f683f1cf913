"""The batches of a call: of the kind of its data, from the epoch where the call begins."""

from typing import Any

from wholestep import tree
from wholestep.data.batches import Batches
from wholestep.data.kinds import Data, Kind
from wholestep.data.leaves import Transform
from wholestep.data.sampler import GrowingSize
from wholestep.data.sizes import BatchSize
from wholestep.data.stream import ReplayedIterator
from wholestep.errors import SpecificationError, message
from wholestep.tree import Tree


def open_batches(
    data: Data,
    batch_size: BatchSize = None,
    *,
    prepare: Transform | None = None,
    transform: Transform | None = None,
    **how: Any,
) -> Batches:
    """Return the batches of data; `Batches` are returned themselves, or prepared.

    Args:
        batch_size: ignored for ready-made batches.
        prepare: a function of every loaded batch, before `transform`; the data may then hold text
            on every engine.
        how: further arguments of `Batches`.
    """
    if data.keeps_position:
        return data.content if prepare is None else data.content.prepared(prepare)
    if prepare is not None and data.are_arrays:
        data = Data(_Rows(data.content), Kind.ROWS)
    if data.are_ready:
        batch_size = None
    return Batches(data, batch_size, transform=compose(prepare, transform), **how)


class _Rows:
    """Arrays as a sequence of rows, of which each batch is loaded."""

    def __init__(self, arrays: Tree):
        self.arrays = arrays

    def __len__(self) -> int:
        return tree.num_rows(self.arrays, "data")

    def __getitem__(self, row: int) -> Tree:
        return tree.map_leaves(lambda leaf: leaf[row], self.arrays)


def compose(first: Transform | None, then: Transform | None) -> Transform | None:
    """Return the composition of both functions; None if there is neither."""
    if first is None or then is None:
        return first or then
    return lambda batch: then(first(batch))


def seek_epoch(batches: Batches, epoch: int, steps_per_epoch: int | None, *, once: bool) -> None:
    """Move batches to the start of this epoch of a run, unless they are within it already.

    Args:
        once: whether an epoch ends with a pass over the data, even after fewer steps.

    Raises:
        SpecificationError: passes differ in their number of batches, and an epoch is no pass.
    """
    num = batches.num_batches
    at, step = batches.position
    if steps_per_epoch is None or num is None:
        start = (epoch, 0)
        current = at
    elif isinstance(batches.sampler, GrowingSize):
        must = "steps_per_epoch and initial_epoch need batches of one size."
        attempt = "leave one out, or seek Batches, and pass these."
        raise SpecificationError(message(must, "a batch_size that grows", attempt))
    elif once:
        epochs_per_pass = -(-num // steps_per_epoch)
        done, part = divmod(epoch, epochs_per_pass)
        start = (done, part * steps_per_epoch)
        current = at * epochs_per_pass + step // steps_per_epoch
    else:
        start = divmod(epoch * steps_per_epoch, num)
        current = (at * num + step) // steps_per_epoch
    if current != epoch:
        batches.seek(*start)


def replayable(batches: Batches) -> Batches:
    """Return batches that `in_order` starts at the first; an iterator's batches are cached."""
    return Batches(ReplayedIterator(iter(batches))) if batches.is_iterator else batches
