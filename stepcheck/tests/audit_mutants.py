"""Edits of right loops' texts, each with the cause that it plants."""

from typing import NamedTuple

import keras


class Mutant(NamedTuple):
    cause: str
    loop: str
    edits: tuple


def of(cause, loop, *edits):
    return Mutant(cause, loop, edits)


MEAN = ("loss = ops.sum(error)", "loss = ops.mean(error)")
JAX_MEAN = ("return ops.sum(error)", "return ops.mean(error)")
ADD = "total = [t + g for t, g in zip(total, grads)]"
DIVIDE = "t / len(rows) + o"
EACH = "default_rng(epoch)"


def accumulated(mean):
    """Return what can be wrong with an accumulated gradient."""
    return [
        of("mean of means", "accumulated", mean, (DIVIDE, "t / len(parts) + o")),
        of("summed over microbatches", "accumulated", mean, (DIVIDE, "t + o")),
        of("divided by a full window", "accumulated", mean, (DIVIDE, "t / 3 + o")),
        of("divided by the full batch", "accumulated", (DIVIDE, "t / 12 + o")),
        of("never divided", "accumulated", (DIVIDE, "t + o")),
        of("divided twice", "accumulated", (DIVIDE, "t / len(rows) / len(parts) + o")),
        of("only the last microbatch", "accumulated", (ADD, "total = list(grads)")),
        of("only the last microbatch", "accumulated", mean, (ADD, "total = list(grads)"), (DIVIDE, "t + o")),
        of("only the first microbatch", "accumulated", (ADD, f"if part is parts[0]: {ADD}")),
        of("first microbatch lost", "accumulated", (ADD, f"if part is not parts[0]: {ADD}")),
        of("last microbatch lost", "accumulated", (ADD, f"if part is not parts[-1]: {ADD}")),
        of("penalty forgotten", "accumulated", (DIVIDE, "t / len(rows) + 0 * o")),
        of("penalty once per microbatch", "accumulated", (DIVIDE, "t / len(rows) + len(parts) * o")),
        of("penalty divided", "accumulated", (DIVIDE, "t / len(rows) + o / len(parts)")),
        of("same order every pass", "accumulated", (EACH, "default_rng(7)")),
        of("rows never used", "accumulated", ("permutation(len(x))", "permutation(len(x) - 3)")),
        of(
            "batches overlap",
            "accumulated",
            (f"np.random.{EACH}.permutation(len(x))", "np.arange(len(x))"),
            ("range(0, len(x), 12)", "range(0, len(x), 4)"),
            ("[start : start + 12]", "[start : start + 5]"),
        ),
    ]


TF = [
    *accumulated(MEAN),
    of("ascent", "accumulated", ("loss = ops.sum(error)", "loss = -ops.sum(error)")),
    of(
        "not reset",
        "accumulated",
        ("            total = [tf.zeros_like(v) for v in variables]\n", ""),
        ("    for epoch", "    total = [tf.zeros_like(v) for v in variables]\n    for epoch"),
    ),
    of("inference mode", "simple", ("training=True", "training=False")),
    of("inference mode", "function", (", training=True", "")),
    of("inference mode", "dataset", (", training=True", "")),
    of("broadcast", "simple", ("y[rows][:, None]", "y[rows]")),
    of("broadcast", "function", ("b[:, None]", "b")),
    of(
        "never divided",
        "simple",
        ("tf.reduce_mean((y[rows][:, None] - output) ** 2)", "(y[rows][:, None] - output) ** 2"),
        ("float(loss)", "float(ops.mean(loss))"),
    ),
    of(
        "broadcast",
        "simple",
        ("tf.reduce_mean((y[rows][:, None] - output) ** 2)", "(y[rows] - output) ** 2"),
        ("float(loss)", "0 * float(ops.mean(loss))"),
        ("printed.append(total / count)", ""),
        ("return printed", "return None"),
    ),
    of("broadcast", "decayed", ("tf.squeeze(output, -1)", "output")),
    of("from_logits", "classes", ("from_logits=True", "from_logits=False")),
    of("from_logits", "smooth", ("from_logits=True", "from_logits=False")),
    of("smoothing missing", "smooth", (", label_smoothing=0.1", "")),
    of("weights ignored", "weighted", (", sample_weight=w[rows]", "")),
    of("weights squared", "weighted", ("sample_weight=w[rows]", "sample_weight=w[rows] ** 2")),
    of(
        "divided by the weights",
        "weighted",
        ("MeanSquaredError()", "MeanSquaredError(reduction='mean_with_sample_weight')"),
    ),
    of("divided by the rows", "by weights", ("reduction='mean_with_sample_weight'", "")),
    of(
        "mean of row means",
        "tokens",
        (
            "tf.reduce_sum(error) / tf.reduce_sum(mask)",
            "tf.reduce_mean(tf.reduce_sum(error, 1) / tf.reduce_sum(mask, 1))",
        ),
    ),
    of("padding counted", "padded", ("/ tf.reduce_sum(weight)", "/ len(weight)")),
    of("padding trained on", "padded", ("error * weight) / tf.reduce_sum(weight)", "error) / len(weight)")),
    of("penalty forgotten", "function", (" + sum(model.losses)", "")),
    of(
        "applied twice",
        "function",
        (
            "        return loss\n",
            "        model.optimizer.apply_gradients(zip(grads, model.trainable_variables))\n        return loss\n",
        ),
    ),
    of(
        "applied twice",
        "accumulated",
        (
            "            optimizer.apply_gradients(zip(final, variables))",
            "            for _ in range(2):\n                optimizer.apply_gradients(zip(final, variables))",
        ),
    ),
    of(
        "optimizer re-created",
        "accumulated",
        ("optimizer.apply_gradients", "keras.optimizers.Adam(0.01).apply_gradients"),
    ),
    of(
        "schedule by microbatch",
        "scheduled",
        (ADD, f"{ADD}\n                optimizer.iterations.assign_add(1)"),
        (
            "optimizer.apply_gradients(zip(final, variables))",
            "optimizer.apply_gradients(zip(final, variables)); optimizer.iterations.assign_sub(1)",
        ),
    ),
    of("schedule by microbatch", "rates", ("            step += 1\n", ""), (ADD, f"{ADD}\n                step += 1")),
    of("schedule frozen", "rates", ("rate(step)", "rate(0)")),
    of("schedule one ahead", "rates", ("rate(step)", "rate(step + 1)")),
    of("decay by microbatch", "accumulated", (ADD, f"{ADD}\n                for v in variables: v.assign(v * 0.99)")),
    of(
        "weights moved inside a window",
        "accumulated",
        (ADD, f"{ADD}\n                variables[0].assign_add(grads[0])"),
    ),
    of("printed: mean of means", "simple", ("float(loss) * len(rows), count + len(rows)", "float(loss), count + 1")),
    of("printed: last batch", "simple", ("printed.append(total / count)", "printed.append(float(loss))")),
    of(
        "printed: not reset",
        "simple",
        ("        total, count = 0.0, 0\n", ""),
        ("    printed = []", "    printed, total, count = [], 0.0, 0"),
    ),
    of(
        "printed: sum", "simple", ("total + float(loss) * len(rows)", "total + float(loss)"), ("total / count", "total")
    ),
]

