"""The functions of `keras.random`, made of words that belong to rows. Arguments are those in Keras, except the seed."""

import math

import keras
from keras import ops

from wholestep.model.words import Words, float_dtype, wide
from wholestep.tree import Tensor

Shape = tuple[int, ...]

_LIMIT = math.erf(math.sqrt(2))  # the probability of two deviations around the mean


def uniform(
    words: Words, shape: Shape, minval: Tensor | float = 0.0, maxval: Tensor | float = 1.0, dtype: str | None = None
) -> Tensor:
    """Return numbers of [minval, maxval)."""
    dtype = float_dtype(dtype)
    low, high = ops.cast(minval, dtype), ops.cast(maxval, dtype)
    return words.uniform(shape, dtype) * (high - low) + low


def normal(
    words: Words, shape: Shape, mean: Tensor | float = 0.0, stddev: Tensor | float = 1.0, dtype: str | None = None
) -> Tensor:
    """Return numbers of a normal distribution, by the inverse of its distribution function."""
    dtype = float_dtype(dtype)
    return ops.cast(standard(words, shape, wide(dtype)), dtype) * ops.cast(stddev, dtype) + ops.cast(mean, dtype)


def standard(words: Words, shape: Shape, dtype: str, stream: Tensor | int = 0) -> Tensor:
    """Return numbers of the normal distribution of mean 0 and deviation 1."""
    return math.sqrt(2) * ops.erfinv(2.0 * words.inside(shape, dtype, stream) - 1.0)


def truncated_normal(
    words: Words, shape: Shape, mean: Tensor | float = 0.0, stddev: Tensor | float = 1.0, dtype: str | None = None
) -> Tensor:
    """Return numbers of a normal distribution, none of them two deviations or more from its mean."""
    dtype = float_dtype(dtype)
    drawn = math.sqrt(2) * ops.erfinv(_LIMIT * (2.0 * words.inside(shape, wide(dtype)) - 1.0))
    drawn = ops.cast(ops.clip(drawn, -2.0, 2.0), dtype)
    return drawn * ops.cast(stddev, dtype) + ops.cast(mean, dtype)


def randint(words: Words, shape: Shape, minval: Tensor | int, maxval: Tensor | int, dtype: str = "int32") -> Tensor:
    """Return whole numbers of [minval, maxval), fewer than 2**32 of them.

    A number of 64 random bits is scaled: no value comes oftener than another by more than 2**-32 of its share.
    """
    dtype = keras.backend.standardize_dtype(dtype)
    wanted = dtype if dtype in ("int32", "int64", "uint32") else "int32"
    low = ops.cast(minval, wanted)
    span = ops.cast(ops.cast(maxval, wanted) - low, "uint32")
    rest = _high(words.words(shape, 1), span)
    product = words.words(shape) * span
    carry = ops.cast(product + rest < product, "uint32")
    return ops.cast(ops.cast(_high(words.words(shape), span) + carry, wanted) + low, dtype)


def _high(one: Tensor, two: Tensor) -> Tensor:
    """Return the upper 32 bits of the products of words."""
    half, mask = ops.convert_to_tensor(16, "uint32"), ops.convert_to_tensor(0xFFFF, "uint32")
    (a, b), (c, d) = ((ops.right_shift(word, half), ops.bitwise_and(word, mask)) for word in (one, two))
    middle = ops.right_shift(b * d, half) + ops.bitwise_and(b * c, mask) + a * d
    return a * c + ops.right_shift(b * c, half) + ops.right_shift(middle, half)


def categorical(words: Words, logits: Tensor, num_samples: int, dtype: str = "int32") -> Tensor:
    """Return for each row of logits (rows, classes) the numbers of classes, (rows, samples), by Gumbel's trick."""
    rows, classes = logits.shape
    own = wide(keras.backend.standardize_dtype(logits.dtype))
    noise = -ops.log(-ops.log(words.inside((rows, num_samples, classes), own)))
    return ops.cast(ops.argmax(ops.cast(logits, own)[:, None, :] + noise, axis=-1), dtype)


def dropout(words: Words, inputs: Tensor, rate: float, noise_shape: Shape) -> Tensor:
    """Return the inputs with some set to 0, and the rest scaled up; `noise_shape` has 1 where one draw serves all."""
    kept = words.below(noise_shape, 1.0 - rate)
    return ops.where(kept, inputs * (1.0 / (1.0 - rate)), ops.zeros_like(inputs))


def shuffle_slices(words: Words, x: Tensor, axis: int = 0) -> Tensor:
    """Return x with its slices along the axis in one random order.

    TensorFlow's own depends on its compiler: XLA draws other numbers from the same seed.
    """
    return ops.take(x, ops.argsort(words.words((x.shape[axis],))), axis=axis)


def shuffle(words: Words, x: Tensor, axis: int = 0) -> Tensor:
    """Return x with every vector along the axis in an independent random order."""
    return ops.take_along_axis(x, ops.argsort(words.words(tuple(x.shape)), axis=axis), axis=axis)
