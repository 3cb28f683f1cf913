"""Search for the errors that turn the meant gradient into the observed one."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import numpy as np

from stepcheck.errors import attempt
from stepcheck.faults import Fault
from stepcheck.solve.coefficients import (
    MOST_SOLVED,
    RAW,
    Explanation,
    explained,
    proved,
)
from stepcheck.solve.evidence import Evidence
from stepcheck.solve.forms import BASE, Form, forms, of_rows, smoothed
from stepcheck.solve.labels import labels_of
from stepcheck.solve.outputs import AtOutput, narrowed
from stepcheck.solve.ratios import least
from stepcheck.trace.measure import SOLVED
from stepcheck.values import Change, Detail, Level

# numbers of a gradient up to which many backward passes are quick
NUM_SMALL = 8_000
_MOST_ROWS = 64  # that take a backward pass each
_MOST_LOOKS = 200  # at forms of the loss
_SURE = 1.5  # the cost of one form, beside which no other is looked for
_Found = Iterator[Explanation | None]


def explain(evidence: list[Evidence]) -> Explanation | None:
    """Return the likeliest errors in the loss that make all these gradients; None for
    none known.
    """
    found: list[Explanation] = []
    num_looks = 0
    has_weights = evidence[0].meant.replay.data[2] is not None
    # ignored weights are a form
    early, late = ((), (_rows,)) if has_weights else ((_rows,), ())
    for stage in (_terms, *early, _forms, *late, _labels, _forms_by_piece):
        for each in stage(evidence):
            num_looks += 1
            found += [each] if each is not None else []
            is_sure = each is not None and each.cost <= _SURE
            if is_sure or num_looks >= _MOST_LOOKS:
                break
        best = min(found, key=lambda each: each.cost, default=None)
        if num_looks >= _MOST_LOOKS or (best is not None and best.cost < RAW):
            return best
    return min(found, key=lambda each: each.cost, default=None)


def by_counts(evidence: list[Evidence]) -> Explanation | None:
    """Return how much whole updates and microbatches count, perhaps beside the gradient
    before.
    """
    levels = [Level.UPDATE]
    if any(len(e.update.pieces) > 1 for e in evidence):
        levels.append(Level.MICROBATCH)
    found: list[Explanation] = []
    for has_before, level in product((False, True), levels):
        each = explained(BASE, evidence, level, has_before=has_before)
        found += [each] if each is not None else []
        if each is not None and each.cost < RAW:
            return each
    is_sure = all(
        sum(e.update.sizes) >= 2 * len(e.update.pieces) for e in evidence
    )
    return found[0] if found and is_sure else None


def _terms(evidence: list[Evidence]) -> _Found:
    """Yield that the losses of outputs count otherwise, the same in all updates."""
    terms = evidence[0].terms[0]
    used: list[int] = np.flatnonzero(terms.coefficients).tolist()
    if len(used) < 2:
        return
    meant, names = terms.coefficients[used], tuple(terms.names[i] for i in used)

    def change(numbers: np.ndarray) -> Change | None:
        counted = numbers * meant
        fault = Fault.OTHER_LOSS_WEIGHTS
        if np.any(np.abs(counted) <= SOLVED * np.abs(counted).max()):
            fault = Fault.OUTPUT_LEFT_OUT
        return Change(
            fault,
            Detail.TERMS_COUNT,
            (*counted.tolist(), *meant.tolist()),
            names,
        )

    columns = [[e.of_term(i) for i in used] for e in evidence]
    yield _mixed(evidence, columns, change)


def _mixed(
    evidence: list[Evidence],
    columns: list[list[np.ndarray]],
    change: Callable[[np.ndarray], Change | None],
) -> Explanation | None:
    """Return what numbers say that are the same in all updates: of one half, to hold in
    both.
    """
    half = [*zip(evidence, columns, strict=True)][: (len(evidence) + 1) // 2]
    numbers = np.median(
        [least(own, e.handed - e.penalty)[0] for e, own in half], axis=0
    )
    found = change(numbers) if np.all(np.isfinite(numbers)) else None
    if found is None:
        return None
    pairs = zip(evidence, columns, strict=True)
    return proved(
        [found],
        1.0,
        evidence,
        [numbers @ np.stack(own) + e.penalty for e, own in pairs],
    )


def _possible(evidence: list[Evidence]) -> Iterator[Form]:
    is_small = len(evidence[0].handed) <= NUM_SMALL or isinstance(
        evidence[0], AtOutput
    )
    for form in forms(evidence[0].meant, evidence[0]):
        if is_small or not form.is_of_pairs:
            yield form


def _tried(
    form: Form, evidence: list[Evidence], level: Level
) -> Explanation | None:
    """Try a form; an error is of labels or outputs that are none for a loss."""
    return attempt(lambda: explained(form, evidence, level))[0]


def _forms(evidence: list[Evidence]) -> _Found:
    """Yield the losses with one error."""
    for form in _possible(evidence):
        yield _tried(form, evidence, Level.UPDATE)
    if (found := smoothed(evidence[0].meant, evidence[0])) is not None:
        plain, even, own = found
        columns = [
            [np.sum(form.parts(e), axis=0) for form in (plain, even)]
            for e in evidence
        ]
        yield _mixed(evidence, columns, partial(_smoothing, own=own))


def _smoothing(numbers: np.ndarray, own: float) -> Change | None:
    """Return the error of labels that are `numbers` of the stated ones and of even
    ones.
    """
    by = float(numbers[1])
    if abs(by - own) < SOLVED:
        return None
    return Change(Fault.OTHER_LABELS, Detail.SMOOTHED, (by, own))


def _rows(evidence: list[Evidence]) -> _Found:
    """Yield how much each row counts, by a count or with few different numbers."""
    most = MOST_SOLVED if isinstance(evidence[0], AtOutput) else _MOST_ROWS
    if any(sum(e.update.sizes) > most for e in evidence):
        return
    found = explained(BASE, evidence, Level.ROW)
    numbers = (
        found.changes[0].count.numbers
        if found and found.changes[0].count
        else ()
    )
    if len(numbers) <= 2:
        yield found


def _labels(evidence: list[Evidence]) -> _Found:
    """Yield that each row has the label of some other row."""
    rows: dict[int, np.ndarray] = {}
    for e in evidence:
        at = [e] if isinstance(e, AtOutput) else narrowed([e])
        found = labels_of(at[0]) if at else None
        if found is None:
            return
        rows |= zip(
            (piece.called.order for piece in e.update.pieces),
            found,
            strict=True,
        )
    change = Change(Fault.LABELS_OF_OTHER_ROWS)
    yield _tried(
        of_rows(lambda e, piece: rows[piece.called.order], change),
        evidence,
        Level.UPDATE,
    )


def _forms_by_piece(evidence: list[Evidence]) -> _Found:
    """Yield the losses with one error, whose microbatches count otherwise besides."""
    if any(len(e.update.pieces) > 1 for e in evidence):
        for form in _possible(evidence):
            yield _tried(form, evidence, Level.MICROBATCH)
