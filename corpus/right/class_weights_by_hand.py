"""Class weights by hand, the mean over the rows as in fit

kind: right
engine: jax
author: first
says: As model.fit(class_weight=...).
call: model, data=(x, y, np.asarray(class_weight)[y]), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True)
"""
import os

os.environ["KERAS_BACKEND"] = "jax"
import jax
import jax.numpy as jnp
import keras
import numpy as np

x = np.random.default_rng(24).normal(size=(400, 6)).astype("float32")
y = (x[:, 0] > 0.8).astype("int32")
class_weight = np.array([0.6, 2.5], "float32")
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(2)])
opt = keras.optimizers.SGD(0.1, momentum=0.9)
opt.build(model.trainable_variables)


def weighted_loss(tv, ntv, xb, yb):
    logits, ntv = model.stateless_call(tv, ntv, xb, training=True)
    ce = -jnp.sum(jax.nn.one_hot(yb, 2) * jax.nn.log_softmax(logits), axis=-1)
    return jnp.mean(ce * jnp.asarray(class_weight)[yb]), ntv


@jax.jit
def step(state, xb, yb):
    tv, ntv, ov = state
    (loss, ntv), g = jax.value_and_grad(weighted_loss, has_aux=True)(tv, ntv, xb, yb)
    tv, ov = opt.stateless_apply(ov, g, tv)
    return loss, (tv, ntv, ov)


def get_state():
    return tuple([v.value for v in vs] for vs in (model.trainable_variables, model.non_trainable_variables, opt.variables))


# ---- training ----
state = get_state()
for epoch in range(3):
    idx = np.random.permutation(len(x))
    for b in np.array_split(idx, 10):
        loss, state = step(state, jnp.asarray(x[b]), jnp.asarray(y[b]))
    print(epoch, float(loss))
for v, a in zip(model.trainable_variables, state[0]):
    v.assign(a)
