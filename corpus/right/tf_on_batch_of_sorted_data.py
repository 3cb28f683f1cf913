"""train_on_batch on data sorted by label

kind: right
engine: tensorflow
author: suite
says: The rows are shuffled one by one.
call: model, data=(x, y), rows="shuffled"
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
from keras import layers

draw = np.random.default_rng(0)
x = draw.normal(size=(20, 5)).astype("float32")
y = np.repeat(np.arange(5), 4)

keras.utils.set_random_seed(3)
model = keras.Sequential(
    [
        keras.Input((5,)),
        layers.Dense(4, "tanh", kernel_regularizer="l2"),
        layers.Dense(5),
    ]
)
model.compile(
    keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
)

# ---- training ----
for epoch in range(2):
    order = np.random.default_rng(epoch).permutation(len(x))
    for start in range(0, len(x), 8):
        rows = order[start : start + 8]
        model.train_on_batch(x[rows], y[rows])
