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


@dataclass(frozen=True)
class Matched:
    """Values of two models in pairs.

    Attributes:
        names: of the first model.
        left: names of large values, of which a part is kept: it has no view in another
            shape.
        pairs: of each value of the first model: (its index, the index in the other, the
            view of the other, or None).
    """

    names: tuple[str, ...]
    pairs: tuple[tuple[int, int, View | None], ...]
    shapes: tuple[tuple[int, ...], ...] = ()
    left: tuple[str, ...] = ()

    def of_one(self, values: Sequence) -> list:
        """Return the first model's values."""
        return [values[i] for i, _, _ in self.pairs] if values else []

    def of_two(self, values: Sequence) -> list:
        """Return the other model's values, in the order and shapes of the first one's."""
        if not values:
            return []
        return [
            _viewed(values[j], shape, view) for (_, j, view), shape in self._shaped()
        ]

    def _shaped(self) -> zip:
        return zip(self.pairs, self.shapes, strict=True)


def _viewed(value: np.ndarray | None, shape: tuple[int, ...], view: View | None) -> Any:
    return value if value is None or view is None else view(value.reshape(shape))


def matched(
    ones: Sequence[Parameter], twos: Sequence[Parameter], match: Match | None = None
) -> Matched:
    """Return which values are which.

    Args:
        match: of a name of the first model, the name of the other, or (the name, a view
            of the other's array); or None.

    Raises:
        SpecificationError: they have other names and other shapes, or `match` gives a
            name that
        there is not.
    """
    places = {each.name: i for i, each in enumerate(twos)}
    if match is not None:
        pairs = [(i, *_stated(each.name, places, match)) for i, each in enumerate(ones)]
    elif {(each.name, each.shape) for each in ones} == {
        (each.name, each.shape) for each in twos
    }:
        pairs = [(i, places[each.name], None) for i, each in enumerate(ones)]
    else:
        pairs = [(i, i, None) for i in range(len(ones))]
        if [each.shape for each in ones] != [each.shape for each in twos]:
            raise SpecificationError(_unlike(ones, twos))
    known = [(i, j, view) for i, j, view in pairs if j is not None]
    chosen = [
        pair
        for pair in known
        if pair[2] is None or places_of(ones[pair[0]].size) is None
    ]
    return Matched(
        tuple(ones[i].name for i, _, _ in chosen),
        tuple(chosen),
        tuple(twos[j].shape for _, j, _ in chosen),
        tuple(ones[pair[0]].name for pair in known if pair not in chosen),
    )


def _stated(
    name: str, places: dict[str, int], match: Match
) -> tuple[int | None, View | None]:
    found = match(name)
    other, view = found if isinstance(found, tuple) else (found, None)
    if other is not None and other not in places:
        must = f"match({name!r}) must return a name of the second trace, or (the name, a view)."
        raise SpecificationError(
            message(must, repr(other), f"one of {', '.join(places)}.")
        )
    return (None if other is None else places[other]), view


def _unlike(ones: Sequence[Parameter], twos: Sequence[Parameter]) -> str:
    received = "; ".join(
        ", ".join(f"{each.name} {each.shape}" for each in side) for side in (ones, twos)
    )
    must = "Both traces must have the same parameters, by name or by order and shape."
    return message(
        must, received, "match=lambda name: (other_name, lambda value: value.T)."
    )
