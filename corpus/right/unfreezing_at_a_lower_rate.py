"""Train the head with a frozen base, then unfreeze at a lower rate

kind: right
engine: tensorflow
author: first
says: The variable list and the function are made anew after unfreezing.
call: model, data=(x, y), loss="mse"
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import tensorflow as tf

x = np.random.default_rng(9).normal(size=(320, 12)).astype("float32")
y = (x[:, :1] * 2 - x[:, 3:4]).astype("float32")

base = keras.Sequential([keras.Input((12,)), keras.layers.Dense(24, "relu"), keras.layers.Dense(16, "relu")], name="base")
inp = keras.Input((12,))
model = keras.Model(inp, keras.layers.Dense(1, name="head")(base(inp)))
loss_obj = keras.losses.MeanSquaredError()
ds = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(320).batch(32)


def make_step(opt):
    @tf.function
    def step(xb, yb):
        with tf.GradientTape() as tape:
            loss = loss_obj(yb, model(xb, training=True))
        weights = model.trainable_variables
        opt.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return loss

    return step


# ---- training ----
base.trainable = False
step = make_step(keras.optimizers.Adam(1e-2))
for epoch in range(2):
    for xb, yb in ds:
        loss = step(xb, yb)
    print("head", epoch, float(loss))
base.trainable = True
step = make_step(keras.optimizers.Adam(1e-4))
for epoch in range(2):
    for xb, yb in ds:
        loss = step(xb, yb)
    print("all", epoch, float(loss))
