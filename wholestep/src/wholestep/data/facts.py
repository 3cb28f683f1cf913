"""Short descriptions of data, by which a resumed run recognizes the data that it had."""

import numpy as np
import xxhash

from wholestep import tree
from wholestep.data.batches import Batches
from wholestep.data.sampler import FixedSize
from wholestep.data.source import IndexedBatches
from wholestep.tree import Tree

_MOST_COPIED = 16 << 20  # bytes at once, unless a single row has more


def layout_of(batches: Batches) -> dict[str, str]:
    """Return the shapes, the number of rows, the batching rule and the order. Reads no rows.

    >>> layout_of(Batches({"x": np.zeros((10, 2), "float32")}, 4, seed=7))["rows"]
    '10 rows, 4 in a batch, seed 7'
    """
    told = {
        "source": type(batches.source).__name__,
        "batches in an epoch": str(batches.num_batches),
    }
    if batches.arrays is not None:
        for name, leaf in tree.named_leaves(batches.arrays):
            told[name] = f"{'x'.join(map(str, leaf.shape))} {leaf.dtype}"
    if batches.is_stream:
        return told
    if isinstance(batches.sampler, FixedSize | IndexedBatches):
        order = batches.sampler.order
        rule = f"seed {order.seed}" if order.shuffle else "in their own order"
        rule += f", {order.block} together" if order.shuffle and order.block > 1 else ""
        told["rows"] = f"{order.num_rows} rows, {batches.sampler.size} in a batch, {rule}"
    else:
        told["shapes"] = ", ".join("x".join(map(str, shape)) for shape in batches.shapes)
        told["order"] = xxhash.xxh3_128_hexdigest(batches.rows(0, 0).data)
    return told


def content_of(batches: Batches) -> dict[str, str]:
    """Return a digest of each array; {} if rows are loaded, as they may be generated anew."""
    if batches.arrays is None:
        return {}
    leaves = [
        (name, leaf) for name, leaf in tree.named_leaves(batches.arrays) if leaf.dtype != object
    ]
    return {name: _digest_in_order(np.asarray(leaf)) for name, leaf in leaves}


def digest_of(batch: Tree) -> str:
    """Return a digest of a batch: its numbers and their nesting."""
    content = xxhash.xxh3_128()
    for name, leaf in tree.named_leaves(batch):
        array = np.asarray(leaf)
        content.update(f"{name} {array.shape} {array.dtype}".encode())
        content.update(_bytes_of(array) if array.dtype != object else str(array.tolist()).encode())
    return content.hexdigest()


def _digest_in_order(array: np.ndarray) -> str:
    """Return a digest of an array's numbers in C order; a non-contiguous array is copied in
    pieces.
    """
    each = len(array) if array.flags.c_contiguous else max(1, _MOST_COPIED // array[:1].nbytes)
    content = xxhash.xxh3_128()
    for start in range(0, len(array), each):
        content.update(_bytes_of(array[start : start + each]))
    return content.hexdigest()


def _bytes_of(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
