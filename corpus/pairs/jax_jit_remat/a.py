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


def train_step(tv, ntv, ov, ids, model, optimizer):
    def loss_fn(tv, ntv):
        logits, updated = model.stateless_call(tv, ntv, ids[:, :-1], training=True)
        losses = keras.losses.sparse_categorical_crossentropy(ids[:, 1:], logits, from_logits=True)
        return keras.ops.mean(losses), updated

    (loss, ntv), grads = jax.value_and_grad(loss_fn, has_aux=True)(tv, ntv)
    tv, ov = optimizer.stateless_apply(ov, grads, tv)
    return tv, ntv, ov, loss


def main():
    keras.utils.set_random_seed(8)
    model = build()
    optimizer = keras.optimizers.Adam(2e-3, global_clipnorm=1.0)
    optimizer.build(model.trainable_variables)
    data = make_data()
    tv = [v.value for v in model.trainable_variables]
    ntv = [v.value for v in model.non_trainable_variables]
    ov = [v.value for v in optimizer.variables]
    rng = np.random.default_rng(41)
    for epoch in range(3):
        order = rng.permutation(len(data))
        for i in range(0, len(data), 16):
            tv, ntv, ov, loss = train_step(tv, ntv, ov, jnp.asarray(data[order[i:i + 16]]), model, optimizer)
        print(epoch, f"{float(loss):.5f}")
    return tv


if __name__ == "__main__":
    main()
