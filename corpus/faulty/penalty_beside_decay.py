"""An L2 penalty in the loss beside AdamW's decay

kind: faulty
engine: jax
author: second
changes: update
quantity: PENALTY
says: Weights are regularised twice: an L2 penalty in the loss and AdamW's decoupled decay.
call: model, data=(x, y), loss=None
"""
import os

os.environ["KERAS_BACKEND"] = "jax"
import jax
import jax.numpy as jnp
import numpy as np
import keras
from keras import layers


def sensors(n=112):
    rng = np.random.default_rng(12)
    x = rng.normal(size=(n, 14)).astype("float32")
    return x, (np.abs(x[:, 0]) > 0.7).astype("int32")


def build():
    model = keras.Sequential([layers.Input((14,)), layers.Dense(32, activation="relu", name="body"),
                              layers.Dense(2, name="head")])
    model.compile(optimizer=keras.optimizers.AdamW(2e-3, weight_decay=0.01),
                  loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def l2_penalty(params, strength=0.01):
    return strength * sum(jnp.sum(jnp.square(p)) for p in params if p.ndim > 1)


def train(model, x, y, epochs=3, bs=16):
    opt = model.optimizer
    opt.build(model.trainable_variables)
    ntv = [v.value for v in model.non_trainable_variables]

    def objective(tv, xb, yb):
        logits, _ = model.stateless_call(tv, ntv, xb, training=True)
        return model.loss(yb, logits) + l2_penalty(tv)  # fault

    @jax.jit
    def step(tv, ov, xb, yb):
        value, g = jax.value_and_grad(objective)(tv, xb, yb)
        tv, ov = opt.stateless_apply(ov, g, tv)
        return tv, ov, value

    tv = [v.value for v in model.trainable_variables]
    ov = [v.value for v in opt.variables]
    rng = np.random.default_rng(0)
    for e in range(epochs):
        p = rng.permutation(len(x))
        for i in range(0, len(x), bs):
            tv, ov, value = step(tv, ov, x[p[i:i + bs]], y[p[i:i + bs]])
        print(e, float(value))
    for v, a in zip(model.trainable_variables, tv):
        v.assign(a)


if __name__ == "__main__":
    keras.utils.set_random_seed(0)
    x, y = sensors()
    model = build()
    # ---- training ----
    train(model, x, y)
