"""The functions of `keras.random`, made of words that belong to rows. Arguments are those in Keras,
except the seed.

A word is a function of the seed, the row's place in the update, and the word's place in the row.
The generator is Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
2011), implemented by `wholestep.engines.protocol.RandomWords.words`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import keras
import numpy as np
from keras import ops

from wholestep.engines import Engine
from wholestep.tree import Tensor

FLOATS = ("float16", "bfloat16", "float32", "float64")
LATER = 1
ALL = 2
PAIRS = 3
_MANTISSA = {"float16": 10, "bfloat16": 7, "float32": 23}
Shape = tuple[int, ...]

_LIMIT = math.erf(math.sqrt(2))  # the probability of two deviations around the mean
_MOST_TRIALS = 10_000  # a hundred suffice in practice, except for sums of waiting times
_NAN = float("nan")
_INVERTED = 10  # below this mean, sum waiting times
# log(k!) minus Stirling's formula, k = 0 .. 9
_TAILS = (
    *(
        0.0810614667953272,
        0.0413406959554092,
        0.0276779256849983,
        0.0207906721037650,
        0.0166446911898211,
    ),
    *(
        0.0138761288230707,
        0.0118967099458917,
        0.0104112652619720,
        0.0092554621827127,
        0.0083305634333628,
    ),
)


@dataclass(frozen=True)
class Words:
    """The random words of one draw.

    Args:
        seed: the state of a seed generator, (2,).
        first: the place in the update of the first row.
        num_rows: the number of rows in the (micro)batch.
        axis: the axis that holds rows; None if a draw is the same for all rows.
        extreme: (), 0 or, in a probe, where to draw the least numbers (negative: the greatest): in
            the later half of the rows (`LATER`), everywhere (`ALL`), or in every second pair of a
            draw that all rows share (`PAIRS`).
    """

    engine: Engine
    seed: Tensor
    first: Tensor | int
    num_rows: int
    axis: int | None
    extreme: Tensor | None = None

    def words(self, shape: tuple[int, ...], stream: Tensor | int = 0) -> Tensor:
        """Return words of this shape, uint32; the words of different streams are independent."""
        if self.axis is None:
            words = ops.reshape(
                self.engine.random.words(self.seed, stream, 0, 1, math.prod(shape)), shape
            )
            extreme = self.extreme
            return (
                words
                if extreme is None
                else _at_extremes(words, extreme, PAIRS, _is_in_second_pair(shape), stream)
            )
        before = shape[: self.axis]
        size = shape[self.axis]
        after = shape[self.axis + 1 :]
        several = size // max(self.num_rows, 1)
        num = math.prod(before) * several * math.prod(after)
        rows = self.engine.random.words(self.seed, stream, self.first, self.num_rows, num)
        if self.extreme is not None:
            is_later = np.arange(self.num_rows)[:, None] >= self.num_rows // 2
            rows = _at_extremes(rows, self.extreme, LATER, is_later, stream)
        if self.axis:
            rows = ops.moveaxis(
                ops.reshape(rows, (self.num_rows, *before, several, *after)), 0, self.axis
            )
        return ops.reshape(rows, shape)

    def below(self, shape: tuple[int, ...], probability: float) -> Tensor:
        """Return booleans that are true with this probability."""
        limit = min(max(round(probability * 2**32), 0), 2**32 - 1)
        return self.words(shape) < ops.convert_to_tensor(limit, "uint32")

    def uniform(self, shape: tuple[int, ...], dtype: str, stream: Tensor | int = 0) -> Tensor:
        """Return numbers of [0, 1): multiples of the spacing of the dtype in [1, 2)."""
        if dtype == "float64":
            return self._whole(shape, stream) * 2.0**-52
        num = _MANTISSA[dtype]
        whole = ops.cast(_shifted(self.words(shape, 2 * stream), 32 - num), "float32")
        return ops.cast(whole * 2.0**-num, dtype)

    def inside(self, shape: tuple[int, ...], dtype: str, stream: Tensor | int = 0) -> Tensor:
        """Return numbers of (0, 1), float32 or float64: the midpoints of equal intervals."""
        if dtype == "float64":
            return (2.0 * self._whole(shape, stream) + 1.0) * 2.0**-53
        whole = ops.cast(_shifted(self.words(shape, 2 * stream), 9), "float32")
        return (2.0 * whole + 1.0) * 2.0**-24

    def _whole(self, shape: tuple[int, ...], stream: Tensor | int) -> Tensor:
        """Return integers of 52 bits, float64."""
        high, low = (_shifted(self.words(shape, 2 * stream + i), 6) for i in (0, 1))
        return ops.cast(high, "float64") * 2.0**26 + ops.cast(low, "float64")


def _at_extremes(
    words: Tensor, extreme: Tensor, which: int, places: np.ndarray, stream: Tensor | int
) -> Tensor:
    """Return words, replaced by extreme words at `places` if `extreme` is `which`, and everywhere
    if it is `ALL`.

    Words of a trial (a traced stream) are inverted instead: with extreme words the trials might
    never end.
    """
    is_replaced = (places & (abs(extreme) == which)) | (abs(extreme) == ALL)
    least, greatest = (ops.full_like(words, word) for word in (0, 2**32 - 1))
    by = (
        ops.where(extreme > 0, least, greatest)
        if isinstance(stream, int)
        else ops.bitwise_not(words)
    )
    return ops.where(is_replaced, by, words)


def _is_in_second_pair(shape: tuple[int, ...]) -> np.ndarray:
    """Return a mask of every second pair of elements, alternating along each axis."""
    return np.asarray(sum(np.indices(shape) // 2) % 2 == 1)


def wide(dtype: str) -> str:
    """Return the dtype in which a distribution of such numbers is computed.

    >>> wide("bfloat16"), wide("float64")
    ('float32', 'float64')
    """
    return "float64" if dtype == "float64" else "float32"


def _shifted(words: Tensor, num: int) -> Tensor:
    """Return words shifted right by `num` bits, so that they can be cast exactly to a floating
    dtype.
    """
    return ops.right_shift(words, ops.convert_to_tensor(num, "uint32"))


def float_dtype(dtype: str | None) -> str:
    """Return the dtype of the result: Keras' floatx if None, and float32 where JAX has no 64
    bits.
    """
    dtype = keras.backend.standardize_dtype(dtype or keras.config.floatx())
    return (
        keras.backend.standardize_dtype(ops.cast(0, dtype).dtype) if dtype == "float64" else dtype
    )


def uniform(
    words: Words,
    shape: Shape,
    minval: Tensor | float = 0.0,
    maxval: Tensor | float = 1.0,
    dtype: str | None = None,
) -> Tensor:
    """Return numbers of [minval, maxval)."""
    dtype = float_dtype(dtype)
    low = ops.cast(minval, dtype)
    high = ops.cast(maxval, dtype)
    return words.uniform(shape, dtype) * (high - low) + low


def normal(
    words: Words,
    shape: Shape,
    mean: Tensor | float = 0.0,
    stddev: Tensor | float = 1.0,
    dtype: str | None = None,
) -> Tensor:
    """Return numbers of a normal distribution, by the inverse of its distribution function."""
    dtype = float_dtype(dtype)
    return ops.cast(standard(words, shape, wide(dtype)), dtype) * ops.cast(
        stddev, dtype
    ) + ops.cast(mean, dtype)


def standard(words: Words, shape: Shape, dtype: str, stream: Tensor | int = 0) -> Tensor:
    """Return numbers of the normal distribution of mean 0 and deviation 1."""
    return math.sqrt(2) * ops.erfinv(2.0 * words.inside(shape, dtype, stream) - 1.0)


def truncated_normal(
    words: Words,
    shape: Shape,
    mean: Tensor | float = 0.0,
    stddev: Tensor | float = 1.0,
    dtype: str | None = None,
) -> Tensor:
    """Return numbers of a normal distribution, none of them two deviations or more from its
    mean.
    """
    dtype = float_dtype(dtype)
    drawn = math.sqrt(2) * ops.erfinv(_LIMIT * (2.0 * words.inside(shape, wide(dtype)) - 1.0))
    drawn = ops.cast(ops.clip(drawn, -2.0, 2.0), dtype)
    return drawn * ops.cast(stddev, dtype) + ops.cast(mean, dtype)


def randint(
    words: Words, shape: Shape, minval: Tensor | int, maxval: Tensor | int, dtype: str = "int32"
) -> Tensor:
    """Return whole numbers of [minval, maxval), fewer than 2**32 of them.

    A number of 64 random bits is scaled: no value comes oftener than another by more than 2**-32 of
    its share.
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
    half = ops.convert_to_tensor(16, "uint32")
    mask = ops.convert_to_tensor(0xFFFF, "uint32")
    (a, b), (c, d) = (
        (ops.right_shift(word, half), ops.bitwise_and(word, mask)) for word in (one, two)
    )
    middle = ops.right_shift(b * d, half) + ops.bitwise_and(b * c, mask) + a * d
    return a * c + ops.right_shift(b * c, half) + ops.right_shift(middle, half)


