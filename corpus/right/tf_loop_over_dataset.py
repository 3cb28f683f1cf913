"""A loop over a tf.data.Dataset inside of tf.function

kind: right
engine: tensorflow
author: suite
says: All batches of an epoch are one call.
call: model, data=(x, y), rows="shuffled"
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import tensorflow as tf
from keras import layers

draw = np.random.default_rng(0)
x = draw.normal(size=(20, 5)).astype("float32")
y = draw.normal(size=20).astype("float32")

keras.utils.set_random_seed(3)
model = keras.Sequential(
    [
        keras.Input((5,)),
        layers.Dense(4, "tanh", kernel_regularizer="l2"),
        layers.Dropout(0.4),
        layers.Dense(1),
    ]
)
model.compile(keras.optimizers.Adam(0.01), "mse")

data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=5).batch(8)


@tf.function
def run(data):
    for a, b in data:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((b[:, None] - model(a, training=True)) ** 2) + sum(model.losses)
        grads = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(grads, model.trainable_variables))


model.optimizer.build(model.trainable_variables)

# ---- training ----
for epoch in range(2):
    run(data)
