"""The watch of an unmodified script: its loops, their models and losses, and the values of its names."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial, wraps
from inspect import signature
from itertools import islice
from typing import Any

import keras
import numpy as np

from stepcheck import tree
from stepcheck.command.stop import Limit
from stepcheck.keras.hooks import Hooks, replaced, room
from stepcheck.keras.listener import listener
from stepcheck.keras.replay import values
from stepcheck.keras.surroundings import Surroundings, names_of_user, of_batch, tape_elsewhere
from stepcheck.trace.log import Log
from stepcheck.trace.loops import Asked, Loop, Use, Watched, spread
from stepcheck.trace.measure import all_same
from stepcheck.tree import Tree
from stepcheck.user_code.source import (
    TRAINING,
    USING,
    Line,
    call_of_loss,
    calls_later,
    is_in_fit,
    line_of_user,
    place_of_loop,
)

_FITS = ("fit", "train_on_batch")
_GIVEN = "x", "y", "sample_weight", "class_weight"
_PATIENCE = 30.0  # seconds that a script runs on after a loop was seen, if another may follow
_LONGER = 5.0  # seconds that it runs on where a use of the model may follow
_OF_ANY_LOSS = vars(keras.losses.Loss("any"))
_PLAIN = int, float, str, list, tuple, dict, np.ndarray
_NO_LOSSES = ("get", "serialize", "deserialize")


class Scout:
    """Watches all models and Keras losses for the time of a `with`.

    Args:
        num_updates: a loop was seen after this many updates of each of its models; None for 30, or as many as are cheap
            until the data were seen twice.
        imported: the names of modules that are not the script's, though they may not be of a library.

    Attributes:
        cut: the sources of a gradient that was taken, and there was none, by their ids.
        metrics: the metrics that were read outside of `fit`, by their ids.
        resets: the metrics that were reset after updates of a loop, by their ids.
        num_warm_up: the updates outside of all loops, of models that a loop trains.
        outdated: by the id of a model, the use that was made of it without its trained weights.
        limit: the end of the script, and the audits that it makes itself.
        is_cut_short: whether the script was ended although other loops may follow.
        elsewhere: in words, that the loop's gradients are taken by another engine than the models'.
    """

    framework = "keras"

    def __init__(self, num_updates: int | None, imported: frozenset[str] = frozenset()):
        self._imported = imported
        self._least, self._is_exact = num_updates or 30, num_updates is not None
        self.limit = Limit(self._least, self._is_enough)
        self.loops: dict[tuple, Loop] = {}
        self._logs: dict[int, list[Log]] = {}
        self._hooked: set[int] = set()
        self._num_seen, self._since = 0, 0.0
        self.is_cut_short = False
        self.cut: dict[int, Any] = {}
        self.num_read: Counter[int] = Counter()
        self._kinds: dict[int, tuple[Any, str]] = {}  # losses that were called, kept, so that no two have one id
        self.metrics: dict[int, keras.metrics.Metric] = {}
        self.resets = set[int]()
        self.num_warm_up = 0
        self.outdated: dict[int, Use] = {}
        self.around = Surroundings()
        self._here = threading.local()
        self._over: Loop | None = None
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
            for kind in (each for each in model.__subclasses__() if "call" in vars(each)):
                if kind.__module__.startswith("keras."):  # those that a script calls by `model.call`
                    stack.enter_context(replaced(kind, "call", self._called(vars(kind)["call"])))
            for name in _FITS:
                stack.enter_context(replaced(model, name, self._fitting(getattr(model, name))))
            for name in USING:
                stack.enter_context(replaced(model, name, self._using(getattr(model, name))))
            stack.enter_context(replaced(loss, "__call__", self._noted(loss.__call__, self._lost)))
            for metric in {value for value in vars(keras.metrics).values() if isinstance(value, type)}:
                for name, note in (("result", self._read), ("reset_state", self._reset)):
                    if name in vars(metric):
                        stack.enter_context(replaced(metric, name, self._noted(vars(metric)[name], note)))
            for name in dir(keras.losses):
                if name[0].islower() and name not in _NO_LOSSES and callable(getattr(keras.losses, name)):
                    function = getattr(keras.losses, name)
                    noted = self._noted(function, partial(self._lost_by, function))
                    stack.enter_context(replaced(keras.losses, name, noted))
            yield

    @property
    def watched(self) -> list[Watched]:
        """All models, once for each loop that calls them."""
        return [each for loop in self.loops.values() for each in loop.watched.values()]

    def settle(self) -> None:
        """Wait for pending records, and add what runs outside of the loops with updates to the loop before."""
        self._listener.settle()
        every = [loop for loop in self.loops.values() if loop.trained]
        warm_up = {id(loop): loop for loop in every if loop.is_warm_up(every)}
        trained = [loop for loop in every if id(loop) not in warm_up]
        self.num_warm_up = sum(each.num_updates for loop in warm_up.values() for each in loop.trained)
        for other in [loop for loop in self.loops.values() if not loop.trained and trained]:
            spread(other, trained)
        self._over = trained[-1] if trained else Loop(self)  # of the notes when the hooks end
        kept = {id(loop) for loop in trained or self.loops.values()}
        self.loops = {key: loop for key, loop in self.loops.items() if id(loop) in kept}
        known, fitted = set[int](), {id(each.model) for loop in trained if loop.is_fit for each in loop.trained}
        for loop in self.loops.values():
            loop.watched = {k: w for k, w in loop.watched.items() if w.log.is_used or k in loop.fitted}
            loop.is_beside_fit = not loop.is_fit and any(id(each.model) in fitted for each in loop.trained)
            for key, each in loop.watched.items():
                each.log.close()
                if key in known or not each.before:
                    each.before = next((c.params for c in each.log.called if c.is_whole), each.before)
            known |= loop.watched.keys()

    @property
    def loop(self) -> Loop:
        """The loop that the main thread runs. A step that several loops call is traced in one, and recorded in each."""
        return self._over or self._at(*place_of_loop())

    def _at(self, lines: tuple[Line, ...], is_fit: bool) -> Loop:
        return self.loops.setdefault((lines, is_fit), Loop(self, lines, is_fit))

    def _is_enough(self) -> bool:
        """Whether the loop that runs here was seen, and no other one follows soon."""
        loops = list(self.loops.values())
        seen = [loop for loop in loops if loop.trained and loop.is_seen(self._least, is_exact=self._is_exact)]
        here, now = self.loop, time.monotonic()
        if len(seen) > self._num_seen:
            self._num_seen, self._since = len(seen), now
        if not seen or (here.trained and here not in seen):
            return False
        if calls_later(TRAINING, self._imported) or (not here.trained and here.may_begin()):
            self.is_cut_short = now > self._since + _PATIENCE
            return self.is_cut_short
        may_lack = keras.backend.backend() == "jax" and now < self._since + _LONGER  # the trained weights
        return not (may_lack and calls_later(USING, self._imported))

    def _depth(self) -> int:
        return int(vars(self._here).get("depth", 0))

    def _called(self, call: Callable) -> Callable:
        """Return a layer's call, which hooks models that are not a part of another."""

        @wraps(call)
        def called(layer: Any, *arguments: Any, **others: Any) -> Any:
            depth = self._depth()
            leaves = tree.leaves((arguments, others)) if depth == 0 and isinstance(layer, keras.Model) else []
            inputs = next(islice(arguments, 2 * (call.__name__ == "stateless_call"), None), None)
            if leaves and not any(isinstance(leaf, keras.KerasTensor) for leaf in leaves):
                is_new = id(layer) not in self._hooked
                self._meet(layer, inputs)
                if is_new and call.__name__ == "call":
                    return layer.call(*arguments, **others)  # which the hooks have on the instance now
            self._here.depth = depth + 1
            try:
                result = call(layer, *arguments, **others)
            finally:
                self._here.depth = depth
            if leaves and id(layer) in self._hooked:
                self._look_ahead()
                self._look_beside(tree.leaves(inputs))
            return result

        return self._listener.unhooked(called)

    def _meet(self, model: keras.Model, inputs: Tree = None) -> None:
        """Hook a model at its first call; collect the script's values during the first updates of a loop."""
        watched = self.in_loop(model)
        if watched.like is None:
            watched.like = keras.tree.map_structure(lambda _: None, inputs)
        if id(model) not in self._hooked:
            self._hooked.add(id(model))
            self._hooks.enter_context(_Hooks(model, self._listener, self).on())
        if len(watched.log.applied) < 3:
            self.around.look()
        if not watched.log.called:
            self.elsewhere = self.elsewhere or tape_elsewhere(model)

    def in_loop(self, model: keras.Model, loop: Loop | None = None) -> Watched:
        """Return a model's record in a loop, by default in the one that runs here."""
        loop = loop or self.loop
        if id(model) not in loop.watched:
            log = Log(room(model), is_stateless=keras.backend.backend() == "jax")
            logs = self._logs.setdefault(id(model), [])
            now = None if logs else values(model)  # None in a trace; an engine's callback could wait for ever
            like = next((each.like for each in self.watched if each.model is model), None)
            watched = Watched(model, log, now.params if now else [], like, logs)
            log.begin(watched.before)
            logs.append(log)
            loop.watched[id(model)] = watched
        return loop.watched[id(model)]

    def _look_ahead(self) -> None:
        """Note the function of the script that is about to get the model's outputs, and the labels."""
        call = call_of_loss(line_of_user(self._listener.stack()), names_of_user())
        if call is not None and (place := call.labels()) is not None:
            loss = call.of(place)
            self._note(loss, f"{loss.__name__} of {call.function.__code__}", call.given[place], None, is_own=True)

    def _look_beside(self, inputs: list[Any]) -> None:
        for name, value in of_batch(inputs).items() if inputs else ():
            if not self._listener.blind([value]):
                self._listener.tell(partial(self._told, "beside", name, Asked(None)), [value])

    def _fitting(self, fit: Callable) -> Callable:
        @wraps(fit)
        def fitting(model: Any, *arguments: Any, **others: Any) -> Any:
            if self._depth() == 0 and fit.__name__ == "fit":
                loop = self._at(*place_of_loop(begins_fit=True))
                given = dict(zip(("x", "y"), arguments, strict=False)) | others
                x, y, weight, by_class = (given.get(name) for name in _GIVEN)
                loop.fitted.setdefault(id(model), (x, y, deepcopy(weight), deepcopy(by_class)))
                self.in_loop(model, loop).log.fit(x, by_class, weight)
            if self._depth() == 0 and id(model) not in self._hooked:
                self._meet(model)
                return getattr(model, fit.__name__)(*arguments, **others)  # which the hooks have on the instance now
            return fit(model, *arguments, **others)

        return fitting

    def _using(self, use: Callable) -> Callable:
        """Return a method that uses a model, and notes whether it lacks the weights that were trained."""

        @wraps(use)
        def using(model: Any, *arguments: Any, **others: Any) -> Any:
            if id(model) in self._logs and not is_in_fit():
                self._listener.settle()
                now = values(model)
                stateless = [log for log in self._logs[id(model)] if log.is_stateless and not log.has_fitted]
                whole = [[one for one in log.called if one.is_whole] for log in stateless]
                for first, *_, last in (each for each in whole if len(each) > 1):
                    if now and all_same(now.params, first.params) and not all_same(now.params, last.params):
                        line = line_of_user(self._listener.stack())
                        self.outdated.setdefault(id(model), Use(use.__name__, line))
            return use(model, *arguments, **others)

        return using

    def _asked(self, shape: tuple[int, ...], missing: list) -> None:
        self.cut |= {id(source): source for source in missing}

    def _noted(self, call: Callable, note: Callable) -> Callable:
        """Return a function whose arguments are noted first."""

        @wraps(call)
        def noted(*arguments: Any, **others: Any) -> Any:
            note(*arguments, **others)
            return call(*arguments, **others)

        return self._listener.unhooked(noted)

    def _read(self, metric: Any) -> None:
        self.num_read[id(metric)] += 1
        if not is_in_fit():
            self.metrics[id(metric)] = metric

    def _reset(self, metric: Any) -> None:
        if self.loop.trained:  # not before the first pass
            self.resets.add(id(metric))

    def _lost(self, loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        if id(loss) not in self._kinds:  # a loss that is made anew in each step is one
            self._kinds[id(loss)] = loss, _kind(loss)
        self._note(loss, self._kinds[id(loss)][1], y_true, sample_weight)

    def _lost_by(self, function: Callable, y_true: Any, y_pred: Any, *arguments: Any, **others: Any) -> None:
        set_to = dict(zip([*signature(function).parameters][2:], arguments, strict=False)) | others
        loss = partial(function, **set_to) if set_to else function
        self._note(loss, f"{function.__name__} {set_to}", y_true, None)

    def _note(self, loss: Any, key: str, y_true: Any, weight: Any, *, is_own: bool = False) -> None:
        if not self._hooked or self._depth():
            return
        self.loop.losses.setdefault(key, Asked(loss, is_own=is_own))
        given = [y_true] if weight is None else [y_true, weight]
        if any(isinstance(each, keras.KerasTensor) or not hasattr(each, "shape") for each in given):
            return
        if not self._listener.blind(given):
            self._listener.tell(partial(self._told, "losses", key, Asked(loss, is_own=is_own)), given)

    def _told(self, kind: str, key: str, new: Asked, order: int, replica: int, numbers: list[np.ndarray]) -> None:
        """Record the labels and weights of a loss, or the other tensors of a batch, in the loop that runs."""
        loop = self.loop
        if any(each.log.is_open and each.log.has_room for each in loop.watched.values()):
            y, weight = np.array(numbers[0]), np.array(numbers[1]) if len(numbers) > 1 else None
            asked = getattr(loop, kind).setdefault(key, Asked(new.loss, is_own=new.is_own))
            asked.calls.append((order, y, weight))


def _kind(loss: keras.losses.Loss) -> str:
    """Return the class of a loss with its configuration, without its name, and with attributes that this may lack."""
    try:
        config = loss.get_config() | {"name": ""}
    except Exception:  # the user's
        config = {}
    own = {name: value for name, value in vars(loss).items() if name not in _OF_ANY_LOSS}
    told = {name: repr(value) if isinstance(value, _PLAIN) else id(value) for name, value in own.items()}
    return f"{type(loss).__name__} {config} {told}"


class _Hooks(Hooks):
    """The hooks on a model that write to the record of the loop that runs."""

    def __init__(self, model: keras.Model, listener: Any, scout: Scout):
        self._scout = scout
        super().__init__(model, listener, Log())

    @property
    def log(self) -> Log:
        """The model's record in the loop that runs."""
        return self._scout.in_loop(self.model).log

    @log.setter
    def log(self, log: Log) -> None:
        pass
