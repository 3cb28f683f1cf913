"""The loss with an error in it, made of axes: labels, weights, mask, outputs, the function; and sums of such forms."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from stepcheck import tree
from stepcheck.faults import Fault
from stepcheck.port import OneLoss, Port
from stepcheck.solve.evidence import Evidence, Meant
from stepcheck.trace.measure import SOLVED
from stepcheck.trace.windows import PAD, Piece
from stepcheck.values import Change, Detail

MOST_STEPS = 2  # rows or places by which labels and weights may be shifted


@dataclass(frozen=True)
class Form:
    """The loss with errors; without any, it is the meant loss.

    Attributes:
        objective: another loss.
        outputs: a function of the outputs that the loss gets instead.
        rows: of an update and a piece, the rows of the data whose labels are read.
        labels: a function of the labels.
        weights: of an update, a piece and the sample weights of the data, the weights of the rows.
        has_pads: whether rows that fill up a batch count.
        is_bare: whether the objective is the same loss without the mask that the model makes.
        is_of_pairs: whether each output meets the labels of all rows of its batch.
        has_their_weights: whether it meets their sample weights, too.
    """

    changes: tuple[Change, ...] = ()
    objective: Any = None
    outputs: Callable | None = None
    rows: Callable[[Evidence, Piece], np.ndarray] | None = None
    labels: Callable | None = None
    weights: Callable[[Evidence, Piece, np.ndarray], np.ndarray] | None = None
    has_pads: bool = False
    is_bare: bool = False
    is_of_pairs: bool = False
    has_their_weights: bool = False

    @property
    def is_at_outputs(self) -> bool:
        """Whether the derivative by the outputs is enough: no program of the model is traced for it."""
        return self.outputs is not None or (self.objective is not None and not self.is_bare)

    def with_(self, other: "Form") -> "Form":
        """Return a form with the errors of both."""
        values = {f.name: getattr(other, f.name) or getattr(self, f.name) for f in fields(self)}
        return Form(**(values | {"changes": self.changes + other.changes}))


BASE = Form()


class Mixture(NamedTuple):
    """A form that is a sum of others; `change` returns what their numbers say, None for nothing."""

    forms: tuple[Form, ...]
    change: Callable[[np.ndarray], Change | None]


def forms(meant: Meant, evidence: list[Evidence]) -> Iterator[Form]:
    """Yield the losses with one error."""
    (_, labels, weights), objective = meant.replay.data, meant.objective
    loss = getattr(objective, "loss", None)
    pairs = Change(Fault.BROADCAST, Detail.ALL_PAIRS)
    yield Form((pairs,), is_of_pairs=True)
    if weights is not None:
        with_weights = replace(pairs, detail=Detail.ALL_PAIRS_WITH_WEIGHTS)
        yield Form((with_weights,), is_of_pairs=True, has_their_weights=True)
    if any(any(e.pads) for e in evidence):
        yield Form((Change(Fault.PADDING_TRAINED_ON),), has_pads=True)
    yield from _labels(labels, meant.replay.num_rows)
    if weights is not None and not getattr(loss, "has_own_weights", False):
        yield from _weights(weights, meant.replay.num_rows)
    if not isinstance(objective, OneLoss):
        return
    if meant.replay.is_masked:
        bare = meant.replay.objective(loss, is_masked=False)
        yield Form((Change(Fault.MASK_IGNORED),), objective=bare, is_bare=True)
    elif _is_plain(meant, evidence):
        shape = _shape(evidence)
        yield from _losses(meant.replay, loss, shape[-1], labels)


def _is_plain(meant: Meant, evidence: list[Evidence]) -> bool:
    """Whether the loss is a function of one output and its labels, row by row.

    Then another may be in its place.
    """
    is_coupled = getattr(meant.objective.loss, "is_coupled", False)
    has_one = all(len(p.called.outputs) == 1 for e in evidence for p in e.update.pieces)
    return has_one and hasattr(meant.replay.data[1], "shape") and not is_coupled


def _shape(evidence: list[Evidence]) -> tuple[int, ...]:
    return evidence[0].update.pieces[0].called.outputs[0].shape


_Rows = Callable[[Evidence, Piece], np.ndarray]


def _indices(num: int) -> Iterator[tuple[Detail, tuple[float, ...], _Rows]]:
    """Yield (detail, its numbers, rows of the data) at which a row's label or weight may be read."""

    def in_batch(by: int) -> _Rows:
        return lambda e, piece: np.roll(piece.rows, -by)

    def in_data(by: int) -> _Rows:
        return lambda e, piece: (piece.rows + by) % num

    for steps, sign in product(range(1, MOST_STEPS + 1), (1, -1)):
        by = sign * steps
        yield Detail.OF_ROW_IN_BATCH, (by,), in_batch(by)
        yield Detail.OF_ROW_IN_DATA, (by,), in_data(by)
    yield Detail.IN_ORDER_OF_DATA, (), lambda e, p: (e.place(p)[1] + np.arange(len(p.rows))) % num
    yield Detail.IN_REVERSE, (), lambda e, piece: piece.rows[::-1]


