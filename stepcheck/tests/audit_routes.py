"""More right loops: Keras' own, replicas, mixed precision, and other styles of writing one by hand."""

import keras
import numpy as np
from audit_loops import (
    DATA,
    JAX_ACCUMULATED,
    JAX_CLIPPED,
    JAX_HEAD,
    JAX_JITTED,
    JAX_SIMPLE,
    MODELS,
    ONE_HOT,
    RATE,
    RIGHT,
    ROWS,
    TF_ACCUMULATED,
    TF_CLIPPED,
    TF_FUNCTION,
    TF_SIMPLE,
    Loop,
    X,
    Y,
    network,
)
from audit_models import JAX_LATER, TF_LATER
from keras import layers

CLIPPED = {"optimizer": keras.optimizers.Adam(0.01, global_clipnorm=0.4)}
ENGINE = keras.backend.backend()


def half(policy, **options):
    """Return a model in mixed precision."""
    keras.config.set_dtype_policy(policy)
    try:
        return network(layers.Dropout(0.4), **options)
    finally:
        keras.config.set_dtype_policy("float32")


def replicated(num):
    """Return a model on so many replicas."""
    import tensorflow as tf

    reduction = tf.distribute.ReductionToOneDevice()  # collectives cannot be left once they have begun
    with tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(num)], cross_device_ops=reduction).scope():
        model = network(layers.Dropout(0.4))
        model.optimizer.build(model.trainable_variables)
    return model


def words(optimizer=None):
    """Return a model that looks up numbers in a table."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((4,)), layers.Embedding(6, 3), layers.Flatten(), layers.Dense(1)])
    model.compile(optimizer or keras.optimizers.Adam(0.01), "mse")
    return model


def two_inputs():
    """Return a model of two named inputs."""
    keras.utils.set_random_seed(3)
    inputs = {"left": keras.Input((5,), name="left"), "right": keras.Input((2,), name="right")}
    joined = layers.Concatenate()([layers.Dense(4, "relu")(inputs["left"]), inputs["right"]])
    model = keras.Model(inputs, layers.Dense(1)(joined))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def frozen():
    """Return a model whose first layer is not trained."""
    model = network(layers.BatchNormalization(), layers.Dense(3, "relu"))
    model.layers[0].trainable = False
    return model


MODELS |= {
    "float16": lambda: half("mixed_float16"),
    "small scale": lambda: half(
        "mixed_float16", optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), 1024.0)
    ),
    "bfloat16": lambda: half("mixed_bfloat16"),
    "two replicas": lambda: replicated(2),
    "three replicas": lambda: replicated(3),
    "words": words,
    "two inputs": two_inputs,
    "frozen": frozen,
    "deep": lambda: network(layers.Dense(4, "tanh")),
    "own": lambda: network(layers.Dropout(0.4)),
    "decay": lambda: network(optimizer=keras.optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.5)),
    "average": lambda: network(optimizer=keras.optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=3)),
    "sum": lambda: network(loss=keras.losses.MeanSquaredError(reduction="sum")),
    "logits": lambda: network(num=3, loss=keras.losses.CategoricalCrossentropy(from_logits=True)),
    "sorted": lambda: network(num=5, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True)),
    "eager": lambda: network(layers.BatchNormalization(), layers.Dropout(0.4)),
}
draw = np.random.default_rng(7)
DATA |= {
    "words": (draw.integers(0, 6, (ROWS, 4)), Y),
    "two inputs": ({"left": X, "right": draw.normal(size=(ROWS, 2)).astype("float32")}, Y),
    "logits": (X, ONE_HOT),
    "sorted": (X, np.repeat(np.arange(5), 4)),
}

# ---- Keras' own loops, on both engines ----

FIT = """
def train(model, x, y, w):
    history = model.fit(x, y, epochs=2, batch_size=8, shuffle=False, verbose=0, validation_data=(x, y))
    return history.history["loss"]
"""
FIT_WEIGHTED = """
def train(model, x, y, w):
    model.fit(x, y, sample_weight=w, epochs=2, batch_size=8, shuffle=False, verbose=0)
"""
FIT_ACCUMULATED = """
def train(model, x, y, w):
    model.compile(keras.optimizers.SGD(0.05, gradient_accumulation_steps=2), "mse")
    model.fit(x, y, epochs=2, batch_size=5, shuffle=False, verbose=0)
