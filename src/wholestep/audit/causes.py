"""The known causes, as data, in the order of the stages in which an audit looks for them."""

from functools import partial

from wholestep.audit.cause import Cause
from wholestep.audit.causes_of_gradients import CAUSES_OF_GRADIENTS

STAGES = ("rows", "forward", "gradient", "apply", "between", "state", "report")
_rows, _forward, _, _apply, _between, _state, _report = (partial(Cause, stage) for stage in STAGES)

CAUSES = (
    _rows(
        "rows never used",
        "Every pass over the data leaves out the same rows: the model never trains on them.",
        "let the last, shorter batch through: `range(0, len(x), size)`, or `drop_remainder=False`.",
        "tracel-ai/burn#5695",
    ),
    _rows(
        "same order every pass",
        "The rows were shuffled once; every pass takes them in that same order.",
        "draw an order in every epoch, `default_rng(epoch).permutation(len(x))`, or `shuffle(len(x), "
        "reshuffle_each_iteration=True)`.",
        "pytorch/pytorch#31771",
    ),
    _rows(
        "same batches every pass",
        "Batches are shuffled, and not rows: the same rows meet in every pass.",
        "`.shuffle(len(x)).batch(size)`, in this order.",
        is_note=True,
    ),
    _rows(
        "batches of few labels",
        "The rows are sorted by label, and are not shuffled one by one: each batch holds one or two of the labels.",
        "shuffle the rows, and then cut batches: `.shuffle(len(x)).batch(size)`, in this order.",
    ),
    _rows(
        "window carried over the epoch",
        "The last microbatches of a pass wait for the first of the next: one update is made of both.",
        "make an optimizer step of what is left at the end of each pass (`if ... or start + size >= len(x)`), or "
        "take a `batch_size` with which none is left.",
        "meta-pytorch/torchtune#2745",
    ),
    _rows(
        "shuffle window",
        "The rows are shuffled in a window that is smaller than the data: neighbours stay neighbours.",
        "`shuffle(len(x), reshuffle_each_iteration=True)`.",
        "tensorflow/tensorflow#36626",
        is_note=True,
    ),
    _rows(
        "drawn with replacement",
        "Rows are drawn with replacement: some come twice before others come once.",
        "draw one order of all rows per pass: `rng.permutation(len(x))`.",
        is_note=True,
    ),
    _rows(
        "batch trained on twice",
        "Some batches make two updates in a row: their rows count twice.",
        "call the training step once for each batch, and print the loss that this call returns.",
    ),
    _rows(
        "rows twice in a pass",
        "The last batch of a pass is filled up with rows that came before, which count twice.",
        "take the last batch as short as it is (`lax.dynamic_slice` moves its start back instead), or give the "
        "rows that fill it up the weight 0.",
        "the documentation of jax.lax.dynamic_slice",
    ),
    _rows(
        "batches overlap",
        "Neighbouring batches share rows, which count twice.",
        "cut with one step: `x[start:start + size] for start in range(0, len(x), size)`.",
    ),
    _forward(
        "inference mode",
        "The gradient is taken in inference mode: dropout is off, and BatchNormalization uses its moving statistics.",
        "call `model(x, training=True)`.",
        "wkentaro/pytorch-fcn#56",
    ),
    _forward(
        "inputs swapped",
        "The model's inputs are given in another order than that of the data: each gets what is meant for another.",
        "name them: a dict of arrays by the names of the model's inputs.",
    ),
    _forward(
        "labels among the inputs",
        "The model is given the labels that it is to predict.",
        "give a decoder what comes before, `y[:, :-1]`, and let it predict what comes next, `y[:, 1:]`.",
    ),
    *CAUSES_OF_GRADIENTS,
    _apply(
        "applied twice",
        "The optimizer takes the same gradient twice.",
        "call `apply_gradients` (or `stateless_apply`) once per update.",
        "keras-team/keras#19990",
    ),
    _apply(
        "variable updated twice",
        "Two optimizers take the same gradient of a variable: it moves twice in every update.",
        "give each optimizer the variables that are its own, `zip(grads, variables)`, and no variable to both.",
    ),
    _apply(
        "optimizer re-created",
        "The optimizer is made anew again and again: moments and the count of updates start at 0 each time.",
        "make the optimizer once, before the loop.",
        "keras-team/keras#13027",
    ),
    _apply(
        "optimizer state thrown away",
        "Every update begins with the optimizer's first state: moments and the count of updates never move.",
        "carry what `stateless_apply` returns to the next update: `tv, ov = optimizer.stateless_apply(ov, grads, tv)`.",
    ),
    _apply(
        "steps of zeros",
        "The optimizer is called with gradients of zeros between two updates: its moments, its count and the weights "
        "move all the same.",
        "call `apply` only where the sum is whole.",
    ),
    _apply(
        "accumulated twice",
        "The loop sums up the gradients of several microbatches, and the optimizer accumulates these sums once "
        "more: there are fewer updates than were meant.",
        "either hand each gradient to an optimizer with `gradient_accumulation_steps`, or sum up, and leave the option "
        "out.",
    ),
    _apply(
        "schedule by microbatch",
        "The schedule of the learning rate moves with every microbatch: it ends too early.",
        "move it once per update (`step += 1`): leave `optimizer.iterations` to the optimizer, and stretch the "
        "schedule where Keras' `gradient_accumulation_steps` counts calls.",
        "huggingface/accelerate#963",
    ),
    _apply(
        "schedule frozen",
        "The learning rate stays at its first value: the schedule was read once.",
        "give the schedule to the optimizer, or assign `schedule(step)` to `optimizer.learning_rate` before every "
        "update.",
        "the FAQ of jax-ml/jax on impure functions",
    ),
    _apply(
        "rate frozen in a trace",
        "The learning rate was read while the step was traced: it moves only when another batch size traces anew.",
        "pass the rate in as a tensor, or assign `optimizer.learning_rate` outside of the traced step.",
        "the FAQ of jax-ml/jax on impure functions",
    ),
    _apply(
        "schedule one ahead",
        "The schedule of the learning rate is one update ahead.",
        "count updates from 0: `schedule(step)` first, then `step += 1`.",
    ),
    _between(
        "update thrown away",
        "What the optimizer step returns does not reach the next forward pass: the weights go back to what they were.",
        "carry the updated variables to the next update: `tv, ov = optimizer.stateless_apply(ov, grads, tv)`.",
    ),
    _between(
        "decay by microbatch",
        "The weights shrink between the microbatches of one update.",
        "decay (`v * 0.99`) once per update, or leave it to the optimizer's `weight_decay`.",
        "keras-team/keras#19990",
    ),
    _between(
        "decayed twice",
        "The weights are decayed by hand, and by the optimizer once more.",
        "leave it to the optimizer's `weight_decay`.",
        "keras-team/keras#19990",
    ),
    _between(
        "weights moved inside a window",
        "The weights move between the microbatches of one update, by no optimizer step.",
        "write to the weights (`assign`, `assign_add`) after the optimizer step.",
    ),
    _between(
        "average by microbatch",
        "The moving average of the weights moves with every microbatch, and not once per update: it looks back over "
        "less.",
        "move the average where the optimizer makes its step.",
    ),
    _state(
        "statistics thrown away",
        "What the forward pass makes of the moving statistics is thrown away: they never move.",
        "carry the non-trainable variables that `stateless_call` returns: `outputs, ntv = "
        "model.stateless_call(tv, ntv, x)`.",
    ),
    _state(
        "seeds thrown away",
        "The seeds of the random draws are thrown away: every update has the same dropout masks.",
        "carry the non-trainable variables that `stateless_call` returns: `outputs, ntv = "
        "model.stateless_call(tv, ntv, x)`.",
        "jax-ml/jax#40232",
    ),
    _state(
        "state of one microbatch",
        "The microbatches of an update all begin with the same statistics and seeds: only what the last one makes of "
        "them is kept.",
        "carry what `stateless_call` returns from microbatch to microbatch: `outputs, ntv = "
        "model.stateless_call(tv, ntv, x)`.",
    ),
    _state(
        "statistics never written back",
        "The trained weights come back to the model, and the moving statistics do not: it predicts with those of the "
        "beginning.",
        "assign them too: `for v, value in zip(model.non_trainable_variables, ntv): v.assign(value)`.",
    ),
    _state(
        "second pass in training mode",
        "The rows of an update go through the model once more in training mode: the moving statistics move twice.",
        "take metrics of the outputs that are there, or call `model(x, training=False)`.",
    ),
    _report(
        "printed: mean of means",
        "The printed loss is a mean of the batches' means: rows of short batches count more.",
        "weigh by rows: `metric.update_state(loss, sample_weight=len(batch))`.",
        "tensorflow/tensorflow#38596",
    ),
    _report(
        "printed: last batch",
        "The printed loss is that of the last batch alone.",
        "keep a mean over all batches of the pass: `total / count`.",
        "Lightning-AI/pytorch-lightning#2924",
    ),
    _report(
        "printed: not reset",
        "The printed loss is a mean over all passes so far: the metric is not reset.",
        "`metric.reset_state()`, or `total, count = 0.0, 0`, at the beginning of each pass.",
        "keras-team/keras#16526",
    ),
    _report(
        "printed: sum",
        "The printed loss is the sum of the batches' means.",
        "divide by the number of rows.",
        "hiyouga/LlamaFactory#7443",
    ),
    _report(
        "printed: means over rows",
        "The printed loss is the sum of the batches' means, divided by the number of rows: too small by the size of a "
        "batch.",
        "add up `loss * len(batch)`, or divide by the number of batches.",
    ),
    _report(
        "printed: summed over microbatches",
        "The printed loss is a sum of the microbatches' means, divided by the number of updates.",
        "take the mean over the microbatches: divide by their number.",
    ),
    _report(
        "printed: without penalty",
        "The printed loss is without the model's own losses, which are trained on.",
        "print the loss with `sum(model.losses)`, as `fit` does.",
        is_note=True,
    ),
)

BY_NAME = {cause.name: cause for cause in CAUSES}


def table() -> str:
    """Return the causes as a table of docs/audit.md."""
    lines = ["| stage | cause | explanation | fix | met in |", "|---|---|---|---|---|"]
    lines += [f"| {c.stage} | {c.name} | {c.explanation} | {c.fix} | {c.source} |" for c in CAUSES]
    return "\n".join(lines)
