"""Which value of one model is which of another: by name, by order, or as the user says."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stepcheck.errors import SpecificationError, message
from stepcheck.trace.measure import places as places_of
from stepcheck.trace.trace import Parameter

View = Callable[[np.ndarray], np.ndarray]
Match = Callable[[str], Any]
_ADVICE = "match=lambda name: (other_name, lambda value: value.T)."


@dataclass(frozen=True)
class Matched:
    """Values of two models in pairs.

    Attributes:
        names: of the first model.
        pairs: of each value of the first model: (its index, the index in the other, the
            shape there, the view of the other, or None).
        left: names of large values, of which a part is kept: it has no view in another
            shape.
    """

    names: tuple[str, ...]
    pairs: tuple[tuple[int, int, tuple[int, ...], View | None], ...]
    left: tuple[str, ...] = ()

    def of_one(self, values: Sequence) -> list:
        """Return the first model's values."""
        return [values[i] for i, *_ in self.pairs] if values else []

    def of_two(self, values: Sequence) -> list:
        """Return the other model's values, in the order and shapes of the first one's."""
        return [
            values[j]
            if view is None or values[j] is None
            else view(values[j].reshape(shape))
            for _, j, shape, view in (self.pairs if values else ())
        ]


def matched(
    ones: Sequence[Parameter],
    twos: Sequence[Parameter],
    match: Match | None = None,
) -> Matched:
    """Return which values are which.

    Args:
        match: of a name of the first model, the name of the other, or (the name, a view
            of the other's array); or None.

    Raises:
        SpecificationError: they have other names and other shapes, or `match` gives a
            name that there is not.
    """
    places: dict[Any, int] = {each.name: i for i, each in enumerate(twos)}
    known = [
        {(each.name, each.shape) for each in side} for side in (ones, twos)
    ]
    stated: list[Any] = [each.name for each in ones]
    if match is not None:
        stated = [match(name) for name in stated]
    elif known[0] != known[1] or len(places) < len(twos):
        shapes = [[each.shape for each in side] for side in (ones, twos)]
        if shapes[0] != shapes[1]:
            must = "Both traces must have the same parameters, by name or by order and shape."
            received = " and ".join(str(sorted(side)) for side in known)
            raise SpecificationError(message(must, received, _ADVICE))
        stated = [*range(len(ones))]
        places = {i: i for i in stated}
    pairs: list[tuple[int, int, tuple[int, ...], View | None]] = []
    left = []
    for i, (one, found) in enumerate(zip(ones, stated, strict=True)):
        other, view = found if isinstance(found, tuple) else (found, None)
        if other is None:
            continue
        if other not in places:
            must = (
                f"match({one.name!r}) must return a name of the second trace."
            )
            advice = f"one of {', '.join(places)}, or (it, a view)."
            raise SpecificationError(message(must, repr(other), advice))
        j = places[other]
        if view is None or places_of(one.size) is None:
            pairs.append((i, j, twos[j].shape, view))
        else:
            left.append(one.name)
    names = tuple(ones[i].name for i, *_ in pairs)
    return Matched(names, tuple(pairs), tuple(left))