JAX = [
    of("ascent", "accumulated", ("return ops.sum(error)", "return -ops.sum(error)")),
    *accumulated(JAX_MEAN),
    of(
        "not reset",
        "accumulated",
        ("            total = [0 * v for v in tv]\n", ""),
        ("    for epoch", "    total = [0 * v for v in tv]\n    for epoch"),
    ),
    of("inference mode", "jitted", ("training=True", "training=False")),
    of("inference mode", "simple", ("training=True", "training=False")),
    of("broadcast", "jitted", ("b[:, None]", "b")),
    of(
        "broadcast",
        "scope",
        ("keras.losses.mean_squared_error(b[:, None], model(a, training=True))", "(b - model(a, training=True)) ** 2"),
    ),
    of("from_logits", "classes", ("from_logits=True", "from_logits=False")),
    of(
        "weights ignored",
        "weighted",
        ("jnp.sum(c * (b - output[:, 0]) ** 2) / jnp.sum(c)", "jnp.mean((b - output[:, 0]) ** 2)"),
    ),
    of("summed over microbatches", "scanned", ("t / 10", "t / 5")),
    of("penalty forgotten", "jitted", (" + sum(own)", "")),
    of("statistics thrown away", "with statistics", ("tv, ntv, ov = step", "tv, _, ov = step")),
    of("seeds thrown away", "simple", ("(_, (loss, ntv)), grads", "(_, (loss, _)), grads")),
    of("update thrown away", "jitted", ("tv, ntv, ov = step", "_, ntv, ov = step")),
    of("optimizer state thrown away", "jitted", ("tv, ntv, ov = step", "tv, ntv, _ = step")),
    of(
        "optimizer re-created",
        "accumulated",
        (
            "            tv, ov = optimizer",
            "            optimizer = keras.optimizers.Adam(0.01)\n"
            "            optimizer.build(model.trainable_variables)\n"
            "            ov = [v.value for v in optimizer.variables]\n"
            "            tv, ov = optimizer",
        ),
    ),
    of(
        "applied twice",
        "accumulated",
        (
            "            tv, ov = optimizer.stateless_apply(ov, final, tv)",
            "            for _ in range(2):\n                tv, ov = optimizer.stateless_apply(ov, final, tv)",
        ),
    ),
    of("decay by microbatch", "accumulated", (ADD, f"{ADD}\n                tv = [0.99 * v for v in tv]")),
    of("printed: last batch", "simple", ("printed.append(total / count)", "printed.append(float(loss))")),
]

MUTANTS = {"tensorflow": TF, "jax": JAX}[keras.backend.backend()]
ALL = [*TF, *JAX]
