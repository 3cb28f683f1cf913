"""The known causes that stand in the loss that a loop prints."""

from functools import partial

from wholestep.audit.cause import Cause

_cause = partial(Cause, "report")

CAUSES_OF_PRINTING = (
    _cause(
        "printed: mean of means",
        "The printed loss is a mean of the batches' means: rows of short batches count more.",
        "weigh by rows: `metric.update_state(loss, sample_weight=len(batch))`.",
        "tensorflow/tensorflow#38596",
    ),
    _cause(
        "printed: last batch",
        "The printed loss is that of the last batch alone.",
        "keep a mean over all batches of the pass: `total / count`.",
        "Lightning-AI/pytorch-lightning#2924",
    ),
    _cause(
        "printed: not reset",
        "The printed loss is a mean over all passes so far: the metric is not reset.",
        "`metric.reset_state()`, or `total, count = 0.0, 0`, at the beginning of each pass.",
        "keras-team/keras#16526",
    ),
    _cause(
        "printed: sum",
        "The printed loss is the sum of the batches' means.",
        "divide by the number of rows.",
        "hiyouga/LlamaFactory#7443",
    ),
    _cause(
        "printed: means over rows",
        "The printed loss is the sum of the batches' means, divided by the number of rows: too small by the size of a "
        "batch.",
        "add up `loss * len(batch)`, or divide by the number of batches.",
    ),
    _cause(
        "printed: summed over microbatches",
        "The printed loss is a sum of the microbatches' means, divided by the number of updates.",
        "take the mean over the microbatches: divide by their number.",
    ),
    _cause(
        "printed: without penalty",
        "The printed loss is without the model's own losses, which are trained on.",
        "print the loss with `sum(model.losses)`, as `fit` does.",
        is_note=True,
    ),
)
