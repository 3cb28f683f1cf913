"""Diagnosis of an update that was not applied or, by a custom `train_step`, was undone."""

from collections.abc import Callable

import numpy as np

from wholestep.custom.update import AnyUpdate, CustomUpdate, is_loss
from wholestep.errors import NonFiniteError, message
from wholestep.reports.diagnosis import diagnose
from wholestep.reports.report import Report
from wholestep.state import State


def why_not_applied(update: AnyUpdate, before: Callable[[], State], report: Report, i: int) -> NonFiniteError:
    """Return the error that explains why update i was not applied; `before` returns the state before it."""
    return _taken_back(report, i) if isinstance(update, CustomUpdate) else diagnose(update, before(), report, i)


def _taken_back(report: Report, i: int) -> NonFiniteError:
    """Return the error that explains why update i of a dispatch was undone."""
    number = report.first + i
    bad = {k: v for k, v in report.numbers(i).items() if is_loss(k) and not np.all(np.isfinite(v))}
    received = ", ".join(f"{name}={value}" for name, value in bad.items()) or "weights that are not finite"
    told = message(
        f"Update {number} must have a finite loss and finite new weights. It was undone; the weights are those after "
        f"update {number - 1}.",
        f"{received}, from the model's train_step, which does not report single rows",
        'look at the batch, lower the learning rate, clip gradients, or pass Trainer(on_nonfinite="skip"); a '
        "number that may be NaN needs a name that does not end with 'loss'.",
    )
    return NonFiniteError(told, number)
