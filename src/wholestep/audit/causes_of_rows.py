"""The known causes that stand in the rows that the updates are made of, and in their order."""

from wholestep.audit.cause import NOWHERE, Cause

CAUSES_OF_ROWS = (
    Cause(
        "rows never used",
        "rows",
        "every pass leaves out the same rows",
        "Every pass over the data leaves out the same rows: the model never trains on them.",
        "let the last, shorter batch through: `range(0, len(x), size)`, or `drop_remainder=False`.",
        "tracel-ai/burn#5695",
    ),
    Cause(
        "same order every pass",
        "rows",
        "the order of a pass is that of the pass before",
        "The rows were shuffled once; every pass takes them in that same order.",
        "draw an order in every epoch, `default_rng(epoch).permutation(len(x))`, or `shuffle(len(x), "
        "reshuffle_each_iteration=True)`.",
        "pytorch/pytorch#31771",
    ),
    Cause(
        "same batches every pass",
        "rows",
        "the batches of a pass are those of the pass before, in another order",
        "Batches are shuffled, and not rows: the same rows meet in every pass.",
        "`.shuffle(len(x)).batch(size)`, in this order.",
        NOWHERE,
        is_note=True,
    ),
    Cause(
        "batches of few labels",
        "rows",
        "batches of sorted rows, in their order or another",
        "The rows are sorted by label, and are not shuffled one by one: each batch holds one or two of the labels.",
        "shuffle the rows, and then cut batches: `.shuffle(len(x)).batch(size)`, in this order.",
        NOWHERE,
    ),
    Cause(
        "window carried over the epoch",
        "rows",
        "microbatches of two passes make one update",
        "The last microbatches of a pass wait for the first of the next: one update is made of both.",
        "make an optimizer step of what is left at the end of each pass (`if ... or start + size >= len(x)`), or "
        "take a `batch_size` with which none is left.",
        "meta-pytorch/torchtune#2745",
    ),
    Cause(
        "shuffle window",
        "rows",
        "no row comes much earlier than it stands in the data",
        "The rows are shuffled in a window that is smaller than the data: neighbours stay neighbours.",
        "`shuffle(len(x), reshuffle_each_iteration=True)`.",
        "tensorflow/tensorflow#36626",
        is_note=True,
    ),
    Cause(
        "drawn with replacement",
        "rows",
        "rows come twice in one pass over the data",
        "Rows are drawn with replacement: some come twice before others come once.",
        "draw one order of all rows per pass: `rng.permutation(len(x))`.",
        NOWHERE,
        is_note=True,
    ),
    Cause(
        "batch trained on twice",
        "rows",
        "a batch comes twice in a row",
        "Some batches make two updates in a row: their rows count twice.",
        "call the training step once for each batch, and print the loss that this call returns.",
        NOWHERE,
    ),
    Cause(
        "rows twice in a pass",
        "rows",
        "the last batch of each pass has rows that the pass has had",
        "The last batch of a pass is filled up with rows that came before, which count twice.",
        "take the last batch as short as it is (`lax.dynamic_slice` moves its start back instead), or give the "
        "rows that fill it up the weight 0.",
        "the documentation of jax.lax.dynamic_slice",
    ),
    Cause(
        "batches overlap",
        "rows",
        "a batch begins with the last rows of the one before",
        "Neighbouring batches share rows, which count twice.",
        "cut with one step: `x[start:start + size] for start in range(0, len(x), size)`.",
        NOWHERE,
    ),
)
