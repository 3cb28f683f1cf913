"""The pictures of a report; only drawing them needs matplotlib."""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from stepcheck.judge import Case, Verdict
from stepcheck.report.page import LEGEND, Picture, bare, drawn
from stepcheck.solve.evidence import Evidence
from stepcheck.solve.places import factors_of_rows
from stepcheck.stages.proofs import by_parameter
from stepcheck.trace.measure import FINE, SOLVED
from stepcheck.trace.windows import PAD, Piece, Update, passes

_MEANT, _RIGHT, _WRONG, _CHANGED = (
    "#222222",
    "#7f9fbf",
    "#c8553d",
    "#1a7f3c",
)  # colours; _RIGHT, _WRONG: the loop's
_NUM_PARAMETERS = 24
_Distances = list[tuple[str, float, float]]  # as `by_parameter` yields them


def pictures(case: Case, verdict: Verdict) -> Iterator[Picture]:
    """Yield the pictures that have something to show."""
    if verdict.evidence:
        e, parameters = _differing(verdict)
        if (factors := factors_of_rows(e)) is not None:
            yield drawn(partial(_factors, e, *factors), 3.2)
        if parameters:
            yield drawn(
                partial(_parameters, e, parameters),
                1.6 + 0.28 * min(len(parameters), _NUM_PARAMETERS),
            )
    if verdict.seen is not None:
        known = [piece for piece in verdict.seen.pieces if piece.is_known]
        if known:
            yield drawn(partial(_orders, passes(known)[:2]), 3.6)
        updates, schedule = verdict.seen.updates, case.schedule
        if updates and np.isfinite(updates[0].applied.learning_rate):
            first = updates[0].applied.iterations
            meant = (
                None
                if schedule is None
                else np.array([schedule(first + i) for i in range(len(updates))])
            )
            yield drawn(partial(_rates, updates, meant), 2.8)


def _differing(verdict: Verdict) -> tuple[Evidence, _Distances]:
    """Return an update that differs, if one does, the one of the first proof if there
    is one, and its distances.
    """
    differs = verdict.evidence[0].meant.replay.tolerance.differs
    differing = [e for e in verdict.evidence if e.without > differs] or verdict.evidence
    proofs = [
        finding.proof for finding in verdict.findings if finding.proof is not None
    ]
    proof = next((each for each in proofs if each.parameters), None)
    for e in differing:
        if proof is not None and proof.update == e.update.number:
            return e, list(proof.parameters)
    return differing[0], list(by_parameter(differing[0], None))


def _coloured(near: np.ndarray) -> list[str]:
    return [_RIGHT if is_near else _WRONG for is_near in near]


def _name_colours(axes: Any, near: np.ndarray, name: str) -> None:
    """Add the used ones of the two colours to the legend."""
    for colour, is_there, end in (
        (_RIGHT, np.any(near), "the same"),
        (_WRONG, not np.all(near), "differs"),
    ):
        if is_there:
            axes.plot([], [], "s", color=colour, ms=8, label=f"{name}: {end}")


def _factors(
    e: Evidence, solved: np.ndarray, should: np.ndarray, figure: Any
) -> tuple[str, str]:
    axes = figure.subplots()
    x = np.arange(1, len(solved) + 1)
    slack = SOLVED * float(np.max(np.abs(should)))
    near = np.isclose(solved, should, rtol=FINE.differs, atol=slack)
    axes.bar(x, solved, color=_coloured(near), width=0.7)
    _name_colours(axes, near, "in your loop")
    lost = x[np.isclose(solved, 0, atol=slack) & ~near]
    axes.plot(lost, np.zeros(len(lost)), "x", color=_WRONG, ms=8, mew=2, clip_on=False)
    axes.stairs(
        should,
        np.arange(len(x) + 1) + 0.5,
        baseline=None,
        color=_MEANT,
        lw=1.5,
        label="as it should be",
    )
    top = max(float(np.max([solved, should])), 1e-12)
    axes.set_ylim(min(float(np.min(solved)), 0.0) * 1.1, top * 1.35)
    ends = np.cumsum([0, *(np.count_nonzero(weights) for weights in e.weights)])
    for i, (start, end) in enumerate(pairwise(ends) if len(ends) > 2 else (), start=1):
        axes.text(
            (start + end) / 2 + 0.5,
            top * 1.06,
            f"microbatch {i}",
            ha="center",
            fontsize=8,
            color="#666666",
        )
        if i > 1:
            axes.axvline(start + 0.5, color="#999999", lw=0.8, ls=":")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(loc="upper right", ncols=3, **LEGEND)
    axes.set_xlim(0.4, len(x) + 0.6)
    bare(
        axes,
        f"row of update {e.update.number}, in the order in which it was used",
        "factor of the row's\ngradient",
    )
    end = (
        "All bars reach the black line."
        if np.all(near)
        else "Red bars are off the black line."
    )
    return "How much each row counts", end


