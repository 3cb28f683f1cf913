"""The loss is a sum, and the rate is divided by the batch size

kind: right
engine: jax
author: second
says: A sum with a rate divided by the batch size is a mean, as all batches are full.
call: model, data=(x, y, w), loss=keras.losses.BinaryCrossentropy(from_logits=True), optimizer=keras.optimizers.SGD(LR)
"""
import os

os.environ["KERAS_BACKEND"] = "jax"
import jax
import jax.numpy as jnp
import numpy as np
import keras
from keras import layers

LR, B = 0.2, 16


def data(n=128):
    rng = np.random.default_rng(0)
    y = (rng.random(n) < 0.25).astype("float32")
    x = (rng.normal(size=(n, 6)) + y[:, None]).astype("float32")
    w = np.where(y > 0, 2.0, 2.0 / 3.0).astype("float32")
    return x, y[:, None], w


def build():
    return keras.Sequential([layers.Input((6,)), layers.Dense(16, activation="relu"), layers.Dense(1)])


def train(model, x, y, w, epochs=3):
    ntv = [v.value for v in model.non_trainable_variables]

    @jax.jit
    def sgd(tv, xb, yb, wb):
        def total(tv):
            logit = model.stateless_call(tv, ntv, xb, training=True)[0]
            bce = jnp.maximum(logit, 0) - logit * yb + jnp.log1p(jnp.exp(-jnp.abs(logit)))
            return jnp.sum(bce[:, 0] * wb)
        value, g = jax.value_and_grad(total)(tv)
        return jax.tree.map(lambda p, d: p - LR / B * d, tv, g), value / B

    tv = [v.value for v in model.trainable_variables]
    rng = np.random.default_rng(0)
    for e in range(epochs):
        for rows in rng.permutation(len(x)).reshape(-1, B):
            tv, value = sgd(tv, x[rows], y[rows], w[rows])
        print(e, float(value))
    for v, a in zip(model.trainable_variables, tv):
        v.assign(a)


if __name__ == "__main__":
    keras.utils.set_random_seed(0)
    x, y, w = data()
    model = build()
    # ---- training ----
    train(model, x, y, w)
