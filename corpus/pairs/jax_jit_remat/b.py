import functools

import jax
import jax.numpy as jnp
import keras
import numpy as np


def make_data():
    rng = np.random.default_rng(40)
    ids = rng.integers(0, 20, size=(64, 13))
    ids[:, 2::2] = (ids[:, 1:-1:2] * 3 + 1) % 20
    return ids.astype("int32")


def build():
    inputs = keras.Input((12,), dtype="int32")
    h = keras.layers.Embedding(20, 24)(inputs)
    a = keras.layers.LayerNormalization()(h)
    a = keras.layers.MultiHeadAttention(2, 12, use_bias=False)(a, a, use_causal_mask=True)
    h = keras.layers.Add()([h, a])
    m = keras.layers.Dense(48, activation="gelu")(keras.layers.LayerNormalization()(h))
    h = keras.layers.Add()([h, keras.layers.Dense(24)(m)])
    return keras.Model(inputs, keras.layers.Dense(20)(h))


@functools.partial(jax.jit, static_argnames=("model", "optimizer"), donate_argnums=(0, 2))
def train_step(tv, ntv, ov, ids, model, optimizer):
    @jax.checkpoint
    def forward(tv, ntv, inputs):
        return model.stateless_call(tv, ntv, inputs, training=True)

    def loss_fn(tv):
        logits, updated = forward(tv, ntv, ids[:, :-1])
        logp = jax.nn.log_softmax(logits)
        picked = jnp.take_along_axis(logp, ids[:, 1:, None], axis=-1)
        return -picked.sum() / picked.size, updated

    (loss, updated), grads = jax.value_and_grad(loss_fn, has_aux=True)(tv)
    tv, ov = optimizer.stateless_apply(ov, grads, tv)
    return tv, updated, ov, loss


def main():
    keras.utils.set_random_seed(8)
    model = build()
    optimizer = keras.optimizers.Adam(2e-3, global_clipnorm=1.0)
    optimizer.build(model.trainable_variables)
    data = make_data()
    tv = [jnp.copy(v.value) for v in model.trainable_variables]
    ntv = [v.value for v in model.non_trainable_variables]
    ov = [jnp.copy(v.value) for v in optimizer.variables]
    rng = np.random.default_rng(41)
    for epoch in range(3):
        for rows in np.split(rng.permutation(len(data)), [16, 32, 48]):
            tv, ntv, ov, loss = train_step(tv, ntv, ov, data[rows], model=model, optimizer=optimizer)
        print(epoch, f"{float(loss):.5f}")
    return tv


if __name__ == "__main__":
    main()
