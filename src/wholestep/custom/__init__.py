"""A model's custom `train_step`, `test_step` and `predict_step`, run unchanged.

Other packages import from here only.
"""

from wholestep.custom.steps import CustomLook, CustomSteps, check_choices, check_replicas
from wholestep.custom.update import undone, update_of

__all__ = [
    "CustomLook",
    "CustomSteps",
    "check_choices",
    "check_replicas",
    "undone",
    "update_of",
]
