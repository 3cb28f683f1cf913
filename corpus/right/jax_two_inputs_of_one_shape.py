"""A model of two inputs of one shape

kind: right
engine: jax
author: suite
says: The inputs are given in the model's order.
call: model, data=(x, y)
"""
import os

os.environ["KERAS_BACKEND"] = "jax"
import jax
import keras
import numpy as np
from keras import layers

draw = np.random.default_rng(0)
both = draw.normal(size=(20, 6)).astype("float32")
x = [both[:, :3], both[:, 3:]]
y = draw.normal(size=(20, 3)).astype("float32")

keras.utils.set_random_seed(3)
inputs = [keras.Input((3,)), keras.Input((3,))]
joined = layers.Concatenate()([layers.Dense(4, "tanh")(inputs[0]), inputs[1]])
model = keras.Model(inputs, layers.Dense(3)(joined))
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
    order = np.random.default_rng(epoch).permutation(len(y))
    for start in range(0, len(y), 8):
        rows = order[start : start + 8]

        grads, ntv = step(tv, ntv, [x[0][rows], x[1][rows]], y[rows])
        tv, ov = optimizer.stateless_apply(ov, grads, tv)

for variables, values in ((model.trainable_variables, tv), (model.non_trainable_variables, ntv)):
    for variable, value in zip(variables, values):
        variable.assign(value)
