"""The known causes that stand in the loss that a loop prints."""

from wholestep.audit.cause import NOWHERE, Cause

CAUSES_OF_PRINTING = (
    Cause(
        "printed: mean of means",
        "report",
        "the mean of the batches' means",
        "The printed loss is a mean of the batches' means: rows of short batches count more.",
        "weigh by rows: `metric.update_state(loss, sample_weight=len(batch))`.",
        "tensorflow/tensorflow#38596",
    ),
    Cause(
        "printed: last batch",
        "report",
        "the loss of the pass's last batch",
        "The printed loss is that of the last batch alone.",
        "keep a mean over all batches of the pass: `total / count`.",
        "Lightning-AI/pytorch-lightning#2924",
    ),
    Cause(
        "printed: not reset",
        "report",
        "the mean over all passes so far",
        "The printed loss is a mean over all passes so far: the metric is not reset.",
        "`metric.reset_state()`, or `total, count = 0.0, 0`, at the beginning of each pass.",
        "keras-team/keras#16526",
    ),
    Cause(
        "printed: sum",
        "report",
        "the sum of the batches' means",
        "The printed loss is the sum of the batches' means.",
        "divide by the number of rows.",
        "hiyouga/LlamaFactory#7443",
    ),
    Cause(
        "printed: means over rows",
        "report",
        "the sum of the batches' means, divided by the number of rows",
        "The printed loss is the sum of the batches' means, divided by the number of rows: too small by the size of a "
        "batch.",
        "add up `loss * len(batch)`, or divide by the number of batches.",
        NOWHERE,
    ),
    Cause(
        "printed: summed over microbatches",
        "report",
        "the sum of the microbatches' means, divided by the number of updates",
        "The printed loss is a sum of the microbatches' means, divided by the number of updates.",
        "take the mean over the microbatches: divide by their number.",
        NOWHERE,
    ),
    Cause(
        "printed: without penalty",
        "report",
        "the mean over rows, without the model's own losses",
        "The printed loss is without the model's own losses, which are trained on.",
        "print the loss with `sum(model.losses)`, as `fit` does.",
        NOWHERE,
        is_note=True,
    ),
)
