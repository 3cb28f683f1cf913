"""Fine-tune a causal model of keras-hub with LoRA: for finetune.py --preset. keras-hub must be
installed.
"""

import keras
import keras_hub
import numpy as np

import wholestep as ws

LENGTH = 256
RANK = 4


def tune(name, pairs):
    """Train one epoch on pairs (prompt, answer), and return the losses; `name`: of a preset, or of
    a folder.
    """
    backbone = keras_hub.models.Backbone.from_preset(name, dtype="mixed_bfloat16")
    tokenizer = keras_hub.models.Tokenizer.from_preset(name)
    backbone.enable_lora(RANK)
    model = keras.Model(
        backbone.input, backbone.token_embedding(backbone(backbone.input), reverse=True)
    )
    rows = [row(*(np.asarray(tokenizer(text), "int32") for text in pair)) for pair in pairs]
    # keras-hub's attention takes no mask of (rows, length, length): rows are padded, not packed.
    data = ws.Batches(
        rows,
        tokens=8 * LENGTH,
        length=lambda row: len(row["tokens"]),
        truncate=True,
        boundaries=[LENGTH],
    )
    trainer = ws.Trainer(model, Answers(), optimizer=keras.optimizers.AdamW(1e-4))
    losses = [step.loss for step in trainer.steps(data)]
    print(f"{name}: loss {losses[0]:.3f} to {losses[-1]:.3f} in {len(losses)} updates.")
    return losses


def row(prompt, answer):
    """Return the tokens, 1 for each, and 1 for each that counts."""
    tokens = np.concatenate([prompt, answer])
    return {
        "tokens": tokens,
        "mask": np.ones_like(tokens),
        "weights": np.arange(len(tokens)) >= len(prompt),
    }


class Answers(ws.Objective):
    """Predict the next token; tokens of the answer count."""

    def __call__(self, model, batch, training):
        """Return the loss of every token."""
        logits = model(
            {"token_ids": batch["tokens"], "padding_mask": batch["mask"]}, training=training
        )[:, :-1]
        loss = keras.losses.sparse_categorical_crossentropy(
            batch["tokens"][:, 1:], logits, from_logits=True
        )
        return ws.Mean(loss, batch["weights"][:, 1:])
