"""A gradient under shard_map, on four devices

kind: right
engine: jax
process: own
author: suite
says: The gradients are averaged over devices with equal rows.
call: model, data=(x, y)
"""
import os

os.environ["KERAS_BACKEND"] = "jax"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
import jax
import keras
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from keras import layers, ops

draw = np.random.default_rng(0)
x = draw.normal(size=(96, 6)).astype("float32")
y = (x[:, :1] > 0).astype("float32") + x[:, 1:2]

keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.Input((6,)),
        layers.Dense(5, "tanh", kernel_regularizer=keras.regularizers.L2(1e-2)),
        layers.Dense(1),
    ]
)
model.compile(keras.optimizers.SGD(0.1), "mse")
optimizer = model.optimizer
optimizer.build(model.trainable_variables)
mesh = Mesh(np.array(jax.devices()), ("rows",))
whole, parts = PartitionSpec(), PartitionSpec("rows")


def loss_at(params, a, b):
    output, _, penalties = model.stateless_call(params, [], a, training=True, return_losses=True)
    return ops.mean((output - b) ** 2) + sum(penalties)


def local(params, a, b):
    return jax.lax.pmean(jax.grad(loss_at)(params, a, b), "rows")


gradient = jax.shard_map(
    local, mesh=mesh, in_specs=(whole, parts, parts), out_specs=whole, check_vma=False
)


@jax.jit
def step(params, slots, a, b):
    return optimizer.stateless_apply(slots, gradient(params, a, b), params)


params = [v.value for v in model.trainable_variables]
slots = [v.value for v in optimizer.variables]
# ---- training ----
for epoch in range(3):
    for rows in np.split(draw.permutation(96), 4):
        params, slots = step(params, slots, x[rows], y[rows])
for variable, value in zip(model.trainable_variables, params):
    variable.assign(value)
