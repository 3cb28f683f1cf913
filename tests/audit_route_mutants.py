"""Edits of the right loops of audit_routes.py, each with the cause that it plants; pairs of causes; unknown faults."""

import keras
from audit_mutants import ADD, DIVIDE, EACH, JAX_MEAN, MEAN, of

APPLY = "model.optimizer.apply_gradients(zip(grads, model.trainable_variables))"
JAX_APPLY = "tv, ov = optimizer.stateless_apply(ov, grads, tv)"


def on_both(mean):
    """Return edits of what both engines have."""
    return [
        of("mean of means", "fit accumulates", ("batch_size=5", "batch_size=6")),
        of("window carried over the epoch", "fit accumulates", ("batch_size=5", "batch_size=4")),
        of("schedule by microbatch", "fit accumulates", ('    model.compile(keras.optimizers.SGD(0.05, gradient_accumulation_steps=2), "mse")\n', "")),
        of("weights ignored", "fit weighted", ("sample_weight=w, ", "")),
        of("weights squared", "fit weighted", ("sample_weight=w,", "sample_weight=w**2,")),
        of("labels of other rows", "on batch", ("y[rows])", "y[start : start + 8])")),
        of("same order every pass", "on batch", (EACH, "default_rng(7)")),
        of("rows never used", "on batch", ("range(0, len(x), 8)", "range(0, len(x) - 8, 8)"), ("permutation(len(x))", "permutation(len(x) - 4)")),
        of("labels shifted", "on batch", ("y[rows])", "y[(rows + 1) % len(x)])")),
        of("labels shifted", "generated", ("y[rows]", "np.roll(y[rows], 1)")),
        of("drawn with replacement", "on batch", ("permutation(len(x))", "integers(0, len(x), len(x))")),
        of("shuffle window", "on batch", (f"np.random.{EACH}.permutation(len(x))", "np.concatenate([i + np.random.default_rng(epoch + i).permutation(5) for i in range(0, 20, 5)])")),
        of("broadcast", "own step", ("y[:, None]", "y"), ("a, b = data", "a, b = data; b = ops.reshape(b, (-1,))")),
        of("inference mode", "own step", ("training=True", "training=False")),
        of("last window dropped", "counted", (" or start + 4 >= len(x)", ""), ("    for epoch in range(3):\n", "    for epoch in range(3):\n        total, count = None, 0\n")),
        of("window carried over the epoch", "counted", (" or start + 4 >= len(x)", "")),
        of("only the last microbatch", "counted", ("grads if total is None else [t + g for t, g in zip(total, grads)]", "grads"), ("t / count", "t")),
        of("summed over microbatches", "counted", ("t / count", "t")),
        of("broadcast", "generated", ("    def batches", "    def loss(a, b):\n        return ops.mean((ops.reshape(a, (-1,)) - b) ** 2)\n\n    model.compile(model.optimizer, loss)\n\n    def batches")),
        of("from_logits", "logits", ("from_logits=True", "from_logits=False")),
        of("printed: last batch", "fit", ('history.history["loss"]', "[float(model.evaluate(x[16:], y[16:], verbose=0)) * 0 + float(model.test_on_batch(x[16:], y[16:]))][:0] or None")) if False else None,
        of("schedule frozen", "traced rate", ("rate(step)" if keras.backend.backend() == "tensorflow" else "rate(count)", "rate(0)")),
    ]


