"""Coefficients of known vectors that make a gradient: solved for in each update, read over all.

handed = sum_s a_s g_s + b p + q before, with s a whole update, its pieces or its rows.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np

from stepcheck.faults import Fault, Quantity
from stepcheck.solve.basis import MOST_ROWS, Basis
from stepcheck.solve.evidence import Evidence
from stepcheck.solve.forms import BASE, Form
from stepcheck.solve.known import of_penalty, of_rows, of_scale
from stepcheck.solve.ratios import Counts, Reading, farthest_first, least, readings
from stepcheck.trace.measure import SOLVED
from stepcheck.values import MEANT, Change, Count, Detail, Group, Known, Level, Rows

SPARE, RAW = (
    4,
    8.0,
)  # numbers beyond the unknowns of a solution; the cost of numbers without a fraction
SAME = 2 * SOLVED  # of norms to which gradients are clipped
_RIGHT = Reading(0, MEANT, np.zeros(0))
_ZERO, _KNOWN = (
    1e-4,
    0.05,
)  # of the largest factor: rounding; of a factor: by how much it may be off
_SURE, _CLIPPED = 2, 1.2  # costs: above the former more is tried; of a clip
_OF_PENALTY = 1e-2  # relative
_MOST_IN_ORDER, _MOST_NUMBERS = 4, 5
_OF_ROWS = {Group.FIRST_ROW_OF_BATCH, Group.LAST_ROW_OF_BATCH, Group.EACH_NTH_ROW}
_BLOCKS = Quantity.ROW_GRADIENTS, Quantity.PENALTY, Quantity.HANDED_GRADIENT
_ROWS, _PENALTY, _HANDED = _BLOCKS
_Before = Callable[[Evidence], np.ndarray]
_BEFORE: tuple[_Before, ...] = (
    lambda e: e.handed,
    lambda e: e.handed - e.penalty,
    lambda e: e.reference,
)


class Vectors(NamedTuple):
    """A choice of vectors that get one coefficient each.

    `columns`: the vectors of an update, as they should count; `at`: of each a row that tells its counts. `shape`:
    factors of the rows that are in the columns, `by_row`. `is_inside`: the model's own losses are in them too.
    """

    level: Level
    form: Form
    columns: Callable[[Basis], list[np.ndarray]]
    at: Callable[[Basis], np.ndarray]
    shape: Count | None = None
    by_row: Callable[[Basis], np.ndarray] | None = None
    is_inside: bool = False

    @property
    def is_of_base(self) -> bool:
        """Whether it has the meant loss."""
        return self.form == BASE


class _Block(NamedTuple):
    """Vectors of one quantity in one update: the row of each in the counts, the meant and the solved coefficients."""

    vectors: list[np.ndarray]
    at: np.ndarray
    meant: np.ndarray
    numbers: np.ndarray = np.zeros(0)
    slack: np.ndarray = np.zeros(0)


class _Solved(NamedTuple):
    """The solution of one update; `fixed` is the part of the gradient without a coefficient."""

    basis: Basis
    fixed: np.ndarray
    blocks: dict[Quantity, _Block]

    @property
    def num_rows(self) -> int:
        return len(self.blocks[_ROWS].vectors)


Made = list[
    np.ndarray | None
]  # a gradient of each update; None where the update before is not known


class Said(NamedTuple):
    """Changes, their cost and the gradients that they make; `rests`: as in `Explanation`."""

    changes: list[Change]
    cost: float
    made: Made
    rests: list[Made]


def solve(vectors: Vectors, bases: list[Basis], fits: float) -> Iterator[Said]:
    """Yield what makes the gradients of all these updates, with as little else in the sum as does."""
    has_penalty = any(basis.has_penalty for basis in bases)
    has_own = has_penalty and not vectors.is_inside
    if has_own and vectors.level in (Level.UPDATE, Level.MICROBATCH):
        yield from solve(vectors._replace(is_inside=True), bases, fits)
    befores = (None, *_BEFORE) if any(basis.before for basis in bases) else (None,)
    for before, with_penalty in product(befores, (False, True) if has_own else (False,)):
        solved = []
        for basis in bases:
            if (own := _solved(vectors, basis, fits, before, with_penalty)) is None:
                break
            solved.append(own)
        else:
            known = [each for each in solved if before is None or _HANDED in each.blocks]
            at = {id(each.basis): i for i, each in enumerate(known)}
            places = [at.get(id(basis)) for basis in bases]
            for said in _said(vectors, known) if before is None or len(known) > 1 else ():
                series = said.made, *said.rests
                made, *rests = ([None if i is None else own[i] for i in places] for own in series)
                yield said._replace(made=made, rests=rests)
            return


def _solved(
    vectors: Vectors, basis: Basis, fits: float, before: _Before | None, with_penalty: bool
) -> _Solved | None:
    e = basis.e
    blocks = _blocks(vectors, basis, before, with_penalty)
    fixed = e.penalty
    if vectors.is_inside or _PENALTY in blocks:
        fixed = np.zeros_like(e.penalty)
    columns = [vector for block in blocks.values() for vector in block.vectors]
    if len(columns) > MOST_ROWS + 2 or len(columns) + SPARE > len(e.handed):
        return None
    numbers, loose = least(columns, e.handed - fixed)
    if not np.all(np.isfinite(numbers)) or e.apart(fixed + numbers @ np.stack(columns)) > fits:
        return None
    slack = fits * max(float(np.linalg.norm(e.handed)), e.scale) * loose
    ends = np.cumsum([len(block.vectors) for block in blocks.values()])[:-1]
    parts = zip(blocks.items(), np.split(numbers, ends), np.split(slack, ends), strict=True)
    found = {q: block._replace(numbers=own, slack=off) for (q, block), own, off in parts}
    return _Solved(basis, fixed, found)


def _blocks(
    vectors: Vectors, basis: Basis, before: _Before | None, with_penalty: bool
) -> dict[Quantity, _Block]:
    e, at = basis.e, vectors.at(basis)
    meant = np.full(len(at), basis.unit)
    if vectors.level is Level.ROW:
        meant = meant * (basis.counts[Known.WEIGHT_OF_ROW] != 0)
    share = np.zeros(len(at))
    if vectors.is_inside:  # each piece's loss has its part of it
        own = basis.counts[Known.WEIGHT_OF_MICROBATCH][at] / (e.whole[0] or 1)
        share = own if len(at) > 1 else np.ones(1)
    pairs = zip(vectors.columns(basis), share, strict=True)
    columns = [(column + own * e.penalty) / basis.unit for column, own in pairs]
    first = np.zeros(1, int)
    blocks = {_ROWS: _Block(columns, at, meant)}
    if with_penalty and basis.has_penalty:
        blocks[_PENALTY] = _Block([e.penalty], first, np.ones(1))
    if before is not None and basis.before is not None:
        blocks[_HANDED] = _Block([before(basis.before)], first, np.zeros(1))
    return blocks


class _Series(NamedTuple):
    """The coefficients of one quantity in all updates that have it, with what may be known of them."""

    numbers: np.ndarray
    slack: np.ndarray
    meant: np.ndarray
    counts: Counts
    sets: dict[Rows, np.ndarray]

    def read(self, *, is_plain: bool) -> list[Reading]:
        """Return what these numbers may be."""
        return readings(self.numbers, self.slack, self.counts, self.meant, is_plain=is_plain)

    def of(self, some: np.ndarray) -> "_Series":
        """Return some of them."""
        columns = [{name: own[some] for name, own in each.items()} for each in self[3:]]
        return _Series(*(own[some] for own in self[:3]), *columns)


def _series(solved: list[_Solved], quantity: Quantity) -> _Series:
    own = [(each.basis, each.blocks[quantity]) for each in solved if quantity in each.blocks]

    def joined(tables: list[dict]) -> dict:
        at = [block.at for _, block in own]
        every = [
            {key: column[rows] for key, column in table.items()}
            for table, rows in zip(tables, at, strict=True)
        ]
        keys = [key for key in every[0] if all(key in each for each in every)]
        return {key: np.concatenate([each[key] for each in every]) for key in keys}

    bases, blocks = zip(*own, strict=True)
    numbers, slack, meant = (
        np.concatenate(each)
        for each in zip(*((b.numbers, b.slack, b.meant) for b in blocks), strict=True)
    )
    tables = [basis.counts for basis in bases], [basis.sets for basis in bases]
    return _Series(numbers, slack, meant, *map(joined, tables))


def _said(vectors: Vectors, solved: list[_Solved]) -> Iterator[Said]:
    """Yield the readings of the coefficients: of the rows, of the penalty, of the gradient before."""
    series = _series(solved, _ROWS)
    rows, penalties, befores = _of_rows(vectors, series), [_RIGHT], [_RIGHT]
    if any(_PENALTY in each.blocks for each in solved):
        own = _series(solved, _PENALTY)
        raw = Count(numbers=tuple(map(float, own.numbers[:_MOST_NUMBERS])))
        penalties = own.read(is_plain=True) or [Reading(2.5, raw, own.numbers, is_solved=True)]
    has_before = _HANDED in solved[0].blocks
    if has_before:
        own = _series(solved, _HANDED)
        some = np.abs(own.numbers) > own.slack  # not where a sum begins anew
        befores = own.of(some).read(is_plain=True) if some.sum() > 1 else []
    for said in product(rows[:3], penalties[:2], befores[:2]):
        yield _combined(vectors, solved, *said)
    if has_before or (rows and rows[0].cost <= _SURE):
        return
    yield from _clipped(vectors, solved, series, penalties[0])
    if not rows and (raw_rows := _raw(vectors, solved, series)) is not None:
        yield _combined(vectors, solved, raw_rows, penalties[0], _RIGHT)


def _raw(vectors: Vectors, solved: list[_Solved], series: _Series) -> Reading | None:
    """Return numbers that no fraction makes, if they are few and not all as they should be."""
    level, numbers, meant = vectors.level, series.numbers, series.meant
    if level is Level.SHAPE or not vectors.is_of_base:
        return None
    num_levels = len(set(np.round(numbers / np.abs(numbers).max(), 2)))
    if level is Level.ROW and num_levels > max(2, len(numbers) // 10):
        return None
    ratios = np.divide(numbers, meant, out=np.ones_like(meant), where=meant != 0)
    is_known = (meant != 0) & (
        series.slack <= _KNOWN * np.abs(meant)
    )  # others have hardly a gradient
    most = np.abs(ratios[is_known]).max(initial=0.0)
    ratios = np.where(np.abs(ratios) < _ZERO * most, 0.0, ratios)
    in_order, differing = ratios[: solved[0].num_rows], farthest_first(ratios[is_known])
    if not len(differing):
        return None
    is_in_order = level is Level.MICROBATCH and len(in_order) <= _MOST_IN_ORDER
    shown = (in_order if is_in_order else differing)[:_MOST_NUMBERS]
    count = Count(above=MEANT.above, numbers=tuple(map(float, shown)), level=level)
    cost = RAW + 0.5 * (level is not Level.UPDATE)
    return Reading(cost, count, numbers, is_solved=True)


def _of_rows(vectors: Vectors, series: _Series) -> list[Reading]:
    """Return the rows' factors as counts: one fraction for all of them, or another one for some."""
    level = vectors.level
    found = series.read(is_plain=level is not Level.ROW)
    if (found and found[0].cost <= _SURE) or level in (Level.UPDATE, Level.SHAPE):
        return found
    for rows, some in series.sets.items():
        if some.all() or not some.any() or (level is not Level.ROW and rows.group in _OF_ROWS):
            continue
        inside, outside = (series.of(own).read(is_plain=True) for own in (some, ~some))
        for a, b in product(inside[:2], outside[:1]):
            if a.is_other(b):
                both = np.zeros_like(series.numbers)
                both[some], both[~some] = a.values, b.values
                count = replace(a.count, rows=rows, others=b.count)
                found.append(Reading(1 + 0.5 * (a.cost + b.cost), count, both))
    return sorted(found, key=lambda reading: reading.cost)


