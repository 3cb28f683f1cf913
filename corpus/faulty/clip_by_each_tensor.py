"""Each tensor is clipped by its own norm

kind: faulty
engine: jax
author: second
changes: update
quantity: HANDED_GRADIENT
says: Each tensor is clipped by its own norm, not the gradient by its global norm.
call: model, data=(x, y), loss="mse", optimizer=keras.optimizers.SGD(0.1, global_clipnorm=CLIP)
"""
import os

os.environ["KERAS_BACKEND"] = "jax"
import jax
import jax.numpy as jnp
import numpy as np
import keras
from keras import layers

CLIP = 0.05


def waves(n=96, steps=10):
    rng = np.random.default_rng(0)
    phase = rng.uniform(0, 6, (n, 1))
    t = np.arange(steps + 1)[None] * 0.5
    s = np.sin(t + phase).astype("float32")
    return s[:, :-1, None], s[:, -1:]


def rnn():
    return keras.Sequential([layers.Input((10, 1)), layers.GRU(12), layers.Dense(1)])


def clip(grads, limit):
    """Scale the gradient to a norm of at most `limit`."""
    def one(g):
        norm = jnp.sqrt(jnp.sum(g * g))  # fault
        return g * jnp.minimum(1.0, limit / (norm + 1e-6))
    return jax.tree.map(one, grads)


def train(model, opt, x, y, epochs=2, bs=16):
    opt.build(model.trainable_variables)
    ntv = [v.value for v in model.non_trainable_variables]
    mse = keras.losses.MeanSquaredError()

    @jax.jit
    def step(tv, ov, xb, yb):
        def f(tv):
            return mse(yb, model.stateless_call(tv, ntv, xb, training=True)[0])
        loss, grads = jax.value_and_grad(f)(tv)
        tv, ov = opt.stateless_apply(ov, clip(grads, CLIP), tv)
        return tv, ov, loss

    tv = [v.value for v in model.trainable_variables]
    ov = [v.value for v in opt.variables]
    for e in range(epochs):
        for i in range(0, len(x), bs):
            tv, ov, loss = step(tv, ov, x[i:i + bs], y[i:i + bs])
        print(e, float(loss))
    for v, a in zip(model.trainable_variables, tv):
        v.assign(a)


if __name__ == "__main__":
    keras.utils.set_random_seed(0)
    x, y = waves()
    model, optimizer = rnn(), keras.optimizers.SGD(0.1)
    # ---- training ----
    train(model, optimizer, x, y)
