"""Mixed precision with LossScaleOptimizer, scaled and applied

kind: right
engine: tensorflow
author: first
says: The loss is scaled, the optimizer unscales.
call: model, data=(x, y), loss=loss_fn
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import tensorflow as tf

keras.mixed_precision.set_global_policy("mixed_float16")
x = np.random.default_rng(0).normal(size=(320, 10)).astype("float32")
y = (x[:, 0] > x[:, 1]).astype("int32")
model = keras.Sequential([
    keras.Input((10,)),
    keras.layers.Dense(32, "relu"),
    keras.layers.Dense(2, dtype="float32"),
])
optimizer = keras.mixed_precision.LossScaleOptimizer(keras.optimizers.Adam(1e-3))
optimizer.build(model.trainable_variables)
loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@tf.function
def train_step(xb, yb):
    with tf.GradientTape() as tape:
        loss = loss_fn(yb, model(xb, training=True))
        scaled = optimizer.scale_loss(loss)
    grads = tape.gradient(scaled, model.trainable_variables)
    optimizer.apply(grads, model.trainable_variables)
    return loss


train = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(320).batch(32)
# ---- training ----
for epoch in range(3):
    for xb, yb in train:
        loss = train_step(xb, yb)
    print(epoch, float(loss))
