"""Label smoothing by hand

kind: right
engine: tensorflow
author: first
says: Smoothed targets, the loss of Keras with label_smoothing says the same.
call: model, data=(x, y), loss=keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import tensorflow as tf

n, classes = 360, 4
x = np.random.default_rng(5).normal(size=(n, 12)).astype("float32")
labels = np.argmax(x[:, :classes], axis=1)
y = keras.utils.to_categorical(labels, classes).astype("float32")

inputs = keras.Input((12,))
h = keras.layers.Dense(32)(inputs)
h = keras.layers.BatchNormalization()(h)
h = keras.layers.Activation("relu")(h)
model = keras.Model(inputs, keras.layers.Dense(classes)(h))
opt = keras.optimizers.Adam(1e-3)
SMOOTH = 0.1


def smooth(y):
    return y * (1.0 - SMOOTH) + SMOOTH / classes


dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(n, seed=1).batch(40)
# ---- training ----
for epoch in range(4):
    for step, (xb, yb) in enumerate(dataset):
        with tf.GradientTape() as tape:
            logits = model(xb, training=True)
            loss = tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(labels=smooth(yb), logits=logits))
        grads = tape.gradient(loss, model.trainable_variables)
        opt.apply_gradients(zip(grads, model.trainable_variables))
    print(epoch, loss.numpy())
