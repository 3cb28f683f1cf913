"""The report of a probe: the changes of a batch, and how far the new weights moved."""

from dataclasses import dataclass
from enum import StrEnum, auto
from itertools import groupby

from stepcheck.errors import SpecificationError, message
from stepcheck.report.words import listed, many

_NUM_SHOWN = 3  # parameters that a line names


class Variation(StrEnum):
    """A change of a batch.

    `VALUES` of one array at least must matter. The others must not.
    """

    VALUES = auto()
    ORDER = auto()
    PADDING = auto()
    WEIGHTS = auto()
    CUTS = auto()


class Outcome(StrEnum):
    """The weights after a change: the same up to rounding, others, or not known."""

    SAME = auto()
    MOVES = auto()
    UNJUDGED = auto()


class Cause(StrEnum):
    """The reason why an outcome is not known."""

    DRAWS = auto()
    UNSEEN = auto()
    NOT_FINITE = auto()
    REFUSED = auto()
    MARKS = auto()
    SMALL = auto()
    CONSTANT = auto()


_CHANGES = {
    Variation.VALUES: "other values in all rows of {}",
    Variation.ORDER: "another order of the rows",
    Variation.PADDING: "padded values of {}",
    Variation.WEIGHTS: "{} in rows of weight 0",
    Variation.CUTS: "a cut into {} microbatches",
}
_LOOK = {
    Variation.ORDER: (
        "labels, masks or weights that `update` does not take from the batch; a last batch that "
        "is left out; draws that depend on a row's place: switch dropout off in `update`"
    ),
    Variation.PADDING: "a mask that a layer, a mean or a normalisation does not use",
    Variation.WEIGHTS: "a mean, a normalisation or a term of the loss without the weights",
    Variation.CUTS: (
        "a mean of means: divide the sum over all microbatches once; a layer that mixes the rows "
        "of a microbatch; draws: switch dropout off in `update`"
    ),
}
_CAUSES = {
    Cause.DRAWS: (
        "two calls of `update` with the same batch give other weights. Restore the weights, the "
        "optimizer and the schedule at its beginning, and switch dropout off, or seed all draws"
    ),
    Cause.UNSEEN: (
        "no other value in the batch moves the weights by more than their rounding. Let `update` "
        "train on the batch that it gets, by a larger step"
    ),
    Cause.NOT_FINITE: "the new weights are not finite",
    Cause.REFUSED: "`update` refused it ({told})",
    Cause.MARKS: (
        "all have one value, which no real place has, so the update may know the padding by it. "
        "If they must not matter, state padding={{'{of}': mask}}"
    ),
    Cause.SMALL: (
        "{moved}: as little or as few as rounding moves, in a lower precision, or where an "
        "optimizer divides a gradient of 0 by its size (Adam). Let `update` use SGD, or float64"
    ),
    Cause.CONSTANT: "no other value is there to put in their place",
}


@dataclass(frozen=True)
class Effect:
    """The effect of one change on the new weights.

    Attributes:
        change: its kind.
        of: the part of the batch that was changed, by name; of a cut its number of
            microbatches.
        outcome: whether the weights are the same; None of `parameters` are named then.
        distance: how far they moved; 1 is as far as other values in all rows move them.
        parameters: (name, distance) of each parameter that moved, the farthest first.
        num_parameters: how many there are.
        cause: why it is not judged; None if it is.
        told: the error of an update that refused the change.
    """

    change: Variation
    of: tuple[str, ...]
    outcome: Outcome
    distance: float = 0.0
    parameters: tuple[tuple[str, float], ...] = ()
    num_parameters: int = 0
    cause: Cause | None = None
    told: str = ""

    def __str__(self) -> str:
        return f"{_named([self])}: {_outcome(self)}"


