"""Losses of PyTorch and functions with their reduction taken apart, and their
relatives.
"""

import copy
import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from stepcheck import port, tree
from stepcheck.errors import SpecificationError, message
from stepcheck.torch.state import unpacked
from stepcheck.tree import Tree

BY_ELEMENT = (
    *(
        nn.MSELoss,
        nn.L1Loss,
        nn.SmoothL1Loss,
        nn.HuberLoss,
        nn.BCELoss,
        nn.BCEWithLogitsLoss,
        nn.PoissonNLLLoss,
    ),
    *(nn.KLDivLoss, nn.SoftMarginLoss),
)
BY_CLASS = nn.CrossEntropyLoss, nn.NLLLoss
_BY_ROW = nn.MultiMarginLoss, nn.MultiLabelMarginLoss, nn.MultiLabelSoftMarginLoss
FUNCTIONS: dict[Callable, type[nn.Module]] = {
    functional.mse_loss: nn.MSELoss,
    functional.l1_loss: nn.L1Loss,
    functional.smooth_l1_loss: nn.SmoothL1Loss,
    functional.huber_loss: nn.HuberLoss,
    functional.binary_cross_entropy: nn.BCELoss,
    functional.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    functional.poisson_nll_loss: nn.PoissonNLLLoss,
    functional.kl_div: nn.KLDivLoss,
    functional.soft_margin_loss: nn.SoftMarginLoss,
    functional.cross_entropy: nn.CrossEntropyLoss,
    functional.nll_loss: nn.NLLLoss,
    functional.multi_margin_loss: nn.MultiMarginLoss,
    functional.multilabel_margin_loss: nn.MultiLabelMarginLoss,
    functional.multilabel_soft_margin_loss: nn.MultiLabelSoftMarginLoss,
}
_SAME = 1e-4  # relative, of a batch's number and the mean of its rows' numbers
_NEAR = 1e-3  # relative, of a model's number and that of a form


class ByRow(NamedTuple):
    """A loss by row: values times weights, and weights, each (rows,).

    `is_divided`: whether the sum of the values is divided by that of the weights.
    """

    values: Tensor
    weights: Tensor
    is_divided: bool


class Loss:
    """A loss of PyTorch on outputs and labels, unreduced.

    Its reduction is the divisor, not a part of the values. A mean over rows with sample
    weights is divided by their sum.

    >>> loss = Loss(nn.CrossEntropyLoss(ignore_index=0))
    >>> by_row = loss.of(torch.zeros(3, 2), torch.tensor([1, 0, 1]))
    >>> by_row.weights.tolist(), by_row.is_divided
    ([1.0, 0.0, 1.0], True)
    """

    is_coupled = False

    def __init__(self, given: nn.Module):
        self.given, self.name = given, type(given).__name__
        self._bare = copy.deepcopy(given)
        self._bare.reduction = "none"

    def of(self, outputs: Any, labels: Tree, weights: Any = None) -> ByRow:
        """Return the loss of a model's output by row."""
        out = outputs if isinstance(outputs, Tensor) else first_of(outputs)
        labels = torch.as_tensor(labels)
        if isinstance(self.given, BY_CLASS):
            out, labels = _classes_second(out, labels)
        labels = self._fitting(out, labels)
        values = self._bare(out, labels)
        how = self.given.reduction
        if isinstance(self.given, BY_CLASS):
            own = self._weights(out, labels)
        else:
            if how in ("sum", "batchmean"):
                values = values.flatten(1).sum(1) if values.ndim > 1 else values
            elif values.ndim > 1 and isinstance(self.given, BY_ELEMENT):
                values = values.mean(-1)
            own = torch.ones(values.shape)
        values = torch.where(own == 0, torch.zeros_like(values), values)
        return _summed(values, own, weights, is_divided=how != "sum")

    def _weights(self, out: Tensor, labels: Tensor) -> Tensor:
        """Return the weight of each label: of its class, 0 for a label that is ignored."""
        if labels.is_floating_point():
            return torch.ones(labels[:, 0].shape)
        ignored = labels == self.given.ignore_index
        own = self.given.weight
        by_class = torch.ones(out.shape[1]) if own is None else own.detach().float()
        return torch.where(ignored, 0.0, by_class[torch.where(ignored, 0, labels)])

    def _fitting(self, out: Tensor, labels: Tensor) -> Tensor:
        """Return labels in the shape and dtype that the loss takes with such outputs."""
        if not isinstance(
            self.given, (*BY_CLASS, nn.MultiMarginLoss, nn.MultiLabelMarginLoss)
        ):
            return _in_shape(labels.to(out.dtype), out.shape)
        if (
            labels.ndim == out.ndim
            and labels.shape == out.shape
            and isinstance(self.given, nn.CrossEntropyLoss)
        ):
            return labels.to(out.dtype)
        if isinstance(self.given, nn.MultiLabelMarginLoss):
            return labels.long()
        return (
            labels
            if labels.ndim == out.ndim - 1
            else labels.reshape(len(out), *out.shape[2:])
        ).long()


