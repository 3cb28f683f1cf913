"""Replicas that divide by the rows of the batch

kind: right
engine: tensorflow
process: own
author: suite
says: The rows of all replicas are added up first.
call: model, data=(x, y)
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import tensorflow as tf
from keras import layers

draw = np.random.default_rng(0)
x = draw.normal(size=(20, 4)).astype("float32")
y = np.argmax(x @ draw.normal(size=(4, 3)), axis=1)

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice())
keras.utils.set_random_seed(0)
with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(4, "tanh"),
            layers.Dense(3),
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.05), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )


dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x)).batch(8)
loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")


def train_step(inputs):
    images, labels = inputs
    with tf.GradientTape() as tape:
        per_example_loss = loss_object(labels, model(images, training=True))
        size = tf.distribute.get_replica_context().all_reduce("sum", tf.size(labels))
        loss = tf.reduce_sum(per_example_loss) / tf.cast(size, tf.float32)
    gradients = tape.gradient(loss, model.trainable_variables)
    model.optimizer.apply_gradients(zip(gradients, model.trainable_variables))


@tf.function
def distributed_train_step(dataset_inputs):
    strategy.run(train_step, args=(dataset_inputs,))


# ---- training ----
for epoch in range(2):
    for batch in strategy.experimental_distribute_dataset(dataset):
        distributed_train_step(batch)
