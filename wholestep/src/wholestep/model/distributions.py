"""The functions of `keras.random`, made of words that belong to rows.

Arguments are those in Keras, except the seed. A word is a function of the seed, the row's place in
the update, and the word's place in the row. The generator is Philox-4x32-10 (Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3", 2011), implemented by
`wholestep.engines.protocol.RandomWords.words`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import keras
import numpy as np
from keras import ops

from wholestep.engines import Engine
from wholestep.tree import Tensor

LATER = 1
ALL = 2
PAIRS = 3
_MANTISSA = {"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52}
_LARGEST_WORD = 2**32 - 1
Shape = tuple[int, ...]
Number = Tensor | float

_LIMIT = math.erf(math.sqrt(2))  # the probability of two deviations around the mean
_MOST_TRIALS = 10_000  # a hundred suffice in practice, except for sums of waiting times
_NAN = float("nan")
_INVERTED = 10  # below this mean, sum waiting times
# log(k!) minus Stirling's formula, k = 0 .. 9
_TAILS = (
    0.0810614667953272,
    0.0413406959554092,
    0.0276779256849983,
    0.0207906721037650,
    0.0166446911898211,
    0.0138761288230707,
    0.0118967099458917,
    0.0104112652619720,
    0.0092554621827127,
    0.0083305634333628,
)


@dataclass(frozen=True)
class RandomBits:
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

    def words(self, shape: Shape, stream: Tensor | int = 0) -> Tensor:
        """Return words of this shape, uint32; the words of different streams are independent."""
        if self.axis is None:
            return self._shared_words(shape, stream)
        before = shape[: self.axis]
        after = shape[self.axis + 1 :]
        per_row = shape[self.axis] // max(self.num_rows, 1)
        num_words = math.prod((*before, per_row, *after))
        words = self.engine.random.words(
            self.seed,
            stream,
            self.first,
            self.num_rows,
            num_words,
        )
        if self.extreme is not None:
            is_later = np.arange(self.num_rows)[:, None] >= self.num_rows // 2
            words = self._with_extremes(words, LATER, is_later, stream)
        if self.axis:
            words = ops.reshape(words, (self.num_rows, *before, per_row, *after))
            words = ops.moveaxis(words, 0, self.axis)
        return ops.reshape(words, shape)

    def _shared_words(self, shape: Shape, stream: Tensor | int) -> Tensor:
        num_words = math.prod(shape)
        words = self.engine.random.words(self.seed, stream, 0, 1, num_words)
        words = ops.reshape(words, shape)
        if self.extreme is None:
            return words
        # every second pair of elements, alternating along each axis
        is_second = np.asarray(sum(np.indices(shape) // 2) % 2 == 1)
        return self._with_extremes(words, PAIRS, is_second, stream)

    def _with_extremes(
        self, words: Tensor, which: int, places: np.ndarray, stream: Tensor | int
    ) -> Tensor:
        """Return words, extreme at `places` if `extreme` is `which`, and everywhere if it is `ALL`.

        Words of a trial (a traced stream) are inverted instead: with extreme words the trials might
        never end.
        """
        assert self.extreme is not None
        kind = abs(self.extreme)
        if isinstance(stream, int):
            greatest = ops.full_like(words, _LARGEST_WORD)
            replacement = ops.where(self.extreme > 0, ops.zeros_like(words), greatest)
        else:
            replacement = ops.bitwise_not(words)
        is_chosen = places & (kind == which)
        return ops.where(is_chosen | (kind == ALL), replacement, words)

    def below(self, shape: Shape, probability: float) -> Tensor:
        """Return booleans that are true with this probability."""
        limit = min(max(round(probability * 2**32), 0), _LARGEST_WORD)
        return self.words(shape) < ops.convert_to_tensor(limit, "uint32")

    def uniform(self, shape: Shape, dtype: str, stream: Tensor | int = 0) -> Tensor:
        """Return numbers of [0, 1): multiples of the spacing of the dtype in [1, 2)."""
        num_bits = _MANTISSA[dtype]
        integers = self._integers(shape, num_bits, stream)
        return ops.cast(integers * 2.0**-num_bits, dtype)

    def inside(self, shape: Shape, dtype: str, stream: Tensor | int = 0) -> Tensor:
        """Return numbers of (0, 1), float32 or float64: the midpoints of equal intervals."""
        num_bits = _MANTISSA[dtype]
        integers = self._integers(shape, num_bits, stream)
        return (2.0 * integers + 1.0) * 0.5 ** (num_bits + 1)

    def _integers(self, shape: Shape, num_bits: int, stream: Tensor | int) -> Tensor:
        """Return integers of `num_bits` bits, float32, or float64 for 52 bits."""
        if num_bits < 32:
            return self._upper_bits(shape, num_bits, "float32", 2 * stream)
        high = self._upper_bits(shape, 26, "float64", 2 * stream)
        low = self._upper_bits(shape, 26, "float64", 2 * stream + 1)
        return high * 2.0**26 + low

    def _upper_bits(self, shape: Shape, num_bits: int, dtype: str, stream: Tensor | int) -> Tensor:
        words = self.words(shape, stream)
        return ops.cast(
            ops.right_shift(words, ops.convert_to_tensor(32 - num_bits, "uint32")), dtype
        )


def wide(dtype: str) -> str:
    """Return the dtype in which a distribution of such numbers is computed.

    >>> wide("bfloat16"), wide("float64")
    ('float32', 'float64')
    """
    return "float64" if dtype == "float64" else "float32"


def uniform(
    bits: RandomBits,
    shape: Shape,
    minval: Number = 0.0,
    maxval: Number = 1.0,
    dtype: str = "float32",
) -> Tensor:
    """Return numbers of [minval, maxval)."""
    low = ops.cast(minval, dtype)
    high = ops.cast(maxval, dtype)
    return bits.uniform(shape, dtype) * (high - low) + low


def normal(
    bits: RandomBits, shape: Shape, mean: Number = 0.0, stddev: Number = 1.0, dtype: str = "float32"
) -> Tensor:
    """Return numbers of a normal distribution, by the inverse of its distribution function."""
    drawn = ops.cast(standard(bits, shape, wide(dtype)), dtype)
    return drawn * ops.cast(stddev, dtype) + ops.cast(mean, dtype)


def standard(bits: RandomBits, shape: Shape, dtype: str, stream: Tensor | int = 0) -> Tensor:
    """Return numbers of the normal distribution of mean 0 and deviation 1."""
    inside = bits.inside(shape, dtype, stream)
    return math.sqrt(2) * ops.erfinv(2.0 * inside - 1.0)


def truncated_normal(
    bits: RandomBits, shape: Shape, mean: Number = 0.0, stddev: Number = 1.0, dtype: str = "float32"
) -> Tensor:
    """Return numbers of a normal distribution, all less than two deviations from its mean."""
    inside = bits.inside(shape, wide(dtype))
    drawn = math.sqrt(2) * ops.erfinv(_LIMIT * (2.0 * inside - 1.0))
    drawn = ops.cast(ops.clip(drawn, -2.0, 2.0), dtype)
    return drawn * ops.cast(stddev, dtype) + ops.cast(mean, dtype)


def randint(
    bits: RandomBits, shape: Shape, minval: Tensor | int, maxval: Tensor | int, dtype: str = "int32"
) -> Tensor:
    """Return whole numbers of [minval, maxval), fewer than 2**32 of them.

    A number of 64 random bits is scaled: no value comes oftener than another by more than 2**-32 of
    its share.
    """
    dtype = keras.backend.standardize_dtype(dtype)
    computed = dtype if dtype in ("int32", "int64", "uint32") else "int32"
    low = ops.cast(minval, computed)
    high = ops.cast(maxval, computed)
    span = ops.cast(high - low, "uint32")
    rest = _high(bits.words(shape, 1), span)
    words = bits.words(shape)
    product = words * span
    carry = ops.cast(product + rest < product, "uint32")
    scaled = ops.cast(_high(words, span) + carry, computed)
    return ops.cast(scaled + low, dtype)


def _high(one: Tensor, two: Tensor) -> Tensor:
    """Return the upper 32 bits of the products of words."""
    half = ops.convert_to_tensor(16, "uint32")
    mask = ops.convert_to_tensor(0xFFFF, "uint32")
    a = ops.right_shift(one, half)
    b = ops.bitwise_and(one, mask)
    c = ops.right_shift(two, half)
    d = ops.bitwise_and(two, mask)
    cross = b * c
    middle = ops.right_shift(b * d, half) + ops.bitwise_and(cross, mask) + a * d
    return a * c + ops.right_shift(cross, half) + ops.right_shift(middle, half)


def categorical(bits: RandomBits, logits: Tensor, num_samples: int, dtype: str = "int32") -> Tensor:
    """Return class numbers (rows, samples) for logits (rows, classes), by Gumbel's trick."""
    rows, classes = logits.shape
    computed = wide(keras.backend.standardize_dtype(logits.dtype))
    inside = bits.inside((rows, num_samples, classes), computed)
    noise = -ops.log(-ops.log(inside))
    noisy = ops.cast(logits, computed)[:, None, :] + noise
    return ops.cast(ops.argmax(noisy, axis=-1), dtype)


