"""The hooks on Keras' methods that every training loop calls, for the time of a `with`."""

import inspect
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any

import keras
import numpy as np

from stepcheck import tree
from stepcheck.errors import SpecificationError
from stepcheck.keras.listener import Listener
from stepcheck.keras.meaning import are_numbers, is_result, tensors
from stepcheck.keras.replay import Replay, flags, is_outdated_in, trained_in, untrained
from stepcheck.seams import replaced
from stepcheck.trace import log as logs
from stepcheck.trace.log import Applied, Called, Log, Other, Scaled, clips_of
from stepcheck.trace.measure import places
from stepcheck.tree import Tree
from stepcheck.user_code.source import is_in_fit, is_in_trainer, line_of_user
from stepcheck.values import Reason
from wholestep.model import uncast, with_mask_of

_TRAINING = ("fit", "train_on_batch")
_NO_UPDATE = ("evaluate", "predict", "test_on_batch", "predict_on_batch")
_MEETING = (
    "compile",
    "__call__",
    "stateless_call",
)  # and not `fit`, which callers may compare with Keras' own
_GONE = object()
_THAWED = (
    "The model must be compiled after its layers are set to be trained. It was not: `fit` does not train the layers "
    "that were thawed. Try: model.compile(...) once more, or watch from before on."
)


