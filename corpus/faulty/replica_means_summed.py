"""MirroredStrategy: the replica's own mean as the loss

kind: faulty
engine: tensorflow
author: first
changes: update
quantity: ROW_GRADIENTS
says: Each replica takes the mean of its rows; the gradients are summed over replicas, so the step
    is twice as large.
call: model, data=(x, y), loss=keras.losses.MeanSquaredError()
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import tensorflow as tf

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
x = np.random.default_rng(32).normal(size=(320, 6)).astype("float32")
y = x[:, :1] * 0.3
with strategy.scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    optimizer.build(model.trainable_variables)
dist = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).shuffle(320).batch(32))


def replica_step(xb, yb):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(keras.losses.mean_squared_error(yb, model(xb, training=True)))  # fault
    grads = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(grads, model.trainable_variables))
    return loss


@tf.function
def train_step(batch):
    losses = strategy.run(replica_step, args=batch)
    return strategy.reduce(tf.distribute.ReduceOp.MEAN, losses, axis=None)


# ---- training ----
for epoch in range(3):
    for batch in dist:
        loss = train_step(batch)
    print(epoch, float(loss))
