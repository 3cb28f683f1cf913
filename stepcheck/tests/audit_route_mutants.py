"""Edits of the right loops of audit_routes.py, each with the cause that it plants; pairs of causes; unknown faults."""

import keras
from audit_models import JAX as MODELS_JAX
from audit_models import TF as MODELS_TF
from audit_mutants import ADD, DIVIDE, EACH, of

APPLY = "model.optimizer.apply_gradients(zip(grads, model.trainable_variables))"
APPLY_OTHER = "other.apply_gradients(zip(grads[2:], model.trainable_variables[2:]))"
STEP = {"tensorflow": "step", "jax": "count"}[keras.backend.backend()]
JAX_APPLY = "tv, ov = optimizer.stateless_apply(ov, grads, tv)"


def on_both():
    """Return edits of what both engines have."""
    return [
        of("mean of means", "fit accumulates", ("batch_size=5", "batch_size=6")),
        of("window carried over the epoch", "fit accumulates", ("batch_size=5", "batch_size=4")),
        of(
            "schedule by microbatch",
            "fit accumulates",
            ('    model.compile(keras.optimizers.SGD(0.05, gradient_accumulation_steps=2), "mse")\n', ""),
        ),
        of("weights ignored", "fit weighted", ("sample_weight=w, ", "")),
        of("weights squared", "fit weighted", ("sample_weight=w,", "sample_weight=w**2,")),
        of("labels of other rows", "on batch", ("y[rows])", "y[start : start + 8])")),
        of("same order every pass", "on batch", (EACH, "default_rng(7)")),
        of(
            "rows never used",
            "on batch",
            ("range(0, len(x), 8)", "range(0, len(x) - 8, 8)"),
            ("permutation(len(x))", "permutation(len(x) - 4)"),
        ),
        of(
            "batches of few labels",
            "sorted",
            (f"np.random.{EACH}.permutation(len(x))", "np.arange(20) if epoch else np.roll(np.arange(20), -8)"),
            ("range(0, len(x), 8)", "(0, 8, 16) if epoch else (0, 12, 8)"),
            ("[start : start + 8]", "[start : start + (4 if start == (16 if epoch else 8) else 8)]"),
        ),
        of("labels shifted", "on batch", ("y[rows])", "y[(rows + 1) % len(x)])")),
        of("labels shifted", "generated", ("y[rows]", "np.roll(y[rows], 1)")),
        of("drawn with replacement", "on batch", ("permutation(len(x))", "integers(0, len(x), len(x))")),
        of(
            "shuffle window",
            "on batch",
            (
                f"np.random.{EACH}.permutation(len(x))",
                "np.concatenate([i + np.random.default_rng(epoch + i).permutation(5) for i in range(0, 20, 5)])",
            ),
        ),
        of("broadcast", "own step", ("y[:, None]", "y"), ("a, b = data", "a, b = data; b = ops.reshape(b, (-1,))")),
        of("inference mode", "own step", ("training=True", "training=False")),
        of(
            "last window dropped",
            "counted",
            (" or start + 4 >= len(x)", ""),
            ("    for epoch in range(3):\n", "    for epoch in range(3):\n        total, count = None, 0\n"),
        ),
        of("window carried over the epoch", "counted", (" or start + 4 >= len(x)", "")),
        of(
            "only the last microbatch",
            "counted",
            ("grads if total is None else [t + g for t, g in zip(total, grads)]", "grads"),
            ("t / count", "t"),
        ),
        of("summed over microbatches", "counted", ("t / count", "t")),
        of(
            "broadcast",
            "generated",
            (
                "    def batches",
                "    def loss(a, b):\n        return ops.mean((ops.reshape(a, (-1,)) - b) ** 2)\n\n"
                "    model.compile(model.optimizer, loss)\n\n    def batches",
            ),
        ),
        of("from_logits", "logits", ("from_logits=True", "from_logits=False")),
        of(
            "schedule frozen",
            "traced rate",
            (f"rate({STEP})", "rate(0)"),
        ),
    ]


