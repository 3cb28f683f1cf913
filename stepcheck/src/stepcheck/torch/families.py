"""The relatives of PyTorch's losses, which a loss may be mistaken for."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stepcheck.torch.losses import BY_CLASS, BY_ELEMENT, Function, Loss


def mean_of(loss: Any, *, by_weight: bool = False) -> Any:
    """Return a loss: a mean over the weights that the data have, or else over its places."""
    return loss


def is_squared(loss: Any) -> bool:
    """Whether it is the mean squared error."""
    return isinstance(loss.given, nn.MSELoss)


def flipped(loss: Any) -> Loss | None:
    """Return the cross entropy of two classes of logits for that of probabilities, or back."""
    own = loss.given
    if isinstance(own, nn.BCEWithLogitsLoss) and own.pos_weight is None:
        return Loss(nn.BCELoss(own.weight, reduction=own.reduction))
    return (
        Loss(nn.BCEWithLogitsLoss(own.weight, own.reduction))
        if isinstance(own, nn.BCELoss)
        else None
    )


def swapped(loss: Any) -> Function:
    """Return a loss that gets outputs and labels in the other order."""
    return Function(lambda outputs, labels: _unreduced(loss, labels.to(outputs.dtype), outputs))


def others(loss: Any, labels: Any) -> Iterator[tuple[str, Loss]]:
    """Yield (in words, loss) for the other losses that take such labels; a function has none."""
    if isinstance(loss, Function):
        return
    reduction = getattr(loss.given, "reduction", "mean")
    is_whole = np.issubdtype(np.asarray(labels).dtype, np.integer)
    if getattr(loss.given, "weight", None) is not None:
        bare = copy.deepcopy(loss.given)
        bare.weight = None
        yield f"{loss.name} without its weights", Loss(bare)
    for kind in (*BY_ELEMENT, *BY_CLASS, nn.MultiMarginLoss):
        if kind is not type(loss.given) and (
            is_whole or kind not in (nn.NLLLoss, nn.MultiMarginLoss)
        ):
            how = "mean" if reduction == "batchmean" else reduction
            yield f"{kind.__name__}()", Loss(kind(reduction=how))


def changes(loss: Any, width: int) -> Iterator[tuple[str, Callable, bool]]:
    """Yield (name, function, whether the loss has it) of functions that outputs may go through."""
    functions: dict[str, Callable] = {}
    if width > 1:
        functions = {
            name: partial(getattr(torch, name), dim=1) for name in ("softmax", "log_softmax")
        }
    functions |= {
        name: getattr(torch, name) for name in ("sigmoid", "tanh", "relu", "exp", "square")
    }
    own = "sigmoid" if "BCE" in loss.name else "softmax"
    yield from ((name, function, name == own) for name, function in functions.items())


def unsmoothed(loss: Any) -> tuple[Loss, float, bool] | None:
    """Return (a loss without smoothing; the smoothing; whether labels are classes), or None."""
    own = loss.given
    if not isinstance(own, nn.CrossEntropyLoss) or own.weight is not None:
        return None
    return Loss(nn.CrossEntropyLoss(reduction=own.reduction)), own.label_smoothing, True


def _unreduced(loss: Any, outputs: Tensor, labels: Tensor) -> Tensor:
    return loss.of(outputs, labels).values
