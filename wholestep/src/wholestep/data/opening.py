"""The batches of a call: of the kind of its data, from the epoch where the call begins."""

from typing import Any

from wholestep import tree
from wholestep.data.batches import Batches
from wholestep.data.kinds import Data, Kind
from wholestep.data.source import Transform
from wholestep.data.stream import Kept
from wholestep.tree import Tree


def open_batches(
    data: Data,
    batch_size: int | None = None,
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
    return Batches(
        data, None if data.are_ready else batch_size, transform=in_turn(prepare, transform), **how
    )


class _Rows:
    """Arrays as a sequence of rows, of which each batch is loaded."""

    def __init__(self, arrays: Tree):
        self.arrays = arrays

    def __len__(self) -> int:
        return tree.num_rows(self.arrays, "data")

    def __getitem__(self, row: int) -> Tree:
        return tree.map_leaves(lambda leaf: leaf[row], self.arrays)


def in_turn(first: Transform | None, then: Transform | None) -> Transform | None:
    """Return the composition of both functions; None if there is neither."""
    if first is None or then is None:
        return first or then
    return lambda batch: then(first(batch))


def go_to_epoch(batches: Batches, epoch: int, steps_per_epoch: int | None, *, once: bool) -> None:
    """Move batches to the start of this epoch of a run, unless they are within it already.

    Args:
        once: whether an epoch ends with a pass over the data, even after fewer steps.
    """
    num, (at, step) = batches.num_batches, batches.position
    if steps_per_epoch is None or num is None:
        position = (epoch, 0)
        is_within = at == epoch
    elif once:
        done, part = divmod(epoch, -(-num // steps_per_epoch))
        position = done, part * steps_per_epoch
        is_within = at == done and 0 <= step - position[1] < steps_per_epoch
    else:
        position = divmod(epoch * steps_per_epoch, num)
        is_within = 0 <= at * num + step - epoch * steps_per_epoch < steps_per_epoch
    if not is_within:
        batches.seek(*position)


def kept(batches: Batches) -> Batches:
    """Return batches whose `in_order` always starts at the first batch; an iterator's batches are
    cached.
    """
    return Batches(Kept(iter(batches))) if batches.is_iterator else batches