"""
ON_BATCH = """
def train(model, x, y, w):
    for epoch in range(2):
        order = np.random.default_rng(epoch).permutation(len(x))
        for start in range(0, len(x), 8):
            rows = order[start : start + 8]
            model.train_on_batch(x[rows], y[rows])
"""
GENERATED = """
def train(model, x, y, w):
    def batches():
        for epoch in range(2):
            order = np.random.default_rng(epoch).permutation(len(x))
            for rows in np.array_split(order, 3):
                yield x[rows], y[rows]

    for a, b in batches():
        model.train_on_batch(a, b)
"""

# ---- a step of the model's own, under fit ----

TF_STEP = """
class Own(keras.Sequential):
    def train_step(self, data):
        a, b = data
        with tf.GradientTape() as tape:
            output = self(a, training=True)
            loss = tf.reduce_mean((b - output) ** 2) + sum(self.losses)
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables))
        return {"loss": loss}


def train(model, x, y, w):
    model.__class__ = Own
    model.fit(x, y[:, None], epochs=2, batch_size=8, shuffle=False, verbose=0)
"""
JAX_STEP = """
class Own(keras.Sequential):
    def loss_at(self, tv, ntv, a, b):
        output, ntv, own = self.stateless_call(tv, ntv, a, training=True, return_losses=True)
        return jnp.mean((b - output) ** 2) + sum(own), ntv

    def train_step(self, state, data):
        tv, ntv, ov, mv = state
        a, b = data
        (loss, ntv), grads = jax.value_and_grad(self.loss_at, has_aux=True)(tv, ntv, a, b)
        tv, ov = self.optimizer.stateless_apply(ov, grads, tv)
        return {"loss": loss}, (tv, ntv, ov, mv)


def train(model, x, y, w):
    model.__class__ = Own
    model.fit(x, y[:, None], epochs=2, batch_size=10, shuffle=False, verbose=0)
"""

# ---- TensorFlow ----

TF_REPLICAS = """
def train(model, x, y, w):
    strategy = model.distribute_strategy
    num = strategy.num_replicas_in_sync

    def replica(a, b, rows):
        with tf.GradientTape() as tape:
            error = (b[:, None] - model(a, training=True)) ** 2
            loss = tf.reduce_sum(error) / tf.cast(rows, "float32") + sum(model.losses) / num
        grads = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(grads, model.trainable_variables))

    @tf.function(reduce_retracing=True)
    def step(a, b, rows):
        strategy.run(replica, args=(a, b, rows))

    def spread(values, parts):
        return strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(values[parts[context.replica_id_in_sync_group]])
        )

    for epoch in range(2):
        order = np.random.default_rng(epoch).permutation(len(x))
        for start in range(0, len(x), 10):
            rows = order[start : start + 10]
            parts = np.array_split(rows, num)
            step(spread(x, parts), spread(y, parts), len(rows))
"""
TF_SCALED = TF_FUNCTION.replace(
    "tf.reduce_mean(tf.square(b[:, None] - output)) + sum(model.losses)",
    "tf.reduce_mean(tf.square(b[:, None] - tf.cast(output, 'float32'))) + sum(model.losses)\n"
    "            loss = model.optimizer.scale_loss(loss)",
)
TF_BY_HAND = """
def train(model, x, y, w):
    optimizer, scale = keras.optimizers.Adam(0.01), 1024.0
    for epoch in range(2):
        order = np.random.default_rng(epoch).permutation(len(x))
        for start in range(0, len(x), 8):
            rows = order[start : start + 8]
            with tf.GradientTape() as tape:
                output = tf.cast(model(x[rows], training=True), "float32")
                loss = tf.reduce_mean((y[rows][:, None] - output) ** 2) + sum(model.losses)
                scaled = loss * scale
            grads = tape.gradient(scaled, model.trainable_variables)
            grads = [g / scale for g in grads]
            optimizer.apply_gradients(zip(grads, model.trainable_variables))
"""
TF_COUNTED = """
def train(model, x, y, w):
    variables = model.trainable_variables
    total, count = None, 0
    for epoch in range(3):
        order = np.random.default_rng(epoch).permutation(len(x))
        for start in range(0, len(x), 4):
            rows = order[start : start + 4]
            with tf.GradientTape() as tape:
                error = (y[rows][:, None] - model(x[rows], training=True)) ** 2
                loss = ops.mean(error) + sum(model.losses)
            grads = tape.gradient(loss, variables)
            total = grads if total is None else [t + g for t, g in zip(total, grads)]
            count += 1
            if count == 2 or start + 4 >= len(x):
                model.optimizer.apply([t / count for t in total], variables)
                total, count = None, 0
