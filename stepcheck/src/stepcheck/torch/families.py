"""The relatives of PyTorch's losses, which a loss may be mistaken for."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from stepcheck.torch.losses import Loss


def flipped(loss: Any) -> Loss | None:
    """Return the cross entropy of two classes of logits for that of probabilities, or
    back.
    """
    own = loss.given
    kinds = {nn.BCELoss: nn.BCEWithLogitsLoss, nn.BCEWithLogitsLoss: nn.BCELoss}
    if type(own) not in kinds or getattr(own, "pos_weight", None) is not None:
        return None
    return Loss(kinds[type(own)](own.weight, reduction=own.reduction))


def changes(loss: Any, width: int) -> Iterator[tuple[str, Callable, bool]]:
    """Yield (name, function, whether the loss has it) of functions that outputs may go
    through.
    """
    own = "sigmoid" if "BCE" in loss.name else "softmax"
    for name in ("softmax", "log_softmax") if width > 1 else ():
        yield name, partial(getattr(torch, name), dim=1), name == own
    for name in ("sigmoid", "tanh", "relu", "exp", "square"):
        yield name, getattr(torch, name), name == own


def unsmoothed(loss: Any) -> tuple[Loss, float, bool] | None:
    """Return (a loss without smoothing; the smoothing; whether labels are classes), or
    None.
    """
    own = loss.given
    if not isinstance(own, nn.CrossEntropyLoss) or own.weight is not None:
        return None
    return (
        Loss(nn.CrossEntropyLoss(reduction=own.reduction)),
        own.label_smoothing,
        True,
    )
