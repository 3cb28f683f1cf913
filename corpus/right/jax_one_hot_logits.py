"""Cross-entropy of one-hot labels and logits

kind: right
engine: jax
author: suite
says: The loss and the layers agree on logits.
call: model, data=(x, y)
"""
import os

os.environ["KERAS_BACKEND"] = "jax"
import jax
import keras
import numpy as np
from keras import layers

draw = np.random.default_rng(0)
x = draw.normal(size=(20, 5)).astype("float32")
y = np.eye(3, dtype="float32")[draw.integers(0, 3, 20)]

keras.utils.set_random_seed(3)
model = keras.Sequential(
    [
        keras.Input((5,)),
        layers.Dense(4, "tanh", kernel_regularizer="l2"),
        layers.Dense(3),
    ]
)
model.compile(keras.optimizers.Adam(0.01), keras.losses.CategoricalCrossentropy(from_logits=True))

optimizer = model.optimizer
optimizer.build(model.trainable_variables)
groups = model.trainable_variables, model.non_trainable_variables, optimizer.variables
tv, ntv, ov = ([v.value for v in group] for group in groups)

loss_fn = keras.losses.CategoricalCrossentropy(from_logits=True)


def loss_at(tv, ntv, a, b):
    output, ntv, own = model.stateless_call(tv, ntv, a, training=True, return_losses=True)
    return loss_fn(b, output) + sum(own), ntv


@jax.jit
def step(tv, ntv, ov, a, b):
    (_, new), grads = jax.value_and_grad(loss_at, has_aux=True)(tv, ntv, a, b)
    tv, ov = optimizer.stateless_apply(ov, grads, tv)
    return tv, new, ov


# ---- training ----
for epoch in range(2):
    order = np.random.default_rng(epoch).permutation(len(x))
    for start in range(0, len(x), 8):
        rows = order[start : start + 8]
        tv, ntv, ov = step(tv, ntv, ov, x[rows], y[rows])

for variables, values in ((model.trainable_variables, tv), (model.non_trainable_variables, ntv)):
    for variable, value in zip(variables, values):
        variable.assign(value)
