"""The list of variables was taken while the backbone was frozen

kind: faulty
engine: tensorflow
author: second
changes: update
quantity: HANDED_GRADIENT
says: The variable list was taken while the backbone was frozen, so after unfreezing the backbone
    still gets no update.
call: ft.model, data=(x, y), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), optimizer=ft.optimizer
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import numpy as np
import tensorflow as tf
import keras
from keras import layers


class FineTuner:
    def __init__(self, num_classes=4):
        self.backbone = keras.Sequential(
            [layers.Input((12,)), layers.Dense(24, activation="relu"),
             layers.Dense(16, activation="relu")], name="backbone")
        self.backbone.trainable = False
        self.model = keras.Sequential(
            [layers.Input((12,)), self.backbone, layers.Dense(num_classes)])
        self.loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.optimizer = keras.optimizers.SGD(0.1)
        self.variables = self.model.trainable_variables  # fault

    @tf.function
    def step(self, x, y):
        with tf.GradientTape() as tape:
            loss = self.loss_fn(y, self.model(x, training=True))
        grads = tape.gradient(loss, self.variables)
        self.optimizer.apply_gradients(zip(grads, self.variables))
        return loss

    def run(self, dataset, epochs):
        for e in range(epochs):
            losses = [float(self.step(x, y)) for x, y in dataset]
            print("epoch", e, np.mean(losses))

    def head_stage(self, dataset):
        self.run(dataset, 1)

    def finetune_stage(self, dataset):
        self.backbone.trainable = True
        self.optimizer.learning_rate = 0.01
        self.run(dataset, 2)


def data(n=96):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, 12)).astype("float32")
    return x, rng.integers(0, 4, n)


def batches(x, y):
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(16)


if __name__ == "__main__":
    keras.utils.set_random_seed(0)
    ft = FineTuner()
    x, y = data()
    ds = batches(x, y)
    ft.head_stage(ds)
    # ---- training ----
    ft.finetune_stage(ds)
