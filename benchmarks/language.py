"""A language model, on rows of one length or of log-normal lengths."""

import random
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import layers, ops

_NUM_HEADS = 4
_SHORTEST = 4
_LONGEST = 512
_MEDIAN = 40
_SPREAD = 0.8  # of the log-normal lengths

Tree = Any


def same_start() -> None:
    """Let the next model begin with the same weights every time: Keras draws their seeds from
    Python's numbers.

    No seed is set in TensorFlow, as keras.utils.set_random_seed would: its shuffle, and so Keras
    fit on arrays, would repeat one order every epoch.
    """
    random.seed(1)


@dataclass(frozen=True)
class Language:
    """
    A Transformer that predicts every next word, and an epoch for it.

    Args:
        length: tokens in a row where all rows have one length.
        num_rows: rows in an epoch, a multiple of `batch_size`.
        quick_rows: the same for a smoke run.
        dropout: the rate of it, after the embedding, in the attention, and after each part of a
            layer.
    """

    num_words: int
    width: int
    num_layers: int
    length: int
    batch_size: int
    num_rows: int
    quick_rows: int
    dropout: float = 0.0

    def model(self) -> keras.Model:
        """Return a compiled model with the same weights every time."""
        same_start()
        words = keras.Input((None,), dtype="int32")
        places = ops.cumsum(ops.ones_like(words), axis=1) - 1
        x = layers.Embedding(self.num_words, self.width)(words) + layers.Embedding(
            _LONGEST, self.width
        )(places)
        x = self._dropped(x)
        head = self.width // _NUM_HEADS
        for _ in range(self.num_layers):
            seen = layers.LayerNormalization()(x)
            attention = layers.MultiHeadAttention(_NUM_HEADS, head, dropout=self.dropout)
            x += self._dropped(attention(seen, seen, use_causal_mask=True))
            hidden = layers.Dense(4 * self.width, activation="relu")(layers.LayerNormalization()(x))
            x += self._dropped(layers.Dense(self.width)(self._dropped(hidden)))
        model = keras.Model(words, layers.Dense(self.num_words)(layers.LayerNormalization()(x)))
        loss = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="mean_with_sample_weight"
        )
        model.compile(keras.optimizers.Adam(), loss)
        return model

    def _dropped(self, x: Any) -> Any:
        return layers.Dropout(self.dropout)(x) if self.dropout else x

    def data(self, *, quick: bool) -> dict[str, np.ndarray]:
        """Return what `fit` takes, x and y: (rows, length) int32."""
        num = self.quick_rows if quick else self.num_rows
        words = np.random.default_rng(1).integers(
            0, self.num_words, (num, self.length + 1), np.int32
        )
        return {"x": words[:, :-1], "y": words[:, 1:]}

    def texts(self, *, quick: bool) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Return rows (x, y, weight), each of its own length: (length,), the weights 1."""
        drawn = np.random.default_rng(1)
        num = self.quick_rows if quick else self.num_rows
        lengths = (
            drawn.lognormal(np.log(_MEDIAN), _SPREAD, num).clip(_SHORTEST, _LONGEST).astype(int)
        )
        texts = [drawn.integers(0, self.num_words, length + 1, np.int32) for length in lengths]
        return [(text[:-1], text[1:], np.ones(len(text) - 1, np.float32)) for text in texts]
