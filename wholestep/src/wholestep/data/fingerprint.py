"""Short descriptions of data, by which a resumed run recognizes its data."""

import numpy as np
import xxhash

from wholestep import tree
from wholestep.data.batches import Batches
from wholestep.data.sampler import FixedSize, GrowingSize
from wholestep.data.source import IndexedBatches
from wholestep.tree import Tree

_MOST_COPIED = 16 << 20  # bytes at once, unless a single row has more


def layout_of(batches: Batches) -> dict[str, str]:
    """Return the shapes, the number of rows, the batching rule and the order. Reads no rows.

    >>> layout_of(Batches({"x": np.zeros((10, 2), "float32")}, 4, seed=7))["rows"]
    '10 rows, 4 in a batch, seed 7'
    """
    layout = {
        "source": type(batches.source).__name__,
        "batches in an epoch": str(batches.num_batches_in(0)),
    }
    for name, leaf in tree.named_leaves(batches.arrays):
        layout[name] = f"{'x'.join(map(str, leaf.shape))} {leaf.dtype}"
    if batches.is_stream:
        return layout
    sampler = batches.sampler
    if isinstance(sampler, FixedSize | GrowingSize | IndexedBatches):
        order = sampler.order
        rule = "in their own order"
        if order.shuffle:
            together = f", {order.block} together" if order.block > 1 else ""
            rule = f"seed {order.seed}{together}"
        layout["rows"] = f"{order.num_rows} rows, {sampler.size} in a batch, {rule}"
    else:
        layout["shapes"] = ", ".join("x".join(map(str, shape)) for shape in batches.shapes)
        layout["order"] = xxhash.xxh3_128_hexdigest(batches.rows(0, 0).data)
    return layout


def content_of(batches: Batches) -> dict[str, str]:
    """Return a digest of each array; {} if rows are loaded, as they may be generated anew."""
    digests = {}
    for name, leaf in tree.named_leaves(batches.arrays):
        if leaf.dtype != object:
            digests[name] = _digest_in_order(np.asarray(leaf))
    return digests


def digest_of(batch: Tree) -> str:
    """Return a digest of a batch: its numbers and their nesting."""
    content = xxhash.xxh3_128()
    for name, leaf in tree.named_leaves(batch):
        array = np.asarray(leaf)
        content.update(f"{name} {array.shape} {array.dtype}".encode())
        is_text = array.dtype == object
        content.update(str(array.tolist()).encode() if is_text else _bytes_of(array))
    return content.hexdigest()


def _digest_in_order(array: np.ndarray) -> str:
    """Return a digest of the numbers in C order; a non-contiguous array is copied in pieces."""
    size = len(array) if array.flags.c_contiguous else max(1, _MOST_COPIED // array[:1].nbytes)
    content = xxhash.xxh3_128()
    for start in range(0, len(array), size):
        content.update(_bytes_of(array[start : start + size]))
    return content.hexdigest()


def _bytes_of(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