def dropout(bits: RandomBits, inputs: Tensor, rate: float, noise_shape: Shape) -> Tensor:
    """Return the inputs with some set to 0, and the rest scaled up.

    `noise_shape` is 1 along the axes that share a draw.
    """
    kept = bits.below(noise_shape, 1.0 - rate)
    scaled = inputs * (1.0 / (1.0 - rate))
    return ops.where(kept, scaled, ops.zeros_like(inputs))


def shuffle_slices(bits: RandomBits, x: Tensor, axis: int = 0) -> Tensor:
    """Return x with its slices along the axis in one random order.

    TensorFlow's own depends on its compiler: XLA draws other numbers from the same seed.
    """
    order = ops.argsort(bits.words((x.shape[axis],)))
    return ops.take(x, order, axis=axis)


def shuffle(bits: RandomBits, x: Tensor, axis: int = 0) -> Tensor:
    """Return x with every vector along the axis in an independent random order."""
    order = ops.argsort(bits.words(tuple(x.shape)), axis=axis)
    return ops.take_along_axis(x, order, axis=axis)


# ---- rejection sampling ----

# The trials of an element are numbered, and each has separate words, so its value does not depend
# on the trials of other elements.


def gamma(bits: RandomBits, shape: Shape, alpha: Number, dtype: str = "float32") -> Tensor:
    """Return numbers of gamma distributions of scale 1, with their derivative by alpha."""
    log = _log_gamma(bits, shape, alpha, wide(dtype), 0)
    return ops.cast(ops.exp(log), dtype)


