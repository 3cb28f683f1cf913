"""The loss with an error in it: in its labels, weights, mask, outputs or function."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from stepcheck import tree
from stepcheck.faults import Fault
from stepcheck.port import OneLoss
from stepcheck.solve.evidence import Evidence, Meant
from stepcheck.trace.windows import PAD, Piece
from stepcheck.values import Change, Detail

_STEPS = 1, -1, 2, -2  # places by which labels may be shifted
_Batches = Callable[[Evidence, Piece], list]
_Rows = Callable[[Evidence, Piece], np.ndarray]


@dataclass(frozen=True)
class Form:
    """The loss with errors; without any, it is the meant loss.

    Attributes:
        batches: of an update and a piece, the batches (x, y[, weights]) whose mean loss
            it is.
        objective: another loss.
        outputs: a function of the outputs that the loss gets instead.
        weighs: whether the rows' weights in it are others.
        has_pads: whether rows that fill up a batch count.
        is_of_pairs: whether it takes a backward pass for each row.
    """

    changes: tuple[Change, ...] = ()
    batches: _Batches | None = None
    objective: Any = None
    outputs: Callable | None = None
    weighs: bool = False
    has_pads: bool = False
    is_of_pairs: bool = False

    def parts(self, e: Evidence) -> list[np.ndarray]:
        """Return the part of each piece in the gradient, with the right factors of its
        rows.
        """
        if self == BASE:
            return e.parts
        weights = [*map(partial(self._weights, e), range(len(e.weights)))]
        whole = np.sum([own.sum(axis=1) for own in weights], axis=0)
        return [
            self._part(e, i, e.counted(own, whole))
            for i, own in enumerate(weights)
        ]

    def _part(self, e: Evidence, i: int, factors: np.ndarray) -> np.ndarray:
        found = np.zeros_like(e.handed)
        batches = self._batches(e, e.update.pieces[i])
        for batch in batches:
            given = i, factors / len(batches), self.objective
            found = found + e.gradient(*given, batch=batch, change=self.outputs)
        return found

    def _batches(self, e: Evidence, piece: Piece) -> list:
        return (
            [e.meant.replay.batch(piece)]
            if self.batches is None
            else self.batches(e, piece)
        )

    def _weights(self, e: Evidence, i: int) -> np.ndarray:
        """Return the rows' weights in a piece (terms, rows)."""
        if self.has_pads:
            return e.terms[i].weights
        if not self.weighs:
            return e.weights[i]
        piece, objective = (
            e.update.pieces[i],
            self.objective or e.meant.objective,
        )
        (batch,) = self._batches(e, piece)
        return e.terms_of(piece, objective, batch).weights * (piece.rows != PAD)


BASE = Form()


def forms(meant: Meant, e: Evidence) -> Iterator[Form]:
    """Yield the losses with one error; `e` is one of the updates."""
    labels, weights = meant.replay.data[1:]
    pairs = Change(Fault.BROADCAST, Detail.ALL_PAIRS)
    yield Form((pairs,), _pairs, is_of_pairs=True)
    if weights is not None:
        both = Change(Fault.BROADCAST, Detail.ALL_PAIRS_WITH_WEIGHTS)
        yield Form(
            (both,), partial(_pairs, has_their_weights=True), is_of_pairs=True
        )
    yield Form((Change(Fault.PADDING_TRAINED_ON),), has_pads=True)
    yield from _of_labels(labels)
    if weights is not None:
        yield from _of_weights(weights)
    if isinstance(meant.objective, OneLoss) and meant.replay.is_masked:
        bare = meant.replay.objective(_loss(meant), is_masked=False)
        yield Form((Change(Fault.MASK_IGNORED),), objective=bare, weighs=True)
    elif e.is_of_one_output:
        yield from _of_outputs(meant, e)


def _loss(meant: Meant) -> Any:
    return getattr(meant.objective, "loss", None)


def _pairs(
    e: Evidence, piece: Piece, *, has_their_weights: bool = False
) -> list:
    """Return the batches in which each output meets the labels of all rows of its
    batch.
    """
    moved = partial(
        e.meant.replay.batch, piece, has_their_weights=has_their_weights
    )
    return [moved(shift=shift) for shift in range(len(piece.rows))]