def _labels(labels: Any, num: int) -> Iterator[Form]:
    for detail, numbers, rows in _indices(num):
        is_mixed = detail is Detail.IN_ORDER_OF_DATA
        fault = Fault.LABELS_OF_OTHER_ROWS if is_mixed else Fault.LABELS_SHIFTED
        yield Form((Change(fault, detail, numbers),), rows=rows)
    single = np.asarray(labels) if hasattr(labels, "shape") else np.zeros(0)
    if single.ndim < 3 and set(np.unique(single)) == {0, 1}:
        inverted = Change(Fault.OTHER_LABELS, Detail.INVERTED)
        yield Form((inverted,), labels=lambda y: 1 - y)
    if any(np.ndim(leaf) > 1 and np.shape(leaf)[1] > 1 for leaf in tree.leaves(labels)):
        for steps, sign in product(range(1, MOST_STEPS + 1), (1, -1)):
            by = sign * steps
            shifted = Change(Fault.LABELS_SHIFTED, Detail.PLACES_AFTER, (by,))
            yield Form((shifted,), labels=partial(_along, by=-by))


def _along(labels: np.ndarray, by: int) -> np.ndarray:
    return np.roll(labels, by, axis=1) if np.ndim(labels) > 1 else labels


def _mean(own: np.ndarray) -> np.ndarray:
    return np.full_like(own, own.mean())


def _root(own: np.ndarray) -> np.ndarray:
    return np.sqrt(np.abs(own))


def _inverse(own: np.ndarray) -> np.ndarray:
    return 1 / np.where(own == 0, 1, own)


def _weights(weights: Any, num: int) -> Iterator[Form]:
    is_mask = np.ndim(weights) > 1 and bool(np.isin(weights, (0, 1)).all())

    def of_rows(change: Callable[[np.ndarray], np.ndarray]) -> Callable:
        return lambda e, piece, own: change(own[np.where(piece.rows == PAD, 0, piece.rows)])

    def at(rows: _Rows) -> Callable:
        return lambda e, piece, own: own[np.where(piece.rows == PAD, 0, rows(e, piece))]

    ways = [
        (Change(Fault.MASK_IGNORED if is_mask else Fault.WEIGHTS_IGNORED), of_rows(np.ones_like)),
        (Change(Fault.WEIGHTS_SQUARED), of_rows(np.square)),
        (Change(Fault.WEIGHTS_AVERAGED_APART), of_rows(_mean)),
        (Change(Fault.OTHER_WEIGHTS, Detail.ROOT), of_rows(_root)),
        (Change(Fault.OTHER_WEIGHTS, Detail.INVERTED), of_rows(_inverse)),
    ]
    for detail, numbers, rows in _indices(num):
        ways.append((Change(Fault.WEIGHTS_OF_OTHER_ROWS, detail, numbers), at(rows)))
    for change, way in ways:
        yield Form((change,), weights=way)


