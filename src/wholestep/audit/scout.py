"""The watch of an unmodified script: its models, its losses, and the values of its names."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial, wraps
from inspect import signature
from typing import Any

import keras
import numpy as np

from wholestep import tree
from wholestep.audit.frozen import FrozenNumbers
from wholestep.audit.hooks import Hooks, replaced
from wholestep.audit.log import Log
from wholestep.audit.replay import values
from wholestep.audit.source import call_of_loss, line_of_user, takes_gradients
from wholestep.audit.stop import Limit
from wholestep.audit.surroundings import Surroundings, names_of_user, tape_elsewhere
from wholestep.audit.watch import room
from wholestep.engines import listener
from wholestep.tree import Tree

_FITS = ("fit", "train_on_batch")
_GIVEN = "x", "y", "sample_weight", "class_weight"
_PATIENCE = 60.0  # seconds that a `fit` runs on after the limit, if a loop of the script's own may follow
_NO_LOSSES = ("get", "serialize", "deserialize")


@dataclass
class Watched:
    """A model that the script calls, not as a part of another, and its record.

    `like` is the nest of its first call's inputs, with None for leaves.
    """

    model: keras.Model
    log: Log
    before: list[np.ndarray]
    like: Tree = None


@dataclass
class Asked:
    """A loss that the script calls, one for each configuration, and its labels.

    `is_own`: whether it is a function of the script, and not of Keras.
    `calls` has (the place in the order of all records, labels, sample weights or None).
    """

    loss: Any
    calls: list[tuple[int, np.ndarray, np.ndarray | None]] = field(default_factory=list)
    is_own: bool = False


class Scout:
    """Watches all models and Keras losses for the time of a `with`.

    Args:
        num_updates: the script is ended after this many updates of one model.

    Attributes:
        watched: the models, in the order of their first calls.
        losses: the losses that are called, Keras' and the script's, by name and configuration.
        fitted: the arguments of `fit`, by the id of the model: x, y, sample and class weights.
        cut: the sources of a gradient that was taken, and there was none, by their ids.
        num_read: how often a metric was read, by its id.
        limit: the end of the script, and the audits that it makes itself.
        is_by_hand: whether updates are made outside of `fit` too; then the records have no others.
        has_gradients: whether the limit has come, and the script's files take gradients themselves.
        elsewhere: in words, that the loop's gradients are taken by another engine than the models'.
    """

    def __init__(self, num_updates: int):
        self.limit = Limit(num_updates, lambda: [each.log for each in self.watched.values()], waits=self._waits)
        self.watched: dict[int, Watched] = {}
        self.losses: dict[str, Asked] = {}
        self._losses_aside: dict[str, Asked] = {}
        self._is_fitting, self._until = False, 0.0
        self._were_fitted: set[int] = set()
        self.is_by_hand = self.has_gradients = False
        self.fitted: dict[int, tuple] = {}
        self.cut: dict[int, Any] = {}
        self.num_read: Counter[int] = Counter()
        self.around, self.frozen = Surroundings(), FrozenNumbers()
        self._here = threading.local()
        self._hooks = ExitStack()
        self.elsewhere = ""

    @contextmanager
    def on(self) -> Iterator[None]:
        """Watch all models and losses inside; afterwards every attribute is restored."""
        own = listener()
        self._listener = self.limit.listener(own)
        layer, model, loss = keras.layers.Layer, keras.Model, keras.losses.Loss
        with ExitStack() as stack:
            stack.enter_context(own.listening(self._asked))
            stack.enter_context(self._hooks)
            for name in ("__call__", "stateless_call"):
                stack.enter_context(replaced(layer, name, self._called(getattr(layer, name))))
            for name in _FITS:
                stack.enter_context(replaced(model, name, self._fitting(getattr(model, name))))
            stack.enter_context(replaced(loss, "__call__", self._lost(loss.__call__)))
            for metric in {value for value in vars(keras.metrics).values() if isinstance(value, type)}:
                if "result" in vars(metric):
                    stack.enter_context(replaced(metric, "result", self._read(vars(metric)["result"])))
            for name in dir(keras.losses):
                if name[0].islower() and name not in _NO_LOSSES and callable(getattr(keras.losses, name)):
                    stack.enter_context(replaced(keras.losses, name, self._lost_by(getattr(keras.losses, name))))
            yield

    def settle(self) -> None:
        """Wait for pending records, and choose the loop; a step that was ended halfway has fewer."""
        self._listener.settle()
        every = list(self.watched.values())
        self.is_by_hand = bool(self.fitted) and any(each.log.is_trained for each in every)
        if self.is_by_hand:
            self.fitted.clear()
            for each in every:
                each.before = next((c.params for c in each.log.called if c.is_whole), each.before)
            return
        for each in every:
            each.log.join()
        for key, asked in self._losses_aside.items():
            self.losses.setdefault(key, Asked(asked.loss, is_own=asked.is_own)).calls += asked.calls

    def _waits(self) -> bool:
        """Whether a `fit` at the limit runs on, as the script may take gradients after it."""
        if not self._until:
            self._until, self.has_gradients = time.monotonic() + _PATIENCE, takes_gradients()
        return self._is_fitting and self.has_gradients and time.monotonic() < self._until

    @contextmanager
    def _apart(self, model: keras.Model) -> Iterator[None]:
        """Inside of a model's `fit`, keep its records apart from those of the loop around it."""
        if self._is_fitting:
            yield
            return
        if id(model) in self._were_fitted and self._until:  # its `fit` is the loop
            self._until = time.monotonic()
        self._were_fitted.add(id(model))
        self._turn()
        try:
            yield
        finally:
            self._turn()

    def _turn(self) -> None:
        self._listener.settle()
        self._is_fitting = not self._is_fitting
        self.losses, self._losses_aside = self._losses_aside, self.losses
        for each in self.watched.values():
            each.log.turn()

    def _depth(self) -> int:
        """Return the number of nested layer calls in this thread."""
        return int(vars(self._here).get("depth", 0))

    def _called(self, call: Callable) -> Callable:
        """Return a layer's call, which hooks models that are not a part of another."""

        @wraps(call)
        def called(layer: Any, *arguments: Any, **others: Any) -> Any:
            depth = self._depth()
            leaves = tree.leaves((arguments, others)) if depth == 0 and isinstance(layer, keras.Model) else []
            if leaves and not any(isinstance(leaf, keras.KerasTensor) for leaf in leaves):
                self._meet(layer, arguments[0] if arguments else None)
                self.frozen.look()
            self._here.depth = depth + 1
            try:
                result = call(layer, *arguments, **others)
            finally:
                self._here.depth = depth
            if leaves and id(layer) in self.watched:
                self._look_ahead()
            return result

        return self._listener.unhooked(called)

    def _meet(self, model: keras.Model, inputs: Tree = None) -> None:
        """Hook a model at its first call; collect the script's values during the first updates."""
        if id(model) not in self.watched:
            like = keras.tree.map_structure(lambda _: None, inputs)
            now = values(model)  # None in a trace
            watched = Watched(model, Log(room(model)), now.params if now else [], like)
            watched.log.begin(watched.before)
            if self._is_fitting:
                watched.log.turn()
            self.watched[id(model)] = watched
            self._hooks.enter_context(Hooks(model, self._listener, watched.log).on())
        if len(self.watched[id(model)].log.applied) < 3:
            self.around.look()
        if not self.watched[id(model)].log.called:
            self.elsewhere = self.elsewhere or tape_elsewhere(model)

    def _look_ahead(self) -> None:
        """Note the function of the script that is about to get the model's outputs, and the labels."""
        call = call_of_loss(line_of_user(self._listener.stack()), names_of_user())
        if call is not None and (place := call.labels()) is not None:
            loss = call.of(place)
            self._note(loss, f"{loss.__name__} of {call.function.__code__}", call.given[place], None, is_own=True)

    def _fitting(self, fit: Callable) -> Callable:
        @wraps(fit)
        def fitting(model: Any, *arguments: Any, **others: Any) -> Any:
            if self._depth() == 0 and id(model) not in self.watched:
                given = dict(zip(("x", "y"), arguments, strict=False)) | others
                if fit.__name__ == "fit":
                    self.fitted[id(model)] = tuple(given.get(name) for name in _GIVEN)
                self._meet(model)
                return getattr(model, fit.__name__)(*arguments, **others)  # which the hooks have on the instance now
            with self._apart(model) if fit.__name__ == "fit" else nullcontext():
                return fit(model, *arguments, **others)

        return fitting

    def _asked(self, shape: tuple[int, ...], missing: list) -> None:
        self.cut |= {id(source): source for source in missing}

    def _read(self, result: Callable) -> Callable:
        """Return a metric's `result`, which counts its calls."""

        @wraps(result)
        def read(metric: Any) -> Any:
            self.num_read[id(metric)] += 1
            return result(metric)

        return self._listener.unhooked(read)

    def _lost(self, call: Callable) -> Callable:
        """Return a loss's call, which records labels and weights."""

        @wraps(call)
        def lost(loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            self._note(loss, f"{type(loss).__name__} {loss.get_config()}", y_true, sample_weight)
            return call(loss, y_true, y_pred, sample_weight)

        return self._listener.unhooked(lost)

    def _lost_by(self, function: Callable) -> Callable:
        @wraps(function)
        def lost(y_true: Any, y_pred: Any, *arguments: Any, **others: Any) -> Any:
            set_to = dict(zip([*signature(function).parameters][2:], arguments, strict=False)) | others
            loss = partial(function, **set_to) if set_to else function
            self._note(loss, f"{function.__name__} {set_to}", y_true, None)
            return function(y_true, y_pred, *arguments, **others)

        return self._listener.unhooked(lost)

    def _note(self, loss: Any, key: str, y_true: Any, weight: Any, *, is_own: bool = False) -> None:
        if not self.watched or self._depth():
            return
        asked = self.losses.setdefault(key, Asked(loss, is_own=is_own))
        given = [y_true] if weight is None else [y_true, weight]
        if any(isinstance(each, keras.KerasTensor) or not hasattr(each, "shape") for each in given):
            return
        if not self._listener.blind(given):
            self._listener.tell(partial(self._told, asked), given)

    def _told(self, asked: Asked, order: int, numbers: list[np.ndarray]) -> None:
        if any(each.log.is_open and each.log.has_room for each in self.watched.values()):
            y, weight = np.array(numbers[0]), np.array(numbers[1]) if len(numbers) > 1 else None
            asked.calls.append((order, y, weight))