def categorical(words: Words, logits: Tensor, num_samples: int, dtype: str = "int32") -> Tensor:
    """Return for each row of logits (rows, classes) the numbers of classes, (rows, samples), by
    Gumbel's trick.
    """
    rows, classes = logits.shape
    own = wide(keras.backend.standardize_dtype(logits.dtype))
    noise = -ops.log(-ops.log(words.inside((rows, num_samples, classes), own)))
    return ops.cast(ops.argmax(ops.cast(logits, own)[:, None, :] + noise, axis=-1), dtype)


def dropout(words: Words, inputs: Tensor, rate: float, noise_shape: Shape) -> Tensor:
    """Return the inputs with some set to 0, and the rest scaled up; `noise_shape` has 1 where one
    draw serves all.
    """
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


# ---- rejection sampling ----

# The trials of an element are numbered, and each has separate words, so its value does not depend
# on the trials of other elements.


def gamma(words: Words, shape: Shape, alpha: Tensor | float, dtype: str | None = None) -> Tensor:
    """Return numbers of gamma distributions of scale 1, with their derivative by alpha."""
    dtype = float_dtype(dtype)
    return ops.cast(ops.exp(_log_gamma(words, shape, alpha, wide(dtype), 0)), dtype)


def beta(
    words: Words,
    shape: Shape,
    alpha: Tensor | float,
    beta: Tensor | float,
    dtype: str | None = None,
) -> Tensor:
    """Return numbers of beta distributions: the ratio of a gamma number to the sum of two."""
    dtype = float_dtype(dtype)
    one, two = (_log_gamma(words, shape, a, wide(dtype), i) for i, a in enumerate((alpha, beta)))
    return ops.cast(ops.sigmoid(one - two), dtype)


