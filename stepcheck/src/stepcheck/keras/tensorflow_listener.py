"""The listener on TensorFlow: eager and inside a `tf.function`."""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from types import FrameType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from stepcheck.keras.listener import Listener, Told
from stepcheck.seams import replaced
from stepcheck.tree import Tensor, Tree
from stepcheck.user_code.stack import uncollected

_ACTIVATIONS = "Softmax", "Sigmoid"
_FUNCTION = type(tf.function(lambda: None))
_KNOWN = (
    tf.distribute.MirroredStrategy,
    tf.distribute.OneDeviceStrategy,
    type(tf.distribute.get_strategy()),
)
Watched = tuple[Tensor, Told]


class EngineListener(Listener):
    """The listener on TensorFlow."""

    is_deaf_to_xla = True

    def __init__(self) -> None:
        self._num_open = 0  # tapes
        self._here = threading.local()  # of a replica

    @cached_property
    def _clock(self) -> tf.Variable:
        """The counter of all reports. Created on first use, as TensorFlow's devices
        cannot be set afterwards.

        It is created in a new thread, outside of the current graph and strategy.
        """
        with ThreadPoolExecutor(1) as alone:
            made = alone.submit(tf.Variable, 0, trainable=False, dtype=tf.int64)
            return made.result()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Count the open tapes, and take the gradients by watched values. Earlier
        traces are kept.
        """
        tape = tf.GradientTape
        enter, leave, gradient = tape.__enter__, tape.__exit__, tape.gradient

        def counted(taken: tf.GradientTape) -> tf.GradientTape:
            if (
                not self._num_open
            ):  # a tape around this one may have the same values
                self._waiting.clear()
            self._num_open += 1
            return enter(taken)

        def uncounted(taken: tf.GradientTape, *raised: object) -> object:
            self._num_open -= 1
            return leave(taken, *raised)

        def asked(
            taken: tf.GradientTape,
            target: Tensor,
            sources: Tree,
            *arguments: object,
            **others: object,
        ) -> Tree:
            flat = keras.tree.flatten(sources)
            is_of_variables = any(hasattr(source, "assign") for source in flat)
            watched = self._watched_here() if is_of_variables else []
            every = [sources, *(value for value, _ in watched)]
            found, *own = gradient(taken, target, every, *arguments, **others)
            for (value, tell), grad in zip(watched, own, strict=True):
                if grad is not None:
                    self.tell(tell, [value, grad])
            return found

        with (
            replaced(tape, "__enter__", counted),
            replaced(tape, "__exit__", uncounted),
            replaced(tape, "gradient", self.unhooked(asked)),
        ):
            yield

    def tell(self, told: Told, values: list[Tensor]) -> None:
        """Call `told`; a counter, incremented first, gives the operations of a trace an
        order.
        """
        context = tf.distribute.get_replica_context()
        place = 0 if context is None else context.replica_id_in_sync_group
        replica = int(tf.get_static_value(place))

        def heard(order: Any, *numbers: Any) -> np.int64:
            told(
                int(order), replica, [np.asarray(number) for number in numbers]
            )
            return np.int64(0)

        order = self._clock.assign_add(1, read_value=True)
        if tf.executing_eagerly():
            heard(order, *values)
        else:
            alone = uncollected()(heard)
            tf.numpy_function(alone, [order, *values], tf.int64, stateful=True)

    def watch_gradient(self, value: Any, told: Told) -> Tensor:
        """Return a copy of the value, whose gradient is taken with the variables'
        gradients.

        Keras takes the logits behind an activation, if it knows them: such a value is
        returned unchanged.
        """
        is_eager = tf.executing_eagerly()
        has_logits = hasattr(value, "_keras_logits")
        has_logits |= not is_eager and value.op.type in _ACTIVATIONS
        if has_logits or not value.dtype.is_floating:
            return value
        copy = tf.identity(value)
        self._waiting.append((copy, told))
        return copy

    @property
    def _waiting(self) -> list[Watched]:
        """The values that wait for their gradients."""
        return vars(self._here).setdefault("waiting", [])

    def _watched_here(self) -> list[Watched]:
        """Return the values that wait for their gradients, and can be a source in the
        present graph.
        """
        graph = (
            None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        )
        own = self._waiting
        return [
            each for each in own if getattr(each[0], "graph", None) is graph
        ]

    def dense(self, gradient: Tensor, by: keras.Variable) -> Tensor:
        """Return the gradient by a variable as one tensor, equal rows summed."""
        return tf.ensure_shape(tf.convert_to_tensor(gradient), by.shape)

    def value(self, variable: keras.Variable) -> Tensor:
        """Return the value of a Keras variable here."""
        return tf.identity(tf.convert_to_tensor(variable.value))

    def is_differentiated(self, values: list[Tensor]) -> bool | None:
        """Whether a tape is open."""
        return self._num_open > 0

    def blind(self, values: list[Tensor]) -> str:
        """Return the name of a part of TensorFlow that reports no values; "" if there
        is none.
        """
        kinds = tf.RaggedTensor | tf.SparseTensor
        if any(isinstance(value, kinds) for value in values):
            return "RaggedTensor or SparseTensor"
        if not isinstance(strategy := tf.distribute.get_strategy(), _KNOWN):
            return type(strategy).__name__
        frame: FrameType | None = sys._getframe(1)  # its own would hold itself
        while frame is not None and not tf.executing_eagerly():
            own = frame.f_locals.get("self")
            frame = frame.f_back
            if isinstance(own, _FUNCTION) and own._jit_compile:
                return "tf.function(jit_compile=True)"
        return ""

    def stack(self) -> Iterable[tuple[str, int]]:
        """Return the stack; in a trace, an operation's stack, which has the lines
        before AutoGraph's conversion.
        """
        if tf.executing_eagerly():
            return super().stack()
        frames = reversed(tf.no_op().traceback)
        return [(frame.filename, frame.lineno) for frame in frames]

    def unhooked(self, function: Callable) -> Callable:
        """Return the function in a form that autograph leaves alone."""
        return tf.autograph.experimental.do_not_convert(function)