LATER_TF = [
    of("same batches every pass", "dataset", (".shuffle(len(x), seed=5).batch(8)", ".batch(8).shuffle(9, seed=4)")),
    of("padded places counted", "tokens", ("tf.reduce_sum(error) / tf.reduce_sum(mask)", "tf.reduce_mean(error)")),
    of("penalty added twice", "function", ("sum(model.losses)", "2 * sum(model.losses)")),
    of(
        "steps of zeros",
        "accumulated",
        (
            "                total = [t + g for t, g in zip(total, grads)]\n",
            "                total = [t + g for t, g in zip(total, grads)]\n"
            "                if part is not parts[-1]:\n"
            "                    optimizer.apply_gradients(zip([0 * t for t in total], variables))\n",
        ),
    ),
    of(
        "decayed twice",
        "decayed",
        ("    @tf.function", "    model.optimizer.weight_decay = 0.004\n\n    @tf.function"),
    ),
    of(
        "second pass in training mode",
        "function",
        (
            "tf.constant(y[rows]))\n",
            "tf.constant(y[rows]))\n            model(x[rows], training=True)\n",
        ),
    ),
    of(
        "printed: summed over microbatches",
        "accumulated",
        ("model.optimizer\n", "model.optimizer\n    printed = []\n"),
        ("        order =", "        running = 0.0\n        order ="),
        ("loss = ops.sum(error)\n", "loss = ops.sum(error)\n                running += float(ops.mean(error))\n"),
        (
            "zip(final, variables))\n",
            "zip(final, variables))\n        printed.append(running / 2)\n    return printed\n",
        ),
    ),
]
LATER_JAX = [
    of("replicas drift apart", "pmapped", ('        grads = jax.lax.pmean(grads, "replicas")\n', "")),
    of("replicas drift apart", "pmapped", ('pmean(grads, "replicas")', 'pmean(grads[:2], "replicas") + grads[2:]')),
    of("summed over replicas", "pmapped", ("pmean(grads,", "psum(grads,")),
    of("penalty added twice", "jitted", ("+ sum(own), ntv", "+ 2 * sum(own), ntv")),
    of(
        "state of one microbatch",
        "accumulated with statistics",
        ("grads, ntv = gradient(", "grads, new = gradient("),
        ("            own =", "            ntv = new\n            own ="),
    ),
]
TF = [
    *LATER_TF,
    *on_both(),
    of("penalty forgotten", "own step", (" + sum(self.losses)", "")),
    of(
        "applied twice",
        "own step",
        (
            '        return {"loss"',
            '        self.optimizer.apply_gradients(zip(grads, self.trainable_variables))\n        return {"loss"',
        ),
    ),
    of("loss not scaled", "scaled", ("            loss = model.optimizer.scale_loss(loss)\n", "")),
    of("loss not scaled", "scaled by hand", ("gradient(scaled,", "gradient(loss,")),
    of("loss scale left in", "scaled by hand", ("            grads = [g / scale for g in grads]\n", "")),
    of(
        "clip before unscale",
        "scaled",
        (f"        {APPLY}", f"        grads, _ = tf.clip_by_global_norm(grads, 1.0)\n        {APPLY}"),
    ),
    of("inference mode", "scaled", ("training=True", "training=False")),
    of("broadcast", "scaled", ("b[:, None]", "b")),
    of("summed over replicas", "replicas", ('tf.cast(rows, "float32")', 'tf.cast(len(a), "float32")')),
    of("summed over replicas", "three replicas", ('tf.cast(rows, "float32")', 'tf.cast(tf.shape(a)[0], "float32")')),
    of("mean of means", "three replicas", ('tf.cast(rows, "float32")', 'tf.cast(tf.shape(a)[0] * num, "float32")')),
    of("divided by the replicas twice", "replicas", ('tf.cast(rows, "float32")', 'tf.cast(rows, "float32") / num')),
    of("penalty once per replica", "replicas", ("sum(model.losses) / num", "sum(model.losses)")),
    of("penalty once per replica", "three replicas", ("sum(model.losses) / num", "sum(model.losses)")),
    of("penalty forgotten", "replicas", (" + sum(model.losses) / num", "")),
    of("divided by the full batch", "three replicas", ('tf.cast(rows, "float32")', "8.0")),
    of("inference mode", "replicas", ("training=True", "training=False")),
    of("broadcast", "replicas", ("error = (b[:, None]", "error = (b"), ("/ tf.cast(rows", "/ 5 / tf.cast(rows")),
    of(
        "clip per microbatch",
        "even",
        (
            "grads = tape.gradient(loss, variables)",
            "grads, _ = tf.clip_by_global_norm(tape.gradient(loss, variables), 0.4)",
        ),
    ),
    of(
        "stale gradients",
        "deep",
        (f"            {APPLY}", f"            {APPLY.replace('grads', 'held')}\n            held = grads"),
        ("    printed = []", "    printed, held = [], [tf.zeros_like(v) for v in model.trainable_variables]"),
    ),
    of(
        "momentum by hand",
        "deep",
        (
            f"            {APPLY}",
            f"            held = [0.9 * h + g for h, g in zip(held, grads)]\n            {APPLY}".replace(
                "(grads,", "(held,"
            ),
        ),
        ("    printed = []", "    printed, held = [], [tf.zeros_like(v) for v in model.trainable_variables]"),
    ),
    of(
        "gradients swapped",
        "deep",
        (f"            {APPLY}", f"            grads[1], grads[3] = grads[3], grads[1]\n            {APPLY}"),
    ),
    of("softmax twice", "logits", ("loss_fn(y[rows], output)", "loss_fn(y[rows], tf.nn.softmax(output))")),
    of(
        "rate frozen in a trace",
        "traced rate",
        ("optimizer.learning_rate.assign(now)", "optimizer.learning_rate.assign(rates[-1])"),
        ("            update(", "            rates.append(rate(step))\n            update("),
        ("    @tf.function", "    rates = []\n\n    @tf.function"),
    ),
    of("schedule one ahead", "traced rate", ("rate(step)", "rate(step + 1)")),
    of(
        "variable left out",
        "deep",
        ("tape.gradient(full, model.trainable_variables)", "tape.gradient(full, model.trainable_variables[:-1])"),
        ("zip(grads, model.trainable_variables)", "zip(grads, model.trainable_variables[:-1])"),
    ),
    of("clip forgotten", "clipped as meant", ("            grads, _ = tf.clip_by_global_norm(grads, 0.4)\n", "")),
    of("clipped otherwise", "clipped as meant", ("clip_by_global_norm(grads, 0.4)", "clip_by_global_norm(grads, 0.2)")),
    of(
        "frozen variable trained",
        "frozen",
        (
            "            with tf.GradientTape() as tape:\n",
            "            with tf.GradientTape() as tape:\n                tape.watch(model.layers[0].kernel.value)\n",
        ),
        (
            "tape.gradient(full, model.trainable_variables)",
            "tape.gradient(full, [*(v.value for v in model.trainable_variables), model.layers[0].kernel.value])",
        ),
        (
            f"            {APPLY}",
            f"            {APPLY}\n            model.layers[0].kernel.assign_sub(0.01 * grads[-1])",
        ),
    ),
    of(
        "variable updated twice",
        "deep",
        (f"            {APPLY}", f"            {APPLY}\n            {APPLY_OTHER}"),
        ("    printed = []", "    printed, other = [], keras.optimizers.Adam(0.01)"),
    ),
    of(
        "optimizer re-created",
        "deep",
        ("range(2):", "range(4):\n        optimizer = keras.optimizers.Adam(0.01)"),
        ("model.optimizer.", "optimizer."),
    ),
    of("printed: without penalty", "deep", ("float(full)", "float(loss)")),
    of("printed: last batch", "deep", ("printed.append(total / count)", "printed.append(float(full))")),
    of("penalty once per microbatch", "even", ("+ o ", "+ len(parts) * o ")),
    of(
        "only the last microbatch",
        "in variables",
        ("            held.assign_add(grad / 2)", "            held.assign_add(grad / 2 * first)"),
        ("def gradient(a, b)", "def gradient(a, b, first)"),
        ("tf.constant(y[rows]))", "tf.constant(y[rows]), float(step % 2 == 0))"),
    ),
    of("not reset", "in variables", ("        for held in sums:\n            held.assign(tf.zeros_like(held))\n", "")),
    of("summed over microbatches", "in variables", ("grad / 2", "grad")),
    of("penalty forgotten", "sum", ("full = loss + sum(model.losses)", "full = loss")),
    of("applied twice", "with decay", ("        return loss\n", f"        {APPLY}\n        return loss\n")),
    of("broadcast", "words", ("y[rows][:, None]", "y[rows]")),
    of("broadcast", "two inputs", ("y[rows][:, None]", "y[rows]")),
]

