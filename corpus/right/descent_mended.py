"""Gradient descent by hand, with BatchNormalization

kind: right
engine: tensorflow
author: suite
says: The model is called with `training=True`.
call: model, data=(x, y)
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import tensorflow as tf
from keras import layers

draw = np.random.default_rng(0)
x = draw.normal(size=(20, 4)).astype("float32")
y = np.argmax(x @ draw.normal(size=(4, 3)), axis=1)

keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.Input((4,)),
        layers.Dense(4, "tanh"),
        layers.BatchNormalization(),
        layers.Dense(3),
    ]
)
model.compile(
    keras.optimizers.SGD(0.05), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
)


lr, batch_size = 0.1, 5
loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
# ---- training ----
for epoch in range(2):
    order = np.random.permutation(len(x))
    for it in range(len(x) // batch_size):
        idx = order[it * batch_size : (it + 1) * batch_size]
        with tf.GradientTape() as tape:
            loss = loss_fn(y[idx], model(x[idx], training=True))
        dW = tape.gradient(loss, model.trainable_variables)
        for W, d in zip(model.trainable_variables, dW):
            W.assign_sub(lr * d)
