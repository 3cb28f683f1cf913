"""Data parallel by NamedSharding, with BatchNorm and a donated state

kind: right
engine: jax
author: second
says: The mean over a sharded batch is the mean over all its rows.
call: model, data=(x, y), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), optimizer=optimizer
"""
import os

os.environ["KERAS_BACKEND"] = "jax"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import keras
from keras import layers


def data(n=96):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, 10)).astype("float32")
    return x, x[:, :3].argmax(1).astype("int32")


def build():
    return keras.Sequential([layers.Input((10,)), layers.Dense(16), layers.BatchNormalization(), layers.ReLU(), layers.Dense(3)])


class ShardedTrainer:
    def __init__(self, model, opt):
        self.model, self.opt = model, opt
        mesh = Mesh(np.array(jax.devices()), ("batch",))
        self.replicated, self.split = NamedSharding(mesh, P()), NamedSharding(mesh, P("batch"))
        opt.build(model.trainable_variables)
        self.groups = (model.trainable_variables, model.non_trainable_variables, opt.variables)
        self.state = jax.device_put(tuple([v.value for v in g] for g in self.groups), self.replicated)
        self.ce = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.step = jax.jit(self._step, donate_argnums=0)

    def _step(self, state, x, y):
        tv, ntv, ov = state

        def f(tv):
            logits, new = self.model.stateless_call(tv, ntv, x, training=True)
            return self.ce(y, logits), new
        (loss, ntv), g = jax.value_and_grad(f, has_aux=True)(tv)
        tv, ov = self.opt.stateless_apply(ov, g, tv)
        return (tv, ntv, ov), loss

    def fit(self, x, y, epochs=2, batch=16):
        # donated buffers must not be the model's own
        self.state = jax.tree.map(lambda a: a + 0, self.state)
        for e in range(epochs):
            for i in range(0, len(x), batch):
                xb, yb = jax.device_put((x[i:i + batch], y[i:i + batch]), self.split)
                self.state, loss = self.step(self.state, xb, yb)
            print(e, float(loss))
        for g, values in zip(self.groups, self.state):
            for v, a in zip(g, values):
                v.assign(np.asarray(a))


if __name__ == "__main__":
    keras.utils.set_random_seed(0)
    x, y = data()
    model, optimizer = build(), keras.optimizers.SGD(0.1)
    trainer = ShardedTrainer(model, optimizer)
    # ---- training ----
    trainer.fit(x, y)