TF = [
    *[each for each in on_both(MEAN) if each],
    of("penalty forgotten", "own step", (" + sum(self.losses)", "")),
    of("applied twice", "own step", ('        return {"loss"', '        self.optimizer.apply_gradients(zip(grads, self.trainable_variables))\n        return {"loss"')),
    of("loss not scaled", "scaled", ("            loss = model.optimizer.scale_loss(loss)\n", "")),
    of("loss not scaled", "scaled by hand", ("gradient(scaled,", "gradient(loss,")),
    of("loss scale left in", "scaled by hand", ("            grads = [g / scale for g in grads]\n", "")),
    of("clip before unscale", "scaled", (f"        {APPLY}", f"        grads, _ = tf.clip_by_global_norm(grads, 1.0)\n        {APPLY}")),
    of("inference mode", "scaled", ("training=True", "training=False")),
    of("penalty forgotten", "scaled", (" + sum(model.losses)", "")),
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
    of("clip per microbatch", "even", ("grads = tape.gradient(loss, variables)", "grads, _ = tf.clip_by_global_norm(tape.gradient(loss, variables), 0.4)")),
    of("stale gradients", "deep", (f"            {APPLY}", f"            {APPLY.replace('grads', 'held')}\n            held = grads"), ("    printed = []", "    printed, held = [], [tf.zeros_like(v) for v in model.trainable_variables]")),
    of("momentum by hand", "deep", (f"            {APPLY}", f"            held = [0.9 * h + g for h, g in zip(held, grads)]\n            {APPLY.replace('grads', 'held')}"), ("    printed = []", "    printed, held = [], [tf.zeros_like(v) for v in model.trainable_variables]")),
    of("gradients swapped", "deep", (f"            {APPLY}", f"            grads[1], grads[3] = grads[3], grads[1]\n            {APPLY}")),
    of("softmax twice", "logits", ("loss_fn(y[rows], output)", "loss_fn(y[rows], tf.nn.softmax(output))")),
    of("rate frozen in a trace", "traced rate", ("optimizer.learning_rate.assign(now)", "optimizer.learning_rate.assign(rates[-1])"), ("            update(", "            rates.append(rate(step))\n            update("), ("    @tf.function", "    rates = []\n\n    @tf.function")),
    of("schedule one ahead", "traced rate", ("rate(step)", "rate(step + 1)")),
    of("variable left out", "deep", ("tape.gradient(full, model.trainable_variables)", "tape.gradient(full, model.trainable_variables[:2])"), ("zip(grads, model.trainable_variables)", "zip(grads, model.trainable_variables[:2])")),
    of("printed: without penalty", "deep", ("printed.append(total / count)", "printed.append(1.0 * total / count)")),
    of("penalty once per microbatch", "even", ("+ o ", "+ len(parts) * o ")),
    of("first microbatch lost", "in variables", ("            held.assign_add(grad / 2)", "            held.assign_add(grad / 2 * first)"), ("def gradient(a, b)", "def gradient(a, b, first)"), ("tf.constant(y[rows]))", "tf.constant(y[rows]), float(step % 2 == 0))")),
    of("not reset", "in variables", ("        for held in sums:\n            held.assign(tf.zeros_like(held))\n", "")),
    of("summed over microbatches", "in variables", ("grad / 2", "grad")),
    of("never divided", "sum", ("tf.reduce_sum(", "(")) if False else of("penalty forgotten", "sum", ("full = loss + sum(model.losses)", "full = loss")),
    of("applied twice", "with decay", ("        return loss\n", f"        {APPLY}\n        return loss\n")),
    of("broadcast", "words", ("y[rows][:, None]", "y[rows]")),
    of("broadcast", "two inputs", ("y[rows][:, None]", "y[rows]")),
]

JAX = [
    *[each for each in on_both(JAX_MEAN) if each],
    of("penalty forgotten", "own step", (" + sum(own)", "")),
    of("statistics thrown away", "epoch", ("(loss, ntv), grads", "(loss, _), grads")) if False else of("penalty forgotten", "epoch", (" + sum(own)", "")),
    of("seeds thrown away", "own step", ("(loss, ntv), grads", "(loss, _), grads")),
    of("loss not scaled", "scaled", ("            loss = optimizer.scale_loss(loss)", "            loss = 1.0 * loss")),
    of("loss scale frozen in a trace", "scale that moves", ("with keras.StatelessScope(zip(optimizer.variables, ov)):", "if True:")),
    of("clip before unscale", "scaled", (f"        {JAX_APPLY}", f"        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in grads))\n        grads = [g * jnp.minimum(1.0, 0.4 / norm) for g in grads]\n        {JAX_APPLY}")),
    of("inference mode", "scaled", ("training=True", "training=False")),
    of("clip per microbatch", "even", (f"            {ADD.replace('total =', '    total =')}", f"                norm = jnp.sqrt(sum(jnp.sum(g**2) for g in grads))\n                grads = [g * jnp.minimum(1.0, 0.4 / norm) for g in grads]\n                {ADD}")),
    of("stale gradients", "deep", (JAX_APPLY, f"{JAX_APPLY.replace('grads', 'held')}; held = grads"), ("    printed = []", "    printed, held = [], [0 * v for v in tv]")),
    of("momentum by hand", "deep", (JAX_APPLY, f"held = [0.9 * h + g for h, g in zip(held, grads)]; {JAX_APPLY.replace('grads', 'held')}"), ("    printed = []", "    printed, held = [], [0 * v for v in tv]")),
    of("gradients swapped", "deep", (JAX_APPLY, f"grads[1], grads[3] = grads[3], grads[1]; {JAX_APPLY}")),
    of("softmax twice", "logits", ("loss_fn(b, output)", "loss_fn(b, jax.nn.softmax(output))")),
    of("rate frozen in a trace", "traced rate", ("ov = [*ov[:place], now, *", "ov = [*ov[:place], jnp.float32(rates[-1]), *"), ("            tv, ntv, ov = step(", "            rates.append(rate(count))\n            tv, ntv, ov = step("), ("    @jax.jit", "    rates = []\n\n    @jax.jit")),
    of("printed: without penalty", "deep", ("printed.append(total / count)", "printed.append(1.0 * total / count)")),
    of("optimizer state thrown away", "with decay", ("tv, ntv, ov = step", "tv, ntv, _ = step")),
    of("update thrown away", "epoch", ("            return (tv, ntv, ov), loss", "            return (carry[0], ntv, ov), loss")),
    of("broadcast", "words", ("b[:, None]", "b")),
]
MUTANTS = {"tensorflow": TF, "jax": JAX}[keras.backend.backend()]
ALL = [*TF, *JAX]
