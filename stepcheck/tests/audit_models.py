"""Right loops of models with several outputs or a mask, of averaged weights, and of windows; and edits of them."""

import keras
import numpy as np
from audit_loops import DATA, JAX_ACCUMULATED, JAX_HEAD, LABELS, MODELS, ROWS, TF_ACCUMULATED, Loop, X, Y
from audit_mutants import ADD, of
from keras import layers, ops


def two_outputs():
    """Return a model with a loss for each of two outputs, which count differently."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((5,))
    hidden = layers.Dense(4, "tanh")(inputs)
    model = keras.Model(
        inputs, {name: layers.Dense(num, name=name)(hidden) for name, num in (("kind", 3), ("price", 1))}
    )
    loss = {"kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "price": "mse"}
    model.compile(keras.optimizers.Adam(0.01), loss, loss_weights={"kind": 1.0, "price": 0.3})
    return model


def both(labels, outputs):
    """Return the loss of two outputs as one number."""
    kind = ops.sparse_categorical_crossentropy(labels["kind"], outputs["kind"], from_logits=True)
    return ops.mean(kind) + 0.3 * ops.mean((labels["price"] - outputs["price"]) ** 2)


def pair():
    """Return a model of two inputs of one shape."""
    keras.utils.set_random_seed(3)
    inputs = [keras.Input((3,)), keras.Input((3,))]
    joined = layers.Concatenate()([layers.Dense(4, "tanh")(inputs[0]), inputs[1]])
    model = keras.Model(inputs, layers.Dense(3)(joined))
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def masked():
    """Return a model that masks the places of token 0."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((4,)), layers.Embedding(9, 3, mask_zero=True), layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


draw = np.random.default_rng(8)
WORDS = draw.integers(1, 9, (ROWS, 4)) * (np.arange(4) < draw.integers(1, 5, ROWS)[:, None])
WORDS[:, 0] = np.arange(ROWS) % 8 + 1  # no row twice
MODELS |= {"two outputs": two_outputs, "masked": masked, "pair": pair}
DATA |= {
    "two outputs": (X, {"kind": LABELS, "price": Y[:, None]}),
    "pair": ([X[:, :3], X[:, 2:]], draw.normal(size=(ROWS, 3)).astype("float32")),
    "masked": (WORDS, draw.normal(size=(ROWS, 4, 1)).astype("float32")),
}

LOSSES = """
    losses = {
        "kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "price": keras.losses.MeanSquaredError(),
    }
    weights = {"kind": 1.0, "price": 0.3}
"""
ROWS_OF = """
    for epoch in range(2):
        order = np.random.default_rng(epoch).permutation(len(x))
        for start in range(0, len(x), 8):
            rows = order[start : start + 8]
"""

# ---- TensorFlow ----

TF_HEAD = "\ndef train(model, x, y, w):"
TF_OUTPUTS = f"""{TF_HEAD}{LOSSES}{ROWS_OF}
            with tf.GradientTape() as tape:
                outputs, total = model(x[rows], training=True), 0.0
                for name in losses:
                    loss = losses[name](y[name][rows], outputs[name])
                    total = total + weights[name] * loss
            grads = tape.gradient(total, model.trainable_variables)
            model.optimizer.apply_gradients(zip(grads, model.trainable_variables))
"""
TF_MASKED = f"""{TF_HEAD}
    loss_fn = keras.losses.MeanSquaredError()
{ROWS_OF}
            with tf.GradientTape() as tape:
                loss = loss_fn(y[rows], model(x[rows], training=True))
            grads = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply_gradients(zip(grads, model.trainable_variables))
"""
TF_PAIR = TF_MASKED.replace("x[rows]", "[x[0][rows], x[1][rows]]").replace("len(x)", "len(y)")
TF_AVERAGED = (
    TF_ACCUMULATED.replace("    for epoch", "    average = [v.numpy() for v in variables]\n    for epoch")
    + """
            average = [0.8 * a + 0.2 * v.numpy() for a, v in zip(average, variables)]
    for v, a in zip(variables, average):
        v.assign(a)
"""
)
TF_THAWED = f"""{TF_HEAD}
    model.layers[0].trainable = False
    variables, optimizer = model.trainable_variables, keras.optimizers.SGD(0.1)
{ROWS_OF.replace("range(2)", "range(3)")}
            if (epoch, start) == (1, 0):
                model.layers[0].trainable = True
                variables, optimizer = model.trainable_variables, keras.optimizers.SGD(0.1)
            with tf.GradientTape() as tape:
                output = model(x[rows], training=True)
                loss = tf.reduce_mean((y[rows][:, None] - output) ** 2) + sum(model.losses)
            grads = tape.gradient(loss, variables)
            optimizer.apply_gradients(zip(grads, variables))
"""
FILLED = """
            weight = (np.arange(8) < len(rows)).astype("float32")
            rows = np.concatenate([rows, np.repeat(rows[-1:], 8 - len(rows))])
"""
MOVED = """
            first = min(start, len(x) - 8)  # as lax.dynamic_slice has it
            rows, weight = order[first : first + 8], (first + np.arange(8) >= start).astype("float32")
"""
TF_FILLED = f"""{TF_HEAD}{ROWS_OF}{FILLED}
            total = [tf.zeros_like(v) for v in model.trainable_variables]
            for part in (np.arange(4), np.arange(4, 8)):
                with tf.GradientTape() as tape:
                    error = (model(x[rows[part]], training=True)[:, 0] - y[rows[part]]) ** 2
                    loss = tf.reduce_sum(error * weight[part]) / tf.reduce_sum(weight)
                grads = tape.gradient(loss, model.trainable_variables)
                total = [t + g for t, g in zip(total, grads)]
            model.optimizer.apply_gradients(zip(total, model.trainable_variables))
"""

