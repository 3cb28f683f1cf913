"""The loss with an error in it, made of axes: labels, weights, mask, outputs, the function; and sums of such forms."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from stepcheck import tree
from stepcheck.port import OneLoss, Port
from stepcheck.solve.evidence import Evidence, Meant
from stepcheck.trace.measure import SOLVED
from stepcheck.trace.windows import PAD, Piece

MOST_STEPS = 2  # rows or places by which labels and weights may be shifted


@dataclass(frozen=True)
class Error:
    """One error: the quantity, what happens to it, its names in the field, the likeliest first, and its number."""

    quantity: str
    predicate: str
    causes: tuple[str, ...] = ()
    number: str = ""

    def __str__(self) -> str:
        return " ".join(part for part in (self.quantity, self.predicate, self.number) if part)


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

    errors: tuple[Error, ...] = ()
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
        return Form(**(values | {"errors": self.errors + other.errors}))


BASE = Form()


class Mixture(NamedTuple):
    """A form that is a sum of others; `told` returns its error by the numbers that these count, None if it is none."""

    forms: tuple[Form, ...]
    told: Callable[[np.ndarray], Error | None]


def forms(meant: Meant, evidence: list[Evidence]) -> Iterator[Form]:
    """Yield the losses with one error."""
    data, objective = meant.replay.data, meant.objective
    loss = getattr(objective, "loss", None)
    has_own = getattr(loss, "has_own_weights", False)
    all_pairs = "meets the labels of all rows of its batch, as outputs (rows, 1) and labels (rows,) do"
    yield Form((Error("each output", all_pairs, ("broadcast",)),), is_of_pairs=True)
    if data[2] is not None:
        with_weights = all_pairs.replace("the labels", "the labels and sample weights").replace("labels (", "both (")
        yield Form((Error("each output", with_weights, ("broadcast",)),), is_of_pairs=True, has_their_weights=True)
    if any(any(e.pads) for e in evidence):
        told = Error("rows", "that fill up a batch are trained on", ("padding trained on",))
        yield Form((told,), has_pads=True)
    for word, rows in _indices(meant.replay.num_rows):
        names = ("labels of other rows",) if word.endswith("order of the data") else ("labels shifted",)
        yield Form((Error("the labels", f"are those {word}", names),), rows=rows)
    single = np.asarray(data[1]) if hasattr(data[1], "shape") else np.zeros(0)
    if single.ndim < 3 and set(np.unique(single)) == {0, 1}:
        yield Form((Error("the labels", "are inverted, 1 - label"),), labels=lambda y: 1 - y)
    if any(np.ndim(leaf) > 1 and np.shape(leaf)[1] > 1 for leaf in tree.leaves(data[1])):
        yield from _along()
    if data[2] is not None and not has_own:
        yield from _weights(data[2], meant.replay.num_rows)
    if not isinstance(objective, OneLoss):
        return
    if meant.replay.is_masked:
        told = Error("the mask", "is left out", ("mask ignored",))
        yield Form((told,), objective=meant.replay.objective(loss, is_masked=False), is_bare=True)
    elif _is_plain(meant, evidence):
        shape = evidence[0].update.pieces[0].called.outputs[0].shape
        yield from _losses(meant.replay, loss, shape[-1], data[1])
        yield from _classes(meant.replay, loss, shape)


def _is_plain(meant: Meant, evidence: list[Evidence]) -> bool:
    """Whether the loss is a function of one output and its labels, row by row, so that another may be in its place."""
    is_coupled = getattr(meant.objective.loss, "is_coupled", False)
    has_one = all(len(p.called.outputs) == 1 for e in evidence for p in e.update.pieces)
    return has_one and hasattr(meant.replay.data[1], "shape") and not is_coupled


def _indices(num: int) -> Iterator[tuple[str, Callable[[Evidence, Piece], np.ndarray]]]:
    """Yield (in words, rows of the data) for the indices at which a row's label or weight may be read."""

    def rolled(by: int) -> Callable[[Evidence, Piece], np.ndarray]:
        return lambda e, piece: np.roll(piece.rows, by)

    def moved(by: int) -> Callable[[Evidence, Piece], np.ndarray]:
        return lambda e, piece: (piece.rows + by) % num

    for steps in range(1, MOST_STEPS + 1):
        for word, sign in (("after", 1), ("before", -1)):
            some = "of the row" if steps == 1 else f"{steps} rows"
            yield f"{some} {word} in the batch", rolled(-sign * steps)
            yield f"{some} {word} in the data", moved(sign * steps)
    yield "in the order of the data", lambda e, piece: (e.place(piece)[1] + np.arange(len(piece.rows))) % num
    yield "of the batch in reverse", lambda e, piece: piece.rows[::-1]


def _along() -> Iterator[Form]:
    for steps in range(1, MOST_STEPS + 1):
        for word, sign in (("after", -1), ("before", 1)):
            told = Error("the labels", f"are those {steps} places {word}", ("labels shifted",))
            yield Form((told,), labels=lambda y, by=sign * steps: np.roll(y, by, axis=1) if np.ndim(y) > 1 else y)