@dataclass(frozen=True)
class ProbeReport:
    """The effects of all changes.

    Attributes:
        effects: one for each change, in the order in which they were made.
        rounding: up to this distance the weights count as the same.
        cause: why nothing could be judged; None if it could.
    """

    effects: tuple[Effect, ...] = ()
    rounding: float = 0.0
    cause: Cause | None = None

    @property
    def findings(self) -> tuple[Effect, ...]:
        """The changes that must not matter, and do."""
        moves = self._with(Outcome.MOVES)
        return tuple(each for each in moves if each.change in _LOOK)

    @property
    def unjudged(self) -> tuple[Effect, ...]:
        """The changes whose effect is not known."""
        return self._with(Outcome.UNJUDGED)

    def _with(self, *outcomes: Outcome) -> tuple[Effect, ...]:
        return tuple(each for each in self.effects if each.outcome in outcomes)

    @property
    def is_right(self) -> bool:
        """Whether no change matters that must not, and each was judged."""
        are_same = (
            each.outcome is Outcome.SAME
            for each in self.effects
            if each.change in _LOOK
        )
        return self.cause is None and all(are_same)

    def require(self, *changes: str) -> None:
        """Raise unless each change was judged, and does not matter: for a test.

        Args:
            changes: of order, padding, weights, cuts; all that were made by default.

        Raises:
            AssertionError: one matters, or was not judged; its text is the report.
            SpecificationError: there is no such change.
        """
        unknown = sorted({*changes} - {*_LOOK})
        if unknown:
            must, advice = f"Changes must be of {', '.join(_LOOK)}.", "'order'."
            raise SpecificationError(message(must, ", ".join(unknown), advice))
        made = {each.change for each in self.effects} & {*_LOOK}
        wanted = {*changes} or made
        wrong = {each.change for each in (*self.findings, *self.unjudged)}
        if not wanted <= made - wrong or self.cause is not None:
            raise AssertionError(str(self))

    @property
    def first_line(self) -> str:
        """The report in a line."""
        if self.cause is not None:
            return f"Nothing could be judged: {_CAUSES[self.cause]}."
        if self.findings:
            groups = groupby(self.findings, lambda each: each.change)
            named = ", ".join(_named([*group]) for _, group in groups)
            return f"The update depends on {named}."
        num = many(
            len({each.change for each in self.effects} & {*_LOOK}), "change"
        )
        if not self.is_right:
            return f"Not all of {num} that must not matter could be judged."
        return (
            f"{num} of the batch that must not matter: none moves the weights."
        )

    def __str__(self) -> str:
        if self.cause is not None:
            return self.first_line
        judged = self._with(Outcome.SAME, Outcome.MOVES)
        lines = [self.first_line, "", *(f"  {each}" for each in judged)]
        if self.unjudged:
            lines += [
                "",
                "Not judged:",
                *(f"  - {each}" for each in self.unjudged),
            ]
        for change in dict.fromkeys(each.change for each in self.findings):
            lines += ["", f"Look for {_LOOK[change]}."]
        unit = "Distances: 1 is as far as other real values move the weights"
        lines += ["", f"{unit}; up to {self.rounding:.2g} is rounding."]
        return "\n".join(lines)

    __repr__ = __str__


def _named(effects: list[Effect]) -> str:
    """Return a change in words, with all parts of the batch that it was made in."""
    change, parts = effects[0].change, [" ".join(each.of) for each in effects]
    word = " or " if change is Variation.CUTS else " and "
    return _CHANGES[change].format(word.join(parts))


def _outcome(effect: Effect) -> str:
    num = f"{len(effect.parameters)} of {many(effect.num_parameters, 'parameter')}"
    some = tuple(f"{name} ({apart:.2g})" for name, apart in effect.parameters)
    moved = f"moves {num} by {effect.distance:.2g}: {listed(some, _NUM_SHOWN)}"
    if effect.cause is not None:
        of = " ".join(effect.of)
        return _CAUSES[effect.cause].format(
            told=effect.told, moved=moved, of=of
        )
    if effect.outcome is Outcome.SAME:
        return f"no weight moves (distance {effect.distance:.2g})"
    return moved
