"""The sums of an update and of an epoch: what was minimised is what is reported. Nothing averages averages."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from wholestep.engines.protocol import Engine
from wholestep.model.compiled import loss_trackers, own_results
from wholestep.model.facts import NOTHING_KNOWN
from wholestep.model.forward import Forward
from wholestep.model.terms import Mean, accumulate, ratio
from wholestep.tree import Tensor, Tree

OWN = "="  # before a name: what a `get_metrics_result` of the model's own says


class EpochSums:
    """How the sums of one forward function become a loss, an epoch and a report.

    The sums of an epoch are two arrays, high and low parts of shape (2, terms + 1): values and weights of every term,
    and last of what has no weight of its own (regularisation and `add_loss`), for which rows stand in.
    """

    def __init__(self, forward: Forward):
        self.forward = forward
        self.terms = forward.facts.terms

    def empty(self) -> tuple[np.ndarray, np.ndarray] | tuple[()]:
        """Return the running sums of an epoch that has not begun; nothing, if the terms are not known yet."""
        zeros = np.zeros((2, len(self.terms) + 1), keras.config.floatx())
        return () if self.forward.facts is NOTHING_KNOWN else (zeros, zeros)

    def fitting(self, engine: Engine, sums: tuple) -> tuple:
        """Return these sums, or empty ones on the device if they are of other terms."""
        empty = self.empty()
        return sums if [s.shape for s in sums] == [e.shape for e in empty] else engine.place(empty)

    def loss(self, sums: dict, once: Tensor, weights: dict | None = None) -> Tensor:
        """Return sum_k c_k * value_k / weight_k + once; the weights are the sums' own unless given."""
        loss = once
        for k, (value, weight) in sums.items():
            fact = self.terms[k]
            if fact.counts:
                mean = value if fact.kind is not Mean else value / (weight if weights is None else weights[k])
                loss = loss + fact.coefficient * mean
        return loss

    def add(self, epoch: tuple[Tensor, Tensor], sums: dict, once: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """Add an update's sums to the epoch's: means by their weights, the rest by the number of rows."""
        rows = ops.cast(count, keras.config.floatx())
        kinds = {k: fact.kind for k, fact in self.terms.items()}
        pairs = [sums[k] if kind is Mean else (rows * sums[k][0], rows) for k, kind in kinds.items()]
        pairs.append((rows * once, rows))
        return accumulate(epoch, ops.stack([ops.stack(part) for part in zip(*pairs, strict=True)]))

    def logs(self, epoch: tuple[Tensor, Tensor], metrics: list, captured: Sequence[Tensor] = ()) -> dict[str, Tensor]:
        """Return the numbers of an epoch so far: the loss, the Keras metrics, each named term, and the model's own."""
        means = ratio(*epoch)
        counted = [fact.coefficient * means[i] for i, fact in enumerate(self.terms.values()) if fact.counts]
        named = {k: means[i] for i, k in enumerate(self.terms) if k}
        numbers = {"loss": sum(counted, means[len(self.terms)])} | self.forward.results(metrics, captured) | named
        own = self.forward.own_results(metrics, numbers, captured)
        return numbers | {OWN + name: value for name, value in own.items()}


def first_logs(
    forward: Forward,
    params: list,
    buffers: list,
    metrics: list,
    captured: list,
    batch: Tree,
    row_weights: Tensor | None,
) -> dict[str, Tensor]:
    """Call all that is the user's once, while notes are taken: the objective, the regularisers, the metrics' results.

    Returns:
        The numbers of an epoch, whose values mean nothing.
    """
    outcome = forward.sums(params, buffers, metrics, captured, batch, row_weights)
    known = forward.so_far()
    if known.has_penalty:
        known.penalty(params, captured)
    sums = EpochSums(known)
    return sums.logs(tuple(map(ops.convert_to_tensor, sums.empty())), outcome.metrics, captured)


def names_of(engine: Engine, forward: Forward) -> list[str]:
    """Return what losses and metrics are called in the numbers of an epoch, as far as the objective need not say."""
    names = list(loss_trackers(forward.model))

    def note(metrics: list) -> dict[str, Tensor]:
        numbers = forward.results(metrics)
        names.extend([*numbers, *forward.own_results(metrics, {})])
        return numbers

    engine.shapes(note, engine.read_metrics(forward.variables))
    return names


def shown(numbers: dict[str, Tensor | float]) -> dict[str, Tensor | float]:
    """Return of an epoch's numbers what a user sees: the model's own results if it makes any, else all."""
    own = {name.removeprefix(OWN): value for name, value in numbers.items() if name.startswith(OWN)}
    return own or numbers


def fresh(model: keras.Model, numbers: dict[str, Any]) -> dict[str, Any]:
    """Return an epoch's numbers as `keras.Model.fit` does, where Keras' metrics hold theirs already."""
    logs = shown(numbers)
    own = own_results(model) if logs is not numbers else {}
    # Read again, as Keras does: it may look at what is no part of the program, such as the learning rate.
    read = {name: np.asarray(value).copy() for name, value in own.items()}
    same = read.keys() == logs.keys()
    return {name: value if value.ndim else float(value) for name, value in read.items()} if same else logs
