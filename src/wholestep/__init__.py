"""wholestep: one whole step, however you cut the batch."""

from wholestep.batches import Batches
from wholestep.errors import BatchError, NonFiniteError, PeerError, SpecificationError, WholestepError
from wholestep.mean import Mean, Sum
from wholestep.objective import Objective
from wholestep.trainer import Trainer

__version__ = "0.1.0"

__all__ = [
    "BatchError",
    "Batches",
    "Mean",
    "NonFiniteError",
    "Objective",
    "PeerError",
    "SpecificationError",
    "Sum",
    "Trainer",
    "WholestepError",
]
