"""The pictures of a report; only drawing them needs matplotlib."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from stepcheck.judge import Case, Verdict
from stepcheck.report.page import LEGEND, Picture, bare, drawn
from stepcheck.solve.changes import Schedule
from stepcheck.solve.evidence import Evidence
from stepcheck.solve.places import factors_of_rows
from stepcheck.stages.proofs import by_parameter
from stepcheck.trace.measure import FINE, SOLVED
from stepcheck.trace.windows import PAD, Piece, Update, passes

_MEANT, _RIGHT, _WRONG, _CHANGED = "#222222", "#7f9fbf", "#c8553d", "#1a7f3c"
_NUM_PARAMETERS = 24
_NEAREST = 1e-8  # distances below are drawn as this
_Distances = list[tuple[str, float, float]]  # as `by_parameter` yields them
_Told = tuple[str, str]  # title and caption


def pictures(case: Case, verdict: Verdict) -> Iterator[Picture]:
    """Yield the pictures that have something to show."""
    if verdict.evidence:
        e, parameters = _differing(verdict)
        if (factors := factors_of_rows(e)) is not None:
            yield drawn(partial(_factors, e, *factors), 3.2)
        height = 1.6 + 0.28 * min(len(parameters), _NUM_PARAMETERS)
        yield drawn(partial(_parameters, e, parameters), height)
    seen = verdict.seen
    known = [piece for piece in seen.pieces if piece.is_known]
    if known:
        yield drawn(partial(_orders, passes(known)[:2]), 3.6)
    if np.isfinite([u.applied.learning_rate for u in seen.updates]).all():
        yield drawn(partial(_rates, seen.updates, case.schedule), 2.8)


def _differing(verdict: Verdict) -> tuple[Evidence, _Distances]:
    """Return the update of a proof, or else the one that differs most, and its
    distances.
    """
    proofs = [each.proof for each in verdict.findings if each.proof is not None]
    known = {
        proof.update: proof.parameters for proof in proofs if proof.parameters
    }
    for e in verdict.evidence:
        if e.update.number in known:
            return e, [*known[e.update.number]]
    e = max(verdict.evidence, key=lambda each: each.without)
    return e, [*by_parameter(e, None)]


def _coloured(near: np.ndarray) -> list[str]:
    return [_RIGHT if is_near else _WRONG for is_near in near]


def _factors(
    e: Evidence, solved: np.ndarray, should: np.ndarray, figure: Any
) -> _Told:
    axes = figure.subplots()
    num = len(solved)
    slack = SOLVED * float(np.max(np.abs(should)))
    near = np.isclose(solved, should, rtol=FINE.differs, atol=slack)
    axes.bar(
        np.arange(1, num + 1),
        solved,
        color=_coloured(near),
        label="in your loop",
    )
    edges = np.arange(num + 1) + 0.5
    axes.stairs(
        should, edges, baseline=None, color=_MEANT, lw=1.5, label="meant"
    )
    for end in np.cumsum([np.count_nonzero(weights) for weights in e.weights])[
        :-1
    ]:
        # between microbatches
        axes.axvline(end + 0.5, color=_MEANT, lw=0.8, ls=":")
    axes.legend(loc="upper right", ncols=2, **LEGEND)
    axes.margins(y=0.3)
    told = f"row of update {e.update.number}, in the order in which it was used"
    bare(axes, told, "factor of the row's\ngradient")
    axes.xaxis.get_major_locator().set_params(integer=True)
    return "How much each row counts", "Red bars are off the black line."


def _parameters(e: Evidence, parameters: _Distances, figure: Any) -> _Told:
    axes, differs = figure.subplots(), e.meant.replay.tolerance.differs
    shown = sorted(parameters, key=lambda each: each[1])[-_NUM_PARAMETERS:]
    y = np.arange(len(shown))
    without, changed = (np.array([each[i] for each in shown]) for i in (1, 2))
    lengths = np.maximum(without, _NEAREST)
    name = "your loop from what was meant"
    axes.barh(
        y, lengths, color=_coloured(without <= differs), height=0.6, label=name
    )
    if np.any(np.isfinite(changed)):
        name, nearest = "from the meant, with this error", changed + _NEAREST
        axes.plot(nearest, y, "D", color=_CHANGED, ms=6, label=name)
    axes.axvline(differs, color=_MEANT, lw=1, ls="--")
    axes.set_xscale("log")
    axes.set_xlim(_NEAREST / 2, 4)
    axes.set_yticks(
        y, [name[-40:] for name, *_ in shown], parse_math=False, fontsize=9
    )
    number = e.update.number
    bare(
        axes,
        f"distance of the gradient of update {number}, relative to its length",
    )
    figure.legend(loc="outside lower center", ncols=3, **LEGEND)
    caption = (
        f"Bars right of the dashed line differ. Shown: {len(shown)} parameters."
    )
    return "Where the gradient differs", caption


def _orders(cut: list[list[Piece]], figure: Any) -> _Told:
    each_axes = figure.subplots(
        1, len(cut), sharex=True, sharey=True, squeeze=False
    )[0]
    for i, (axes, pieces) in enumerate(
        zip(each_axes, cut, strict=True), start=1
    ):
        rows = np.concatenate(
            [piece.rows[piece.rows != PAD] for piece in pieces]
        )
        axes.scatter(np.arange(1, len(rows) + 1), rows + 1, s=6, color=_RIGHT)
        axes.set_title(f"pass {i}: {len(rows)} rows", fontsize=10)
        bare(
            axes,
            "place in the pass",
            "row of the data, from 1" if i == 1 else "",
        )
    caption = (
        "A cloud is a full shuffle, a band along the diagonal is a shuffle within a "
        "window, one line is no shuffle; "
        "two equal clouds are one order for both passes."
    )
    return "In which order the rows come", caption


def _rates(
    updates: list[Update], schedule: Schedule | None, figure: Any
) -> _Told:
    axes = figure.subplots()
    numbers = [u.number for u in updates]
    used = np.array([u.applied.learning_rate for u in updates])
    caption = "No schedule was given to compare with."
    near = np.ones(len(used), bool)
    if schedule is not None:
        first = updates[0].applied.iterations
        meant = [schedule(first + i) for i in range(len(used))]
        near = np.isclose(used, meant, rtol=FINE.differs)
        axes.plot(numbers, meant, color=_MEANT, lw=1.5, label="meant")
        axes.legend(loc="upper right", **LEGEND)
        caption = "Red points are off the line."
    axes.scatter(numbers, used, color=_coloured(near), s=22)
    axes.set_ylim(0, 1.3 * float(np.max(used)) or 1.0)
    bare(axes, "update", "learning rate")
    return "The learning rate", caption
