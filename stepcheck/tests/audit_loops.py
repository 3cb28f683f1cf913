"""Right training loops, as people write them, and edits of their text that make them wrong."""

from dataclasses import dataclass, field

import keras
import numpy as np
from keras import layers, ops

import wholestep as ws

ROWS = 20
draw = np.random.default_rng(0)
X = draw.normal(size=(ROWS, 5)).astype("float32")
Y = draw.normal(size=ROWS).astype("float32")
LABELS = draw.integers(0, 3, ROWS)
ONE_HOT = np.eye(3, dtype="float32")[LABELS]
W = draw.uniform(0.5, 2, ROWS).astype("float32")
TOKENS = draw.normal(size=(ROWS, 4, 2)).astype("float32")
NEXT = np.stack([TOKENS.sum(-1), np.arange(4) < draw.integers(1, 5, ROWS)[:, None]], -1).astype("float32")
RATE = keras.optimizers.schedules.InverseTimeDecay(0.05, 2, 0.7)


def network(*middle, num=1, activation=None, optimizer=None, regularizer="l2", loss="mse", shape=(5,)):
    keras.utils.set_random_seed(3)
    made = keras.Sequential([keras.Input(shape), layers.Dense(4, "tanh", kernel_regularizer=regularizer), *middle])
    made.add(layers.Dense(num, activation))
    made.compile(optimizer or keras.optimizers.Adam(0.01), loss)
    return made


class Tokens(ws.Objective):
    """A mean over places, each row with as many as it has."""

    def __call__(self, model, batch, training):
        tokens, after = batch
        error = model(tokens, training=training)[..., 0] - after[..., 0]
        return ws.Mean(error**2, after[..., 1])


class Weighted(ws.Objective):
    """A mean that is divided by the sum of the weights."""

    def __call__(self, model, batch, training):
        x, y, weight = batch
        return ws.Mean((model(x, training=training)[:, 0] - y) ** 2, weight)


SMOOTH = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
MODELS = {
    "plain": network,
    "dropout": lambda: network(layers.Dropout(0.4)),
    "norm": lambda: network(layers.BatchNormalization(), layers.Dropout(0.4)),
    "classes": lambda: network(num=3, loss=LOGITS),
    "smooth": lambda: network(num=3, loss=SMOOTH),
    "tokens": lambda: network(shape=(4, 2)),
    "schedule": lambda: network(optimizer=keras.optimizers.SGD(RATE)),
    "several": lambda: network(optimizer=keras.optimizers.SGD(RATE, gradient_accumulation_steps=2)),
    "statistics": lambda: network(layers.BatchNormalization()),
    "sgd": lambda: network(optimizer=keras.optimizers.SGD(0.05), regularizer=None),
}
DATA = {"classes": (X, LABELS), "smooth": (X, ONE_HOT), "tokens": (TOKENS, NEXT)}


BACK = """
    for variables, values in ((model.trainable_variables, tv), (model.non_trainable_variables, ntv)):
        for variable, value in zip(variables, values):
            variable.assign(value)
"""


@dataclass(frozen=True)
class Loop:
    """The text of a right loop, `train(model, x, y, w)`, and how it is audited."""

    text: str
    model: str = "plain"
    loss: object = None
    weights: bool = False
    options: dict = field(default_factory=dict)

    def __post_init__(self):
        if "tv, ntv, ov = (" in self.text:  # values by hand, which belong into the model in the end
            text, ending = self.text.removesuffix("    return printed\n"), "    return printed\n"
            object.__setattr__(self, "text", text + BACK + (ending if text != self.text else ""))

    @property
    def data(self):
        x, y = DATA.get(self.model, (X, Y))
        return (x, y, W) if self.weights else (x, y)


# ---- TensorFlow ----

TF_SIMPLE = """
def train(model, x, y, w):
    printed = []
    for epoch in range(2):
        total, count = 0.0, 0
        order = np.random.default_rng(epoch).permutation(len(x))
        for start in range(0, len(x), 8):
            rows = order[start : start + 8]
            with tf.GradientTape() as tape:
                output = model(x[rows], training=True)
                loss = tf.reduce_mean((y[rows][:, None] - output) ** 2)
                full = loss + sum(model.losses)
            grads = tape.gradient(full, model.trainable_variables)
            model.optimizer.apply_gradients(zip(grads, model.trainable_variables))
            total, count = total + float(loss) * len(rows), count + len(rows)
        printed.append(total / count)
    return printed
"""

