"""A train_step of its own, under fit

kind: right
engine: jax
author: suite
says: The model's losses are added once.
call: model, data=(x, y)
"""
import os

os.environ["KERAS_BACKEND"] = "jax"
import jax
import jax.numpy as jnp
import keras
import numpy as np
from keras import layers

draw = np.random.default_rng(0)
x = draw.normal(size=(20, 5)).astype("float32")
y = draw.normal(size=20).astype("float32")


class Own(keras.Sequential):
    def loss_at(self, tv, ntv, a, b):
        output, ntv, own = self.stateless_call(tv, ntv, a, training=True, return_losses=True)
        return jnp.mean((b - output) ** 2) + sum(own), ntv

    def train_step(self, state, data):
        tv, ntv, ov, mv = state
        a, b = data
        (loss, ntv), grads = jax.value_and_grad(self.loss_at, has_aux=True)(tv, ntv, a, b)
        tv, ov = self.optimizer.stateless_apply(ov, grads, tv)
        return {"loss": loss}, (tv, ntv, ov, mv)


keras.utils.set_random_seed(3)
model = Own(
    [
        keras.Input((5,)),
        layers.Dense(4, "tanh", kernel_regularizer="l2"),
        layers.Dropout(0.4),
        layers.Dense(1),
    ]
)
model.compile(keras.optimizers.Adam(0.01), "mse")

# ---- training ----
model.fit(x, y[:, None], epochs=2, batch_size=10, shuffle=False, verbose=0)
