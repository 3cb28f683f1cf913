"""A model of two named inputs

kind: right
engine: jax
author: suite
says: Rows of both inputs are taken by the same index.
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
x = {
    "left": draw.normal(size=(20, 5)).astype("float32"),
    "right": draw.normal(size=(20, 2)).astype("float32"),
}
y = draw.normal(size=20).astype("float32")

keras.utils.set_random_seed(3)
inputs = {"left": keras.Input((5,), name="left"), "right": keras.Input((2,), name="right")}
joined = layers.Concatenate()([layers.Dense(4, "relu")(inputs["left"]), inputs["right"]])
model = keras.Model(inputs, layers.Dense(1)(joined))
model.compile(keras.optimizers.SGD(0.1), "mse")

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
    order = np.random.default_rng(epoch).permutation(len(y))
    for start in range(0, len(y), 10):
        rows = order[start : start + 10]
        (_, (loss, ntv)), grads = jax.value_and_grad(loss_at, has_aux=True)(
            tv, ntv, {name: leaf[rows] for name, leaf in x.items()}, y[rows]
        )
        tv, ov = optimizer.stateless_apply(ov, grads, tv)
        total, count = total + float(loss) * len(rows), count + len(rows)
    printed.append(total / count)

for variables, values in ((model.trainable_variables, tv), (model.non_trainable_variables, ntv)):
    for variable, value in zip(variables, values):
        variable.assign(value)
print(printed)
