"""The hooks on Keras' methods that every training loop calls, for the time of a `with`."""

import inspect
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import keras
import numpy as np

from stepcheck import tree
from stepcheck.keras.listener import Listener
from stepcheck.keras.meaning import tensors
from stepcheck.keras.objective import VARIABLES, Beside
from stepcheck.keras.state import (
    flags,
    in_part,
    is_outdated_in,
    outlined,
    room,
    trained_in,
    untrained,
)
from stepcheck.keras.steps import at_rate, rules, slots_of
from stepcheck.seams import replaced
from stepcheck.trace.log import Applied, Called, Log, Other, Scaled, clips_of
from stepcheck.trace.windows import packed
from stepcheck.tree import Tree
from stepcheck.user_code.source import is_in_fit, is_in_trainer, line_of_user
from stepcheck.values import Reason
from wholestep.model import uncast, with_mask_of

_NO_UPDATE = ("evaluate", "predict", "test_on_batch", "predict_on_batch")
Found = Callable[[keras.Model], "Hooks"]


@contextmanager
def listening(
    listener: Listener, hooks: list["Hooks"], found: Found | None = None
) -> Iterator[None]:
    """Record to the logs of several hooks inside; afterwards all attributes are
    restored.

    Args:
        hooks: one for each model; those that are found are added.
        found: makes the hooks of a model that has none, and is called by no other.
    """
    model, optimizers = keras.Model, keras.optimizers
    met = partial(_met, hooks, found, threading.local())
    seams = [
        *((model, name, met) for name in ("__call__", "stateless_call")),
        (model, "make_train_function", partial(_made, hooks, found, listener)),
        (optimizers.Optimizer, "apply", partial(_around, "stepping", hooks)),
        (
            optimizers.LossScaleOptimizer,
            "check_finite",
            partial(_around, "checking", hooks),
        ),
    ]
    with ExitStack() as stack:
        stack.callback(_close, hooks)  # also those that are found later
        stack.enter_context(listener.listening())
        for each in hooks:
            each.begin()
        for kind, name, hooked in seams:
            owner = next(each for each in kind.__mro__ if name in vars(each))
            method = listener.unhooked(hooked(getattr(owner, name)))
            stack.enter_context(replaced(owner, name, method))
        yield


def _met(
    hooks: list["Hooks"],
    found: Found | None,
    inside: threading.local,
    method: Callable,
) -> Callable:
    """Return a call of a model, before which a model that is to be found is hooked.

    Args:
        inside: whether a model runs.
    """
    names = VARIABLES if method.__name__ == "stateless_call" else ()

    @wraps(method)
    def met(layer: Any, *arguments: Any, **others: Any) -> Any:
        if not isinstance(layer, keras.Model):
            return method(layer, *arguments, **others)
        is_inner = getattr(inside, "runs", False)
        if not is_inner:
            _find(layer, hooks, found, arguments)
        given = dict(zip(names, arguments, strict=False)) | others
        for each in hooks:
            each.harmless(each.note_beside)(layer, given)
        inside.runs = True
        try:
            return method(layer, *arguments, **others)
        finally:
            inside.runs = is_inner

    return met


def _find(
    model: keras.Model, hooks: list["Hooks"], found: Found | None, given: Tree
) -> None:
    """Hook a model that is to be found, if it is given no symbols."""
    if found is None or any(each.model is model for each in hooks):
        return
    if not any(
        isinstance(leaf, keras.KerasTensor) for leaf in tree.leaves(given)
    ):
        hooks.append(found(model))
        hooks[-1].begin()


def _made(
    hooks: list["Hooks"],
    found: Found | None,
    listener: Listener,
    make: Callable,
) -> Callable:
    """Return what makes training functions anew, as far as they can be recorded."""

    @wraps(make)
    def made(trainer: Any, force: bool = False) -> Any:
        of = []
        if isinstance(trainer, keras.Model):
            _find(trainer, hooks, found, ())
            parts = {id(part) for part in trainer._flatten_layers()}
            of = [each for each in hooks if id(each.model) in parts]
        for each in of:
            each.renew(trainer)
        if not (of and listener.is_deaf_to_xla and trainer.jit_compile):
            return make(trainer, force)
        with replaced(trainer, "_jit_compile", False):
            return make(trainer, force)

    return made