def beta(
    bits: RandomBits, shape: Shape, alpha: Number, beta: Number, dtype: str = "float32"
) -> Tensor:
    """Return numbers of beta distributions: the ratio of a gamma number to the sum of two."""
    one = _log_gamma(bits, shape, alpha, wide(dtype), 0)
    two = _log_gamma(bits, shape, beta, wide(dtype), 1)
    return ops.cast(ops.sigmoid(one - two), dtype)


def _log_gamma(bits: RandomBits, shape: Shape, alpha: Number, dtype: str, number: int) -> Tensor:
    """Return logarithms of gamma numbers.

    By Marsaglia and Tsang, "A simple method for generating gamma variables" (2000).

    Args:
        number: 0 or 1, to tell two simultaneous draws apart.
    """
    alphas = ops.broadcast_to(ops.cast(alpha, dtype), shape)
    fixed = ops.stop_gradient(alphas)
    is_small = fixed < 1
    d = ops.where(is_small, fixed + 1, fixed) - 1 / 3
    c = 1 / ops.sqrt(9 * d)

    def trial(t: Tensor) -> tuple[Tensor, Tensor]:
        stream = 4 * t + 2 * number + 2
        x = standard(bits, shape, dtype, stream)
        v = (1 + c * x) ** 3
        positive = ops.where(v > 0, v, 1.0)
        log_v = ops.log(positive)
        u = bits.inside(shape, dtype, stream + 1)
        log_ratio = 0.5 * x * x + d * (1 - v + log_v)
        return log_v, (v > 0) & (ops.log(u) < log_ratio)

    is_valid = fixed > 0
    log = ops.log(d) + _first_accepted(trial, shape, dtype, is_valid)
    log = ops.where(is_valid, log, _NAN)
    boost = ops.log(bits.inside(shape, dtype, number)) / fixed
    log = ops.stop_gradient(ops.where(is_small, log + boost, log))
    is_constant = not hasattr(alpha, "dtype") or isinstance(alpha, np.ndarray | np.generic)
    return log if is_constant else _with_slope(bits, log, alphas)


def _with_slope(bits: RandomBits, log: Tensor, alphas: Tensor) -> Tensor:
    """Return logarithms of gamma numbers with their derivative by alpha."""
    fixed = ops.stop_gradient(alphas)
    sample = ops.exp(log)
    slope = bits.engine.random.gamma_slope(fixed, sample) / sample
    slope = ops.where(ops.isfinite(slope), slope, 0.0)
    return log + (alphas - fixed) * ops.stop_gradient(slope)


