"""An epoch as one lax.scan, BatchNorm and dropout, stateless_apply

kind: right
engine: jax
author: first
says: All three states go through the carry.
call: model, data=(x, y), loss=loss_fn
"""
import os

os.environ["KERAS_BACKEND"] = "jax"
import jax
import jax.numpy as jnp
import keras
import numpy as np

x = np.random.default_rng(1).normal(size=(384, 10)).astype("float32")
y = np.argmax(x[:, :3], axis=1).astype("int32")
model = keras.Sequential([
    keras.Input((10,)),
    keras.layers.Dense(32, use_bias=False),
    keras.layers.BatchNormalization(),
    keras.layers.ReLU(),
    keras.layers.Dropout(0.1),
    keras.layers.Dense(3),
])
optimizer = keras.optimizers.Adam(1e-3)
optimizer.build(model.trainable_variables)
loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def objective(tv, ntv, xb, yb):
    logits, ntv = model.stateless_call(tv, ntv, xb, training=True)
    return loss_fn(yb, logits), ntv


def body(carry, batch):
    tv, ntv, ov = carry
    (loss, ntv), grads = jax.value_and_grad(objective, has_aux=True)(tv, ntv, *batch)
    tv, ov = optimizer.stateless_apply(ov, grads, tv)
    return (tv, ntv, ov), loss


@jax.jit
def epoch_fn(carry, xs, ys):
    return jax.lax.scan(body, carry, (xs, ys))


# ---- training ----
carry = (
    [v.value for v in model.trainable_variables],
    [v.value for v in model.non_trainable_variables],
    [v.value for v in optimizer.variables],
)
for epoch in range(4):
    p = np.random.permutation(384)
    carry, losses = epoch_fn(carry, x[p].reshape(12, 32, 10), y[p].reshape(12, 32))
    print(epoch, losses.mean())
for vs, vals in zip((model.trainable_variables, model.non_trainable_variables, optimizer.variables), carry):
    for a, b in zip(vs, vals):
        a.assign(b)
