"""The sums of the microbatches of an update, and of an epoch: the reported loss is the minimised
one.

No mean of means is taken.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import keras
import numpy as np
from keras import ops

from wholestep import slices
from wholestep.cut import Cut
from wholestep.engines import Engine
from wholestep.model import NOTHING_KNOWN, Forward, Outcome, TraceFacts, loss_trackers, own_results
from wholestep.slices import Gradient, LookupSize, Part, Slices
from wholestep.state import Values
from wholestep.tree import Tensor, Tree

Added = TypeVar("Added")
Carried = TypeVar("Carried")
Alike = TypeVar("Alike")

# by the index of each parameter whose gradient is `Slices`
LookupSizes = Mapping[int, Sequence[LookupSize]]
# the rows of a microbatch, the place of its first row, its number
Piece = tuple[Tensor, Tensor, Tensor]


class Sums(NamedTuple):
    """The sums over the rows of an update; the sums of replicas add up."""

    grads: list[Gradient]
    terms: dict[str, tuple[Tensor, Tensor]]
    extra: Tensor


class After(NamedTuple):
    """The changes of variables, alike on every replica: of the moved buffers, and the assigned
    parameters.
    """

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
        start = start + num * size
        done = done + num


def nothing(
    facts: TraceFacts, values: Values, lookups: LookupSizes, num_parts: int, num_rows: Tensor
) -> Totals:
    """Return the totals of no microbatch, for an update of `num_rows` rows.

    Args:
        num_parts: the number of parts that are added up: of all microbatches and replicas.
    """
    params, buffers, metrics, _ = values
    grads: list[Gradient] = []
    for i, param in enumerate(params):
        dtype = _accumulator(param.dtype)
        if i in lookups:
            grads.append(slices.zeros(lookups[i], num_parts, param.shape[1:], dtype, 0 * num_rows))
        else:
            grads.append(ops.zeros(param.shape, dtype))
    zero = ops.zeros((), keras.config.floatx())
    after = After(
        [ops.zeros_like(buffers[i]) for i in facts.moved],
        [ops.zeros_like(params[i]) for i in facts.assigned],
    )
    return Folded(Sums(grads, dict.fromkeys(facts.terms, (zero, zero)), zero), metrics, after)


def no_weights(facts: TraceFacts) -> Weights:
    """Return the weights of no microbatch."""
    return Folded(
        (),
        {
            k: ops.zeros((), keras.config.floatx())
            for k, fact in facts.terms.items()
            if fact.is_mean
        },
        (),
    )


def add_gradients(
    total: list[Gradient], new: list[Gradient], lookups: LookupSizes, part: Part | None
) -> list[Gradient]:
    """Return the sums of gradients after one part of the batch; None for a part without rows."""
    added: list[Gradient] = []
    for i, (old, grad) in enumerate(zip(total, new, strict=True)):
        if isinstance(old, Slices):
            assert isinstance(grad, Slices), (
                "the shapes that were asked for are those of the gradient"
            )
            added.append(old if part is None else slices.add(lookups[i], old, grad, part))
        else:
            added.append(old + ops.cast(grad, old.dtype))
    return added


def merge_lookups(total: list[Gradient], lookups: LookupSizes) -> list[Gradient]:
    """Return the gradients of a batch whose parts are all added."""
    gradients: list[Gradient] = []
    for i, gradient in enumerate(total):
        if i in lookups and isinstance(gradient, Slices):
            gradient = slices.merge(lookups[i], gradient)
        gradients.append(gradient)
    return gradients


def add(
    floats: dict[int, bool],
    total: Totals,
    grads: list[Gradient],
    outcome: Outcome,
    buffers: list[Tensor],
    share: Tensor,
) -> Totals:
    """Return the totals after one microbatch, whose rows are this share of the update's.

    Args:
        grads: the sums of gradients after it.
        floats: the places of the moved buffers, each with whether it is floating. Others, such as
            frozen weights, have no total: it would be another copy of them.
    """
    sums = total.sums
    after = total.alike
    terms = {
        k: (plus(sums.terms[k][0], v), plus(sums.terms[k][1], w))
        for k, (v, w) in outcome.sums.items()
    }
    moves = _buffer_moves(floats, after.buffers, outcome.buffers, buffers, share)
    pairs = zip(after.assigned, outcome.assigned, strict=True)
    assigned = [old + ops.cast(share, old.dtype) * new for old, new in pairs]
    return Folded(
        Sums(grads, terms, sums.extra + outcome.extra), outcome.metrics, After(moves, assigned)
    )


def plus(total: Tensor, value: Tensor) -> Tensor:
    """Return a total with a value added, in the total's dtype: an objective may compute in a wider
    one.
    """
    return total + ops.cast(value, total.dtype)


def weights_of_rows(
    engine: Engine, cut: Cut, size: int, first: Tensor, count: Tensor
) -> Tensor | None:
    """Return the weights of the rows that `engine.replicas.batch` returns; None if all weights are
    1.
    """
    if not cut.padded:
        return None
    is_real = first + ops.arange(size, dtype="int32") < count
    return engine.replicas.part(ops.cast(is_real, keras.config.floatx()))[0]


def extra_share(cut: Cut, size: int) -> float:
    """Return the factor of the other losses on `size` rows."""
    is_part = cut.num_microbatches > 1 or cut.split
    return size / cut.rows if cut.extra == "mean" and is_part else 1.0


def _buffer_moves(
    floats: dict[int, bool],
    moves: list[Tensor],
    after: list[Tensor],
    before: list[Tensor],
    share: Tensor,
) -> list[Tensor]:
    """Return buffer changes: moving statistics by the row-weighted mean over microbatches, others
    by the last.

    Every microbatch starts from the same buffers.
    """
    return [
        move + ops.cast(share, move.dtype) * (after[i] - before[i])
        if is_float
        else _apart(after[i], before[i])
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
    """Return the dtype in which gradients are summed: float32, or float64 for float64
    parameters.
    """
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


OWN = "="  # the prefix of results of a custom `get_metrics_result`


class EpochSums:
    """Turns the sums of one forward function into a loss, the sums of an epoch and a report.

    The sums of an epoch are two arrays, high and low parts of shape (2, terms + 1): values and
    weights of every term, and last of the losses without weights (regularisation and `add_loss`),
    which are weighted by rows.
    """

    def __init__(self, forward: Forward):
        self.forward = forward
        self.terms = forward.facts.terms

    def empty(self) -> tuple[np.ndarray, np.ndarray] | tuple[()]:
        """Return the running sums of an epoch that has not begun; () if the terms are not known
        yet.
        """
        zeros = np.zeros((2, len(self.terms) + 1), keras.config.floatx())
        return () if self.forward.facts is NOTHING_KNOWN else (zeros, zeros)

    def fitting(self, engine: Engine, sums: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return these sums; empty ones on the device if their terms differ."""
        empty = self.empty()
        return (
            sums
            if [s.shape for s in sums] == [e.shape for e in empty]
            else engine.devices.place(empty)
        )

    def loss(
        self, sums: dict[str, Any], once: Tensor, weights: dict[str, Any] | None = None
    ) -> Tensor:
        """Return sum_k c_k * value_k / weight_k + once; the weights are the sums' own unless
        given.
        """
        loss = once
        for k, (value, weight) in sums.items():
            fact = self.terms[k]
            if fact.counts:
                mean = (
                    value / (weight if weights is None else weights[k]) if fact.is_mean else value
                )
                loss = loss + fact.coefficient * mean
        return loss

    def add(
        self, epoch: tuple[Tensor, Tensor], sums: dict[str, Any], once: Tensor, count: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Add an update's sums to the epoch's: means by their weights, the rest by the number of
        rows.
        """
        rows = ops.cast(count, keras.config.floatx())
        pairs = [
            sums[k] if fact.is_mean else (rows * sums[k][0], rows) for k, fact in self.terms.items()
        ]
        pairs.append((rows * once, rows))
        values = ops.stack([ops.stack(part) for part in zip(*pairs, strict=True)])
        return accumulate(epoch, ops.cast(values, epoch[0].dtype))

    def logs(
        self, epoch: tuple[Tensor, Tensor], metrics: list[Tensor], captured: Sequence[Tensor] = ()
    ) -> dict[str, Tensor]:
        """Return the numbers of an epoch so far: the loss, the Keras metrics, each named term, and
        custom results.
        """
        means = ratio(*epoch)
        counted = [
            fact.coefficient * means[i] for i, fact in enumerate(self.terms.values()) if fact.counts
        ]
        named = {k: means[i] for i, k in enumerate(self.terms) if k}
        numbers = (
            {"loss": sum(counted, means[len(self.terms)])}
            | self.forward.results(metrics, captured)
            | named
        )
        own = self.forward.own_results(metrics, numbers, captured)
        return numbers | {OWN + name: value for name, value in own.items()}


def accumulate(total: tuple[Tensor, Tensor], value: Tensor) -> tuple[Tensor, Tensor]:
    """Add `value` to a running total of two floats, exactly (Knuth's two-sum): a count never stops
    growing at 2^24.
    """
    high, low = total
    new = high + value
    back = new - high
    return new, low + ((high - (new - back)) + (value - back))


def ratio(high: Tensor, low: Tensor) -> Tensor:
    """Return values / weights of running totals of shape (2, ...); 0 where nothing has been weighed
    yet.
    """
    values = high[0] + low[0]
    weights = high[1] + low[1]
    return ops.where(
        weights == 0, ops.zeros_like(weights), values / ops.where(weights == 0, 1.0, weights)
    )


def first_logs(
    forward: Forward, values: Values, batch: Tree, row_weights: Tensor | None
) -> dict[str, Tensor]:
    """Call all user functions once, in a trace: the objective, the regularisers, the metrics'
    results.

    Returns:
        The numbers of an epoch, without meaningful values.
    """
    outcome = forward.sums(values, batch, row_weights)
    known = forward.so_far()
    if known.has_penalty:
        known.penalty(values.params, values.captured)
    sums = EpochSums(known)
    return sums.logs(
        tuple(map(ops.convert_to_tensor, sums.empty())), outcome.metrics, values.captured
    )


def names_of(engine: Engine, forward: Forward) -> list[str]:
    """Return the names of an epoch's losses and metrics, except names that only the objective
    gives.
    """
    names = list(loss_trackers(forward.model))

    def note(metrics: list[Tensor]) -> dict[str, Tensor]:
        numbers = forward.results(metrics)
        names.extend([*numbers, *forward.own_results(metrics, {})])
        return numbers

    engine.programs.shapes(note, engine.variables.values(forward.variables.metrics))
    return names


def visible(numbers: dict[str, Tensor | float]) -> dict[str, Tensor | float]:
    """Return the numbers to show to the user: the custom results if there are any, else all."""
    own = {name.removeprefix(OWN): value for name, value in numbers.items() if name.startswith(OWN)}
    return own or numbers


def fresh(model: keras.Model, numbers: dict[str, Any]) -> dict[str, Any]:
    """Return an epoch's numbers as `keras.Model.fit` does, once Keras' metrics have their
    values.
    """
    logs = visible(numbers)
    # Called again, as in Keras: it may read values outside of the program, such as the learning
    # rate.
    return logs if logs is numbers else read_results(own_results(model), logs)


def read_results(results: dict[str, Any], logs: dict[str, Any]) -> dict[str, Any]:
    """Return a model's metric results as numbers if they have the names of the logs; else the
    logs.
    """
    if results.keys() != logs.keys():
        return logs
    read = {name: np.asarray(value).copy() for name, value in results.items()}
    return {name: value if value.ndim else float(value) for name, value in read.items()}
