"""MirroredStrategy: both replicas get the same batch

kind: faulty
engine: tensorflow
author: first
changes: update
quantity: ROWS
says: `experimental_distribute_values_from_function` hands the same rows to each replica: half of
    the rows of the global batch are copies.
call: model, data=(x, y), loss=keras.losses.MeanSquaredError(), rows="once"
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import tensorflow as tf

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
x = np.random.default_rng(8).normal(size=(320, 5)).astype("float32")
y = x[:, :1] - x[:, 1:2]
PER_REPLICA = 16
with strategy.scope():
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(12, "relu"), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.05)
    optimizer.build(model.trainable_variables)
    mse = keras.losses.MeanSquaredError(reduction="none")


def step_fn(xb, yb):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(mse(yb, model(xb, training=True))) / (PER_REPLICA * strategy.num_replicas_in_sync)
    grads = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(grads, model.trainable_variables))
    return loss


@tf.function
def train_step(xb, yb):
    return strategy.reduce("SUM", strategy.run(step_fn, args=(xb, yb)), axis=None)


# ---- training ----
for epoch in range(2):
    perm = np.random.permutation(320)
    for i in range(0, 320, PER_REPLICA):
        rows = perm[i : i + PER_REPLICA]
        xb = strategy.experimental_distribute_values_from_function(lambda ctx: tf.constant(x[rows]))  # fault
        yb = strategy.experimental_distribute_values_from_function(lambda ctx: tf.constant(y[rows]))
        loss = train_step(xb, yb)
    print(epoch, float(loss))
