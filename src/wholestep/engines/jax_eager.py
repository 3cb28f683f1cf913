"""The engine on JAX where nothing is compiled."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from wholestep.engines.eager import Eager
from wholestep.engines.jax import JaxEngine
from wholestep.engines.jax_words import JaxWords
from wholestep.errors import SpecificationError, message
from wholestep.state import State
from wholestep.tree import Tensor, Tree

_LOCK = threading.Lock()
_READS = "__array__", "__float__", "__complex__", "__format__", "tolist"  # int, bool and item work on tracers already
_OWN = {name: getattr(jax.core.Tracer, name) for name in _READS}
_ARITHMETIC = "add", "subtract", "multiply", "divide", "floor_divide", "remainder", "divmod", "power", "matmul"
_BITWISE = "left_shift", "right_shift", "bitwise_and", "bitwise_or", "bitwise_xor"
_COMPARISONS = "equal", "not_equal", "less", "less_equal", "greater", "greater_equal"
_OPERATORS = {*_ARITHMETIC, *_BITWISE, *_COMPARISONS}  # numpy calls these for `array * tracer`
_holders: list[None] = []


class EagerJaxEngine(Eager, JaxEngine):
    """The methods of `wholestep.engines.protocol` on JAX, for one device, without `jax.jit`.

    While a gradient is computed, JAX passes values in tracers. Here numpy and Python can read them, but numpy
    functions that would lose the gradient are refused.
    """

    def staged(self, data: Tree) -> Tree:
        """Return host arrays as arrays of JAX."""
        return self.place(data)

    def words(self, seed: Tensor, stream: Tensor | int, first: Tensor | int, num_rows: int, num_words: int) -> Tensor:
        """Return the random words of each row by its place: (rows, words). Compiled, as it calls no user function."""
        return _words(num_rows, num_words)(seed, stream, first)

    def differentiate(self, function: Callable, params: list) -> tuple[list, Tree]:
        """Return (gradients, auxiliary) of a function params -> (scalar, auxiliary)."""
        with _readable():
            return super().differentiate(function, params)

    def fold(self, function: Callable, carry: Tree, pieces: Tree, num: int) -> Tree:
        """Return function(... function(carry, piece 0) ..., piece num-1); pieces have a leading axis of length num."""
        for i in range(num):
            carry = function(carry, jax.tree.map(lambda leaf, i=i: leaf[i], pieces))
        return carry

    def repeat(self, function: Callable, num: Tensor, state: State, reports: Tree) -> tuple[State, Tree]:
        """Call (i, state) -> (state, report) for i < num, as long as the state is not stopped; keep the reports."""
        i = 0
        while i < int(num) and int(state.stopped) == 0:
            state, report = function(jnp.int32(i), state)
            reports = jax.tree.map(lambda all, one, i=i: all.at[i].set(one), reports, report)
            i += 1
        return state, reports

    def apply(self, state: State, new: State, grads: list, ok: Tensor, assigned: dict[int, Tensor]) -> State:
        """Return `new` with one optimizer update applied if `ok`, else `state`; nothing is `assigned` here."""
        if not ok:
            return state
        params, slots = self.optimizer.stateless_apply(state.slots, grads, state.params)
        return new._replace(params=params, slots=slots)

    def call_step(
        self,
        step: Callable,
        groups: Sequence[list],
        values: Sequence[list],
        num: int,
        data: Tree,
        note: Callable[[keras.Variable], None],
    ) -> tuple[Tree, list[list]]:
        """Call a step with the values of the first `num` groups; return its results and all values after it."""
        with _readable():
            return super().call_step(step, groups, values, num, data, note)


@lru_cache(maxsize=256)
def _words(num_rows: int, num_words: int) -> Callable:
    return jax.jit(partial(JaxWords().words, num_rows=num_rows, num_words=num_words))


def _reading(name: str) -> Callable:
    """Return a method that reads a tracer's concrete value; without one it raises JAX's error."""

    def read(tracer: jax.core.Tracer, *args: Any, **kwargs: Any) -> Any:
        value = tracer.to_concrete_value()
        found = partial(_OWN[name], tracer) if value is None else getattr(np.asarray(value), name)
        return found(*args, **kwargs)

    return read


def _ufunc(_: jax.core.Tracer, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
    """Return the result of a numpy ufunc on tracers: operators run in JAX; others may not return a float."""
    if method == "__call__" and not kwargs and ufunc.__name__ in _OPERATORS:
        return getattr(jnp, ufunc.__name__)(*inputs)
    inputs = tuple(np.asarray(leaf) if isinstance(leaf, jax.core.Tracer) else leaf for leaf in inputs)
    return _looked(getattr(ufunc, method)(*inputs, **kwargs), ufunc.__name__)


def _function(_: jax.core.Tracer, function: Any, types: Any, args: tuple, kwargs: dict) -> Any:
    """Return the result of another numpy function on tracers."""
    return _looked(function._implementation(*args, **kwargs), function.__name__)


def _looked(found: Any, name: str) -> Any:
    """Return a result of numpy.

    Raises:
        SpecificationError: the result is floating, so that a gradient would be lost.
    """
    if any(isinstance(leaf, np.ndarray | np.inexact) and leaf.dtype.kind in "fcV" for leaf in jax.tree.leaves(found)):
        must = f"A value whose gradient is taken must not go through np.{name}: numpy's result has no gradient."
        try_ = f"keras.ops.{name} or its equivalent there; to read the numbers, np.{name}(np.asarray(x))."
        raise SpecificationError(message(must, "a tracer of JAX, under run_eagerly=True", try_))
    return found


_PATCHES = {name: _reading(name) for name in _READS} | {"__array_ufunc__": _ufunc, "__array_function__": _function}
_BEFORE = {name: vars(jax.core.Tracer)[name] for name in _PATCHES if name in vars(jax.core.Tracer)}


@contextmanager
def _readable() -> Iterator[None]:
    """Let numpy and Python read tracers that have a concrete value. The last thread to leave restores JAX."""
    with _LOCK:
        _holders.append(None)
        for name, method in _PATCHES.items():
            setattr(jax.core.Tracer, name, method)
    try:
        yield
    finally:
        with _LOCK:
            _holders.pop()
            for name in _PATCHES if not _holders else ():
                if name in _BEFORE:
                    setattr(jax.core.Tracer, name, _BEFORE[name])
                else:
                    delattr(jax.core.Tracer, name)