"""
TF_VARIABLES = """
def train(model, x, y, w):
    variables = model.trainable_variables
    sums = [tf.Variable(tf.zeros_like(v), trainable=False) for v in variables]
    model.optimizer.build(variables)

    @tf.function
    def gradient(a, b):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((b[:, None] - model(a, training=True)) ** 2) + sum(model.losses)
        for held, grad in zip(sums, tape.gradient(loss, variables)):
            held.assign_add(grad / 2)

    @tf.function
    def update():
        model.optimizer.apply_gradients(zip([tf.identity(held) for held in sums], variables))
        for held in sums:
            held.assign(tf.zeros_like(held))

    for epoch in range(2):
        order = np.random.default_rng(epoch).permutation(len(x))
        for step, start in enumerate(range(0, len(x), 5), start=1):
            rows = order[start : start + 5]
            gradient(tf.constant(x[rows]), tf.constant(y[rows]))
            if step % 2 == 0:
                update()
"""
TF_TRACED_RATE = """
def train(model, x, y, w):
    optimizer, step = keras.optimizers.SGD(0.05), 0
    optimizer.build(model.trainable_variables)

    @tf.function
    def update(a, b, now):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((b[:, None] - model(a, training=True)) ** 2) + sum(model.losses)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.learning_rate.assign(now)
        optimizer.apply_gradients(zip(grads, model.trainable_variables))

    for epoch in range(2):
        for start in range(0, len(x), 8):
            rows = np.random.default_rng(epoch).permutation(len(x))[start : start + 8]
            update(tf.constant(x[rows]), tf.constant(y[rows]), tf.constant(rate(step), "float32"))
            step += 1
"""
TF_INPUTS = TF_SIMPLE.replace("x[rows]", "{name: leaf[rows] for name, leaf in x.items()}").replace("len(x)", "len(y)")
TF_LOGITS = """
def train(model, x, y, w):
    loss_fn = keras.losses.CategoricalCrossentropy(from_logits=True)
    for epoch in range(2):
        order = np.random.default_rng(epoch).permutation(len(x))
        for start in range(0, len(x), 8):
            rows = order[start : start + 8]
            with tf.GradientTape() as tape:
                output = model(x[rows], training=True)
                loss = loss_fn(y[rows], output) + sum(model.losses)
            grads = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply_gradients(zip(grads, model.trainable_variables))
"""
TF_EVEN = TF_ACCUMULATED.replace("12", "10").replace("loss = ops.sum(error)", "loss = ops.mean(error)")
TF_EVEN = TF_EVEN.replace("t / len(rows) + o", "t / len(parts) + o")
TF_SUM = TF_SIMPLE.replace("tf.reduce_mean", "tf.reduce_sum").replace(
    "total + float(loss) * len(rows), count + len(rows)", "total + float(loss), count + len(rows)"
)
TF_SUM = TF_SUM.replace("    return printed\n", "")

# ---- JAX ----

JAX_SCALED = (
    JAX_HEAD
    + """
    def loss_at(tv, ntv, ov, a, b):
        output, ntv, own = model.stateless_call(tv, ntv, a, training=True, return_losses=True)
        loss = jnp.mean((b[:, None] - output.astype("float32")) ** 2) + sum(own)
        with keras.StatelessScope(zip(optimizer.variables, ov)):
            loss = optimizer.scale_loss(loss)
        return loss, ntv

    @jax.jit
    def step(tv, ntv, ov, a, b):
        (_, ntv), grads = jax.value_and_grad(loss_at, has_aux=True)(tv, ntv, ov, a, b)
        tv, ov = optimizer.stateless_apply(ov, grads, tv)
        return tv, ntv, ov

    for epoch in range(2):
        order = np.random.default_rng(epoch).permutation(len(x))
        for start in range(0, len(x), 5):
            rows = order[start : start + 5]
            tv, ntv, ov = step(tv, ntv, ov, x[rows], y[rows])
"""
)
JAX_EPOCH = (
    JAX_HEAD
    + """
    def loss_at(tv, ntv, a, b):
        output, ntv, own = model.stateless_call(tv, ntv, a, training=True, return_losses=True)
        return jnp.mean((b[:, None] - output) ** 2) + sum(own), ntv

    @jax.jit
    def run(carry, batches):
        def step(carry, batch):
            tv, ntv, ov = carry
            (loss, ntv), grads = jax.value_and_grad(loss_at, has_aux=True)(tv, ntv, *batch)
            tv, ov = optimizer.stateless_apply(ov, grads, tv)
            return (tv, ntv, ov), loss

        return jax.lax.scan(step, carry, batches)

    for epoch in range(2):
        order = np.random.default_rng(epoch).permutation(len(x)).reshape(4, 5)
        (tv, ntv, ov), _ = run((tv, ntv, ov), (x[order], y[order]))
