"""Losses of PyTorch, and functions of outputs and labels, by row."""

import copy
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from stepcheck import port, tree
from stepcheck.errors import SpecificationError, attempt, message
from stepcheck.torch.nests import packed, unpacked
from stepcheck.tree import Tree

BY_CLASS = nn.CrossEntropyLoss, nn.NLLLoss
FUNCTIONS: dict[Callable, type[nn.Module]] = {
    functional.mse_loss: nn.MSELoss,
    functional.l1_loss: nn.L1Loss,
    functional.smooth_l1_loss: nn.SmoothL1Loss,
    functional.huber_loss: nn.HuberLoss,
    functional.binary_cross_entropy: nn.BCELoss,
    functional.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    functional.kl_div: nn.KLDivLoss,
    functional.cross_entropy: nn.CrossEntropyLoss,
    functional.nll_loss: nn.NLLLoss,
}
_SAME = 1e-4  # relative, of a batch's number and the mean of its rows' numbers
_NEAR = 1e-3  # relative, of a model's number and that of a form


class ByRow(NamedTuple):
    """A loss by term and row: values times weights, and weights, both (terms, rows).

    `is_divided`: whether the sum of the values is divided by that of the weights.
    """

    values: Tensor
    weights: Tensor
    is_divided: bool = True
    names: tuple[str, ...] = ("loss",)


def times(values: Tensor, weights: Any) -> tuple[Tensor, Tensor]:
    """Return values times weights, and these; weights may have the leading axes alone."""
    own = torch.as_tensor(weights).to(values)
    own = own.reshape(*own.shape, *[1] * (values.ndim - own.ndim)).expand_as(
        values
    )
    return torch.where(own == 0, torch.zeros_like(values), values) * own, own


def by_row(
    values: Tensor, own: Tensor, weights: Any = None, *, is_divided: bool = True
) -> ByRow:
    """Return the sums of values and of their weights of each row, times sample weights."""
    if weights is not None:
        values, sample = times(values, weights)
        own = own * sample
    num = len(values)
    values, own = (each.reshape(1, num, -1).sum(2) for each in (values, own))
    return ByRow(values, own, is_divided)


class Loss:
    """A loss of PyTorch on outputs and labels, unreduced.

    Its reduction is the divisor, not a part of the values. A mean over rows with sample
    weights is divided by their sum.

    >>> loss = Loss(nn.CrossEntropyLoss(ignore_index=0))
    >>> by_row = loss.of(torch.zeros(3, 2), torch.tensor([1, 0, 1]))
    >>> by_row.weights.tolist(), by_row.is_divided
    ([[1.0, 0.0, 1.0]], True)
    """

    is_coupled = False

    def __init__(self, given: nn.Module):
        self.given, self.name = given, type(given).__name__
        self._bare = copy.deepcopy(given)
        self._bare.reduction = "none"

    def of(self, outputs: Any, labels: Tree, weights: Any = None) -> ByRow:
        """Return the loss of a model's output by row."""
        out, labels = first_of(outputs), torch.as_tensor(labels)
        how, is_by_class = (
            self.given.reduction,
            isinstance(self.given, BY_CLASS),
        )
        if is_by_class:
            out, labels = _classes_second(out, labels)
        if labels.shape == out.shape:
            labels = labels.to(out.dtype)
        elif is_by_class:
            labels = labels.reshape(len(out), *out.shape[2:]).long()
        elif labels.numel() == out.numel():
            labels = labels.reshape(out.shape).to(out.dtype)
        values = self._bare(out, labels)
        if not is_by_class and values.ndim > 1:
            places = values.reshape(len(values), -1)
            values = values.mean(-1) if how == "mean" else places.sum(1)
        own = torch.ones_like(values)
        if is_by_class and not labels.is_floating_point():
            own = self._weights(out, labels).to(values)
        return by_row(values, own, weights, is_divided=how != "sum")

    def _weights(self, out: Tensor, labels: Tensor) -> Tensor:
        """Return the weight of each label: of its class, 0 for a label that is ignored."""
        given, ones = self.given, torch.ones_like(out)
        ask = {"ignore_index": given.ignore_index, "reduction": "none"}
        return functional.nll_loss(-ones, labels, given.weight, **ask)


class Function:
    """A function of outputs and labels that returns values, (values, weights), or one
    number.

    One number is the mean or the sum of those of the rows alone, or else it
    `is_coupled`: it is the loss of a whole batch.
    """

    def __init__(self, function: Callable):
        self.given = function
        self.name = getattr(function, "__name__", type(function).__name__)
        self.num_labels = _num_required(function) - 1
        self.is_coupled = False

    def of(self, outputs: Any, labels: Tree, weights: Any = None) -> ByRow:
        """Return the loss of a model's output by row."""
        found = self.whole(outputs, labels)
        if isinstance(found, tuple):
            return by_row(*times(*map(torch.as_tensor, found)), weights)
        if found.ndim:
            return by_row(found, torch.ones_like(found), weights)
        if not self.is_coupled and (
            rows := self._alone(outputs, labels, found)
        ):
            return by_row(*rows[:2], weights, is_divided=rows.is_divided)
        self.is_coupled = True
        first = torch.zeros(len(first_of(outputs))).to(found)
        first[0] = 1
        return by_row(first * found, first)

    def whole(self, outputs: Any, labels: Tree) -> Any:
        """Return the function's result."""
        given = tree.map_leaves(torch.as_tensor, labels)
        if self.num_labels > 1 and isinstance(given, tuple):
            return self.given(outputs, *given)
        return self.given(outputs, given)

    def _alone(self, outputs: Any, labels: Tree, found: Tensor) -> ByRow | None:
        """Return a number as the mean or the sum of the rows' numbers; None if it is
        neither.
        """
        form, leaves = unpacked(outputs)
        if len({leaf.shape[:1] for leaf in leaves}) > 1:
            return None

        def alone(i: int) -> Tensor:
            def row(leaf: Any) -> Any:
                return leaf[i : i + 1]

            return self.whole(
                packed(form, list(map(row, leaves))),
                tree.map_leaves(row, labels),
            )

        values = torch.stack([*map(alone, range(len(leaves[0])))])
        numbers = values.detach()
        total, most = float(numbers.sum()), float(numbers.abs().sum())
        for num, is_divided in ((len(values), True), (1, False)):
            if (
                abs(found.item() * num - total)
                <= _SAME * max(most, 1e-30) * num
            ):
                return ByRow(values, torch.ones_like(values), is_divided)
        return None


