"""AdamW and label smoothing by hand

kind: right
engine: jax
author: second
says: The rule is Keras' AdamW without decay of the biases.
meant: adamw_of_keras = keras.optimizers.AdamW(LR, weight_decay=WD)
    adamw_of_keras.exclude_from_weight_decay(var_names=["bias"])
call: model, data=(x, keras.utils.to_categorical(y, 4).astype("float32")),
    loss=keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=SMOOTH), optimizer=adamw_of_keras
"""
import os

os.environ["KERAS_BACKEND"] = "jax"
import jax
import jax.numpy as jnp
import numpy as np
import keras
from keras import layers

LR, B1, B2, EPS, WD, SMOOTH, CLASSES = 3e-3, 0.9, 0.999, 1e-7, 0.02, 0.1, 4


def data(n=112):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(n, 9)).astype("float32")
    return x, x[:, :CLASSES].argmax(1).astype("int32")


def build():
    return keras.Sequential([layers.Input((9,)), layers.Dense(32, activation="relu"), layers.Dense(CLASSES)])


def adamw(params, grads, m, v, t):
    out = ([], [], [])
    for p, g, m_, v_ in zip(params, grads, m, v):
        m_ = B1 * m_ + (1 - B1) * g
        v_ = B2 * v_ + (1 - B2) * g ** 2
        lr = LR * jnp.sqrt(1 - B2 ** t) / (1 - B1 ** t)
        if p.ndim > 1:
            p = p - LR * WD * p
        out[0].append(p - lr * m_ / (jnp.sqrt(v_) + EPS))
        out[1].append(m_)
        out[2].append(v_)
    return out


def train(model, x, y, epochs=3, bs=16):
    ntv = [v.value for v in model.non_trainable_variables]

    @jax.jit
    def step(params, m, v, t, xb, yb):
        def loss(params):
            logits, _ = model.stateless_call(params, ntv, xb, training=True)
            target = jax.nn.one_hot(yb, CLASSES) * (1 - SMOOTH) + SMOOTH / CLASSES
            return -jnp.mean(jnp.sum(target * jax.nn.log_softmax(logits), -1))
        value, g = jax.value_and_grad(loss)(params)
        return (*adamw(params, g, m, v, t), value)

    params = [v.value for v in model.trainable_variables]
    m = [jnp.zeros_like(p) for p in params]
    v = [jnp.zeros_like(p) for p in params]
    t = 0
    for e in range(epochs):
        for i in range(0, len(x), bs):
            t += 1
            params, m, v, value = step(params, m, v, float(t), x[i:i + bs], y[i:i + bs])
        print(e, float(value))
    for var, p in zip(model.trainable_variables, params):
        var.assign(p)


if __name__ == "__main__":
    keras.utils.set_random_seed(0)
    x, y = data()
    model = build()
    # ---- training ----
    train(model, x, y)
