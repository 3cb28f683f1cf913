"""A train_step of its own, under fit

kind: right
engine: tensorflow
author: suite
says: The model's losses are added once.
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
y = draw.normal(size=20).astype("float32")


class Own(keras.Sequential):
    def train_step(self, data):
        a, b = data
        with tf.GradientTape() as tape:
            output = self(a, training=True)
            loss = tf.reduce_mean((b - output) ** 2) + sum(self.losses)
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables))
        return {"loss": loss}


keras.utils.set_random_seed(3)
model = Own(
    [
        keras.Input((5,)),
        layers.Dense(4, "tanh", kernel_regularizer="l2"),
        layers.Dropout(0.4),
        layers.Dense(1),
    ]
)
model.compile(keras.optimizers.Adam(0.01), "mse")

# ---- training ----
model.fit(x, y[:, None], epochs=2, batch_size=8, shuffle=False, verbose=0)
