"""The microbatches of an update: their rows, the initial totals of the fold, and the share that each adds."""

from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

import keras
import numpy as np
from keras import ops

from wholestep.cut import Cut
from wholestep.engines import Engine
from wholestep.model import Outcome, TraceFacts
from wholestep.state import Values
from wholestep.tree import Tensor

Added = TypeVar("Added")
Carried = TypeVar("Carried")
Alike = TypeVar("Alike")

Piece = tuple[Tensor, Tensor, Tensor]  # the rows of a microbatch, the place of its first row, its number


class Sums(NamedTuple):
    """The sums over the rows of an update; the sums of replicas add up."""

    grads: list[Tensor]
    terms: dict[str, tuple[Tensor, Tensor]]
    extra: Tensor


class After(NamedTuple):
    """The changes of variables, alike on every replica: of the moved buffers, and the assigned parameters."""

    buffers: list[Tensor]
    assigned: list[Tensor]


class Folded(NamedTuple, Generic[Added, Carried, Alike]):
    """The totals over microbatches, as `Replicas.total` sums them over replicas."""

    sums: Added
    carried: Carried
    alike: Alike


Totals = Folded[Sums, list[Tensor], After]  # carried: the metrics
Weights = Folded[tuple[()], dict[str, Tensor], tuple[()]]  # carried: the weight of every mean


def pieces_of(cut: Cut, rows: Tensor) -> Iterator[tuple[Piece, int]]:
    """Yield the microbatches of each section, stacked, and their number."""
    start = done = 0
    for num, size in cut.sections:
        firsts = np.arange(start, start + num * size, size, dtype=np.int32)
        numbers = np.arange(done, done + num, dtype=np.int32)
        places = ops.convert_to_tensor(firsts), ops.convert_to_tensor(numbers)
        yield (ops.reshape(rows[start : start + num * size], (num, size)), *places), num
        start, done = start + num * size, done + num


def nothing(facts: TraceFacts, values: Values) -> Totals:
    """Return the totals of no microbatch."""
    params, buffers, metrics, _ = values
    grads = [ops.zeros(p.shape, _accumulator(p.dtype)) for p in params]
    zero = ops.zeros((), keras.config.floatx())
    after = After(
        [ops.zeros_like(buffers[i]) for i in facts.moved], [ops.zeros_like(params[i]) for i in facts.assigned]
    )
    return Folded(Sums(grads, dict.fromkeys(facts.terms, (zero, zero)), zero), metrics, after)


def no_weights(facts: TraceFacts) -> Weights:
    """Return the weights of no microbatch."""
    return Folded((), {k: ops.zeros((), keras.config.floatx()) for k, fact in facts.terms.items() if fact.is_mean}, ())


def add(
    floats: dict[int, bool], total: Totals, grads: list[Tensor], outcome: Outcome, buffers: list[Tensor], share: Tensor
) -> Totals:
    """Return the totals after one microbatch, whose rows are this share of the update's.

    Args:
        floats: the places of the moved buffers, each with whether it is floating. Others, such as frozen weights, have
            no total: it would be another copy of them.
    """
    sums, after = total.sums, total.alike
    added = [old + ops.cast(new, old.dtype) for old, new in zip(sums.grads, grads, strict=True)]
    terms = {k: (sums.terms[k][0] + v, sums.terms[k][1] + w) for k, (v, w) in outcome.sums.items()}
    moves = _buffer_moves(floats, after.buffers, outcome.buffers, buffers, share)
    pairs = zip(after.assigned, outcome.assigned, strict=True)
    assigned = [old + ops.cast(share, old.dtype) * new for old, new in pairs]
    return Folded(Sums(added, terms, sums.extra + outcome.extra), outcome.metrics, After(moves, assigned))


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
    floats: dict[int, bool], moves: list[Tensor], after: list[Tensor], before: list[Tensor], share: Tensor
) -> list[Tensor]:
    """Return buffer changes: moving statistics by the row-weighted mean over microbatches, others by the last.

    Every microbatch starts from the same buffers.
    """
    return [
        move + ops.cast(share, move.dtype) * (after[i] - before[i]) if is_float else _apart(after[i], before[i])
        for move, (i, is_float) in zip(moves, floats.items(), strict=True)
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
    if cut.num_microbatches == 1:
        return values
    size = values.shape[0] // cut.num_microbatches
    return ops.slice(values, [number * size], [size])
