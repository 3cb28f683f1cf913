"""Coefficients of known vectors that make a gradient: solved for in each update, read over all.

handed = sum_s a_s g_s + b p + q before, with s a whole update, its pieces or its rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from stepcheck.faults import Fault, Quantity
from stepcheck.solve.counts import counts_of, name_of_penalty, name_of_rows, unit
from stepcheck.solve.evidence import Evidence
from stepcheck.solve.forms import BASE, Form
from stepcheck.solve.ratios import Reading, least, read
from stepcheck.trace.measure import SOLVED
from stepcheck.values import MEANT, Change, Count, Detail, Known, Level

RAW = 4.0  # the cost of numbers that are no fraction
MOST_SOLVED = 256  # numbers of one update
_SPARE = 4  # numbers of a gradient beyond the unknowns
_UNNAMED = 0.5  # the cost of a form without a name in the field, beyond that of one with a name
_OF_PENALTY = 1e-2
_NUM_SHOWN = 5
_WEIGHTS = {
    Level.UPDATE: Known.WEIGHT_OF_UPDATE,
    Level.MICROBATCH: Known.WEIGHT_OF_MICROBATCH,
    Level.ROW: Known.WEIGHT_OF_ROW,
}


@dataclass(frozen=True)
class Explanation:
    """Changes that make the gradients: their cost, how far they are apart, the made gradients."""

    changes: tuple[Change, ...]
    cost: float
    apart: float
    made: list[np.ndarray]


class _Solved(NamedTuple):
    """The solution of one update: its columns, and the number of each, with by how much it is off.

    `at`: a row of each of the first columns, which are the rows'; `more`: the kind of the others.
    """

    e: Evidence
    columns: np.ndarray
    at: np.ndarray
    more: tuple[Quantity, ...]
    numbers: np.ndarray
    slack: np.ndarray

    def of(self, quantity: Quantity) -> slice:
        """Return the places of a quantity's columns."""
        num = len(self.at)
        if quantity is Quantity.ROW_GRADIENTS:
            return slice(num)
        if quantity not in self.more:
            return slice(0, 0)
        start = num + self.more.index(quantity)
        return slice(start, start + 1)


def explained(
    form: Form, evidence: list[Evidence], level: Level, *, has_before: bool = False
) -> Explanation | None:
    """Return how a loss's parts count in all these updates; None if they do not make the gradients.

    Args:
        has_before: whether the gradient that was handed over before may be a part.
    """
    solved: list[_Solved] = []
    is_other = form == BASE
    for e in evidence:
        parts = form.parts(e)
        is_other = is_other or differ(e, sum(parts), sum(e.parts))
        one = _solved(e, *_columns(e, parts, level), has_before=has_before)
        if one is None:
            return None
        solved.append(one)
    return _said(form, solved, level) if is_other else None


def differ(e: Evidence, one: np.ndarray, two: np.ndarray) -> bool:
    """Whether two gradients differ."""
    return bool(np.linalg.norm(one - two) > e.meant.replay.tolerance.fits * np.linalg.norm(two))


def _columns(
    e: Evidence, parts: list[np.ndarray], level: Level
) -> tuple[list[np.ndarray], np.ndarray]:
    """Return (vectors that get a coefficient each, a row of each)."""
    sizes = e.update.sizes
    starts = np.cumsum([0, *sizes])[:-1]
    if level is Level.UPDATE:
        return [sum(parts)], starts[:1]
    if level is Level.MICROBATCH:
        used = [i for i, part in enumerate(parts) if np.any(part)]
        return [parts[i] for i in used], starts[used]
    columns = []
    for factors, rows in zip(e.factors, e.rows, strict=True):
        columns += [*np.einsum("tr,trp->rp", factors, rows.reshape(*factors.shape, -1))]
    used = [i for i, column in enumerate(columns) if np.any(column)]
    return [columns[i] for i in used], np.array(used, int)


