"""Why an update was not applied, or, by a model's own `train_step`, taken back."""

from collections.abc import Callable

import numpy as np

from wholestep.custom.update import AnyUpdate, CustomUpdate, is_loss
from wholestep.errors import NonFiniteError, message
from wholestep.reports.diagnosis import diagnose
from wholestep.reports.report import Report
from wholestep.state import State


def why_not_applied(update: AnyUpdate, before: Callable[[], State], report: Report, i: int) -> NonFiniteError:
    """Return the error that says why update i of a dispatch was not applied; `before` returns the state before it."""
    return _taken_back(report, i) if isinstance(update, CustomUpdate) else diagnose(update, before(), report, i)


def _taken_back(report: Report, i: int) -> NonFiniteError:
    """Return the error that says why update i of a dispatch was taken back."""
    number = report.first + i
    bad = {k: v for k, v in report.numbers(i).items() if is_loss(k) and not np.all(np.isfinite(v))}
    received = ", ".join(f"{name}={value}" for name, value in bad.items()) or "weights that are not finite"
    told = message(
        f"Update {number} must have a finite loss, and leave finite weights. It was taken back; the weights are those "
        f"after update {number - 1}.",
        f"{received}, from the model's own train_step, which does not tell the rows apart",
        'look at the batch, lower the learning rate, clip gradients, or pass Trainer(on_nonfinite="skip"); a '
        "number that may be NaN needs a name that does not end with 'loss'.",
    )
    return NonFiniteError(told, number)