"""
)
JAX_COUNTED = (
    JAX_HEAD
    + """
    def loss_at(tv, ntv, a, b):
        output, ntv, own = model.stateless_call(tv, ntv, a, training=True, return_losses=True)
        return jnp.mean((b[:, None] - output) ** 2) + sum(own), ntv

    total, count = None, 0
    for epoch in range(3):
        order = np.random.default_rng(epoch).permutation(len(x))
        for start in range(0, len(x), 4):
            rows = order[start : start + 4]
            grads, ntv = jax.grad(loss_at, has_aux=True)(tv, ntv, x[rows], y[rows])
            total = grads if total is None else [t + g for t, g in zip(total, grads)]
            count += 1
            if count == 2 or start + 4 >= len(x):
                tv, ov = optimizer.stateless_apply(ov, [t / count for t in total], tv)
                total, count = None, 0
"""
)
JAX_INPUTS = JAX_SIMPLE.replace("x[rows]", "{name: leaf[rows] for name, leaf in x.items()}").replace("len(x)", "len(y)")
JAX_LOGITS = JAX_JITTED.replace("jnp.mean((b[:, None] - output) ** 2)", "loss_fn(b, output)").replace(
    "def loss_at", "loss_fn = keras.losses.CategoricalCrossentropy(from_logits=True)\n\n    def loss_at"
)
JAX_EVEN = JAX_ACCUMULATED.replace("12", "10").replace("return ops.sum(error)", "return ops.mean(error)")
JAX_EVEN = JAX_EVEN.replace("t / len(rows) + o", "t / len(parts) + o")
JAX_RATES = (
    JAX_HEAD.replace("optimizer = model.optimizer", "optimizer = keras.optimizers.SGD(0.05)")
    + """
    def loss_at(tv, ntv, a, b):
        output, ntv, own = model.stateless_call(tv, ntv, a, training=True, return_losses=True)
        return jnp.mean((b[:, None] - output) ** 2) + sum(own), ntv

    @jax.jit
    def step(tv, ntv, ov, a, b, now):
        (_, ntv), grads = jax.value_and_grad(loss_at, has_aux=True)(tv, ntv, a, b)
        place = [v.path for v in optimizer.variables].index(optimizer.learning_rate.path)
        ov = [*ov[:place], now, *ov[place + 1 :]]
        tv, ov = optimizer.stateless_apply(ov, grads, tv)
        return tv, ntv, ov

    count = 0
    for epoch in range(2):
        order = np.random.default_rng(epoch).permutation(len(x))
        for start in range(0, len(x), 8):
            rows = order[start : start + 8]
            tv, ntv, ov = step(tv, ntv, ov, x[rows], y[rows], np.float32(rate(count)))
            count += 1
"""
)

JAX_PMAPPED = (
    JAX_HEAD
    + """
    num = 2

    def loss_at(tv, ntv, a, b):
        output, ntv, own = model.stateless_call(tv, ntv, a, training=True, return_losses=True)
        return jnp.mean((b[:, None] - output) ** 2) + sum(own), ntv

    def step(tv, ntv, ov, a, b):
        (_, ntv), grads = jax.value_and_grad(loss_at, has_aux=True)(tv, ntv, a, b)
        grads = jax.lax.pmean(grads, "replicas")
        tv, ov = optimizer.stateless_apply(ov, grads, tv)
        return tv, ntv, ov

    step = jax.pmap(step, axis_name="replicas", devices=jax.devices()[:num])
    state = jax.tree.map(lambda value: jnp.stack([value] * num), (tv, ntv, ov))
    for epoch in range(2):
        order = np.random.default_rng(epoch).permutation(len(x))
        for start in range(0, len(x), 10):
            rows = order[start : start + 10].reshape(num, -1)
            state = step(*state, x[rows], y[rows])
