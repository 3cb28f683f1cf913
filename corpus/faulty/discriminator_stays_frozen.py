"""GAN: the discriminator is frozen for the generator's step and never released

kind: faulty
engine: tensorflow
author: first
changes: update
quantity: HANDED_GRADIENT
says: `discriminator.trainable = False` is not set back: its list of variables is empty from the
    second step on.
call: discriminator, data=(np.concatenate([real, real + 2]), np.repeat([[1.0], [0.0]], 160, 0).astype("float32")), loss=bce
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import tensorflow as tf

real = np.random.default_rng(40).normal(size=(160, 2)).astype("float32")
generator = keras.Sequential([keras.Input((3,)), keras.layers.Dense(12, "relu"), keras.layers.Dense(2)])
discriminator = keras.Sequential([keras.Input((2,)), keras.layers.Dense(12, "relu"), keras.layers.Dense(1)])
g_opt, d_opt = keras.optimizers.Adam(1e-3), keras.optimizers.Adam(1e-3)
bce = keras.losses.BinaryCrossentropy(from_logits=True)


def d_step(batch):
    fake = generator(np.random.normal(size=(len(batch), 3)).astype("float32"), training=True)
    both = tf.concat([batch, fake], 0)
    labels = tf.concat([tf.ones((len(batch), 1)), tf.zeros((len(batch), 1))], 0)
    with tf.GradientTape() as tape:
        loss = bce(labels, discriminator(both, training=True))
    variables = discriminator.trainable_variables
    for g, v in zip(tape.gradient(loss, variables), variables):
        v.assign_sub(0.01 * g)
    return loss


def g_step(n):
    discriminator.trainable = False  # fault
    with tf.GradientTape() as tape:
        fake = generator(np.random.normal(size=(n, 3)).astype("float32"), training=True)
        loss = bce(tf.ones((n, 1)), discriminator(fake, training=True))
    g_opt.apply_gradients(zip(tape.gradient(loss, generator.trainable_variables), generator.trainable_variables))
    return loss


# ---- training ----
for epoch in range(3):
    for i in range(0, 160, 16):
        d = d_step(real[i:i + 16])
        g = g_step(16)
    print(epoch, float(d), float(g))
