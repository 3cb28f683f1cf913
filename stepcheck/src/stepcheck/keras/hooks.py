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
from stepcheck.trace.measure import NUM_PLACES, outline, places
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


@contextmanager
def listening(
    listener: Listener, hooks: list["Hooks"], found: Callable[[keras.Model], "Hooks"] | None = None
) -> Iterator[None]:
    """Record to the logs of several hooks inside; afterwards every attribute is the object that it was.

    Args:
        hooks: one for each model; those that are found are added.
        found: makes the hooks of a model that has none, and is called by no other.
    """
    owner = next(each for each in keras.optimizers.Optimizer.__mro__ if "apply" in vars(each))
    scaling = keras.optimizers.LossScaleOptimizer
    with listener.listening(), ExitStack() as stack:
        stack.callback(lambda: [each.close() for each in hooks])
        for each in hooks:
            each.begin()
        for name in _MEETING if found is None else (*_MEETING, "make_train_function"):
            stack.enter_context(_meeting(name, listener, hooks, found))
        apply, check = _applied(owner.apply, hooks), _checked(scaling.check_finite, hooks)
        stack.enter_context(replaced(owner, "apply", listener.unhooked(apply)))
        stack.enter_context(replaced(scaling, "check_finite", listener.unhooked(check)))
        yield


@contextmanager
def _meeting(name: str, listener: Listener, hooks: list["Hooks"], found: Any) -> Iterator[None]:
    """Inside, a model is hooked before its first call: one of the same variables, or one that is found."""
    owner = next(each for each in keras.Model.__mro__ if name in vars(each))
    method, inside = getattr(owner, name), threading.local()  # whether a model runs

    @wraps(method)
    def met(layer: Any, *arguments: Any, **others: Any) -> Any:
        is_model, is_inner = isinstance(layer, keras.Model), getattr(inside, "runs", False)
        is_known = not is_model or any(id(layer) in each.hooked for each in hooks)
        twin = None if is_known else next((each for each in hooks if each.is_twin(layer)), None)
        if twin is not None:
            twin.hook(layer)
        elif found and not is_known and not is_inner and name != "compile" and _runs(arguments):
            hooks.append(found(layer))
            hooks[-1].begin()
        inside.runs = is_inner or is_model
        compiled = vars(layer).get("_jit_compile") if name == "make_train_function" else None
        try:
            if compiled is not None and listener.is_deaf_to_xla:
                vars(layer)["_jit_compile"] = False
            return method(layer, *arguments, **others)
        finally:
            inside.runs = is_inner
            if compiled is not None:
                vars(layer)["_jit_compile"] = compiled

    with replaced(owner, name, listener.unhooked(met)):
        yield


def _runs(arguments: Any) -> bool:
    """Whether a model is called with numbers, and not to build a model around it."""
    return not any(isinstance(leaf, keras.KerasTensor) for leaf in tree.leaves(arguments))


