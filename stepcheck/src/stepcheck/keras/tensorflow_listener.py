"""The listener on TensorFlow: eager and inside a `tf.function`."""

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from types import FrameType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from stepcheck.keras.listener import Told
from stepcheck.tree import Tensor, Tree
from stepcheck.user_code.stack import running, uncollected

_ACTIVATIONS = "Softmax", "Sigmoid"
_MOST_WATCHED = 64  # values that wait for their gradients
_FUNCTION = type(tf.function(lambda: None))
_KNOWN = (
    tf.distribute.MirroredStrategy,
    tf.distribute.OneDeviceStrategy,
    type(tf.distribute.get_strategy()),
)


class EngineListener:
    """The listener on TensorFlow."""

    is_deaf_to_xla = True

    def __init__(self) -> None:
        self._num_open = 0
        self._here = threading.local()  # of a replica

    @cached_property
    def _clock(self) -> tf.Variable:
        """The counter of all reports. Created on first use, as TensorFlow's devices
        cannot be set afterwards.

        It is created in a new thread, outside of the current graph and strategy.
        """
        with ThreadPoolExecutor(1) as alone:
            return alone.submit(
                tf.Variable, 0, trainable=False, dtype=tf.int64
            ).result()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Count the open tapes, and take the gradients by watched values. Earlier
        traces are kept.
        """
        tape = tf.GradientTape
        enter, leave, gradient = (
            tape.__dict__[name] for name in ("__enter__", "__exit__", "gradient")
        )

        def counted(taken: tf.GradientTape) -> tf.GradientTape:
            if (
                not self._num_open
            ):  # else a tape around this one may have the same values
                self._drop_done()
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
            is_of_variables = any(
                hasattr(source, "assign") for source in keras.tree.flatten(sources)
            )
            watched = self._watched_here() if is_of_variables else []
            found, *own = gradient(
                taken,
                target,
                [sources, *(each for each, *_ in watched)],
                *arguments,
                **others,
            )
            for (_, value, tell), grad in zip(watched, own, strict=True):
                if grad is not None:
                    self.tell(tell, [value, grad])
            if not taken._persistent:
                self._done().update(
                    id(each)
                    for (each, *_), g in zip(watched, own, strict=True)
                    if g is not None
                )
            return found

        try:
            tape.__enter__, tape.__exit__, tape.gradient = (
                counted,
                uncounted,
                self.unhooked(asked),
            )
            with _without_xla():
                yield
        finally:
            tape.__enter__, tape.__exit__, tape.gradient = enter, leave, gradient

    def tell(self, told: Told, values: list[Tensor]) -> None:
        """Call `told`; a counter, incremented first, gives the operations of a trace an
        order.
        """
        context = tf.distribute.get_replica_context()
        replica = (
            0
            if context is None
            else int(tf.get_static_value(context.replica_id_in_sync_group))
        )
        if tf.executing_eagerly():
            self._clock.assign_add(1)
            told(int(self._clock), replica, [np.asarray(value) for value in values])
            return

        def heard(order: np.ndarray, *numbers: np.ndarray) -> np.int64:
            with uncollected():
                told(int(order), replica, [np.asarray(number) for number in numbers])
            return np.int64(0)

        order = self._clock.assign_add(1, read_value=True)
        tf.numpy_function(heard, [order, *values], tf.int64, stateful=True)

    def watch_gradient(self, value: Any, told: Told) -> Tensor:
        """Return a copy of the value, whose gradient is taken with the variables'
        gradients.
        """
        is_hidden = (
            not tf.executing_eagerly() and value.op.type in _ACTIVATIONS
        )  # Keras would take what it gets
        logits = getattr(
            value, "_keras_logits", None
        )  # of which Keras' cross entropies are
        if not value.dtype.is_floating or (logits is None and is_hidden):
            return value
        copy = tf.identity(value)
        self._waiting().append((copy, copy, told))
        if logits is not None:
            copy._keras_logits = tf.identity(logits)
            self._waiting().append(
                (
                    copy._keras_logits,
                    copy,
                    lambda order, replica, both: told(
                        order, replica, _by_output(*both)
                    ),
                )
            )
        return copy

    def _waiting(self) -> deque:
        vars(self._here).setdefault("waiting", deque(maxlen=_MOST_WATCHED))
        return self._here.waiting

    def _done(self) -> set[int]:
        """Return the ids of the values whose gradient was taken, by a tape that gives
        no other.
        """
        return vars(self._here).setdefault("done", set())

    def _drop_done(self) -> None:
        """Keep no more than the values that still wait."""
        done, waiting = self._done(), self._waiting()
        left = [each for each in waiting if id(each[0]) not in done]
        waiting.clear()
        waiting.extend(left)
        done.clear()

    def _watched_here(self) -> list[tuple[Tensor, Tensor, Told]]:
        """Return the values that wait for their gradients, and can be a source in the
        present graph.
        """
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        return [
            each for each in self._waiting() if getattr(each[0], "graph", None) is graph
        ]

    def value(self, variable: keras.Variable) -> Tensor:
        """Return the value of a Keras variable here."""
        return tf.identity(tf.convert_to_tensor(variable.value))

    def dense(self, gradient: Tensor) -> Tensor:
        """Return a gradient as one tensor."""
        return tf.convert_to_tensor(gradient)

    def is_differentiated(self, values: list[Tensor]) -> bool | None:
        """Whether a tape is open."""
        return self._num_open > 0

    def blind(self, values: list[Tensor]) -> str:
        """Return the name of a part of TensorFlow that reports no values; "" if there
        is none.
        """
        if any(
            isinstance(value, tf.RaggedTensor | tf.SparseTensor) for value in values
        ):
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
            return running()
        return _places(tf.no_op())

    def unhooked(self, function: Callable) -> Callable:
        """Return the function in a form that autograph leaves alone."""
        return tf.autograph.experimental.do_not_convert(function)

    def settle(self) -> None:
        """Do nothing: TensorFlow's functions have finished when they return."""


def _places(operation: tf.Operation) -> list[tuple[str, int]]:
    return [(frame.filename, frame.lineno) for frame in reversed(operation.traceback)]


def _by_output(output: np.ndarray, by_logits: np.ndarray) -> list[np.ndarray]:
    """Return [output, a derivative by the output] that gives this one by the logits: of
    a softmax, or of a sigmoid.
    """
    known = np.maximum(output.astype("float64"), 1e-30)
    is_softmax = (
        output.ndim > 1
        and output.shape[-1] > 1
        and np.allclose(output.sum(-1), 1, atol=1e-3)
    )
    return [
        output,
        by_logits / (known if is_softmax else known * np.maximum(1 - known, 1e-30)),
    ]


@contextmanager
def _without_xla() -> Iterator[None]:
    """Inside, functions that are traced for the first time are not compiled by XLA."""
    call, without = _FUNCTION.__call__, list[Any]()

    def called(function: Any, *arguments: object, **others: object) -> Any:
        if function._jit_compile and not function.experimental_get_tracing_count():
            module = function.python_function.__module__ or ""
            if module.split(".")[0] not in (
                "keras",
                "wholestep",
            ):  # theirs are compiled as ever
                function._jit_compile = False
                without.append(function)
        return call(function, *arguments, **others)

    try:
        _FUNCTION.__call__ = called
        yield
    finally:
        _FUNCTION.__call__ = call
        for function in without:
            function._jit_compile = True
