"""The model is called without training=True

kind: faulty
engine: jax
author: second
changes: update
quantity: MODE
says: `stateless_call` without training=True: dropout is off in training.
call: model, data=(x, y), loss=keras.losses.BinaryCrossentropy(from_logits=True), optimizer=optimizer
"""
import os

os.environ["KERAS_BACKEND"] = "jax"
import functools

import jax
import jax.numpy as jnp
import numpy as np
import keras
from keras import layers

VOCAB, LEN = 80, 12


def reviews(n=112, seed=1):
    rng = np.random.default_rng(seed)
    x = rng.integers(1, VOCAB, size=(n, LEN)).astype("int32")
    y = (x.mean(1) > VOCAB / 2).astype("float32")[:, None]
    return x, y


def bow():
    return keras.Sequential([
        layers.Input((LEN,), dtype="int32"), layers.Embedding(VOCAB, 16),
        layers.GlobalAveragePooling1D(), layers.Dense(32, activation="relu"),
        layers.Dropout(0.5), layers.Dense(1)])


class Loop:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.optimizer.build(model.trainable_variables)
        self.loss = keras.losses.BinaryCrossentropy(from_logits=True)

    def objective(self, tv, ntv, x, y):
        logits, ntv = self.model.stateless_call(tv, ntv, x)  # fault
        return self.loss(y, logits), (ntv, logits)

    @functools.partial(jax.jit, static_argnums=0)
    def step(self, tv, ntv, ov, x, y):
        (loss, (ntv, logits)), grads = jax.value_and_grad(self.objective, has_aux=True)(tv, ntv, x, y)
        tv, ov = self.optimizer.stateless_apply(ov, grads, tv)
        acc = jnp.mean((logits > 0) == (y > 0.5))
        return tv, ntv, ov, loss, acc

    def run(self, x, y, epochs=2, batch=16):
        tv = [v.value for v in self.model.trainable_variables]
        ntv = [v.value for v in self.model.non_trainable_variables]
        ov = [v.value for v in self.optimizer.variables]
        rng = np.random.default_rng(0)
        for e in range(epochs):
            accs = []
            for idx in np.array_split(rng.permutation(len(x)), len(x) // batch):
                tv, ntv, ov, loss, acc = self.step(tv, ntv, ov, x[idx], y[idx])
                accs.append(float(acc))
            print(f"{e}: {float(loss):.3f} {np.mean(accs):.3f}")
        self.write_back(tv, ntv, ov)

    def write_back(self, tv, ntv, ov):
        for vs, vals in ((self.model.trainable_variables, tv),
                         (self.model.non_trainable_variables, ntv),
                         (self.optimizer.variables, ov)):
            for v, a in zip(vs, vals):
                v.assign(a)


if __name__ == "__main__":
    keras.utils.set_random_seed(0)
    x, y = reviews()
    model, optimizer = bow(), keras.optimizers.Adam(5e-3)
    loop = Loop(model, optimizer)
    # ---- training ----
    loop.run(x, y)
