"""Training scripts that know nothing of an audit, for both engines."""

import keras

HEAD = """
import sys
import keras
import numpy as np
from keras import layers

rng = np.random.default_rng(0)
keras.utils.set_random_seed(1)


def network(*, num=1, activation=None):
    return keras.Sequential([keras.Input((5,)), layers.Dense(4, "tanh"), layers.Dense(num, activation)])
"""

# update(model, optimizer, value) returns step(a, b): `value(model, a, b)` is the loss
TF_UPDATE = """
import tensorflow as tf


def update(model, optimizer, value):
    def step(a, b):
        with tf.GradientTape() as tape:
            loss = value(model, a, b)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables))

    return step
"""

JAX_UPDATE = """
import jax


def update(model, optimizer, value):
    variables = model.trainable_variables
    optimizer.build(variables)

    def value_at(values, a, b):
        with keras.StatelessScope(zip(variables, values)):
            return value(model, a, b)

    @jax.jit
    def new(values, slots, a, b):
        return optimizer.stateless_apply(slots, jax.grad(value_at)(values, a, b), values)

    def step(a, b):
        values = [v.value for v in variables], [v.value for v in optimizer.variables]
        values, slots = new(*values, a, b)
        for variable, one in zip(variables + optimizer.variables, [*values, *slots]):
            variable.assign(one)

    return step
"""
UPDATE = {"tensorflow": TF_UPDATE, "jax": JAX_UPDATE}[keras.backend.backend()]

# ---- data in a function's own names, a Keras loss that the script calls ----

IN_MAIN = """
def main():
    x_train = rng.normal(size=(40, 5)).astype("float32")
    y_train, unrelated = x_train.sum(1), np.arange(40.0)
    model, loss_fn = network(), keras.losses.MeanSquaredError()
    step = update(model, keras.optimizers.Adam(0.01), lambda model, a, b: loss_fn(b, model(a, training=True)))
    for epoch in range(1000):
        order = rng.permutation(40)
        for start in range(0, 40, 8):
            rows = order[start : start + 8]
            step(x_train[rows], y_train[rows])
    raise AssertionError("never")


main()
"""

# ---- a model that is compiled, a loss by hand, data in the script's own names ----

BY_HAND = """
x = rng.normal(size=(24, 5)).astype("float32")
y = x.sum(1)
model = network()
model.compile("adam", "mse")
step = update(model, model.optimizer, lambda model, a, b: keras.ops.mean((model(a, training=True) - b[:, None]) ** 2))
for epoch in range(2):
    for rows in rng.permutation(24).reshape(3, 8):
        step(x[rows], y[rows])
print("the end", sys.argv[1:])
"""

# ---- rows that are made on the way, labels that only the loss gets ----

AUGMENTED = """
def batches():
    while True:
        a = rng.normal(size=(8, 5)).astype("float32")
        yield a, (a.sum(1) > 0).astype("int32")


model, loss_fn = network(num=2), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
step = update(model, keras.optimizers.SGD(0.1), lambda model, a, b: loss_fn(b, model(a, training=True)))
for a, b in batches():
    step(a, b)
"""

# ---- batches of a dataset of Keras, another loss by function ----

DATASET = """
class Halves(keras.utils.PyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        draw = np.random.default_rng(i)
        a = draw.normal(size=(6, 5)).astype("float32")
        return a, a[:, :1]


data, model = Halves(), network()
step = update(
    model,
    keras.optimizers.SGD(0.1),
    lambda model, a, b: keras.ops.mean(keras.losses.mean_absolute_error(b, model(a, training=True))),
)
for epoch in range(2):
    for i in rng.permutation(4):
        step(*data[i])
"""

# ---- Keras' own loop ----

FIT = """
RATE = keras.optimizers.schedules.CosineDecay(0.01, 50)
x = rng.normal(size=(24, 5)).astype("float32")
y = (x.sum(1) > 0).astype("float32")
model = network(activation="sigmoid")
model.compile("adam", "binary_crossentropy")
for epoch in range(1000):
    order = rng.permutation(24)
    model.fit(x[order], y[order], batch_size=8, shuffle=False, class_weight={0: 1.0, 1: 3.0}, verbose=0)
raise AssertionError("never")
"""

# ---- its own audit ----