TF_FUNCTION = """
def train(model, x, y, w):
    @tf.function
    def step(a, b):
        with tf.GradientTape() as tape:
            output = model(a, training=True)
            loss = tf.reduce_mean(tf.square(b[:, None] - output)) + sum(model.losses)
        grads = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(grads, model.trainable_variables))
        return loss

    for epoch in range(2):
        order = np.random.default_rng(epoch).permutation(len(x))
        for start in range(0, len(x), 8):
            rows = order[start : start + 8]
            step(tf.constant(x[rows]), tf.constant(y[rows]))
"""

TF_ACCUMULATED = """
def train(model, x, y, w):
    variables, optimizer = model.trainable_variables, model.optimizer
    for epoch in range(2):
        order = np.random.default_rng(epoch).permutation(len(x))
        for start in range(0, len(x), 12):
            rows = order[start : start + 12]
            total = [tf.zeros_like(v) for v in variables]
            parts = [rows[i : i + 5] for i in range(0, len(rows), 5)]
            for part in parts:
                with tf.GradientTape() as tape:
                    error = (y[part][:, None] - model(x[part], training=True)) ** 2
                    loss = ops.sum(error)
                grads = tape.gradient(loss, variables)
                total = [t + g for t, g in zip(total, grads)]
            with tf.GradientTape() as tape:
                penalty = sum(model.losses)
            own = [tf.zeros_like(v) if g is None else g for g, v in zip(tape.gradient(penalty, variables), variables)]
            final = [t / len(rows) + o for t, o in zip(total, own)]
            optimizer.apply_gradients(zip(final, variables))
"""

TF_WEIGHTED = """
def train(model, x, y, w):
    loss_fn = keras.losses.MeanSquaredError()
    for epoch in range(2):
        order = np.random.default_rng(epoch).permutation(len(x))
        for start in range(0, len(x), 8):
            rows = order[start : start + 8]
            with tf.GradientTape() as tape:
                output = model(x[rows], training=True)
                loss = loss_fn(y[rows], output, sample_weight=w[rows]) + sum(model.losses)
            grads = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply_gradients(zip(grads, model.trainable_variables))
"""

TF_DATASET = """
def train(model, x, y, w):
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=5).batch(8)

    @tf.function
    def run(data):
        for a, b in data:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((b[:, None] - model(a, training=True)) ** 2) + sum(model.losses)
            grads = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply_gradients(zip(grads, model.trainable_variables))

    model.optimizer.build(model.trainable_variables)
    for epoch in range(2):
        run(data)
"""

TF_CLIPPED = """
def train(model, x, y, w):
    average = [tf.identity(v) for v in model.trainable_variables]
    for epoch in range(2):
        order = np.random.default_rng(epoch).permutation(len(x))
        for start in range(0, len(x), 8):
            rows = order[start : start + 8]
            with tf.GradientTape() as tape:
                output = model(x[rows], training=True)
                loss = tf.reduce_mean((y[rows, None] - output) ** 2) + sum(model.losses)
            grads = tape.gradient(loss, model.trainable_variables)
            grads, _ = tf.clip_by_global_norm(grads, 0.4)
            model.optimizer.apply_gradients(zip(grads, model.trainable_variables))
            average = [0.9 * a + 0.1 * v for a, v in zip(average, model.trainable_variables)]
        model(x, training=False)
"""

TF_CLASSES = """
def train(model, x, y, w):
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    for epoch in range(2):
        order = np.random.default_rng(epoch).permutation(len(x))
        for start in range(0, len(x), 8):
            rows = order[start : start + 8]
            with tf.GradientTape() as tape:
                loss = loss_fn(y[rows], model(x[rows], training=True)) + sum(model.losses)
            grads = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply_gradients(zip(grads, model.trainable_variables))
        model.evaluate(x, y, verbose=0)
"""

