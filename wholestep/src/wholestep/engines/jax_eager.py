"""Operations on JAX where nothing is compiled: user code reads the values of JAX' tracers."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wholestep.engines.protocol import Carried, Found, Operations
from wholestep.errors import SpecificationError, message
from wholestep.state import State
from wholestep.tree import Tensor, Tree

_LOCK = threading.Lock()
# int, bool and item work on tracers already
_READS = "__array__", "__float__", "__complex__", "__format__", "tolist"
_OWN = {name: getattr(jax.core.Tracer, name) for name in _READS}
_ARITHMETIC = (
    "add",
    "subtract",
    "multiply",
    "divide",
    "floor_divide",
    "remainder",
    "divmod",
    "power",
    "matmul",
)
_BITWISE = "left_shift", "right_shift", "bitwise_and", "bitwise_or", "bitwise_xor"
_COMPARISONS = "equal", "not_equal", "less", "less_equal", "greater", "greater_equal"
_OPERATORS = {*_ARITHMETIC, *_BITWISE, *_COMPARISONS}  # numpy calls these for `array * tracer`
_holders: list[None] = []
# whether this thread may read tracers
_READABLE: ContextVar[bool] = ContextVar("readable", default=False)


class EagerJaxOperations:
    """The part `ops` of the eager engine on JAX: Python's loops, and gradients whose values can be
    read.

    While a gradient is computed, JAX passes values in tracers. Here numpy and Python can read them,
    but numpy functions that would lose the gradient are refused.
    """

    def __init__(self, ops: Operations):
        self.has_slices = ops.has_slices
        self._differentiate = ops.differentiate
        self.gather = ops.gather
        self.lookup = ops.lookup
        self.is_finite = ops.is_finite

    def differentiate(
        self,
        function: Callable[[list], tuple[Tensor, Found]],
        params: list,
        *,
        slices: bool = False,
    ) -> tuple[list, Found]:
        """Return (gradients, auxiliary) of a function params -> (scalar, auxiliary), all dense."""
        with readable():
            return self._differentiate(function, params)

    def fold(
        self, function: Callable[[Carried, Any], Carried], carry: Carried, pieces: Tree, num: int
    ) -> Carried:
        """Return function(... function(carry, piece 0) ..., piece num-1); pieces have a leading
        axis of length num.
        """
        for i in range(num):
            carry = function(carry, jax.tree.map(lambda leaf, i=i: leaf[i], pieces))
        return carry

    def repeat(
        self,
        function: Callable[[Any, State], tuple[State, Found]],
        num: Tensor,
        state: State,
        reports: Found,
    ) -> tuple[State, Found]:
        """Call (i, state) -> (state, report) for i < num, as long as the state is not stopped; keep
        the reports.
        """
        i = 0
        while i < int(num) and int(state.stopped) == 0:
            state, report = function(jnp.int32(i), state)
            reports = jax.tree.map(lambda all, one, i=i: all.at[i].set(one), reports, report)
            i += 1
        return state, reports


def _reading(name: str) -> Callable:
    """Return a method that reads a tracer's concrete value; without one, and in other threads, JAX'
    own method.
    """

    def read(tracer: jax.core.Tracer, *args: Any, **kwargs: Any) -> Any:
        value = tracer.to_concrete_value() if _READABLE.get() else None
        found = partial(_OWN[name], tracer) if value is None else getattr(np.asarray(value), name)
        return found(*args, **kwargs)

    return read


def _ufunc(_: jax.core.Tracer, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
    """Return the result of a numpy ufunc on tracers: operators run in JAX; others may not return a
    float.
    """
    if method == "__call__" and not kwargs and ufunc.__name__ in _OPERATORS:
        return getattr(jnp, ufunc.__name__)(*inputs)
    inputs = tuple(
        np.asarray(leaf) if isinstance(leaf, jax.core.Tracer) else leaf for leaf in inputs
    )
    return _looked(getattr(ufunc, method)(*inputs, **kwargs), ufunc.__name__)


def _function(_: jax.core.Tracer, function: Any, types: Any, args: tuple, kwargs: dict) -> Any:
    """Return the result of another numpy function on tracers."""
    return _looked(function._implementation(*args, **kwargs), function.__name__)


def _looked(found: Any, name: str) -> Any:
    """Return a result of numpy.

    Raises:
        SpecificationError: the result is floating, so that a gradient would be lost.
    """
    floats = (leaf for leaf in jax.tree.leaves(found) if isinstance(leaf, np.ndarray | np.inexact))
    if _READABLE.get() and any(leaf.dtype.kind in "fcV" for leaf in floats):
        must = (
            f"A value whose gradient is taken must not go through np.{name}: numpy's result "
            "has no gradient."
        )
        try_ = (
            f"keras.ops.{name} or its equivalent there; to read the numbers, "
            f"np.{name}(np.asarray(x))."
        )
        raise SpecificationError(message(must, "a tracer of JAX, under run_eagerly=True", try_))
    return found


_PATCHES = {name: _reading(name) for name in _READS} | {
    "__array_ufunc__": _ufunc,
    "__array_function__": _function,
}
_BEFORE = {name: vars(jax.core.Tracer)[name] for name in _PATCHES if name in vars(jax.core.Tracer)}


@contextmanager
def readable() -> Iterator[None]:
    """Let numpy and Python read tracers that have a concrete value, in this thread.

    The first thread to enter patches JAX' class, whose methods work as before in other threads; the
    last restores it.
    """
    with _LOCK:
        _holders.append(None)
        for name, method in _PATCHES.items():
            setattr(jax.core.Tracer, name, method)
    token = _READABLE.set(True)
    try:
        yield
    finally:
        _READABLE.reset(token)
        with _LOCK:
            _holders.pop()
            for name in _PATCHES if not _holders else ():
                if name in _BEFORE:
                    setattr(jax.core.Tracer, name, _BEFORE[name])
                else:
                    delattr(jax.core.Tracer, name)