def _first_accepted(
    trial: Callable[[Tensor], tuple[Tensor, Tensor]], shape: Shape, dtype: str, is_valid: Tensor
) -> Tensor:
    """Return each element's first accepted value of `trial`: number -> (values, are accepted).

    Args:
        is_valid: where parameters are valid; elsewhere no trial would ever be accepted.
    """

    def next_trial(t: Tensor, values: Tensor, done: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        candidates, are_accepted = trial(t)
        return t + 1, ops.where(done, values, candidates), done | are_accepted

    number = ops.zeros((), "int32")
    begin = ops.zeros(shape, dtype)
    _, values, _ = ops.while_loop(_goes_on, next_trial, (number, begin, ~is_valid))
    return values


def _goes_on(t: Tensor, _: Tensor, done: Tensor) -> Tensor:
    return ~ops.all(done) & (t < _MOST_TRIALS)


def binomial(
    bits: RandomBits, shape: Shape, counts: Number, probabilities: Number, dtype: str = "float32"
) -> Tensor:
    """Return numbers of binomial distributions: the successes in `counts` trials.

    Means below 10 by summing waiting times, others by Hörmann, "The generation of binomial random
    variates" (1993).
    """
    computed = wide(dtype)
    n = ops.stop_gradient(ops.broadcast_to(ops.cast(counts, computed), shape))
    p = ops.stop_gradient(ops.broadcast_to(ops.cast(probabilities, computed), shape))
    is_valid = (n >= 0) & (p >= 0) & (p <= 1)
    n = ops.where(is_valid, n, 0.0)
    p = ops.where(is_valid, p, 0.0)
    q = ops.minimum(p, 1 - p)
    is_small = n * q < _INVERTED
    small_n = ops.where(is_small, n, 0.0)
    small_q = ops.where(is_small, q, 0.5)
    large_n = ops.where(is_small, 100.0, n)
    large_q = ops.where(is_small, 0.5, q)
    small = _inverted(bits, shape, computed, small_n, small_q)
    large = _transformed(bits, shape, computed, large_n, large_q)
    successes = ops.where(is_small, small, large)
    successes = ops.where(p > 0.5, n - successes, successes)
    return ops.cast(ops.where(is_valid, successes, _NAN), dtype)


def _inverted(bits: RandomBits, shape: Shape, dtype: str, n: Tensor, q: Tensor) -> Tensor:
    """Return the number of waiting times for a success that fit into n trials."""
    scale = ops.log1p(-q)

    def wait(t: Tensor, state: Tensor, done: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        passed = state[0]
        num = state[1]
        inside = bits.inside(shape, dtype, 2 * t)
        waits = ops.ceil(ops.log(inside) / scale)
        waits = ops.where(q > 0, waits, n + 1)
        passed = ops.where(done, passed, passed + waits)
        done = done | (passed > n)
        num = ops.where(done, num, num + 1)
        return t + 1, ops.stack([passed, num]), done

    number = ops.zeros((), "int32")
    begin = ops.zeros((2, *shape), dtype)
    done = ops.zeros(shape, "bool")
    _, state, _ = ops.while_loop(_goes_on, wait, (number, begin, done))
    return state[1]


def _transformed(bits: RandomBits, shape: Shape, dtype: str, n: Tensor, q: Tensor) -> Tensor:
    """Return binomial numbers by transformed rejection; n * q must be >= 10, and q <= 1/2."""
    deviation = ops.sqrt(n * q * (1 - q))
    b = 1.15 + 2.53 * deviation
    a = -0.0873 + 0.0248 * b + 0.01 * q
    r = q / (1 - q)
    m = ops.floor((n + 1) * q)
    quick = 0.92 - 4.2 / b
    scale = (2.83 + 5.1 / b) * deviation

    def trial(t: Tensor) -> tuple[Tensor, Tensor]:
        u = bits.inside(shape, dtype, 2 * t) - 0.5
        v = bits.inside(shape, dtype, 2 * t + 1)
        near = 0.5 - ops.abs(u)
        slope = 2 * a / near + b
        k = ops.floor(slope * u + n * q + 0.5)
        is_inside = (k >= 0) & (k <= n)
        k = ops.where(is_inside, k, m)
        log_ratio = _log_ratio(n, r, m, k)
        is_quick = (near >= 0.07) & (v <= quick)
        density = v * scale / (a / near**2 + b)
        is_accepted = is_quick | (ops.log(density) <= log_ratio)
        return k, is_inside & is_accepted

    return _first_accepted(trial, shape, dtype, ops.ones(shape, "bool"))


def _log_ratio(n: Tensor, r: Tensor, m: Tensor, k: Tensor) -> Tensor:
    """Return log(p(k) / p(m)) of binomial numbers, whose odds are r."""
    rest_m = n - m + 1
    rest_k = n - k + 1
    log = (m + 0.5) * ops.log((m + 1) / (r * rest_m))
    log = log + (n + 1) * ops.log(rest_m / rest_k)
    log = log + (k + 0.5) * ops.log(r * rest_k / (k + 1))
    return log + _tail(m) + _tail(n - m) - _tail(k) - _tail(n - k)


def _tail(k: Tensor) -> Tensor:
    """Return log(k!) minus Stirling's formula."""
    inverse = 1 / (k + 1)
    square = inverse**2
    series = (1 / 12 - (1 / 360 - square / 1260) * square) * inverse
    index = ops.cast(ops.clip(k, 0, 9), "int32")
    exact = ops.take(ops.convert_to_tensor(_TAILS, k.dtype), index)
    return ops.where(k <= 9, exact, series)
