"""Two runs compared, update by update, and part by part of each: what differs first."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

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
from stepcheck.trace.log import Applied, Values
from stepcheck.trace.matching import Match, Matched, matched
from stepcheck.trace.measure import ROUNDED, outline, tolerance
from stepcheck.trace.sides import Sides, facing
from stepcheck.trace.trace import Run
from stepcheck.trace.updates import NEAR, Pair, Update, paired, updates
from stepcheck.values import Number, Shown, Where

GROWTH = 100.0  # rounding grows so much from one quantity to the next
_NEAR = 0.01  # relative distance of gradients at which the moves of the weights are compared
_ULPS = 4.0  # of a weight, by which its move is rounded
_FOLLOWS, _UNJUDGED = Judged(Relation.FOLLOWS), Judged(Relation.UNJUDGED)
_BY_MODE = Kind.OTHER_OUTPUTS, Kind.OTHER_DRAWS, Kind.OTHER_STATISTICS
_ORDER = (
    Relation.FOLLOWS,
    Relation.UNJUDGED,
    Relation.EQUAL,
    Relation.BY_ROUNDING,
)


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
    comparison = _Comparison(one, two, match, bits=bits)
    comparison.near_rows = _NEAR if is_one_of_several and not bits else NEAR
    ones, twos = comparison.updates
    table = tuple(map(comparison.update, ones, twos))
    differences = [each for each in (comparison.first,) if each is not None]
    nums = len(ones), len(twos)
    firsts = [*ones[:1], *twos[:1]]
    if nums[0] != nums[1] and not any(each.is_by_hand for each in firsts):
        order = max(each.applied.order for each in (*ones, *twos))
        known = Part.ROWS, Kind.FEWER_UPDATES, min(nums) + 1, np.inf
        differences.append(Difference(*known, counts=nums, order=order))
    names, left = (one.name, two.name), comparison.params.left
    return ComparedModel(names, table, tuple(differences), nums, left)


class _Quantity(NamedTuple):
    """Numbers of an update in both runs.

    Attributes:
        kind: of the difference that they show.
        apart: their relative distance; None if they were not kept.
        most: up to which distance they are equal.
    """

    part: Part
    kind: Kind
    apart: float | None
    most: float
    sides: Sides | None = None
    what: Shown = Shown.STATE


class _Comparison:
    """Two runs, up to their first difference.

    Attributes:
        near_rows: the relative distance of equal rows.
    """

    def __init__(self, one: Run, two: Run, match: Match | None, *, bits: bool):
        self.bits = bits
        self.fits, self.differs = tolerance([*one.dtypes, *two.dtypes])
        self.params = matched(one.parameters, two.parameters, match)
        self.others = _others(one, two, match)
        self.updates, self.near_rows = (updates(one), updates(two)), NEAR
        self.first: Difference | None = None
        # the largest distance that rounding has made up to now
        self._noise = 0.0
        # Of each parameter the entries whose gradients have been near in all updates.
        self._near: list = [np.True_] * len(self.params.names)
        self._last: Pair | None = None

    def update(self, one: Update, two: Update) -> ComparedUpdate:
        """Return an update of both runs compared."""
        parts = dict.fromkeys(Part, _FOLLOWS)
        if self.first is None:
            pair = paired(one, two, self.near_rows)
            self._judge(pair, parts)
            are_equal = parts[Part.OUTPUTS].relation in _ORDER[2:]
            if not pair.has_other_mode:
                parts[Part.MODE] = Judged(Relation.EQUAL, 0.0)
            elif parts[Part.MODE] is _FOLLOWS and (
                are_equal or self.first is None
            ):
                parts[Part.MODE] = Judged(Relation.NO_EFFECT)
            self._last = pair
        return ComparedUpdate(
            one.number, parts, (len(one.digests), len(two.digests))
        )

    def _judge(self, pair: Pair, parts: dict[Part, Judged]) -> None:
        """Judge the parts of an update, up to the first difference."""
        for each in self._quantities(pair):
            judged = self._judged(each)
            if judged.relation is Relation.DIFFERS:
                self.first = self._difference(pair, each)
                parts[self.first.part] = judged
                return
            if each.kind not in (Kind.OTHER_WEIGHTS, Kind.OTHER_RATE):
                known = parts[each.part], judged
                parts[each.part] = max(
                    known, key=lambda e: _ORDER.index(e.relation)
                )

    def _judged(self, quantity: _Quantity) -> Judged:
        """Return whether a quantity differs: not if rounding may have grown so far."""
        apart = quantity.apart
        is_exact = self.bits or quantity.kind is Kind.OTHER_RATE
        if apart is None:
            return _UNJUDGED
        if apart <= (0.0 if self.bits else quantity.most):
            relation = Relation.EQUAL
        elif apart <= GROWTH * self._noise and not is_exact:
            relation = Relation.BY_ROUNDING
        else:
            return Judged(Relation.DIFFERS, apart)
        self._noise = max(self._noise, apart)
        return Judged(relation, apart)

    def _quantity(
        self,
        part: Part,
        kind: Kind,
        most: float,
        what: Shown,
        sides: Sides | None,
    ) -> _Quantity:
        apart = None if sides is None else sides.apart(bits=self.bits)
        return _Quantity(part, kind, apart, most, sides, what)

    def _quantities(self, pair: Pair) -> Iterator[_Quantity]:
        """Yield the quantities of an update, in the order in which they are made."""
        fits, differs = self.fits, self.differs
        gradients, before, after = self._kept(pair)
        if pair.one.number == 1 and pair.are_whole:
            at = Part.STATE, Kind.OTHER_WEIGHTS, fits, Shown.WEIGHT
            yield self._quantity(*at, before)
        elif pair.are_whole and before is not None:
            self._noise = max(self._noise, before.apart())
        if pair.places is not None:
            self._noise = max(self._noise, pair.rows_apart)
        have_rows = len(pair.one.digests) and len(pair.two.digests)
        apart = pair.rows_apart if have_rows else None
        yield _Quantity(Part.ROWS, Kind.OTHER_ROWS, apart, NEAR)
        at = Part.OUTPUTS, Kind.OTHER_OUTPUTS, fits, Shown.OUTPUT
        yield self._quantity(*at, facing(pair, are_outputs=True))
        known = None if pair.are_by_hand else gradients
        at = Part.GRADIENT, Kind.OTHER_GRADIENT, differs, Shown.GRADIENT
        yield self._quantity(*at, known)
        rates = [np.array(step.learning_rate) for step in pair.steps]
        if np.all(np.isfinite(rates)):
            at = Part.STEP, Kind.OTHER_RATE, ROUNDED, Shown.RATE
            name = str(pair.one.number)
            yield self._quantity(*at, Sides.of([name], rates[:1], rates[1:]))
        moves, near, most = None, None, differs
        if pair.are_whole and known:
            sides = zip(known.ones, known.twos, self._near, strict=True)
            most = ROUNDED
            near = self._near = [_are_near(a, b) & mask for a, b, mask in sides]
        if before and after and gradients:
            moves = _moves(before, after, near)
        yield self._quantity(
            Part.STEP, Kind.OTHER_STEP, most, Shown.MOVE, moves
        )
        if pair.are_whole:
            yield from self._states(pair, after)

    def _kept(self, pair: Pair) -> list[Sides | None]:
        """Return the gradients, and the weights before and after the step: whole, or
        their outlines.
        """
        if pair.are_whole:
            whole = [(_filled(s), s.params, s.params_after) for s in pair.steps]
            return [self._sides(*both) for both in zip(*whole, strict=True)]
        has_views = any(view is not None for *_, view in self.params.pairs)
        if self._last is None or has_views:  # an outline has one layout
            return [None, None, None]
        (grads, after), (_, before) = (
            zip(*map(_outlined, each.steps), strict=True)
            for each in (pair, self._last)
        )
        return [self._sides(*both) for both in (grads, before, after)]

    def _sides(self, ones: list, twos: list) -> Sides | None:
        """Return values of all parameters; None if they were not kept."""
        if not ones or not twos:
            return None
        params = self.params
        return Sides.of(params.names, params.of_one(ones), params.of_two(twos))

    def _states(self, pair: Pair, before: Sides | None) -> Iterator[_Quantity]:
        """Yield what moved the weights after the step, and the statistics."""
        ends = pair.one.after, pair.two.after
        after = self._sides(*(each.params for each in ends))
        if before and after:
            at = Part.STATE, Kind.WRITTEN, self.differs, Shown.MOVE
            yield self._quantity(*at, _moves(before, after))
        floats = self._buffers(*ends, kinds="f")
        if floats:
            at = Part.STATE, Kind.OTHER_STATISTICS, self.fits, Shown.STATE
            yield self._quantity(*at, Sides.of(*zip(*floats, strict=True)))

    def _buffers(
        self, one: Update | Values, two: Update | Values, kinds: str
    ) -> list:
        """Return (name, value, other value) of statistics or seeds of some dtypes."""
        values = (
            self.others.of_one(one.buffers),
            self.others.of_two(two.buffers),
        )
        every = zip(self.others.names, *values, strict=False)
        return [each for each in every if each[1].dtype.kind in kinds]

    def _difference(self, pair: Pair, quantity: _Quantity) -> Difference:
        """Return the difference that a quantity shows."""
        part, kind, apart, most, sides, what = quantity
        number = 0 if kind is Kind.OTHER_WEIGHTS else pair.one.number
        lines = [
            [None, *(p.line for p in u.passes)][-1]
            for u in (pair.one, pair.two)
        ]
        if part in (Part.STEP, Part.STATE):
            lines = [step.line for step in pair.steps]
        made = Difference(
            part, kind, number, apart or 0.0, order=pair.steps[0].order
        )
        made = replace(made, lines=(lines[0], lines[1]))
        if sides is None:
            return self._rows(pair, made)
        where = Where(parameters=sides.unlike(most))
        numbers = (sides.number(what),)
        made = replace(made, where=where, numbers=numbers)
        if part is Part.GRADIENT:
            return self._gradient(pair, sides, made)
        if part is Part.OUTPUTS:
            where = Where(
                rows=sides.unlike_rows(most), outputs=sides.unlike(most)
            )
            kind = Kind.OTHER_DRAWS if self._has_other_draws(pair) else kind
            made = replace(made, kind=kind, where=where)
        if pair.has_other_mode and kind in _BY_MODE:
            return replace(made, part=Part.MODE, kind=Kind.OTHER_MODE)
        return made

    def _rows(self, pair: Pair, made: Difference) -> Difference:
        one, two = pair.one.digests, pair.two.digests
        used = [
            {*np.concatenate([e.digests for e in run])} for run in self.updates
        ]
        same_size = Kind.OTHER_ORDER if used[0] == used[1] else Kind.OTHER_ROWS
        kind = same_size if len(one) == len(two) else Kind.OTHER_CUT
        where = Where(rows=tuple(np.flatnonzero(~np.isin(one, two)).tolist()))
        return replace(
            made, kind=kind, where=where, counts=(len(one), len(two))
        )

    def _has_other_draws(self, pair: Pair) -> bool:
        """Whether the passes draw random numbers from other states."""
        seeds = self._buffers(pair.one, pair.two, kinds="iu")
        ones, twos = (
            [p.random for p in each.passes] for each in (pair.one, pair.two)
        )
        are_other = ones != twos and any([*ones, *twos])
        return are_other or any(not np.array_equal(a, b) for _, a, b in seeds)

    def _gradient(
        self, pair: Pair, sides: Sides, made: Difference
    ) -> Difference:
        """Return a difference of gradients, explained by the derivatives of rows."""
        most, unlike = self.differs, made.where.parameters
        one, two = (float(np.linalg.norm(each)) for each in sides.vectors)
        length = Number(Shown.GRADIENT_LENGTH, "", one, two, np.nan)
        made = replace(made, numbers=(length, *made.numbers))
        if unlike and sides.lost.issuperset(unlike):
            return replace(made, kind=Kind.NO_GRADIENT)
        factor = sides.multiple(most)
        if factor is not None:
            made = replace(made, kind=Kind.MULTIPLE, counts=(factor,))
        found = facing(pair, are_outputs=False)
        if found is None:
            return made
        factors, rests = found.factors()
        known = np.flatnonzero(~np.isnan(factors))
        factors = factors[known]
        is_otherwise = factor is not None and not np.allclose(
            factors, factor, most
        )
        if is_otherwise or not len(known):  # as where the optimizer divides
            return made
        # One number of a row has a factor in any case: rows of a pass count alike then.
        num_factors = len({*np.round(factors, 2).tolist()})
        are_few = num_factors <= len(pair.one.passes) * len(pair.two.passes) + 1
        are_several = any(each[:1].size > 1 for each in found.ones)
        is_changed, rows = np.abs(factors - 1) > most, found.unlike_rows(most)
        kind, counts = Kind.OTHER_LOSS, ()
        if np.max(rests) <= most and (are_few or are_several):
            if not is_changed.any():
                return replace(made, kind=Kind.AFTER_LOSS)
            kind, counts = Kind.ROWS_COUNT, tuple(factors[is_changed].tolist())
            rows = () if is_changed.all() else tuple(known[is_changed].tolist())
        numbers = (*made.numbers, found.number(Shown.DERIVATIVE))
        where = replace(made.where, rows=rows)
        return replace(
            made, kind=kind, counts=counts, where=where, numbers=numbers
        )


def _others(one: Run, two: Run, match: Match | None) -> Matched:
    try:
        return matched(one.others, two.others, match)
    except SpecificationError:  # other layers, of equal parameters
        return Matched((), ())


def _filled(step: Applied) -> list[np.ndarray]:
    """Return the gradients of a step; a missing one is zeros."""
    pairs = zip(step.grads, step.params, strict=True)
    return [np.zeros(p.shape) if g is None else g for g, p in pairs]


def _outlined(step: Applied) -> list[list]:
    """Return the outlines of gradients and weights, also of numbers that were kept."""
    if not step.is_whole:
        return [*map(list, step.outlines)] or [[], []]
    return [
        [*map(outline, each)] for each in (_filled(step), step.params_after)
    ]


def _are_near(one: np.ndarray, two: np.ndarray) -> np.ndarray:
    return np.abs(one - two) <= _NEAR * np.maximum(np.abs(one), np.abs(two))


def _moves(before: Sides, after: Sides, near: list | None = None) -> Sides:
    """Return the weights' moves at near entries; those that their rounding explains are
    equal.
    """
    ones, twos = [], []
    masks = near or [np.True_] * len(before.ones)
    parts = zip(
        before.ones, before.twos, after.ones, after.twos, masks, strict=True
    )
    for one, two, one_after, two_after, mask in parts:
        a, b = one_after - one, two_after - two
        ulps = (
            _ULPS
            * np.finfo("float32").eps
            * np.maximum(abs(one), abs(one_after))
        )
        is_equal = ~mask | (np.abs(a - b) <= ulps)
        ones.append(np.where(mask, a, 0))
        twos.append(np.where(is_equal, ones[-1], b))
    return Sides(before.names, ones, twos)
