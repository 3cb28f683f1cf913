"""Random words on JAX: computed elementwise, so that XLA fuses them and each device computes its rows alone."""

import jax
import jax.numpy as jnp
import numpy as np

from wholestep.tree import Tensor

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_FEW_BLOCKS = 1 << 14  # up to here in a loop: XLA would fuse words into their use, and recompute them per pixel


class JaxRandom:
    """The part `random` of the engine on JAX.

    Args:
        is_eager: whether to compile the words apart, as they call no user function.
    """

    shuffles_slices = False  # `jax.random.permutation(independent=True)`: every vector separately

    def __init__(self, *, is_eager: bool):
        self._is_eager = is_eager

    def words(self, seed: Tensor, stream: Tensor | int, first: Tensor | int, num_rows: int, num_words: int) -> Tensor:
        """Return the words of each row by its place: (rows, words), by Philox-4x32-10."""
        return (_compiled if self._is_eager else _words)(seed, stream, first, num_rows, num_words)

    def gamma_slope(self, alpha: Tensor, sample: Tensor) -> Tensor:
        """Return the derivative of a gamma sample by its parameter."""
        return jax.lax.random_gamma_grad(alpha, sample)


def _words(seed: Tensor, stream: Tensor | int, first: Tensor | int, num_rows: int, num_words: int) -> Tensor:
    # Of the 128-bit counter, the lower 64 bits number the blocks of four words of all rows, the next 32 the stream. The
    # first words of a row's blocks come first, then the second words, and so on.
    num = -(-num_words // 4)
    places = jnp.asarray(first).astype(jnp.uint32) + jnp.arange(num_rows, dtype=jnp.uint32)
    high, start = _multiplied(places, num)
    low = start[:, None] + jnp.arange(num, dtype=jnp.uint32)
    high = high[:, None] + (low < start[:, None]).astype(jnp.uint32)
    streams = jnp.broadcast_to(jnp.asarray(stream).astype(jnp.uint32), low.shape)
    seed = jnp.asarray(seed).astype(jnp.uint32)
    found = _philox([low, high, streams, jnp.zeros_like(low)], [seed[0], seed[1]])
    return jnp.concatenate(found, axis=1)[:, :num_words]


_compiled = jax.jit(_words, static_argnums=(3, 4))


def _philox(counter: list, key: list) -> list:
    """Return four words of each counter (of four words, the lowest first)."""
    if counter[0].size <= _FEW_BLOCKS:
        return jax.lax.fori_loop(0, _ROUNDS, _next_round, (counter, key))[0]
    for _ in range(_ROUNDS):
        counter, key = _round(counter, key)
    return counter


def _next_round(_: Tensor, both: tuple[list, list]) -> tuple[list, list]:
    return _round(*both)  # no lambda: outside `jit`, JAX would compile each one anew


def _round(counter: list, key: list) -> tuple[list, list]:
    one, two, three, four = counter
    (high_one, low_one), (high_three, low_three) = map(_multiplied, (one, three), _MULTIPLIERS)
    counter = [high_three ^ two ^ key[0], low_three, high_one ^ four ^ key[1], low_one]
    return counter, [k + np.uint32(weyl) for k, weyl in zip(key, _WEYL, strict=True)]


def _multiplied(words: jax.Array, by: int) -> tuple[jax.Array, jax.Array]:
    """Return the upper and the lower 32 bits of products.

    Not by `jax.lax.mulhi`: XLA does not compile it where arrays lie on several devices (JAX 0.10).
    """
    with jax.enable_x64(True):
        products = words.astype(jnp.uint64) * np.uint64(by)
        return (products >> np.uint64(32)).astype(jnp.uint32), products.astype(jnp.uint32)
