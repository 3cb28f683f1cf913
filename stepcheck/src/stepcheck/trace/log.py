"""The record of a loop, in order: forward passes and optimizer steps with their
numbers.
"""

from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from stepcheck.faults import Fault, Stage
from stepcheck.steps import StepRule
from stepcheck.trace.digests import digests, in_rows
from stepcheck.trace.measure import in_part, once, same
from stepcheck.values import Line, Reason, Unjudged

_MOST_BYTES = 512 << 20  # of inputs that are kept after the room is used up
# updates that are kept of a small model, and sizes of batches beyond the room
# of a large one
MOST, MOST_SIZES = (
    40,
    3,
)
_ROOM, _ROOM_BY_SIZE = 100_000_000, 4  # bytes, and times the size of a model
STEPPED: ContextVar[Callable[["Log"], None] | None] = ContextVar(
    "what is told of each event", default=None
)
_EVENTS = "called", "applied", "scaled", "others"
Flags = list[
    tuple[Any, bool]
]  # layers, then variables, and whether each is set to be trained


SlotsOf = tuple[tuple[tuple[int, str], ...], tuple[tuple[int, str], ...]]


def joined(one: SlotsOf, two: SlotsOf) -> SlotsOf:
    """Return the places of the slots of two optimizers, one after the other."""
    return one[0] + two[0], one[1] + two[1]


def clips_of(optimizer: Any) -> tuple[float, float, float]:
    """Return the bounds of an optimizer: of each gradient's norm, of the norm of all,
    of each number; 0 for none.
    """
    norm, whole, value = (
        getattr(optimizer, name, None)
        for name in ("clipnorm", "global_clipnorm", "clipvalue")
    )
    return float(norm or 0), float(whole or 0), float(value or 0)