# ---- JAX ----

JAX_OUTPUTS = f"""{JAX_HEAD}{LOSSES}
    def loss_at(tv, ntv, a, b):
        (outputs, ntv), total = model.stateless_call(tv, ntv, a, training=True), 0.0
        for name in losses:
            loss = losses[name](b[name], outputs[name])
            total = total + weights[name] * loss
        return total, ntv

    step = jax.jit(jax.grad(loss_at, has_aux=True))
{ROWS_OF}
            grads, ntv = step(tv, ntv, x[rows], {{name: leaf[rows] for name, leaf in y.items()}})
            tv, ov = optimizer.stateless_apply(ov, grads, tv)
"""
JAX_MASKED = f"""{JAX_HEAD}
    loss_fn = keras.losses.MeanSquaredError()

    def loss_at(tv, ntv, a, b):
        output, ntv = model.stateless_call(tv, ntv, a, training=True)
        return loss_fn(b, output), ntv

    step = jax.jit(jax.grad(loss_at, has_aux=True))
{ROWS_OF}
            grads, ntv = step(tv, ntv, x[rows], y[rows])
            tv, ov = optimizer.stateless_apply(ov, grads, tv)
"""
JAX_PAIR = JAX_MASKED.replace("x[rows]", "[x[0][rows], x[1][rows]]").replace("len(x)", "len(y)")
JAX_AVERAGED = (
    JAX_ACCUMULATED.replace("    for epoch", "    average = list(tv)\n    for epoch")
    + """
            average = [0.8 * a + 0.2 * v for a, v in zip(average, tv)]
    tv = average
"""
)
JAX_SELECTED = f"""{JAX_HEAD}
    def loss_at(tv, ntv, a, b):
        output, ntv, own = model.stateless_call(tv, ntv, a, training=True, return_losses=True)
        return jnp.mean((b[:, None] - output) ** 2) + sum(own), ntv

    @jax.jit
    def step(tv, ntv, ov, total, is_full, a, b):
        grads, ntv = jax.grad(loss_at, has_aux=True)(tv, ntv, a, b)
        total = [t + g / 2 for t, g in zip(total, grads)]
        new = optimizer.stateless_apply(ov, total, tv)
        tv, ov = jax.tree.map(lambda a, b: jnp.where(is_full, a, b), new, (tv, ov))
        return tv, ntv, ov, [jnp.where(is_full, 0.0, t) for t in total]

    total = [0 * v for v in tv]
    for epoch in range(3):
        order = np.random.default_rng(epoch).permutation(len(x))
        for i, start in enumerate(range(0, len(x), 5)):
            rows = order[start : start + 5]
            tv, ntv, ov, total = step(tv, ntv, ov, total, i % 2 == 1, x[rows], y[rows])
"""
JAX_FILLED = f"""{JAX_HEAD}
    def loss_at(tv, ntv, a, b, weight):
        output, ntv = model.stateless_call(tv, ntv, a, training=True)
        return jnp.sum((b - output[:, 0]) ** 2 * weight), ntv

    step = jax.jit(jax.grad(loss_at, has_aux=True))
{ROWS_OF}{FILLED}
            total = [0 * v for v in tv]
            for part in (np.arange(4), np.arange(4, 8)):
                grads, ntv = step(tv, ntv, x[rows[part]], y[rows[part]], weight[part] / weight.sum())
                total = [t + g for t, g in zip(total, grads)]
            tv, ov = optimizer.stateless_apply(ov, total, tv)
"""

TF_LATER = {
    "two outputs": Loop(TF_OUTPUTS, "two outputs"),
    "masked": Loop(TF_MASKED, "masked"),
    "averaged": Loop(TF_AVERAGED),
    "thawed": Loop(TF_THAWED),
    "filled up": Loop(TF_FILLED, "sgd"),
    "moved back": Loop(TF_FILLED.replace(FILLED, MOVED), "sgd"),
    "one loss of two": Loop(TF_OUTPUTS, "two outputs", both),
    "pair": Loop(TF_PAIR, "pair"),
}
JAX_LATER = {
    "two outputs": Loop(JAX_OUTPUTS, "two outputs"),
    "masked": Loop(JAX_MASKED, "masked"),
    "averaged": Loop(JAX_AVERAGED),
    "selected": Loop(JAX_SELECTED),
    "filled up": Loop(JAX_FILLED, "sgd"),
    "moved back": Loop(JAX_FILLED.replace(FILLED, MOVED), "sgd"),
    "one loss of two": Loop(JAX_OUTPUTS, "two outputs", both),
    "pair": Loop(JAX_PAIR, "pair"),
}

