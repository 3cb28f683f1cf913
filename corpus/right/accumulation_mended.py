"""Accumulated gradients, divided by the microbatches of the window

kind: right
engine: tensorflow
author: suite
says: The last window of an epoch may be short, and all microbatches have four rows.
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
y = (x @ draw.normal(size=(4, 1))).astype("float32")

keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.Input((4,)),
        layers.Dense(4, "tanh"),
        layers.Dense(1),
    ]
)
model.compile(keras.optimizers.SGD(0.05), "mse")


loss_object = keras.losses.MeanSquaredError()
train_vars = model.trainable_variables
n_acum = 2
n_batches = len(x) // 4
# ---- training ----
for epoch in range(2):
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x)).batch(4)
    accum_gradient = [tf.zeros_like(this_var) for this_var in train_vars]
    for i, (xb, yb) in enumerate(dataset):
        with tf.GradientTape() as tape:
            predictions = model(xb, training=True)
            loss_value = loss_object(yb, predictions)
        gradients = tape.gradient(loss_value, train_vars)
        accum_gradient = [(acum_grad + grad) for acum_grad, grad in zip(accum_gradient, gradients)]
        if (i + 1) % n_acum == 0 or i + 1 == n_batches:
            model.optimizer.apply_gradients(
                zip([g / (i % n_acum + 1) for g in accum_gradient], train_vars)
            )
            accum_gradient = [tf.zeros_like(this_var) for this_var in train_vars]
