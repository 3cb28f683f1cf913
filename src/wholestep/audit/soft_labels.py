"""Losses of soft labels, solved for: a sum of two cross entropies, of classes and of soft labels."""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import numpy as np

from wholestep.audit.families import Soft, are_shares, shares_of
from wholestep.audit.found import Likely
from wholestep.audit.measure import SOLVED
from wholestep.audit.ratios import least

_TEMPERATURES = 1.0, 2.0, 3.0, 4.0, 5.0, 1.5, 2.5, 6.0, 7.0, 8.0, 10.0, 12.0, 15.0, 20.0, 0.5
_MOST_NUMBERS = 2**24  # of one-hot labels
_FEWEST = 3  # of two classes, any loss of the difference has such a derivative
_NUM_ROWS = 16  # from which two numbers are solved: those with the largest derivatives


class Softened(NamedTuple):
    """A loss, its labels for all rows of the data, and a note on it; "" for none."""

    loss: Soft
    labels: np.ndarray
    note: str = ""


def softened(
    rows: np.ndarray, outputs: np.ndarray, derivative: np.ndarray, labels: dict[str, np.ndarray]
) -> Iterator[Softened]:
    """Yield the sums of two cross entropies of these logits that have this derivative: of classes, and of soft labels.

    Args:
        rows: the rows of the data of which the outputs are.
        labels: the arrays that may be the classes, or the outputs of a teacher, by name; a row for each of the data.
    """
    shape, width = outputs.shape[1:], outputs.shape[-1]
    if width < _FEWEST or max(map(len, labels.values()), default=0) * outputs[0].size > _MOST_NUMBERS:
        return
    at = np.argsort(-np.abs(derivative).reshape(-1, width).sum(-1))[:_NUM_ROWS]
    out, moved = (each.reshape(-1, width)[at] for each in (outputs, derivative))
    classes = [(name, y.astype(int).reshape(-1, *shape[:-1])) for name, y in labels.items() if _are_classes(y, shape)]
    for (name, y), (teacher, soft, own) in product(classes, _soft(shape, labels)):
        both = np.eye(width)[y], np.broadcast_to(soft, (*y.shape, width))
        hot, targets = (each[rows].reshape(-1, width)[at] for each in both)
        for divisor in dict.fromkeys((own, 1.0)) if own else _TEMPERATURES:
            if (found := _solved(out, moved, hot, targets, divisor)) is None:
                continue
            one, two = (found * len(outputs) if teacher else found / found.sum()).tolist()
            told, note = f"categorical_crossentropy of {name or 'the data'} as labels, smoothed by {two:.3g}", ""
            if teacher:
                told = f"{one:.3g} times the cross entropy of {name}, and {two * divisor:.3g} times that of {teacher}"
                told += f" by the outputs / {divisor:g}"
            if own > 1.0 != own / divisor:  # below 1 labels are sharpened, which is meant
                note = (
                    f"The soft labels are {teacher}, and the loss takes the outputs / {divisor:g}: one temperature is "
                )
                note = Likely(f"{note}meant for both.")
            yield Softened(
                Soft(one, two * divisor, divisor, name=told), np.concatenate(both, -1).astype("float32"), note
            )


def _soft(shape: tuple[int, ...], labels: dict[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray, float]]:
    """Yield (name, soft labels, their temperature or 0): the same for all classes, softmaxes of logits, and shares."""
    yield "", np.full(shape[-1:], 1 / shape[-1]), 1.0
    teachers = {name: y for name, y in labels.items() if y.shape[1:] == shape and y.dtype.kind == "f"}
    for name, logits in teachers.items():
        for own in () if are_shares(logits) else _TEMPERATURES:
            yield f"the softmax of {name} / {own:g}", shares_of(logits / own), own
    yield from ((name, shares, 0.0) for name, shares in teachers.items() if are_shares(shares))


def _are_classes(y: np.ndarray, shape: tuple[int, ...]) -> bool:
    """Whether these are whole numbers from 0 on, one for each place of outputs of this shape."""
    is_one = y.size == len(y) * int(np.prod(shape[:-1])) > 0 and y.dtype.kind in "iuf"
    return is_one and bool(np.all(y == np.round(y)) and y.min() >= 0 and y.max() < shape[-1])


def _solved(out: np.ndarray, moved: np.ndarray, one: np.ndarray, two: np.ndarray, divisor: float) -> np.ndarray | None:
    """Return the factors above 0 of both cross entropies, by which they have these derivatives in each row."""
    parts = [shares_of(out) - one, shares_of(out / divisor) - two]
    by_row = [least([part[i] for part in parts], row)[0] for i, row in enumerate(moved)]
    rest = moved - sum(f[:, None] * part for f, part in zip(np.transpose(by_row), parts, strict=True))
    found = np.median(by_row, axis=0)
    return found if np.linalg.norm(rest) <= SOLVED * np.linalg.norm(moved) and np.all(found > 0) else None
