"""
Do the rows of a batch see each other? Found out by trying, not by a list of layer names.

The content of the other rows is changed, same shapes and seeds: if the first row's value moves, its rows are coupled
(BatchNormalization, in-batch negatives). If the forward pass moves floating state (moving statistics), padding would
enter it. What `add_loss` and activity regularisers add up to is found by cutting four rows into two and two.
"""

from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from wholestep.forward import Forward, Rows
from wholestep.mean import Whole
from wholestep.state import State

_ROWS = 4


@dataclass(frozen=True)
class Coupling:
    """
    What the probe found.

    Args:
        couples: a row's value depends on the other rows.
        moves: the forward pass moves floating state, such as moving statistics.
        whole: a loss came as one number.
        extra: how the model's other losses add up over microbatches: "none", "sum", "mean", or "whole" (not at all).
    """

    couples: bool = False
    moves: bool = False
    whole: bool = False
    extra: str = "none"

    @property
    def may_cut(self) -> bool:
        """Whether any cut of the batch gives the same update."""
        return not (self.couples or self.moves or self.whole or self.extra == "whole")

    @property
    def can_cut(self) -> bool:
        """Whether a cut has a meaning at all, if another one than the whole batch's."""
        return not self.whole and self.extra != "whole"

    @property
    def may_pad(self) -> bool:
        """Whether rows of weight 0 change nothing."""
        return self.may_cut and self.extra == "none"

    @property
    def why(self) -> str:
        """Why the batch may not be cut, in plain words."""
        reasons = {
            "the rows of a batch see each other (as in BatchNormalization)": self.couples,
            "the forward pass moves statistics of the batch": self.moves and not self.couples,
            "a loss came as one number instead of one per row": self.whole,
            "a loss from add_loss is neither a sum nor a mean over rows": self.extra == "whole",
        }
        return "; ".join(reason for reason, holds in reasons.items() if holds)


def probe(engine: Any, forward: Forward, state: State, data: Any, rows: np.ndarray) -> Coupling:
    """Run the objective on a few of these rows and see what depends on what."""
    rows = np.asarray(rows)
    if len(rows) < 2:
        return Coupling()
    size = min(_ROWS, len(rows))
    spread = np.linspace(0, len(rows) - 1, min(2 * size - 1, len(rows))).astype(int)
    first = rows[spread[:size]]
    other = np.concatenate([first[:1], rows[np.roll(spread, 1 - size)[: size - 1]]])
    run = _runner(engine, forward, state, data)
    one, two = run(first), run(other)
    couples = _differs(one, two, slice(0, 1)) or not _differs(one, two, slice(1, None))
    moves = any(
        is_float and not np.array_equal(before, after)
        for is_float, before, after in zip(
            forward.variables.floats, engine.fetch(state.buffers), one.buffers, strict=True
        )
    )
    whole = any(fact.kind is Whole for fact in forward.facts.values())
    extra = _extra(run, first, one) if forward.has_extra else "none"
    return Coupling(couples and not whole, moves, whole, extra)


def _runner(engine: Any, forward: Forward, state: State, data: Any) -> Any:
    programs: dict[int, Any] = {}

    def function(state: State, data: Any, rows: Any) -> Rows:
        batch = engine.gather(data, rows)
        return forward.rows(engine.params(state), state.buffers, state.metrics, batch)

    def run(rows: np.ndarray) -> Rows:
        arguments = (state, data, engine.place(rows.astype(np.int32)))
        if len(rows) not in programs:
            programs[len(rows)] = engine.compile(function, arguments, spends=False)
        return engine.fetch(programs[len(rows)](*arguments))

    return run


def _differs(one: Rows, two: Rows, rows: slice) -> bool:
    """Whether these rows' values moved by more than rounding."""
    tolerance = 64 * float(np.finfo(_compute_dtype()).eps)
    for label, pair in one.values.items():
        for a, b in zip(pair, two.values[label], strict=True):
            a, b = np.asarray(a, np.float64)[rows], np.asarray(b, np.float64)[rows]
            if not np.allclose(a, b, rtol=tolerance, atol=tolerance * 1e-3, equal_nan=True):
                return True
    return False


def _compute_dtype() -> Any:
    dtype = keras.config.dtype_policy().compute_dtype
    return np.float16 if dtype in ("float16", "bfloat16") else dtype


def _extra(run: Any, rows: np.ndarray, whole: Rows) -> str:
    half = len(rows) // 2
    if len(rows) != 2 * half:
        return "whole"
    value = float(whole.extra)
    parts = float(run(rows[:half]).extra) + float(run(rows[half:]).extra)
    if value == 0 or not np.isfinite(value):
        return "whole"
    if np.isclose(value, parts, rtol=1e-4):
        return "sum"
    return "mean" if np.isclose(value, parts / 2, rtol=1e-4) else "whole"
