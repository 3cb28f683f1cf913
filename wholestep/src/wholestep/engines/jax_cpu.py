"""Operations for which XLA's compiler for CPUs has slow code: max pooling's gradient, and some
convolutions.

Here they are elementwise operations on shifted slices, or one product of matrices, in this
library's programs alone. Measured on two cores:

- XLA's gradient of max pooling visits each window in turn. For 64 images of 26 x 26 x 32 in windows
  of 2 x 2 it takes 14.9 ms, and this one 0.9. Where windows do not overlap, both give the same
  bits.
- A depthwise convolution of 32 images of 28 x 28 x 64 with 3 x 3 takes 31 ms, and so does its
  gradient by the images; here 0.9 and 1.0. Its gradient by the kernel is XLA's.
- The gradient by the kernel of a convolution with 1 x 1, of as many images from 64 to 64 channels,
  takes 7.8 ms, and as a product of matrices 2.9. To XLA it is a convolution whose kernel has the
  size of the images.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import mlir

from wholestep.jax_private import lowering

_MOST_PLACES = 32  # of a window or a kernel: each is an operation
_POOLING = lax.select_and_scatter_add_p
_CONVOLUTION = lax.conv_general_dilated_p

_is_ours: ContextVar[bool] = ContextVar("whether this library's program is lowered", default=False)


@contextmanager
def elementwise() -> Iterator[None]:
    """Return a context in which programs are lowered with this module's operations; others keep
    XLA's.
    """
    token = _is_ours.set(True)
    try:
        yield
    finally:
        _is_ours.reset(token)


def _lower(
    xla: Callable, ours: Callable[..., Callable | None], context: Any, *values: Any, **how: Any
) -> Any:
    """Return the lowered operation: ours, unless it returns None for these shapes."""
    if _is_ours.get() and (function := ours(*context.avals_in, **how)) is not None:
        return mlir.lower_fun(function, multiple_results=False)(context, *values)
    return xla(context, *values, **how)


def _pooling(
    source: Any,
    operand: Any,
    *,
    select_prim: Any,
    window_dimensions: Sequence,
    window_strides: Sequence,
    padding: Any,
) -> Callable | None:
    is_max = select_prim is lax.ge_p and jnp.issubdtype(operand.dtype, jnp.floating)
    if not is_max or math.prod(window_dimensions) > _MOST_PLACES:
        return None
    return partial(
        pooling_gradient, window=window_dimensions, strides=window_strides, padding=padding
    )


def _convolution(x: Any, kernel: Any, **how: Any) -> Callable | None:
    lhs, rhs, _ = numbers = how["dimension_numbers"]
    is_single = x.dtype == kernel.dtype in (jnp.float32, jnp.float64)
    is_single &= how["preferred_element_type"] in (None, x.dtype)
    if not is_single or how["batch_group_count"] != 1:
        return None
    num_groups = how["feature_group_count"]
    image = [x.shape[axis] for axis in lhs[2:]]
    window = [kernel.shape[axis] for axis in rhs[2:]]
    if num_groups == 1 and image and image == window:
        is_dilated = {1} != {*how["lhs_dilation"], *how["rhs_dilation"]}
        is_padded = any(map(any, how["padding"]))
        return None if is_dilated or is_padded else partial(product, numbers=numbers)
    is_depthwise = num_groups == x.shape[lhs[1]] == kernel.shape[rhs[0]] > 1
    if not is_depthwise or math.prod(window) > _MOST_PLACES:
        return None
    names = "window_strides", "padding", "lhs_dilation", "rhs_dilation"
    return partial(depthwise, numbers=numbers, **{name: how[name] for name in names})


def register() -> None:
    """Let JAX lower these operations here, where it tells its own rules for all others."""
    for primitive, ours in ((_POOLING, _pooling), (_CONVOLUTION, _convolution)):
        if (xla := lowering(primitive)) is not None:
            mlir.register_lowering(primitive, partial(_lower, xla, ours), platform="cpu")


register()


def pooling_gradient(
    source: jax.Array,
    operand: jax.Array,
    *,
    window: Sequence[int],
    strides: Sequence[int],
    padding: Sequence,
) -> jax.Array:
    """Return the gradient by the operand of max pooling: each window's goes to its first largest
    value.

    Args:
        source: the gradient by the result, one value for each window.
        window, strides: by axis of the operand.
        padding: (low, high) by axis.

    >>> x, by_result = jnp.array([3.0, 3.0, 1.0, 2.0, 9.0]), jnp.array([10.0, 20.0])
    >>> pooling_gradient(by_result, x, window=(2,), strides=(2,), padding=[(0, 0)]).tolist()
    [10.0, 0.0, 0.0, 20.0, 0.0]
    """
    lowest = jnp.array(-jnp.inf, operand.dtype)
    values = lax.pad(operand, lowest, [(*ends, 0) for ends in padding])
    starts = list(itertools.product(*map(range, window)))
    chosen = _largest(values, starts, source.shape, strides)
    zero = jnp.zeros((), source.dtype)
    total = jnp.zeros(values.shape, source.dtype)
    for i, start in enumerate(starts):
        ends = _ends(start, source.shape, strides)
        spread = [
            (at, size - end, stride - 1)
            for at, size, end, stride in zip(start, values.shape, ends, strides, strict=True)
        ]
        total = total + lax.pad(jnp.where(chosen == i, source, zero), zero, spread)
    low = [first for first, _ in padding]
    return _shifted(total, low, operand.shape, [1] * operand.ndim)


def _largest(
    values: jax.Array, starts: list[tuple], shape: Sequence[int], strides: Sequence[int]
) -> jax.Array:
    """Return the index of the start from which each window has its first largest value."""
    largest = _shifted(values, starts[0], shape, strides)
    chosen = jnp.zeros(largest.shape, jnp.int32)
    for i, start in enumerate(starts[1:], start=1):
        other = _shifted(values, start, shape, strides)
        keeps = largest >= other
        largest = jnp.where(keeps, largest, other)
        chosen = jnp.where(keeps, chosen, i)
    return chosen


def depthwise(
    x: jax.Array,
    kernel: jax.Array,
    *,
    window_strides: Sequence[int],
    padding: Sequence,
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
    numbers: Any,
) -> jax.Array:
    """Return `jax.lax.conv_general_dilated`, where each channel has a kernel for itself.

    >>> x, kernel = jnp.arange(8.0).reshape(1, 4, 2), jnp.ones((2, 1, 2))
    >>> dilations = {"lhs_dilation": (1,), "rhs_dilation": (1,)}
    >>> how = {"window_strides": (1,), "padding": [(0, 0)]} | dilations
    >>> numbers = lax.conv_dimension_numbers(x.shape, kernel.shape, ("NWC", "WIO", "NWC"))
    >>> depthwise(x, kernel, **how, numbers=numbers).tolist()
    [[[2.0, 4.0], [6.0, 8.0], [10.0, 12.0]]]
    """
    lhs, rhs, out = numbers
    x = jnp.transpose(x, (lhs[0], *lhs[2:], lhs[1]))
    kernel = jnp.squeeze(jnp.transpose(kernel, (*rhs[2:], rhs[0], rhs[1])), -1)
    spread = [(*ends, dilation - 1) for ends, dilation in zip(padding, lhs_dilation, strict=True)]
    x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *spread, (0, 0, 0)])
    *sizes, num_channels = kernel.shape
    nums = [
        (size - (num - 1) * dilation - 1) // stride + 1
        for size, num, dilation, stride in zip(
            x.shape[1:-1], sizes, rhs_dilation, window_strides, strict=True
        )
    ]
    shape = (x.shape[0], *nums, num_channels)
    total = jnp.zeros((), x.dtype)
    for place in itertools.product(*map(range, sizes)):
        start = [at * dilation for at, dilation in zip(place, rhs_dilation, strict=True)]
        total = total + _shifted(x, (0, *start, 0), shape, (1, *window_strides, 1)) * kernel[place]
    return _ordered(total, out)


def product(x: jax.Array, kernel: jax.Array, *, numbers: Any) -> jax.Array:
    """Return the convolution with a kernel as large as the images: one number for each image and
    kernel.

    >>> x, kernel = jnp.arange(6.0).reshape(1, 3, 2), jnp.ones((3, 2, 4))
    >>> axes = "NWC", "WIO", "NWC"
    >>> numbers = lax.conv_dimension_numbers(x.shape, kernel.shape, axes)
    >>> product(x, kernel, numbers=numbers).tolist()
    [[[15.0, 15.0, 15.0, 15.0]]]
    """
    lhs, rhs, out = numbers
    found = lax.dot_general(x, kernel, (((*lhs[2:], lhs[1]), (*rhs[2:], rhs[1])), ((), ())))
    return _ordered(jnp.expand_dims(found, tuple(range(1, len(lhs) - 1))), out)


def _ordered(found: jax.Array, out: Sequence[int]) -> jax.Array:
    """Return an array of (rows, other axes, channels) with its axes in the order of a convolution's
    result.
    """
    places = [0, found.ndim - 1, *range(1, found.ndim - 1)]
    return jnp.transpose(found, [places[out.index(axis)] for axis in range(found.ndim)])


def _shifted(
    x: jax.Array, start: Sequence[int], shape: Sequence[int], strides: Sequence[int]
) -> jax.Array:
    """Return the values of `shape` from a start on."""
    return lax.slice(x, start, _ends(start, shape, strides), strides)


def _ends(start: Sequence[int], shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Return the ends of slices of `shape` from a start on."""
    return [
        at + (num - 1) * stride + 1 for at, num, stride in zip(start, shape, strides, strict=True)
    ]