def _log_gamma(
    words: Words, shape: Shape, alpha: Tensor | float, dtype: str, number: int
) -> Tensor:
    """Return logarithms of gamma numbers.

    By Marsaglia and Tsang, "A simple method for generating gamma variables" (2000).

    Args:
        number: 0 or 1, to tell two simultaneous draws apart.
    """
    given = ops.broadcast_to(ops.cast(alpha, dtype), shape)
    fixed = ops.stop_gradient(given)
    d = ops.where(fixed < 1, fixed + 1, fixed) - 1 / 3
    c = 1 / ops.sqrt(9 * d)

    def trial(t: Tensor, log: Tensor, accepted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = standard(words, shape, dtype, 4 * t + 2 * number + 2)
        v = (1 + c * x) ** 3
        log_v = ops.log(ops.where(v > 0, v, ops.ones_like(v)))
        u = words.inside(shape, dtype, 4 * t + 2 * number + 3)
        fits = (v > 0) & (ops.log(u) < 0.5 * x * x + d * (1 - v + log_v))
        return t + 1, ops.where(accepted, log, log_v), accepted | fits

    is_valid = fixed > 0
    log = ops.where(is_valid, ops.log(d) + _tried(trial, shape, dtype, is_valid), _NAN)
    boost = ops.log(words.inside(shape, dtype, number)) / fixed
    log = ops.stop_gradient(ops.where(fixed < 1, log + boost, log))
    if not hasattr(alpha, "dtype") or isinstance(alpha, np.ndarray | np.generic):
        return log
    number_drawn = ops.exp(log)
    slope = words.engine.random.gamma_slope(fixed, number_drawn) / number_drawn
    return log + (given - fixed) * ops.stop_gradient(
        ops.where(ops.isfinite(slope), slope, ops.zeros_like(slope))
    )


def _tried(trial: Callable[..., tuple], shape: Shape, dtype: str, is_valid: Tensor) -> Tensor:
    """Return the accepted values of (trial, value, accepted) -> the next triple, element by
    element.

    Args:
        is_valid: where parameters are valid; elsewhere no trial would ever be accepted.
    """

    def goes_on(t: Tensor, value: Tensor, accepted: Tensor) -> Tensor:
        return ~ops.all(accepted) & (t < _MOST_TRIALS)

    begin = ops.zeros((), "int32"), ops.zeros(shape, dtype), ~is_valid
    return ops.while_loop(goes_on, trial, begin)[1]


def binomial(
    words: Words,
    shape: Shape,
    counts: Tensor | float,
    probabilities: Tensor | float,
    dtype: str | None = None,
) -> Tensor:
    """Return numbers of binomial distributions: the successes in `counts` trials.

    Means below 10 by summing waiting times, others by Hörmann, "The generation of binomial random
    variates" (1993).
    """
    dtype = float_dtype(dtype)
    own = wide(dtype)
    n, p = (
        ops.stop_gradient(ops.broadcast_to(ops.cast(a, own), shape))
        for a in (counts, probabilities)
    )
    is_valid = (n >= 0) & (p >= 0) & (p <= 1)
    n, p = (ops.where(is_valid, a, ops.zeros_like(a)) for a in (n, p))
    q = ops.minimum(p, 1 - p)
    few = n * q < _INVERTED
    inverted = _inverted(
        words, shape, own, ops.where(few, n, ops.zeros_like(n)), ops.where(few, q, 0.5 + 0 * q)
    )
    large_n = ops.where(few, 100.0 + 0 * n, n)
    large_q = ops.where(few, 0.5 + 0 * q, q)
    found = ops.where(few, inverted, _transformed(words, shape, own, large_n, large_q))
    return ops.cast(ops.where(is_valid, ops.where(p > 0.5, n - found, found), _NAN), dtype)


def _inverted(words: Words, shape: Shape, dtype: str, n: Tensor, q: Tensor) -> Tensor:
    """Return the number of waiting times for a success that fit into n trials."""
    scale = ops.log1p(-q)

    def trial(t: Tensor, both: Tensor, done: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        passed = both[0]
        num = both[1]
        waits = ops.ceil(ops.log(words.inside(shape, dtype, 2 * t)) / scale)
        passed = ops.where(done, passed, passed + ops.where(q > 0, waits, n + 1))
        return (
            t + 1,
            ops.stack([passed, ops.where(done | (passed > n), num, num + 1)]),
            done | (passed > n),
        )

    begin = ops.zeros((), "int32"), ops.zeros((2, *shape), dtype), ops.zeros(shape, "bool")
    return ops.while_loop(lambda t, both, done: ~ops.all(done) & (t < _MOST_TRIALS), trial, begin)[
        1
    ][1]


def _transformed(words: Words, shape: Shape, dtype: str, n: Tensor, q: Tensor) -> Tensor:
    """Return binomial numbers by transformed rejection with squeeze, for n * q >= 10 and q <=
    1/2.
    """
    deviation = ops.sqrt(n * q * (1 - q))
    b = 1.15 + 2.53 * deviation
    a = -0.0873 + 0.0248 * b + 0.01 * q
    r = q / (1 - q)
    m = ops.floor((n + 1) * q)
    quick = 0.92 - 4.2 / b
    scale = (2.83 + 5.1 / b) * deviation

    def trial(t: Tensor, value: Tensor, accepted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        u, v = (words.inside(shape, dtype, 2 * t + i) for i in (0, 1))
        u = u - 0.5
        near = 0.5 - ops.abs(u)
        k = ops.floor((2 * a / near + b) * u + n * q + 0.5)
        is_inside = (k >= 0) & (k <= n)
        k = ops.where(is_inside, k, m)
        bound = (m + 0.5) * ops.log((m + 1) / (r * (n - m + 1))) + (n + 1) * ops.log(
            (n - m + 1) / (n - k + 1)
        )
        bound = bound + (k + 0.5) * ops.log(r * (n - k + 1) / (k + 1))
        bound = bound + _tail(m) + _tail(n - m) - _tail(k) - _tail(n - k)
        fits = ((near >= 0.07) & (v <= quick)) | (ops.log(v * scale / (a / near**2 + b)) <= bound)
        return t + 1, ops.where(accepted, value, k), accepted | (is_inside & fits)

    return _tried(trial, shape, dtype, ops.ones(shape, "bool"))


def _tail(k: Tensor) -> Tensor:
    """Return log(k!) minus Stirling's formula."""
    inverse = 1 / (k + 1)
    series = (1 / 12 - (1 / 360 - inverse**2 / 1260) * inverse**2) * inverse
    known = ops.take(ops.convert_to_tensor(_TAILS, k.dtype), ops.cast(ops.clip(k, 0, 9), "int32"))
    return ops.where(k <= 9, known, series)
