"""Encoder and decoder, only the decoder's variables are given

kind: faulty
engine: tensorflow
author: first
changes: update
quantity: HANDED_GRADIENT
says: The gradient is taken for and applied to decoder.trainable_variables only.
call: autoencoder, data=(x, x), loss="mse"
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import tensorflow as tf

x = np.random.default_rng(36).normal(size=(300, 10)).astype("float32")
encoder = keras.Sequential([keras.Input((10,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(3)], name="encoder")
decoder = keras.Sequential([keras.Input((3,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(10)], name="decoder")
inp = keras.Input((10,))
autoencoder = keras.Model(inp, decoder(encoder(inp)))
opt = keras.optimizers.Adam(1e-3)
# ---- training ----
for epoch in range(3):
    for b in np.random.permutation(300).reshape(10, 30):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x[b] - autoencoder(x[b], training=True)))
        g = tape.gradient(loss, decoder.trainable_variables)  # fault
        opt.apply_gradients(zip(g, decoder.trainable_variables))  # fault
    print(epoch, float(loss))
