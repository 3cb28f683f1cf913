"""A mask that the model hands to the loss

kind: right
engine: jax
author: suite
says: Keras divides by all places, as the loss does.
call: model, data=(x, y)
"""
import os

os.environ["KERAS_BACKEND"] = "jax"
import jax
import keras
import numpy as np
from keras import layers

draw = np.random.default_rng(0)
x = draw.integers(1, 9, (20, 4)) * (np.arange(4) < draw.integers(1, 5, 20)[:, None])
x[:, 0] = np.arange(20) % 8 + 1
y = draw.normal(size=(20, 4, 1)).astype("float32")

keras.utils.set_random_seed(3)
model = keras.Sequential(
    [keras.Input((4,)), layers.Embedding(9, 3, mask_zero=True), layers.Dense(1)]
)
model.compile(keras.optimizers.Adam(0.01), "mse")

optimizer = model.optimizer
optimizer.build(model.trainable_variables)
groups = model.trainable_variables, model.non_trainable_variables, optimizer.variables
tv, ntv, ov = ([v.value for v in group] for group in groups)

loss_fn = keras.losses.MeanSquaredError()


def loss_at(tv, ntv, a, b):
    output, ntv = model.stateless_call(tv, ntv, a, training=True)
    return loss_fn(b, output), ntv


step = jax.jit(jax.grad(loss_at, has_aux=True))


# ---- training ----
for epoch in range(2):
    order = np.random.default_rng(epoch).permutation(len(x))
    for start in range(0, len(x), 8):
        rows = order[start : start + 8]

        grads, ntv = step(tv, ntv, x[rows], y[rows])
        tv, ov = optimizer.stateless_apply(ov, grads, tv)

for variables, values in ((model.trainable_variables, tv), (model.non_trainable_variables, ntv)):
    for variable, value in zip(variables, values):
        variable.assign(value)
