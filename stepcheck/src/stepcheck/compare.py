"""Two runs compared, update by update, and part by part of each: what differs first."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from stepcheck.differences import (
    ComparedModel,
    ComparedUpdate,
    Difference,
    Judged,
    Kind,
    Part,
    Relation,
)
from stepcheck.errors import SpecificationError
from stepcheck.trace.log import Applied
from stepcheck.trace.matching import Match, Matched, matched
from stepcheck.trace.measure import ROUNDED, outline, tolerance
from stepcheck.trace.sides import (
    Facing,
    Sides,
    by_row,
    derivatives_of,
    facing,
    outputs_of,
)
from stepcheck.trace.trace import Run
from stepcheck.trace.updates import Pairs, Update, in_order, paired, updates
from stepcheck.values import Number, Shown, Where

GROWTH = 10.0  # rounding grows so much from one quantity to the next, and from update to update
_NEAR = 0.01  # relative distance of gradients at which the moves of the weights are compared
_ULPS = 4.0  # of a weight, by which its move is rounded
_FOLLOWS, _UNJUDGED = Judged(Relation.FOLLOWS), Judged(Relation.UNJUDGED)
_WORST_FIRST = Relation.DIFFERS, Relation.BY_ROUNDING, Relation.EQUAL
_NAN = float("nan")


def compare(
    one: Run,
    two: Run,
    *,
    match: Match | None = None,
    bits: bool = False,
    is_one_of_several: bool = False,
) -> ComparedModel:
    """Return how two runs of a model differ.

    Args:
        is_one_of_several: whether its rows may be outputs of another model, which
            rounding moves.

    Raises:
        SpecificationError: their parameters cannot be matched.
    """
    ones, twos = updates(one), updates(two)
    comparison = _Comparison(one, two, match, bits)
    comparison.has_derived_rows = is_one_of_several
    comparison.all_rows = _used(ones) == _used(twos)
    table = tuple(comparison.update(*pair) for pair in zip(ones, twos, strict=False))
    nums = len(ones), len(twos)
    are_by_hand = any(each.is_by_hand for each in (*ones[:1], *twos[:1]))
    if nums[0] != nums[1] and not are_by_hand:  # whose end may not be seen
        comparison.add(Part.ROWS, Kind.FEWER_UPDATES, min(nums) + 1, counts=nums)
    found = tuple(comparison.differences)
    left, fits = comparison.params.left, comparison.fits
    return ComparedModel((one.name, two.name), table, found, nums, left, fits)


def _used(found: list[Update]) -> set[int]:
    """Return the digests of all rows that were used."""
    return {digest for update in found for digest in update.digests.tolist()}


class _Comparison:
    """Two runs, and the differences up to now.

    Attributes:
        all_rows: whether both use the same rows in all.
    """

    def __init__(self, one: Run, two: Run, match: Match | None, bits: bool):
        self.bits, self.has_match, self.all_rows = bits, match is not None, False
        self.has_derived_rows = False
        self._order = 0
        self.fits, self.differs = tolerance([*one.dtypes, *two.dtypes])
        self.params = matched(one.parameters, two.parameters, match)
        self.others = _others(one, two, match)
        self.slots = next(iter(one.slots.values()), ())
        self.differences: list[Difference] = []
        self._history: dict[str, list[float]] = {}
        self._noise = 0.0  # the largest distance that rounding has made up to now
        self._near: list[np.ndarray] = []  # entries with near gradients in all updates
        self._last: tuple[Update, Update] | None = None

    def add(
        self, part: Part, kind: Kind, update: int, apart: float = np.inf, **known: Any
    ) -> None:
        """Add a difference."""
        made = Difference(part, kind, update, apart, order=self._order, **known)
        self.differences.append(made)

    def update(self, one: Update, two: Update) -> ComparedUpdate:
        """Return an update of both runs compared."""
        if one.number == 1:
            self._begin(one, two)
        self._order = one.applied.order
        if not self.differences:
            self._note_weights(one, two)
        pairs = paired(one, two)
        rows = self._rows(one, two, pairs)
        if rows.relation is Relation.BY_ROUNDING:
            pairs = in_order(one, two)
        parts = {Part.ROWS: rows, Part.MODE: _UNJUDGED}
        for part, judge in (
            (Part.OUTPUTS, self._outputs),
            (Part.GRADIENT, self._gradient),
        ):
            parts[part] = _FOLLOWS if self.differences else judge(one, two, pairs)
        rate = self._rate(one, two)
        parts[Part.STEP] = _FOLLOWS if self.differences else self._step(one, two)
        parts[Part.STATE] = _FOLLOWS if self.differences else self._state(one, two)
        parts[Part.MODE] = self._mode(one, two, parts[Part.OUTPUTS].relation)
        parts[Part.STEP] = parts[Part.STEP] if rate is None else rate
        self._last = one, two
        return ComparedUpdate(one.number, parts, (len(one.digests), len(two.digests)))

    def _judged(self, name: str, sides: Sides, most: float) -> Judged:
        """Return whether arrays differ: not if rounding, as far as it was seen, may
        have grown so far.
        """
        apart = sides.apart(bits=self.bits)
        past = self._history.setdefault(name, [])
        growth = past[-1] / past[-2] if len(past) > 1 and past[-2] else 1.0
        limit = GROWTH * self._noise * max(GROWTH, growth)
        past.append(apart)
        if apart <= (0.0 if self.bits else most):
            judged = Judged(Relation.EQUAL, apart)
        elif apart <= limit and not self.bits:
            judged = Judged(Relation.BY_ROUNDING, apart)
        else:
            return Judged(Relation.DIFFERS, apart)
        self._noise = max(self._noise, apart)
        return judged

    def _of_params(self, ones: Sequence, twos: Sequence) -> Sides:
        return Sides.of(
            self.params.names, self.params.of_one(ones), self.params.of_two(twos)
        )

    def _tell(
        self,
        part: Part,
        kind: Kind,
        update: int,
        sides: Sides,
        what: Shown,
        **known: Any,
    ) -> None:
        """Add a difference of named arrays, with its numbers."""
        where = Where(parameters=sides.unlike(self.fits), rows=known.pop("rows", ()))
        i, index, one, two = sides.largest()
        largest = Number(what, f"{sides.names[i]}{[*index]}", one, two, _NAN)
        numbers = (*known.pop("numbers", ()), largest)
        self.add(
            part, kind, update, sides.apart(), where=where, numbers=numbers, **known
        )

    def _begin(self, one: Update, two: Update) -> None:
        """Compare the weights before the first update."""
        weights = self._of_params(one.applied.params, two.applied.params)
        if self._judged("weights", weights, self.fits).relation is Relation.DIFFERS:
            self._tell(Part.STATE, Kind.OTHER_WEIGHTS, 0, weights, Shown.WEIGHT)

    def _note_weights(self, one: Update, two: Update) -> None:
        """Note how far rounding has moved the weights apart."""
        if _are_whole(one, two):
            weights = self._of_params(one.applied.params, two.applied.params)
            self._noise = max(self._noise, weights.apart())

    # ---- rows and mode ----

    def _rows(self, one: Update, two: Update, pairs: Pairs | None) -> Judged:
        digests = one.digests, two.digests
        if not all(map(len, digests)):
            return _UNJUDGED
        if pairs is not None:
            return Judged(Relation.EQUAL, 0.0)
        if self.differences:
            return _FOLLOWS
        sizes = len(digests[0]), len(digests[1])
        apart = _apart(one.sketches, two.sketches)
        if self.has_derived_rows and apart < _NEAR and not self.bits:
            self._noise = max(self._noise, apart)
            return Judged(Relation.BY_ROUNDING, apart)
        same_size = Kind.OTHER_ORDER if self.all_rows else Kind.OTHER_ROWS
        kind = same_size if sizes[0] == sizes[1] else Kind.OTHER_CUT
        where = Where(rows=tuple(np.flatnonzero(~np.isin(*digests)).tolist()))
        lines = _lines(one, two)
        self.add(Part.ROWS, kind, one.number, where=where, counts=sizes, lines=lines)
        return Judged(Relation.DIFFERS)

    def _mode(self, one: Update, two: Update, outputs: Relation) -> Judged:
        if not _has_other_mode(one, two):
            return Judged(Relation.EQUAL, 0.0)
        first = next(iter(self.differences), None)
        if first is not None and first.part is Part.MODE and first.update == one.number:
            return Judged(Relation.DIFFERS, first.apart)
        has_effect = first is not None and outputs not in (
            Relation.EQUAL,
            Relation.BY_ROUNDING,
        )
        return _FOLLOWS if has_effect else Judged(Relation.NO_EFFECT)

    # ---- outputs ----

    def _outputs(self, one: Update, two: Update, pairs: Pairs | None) -> Judged:
        found = [] if pairs is None else [*facing(one, two, pairs, outputs_of)]
        if not found:
            return _UNJUDGED
        sides = _as_sides(found)
        judged = self._judged("outputs", sides, self.fits)
        if judged.relation is not Relation.DIFFERS:
            return judged
        if any(each.is_cut for each in found):  # with other padding
            return Judged(Relation.UNJUDGED, judged.apart)
        rows, number = _unlike_rows(found, self.fits, Shown.OUTPUT)
        where = Where(rows=rows, outputs=tuple(dict.fromkeys(sides.unlike(self.fits))))
        part, kind = Part.OUTPUTS, Kind.OTHER_OUTPUTS
        if _has_other_mode(one, two):
            part, kind = Part.MODE, Kind.OTHER_MODE
        elif self._has_other_draws(one, two):
            kind = Kind.OTHER_DRAWS
        lines, apart = _lines(one, two), judged.apart
        self.add(
            part, kind, one.number, apart, where=where, numbers=(number,), lines=lines
        )
        return judged if part is Part.OUTPUTS else _FOLLOWS

    def _has_other_draws(self, one: Update, two: Update) -> bool:
        """Whether the passes draw random numbers from other states."""
        ones, twos = ([called.random for called in each.passes] for each in (one, two))
        seeds = [
            each for each in self._of_others(one, two) if each[0].dtype.kind in "iu"
        ]
        are_other = any(not np.array_equal(*each) for each in seeds)
        return are_other or (ones != twos and any([*ones, *twos]))

    def _of_others(
        self, one: Update, two: Update, *, after: bool = False
    ) -> list[tuple]:
        """Return the statistics and seeds of an update in pairs, as far as they were
        kept.
        """
        ones, twos = (
            each.after.buffers if after else each.buffers for each in (one, two)
        )
        if not ones or not twos:
            return []
        return [*zip(self.others.of_one(ones), self.others.of_two(twos), strict=True)]

    # ---- gradient ----

    def _gradient(self, one: Update, two: Update, pairs: Pairs | None) -> Judged:
        sides = self._gradients(one, two)
        if sides is None or one.is_by_hand or two.is_by_hand:
            return _UNJUDGED
        judged = self._judged("gradient", sides, self.differs)
        if judged.relation is not Relation.DIFFERS:
            return judged
        kind, counts, rows, numbers = self._why(one, two, pairs, sides)
        length = Number(Shown.GRADIENT_LENGTH, "", *sides.lengths(), _NAN)
        known = {"counts": counts, "rows": rows, "lines": _lines(one, two)}
        numbers = (length, *numbers)
        self._tell(
            Part.GRADIENT,
            kind,
            one.number,
            sides,
            Shown.GRADIENT,
            numbers=numbers,
            **known,
        )
        return judged

    def _gradients(self, one: Update, two: Update) -> Sides | None:
        """Return the gradients as handed over, or their outlines; None if neither was
        kept.
        """
        if _are_whole(one, two):
            return self._of_params(*(_filled(each.applied) for each in (one, two)))
        return self._outlines(one, two, 0)

    def _outlines(self, one: Update, two: Update, which: int) -> Sides | None:
        """Return the outlines of gradients (0), or of weights afterwards (1); None if
        not kept.
        """
        both = _outlines_of(one.applied), _outlines_of(two.applied)
        if not all(len(side[which]) if side else 0 for side in both):
            return None
        # In another layout, its length alone is the same.
        kept = [slice(None if view is None else 1) for *_, view in self.params.pairs]
        every = [*zip(self.params.pairs, kept, strict=True)]
        ones = [both[0][which][i][part] for (i, _, _), part in every]
        twos = [both[1][which][j][part] for (_, j, _), part in every]
        return Sides.of(self.params.names, ones, twos)

    def _why(
        self, one: Update, two: Update, pairs: Pairs | None, sides: Sides
    ) -> tuple:
        """Return what differs in a gradient: (kind, counts, rows, numbers of a row)."""
        lost = {*self._lost(one, two)}
        if lost and lost >= {*sides.unlike(self.differs)}:
            return Kind.NO_GRADIENT, (), (), ()
        factor = sides.multiple(self.differs)
        counts = () if factor is None else (factor,)
        other = Kind.OTHER_GRADIENT if factor is None else Kind.MULTIPLE
        found = [] if pairs is None else [*facing(one, two, pairs, derivatives_of)]
        rows = by_row(found, 0 if pairs is None else len(pairs.one))
        known = np.flatnonzero(~np.isnan(rows.factors))
        if not len(known):
            return other, counts, (), ()
        unlike, number = _unlike_rows(found, self.differs, Shown.DERIVATIVE)
        factors = rows.factors[known]
        num_parts = (
            len(one.passes) * len(two.passes) + 1
        )  # rows of a pass may count alike
        are_few = len({*np.round(factors, 2).tolist()}) <= num_parts
        if np.max(rows.rests[known]) > self.differs or not (are_few or rows.is_proof):
            return Kind.OTHER_LOSS, (), unlike, (number,)
        changed = np.abs(factors - 1) > self.differs
        if not changed.any():
            return (Kind.AFTER_LOSS if factor is None else other), counts, (), ()
        is_even = np.ptp(factors) <= self.differs * np.max(np.abs(factors))
        if (
            factor is not None
            and is_even
            and abs(factors[0] / factor - 1) > self.differs
        ):
            return other, counts, (), ()  # as where the optimizer divides
        counts = tuple(factors[changed].tolist())
        some = () if changed.all() else tuple(known[changed].tolist())  # none for all
        return Kind.ROWS_COUNT, counts, some, (number,)

    def _lost(self, one: Update, two: Update) -> Iterator[str]:
        """Yield the names of parameters that have a gradient in one run alone."""
        ones, twos = one.applied.grads, two.applied.grads
        for name, (i, j, _) in zip(self.params.names, self.params.pairs, strict=True):
            if ones and twos and (ones[i] is None) != (twos[j] is None):
                yield name

    # ---- step ----

    def _rate(self, one: Update, two: Update) -> Judged | None:
        """Compare the learning rates; the first difference is added."""
        rates = one.applied.learning_rate, two.applied.learning_rate
        apart = abs(rates[0] - rates[1]) / max(map(abs, rates)) if any(rates) else 0.0
        is_known = any(each.kind is Kind.OTHER_RATE for each in self.differences)
        if is_known or not apart > ROUNDED:  # as where a rate is not known
            return None
        numbers = (Number(Shown.RATE, str(one.number), *rates, _NAN),)
        lines = one.applied.line, two.applied.line
        self.add(
            Part.STEP, Kind.OTHER_RATE, one.number, apart, numbers=numbers, lines=lines
        )
        return Judged(Relation.DIFFERS, apart)

    def _step(self, one: Update, two: Update) -> Judged:
        """Compare the moves of the weights, where all gradients up to now are near."""
        gradients, states = self._gradients(one, two), self._states(one, two)
        if gradients is None or states is None:
            return _UNJUDGED
        before, after = states
        near = [np.ones_like(each, bool) for each in before.ones]
        is_known = _are_whole(one, two) and not (one.is_by_hand or two.is_by_hand)
        if is_known:
            near = [
                _are_near(*each)
                for each in zip(gradients.ones, gradients.twos, strict=True)
            ]
            near = [a & b for a, b in zip(near, self._near or near, strict=True)]
            self._near = near
            self._noise = max(self._noise, _masked(gradients, near).apart())
        moves = _moves(before, after, near)
        judged = self._judged("step", moves, ROUNDED if is_known else self.differs)
        if judged.relation is Relation.DIFFERS:
            lines = one.applied.line, two.applied.line
            self._tell(
                Part.STEP, Kind.OTHER_STEP, one.number, moves, Shown.MOVE, lines=lines
            )
        return judged

    def _states(self, one: Update, two: Update) -> tuple[Sides, Sides] | None:
        """Return the weights before and after, or their outlines; None if neither was
        kept.
        """
        if _are_whole(one, two):
            before = self._of_params(one.applied.params, two.applied.params)
            return before, self._of_params(
                one.applied.params_after, two.applied.params_after
            )
        last = None if self._last is None else self._outlines(*self._last, 1)
        now = self._outlines(one, two, 1)
        return None if last is None or now is None else (last, now)

    # ---- state ----

    def _state(self, one: Update, two: Update) -> Judged:
        """Compare what moved the weights after the step, the optimizer's slots, and
        statistics.
        """
        if not _are_whole(one, two):
            return _UNJUDGED
        found = (
            self._written(one, two),
            self._slots(one, two),
            self._statistics(one, two),
        )
        known = [each for each in found if each is not None]
        return min(
            known, key=lambda e: _WORST_FIRST.index(e.relation), default=_UNJUDGED
        )

    def _written(self, one: Update, two: Update) -> Judged | None:
        if not one.after.params or not two.after.params:
            return None
        before = self._of_params(one.applied.params_after, two.applied.params_after)
        after = self._of_params(one.after.params, two.after.params)
        moves = _moves(
            before, after, [np.ones_like(each, bool) for each in before.ones]
        )
        judged = self._judged("written", moves, self.differs)
        if judged.relation is Relation.DIFFERS:
            self._tell(Part.STATE, Kind.WRITTEN, one.number, moves, Shown.MOVE)
        return judged

    def _slots(self, one: Update, two: Update) -> Judged | None:
        ones, twos = one.applied.slots_after, two.applied.slots_after
        is_alike = [a.shape for a in ones] == [b.shape for b in twos]
        if not ones or not is_alike or self.has_match:
            return None
        has_names = len(self.slots) == len(ones)
        sides = Sides.of(
            self.slots if has_names else [*map(str, range(len(ones)))], ones, twos
        )
        judged = self._judged("slots", sides, self.differs)
        if judged.relation is Relation.DIFFERS:
            self._tell(Part.STATE, Kind.OTHER_SLOTS, one.number, sides, Shown.STATE)
        return judged

    def _statistics(self, one: Update, two: Update) -> Judged | None:
        both = self._of_others(one, two, after=True)
        known = [i for i, (a, _) in enumerate(both) if a.dtype.kind == "f"]
        if not known:
            return None
        names = [self.others.names[i] for i in known]
        sides = Sides.of(names, *zip(*(both[i] for i in known), strict=True))
        judged = self._judged("statistics", sides, self.fits)
        if judged.relation is Relation.DIFFERS:
            part, kind = Part.STATE, Kind.OTHER_STATISTICS
            if _has_other_mode(one, two):
                part, kind = Part.MODE, Kind.OTHER_MODE
            self._tell(
                part, kind, one.number, sides, Shown.STATE, lines=_lines(one, two)
            )
        return judged


def _others(one: Run, two: Run, match: Match | None) -> Matched:
    try:
        return matched(one.others, two.others, match)
    except SpecificationError:  # other layers, of equal parameters
        return Matched((), ())


def _are_whole(one: Update, two: Update) -> bool:
    return one.applied.is_whole and two.applied.is_whole


def _has_other_mode(one: Update, two: Update) -> bool:
    ones, twos = ({called.mode for called in each.passes} for each in (one, two))
    return ones != twos


def _apart(one: np.ndarray, two: np.ndarray) -> float:
    """Return how far sketches are apart; infinitely if there are none, or others."""
    is_alike = one.shape == two.shape and one.size
    return Sides.of(("",), [one], [two]).apart() if is_alike else np.inf


def _filled(step: Applied) -> list[np.ndarray]:
    """Return the gradients of a step; a missing one is zeros."""
    pairs = zip(step.grads, step.params, strict=True)
    return [np.zeros(p.shape) if g is None else g for g, p in pairs]


def _outlines_of(step: Applied) -> list[np.ndarray]:
    """Return the outlines of gradients and weights of a step, also where all numbers
    were kept.
    """
    if not step.is_whole:
        return step.outlines
    parts = _filled(step), step.params_after
    return [np.stack([outline(each) for each in part]) for part in parts]


def _lines(one: Update, two: Update) -> tuple:
    ones, twos = ([called.line for called in each.passes] for each in (one, two))
    return next(reversed(ones), None), next(reversed(twos), None)


def _as_sides(found: list[Facing]) -> Sides:
    """Return each output, of all rows."""
    names = tuple(sorted({str(each.leaf) for each in found}))
    by_leaf = [[each for each in found if str(each.leaf) == name] for name in names]
    ones, twos = (
        [np.concatenate([np.ravel(each[side]) for each in own]) for own in by_leaf]
        for side in (2, 3)
    )
    return Sides.of(names, ones, twos)


def _unlike_rows(
    found: list[Facing], most: float, what: Shown
) -> tuple[tuple[int, ...], Number]:
    """Return (the rows that differ, numbers of the output that differs most)."""
    sides = Sides.of(
        tuple(str(each.leaf) for each in found),
        *zip(*(e[2:4] for e in found), strict=True),
    )
    scale = max(
        float(np.max(np.abs(each), initial=0)) for each in (*sides.ones, *sides.twos)
    )
    unlike: set[int] = set()
    for each, a, b in zip(found, sides.ones, sides.twos, strict=True):
        if len(each.at):
            by = np.max(np.abs(a - b).reshape(len(a), -1), axis=1)
            unlike |= {*each.at[by > most * scale].tolist()}
    i, (*index,), one, two = sides.largest()
    if len(found[i].at):
        index[0] = int(found[i].at[index[0]])
    of = (
        f"{found[i].leaf}{index}"
        if what is Shown.OUTPUT
        else str(index[0] if index else 0)
    )
    return tuple(sorted(unlike)), Number(what, of, one, two, _NAN)


def _are_near(one: np.ndarray, two: np.ndarray) -> np.ndarray:
    return np.abs(one - two) <= _NEAR * np.maximum(np.abs(one), np.abs(two))


def _masked(sides: Sides, near: list[np.ndarray]) -> Sides:
    ones, twos = (
        [np.where(mask, each, 0) for each, mask in zip(side, near, strict=True)]
        for side in (sides.ones, sides.twos)
    )
    return Sides(sides.names, ones, twos)


def _moves(before: Sides, after: Sides, near: list[np.ndarray]) -> Sides:
    """Return the weights' moves at near entries; those that their rounding explains are
    equal.
    """
    ones, twos = [], []
    parts = zip(before.ones, before.twos, after.ones, after.twos, near, strict=True)
    for one, two, one_after, two_after, mask in parts:
        a, b = one_after - one, two_after - two
        ulp = (
            _ULPS * np.finfo("float32").eps * np.maximum(np.abs(one), np.abs(one_after))
        )
        is_equal = ~mask | (np.abs(a - b) <= ulp)
        ones.append(np.where(mask, a, 0))
        twos.append(np.where(is_equal, ones[-1], b))
    return Sides(before.names, ones, twos)
