"""Both directions of a contrastive loss take the softmax over one axis

kind: faulty
engine: jax
author: second
changes: update
quantity: LOSS_FORM
says: Both directions use the softmax over axis 1; the text-to-image direction should use axis 0.
meant: class Clip(keras.losses.Loss):
        def __init__(self):
            super().__init__(reduction="none", name="clip")
        def call(self, y_true, emb):
            scores = ops.matmul(emb[:, :DIM], ops.transpose(emb[:, DIM:])) / TAU
            diag = ops.arange(ops.shape(scores)[0])
            rows = keras.losses.sparse_categorical_crossentropy(diag, scores, from_logits=True)
            columns = keras.losses.sparse_categorical_crossentropy(diag, ops.transpose(scores), from_logits=True)
            return ops.mean(rows + columns) / 2
call: model, data=([img, txt], np.zeros((len(img), 16), "float32")), loss=Clip(), optimizer=optimizer
"""
import os

os.environ["KERAS_BACKEND"] = "jax"
import jax
import jax.numpy as jnp
import numpy as np
import keras
from keras import layers, ops

DIM, TAU = 8, 0.1


def pairs(n=128):
    rng = np.random.default_rng(0)
    z = rng.normal(size=(n, 4))
    img = np.tanh(z @ rng.normal(size=(4, 12))) + 0.1 * rng.normal(size=(n, 12))
    txt = z @ rng.normal(size=(4, 10)) + 0.1 * rng.normal(size=(n, 10))
    return img.astype("float32"), txt.astype("float32")


def towers():
    img, txt = keras.Input((12,)), keras.Input((10,))
    def tower(x, name):
        x = layers.Dense(24, activation="relu", name=name + "_hidden")(x)
        x = layers.Dense(DIM, name=name + "_proj")(x)
        return layers.UnitNormalization()(x)
    out = layers.Concatenate()([tower(img, "img"), tower(txt, "txt")])
    return keras.Model([img, txt], out)


def info_nce(emb):
    a, b = emb[:, :DIM], emb[:, DIM:]
    logits = a @ b.T / TAU
    diag = jnp.arange(logits.shape[0])
    i2t = -jax.nn.log_softmax(logits, axis=1)[diag, diag]
    t2i = -jax.nn.log_softmax(logits, axis=1)[diag, diag]  # fault
    return jnp.mean(i2t + t2i) / 2


def train(model, opt, img, txt, epochs=2, bs=32):
    opt.build(model.trainable_variables)
    ntv = [v.value for v in model.non_trainable_variables]

    @jax.jit
    def step(tv, ov, a, b):
        def loss(tv):
            emb, _ = model.stateless_call(tv, ntv, [a, b], training=True)
            return info_nce(emb)
        l, g = jax.value_and_grad(loss)(tv)
        tv, ov = opt.stateless_apply(ov, g, tv)
        return tv, ov, l

    tv = [v.value for v in model.trainable_variables]
    ov = [v.value for v in opt.variables]
    rng = np.random.default_rng(0)
    for e in range(epochs):
        for idx in rng.permutation(len(img)).reshape(-1, bs):
            tv, ov, l = step(tv, ov, img[idx], txt[idx])
        print(e, float(l))
    for v, a in zip(model.trainable_variables, tv):
        v.assign(a)


if __name__ == "__main__":
    keras.utils.set_random_seed(0)
    img, txt = pairs()
    model, optimizer = towers(), keras.optimizers.Adam(3e-3)
    # ---- training ----
    train(model, optimizer, img, txt)
