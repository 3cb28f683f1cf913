"""The report of a probe: the changes of a batch, and how far the new weights moved."""

from dataclasses import dataclass
from enum import StrEnum, auto

from stepcheck.errors import SpecificationError, message
from stepcheck.report.words import listed, many

_NUM_SHOWN = 3  # parameters that a line names


class Variation(StrEnum):
    """A change of a batch.

    `VALUE` is in one row and `VALUES` in all: at least one must matter. `ROW` is a
    fact. The others must not matter.
    """

    VALUE = auto()
    VALUES = auto()
    ORDER = auto()
    PADDING = auto()
    WEIGHTS = auto()
    CUTS = auto()
    ROW = auto()


class Outcome(StrEnum):
    """The weights after a change: the same up to rounding, others, or not known."""

    SAME = auto()
    MOVES = auto()
    UNJUDGED = auto()


class Cause(StrEnum):
    """The reason why an outcome is not known."""

    DRIFTS = auto()
    DRAWS = auto()
    UNSEEN = auto()
    NOT_FINITE = auto()
    REFUSED = auto()
    MARKS = auto()
    SMALL = auto()
    CONSTANT = auto()


_CHANGES = {
    Variation.VALUE: "other values in one row of {}",
    Variation.VALUES: "other values in all rows of {}",
    Variation.ORDER: "another order of the rows",
    Variation.PADDING: "padded values of {}",
    Variation.WEIGHTS: "{} in rows of weight 0",
    Variation.CUTS: "a cut into {}",
    Variation.ROW: "one more row of weight 0 (which some losses count in their divisor)",
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
    Cause.DRIFTS: (
        "`update` does not begin anew: the same batch moves the weights further in each call. "
        "Restore the weights, the optimizer and the schedule at its beginning, or make them there"
    ),
    Cause.DRAWS: (
        "two calls of `update` with the same batch give other weights. Switch dropout off, or "
        "seed all draws at the beginning of `update`"
    ),
    Cause.UNSEEN: (
        "no other value in the batch moves the weights by more than their rounding. Let `update` "
        "train on the batch that it gets, by a larger step"
    ),
    Cause.NOT_FINITE: "the new weights are not finite",
    Cause.REFUSED: "`update` refused it ({})",
    Cause.MARKS: (
        "all are {}, which no real place is, so the update may know the padding by them. If they "
        "must not matter, state padding={{{!r}: mask}}"
    ),
    Cause.SMALL: (
        "{}: as little or as few as rounding moves, in a lower precision, or where an optimizer "
        "divides a gradient of 0 by its own size (Adam). Let `update` use SGD, or float64"
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
        told: details of the cause.
    """

    change: Variation
    of: tuple[str, ...]
    outcome: Outcome
    distance: float = 0.0
    parameters: tuple[tuple[str, float], ...] = ()
    num_parameters: int = 0
    cause: Cause | None = None
    told: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{_name(self)}: {_outcome(self)}"


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
        must_not = {*_LOOK}
        return tuple(
            each
            for each in self.effects
            if each.outcome is Outcome.MOVES and each.change in must_not
        )

    @property
    def unjudged(self) -> tuple[Effect, ...]:
        """The changes whose effect is not known."""
        return tuple(each for each in self.effects if each.outcome is Outcome.UNJUDGED)

    @property
    def is_right(self) -> bool:
        """Whether no change matters that must not, and each was judged; a row more need
        not be.
        """
        must = [each for each in self.unjudged if each.change in _LOOK]
        return self.cause is None and not self.findings and not must

    def require(self, *changes: str) -> None:
        """Raise unless each change was judged, and does not matter: for a test.

        Args:
            changes: of order, padding, weights, cuts; all that were made by default.

        Raises:
            AssertionError: one matters, or was not judged; its text is the report.
            SpecificationError: there is no such change.
        """
        unknown = {*changes} - {*_LOOK}
        if unknown:
            must = f"Changes must be of {', '.join(_LOOK)}."
            raise SpecificationError(
                message(must, ", ".join(sorted(unknown)), "report.require('order').")
            )
        wanted = {*changes} or {
            each.change for each in self.effects if each.change in _LOOK
        }
        judged = {
            each.change for each in self.effects if each.outcome is not Outcome.UNJUDGED
        }
        wrong = {each.change for each in (*self.findings, *self.unjudged)}
        if wanted & wrong or not wanted <= judged or self.cause is not None:
            raise AssertionError(str(self))

    @property
    def first_line(self) -> str:
        """The report in a line."""
        if self.cause is not None:
            return f"Nothing could be judged: {_CAUSES[self.cause]}."
        if self.findings:
            named = ", ".join(
                _named(self.findings, change) for change in _changes(self.findings)
            )
            return f"The update depends on {named}."
        num = many(len({each.change for each in self.effects} & {*_LOOK}), "change")
        if not self.is_right:
            return f"Not all of {num} that must not matter could be judged."
        return f"{num} of the batch that must not matter: none moves the weights."

    def __str__(self) -> str:
        if self.cause is not None:
            return self.first_line
        lines = [self.first_line, ""]
        shown = [each for each in self.effects if each.change is not Variation.VALUES]
        lines += [f"  {each}" for each in shown if each.outcome is not Outcome.UNJUDGED]
        if self.unjudged:
            lines += ["", "Not judged:"]
            lines += [
                f"  - {each}" for each in shown if each.outcome is Outcome.UNJUDGED
            ]
        for change in _changes(self.findings):
            lines += ["", f"Look for {_LOOK[change]}."]
        unit = "Distances: 1 is as far as other real values move the weights"
        return "\n".join(
            [*lines, "", f"{unit}; up to {self.rounding:.2g} is rounding."]
        )

    __repr__ = __str__


def _changes(effects: tuple[Effect, ...]) -> list[Variation]:
    return [*dict.fromkeys(each.change for each in effects)]


def _named(effects: tuple[Effect, ...], change: Variation) -> str:
    """Return a change in words, with all parts of the batch that it was made in."""
    parts = [each.of for each in effects if each.change is change]
    names = [" ".join(each) for each in parts]
    if change is Variation.CUTS:
        names = [f"{' or '.join(names)} microbatches"]
    return _CHANGES[change].format(" and ".join(names))


def _name(effect: Effect) -> str:
    return _named((effect,), effect.change)


def _outcome(effect: Effect) -> str:
    if effect.cause is not None:
        return _CAUSES[effect.cause].format(*(effect.told or [_moved(effect)]))
    if effect.outcome is Outcome.SAME:
        return f"no weight moves (distance {effect.distance:.2g})"
    return _moved(effect)


def _moved(effect: Effect) -> str:
    num = f"{len(effect.parameters)} of {many(effect.num_parameters, 'parameter')}"
    some = tuple(f"{name} ({apart:.2g})" for name, apart in effect.parameters)
    return f"moves {num} by {effect.distance:.2g}: {listed(some, _NUM_SHOWN)}"
