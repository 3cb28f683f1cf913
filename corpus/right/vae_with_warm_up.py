"""A VAE with a warm-up of the KL term and free bits

kind: right
engine: tensorflow
author: second
says: The weight of the KL term is meant to grow.
call: none
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import numpy as np
import tensorflow as tf
import keras
from keras import layers

LATENT = 3


def data(n=96):
    rng = np.random.default_rng(0)
    return (rng.normal(size=(n, 3)) @ rng.normal(size=(3, 12))).astype("float32")


class VAE(keras.Model):
    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential([layers.Input((12,)), layers.Dense(24, activation="relu"), layers.Dense(2 * LATENT)])
        self.decoder = keras.Sequential([layers.Input((LATENT,)), layers.Dense(24, activation="relu"), layers.Dense(12)])
        self.built = True

    def call(self, x, training=None):
        mu, logvar = tf.split(self.encoder(x, training=training), 2, axis=-1)
        z = mu + tf.exp(0.5 * logvar) * tf.random.normal(tf.shape(mu))
        return self.decoder(z, training=training), mu, logvar


def elbo_terms(x, recon, mu, logvar, floor=0.05):
    rec = tf.reduce_mean(tf.reduce_sum(tf.square(x - recon), axis=1))
    kl_dim = tf.reduce_mean(-0.5 * (1 + logvar - tf.square(mu) - tf.exp(logvar)), axis=0)
    return rec, tf.reduce_sum(tf.maximum(kl_dim, floor))


def train(vae, opt, x, epochs=3, warmup=12):
    ds = tf.data.Dataset.from_tensor_slices(x).shuffle(len(x), seed=0).batch(16)
    it = tf.Variable(0, dtype=tf.int64)

    @tf.function
    def step(xb):
        beta = tf.minimum(1.0, tf.cast(it, tf.float32) / warmup)
        with tf.GradientTape() as tape:
            rec, kl = elbo_terms(xb, *vae(xb, training=True))
            loss = rec + beta * kl
        opt.apply_gradients(zip(tape.gradient(loss, vae.trainable_variables), vae.trainable_variables))
        it.assign_add(1)
        return rec, kl, beta

    for e in range(epochs):
        for xb in ds:
            rec, kl, beta = step(xb)
        print(e, float(rec), float(kl), float(beta))


if __name__ == "__main__":
    keras.utils.set_random_seed(0)
    x = data()
    vae, optimizer = VAE(), keras.optimizers.Adam(2e-3)
    # ---- training ----
    train(vae, optimizer, x)
