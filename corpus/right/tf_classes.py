"""Cross-entropy of logits, and evaluate after each epoch

kind: right
engine: tensorflow
author: suite
says: The loss and the layers agree on logits.
call: model, data=(x, y)
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import tensorflow as tf
from keras import layers

draw = np.random.default_rng(0)
x = draw.normal(size=(20, 5)).astype("float32")
y = draw.integers(0, 3, 20)

keras.utils.set_random_seed(3)
model = keras.Sequential(
    [
        keras.Input((5,)),
        layers.Dense(4, "tanh", kernel_regularizer="l2"),
        layers.Dense(3),
    ]
)
model.compile(
    keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
)

loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

# ---- training ----
for epoch in range(2):
    order = np.random.default_rng(epoch).permutation(len(x))
    for start in range(0, len(x), 8):
        rows = order[start : start + 8]
        with tf.GradientTape() as tape:
            loss = loss_fn(y[rows], model(x[rows], training=True)) + sum(model.losses)
        grads = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(grads, model.trainable_variables))
    model.evaluate(x, y, verbose=0)