JAX = [
    *LATER_JAX,
    *on_both(),
    of("penalty forgotten", "own step", (" + sum(own)", "")),
    of("penalty forgotten", "epoch", (" + sum(own)", "")),
    of("seeds thrown away", "own step", ("(loss, ntv), grads", "(loss, _), grads")),
    of("loss not scaled", "scaled", ("            loss = optimizer.scale_loss(loss)", "            loss = 1.0 * loss")),
    of(
        "loss scale frozen in a trace",
        "scale that moves",
        ("with keras.StatelessScope(zip(optimizer.variables, ov)):", "if True:"),
    ),
    of(
        "clip before unscale",
        "scaled",
        (
            f"        {JAX_APPLY}",
            f"        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in grads))\n"
            f"        grads = [g * jnp.minimum(1.0, 0.4 / norm) for g in grads]\n        {JAX_APPLY}",
        ),
    ),
    of("inference mode", "scaled", ("training=True", "training=False")),
    of(
        "clip per microbatch",
        "even",
        (
            f"            {ADD.replace('total =', '    total =')}",
            f"                norm = jnp.sqrt(sum(jnp.sum(g**2) for g in grads))\n"
            f"                grads = [g * jnp.minimum(1.0, 0.4 / norm) for g in grads]\n                {ADD}",
        ),
    ),
    of(
        "stale gradients",
        "deep",
        (JAX_APPLY, f"{JAX_APPLY.replace('grads', 'held')}; held = grads"),
        ("    printed = []", "    printed, held = [], [0 * v for v in tv]"),
    ),
    of(
        "momentum by hand",
        "deep",
        (JAX_APPLY, f"held = [0.9 * h + g for h, g in zip(held, grads)]; {JAX_APPLY.replace('grads', 'held')}"),
        ("    printed = []", "    printed, held = [], [0 * v for v in tv]"),
    ),
    of("gradients swapped", "deep", (JAX_APPLY, f"grads[1], grads[3] = grads[3], grads[1]; {JAX_APPLY}")),
    of("softmax twice", "logits", ("loss_fn(b, output)", "loss_fn(b, jax.nn.softmax(output))")),
    of(
        "rate frozen in a trace",
        "traced rate",
        ("ov = [*ov[:place], now, *", "ov = [*ov[:place], jnp.float32(rates[-1]), *"),
        ("            tv, ntv, ov = step(", "            rates.append(rate(count))\n            tv, ntv, ov = step("),
        ("    @jax.jit", "    rates = []\n\n    @jax.jit"),
    ),
    of(
        "variable left out",
        "deep",
        ("build(model.trainable_variables)", "build(model.trainable_variables[:-1])"),
        (JAX_APPLY, "some, ov = optimizer.stateless_apply(ov, grads[:-1], tv[:-1]); tv = [*some, tv[-1]]"),
    ),
    of("printed: without penalty", "deep", ("float(full)", "float(loss)")),
    of("printed: last batch", "deep", ("printed.append(total / count)", "printed.append(float(full))")),
    of("optimizer state thrown away", "with decay", ("tv, ntv, ov = step", "tv, ntv, _ = step")),
    of(
        "update thrown away",
        "epoch",
        ("            return (tv, ntv, ov), loss", "            return (carry[0], ntv, ov), loss"),
    ),
    of("broadcast", "words", ("b[:, None]", "b")),
]
TF += MODELS_TF
JAX += MODELS_JAX
MUTANTS = {"tensorflow": TF, "jax": JAX}[keras.backend.backend()]

