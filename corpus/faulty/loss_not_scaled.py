"""Mixed precision: the loss is not scaled, the optimizer unscales

kind: faulty
engine: tensorflow
author: first
changes: update
quantity: HANDED_GRADIENT
says: `scale_loss` is missing, LossScaleOptimizer divides the gradients by 32768.
call: model, data=(x, y), loss=loss_fn
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import tensorflow as tf

keras.mixed_precision.set_global_policy("mixed_float16")
x = np.random.default_rng(44).normal(size=(320, 8)).astype("float32")
y = (x[:, 0] > 0).astype("int32")
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(2, dtype="float32")])
optimizer = keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(0.1))
optimizer.build(model.trainable_variables)
loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@tf.function
def train_step(xb, yb):
    with tf.GradientTape() as tape:
        loss = loss_fn(yb, model(xb, training=True))  # fault
    grads = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(grads, model.trainable_variables))
    return loss


ds = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(320).batch(32)
# ---- training ----
for epoch in range(3):
    for xb, yb in ds:
        loss = train_step(xb, yb)
    print(epoch, float(loss))