def _around(name: str, hooks: list["Hooks"], method: Callable) -> Callable:
    """Return a method of optimizers that the hooks of each model see begin and end.

    Args:
        name: of the method of `Hooks` that sees it begin, and returns what sees its end.
    """

    @wraps(method)
    def told(optimizer: Any, *arguments: Any, **others: Any) -> Any:
        given = [
            [*each] if isinstance(each, Iterator) else each
            for each in arguments
        ]
        begun = [
            each.harmless(getattr(each, name))(optimizer, *given, **others)
            for each in hooks
        ]
        result = method(optimizer, *given, **others)
        for each, end in zip(hooks, begun, strict=False):
            if end is not None:
                each.harmless(end)(result)
        return result

    return told


def _close(hooks: list["Hooks"]) -> None:
    for each in hooks:
        each.close()


class Hooks:
    """The hooks on one model, which write to a log."""

    def __init__(
        self,
        model: keras.Model,
        listener: Listener,
        log: Log,
        beside: Beside | None = None,
    ):
        self.model = model
        self.listener = listener
        self.log = log
        self.beside = beside
        # models with training functions made inside
        self._renewed: set[int] = set()
        self._stack = ExitStack()
        self._num_muted: Counter[int] = Counter()  # by thread

    def begin(self) -> None:
        """Hook the model's own methods, until the record is closed."""
        self.log.is_stateless = keras.backend.backend() == "jax"
        hooked: dict[str, Any] = {name: self._mute(name) for name in _NO_UPDATE}
        hooked |= {"fit": self._fit(), "call": self._call()}
        for name, method in hooked.items():
            self._stack.enter_context(replaced(self.model, name, method))

    def close(self) -> None:
        """Restore all models, and end the record."""
        self._stack.close()
        self.log.close()

    def renew(self, trainer: keras.Model) -> None:
        """Let a model that trains this one make its training function anew, for this
        record.
        """
        if id(trainer) in self._renewed:
            return
        if is_outdated_in(
            trainer
        ):  # a new function would train other variables
            self.log.leave(Reason.OUTLINED)
            return
        held, name = vars(trainer), "train_function"
        before, compiled = held.get(name), held.get("_compile_config")

        def restore() -> None:
            is_same = held.get("_compile_config") is compiled
            held[name] = before if is_same else None

        self._renewed.add(id(trainer))
        self._stack.callback(restore)
        held[name] = None

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
        self._tell(
            lambda order, replica, numbers: beside.keep(order, place, numbers),
            own,
        )

    def _is_silent(self) -> bool:
        thread = threading.current_thread()
        # A prediction runs on in TensorFlow's threads of replicas.
        is_replica = "Replica" in type(thread).__name__
        here = self._num_muted[thread.ident or 0]
        num = self._num_muted.total() if is_replica else here
        return num > 0 or not self.log.is_open

    def _mute(self, name: str) -> Callable:
        method = getattr(self.model, name)

        @wraps(method)
        def muted(*arguments: Any, **others: Any) -> Any:
            here = threading.get_ident()
            self._num_muted[here] += 1
            try:
                return method(*arguments, **others)
            finally:
                self._num_muted[here] -= 1

        return _as_bound(muted, method)

    def _fit(self) -> Callable:
        """Return the method `fit`, whose arguments are noted."""
        method = self.model.fit

        @wraps(method)
        def heard(*arguments: Any, **others: Any) -> Any:
            self.log.fit(
                others.get("class_weight"), others.get("sample_weight")
            )
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
                self.log.leave(
                    Reason.FAILED, told=f"{type(error).__name__}: {error}"
                )
                return None

        return called

    def _tell(self, told: Callable, values: Tree) -> bool:
        """Tell the numbers of values, nested as they are; return whether that is
        possible here.
        """
        leaves = tree.leaves(values)
        blind = self.listener.blind(leaves)
        if is_in_trainer():
            self.log.leave(Reason.OWN_TRAINER)
        elif blind:
            self.log.leave(Reason.BLIND, told=blind)
        else:
            heard = self.harmless(
                lambda order, replica, own: told(
                    order, replica, packed(own, values)
                )
            )
            self.listener.tell(heard, leaves)
            return True
        return False

    def checking(self, *_: Any) -> Callable:
        """Return what records whether the gradients of a step are finite."""

        def keep(order: int, replica: int, own: list) -> None:
            self.log.add(Scaled(order, bool(own[0]), replica))

        return lambda is_finite: (
            self._is_silent() or self._tell(keep, [is_finite])
        )

    def _call(self) -> Callable:
        call = self.model.call
        first = next(iter(inspect.signature(call).parameters), "inputs")

        @wraps(call)
        def told(*arguments: Any, **others: Any) -> Any:
            given = arguments[0] if arguments else others.get(first)
            begun = self.harmless(self._before_call)(given)
            outputs = call(*arguments, **others)
            if begun is None:
                return outputs
            end = self.harmless(self._after_call)
            watched = end(begun, outputs, others.get("training"))
            return outputs if watched is None else watched

        return told

    def _before_call(self, given: Tree) -> tuple[list, list, list] | None:
        """Return the inputs, parameters and other values of a pass; None if it is not
        recorded.
        """
        inputs = tree.leaves(given)
        is_symbolic = any(
            isinstance(leaf, keras.KerasTensor) for leaf in inputs
        )
        if self._is_silent() or is_symbolic:
            return None
        self.log.has_fitted |= is_in_fit()
        params = self._values(self.model.trainable_variables)
        return inputs, params, self._values(untrained(self.model))

    def _after_call(
        self,
        begun: tuple[list, list, list],
        outputs: Tree,
        training: bool | None,
    ) -> Tree:
        """Record a forward pass, and return its outputs, of which gradients are
        recorded.
        """
        inputs, params, buffers = begun
        trained = trained_in(self.model)
        if not self.model.built or not params:
            params = self._values(self.model.trainable_variables)
        if trained not in self.log.flags:  # its first call may have built it
            self.log.room = room(self.model, is_run=self.log.is_run)
            self.log.flags[trained] = flags(self.model)
        differentiated = self.listener.is_differentiated([*params, *inputs])
        is_training = differentiated if training is None else training
        known = {
            "differentiated": differentiated,
            "line": line_of_user(self.listener.stack()),
            "trained": trained,
            "is_training": is_training is True,
            "mode": (training is True,),
        }
        with uncast():
            groups = inputs, tensors(outputs), params, buffers
        is_told = self._tell_call(groups, known)
        return (
            self._watched(outputs)
            if is_told and differentiated is not False
            else None
        )

    def _tell_call(
        self, groups: tuple[list, ...], known: dict[str, Any]
    ) -> bool:
        def told(order: int, replica: int, numbers: Any) -> None:
            inputs, outputs = ([*map(np.array, own)] for own in numbers[:2])
            kept: Any = outputs, *numbers[2:]
            if not self.log.wants(inputs, replica):
                kept = [], [], []
            given = known | {"replica": replica}
            self.log.add(Called(order, inputs, *kept, **given))

        return self._tell(told, groups)

    def _watched(self, outputs: Tree) -> Tree:
        """Return a model's outputs; the gradients of losses by them are recorded."""
        place = itertools.count()

        def watched(output: Any) -> Any:
            if not keras.ops.is_tensor(output):
                return output
            i = next(place)
            if isinstance(output, keras.Variable):
                return output

            told = self.harmless(
                lambda _, replica, both: self.log.differentiate(
                    replica, i, *both
                )
            )
            return with_mask_of(
                self.listener.watch_gradient(output, told), output
            )

        return tree.map_leaves(watched, outputs)

    def _values(self, variables: list) -> list:
        """Return the values themselves, before a layer of lower precision casts them; of
        a run that is compared, large ones in part.
        """
        with uncast():
            values = [self._value(v) for v in variables]
        return in_part(values) if self.log.is_run else values

    def _value(self, variable: Any) -> Any:
        """Return the value of a variable; a value itself is returned unchanged."""
        is_variable = isinstance(variable, keras.Variable)
        return self.listener.value(variable) if is_variable else variable

    def stepping(
        self,
        optimizer: Any,
        grads: list,
        trainable_variables: list | None = None,
    ) -> Callable | None:
        """Begin the record of an optimizer step, and return what ends it, or None."""
        if self._is_silent():
            return None
        given = trainable_variables
        of = optimizer._trainable_variables if given is None else given
        handed = {id(v): grad for v, grad in zip(of, grads, strict=False)}
        params = self.model.trainable_variables
        scale = optimizer.loss_scale_factor
        counts = (
            optimizer.learning_rate,
            optimizer.iterations,
            optimizer._iterations,
        )
        numbers = [
            keras.ops.convert_to_tensor(self._value(each)) for each in counts
        ]
        if not any(id(v) in handed for v in params):
            self._tell(
                lambda order, replica, _: self.log.add(Other(order, replica)),
                numbers,
            )
            return None
        place = [
            i for i, v in enumerate(params) if handed.get(id(v)) is not None
        ]
        pairs = [(params[i], handed[id(params[i])]) for i in place]
        dense = [self.listener.dense(grad, v) for v, grad in pairs]
        held = [
            each if scale is None else each / scale  # by which `apply` divides
            for each in in_part(dense)
        ]
        before, slots_before = (
            self._states(optimizer),
            slots_of(optimizer, params),
        )

        def end(_: Any) -> None:
            slots = slots_before, slots_of(optimizer, params)
            known = self._known(optimizer, handed) | {"slots_of": slots}
            by_place = dict(zip(place, held, strict=True))
            groups = by_place, *before, *self._states(optimizer), numbers
            self._tell_apply(optimizer, groups, known)

        return end

    def _states(self, optimizer: Any) -> list[list]:
        """Return the values of parameters and of the optimizer's variables, large ones
        in part.
        """
        groups = self.model.trainable_variables, optimizer.variables
        return [
            in_part([self.listener.value(v) for v in each]) for each in groups
        ]

    def _known(self, optimizer: Any, handed: dict[int, Any]) -> dict[str, Any]:
        """Return the fields of a recorded step that are known without its numbers.

        Args:
            handed: the gradients, or None, by the identity of a variable.
        """
        params = self.model.trainable_variables
        grads = [handed.get(id(v)) for v in params]
        lost = [i for i, v in enumerate(params) if handed.get(id(v), 0) is None]
        slots = {id(v) for v in optimizer._trainable_variables}
        return {
            "kind": type(optimizer).__name__,
            "line": line_of_user(self.listener.stack()),
            "lost": tuple(lost),
            "rules": rules(optimizer, params, grads),
            "accumulates": optimizer.gradient_accumulation_steps or 1,
            "clips": clips_of(optimizer),
            "built": tuple(i for i, v in enumerate(params) if id(v) in slots),
            "trained": trained_in(self.model),
        }

    def _tell_apply(
        self, optimizer: Any, groups: tuple[Any, ...], known: dict[str, Any]
    ) -> None:
        self.log.optimizers[id(optimizer)] = optimizer
        num = len(known["rules"])

        def told(order: int, replica: int, numbers: Any) -> None:
            held, *states, (rate, count, calls) = numbers
            grads = [
                None if i not in held else np.array(held[i]) for i in range(num)
            ]
            named = known | {
                "learning_rate": float(rate),
                "iterations": int(count),
                "num_calls": int(calls),
                "rules": at_rate(known["rules"], float(rate)),
                "replica": replica,
            }
            applied = Applied(order, id(optimizer), grads, *states, **named)
            if not self.log.wants_step(replica):
                applied = applied.emptied()
                if self.log.is_run:
                    outlines = [outlined(grads), outlined(states[2])]
                    applied = replace(applied, outlines=outlines)
            self.log.add(applied)

        self._tell(told, groups)


def _as_bound(function: Callable, method: Any) -> Callable:
    """Return the function as a bound method: callers may compare its `__func__`."""
    vars(function)["__func__"] = getattr(method, "__func__", None)
    return function
