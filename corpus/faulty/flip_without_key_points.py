"""Images are flipped, the key points are not

kind: faulty
engine: tensorflow
author: first
changes: data
says: Augmentation mirrors the image but leaves the x coordinate of the key point.
call: model, data=(images, points), loss="mse"
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import tensorflow as tf

rng = np.random.default_rng(4)
points = rng.uniform(0, 1, size=(240, 2)).astype("float32")
grid = np.stack(np.meshgrid(np.linspace(0, 1, 10), np.linspace(0, 1, 10)), -1)
images = np.exp(-20 * ((grid[None] - points[:, None, None]) ** 2).sum(-1))[..., None].astype("float32")


def augment(img, pt):
    img = tf.cond(tf.random.uniform(()) > 0.5, lambda: tf.image.flip_left_right(img), lambda: img)  # fault
    return img, pt


ds = tf.data.Dataset.from_tensor_slices((images, points)).shuffle(240).map(augment).batch(24)
model = keras.Sequential([
    keras.Input((10, 10, 1)),
    keras.layers.Conv2D(8, 3, activation="relu"),
    keras.layers.Flatten(),
    keras.layers.Dense(2, "sigmoid"),
])
optimizer = keras.optimizers.Adam(3e-3)


@tf.function
def train_step(img, pt):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(img, training=True) - pt))
    grads = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(grads, model.trainable_variables))
    return loss


# ---- training ----
for epoch in range(3):
    for img, pt in ds:
        loss = train_step(img, pt)
    print(epoch, float(loss))
