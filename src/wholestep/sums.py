"""The sums of an update and of an epoch: the reported loss is the minimised one. No mean of means is taken."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from wholestep.engines import Engine
from wholestep.model import NOTHING_KNOWN, Forward, loss_trackers, own_results
from wholestep.state import Values
from wholestep.tree import Tensor, Tree

OWN = "="  # the prefix of results of a custom `get_metrics_result`


class EpochSums:
    """Turns the sums of one forward function into a loss, the sums of an epoch and a report.

    The sums of an epoch are two arrays, high and low parts of shape (2, terms + 1): values and weights of every term,
    and last of the losses without weights (regularisation and `add_loss`), which are weighted by rows.
    """

    def __init__(self, forward: Forward):
        self.forward = forward
        self.terms = forward.facts.terms

    def empty(self) -> tuple[np.ndarray, np.ndarray] | tuple[()]:
        """Return the running sums of an epoch that has not begun; () if the terms are not known yet."""
        zeros = np.zeros((2, len(self.terms) + 1), keras.config.floatx())
        return () if self.forward.facts is NOTHING_KNOWN else (zeros, zeros)

    def fitting(self, engine: Engine, sums: tuple) -> tuple:
        """Return these sums; empty ones on the device if their terms differ."""
        empty = self.empty()
        return sums if [s.shape for s in sums] == [e.shape for e in empty] else engine.devices.place(empty)

    def loss(self, sums: dict, once: Tensor, weights: dict | None = None) -> Tensor:
        """Return sum_k c_k * value_k / weight_k + once; the weights are the sums' own unless given."""
        loss = once
        for k, (value, weight) in sums.items():
            fact = self.terms[k]
            if fact.counts:
                mean = value / (weight if weights is None else weights[k]) if fact.is_mean else value
                loss = loss + fact.coefficient * mean
        return loss

    def add(self, epoch: tuple[Tensor, Tensor], sums: dict, once: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """Add an update's sums to the epoch's: means by their weights, the rest by the number of rows."""
        rows = ops.cast(count, keras.config.floatx())
        pairs = [sums[k] if fact.is_mean else (rows * sums[k][0], rows) for k, fact in self.terms.items()]
        pairs.append((rows * once, rows))
        return accumulate(epoch, ops.stack([ops.stack(part) for part in zip(*pairs, strict=True)]))

    def logs(self, epoch: tuple[Tensor, Tensor], metrics: list, captured: Sequence[Tensor] = ()) -> dict[str, Tensor]:
        """Return the numbers of an epoch so far: the loss, the Keras metrics, each named term, and custom results."""
        means = ratio(*epoch)
        counted = [fact.coefficient * means[i] for i, fact in enumerate(self.terms.values()) if fact.counts]
        named = {k: means[i] for i, k in enumerate(self.terms) if k}
        numbers = {"loss": sum(counted, means[len(self.terms)])} | self.forward.results(metrics, captured) | named
        own = self.forward.own_results(metrics, numbers, captured)
        return numbers | {OWN + name: value for name, value in own.items()}


def accumulate(total: tuple[Tensor, Tensor], value: Tensor) -> tuple[Tensor, Tensor]:
    """Add `value` to a running total of two floats, exactly (Knuth's two-sum): a count never stops growing at 2^24."""
    high, low = total
    new = high + value
    back = new - high
    return new, low + ((high - (new - back)) + (value - back))


def ratio(high: Tensor, low: Tensor) -> Tensor:
    """Return values / weights of running totals of shape (2, ...); 0 where nothing has been weighed yet."""
    values, weights = high[0] + low[0], high[1] + low[1]
    return ops.where(weights == 0, ops.zeros_like(weights), values / ops.where(weights == 0, 1.0, weights))


def first_logs(forward: Forward, values: Values, batch: Tree, row_weights: Tensor | None) -> dict[str, Tensor]:
    """Call all user functions once, in a trace: the objective, the regularisers, the metrics' results.

    Returns:
        The numbers of an epoch, without meaningful values.
    """
    outcome = forward.sums(values, batch, row_weights)
    known = forward.so_far()
    if known.has_penalty:
        known.penalty(values.params, values.captured)
    sums = EpochSums(known)
    return sums.logs(tuple(map(ops.convert_to_tensor, sums.empty())), outcome.metrics, values.captured)


def names_of(engine: Engine, forward: Forward) -> list[str]:
    """Return the names of an epoch's losses and metrics, except names that only the objective gives."""
    names = list(loss_trackers(forward.model))

    def note(metrics: list) -> dict[str, Tensor]:
        numbers = forward.results(metrics)
        names.extend([*numbers, *forward.own_results(metrics, {})])
        return numbers

    engine.programs.shapes(note, engine.variables.values(forward.variables.metrics))
    return names


def shown(numbers: dict[str, Tensor | float]) -> dict[str, Tensor | float]:
    """Return the numbers to show to the user: the custom results if there are any, else all."""
    own = {name.removeprefix(OWN): value for name, value in numbers.items() if name.startswith(OWN)}
    return own or numbers


def fresh(model: keras.Model, numbers: dict[str, Any]) -> dict[str, Any]:
    """Return an epoch's numbers as `keras.Model.fit` does, once Keras' metrics have their values."""
    logs = shown(numbers)
    own = own_results(model) if logs is not numbers else {}
    # Called again, as in Keras: it may read values outside of the program, such as the learning rate.
    read = {name: np.asarray(value).copy() for name, value in own.items()}
    same = read.keys() == logs.keys()
    return {name: value if value.ndim else float(value) for name, value in read.items()} if same else logs
