"""A frozen layer before BatchNormalization

kind: right
engine: jax
author: suite
says: The frozen layer gets no gradient; the statistics move.
call: model, data=(x, y)
printed: loss=printed
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
        layers.Dense(4, "tanh", kernel_regularizer="l2"),
        layers.BatchNormalization(),
        layers.Dense(3, "relu"),
        layers.Dense(1),
    ]
)
model.layers[0].trainable = False
model.compile(keras.optimizers.Adam(0.01), "mse")

optimizer = model.optimizer
optimizer.build(model.trainable_variables)
groups = model.trainable_variables, model.non_trainable_variables, optimizer.variables
tv, ntv, ov = ([v.value for v in group] for group in groups)


def loss_at(tv, ntv, a, b):
    output, ntv, own = model.stateless_call(tv, ntv, a, training=True, return_losses=True)
    loss = jnp.mean((b[:, None] - output) ** 2)
    return loss + sum(own), (loss, ntv)


printed = []

# ---- training ----
for epoch in range(2):
    total, count = 0.0, 0
    order = np.random.default_rng(epoch).permutation(len(x))
    for start in range(0, len(x), 10):
        rows = order[start : start + 10]
        (_, (loss, ntv)), grads = jax.value_and_grad(loss_at, has_aux=True)(
            tv, ntv, x[rows], y[rows]
        )
        tv, ov = optimizer.stateless_apply(ov, grads, tv)
        total, count = total + float(loss) * len(rows), count + len(rows)
    printed.append(total / count)

for variables, values in ((model.trainable_variables, tv), (model.non_trainable_variables, ntv)):
    for variable, value in zip(variables, values):
        variable.assign(value)
print(printed)
