"""The random words of one draw: a function of the seed, the row's place in the update, and the word's place in the row.

The generator is Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), implemented by
`wholestep.engines.protocol.RandomWords.words`.
"""

import math
from dataclasses import dataclass

import keras
import numpy as np
from keras import ops

from wholestep.engines import Engine
from wholestep.tree import Tensor

FLOATS = ("float16", "bfloat16", "float32", "float64")
LATER, ALL, PAIRS = 1, 2, 3
_MANTISSA = {"float16": 10, "bfloat16": 7, "float32": 23}


@dataclass(frozen=True)
class Words:
    """The random words of one draw.

    Args:
        seed: the state of a seed generator, (2,).
        first: the place in the update of the first row.
        num_rows: the number of rows in the (micro)batch.
        axis: the axis that holds rows; None if a draw is the same for all rows.
        extreme: (), 0 or, in a probe, where to draw the least numbers (negative: the greatest): in the later half of
            the rows (`LATER`), everywhere (`ALL`), or in every second pair of a draw that all rows share (`PAIRS`).
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
            words = ops.reshape(self.engine.random.words(self.seed, stream, 0, 1, math.prod(shape)), shape)
            extreme = self.extreme
            return words if extreme is None else _at_extremes(words, extreme, PAIRS, _is_in_second_pair(shape), stream)
        before, size, after = shape[: self.axis], shape[self.axis], shape[self.axis + 1 :]
        several = size // max(self.num_rows, 1)
        num = math.prod(before) * several * math.prod(after)
        rows = self.engine.random.words(self.seed, stream, self.first, self.num_rows, num)
        if self.extreme is not None:
            is_later = np.arange(self.num_rows)[:, None] >= self.num_rows // 2
            rows = _at_extremes(rows, self.extreme, LATER, is_later, stream)
        if self.axis:
            rows = ops.moveaxis(ops.reshape(rows, (self.num_rows, *before, several, *after)), 0, self.axis)
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


def _at_extremes(words: Tensor, extreme: Tensor, which: int, places: np.ndarray, stream: Tensor | int) -> Tensor:
    """Return words, replaced by extreme words at `places` if `extreme` is `which`, and everywhere if it is `ALL`.

    Words of a trial (a traced stream) are inverted instead: with extreme words the trials might never end.
    """
    is_replaced = (places & (abs(extreme) == which)) | (abs(extreme) == ALL)
    least, greatest = (ops.full_like(words, word) for word in (0, 2**32 - 1))
    by = ops.where(extreme > 0, least, greatest) if isinstance(stream, int) else ops.bitwise_not(words)
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
    """Return words shifted right by `num` bits, so that they can be cast exactly to a floating dtype."""
    return ops.right_shift(words, ops.convert_to_tensor(num, "uint32"))


def float_dtype(dtype: str | None) -> str:
    """Return the dtype of the result: Keras' floatx if None, and float32 where JAX has no 64 bits."""
    dtype = keras.backend.standardize_dtype(dtype or keras.config.floatx())
    return keras.backend.standardize_dtype(ops.cast(0, dtype).dtype) if dtype == "float64" else dtype