def _solved(
    e: Evidence, columns: list[np.ndarray], at: np.ndarray, *, has_before: bool
) -> _Solved | None:
    more = {Quantity.PENALTY: e.penalty} if np.any(e.penalty) else {}
    if has_before and e.before is not None and len(e.before.handed) == len(e.handed):
        more[Quantity.HANDED_GRADIENT] = e.before.handed
    every = [*columns, *more.values()]
    num = len(every)
    if not columns or num > MOST_SOLVED or num + _SPARE > len(e.handed):
        return None
    numbers, loose = least(every, e.handed)
    fits = e.meant.replay.tolerance.fits
    if not np.all(np.isfinite(numbers)) or e.apart(numbers @ np.stack(every)) > fits:
        return None
    slack = fits * max(float(np.linalg.norm(e.handed)), e.scale) * loose
    return _Solved(e, np.stack(every), at, (*more,), numbers, slack)


def _said(form: Form, solved: list[_Solved], level: Level) -> Explanation | None:
    """Return the meaning of the coefficients: of the rows, of the penalty, of the gradient before."""
    rows = _of_rows(solved, level)
    penalty = _read(solved, Quantity.PENALTY, 1.0)
    before = _of_before(solved)
    changes = [*form.changes]
    cost = sum(1 + _UNNAMED * (not change.fault.has_name) for change in changes)
    is_sum = before is None or before.count == Count()  # of an average, its rows' number is a part
    if not rows.is_right and is_sum:
        changes.append(_change_of_rows(rows, solved, level))
        cost += rows.cost
    if not penalty.is_right and not _is_in_rows(solved, rows, penalty, level):
        fault = name_of_penalty(penalty.count)
        changes.append(Change(fault, count=penalty.count))
        cost += penalty.cost
    if before is not None:
        fault = Fault.NOT_RESET if is_sum else Fault.MOMENTUM_BY_HAND
        changes.append(Change(fault, Detail.ADDED_BEFORE, count=before.count))
        cost += before.cost
    return proved(changes, cost, [each.e for each in solved], _made(solved, rows, penalty))


def proved(
    changes: list[Change], cost: float, evidence: list[Evidence], made: list[np.ndarray]
) -> Explanation | None:
    """Return changes as an explanation, if they make the gradients."""
    proven = [e.proven(own) for e, own in zip(evidence, made, strict=True)]
    apart = max(each for _, each in proven)
    is_so = bool(changes) and apart <= evidence[0].meant.replay.tolerance.fits
    return Explanation(tuple(changes), cost, apart, [own for own, _ in proven]) if is_so else None


def _joined(solved: list[_Solved], of: Callable[[_Solved], np.ndarray]) -> np.ndarray:
    return np.concatenate([of(each) for each in solved])


def _read(
    solved: list[_Solved], quantity: Quantity, meant: float, used: np.ndarray | None = None
) -> Reading:
    """Return the numbers of a quantity as a fraction of counts, or as such; all or the used ones."""
    numbers = _joined(solved, lambda each: each.numbers[each.of(quantity)])
    slack = _joined(solved, lambda each: each.slack[each.of(quantity)])
    some = np.ones(len(numbers), bool) if used is None else used
    if not len(numbers):
        return Reading(0, MEANT, numbers)
    units = np.ones(len(numbers))
    if quantity is Quantity.ROW_GRADIENTS:
        units = _joined(solved, lambda each: np.full(len(each.at), unit(each.e)))
    at = [each.at[: len(each.numbers[each.of(quantity)])] for each in solved]
    tables = [counts_of(each.e) for each in solved]
    counts = {}
    for known in tables[0]:
        if all(known in table for table in tables):
            columns = [table[known][rows] for table, rows in zip(tables, at, strict=True)]
            counts[known] = np.concatenate(columns)[some]
    given = (numbers * units)[some], (slack * units)[some], counts, (meant * units)[some]
    found = read(*given)
    if found is None:
        raw = Count(numbers=tuple(map(float, numbers[:_NUM_SHOWN])))
        return Reading(RAW, raw, numbers)
    values = np.zeros(len(numbers))
    values[some] = found.values / units[some]
    return found._replace(values=values)