def _losses(replay: Port, loss: Any, width: int, labels: Any) -> Iterator[Form]:
    losses, objective = replay.losses, replay.objective
    if (other := losses.flipped(loss)) is not None:
        yield Form((Change(Fault.FROM_LOGITS),), objective=objective(other))
    for name, function, is_own in losses.changes(loss, width):
        fault = Fault.SOFTMAX_TWICE if is_own else Fault.OTHER_OUTPUTS
        yield Form((Change(fault, Detail.FUNCTION_AGAIN, names=(name,)),), outputs=function)
    swapped = Change(Fault.ANOTHER_LOSS, Detail.ARGUMENTS_SWAPPED)
    yield Form((swapped,), objective=objective(losses.swapped(loss)))
    for name, other in losses.others(loss, labels):
        names = name, loss.name
        another = Change(Fault.ANOTHER_LOSS, Detail.OTHER_FUNCTION, names=names)
        yield Form((another,), objective=objective(other))


def _as_classes(labels: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return np.reshape(labels, labels.shape[: len(shape) - 1]).astype(int)


def mixtures(meant: Meant, evidence: list[Evidence]) -> Iterator[Mixture]:
    """Yield the losses with numbers in them: smoothed labels, labels and outputs of another scale."""
    replay, objective = meant.replay, meant.objective
    if not isinstance(objective, OneLoss) or replay.is_masked or not _is_plain(meant, evidence):
        return
    if (plain := replay.losses.unsmoothed(objective.loss)) is not None:
        other, own, is_sparse = plain
        yield _smoothed(replay.objective(other), own, _shape(evidence), is_sparse)
    if replay.losses.is_squared(objective.loss):
        constant = (partial(np.full_like, fill_value=value) for value in (0, 1))
        yield Mixture((BASE, *(Form(labels=labels) for labels in constant)), _scaled)


def _smoothed(full: OneLoss, own: float, shape: tuple[int, ...], is_sparse: bool) -> Mixture:
    num, eye = shape[-1], np.eye(shape[-1], dtype="float32")

    def hot(labels: np.ndarray) -> np.ndarray:
        return eye[_as_classes(labels, shape)] if is_sparse else labels

    def even(labels: np.ndarray) -> np.ndarray:
        return np.full_like(hot(labels), 1 / max(num, 2))

    forms = Form((), full, labels=hot), Form((), full, labels=even)
    return Mixture(forms, partial(_smoothing, own=own, num=num))


def _smoothing(numbers: np.ndarray, own: float, num: int) -> Change | None:
    """Return the error of labels that are `numbers` of hot ones and of even ones."""
    smoothing, whole = float(numbers[1]), 1 - float(numbers[0])
    if num > 1 and abs(smoothing - num * whole) < SOLVED < whole < 1:
        return Change(Fault.SMOOTHING_NOT_DIVIDED, Detail.SMOOTHED, (whole,))
    smoothing = 0.0 if abs(smoothing) < SOLVED else smoothing
    is_one = abs(numbers.sum() - 1) <= 10 * SOLVED
    if not is_one or not 0 <= smoothing < 1 or abs(smoothing - own) < SOLVED:
        return None
    twice = 1 - (1 - own) ** 2
    fault = Fault.SMOOTHING_MISSING if smoothing == 0 else Fault.OTHER_LABELS
    if own > 0 and abs(smoothing - twice) < SOLVED:
        fault = Fault.SMOOTHING_TWICE
    return Change(fault, Detail.SMOOTHED, (smoothing, own))


def _scaled(numbers: np.ndarray) -> Change | None:
    """Return the error of a squared loss.

    Its derivative by the outputs o is a (o - y) + b o + c (o - 1).
    """
    labels, whole, origin = float(numbers[0]), float(numbers.sum()), float(numbers[2])
    if abs(labels) < SOLVED or abs(whole) < SOLVED:
        return None
    times, plus = whole / labels, origin / labels
    if abs(times - 1) > SOLVED:
        return Change(Fault.OTHER_OUTPUTS, Detail.SCALED, (times, plus))
    return Change(Fault.OTHER_LABELS, Detail.ADDED, (plus,)) if abs(plus) > SOLVED else None
