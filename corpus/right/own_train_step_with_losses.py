"""A train_step of one's own for fit, with the model's losses

kind: right
engine: jax
author: second
says: The model's losses are added once.
call: model, data=(x, y), loss=None
"""
import os

os.environ["KERAS_BACKEND"] = "jax"
import jax
import numpy as np
import keras
from keras import layers


class MyModel(keras.Model):
    def loss_and_updates(self, tv, ntv, mv, x, y):
        y_pred, ntv, extra = self.stateless_call(tv, ntv, x, training=True, return_losses=True)
        loss = keras.losses.mean_squared_error(y, y_pred).mean() + sum(extra)
        return loss, (ntv, y_pred)

    def train_step(self, state, data):
        tv, ntv, ov, mv = state
        x, y = data
        (loss, (ntv, y_pred)), grads = jax.value_and_grad(self.loss_and_updates, has_aux=True)(tv, ntv, mv, x, y)
        tv, ov = self.optimizer.stateless_apply(ov, grads, tv)
        new_mv, logs = [], {}
        for metric in self.metrics:
            own = mv[len(new_mv): len(new_mv) + len(metric.variables)]
            own = (metric.stateless_update_state(own, loss) if metric.name == "loss"
                   else metric.stateless_update_state(own, y, y_pred))
            logs[metric.name] = metric.stateless_result(own)
            new_mv += own
        return logs, (tv, ntv, ov, new_mv)


def data(n=128):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, 9)).astype("float32")
    return x, (x @ rng.normal(size=(9, 1))).astype("float32")


def build():
    inp = keras.Input((9,))
    h = layers.Dense(24, activation="relu", kernel_regularizer="l2")(inp)
    h = layers.Dropout(0.1)(h)
    model = MyModel(inp, layers.Dense(1)(h))
    model.compile(optimizer=keras.optimizers.Adam(5e-3), loss="mse")
    return model


if __name__ == "__main__":
    keras.utils.set_random_seed(0)
    x, y = data()
    model = build()
    # ---- training ----
    model.fit(x, y, batch_size=16, epochs=3, verbose=2)