class Function:
    """A function of outputs and labels that returns values, (values, weights), or one
    number.

    One number is the mean or the sum of those of the rows alone, or else it
    `is_coupled`: it is the loss of a whole batch.
    """

    def __init__(self, function: Callable):
        self.given, self.name = (
            function,
            getattr(function, "__name__", type(function).__name__),
        )
        self.num_labels = _num_required(function) - 1
        self.is_coupled = False

    def of(self, outputs: Any, labels: Tree, weights: Any = None) -> ByRow:
        """Return the loss of a model's output by row."""
        num = len(outputs if isinstance(outputs, Tensor) else first_of(outputs))
        found = self.whole(outputs, labels)
        if isinstance(found, tuple):
            values, own = (torch.as_tensor(each) for each in found)
            own = own.broadcast_to(values.shape).to(values)
            return _summed(torch.where(own == 0, 0.0, values) * own, own, weights)
        if found.ndim:
            return _summed(found, torch.ones_like(found), weights)
        if not self.is_coupled:
            by_row = self._by_row(outputs, labels, weights, found)
            if by_row is not None:
                return by_row
            self.is_coupled = True
        first = (torch.arange(num) == 0).to(found.dtype)
        return ByRow(first * found, first, True)

    def whole(self, outputs: Any, labels: Tree) -> Any:
        """Return the function's result."""
        given = _as_tensors(labels)
        if self.num_labels > 1 and isinstance(given, tuple):
            return self.given(outputs, *given)
        return self.given(outputs, given)

    def _by_row(
        self, outputs: Any, labels: Tree, weights: Any, found: Tensor
    ) -> ByRow | None:
        """Return a number as the mean or the sum of the rows' numbers; None if it is
        neither.
        """
        given = unpacked(outputs)
        if len({leaf.shape[:1] for leaf in given.leaves}) > 1:
            return None
        num = len(given.leaves[0])
        own = (
            torch.ones(num) if weights is None else torch.as_tensor(weights).reshape(-1)
        )

        def alone(i: int) -> Tensor:
            one = given.packed([leaf[i : i + 1] for leaf in given.leaves])
            return self.whole(
                one, tree.map_leaves(lambda leaf: leaf[i : i + 1], labels)
            )

        values = own.to(found) * torch.stack([alone(i) for i in range(num)])
        total = float(values.detach().sum())
        near = _SAME * max(float(values.detach().abs().sum()), 1e-30)
        for is_divided, divisor in ((True, float(own.sum())), (False, 1.0)):
            if abs(float(found) * divisor - total) <= near * max(divisor, 1.0):
                return ByRow(values, own.to(found), is_divided)
        return ByRow(values, own.to(found), True) if weights is not None else None

    def has_parameters(self, outputs: Any, labels: Tree) -> bool:
        """Whether the result has a gradient by tensors beside the outputs, which may
        move.
        """
        given = unpacked(outputs)
        leaves = [leaf.detach() for leaf in given.leaves]
        with torch.enable_grad():
            found = self.whole(given.packed(leaves), labels)
        return any(
            isinstance(each, Tensor) and each.requires_grad
            for each in unpacked(found).leaves
        )


def _summed(
    values: Tensor, own: Tensor, sample: Any, *, is_divided: bool = True
) -> ByRow:
    """Return values and their weights by row, times the sample weights of rows or
    places.
    """
    num = len(values)
    if sample is not None:
        given = torch.as_tensor(sample).to(values.dtype)
        is_by_place = given.ndim > 1 and given.numel() == values.numel()
        given = given.reshape(
            values.shape if is_by_place else (num, *[1] * (values.ndim - 1))
        )
        values, own = values * given, own * given
    return ByRow(
        values.reshape(num, -1).sum(1), own.reshape(num, -1).sum(1), is_divided
    )


class Objective(port.OneLoss):
    """One loss on the model's one output.

    Args:
        packed: makes the output of its one leaf.
    """

    def __init__(self, loss: Any, packed: Callable[[list], Any] | None = None):
        self.loss, self.given, self._packed = loss, loss.given, packed

    def of(self, outputs: Any, labels: Tree, *weights: Any) -> ByRow:
        """Return the loss of outputs by row."""
        if isinstance(outputs, Tensor) and self._packed is not None:
            outputs = self._packed([outputs])
        return self.loss.of(outputs, labels, *weights)


class NoLoss(port.NoLoss):
    """Placeholder for an unknown loss: gradients are not judged."""

    def of(self, outputs: Any, labels: Tree, *weights: Any) -> ByRow:
        """Return zeros, one for each row."""
        first = first_of(outputs)
        values = 0 * first.reshape(len(first), -1).sum(1)
        return ByRow(values, torch.ones(len(first)), True)


