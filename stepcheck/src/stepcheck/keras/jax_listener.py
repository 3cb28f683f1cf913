"""The listener on JAX: eager, under `grad` and inside `jit`."""

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.experimental import io_callback
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from stepcheck.keras.listener import Listener, Told
from stepcheck.tree import Tensor


class EngineListener(Listener):
    """The listener on JAX."""

    def __init__(self) -> None:
        self._clock = 0
        # under `shard_map`, by replica
        self._num_told: Counter[int] = Counter()
        self._telling = threading.Lock()  # several devices tell at once
        self._are_several = False  # devices that a program of the loop runs on

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Clear all traces before and after, so that functions are traced anew inside
        and again afterwards.
        """
        jax.clear_caches()
        try:
            yield
        finally:
            jax.effects_barrier()
            jax.clear_caches()

    def tell(self, told: Told, values: list[Tensor]) -> None:
        """Pass the values to `told`, in the order in which the program runs; under
        `shard_map`, on each device.

        JAX orders the calls of one device. Under `shard_map` all make the same calls,
        so the n-th call of each has one place. A call outside comes after the n-th
        calls of all devices.
        """
        axes, here = _axes(), np.zeros((), np.int32)

        def heard(replica: np.ndarray, *numbers: np.ndarray) -> None:
            with self._telling:
                index = int(replica)
                self._clock += 1
                self._num_told[index] += bool(axes)
                place = index if axes else self._clock + _MOST_DEVICES
                order = (self._num_told[index] << 32) + place
                told(order, index, [*map(np.asarray, numbers)])

        if not _kinds(values):
            jax.effects_barrier()  # earlier values are reported first
            heard(here, *values)
            return
        joined, apart = _joined(values)

        def called(replica: np.ndarray, *numbers: np.ndarray) -> None:
            heard(replica, *apart([*map(np.asarray, numbers)]))

        if self._spans_devices():
            # JAX orders no other callback there, but has no derivative of this one.
            replica = jax.lax.axis_index(axes) if axes else here
            given = map(jax.lax.stop_gradient, joined)
            io_callback(called, None, replica, *given, ordered=True)
        else:
            jax.debug.callback(called, here, *joined, ordered=True)

    def _spans_devices(self) -> bool:
        """Whether the loop has programs on several devices, as far as is known here."""
        if not self._are_several and jax.device_count() > 1:
            arrays = jax.live_arrays()
            self._are_several = bool(_axes()) or any(
                len(each.sharding.device_set) > 1 for each in arrays
            )
        return self._are_several

    def watch_gradient(self, value: Tensor, told: Told) -> Tensor:
        """Return the value, through an identity whose transpose tells the gradient."""
        if not _kinds([value]):
            return value  # nothing is differentiated
        return _watched.bind(
            value,
            jax.lax.stop_gradient(value),
            told=lambda *both: self.tell(told, list(both)),
        )

    def value(self, variable: keras.Variable) -> Tensor:
        """Return the value of a Keras variable here."""
        return variable.value

    def is_differentiated(self, values: list[Tensor]) -> bool | None:
        """Whether `grad` traces the values. None inside a nested `jit`, which hides it."""
        kinds = _kinds(values)
        if kinds & {"JVPTracer", "LinearizeTracer"}:
            return True
        return None if kinds else False

    def blind(self, values: list[Tensor]) -> str:
        """Return the name of a part of JAX that reports no values in order; "" if there
        is none.
        """
        if keras.distribution.distribution() is not None:
            return "keras.distribution"
        if len(_axes()) > 1:
            # the optimizer's step may be in the same program
            self._are_several = True
            return "jax.shard_map over several axes"
        return "jax.vmap" if "BatchTracer" in _kinds(values) else ""


_MOST_DEVICES = 1 << 20
Apart = Callable[[list[np.ndarray]], list[np.ndarray]]


def _joined(values: list[Tensor]) -> tuple[list[Tensor], Apart]:
    """Return all numbers of each dtype as one vector, and what takes them apart again:
    a callback is slow by the number of its arrays.
    """
    kinds = dict.fromkeys(value.dtype for value in values)
    shapes = [value.shape for value in values]
    groups = [
        [i for i, value in enumerate(values) if value.dtype == kind]
        for kind in kinds
    ]

    def apart(vectors: list[np.ndarray]) -> list[np.ndarray]:
        found = [np.zeros(0)] * len(shapes)
        for own, vector in zip(groups, vectors, strict=True):
            ends = np.cumsum([math.prod(shapes[i]) for i in own])
            for i, part in zip(own, np.split(vector, ends[:-1]), strict=True):
                found[i] = part.reshape(shapes[i])
        return found

    parts = [[jnp.ravel(values[i]) for i in own] for own in groups]
    return [*map(jnp.concatenate, parts)], apart


def _axes() -> tuple[str, ...]:
    """Return the axes of the mesh of devices on each of which this code runs, under
    `shard_map` or `pmap`.
    """
    return tuple(getattr(jax.sharding.get_abstract_mesh(), "manual_axes", ()))


def _kinds(values: list[Tensor]) -> set[str]:
    return {
        type(value).__name__
        for value in values
        if isinstance(value, jax.core.Tracer)
    }


def _is_first(first: Tensor, second: Tensor, *, told: Callable) -> Tensor:
    return first


def _derived(primals: tuple, tangents: tuple, *, told: Callable) -> tuple:
    (first, second), (tangent, _) = primals, tangents
    value = _watched.bind(first, second, told=told)
    if isinstance(tangent, ad.Zero):
        return value, ad.Zero.from_primal_value(value)
    return value, _watched.bind(tangent, second, told=told)


def _transposed(
    gradient: Tensor, _: Tensor, value: Tensor, *, told: Callable
) -> tuple:
    if isinstance(gradient, ad.Zero):
        return None, None
    told(value, gradient)
    return gradient, None


def _batched(values: tuple, axes: tuple, *, told: Callable) -> tuple:
    return _watched.bind(*values, told=told), axes[0]


# the identity of its first argument, linear in it
_watched = Primitive("watched")
_watched.def_impl(_is_first)
_watched.def_abstract_eval(_is_first)
ad.primitive_jvps[_watched] = _derived
ad.primitive_transposes[_watched] = _transposed
batching.primitive_batchers[_watched] = _batched
mlir.register_lowering(
    _watched, mlir.lower_fun(_is_first, multiple_results=False)
)
