"""Two outputs, and a loss of both that is one number

kind: right
engine: jax
author: suite
says: The loss is stated as a function of both outputs.
meant: def both(labels, outputs):
        kind = keras.losses.sparse_categorical_crossentropy(
            labels["kind"], outputs["kind"], from_logits=True
        )
        price = (labels["price"] - outputs["price"]) ** 2
        return keras.ops.mean(kind) + 0.3 * keras.ops.mean(price)
call: model, data=(x, y), loss=both
"""
import os

os.environ["KERAS_BACKEND"] = "jax"
import jax
import keras
import numpy as np
from keras import layers

draw = np.random.default_rng(0)
x = draw.normal(size=(20, 5)).astype("float32")
y = {"kind": draw.integers(0, 3, 20), "price": draw.normal(size=(20, 1)).astype("float32")}

keras.utils.set_random_seed(3)
inputs = keras.Input((5,))
hidden = layers.Dense(4, "tanh")(inputs)
kind = layers.Dense(3, name="kind")(hidden)
price = layers.Dense(1, name="price")(hidden)
model = keras.Model(inputs, {"kind": kind, "price": price})
cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(
    keras.optimizers.Adam(0.01),
    loss={"kind": cross_entropy, "price": "mse"},
    loss_weights={"kind": 1.0, "price": 0.3},
)

optimizer = model.optimizer
optimizer.build(model.trainable_variables)
groups = model.trainable_variables, model.non_trainable_variables, optimizer.variables
tv, ntv, ov = ([v.value for v in group] for group in groups)

losses = {
    "kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    "price": keras.losses.MeanSquaredError(),
}
weights = {"kind": 1.0, "price": 0.3}


def loss_at(tv, ntv, a, b):
    (outputs, ntv), total = model.stateless_call(tv, ntv, a, training=True), 0.0
    for name in losses:
        loss = losses[name](b[name], outputs[name])
        total = total + weights[name] * loss
    return total, ntv


step = jax.jit(jax.grad(loss_at, has_aux=True))


# ---- training ----
for epoch in range(2):
    order = np.random.default_rng(epoch).permutation(len(x))
    for start in range(0, len(x), 8):
        rows = order[start : start + 8]

        grads, ntv = step(tv, ntv, x[rows], {name: leaf[rows] for name, leaf in y.items()})
        tv, ov = optimizer.stateless_apply(ov, grads, tv)

for variables, values in ((model.trainable_variables, tv), (model.non_trainable_variables, ntv)):
    for variable, value in zip(variables, values):
        variable.assign(value)
