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
    holds_numbers,
    numpy_batch,
    own_batch,
    refuse_lists,
    text_as_arrays,
    to_numpy,
    without_none,
)
from wholestep.data.opening import go_to_epoch, in_turn, open_batches, replayable
from wholestep.data.sparse import dense, is_sparse
from wholestep.data.weights import check_weights, class_weighted

__all__ = [
    "NUMBER_CLASSES",
    "Batch",
    "Batches",
    "Block",
    "Check",
    "Data",
    "Feed",
    "FeedCache",
    "SingleBatches",
    "as_rows",
    "check_weights",
    "class_weighted",
    "classify",
    "content_of",
    "dense",
    "digest_of",
    "go_to_epoch",
    "holds_numbers",
    "in_turn",
    "is_sparse",
    "layout_of",
    "most_in_a_dispatch",
    "numpy_batch",
    "open_batches",
    "open_feed",
    "own_batch",
    "refuse_lists",
    "replayable",
    "stack",
    "stage",
    "text_as_arrays",
    "to_numpy",
    "without_none",
]
