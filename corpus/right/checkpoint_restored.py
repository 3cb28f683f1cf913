"""tf.train.Checkpoint with model and optimizer, restored in the middle

kind: right
engine: tensorflow
author: first
says: The state is saved after epoch 2 and put back as if the run had been killed.
call: model, data=(x, y), loss="mae"
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import tempfile

import keras
import numpy as np
import tensorflow as tf

x = np.random.default_rng(16).normal(size=(280, 5)).astype("float32")
y = np.abs(x[:, :1]).astype("float32")
model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(1)])
opt = keras.optimizers.Adam(3e-3)
opt.build(model.trainable_variables)
mae = keras.losses.MeanAbsoluteError()
folder = tempfile.mkdtemp()


@tf.function
def step(xb, yb):
    with tf.GradientTape() as tape:
        loss = mae(yb, model(xb, training=True))
    opt.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
    return loss


ds = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(280).batch(28)


def run(epochs):
    for e in range(epochs):
        for xb, yb in ds:
            loss = step(xb, yb)
        print(e, float(loss))


# ---- training ----
run(2)
ckpt = tf.train.Checkpoint(model=model, optimizer=opt)
path = ckpt.save(folder + "/ck")
run(1)  # the run that was lost
ckpt.restore(path)
run(2)
