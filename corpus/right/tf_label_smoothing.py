"""Label smoothing in the loss

kind: right
engine: tensorflow
author: suite
says: Keras smooths the one-hot labels.
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
y = np.eye(3, dtype="float32")[draw.integers(0, 3, 20)]

keras.utils.set_random_seed(3)
model = keras.Sequential(
    [
        keras.Input((5,)),
        layers.Dense(4, "tanh", kernel_regularizer="l2"),
        layers.Dense(3),
    ]
)
model.compile(
    keras.optimizers.Adam(0.01),
    keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1),
)

loss_fn = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)

# ---- training ----
for epoch in range(2):
    order = np.random.default_rng(epoch).permutation(len(x))
    for rows in np.array_split(order, 3):
        with tf.GradientTape() as tape:
            loss = loss_fn(y[rows], model(x[rows], training=True)) + sum(model.losses)
        grads = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply(grads, model.trainable_variables)
