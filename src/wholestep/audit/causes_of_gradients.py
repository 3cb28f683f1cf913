"""The known causes that stand in the gradient: another loss, other factors of the rows, other things in it."""

from functools import partial

from wholestep.audit.cause import Cause

_cause = partial(Cause, "gradient")

_LOST = "Of the microbatches of an update only some reach the optimizer"

CAUSES_OF_GRADIENTS = (
    # ---- another loss ----
    _cause(
        "broadcast",
        "Labels of shape (rows,) meet outputs of shape (rows, 1): their difference is (rows, rows), and the mean "
        "over it draws every output to every label of its batch.",
        "`y = y[:, None]` or `output = squeeze(output, -1)`, or a Keras loss, which gives both the same rank.",
        "tensorflow/tensorflow#33898, #28901, #52115",
    ),
    _cause(
        "padding trained on",
        "Rows that fill up a short batch count in the loss as any other: they draw the model to their labels of 0.",
        "multiply the losses by a mask and divide by its sum: `sum(mask * values) / sum(mask)`.",
    ),
    _cause(
        "from_logits",
        "The loss takes the outputs for logits where they are probabilities, or the other way round.",
        "`from_logits=True` if the last layer has no activation, False after a softmax or sigmoid.",
        "tensorflow/tensorflow#35585",
    ),
    _cause(
        "smoothing missing",
        "The loss that was meant smooths the labels; the loop's does not.",
        "give the loop's loss the same `label_smoothing`.",
    ),
    _cause(
        "smoothing twice",
        "The labels are smoothed by hand, and by the loss once more.",
        "leave it to the loss's `label_smoothing`.",
    ),
    _cause(
        "mask ignored",
        "The model masks places (`mask_zero`, `Masking`), and the loop's loss counts them as any other.",
        "give the model's outputs to a Keras loss as they are, or multiply the losses by `mask` and divide by its sum.",
    ),
    _cause(
        "output left out",
        "Of the losses of the model's outputs not all reach the gradient.",
        "add them up: `total = total + loss`, in the loop over the outputs.",
    ),
    _cause(
        "loss weights ignored",
        "The losses of the model's outputs are added up without the `loss_weights` that were meant.",
        "multiply each by its own: `total = sum(weights[k] * losses[k] for k in losses)`.",
    ),
    _cause(
        "other loss weights",
        "The losses of the model's outputs are added up with other `loss_weights` than were meant.",
        "multiply the loss of each output by its own number of the `loss_weights` that were meant.",
    ),
    _cause(
        "weights ignored",
        "The sample weights do not reach the loss.",
        "pass `sample_weight=` to the loss, or multiply the unreduced losses: `sum(w * values) / sum(w)`.",
        "keras-team/keras#13641",
    ),
    _cause(
        "weights squared",
        "The sample weights are multiplied in twice.",
        "weigh once: either in the loss or after it, and not by `sample_weight ** 2`.",
    ),
    _cause(
        "weights averaged apart",
        "A mean of the losses is multiplied by the sample weights: each row of a batch weighs the same.",
        "pass `sample_weight=` to the loss, or multiply the unreduced losses (`reduction=None`) before the mean.",
    ),
    _cause(
        "softmax twice",
        "The outputs are logits, and go through a softmax or sigmoid before a loss that does so itself.",
        "give the loss the logits, without a `softmax` before it, or say `from_logits=False`.",
        "tensorflow/tensorflow#35585",
    ),
    _cause(
        "labels shifted",
        "Each row is trained on the label of its neighbour.",
        "cut inputs and labels by the same index, `x[rows], y[rows]`, and `roll` neither.",
    ),
    _cause(
        "weights of other rows",
        "The rows have sample weights that are not their own.",
        "draw one order, and take the weights by it too: `x[rows], y[rows], weight[rows]`.",
    ),
    _cause(
        "labels of other rows",
        "The inputs are shuffled and the labels are not, or by themselves: the rows do not have their own labels.",
        "draw one order, and take both by it: `rows = order[start:stop]`, then `x[rows], y[rows]`.",
    ),
    # ---- other factors of the rows ----
    _cause(
        "mean of means",
        "Each microbatch is divided by its own weight, and the means are averaged: rows of light ones count more.",
        "sum up, and divide once by the weight (the rows) of all microbatches of the update; for Keras' own "
        "accumulation take a `batch_size` that cuts the rows evenly.",
        "huggingface/transformers#34191",
    ),
    _cause(
        "summed over microbatches",
        "The microbatches' mean gradients are added up and not divided by their number.",
        "divide the sum once: by the weight of all rows of the update, or a sum `t + g` of means of even microbatches "
        "by their `count`.",
        "paiml/aprender#2123",
    ),
    _cause(
        "padding counted",
        "Rows that fill up a short batch weigh nothing, but are counted in the division.",
        "divide by the sum of the weights, not by the number of rows.",
        "EleutherAI/gpt-neo#45",
    ),
    _cause(
        "padded places counted",
        "Places without a weight are counted in the division: rows with few places pull the loss down.",
        "divide by the sum of the mask, not by the number of places.",
        "tensorflow/docs#1460",
    ),
    _cause(
        "divided by a full window",
        "The last window of a pass has fewer microbatches, and is divided as if it were full.",
        "divide by the number of rows that are there.",
        "Lightning-AI/pytorch-lightning#19987",
    ),
    _cause(
        "divided by the full batch",
        "A short batch is divided by the size of a full one: its rows count too little.",
        "divide by the number of rows of this batch.",
        "tensorflow/tensorflow#55321",
    ),
    _cause(
        "never divided",
        "The losses of the rows are added up and not divided: the gradient grows with the batch.",
        "take the mean, or divide by the weight of the batch: `sum(values) / len(rows)`.",
        "keras-team/keras#16285",
    ),
    _cause(
        "summed over replicas",
        "Each replica divides by its own rows, and the optimizer adds up what they hand over: replicas times too much.",
        "divide by the number of rows of all replicas: `tf.nn.compute_average_loss(losses, global_batch_size=...)`.",
        "tensorflow/tensorflow#55321",
    ),
    _cause(
        "divided by the replicas twice",
        "The loss is divided by the number of replicas, and Keras' losses have done so already under a strategy.",
        "divide once, not by `num_replicas_in_sync` again: Keras' losses know the strategy, "
        "`tf.nn.compute_average_loss` does not.",
        "keras-team/keras#16285",
    ),
    _cause(
        "last window dropped",
        "What is left of a pass, less than a full window of microbatches, is thrown away at its end.",
        "make an optimizer step of what is left at the end of each pass (`if ... or start + size >= len(x)`).",
        "timoschick/pet#36",
    ),
    _cause(
        "divided twice",
        "The gradient is divided by the weight of all rows, and by the number of microbatches once more.",
        "divide once: by the weight of all rows, and not by `len(parts)` again.",
        "huggingface/transformers#35438",
    ),
    _cause(
        "only the last microbatch",
        f"{_LOST}: the last one alone; each overwrites the one before.",
        "add up: `total = [t + g for t, g in zip(total, grads)]`.",
        "mflux-community/mflux#447",
    ),
    _cause(
        "only the first microbatch",
        f"{_LOST}: the first one alone.",
        "add those of all parts to it, not of `parts[0]` alone, before the optimizer step.",
    ),
    _cause(
        "first microbatch lost",
        f"{_LOST}: the first is lost.",
        "reset the sum after the optimizer step, not after `parts[0]`.",
    ),
    _cause(
        "last microbatch lost",
        f"{_LOST}: the last comes after the optimizer step, or never.",
        "add the gradient first, of all `parts`, then ask whether it is time for the step.",
    ),
    _cause(
        "mean of row means",
        "Each row is divided by its own weight: places of short rows count more.",
        "divide once, by the sum of all weights: `reduce_sum(values) / reduce_sum(weights)`, or `ws.Mean(values, "
        "weights)`.",
        "huggingface/transformers#34191",
    ),
    _cause(
        "divided by the weights",
        "The loss is divided by the sum of the sample weights; the one that was meant divides by the number of rows.",
        "divide by the number of rows, or mean it so: `reduction='mean_with_sample_weight'`, or an `Objective`.",
    ),
    _cause(
        "divided by the rows",
        "The loss is divided by the number of rows; the one that was meant divides by the sum of the weights.",
        "divide by the sum of the weights: `reduction='mean_with_sample_weight'`.",
    ),
    # ---- what else is in it ----
    _cause(
        "penalty forgotten",
        "The model's own losses (regularisers, `add_loss`) are not in the loop's loss.",
        "add `sum(model.losses)`, once per update.",
        "keras-team/keras#19891",
    ),
    _cause(
        "penalty once per microbatch",
        "The model's own losses are added for every microbatch, and not divided.",
        "add `sum(model.losses)` once per update, not `len(parts)` times.",
        "keras-team/keras#19891",
    ),
    _cause(
        "penalty once per replica",
        "The model's own losses are added on every replica, and not divided.",
        "divide them by `num_replicas_in_sync`: `tf.nn.scale_regularization_loss(sum(model.losses))`.",
        "keras-team/keras#19891",
    ),
    _cause(
        "penalty added twice",
        "The model's own losses (regularisers, `add_loss`) are added twice.",
        "add either `sum(model.losses)` or a penalty by hand.",
    ),
    _cause(
        "penalty divided",
        "The model's own losses are added once, and divided with the sum of the microbatches.",
        "add `sum(model.losses)` after the division by `len(parts)`.",
        "keras-team/keras#19891",
    ),
    _cause(
        "not reset",
        "The sum of the gradients is not reset after the optimizer step: each update contains all before it.",
        "set the sum to zero after each optimizer step: `total = [zeros_like(v) for v in variables]`.",
        "meta-pytorch/torchtune#2745",
    ),
    _cause(
        "momentum by hand",
        "A part of the gradient before is in this one: the sum is not reset, or momentum comes on top of the "
        "optimizer's own.",
        "set the sum to zero after each optimizer step, `total = [zeros_like(v) for v in variables]`, and leave "
        "momentum to the optimizer.",
    ),
    _cause(
        "ascent",
        "The gradient has the other sign: each update makes the loss larger.",
        "return the loss and not `-loss`, and subtract its gradient: `weight - rate * gradient`; what is to become "
        "larger stands in the loss with a minus.",
    ),
    _cause(
        "stale gradients",
        "The optimizer gets the gradient of the batch before, not that of this one.",
        "take the gradient before the optimizer step, of this batch.",
    ),
    _cause(
        "clip per microbatch",
        "The gradients of the microbatches are clipped one by one: their sum is no longer that of the batch.",
        "clip once, after the sum and the division.",
        "huggingface/transformers#1563",
    ),
    _cause(
        "gradients swapped",
        "Gradients and variables are not in the same order.",
        "zip the gradients with the very list that they were taken of: `zip(grads, variables)`.",
    ),
    # ---- in float16 and bfloat16 alone ----
    _cause(
        "loss not scaled",
        "The gradient is divided by the loss scale once too often: the loss was never multiplied by it, or both the "
        "loop and the optimizer divide. The weights hardly move.",
        "`loss = optimizer.scale_loss(loss)` inside of the tape, and the gradients as they are to `optimizer.apply`.",
    ),
    _cause(
        "loss scale left in",
        "The gradient is that of the scaled loss: nobody divides by the scale.",
        "divide the gradients by the scale before the optimizer gets them, or use a `LossScaleOptimizer`.",
    ),
    _cause(
        "loss scale frozen in a trace",
        "The loss is scaled by the scale that the optimizer had when the step was traced, and not by that of now.",
        "scale the loss inside of a `keras.StatelessScope` that holds the optimizer's variables of this update.",
        "the FAQ of jax-ml/jax on impure functions",
    ),
    _cause(
        "clip before unscale",
        "Gradients are clipped while the loss scale is in them: what is left after the division is tiny.",
        "clip in the optimizer: `LossScaleOptimizer(Adam(global_clipnorm=1.0))`.",
        "Lightning-AI/pytorch-lightning#9330",
    ),
    # ---- what is not in it ----
    _cause(
        "variable left out",
        "Trainable, but no gradient of it reaches the optimizer.",
        "take the gradient of `model.trainable_variables` with the whole model inside of the tape, and hand over all: "
        "`zip(grads, model.trainable_variables)`, or `stateless_apply(ov, grads, tv)`; or set `layer.trainable = "
        "False` on what is frozen.",
    ),
    _cause(
        "frozen variable trained",
        "The layer is set to `trainable = False`, and its variables are trained all the same.",
        "take the gradient of `model.trainable_variables` (`trainable_weights`), and not of `model.variables` or "
        "`model.weights`.",
    ),
    _cause(
        "clip forgotten",
        "The optimizer that was meant clips the gradient; nothing clips it here.",
        "give the loop's optimizer the same `clipnorm`, `global_clipnorm` or `clipvalue`, or hand it the gradients "
        "that were clipped: `clipped, _ = tf.clip_by_global_norm(grads, bound)`, then `zip(clipped, variables)`.",
    ),
    _cause(
        "clipped otherwise",
        "The gradient is clipped, but not as the optimizer that was meant does it.",
        "leave it to the optimizer's own `clipnorm` (each variable), `global_clipnorm` (all together) or `clipvalue`; "
        "`tf.clip_by_global_norm(grads, bound)` once is all together.",
    ),
)