OWN = """
import stepcheck

x = rng.normal(size=(24, 5)).astype("float32")
y = x.sum(1)
model = network()
value = lambda model, a, b: keras.ops.mean((model(a, training=True) - b[:, None]) ** 2)
step = update(model, keras.optimizers.Adam(0.01), value)
with stepcheck.watch(model, data=(x, y), loss="mse") as report:
    while True:
        for rows in rng.permutation(24).reshape(3, 8):
            step(x[rows], y[rows])
"""

# ---- Adam by hand ----

OWN_ADAM = """
import jax

x = rng.normal(size=(24, 5)).astype("float32")
y = x.sum(1)
model = network()


def value(params, a, b):
    return ((model.stateless_call(params, [], a)[0] - b[:, None]) ** 2).mean()


@jax.jit
def moved(params, means, a, b, t):
    grads = jax.grad(value)(params, a, b)
    means = [(0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g) for (m, v), g in zip(means, grads)]
    steps = [m / (1 - 0.9**t) / ((v / (1 - 0.999**t)) ** 0.5 + 1e-8) for m, v in means]
    return [p - 0.01 * step for p, step in zip(params, steps)], means


params = first = [v.value for v in model.trainable_variables]
means = [(0 * p, 0 * p) for p in params]
for t, rows in enumerate([*rng.permutation(24).reshape(3, 8), *rng.permutation(24).reshape(3, 8)]):
    params, means = moved(params, means, x[rows], y[rows], t + 1.0)
for variable, value in zip(model.trainable_variables, params):
    variable.assign(value)
"""

# ---- two outputs, each with labels ----

HEADS = """
x = rng.normal(size=(48, 5)).astype("float32")
age, kind = x.sum(1)[:, None], (x[:, 0] > 0).astype("int32")
inputs = keras.Input((5,))
inner = layers.Dense(6, "tanh")(inputs)
model = keras.Model(inputs, [layers.Dense(1)(inner), layers.Dense(2)(inner)])
OF_AGE, OF_KIND = 1.0, 1.0


def value(model, a, b):
    first, second = model(a, training=True)
    of_age = keras.ops.mean((first - b[0]) ** 2)
    of_kind = keras.ops.mean(keras.ops.sparse_categorical_crossentropy(b[1], second, from_logits=True))
    return OF_AGE * of_age + OF_KIND * of_kind


step = update(model, keras.optimizers.Adam(0.01), value)
for epoch in range(2):
    for rows in rng.permutation(48).reshape(6, 8):
        step(x[rows], (age[rows], kind[rows]))
"""

# ---- padded tokens, a loss by hand over the tokens, labels among several arrays ----

TOKENS = """
tok = np.zeros((48, 7), "int32")
for i, num in enumerate(lens := rng.integers(2, 8, 48)):
    tok[i, :num] = rng.integers(1, 9, num)
tags = (tok * 3 % 5).astype("int32")
model = keras.Sequential([keras.Input((None,), dtype="int32"), layers.Embedding(9, 6), layers.Dense(9)])


def value(model, a, b):
    losses = keras.ops.sparse_categorical_crossentropy(b, model(a, training=True), from_logits=True)
    mask = keras.ops.cast(a > 0, "float32")
    return keras.ops.sum(losses * mask) / keras.ops.sum(mask)


step = update(model, keras.optimizers.Adam(0.01), value)
for epoch in range(2):
    for rows in rng.permutation(48).reshape(6, 8):
        step(tok[rows], tags[rows])
"""

# ---- metrics and a validation inside of the loop, a model with statistics and draws ----

TF_MEASURED = """
import tensorflow as tf


@tf.function
def step(a, b):
    with tf.GradientTape() as tape:
        out = model(a, training=True)
        loss = loss_fn(b, out)
    grads = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(grads, model.trainable_variables))
    return loss, out


@tf.function
def validated(a):
    return model(a, training=False)
"""

JAX_MEASURED = """
import jax

optimizer.build(model.trainable_variables)
held = model.trainable_variables, model.non_trainable_variables, optimizer.variables
values = [[v.value for v in variables] for variables in held]


def value(params, others, a, b):
    out, others = model.stateless_call(params, others, a, training=True)
    return loss_fn(b, out), (others, out)


@jax.jit
def moved(params, others, slots, a, b):
    (loss, (others, out)), grads = jax.value_and_grad(value, has_aux=True)(params, others, a, b)
    params, slots = optimizer.stateless_apply(slots, grads, params)
    return params, others, slots, loss, out


def step(a, b):
    *values[:], loss, out = moved(*values, a, b)
    return loss, out


def validated(a):
    return model.stateless_call(values[0], values[1], a, training=False)[0]
"""

