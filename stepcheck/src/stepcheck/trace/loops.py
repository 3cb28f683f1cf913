"""The loops of a script: the models that each trains, with their records, and the losses that it calls."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import wraps
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from stepcheck.trace.log import Called, Line, Log
from stepcheck.tree import Tree

_LONGER = 5.0  # seconds that a loop is watched beyond its updates, until it has gone twice over its data
_WARM_UP = 3  # updates outside of all loops: fewer compile a step, or try it
_FEW = 30  # forward passes before the first update of a loop
_MOST_UPDATES, _MOST_BYTES = 1000, 2**28  # of such a loop, and of its inputs


class LossCall(NamedTuple):
    """A call of a function of the user's that gets the model's outputs: the function, its arguments, their places."""

    function: Callable
    given: dict[int | str, Any]
    outputs: int | str

    def labels(self) -> int | str | None:
        """Return the place of the only argument that has rows; None if there is no such one."""
        places = [place for place, value in self.given.items() if len(getattr(value, "shape", None) or ())]
        return places[0] if len(places) == 1 else None

    def of(self, labels: int | str) -> Callable:
        """Return the function of labels and outputs, with all other arguments as they are here."""
        given = {place: value for place, value in self.given.items() if place != labels}

        @wraps(self.function)
        def loss(y_true: Any, y_pred: Any) -> Any:
            every = {**given, labels: y_true, self.outputs: y_pred}
            places = sorted(place for place in every if isinstance(place, int))
            named = {str(k): v for k, v in every.items() if not isinstance(k, int)}
            return self.function(*(every[i] for i in places), **named)

        return loss


@dataclass
class Watched:
    """A model that the script calls, not as a part of another, and its record in one loop.

    Attributes:
        before: its weights when the loop begins; empty if they are not known.
        like: the nest of its first call's inputs, with None for leaves.
        logs: its records in all loops.
    """

    model: Any
    log: Log
    before: list[np.ndarray]
    like: Tree = None
    logs: list[Log] = field(default_factory=list)
    _called: list[Called] = field(default_factory=list)
    _num_moves: int = 0
    _num_rows: int = 0
    _num_bytes: int = 0
    _rows: set[int] = field(default_factory=set)

    @property
    def num_updates(self) -> int:
        """The number of its updates; without an optimizer of Keras, of the moves of its weights."""
        for called in islice(self.log.called, len(self._called), None):
            last = self._called[-1] if self._called else called
            steps = [log.applied[-1].order for log in self.logs if log.applied]
            self._num_moves += not any(last.order < order for order in steps) and _has_moved(last, called)
            self._called.append(called)
            if called.differentiated is not False and called.inputs and called.inputs[0].ndim:
                self._num_rows += len(called.inputs[0])
                self._num_bytes += sum(leaf.nbytes for leaf in called.inputs)
                self._rows |= {hash(row.tobytes()) for row in called.inputs[0]}
        return self.log.num_updates or self._num_moves

    def has_gone_twice(self) -> bool:
        """Whether its batches have gone twice over their rows, or hold too much for that."""
        is_long = self.num_updates >= _MOST_UPDATES or self._num_bytes > _MOST_BYTES
        return is_long or self._num_rows > 2 * len(self._rows)


def _has_moved(one: Called, two: Called) -> bool:
    """Whether the weights have moved between two forward passes of a gradient, or this is not known."""
    if one.differentiated is False or two.differentiated is False:
        return False
    return not (one.is_whole and two.is_whole) or any(a is not b for a, b in zip(one.params, two.params, strict=False))


class Use(NamedTuple):
    """A method of a model that was called, and where."""

    name: str
    line: Line | None


@dataclass
class Asked:
    """A loss that the script calls, one for each configuration, and its labels.

    `is_own`: whether it is a function of the script, and not of Keras.
    `calls` has (the place in the order of all records, labels, sample weights or None).
    """

    loss: Any
    calls: list[tuple[int, np.ndarray, np.ndarray | None]] = field(default_factory=list)
    is_own: bool = False


@dataclass
class Loop:
    """The record of one loop of a script, or of one `fit`.

    Attributes:
        lines: the calls that lead to it, and its own line last; none for lines outside of all loops.
        watched: the models that are called in it, by their ids, in the order of their first calls.
        losses: the losses that are called, Keras' and the script's, by name and configuration.
        beside: the script's other tensors by name, for example sample weights in its loss.
        fitted: the arguments of `fit`, by the id of the model: x, y, sample and class weights.
        is_beside_fit: whether its models are trained by `fit` elsewhere.
        is_closed: whether its records were closed before its end.
    """

    scout: Any
    lines: tuple[Line, ...] = ()
    is_fit: bool = False
    watched: dict[int, Watched] = field(default_factory=dict)
    losses: dict[str, Asked] = field(default_factory=dict)
    beside: dict[str, Asked] = field(default_factory=dict)
    fitted: dict[int, tuple] = field(default_factory=dict)
    is_beside_fit: bool = False
    is_closed: bool = False
    until: float = float("inf")

    @property
    def trained(self) -> list[Watched]:
        """The models with updates."""
        return [each for each in self.watched.values() if each.log.num_updates] or [
            each for each in self.watched.values() if each.num_updates
        ]

    @property
    def place(self) -> str:
        """Where it is, in words."""
        return f"trained {'by the `fit` ' * self.is_fit}at {self.lines[-1]}" if self.lines else "trained"

    def is_warm_up(self, loops: list["Loop"]) -> bool:
        """Whether its few updates are outside of all loops, and others of these train all of its models."""
        known = {id(each.model) for loop in loops if loop is not self for each in loop.trained}
        own = self.trained
        is_short = all(each.num_updates < _WARM_UP and id(each.model) in known for each in own)
        return bool(own) and not self.lines and not self.is_fit and is_short

    def may_begin(self) -> bool:
        """Whether its first updates may follow: it has a forward pass of a gradient, or few others so far."""
        called = [one for each in self.watched.values() for one in each.log.called]
        return len(called) < _FEW or any(one.differentiated is not False for one in called)

    def is_seen(self, least: int, *, is_exact: bool) -> bool:
        """Whether enough updates were seen, of each model or for some seconds; then its records are closed."""
        trained = [each for each in self.trained if each.log.is_open]
        ready = [each.num_updates >= least for each in trained]
        if any(ready):
            self.until = min(self.until, time.monotonic() + _LONGER)
        is_enough = all(ready) and (is_exact or any(each.has_gone_twice() for each in trained))
        if is_enough or time.monotonic() > self.until:
            self.is_closed, self.until = True, float("inf")
            for each in self.watched.values():
                each.log.is_open = False
        return not any(each.log.is_open for each in trained)


def spread(other: Loop, loops: list[Loop]) -> None:
    """Add the records of a loop without updates to the loops before its forward passes."""
    begins = [min(order for each in loop.trained for order in each.log.orders()) for loop in loops]

    def before(order: int) -> Loop:
        return loops[max((i for i, begin in enumerate(begins) if begin < order), default=0)]

    for key, each in other.watched.items():
        for called in each.log.called:
            loop = before(called.order)
            own = loop.watched.setdefault(key, Watched(each.model, Log(each.log.room), each.before, each.like))
            if any(one.log.is_open for one in loop.trained):
                own.log.called.append(called)
            else:
                own.log.num_late += 1
        for loop in loops:
            if key in loop.watched:
                log = loop.watched[key].log
                log.called.sort(key=lambda event: event.order)
                log.has_evaluated |= each.log.has_evaluated
                log.notes |= each.log.notes
                log.unseen |= each.log.unseen
    for name, asked in other.losses.items():
        for order in [call[0] for call in asked.calls] or [0]:
            before(order).losses.setdefault(name, Asked(asked.loss, is_own=asked.is_own))
        for call in asked.calls:
            before(call[0]).losses[name].calls.append(call)


def outputs_beside(loop: Loop, log: Log) -> Iterator[tuple[str, dict[int, np.ndarray]]]:
    """Yield (name, by the order of a pass the outputs of another model nearest before or after it in its update)."""
    own = [called.order for called in log.called if called.derivatives]
    steps = sorted(step.order for step in log.applied)
    for each in loop.watched.values():
        others = {c.order: c.outputs[0] for c in each.log.called if len(c.outputs) == 1 and c.order not in own}
        orders = sorted(others)
        for side, where in enumerate(("before", "after")):
            places = [(order, int(np.searchsorted(orders, order)) - 1 + side) for order in own]
            pairs = [(order, orders[place]) for order, place in places if 0 <= place < len(orders)]
            pairs = [pair for pair in pairs if len({*np.searchsorted(steps, pair).tolist()}) == 1]
            yield f"the outputs of {each.model.name!r} {where} it", {order: others[other] for order, other in pairs}