TF_SMOOTH = """
def train(model, x, y, w):
    loss_fn = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
    for epoch in range(2):
        order = np.random.default_rng(epoch).permutation(len(x))
        for rows in np.array_split(order, 3):
            with tf.GradientTape() as tape:
                loss = loss_fn(y[rows], model(x[rows], training=True)) + sum(model.losses)
            grads = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply(grads, model.trainable_variables)
"""

TF_TOKENS = """
def train(model, x, y, w):
    for epoch in range(2):
        order = np.random.default_rng(epoch).permutation(len(x))
        for start in range(0, len(x), 8):
            rows = order[start : start + 8]
            label, mask = y[rows][..., 0], y[rows][..., 1]
            with tf.GradientTape() as tape:
                error = (model(x[rows], training=True)[..., 0] - label) ** 2 * mask
                loss = tf.reduce_sum(error) / tf.reduce_sum(mask) + sum(model.losses)
            grads = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply_gradients(zip(grads, model.trainable_variables))
"""

TF_PADDED = """
def train(model, x, y, w):
    for epoch in range(2):
        order = np.random.default_rng(epoch).permutation(len(x))
        for start in range(0, len(x), 8):
            rows = order[start : start + 8]
            a, b, weight = np.zeros((8, 5), "float32"), np.zeros(8, "float32"), np.zeros(8, "float32")
            a[: len(rows)], b[: len(rows)], weight[: len(rows)] = x[rows], y[rows], 1
            with tf.GradientTape() as tape:
                error = (model(a, training=True)[:, 0] - b) ** 2
                loss = tf.reduce_sum(error * weight) / tf.reduce_sum(weight) + sum(model.losses)
            grads = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply_gradients(zip(grads, model.trainable_variables))
"""

TF_RATES = """
def train(model, x, y, w):
    optimizer, step = keras.optimizers.SGD(0.05), 0
    for epoch in range(2):
        for start in range(0, len(x), 12):
            optimizer.learning_rate = rate(step)
            step += 1
            total = [tf.zeros_like(v) for v in model.trainable_variables]
            rows = np.arange(len(x))[start : start + 12]
            for part in np.array_split(rows, 3):
                with tf.GradientTape() as tape:
                    error = (y[part][:, None] - model(x[part], training=True)) ** 2
                    loss = ops.sum(error) / len(rows) + sum(model.losses) / 3
                grads = tape.gradient(loss, model.trainable_variables)
                total = [t + g for t, g in zip(total, grads)]
            optimizer.apply_gradients(zip(total, model.trainable_variables))
"""

TF_DECAYED = """
def train(model, x, y, w):
    @tf.function(reduce_retracing=True)
    def step(a, b):
        with tf.GradientTape(persistent=True) as tape:
            output = model(a, training=True)
            loss = tf.reduce_mean((b - tf.squeeze(output, -1)) ** 2)
            loss = loss + tf.add_n(model.losses)
        model.optimizer.apply_gradients(
            [(tape.gradient(loss, v), v) for v in model.trainable_variables]
        )
        for v in model.trainable_variables:
            v.assign(v * 0.999)

    for epoch in range(2):
        order = np.random.default_rng(epoch).permutation(len(x))
        for start in range(0, len(x), 6):
            rows = order[start : start + 6]
            step(tf.constant(x[rows]), tf.constant(y[rows]))
"""

# ---- JAX ----

JAX_HEAD = """
def train(model, x, y, w):
    optimizer = model.optimizer
    optimizer.build(model.trainable_variables)
    groups = model.trainable_variables, model.non_trainable_variables, optimizer.variables
    tv, ntv, ov = ([v.value for v in group] for group in groups)
"""

JAX_SIMPLE = (
    JAX_HEAD
    + """
    def loss_at(tv, ntv, a, b):
        output, ntv, own = model.stateless_call(tv, ntv, a, training=True, return_losses=True)
        loss = jnp.mean((b[:, None] - output) ** 2)
        return loss + sum(own), (loss, ntv)

    printed = []
    for epoch in range(2):
        total, count = 0.0, 0
        order = np.random.default_rng(epoch).permutation(len(x))
        for start in range(0, len(x), 10):
            rows = order[start : start + 10]
            (_, (loss, ntv)), grads = jax.value_and_grad(loss_at, has_aux=True)(tv, ntv, x[rows], y[rows])
            tv, ov = optimizer.stateless_apply(ov, grads, tv)
            total, count = total + float(loss) * len(rows), count + len(rows)
        printed.append(total / count)
    return printed
"""
)

