"""A small Transformer for packed rows, its loss, and which of its kernels are sharded: for
finetune.py.
"""

import keras
from finetune_data import LENGTH, VOCABULARY
from keras import layers, ops

import wholestep as ws

WIDTH = 64
NUM_LAYERS = 2


def new_backbone():
    """Return the model {tokens, positions, segment_ids: (rows, length)} -> (rows, length,
    WIDTH).
    """
    inputs = {
        name: keras.Input((None,), dtype="int32", name=name)
        for name in ("tokens", "positions", "segment_ids")
    }
    segments = inputs["segment_ids"]
    # sequences in one row do not attend to each other
    mask = ops.equal(segments[:, :, None], segments[:, None, :])
    x = layers.Embedding(VOCABULARY, WIDTH, name="token_embedding")(inputs["tokens"])
    x = x + layers.Embedding(LENGTH, WIDTH, name="position_embedding")(inputs["positions"])
    for i in range(NUM_LAYERS):
        y = layers.LayerNormalization(name=f"attention_norm_{i}")(x)
        attention = layers.MultiHeadAttention(4, WIDTH // 4, name=f"attention_{i}")
        x = x + attention(y, y, attention_mask=mask, use_causal_mask=True)
        y = layers.LayerNormalization(name=f"dense_norm_{i}")(x)
        y = layers.Dense(4 * WIDTH, "gelu", name=f"wide_{i}")(y)
        x = x + layers.Dense(WIDTH, name=f"narrow_{i}")(y)
    return keras.Model(inputs, layers.LayerNormalization(name="norm")(x), name="backbone")


def add_lora(backbone, rank):
    """Freeze a backbone, except for the LoRA weights and the biases of its queries, values and
    dense layers.
    """
    for layer in backbone.layers:
        layer.trainable = False  # and all its parts: an attention layer has four
        is_attention = isinstance(layer, layers.MultiHeadAttention)
        is_dense = isinstance(layer, layers.Dense)
        for part in [layer.query_dense, layer.value_dense] if is_attention else [layer] * is_dense:
            part.trainable = True  # before enable_lora, which freezes the kernel
            part.enable_lora(rank)


class Answers(ws.Objective):
    """Predict the next character; `weights` says which characters count, and nothing crosses into
    another sequence.
    """

    def __call__(self, model, batch, training):
        """Return the loss of every character."""
        tokens = batch["tokens"]
        segments = batch["segment_ids"]
        logits = model(
            {k: batch[k] for k in ("tokens", "positions", "segment_ids")}, training=training
        )[:, :-1]
        loss = keras.losses.sparse_categorical_crossentropy(tokens[:, 1:], logits, from_logits=True)
        return ws.Mean(
            loss, ops.where(segments[:, 1:] == segments[:, :-1], batch["weights"][:, 1:], 0.0)
        )


def sharded(num):
    """Return a distribution that shards the kernels of queries, keys, values and wide layers over
    `num` devices.
    """
    mesh = keras.distribution.DeviceMesh(
        (1, num), ["batch", "model"], keras.distribution.list_devices()[:num]
    )
    places = keras.distribution.LayoutMap(mesh)
    places[".*(query|key|value)/kernel"], places[".*wide_./kernel"] = (
        (None, "model", None),
        (None, "model"),
    )
    return keras.distribution.ModelParallel(layout_map=places, batch_dim_name="batch")
