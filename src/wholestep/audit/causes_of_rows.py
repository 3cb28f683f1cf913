"""The known causes that stand in the rows that the updates are made of, and in their order."""

from functools import partial

from wholestep.audit.cause import Cause

_cause = partial(Cause, "rows")

CAUSES_OF_ROWS = (
    _cause(
        "rows never used",
        "Every pass over the data leaves out the same rows: the model never trains on them.",
        "let the last, shorter batch through: `range(0, len(x), size)`, or `drop_remainder=False`.",
        "tracel-ai/burn#5695",
    ),
    _cause(
        "same order every pass",
        "The rows were shuffled once; every pass takes them in that same order.",
        "draw an order in every epoch, `default_rng(epoch).permutation(len(x))`, or `shuffle(len(x), "
        "reshuffle_each_iteration=True)`.",
        "pytorch/pytorch#31771",
    ),
    _cause(
        "same batches every pass",
        "Batches are shuffled, and not rows: the same rows meet in every pass.",
        "`.shuffle(len(x)).batch(size)`, in this order.",
        is_note=True,
    ),
    _cause(
        "batches of few labels",
        "The rows are sorted by label, and batches are shuffled, not rows: each batch holds one or two of the labels.",
        "`.shuffle(len(x)).batch(size)`, in this order.",
    ),
    _cause(
        "window carried over the epoch",
        "The last microbatches of a pass wait for the first of the next: one update is made of both.",
        "make an optimizer step of what is left at the end of each pass (`if ... or start + size >= len(x)`), or "
        "take a `batch_size` with which none is left.",
        "meta-pytorch/torchtune#2745",
    ),
    _cause(
        "shuffle window",
        "The rows are shuffled in a window that is smaller than the data: neighbours stay neighbours.",
        "`shuffle(len(x), reshuffle_each_iteration=True)`.",
        "tensorflow/tensorflow#36626",
        is_note=True,
    ),
    _cause(
        "drawn with replacement",
        "Rows are drawn with replacement: some come twice before others come once.",
        "draw one order of all rows per pass: `rng.permutation(len(x))`.",
        is_note=True,
    ),
    _cause(
        "batch trained on twice",
        "Some batches make two updates in a row: their rows count twice.",
        "call the training step once for each batch, and print the loss that this call returns.",
    ),
    _cause(
        "rows twice in a pass",
        "The last batch of a pass is filled up with rows that came before, which count twice.",
        "take the last batch as short as it is (`lax.dynamic_slice` moves its start back instead), or give the "
        "rows that fill it up the weight 0.",
        "the documentation of jax.lax.dynamic_slice",
    ),
    _cause(
        "batches overlap",
        "Neighbouring batches share rows, which count twice.",
        "cut with one step: `x[start:start + size] for start in range(0, len(x), size)`.",
    ),
)
