"""The epochs of a run, in data whose own epochs may be longer or shorter."""

from collections.abc import Iterator
from contextlib import contextmanager

from wholestep.data.batches import Batches
from wholestep.data.ready import BatchStream, IndexedBatches, Kept


def go_to_epoch(batches: Batches, epoch: int, steps_per_epoch: int | None, *, once: bool) -> None:
    """Move batches to the start of this epoch of a run, unless they are within it already.

    Args:
        once: whether an epoch ends with a pass over the data, even after fewer steps.
    """
    num, (at, step) = batches.num_batches, batches.position
    if steps_per_epoch is None or num is None:
        position, is_within = (epoch, 0), at == epoch
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
    """Return batches whose `in_order` always starts at the first batch; an iterator's batches are cached."""
    once = isinstance(batches.source, BatchStream) and not batches.source.begins_again
    return Batches(Kept(iter(batches))) if once else batches


@contextmanager
def ending_workers(batches: Batches) -> Iterator[None]:
    """End the workers of a PyDataset when the block is left."""
    try:
        yield
    finally:
        if isinstance(batches.source, IndexedBatches) and batches.source.workers is not None:
            batches.source.workers.end()
