"""The user's Keras model: its calls, losses, draws and preprocessing, and the coupling of its rows.

Other packages import from here only.
"""

from wholestep.model import compiled
from wholestep.model.compiled import (
    are_same,
    distinct,
    is_overridden,
    layers,
    loss_trackers,
    open_columns,
    own_results,
    resets_on_the_host,
    unpack,
    without_labels,
)
from wholestep.model.coupling import (
    Coupling,
    Findings,
    inference,
    metrics_are_additive,
    metrics_ignore_padding,
    probe,
)
from wholestep.model.forward import Forward, MicrobatchSums
from wholestep.model.graph import values_for_tensors
from wholestep.model.losses import CompiledObjective, LossCall, check_labels, joining, unreduced
from wholestep.model.misfit import (
    check_fits,
    check_labels_are_numbers,
    check_parts,
    explained,
    named,
)
from wholestep.model.objective import (
    Mean,
    Objective,
    ObjectiveOutput,
    ScalarTerm,
    Sum,
    Term,
    Whole,
    checked,
    leave_rows_out,
    leaves_of,
    mask_of,
    read,
    uncast,
    with_leaves,
    with_mask_of,
)
from wholestep.model.trace import NOTHING_KNOWN, TraceFacts

__all__ = [
    "NOTHING_KNOWN",
    "CompiledObjective",
    "Coupling",
    "Findings",
    "Forward",
    "LossCall",
    "Mean",
    "MicrobatchSums",
    "Objective",
    "ObjectiveOutput",
    "ScalarTerm",
    "Sum",
    "Term",
    "TraceFacts",
    "Whole",
    "are_same",
    "check_fits",
    "check_labels",
    "check_labels_are_numbers",
    "check_parts",
    "checked",
    "compiled",
    "distinct",
    "explained",
    "inference",
    "is_overridden",
    "joining",
    "layers",
    "leave_rows_out",
    "leaves_of",
    "loss_trackers",
    "mask_of",
    "metrics_are_additive",
    "metrics_ignore_padding",
    "named",
    "open_columns",
    "own_results",
    "probe",
    "read",
    "resets_on_the_host",
    "uncast",
    "unpack",
    "unreduced",
    "values_for_tensors",
    "with_leaves",
    "with_mask_of",
    "without_labels",
]
