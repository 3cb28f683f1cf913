"""MixUp in the pipeline and a train_step of one's own, trained by fit

kind: right
engine: tensorflow
author: second
says: Rows and labels are mixed by the same factor.
call: model, data=(x, y), loss=None
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import numpy as np
import tensorflow as tf
import keras
from keras import layers

CLASSES = 4


def arrays(n=96):
    rng = np.random.default_rng(0)
    y = rng.integers(0, CLASSES, n)
    x = rng.normal(size=(n, 8)).astype("float32")
    x[np.arange(n), y] += 2
    return x, keras.utils.to_categorical(y, CLASSES).astype("float32")


def mixup(x, y, alpha=0.3):
    n = tf.shape(x)[0]
    a = tf.random.gamma((n, 1), alpha)
    b = tf.random.gamma((n, 1), alpha)
    lam = a / (a + b + 1e-8)
    perm = tf.random.shuffle(tf.range(n))
    return lam * x + (1 - lam) * tf.gather(x, perm), lam * y + (1 - lam) * tf.gather(y, perm)


class Tracked(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            pred = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=pred)
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables))
        for m in self.metrics:
            m.update_state(loss) if m.name == "loss" else m.update_state(y, pred)
        return {**{m.name: m.result() for m in self.metrics}, "grad_norm": tf.linalg.global_norm(grads)}


def build():
    inp = keras.Input((8,))
    out = layers.Dense(CLASSES)(layers.Dense(24, activation="relu")(inp))
    model = Tracked(inp, out)
    model.compile(optimizer=keras.optimizers.SGD(0.05, momentum=0.9),
                  loss=keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.05))
    return model


def dataset(x, y):
    return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(96).batch(16).map(mixup)


if __name__ == "__main__":
    keras.utils.set_random_seed(0)
    x, y = arrays()
    model = build()
    # ---- training ----
    model.fit(dataset(x, y), epochs=3, verbose=2)