# ---- two causes at once, of different stages: what was edited for each of them ----

PAIRS = [
    *[("accumulated", "same order every pass", other) for other in ("mean of means", "penalty forgotten", "not reset")],
    ("accumulated", "rows never used", "divided twice"),
    ("accumulated", "same order every pass", "optimizer re-created"),
    ("accumulated", "summed over microbatches", "optimizer re-created"),
    ("accumulated", "penalty divided", "applied twice"),
    ("accumulated", "same order every pass", "decay by microbatch"),
    ("accumulated", "only the first microbatch", "applied twice"),
    ("fit accumulates", "window carried over the epoch", "schedule by microbatch"),
    ("fit accumulates", "mean of means", "schedule by microbatch"),
    ("on batch", "same order every pass", "labels shifted"),
    ("own step", "inference mode", "penalty forgotten"),
    ("deep", "stale gradients", "printed: last batch"),
]
TF_PAIRS = [
    ("simple", "inference mode", "printed: last batch"),
    ("simple", "inference mode", "broadcast"),
    ("function", "inference mode", "penalty forgotten"),
    ("function", "broadcast", "applied twice"),
    ("replicas", "inference mode", "summed over replicas"),
    ("scaled", "inference mode", "loss not scaled"),
    ("own step", "broadcast", "applied twice"),
]
JAX_PAIRS = [
    ("jitted", "inference mode", "penalty forgotten"),
    ("jitted", "broadcast", "optimizer state thrown away"),
    ("simple", "seeds thrown away", "printed: last batch"),
    ("own step", "penalty forgotten", "seeds thrown away"),
    ("accumulated", "first microbatch lost", "optimizer re-created"),
    ("scaled", "inference mode", "loss not scaled"),
]

# ---- faults that nothing explains: (loop, stage, edits) ----

ERROR = {"tensorflow": "(y[rows][:, None] - output)", "jax": "(b[:, None] - output)"}[keras.backend.backend()]
GRADS = {"tensorflow": (APPLY, "grads"), "jax": (JAX_APPLY, "grads")}[keras.backend.backend()]


QUIET = ("return printed", "return None")


def changed(text):
    """Return the edit that hands over other gradients."""
    return (GRADS[0], f"grads = {text}; {GRADS[0]}")


UNKNOWN = [
    ("simple", "gradient", ((f"{ERROR} ** 2", f"ops.abs({ERROR}) ** 1.5"), QUIET)),
    ("accumulated", "gradient", ((DIVIDE, "t / len(rows) + 0.3 * abs(t) ** 0.5 + o"),)),
    ("traced rate", "apply", ((f"rate({STEP})", f"0.7 * rate({STEP})"),)),
]
ALL = [*TF, *JAX]
