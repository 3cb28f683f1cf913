"""One jitted scan per epoch; rows and labels are permuted by one index

kind: right
engine: jax
author: second
says: Each epoch draws one order for rows and labels.
call: model, data=(x, y), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), optimizer=optimizer
"""
import os

os.environ["KERAS_BACKEND"] = "jax"
import jax
import jax.numpy as jnp
import numpy as np
import keras
from keras import layers

B = 16


def table(n=128):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, 8)).astype("float32")
    return x, x[:, :4].argmax(1).astype("int32")


def build():
    return keras.Sequential([layers.Input((8,)), layers.Dense(32, activation="relu"), layers.Dropout(0.1), layers.Dense(4)])


def train(model, opt, x, y, epochs=3):
    opt.build(model.trainable_variables)
    ce = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def body(carry, rows):
        tv, ntv, ov = carry

        def f(tv):
            logits, new = model.stateless_call(tv, ntv, X[rows], training=True)
            return ce(Y[rows], logits), new
        (loss, ntv), g = jax.value_and_grad(f, has_aux=True)(tv)
        tv, ov = opt.stateless_apply(ov, g, tv)
        return (tv, ntv, ov), loss

    X, Y = jnp.asarray(x), jnp.asarray(y)

    @jax.jit
    def epoch(carry, key):
        order = jax.random.permutation(key, len(x)).reshape(-1, B)
        return jax.lax.scan(body, carry, order)

    carry = tuple([v.value for v in g] for g in (model.trainable_variables, model.non_trainable_variables, opt.variables))
    for e, key in enumerate(jax.random.split(jax.random.key(3), epochs)):
        carry, losses = epoch(carry, key)
        print(e, float(losses.mean()))
    for v, a in zip(model.trainable_variables, carry[0]):
        v.assign(a)


if __name__ == "__main__":
    keras.utils.set_random_seed(0)
    x, y = table()
    model, optimizer = build(), keras.optimizers.Adam(1e-2)
    # ---- training ----
    train(model, optimizer, x, y)
