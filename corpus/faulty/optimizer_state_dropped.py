"""The optimizer's new state is dropped

kind: faulty
engine: jax
author: first
changes: update
quantity: STEP
says: The second result of `stateless_apply` goes to `_`: each step starts with Adam's zero moments.
call: model, data=(x, y), loss="mse"
"""
import os

os.environ["KERAS_BACKEND"] = "jax"
import jax
import keras
import numpy as np

x = np.random.default_rng(48).normal(size=(320, 6)).astype("float32")
y = np.tanh(x[:, :1])
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(1)])
optimizer = keras.optimizers.Adam(1e-3)
optimizer.build(model.trainable_variables)
mse = keras.losses.MeanSquaredError()


def compute_loss(tv, ntv, xb, yb):
    pred, ntv = model.stateless_call(tv, ntv, xb, training=True)
    return mse(yb, pred), ntv


@jax.jit
def train_step(tv, ntv, opt_vars, xb, yb):
    (loss, ntv), grads = jax.value_and_grad(compute_loss, has_aux=True)(tv, ntv, xb, yb)
    tv, _ = optimizer.stateless_apply(opt_vars, grads, tv)  # fault
    return tv, ntv, loss


# ---- training ----
tv = [v.value for v in model.trainable_variables]
ntv = [v.value for v in model.non_trainable_variables]
opt_vars = [v.value for v in optimizer.variables]
for epoch in range(3):
    for b in np.random.permutation(320).reshape(10, 32):
        tv, ntv, loss = train_step(tv, ntv, opt_vars, x[b], y[b])
    print(epoch, float(loss))
for v, a in zip(model.trainable_variables, tv):
    v.assign(a)
