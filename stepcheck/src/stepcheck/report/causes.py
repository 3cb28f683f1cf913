"""The known causes, as data, in the order of the stages in which an audit looks for them."""

from collections.abc import Iterator
from dataclasses import dataclass

STAGES = ("rows", "forward", "gradient", "apply", "between", "state", "report")


@dataclass(frozen=True)
class Cause:
    """One known cause: its name in the field, an explanation, and the fix.

    Args:
        explanation: "" for an error of the gradient, which is solved for: its sentence is generated.
        source: a public thread that reports it, if one is known.
        is_note: whether it is often intended: then it is a note.
    """

    stage: str
    name: str
    explanation: str
    fix: str
    source: str = ""
    is_note: bool = False


ON_JAX = " On JAX: "
ACCUMULATING = " With `gradient_accumulation_steps`: "  # and after it the fix for an optimizer that accumulates
# For each stage its causes: `name | source | note`; below it the explanation, if any, and after an arrow the fix: for
# both engines, or for TensorFlow, and after `ON_JAX` for JAX.
_TEXT = """
# rows
rows never used | tracel-ai/burn#5695
    Every pass over the data leaves out the same rows: the model never trains on them.
    -> let the last, shorter batch through: `range(0, len(x), size)`, or `drop_remainder=False`.
same order every pass | pytorch/pytorch#31771
    The rows were shuffled once; every pass takes them in that same order.
    -> draw an order in every epoch, `default_rng(epoch).permutation(len(x))`, or `shuffle(len(x),
    reshuffle_each_iteration=True)`, after any `cache()`.
same batches every pass | note
    Batches are shuffled, and not rows: the same rows meet in every pass.
    -> `.shuffle(len(x)).batch(size)`, in this order.
batches of few labels
    The rows are sorted by label, and are not shuffled one by one: each batch holds one or two of the labels.
    -> shuffle the rows, and then cut batches: `.shuffle(len(x)).batch(size)`, in this order.
window carried over the epoch | meta-pytorch/torchtune#2745
    The last microbatches of a pass wait for the first of the next: one update is made of both.
    -> make an optimizer step of the rest at the end of each pass (`if ... or start + size >= len(x)`), or take
    a `batch_size` that leaves no rest.
shuffle window | tensorflow/tensorflow#36626 | note
    The rows are shuffled in a window that is smaller than the data: neighbours stay neighbours.
    -> `shuffle(len(x), reshuffle_each_iteration=True)`.
drawn with replacement | note
    Rows are drawn with replacement: some come twice before others come once.
    -> draw one order of all rows per pass: `rng.permutation(len(x))`.
batch trained on twice
    Some batches make two updates in a row: their rows count twice.
    -> call the training step once for each batch, and print the loss that this call returns.
rows twice in a pass | the documentation of jax.lax.dynamic_slice
    The last batch of a pass is filled up with rows that came before, which count twice.
    -> take the last batch as short as it is (`lax.dynamic_slice` moves its start back instead), or give the rows
    that fill it up the weight 0.
batches overlap
    Neighbouring batches share rows, which count twice.
    -> cut with one step: `x[start:start + size] for start in range(0, len(x), size)`.
# forward
inference mode | wkentaro/pytorch-fcn#56
    The gradient is taken in inference mode: dropout is off, and BatchNormalization uses its moving statistics.
    -> call the model with `training=True`.
inputs swapped
    The model's inputs are given in another order than the data's: each gets the values of another.
    -> name them: a dict of arrays by the names of the model's inputs.
labels among the inputs
    The model is given the labels that it is to predict.
    -> give a decoder what comes before, `y[:, :-1]`, and let it predict what comes next, `y[:, 1:]`.
# gradient
broadcast | tensorflow/tensorflow#33898, #28901, #52115
    -> `y = y[:, None]` (and the sample weights) or `output = squeeze(output, -1)`, or a Keras loss, which gives all the
    same rank.
padding trained on
    -> multiply the losses by a mask and divide by its sum: `sum(mask * values) / sum(mask)`.
from_logits | tensorflow/tensorflow#35585
    -> `from_logits=True` if the last layer has no activation, False after a softmax or sigmoid.
smoothing missing
    -> give the loop's loss the same `label_smoothing`.
smoothing not divided
    -> divide it by the number of classes, `y * (1 - 0.1) + 0.1 / num_classes`, or leave it to the loss's
    `label_smoothing`.
smoothing twice
    -> leave it to the loss's `label_smoothing`.
mask ignored
    -> give the model's outputs to a Keras loss as they are, or multiply the losses by `mask` and divide by its sum.
output left out
    -> add them up: `total = total + loss`, in the loop over the outputs.
loss weights ignored
    -> multiply each by its own: `total = sum(weights[k] * losses[k] for k in losses)`.
other loss weights
    -> multiply the loss of each output by its own number of the `loss_weights` that were meant.
weights ignored | keras-team/keras#13641
    -> pass `sample_weight=` to the loss, or multiply the unreduced losses: `sum(w * values) / sum(w)`.
weights squared
    -> weigh once: either in the loss or after it, and not by `sample_weight ** 2`.
weights averaged apart
    -> pass `sample_weight=` to the loss, or multiply the unreduced losses (`reduction=None`) before the mean.
softmax twice | tensorflow/tensorflow#35585
    -> give the loss the logits, without a `softmax` before it, or say `from_logits=False`.
labels shifted
    -> cut inputs and labels by the same index, `x[rows], y[rows]`, and `roll` neither.
weights of other rows
    -> draw one order, and take the weights by it too: `x[rows], y[rows], weight[rows]`.
labels of other rows
    -> draw one order, and take both by it: `rows = order[start:stop]`, then `x[rows], y[rows]`.
mean of means | huggingface/transformers#34191
    -> sum up, and divide once by the number of rows (or the sum of their weights) of all microbatches of the
    update. With `gradient_accumulation_steps`: take a `batch_size` that cuts the rows evenly.
summed over microbatches | paiml/aprender#2123
    -> divide the sum once: by the number of rows of the update, or a sum `t + g` of means of even microbatches
    by their `count`.
padding counted | EleutherAI/gpt-neo#45
    -> divide by the sum of the weights, not by the number of rows.
padded places counted | tensorflow/docs#1460
    -> divide by the sum of the mask, not by the number of places.
divided by a full window | Lightning-AI/pytorch-lightning#19987
    -> divide by the number of rows that are there.
divided by the full batch | tensorflow/tensorflow#55321
    -> divide by the number of rows of this batch.
never divided | keras-team/keras#16285
    -> take the mean, or divide by the number of rows (or the sum of their weights): `sum(values) / len(rows)`.
summed over replicas | tensorflow/tensorflow#55321
    -> divide by the number of rows of all replicas: `tf.nn.compute_average_loss(losses, global_batch_size=...)`.
    On JAX: divide by the number of rows of all replicas: `jnp.sum(losses) / jax.lax.psum(len(losses), axis)`.
divided by the replicas twice | keras-team/keras#16285
    -> divide once, not by `num_replicas_in_sync` again: Keras' losses know the strategy,
    `tf.nn.compute_average_loss` does not. On JAX: divide once, by the number of rows of all replicas, and add up the
    gradients by `jax.lax.psum`, not by `jax.lax.pmean`.
last window dropped | timoschick/pet#36
    -> make an optimizer step of the rest at the end of each pass (`if ... or start + size >= len(x)`).
divided twice | huggingface/transformers#35438
    -> divide once: by the number of all rows (or the sum of their weights), and not by `len(parts)` again.
only the last microbatch | mflux-community/mflux#447
    -> add up: `total = [t + g for t, g in zip(total, grads)]`.
only the first microbatch
    -> add those of all parts to it, not of `parts[0]` alone, before the optimizer step.
first microbatch lost
    -> reset the sum after the optimizer step, not after `parts[0]`.
last microbatch lost
    -> add the gradient first, of all `parts`, then ask whether it is time for the step.
mean of row means | huggingface/transformers#34191
    -> divide once by the sum of all weights: `reduce_sum(values) / reduce_sum(weights)`, or `ws.Mean`. On JAX: divide
    once by the sum of all weights: `jnp.sum(values) / jnp.sum(weights)`, or `ws.Mean`.
divided by the weights
    -> divide by the number of rows, or mean it so: `reduction='mean_with_sample_weight'`, or an `Objective`.
divided by the rows
    -> divide by the sum of the weights, `sum(losses * weights) / sum(weights)`, as
    `reduction='mean_with_sample_weight'` does.
penalty forgotten | keras-team/keras#19891
    -> add `sum(model.losses)`, read after the forward pass, once per update. On JAX: take the model's losses,
    `outputs, ntv, losses = model.stateless_call(tv, ntv, x, return_losses=True)`, and add `sum(losses)`, once per
    update.
penalty once per microbatch | keras-team/keras#19891
    -> add `sum(model.losses)` once per update, not `len(parts)` times. On JAX: add the model's losses, which
    `stateless_call(..., return_losses=True)` returns, once per update, not `len(parts)` times.
penalty once per replica | keras-team/keras#19891
    -> divide the model's losses by `num_replicas_in_sync`: `tf.nn.scale_regularization_loss(sum(model.losses))`.
    On JAX: divide the model's losses by the number of replicas: `sum(losses) / jax.lax.psum(1, axis)`.
penalty added twice
    -> add either `sum(model.losses)` or a penalty by hand. On JAX: add either `sum(losses)` of
    `stateless_call(..., return_losses=True)` or a penalty by hand.
penalty divided | keras-team/keras#19891
    -> add `sum(model.losses)` after the division by `len(parts)`. On JAX: add the model's losses, which
    `stateless_call(..., return_losses=True)` returns, after the division by `len(parts)`.
not reset | meta-pytorch/torchtune#2745
    -> set the sum to zero after each optimizer step: `total = [tf.zeros_like(v) for v in variables]`, or, if it is
    held in a `tf.Variable`, `held.assign(tf.zeros_like(held))`. On JAX: set the sum to zero after each optimizer step:
    `total = [jnp.zeros_like(v) for v in tv]`.
momentum by hand
    -> set the sum to zero after each optimizer step, `total = [tf.zeros_like(v) for v in variables]` (a `tf.Variable`:
    `held.assign(tf.zeros_like(held))`), and leave momentum to the optimizer. On JAX: set the sum to zero after each
    optimizer step, `total = [jnp.zeros_like(v) for v in tv]`, and leave momentum to the optimizer.
ascent
    -> subtract the gradient, `weight - rate * gradient`, and return the loss, not `-loss`; a quantity to maximise
    enters the loss with a minus.
stale gradients
    -> take the gradient before the optimizer step, of this batch.
clip per microbatch | huggingface/transformers#1563
    -> clip once, after the sum and the division.
gradients swapped
    -> zip the gradients with the very list that they were taken of: `zip(grads, variables)`.
loss not scaled
    -> `loss = optimizer.scale_loss(loss)` inside of the tape, and the gradients as they are to `optimizer.apply`.
    On JAX: `loss = optimizer.scale_loss(loss)` inside of the function whose gradient is taken, and the gradients as
    they are to `optimizer.stateless_apply`.
loss scale left in
    -> divide the gradients by the scale before the optimizer gets them, or use a `LossScaleOptimizer`.
loss scale frozen in a trace | the FAQ of jax-ml/jax on impure functions
    -> scale the loss inside of a `keras.StatelessScope` that holds the optimizer's variables of this update.
clip before unscale | Lightning-AI/pytorch-lightning#9330
    -> clip in the optimizer: `LossScaleOptimizer(Adam(global_clipnorm=1.0))`.
variable left out
    Trainable, but no gradient of it reaches the optimizer.
    -> take the gradient of `model.trainable_variables` with the whole model inside of the tape, and hand over all:
    `zip(grads, model.trainable_variables)`; or set `layer.trainable = False` on frozen layers. On JAX: take the
    gradient of the values of all `model.trainable_variables` with the whole model inside of the function, and hand over
    all: `stateless_apply(ov, grads, tv)`; or set `layer.trainable = False` on frozen layers.
frozen variable trained
    The layer is set to `trainable = False`, and its variables are trained all the same.
    -> take the gradient of `model.trainable_variables`, and not of `model.variables` or `model.weights`.
clip forgotten
    The optimizer that was meant clips the gradient; nothing clips it here.
    -> give the loop's optimizer the same `clipnorm`, `global_clipnorm` or `clipvalue`, or hand it the gradients
    that were clipped: `clipped, _ = tf.clip_by_global_norm(grads, bound)`, then `zip(clipped, variables)`. On JAX: give
    the loop's optimizer the same `clipnorm`, `global_clipnorm` or `clipvalue`.
clipped otherwise
    The gradient is clipped, but not as the optimizer that was meant does it.
    -> leave it to the optimizer's own `clipnorm` (each variable), `global_clipnorm` (all together) or `clipvalue`;
    `tf.clip_by_global_norm(grads, bound)` once is all together. On JAX: leave it to the optimizer's own `clipnorm`
    (each variable), `global_clipnorm` (all together) or `clipvalue`.
# apply
applied twice | keras-team/keras#19990
    The optimizer takes the same gradient twice.
    -> call `apply_gradients` once per update. On JAX: call `stateless_apply` once per update.
variable updated twice
    Two optimizers take the same gradient of a variable: it moves twice in every update.
    -> give each optimizer the variables that are its own, `zip(grads, variables)`, and no variable to both. On JAX:
    give each optimizer the variables that are its own, `stateless_apply(ov, grads, tv)`, and no variable to both.
optimizer re-created | keras-team/keras#13027
    The optimizer is made anew again and again: moments and the count of updates start at 0 each time.
    -> make the optimizer once, before the loop.
optimizer state thrown away
    The optimizer's state goes back to the first one: moments and the count of updates begin anew.
    -> assign no earlier values to `optimizer.variables`. On JAX: carry what `stateless_apply` returns to the next
    update, and to the next pass: `tv, ov = optimizer.stateless_apply(ov, grads, tv)`.
steps of zeros
    The optimizer is called with gradients of zeros between two updates: its moments, count and weights move.
    -> call `apply` only where the sum is whole.
accumulated twice
    The loop sums up the gradients of several microbatches, and the optimizer accumulates these sums once more.
    -> hand each gradient to an optimizer with `gradient_accumulation_steps`, or sum up without this option.
schedule by microbatch | huggingface/accelerate#963
    The schedule of the learning rate moves with every microbatch: it ends too early.
    -> move it once per update (`step += 1`): leave `optimizer.iterations` to the optimizer; if it has
    `gradient_accumulation_steps`, which counts calls, stretch the schedule.
schedule frozen | the FAQ of jax-ml/jax on impure functions
    The learning rate stays at its first value: the schedule was read once.
    -> give the schedule to the optimizer, or assign `optimizer.learning_rate = schedule(step)` in each update.
rate frozen in a trace | the FAQ of jax-ml/jax on impure functions
    The learning rate was read while the step was traced: it moves only when another batch size traces anew.
    -> pass the rate in as a tensor, or assign `optimizer.learning_rate` outside of the traced step.
schedule one ahead
    The schedule of the learning rate is one update ahead.
    -> count updates from 0: `schedule(step)` first, then `step += 1`.
# between
update thrown away
    The result of the optimizer step does not reach the next forward pass: the weights go back.
    -> assign no earlier values to `model.trainable_variables` after the optimizer step. On JAX: carry the updated
    variables to the next update: `tv, ov = optimizer.stateless_apply(ov, grads, tv)`.
decay by microbatch | keras-team/keras#19990
    The weights shrink between the microbatches of one update.
    -> decay (`v * 0.99`) once per update, or leave it to the optimizer's `weight_decay`.
decayed twice | keras-team/keras#19990
    The weights are decayed by hand, and by the optimizer once more.
    -> leave it to the optimizer's `weight_decay`.
weights moved inside a window
    The weights move between the microbatches of one update, by no optimizer step.
    -> write to the weights (`assign`, `assign_add`) after the optimizer step.
replicas drift apart
    Each replica steps by its own gradient, and their weights differ from then on.
    -> sum up the gradients of all replicas before the step. On JAX: `grads = jax.lax.pmean(grads, axis)` where each
    loss is the mean of its replica's rows, `jax.lax.psum` where it is divided by the rows of all.
average by microbatch
    The moving average of the weights moves with every microbatch, and not once per update: it looks back over less.
    -> move the average where the optimizer makes its step.
# state
statistics thrown away
    The new moving statistics of the forward pass are thrown away: they never move.
    -> assign no earlier values to `model.non_trainable_variables`.
    On JAX: carry the non-trainable variables to the next update: `outputs, ntv = model.stateless_call(tv, ntv, x)`.
seeds thrown away | jax-ml/jax#40232
    The seeds of the random draws are thrown away: every update has the same dropout masks.
    -> assign no earlier values to the states of the `SeedGenerator`s, `model.non_trainable_variables`.
    On JAX: carry the non-trainable variables to the next update: `outputs, ntv = model.stateless_call(tv, ntv, x)`.
state of one microbatch
    The microbatches of an update all begin with the same statistics and seeds: only the last one's are kept.
    -> assign no earlier values to `model.non_trainable_variables` between microbatches. On JAX: carry them from
    microbatch to microbatch: `outputs, ntv = model.stateless_call(tv, ntv, x)`.
statistics never written back
    The trained weights come back to the model, and the moving statistics do not: it predicts with the first ones.
    -> bring all of `model.variables` back, and not the trainable ones alone:
    `model.set_weights(trained.get_weights())`.
    On JAX: assign them too: `for v, value in zip(model.non_trainable_variables, ntv): v.assign(value)`.
second pass in training mode
    The rows of an update go through the model once more in training mode: the moving statistics move twice.
    -> take metrics of the outputs that are there, or call `model(x, training=False)`. On JAX: take metrics of the
    outputs that are there, or call `model.stateless_call(tv, ntv, x, training=False)`.
# report
printed: mean of means | tensorflow/tensorflow#38596
    The printed loss is a mean of the batches' means: rows of short batches count more.
    -> weigh by rows: `metric.update_state(loss, sample_weight=len(batch))`.
printed: last batch | Lightning-AI/pytorch-lightning#2924
    The printed loss is the last batch's alone.
    -> keep a mean over all batches of the pass: `total / count`.
printed: not reset | keras-team/keras#16526
    The printed loss is a mean over all passes so far: the metric is not reset.
    -> `metric.reset_state()`, or `total, count = 0.0, 0`, at the beginning of each pass.
printed: sum | hiyouga/LlamaFactory#7443
    The printed loss is the sum of the batches' means.
    -> divide by the number of rows.
printed: means over rows
    The printed loss is the sum of the batches' means, divided by the number of rows: too small by a batch's size.
    -> add up `loss * len(batch)`, or divide by the number of batches.
printed: summed over microbatches
    The printed loss is a sum of the microbatches' means, divided by the number of updates.
    -> take the mean over the microbatches: divide by their number.
printed: without penalty | note
    The printed loss is without the model's own losses, which are trained on.
    -> print the loss with `sum(model.losses)`, as `fit` does. On JAX: print the loss with the model's losses, which
    `stateless_call(..., return_losses=True)` returns, as `fit` does.
"""


