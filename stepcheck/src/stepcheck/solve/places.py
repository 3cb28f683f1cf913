"""Where derivatives by an output differ: in how much places count, or in their form."""

import numpy as np

from stepcheck.faults import Fault
from stepcheck.solve.coefficients import farthest_first
from stepcheck.solve.evidence import Evidence
from stepcheck.solve.outputs import AtOutput
from stepcheck.solve.ratios import least
from stepcheck.values import MEANT, Change, Count, Level, Number, Shown

_NOTHING = 1e-4  # of the largest derivative
_NUM_SHOWN = 3
_NUM_FREE = 64  # rows whose factors are solved for


def at_places(
    e: AtOutput,
) -> tuple[Change, tuple[int, ...], tuple[Number, ...]]:
    """Return (a change, the rows where it shows most, the derivatives there: observed,
    meant).

    A place is an output of a row, or of each of its tokens. If the derivatives of all
    places are parallel to the meant ones, as they are not by chance, places count
    otherwise.
    """
    pieces = e.update.pieces
    handed, meant = (e.by_piece(each) for each in (e.handed, e.reference))
    lost = [
        i
        for i, (own, should) in enumerate(zip(handed, meant, strict=True), 1)
        if np.abs(own).max() <= _NOTHING * np.abs(should).max()
    ]
    if 0 < len(lost) < len(pieces):
        counts = (*map(float, lost), float(len(pieces)))
        return Change(Fault.PASSES_LEFT_OUT, numbers=counts), (), ()
    rows = [
        np.repeat(p.rows, own.size // max(1, len(own)))
        for p, own in zip(pieces, handed, strict=True)
    ]
    observed, expected = e.handed, e.reference
    far = np.argsort(-np.abs(observed - expected), kind="stable")[:_NUM_SHOWN]
    of = np.concatenate(rows)[far].tolist()
    shown = zip(of, observed[far].tolist(), expected[far].tolist(), strict=True)
    numbers = tuple(
        Number(Shown.DERIVATIVE, str(row), a, b, float("nan"))
        for row, a, b in shown
    )
    return _change(handed, meant, e), tuple(dict.fromkeys(of)), numbers


def _change(
    handed: list[np.ndarray], meant: list[np.ndarray], e: AtOutput
) -> Change:
    width = meant[0].shape[-1] if meant[0].ndim > 1 else 1
    own, should = (
        np.concatenate([each.reshape(-1, width) for each in both])
        for both in (handed, meant)
    )
    sizes = np.sum(should**2, axis=1)
    is_used = sizes > _NOTHING * sizes.max()
    if not np.any(is_used):
        return Change(Fault.LOSS_UNLIKE)
    own_used, used = own[is_used], should[is_used]
    ratios = np.sum(own_used * used, axis=1) / sizes[is_used]
    rest = np.linalg.norm(own_used - ratios[:, None] * used, axis=1)
    fits = e.meant.replay.tolerance.fits
    is_parallel = np.all(rest <= fits * np.linalg.norm(own, axis=1).max())
    if (
        not is_parallel
        or np.linalg.matrix_rank(used, tol=fits * np.abs(used).max()) < 2
    ):
        return Change(Fault.LOSS_UNLIKE)
    numbers = tuple(farthest_first(ratios)[:5].tolist())
    has_weights = e.meant.replay.data[2] is not None
    fault = Fault.OTHER_WEIGHTS if has_weights else Fault.ROWS_COUNTED_OTHERWISE
    return Change(
        fault, count=Count(above=MEANT.above, numbers=numbers, level=Level.ROW)
    )


def factors_of_rows(e: Evidence) -> tuple[np.ndarray, np.ndarray] | None:
    """Return (the factors of the rows that make the handed gradient, the right ones),
    or None.
    """
    used = np.flatnonzero(
        np.concatenate([weights.reshape(-1) for weights in e.weights])
    )
    if not 0 < len(used) <= min(_NUM_FREE, len(e.handed) // 2):
        return None
    rows = np.concatenate(e.rows)[used]
    solved = least([*rows.astype("float64")], e.handed - e.penalty)[0]
    if (
        e.apart(solved.astype("float32") @ rows + e.penalty)
        > e.meant.replay.tolerance.fits
    ):
        return None
    return solved, np.concatenate(
        [factors.reshape(-1) for factors in e.factors]
    )[used]
