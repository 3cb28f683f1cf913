"""Replicas that divide by the tokens of the batch

kind: right
engine: tensorflow
process: own
author: suite
says: The tokens of all replicas are added up first.
meant: def masked(real, pred):
        mask = tf.cast(tf.not_equal(real, 0), tf.float32)
        target = tf.one_hot(tf.cast(real, tf.int32), 6) * 0.9 + 0.1 / 6
        entropy = tf.nn.softmax_cross_entropy_with_logits(target, pred)
        return entropy, mask
call: model, data=(x, y), loss=masked
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import tensorflow as tf
from keras import layers

draw = np.random.default_rng(0)
is_there = np.arange(6) < draw.integers(4, 7, size=(16, 1))
words = (draw.integers(1, 6, size=(16, 6)) * is_there).astype("int32")
x, y = words[:, :-1], words[:, 1:]

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice())
keras.utils.set_random_seed(0)
with strategy.scope():
    inputs = keras.Input((5,), dtype="int32")
    h = layers.Embedding(6, 4)(inputs)
    h = h + layers.MultiHeadAttention(1, 4)(h, h, use_causal_mask=True)
    model = keras.Model(inputs, layers.Dense(6)(layers.LayerNormalization()(h)))
    model.compile(keras.optimizers.SGD(0.2))


dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(16).batch(8)


def loss_function(real, pred):
    mask = tf.cast(tf.math.logical_not(tf.math.equal(real, 0)), tf.float32)
    target = tf.one_hot(real, 6) * 0.9 + 0.1 / 6
    count = tf.distribute.get_replica_context().all_reduce("sum", tf.reduce_sum(mask))
    return tf.reduce_sum(tf.nn.softmax_cross_entropy_with_logits(target, pred) * mask) / count


def train_step(inp, tar):
    with tf.GradientTape() as tape:
        loss = loss_function(tar, model(inp, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    model.optimizer.apply_gradients(zip(gradients, model.trainable_variables))


@tf.function
def distributed_train_step(inp, tar):
    strategy.run(train_step, args=(inp, tar))


# ---- training ----
for epoch in range(2):
    for inp, tar in strategy.experimental_distribute_dataset(dataset):
        distributed_train_step(inp, tar)