def _weights(weights: Any, num: int) -> Iterator[Form]:
    is_mask = np.ndim(weights) > 1 and bool(np.isin(weights, (0, 1)).all())
    quantity, ignored = ("the mask", "mask ignored") if is_mask else ("the sample weights", "weights ignored")

    def of_rows(change: Callable[[np.ndarray], np.ndarray]) -> Callable:
        return lambda e, piece, weights: change(weights[np.where(piece.rows == PAD, 0, piece.rows)])

    def at(rows: Callable[[Evidence, Piece], np.ndarray]) -> Callable:
        return lambda e, piece, weights: weights[np.where(piece.rows == PAD, 0, rows(e, piece))]

    ways: dict[str, tuple[Callable, str]] = {
        f"{'is' if is_mask else 'are'} left out": (of_rows(np.ones_like), ignored),
        "are squared": (of_rows(np.square), "weights squared"),
        "are averaged over their batch": (of_rows(lambda own: 0 * own + own.mean()), "weights averaged apart"),
        "come under a root": (of_rows(lambda own: np.sqrt(np.abs(own))), ""),
        "are inverted": (of_rows(lambda own: 1 / np.where(own == 0, 1, own)), ""),
    }
    ways |= {f"are those {word}": (at(rows), "weights of other rows") for word, rows in _indices(num)}
    for predicate, (way, name) in ways.items():
        told = Error(quantity if name == ignored else "the sample weights", predicate, (name,) if name else ())
        yield Form((told,), weights=way)


def _losses(replay: Port, loss: Any, width: int, labels: Any) -> Iterator[Form]:
    losses, objective = replay.losses, replay.objective
    if (other := losses.flipped(loss)) is not None:
        told = Error("the loss", "takes from_logits the other way", ("from_logits",))
        yield Form((told,), objective=objective(other))
    for name, change, is_own in losses.changes(loss, width):
        told = Error("the outputs", f"go through one more {name}", ("softmax twice",) * is_own)
        yield Form((told,), outputs=change)
    told = Error("the loss", "gets labels and outputs in the other order")
    yield Form((told,), objective=objective(losses.swapped(loss)))
    for name, other in losses.others(loss, labels):
        yield Form((Error("the loss", f"is {name} instead of {loss.name}"),), objective=objective(other))


def _classes(replay: Port, loss: Any, shape: tuple[int, ...]) -> Iterator[Form]:
    """Yield the loss by classes that are counted from another number."""
    if (plain := replay.losses.unsmoothed(loss)) is None or not plain[2]:
        return
    full, num = replay.objective(plain[0]), shape[-1]
    for word, start, by in (("higher", 1, 1), ("lower", 0, -1)):
        hot = np.eye(num + 2, num, k=by - 1, dtype="float32")  # no class beyond the last counts

        def labels(labels: np.ndarray, hot: np.ndarray = hot) -> np.ndarray:
            return hot[np.reshape(labels, labels.shape[: len(shape) - 1]).astype(int) + 1]

        told = Error("the labels", f"are one class {word}, as if the classes of the loss were counted from {start}")
        yield Form((told,), full, labels=labels)


def mixtures(meant: Meant, evidence: list[Evidence]) -> Iterator[Mixture]:
    """Yield the losses with numbers in them: smoothed labels, labels and outputs of another scale or origin."""
    objective, loss, losses = meant.objective, getattr(meant.objective, "loss", None), meant.replay.losses
    if not isinstance(objective, OneLoss) or meant.replay.is_masked or not _is_plain(meant, evidence):
        return
    if (plain := losses.unsmoothed(loss)) is not None:
        other, own, is_sparse = plain
        shape = evidence[0].update.pieces[0].called.outputs[0].shape
        yield _smoothed(meant.replay.objective(other), own, shape, is_sparse)
    if losses.is_squared(loss):
        constant = [partial(np.full_like, fill_value=value) for value in (0, 1)]
        yield Mixture((BASE, *(Form((Error("labels", "constant"),), labels=labels) for labels in constant)), _scaled)


def _smoothed(full: OneLoss, own: float, shape: tuple[int, ...], is_sparse: bool) -> Mixture:
    num, eye = shape[-1], np.eye(shape[-1], dtype="float32")

    def hot(labels: np.ndarray) -> np.ndarray:
        return eye[np.reshape(labels, labels.shape[: len(shape) - 1]).astype(int)] if is_sparse else labels

    def told(numbers: np.ndarray) -> Error | None:
        smoothing, whole = float(numbers[1]), 1 - float(numbers[0])
        if num > 1 and abs(smoothing - num * whole) < SOLVED < whole < 1:
            return Error("the labels", f"are smoothed by {whole:.3g} for each class", ("smoothing not divided",))
        smoothing = 0.0 if abs(smoothing) < SOLVED else smoothing
        if abs(numbers.sum() - 1) > 10 * SOLVED or not 0 <= smoothing < 1 or abs(smoothing - own) < SOLVED:
            return None
        is_twice = own > 0 and abs(smoothing - 1 + (1 - own) ** 2) < SOLVED
        names = ("smoothing missing",) if smoothing == 0 else ("smoothing twice",) if is_twice else ()
        return Error("the labels", f"are smoothed by {smoothing:.3g} instead of {own:.3g}", names)

    even = Form((Error("labels", "even"),), full, labels=lambda labels: np.full_like(hot(labels), 1 / max(num, 2)))
    return Mixture((Form((Error("labels", "hot"),), full, labels=hot), even), told)


def _scaled(numbers: np.ndarray) -> Error | None:
    """Return the error of a squared loss with the derivative a (o - y) + b o + c (o - 1) by the outputs o."""
    labels, whole, origin = float(numbers[0]), float(numbers.sum()), float(numbers[2])
    if abs(labels) < SOLVED or abs(whole) < SOLVED:
        return None
    ratio, plus = labels / whole, origin / labels
    told = [f"are times {ratio:.4g} beside the outputs (the outputs times {1 / ratio:.4g})"] * (abs(ratio - 1) > SOLVED)
    told += [f"have {plus:.4g} added"] * (abs(plus) > SOLVED)
    return Error("the labels", " and ".join(told)) if told else None
