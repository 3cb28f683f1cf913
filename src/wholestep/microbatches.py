"""The microbatches of an update: their rows, the initial totals of the fold, and the share that each adds."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import keras
import numpy as np
from keras import ops

from wholestep.cut import Cut
from wholestep.engines import Engine
from wholestep.model import Outcome, TraceFacts
from wholestep.state import Values
from wholestep.tree import Tensor

Carried = TypeVar("Carried")


class Totals(NamedTuple):
    """The totals carried from microbatch to microbatch; every part is a plain sum."""

    grads: list[Tensor]
    sums: dict[str, tuple[Tensor, Tensor]]
    extra: Tensor
    buffers: list[Tensor]
    metrics: list[Tensor]
    assigned: list[Tensor]


def over(
    engine: Engine, cut: Cut, function: Callable[[Carried, Any], Carried], carry: Carried, rows: Tensor
) -> Carried:
    """Fold a function of (carry, (rows of a microbatch, place of its first row, its number)) over all microbatches."""
    start = done = 0
    for num, size in cut.sections:
        pieces = ops.reshape(rows[start : start + num * size], (num, size))
        firsts = np.arange(start, start + num * size, size, dtype=np.int32)
        numbers = np.arange(done, done + num, dtype=np.int32)
        places = (ops.convert_to_tensor(firsts), ops.convert_to_tensor(numbers))
        carry = engine.ops.fold(function, carry, (pieces, *places), num)
        start, done = start + num * size, done + num
    return carry


def nothing(facts: TraceFacts, values: Values) -> Totals:
    """Return the totals of no microbatch."""
    params, buffers, metrics, _ = values
    grads = [ops.zeros(p.shape, _accumulator(p.dtype)) for p in params]
    zero = ops.zeros((), keras.config.floatx())
    sums = dict.fromkeys(facts.terms, (zero, zero))
    assigned = [ops.zeros_like(params[i]) for i in facts.assigned]
    return Totals(grads, sums, zero, [ops.zeros_like(b) for b in buffers], metrics, assigned)


def add(
    floats: list[bool], total: Totals, grads: list[Tensor], outcome: Outcome, buffers: list[Tensor], share: Tensor
) -> Totals:
    """Return the totals after one microbatch, whose rows are this share of the update's."""
    return Totals(
        [old + ops.cast(new, old.dtype) for old, new in zip(total.grads, grads, strict=True)],
        {k: (total.sums[k][0] + v, total.sums[k][1] + w) for k, (v, w) in outcome.sums.items()},
        total.extra + outcome.extra,
        _buffer_moves(floats, total.buffers, outcome.buffers, buffers, share),
        outcome.metrics,
        [old + ops.cast(share, old.dtype) * new for old, new in zip(total.assigned, outcome.assigned, strict=True)],
    )


def weights_of_rows(engine: Engine, cut: Cut, size: int, first: Tensor, count: Tensor) -> Tensor | None:
    """Return the weights of the rows that `engine.replicas.batch` returns; None if all weights are 1."""
    if not cut.padded:
        return None
    is_real = first + ops.arange(size, dtype="int32") < count
    return engine.replicas.part(ops.cast(is_real, keras.config.floatx()))[0]


def extra_share(cut: Cut, size: int) -> float:
    """Return the factor of the other losses on `size` rows."""
    is_part = cut.num_microbatches > 1 or cut.split
    return size / cut.rows if cut.extra == "mean" and is_part else 1.0


def _buffer_moves(
    floats: list[bool], moves: list[Tensor], after: list[Tensor], before: list[Tensor], share: Tensor
) -> list[Tensor]:
    """Return buffer changes: moving statistics by the row-weighted mean over microbatches, counters and seeds once.

    Every microbatch starts from the same buffers.
    """
    return [
        move + ops.cast(share, move.dtype) * (a - b) if is_float else _apart(a, b)
        for move, a, b, is_float in zip(moves, after, before, floats, strict=True)
    ]


def _apart(after: Tensor, before: Tensor) -> Tensor:
    """Return the change of a buffer; of booleans, whether it changed."""
    return ops.logical_xor(after, before) if _is_bool(before) else after - before


def moved(before: Tensor, move: Tensor) -> Tensor:
    """Return a buffer with a change applied."""
    return ops.logical_xor(before, move) if _is_bool(before) else before + move


def _is_bool(value: Tensor) -> bool:
    return keras.backend.standardize_dtype(value.dtype) == "bool"


def _accumulator(dtype: object) -> str:
    """Return the dtype in which gradients are summed: float32, or float64 for float64 parameters."""
    return "float64" if "float64" in str(dtype) else "float32"


def row_share(cut: Cut, size: int, first: Tensor, count: Tensor) -> Tensor:
    """Return the share of the update's rows that lies in this microbatch."""
    if not cut.padded:
        return ops.full((), size / cut.rows, keras.config.floatx())
    inside = ops.clip(count - first, 0, size)
    return ops.cast(inside, keras.config.floatx()) / ops.cast(count, keras.config.floatx())


def section(values: Tensor, number: Tensor, cut: Cut) -> Tensor:
    """Return one microbatch's section of values for all microbatches."""
    size = values.shape[0] // cut.num_microbatches
    return ops.slice(values, [number * size], [size])
