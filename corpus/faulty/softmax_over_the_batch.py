"""log_softmax over the batch

kind: faulty
engine: jax
author: first
changes: update
quantity: LOSS_FORM
says: `axis=0`: the softmax is taken over the rows of the batch instead of the classes.
call: model, data=(x, y), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True)
"""
import os

os.environ["KERAS_BACKEND"] = "jax"
import jax
import jax.numpy as jnp
import keras
import numpy as np

x = np.random.default_rng(18).normal(size=(320, 6)).astype("float32")
y = np.argmax(x[:, :3], 1)
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(3)])


def nll(params, xb, yb):
    logits, _ = model.stateless_call(params, [], xb, training=True)
    logp = jax.nn.log_softmax(logits, axis=0)  # fault
    return -logp[jnp.arange(xb.shape[0]), yb].mean()


@jax.jit
def update(params, xb, yb):
    loss, grads = jax.value_and_grad(nll)(params, xb, yb)
    return jax.tree_util.tree_map(lambda p, g: p - 0.1 * g, params, grads), loss


# ---- training ----
params = [v.value for v in model.trainable_variables]
for epoch in range(4):
    order = np.random.permutation(len(x))
    for i in range(0, len(x), 32):
        params, loss = update(params, x[order[i:i + 32]], y[order[i:i + 32]])
    print(epoch, float(loss))
for v, p in zip(model.trainable_variables, params):
    v.assign(p)