JAX_JITTED = (
    JAX_HEAD
    + """
    def loss_at(tv, ntv, a, b):
        output, ntv, own = model.stateless_call(tv, ntv, a, training=True, return_losses=True)
        return jnp.mean((b[:, None] - output) ** 2) + sum(own), ntv

    @jax.jit
    def step(tv, ntv, ov, a, b):
        (_, new), grads = jax.value_and_grad(loss_at, has_aux=True)(tv, ntv, a, b)
        tv, ov = optimizer.stateless_apply(ov, grads, tv)
        return tv, new, ov

    for epoch in range(2):
        order = np.random.default_rng(epoch).permutation(len(x))
        for start in range(0, len(x), 8):
            rows = order[start : start + 8]
            tv, ntv, ov = step(tv, ntv, ov, x[rows], y[rows])
"""
)

JAX_ACCUMULATED = (
    JAX_HEAD
    + """
    @jax.jit
    def gradient(tv, ntv, a, b):
        def loss_at(tv):
            output, new = model.stateless_call(tv, ntv, a, training=True)
            error = (b[:, None] - output) ** 2
            return ops.sum(error), new

        return jax.grad(loss_at, has_aux=True)(tv)

    def penalty(tv):
        return sum(v.regularizer(value) for v, value in zip(model.trainable_variables, tv) if v.regularizer)

    for epoch in range(2):
        order = np.random.default_rng(epoch).permutation(len(x))
        for start in range(0, len(x), 12):
            rows = order[start : start + 12]
            total = [0 * v for v in tv]
            parts = [rows[i : i + 5] for i in range(0, len(rows), 5)]
            for part in parts:
                grads, ntv = gradient(tv, ntv, x[part], y[part])
                total = [t + g for t, g in zip(total, grads)]
            own = jax.grad(penalty)(tv)
            final = [t / len(rows) + o for t, o in zip(total, own)]
            tv, ov = optimizer.stateless_apply(ov, final, tv)
"""
)

JAX_SCANNED = (
    JAX_HEAD
    + """
    def loss_at(tv, ntv, a, b):
        output, new = model.stateless_call(tv, ntv, a, training=True)
        return jnp.sum((b[:, None] - output) ** 2), new

    @jax.jit
    def step(tv, ntv, ov, a, b):
        def body(carry, part):
            total, ntv = carry
            grads, ntv = jax.grad(loss_at, has_aux=True)(tv, ntv, *part)
            return ([t + g for t, g in zip(total, grads)], ntv), None

        (total, ntv), _ = jax.lax.scan(body, ([0 * v for v in tv], ntv), (a.reshape(2, 5, 5), b.reshape(2, 5)))
        tv, ov = optimizer.stateless_apply(ov, [t / 10 for t in total], tv)
        return tv, ntv, ov

    for epoch in range(2):
        order = np.random.default_rng(epoch).permutation(len(x))
        for rows in order.reshape(2, 10):
            tv, ntv, ov = step(tv, ntv, ov, x[rows], y[rows])
"""
)

JAX_SCOPE = """
def train(model, x, y, w):
    variables, optimizer = model.trainable_variables, model.optimizer
    optimizer.build(variables)

    def loss_at(values, a, b):
        with keras.StatelessScope(zip(variables, values)):
            return ops.mean(keras.losses.mean_squared_error(b[:, None], model(a, training=True))) + sum(model.losses)

    @jax.jit
    def update(values, slots, a, b):
        return optimizer.stateless_apply(slots, jax.grad(loss_at)(values, a, b), values)

    for epoch in range(2):
        for start in range(0, len(x), 8):
            held = variables + optimizer.variables
            values, slots = update(
                [v.value for v in variables],
                [v.value for v in optimizer.variables],
                x[start : start + 8],
                y[start : start + 8],
            )
            for variable, value in zip(held, [*values, *slots]):
                variable.assign(value)
        model.predict(x, verbose=0)
"""

