"""The last batch begins earlier, and its first rows have weight zero

kind: right
engine: jax
author: suite
says: Rows that came before do not count again.
call: model, data=(x, y)
"""
import os

os.environ["KERAS_BACKEND"] = "jax"
import jax
import jax.numpy as jnp
import keras
import numpy as np
from keras import layers

draw = np.random.default_rng(0)
x = draw.normal(size=(20, 5)).astype("float32")
y = draw.normal(size=20).astype("float32")

keras.utils.set_random_seed(3)
model = keras.Sequential(
    [
        keras.Input((5,)),
        layers.Dense(4, "tanh"),
        layers.Dense(1),
    ]
)
model.compile(keras.optimizers.SGD(0.05), "mse")

optimizer = model.optimizer
optimizer.build(model.trainable_variables)
groups = model.trainable_variables, model.non_trainable_variables, optimizer.variables
tv, ntv, ov = ([v.value for v in group] for group in groups)


def loss_at(tv, ntv, a, b, weight):
    output, ntv = model.stateless_call(tv, ntv, a, training=True)
    return jnp.sum((b - output[:, 0]) ** 2 * weight), ntv


step = jax.jit(jax.grad(loss_at, has_aux=True))


# ---- training ----
for epoch in range(2):
    order = np.random.default_rng(epoch).permutation(len(x))
    for start in range(0, len(x), 8):
        rows = order[start : start + 8]

        first = min(start, len(x) - 8)  # as lax.dynamic_slice has it
        rows, weight = order[first : first + 8], (first + np.arange(8) >= start).astype("float32")

        total = [0 * v for v in tv]
        for part in (np.arange(4), np.arange(4, 8)):
            grads, ntv = step(tv, ntv, x[rows[part]], y[rows[part]], weight[part] / weight.sum())
            total = [t + g for t, g in zip(total, grads)]
        tv, ov = optimizer.stateless_apply(ov, total, tv)

for variables, values in ((model.trainable_variables, tv), (model.non_trainable_variables, ntv)):
    for variable, value in zip(variables, values):
        variable.assign(value)
