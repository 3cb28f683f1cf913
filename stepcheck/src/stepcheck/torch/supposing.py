"""The loss that a model computes itself of its outputs and labels."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from stepcheck.torch.losses import ByRow, first_of
from stepcheck.tree import Tree

_SAME = 1e-3  # relative, of a model's number and that of a form


class ModelsOwn:
    """The loss that a model of Transformers computes of its logits and labels; labels of -100 are ignored.

    Args:
        told: in words.
        shift: the places by which labels are those of later ones; 1 for the next.
        function: the unreduced loss.
    """

    def __init__(self, told: str, shift: int, function: Callable):
        self.told, self.given, self.shift, self._function = told, None, shift, function

    @staticmethod
    def of_pass(outputs: Any, labels: Any, loss: float, num: float | None) -> "ModelsOwn | None":
        """Return the form that has this loss on a pass: the mean, or the sum divided by `num`."""
        for each in _FORMS:
            own = ModelsOwn(*each)
            try:
                found = own.of(outputs, labels)
            except (IndexError, KeyError, RuntimeError, TypeError, ValueError):
                continue
            total, weight = float(found.values.sum()), float(found.weights.sum())
            if any(abs(loss * n - total) <= _SAME * abs(total) for n in (weight, num) if n):
                return own
        return None

    def of(self, outputs: Any, labels: Tree, *weights: Any) -> ByRow:
        """Return the loss of outputs by row: the sum over its places, and their number."""
        logits = outputs["logits"] if isinstance(outputs, dict) else first_of(outputs)
        given: Tensor = torch.as_tensor(labels)
        num = len(logits)
        if self.shift:
            logits, given = logits[:, : given.shape[1] - self.shift], given[:, self.shift :]
        values = self._function(logits, given)
        own = torch.ne(given, -100).to(values.dtype).broadcast_to(values.shape)
        return ByRow(values.reshape(num, -1).sum(1), own.reshape(num, -1).sum(1), True)


def _of_classes(logits: Tensor, labels: Tensor) -> Tensor:
    flat = functional.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), labels.reshape(-1), reduction="none")
    return flat.reshape(labels.shape)


_FORMS = (
    ("cross entropy of the next place, over the places whose label is not -100", 1, _of_classes),
    ("cross entropy over the places whose label is not -100", 0, _of_classes),
    ("cross entropy of the place after the next, over the places whose label is not -100", 2, _of_classes),
    ("squared error", 0, lambda out, y: functional.mse_loss(out.reshape(y.shape), y, reduction="none")),
    ("binary cross entropy", 0, partial(functional.binary_cross_entropy_with_logits, reduction="none")),
)