class Objective(port.OneLoss):
    """One loss on the model's one output.

    Args:
        form: of the output, if it is a nest of one leaf.
    """

    def __init__(self, loss: Any, form: Any = None):
        self.loss, self.given, self._form = loss, loss.given, form

    def of(self, outputs: Any, labels: Tree, *weights: Any) -> ByRow:
        """Return the loss of outputs by row."""
        if isinstance(outputs, Tensor) and self._form is not None:
            outputs = packed(self._form, [outputs])
        return self.loss.of(outputs, labels, *weights)


def _of_classes(logits: Tensor, labels: Tensor) -> Tensor:
    flat = logits.reshape(-1, logits.shape[-1]).float()
    values = functional.cross_entropy(
        flat, labels.reshape(-1), reduction="none"
    )
    return values.reshape(labels.shape)


def _of_numbers(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.mse_loss(
        logits.reshape(labels.shape), labels, reduction="none"
    )


_of_each = partial(
    functional.binary_cross_entropy_with_logits, reduction="none"
)
_FORMS = (1, _of_classes), (0, _of_classes), (0, _of_numbers), (0, _of_each)


def _of_logits(
    shift: int, function: Callable, outputs: Any, labels: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the values and weights of a loss of a model of Transformers, by place.

    Args:
        shift: 1 if a label is that of the place before.
    """
    logits = (
        outputs["logits"] if isinstance(outputs, dict) else first_of(outputs)
    )
    if shift:
        logits, labels = logits[:, : labels.shape[1] - 1], labels[:, 1:]
    values = function(logits, labels)
    return values, labels != -100


def models_own(
    outputs: Any, labels: np.ndarray, loss: float, num: float | None
) -> Function | None:
    """Return the loss that a model computes of its logits and labels: of the usual
    ones the one whose mean, or sum divided by the stated number, is nearest.
    """

    def apart(function: Function) -> float:
        found = function.of(outputs, labels)
        total, weight = found.values.sum().item(), found.weights.sum().item()
        sums = [loss * divisor for divisor in (weight, num) if divisor]
        return min(abs(each - total) for each in sums) / (abs(total) or 1.0)

    functions = [Function(partial(_of_logits, *form)) for form in _FORMS]
    tried = [(attempt(partial(apart, each))[0], each) for each in functions]
    known = [
        (far, each) for far, each in tried if far is not None and far < _NEAR
    ]
    return min(known, key=lambda pair: pair[0])[1] if known else None


def meant(loss: Any) -> Loss | Function:
    """Return the loss that is meant, taken apart.

    Raises:
        SpecificationError: it is not a loss of outputs and labels.
    """
    if isinstance(loss, type) or not callable(loss):
        must = (
            "loss must be a loss of outputs and labels, or a function of both."
        )
        way = "loss=nn.MSELoss(), or loss=lambda outputs, labels: a value for each row."
        raise SpecificationError(message(must, loss, way))
    is_partial = isinstance(loss, partial) and not loss.args
    function, arguments = (
        (loss.func, loss.keywords) if is_partial else (loss, {})
    )
    kinds = [kind for own, kind in FUNCTIONS.items() if own is function]
    given = kinds[0](**arguments) if kinds else loss
    return Loss(given) if type(given) in FUNCTIONS.values() else Function(given)


def first_of(outputs: Any) -> Tensor:
    """Return the first floating tensor of a model's output, preferably with rows."""
    leaves = [
        leaf for leaf in unpacked(outputs).leaves if leaf.is_floating_point()
    ]
    return next((leaf for leaf in leaves if leaf.ndim), leaves[0])


def _classes_second(out: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs with the classes second, and labels by place: a loop makes both
    flat.
    """
    if out.ndim < 3 or labels.is_floating_point():
        return out, labels
    places = out.shape[:-1]
    labels = labels.reshape(places) if labels.ndim == 1 else labels
    if labels.shape != places:
        return out, labels
    if labels.shape == out.shape[:1] + out.shape[2:]:
        raise ValueError(
            "there are as many places as classes: state a function"
        )
    return out.movedim(-1, 1), labels


def _num_required(function: Callable) -> int:
    """Return the number of arguments that a function needs, 2 at least."""
    num = 0
    with suppress(TypeError, ValueError):  # of a function without a signature
        for each in signature(function).parameters.values():
            is_placed = each.kind in (
                each.POSITIONAL_ONLY,
                each.POSITIONAL_OR_KEYWORD,
            )
            num += is_placed and each.default is each.empty
    return max(2, num)