class ModelsOwn:
    """The loss that a model of Transformers computes of its logits and labels, without
    -100.

    Args:
        shift: the places by which labels are those of later ones; 1 for the next.
        function: the unreduced loss.
    """

    given = None

    def __init__(self, shift: int, function: Callable):
        self._shift, self._function = shift, function

    @staticmethod
    def of_pass(
        outputs: Any, labels: Any, loss: float, num: float | None
    ) -> "ModelsOwn | None":
        """Return the form that is nearest to this loss: the mean, or the sum divided by
        `num`.
        """
        nearest, own = _NEAR, None
        for each in _FORMS:
            form = ModelsOwn(*each)
            try:
                found = form.of(outputs, labels)
            except (IndexError, KeyError, RuntimeError, TypeError, ValueError):
                continue
            apart = _apart(found, loss, num)
            if apart < nearest:
                nearest, own = apart, form
        return own

    def of(self, outputs: Any, labels: Tree, *weights: Any) -> ByRow:
        """Return the loss of outputs by row: the sum over its places, and their number."""
        logits = outputs["logits"] if isinstance(outputs, dict) else first_of(outputs)
        given: Tensor = torch.as_tensor(labels)
        num = len(logits)
        if self._shift:
            logits, given = (
                logits[:, : given.shape[1] - self._shift],
                given[:, self._shift :],
            )
        values = self._function(logits, given)
        own = torch.ne(given, -100).to(values.dtype).broadcast_to(values.shape)
        return ByRow(values.reshape(num, -1).sum(1), own.reshape(num, -1).sum(1), True)


def _apart(found: ByRow, loss: float, num: float | None) -> float:
    """Return the distance of a loss from a mean by row, or from the sum divided by
    `num`.
    """
    total, weight = float(found.values.sum()), float(found.weights.sum())
    sums = [loss * divisor for divisor in (weight, num) if divisor]
    length = abs(total) or 1.0
    return min((abs(each - total) / length for each in sums), default=math.inf)


def _of_classes(logits: Tensor, labels: Tensor) -> Tensor:
    flat = functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(),
        labels.reshape(-1),
        reduction="none",
    )
    return flat.reshape(labels.shape)


_FORMS = (
    (1, _of_classes),
    (0, _of_classes),
    (0, lambda out, y: functional.mse_loss(out.reshape(y.shape), y, reduction="none")),
    (0, partial(functional.binary_cross_entropy_with_logits, reduction="none")),
)


def meant(loss: Any) -> Loss | Function:
    """Return the loss that is meant, taken apart.

    Raises:
        SpecificationError: it is not a loss of outputs and labels.
    """
    if isinstance(loss, type):
        must = "loss must be a loss, and no class of losses."
        raise SpecificationError(
            message(must, f"the class {loss.__name__}", f"loss={loss.__name__}().")
        )
    arguments = loss.keywords if isinstance(loss, partial) and not loss.args else {}
    function = loss.func if isinstance(loss, partial) and not loss.args else loss
    if isinstance(function, Callable) and function in FUNCTIONS:  # type: ignore[arg-type]
        loss = FUNCTIONS[function](**arguments)
    if isinstance(loss, (*BY_ELEMENT, *BY_CLASS, *_BY_ROW)):
        return Loss(loss)
    if isinstance(loss, nn.modules.loss._Loss) or not callable(loss):
        must = "loss must be a loss of outputs and labels that is known, or a function of both."
        attempt = (
            "loss=lambda outputs, labels: ..., which returns a value for each row."
        )
        raise SpecificationError(
            message(must, getattr(type(loss), "__name__", loss), attempt)
        )
    return Function(loss)


def first_of(outputs: Any) -> Tensor:
    """Return the first floating tensor of a model's output, preferably with rows."""
    leaves = [leaf for leaf in unpacked(outputs).leaves if leaf.is_floating_point()]
    return next((leaf for leaf in leaves if leaf.ndim), leaves[0])


def _classes_second(out: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs with the classes second, and labels by place: a loop makes both
    flat.
    """
    if out.ndim < 3 or labels.is_floating_point():
        return out, labels
    if labels.ndim == 1 and len(labels) == out[..., 0].numel():
        labels = labels.reshape(out.shape[:-1])
    if labels.shape != out.shape[:-1]:
        return out, labels
    if labels.shape == out.shape[:1] + out.shape[2:]:
        raise ValueError(
            "there are as many places as classes: a function of outputs and labels must be stated"
        )
    return out.movedim(-1, 1), labels


def _in_shape(labels: Tensor, shape: torch.Size) -> Tensor:
    """Return labels in the shape of outputs, if they have as many numbers."""
    return labels.reshape(shape) if labels.numel() == shape.numel() else labels


def _num_required(function: Callable) -> int:
    """Return the number of arguments that a function needs, 2 at least."""
    with suppress(TypeError, ValueError):  # of a function without a signature
        own = signature(function).parameters.values()
        return max(
            2,
            sum(
                p.default is p.empty
                and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
                for p in own
            ),
        )
    return 2


def _as_tensors(labels: Tree) -> Any:
    return (
        tuple(map(_as_tensors, labels))
        if isinstance(labels, tuple | list)
        else torch.as_tensor(labels)
    )
