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
from stepcheck.keras.listener import Listener
from stepcheck.keras.meaning import are_numbers, is_result, tensors
from stepcheck.keras.objective import VARIABLES, Beside
from stepcheck.keras.state import (
    apart,
    flags,
    in_part,
    is_outdated_in,
    outlined,
    restoring,
    room,
    trained_in,
    untrained,
)
from stepcheck.keras.steps import at_rate, known_of, slots_of
from stepcheck.seams import replaced
from stepcheck.trace.log import Applied, Called, Log, Other, Scaled, clips_of
from stepcheck.tree import Tree
from stepcheck.user_code.source import is_in_fit, is_in_trainer, line_of_user
from stepcheck.values import Reason
from wholestep.model import uncast, with_mask_of

_NO_UPDATE = ("evaluate", "predict", "test_on_batch", "predict_on_batch")
_MEETING = (
    "compile",
    "__call__",
    "stateless_call",
)  # not `fit`: callers compare it with Keras' own
_MAKE = "make_train_function"
_GONE = object()


@contextmanager
def listening(
    listener: Listener,
    hooks: list["Hooks"],
    found: Callable[[keras.Model], "Hooks"] | None = None,
) -> Iterator[None]:
    """Record to the logs of several hooks inside; afterwards all attributes are
    restored.

    Args:
        hooks: one for each model; those that are found are added.
        found: makes the hooks of a model that has none, and is called by no other.
    """
    owner = next(
        each for each in keras.optimizers.Optimizer.__mro__ if "apply" in vars(each)
    )
    scaling = keras.optimizers.LossScaleOptimizer
    with listener.listening(), ExitStack() as stack:
        stack.callback(_close, hooks)  # also those that are found later
        for each in hooks:
            each.begin()
        stack.enter_context(_making(listener, hooks))
        for name in _MEETING if found is None else (*_MEETING, _MAKE):
            stack.enter_context(_meeting(name, listener, hooks, found))
        apply, check = (
            _applied(owner.apply, hooks),
            _checked(scaling.check_finite, hooks),
        )
        stack.enter_context(replaced(owner, "apply", listener.unhooked(apply)))
        stack.enter_context(replaced(scaling, "check_finite", listener.unhooked(check)))
        yield


@contextmanager
def _meeting(
    name: str, listener: Listener, hooks: list["Hooks"], found: Any
) -> Iterator[None]:
    """Inside, models of the same variables, or found ones, are hooked before their
    first call.
    """
    owner = next(each for each in keras.Model.__mro__ if name in vars(each))
    method, inside = getattr(owner, name), threading.local()  # whether a model runs

    @wraps(method)
    def met(layer: Any, *arguments: Any, **others: Any) -> Any:
        is_model, is_inner = (
            isinstance(layer, keras.Model),
            getattr(inside, "runs", False),
        )
        is_known = not is_model or any(id(layer) in each.hooked for each in hooks)
        twin = (
            None
            if is_known
            else next((each for each in hooks if each.is_twin(layer)), None)
        )
        if twin is not None:
            twin.hook(layer)
        elif (
            found
            and not is_known
            and not is_inner
            and name != "compile"
            and _runs(arguments)
        ):
            hooks.append(found(layer))
            hooks[-1].begin()
        if is_model and name in ("__call__", "stateless_call"):
            given = (
                inspect.signature(method).bind(layer, *arguments, **others).arguments
            )
            for each in hooks:
                each.harmless(each.note_beside)(layer, given)
        inside.runs = is_inner or is_model
        try:
            return method(layer, *arguments, **others)
        finally:
            inside.runs = is_inner

    with replaced(owner, name, listener.unhooked(met)):
        yield


@contextmanager
def _making(listener: Listener, hooks: list["Hooks"]) -> Iterator[None]:
    """Inside, models make their training functions anew, as far as they can be
    recorded.
    """
    owner = next(each for each in keras.Model.__mro__ if _MAKE in vars(each))
    make = getattr(owner, _MAKE)

    @wraps(make)
    def made(trainer: Any, force: bool = False) -> Any:
        of = [each for each in hooks if each.is_part_of(trainer)]
        for each in of:
            each.renew(trainer)
        held = vars(trainer)
        compiled = bool(of) and listener.is_deaf_to_xla and trainer.jit_compile
        if not compiled:
            return make(trainer, force)
        held["_jit_compile"] = False
        try:
            return make(trainer, force)
        finally:
            held["_jit_compile"] = compiled

    with replaced(owner, _MAKE, made):
        yield


def _runs(arguments: Any) -> bool:
    """Whether a model is called with numbers, and not to build a model around it."""
    return not any(
        isinstance(leaf, keras.KerasTensor) for leaf in tree.leaves(arguments)
    )


