import jax
import keras
import numpy as np


def make_data():
    rng = np.random.default_rng(23)
    x = rng.normal(size=(104, 10)).astype("float32")
    y = np.argmax(x[:, :3] + x[:, 3:6] ** 2, axis=1).astype("int32")
    return x, y


def build():
    inputs = keras.Input((10,))
    h = keras.layers.Dense(32, use_bias=False)(inputs)
    h = keras.layers.BatchNormalization(momentum=0.8)(h)
    h = keras.layers.Activation("silu")(h)
    h = keras.layers.Dropout(0.3, seed=5)(h)
    h = keras.layers.Dense(16, activation="tanh")(h)
    return keras.Model(inputs, keras.layers.Dense(3)(h))


def make_optimizer():
    return keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(5e-3, decay_steps=16, warmup_steps=4, warmup_target=1e-2))


model = optimizer = None


def compute_loss(tv, ntv, xb, yb):
    logits, ntv = model.stateless_call(tv, ntv, xb, training=True)
    loss = keras.ops.mean(keras.losses.sparse_categorical_crossentropy(yb, logits, from_logits=True))
    return loss, ntv


@jax.jit
def train_step(tv, ntv, ov, xb, yb):
    (loss, ntv), grads = jax.value_and_grad(compute_loss, has_aux=True)(tv, ntv, xb, yb)
    tv, ov = optimizer.stateless_apply(ov, grads, tv)
    return tv, ntv, ov, loss


def main():
    global model, optimizer
    keras.utils.set_random_seed(2)
    x, y = make_data()
    model, optimizer = build(), make_optimizer()
    optimizer.build(model.trainable_variables)
    tv = [v.value for v in model.trainable_variables]
    ntv = [v.value for v in model.non_trainable_variables]
    ov = [v.value for v in optimizer.variables]
    for epoch in range(4):
        for i in range(0, len(x), 32):
            tv, ntv, ov, loss = train_step(tv, ntv, ov, x[i:i + 32], y[i:i + 32])
        print(epoch, f"{float(loss):.5f}")
    for variables, values in ((model.trainable_variables, tv), (model.non_trainable_variables, ntv)):
        for variable, value in zip(variables, values):
            variable.assign(value)
    return model


if __name__ == "__main__":
    main()
