"""Two outputs, the second is compared with the first target

kind: faulty
engine: jax
author: first
changes: update
quantity: LABELS
says: Copy and paste: both heads are trained on ya.
call: model, data=(x, (ya, yb)), loss=["mse", "mse"]
"""
import os

os.environ["KERAS_BACKEND"] = "jax"
import jax
import jax.numpy as jnp
import keras
import numpy as np

x = np.random.default_rng(30).normal(size=(320, 6)).astype("float32")
ya, yb = x[:, :1] * 2, np.cos(x[:, 1:2])
inp = keras.Input((6,))
h = keras.layers.Dense(24, "relu")(inp)
model = keras.Model(inp, [keras.layers.Dense(1, name="a")(h), keras.layers.Dense(1, name="b")(h)])
opt = keras.optimizers.Adam(1e-3)
opt.build(model.trainable_variables)


def loss_fn(tv, ntv, xs, ya, yb):
    (pa, pb), ntv = model.stateless_call(tv, ntv, xs, training=True)
    loss_a = jnp.mean((pa - ya) ** 2)
    loss_b = jnp.mean((pb - ya) ** 2)  # fault
    return loss_a + loss_b, ntv


@jax.jit
def step(tv, ntv, ov, xs, ya, yb):
    (loss, ntv), g = jax.value_and_grad(loss_fn, has_aux=True)(tv, ntv, xs, ya, yb)
    tv, ov = opt.stateless_apply(ov, g, tv)
    return tv, ntv, ov, loss


# ---- training ----
tv, ntv, ov = ([v.value for v in vs] for vs in (model.trainable_variables, model.non_trainable_variables, opt.variables))
for epoch in range(3):
    for b in np.random.permutation(320).reshape(10, 32):
        tv, ntv, ov, loss = step(tv, ntv, ov, x[b], ya[b], yb[b])
    print(epoch, loss)
for v, a in zip(model.trainable_variables, tv):
    v.assign(a)
