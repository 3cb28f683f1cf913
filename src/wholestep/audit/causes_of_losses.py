"""The known causes that make the gradient that of another loss, or of a loss of another scale."""

from wholestep.audit.cause import NOWHERE, Cause

OTHER_LOSSES = (
    Cause(
        "broadcast",
        "gradient",
        "the loss of all pairs of labels and outputs of the batch",
        "Labels of shape (rows,) meet outputs of shape (rows, 1): their difference is (rows, rows), and the mean "
        "over it draws every output to every label of its batch.",
        "`y = y[:, None]` or `output = squeeze(output, -1)`, or a Keras loss, which gives both the same rank.",
        "tensorflow/tensorflow#33898, #28901, #52115",
    ),
    Cause(
        "padding trained on",
        "gradient",
        "rows that are none of the data count as the others, with labels of 0",
        "Rows that fill up a short batch count in the loss as any other: they draw the model to their labels of 0.",
        "multiply the losses by a mask and divide by its sum: `sum(mask * values) / sum(mask)`.",
        NOWHERE,
    ),
    Cause(
        "from_logits",
        "gradient",
        "the same loss with `from_logits` the other way",
        "The loss takes the outputs for logits where they are probabilities, or the other way round.",
        "`from_logits=True` if the last layer has no activation, False after a softmax or sigmoid.",
        "tensorflow/tensorflow#35585",
    ),
    Cause(
        "smoothing missing",
        "gradient",
        "the same loss with label_smoothing=0",
        "The loss that was meant smooths the labels; the loop's does not.",
        "give the loop's loss the same `label_smoothing`.",
        NOWHERE,
    ),
    Cause(
        "weights ignored",
        "gradient",
        "the same loss without sample weights",
        "The sample weights do not reach the loss.",
        "pass `sample_weight=` to the loss, or multiply the unreduced losses: `sum(w * values) / sum(w)`.",
        "keras-team/keras#13641",
    ),
    Cause(
        "weights squared",
        "gradient",
        "the same loss with the squares of the sample weights",
        "The sample weights are multiplied in twice.",
        "weigh once: either in the loss or after it, and not by `sample_weight ** 2`.",
        NOWHERE,
    ),
    Cause(
        "softmax twice",
        "gradient",
        "the same loss of the outputs after one more softmax (or sigmoid)",
        "The outputs are logits, and go through a softmax or sigmoid before a loss that does so itself.",
        "give the loss the logits, without a `softmax` before it, or say `from_logits=False`.",
        "tensorflow/tensorflow#35585",
    ),
    Cause(
        "labels shifted",
        "gradient",
        "the labels of the next or last row, or of the next or last place in a row",
        "Each row is trained on the label of its neighbour.",
        "cut inputs and labels by the same index, `x[rows], y[rows]`, and `roll` neither.",
        NOWHERE,
    ),
    Cause(
        "labels of other rows",
        "gradient",
        "the labels in the order of the data, the inputs in the order of the loop",
        "The inputs are shuffled and the labels are not: no row has its own label.",
        "draw one order, and take both by it: `rows = order[start:stop]`, then `x[rows], y[rows]`.",
        NOWHERE,
    ),
)

SCALED = (  # looked for in float16 and bfloat16 alone
    Cause(
        "loss not scaled",
        "gradient",
        "the gradient divided by the loss scale",
        "The gradient is divided by the loss scale, and the loss was never multiplied by it: the weights hardly move.",
        "`loss = optimizer.scale_loss(loss)` inside of the tape.",
        NOWHERE,
    ),
    Cause(
        "loss scale left in",
        "gradient",
        "the gradient times the loss scale",
        "The gradient is that of the scaled loss: nobody divides by the scale.",
        "divide the gradients by the scale before the optimizer gets them, or use a `LossScaleOptimizer`.",
        NOWHERE,
    ),
    Cause(
        "loss scale frozen in a trace",
        "gradient",
        "the gradient times a power of two",
        "The loss is scaled by the scale that the optimizer had when the step was traced, and not by that of now.",
        "scale the loss inside of a `keras.StatelessScope` that holds the optimizer's variables of this update.",
        "the FAQ of jax-ml/jax on impure functions",
    ),
    Cause(
        "clip before unscale",
        "gradient",
        "the gradient of the scaled loss is clipped, and then divided by the scale",
        "Gradients are clipped while the loss scale is in them: what is left after the division is tiny.",
        "clip in the optimizer: `LossScaleOptimizer(Adam(global_clipnorm=1.0))`.",
        "Lightning-AI/pytorch-lightning#9330",
    ),
)