def _causes() -> Iterator[Cause]:
    for part in _TEXT.split("\n# ")[1:]:
        stage, *lines = part.splitlines()
        starts = [i for i, line in enumerate(lines) if not line.startswith(" ")]
        for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
            name, *marks = lines[start].split(" | ")
            explanation, fix = " ".join(line.strip() for line in lines[start + 1 : end]).split("-> ")
            source = "".join(mark for mark in marks if mark != "note")
            yield Cause(stage, name, explanation.strip(), fix, source, "note" in marks)


CAUSES = tuple(_causes())
BY_NAME = {cause.name: cause for cause in CAUSES}


def table() -> str:
    """Return the causes as two tables of docs/audit.md: known causes, and errors that the audit solves for."""
    listed = ["| stage | cause | explanation | fix | met in |", "|---|---|---|---|---|"]
    listed += [f"| {c.stage} | {c.name} | {c.explanation} | {c.fix} | {c.source} |" for c in CAUSES if c.explanation]
    solved = ["| cause | fix | met in |", "|---|---|---|"]
    solved += [f"| {c.name} | {c.fix} | {c.source} |" for c in CAUSES if not c.explanation]
    between = "Errors of the gradient are solved for. A report explains each by its numbers; these have a name:"
    return "\n".join([*listed, "", between, "", *solved])


