"""The relatives of PyTorch's losses, which a loss may be mistaken for."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from stepcheck.torch.losses import Loss


def mean_of(loss: Any, *, by_weight: bool = False) -> Any:
    """Return a loss: a mean over the weights that the data have, or else over its
    places.
    """
    return loss


def flipped(loss: Any) -> Loss | None:
    """Return the cross entropy of two classes of logits for that of probabilities, or
    back.
    """
    own = loss.given
    if isinstance(own, nn.BCEWithLogitsLoss) and own.pos_weight is None:
        return Loss(nn.BCELoss(own.weight, reduction=own.reduction))
    return (
        Loss(nn.BCEWithLogitsLoss(own.weight, own.reduction))
        if isinstance(own, nn.BCELoss)
        else None
    )


def changes(loss: Any, width: int) -> Iterator[tuple[str, Callable, bool]]:
    """Yield (name, function, whether the loss has it) of functions that outputs may go
    through.
    """
    functions: dict[str, Callable] = {}
    if width > 1:
        functions = {
            name: partial(getattr(torch, name), dim=1)
            for name in ("softmax", "log_softmax")
        }
    functions |= {
        name: getattr(torch, name)
        for name in ("sigmoid", "tanh", "relu", "exp", "square")
    }
    own = "sigmoid" if "BCE" in loss.name else "softmax"
    yield from ((name, function, name == own) for name, function in functions.items())


def unsmoothed(loss: Any) -> tuple[Loss, float, bool] | None:
    """Return (a loss without smoothing; the smoothing; whether labels are classes), or
    None.
    """
    own = loss.given
    if not isinstance(own, nn.CrossEntropyLoss) or own.weight is not None:
        return None
    return Loss(nn.CrossEntropyLoss(reduction=own.reduction)), own.label_smoothing, True
