"""Updates of early layers are scaled down after the optimizer

kind: right
engine: jax
author: second
says: Rates by layer are meant.
call: model, data=(x, y), loss=keras.losses.BinaryCrossentropy(from_logits=True), optimizer=optimizer
"""
import os

os.environ["KERAS_BACKEND"] = "jax"
import jax
import jax.numpy as jnp
import numpy as np
import keras
from keras import layers

DECAY = 0.6


def data(n=112):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, 10)).astype("float32")
    return x, (x[:, 0] * x[:, 1] > 0).astype("float32")[:, None]


def build():
    return keras.Sequential([layers.Input((10,)), layers.Dense(24, activation="relu"),
                             layers.Dense(24, activation="relu"), layers.Dense(1)])


def multipliers(model):
    depth = {id(w): i for i, layer in enumerate(model.layers) for w in layer.trainable_variables}
    top = max(depth.values())
    return [DECAY ** (top - depth[id(v)]) for v in model.trainable_variables]


def train(model, opt, x, y, epochs=2, bs=16):
    opt.build(model.trainable_variables)
    scale = multipliers(model)
    ntv = [v.value for v in model.non_trainable_variables]
    bce = keras.losses.BinaryCrossentropy(from_logits=True)

    @jax.jit
    def step(tv, ov, xb, yb):
        loss, g = jax.value_and_grad(
            lambda tv: bce(yb, model.stateless_call(tv, ntv, xb, training=True)[0]))(tv)
        new, ov = opt.stateless_apply(ov, g, tv)
        return [old + s * (n - old) for old, n, s in zip(tv, new, scale)], ov, loss

    tv, ov = [v.value for v in model.trainable_variables], [v.value for v in opt.variables]
    rng = np.random.default_rng(0)
    for e in range(epochs):
        p = rng.permutation(len(x))
        for i in range(0, len(x), bs):
            tv, ov, loss = step(tv, ov, x[p[i:i + bs]], y[p[i:i + bs]])
        print(e, float(loss))
    for v, a in zip(model.trainable_variables, tv):
        v.assign(a)


if __name__ == "__main__":
    keras.utils.set_random_seed(0)
    x, y = data()
    model, optimizer = build(), keras.optimizers.Adam(5e-3)
    # ---- training ----
    train(model, optimizer, x, y)
