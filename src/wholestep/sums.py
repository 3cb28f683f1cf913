"""The sums of an update and of an epoch: what was minimised is what is reported. Nothing averages averages."""

import itertools
import math
from collections.abc import Sequence

import keras
import numpy as np
from keras import ops

from wholestep.model.forward import Forward
from wholestep.model.terms import Mean, accumulate, ratio
from wholestep.tree import Tensor

OWN = "="  # before a name: what a `get_metrics_result` of the model's own says


class EpochSums:
    """How the sums of one forward function become a loss, an epoch and a report.

    The sums of an epoch are two arrays, high and low parts of shape (2, terms + 1): values and weights of every term,
    and last of what has no weight of its own (regularisation and `add_loss`), for which rows stand in.
    """

    def __init__(self, forward: Forward):
        self.forward = forward
        self.layout = ReportLayout()

    def empty(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the running sums of an epoch that has not begun. Needs the facts of a trace."""
        zeros = np.zeros((2, len(self.forward.facts) + 1), keras.config.floatx())
        return zeros, zeros

    def loss(self, sums: dict, once: Tensor, weights: dict | None = None) -> Tensor:
        """Return sum_k c_k * value_k / weight_k + once; the weights are the sums' own unless given."""
        loss = once
        for k, (value, weight) in sums.items():
            fact = self.forward.facts[k]
            if fact.counts:
                mean = value if fact.kind is not Mean else value / (weight if weights is None else weights[k])
                loss = loss + fact.coefficient * mean
        return loss

    def add(self, epoch: tuple[Tensor, Tensor], sums: dict, once: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """Add an update's sums to the epoch's: means by their weights, the rest by the number of rows."""
        rows = ops.cast(count, keras.config.floatx())
        kinds = {k: fact.kind for k, fact in self.forward.facts.items()}
        pairs = [sums[k] if kind is Mean else (rows * sums[k][0], rows) for k, kind in kinds.items()]
        pairs.append((rows * once, rows))
        return accumulate(epoch, ops.stack([ops.stack(part) for part in zip(*pairs, strict=True)]))

    def logs(self, epoch: tuple[Tensor, Tensor], metrics: list, captured: Sequence[Tensor] = ()) -> dict[str, Tensor]:
        """Return the numbers of an epoch so far: the loss, the Keras metrics, each named term, and the model's own."""
        facts = self.forward.facts
        means = ratio(*epoch)
        counted = [fact.coefficient * means[i] for i, fact in enumerate(facts.values()) if fact.counts]
        named = {k: means[i] for i, k in enumerate(facts) if k}
        numbers = {"loss": sum(counted, means[len(facts)])} | self.forward.results(metrics, captured) | named
        own = self.forward.own_results(metrics, numbers, captured)
        return numbers | {OWN + name: value for name, value in own.items()}


def shown(numbers: dict[str, Tensor | float]) -> dict[str, Tensor | float]:
    """Return of an epoch's numbers what a user sees: the model's own results if it makes any, else all."""
    own = {name.removeprefix(OWN): value for name, value in numbers.items() if name.startswith(OWN)}
    return own or numbers


class ReportLayout:
    """Where each name of the logs lies in a report. Valid once an update has been traced."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._places: list[tuple[str, int, int, tuple[int, ...]]] = []  # the name, from where to where, the shape

    def pack(self, logs: dict[str, Tensor]) -> Tensor:
        """Return the logs as one vector."""
        self.shapes = {name: tuple(value.shape) for name, value in logs.items()}
        ends = [0, *itertools.accumulate(map(math.prod, self.shapes.values()))]
        self._places = list(zip(self.shapes, ends, ends[1:], self.shapes.values(), strict=False))
        return ops.concatenate(
            [ops.reshape(ops.cast(v, next(iter(logs.values())).dtype), (-1,)) for v in logs.values()]
        )

    def unpack(self, report: np.ndarray) -> dict[str, Tensor]:
        """Return the logs that a vector holds: floats, and arrays where a metric has several values."""
        return {
            name: report[start:stop].reshape(shape) if shape else float(report[start])
            for name, start, stop, shape in self._places
        }