def _applied(apply: Callable, hooks: list["Hooks"]) -> Callable:
    """Return the optimizers' `apply`, recorded by the hooks of each model."""

    @wraps(apply)
    def told(optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
        grads = list(grads)
        given = None if trainable_variables is None else list(trainable_variables)
        ends = [
            (each, each.harmless(each.stepping)(optimizer, grads, given))
            for each in hooks
        ]
        result = apply(optimizer, grads, given)
        for each, end in ends:
            if end is not None:
                each.harmless(end)()
        return result

    return told


def _checked(check: Callable, hooks: list["Hooks"]) -> Callable:
    """Return the check of an optimizer that scales the loss, with a record of its
    result.
    """

    @wraps(check)
    def told(optimizer: Any, grads: Any) -> Any:
        is_finite = check(optimizer, grads)
        for each in hooks:
            each.harmless(each.note_check)(is_finite)
        return is_finite

    return told


def _close(hooks: list["Hooks"]) -> None:
    for each in hooks:
        each.close()


class Hooks:
    """The hooks on one model, which write to a log.

    Other models of the very same variables are recorded as this one.
    """

    def __init__(
        self,
        model: keras.Model,
        listener: Listener,
        log: Log,
        beside: Beside | None = None,
    ):
        self.model, self.listener, self.log, self.beside = model, listener, log, beside
        self.hooked: dict[int, Callable[[], None]] = {}
        self._anew: dict[
            int, Callable[[], None]
        ] = {}  # models with training functions made inside
        self._num_muted: Counter[int] = Counter()  # by thread
        self._optimizers: list = []  # kept, so that no two have one id

    @contextmanager
    def on(self) -> Iterator[None]:
        """Record to the log inside; afterwards all attributes are restored."""
        with listening(self.listener, [self]):
            yield

    def begin(self) -> None:
        """Hook the model."""
        self.log.is_stateless = keras.backend.backend() == "jax"
        self.hook(self.model)

    def close(self) -> None:
        """Restore all models, and end the record."""
        for undo in (*self.hooked.values(), *self._anew.values()):
            undo()
        self.hooked.clear()
        self._anew.clear()
        self.listener.settle()
        self.log.close()

    def hook(self, model: keras.Model) -> None:
        """Hook a model's own methods, and keep how to restore them."""
        hooked: dict[str, Any] = {name: self._mute(model, name) for name in _NO_UPDATE}
        hooked |= {"fit": self._fit(model), "call": self._call(model)}
        before = {name: vars(model).get(name, _GONE) for name in hooked}

        def unhook() -> None:
            for name, value in before.items():
                if value is _GONE:
                    vars(model).pop(name, None)
                else:
                    vars(model)[name] = value

        vars(model).update(
            hooked
        )  # past Keras' own __setattr__, which would look at them
        self.hooked[id(model)] = unhook

    def renew(self, trainer: keras.Model) -> None:
        """Let a model that trains this one make its training function anew, for this
        record.
        """
        if id(trainer) in self._anew:
            return
        if is_outdated_in(trainer):  # a new function would train other variables
            self.log.leave(Reason.OUTLINED)
            return
        self._anew[id(trainer)] = restoring(trainer)
        vars(trainer)["train_function"] = None

    def is_part_of(self, trainer: Any) -> bool:
        """Whether a model trains this one: it is this one, has it as a part, or its
        variables.
        """
        if not isinstance(trainer, keras.Model):
            return False
        parts = trainer._flatten_layers()
        return any(part is self.model for part in parts) or self.is_twin(trainer)

    def note_beside(self, model: keras.Model, given: dict[str, Any]) -> None:
        """Record the values of another model that is called, its own or those that it
        is given.
        """
        beside = self.beside
        if beside is None or self._is_silent() or not model.built:
            return
        if (place := beside.place(model)) is None:
            return
        groups = [given.get(name, getattr(model, name)) for name in VARIABLES]
        with uncast():
            own = [self._value(v) for group in groups for v in group]
        if self._can_record(own):
            self._tell(
                lambda order, replica, numbers: beside.keep(order, place, numbers), own
            )

    def is_twin(self, model: keras.Model) -> bool:
        """Whether another model trains this one's variables, neither being a part of
        the other.
        """
        own, others = (
            {id(v) for v in each.trainable_variables} for each in (self.model, model)
        )
        parts = [
            *self.model._flatten_layers(),
            *model._flatten_layers(include_self=False),
        ]
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
        num = (
            self._num_muted.total()
            if is_replica
            else self._num_muted[thread.ident or 0]
        )
        return num > 0 or not self.log.is_open

    def _mute(self, model: keras.Model, name: str) -> Callable:
        method = getattr(model, name)

        @wraps(method)
        def muted(*arguments: Any, **others: Any) -> Any:
            here = threading.get_ident()
            self._num_muted[here] += 1
            try:
                return method(*arguments, **others)
            finally:
                self._num_muted[here] -= 1

        return _as_bound(muted, method)

    def _fit(self, model: keras.Model) -> Callable:
        """Return the method `fit`, whose arguments are noted."""
        method = model.fit

        @wraps(method)
        def heard(*arguments: Any, **others: Any) -> Any:
            x = arguments[0] if arguments else others.get("x")
            self.log.fit(x, others.get("class_weight"), others.get("sample_weight"))
            return method(*arguments, **others)

        return _as_bound(heard, method)

    def harmless(self, function: Callable) -> Callable:
        """Return a function whose errors end the record, not the loop; then it returns
        None.
        """

        @wraps(function)
        def called(*arguments: Any, **others: Any) -> Any:
            try:
                return function(*arguments, **others)
            except Exception as error:  # of our own, in the midst of the loop
                self.log.is_open = False
                self.log.leave(Reason.FAILED, told=f"{type(error).__name__}: {error}")
                return None

        return called

    def _tell(self, told: Callable, values: list) -> None:
        self.listener.tell(self.harmless(told), values)

    def note_check(self, is_finite: Any) -> None:
        """Record whether the gradients of a step are finite."""
        if self._is_silent() or not self._can_record([is_finite]):
            return

        def keep(order: int, replica: int, numbers: list[np.ndarray]) -> None:
            self.log.add(Scaled(order, bool(numbers[0]), replica))

        self._tell(keep, [is_finite])

    def _call(self, model: keras.Model) -> Callable:
        call = model.call
        first = next(iter(inspect.signature(call).parameters), "inputs")

        @wraps(call)
        def told(*arguments: Any, **others: Any) -> Any:
            given = arguments[0] if arguments else others.get(first)
            begun = self.harmless(self._before_call)(given)
            outputs = call(*arguments, **others)
            if begun is None:
                return outputs
            watched = self.harmless(self._after_call)(
                begun, outputs, others.get("training")
            )
            return outputs if watched is None else watched

        return told

    def _before_call(self, given: Tree) -> tuple[list, list, list] | None:
        """Return the inputs, parameters and other values of a pass; None if it is not
        recorded.
        """
        inputs = tree.leaves(given)
        if self._is_silent() or any(
            isinstance(leaf, keras.KerasTensor) for leaf in inputs
        ):
            return None
        self.log.has_fitted |= is_in_fit()
        self.log.is_by_name |= isinstance(given, dict)
        params = self._values(self.model.trainable_variables)
        return inputs, params, self._values(untrained(self.model))

    def _after_call(
        self, begun: tuple[list, list, list], outputs: Tree, training: bool | None
    ) -> Tree:
        """Record a forward pass, and return its outputs, of which gradients are
        recorded.
        """
        inputs, params, buffers = begun
        if not self.model.built or not params:
            params = self._values(self.model.trainable_variables)
        with uncast():
            groups = (inputs, tensors(outputs), params, buffers)
        if not self._can_record([leaf for group in groups for leaf in group]):
            return outputs
        if trained_in(self.model) not in self.log.flags:
            # Its first call may have built it.
            self.log.room = room(self.model, is_run=self.log.is_run)
            self.log.flags[trained_in(self.model)] = flags(self.model)
        differentiated = self.listener.is_differentiated([*params, *inputs])
        is_training = (differentiated if training is None else training) is True
        mode = (training is True,)
        self._tell_call(groups, differentiated, is_training=is_training, mode=mode)
        return outputs if differentiated is False else self._watched(outputs)

    def _watched(self, outputs: Tree) -> Tree:
        """Return a model's outputs; the gradients of losses by them are recorded."""
        place = itertools.count()

        def watched(output: Any) -> Any:
            i = next(place) if are_numbers(output) else -1
            if not is_result(output):
                return output

            def differentiated(_: int, replica: int, both: list[np.ndarray]) -> None:
                self.log.differentiate(replica, i, *both)

            told = self.harmless(differentiated)
            return with_mask_of(self.listener.watch_gradient(output, told), output)

        return tree.map_leaves(watched, outputs)

    def _values(self, variables: list) -> list:
        """Return the values themselves, before a layer of lower precision casts them."""
        with uncast():
            values = [self._value(v) for v in variables]
        if not self.log.is_run:
            return values
        return [
            in_part(value, v.shape) for value, v in zip(values, variables, strict=True)
        ]

    def _value(self, variable: Any) -> Any:
        """Return the value of a variable; a value itself is returned unchanged."""
        return (
            self.listener.value(variable)
            if isinstance(variable, keras.Variable)
            else variable
        )

    def _can_record(self, values: list) -> bool:
        if is_in_trainer():
            self.log.leave(Reason.OWN_TRAINER)
            return False
        blind = self.listener.blind(values)
        if blind:
            self.log.leave(Reason.BLIND, told=blind)
        return not blind

    def _tell_call(
        self, groups: tuple[list, ...], differentiated: bool | None, **known: Any
    ) -> None:
        line, trained = line_of_user(self.listener.stack()), trained_in(self.model)

        def told(order: int, replica: int, numbers: list[np.ndarray]) -> None:
            given, outputs, params, buffers = apart(numbers, groups)
            inputs = [np.array(leaf) for leaf in given]
            is_kept = self.log.wants(inputs, replica)
            kept = (
                ([np.array(leaf) for leaf in outputs], params, buffers)
                if is_kept
                else ([], [], [])
            )
            called = Called(
                order, inputs, *kept, differentiated, line, replica, trained=trained
            )
            self.log.add(replace(called, **known))

        self._tell(told, [leaf for group in groups for leaf in group])

    def stepping(
        self, optimizer: Any, grads: list, given: list | None
    ) -> Callable | None:
        """Begin the record of an optimizer step, and return what ends it, or None."""
        if self._is_silent():
            return None
        of = optimizer._trainable_variables if given is None else given
        handed = {id(v): g for v, g in zip(of, grads, strict=False)}
        params = self.model.trainable_variables
        if not any(id(v) in handed for v in params):
            self._tell_other(optimizer)
            return None
        self._optimizers.append(optimizer)
        place = [i for i, v in enumerate(params) if handed.get(id(v)) is not None]
        held = [
            in_part(self.listener.dense(handed[id(params[i])]), params[i].shape)
            for i in place
        ]
        if (
            scale := optimizer.loss_scale_factor
        ) is not None:  # by which `apply` divides
            held = [each / scale for each in held]
        counts = optimizer.learning_rate, optimizer.iterations, optimizer._iterations
        numbers = [self._number(each) for each in counts]
        before, slots_before = self._states(optimizer), slots_of(optimizer, params)

        def end() -> None:
            groups = (held, *before, *self._states(optimizer), numbers)
            if self._can_record([leaf for group in groups for leaf in group]):
                known = known_of(optimizer, params, handed, slots_before)
                self._tell_apply(optimizer, place, groups, known)

        return end

    def _tell_other(self, optimizer: Any) -> None:
        count = [self._number(optimizer.iterations)]
        if self._can_record(count):
            self._tell(
                lambda order, replica, _: self.log.add(Other(order, replica)), count
            )

    def _states(self, optimizer: Any) -> list[list]:
        """Return the values of parameters and of the optimizer's variables, large ones
        in part.
        """
        groups = self.model.trainable_variables, optimizer.variables
        return [
            [in_part(self.listener.value(v), v.shape) for v in variables]
            for variables in groups
        ]

    def _number(self, number: Any) -> Any:
        """Return the present value of an optimizer's number."""
        return keras.ops.convert_to_tensor(self._value(number))

    def _tell_apply(
        self,
        optimizer: Any,
        place: list[int],
        groups: tuple[list, ...],
        known: dict[str, Any],
    ) -> None:
        line, self.log.optimizers[id(optimizer)] = (
            line_of_user(self.listener.stack()),
            optimizer,
        )
        slots = {id(v) for v in optimizer._trainable_variables}
        built = tuple(
            i for i, v in enumerate(self.model.trainable_variables) if id(v) in slots
        )
        accumulates, clips = (
            optimizer.gradient_accumulation_steps or 1,
            clips_of(optimizer),
        )
        trained = trained_in(self.model)
        is_scheduled = isinstance(
            optimizer._learning_rate, keras.optimizers.schedules.LearningRateSchedule
        )

        def told(order: int, replica: int, numbers: list[np.ndarray]) -> None:
            held, params, slots, params_after, slots_after, (rate, count, calls) = (
                apart(numbers, groups)
            )
            by_place = dict(zip(place, map(np.array, held), strict=True))
            grads = [by_place.get(i) for i in range(len(known["rules"]))]
            states = grads, params, slots, params_after, slots_after
            is_kept, outlines = self.log.wants_step(replica), []
            if not is_kept:
                outlines = (
                    [*map(outlined, (grads, params_after))] if self.log.is_run else []
                )
                states = [], [], [], [], []
            counted = replica, accumulates, int(calls), clips, built
            applied = Applied(
                order, id(optimizer), *states, float(rate), int(count), line, *counted
            )
            own = at_rate(known["rules"], float(rate))
            named = known | {"trained": trained, "rules": own}
            self.log.add(
                replace(applied, **named, is_scheduled=is_scheduled, outlines=outlines)
            )

        self._tell(told, [leaf for group in groups for leaf in group])


def _as_bound(function: Callable, method: Any) -> Callable:
    """Return the function as a bound method: callers may compare its `__func__`."""
    vars(function)["__func__"] = getattr(method, "__func__", None)
    return function
