"""Data: a source, a sampler and a position, on their way to the device; the door of the room."""

from wholestep.data.batches import Batches
from wholestep.data.block import (
    Batch,
    Block,
    Check,
    FeedCache,
    SingleBatches,
    most_in_a_dispatch,
    stack,
    stage,
)
from wholestep.data.feed import Feed, open_feed
from wholestep.data.fingerprint import content_of, digest_of, layout_of
from wholestep.data.kinds import Data, classify
from wholestep.data.leaves import (
    NUMBER_CLASSES,
    as_rows,
    copied_batch,
    holds_numbers,
    numpy_batch,
    refuse_lists,
    text_as_arrays,
    to_numpy,
    without_none,
)
from wholestep.data.opening import compose, open_batches, replayable, seek_epoch
from wholestep.data.sizes import BatchSize, SizeSteps, first_size, size_schedule
from wholestep.data.sparse import dense, is_sparse
from wholestep.data.weights import check_weights, class_weighted

__all__ = [
    "NUMBER_CLASSES",
    "Batch",
    "BatchSize",
    "Batches",
    "Block",
    "Check",
    "Data",
    "Feed",
    "FeedCache",
    "SingleBatches",
    "SizeSteps",
    "as_rows",
    "check_weights",
    "class_weighted",
    "classify",
    "compose",
    "content_of",
    "copied_batch",
    "dense",
    "digest_of",
    "first_size",
    "holds_numbers",
    "is_sparse",
    "layout_of",
    "most_in_a_dispatch",
    "numpy_batch",
    "open_batches",
    "open_feed",
    "refuse_lists",
    "replayable",
    "seek_epoch",
    "size_schedule",
    "stack",
    "stage",
    "text_as_arrays",
    "to_numpy",
    "without_none",
]
