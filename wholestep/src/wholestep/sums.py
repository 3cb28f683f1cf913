"""The sums of the microbatches of an update, and of an epoch. No mean of means is taken."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import keras
import numpy as np
from keras import ops

from wholestep import slices
from wholestep.cut import Cut
from wholestep.engines import Engine
from wholestep.errors import SpecificationError, message
from wholestep.model import (
    NOTHING_KNOWN,
    Forward,
    MicrobatchSums,
    TraceFacts,
    loss_trackers,
    own_results,
)
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
    """Changes that are alike on every replica.

    Args:
        buffers: by moved buffer: the sum of its changes, or the value of one that is not floating;
            of an update in one microbatch: all buffers.
        assigned: the values of the assigned parameters.
    """

    buffers: list[Tensor]
    assigned: list[Tensor]


class Folded(NamedTuple, Generic[Added, Carried, Alike]):
    """The totals over microbatches, as `Replicas.total` sums them over replicas."""

    sums: Added
    carried: Carried
    alike: Alike


class SumInputs(NamedTuple):
    """The arguments of the sums of an update, the same for every microbatch and replica.

    `places`, `weights` and `slopes` are known after the first passes over the full batch, see
    `Forward.sums` and `EpochSums.loss`.
    """

    values: Values
    scale: Tensor
    rows: Tensor
    num_rows: Tensor
    places: Sequence[Tensor] = ()
    weights: dict[str, Tensor] | None = None
    slopes: Sequence[Tensor] = ()

    def with_params(self, params: list[Tensor]) -> "SumInputs":
        """Return the inputs with other values of the parameters."""
        return self._replace(values=self.values._replace(params=params))


Totals = Folded[Sums, list[Tensor], After]  # carried: the metrics
Weights = Folded[tuple[()], dict[str, Tensor], tuple[()]]  # carried: the weight of every mean


def pieces_of(cut: Cut, rows: Tensor) -> Iterator[tuple[Piece, int]]:
    """Yield the microbatches of each section, stacked, and their number."""
    start = 0
    number = 0
    for num, size in cut.sections:
        firsts = np.arange(start, start + num * size, size, dtype=np.int32)
        numbers = np.arange(number, number + num, dtype=np.int32)
        stacked = ops.reshape(rows[start : start + num * size], (num, size))
        yield (stacked, ops.convert_to_tensor(firsts), ops.convert_to_tensor(numbers)), num
        start += num * size
        number += num


def num_shares(engine: Engine, cut: Cut) -> int:
    """Return the number of replicas that fold their rows of each microbatch."""
    return engine.devices.num_replicas if cut.split else 1


def part_of(engine: Engine, cut: Cut, piece: Piece) -> Part | None:
    """Return a replica's part of the batch in a microbatch; None if it has no row of it."""
    rows, first, number = piece
    local_rows, start = engine.replicas.part(rows)
    if not local_rows.shape[0]:
        return None
    num = num_shares(engine, cut)
    share = start // -(-rows.shape[0] // num)
    return Part(first + start, number * num + share)