def _combined(
    vectors: Vectors, solved: list[_Solved], rows: Reading, penalty: Reading, before: Reading
) -> Said:
    """Return what these readings say, its cost, and the gradients that they make."""
    bases = [each.basis for each in solved]
    ends = np.cumsum([each.num_rows for each in solved])[:-1]
    own = np.split(rows.values, ends)
    counted = [_by_row(vectors, *each) for each in zip(bases, own, strict=True)]
    form = vectors.form.changes
    found = [(change, _ROWS) for change in form]
    cost = rows.cost + penalty.cost + before.cost + len(found) + (vectors.shape is not None)
    if not rows.is_right or vectors.shape is not None:
        of_rows, is_chance = _changes_of_rows(vectors, bases, rows, own, counted)
        cost += is_chance
        found = [(change, _ROWS) for change in of_rows]
    if not penalty.is_right and _is_in_rows(bases, counted, penalty.values):
        cost -= penalty.cost
    elif not penalty.is_right:
        some = [each.basis for each in solved if _PENALTY in each.blocks]
        found.append(
            (
                _named(
                    Fault.PENALTY_COUNTED_OTHERWISE, of_penalty(some, penalty.values), penalty.count
                ),
                _PENALTY,
            )
        )
    if not before.is_right:
        is_sum = before.count == Count()
        # Of a moving average its own rows' number is a part.
        found = found if is_sum else [(change, _ROWS) for change in form]
        fault = Fault.NOT_RESET if is_sum else Fault.MOMENTUM_BY_HAND
        found.append((Change(fault, Detail.ADDED_BEFORE, count=before.count), _HANDED))
    blocks = [block for _, block in found]
    are_apart = 1 < len(found) == len({*blocks})
    made, rests = _made(vectors, solved, own, penalty.values, blocks if are_apart else [])
    return Said([change for change, _ in found], cost, made, rests)


