"""Distillation, the teacher runs in training mode

kind: faulty
engine: jax
author: first
changes: update
quantity: LABELS
says: The frozen teacher is called with training=True, so its targets go through dropout.
call: student, data=(x, np.asarray(teacher(x, training=False))), loss="mse"
"""
import os

os.environ["KERAS_BACKEND"] = "jax"
import jax
import jax.numpy as jnp
import keras
import numpy as np

x = np.random.default_rng(12).normal(size=(320, 6)).astype("float32")
teacher = keras.Sequential([keras.Input((6,)), keras.layers.Dense(64, "relu"), keras.layers.Dropout(0.5), keras.layers.Dense(3)])
student = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(3)])
opt = keras.optimizers.Adam(3e-3)
opt.build(student.trainable_variables)
t_tv = [v.value for v in teacher.trainable_variables]
t_ntv = [v.value for v in teacher.non_trainable_variables]


def distill(tv, ntv, t_ntv, xb):
    target, t_ntv = teacher.stateless_call(t_tv, t_ntv, xb, training=True)  # fault
    pred, ntv = student.stateless_call(tv, ntv, xb, training=True)
    return jnp.mean((pred - jax.lax.stop_gradient(target)) ** 2), (ntv, t_ntv)


@jax.jit
def step(tv, ntv, t_ntv, ov, xb):
    (loss, (ntv, t_ntv)), g = jax.value_and_grad(distill, has_aux=True)(tv, ntv, t_ntv, xb)
    tv, ov = opt.stateless_apply(ov, g, tv)
    return tv, ntv, t_ntv, ov, loss


# ---- training ----
tv, ntv = [v.value for v in student.trainable_variables], [v.value for v in student.non_trainable_variables]
ov = [v.value for v in opt.variables]
for epoch in range(3):
    for b in np.random.permutation(320).reshape(10, 32):
        tv, ntv, t_ntv, ov, loss = step(tv, ntv, t_ntv, ov, x[b])
    print(epoch, loss)
for v, a in zip(student.trainable_variables, tv):
    v.assign(a)