def zero_totals(
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
    terms = [k for k, fact in facts.terms.items() if not fact.joins]
    sums = Sums(grads, dict.fromkeys(terms, (zero, zero)), zero)
    moves = [ops.zeros_like(buffers[i]) for i in facts.moved]
    assigned = [ops.zeros_like(params[i]) for i in facts.assigned]
    return Folded(sums, metrics, After(moves, assigned))


def zero_weights(facts: TraceFacts) -> Weights:
    """Return the weights of no microbatch."""
    means = [k for k, fact in facts.terms.items() if fact.is_mean and not fact.joins]
    zero = ops.zeros((), keras.config.floatx())
    return Folded((), dict.fromkeys(means, zero), ())


def add_weights(total: Weights, outcome: MicrobatchSums) -> Weights:
    """Return the weights after one microbatch."""
    weights = {}
    for k, before in total.carried.items():
        _, weight = outcome.sums[k]
        weights[k] = plus(before, weight)
    return total._replace(carried=weights)


def lookup_sizes(
    cut: Cut, paths: list[str], num_few: int, few: list[Gradient], full: list[Gradient]
) -> LookupSizes:
    """Return the sizes of lookups, by the gradients of `num_few` rows and of the full batch.

    Raises:
        SpecificationError: replicas would add up lookups whose number depends on values.
    """
    sizes = {}
    for i, (path, part, whole) in enumerate(zip(paths, few, full, strict=True)):
        if not isinstance(part, Slices) or not isinstance(whole, Slices):
            continue
        reads = [values.shape[0] for values in part.values]
        all_reads = [values.shape[0] for values in whole.values]
        if len(reads) != len(all_reads):
            # Each row is looked up by itself, in a loop of Python: all count as one lookup.
            reads, all_reads = [_total(reads)], [_total(all_reads)]
        pairs = zip(reads, all_reads, strict=True)
        sizes[i] = [LookupSize.of(path, (num_few, a), (cut.places, b)) for a, b in pairs]
        if cut.split and LookupSize(None) in sizes[i]:
            must = (
                f"On several replicas, the number of rows that are looked up in {path!r} must be "
                "known."
            )
            attempt = "dense_gradients=True, or one device."
            raise SpecificationError(message(must, "a number that depends on values", attempt))
    return sizes


def _total(reads: list[int | None]) -> int | None:
    known = [num for num in reads if num is not None]
    return sum(known) if len(known) == len(reads) else None


def add_gradients(
    total: list[Gradient], new: list[Gradient], lookups: LookupSizes, part: Part | None
) -> list[Gradient]:
    """Return the sums of gradients after one part of the batch; None for a part without rows."""
    added: list[Gradient] = []
    for i, (old, grad) in enumerate(zip(total, new, strict=True)):
        if not isinstance(old, Slices):
            added.append(old + ops.cast(grad, old.dtype))
        elif part is None:
            added.append(old)
        else:
            assert isinstance(grad, Slices), "the shapes asked for are those of the gradient"
            added.append(slices.add(lookups[i], old, grad, part))
    return added


def merge_lookups(total: list[Gradient], lookups: LookupSizes) -> list[Gradient]:
    """Return the gradients of a batch whose parts are all added."""
    merged = list(total)
    for i, gradient in enumerate(total):
        if isinstance(gradient, Slices) and i in lookups:
            merged[i] = slices.merge(lookups[i], gradient)
    return merged


def add(
    floats: dict[int, bool],
    total: Totals,
    grads: list[Gradient],
    outcome: MicrobatchSums,
    buffers: list[Tensor],
    share: Tensor,
) -> Totals:
    """Return the totals after one microbatch, whose rows are this share of the update's.

    Every microbatch starts from the same buffers. Moving statistics change by the row-weighted mean
    over microbatches; other buffers have the value after the last one.

    Args:
        grads: the sums of gradients after it.
        floats: the places of the moved buffers, each with whether it is floating. Others, such as
            frozen weights, have no total: it would be another copy of them.
    """
    terms = {}
    for k, (value, weight) in outcome.sums.items():
        old_value, old_weight = total.sums.terms[k]
        terms[k] = plus(old_value, value), plus(old_weight, weight)
    sums = Sums(grads, terms, total.sums.extra + outcome.extra)
    moves = []
    for move, (i, is_float) in zip(total.alike.buffers, floats.items(), strict=True):
        after = outcome.buffers[i]
        if is_float:
            after = move + ops.cast(share, move.dtype) * (after - buffers[i])
        moves.append(after)
    pairs = zip(total.alike.assigned, outcome.assigned, strict=True)
    assigned = [old + ops.cast(share, old.dtype) * new for old, new in pairs]
    return Folded(sums, outcome.metrics, After(moves, assigned))


def moved_buffers(
    floats: dict[int, bool], before: list[Tensor], moves: list[Tensor]
) -> list[Tensor]:
    """Return the buffers after all microbatches, by the totals of `add`."""
    buffers = list(before)
    for move, (i, is_float) in zip(moves, floats.items(), strict=True):
        buffers[i] = before[i] + move if is_float else move
    return buffers


def plus(total: Tensor, value: Tensor) -> Tensor:
    """Return their sum in the total's dtype: an objective may compute in a wider one."""
    return total + ops.cast(value, total.dtype)


def weights_of_rows(
    engine: Engine, cut: Cut, size: int, first: Tensor, count: Tensor
) -> Tensor | None:
    """Return the weights of the rows of `engine.replicas.batch`; None if all weights are 1."""
    if not cut.padded:
        return None
    is_real = first + ops.arange(size, dtype="int32") < count
    return engine.replicas.part(ops.cast(is_real, keras.config.floatx()))[0]


def extra_share(cut: Cut, size: int) -> float:
    """Return the factor of the other losses on `size` rows."""
    return size / cut.rows if cut.extra == "mean" and cut.has_parts else 1.0


def _accumulator(dtype: object) -> str:
    """Return the dtype of the sums of gradients: float32, or float64 for float64 parameters."""
    return "float64" if "float64" in str(dtype) else "float32"


def row_share(cut: Cut, size: int, first: Tensor, count: Tensor) -> Tensor:
    """Return the share of the update's rows that lies in this microbatch."""
    if not cut.padded:
        return ops.full((), size / cut.rows, keras.config.floatx())
    floatx = keras.config.floatx()
    num_real = ops.clip(count - first, 0, size)
    return ops.cast(num_real, floatx) / ops.cast(count, floatx)


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
        """Return the sums before the first row of an epoch; () if the terms are not known yet."""
        if self.forward.facts is NOTHING_KNOWN:
            return ()
        shape = 2, len(self.terms) + 1
        zeros = np.zeros(shape, keras.config.floatx())
        return zeros, zeros

    def fitting(self, engine: Engine, sums: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return these sums; empty ones on the device if their terms differ."""
        empty = self.empty()
        is_fitting = [s.shape for s in sums] == [e.shape for e in empty]
        return sums if is_fitting else engine.devices.place(empty)

    def loss(
        self, sums: dict[str, Any], once: Tensor, weights: dict[str, Any] | None = None
    ) -> Tensor:
        """Return sum_k c_k * value_k / weight_k + once, by default by the sums' own weights."""
        loss = once
        for k, (value, weight) in sums.items():
            fact = self.terms[k]
            if not fact.counts:
                continue
            if fact.is_mean:
                value = value / (weight if weights is None else weights[k])
            loss = loss + fact.coefficient * value
        return loss

    def add(
        self, epoch: tuple[Tensor, Tensor], sums: dict[str, Any], once: Tensor, count: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Add an update's sums to the epoch's: means by their weights, the rest by the rows."""
        rows = ops.cast(count, keras.config.floatx())
        pairs = []
        for k, fact in self.terms.items():
            value, weight = sums[k]
            pairs.append((value, weight) if fact.is_mean else (rows * value, rows))
        values, weights = zip(*pairs, (rows * once, rows), strict=True)
        update = ops.stack([ops.stack(values), ops.stack(weights)])
        return accumulate(epoch, ops.cast(update, epoch[0].dtype))

    def logs(
        self, epoch: tuple[Tensor, Tensor], metrics: list[Tensor], captured: Sequence[Tensor] = ()
    ) -> dict[str, Tensor]:
        """Return an epoch's numbers: the loss, Keras' metrics, named terms and custom results."""
        means = ratio(*epoch)
        loss = means[len(self.terms)]
        named = {}
        for i, (k, fact) in enumerate(self.terms.items()):
            if fact.counts:
                loss = loss + fact.coefficient * means[i]
            if k:
                named[k] = means[i]
        numbers = {"loss": loss} | self.forward.results(metrics, captured) | named
        custom = self.forward.own_results(metrics, numbers, captured)
        return numbers | {OWN + name: value for name, value in custom.items()}


def accumulate(total: tuple[Tensor, Tensor], value: Tensor) -> tuple[Tensor, Tensor]:
    """Add `value` to a running total of two floats, exactly (Knuth's two-sum).

    So a count never stops growing at 2^24.
    """
    high, low = total
    new = high + value
    back = new - high
    return new, low + ((high - (new - back)) + (value - back))


def ratio(high: Tensor, low: Tensor) -> Tensor:
    """Return values / weights of running totals of shape (2, ...); 0 where no weight is yet."""
    total = high + low
    weights = total[1]
    is_empty = weights == 0
    means = total[0] / ops.where(is_empty, 1.0, weights)
    return ops.where(is_empty, ops.zeros_like(weights), means)


def first_logs(
    forward: Forward, values: Values, batch: Tree, row_weights: Tensor | None
) -> dict[str, Tensor]:
    """Call all user functions in a trace: the objective, regularisers, and metrics' results.

    Returns:
        The numbers of an epoch, without meaningful values.
    """
    outcome = forward.sums(values, batch, row_weights)
    known = forward.so_far()
    if known.has_penalty:
        known.penalty(values.params, values.captured)
    sums = EpochSums(known)
    empty = tuple(map(ops.convert_to_tensor, sums.empty()))
    return sums.logs(empty, outcome.metrics, values.captured)


def names_of(engine: Engine, forward: Forward) -> list[str]:
    """Return the names of an epoch's losses and metrics, without those of an objective's terms."""
    names = list(loss_trackers(forward.model))

    def note(metrics: list[Tensor]) -> dict[str, Tensor]:
        numbers = forward.results(metrics)
        names.extend([*numbers, *forward.own_results(metrics, {})])
        return numbers

    engine.programs.shapes(note, engine.variables.values(forward.variables.metrics))
    return names


def visible(numbers: dict[str, Tensor | float]) -> dict[str, Tensor | float]:
    """Return the numbers to show to the user: the custom results if there are any, else all."""
    custom = {}
    for name, value in numbers.items():
        if name.startswith(OWN):
            custom[name.removeprefix(OWN)] = value
    return custom or numbers


def fresh(model: keras.Model, numbers: dict[str, Any]) -> dict[str, Any]:
    """Return an epoch's numbers as `keras.Model.fit` does, after Keras' metrics are set."""
    logs = visible(numbers)
    # Called again, as in Keras: it may read values outside of the program, such as the learning
    # rate.
    return logs if logs is numbers else read_results(own_results(model), logs)


def read_results(results: dict[str, Any], logs: dict[str, Any]) -> dict[str, Any]:
    """Return metric results as numbers if they have the names of the logs; else the logs."""
    if results.keys() != logs.keys():
        return logs
    numbers: dict[str, Any] = {}
    for name, value in results.items():
        number = np.asarray(value).copy()
        numbers[name] = number if number.ndim else float(number)
    return numbers