def _by_row(vectors: Vectors, basis: Basis, own: np.ndarray) -> np.ndarray:
    """Return the factors of an update's rows by the coefficients of its vectors."""
    if vectors.level is Level.MICROBATCH:
        by_row = basis.by_row(vectors.at(basis), own)
    else:
        by_row = own * np.ones(sum(basis.sizes))
    return by_row if vectors.by_row is None else by_row * vectors.by_row(basis)


def _named(fault: Fault, names: tuple[Fault, ...], count: Count) -> Change:
    """Return the change with the first of some names, if there are any, and a count."""
    first, *twins = names or (fault,)
    return Change(first, count=count, twins=tuple(twins))


def _changes_of_rows(
    vectors: Vectors,
    bases: list[Basis],
    rows: Reading,
    own: list[np.ndarray],
    counted: list[np.ndarray],
) -> tuple[list[Change], bool]:
    """Return (the changes of the rows' factors and of the form, whether a fraction may be it by chance)."""
    names, more = of_rows(bases, counted), list[Change]()
    if not names and (names := of_rows(bases, counted, is_of_last=True)):
        more = [Change(Fault.LAST_WINDOW_DROPPED)]
    ratios = np.concatenate([each / basis.unit for each, basis in zip(own, bases, strict=True)])
    if not names and vectors.level is Level.UPDATE:
        names = of_scale(bases, ratios)
    count = rows.count if vectors.shape is None else rows.count.times(vectors.shape)
    is_whole = count.rows is None and not rows.is_right and count.number != 0
    if is_whole and Known.MEANT not in count.above:
        count = replace(count, instead=Count(below=(Known.WEIGHT_OF_UPDATE,) * bases[0].is_divided))
    changes = [*vectors.form.changes]
    if changes and not names:  # a number of the form
        changes[-1] = replace(changes[-1], count=count)
    else:
        changes += [_named(Fault.ROWS_COUNTED_OTHERWISE, names, count), *more]
    is_even = vectors.shape is None and np.ptp(ratios) <= SOLVED * np.abs(ratios).max()
    is_fraction = rows.count.number != 0 and not rows.is_solved
    return changes, bool(is_even and not names and is_fraction)


