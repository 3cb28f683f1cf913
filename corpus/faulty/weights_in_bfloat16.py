"""The weights themselves are kept in bfloat16

kind: faulty
engine: jax
author: second
changes: update
quantity: STEP
says: The weights themselves are kept in bfloat16 with no float32 master copy: small updates are
    rounded away.
call: model, data=(x, y), loss="mse", optimizer=optimizer
"""
import os

os.environ["KERAS_BACKEND"] = "jax"
import jax
import jax.numpy as jnp
import numpy as np
import keras
from keras import layers


def data(n=128):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, 12)).astype("float32")
    return x, (x[:, :1] * x[:, 1:2]).astype("float32")


def build():
    return keras.Sequential([layers.Input((12,)), layers.Dense(32, activation="relu"), layers.Dense(1)])


def cast(tree, dtype):
    return jax.tree.map(lambda a: a.astype(dtype), tree)


def train(model, opt, x, y, epochs=3, bs=16):
    opt.build(model.trainable_variables)
    ntv = [v.value for v in model.non_trainable_variables]

    def loss_fn(tv, xb, yb):
        pred, _ = model.stateless_call(tv, ntv, xb.astype("bfloat16"), training=True)
        return jnp.mean(jnp.square(pred.astype("float32") - yb))

    @jax.jit
    def step(tv, ov, xb, yb):
        loss, g = jax.value_and_grad(loss_fn)(tv, xb, yb)
        tv, ov = opt.stateless_apply(ov, g, tv)
        return cast(tv, "bfloat16"), ov, loss  # fault

    tv = cast([v.value for v in model.trainable_variables], "bfloat16")  # fault
    ov = [v.value for v in opt.variables]
    for e in range(epochs):
        for i in range(0, len(x), bs):
            tv, ov, loss = step(tv, ov, x[i:i + bs], y[i:i + bs])
        print(e, float(loss))
    for v, a in zip(model.trainable_variables, cast(tv, "float32")):
        v.assign(a)


if __name__ == "__main__":
    keras.utils.set_random_seed(0)
    x, y = data()
    model, optimizer = build(), keras.optimizers.SGD(1e-3)
    # ---- training ----
    train(model, optimizer, x, y)