def _of_rows(solved: list[_Solved], level: Level) -> Reading:
    quantity = Quantity.ROW_GRADIENTS
    numbers = _joined(solved, lambda each: each.numbers[each.of(quantity)])
    used = np.abs(numbers) > SOLVED * np.abs(numbers).max()
    if level is Level.MICROBATCH and not np.all(used):
        found = _read(solved, quantity, 1.0, used)
        return Reading(1 + found.cost, Count(level=level), found.values)
    found = _read(solved, quantity, 1.0)
    if not found.count.numbers:
        return found
    first = farthest_first(found.values)[:_NUM_SHOWN]
    count = Count(above=MEANT.above, numbers=tuple(first.tolist()), level=level)
    return found._replace(count=count)


def farthest_first(ratios: np.ndarray) -> np.ndarray:
    """Return each number once, the farthest from 1 first.

    >>> farthest_first(np.array([1.0, 1.0001, 0.5, 3.0, 0.5])).tolist()
    [3.0, 0.5, 1.0]
    """
    near = np.where(np.abs(ratios - np.round(ratios)) <= SOLVED, np.round(ratios), ratios)
    single = np.unique([float(f"{ratio:.3g}") for ratio in near])
    return single[np.argsort(-np.abs(single - 1), kind="stable")]


def _of_before(solved: list[_Solved]) -> Reading | None:
    """Return how much the gradient before counts, in the updates that do not begin anew."""
    added = []
    for each in solved:
        place = each.of(Quantity.HANDED_GRADIENT)
        if np.any(np.abs(each.numbers[place]) > each.slack[place]):
            added.append(each)
    return _read(added, Quantity.HANDED_GRADIENT, 0.0) if len(added) > 1 else None


def _change_of_rows(rows: Reading, solved: list[_Solved], level: Level) -> Change:
    e, count = solved[0].e, rows.count
    if level is Level.MICROBATCH and np.any(np.abs(rows.values) <= SOLVED):
        return _left_out(rows, solved)
    if Known.MEANT not in count.above:
        is_divided = bool(e.terms[0].divided[0])
        count = replace(count, instead=Count(below=(Known.WEIGHT_OF_UPDATE,) * is_divided))
    return Change(name_of_rows(count, e.meant), count=count)


def _left_out(rows: Reading, solved: list[_Solved]) -> Change:
    """Return which forward passes of the first such update count nothing."""
    left, found = rows.values, np.zeros(0, int)
    for each in solved:
        own, left = left[: len(each.at)], left[len(each.at) :]
        empty = each.at[np.abs(own) <= SOLVED]
        ends = np.cumsum(each.e.update.sizes)
        found = np.searchsorted(ends, empty, side="right") + 1
        if len(found):
            break
    return Change(Fault.PASSES_LEFT_OUT, numbers=(*map(float, found), float(len(ends))))


def _is_in_rows(solved: list[_Solved], rows: Reading, penalty: Reading, level: Level) -> bool:
    """Whether the penalty has the factor of the rows: then both are parts of one loss."""
    left, own = rows.values, []
    for each in solved:
        num = len(each.at)
        weights = counts_of(each.e)[_WEIGHTS[level]][each.at]
        if Quantity.PENALTY in each.more:
            own.append(np.average(left[:num], weights=weights))
        left = left[num:]
    near = _OF_PENALTY * np.abs(penalty.values)
    return bool(np.all(np.abs(np.array(own) - penalty.values) <= near))


def _made(solved: list[_Solved], rows: Reading, penalty: Reading) -> list[np.ndarray]:
    """Return the gradients that the readings of the rows and of the penalty make."""
    made = []
    of_rows, of_penalty = [*rows.values], [*penalty.values]
    for each in solved:
        numbers = each.numbers.copy()
        num = len(each.at)
        numbers[:num], of_rows = of_rows[:num], of_rows[num:]
        if Quantity.PENALTY in each.more:
            numbers[num] = of_penalty.pop(0)
        made.append(numbers @ each.columns)
    return made