def _made(
    vectors: Vectors,
    solved: list[_Solved],
    own: list[np.ndarray],
    penalty: np.ndarray,
    blocks: list[Quantity],
) -> tuple[Made, list[Made]]:
    """Return (the gradients of a solution, the same without the change of each of these blocks)."""
    made, at = Made(), 0
    rests = [Made() for _ in blocks]
    for each, rows in zip(solved, own, strict=True):
        numbers = {_ROWS: rows, _PENALTY: penalty[at : at + 1]}
        at += _PENALTY in each.blocks
        if _HANDED in each.blocks:
            numbers[_HANDED] = each.blocks[_HANDED].numbers
        parts = {q: numbers[q] @ np.stack(block.vectors) for q, block in each.blocks.items()}
        made.append(whole := sum(parts.values(), each.fixed))
        e = each.basis.e
        of_data = e.reference - (0 if vectors.is_inside else e.penalty)
        should = {_ROWS: of_data, _PENALTY: e.penalty, _HANDED: np.zeros_like(e.penalty)}
        for rest, block in zip(rests, blocks, strict=True):
            rest.append(whole + (should[block] - parts[block] if block in parts else 0))
    return made, rests


def _is_in_rows(bases: list[Basis], counted: list[np.ndarray], penalty: np.ndarray) -> bool:
    """Whether the penalty has the factor of the rows: then both are parts of one loss."""
    own = []
    for each, basis in zip(counted, bases, strict=True):
        weight = basis.counts[Known.WEIGHT_OF_ROW]
        own.append(np.sum(each * weight) if basis.is_divided else np.mean(each[weight != 0]))
    near = _OF_PENALTY * np.abs(penalty)
    return len(own) == len(penalty) and bool(np.all(np.abs(np.array(own) - penalty) <= near))


