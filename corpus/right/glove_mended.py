"""A product of words, with labels of the outputs' rank

kind: right
engine: tensorflow
author: suite
says: Labels have the shape (B, 1), as the outputs.
call: model, data=(x, y)
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import tensorflow as tf
from keras import layers

draw = np.random.default_rng(0)
x = np.stack(np.divmod(draw.permutation(36)[:24], 6), axis=1).astype("int32")
y = np.log(draw.integers(1, 100, 24)).astype("float32")


class Glove(keras.Model):
    def __init__(self):
        super().__init__()
        self.target, self.context = (layers.Embedding(6, 3) for _ in range(2))
        self.target_bias, self.context_bias = (layers.Embedding(6, 1) for _ in range(2))
        self.dot = layers.Dot(axes=-1)

    def call(self, inputs):
        t, c = inputs[:, 0], inputs[:, 1]
        product = self.dot([self.target(t), self.context(c)])
        return product + self.target_bias(t) + self.context_bias(c)


keras.utils.set_random_seed(0)
model = Glove()
model(x[:1])
model.compile(keras.optimizers.Adagrad(0.1), "mse")


dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(24).batch(12)


@tf.function
def train_step(pairs, labels):
    with tf.GradientTape() as tape:
        prediction = model(pairs, training=True)
        loss = tf.reduce_mean(tf.math.squared_difference(labels[:, None], prediction))
    grads = tape.gradient(loss, model.trainable_variables)
    model.optimizer.apply_gradients(zip(grads, model.trainable_variables))


# ---- training ----
for epoch in range(2):
    for pairs, labels in dataset:
        train_step(pairs, labels)
