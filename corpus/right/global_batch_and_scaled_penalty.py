"""Two replicas with a loss of the global batch and a scaled penalty

kind: right
engine: tensorflow
author: second
says: Rows count once in the global batch, and each replica adds its share of the penalty.
call: job.model, data=(x, y), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), optimizer=job.optimizer
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import numpy as np
import tensorflow as tf

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration(), tf.config.LogicalDeviceConfiguration()])
import keras
from keras import layers

GLOBAL_BATCH = 16


def load(n=104):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, 9)).astype("float32")
    return x, x[:, :3].argmax(1).astype("int64")


class Job:
    def __init__(self):
        self.strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        with self.strategy.scope():
            self.model = keras.Sequential([
                layers.Input((9,)),
                layers.Dense(24, activation="relu", kernel_regularizer=keras.regularizers.L2(1e-3)),
                layers.Dense(3)])
            self.optimizer = keras.optimizers.SGD(0.1)
            self.per_example = keras.losses.SparseCategoricalCrossentropy(
                from_logits=True, reduction="none")

    def compute_loss(self, y, logits):
        loss = tf.reduce_sum(self.per_example(y, logits)) / GLOBAL_BATCH
        reg = tf.add_n(self.model.losses)
        return loss + reg / self.strategy.num_replicas_in_sync

    def replica_step(self, x, y):
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y, self.model(x, training=True))
        variables = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return loss

    @tf.function
    def step(self, batch):
        losses = self.strategy.run(self.replica_step, args=batch)
        return self.strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    def train(self, x, y, epochs=2):
        ds = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(104, seed=0)
        ds = ds.batch(GLOBAL_BATCH, drop_remainder=True)
        dist = self.strategy.experimental_distribute_dataset(ds)
        for e in range(epochs):
            print(e, np.mean([float(self.step(b)) for b in dist]))


if __name__ == "__main__":
    keras.utils.set_random_seed(0)
    x, y = load()
    job = Job()
    # ---- training ----
    job.train(x, y)