@dataclass(frozen=True, eq=False)
class Called:
    """A forward pass: the leaves of its input and output, and all values of the model
    before it.

    Beyond the log's room only the inputs are kept.

    Attributes:
        differentiated: whether a gradient was taken; None if it is not known.
        derivatives: the gradients of the loop's losses by the output's leaves, in the
            order in which they were taken.
        setting: all else that a port needs to run it again.
        trained: which variables were set to be trained, as a port knows them again.
        is_training: whether it was called in training mode, and a gradient of it can be
            taken.
        mode: of each part of the model, whether it is in training mode; one for all
            where they agree.
        random: a digest of the random state before it, if it draws; of a run that is
            compared with another.
    """

    order: int
    inputs: list[np.ndarray]
    outputs: list[np.ndarray]
    params: list[np.ndarray]
    buffers: list[np.ndarray]
    differentiated: bool | None
    line: Line | None
    replica: int = 0
    derivatives: dict[int, list[np.ndarray]] = field(
        default_factory=dict, compare=False
    )
    setting: Any = field(default=None, compare=False)
    trained: tuple[int, ...] = ()
    is_training: bool = False
    mode: tuple[bool, ...] = ()
    random: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether its numbers were kept."""
        return bool(self.params)


@dataclass(frozen=True)
class Applied:
    """An optimizer step: the gradients handed over (by parameter; None for a missing
    one), values before and after.

    Large arrays are kept at the entries of `stepcheck.trace.measure.places`.

    Attributes:
        accumulates: the number of calls that the optimizer itself makes one update of;
            `num_calls`: calls before this.
        clips: the optimizer's bounds, of each gradient's norm, of the norm of all and
            of each number; 0 for none.
        built: the model's parameters that the optimizer has slots of, by index.
        lost: the parameters that were handed over with None for a gradient, by index.
        setting: all else that a port needs to make it again.
        trained: as of `Called`.
        outlines: of a run, of gradients and of weights after it, where their numbers
            are not kept.
        rules: of each parameter, the settings of its step; None where they are not
            known, or no step is made.
        slots_of: of each slot before, and after, its parameter by index, and its name
            in `stepcheck.steps.Slots`; "" for another one.
    """

    order: int
    optimizer: int
    grads: list[np.ndarray | None]
    params: list[np.ndarray]
    slots: list[np.ndarray]
    params_after: list[np.ndarray]
    slots_after: list[np.ndarray]
    learning_rate: float
    iterations: int
    line: Line | None
    replica: int = 0
    accumulates: int = 1
    num_calls: int = 0
    clips: tuple[float, float, float] = (0.0, 0.0, 0.0)
    built: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    kind: str = ""
    setting: Any = field(default=None, compare=False)
    trained: tuple[int, ...] = ()
    outlines: list[np.ndarray] = field(default_factory=list)
    rules: tuple[StepRule | None, ...] = ()
    slots_of: SlotsOf = ((), ())

    @property
    def is_whole(self) -> bool:
        """Whether its numbers were kept."""
        return bool(self.params_after)

    def emptied(self) -> "Applied":
        """Return the step without its numbers."""
        return replace(
            self, grads=[], params=[], slots=[], params_after=[], slots_after=[]
        )


@dataclass(frozen=True)
class Scaled:
    """A check of an optimizer that scales the loss: it skips the step if the gradients
    are not finite.

    `is_last`: gradients that the loop clips still have the scale, which is divided out
    after that. `scale`: 0 if it is not known.
    """

    order: int
    is_finite: bool
    replica: int = 0
    is_last: bool = True
    scale: float = 0.0


@dataclass(frozen=True)
class Other:
    """An optimizer step that moves no variable of the model."""

    order: int
    replica: int = 0


Event = Called | Applied | Scaled | Other


class Values(NamedTuple):
    """All values of a model."""

    params: list[np.ndarray]
    buffers: list[np.ndarray]


def room(num_weights: int) -> int:
    """Return the number of updates of a model that a log keeps with all numbers.

    40, or as many as fit in 100 MB or in four times the model's size: an update keeps
    the weights once.

    >>> room(4), room(25_000_000)
    (40, 4)
    """
    return int(np.clip(_ROOM // (4 * max(num_weights, 1)), _ROOM_BY_SIZE, MOST))


@dataclass
class Log:
    """The record of a loop.

    Args:
        room: of how many optimizer steps all numbers are kept; later only of the first
            on batches of a new size.

    Attributes:
        unjudged: code that ran and could not be recorded.
        has_fitted: whether the `fit` of this model, or of one around it, has cut the
            batches.
        flags: the trainable layers and variables of a forward pass, by the set of them.
        is_cut: whether it ends before the loop, for a reason in `unjudged`.
        fitted: `class_weight` and `sample_weight` of the model's first `fit`.
        is_stateless: whether an optimizer step sees only the variables that are passed
            to it.
        is_run: whether it is compared with another run: rows are kept as digests, large
            outputs and weights in part.
        is_shared: whether each replica's step has the gradient of all, as a process of
            several has.
        optimizers: the optimizers that made steps, by identity.
        stepped: is called after each event, with the log.
        lines: by fault, the line that makes it, where it is not that of the step or the
            pass.
    """

    room: int = MOST
    called: list[Called] = field(default_factory=list)
    applied: list[Applied] = field(default_factory=list)
    scaled: list[Scaled] = field(default_factory=list)
    others: list[Other] = field(default_factory=list)
    unjudged: list[Unjudged] = field(default_factory=list)
    has_fitted: bool = False
    is_open: bool = True
    is_cut: bool = False
    fitted: tuple[Any, Any] = (None, None)
    is_stateless: bool = False
    is_shared: bool = False
    is_run: bool = False
    flags: dict[tuple[int, ...], Flags] = field(default_factory=dict)
    optimizers: dict[int, Any] = field(default_factory=dict)
    stepped: Callable[["Log"], None] | None = field(default_factory=STEPPED.get)
    lines: dict[Fault, Line] = field(default_factory=dict)
    _last: dict[str, list[np.ndarray]] = field(default_factory=dict)
    _num_moved: int = 0
    # of passes: (replica, rows of the input)
    _sizes: set[tuple[int, tuple[int, ...]]] = field(default_factory=set)
    # of the inputs of forward passes of which no more is kept
    _num_bytes: int = 0

    @property
    def has_room(self) -> bool:
        """Whether numbers are still kept."""
        if self.room < MOST or self.is_run:
            return (len(self.applied) or self._num_moved) < self.room
        return len(self.applied) < self.room * max(
            len({replica for replica, _ in self._sizes}), 1
        )

    @property
    def num_updates(self) -> int:
        """The number of updates of all replicas; calls that the optimizer accumulates
        are one update.
        """
        counts = Counter(
            each.replica
            for each in self.applied
            if not (each.num_calls + 1) % each.accumulates
        )
        return min(counts.values(), default=0)

    @property
    def num_moves(self) -> int:
        """The number of updates; of a loop without an optimizer, how often its passes
        found moved weights.
        """
        return self.num_updates or (0 if self.applied else self._num_moved)

    def begin(self, params: list[np.ndarray]) -> None:
        """Keep the model's initial weights; they are not kept again until they move."""
        self._last["params"] = params

    def wants(self, inputs: list[np.ndarray], replica: int = 0) -> bool:
        """Whether the numbers of a forward pass on such inputs are kept: there is room,
        or their number is new.
        """
        sizes = {size for own, size in self._sizes if own == replica}
        return self.has_room or (
            0 < len(sizes) < MOST_SIZES and inputs[0].shape[:1] not in sizes
        )

    def wants_step(self, replica: int) -> bool:
        """Whether the numbers of an optimizer step are kept: there is room, or the pass
        before it is kept.
        """
        events: list[Called | Applied] = [
            *self.called[-2 * MOST :],
            *self.applied[-MOST:],
        ]
        own = [event for event in events if event.replica == replica]
        last = max(own, key=lambda event: event.order, default=None)
        return self.has_room or (isinstance(last, Called) and last.is_whole)

    def add(self, event: Event) -> None:
        """Keep an event, its arrays as copies; values that have not moved are kept
        once.
        """
        if not self.is_open:
            return
        if isinstance(event, Scaled):
            self.scaled.append(event)
        elif isinstance(event, Other):
            self.others.append(event)
        elif isinstance(event, Called):
            self._call(event)
        else:
            for values in (event.params, event.params_after):
                values[:] = self._once("params of steps", values)
            for values in (event.slots, event.slots_after):
                values[:] = self._once("slots", values)
            self.applied.append(event)
        if self.stepped is not None:
            self.stepped(self)

    def _call(self, event: Called) -> None:
        """Keep a forward pass."""
        if self.is_run:
            event.inputs[:] = digests(event.inputs)
            event.outputs[:] = map(in_rows, event.outputs)
            for values in (event.params, event.buffers):
                values[:] = in_part(values)
        event.params[:] = self._once("params", event.params)
        event.buffers[:] = self._once("buffers", event.buffers)
        self._sizes |= {
            (event.replica, leaf.shape[:1]) for leaf in event.inputs[:1]
        }
        outputs = event.outputs if self.is_run else []
        rest = [*([] if event.is_whole else event.inputs), *outputs]
        self._num_bytes += sum(leaf.nbytes for leaf in rest)
        self.called.append(event)
        if self._num_bytes > _MOST_BYTES:
            self.cut(Reason.CUT)

    def leave(
        self, reason: Reason, stage: Stage | None = None, told: str = ""
    ) -> None:
        """Note once that something is not judged."""
        left = Unjudged(reason, stage, told=told)
        if left not in self.unjudged:
            self.unjudged.append(left)

    def cut(self, reason: Reason) -> None:
        """Keep nothing more."""
        self.is_open, self.is_cut = False, True
        self.unjudged.append(Unjudged(reason, updates=self.num_updates))

    def fit(self, by_class: Any, weight: Any) -> None:
        """Note the arguments of `fit`; end where a later one has other weights of rows."""
        if not self.has_fitted:
            self.fitted = deepcopy(by_class), deepcopy(weight)
            self.has_fitted = True  # which the threads of replicas do not see
        elif not all(map(np.array_equal, (by_class, weight), self.fitted)):
            self.cut(Reason.OTHER_WEIGHTS)

    def differentiate(
        self, replica: int, i: int, output: np.ndarray, derivative: np.ndarray
    ) -> None:
        """Keep the derivative of a loss by the i-th output of the last forward pass
        that had this output.
        """
        passes = (
            each
            for each in reversed(self.called[-MOST:])
            if each.replica == replica and i < len(each.outputs)
        )
        output = in_rows(output) if self.is_run else output
        called = next(
            (each for each in passes if same(each.outputs[i], output)), None
        )
        if self.is_open and called is not None:
            self.derive(called, i, derivative)

    def derive(self, called: Called, i: int, derivative: np.ndarray) -> None:
        """Keep the derivative of a loss by the i-th output of a pass."""
        kept = in_rows(derivative) if self.is_run else derivative
        called.derivatives.setdefault(i, []).append(np.array(kept))

    def _once(self, kind: str, new: list[np.ndarray]) -> list[np.ndarray]:
        if not new:
            return new
        old = self._last.get(kind, [])
        kept = once(new, old)
        self._num_moved += kind == "params" and any(
            a is not b for a, b in zip(kept, old, strict=False)
        )
        self._last[kind] = kept
        return kept

    def orders(self) -> list[int]:
        """Return the places of its forward passes and optimizer steps in the order of
        all records.
        """
        return [
            *(each.order for each in self.called),
            *(each.order for each in self.applied),
        ]

    def since(self, order: int) -> "Log":
        """Return the events after this one."""
        late = replace(self, unjudged=[*self.unjudged])
        for name in _EVENTS:
            setattr(
                late,
                name,
                [event for event in getattr(self, name) if event.order > order],
            )
        return late

    def close(self) -> None:
        """Keep nothing more, and sort the events in the order in which they ran."""
        self.is_open = False
        for name in _EVENTS:
            getattr(self, name).sort(key=lambda event: event.order)
