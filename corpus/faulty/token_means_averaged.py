"""Token means of unequal microbatches are averaged

kind: faulty
engine: jax
author: second
changes: update
quantity: ROW_GRADIENTS
says: Token means of micro-batches with unequal token counts are averaged; tokens in short micro-
    batches weigh more.
call: model, data=(ids[:, :-1], ids[:, 1:], (ids[:, 1:] != 0).astype("float32")),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight"),
    optimizer=optimizer
"""
import os

os.environ["KERAS_BACKEND"] = "jax"
import jax
import jax.numpy as jnp
import numpy as np
import keras
from keras import layers

VOCAB, LEN, PAD = 40, 16, 0


def stories(n=96, seed=0):
    rng = np.random.default_rng(seed)
    ids = np.zeros((n, LEN + 1), "int32")
    for row, length in zip(ids, rng.integers(3, LEN + 2, n)):
        row[:length] = (rng.integers(1, VOCAB) + np.arange(length)) % (VOCAB - 1) + 1
    return ids


def lm():
    tok = keras.Input((LEN,), dtype="int32")
    h = layers.Embedding(VOCAB, 16)(tok)
    a = layers.MultiHeadAttention(2, 8)(h, h, use_causal_mask=True)
    h = layers.LayerNormalization()(h + a)
    h = h + layers.Dense(16, activation="gelu")(h)
    return keras.Model(tok, layers.Dense(VOCAB)(h))


class LMTrainer:
    def __init__(self, model, optimizer, accum=4, micro=4):
        self.model, self.opt = model, optimizer
        self.accum, self.micro = accum, micro
        self.opt.build(model.trainable_variables)
        self.tv = [v.value for v in model.trainable_variables]
        self.ntv = [v.value for v in model.non_trainable_variables]
        self.ov = [v.value for v in optimizer.variables]
        self.grad_fn = jax.jit(jax.value_and_grad(self.loss))
        self.apply = jax.jit(self.opt.stateless_apply)

    def loss(self, tv, inputs, targets):
        logits, _ = self.model.stateless_call(tv, self.ntv, inputs, training=True)
        mask = (targets != PAD).astype("float32")
        nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]
        return (nll * mask).sum() / mask.sum()  # fault

    def batches(self, ids, rng):
        order = rng.permutation(len(ids))
        size = self.accum * self.micro
        for i in range(0, len(ids) - size + 1, size):
            yield [ids[order[j:j + self.micro]] for j in range(i, i + size, self.micro)]

    def fit(self, ids, epochs=2):
        rng = np.random.default_rng(0)
        for epoch in range(epochs):
            for group in self.batches(ids, rng):
                grads, loss = None, 0.0
                for mb in group:
                    l, g = self.grad_fn(self.tv, mb[:, :-1], mb[:, 1:])
                    loss += float(l) / self.accum
                    g = [x / self.accum for x in g]  # fault
                    grads = g if grads is None else [a + b for a, b in zip(grads, g)]
                self.tv, self.ov = self.apply(self.ov, grads, self.tv)
            print(f"epoch {epoch} loss {loss:.3f}")
        for v, a in zip(self.model.trainable_variables, self.tv):
            v.assign(a)


if __name__ == "__main__":
    keras.utils.set_random_seed(0)
    ids = stories()
    model, optimizer = lm(), keras.optimizers.SGD(0.3)
    trainer = LMTrainer(model, optimizer)
    # ---- training ----
    trainer.fit(ids)
