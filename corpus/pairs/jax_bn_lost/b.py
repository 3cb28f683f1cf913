import jax
import keras
import numpy as np


def build():
    return keras.Sequential([
        keras.Input((9,)),
        keras.layers.Dense(24, use_bias=False), keras.layers.BatchNormalization(momentum=0.9), keras.layers.Activation("relu"),
        keras.layers.Dense(24, use_bias=False), keras.layers.BatchNormalization(momentum=0.9), keras.layers.Activation("relu"),
        keras.layers.Dense(1)])


def make_step(model, optimizer):
    def loss_fn(tv, ntv, x, y):
        prediction, ntv = model.stateless_call(tv, ntv, x, training=True)
        return keras.ops.mean(keras.ops.square(prediction - y)), ntv

    def step(tv, ntv, ov, x, y):
        (loss, ntv), grads = jax.value_and_grad(loss_fn, has_aux=True)(tv, ntv, x, y)
        tv, ov = optimizer.stateless_apply(ov, grads, tv)
        return tv, ntv, ov, loss

    return jax.jit(step)


def main():
    keras.utils.set_random_seed(13)
    rng = np.random.default_rng(13)
    x = (3 * rng.normal(size=(96, 9)) + 1).astype("float32")
    y = np.tanh(x[:, :1] - x[:, 1:2]).astype("float32")
    model = build()
    optimizer = keras.optimizers.SGD(0.02, momentum=0.9)
    optimizer.build(model.trainable_variables)
    train_step = make_step(model, optimizer)
    tv = [v.value for v in model.trainable_variables]
    ntv = [v.value for v in model.non_trainable_variables]
    ov = [v.value for v in optimizer.variables]
    for epoch in range(3):
        for idx in np.split(rng.permutation(96), 4):
            tv, _, ov, loss = train_step(tv, ntv, ov, x[idx], y[idx])
        prediction, _ = model.stateless_call(tv, ntv, x, training=False)
        print(epoch, f"loss {float(loss):.5f} evaluation {float(keras.ops.mean((prediction - y) ** 2)):.5f}")
    return tv, ntv


if __name__ == "__main__":
    main()