class Hooks:
    """The hooks on one model and all optimizers, which write to a log.

    Other models of the very same variables, such as `Own(model.inputs, model.outputs)`, are recorded as this one.
    """

    def __init__(self, model: keras.Model, listener: Listener, log: Log):
        self.model, self.listener, self.log = model, listener, log
        self._hooked: dict[int, Callable[[], None]] = {}
        self._num_muted: Counter[int] = Counter()  # by thread
        self._optimizers: list = []  # kept, so that no two have one id

    @contextmanager
    def on(self) -> Iterator[None]:
        """Record to the log inside; afterwards every attribute is the object that it was, also after an error."""
        owner = next(each for each in keras.optimizers.Optimizer.__mro__ if "apply" in vars(each))
        scaling = keras.optimizers.LossScaleOptimizer
        self.log.is_stateless = Replay.engine() == "jax"
        with self.listener.listening(), ExitStack() as stack:
            stack.callback(self._close)
            self._hook(self.model)
            for name in _MEETING:
                stack.enter_context(self._meeting(name))
            stack.enter_context(replaced(owner, "apply", self._apply(owner.apply)))
            stack.enter_context(
                replaced(scaling, "check_finite", self._check(scaling.check_finite))
            )
            yield

    def _close(self) -> None:
        for unhook in self._hooked.values():
            unhook()
        self._hooked.clear()
        self.listener.settle()
        self.log.close()

    def _hook(self, model: keras.Model) -> None:
        """Hook a model's own methods, and keep how to restore them."""
        hooked: dict[str, Any] = {name: self._mute(model, name) for name in _NO_UPDATE}
        hooked |= {name: self._train(model, name) for name in _TRAINING}
        hooked |= {"call": self._call(model), "train_function": None}
        before = {name: vars(model).get(name, _GONE) for name in hooked}
        compiled = compiled_in(model)

        def unhook() -> None:
            if any(
                a is not b for a, b in zip(compiled, compiled_in(model), strict=True)
            ):  # the old one is outdated
                before["train_function"] = None
            vars(model).update(
                {name: value for name, value in before.items() if value is not _GONE}
            )
            for name in (name for name, value in before.items() if value is _GONE):
                vars(model).pop(name, None)

        vars(model).update(hooked)  # past Keras' own __setattr__, which would look at them
        self._hooked[id(model)] = unhook

    @contextmanager
    def _meeting(self, name: str) -> Iterator[None]:
        """Inside, a model of the same variables is hooked before its first call."""
        owner = keras.layers.Layer if name in vars(keras.layers.Layer) else keras.Model
        method = getattr(owner, name)

        @wraps(method)
        def met(layer: Any, *arguments: Any, **others: Any) -> Any:
            if (
                isinstance(layer, keras.Model)
                and id(layer) not in self._hooked
                and self._is_twin(layer)
            ):
                self._hook(layer)
            return method(layer, *arguments, **others)

        with replaced(owner, name, self.listener.unhooked(met)):
            yield

    def _is_twin(self, model: keras.Model) -> bool:
        """Whether another model trains this one's variables, neither being a part of the other."""
        own, others = ({id(v) for v in each.trainable_variables} for each in (self.model, model))
        parts = [*self.model._flatten_layers(), *model._flatten_layers(include_self=False)]
        return (
            bool(own)
            and own == others
            and not any(part is model or part is self.model for part in parts[1:])
        )

    def _is_silent(self) -> bool:
        thread = threading.current_thread()
        is_replica = (
            "Replica" in type(thread).__name__
        )  # of TensorFlow, in which a prediction runs on
        num = self._num_muted.total() if is_replica else self._num_muted[thread.ident or 0]
        return num > 0 or not self.log.is_open

    def _mute(self, model: keras.Model, name: str) -> Callable:
        method = getattr(model, name)

        @wraps(method)
        def muted(*arguments: Any, **others: Any) -> Any:
            self.log.has_evaluated = True
            here = threading.get_ident()
            self._num_muted[here] += 1
            try:
                return method(*arguments, **others)
            finally:
                self._num_muted[here] -= 1

        return _as_bound(muted, method)

    def _train(self, model: keras.Model, name: str) -> Callable:
        """Return a method that trains by Keras' own loop, in programs that can be recorded."""
        method, is_outdated = getattr(model, name), is_outdated_in(model)

        @wraps(method)
        def heard(*arguments: Any, **others: Any) -> Any:
            held = vars(model)
            if name == "fit" and (is_outdated or is_outdated_in(model)):
                trained = {id(v) for v in model.optimizer._trainable_variables}
                if is_outdated and not {id(v) for v in model.trainable_variables} <= trained:
                    raise SpecificationError(_THAWED)
            if name == "fit":
                given = {"x": arguments[0] if arguments else None} | others
                self.log.fit(given["x"], given.get("class_weight"), given.get("sample_weight"))
            compiled = (
                held["_jit_compile"]
                if self.listener.is_deaf_to_xla and model.jit_compile
                else _GONE
            )
            if compiled is _GONE:
                return method(*arguments, **others)
            held["_jit_compile"] = False
            try:
                return method(*arguments, **others)
            finally:
                held["_jit_compile"] = compiled

        return _as_bound(heard, method)

    def _check(self, check: Callable) -> Callable:
        listener = self.listener

        @wraps(check)
        def told(optimizer: Any, grads: Any) -> Any:
            is_finite = check(optimizer, grads)
            if not self._is_silent() and self._can_record([is_finite]):

                def keep(order: int, replica: int, numbers: list[np.ndarray]) -> None:
                    self.log.add(Scaled(order, bool(numbers[0]), replica))

                listener.tell(keep, [is_finite])
            return is_finite

        return listener.unhooked(told)

    def _call(self, model: keras.Model) -> Callable:
        call, listener = model.call, self.listener
        first = next(iter(inspect.signature(call).parameters), "inputs")

        @wraps(call)
        def told(*arguments: Any, **others: Any) -> Any:
            given = arguments[0] if arguments else others.get(first)
            inputs = tree.leaves(given)
            if self._is_silent() or any(isinstance(leaf, keras.KerasTensor) for leaf in inputs):
                return call(*arguments, **others)
            self.log.has_fitted |= is_in_fit()
            self.log.is_by_name |= isinstance(given, dict)
            params = self._values(self.model.trainable_variables)
            buffers = self._values(untrained(self.model))
            outputs = call(*arguments, **others)
            if not self.model.built or not params:
                params = self._values(self.model.trainable_variables)
            with uncast():
                groups = (inputs, tensors(outputs), params, buffers)
            if self._can_record([leaf for group in groups for leaf in group]):
                if trained_in(self.model) not in self.log.flags:
                    self.log.room = room(self.model)  # its first call may have built it
                    self.log.flags[trained_in(self.model)] = flags(self.model)
                differentiated = listener.is_differentiated([*params, *inputs])
                training = others.get("training")
                is_training = (differentiated if training is None else training) is True
                self._tell_call(groups, differentiated, is_training=is_training)
                if differentiated is not False:
                    outputs = self._watched(outputs)
            return outputs

        return told

    def _watched(self, outputs: Tree) -> Tree:
        """Return a model's outputs; the gradients of losses by them are recorded."""
        place = itertools.count()

        def watched(output: Any) -> Any:
            i = next(place) if are_numbers(output) else -1
            if not is_result(output):
                return output

            def differentiated(_: int, replica: int, both: list[np.ndarray]) -> None:
                self.log.differentiate(replica, i, *both)

            return with_mask_of(self.listener.watch_gradient(output, differentiated), output)

        return tree.map_leaves(watched, outputs)

    def _values(self, variables: list) -> list:
        """Return the values themselves, before a layer of lower precision casts them."""
        with uncast():
            return [self.listener.value(v) for v in variables]

    def _can_record(self, values: list) -> bool:
        if is_in_trainer():
            self.log.leave(Reason.OWN_TRAINER)
            return False
        blind = self.listener.blind(values)
        if blind:
            self.log.leave(Reason.BLIND, told=blind)
        return not blind

    def _tell_call(
        self, groups: tuple[list, ...], differentiated: bool | None, *, is_training: bool
    ) -> None:
        line, trained = line_of_user(self.listener.stack()), trained_in(self.model)

        def told(order: int, replica: int, numbers: list[np.ndarray]) -> None:
            given, outputs, params, buffers = _apart(numbers, groups)
            inputs = [np.array(leaf) for leaf in given]
            is_kept = self.log.wants(inputs, replica)
            kept = (
                ([np.array(leaf) for leaf in outputs], params, buffers) if is_kept else ([], [], [])
            )
            known: dict[str, Any] = {"trained": trained, "is_training": is_training}
            self.log.add(Called(order, inputs, *kept, differentiated, line, replica, **known))

        self.listener.tell(told, [leaf for group in groups for leaf in group])

    def _apply(self, apply: Callable) -> Callable:
        listener = self.listener

        @wraps(apply)
        def told(optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
            if self._is_silent():
                return apply(optimizer, grads, trainable_variables)
            grads = list(grads)
            given = None if trainable_variables is None else list(trainable_variables)
            of = optimizer._trainable_variables if given is None else given
            handed = {id(v): g for v, g in zip(of, grads, strict=False)}
            params = self.model.trainable_variables
            if not any(id(v) in handed for v in params):
                self.log.has_others = True
                self._tell_other(optimizer)
                return apply(optimizer, grads, given)
            self._optimizers.append(optimizer)
            place = [i for i, v in enumerate(params) if handed.get(id(v)) is not None]
            held = [_in_part(listener.dense(handed[id(params[i])]), params[i].shape) for i in place]
            if (scale := optimizer.loss_scale_factor) is not None:  # by which `apply` divides
                held = [each / scale for each in held]
            numbers = [
                self._number(n)
                for n in (optimizer.learning_rate, optimizer.iterations, optimizer._iterations)
            ]
            before = self._states(optimizer)
            result = apply(optimizer, grads, given)
            groups = (held, *before, *self._states(optimizer), numbers)
            if self._can_record([leaf for group in groups for leaf in group]):
                lost = [
                    i for i, v in enumerate(params) if id(v) in handed and handed[id(v)] is None
                ]
                self._tell_apply(optimizer, (place, lost, len(params)), groups)
            return result

        return listener.unhooked(told)

    def _tell_other(self, optimizer: Any) -> None:
        count = [self._number(optimizer.iterations)]
        if self._can_record(count):
            self.listener.tell(lambda order, replica, _: self.log.add(Other(order, replica)), count)

    def _states(self, optimizer: Any) -> list[list]:
        """Return the values of the model's parameters and of the optimizer's variables, of large ones in part."""
        groups = self.model.trainable_variables, optimizer.variables
        return [
            [_in_part(self.listener.value(v), v.shape) for v in variables] for variables in groups
        ]

    def _number(self, number: Any) -> Any:
        """Return the present value of an optimizer's number, which may be a variable or computed from some."""
        is_variable = isinstance(number, keras.Variable)
        return self.listener.value(number) if is_variable else keras.ops.convert_to_tensor(number)

    def _tell_apply(
        self, optimizer: Any, handed: tuple[list[int], list[int], int], groups: tuple[list, ...]
    ) -> None:
        line, self.log.optimizers[id(optimizer)] = line_of_user(self.listener.stack()), optimizer
        (place, lost, num), kind = handed, type(optimizer).__name__
        slots = {id(v) for v in optimizer._trainable_variables}
        built = tuple(i for i, v in enumerate(self.model.trainable_variables) if id(v) in slots)
        accumulates, clips = optimizer.gradient_accumulation_steps or 1, clips_of(optimizer)
        trained = trained_in(self.model)
        is_scheduled = isinstance(
            optimizer._learning_rate, keras.optimizers.schedules.LearningRateSchedule
        )

        def told(order: int, replica: int, numbers: list[np.ndarray]) -> None:
            held, params, slots, params_after, slots_after, (rate, count, calls) = _apart(
                numbers, groups
            )
            by_place = dict(zip(place, map(np.array, held), strict=True))
            states = [by_place.get(i) for i in range(num)], params, slots, params_after, slots_after
            states = states if self.log.wants_step(replica) else ([], [], [], [], [])
            counted = replica, accumulates, int(calls), clips, built
            applied = Applied(
                order, id(optimizer), *states, float(rate), int(count), line, *counted
            )
            known: dict[str, Any] = {"lost": tuple(lost), "kind": kind, "trained": trained}
            self.log.add(replace(applied, **known, is_scheduled=is_scheduled))

        self.listener.tell(told, [leaf for group in groups for leaf in group])


def _as_bound(function: Callable, method: Any) -> Callable:
    """Return the function as the bound method that it replaces: callers may compare `__func__` with Keras' own."""
    vars(function)["__func__"] = getattr(method, "__func__", None)
    return function


def _in_part(value: Any, shape: tuple[int, ...]) -> Any:
    """Return a tensor, of a large one its entries at some places; a traced sparse gradient may not have its shape."""
    chosen = places(int(np.prod(shape)))
    return value if chosen is None else keras.ops.take(keras.ops.reshape(value, (-1,)), chosen)


def _apart(values: list, groups: tuple[list, ...]) -> list[list]:
    rest = iter(values)
    return [list(itertools.islice(rest, len(group))) for group in groups]


def room(model: keras.Model) -> int:
    """Return the number of updates of a model that a log keeps with all numbers.

    >>> room(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]))
    40
    """
    return logs.room(sum(int(np.prod(v.shape)) for v in model.trainable_variables))


def compiled_in(model: keras.Model) -> list:
    """Return the objects that `compile` replaces."""
    return [vars(model).get(name) for name in ("optimizer", "_compile_loss", "_compile_metrics")]
