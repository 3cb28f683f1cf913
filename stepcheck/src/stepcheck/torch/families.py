"""The relatives of PyTorch's losses, which a loss may be mistaken for, and the usual ones."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from stepcheck.keras.usual import Kind, Softened, kinds
from stepcheck.torch.losses import BY_CLASS, BY_ELEMENT, Function, Loss

_SMALLEST = 1e-30  # of a probability whose logarithm is taken


def usual(outputs: list[np.ndarray], y: Any) -> Iterator[Any]:
    """Yield the losses that fit labels and outputs, the most usual first."""
    for kind, from_logits in kinds(outputs, y):
        yield _USUAL[kind, from_logits]()


def mean_of(loss: Any, *, by_weight: bool = False) -> Any:
    """Return a loss as a mean over its places; `by_weight`: over their weights, which the data have."""
    if isinstance(loss, Function):
        loss.has_sample_weights = by_weight
    return loss


def picked(loss: Any) -> Function:
    """Return a loss of one output of each row; labels: (rows, 2), the output's index and the label."""

    def of_one(outputs: Tensor, labels: Tensor) -> Tensor:
        return _unreduced(loss, outputs.gather(1, labels[:, :1].long()), labels[:, 1:])

    return Function(of_one)


def by_place(loss: Any) -> Function:
    """Return a loss of which each output is a place; labels: (..., outputs, 1)."""
    return Function(lambda outputs, labels: _unreduced(loss, outputs[..., None], labels))


def soft(found: Softened) -> Function:
    """Return a sum of two cross entropies as a loss."""

    def of_both(outputs: Tensor, labels: Tensor) -> Tensor:
        pairs = zip(found.factors, labels.chunk(2, dim=-1), (outputs, outputs / found.divisor), strict=True)
        return sum(f * functional.cross_entropy(*_classes_second(out, y), reduction="none") for f, y, out in pairs)

    return _named(found.told, of_both)


def _classes_second(*tensors: Tensor) -> Iterator[Tensor]:
    yield from (each.movedim(-1, 1) for each in tensors)


def _of_probabilities(outputs: Tensor, labels: Tensor) -> Tensor:
    (logs,) = _classes_second(outputs.clamp_min(_SMALLEST).log())
    if labels.shape == outputs.shape:
        return -(logs * labels.movedim(-1, 1)).sum(1)
    return functional.nll_loss(logs, labels.long().reshape(logs[:, 0].shape), reduction="none")


def _named(name: str, function: Callable) -> Function:
    loss = Function(function)
    loss.name = name
    return loss


_USUAL: dict[tuple[Kind, bool], Callable] = {
    ("classes", True): lambda: Loss(nn.CrossEntropyLoss(), has_last=True),
    ("classes", False): lambda: _named("cross entropy of probabilities", _of_probabilities),
    ("shares", True): lambda: Loss(nn.CrossEntropyLoss(), has_last=True),
    ("shares", False): lambda: _named("cross entropy of probabilities", _of_probabilities),
    ("two classes", True): lambda: Loss(nn.BCEWithLogitsLoss()),
    ("two classes", False): lambda: Loss(nn.BCELoss()),
    ("squared", False): lambda: Loss(nn.MSELoss()),
    ("absolute", False): lambda: Loss(nn.L1Loss()),
    ("huber", False): lambda: Loss(nn.HuberLoss()),
}


def is_squared(loss: Any) -> bool:
    """Whether it is the mean squared error."""
    return isinstance(loss.given, nn.MSELoss)


def flipped(loss: Any) -> Loss | None:
    """Return the cross entropy of two classes with logits for probabilities, or the other way round."""
    own = loss.given
    if isinstance(own, nn.BCEWithLogitsLoss) and own.pos_weight is None:
        return loss.other(nn.BCELoss(own.weight, reduction=own.reduction))
    return loss.other(nn.BCEWithLogitsLoss(own.weight, own.reduction)) if isinstance(own, nn.BCELoss) else None


def swapped(loss: Any) -> Function:
    """Return a loss that gets outputs and labels in the other order."""
    return Function(lambda outputs, labels: _unreduced(loss, labels.to(outputs.dtype), outputs))


def others(loss: Any, labels: Any) -> Iterator[tuple[str, Loss]]:
    """Yield (in words, loss) for the other losses that take such labels; a function of the user's has none."""
    if isinstance(loss, Function):
        return
    reduction = getattr(loss.given, "reduction", "mean")
    is_whole = np.issubdtype(np.asarray(labels).dtype, np.integer)
    if getattr(loss.given, "weight", None) is not None:
        bare = copy.deepcopy(loss.given)
        bare.weight = None
        yield f"{loss.name} without its weights", loss.other(bare)
    for kind in (*BY_ELEMENT, *BY_CLASS, nn.MultiMarginLoss):
        if kind is not type(loss.given) and (is_whole or kind not in (nn.NLLLoss, nn.MultiMarginLoss)):
            how = "mean" if reduction == "batchmean" else reduction
            yield f"{kind.__name__}()", loss.other(kind(reduction=how))


def changes(loss: Any, width: int) -> Iterator[tuple[str, Callable, bool]]:
    """Yield (name, function, whether it is the loss's own activation) of functions that outputs may go through."""
    functions: dict[str, Callable] = {}
    if width > 1:
        functions = {name: partial(getattr(torch, name), dim=1) for name in ("softmax", "log_softmax")}
    functions |= {name: getattr(torch, name) for name in ("sigmoid", "tanh", "relu", "exp", "square")}
    own = "sigmoid" if "BCE" in loss.name else "softmax"
    yield from ((name, function, name == own) for name, function in functions.items())


def unsmoothed(loss: Any) -> tuple[Loss, float, bool] | None:
    """Return (a loss of dense labels without smoothing; the smoothing; whether labels are classes), or None."""
    own = loss.given
    if not isinstance(own, nn.CrossEntropyLoss) or own.weight is not None:
        return None
    return loss.other(nn.CrossEntropyLoss(reduction=own.reduction)), own.label_smoothing, True


def _unreduced(loss: Any, outputs: Tensor, labels: Tensor) -> Tensor:
    return loss.of(outputs, labels).values
