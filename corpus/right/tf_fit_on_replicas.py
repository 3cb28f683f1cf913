"""fit under MirroredStrategy

kind: right
engine: tensorflow
process: own
author: suite
says: Keras divides by the rows of all replicas.
call: model, data=(x, y)
printed: loss=history.history["loss"]
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
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice())
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

# ---- training ----
history = model.fit(x, y, epochs=2, batch_size=10, shuffle=False, verbose=0, validation_data=(x, y))
print(history.history["loss"])
