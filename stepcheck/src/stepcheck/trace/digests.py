"""Digests of a run's rows, and a part of its wide outputs."""

from functools import cache
from hashlib import blake2b

import numpy as np

from stepcheck.trace.measure import places

_WIDE = 64  # of a wider last axis of an output this many entries are kept
_IGNORED = -100  # a label of padding in PyTorch
_KINDS = {"f": np.float32, "i": np.int64, "u": np.int64, "b": np.int64}


def digests(inputs: list[np.ndarray]) -> list[np.ndarray]:
    """Return [each row's digest, of shape (rows,), a sketch of its numbers, of shape
    (rows, 2)].

    Equal numbers have equal digests in each dtype, and rows of integers without their
    padding: a batch may be padded more than another one. A sketch differs by as much as
    the row's numbers do.

    >>> short, long = np.array([[5, 3]]), np.array([[5, 3, 0, 0]])
    >>> bool(digests([short])[0] == digests([long])[0])
    True
    """
    rows = [
        leaf for leaf in inputs if leaf.ndim and len(leaf) == len(inputs[0])
    ]
    if not rows:
        return []
    plain = [_plain(leaf) for leaf in rows]
    parts = zip(*(_in_bytes(leaf, plain) for leaf in plain), strict=True)
    made = [blake2b(b"".join(part), digest_size=8).digest() for part in parts]
    found = np.frombuffer(b"".join(made), "<u8")
    sketches = [_sketch(leaf) for leaf in plain if leaf.dtype == np.float32]
    none = [np.zeros((len(made), 0))]
    return [found, np.sum(sketches or none, axis=0)]


def _plain(leaf: np.ndarray) -> np.ndarray:
    """Return numbers in one dtype of their kind; a zero has one sign."""
    kind = _KINDS.get(leaf.dtype.kind)
    return leaf if kind is None else np.ascontiguousarray(leaf, kind) + kind(0)


def _in_bytes(leaf: np.ndarray, every: list[np.ndarray]) -> list[bytes]:
    """Return each row's bytes, of integers without padding."""
    if leaf.dtype.kind in "OSU":
        return [str(row.tolist()).encode() for row in leaf]
    if leaf.ndim != 2 or leaf.dtype != np.int64 or leaf.shape[1] < 2:
        return [row.tobytes() for row in leaf]
    alike = [
        e for e in every if e.shape == leaf.shape and e.dtype == leaf.dtype
    ]
    cuts = zip(leaf, *_bounds(alike), strict=True)
    return [row[first:end].tobytes() for row, first, end in cuts]


def _bounds(leaves: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return each row's first column and end without padding: where masks are 0, or
    else zeros at the end.

    Labels of -100 are padding too. A mask has zeros and ones alone, and a one in each
    row.
    """
    masks = (
        [leaf for leaf in leaves if _is_mask(leaf)] if len(leaves) > 1 else []
    )
    are_used = [(leaf != 0) & (leaf != _IGNORED) for leaf in masks or leaves]
    used = np.any(are_used, axis=0)
    first = np.argmax(used, axis=1) if masks else np.zeros(len(used), int)
    end = used.shape[1] - np.argmax(used[:, ::-1], axis=1)
    return first, np.where(used.any(axis=1), end, 0)


def _is_mask(leaf: np.ndarray) -> bool:
    return bool(np.all((leaf == 0) | (leaf == 1)) and np.all(leaf.any(axis=1)))


def _sketch(leaf: np.ndarray) -> np.ndarray:
    flat = leaf.reshape(len(leaf), -1).astype("float64")
    weighed = flat @ _direction(flat.shape[1])
    return np.stack([np.linalg.norm(flat, axis=1), weighed], axis=1)


@cache
def _direction(size: int) -> np.ndarray:
    return np.random.default_rng(size).normal(size=size)


def in_rows(output: np.ndarray) -> np.ndarray:
    """Return an output, of a wide last axis some entries, always the same.

    >>> in_rows(np.zeros((2, 3, 50_000))).shape
    (2, 3, 64)
    """
    chosen = places(output.shape[-1], _WIDE) if output.ndim > 1 else None
    return output if chosen is None else output[..., chosen]