"""
)

BOTH = {
    "fit": Loop(FIT, "norm"),
    "fit weighted": Loop(FIT_WEIGHTED, weights=True),
    "fit accumulates": Loop(FIT_ACCUMULATED, "several"),
    "fit in float16": Loop(FIT.replace("return history", "history"), "small scale"),
    "fit in bfloat16": Loop(FIT.replace("return history", "history"), "bfloat16"),
    "fit two inputs": Loop(FIT, "two inputs"),
    "fit several at once": Loop(
        FIT.replace("    history =", "    model.compile(model.optimizer, 'mse', steps_per_execution=2)\n    history ="),
        "own",
    ),
    "fit eagerly": Loop(
        FIT.replace("    history =", "    model.compile(model.optimizer, 'mse', run_eagerly=True)\n    history ="),
        "eager",
    ),
    "on batch": Loop(ON_BATCH, "norm"),
    "sorted": Loop(ON_BATCH, "sorted"),
    "generated": Loop(GENERATED, "frozen"),
    "fit words": Loop(FIT, "words"),
    "fit with decay": Loop(FIT, "decay"),
}
TF_MORE = {
    **BOTH,
    "own step": Loop(TF_STEP, "own"),
    "replicas": Loop(TF_REPLICAS, "two replicas"),
    "three replicas": Loop(TF_REPLICAS.replace("len(x), 10", "len(x), 8").replace("+ 10", "+ 8"), "three replicas"),
    "fit on replicas": Loop(FIT.replace("batch_size=8", "batch_size=10"), "two replicas"),
    "scaled": Loop(TF_SCALED, "small scale"),
    "scaled by hand": Loop(TF_BY_HAND, "float16"),
    "counted": Loop(TF_COUNTED, "own"),
    "in variables": Loop(TF_VARIABLES),
    "traced rate": Loop(TF_TRACED_RATE, "schedule", options={"learning_rate": RATE}),
    "two inputs": Loop(TF_INPUTS, "two inputs"),
    "words": Loop(TF_SIMPLE, "words"),
    "frozen": Loop(TF_SIMPLE, "frozen"),
    "deep": Loop(TF_SIMPLE.replace("float(loss)", "float(full)"), "deep"),
    "logits": Loop(TF_LOGITS, "logits"),
    "even": Loop(TF_EVEN),
    "with decay": Loop(TF_FUNCTION, "decay"),
    "average": Loop(TF_SIMPLE.replace("float(loss)", "float(full)"), "average"),
    "sum": Loop(TF_SUM, "sum"),
    "clipped as meant": Loop(TF_CLIPPED, options=CLIPPED),
}
JAX_MORE = {
    **BOTH,
    "own step": Loop(JAX_STEP, "own"),
    "scaled": Loop(JAX_SCALED, "small scale"),
    "scale that moves": Loop(JAX_SCALED, "float16"),
    "epoch": Loop(JAX_EPOCH, "norm"),
    "pmapped": Loop(JAX_PMAPPED, "deep"),
    "counted": Loop(JAX_COUNTED, "own"),
    "two inputs": Loop(JAX_INPUTS, "two inputs"),
    "words": Loop(JAX_SIMPLE, "words"),
    "frozen": Loop(JAX_SIMPLE, "frozen"),
    "deep": Loop(
        JAX_SIMPLE.replace("float(loss)", "float(full)").replace("(_, (loss, ntv))", "(full, (loss, ntv))"), "deep"
    ),
    "logits": Loop(JAX_LOGITS, "logits"),
    "even": Loop(JAX_EVEN),
    "with decay": Loop(JAX_JITTED, "decay"),
    "traced rate": Loop(JAX_RATES, "schedule", options={"learning_rate": RATE}),
    "clipped as meant": Loop(JAX_CLIPPED, "dropout", options=CLIPPED),
}
COMPILE = """class Own(keras.Model):
    def compile(self, given):
        super().compile(optimizer=given)

"""
WRAPPED = (
    ("class Own(keras.Sequential):\n", COMPILE),
    (
        "    model.__class__ = Own\n    model.fit",
        "    own = Own(model.inputs, model.outputs)\n    own.compile('sgd')\n    own.fit",
    ),
)


def wrapped(text):
    """Return the loop of another model that has the audited one's variables."""
    for old, new in WRAPPED:
        text = text.replace(old, new)
    return text


TF_MORE["wrapped"] = Loop(wrapped(TF_STEP), "own")
JAX_MORE["wrapped"] = Loop(wrapped(JAX_STEP), "own")
TF_MORE |= TF_LATER
JAX_MORE |= JAX_LATER
MORE = {"tensorflow": TF_MORE, "jax": JAX_MORE}[ENGINE]
LOOPS = RIGHT | MORE
