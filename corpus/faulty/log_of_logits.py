"""Log of clipped logits, as if they were probabilities

kind: faulty
engine: jax
author: first
changes: update
quantity: LOSS_FORM
says: The model's logits go through jnp.log without a softmax.
call: model, data=(x, y), loss=keras.losses.CategoricalCrossentropy(from_logits=True)
"""
import os

os.environ["KERAS_BACKEND"] = "jax"
import jax
import jax.numpy as jnp
import keras
import numpy as np

x = np.random.default_rng(16).normal(size=(320, 9)).astype("float32")
y = np.eye(4, dtype="float32")[np.argmax(x[:, :4], axis=1)]
model = keras.Sequential([keras.Input((9,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(4)])
optimizer = keras.optimizers.Adam(1e-3)
optimizer.build(model.trainable_variables)


def cross_entropy(pred, target):
    pred = jnp.clip(pred, 1e-7, 1.0)
    return -jnp.mean(jnp.sum(target * jnp.log(pred), axis=-1))  # fault


def loss_fn(tv, ntv, xb, yb):
    pred, ntv = model.stateless_call(tv, ntv, xb, training=True)
    return cross_entropy(pred, yb), ntv


@jax.jit
def train_step(tv, ntv, ov, xb, yb):
    (loss, ntv), grads = jax.value_and_grad(loss_fn, has_aux=True)(tv, ntv, xb, yb)
    tv, ov = optimizer.stateless_apply(ov, grads, tv)
    return tv, ntv, ov, loss


# ---- training ----
tv = [v.value for v in model.trainable_variables]
ntv = [v.value for v in model.non_trainable_variables]
ov = [v.value for v in optimizer.variables]
for epoch in range(3):
    for b in np.random.permutation(320).reshape(10, 32):
        tv, ntv, ov, loss = train_step(tv, ntv, ov, x[b], y[b])
    print("epoch", epoch, loss)
for v, a in zip(model.trainable_variables, tv):
    v.assign(a)
