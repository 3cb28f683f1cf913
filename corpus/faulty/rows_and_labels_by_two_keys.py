"""Rows and labels are permuted with two keys

kind: faulty
engine: jax
author: second
changes: update
quantity: LABELS
says: `x` and `y` are permuted with different keys: rows do not match labels.
call: model, data=(x, y), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), optimizer=optimizer
"""
import os

os.environ["KERAS_BACKEND"] = "jax"
import jax
import jax.numpy as jnp
import numpy as np
import keras
from keras import layers

BATCH = 16


def table(n=128):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, 8)).astype("float32")
    return x, x[:, :4].argmax(1).astype("int32")


def build():
    return keras.Sequential([layers.Input((8,)), layers.Dense(32, activation="relu"), layers.Dense(4)])


def shuffled(key, x, y):
    kx, ky = jax.random.split(key)  # fault
    steps = len(x) // BATCH
    xs = jax.random.permutation(kx, x)[: steps * BATCH].reshape(steps, BATCH, -1)
    ys = jax.random.permutation(ky, y)[: steps * BATCH].reshape(steps, BATCH)
    return xs, ys


def train(model, opt, x, y, epochs=3):
    opt.build(model.trainable_variables)
    ntv = [v.value for v in model.non_trainable_variables]
    ce = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def loss_fn(tv, xb, yb):
        logits, _ = model.stateless_call(tv, ntv, xb, training=True)
        return ce(yb, logits)

    def body(carry, batch):
        tv, ov = carry
        loss, grads = jax.value_and_grad(loss_fn)(tv, *batch)
        return opt.stateless_apply(ov, grads, tv), loss

    @jax.jit
    def epoch_fn(carry, key, x, y):
        return jax.lax.scan(body, carry, shuffled(key, x, y))

    carry = ([v.value for v in model.trainable_variables], [v.value for v in opt.variables])
    x, y = jnp.asarray(x), jnp.asarray(y)
    key = jax.random.key(0)
    for e in range(epochs):
        key, sub = jax.random.split(key)
        carry, losses = epoch_fn(carry, sub, x, y)
        print(e, float(losses.mean()))
    for v, a in zip(model.trainable_variables, carry[0]):
        v.assign(a)


if __name__ == "__main__":
    keras.utils.set_random_seed(0)
    x, y = table()
    model, optimizer = build(), keras.optimizers.Adam(1e-2)
    # ---- training ----
    train(model, optimizer, x, y)
