"""A Transformer that reads and writes characters, its loss and its learning rate: for
translate_dates.py.
"""

import keras
import numpy as np
from keras import layers, ops
from translate_dates_data import BEGIN, LONGEST, PADDING, lengths

import wholestep as ws

NUM_HEADS = 4
SMOOTHING = 0.1


def transformer(num_tokens, width, num_layers):
    """Return the model [source: (rows, S), target: (rows, T)] -> logits (rows, T, tokens), for any
    S and T.

    The logits at index t depend on the full source, and on the target up to t.
    """
    source = keras.Input((None,), dtype="int32")
    target = keras.Input((None,), dtype="int32")
    table = Embedding(num_tokens, width)
    is_text = ops.expand_dims(source != PADDING, 1)  # (rows, 1, S): no place looks at padding

    x = table(source)
    for _ in range(num_layers):
        x = think(look(x, attention_mask=is_text))
    memory = layers.LayerNormalization()(x)

    x = table(target)
    for _ in range(num_layers):
        x = look(x, use_causal_mask=True)  # padding comes last: no character looks at it
        x = think(look(x, memory, attention_mask=is_text))
    return keras.Model([source, target], table(layers.LayerNormalization()(x), reverse=True))


def look(x, memory=None, **masks):
    """Attend to `memory`, or to the sequence itself."""
    query = layers.LayerNormalization()(x)
    attention = layers.MultiHeadAttention(NUM_HEADS, x.shape[-1] // NUM_HEADS)
    return x + attention(query, query if memory is None else memory, **masks)


def think(x):
    """Apply the feed-forward block to every token."""
    hidden = layers.Dense(4 * x.shape[-1], activation="relu")(layers.LayerNormalization()(x))
    return x + layers.Dense(x.shape[-1])(hidden)


class Embedding(layers.ReversibleEmbedding):
    """One table for input characters, output characters and, in reverse, logits; with sines that
    encode the index.

    As in https://arxiv.org/abs/1706.03762 (3.4 and 3.5), with two changes for short texts whose
    digits have an order: wavelengths up to 100 * 2 pi, not 10 000 * 2 pi, and character vectors
    that are smaller than the sines.
    """

    def __init__(self, num_tokens, width):
        super().__init__(
            num_tokens,
            width,
            embeddings_initializer=keras.initializers.RandomNormal(stddev=width**-0.5),
        )

    def call(self, inputs, reverse=False):
        """Return (rows, length, width) of tokens (rows, length); in reverse, logits (rows, length,
        tokens).
        """
        if reverse:
            return super().call(inputs, reverse=True)
        place = ops.cast(ops.arange(ops.shape(inputs)[1]), self.compute_dtype)[:, None]
        angle = place / 100 ** (np.arange(0, self.output_dim, 2, dtype="float32") / self.output_dim)
        character = 0.4 * self.output_dim**0.5 * super().call(inputs)
        return character + ops.concatenate([ops.sin(angle), ops.cos(angle)], axis=-1)


def smoothed_cross_entropy(wanted, logits):
    """Return the cross-entropy with 0.9 on the wanted token and 0.1 spread over the others, minus
    its lowest value.

    The lowest value is the entropy of the smoothed target. So 0 is perfect, and a curve shows the
    remaining error.

    Args:
        wanted: tokens (rows, length).
        logits: (rows, length, tokens).
    """
    num_others = logits.shape[-1] - 1
    right = 1 - SMOOTHING
    other = SMOOTHING / num_others
    lowest = -right * np.log(right) - num_others * other * np.log(other)
    log_probabilities = ops.log_softmax(logits)
    of_wanted = ops.take_along_axis(log_probabilities, wanted[..., None], axis=-1)[..., 0]
    return -(right - other) * of_wanted - other * ops.sum(log_probabilities, axis=-1) - lowest


class WarmUp(keras.optimizers.schedules.LearningRateSchedule):
    """A linear warm-up for `num_warmup` updates, then a decay with the inverse square root of the
    number of updates.

    It counts updates, not microbatches (https://arxiv.org/abs/1706.03762, 5.3).
    """

    def __init__(self, width, num_warmup):
        self.width = width
        self.num_warmup = num_warmup

    def __call__(self, step):
        """Return the learning rate of the update after `step` updates."""
        number = ops.cast(step, "float32") + 1
        return self.width**-0.5 * ops.minimum(number**-0.5, number * self.num_warmup**-1.5)


def translate(model, characters, rows):
    """Return the model's translations of these rows, by greedy decoding."""
    (batch,) = ws.Batches(rows, tokens=10**6, length=lengths, boundaries=[LONGEST], shuffle=False)
    written = np.zeros_like(batch["target"])
    written[:, 0] = BEGIN
    for place in range(1, LONGEST["target"]):
        logits = model.predict([batch["source"], written[:, :-1]], batch_size=100, verbose=0)
        written[:, place] = logits[:, place - 1].argmax(axis=-1)
    return [characters.decode(tokens) for tokens in written[:, 1:]]