def _applied(apply: Callable, hooks: list["Hooks"]) -> Callable:
    """Return the optimizers' `apply`, recorded by the hooks of each model."""

    @wraps(apply)
    def told(optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
        grads = list(grads)
        given = None if trainable_variables is None else list(trainable_variables)
        ends = [each.stepping(optimizer, grads, given) for each in hooks]
        result = apply(optimizer, grads, given)
        for end in filter(None, ends):
            end()
        return result

    return told


def _checked(check: Callable, hooks: list["Hooks"]) -> Callable:
    """Return the check of an optimizer that scales the loss, with a record of its result."""

    @wraps(check)
    def told(optimizer: Any, grads: Any) -> Any:
        is_finite = check(optimizer, grads)
        for each in hooks:
            each.note_check(is_finite)
        return is_finite

    return told


class Hooks:
    """The hooks on one model, which write to a log.

    Other models of the very same variables, such as `Own(model.inputs, model.outputs)`, are recorded as this one.
    """

    def __init__(self, model: keras.Model, listener: Listener, log: Log):
        self.model, self.listener, self.log = model, listener, log
        self.hooked: dict[int, Callable[[], None]] = {}
        self._num_muted: Counter[int] = Counter()  # by thread
        self._optimizers: list = []  # kept, so that no two have one id

    @contextmanager
    def on(self) -> Iterator[None]:
        """Record to the log inside; afterwards every attribute is the object that it was, also after an error."""
        with listening(self.listener, [self]):
            yield

    def begin(self) -> None:
        """Hook the model."""
        self.log.is_stateless = Replay.engine() == "jax"
        self.hook(self.model)

    def close(self) -> None:
        """Restore all models, and end the record."""
        for unhook in self.hooked.values():
            unhook()
        self.hooked.clear()
        self.listener.settle()
        self.log.close()

    def hook(self, model: keras.Model) -> None:
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
        self.hooked[id(model)] = unhook

    def is_twin(self, model: keras.Model) -> bool:
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

    def note_check(self, is_finite: Any) -> None:
        """Record whether the gradients of a step are finite."""
        if self._is_silent() or not self._can_record([is_finite]):
            return

        def keep(order: int, replica: int, numbers: list[np.ndarray]) -> None:
            self.log.add(Scaled(order, bool(numbers[0]), replica))

        self.listener.tell(keep, [is_finite])

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
                    self.log.room = room(
                        self.model, is_run=self.log.is_run
                    )  # its first call may have built it
                    self.log.flags[trained_in(self.model)] = flags(self.model)
                differentiated = listener.is_differentiated([*params, *inputs])
                training = others.get("training")
                is_training = (differentiated if training is None else training) is True
                mode = (training is True,)
                self._tell_call(groups, differentiated, is_training=is_training, mode=mode)
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
            values = [self.listener.value(v) for v in variables]
        if not self.log.is_run:
            return values
        return [_in_part(value, v.shape) for value, v in zip(values, variables, strict=True)]

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
            given, outputs, params, buffers = _apart(numbers, groups)
            inputs = [np.array(leaf) for leaf in given]
            is_kept = self.log.wants(inputs, replica)
            kept = (
                ([np.array(leaf) for leaf in outputs], params, buffers) if is_kept else ([], [], [])
            )
            called = Called(order, inputs, *kept, differentiated, line, replica, trained=trained)
            self.log.add(replace(called, **known))

        self.listener.tell(told, [leaf for group in groups for leaf in group])

    def stepping(self, optimizer: Any, grads: list, given: list | None) -> Callable | None:
        """Begin the record of an optimizer step, and return what ends it; None if there is nothing to end."""
        if self._is_silent():
            return None
        of = optimizer._trainable_variables if given is None else given
        handed = {id(v): g for v, g in zip(of, grads, strict=False)}
        params = self.model.trainable_variables
        if not any(id(v) in handed for v in params):
            self.log.has_others = True
            self._tell_other(optimizer)
            return None
        self._optimizers.append(optimizer)
        place = [i for i, v in enumerate(params) if handed.get(id(v)) is not None]
        held = [
            _in_part(self.listener.dense(handed[id(params[i])]), params[i].shape) for i in place
        ]
        if (scale := optimizer.loss_scale_factor) is not None:  # by which `apply` divides
            held = [each / scale for each in held]
        counts = optimizer.learning_rate, optimizer.iterations, optimizer._iterations
        numbers = [self._number(each) for each in counts]
        before = self._states(optimizer)

        def end() -> None:
            groups = (held, *before, *self._states(optimizer), numbers)
            if self._can_record([leaf for group in groups for leaf in group]):
                handed_none = (i for i, v in enumerate(params) if handed.get(id(v), 0) is None)
                self._tell_apply(optimizer, (place, [*handed_none], len(params)), groups)

        return end

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
            grads = [by_place.get(i) for i in range(num)]
            states = grads, params, slots, params_after, slots_after
            is_kept, outlines = self.log.wants_step(replica), []
            if not is_kept:
                outlines = [*map(_outlined, (grads, params_after))] if self.log.is_run else []
                states = [], [], [], [], []
            counted = replica, accumulates, int(calls), clips, built
            applied = Applied(
                order, id(optimizer), *states, float(rate), int(count), line, *counted
            )
            known: dict[str, Any] = {"lost": tuple(lost), "kind": kind, "trained": trained}
            self.log.add(replace(applied, **known, is_scheduled=is_scheduled, outlines=outlines))

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


def _outlined(values: list) -> np.ndarray:
    """Return the outlines of a parameter's numbers each; of a missing gradient zeros."""
    return np.stack([outline(np.zeros(1) if each is None else each) for each in values])


def room(model: keras.Model, *, is_run: bool = False) -> int:
    """Return the number of updates of a model that a log keeps with all numbers.

    >>> room(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]))
    40
    """
    sizes = [int(np.prod(v.shape)) for v in model.trainable_variables]
    return logs.room(sum(min(size, NUM_PLACES) if is_run else size for size in sizes))


def compiled_in(model: keras.Model) -> list:
    """Return the objects that `compile` replaces."""
    return [vars(model).get(name) for name in ("optimizer", "_compile_loss", "_compile_metrics")]
