"""The usual losses, by the shapes and the numbers of outputs and labels; the frameworks have each as their own."""

from collections.abc import Iterator
from itertools import product
from typing import Any, Literal, NamedTuple

import numpy as np

from stepcheck.report.found import Likely
from stepcheck.solve.ratios import least
from stepcheck.trace.measure import SOLVED, are_shares

Kind = Literal["classes", "shares", "two classes", "squared", "absolute", "huber"]


class Usual(NamedTuple):
    """A usual loss; `from_logits`: whether it takes the outputs as logits, and not as probabilities."""

    kind: Kind
    from_logits: bool = False


def kinds(outputs: list[np.ndarray], y: Any) -> Iterator[Usual]:
    """Yield the losses that fit labels and the one output, the most usual first.

    >>> [each.kind for each in kinds([np.array([[0.9, 0.1]])], np.array([0]))]
    ['classes']
    """
    if len(outputs) != 1 or not isinstance(y, np.ndarray) or not y.size or not outputs[0].ndim:
        return
    labels, out = y[..., 0] if y.ndim > 1 and y.shape[-1] == 1 else y, outputs[0]
    single = out[..., 0] if out.ndim > 1 and out.shape[-1] == 1 else out
    is_whole = labels.dtype.kind in "biuf" and bool(np.all(labels == np.round(labels)))
    if labels.ndim == out.ndim - 1 and out.shape[-1] > 1:
        if is_whole and labels.min() >= 0 and labels.max() < out.shape[-1]:
            yield Usual("classes", not are_shares(out))
        return
    if labels.ndim != single.ndim or labels.shape[1:] != single.shape[1:]:
        return
    are_logits = bool(out.min() < 0 or out.max() > 1)
    if set(np.unique(labels)) <= {0, 1}:
        if out.shape[-1] > 1 and np.all(y.sum(-1) == 1):
            yield Usual("shares", not are_shares(out))
        yield Usual("two classes", are_logits)
    yield from (Usual("squared"), Usual("absolute"), Usual("huber"))
    if not is_whole and labels.min() >= 0 and labels.max() <= 1:  # as of pixels
        yield Usual("two classes", are_logits)


def shares_of(logits: np.ndarray, axis: int = -1) -> np.ndarray:
    """Return the softmax of logits."""
    powers = np.exp(logits - logits.max(axis, keepdims=True))
    return powers / powers.sum(axis, keepdims=True)


_TEMPERATURES = 1.0, 2.0, 3.0, 4.0, 5.0, 1.5, 2.5, 6.0, 7.0, 8.0, 10.0, 12.0, 15.0, 20.0, 0.5
_MOST_NUMBERS = 2**24  # of one-hot labels
_FEWEST = 3  # of two classes, any loss of the difference has such a derivative
_NUM_ROWS = 16  # from which two numbers are solved: those with the largest derivatives


class Softened(NamedTuple):
    """A sum of two cross entropies: of logits, and of logits divided by a number.

    Attributes:
        factors: of both.
        labels: shares for all rows of the data, (rows, ..., twice the classes), of both side by side.
        told: the loss in words.
        note: an observation on it; "" for none.
    """

    factors: tuple[float, float]
    divisor: float
    labels: np.ndarray
    told: str
    note: str = ""


def softened(
    rows: np.ndarray, outputs: np.ndarray, derivative: np.ndarray, labels: dict[str, np.ndarray]
) -> Iterator[Softened]:
    """Yield the sums of cross entropies of classes and of soft labels that have this derivative by these logits."""
    shape, width = outputs.shape[1:], outputs.shape[-1]
    if not shape or width < _FEWEST or max(map(len, labels.values()), default=0) * outputs[0].size > _MOST_NUMBERS:
        return
    at = np.argsort(-np.abs(derivative).reshape(-1, width).sum(-1))[:_NUM_ROWS]
    out, moved = (each.reshape(-1, width)[at] for each in (outputs, derivative))
    classes = [(name, y.astype(int).reshape(-1, *shape[:-1])) for name, y in labels.items() if _are_classes(y, shape)]
    for (name, y), (teacher, soft, own) in product(classes, _soft(shape, labels)):
        both = np.eye(width)[y], np.broadcast_to(soft, (*y.shape, width))
        hot, targets = (each[rows].reshape(-1, width)[at] for each in both)
        for divisor in dict.fromkeys((own, 1.0)) if own > 1.0 or not teacher else _TEMPERATURES:
            if (found := _solved(out, moved, hot, targets, divisor)) is None:
                continue
            one, two = (found * len(outputs) if teacher else found / found.sum()).tolist()
            told, note = f"cross entropy of {name or 'the data'} as labels, smoothed by {two:.3g}", ""
            if teacher:
                told = f"{one:.3g} times the cross entropy of {name or 'the data'}, and {two * divisor:.3g} times that"
                told += f" of {teacher} by the outputs / {divisor:g}"
            if own >= 1.0 != own / divisor:  # below 1 labels are sharpened, which is meant
                note = f"The soft labels are {teacher}, and the loss takes the outputs / {divisor:g}: one temperature "
                note = Likely(f"{note}is meant for both.")
            yield Softened((one, two * divisor), divisor, np.concatenate(both, -1).astype("float32"), told, note)


def _soft(shape: tuple[int, ...], labels: dict[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray, float]]:
    """Yield (name, soft labels, their temperature or 0): the same for all classes, softmaxes of logits, and shares."""
    yield "", np.full(shape[-1:], 1 / shape[-1]), 1.0
    teachers = {name: y for name, y in labels.items() if y.shape[1:] == shape and y.dtype.kind == "f"}
    for name, logits in teachers.items():
        for own in () if are_shares(logits) else _TEMPERATURES:
            yield f"the softmax of {name} / {own:g}", shares_of(logits / own), own
    yield from ((name, shares, 0.0) for name, shares in teachers.items() if are_shares(shares))


def _are_classes(y: np.ndarray, shape: tuple[int, ...]) -> bool:
    is_one = y.size == len(y) * int(np.prod(shape[:-1])) > 0 and y.dtype.kind in "iuf"
    return is_one and bool(np.all(y == np.round(y)) and y.min() >= 0 and y.max() < shape[-1])


def _solved(out: np.ndarray, moved: np.ndarray, one: np.ndarray, two: np.ndarray, divisor: float) -> np.ndarray | None:
    """Return the factors above 0 of both cross entropies, by which they have these derivatives in each row."""
    parts = [shares_of(out) - one, shares_of(out / divisor) - two]
    by_row = [least([part[i] for part in parts], row)[0] for i, row in enumerate(moved)]
    rest = moved - sum(f[:, None] * part for f, part in zip(np.transpose(by_row), parts, strict=True))
    found = np.median(by_row, axis=0)
    return found if np.linalg.norm(rest) <= SOLVED * np.linalg.norm(moved) and np.all(found > 0) else None
