"""Three replicas with unequal numbers of rows

kind: right
engine: tensorflow
process: own
author: suite
says: Each divides its sum by all rows, and adds a third of the penalty.
call: model, data=(x, y)
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import tensorflow as tf
from keras import layers

draw = np.random.default_rng(0)
x = draw.normal(size=(20, 5)).astype("float32")
y = draw.normal(size=20).astype("float32")

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 3)
strategy = tf.distribute.MirroredStrategy(
    ["CPU:0", "CPU:1", "CPU:2"], tf.distribute.ReductionToOneDevice()
)
keras.utils.set_random_seed(3)
with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((5,)),
            layers.Dense(4, "tanh", kernel_regularizer="l2"),
            layers.Dropout(0.4),
            layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse")
    model.optimizer.build(model.trainable_variables)

num = strategy.num_replicas_in_sync


def replica(a, b, rows):
    with tf.GradientTape() as tape:
        error = (b[:, None] - model(a, training=True)) ** 2
        loss = tf.reduce_sum(error) / tf.cast(rows, "float32") + sum(model.losses) / num
    grads = tape.gradient(loss, model.trainable_variables)
    model.optimizer.apply_gradients(zip(grads, model.trainable_variables))


@tf.function(reduce_retracing=True)
def step(a, b, rows):
    strategy.run(replica, args=(a, b, rows))


def spread(values, parts):
    return strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(values[parts[context.replica_id_in_sync_group]])
    )


# ---- training ----
for epoch in range(2):
    order = np.random.default_rng(epoch).permutation(len(x))
    for start in range(0, len(x), 8):
        rows = order[start : start + 8]
        parts = np.array_split(rows, num)
        step(spread(x, parts), spread(y, parts), len(rows))
