"""Digests of a run's rows, and a part of its wide outputs."""

from functools import cache
from hashlib import blake2b

import numpy as np

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
    rows = [leaf for leaf in inputs if leaf.ndim and len(leaf) == len(inputs[0])]
    if not rows:
        return []
    plain = [_plain(leaf) for leaf in rows]
    padded = {
        leaf.shape: _bounds(plain, leaf.shape) for leaf in plain if _is_padded(leaf)
    }
    found = np.zeros(len(rows[0]), "uint64")
    for i in range(len(found)):
        made = blake2b(digest_size=8)
        for leaf in plain:
            bounds = padded.get(leaf.shape) if _is_padded(leaf) else None
            row = leaf[i] if bounds is None else leaf[i, slice(*bounds[i])]
            made.update(
                str(row.tolist()).encode()
                if leaf.dtype.kind in "OSU"
                else row.tobytes()
            )
        found[i] = int.from_bytes(made.digest(), "little")
    numbers = [leaf for leaf in plain if leaf.dtype == np.float32]
    return [
        found,
        np.sum([_sketch(leaf) for leaf in numbers], 0) if numbers else _none(found),
    ]


def _plain(leaf: np.ndarray) -> np.ndarray:
    """Return numbers in one dtype of their kind; a zero has one sign."""
    kind = _KINDS.get(leaf.dtype.kind)
    return leaf if kind is None else np.ascontiguousarray(leaf, kind) + kind(0)


def _is_padded(leaf: np.ndarray) -> bool:
    return leaf.ndim == 2 and leaf.dtype == np.int64 and leaf.shape[1] > 1


def _bounds(plain: list[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """Return each row's [first column, end] without padding: where masks are 0, or else
    zeros at the end.

    Labels of -100 are padding too. A mask has zeros and ones alone, and a one in each
    row.
    """
    leaves = [leaf for leaf in plain if leaf.shape == shape and _is_padded(leaf)]
    masks = [leaf for leaf in leaves if _is_mask(leaf)] if len(leaves) > 1 else []
    used = np.any(
        [(leaf != 0) & (leaf != _IGNORED) for leaf in masks or leaves], axis=0
    )
    first = np.argmax(used, axis=1) if masks else np.zeros(shape[0], int)
    return np.stack(
        [first, np.where(used.any(1), shape[1] - np.argmax(used[:, ::-1], 1), 0)], 1
    )


def _is_mask(leaf: np.ndarray) -> bool:
    return bool(np.all((leaf == 0) | (leaf == 1)) and np.all(leaf.any(axis=1)))


def _sketch(leaf: np.ndarray) -> np.ndarray:
    flat = leaf.reshape(len(leaf), -1).astype("float64")
    return np.stack(
        [np.linalg.norm(flat, axis=1), flat @ _direction(flat.shape[1])], axis=1
    )


def _none(found: np.ndarray) -> np.ndarray:
    return np.zeros((len(found), 0))


@cache
def _direction(size: int) -> np.ndarray:
    return np.random.default_rng(size).normal(size=size)


def in_rows(output: np.ndarray) -> np.ndarray:
    """Return an output, of a wide last axis some entries, always the same.

    >>> in_rows(np.zeros((2, 3, 50_000))).shape
    (2, 3, 64)
    """
    if output.ndim < 2 or output.shape[-1] <= _WIDE:
        return output
    return output[..., _chosen(output.shape[-1])]


@cache
def _chosen(size: int) -> np.ndarray:
    return np.sort(
        np.random.default_rng(size).choice(size, _WIDE, replace=False, shuffle=False)
    )