JAX_CLIPPED = JAX_JITTED.replace(
    "        tv, ov = optimizer.stateless_apply(",
    """        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in grads))
        grads = [g * jnp.minimum(1.0, 0.4 / norm) for g in grads]
        tv, ov = optimizer.stateless_apply(""",
).replace("    @jax.jit\n    def step", "    @partial(jax.jit, donate_argnums=(0, 1, 2))\n    def step")

JAX_WEIGHTED = (
    JAX_JITTED.replace("tv, ntv, a, b)", "tv, ntv, a, b, c)")
    .replace("def step(tv, ntv, ov, a, b)", "def step(tv, ntv, ov, a, b, c)")
    .replace("jnp.mean((b[:, None] - output) ** 2)", "jnp.sum(c * (b - output[:, 0]) ** 2) / jnp.sum(c)")
    .replace("x[rows], y[rows])", "x[rows], y[rows], w[rows])")
)

TF_LOOPS = {
    "simple": Loop(TF_SIMPLE, "dropout"),
    "function": Loop(TF_FUNCTION, "norm"),
    "accumulated": Loop(TF_ACCUMULATED),
    "weighted": Loop(TF_WEIGHTED, weights=True),
    "by weights": Loop(
        TF_WEIGHTED.replace("MeanSquaredError()", "MeanSquaredError(reduction='mean_with_sample_weight')"),
        loss=Weighted(),
        weights=True,
    ),
    "dataset": Loop(TF_DATASET, "dropout"),
    "last layer": Loop(
        TF_SIMPLE.replace("model.trainable_variables", "model.layers[-1].trainable_variables").replace(
            "float(loss)", "float(full)"
        )
    ),
    "optimizer of its own": Loop(TF_ACCUMULATED.replace("model.optimizer", "keras.optimizers.SGD(0.1)"), "schedule"),
    "keras accumulates": Loop(
        TF_SIMPLE.replace("8", "5").replace(
            "printed = []",
            "printed = []\n    model.compile(keras.optimizers.SGD(0.05, gradient_accumulation_steps=2), 'mse')",
        ),
        "several",
    ),
    "held out": Loop(TF_CLASSES.replace("(len(x))", "(len(x) - 4)").replace("len(x), 8", "len(x) - 4, 8"), "classes"),
    "clipped": Loop(TF_CLIPPED),
    "classes": Loop(TF_CLASSES, "classes"),
    "smooth": Loop(TF_SMOOTH, "smooth"),
    "tokens": Loop(TF_TOKENS, "tokens", Tokens()),
    "padded": Loop(TF_PADDED),
    "rates": Loop(TF_RATES, "schedule", options={"learning_rate": RATE}),
    "scheduled": Loop(TF_ACCUMULATED, "schedule"),
    "decayed": Loop(TF_DECAYED, "norm"),
}
JAX_LOOPS = {
    "simple": Loop(JAX_SIMPLE, "dropout"),
    "jitted": Loop(JAX_JITTED, "norm"),
    "accumulated": Loop(JAX_ACCUMULATED),
    "accumulated with statistics": Loop(JAX_ACCUMULATED, "norm"),
    "with statistics": Loop(JAX_JITTED, "statistics"),
    "scanned": Loop(JAX_SCANNED, "sgd"),
    "scope": Loop(JAX_SCOPE),
    "clipped": Loop(JAX_CLIPPED, "dropout"),
    "weighted": Loop(JAX_WEIGHTED, loss=Weighted(), weights=True),
    "scheduled": Loop(JAX_ACCUMULATED, "schedule"),
    "classes": Loop(
        JAX_JITTED.replace("jnp.mean((b[:, None] - output) ** 2)", "loss_fn(b, output)").replace(
            "def loss_at", "loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)\n\n    def loss_at"
        ),
        "classes",
    ),
}
RIGHT = {"tensorflow": TF_LOOPS, "jax": JAX_LOOPS}[keras.backend.backend()]

__all__ = ["RIGHT", "Loop", "ops"]
