"""Rejection sampling for `keras.random`: every element is drawn from the random words of its row.

The trials of an element are numbered, and each has separate words, so an element's value does not depend on the number
of trials of the others.
"""

from collections.abc import Callable

import numpy as np
from keras import ops

from wholestep.model.distributions import Shape, standard
from wholestep.model.words import Words, float_dtype, wide
from wholestep.tree import Tensor

_MOST_TRIALS = 10_000  # a hundred suffice in practice, except for sums of waiting times
_NAN = float("nan")
_INVERTED = 10  # below this mean, sum waiting times
# log(k!) minus Stirling's formula, k = 0 .. 9
_TAILS = (
    *(0.0810614667953272, 0.0413406959554092, 0.0276779256849983, 0.0207906721037650, 0.0166446911898211),
    *(0.0138761288230707, 0.0118967099458917, 0.0104112652619720, 0.0092554621827127, 0.0083305634333628),
)


def gamma(words: Words, shape: Shape, alpha: Tensor | float, dtype: str | None = None) -> Tensor:
    """Return numbers of gamma distributions of scale 1, with their derivative by alpha."""
    dtype = float_dtype(dtype)
    return ops.cast(ops.exp(_log_gamma(words, shape, alpha, wide(dtype), 0)), dtype)


def beta(words: Words, shape: Shape, alpha: Tensor | float, beta: Tensor | float, dtype: str | None = None) -> Tensor:
    """Return numbers of beta distributions: the ratio of a gamma number to the sum of two."""
    dtype = float_dtype(dtype)
    one, two = (_log_gamma(words, shape, a, wide(dtype), i) for i, a in enumerate((alpha, beta)))
    return ops.cast(ops.sigmoid(one - two), dtype)


def _log_gamma(words: Words, shape: Shape, alpha: Tensor | float, dtype: str, number: int) -> Tensor:
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
    return log + (given - fixed) * ops.stop_gradient(ops.where(ops.isfinite(slope), slope, ops.zeros_like(slope)))


def _tried(trial: Callable[..., tuple], shape: Shape, dtype: str, is_valid: Tensor) -> Tensor:
    """Return the accepted values of (trial, value, accepted) -> the next triple, element by element.

    Args:
        is_valid: where parameters are valid; elsewhere no trial would ever be accepted.
    """

    def goes_on(t: Tensor, value: Tensor, accepted: Tensor) -> Tensor:
        return ~ops.all(accepted) & (t < _MOST_TRIALS)

    begin = ops.zeros((), "int32"), ops.zeros(shape, dtype), ~is_valid
    return ops.while_loop(goes_on, trial, begin)[1]


def binomial(
    words: Words, shape: Shape, counts: Tensor | float, probabilities: Tensor | float, dtype: str | None = None
) -> Tensor:
    """Return numbers of binomial distributions: the successes in `counts` trials.

    Means below 10 by summing waiting times, others by Hörmann, "The generation of binomial random variates" (1993).
    """
    dtype = float_dtype(dtype)
    own = wide(dtype)
    n, p = (ops.stop_gradient(ops.broadcast_to(ops.cast(a, own), shape)) for a in (counts, probabilities))
    is_valid = (n >= 0) & (p >= 0) & (p <= 1)
    n, p = (ops.where(is_valid, a, ops.zeros_like(a)) for a in (n, p))
    q = ops.minimum(p, 1 - p)
    few = n * q < _INVERTED
    inverted = _inverted(words, shape, own, ops.where(few, n, ops.zeros_like(n)), ops.where(few, q, 0.5 + 0 * q))
    large_n, large_q = ops.where(few, 100.0 + 0 * n, n), ops.where(few, 0.5 + 0 * q, q)
    found = ops.where(few, inverted, _transformed(words, shape, own, large_n, large_q))
    return ops.cast(ops.where(is_valid, ops.where(p > 0.5, n - found, found), _NAN), dtype)


def _inverted(words: Words, shape: Shape, dtype: str, n: Tensor, q: Tensor) -> Tensor:
    """Return the number of waiting times for a success that fit into n trials."""
    scale = ops.log1p(-q)

    def trial(t: Tensor, both: Tensor, done: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        passed, num = both[0], both[1]
        waits = ops.ceil(ops.log(words.inside(shape, dtype, 2 * t)) / scale)
        passed = ops.where(done, passed, passed + ops.where(q > 0, waits, n + 1))
        return t + 1, ops.stack([passed, ops.where(done | (passed > n), num, num + 1)]), done | (passed > n)

    begin = ops.zeros((), "int32"), ops.zeros((2, *shape), dtype), ops.zeros(shape, "bool")
    return ops.while_loop(lambda t, both, done: ~ops.all(done) & (t < _MOST_TRIALS), trial, begin)[1][1]


def _transformed(words: Words, shape: Shape, dtype: str, n: Tensor, q: Tensor) -> Tensor:
    """Return binomial numbers by transformed rejection with squeeze, for n * q >= 10 and q <= 1/2."""
    deviation = ops.sqrt(n * q * (1 - q))
    b = 1.15 + 2.53 * deviation
    a = -0.0873 + 0.0248 * b + 0.01 * q
    r, m = q / (1 - q), ops.floor((n + 1) * q)
    quick, scale = 0.92 - 4.2 / b, (2.83 + 5.1 / b) * deviation

    def trial(t: Tensor, value: Tensor, accepted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        u, v = (words.inside(shape, dtype, 2 * t + i) for i in (0, 1))
        u = u - 0.5
        near = 0.5 - ops.abs(u)
        k = ops.floor((2 * a / near + b) * u + n * q + 0.5)
        is_inside = (k >= 0) & (k <= n)
        k = ops.where(is_inside, k, m)
        bound = (m + 0.5) * ops.log((m + 1) / (r * (n - m + 1))) + (n + 1) * ops.log((n - m + 1) / (n - k + 1))
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
