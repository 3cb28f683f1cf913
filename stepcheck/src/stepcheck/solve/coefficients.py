"""Coefficients of known vectors that make a gradient: solved for in each update, read
over all.

handed = sum_s a_s g_s + b p + q before, with s a whole update, its pieces or its rows.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from stepcheck.faults import Fault, Quantity
from stepcheck.solve.counts import (
    counts_of,
    name_of_penalty,
    name_of_rows,
    unit,
)
from stepcheck.solve.evidence import Evidence
from stepcheck.solve.forms import BASE, Form
from stepcheck.solve.ratios import Reading, least, read
from stepcheck.trace.measure import SOLVED, is_even
from stepcheck.values import MEANT, Change, Count, Detail, Known, Level

RAW = 4.0  # the cost of numbers that are no fraction
SCALED = 2.0  # of the number that was meant, times any number
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
    """Changes that make the gradients: their cost, how far they are apart, the made
    gradients.
    """

    changes: tuple[Change, ...]
    cost: float
    apart: float
    made: list[np.ndarray]


class _Column(NamedTuple):
    """A vector of an update with its coefficient, which may be off by `slack`; 1 is
    meant.
    """

    e: Evidence
    quantity: Quantity
    vector: np.ndarray
    counts: dict[Known, float]
    number: float
    slack: float


def explained(
    form: Form,
    evidence: list[Evidence],
    level: Level,
    *,
    has_before: bool = False,
) -> Explanation | None:
    """Return how a loss's parts count in all these updates; None if they do not make
    the gradients.

    Args:
        has_before: whether the gradient that was handed over before may be a part.
    """
    columns: list[_Column] = []
    is_other = form == BASE
    for e in evidence:
        parts = form.parts(e)
        is_other = is_other or differ(
            e, np.sum(parts, axis=0), np.sum(e.parts, axis=0)
        )
        solved = _solved(e, _vectors(e, parts, level), has_before=has_before)
        if solved is None:
            return None
        columns += solved
    return _said(form, evidence, columns, level) if is_other else None


def differ(e: Evidence, one: np.ndarray, two: np.ndarray) -> bool:
    """Whether two gradients differ."""
    return bool(
        np.linalg.norm(one - two)
        > e.meant.replay.tolerance.fits * np.linalg.norm(two)
    )


def _vectors(
    e: Evidence, parts: list[np.ndarray], level: Level
) -> list[tuple[int, np.ndarray]]:
    """Return (a row, its vector) of each vector that gets a coefficient."""
    if level is Level.ROW:
        rows = []
        for factors, own in zip(e.factors, e.rows, strict=True):
            rows += [
                *np.einsum(
                    "tr,trp->rp", factors, own.reshape(*factors.shape, -1)
                )
            ]
        return [(i, row) for i, row in enumerate(rows) if np.any(row)]
    if level is Level.UPDATE:
        return [(0, np.sum(parts, axis=0))]
    starts = np.cumsum([0, *e.update.sizes]).tolist()
    return [
        (start, part)
        for start, part in zip(starts, parts, strict=False)
        if np.any(part)
    ]


def _solved(
    e: Evidence, rows: list[tuple[int, np.ndarray]], *, has_before: bool
) -> list[_Column] | None:
    kinds = [(Quantity.ROW_GRADIENTS, at, vector) for at, vector in rows]
    if np.any(e.penalty):
        kinds.append((Quantity.PENALTY, 0, e.penalty))
    if (
        has_before
        and e.before is not None
        and len(e.before.handed) == len(e.handed)
    ):
        kinds.append((Quantity.HANDED_GRADIENT, 0, e.before.handed))
    vectors = [vector for *_, vector in kinds]
    if (
        not rows
        or len(vectors) > MOST_SOLVED
        or len(vectors) + _SPARE > len(e.handed)
    ):
        return None
    numbers, loose = least(vectors, e.handed)
    fits, counts = e.meant.replay.tolerance.fits, counts_of(e)
    if (
        not np.all(np.isfinite(numbers))
        or e.apart(numbers @ np.stack(vectors)) > fits
    ):
        return None
    slack = fits * max(float(np.linalg.norm(e.handed)), e.scale) * loose
    found = []
    for (quantity, at, vector), number, off in zip(
        kinds, numbers, slack, strict=True
    ):
        own = {known: float(column[at]) for known, column in counts.items()}
        found.append(
            _Column(e, quantity, vector, own, float(number), float(off))
        )
    return found


def _said(
    form: Form, evidence: list[Evidence], columns: list[_Column], level: Level
) -> Explanation | None:
    """Return the changes that coefficients of rows, penalty and the gradient before
    stand for.
    """
    of = {
        quantity: [c for c in columns if c.quantity is quantity]
        for quantity in Quantity
    }
    rows, penalties = of[Quantity.ROW_GRADIENTS], of[Quantity.PENALTY]
    added = [c for c in of[Quantity.HANDED_GRADIENT] if abs(c.number) > c.slack]
    by_rows, by_penalty = _of_rows(rows, level), _read(penalties, 1.0)
    before = _read(added, 0.0) if len(added) > 1 else None
    changes = [*form.changes]
    cost = sum(1 + _UNNAMED * (not change.fault.has_name) for change in changes)
    # of an average, its rows' number is a part
    is_sum = before is None or before.count == Count()
    if not by_rows.is_right and is_sum:
        changes.append(_change_of_rows(by_rows, rows))
        cost += by_rows.cost
    numbers = dict(
        zip(
            map(id, rows + penalties),
            [*by_rows.values, *by_penalty.values],
            strict=True,
        )
    )
    if not by_penalty.is_right and not _is_in_rows(
        numbers, rows, penalties, level
    ):
        changes.append(
            Change(name_of_penalty(by_penalty.count), count=by_penalty.count)
        )
        cost += by_penalty.cost
    if before is not None:
        is_steady = is_even(np.array(before.count.numbers))
        fault = Fault.MOMENTUM_BY_HAND if is_steady else Fault.NOT_RESET
        fault = Fault.NOT_RESET if is_sum else fault
        changes.append(Change(fault, Detail.ADDED_BEFORE, count=before.count))
        cost += before.cost
    made = []
    for e in evidence:
        own = [
            numbers.get(id(c), c.number) * c.vector for c in columns if c.e is e
        ]
        made.append(sum(own, np.zeros_like(e.handed)))
    return proved(changes, cost, evidence, made)


def proved(
    changes: list[Change],
    cost: float,
    evidence: list[Evidence],
    made: list[np.ndarray],
) -> Explanation | None:
    """Return changes as an explanation, if they make the gradients."""
    proven = [e.proven(own) for e, own in zip(evidence, made, strict=True)]
    apart = max(each for _, each in proven)
    is_so = bool(changes) and apart <= evidence[0].meant.replay.tolerance.fits
    return (
        Explanation(tuple(changes), cost, apart, [own for own, _ in proven])
        if is_so
        else None
    )


def _read(columns: list[_Column], right: float) -> Reading:
    """Return coefficients as a fraction of counts, or as such."""
    numbers = np.array([c.number for c in columns])
    if not columns:
        return Reading(0, MEANT, numbers)
    is_of_rows = columns[0].quantity is Quantity.ROW_GRADIENTS
    units = np.array([unit(c.e) if is_of_rows else 1.0 for c in columns])
    slack = np.array([c.slack for c in columns]) * units
    shared = [
        k for k in columns[0].counts if all(k in c.counts for c in columns)
    ]
    counts = {
        known: np.array([c.counts[known] for c in columns]) for known in shared
    }
    found = read(numbers * units, slack, counts, right * units)
    if found is not None:
        return replace(found, values=found.values / units)
    return Reading(
        RAW, Count(numbers=tuple(numbers[:_NUM_SHOWN].tolist())), numbers
    )


def _of_rows(rows: list[_Column], level: Level) -> Reading:
    """Return how much vectors of rows count; those that count nothing are read apart."""
    numbers = np.array([c.number for c in rows])
    used = np.abs(numbers) > SOLVED * np.abs(numbers).max()
    if level is Level.MICROBATCH and not np.all(used):
        found = _read(
            [c for c, is_used in zip(rows, used, strict=True) if is_used], 1.0
        )
        values = np.zeros(len(rows))
        values[used] = found.values
        return Reading(1 + found.cost, Count(level=level), values)
    found = _read(rows, 1.0)
    if not found.count.numbers:
        return found
    first = farthest_first(numbers)[:_NUM_SHOWN]
    count = Count(above=MEANT.above, numbers=tuple(first.tolist()), level=level)
    return replace(found, count=count)


def farthest_first(ratios: np.ndarray) -> np.ndarray:
    """Return each number once, the farthest from 1 first.

    >>> farthest_first(np.array([1.0, 1.0001, 0.5, 3.0, 0.5])).tolist()
    [3.0, 0.5, 1.0]
    """
    near = np.where(
        np.abs(ratios - np.round(ratios)) <= SOLVED, np.round(ratios), ratios
    )
    single = np.unique([float(f"{ratio:.3g}") for ratio in near])
    return single[np.argsort(-np.abs(single - 1), kind="stable")]


def _change_of_rows(reading: Reading, rows: list[_Column]) -> Change:
    count = reading.count
    if count.level is Level.MICROBATCH and not np.all(reading.values):
        e = rows[int(np.argmin(np.abs(reading.values)))].e
        own = [
            value
            for c, value in zip(rows, reading.values, strict=True)
            if c.e is e
        ]
        lost = [float(i) for i, value in enumerate(own, 1) if not value]
        return Change(
            Fault.PASSES_LEFT_OUT, numbers=(*lost, float(len(e.update.pieces)))
        )
    if Known.MEANT not in count.above:
        is_divided = bool(rows[0].e.terms[0].divided[0])
        count = replace(
            count, instead=Count(below=(Known.WEIGHT_OF_UPDATE,) * is_divided)
        )
    return Change(name_of_rows(count, rows[0].e.meant), count=count)


def _is_in_rows(
    numbers: dict[int, float],
    rows: list[_Column],
    penalties: list[_Column],
    level: Level,
) -> bool:
    """Whether the penalty has the factor of the rows: then both are parts of one loss."""
    for penalty in penalties:
        own = [c for c in rows if c.e is penalty.e]
        weights = [c.counts[_WEIGHTS[level]] for c in own]
        factor = np.average([numbers[id(c)] for c in own], weights=weights)
        if abs(factor - numbers[id(penalty)]) > _OF_PENALTY * abs(
            numbers[id(penalty)]
        ):
            return False
    return True
