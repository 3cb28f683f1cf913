"""Two outputs, and a loss of both that is one number

kind: right
engine: tensorflow
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

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import tensorflow as tf
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

losses = {
    "kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    "price": keras.losses.MeanSquaredError(),
}
weights = {"kind": 1.0, "price": 0.3}


# ---- training ----
for epoch in range(2):
    order = np.random.default_rng(epoch).permutation(len(x))
    for start in range(0, len(x), 8):
        rows = order[start : start + 8]

        with tf.GradientTape() as tape:
            outputs, total = model(x[rows], training=True), 0.0
            for name in losses:
                loss = losses[name](y[name][rows], outputs[name])
                total = total + weights[name] * loss
        grads = tape.gradient(total, model.trainable_variables)
        model.optimizer.apply_gradients(zip(grads, model.trainable_variables))
