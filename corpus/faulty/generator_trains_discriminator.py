"""The generator's step trains the discriminator, too

kind: faulty
engine: tensorflow
author: second
changes: update
quantity: STATE
says: The generator's step also trains the discriminator (to call fakes real), as its list holds
    the combined model's variables.
call: gan.d, data=(points, np.ones((len(points), 1), "float32")), loss=keras.losses.BinaryCrossentropy(from_logits=True), optimizer=gan.d_opt
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import numpy as np
import tensorflow as tf
import keras
from keras import layers

LATENT, BATCH = 4, 32


def ring(n=128, seed=0):
    rng = np.random.default_rng(seed)
    a = rng.integers(0, 8, n) * np.pi / 4
    pts = np.stack([np.cos(a), np.sin(a)], 1) + 0.05 * rng.normal(size=(n, 2))
    return pts.astype("float32")


class RingGAN:
    def __init__(self):
        self.g = keras.Sequential([layers.Input((LATENT,)), layers.Dense(16, activation="relu"), layers.Dense(2)], name="generator")
        self.d = keras.Sequential([layers.Input((2,)), layers.Dense(16, activation="relu"), layers.Dense(1)], name="discriminator")
        self.combined = keras.Sequential([layers.Input((LATENT,)), self.g, self.d])
        self.g_opt = keras.optimizers.Adam(1e-3, beta_1=0.5)
        self.d_opt = keras.optimizers.Adam(1e-3, beta_1=0.5)
        self.bce = keras.losses.BinaryCrossentropy(from_logits=True)

    @tf.function
    def d_step(self, real):
        z = tf.random.normal((tf.shape(real)[0], LATENT))
        fake = self.g(z, training=False)
        both = tf.concat([real, fake], 0)
        labels = tf.concat([tf.ones_like(real[:, :1]), tf.zeros_like(fake[:, :1])], 0)
        with tf.GradientTape() as tape:
            loss = self.bce(labels, self.d(both, training=True))
        grads = tape.gradient(loss, self.d.trainable_variables)
        self.d_opt.apply_gradients(zip(grads, self.d.trainable_variables))
        return loss

    @tf.function
    def g_step(self, n):
        z = tf.random.normal((n, LATENT))
        with tf.GradientTape() as tape:
            logits = self.combined(z, training=True)
            loss = self.bce(tf.ones_like(logits), logits)
        grads = tape.gradient(loss, self.combined.trainable_variables)  # fault
        self.g_opt.apply_gradients(zip(grads, self.combined.trainable_variables))  # fault
        return loss

    def train(self, points, epochs=3):
        ds = tf.data.Dataset.from_tensor_slices(points).shuffle(128).batch(BATCH)
        for epoch in range(epochs):
            for real in ds:
                dl = self.d_step(real)
                gl = self.g_step(BATCH)
            print(epoch, float(dl), float(gl))


if __name__ == "__main__":
    keras.utils.set_random_seed(0)
    points = ring()
    gan = RingGAN()
    # ---- training ----
    gan.train(points)
