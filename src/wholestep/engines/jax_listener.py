"""The listener of an audit on JAX: eager, under `grad` and inside `jit`."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import jax
import keras
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from wholestep.engines.protocol import Asked, Told
from wholestep.engines.shared import running
from wholestep.tree import Tensor


class EngineListener:
    """The listener on JAX."""

    is_deaf_to_xla = False

    def __init__(self) -> None:
        self._clock = 0
        self.clipped: dict[int, tuple[Tensor, str]] = {}
        self.handed: dict[int, Tensor] = {}
        self.clipped_late: set[str] = set()

    @contextmanager
    def listening(self, told: Asked) -> Iterator[None]:
        """Clear all traces before and after, so that functions are traced anew inside and again afterwards."""
        jax.clear_caches()
        try:
            yield
        finally:
            jax.clear_caches()

    def tell(self, told: Told, values: list[Tensor]) -> None:
        """Pass the values to `told`, in the order in which the program runs."""

        def heard(*numbers: np.ndarray) -> None:
            self._clock += 1
            told(self._clock, [np.asarray(number) for number in numbers])

        if _kinds(values):
            jax.debug.callback(heard, *values, ordered=True)
        else:
            jax.effects_barrier()  # earlier values are reported first
            heard(*map(np.asarray, values))

    def watch_gradient(self, value: Tensor, told: Told) -> Tensor:
        """Return the value, through an identity whose transpose tells the gradient."""
        if not _kinds([value]):
            return value  # nothing is differentiated
        return _watched.bind(value, jax.lax.stop_gradient(value), told=lambda *both: self.tell(told, list(both)))

    def value(self, variable: keras.Variable) -> Tensor:
        """Return the value of a Keras variable here."""
        return variable.value

    def dense(self, gradient: Tensor) -> Tensor:
        """Return the gradient unchanged."""
        return gradient

    def is_differentiated(self, values: list[Tensor]) -> bool | None:
        """Whether `grad` traces the values. None inside a nested `jit`, which hides it."""
        kinds = _kinds(values)
        if kinds & {"JVPTracer", "LinearizeTracer"}:
            return True
        return None if kinds else False

    def replica(self) -> int:
        """Return 0: a program on JAX does not know its replica."""
        return 0

    def blind(self, values: list[Tensor]) -> str:
        """Return the part of JAX under which values cannot be reported in order; "" if there is none."""
        if keras.distribution.distribution() is not None:
            return "what runs under a keras.distribution"
        return "what runs under jax.vmap" if "BatchTracer" in _kinds(values) else ""

    def stack(self) -> Iterable[tuple[str, int]]:
        """Return Python's stack: JAX traces functions unchanged."""
        return running()

    def unhooked(self, function: Callable) -> Callable:
        """Return the function unchanged."""
        return function

    def settle(self) -> None:
        """Wait for the device and its reports."""
        jax.effects_barrier()


def _kinds(values: list[Tensor]) -> set[str]:
    return {type(value).__name__ for value in values if isinstance(value, jax.core.Tracer)}


def _is_first(first: Tensor, second: Tensor, *, told: Callable) -> Tensor:
    return first


def _derived(primals: tuple, tangents: tuple, *, told: Callable) -> tuple:
    (first, second), (tangent, _) = primals, tangents
    value = _watched.bind(first, second, told=told)
    if isinstance(tangent, ad.Zero):
        return value, ad.Zero.from_primal_value(value)
    return value, _watched.bind(tangent, second, told=told)


def _transposed(gradient: Tensor, _: Tensor, value: Tensor, *, told: Callable) -> tuple:
    if isinstance(gradient, ad.Zero):
        return None, None
    told(value, gradient)
    return gradient, None


def _batched(values: tuple, axes: tuple, *, told: Callable) -> tuple:
    return _watched.bind(*values, told=told), axes[0]


_watched = Primitive("watched")  # the identity of its first argument, linear in it
_watched.def_impl(_is_first)
_watched.def_abstract_eval(_is_first)
ad.primitive_jvps[_watched] = _derived
ad.primitive_transposes[_watched] = _transposed
batching.primitive_batchers[_watched] = _batched
mlir.register_lowering(_watched, mlir.lower_fun(_is_first, multiple_results=False))