def _clipped(
    vectors: Vectors, solved: list[_Solved], series: _Series, penalty: Reading
) -> Iterator[Said]:
    """Yield that each vector is shortened to one norm, if the longer ones are."""
    is_plain = vectors.level is Level.UPDATE
    may_be_meant = is_plain and vectors.is_of_base and penalty.is_right
    if vectors.level not in (Level.UPDATE, Level.MICROBATCH) or may_be_meant:
        return
    for cut, bound in _cuts(solved, series, is_plain):
        changes, cost, made, _ = _combined(vectors, solved, cut, penalty, _RIGHT)
        if is_plain and not changes:  # the clip alone, which may be meant
            continue
        if is_plain:
            changes[-1] = replace(changes[-1], bound=bound)
        else:
            changes.append(Change(Fault.CLIP_PER_MICROBATCH, Detail.CLIPPED_BY_NORM, (bound,)))
        yield Said(changes, cost + _CLIPPED, made, [])
        return


def _cuts(
    solved: list[_Solved], series: _Series, is_plain: bool
) -> Iterator[tuple[Reading, float]]:
    """Yield (factors that shorten the longer vectors to one norm, the norm)."""
    blocks = [(each.basis, each.blocks[_ROWS]) for each in solved]
    whole = series.counts[Known.WEIGHT_OF_UPDATE]
    share = 1 if is_plain else series.counts[Known.WEIGHT_OF_MICROBATCH] / whole
    lengths = [np.linalg.norm(vector) for _, block in blocks for vector in block.vectors]
    parts = np.array(lengths) * series.meant
    nums = [(len(block.vectors), basis.unit) for basis, block in blocks]
    even = np.concatenate([np.full(num, unit / num) for num, unit in nums]) / share
    ways = (
        (series.meant, share),  # a mean, in a sum by rows
        (even, share),  # or a mean of the pieces' means
        (series.meant, 1),  # a part of the update's gradient
        (series.meant, 1 / whole),  # a sum, divided at last
    )
    for base, by in ways:
        ratios, norms = series.numbers / base, parts / by
        is_cut = ratios < 1 - SOLVED
        if is_cut.sum() < 2 or np.any(ratios > 1 + SOLVED) or np.any(ratios <= 0):
            continue
        clipped = ratios * norms
        bound = float(np.median(clipped[is_cut]))
        if np.ptp(clipped[is_cut]) <= SAME * bound and np.all(clipped <= bound * (1 + SAME)):
            yield Reading(0, MEANT, np.minimum(1.0, bound / norms) * base), bound