MEASURED = f"""
x = rng.normal(size=(64, 5)).astype("float32")
y = (x.sum(1) > 0).astype("int32")
x_val = rng.normal(size=(16, 5)).astype("float32")
model = keras.Sequential([keras.Input((5,)), layers.Dense(8), layers.BatchNormalization(), layers.Dropout(0.3)])
model.add(layers.Dense(2))
loss_fn, optimizer = keras.losses.SparseCategoricalCrossentropy(from_logits=True), keras.optimizers.Adam(0.01)
metrics = {{"loss": keras.metrics.Mean("loss"), "acc": keras.metrics.SparseCategoricalAccuracy("acc")}}
val_acc = keras.metrics.SparseCategoricalAccuracy("val_acc")
{ {"tensorflow": TF_MEASURED, "jax": JAX_MEASURED}[keras.backend.backend()] }
for epoch in range(6):
    for metric in [*metrics.values(), val_acc]:
        metric.reset_state()
    order = rng.permutation(64)
    for start in range(0, 64, 8):
        rows = order[start : start + 8]
        loss, out = step(x[rows], y[rows])
        metrics["loss"].update_state(loss)
        metrics["acc"].update_state(y[rows], out)
    for start in range(0, 16, 8):
        val_acc.update_state((x_val[start : start + 8].sum(1) > 0).astype("int32"), validated(x_val[start : start + 8]))
    print(*(float(metric.result()) for metric in [*metrics.values(), val_acc]))
"""

# ---- two models one after the other, trained as one ----

TF_IN_A_ROW = """
import tensorflow as tf


@tf.function
def step(a):
    with tf.GradientTape() as tape:
        loss = loss_fn(a, decoder(encoder(a, training=True), training=True))
    grads = tape.gradient(loss, variables)
    optimizer.apply_gradients(zip(grads, variables))
"""

JAX_IN_A_ROW = """
import jax

optimizer.build(variables)
num = len(encoder.trainable_variables)
held = variables, encoder.non_trainable_variables, decoder.non_trainable_variables, optimizer.variables
values = [[v.value for v in each] for each in held]


def value(params, ours, theirs, a):
    code, ours = encoder.stateless_call(params[:num], ours, a, training=True)
    out, theirs = decoder.stateless_call(params[num:], theirs, code, training=True)
    return loss_fn(a, out), (ours, theirs)


@jax.jit
def moved(params, ours, theirs, slots, a):
    grads, (ours, theirs) = jax.grad(value, has_aux=True)(params, ours, theirs, a)
    params, slots = optimizer.stateless_apply(slots, grads, params)
    return params, ours, theirs, slots


def step(a):
    values[:] = moved(*values, a)
"""

IN_A_ROW = f"""
x = rng.normal(size=(64, 5)).astype("float32")
encoder = keras.Sequential([keras.Input((5,)), layers.Dense(6), layers.BatchNormalization(), layers.Dropout(0.3)])
decoder = keras.Sequential([keras.Input((6,)), layers.Dense(4, "tanh"), layers.Dense(5)])
loss_fn, optimizer = keras.losses.MeanSquaredError(), keras.optimizers.Adam(0.01)
variables = encoder.trainable_variables + decoder.trainable_variables
{ {"tensorflow": TF_IN_A_ROW, "jax": JAX_IN_A_ROW}[keras.backend.backend()] }
for epoch in range(6):
    order = rng.permutation(64)
    for start in range(0, 64, 8):
        step(x[order[start : start + 8]])
"""

SCRIPTS = {"in main": IN_MAIN, "by hand": BY_HAND, "augmented": AUGMENTED, "dataset": DATASET, "fit": FIT, "own": OWN}
SCRIPTS |= {"measured": MEASURED, "in a row": IN_A_ROW, "tokens": TOKENS, "own adam": OWN_ADAM, "heads": HEADS}


def script(name, *edits):
    """Return the text of a script, edited."""
    text = HEAD + ("" if name in ("measured", "in a row") else UPDATE) + SCRIPTS[name]
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    return text
