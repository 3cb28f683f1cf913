"""wholestep: one whole step, however you cut the batch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from wholestep import backend
from wholestep.errors import (
    BatchError,
    CheckpointError,
    NonFiniteError,
    PeerError,
    SpecificationError,
    WholestepError,
)

if TYPE_CHECKING:
    from wholestep.aliases import audit
    from wholestep.checkpoints import Checkpoints, load_weights
    from wholestep.data import Batches
    from wholestep.determinism import deterministic
    from wholestep.model import Mean, Objective, Sum, Whole
    from wholestep.nonfinite import Skip
    from wholestep.reports.run_report import RunReport
    from wholestep.schedules import RowSchedule
    from wholestep.steps import Step
    from wholestep.trainer import Trainer

__version__ = "0.2.0"

__all__ = [
    "BatchError",
    "Batches",
    "CheckpointError",
    "Checkpoints",
    "Mean",
    "NonFiniteError",
    "Objective",
    "PeerError",
    "RowSchedule",
    "RunReport",
    "Skip",
    "SpecificationError",
    "Step",
    "Sum",
    "Trainer",
    "Whole",
    "WholestepError",
    "audit",
    "deterministic",
    "load_weights",
]

_HOMES = {
    "Batches": "data",
    "Checkpoints": "checkpoints.settings",
    "Mean": "model",
    "Objective": "model",
    "RowSchedule": "schedules",
    "RunReport": "reports.run_report",
    "Skip": "nonfinite",
    "Step": "steps",
    "Sum": "model",
    "Trainer": "trainer",
    "Whole": "model",
    "audit": "aliases",
    "deterministic": "determinism",
    "load_weights": "checkpoints",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use: `wholestep launch` starts other processes and needs no
    Keras itself.
    """
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name != "audit":  # which may be of a loop without Keras
        backend.check()
    home = import_module(f"wholestep.{_HOMES[name]}")
    globals()[name] = value = getattr(home, name)
    return value


def __dir__() -> list[str]:
    """Return the public names alone, for tab completion."""
    return __all__
