"""A product of words (GloVe), in a jitted step

kind: right
engine: jax
author: suite
says: Counts have the shape (B, 1), as the predictions.
call: model, data=([focal, context], count[:, None]), loss=glove_loss, optimizer=optimizer
"""
import os

os.environ["KERAS_BACKEND"] = "jax"
import jax
import keras
import numpy as np
from keras import layers, ops

draw = np.random.default_rng(0)
focal, context = draw.integers(0, 60, (2, 240)).astype("int32")
count = draw.integers(1, 200, 240).astype("float32")


def vectors(word, dim):
    return layers.Embedding(60, dim)(word)


keras.utils.set_random_seed(1)
inputs = [keras.Input((), dtype="int32"), keras.Input((), dtype="int32")]
product = layers.Dot(axes=-1)([vectors(word, 8) for word in inputs])
model = keras.Model(inputs, layers.Add()([product, *(vectors(word, 1) for word in inputs)]))
optimizer = keras.optimizers.Adagrad(0.1)
optimizer.build(model.trainable_variables)


def glove_loss(count, prediction):
    return ops.minimum(count / 100, 1) ** 0.75 * (prediction - ops.log(count)) ** 2


def value_at(values, pair, count):
    with keras.StatelessScope(zip(model.trainable_variables, values)):
        return ops.mean(glove_loss(count[:, None], model(pair, training=True)))


@jax.jit
def update(values, slots, pair, count):
    return optimizer.stateless_apply(slots, jax.grad(value_at)(values, pair, count), values)


# ---- training ----
for epoch in range(2):
    order = draw.permutation(240)
    for start in range(0, 240, 64):
        rows = order[start : start + 64]
        held = model.trainable_variables + optimizer.variables
        values = [v.value for v in model.trainable_variables]
        slots = [v.value for v in optimizer.variables]
        values, slots = update(values, slots, [focal[rows], context[rows]], count[rows])
        for variable, value in zip(held, [*values, *slots]):
            variable.assign(value)