def _parameters(e: Evidence, parameters: _Distances, figure: Any) -> tuple[str, str]:
    axes, (fits, differs) = figure.subplots(), e.meant.replay.tolerance
    worst = sorted(parameters, key=lambda each: -each[1])[:_NUM_PARAMETERS]
    shown = [each for each in parameters if each in worst][::-1]
    y = np.arange(len(shown))
    floor = 1e-8
    without, changed = (np.array([each[i] for each in shown], float) for i in (1, 2))
    axes.barh(
        y, np.maximum(without, floor), color=_coloured(without <= differs), height=0.6
    )
    _name_colours(axes, without <= differs, "your loop from what was meant")
    if np.any(np.isfinite(changed)):
        name = "from the reference with this fault"
        axes.plot(
            np.maximum(changed, floor), y, "D", color=_CHANGED, ms=6, ls="", label=name
        )
    axes.axvspan(floor / 2, fits, color="#3d9e5f", alpha=0.10, lw=0, zorder=0)
    axes.axvline(differs, color=_MEANT, lw=1, ls="--")
    axes.text(differs * 1.2, len(shown) - 0.38, "differs", fontsize=8, va="bottom")
    axes.text(
        fits / 1.2,
        len(shown) - 0.38,
        "the same, but for rounding",
        fontsize=8,
        va="bottom",
        ha="right",
    )
    axes.set_xscale("log")
    axes.set_xlim(floor / 2, 4)
    axes.set_ylim(-0.6, len(shown) + 0.1)
    names = [name if len(name) <= 40 else f"...{name[-37:]}" for name, *_ in shown]
    axes.set_yticks(y, labels=names, parse_math=False, fontsize=9)
    bare(
        axes,
        f"distance of the gradient of update {e.update.number}, relative to its length",
    )
    figure.legend(loc="outside lower center", ncols=2, **LEGEND)
    num = len(parameters)
    left = "" if len(shown) == num else f" The {len(shown)} of {num} that differ most."
    return "Where the gradient differs", f"Bars right of the dashed line differ.{left}"


def _orders(cut: list[list[Piece]], figure: Any) -> tuple[str, str]:
    each_axes = figure.subplots(1, 2, sharex=True, sharey=True)
    for i, axes in enumerate(each_axes):
        if i < len(cut):
            rows = np.concatenate([piece.rows[piece.rows != PAD] for piece in cut[i]])
            size = float(np.clip(4000 / max(len(rows), 1), 1, 25))
            axes.scatter(
                np.arange(1, len(rows) + 1), rows + 1, s=size, color="#35608f", lw=0
            )
            axes.set_title(f"pass {i + 1}: {len(rows)} rows", fontsize=10)
        else:
            axes.text(
                0.5,
                0.5,
                "no second pass was seen",
                transform=axes.transAxes,
                ha="center",
                color="#666666",
            )
        bare(axes, "place in the pass", "row of the data, from 1" if i == 0 else "")
    each_axes[0].yaxis.get_major_locator().set_params(integer=True)
    each_axes[0].set_ylim(bottom=0)
    each_axes[0].set_xlim(left=0)
    caption = (
        "A cloud is a full shuffle, a band along the diagonal is a shuffle within a "
        "window, one line is no shuffle; "
        "two equal clouds are one order for both passes."
    )
    return "In which order the rows come", caption


def _rates(
    updates: list[Update], meant: np.ndarray | None, figure: Any
) -> tuple[str, str]:
    axes = figure.subplots()
    numbers, used = (
        [u.number for u in updates],
        np.array([u.applied.learning_rate for u in updates]),
    )
    caption, near = "No schedule was given to compare with.", np.ones(len(used), bool)
    if meant is not None:
        caption, near = (
            "The points should lie on the line.",
            np.isclose(used, meant, rtol=FINE.differs),
        )
        axes.plot(
            numbers, meant, color=_MEANT, lw=1.5, label="as it was meant", zorder=1
        )
        _name_colours(axes, near, "in your loop")
        axes.legend(loc="upper right", ncols=3, **LEGEND)
    axes.scatter(numbers, used, color=_coloured(near), s=22, zorder=2)
    axes.set_ylim(
        0, float(max(np.max(used), *(() if meant is None else meant), 0)) * 1.3 or 1
    )
    axes.xaxis.get_major_locator().set_params(integer=True)
    bare(axes, "update", "learning rate")
    return "The learning rate", caption
