"""Properties of an objective's random draws. Traces on two batch sizes show which axis of a draw holds rows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple


class Asked(NamedTuple):
    """One call of `keras.random` by an objective.

    Args:
        name: the function.
        shape: of the drawn array; None if it is known only when the program runs.
        along: the axis along which elements change places, of a shuffle.
        why: why the function cannot be computed from the random words of rows; "" if it can.
        is_inside: whether a separately traced function, or the body of a loop, made the call.
    """

    name: str
    shape: tuple[int, ...] | None
    along: int | None = None
    why: str = ""
    is_inside: bool = False


@dataclass(frozen=True)
class DrawFact:
    """Properties of one draw.

    Args:
        axis: the axis that holds rows; None if there is none, or it is not known.
        couples: whether rows change places.
        why: why the draw cannot be assigned to rows; "" if it can.
        is_inside: whether it is drawn in a separately traced function, or in the body of a loop.
        of_row: the shape of the traced draw, where the axis of rows counts one row.
    """

    name: str
    axis: int | None = None
    couples: bool = False
    why: str = ""
    is_inside: bool = False
    of_row: tuple[int, ...] = ()

    @property
    def is_ours(self) -> bool:
        """Whether every cut of the batch draws the same numbers."""
        return not (self.why or self.couples)

    def fits(self, shape: tuple[int, ...] | None, num_rows: int) -> bool:
        """Whether a draw of this shape can be this draw, with equally many numbers for every row."""
        if shape is None or len(shape) != len(self.of_row):
            return False
        return self.axis is None or shape[self.axis] % max(1, num_rows) == 0

    def is_like(self, shape: tuple[int, ...] | None, num_rows: int) -> bool:
        """Whether a draw of this shape has the traced shape, `of_row`, for every row."""
        if shape is None or not self.fits(shape, num_rows):
            return False
        return tuple(size // (max(1, num_rows) if i == self.axis else 1) for i, size in enumerate(shape)) == self.of_row


def compare(one: Sequence[Asked], num_rows: int, two: Sequence[Asked] | None) -> tuple[DrawFact, ...]:
    """Return the properties of draws, from calls on `num_rows` rows and on twice as many (None: refused).

    >>> one = [Asked("uniform", (3, 5)), Asked("normal", (5,)), Asked("uniform", (4, 6))]
    >>> two = [Asked("uniform", (6, 5)), Asked("normal", (5,)), Asked("uniform", (4, 12))]
    >>> [fact.axis for fact in compare(one, 3, two)]
    [0, None, 1]
    """
    if two is None or [a.name for a in one] != [a.name for a in two]:
        why = "of another number of rows the objective draws otherwise"
        return tuple(DrawFact(asked.name, why=why, is_inside=asked.is_inside) for asked in one)
    return tuple(replace(_fact(a, b, num_rows), is_inside=a.is_inside) for a, b in zip(one, two, strict=True))


def _fact(one: Asked, two: Asked, num_rows: int) -> DrawFact:
    if one.why:
        return DrawFact(one.name, why=one.why)
    if one.shape is None or two.shape is None:
        return DrawFact(one.name, why="its shape is known only when the program runs")
    shapes = f"its shape is {one.shape} of {num_rows} rows and {two.shape} of twice as many"
    if len(one.shape) != len(two.shape):
        return DrawFact(one.name, why=shapes)
    differing = [i for i, (a, b) in enumerate(zip(one.shape, two.shape, strict=True)) if a != b]
    if not differing:
        return DrawFact(one.name, of_row=one.shape)
    axis = differing[0]
    is_odd = one.shape[axis] % num_rows or two.shape[axis] != 2 * one.shape[axis]
    if len(differing) > 1 or is_odd or (one.name == "categorical" and axis):
        return DrawFact(one.name, why=shapes)
    of_row = tuple(size // (num_rows if i == axis else 1) for i, size in enumerate(one.shape))
    return DrawFact(one.name, axis, couples=one.along == axis, of_row=of_row)