# ---- what makes them wrong ----

OTHER = "np.random.default_rng(start + 9).permutation(len(x))[:10]"
ADDED = "total = total + weights[name] * loss"
OUTPUTS = [
    of("inputs swapped", "pair", ("[x[0][rows], x[1][rows]]", "[x[1][rows], x[0][rows]]")),
    of("labels among the inputs", "pair", ("[x[0][rows], x[1][rows]]", "[x[0][rows], y[rows]]")),
    of(
        "batches overlap",
        "on batch",
        ("range(0, len(x), 8)", "range(3)"),
        ("order[start : start + 8]", "order[start :][:8]"),
    ),
    of("output left out", "two outputs", (ADDED, "total = 0 * total + weights[name] * loss")),
    of("loss weights ignored", "two outputs", ("weights[name] * loss", "loss")),
    of("other loss weights", "two outputs", ('"kind": 1.0, "price": 0.3', '"kind": 0.3, "price": 1.0')),
]
TF = [
    *OUTPUTS,
    of(
        "mask ignored",
        "masked",
        ("loss_fn(y[rows], model(x[rows], training=True))", "ops.mean((y[rows] - model(x[rows], training=True)) ** 2)"),
    ),
    of(
        "average by microbatch",
        "averaged",
        (ADD, f"{ADD}\n                average = [0.8 * a + 0.2 * v.numpy() for a, v in zip(average, variables)]"),
        ("            average = [0.8 * a + 0.2 * v.numpy() for a, v in zip(average, variables)]\n    for", "    for"),
    ),
    of(
        "variable left out",
        "thawed",
        ("                variables, optimizer = model.trainable_variables,", "                optimizer ="),
    ),
    of(
        "smoothing not divided",
        "smooth",
        ("loss_fn(y[rows], model(x[rows], training=True))", "-tf.reduce_mean(tf.reduce_sum(given * logs, -1))"),
        (
            "                loss =",
            "                given = y[rows] * (1 - 0.1) + 0.1\n"
            "                logs = tf.nn.log_softmax(model(x[rows], training=True))\n"
            "                loss =",
        ),
    ),
    of("smoothing twice", "smooth", ("loss_fn(y[rows],", "loss_fn(y[rows] * (1 - 0.1) + 0.1 / 3,")),
    of(
        "weights averaged apart",
        "weighted",
        ("loss_fn(y[rows], output, sample_weight=w[rows])", "tf.reduce_mean(loss_fn(y[rows], output) * w[rows])"),
    ),
    of(
        "batch trained on twice",
        "function",
        ("            step(tf.constant(x[rows])", "            for _ in range(2 if start == 8 else 1): step(x[rows]"),
        ("tf.constant(y[rows])", "y[rows]"),
    ),
    of("printed: means over rows", "simple", ("float(loss) * len(rows)", "float(loss)")),
    of("rows twice in a pass", "function", ("order[start : start + 8]", "order[min(start, len(x) - 8) :][:8]")),
    of(
        "accumulated twice",
        "even",
        (", model.optimizer\n", ", keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)\n"),
    ),
    of("penalty forgotten", "wrapped", (" + sum(self.losses)", "")),
    of("weights of other rows", "weighted", ("sample_weight=w[rows]", "sample_weight=w[start : start + 8]")),
    of("labels of other rows", "simple", ("y[rows][:, None]", f"y[{OTHER}][: len(rows), None]")),
]
JAX = [
    *OUTPUTS,
    of("mask ignored", "masked", ("return loss_fn(b, output), ntv", "return jnp.mean((b - output) ** 2), ntv")),
    of(
        "average by microbatch",
        "averaged",
        (ADD, f"{ADD}\n                average = [0.8 * a + 0.2 * v for a, v in zip(average, tv)]"),
        ("            average = [0.8 * a + 0.2 * v for a, v in zip(average, tv)]\n    tv", "    tv"),
    ),
    of("statistics never written back", "with statistics", (", (model.non_trainable_variables, ntv))", ",)")),
    of("penalty forgotten", "wrapped", (" + sum(own)", "")),
    of("summed over microbatches", "selected", ("t + g / 2", "t + g")),
    of(
        "batch trained on twice",
        "jitted",
        ("            tv, ntv, ov = step", "            for _ in range(2 if start == 8 else 1): tv, ntv, ov = step"),
    ),
    of("printed: means over rows", "simple", ("float(loss) * len(rows)", "float(loss)")),
    of("rows twice in a pass", "jitted", ("order[start : start + 8]", "order[min(start, len(x) - 8) :][:8]")),
    of(
        "accumulated twice",
        "even",
        ("optimizer = model.optimizer", "optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)"),
    ),
    of("labels of other rows", "simple", ("x[rows], y[rows])", f"x[rows], y[{OTHER}])")),
]
