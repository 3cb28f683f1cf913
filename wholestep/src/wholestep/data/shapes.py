"""A few fixed shapes for rows of many lengths: the shapes that pad least, or the user's.

A shape is the padded length of each sequence of a row. Rows of one shape are computed by one
program.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import keras
import numpy as np
from numpy import ndarray

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

    length: Tree | Callable = None
    boundaries: Tree = None
    pad: Tree = 0
    truncate: bool = False
    pack: bool = False


def best_shapes(lengths: ndarray, tokens: int) -> ndarray:
    """Return the shapes that pad least: int64 (shapes, sequences), at most a dozen.

    Rows are sorted by the sum of their lengths and cut into groups; a group's shape is the longest
    of each of its sequences, and its cost is its rows times the places of that shape. Dynamic
    programming finds the cuts of least cost, and the fewest shapes are taken whose cost is within 5
    % of the cost of 12 shapes. Cuts are on a grid that grows by 3 %, so the cost is up to about 3 %
    above the optimum.

    Args:
        lengths: int32 (sequences, rows).
        tokens: the most places of a shape, if possible.

    >>> best_shapes(np.array([[40, 39, 40, 90, 88, 90]], np.int32), tokens=512).ravel().tolist()
    [40, 90]
    """
    counts, longest = _grid_cells(lengths)
    cost = _costs(counts, longest, tokens)
    totals = [cost[0]]
    starts = []
    for _ in range(min(_MOST, len(counts)) - 1):
        through = totals[-1][:-1, None] + cost[1:]  # [i, j]: the last group is the cells i + 1 .. j
        starts.append(np.argmin(through, axis=0) + 1)
        totals.append(np.min(through, axis=0))
    return _sorted(_groups(totals, starts, longest))


def user_shapes(boundaries: Any, paths: tuple[tuple, ...]) -> ndarray:
    """Return the user's shapes: int64 (shapes, sequences).

    Args:
        boundaries: a list of integers for all sequences, or of nests with an integer for each
            sequence.
        paths: the paths of the lengths in a row.

    Raises:
        SpecificationError: no shape, too many, or a shape that does not name every sequence.
    """
    if isinstance(boundaries, dict | str) or not isinstance(boundaries, Iterable):
        boundaries = [boundaries]
    shapes = [_shape(boundary, paths) for boundary in boundaries]
    if not 0 < len(shapes) < NONE:
        must = f"boundaries must be 1 to {NONE - 1} shapes."
        raise SpecificationError(message(must, len(shapes), "leave them out: the best are chosen."))
    return _sorted(np.array(shapes, np.int64))


def assign_shapes(lengths: ndarray, shapes: ndarray) -> ndarray:
    """Return each row's smallest shape that holds it, as a number, uint8 (rows,); NONE without one.

    Args:
        lengths: int32 (sequences, rows).
        shapes: int64 (shapes, sequences).
    """
    numbers = np.full(lengths.shape[1], NONE, np.uint8)
    largest_first = np.argsort(shapes.sum(axis=1), kind="stable")[::-1]
    for number in largest_first:
        shape = shapes[number]
        fits = lengths[0] <= shape[0]
        for length, most in zip(lengths[1:], shape[1:], strict=True):
            fits &= length <= most
        np.putmask(numbers, fits, number)
    return numbers


def _sorted(shapes: ndarray) -> ndarray:
    """Return the distinct shapes, the smallest first."""
    shapes = np.unique(shapes, axis=0)
    return shapes[np.argsort(shapes.sum(axis=1), kind="stable")]


def _grid_cells(lengths: ndarray) -> tuple[ndarray, ndarray]:
    """Group the rows by the sum of their lengths, on the grid.

    Returns:
        The number of rows in each cell, (cells,), and its longest sequences, (cells, sequences).
    """
    sums = lengths.sum(axis=0, dtype=np.int32)
    most = int(sums.max())
    edges = [1]
    while edges[-1] < most:
        grown = int(edges[-1] * _GROWTH)
        edges.append(max(edges[-1] + 1, grown))
    cell_of_sum = np.searchsorted(edges, np.arange(most + 1)).astype(np.uint16)
    cells = cell_of_sum[sums]
    counts = np.bincount(cells)
    longest = np.ones((len(lengths), len(edges)), np.int32)
    for in_cells, length in zip(longest, lengths, strict=True):
        np.maximum.at(in_cells, cells, length)
    filled = counts > 0
    return counts[filled], longest.T[filled].astype(np.int64)


def _costs(counts: ndarray, longest: ndarray, tokens: int) -> ndarray:
    """Return the cost of one group of the cells i..j, float64 (cells, cells); inf if j < i."""
    num = len(counts)
    cost = np.full((num, num), np.inf)
    for i in range(num):
        rows = np.cumsum(counts[i:])
        places = np.maximum.accumulate(longest[i:]).sum(axis=1)
        penalty = np.where(places > tokens, _TOO_LARGE, 1.0)
        cost[i, i:] = rows * places * penalty
    return cost


def _groups(totals: list[ndarray], starts: list[ndarray], longest: ndarray) -> ndarray:
    """Return the shapes of the fewest groups that cost little more than the most groups."""
    enough = _ENOUGH * totals[-1][-1]
    num_cuts = next(k for k, total in enumerate(totals) if total[-1] <= enough)
    shapes = []
    end = len(longest)
    for start_of_last in reversed(starts[:num_cuts]):
        start = start_of_last[end - 1]
        shapes.append(longest[start:end].max(axis=0))
        end = start
    shapes.append(longest[:end].max(axis=0))
    return np.array(shapes)


def _shape(boundary: Tree, paths: tuple[tuple, ...]) -> list[int]:
    named = dict(keras.tree.flatten_with_path(boundary))
    names_all = () in named or set(named) == set(paths)
    sizes = [named.get(path, named.get(())) for path in paths]
    counts = [int(size) for size in sizes if is_count(size) and size <= LONGEST]
    if not names_all or len(counts) < len(paths):
        names = " and ".join(tree.name(path, "boundary") for path in paths)
        must = (
            f"Each of boundaries must be a whole number of at least 1 and at most {LONGEST}, "
            f"or name {names}."
        )
        raise SpecificationError(message(must, boundary, "boundaries=[16, 32, 64]."))
    return counts
