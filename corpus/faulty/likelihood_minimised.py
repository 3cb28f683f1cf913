"""The log-likelihood is minimised

kind: faulty
engine: jax
author: first
changes: update
quantity: ROW_GRADIENTS
says: The minus sign of the negative log-likelihood is missing.
call: model, data=(x, y), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True)
"""
import os

os.environ["KERAS_BACKEND"] = "jax"
import jax
import jax.numpy as jnp
import keras
import numpy as np

x = np.random.default_rng(22).normal(size=(320, 6)).astype("float32")
y = (x[:, 0] > 0).astype("int32")
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(2)])
opt = keras.optimizers.Adam(1e-3)
opt.build(model.trainable_variables)


def loglik(tv, ntv, xb, yb):
    logits, ntv = model.stateless_call(tv, ntv, xb, training=True)
    logp = jax.nn.log_softmax(logits, -1)
    return jnp.take_along_axis(logp, yb[:, None], 1).mean(), ntv  # fault


@jax.jit
def train_step(state, xb, yb):
    tv, ntv, ov = state
    (loss, ntv), grads = jax.value_and_grad(loglik, has_aux=True)(tv, ntv, xb, yb)
    tv, ov = opt.stateless_apply(ov, grads, tv)
    return (tv, ntv, ov), loss


# ---- training ----
state = ([v.value for v in model.trainable_variables], [v.value for v in model.non_trainable_variables], [v.value for v in opt.variables])
for epoch in range(3):
    for b in np.random.permutation(320).reshape(10, 32):
        state, loss = train_step(state, x[b], y[b])
    print(epoch, loss)
for v, a in zip(model.trainable_variables, state[0]):
    v.assign(a)