def _at(rows: _Rows) -> _Batches:
    """Return batches with the labels of other rows of the data."""

    def batches(e: Evidence, piece: Piece) -> list:
        others = np.where(piece.rows == PAD, 0, rows(e, piece))
        return [e.meant.replay.batch(piece, labels=others)]

    return batches


def _with(change: Callable[[np.ndarray], np.ndarray], place: int) -> _Batches:
    """Return batches with changed labels (place 1) or weights (place 2)."""

    def batches(e: Evidence, piece: Piece) -> list:
        batch = [*e.meant.replay.batch(piece)]
        batch[place] = tree.map_leaves(
            lambda leaf: change(np.asarray(leaf)), batch[place]
        )
        return [tuple(batch)]

    return batches


def of_rows(rows: _Rows, change: Change) -> Form:
    """Return the loss with the labels of other rows of the data."""
    return Form((change,), _at(rows), weighs=True)


def _of_labels(labels: Any) -> Iterator[Form]:
    """Yield the loss with the labels of other places of the same rows."""
    if any(
        np.ndim(leaf) > 1 and np.shape(leaf)[1] > 1
        for leaf in tree.leaves(labels)
    ):
        for by in _STEPS:
            change = Change(Fault.LABELS_SHIFTED, Detail.PLACES_AFTER, (by,))
            yield Form(
                (change,), _with(partial(_along, by=-by), 1), weighs=True
            )


def _along(labels: np.ndarray, by: int) -> np.ndarray:
    return np.roll(labels, by, axis=1) if np.ndim(labels) > 1 else labels


def _of_weights(weights: Any) -> Iterator[Form]:
    is_mask = np.ndim(weights) > 1 and bool(np.isin(weights, (0, 1)).all())
    ignored = Fault.MASK_IGNORED if is_mask else Fault.WEIGHTS_IGNORED
    ways: list[tuple[Fault, Callable]] = [
        (ignored, np.ones_like),
        (Fault.WEIGHTS_SQUARED, np.square),
        (
            Fault.WEIGHTS_AVERAGED_APART,
            lambda own: np.full_like(own, own.mean()),
        ),
    ]
    for fault, way in ways:
        yield Form((Change(fault),), _with(way, 2), weighs=True)


def _of_outputs(meant: Meant, e: Evidence) -> Iterator[Form]:
    """Yield the loss with `from_logits` the other way, and with the activation once
    more.
    """
    losses, loss = meant.replay.losses, _loss(meant)
    width = e.update.pieces[0].called.outputs[0].shape[-1]
    if (other := losses.flipped(loss)) is not None:
        yield Form(
            (Change(Fault.FROM_LOGITS),),
            objective=meant.replay.objective(other),
        )
    for name, function, is_own in losses.changes(loss, width):
        fault = Fault.SOFTMAX_TWICE if is_own else Fault.OTHER_OUTPUTS
        yield Form(
            (Change(fault, Detail.FUNCTION_AGAIN, names=(name,)),),
            outputs=function,
        )


def smoothed(meant: Meant, e: Evidence) -> tuple[Form, Form, float] | None:
    """Return the losses of the labels as such, and of even labels, and the meant
    smoothing.

    A loss of smoothed labels is a sum of both; None for a loss that has no smoothing.
    """
    plain = (
        meant.replay.losses.unsmoothed(_loss(meant))
        if e.is_of_one_output
        else None
    )
    if plain is None:
        return None
    other, own, is_sparse = plain
    shape = e.update.pieces[0].called.outputs[0].shape
    eye, full = (
        np.eye(shape[-1], dtype="float32"),
        meant.replay.objective(other),
    )

    def hot(labels: np.ndarray) -> np.ndarray:
        classes = (
            labels.reshape(labels.shape[: len(shape) - 1]).astype(int)
            if is_sparse
            else 0
        )
        return eye[np.clip(classes, 0, len(eye) - 1)] if is_sparse else labels

    def even(labels: np.ndarray) -> np.ndarray:
        return np.full_like(hot(labels), 1 / max(shape[-1], 2))

    return Form((), _with(hot, 1), full), Form((), _with(even, 1), full), own
