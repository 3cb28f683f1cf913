"""The sums of an update and of an epoch: what was minimised is what is reported. Nothing averages averages."""

from typing import Any

import keras
import numpy as np
from keras import ops

from wholestep.forward import Forward
from wholestep.mean import Mean, accumulate, ratio

Tensor = Any

_ONCE = "+"  # what has no weight of its own: regularisation and `add_loss`; rows stand in for it over an epoch


class Tally:
    """How the sums of one forward function become a loss, an epoch and a report."""

    def __init__(self, forward: Forward):
        self.forward = forward
        self.layout = Layout()

    def empty(self) -> dict:
        """Return the running sums of an epoch that has not begun. Needs the facts of a trace."""
        zero = np.zeros((), keras.config.floatx())
        return dict.fromkeys([*self.forward.facts, _ONCE], ((zero, zero), (zero, zero)))

    def loss(self, sums: dict, once: Tensor, weights: dict | None = None) -> Tensor:
        """Return sum_k c_k * value_k / weight_k + once; the weights are the sums' own unless given."""
        loss = once
        for k, (value, weight) in sums.items():
            fact = self.forward.facts[k]
            if fact.counts:
                mean = value if fact.kind is not Mean else value / (weight if weights is None else weights[k])
                loss = loss + fact.coefficient * mean
        return loss

    def add(self, epoch: dict, sums: dict, once: Tensor, count: Tensor) -> dict:
        """Add an update's sums to the epoch's: means by their weights, the rest by the number of rows."""
        rows = ops.cast(count, keras.config.floatx())
        facts = self.forward.facts
        new = {k: (v, w) if facts[k].kind is Mean else (rows * v, rows) for k, (v, w) in sums.items()}
        new[_ONCE] = (rows * once, rows)
        return {k: (accumulate(epoch[k][0], v), accumulate(epoch[k][1], w)) for k, (v, w) in new.items()}

    def logs(self, sums: dict, metrics: list) -> dict[str, Tensor]:
        """Return what is reported of an epoch so far: the loss, the Keras metrics, each named term."""
        facts = self.forward.facts
        means = {k: ratio(*sums[k]) for k in facts}
        counted = [fact.coefficient * means[k] for k, fact in facts.items() if fact.counts]
        named = {k: mean for k, mean in means.items() if k}
        return {"loss": sum(counted, ratio(*sums[_ONCE]))} | self.forward.results(metrics) | named


class Layout:
    """Where each name of the logs lies in a report. Valid once an update has been traced."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}

    def pack(self, logs: dict[str, Tensor]) -> Tensor:
        """Return the logs as one vector."""
        self.shapes = {name: tuple(value.shape) for name, value in logs.items()}
        return ops.concatenate(
            [ops.reshape(ops.cast(v, next(iter(logs.values())).dtype), (-1,)) for v in logs.values()]
        )

    def unpack(self, report: np.ndarray) -> dict[str, Any]:
        """Return the logs that a vector holds: floats, and arrays where a metric has several values."""
        logs, start = {}, 0
        for name, shape in self.shapes.items():
            size = int(np.prod(shape, dtype=int))
            part = report[start : start + size]
            logs[name] = part.reshape(shape) if shape else float(part[0])
            start += size
        return logs