# ---- where each part of an update is a replica's ----

_TOTAL = '`total = tf.distribute.get_replica_context().all_reduce("SUM", {})`'
_ADDED_UP_BY_JAX = (
    "add the gradients up once: by `jax.lax.psum(gradients, axis)` under `jax.pmap` and `check_vma=False`; otherwise "
    "`jax.shard_map` adds up a gradient by values that the devices share."
)
_ON_PROCESSES = (
    "divide by the {} of all processes: `dist.all_reduce(num)`, then `loss.sum() * dist.get_world_size() / num`, as "
    "`DistributedDataParallel` averages the gradients; without the factor if you add them up yourself."
)
OF_ROWS = {
    "tensorflow": f"divide by the rows of all replicas: {_TOTAL.format('tf.shape(labels)[0]')}, then "
    "`tf.reduce_sum(losses) / tf.cast(total, losses.dtype)`.",
    "jax": "divide by the rows of all replicas: `jnp.sum(losses) / jax.lax.psum(len(losses), axis)`, and "
    f"{_ADDED_UP_BY_JAX}",
    "torch": _ON_PROCESSES.format("rows"),
}
OF_WEIGHTS = {
    "tensorflow": "divide by the sum of the weights (the mask) of all replicas: "
    f"{_TOTAL.format('tf.reduce_sum(weights)')}, then `tf.reduce_sum(losses * weights) / total`, and not by "
    "`num_replicas_in_sync`.",
    "jax": "divide by the sum of the weights (the mask) of all replicas: `jnp.sum(losses * weights) / "
    f"jax.lax.psum(jnp.sum(weights), axis)`, and {_ADDED_UP_BY_JAX}",
    "torch": _ON_PROCESSES.format("tokens or weights"),
}
SUMMED = "summed over replicas"
TWICE = "The sum over the replicas is taken twice: the gradient counts {} times."
ADDED_UP_ONCE = {
    "tensorflow": "add the gradients up once: `optimizer.apply_gradients` adds up what the replicas give.",
    "jax": _ADDED_UP_BY_JAX,
    "torch": "average the gradients: `p.grad /= dist.get_world_size()` after `dist.all_reduce(p.grad)`.",
}
ON_REPLICAS = {  # explanations
    SUMMED: "Each replica divides by its own {}, and the gradients are added up: replicas times too much.",
    "mean of means": "Each replica divides by its own {}, and the means are averaged: rows of a replica with fewer of "
    "them count more.",
    "divided by the full batch": "",
}
