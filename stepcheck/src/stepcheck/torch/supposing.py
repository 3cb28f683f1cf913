"""The loss of a loop that calls none of PyTorch's: computed by the model, or solved for by its derivative."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from stepcheck import tree
from stepcheck.keras.derived import APART, Solved, as_wide, by_pass, passes, solved
from stepcheck.port import ByPass, quiet
from stepcheck.report.found import Likely
from stepcheck.stages.judge import Case
from stepcheck.stages.unsolved import by_frequency, explains, notes_on
from stepcheck.torch.losses import ByRow, Objective, first_of
from stepcheck.torch.replay import Replay
from stepcheck.trace.log import Called, Log
from stepcheck.trace.windows import PAD, Rows
from stepcheck.tree import Tree

_FEW = 0.02  # of labels that are others: fewer may be noise
_SECONDS = 20.0  # of the search; the loss that is tried then is tried to its end


class Known(NamedTuple):
    """What may be in a loss.

    Attributes:
        labels: the arrays with a row for each row of the data, by name.
        beside: the tensors that the script names beside a pass, by name and by the order of the pass.
    """

    labels: dict[str, np.ndarray]
    beside: dict[str, dict[int, np.ndarray]]


class Supposed(NamedTuple):
    """A loss with the derivative of the loop's, its data, and both in words."""

    data: tuple[Any, Any, Any]
    objective: Objective
    by_pass: ByPass | None
    told: str
    note: str = ""


class Explained(NamedTuple):
    """A case by a loss that explains the gradients of a loop; `note`: on the loss, "" for none."""

    case: Case
    note: str


def supposed(
    model: nn.Module, log: Log, x: Tree, known: Known, case_of: Callable[[Supposed], Case]
) -> Explained | None:
    """Return the case by the first loss that explains the gradients of a loop; None if none does."""
    until = time.monotonic() + _SECONDS
    with quiet():
        for each in _possible(model, log, x, known):
            case = case_of(each)
            if (verdict := case.judge()).failed is None and explains(verdict):
                return Explained(case, each.note)
            if time.monotonic() > until:
                break
    return None


def notes(model: nn.Module, log: Log, x: Tree, known: Known) -> Iterator[str]:
    """Yield a note on a loss that no usual one explains."""
    if _is_of_one_output(log) and (derived := passes(log, Rows(x), 0)):
        labels = {name: y for name, y in known.labels.items() if y.dtype.kind in "fiub"}
        yield from notes_on(_port(model, x), derived, labels, {})


def _possible(model: nn.Module, log: Log, x: Tree, known: Known) -> Iterator[Supposed]:
    if not _is_of_one_output(log):
        return
    (first, *others), masks = tree.leaves(x), {}
    labels = known.labels | ({} if others else {"the inputs": first})
    if not others and first.ndim == 2 and first.dtype.kind in "iu":  # of places
        labels["the next inputs"] = np.pad(first[:, 1:], [(0, 0), (0, 1)])
        masks = {"at all places but the last": np.arange(first.shape[1]) < np.full_like(first, first.shape[1] - 1)}
    if derived := passes(log, Rows(x), 0):
        for one in solved(_port(model, x), derived, labels, labels | masks):
            note = one.note or next(_by_class(one), "")
            yield Supposed((x, one.labels, one.weights), Objective(one.loss), None, one.told, note)
    yield from _by_pass(model, log, x, known)


def _by_class(one: Solved) -> Iterator[str]:
    if one.weights is not None:
        yield from by_frequency(one.labels, one.weights)


def _by_pass(model: nn.Module, log: Log, x: Tree, known: Known) -> Iterator[Supposed]:
    """Yield the losses of labels that belong to a pass, and to no row."""
    called = [each for each in log.called if each.is_whole and set(each.derivatives) == {0}]
    values = {name: _joined(own, called) for name, own in known.beside.items() if _are_as(own, called)}
    if not values:
        return
    table = Rows(x)
    rows = np.concatenate([table.find(each.inputs) for each in called])
    if np.all(rows != PAD):
        values = {name: y[rows] for name, y in known.labels.items()} | values
    for one, own in by_pass(_port(model, np.zeros(len(rows))), called, values):
        note = one.note or next(of_other_rows(one.labels, rows, known.labels), "")
        yield Supposed((x, np.zeros(len(tree.leaves(x)[0])), None), Objective(one.loss), own, one.told, note)


def of_other_rows(given: np.ndarray, rows: np.ndarray, labels: dict[str, np.ndarray]) -> Iterator[str]:
    """Yield a note if the labels of a whole pass are those of an array, but not of the rows of the inputs."""
    for name, y in labels.items():
        num = len(y)
        is_pass = np.array_equal(np.sort(rows[:num]), np.arange(num))
        if not is_pass or y.dtype.kind not in "fiub" or y.shape[1:] != given.shape[1:]:
            continue
        own, expected = given[:num].reshape(num, -1), y[rows[:num]].reshape(num, -1)
        share = float(np.mean(np.any(own != expected, axis=1)))
        if share > _FEW and np.array_equal(np.sort(own, axis=0), np.sort(expected, axis=0)):
            told = f"The loss gets the labels of {name}, but in {share:.0%} of the rows not those of the inputs' rows."
            yield Likely(f"{told} {APART}")


def _is_of_one_output(log: Log) -> bool:
    """Whether the loss is of the first output alone."""
    return all(not called.derivatives or set(called.derivatives) == {0} for called in log.called if called.is_whole)


def _port(model: nn.Module, x: Tree) -> Replay:
    return Replay(model, (x, np.zeros(len(tree.leaves(x)[0])), None))


def _joined(own: dict[int, np.ndarray], called: list[Called]) -> np.ndarray:
    return np.concatenate(as_wide([own[each.order] for each in called]))


def _are_as(own: dict[int, np.ndarray], called: list[Called]) -> bool:
    """Whether there are values for each pass, a row for each of its rows, and of one shape and kind.

    Of outputs with places there may be more of these in one pass than in another.
    """
    values = [(own[c.order], c.outputs[0]) for c in called if c.order in own]
    places = 2 if values and values[0][1].ndim > 2 else 1
    are_all = bool(called) and len(values) == len(called)
    is_one_kind = len({(v.shape[places:], v.ndim, v.dtype) for v, _ in values}) == 1
    return are_all and is_one_kind and all(len(v) == len(out) for v, out in values)


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
