"""The pictures of a report, and the numbers that they show; only drawing them needs matplotlib."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from io import BytesIO
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from wholestep.audit.by_row import solve
from wholestep.audit.judge import Case, Verdict
from wholestep.audit.measure import FINE, SOLVED, Tolerance
from wholestep.audit.proof import by_parameter
from wholestep.audit.windows import PAD, passes
from wholestep.errors import SpecificationError, message

_MEANT, _RIGHT, _WRONG, _CHANGED = "#222222", "#7f9fbf", "#c8553d", "#1a7f3c"  # colours; _RIGHT, _WRONG: the loop's
_NUM_PARAMETERS = 24
_LEGEND: dict[str, Any] = {"framealpha": 1.0, "edgecolor": "none", "fontsize": 9}


class Picture(NamedTuple):
    """A picture as PNG, its title, and its description for readers who cannot see it."""

    title: str
    caption: str
    png: bytes


@dataclass(frozen=True)
class Factors:
    """The factor of each row in the gradient of an update, and the right one; `sizes`: rows by microbatch."""

    update: int
    solved: np.ndarray
    should: np.ndarray
    sizes: list[int]


@dataclass(frozen=True)
class Rates:
    """The learning rate of each update; `meant`: None if it is not known."""

    numbers: list[int]
    used: np.ndarray
    meant: np.ndarray | None


@dataclass(frozen=True)
class Views:
    """The numbers of the pictures; None or empty if they were not seen.

    Attributes:
        parameters: (name, distance, distance from it with the fault or NaN) of the gradients of `update`.
        orders: the rows in the order in which the first two passes took them.
        num_rows: of the data.
        tolerance: the distances from which on the gradients differ.
    """

    factors: Factors | None
    update: int
    parameters: list[tuple[str, float, float]]
    orders: list[np.ndarray]
    num_rows: int
    rates: Rates | None
    tolerance: Tolerance = FINE


def views(case: Case, verdict: Verdict) -> Views:
    """Return the numbers of the pictures."""
    tolerance = verdict.evidence[0].meant.replay.tolerance if verdict.evidence else FINE
    differing = [e for e in verdict.evidence if e.without > tolerance.differs] or verdict.evidence
    factors, update, parameters = None, 0, []
    if differing:
        proofs = [c.proof for c in verdict.causes if c.proof and c.proof.parameters]
        shown = [e for e in differing if proofs and proofs[0].where == f"update {e.update.number}"]
        e = (shown or differing)[0]
        update = e.update.number
        parameters = list(proofs[0].parameters) if shown else list(by_parameter(e, None))
        if (found := solve(e)) is not None:
            sizes = [int(np.count_nonzero(w)) for w in e.weights]
            factors = Factors(update, *found, sizes)
    orders, num = [], 0
    if verdict.seen is not None and verdict.seen.pieces:
        known = [piece for piece in verdict.seen.pieces if piece.is_known]
        cut = passes(known)[:2] if known else []
        orders = [np.concatenate([p.rows[p.rows != PAD] for p in each]) for each in cut]
        num = 1 + max((int(each.max()) for each in orders if len(each)), default=0)
    return Views(factors, update, parameters, orders, num, _rates_of(case, verdict), tolerance)


def _rates_of(case: Case, verdict: Verdict) -> Rates | None:
    updates = verdict.seen.updates if verdict.seen is not None else []
    if not updates:
        return None
    first = updates[0].applied.iterations
    meant = None
    if case.schedule is not None:
        meant = np.array([case.schedule(first + i) for i in range(len(updates))])
    return Rates([u.number for u in updates], np.array([u.applied.learning_rate for u in updates]), meant)


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def assert_drawable() -> None:
    """Raise if matplotlib is not installed.

    Raises:
        SpecificationError: it is not.
    """
    if not can_draw():
        must, attempt = "The pictures of a report need matplotlib.", "pip install 'wholestep[demo]', or print(report)."
        raise SpecificationError(message(must, "none installed", attempt))


def pictures(views: Views) -> Iterator[Picture]:
    """Yield the pictures that have something to show."""
    if views.factors is not None:
        yield _drawn(_factors, views.factors, (8, 3.2))
    if views.parameters:
        shown = min(len(views.parameters), _NUM_PARAMETERS)
        yield _drawn(_parameters, views, (8, 1.6 + 0.28 * shown))
    if views.orders:
        yield _drawn(_orders, views, (8, 3.6))
    if views.rates is not None:
        yield _drawn(_rates, views.rates, (8, 2.8))


def _drawn(draw: Callable[[Any, Any], tuple[str, str]], shown: Any, size: tuple[float, float]) -> Picture:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    title, caption = draw(figure, shown)
    file = BytesIO()
    figure.savefig(file, format="png", dpi=120)
    return Picture(title, caption, file.getvalue())


def _bare(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)


def _coloured(near: np.ndarray) -> list[str]:
    return [_RIGHT if is_near else _WRONG for is_near in near]


def _name_colours(axes: Any, near: np.ndarray, name: str) -> None:
    """Add the used ones of the two colours to the legend."""
    for colour, is_there, end in ((_RIGHT, np.any(near), "the same"), (_WRONG, not np.all(near), "differs")):
        if is_there:
            axes.plot([], [], "s", color=colour, ms=8, label=f"{name}: {end}")


def _factors(figure: Any, factors: Factors) -> tuple[str, str]:
    axes = figure.subplots()
    x = np.arange(1, len(factors.solved) + 1)
    slack = SOLVED * float(np.max(np.abs(factors.should)))
    near = np.isclose(factors.solved, factors.should, rtol=FINE.differs, atol=slack)
    axes.bar(x, factors.solved, color=_coloured(near), width=0.7)
    _name_colours(axes, near, "in your loop")
    lost = x[np.isclose(factors.solved, 0, atol=slack) & ~near]
    axes.plot(lost, np.zeros(len(lost)), "x", color=_WRONG, ms=8, mew=2, clip_on=False)
    axes.step(
        np.append(x - 0.5, x[-1] + 0.5), np.append(factors.should, factors.should[-1]), where="post", color=_MEANT
    )
    axes.plot([], [], color=_MEANT, label="as it should be")
    top = max(float(np.max(np.concatenate([factors.solved, factors.should]))), 1e-12)
    low = min(float(np.min(factors.solved)), 0.0)
    axes.set_ylim(low * 1.1, top * 1.35)
    if len(factors.sizes) > 1:
        ends = np.cumsum([0, *factors.sizes])
        for i, (start, end) in enumerate(pairwise(ends), start=1):
            axes.text((start + end) / 2 + 0.5, top * 1.06, f"microbatch {i}", ha="center", fontsize=8, color="#666666")
            if i > 1:
                axes.axvline(start + 0.5, color="#999999", lw=0.8, ls=":")
    axes.set_xlabel(f"row of update {factors.update}, in the order in which it was used")
    axes.set_ylabel("factor of the row's\ngradient")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(loc="upper right", ncols=3, **_LEGEND)
    axes.set_xlim(0.4, len(x) + 0.6)
    _bare(axes)
    end = "they do." if np.all(near) else "they do not all."
    return "How much each row counts", f"The bars should reach the black line: {end}"


def _parameters(figure: Any, views: Views) -> tuple[str, str]:
    axes, (fits, differs) = figure.subplots(), views.tolerance
    worst = sorted(views.parameters, key=lambda each: -each[1])[:_NUM_PARAMETERS]
    shown = [each for each in views.parameters if each in worst][::-1]
    y = np.arange(len(shown))
    floor = 1e-8
    without, changed = (np.array([each[i] for each in shown], float) for i in (1, 2))
    axes.barh(y, np.maximum(without, floor), color=_coloured(without <= differs), height=0.6)
    _name_colours(axes, without <= differs, "your loop from what was meant")
    if np.any(np.isfinite(changed)):
        axes.plot(
            np.maximum(changed, floor), y, "D", color=_CHANGED, ms=6, ls="", label="from the reference with this fault"
        )
    axes.axvspan(floor / 2, fits, color="#3d9e5f", alpha=0.10, lw=0, zorder=0)
    axes.axvline(differs, color=_MEANT, lw=1, ls="--")
    axes.text(differs * 1.2, len(shown) - 0.38, "differs", fontsize=8, va="bottom")
    axes.text(fits / 1.2, len(shown) - 0.38, "the same, but for rounding", fontsize=8, va="bottom", ha="right")
    axes.set_xscale("log")
    axes.set_xlim(floor / 2, 4)
    axes.set_ylim(-0.6, len(shown) + 0.1)
    axes.set_yticks(y, labels=[_short(each[0]) for each in shown], parse_math=False, fontsize=9)
    axes.set_xlabel(f"distance of the gradient of update {views.update}, relative to its length")
    _bare(axes)
    figure.legend(loc="outside lower center", ncols=2, **_LEGEND)
    left = (
        "" if len(shown) == len(views.parameters) else f" The {len(shown)} of {len(views.parameters)} that differ most."
    )
    return "Where the gradient differs", f"Bars right of the dashed line differ.{left}"


def _short(name: str) -> str:
    return name if len(name) <= 40 else f"...{name[-37:]}"


def _orders(figure: Any, views: Views) -> tuple[str, str]:
    each_axes = figure.subplots(1, max(2, len(views.orders)), sharex=True, sharey=True)
    for i, axes in enumerate(each_axes):
        if i < len(views.orders):
            rows = views.orders[i]
            size = float(np.clip(4000 / max(len(rows), 1), 1, 25))
            axes.scatter(np.arange(1, len(rows) + 1), rows + 1, s=size, color="#35608f", lw=0)
            axes.set_title(f"pass {i + 1}: {len(rows)} rows", fontsize=10)
        else:
            axes.text(0.5, 0.5, "no second pass was seen", transform=axes.transAxes, ha="center", color="#666666")
        axes.set_xlabel("place in the pass")
        _bare(axes)
    each_axes[0].set_ylabel("row of the data, from 1")
    each_axes[0].yaxis.get_major_locator().set_params(integer=True)
    each_axes[0].set_ylim(bottom=0)
    each_axes[0].set_xlim(left=0)
    caption = (
        "A cloud is a full shuffle, a band along the diagonal is a shuffle within a window, one line is no shuffle; "
        "two equal clouds are one order for both passes."
    )
    return "In which order the rows come", caption


def _rates(figure: Any, rates: Rates) -> tuple[str, str]:
    axes = figure.subplots()
    if rates.meant is not None:
        axes.plot(rates.numbers, rates.meant, color=_MEANT, lw=1.5, label="as it was meant", zorder=1)
    meant = rates.used if rates.meant is None else rates.meant
    near = np.isclose(rates.used, meant, rtol=FINE.differs)
    axes.scatter(rates.numbers, rates.used, color=_coloured(near), s=22, zorder=2)
    if rates.meant is not None:
        _name_colours(axes, near, "in your loop")
        axes.legend(loc="upper right", ncols=3, **_LEGEND)
    top = float(max(np.max(rates.used), 0 if rates.meant is None else np.max(rates.meant)))
    axes.set_ylim(0, top * 1.3 or 1)
    axes.set_xlabel("update")
    axes.set_ylabel("learning rate")
    axes.xaxis.get_major_locator().set_params(integer=True)
    _bare(axes)
    caption = (
        "The points should lie on the line." if rates.meant is not None else "No schedule was given to compare with."
    )
    return "The learning rate", caption
