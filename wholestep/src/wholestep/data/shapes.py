"""A few fixed shapes for rows of many lengths: the shapes that pad least, or given ones.

A shape is the padded length of each sequence of a row. Rows of one shape are computed by one
program.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import keras
import numpy as np

from wholestep import tree
from wholestep.checks import is_count
from wholestep.errors import SpecificationError, message
from wholestep.tree import Tree

NONE = 255  # the shape number of a row that fits no shape
LONGEST = 2**27  # so that the lengths of a row add up in 32 bits
_MOST = 12
_ENOUGH = 1.05
_GROWTH = 1.03
_TOO_LARGE = 1e6


class LengthOptions(NamedTuple):
    """The options of batches under a token budget, as in `Batches`."""

    length: Tree | Callable[[Any], Any] = None
    boundaries: Tree = None
    pad: Tree = 0
    truncate: bool = False
    pack: bool = False


def best(lengths: np.ndarray, tokens: int) -> np.ndarray:
    """Return the shapes that pad least: int64 (shapes, sequences), at most a dozen.

    Rows are sorted by the sum of their lengths and cut into groups; a group's shape is the longest
    of each of its sequences, and its cost is its rows times the places of that shape. Dynamic
    programming finds the cuts of least cost, and the fewest shapes are taken whose cost is within 5
    % of the cost of 12 shapes. Cuts are on a grid that grows by 3 %, so the cost is up to about 3 %
    above the optimum.

    Args:
        lengths: int32 (sequences, rows).
        tokens: the most places of a shape, if possible.

    >>> best(np.array([[40, 39, 40, 90, 88, 90]], np.int32), tokens=512).ravel().tolist()
    [40, 90]
    """
    counts, longest = _on_a_grid(lengths)
    cost = _costs(counts, longest, tokens)
    totals = [cost[0]]
    cuts = []
    for _ in range(min(_MOST, len(counts)) - 1):
        through = totals[-1][:-1, None] + cost[1:]  # [i, j]: the last group is the cells i + 1 .. j
        cuts.append(np.argmin(through, axis=0))
        totals.append(np.min(through, axis=0))
    return _sorted(_groups(totals, cuts, longest))


def given(boundaries: Any, paths: tuple[tuple, ...]) -> np.ndarray:
    """Return the user's shapes: int64 (shapes, sequences).

    Args:
        boundaries: a list of integers for all sequences, or of nests with an integer for each
            sequence.
        paths: the paths of the lengths in a row.

    Raises:
        SpecificationError: no shape, too many, or a shape that does not name every sequence.
    """
    several = isinstance(boundaries, Iterable) and not isinstance(boundaries, dict | str)
    shapes = [_shape(boundary, paths) for boundary in (boundaries if several else [boundaries])]
    if not 0 < len(shapes) < NONE:
        must = f"boundaries must be 1 to {NONE - 1} shapes."
        raise SpecificationError(message(must, len(shapes), "leave them out: the best are chosen."))
    return _sorted(np.array(shapes, np.int64))


def assign(lengths: np.ndarray, shapes: np.ndarray) -> np.ndarray:
    """Return for each row the number of the smallest shape that holds it, uint8 (rows,); NONE if no
    shape does.

    Args:
        lengths: int32 (sequences, rows).
        shapes: int64 (shapes, sequences).
    """
    numbers = np.full(lengths.shape[1], NONE, np.uint8)
    for k in np.argsort(shapes.sum(axis=1), kind="stable")[::-1]:
        fits = lengths[0] <= shapes[k, 0]
        for length, most in zip(lengths[1:], shapes[k, 1:], strict=True):
            fits &= length <= most
        np.putmask(numbers, fits, k)
    return numbers


def _sorted(shapes: np.ndarray) -> np.ndarray:
    """Return the distinct shapes, the smallest first."""
    shapes = np.unique(shapes, axis=0)
    return shapes[np.argsort(shapes.sum(axis=1), kind="stable")]


def _on_a_grid(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of rows in each cell of the grid, (cells,), and its longest sequences,
    (cells, sequences).
    """
    sums = lengths.sum(axis=0, dtype=np.int32)
    edges = [1]
    most = int(sums.max())
    while edges[-1] < most:
        edges.append(max(edges[-1] + 1, int(edges[-1] * _GROWTH)))
    cell_of = np.searchsorted(edges, np.arange(most + 1)).astype(np.uint16)
    cells = cell_of[sums]
    longest = np.ones((len(edges), len(lengths)), np.int32)
    for s, length in enumerate(lengths):
        np.maximum.at(longest[:, s], cells, length)
    counts = np.bincount(cells, minlength=len(edges))
    return counts[counts > 0], longest[counts > 0].astype(np.int64)


def _costs(counts: np.ndarray, longest: np.ndarray, tokens: int) -> np.ndarray:
    """Return the cost of one group of the cells i..j, float64 (cells, cells); infinite below the
    diagonal.
    """
    before = np.concatenate([[0], np.cumsum(counts)])
    cost = np.full((len(counts), len(counts)), np.inf)
    for i in range(len(counts)):
        places = np.maximum.accumulate(longest[i:], axis=0).sum(axis=1)
        cost[i, i:] = (
            (before[i + 1 :] - before[i]) * places * np.where(places > tokens, _TOO_LARGE, 1.0)
        )
    return cost


def _groups(totals: list[np.ndarray], cuts: list[np.ndarray], longest: np.ndarray) -> np.ndarray:
    """Return the shapes of the fewest groups that cost little more than the most groups."""
    num = next(k for k, total in enumerate(totals) if total[-1] <= _ENOUGH * totals[-1][-1])
    shapes = []
    end = len(longest) - 1
    for k in range(num, 0, -1):
        cut = cuts[k - 1][end]
        shapes.append(longest[cut + 1 : end + 1].max(axis=0))
        end = cut
    return np.array([*shapes, longest[: end + 1].max(axis=0)])


def _shape(boundary: Tree, paths: tuple[tuple, ...]) -> list[int]:
    named = dict(keras.tree.flatten_with_path(boundary))
    sizes: list[Any] = [named.get(path, named.get(())) for path in paths]
    is_whole = all(is_count(n) and n <= LONGEST for n in sizes)
    if not is_whole or (() not in named and set(named) != set(paths)):
        names = " and ".join(tree.name(path, "boundary") for path in paths)
        must = (
            f"Each of boundaries must be a whole number of at least 1 and at most {LONGEST}, "
            f"or name {names}."
        )
        raise SpecificationError(message(must, boundary, "boundaries=[16, 32, 64]."))
    return [int(n) for n in sizes]
