"""The loss of a loop, solved for: the usual loss and labels whose derivative by the outputs the loop's loss has."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from wholestep.audit.families import Loss, Through, by_place, losses, mean_of, others, shares_of, softened
from wholestep.audit.found import Likely
from wholestep.audit.log import Log
from wholestep.audit.meaning import LossObjective
from wholestep.audit.measure import SOLVED, are_shares, is_padded
from wholestep.audit.replay import Replay
from wholestep.audit.windows import PAD, Rows, assembled

_MOST_PASSES = 12  # on which a loss is tried
_FEWEST, _FEW_CLASSES = 3, 20  # of two classes, any loss of the difference has such a derivative
_SHARE = 0.02  # of labels that are others: fewer may be marks of no label
_UNLIKE, _ALIKE = 0.1, 0.02  # weights of classes that differ, and shares that do not: of a part of the rows
_ROWS_OF_A_CLASS = 3  # and more show that a factor belongs to the class


class Derived(NamedTuple):
    """A forward pass: its rows of the data, and the derivative of the loop's loss by one output."""

    rows: np.ndarray
    output: np.ndarray
    derivative: np.ndarray


class Solved(NamedTuple):
    """A loss with the derivative of the loop's.

    Attributes:
        labels: one for each row of the data.
        weights: one for each row or place of the data; None if all count the same.
        told: the loss, the labels and the weights in words.
        note: an observation on the loss; "" for none.
    """

    loss: Loss
    labels: np.ndarray
    weights: np.ndarray | None
    told: str
    note: str = ""


def passes(log: Log, rows: Rows, i: int) -> list[Derived]:
    """Return the forward passes on rows of the data whose i-th output a gradient was taken by."""
    found: list[Derived] = []
    for called in log.called:
        if called.is_whole and called.derivatives.get(i):
            own = rows.find(called.inputs)
            if len(own) and np.all(own != PAD) and called.outputs[i].shape[:1] == own.shape:
                found.append(Derived(own, called.outputs[i], by_logits(called.outputs[i], called.derivatives[i][-1])))
    return found


def by_logits(output: np.ndarray, derivative: np.ndarray) -> np.ndarray:
    """Return the derivative by the logits, from one by a softmax' probabilities or their logarithms, or unchanged.

    The former are known but for a constant, where a loss took the logits instead.
    """
    derivative = np.asarray(derivative, "float64")
    if _is_single(output):
        return derivative
    if are_shares(output):
        return output * (derivative - np.sum(output * derivative, axis=-1, keepdims=True))
    if output.max() <= 0 and are_shares(shares := np.exp(output)):
        return derivative - shares * np.sum(derivative, axis=-1, keepdims=True)
    return derivative


def solved(
    replay: Replay, derived: list[Derived], labels: dict[str, np.ndarray], beside: dict[str, np.ndarray]
) -> Iterator[Solved]:
    """Yield the losses that have these derivatives, the most usual first.

    Args:
        labels: the arrays that may hold the labels, by name, a row for each row of the data.
        beside: all arrays with a row for each row of the data: weights and masks may be among them.
    """
    own = {name: y for name, y in labels.items() if hasattr(y, "shape")}
    pairs = _classes(derived)
    if pairs is not None and not (same := [name for name, y in own.items() if not any(_others(pairs, y))]):
        read = assembled(replay.num_rows, [(rows, np.maximum(classes, 0)) for rows, classes in pairs])
        own = own if read is None else {"the classes that its derivative shows": read}
    elif pairs is not None:
        own = {name: own[name] for name in same}
    padded = {name or "labels": y for name, y in (own | beside).items() if is_padded(np.asarray(y))}
    masks = {f"at the places whose {name} are not 0": y != 0 for name, y in padded.items()}
    usual = {name: list(losses([derived[0].output], y)) for name, y in own.items()}
    for name, y in own.items():
        for loss in usual[name]:
            yield from _fitted(replay, derived[:_MOST_PASSES], loss, (name, y), beside | masks)
    first, arrays = derived[0], {name: y for name, y in (own | beside).items() if hasattr(y, "shape")}
    for soft in softened(first.rows, first.output, first.derivative, arrays):
        for found in _fitted(replay, derived[:_MOST_PASSES], soft.loss, ("", soft.labels), beside | masks):
            yield found._replace(note=soft.note)
    for name, y in own.items():
        for _, loss in (pair for one in usual[name][:1] for pair in others(one, y)):
            yield from _fitted(replay, derived[:_MOST_PASSES], loss, (name, y), beside | masks)
    for name, y in own.items():
        if y.dtype.kind == "f" and y.shape[1:] == derived[0].output.shape[1:] and np.any(is_nan := np.isnan(y)):
            places = [d._replace(output=d.output[..., None], derivative=d.derivative[..., None]) for d in derived]
            mask = {f"at the places whose {name or 'labels'} are no NaN": ~is_nan}
            for each in solved(replay, places, {name: np.nan_to_num(y)[..., None]}, mask):
                yield each._replace(loss=Through(each.loss, by_place))


def of_other_labels(derived: list[Derived], name: str, y: np.ndarray) -> Iterator[str]:
    """Yield a note if the loss is a cross entropy of classes, and of other ones than the labels of the same rows."""
    if (pairs := _classes(derived)) is None or not (found := list(_others(pairs, y))):
        return
    (row, used, own), num = found[0], sum(np.count_nonzero(classes >= 0) for _, classes in pairs)
    if own < 0 or len(found) < _SHARE * num:
        return
    told = f"The gradient is that of a cross entropy of other classes than {name} has for the rows of the inputs: in "
    told += f"{len(found) / num:.0%} of the rows (row {row}: class {used}, and not {own}). "
    yield Likely(f"{told}Are inputs and labels shuffled apart, or is another array read?")


def of_other_axis(derived: list[Derived], y: np.ndarray) -> Iterator[str]:
    """Yield a note if the loss takes a softmax over the rows of the batch, or over places, and not over classes."""
    if derived[0].output.ndim > 2:
        yield from _over_places(derived, y)
        return
    for each in derived:
        labels = y[each.rows]
        if each.output.ndim != 2 or _is_single(each.output):
            return
        if labels.shape != each.output.shape:
            if labels.dtype.kind not in "iu" or labels.size != len(each.rows):
                return
            labels = np.eye(each.output.shape[-1])[labels.reshape(-1) % each.output.shape[-1]]
        shares = shares_of(each.output, 0)
        found = _factors(each.derivative, shares * labels.sum(0) - labels)
        if found is None or not _even(found):
            return
    yield Likely("The softmax is taken over the rows of the batch, and not over the classes: `axis=-1` is meant.")


def _over_places(derived: list[Derived], y: np.ndarray) -> Iterator[str]:
    """Yield a note on any loss of a softmax over places: its derivative by the outputs adds up to 0 along their axis.

    A softmax stays the same if a number is added to all outputs along its axis.
    """
    for each in derived:
        is_of_classes = y.dtype.kind in "iu" and y.shape[1:] == each.output.shape[1:-1]
        if not (is_of_classes or y.shape[1:] == each.output.shape[1:]) or _is_flat(each.derivative, -1):
            return
    for axis in range(1, derived[0].output.ndim - 1):
        if all(_is_flat(each.derivative, axis) for each in derived):
            told = f"The loss is the same if a number is added to all outputs along axis {axis}, as after a softmax "
            yield Likely(f"{told}over it. The classes are the last axis: `axis=-1` is meant.")
            return


def normalised(derived: list[Derived]) -> Iterator[str]:
    """Yield a note if each output is divided by its length over the rows of a batch, and no row by its own.

    Then the loss is the same if an output is multiplied in all rows. Outputs that are also centred over the rows, as
    those of Barlow twins, are meant so.
    """
    moved = [(each.output * each.derivative, each.derivative) for each in derived if each.output.ndim == 2]
    if moved and all(_is_flat(m, 0) and not _is_flat(m, 1) and not _is_flat(d, 0) for m, d in moved):
        told = "The loss is the same if one of the outputs is multiplied by a number in all rows of a batch: outputs "
        told += "are divided by their length over the rows (`axis=0`), and not by that of each row (`axis=-1`)."
        yield Likely(told)


def _is_flat(derivative: np.ndarray, axis: int) -> bool:
    """Whether a derivative adds up to 0 along an axis, up to rounding."""
    most = np.abs(derivative).sum(axis).max()
    return bool(most > 0 and np.abs(derivative.sum(axis)).max() <= SOLVED * most)


def without_class(derived: list[Derived], name: str, y: np.ndarray) -> Iterator[str]:
    """Yield a note if labels lie outside of the classes that the outputs have, and their rows have no loss."""
    width, pairs = derived[0].output.shape[-1], _classes(derived)
    if pairs is None or y.dtype.kind not in "iu" or y.size != len(y) or 0 <= y.min() <= y.max() < width:
        return
    used = np.concatenate([classes.reshape(-1) for _, classes in pairs])
    own = np.concatenate([y.reshape(-1)[rows] for rows, _ in pairs])
    is_class = (own >= 0) & (own < width)
    if (
        not is_class.all()
        and used.size == own.size
        and np.all(used[~is_class] < 0)
        and np.all(used[is_class] == own[is_class])
    ):
        told = f"The labels {name} go from {y.min()} to {y.max()}, and the outputs have classes up to {width - 1}: the "
        yield Likely(f"{told}rows of the other labels have no loss (`one_hot` gives zeros for them).")


def of_rows(replay: Replay, derived: list[Derived], loss: Loss, y: np.ndarray) -> Iterator[str]:
    """Yield a note on the factors of the rows or places in the loss, if these are not equal."""
    factors = _factors_of(replay, derived, loss, y)
    if factors is None or all(map(_even, factors)):
        return
    rows, is_zero = [each.rows for each in derived], np.asarray(y) == 0
    if is_zero.any() and _are(factors, rows, is_zero):
        yield Likely("The loss counts the places alone whose labels are 0. If that is padding, the mask is inverted.")
    elif by_class := _by_prediction(derived, factors):
        told = ", ".join(f"{number:.3g} for class {k}" for k, number in [*by_class.items()][:4])
        told = f"A row's loss is multiplied by a number that depends on the class that the model predicts ({told}), "
        yield Likely(f"{told}and not on the row's label. Is the weight of the label meant?")
    elif not _is_single(derived[0].output):  # else every loss is another one times a factor
        least, most = (how([how(each[np.isfinite(each)]) for each in factors]) for how in (min, max))
        share = np.mean(np.concatenate([np.ravel(each) for each in factors]) <= SOLVED * most)
        lost = f"{share:.0%} count nothing" if share else f"they count from {least:.3g} to {most:.3g}"
        yield f"Rows or places do not count alike in the loss, which is {loss.name} otherwise: {lost}. Is that meant?"


def _by_prediction(derived: list[Derived], factors: list[np.ndarray]) -> dict[int, float]:
    """Return the factor of the rows by the class that the model predicts; nothing if it does not depend on that."""
    if any(each.output.ndim != 2 or _is_single(each.output) for each in derived):
        return {}
    chosen = np.concatenate([np.argmax(each.output, axis=-1) for each in derived])
    values = np.concatenate([each / np.nanmax(each) for each in factors])
    by_class = {k: values[chosen == k] for k in np.unique(chosen).tolist()}
    is_of_class = len(by_class) > 1 and all(np.ptp(own) <= SOLVED for own in by_class.values())
    return {k: float(own[0]) for k, own in by_class.items()} if is_of_class else {}


def by_frequency(y: np.ndarray, weights: np.ndarray) -> Iterator[str]:
    """Yield a note if the rows' weights are those of their classes, and in proportion to the number of its rows."""
    if y.dtype.kind not in "iu" or y.size != len(y) or np.shape(weights) != (len(y),):
        return
    classes, place, counts = np.unique(y, return_inverse=True, return_counts=True)
    own = np.array([np.mean(weights[place.reshape(-1) == i]) for i in range(len(classes))])
    is_of_class = len(classes) <= _FEW_CLASSES and np.allclose(own[place.reshape(-1)], weights, rtol=SOLVED)
    for power, told in ((1.0, "the number of its rows"), (0.5, "the root of the number of its rows")):
        shares = own / counts**power
        if is_of_class and np.ptp(own) > _UNLIKE * own.max() and np.ptp(shares) <= _ALIKE * shares.max():
            told = (
                f"The weight of a class grows with {told}: {counts.max()} rows have {own.max() / own.min():.3g} times "
            )
            yield Likely(
                f"{told}the weight of {counts.min()}. Rare classes get the large weights: divide by the counts."
            )


def _is_single(output: np.ndarray) -> bool:
    return output.ndim < 2 or output.shape[-1] == 1


def _others(pairs: list[tuple[np.ndarray, np.ndarray]], y: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Yield (row, the class of the loss, the label) where these are not the same; nothing if these are no labels."""
    for rows, classes in pairs:
        own = np.asarray(y)[rows]
        if own.ndim == classes.ndim + 1 and own.shape[-1] > 1:
            own = own.argmax(-1)
        if own.size != classes.size or own.dtype.kind not in "biuf":
            yield int(rows[0]), int(classes.flat[0]), -1
            return
        own = own.reshape(classes.shape)
        for place in np.argwhere((own != classes) & (classes >= 0) & (own >= 0)):
            yield int(rows[place[0]]), int(classes[tuple(place)]), int(own[tuple(place)])


def _fitted(
    replay: Replay, derived: list[Derived], loss: Loss, labels: tuple[str, np.ndarray], beside: dict[str, np.ndarray]
) -> Iterator[Solved]:
    """Yield the loss with the weights of rows or places by which it has the derivatives, if there are some."""
    name, y = labels
    if (factors := _factors_of(replay, derived, loss, y)) is None:
        return
    told = f"{loss.name} of {name} as labels" if name else str(loss.name)
    if all(_even(each) for each in factors):
        yield Solved(loss, y, None, told)
        return
    rows = [each.rows for each in derived]
    for by, w in [*beside.items(), *_by_class(rows, y, factors)]:
        if _are(factors, rows, w):
            weighed, by = mean_of(loss, by_weight=True), by.replace(f"whose {name} are", "whose labels are")
            yield Solved(weighed, y, np.asarray(w, "float32"), f"{told} {'by the weights ' * (w.dtype != bool)}{by}")
            return


def _factors_of(replay: Replay, derived: list[Derived], loss: Loss, y: np.ndarray) -> list[np.ndarray] | None:
    """Return the factors of the rows or places of each pass by which this loss has the derivatives; None if none do."""
    factors, objective = [], LossObjective(loss)
    for each in derived:
        try:
            made = by_logits(each.output, replay.derivative(objective, each.output, y[each.rows], is_once=True))
        except Exception:  # the loss does not take such labels
            return None
        if (found := _factors(each.derivative, made)) is None:
            return None
        factors.append(found)
    return factors


def _factors(observed: np.ndarray, made: np.ndarray) -> np.ndarray | None:
    """Return how often the derivative of each row or place counts, NaN where it is 0; None if that does not make it."""
    is_single = _is_single(made)
    axis = () if is_single else (-1,)
    size = np.sum(made * made, axis=axis)
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = np.where(size > 0, np.sum(observed * made, axis=axis) / size, np.nan)
    spread = np.nan_to_num(factors)
    rest = observed - made * (spread if is_single else spread[..., None])
    if np.linalg.norm(rest) > SOLVED * np.linalg.norm(observed) or not np.any(observed):
        return None
    return factors if np.all(factors[np.isfinite(factors)] > -SOLVED) else None


def _even(factors: np.ndarray) -> bool:
    known = factors[np.isfinite(factors)]
    return known.size > 0 and bool(np.ptp(known) <= SOLVED * np.max(np.abs(known)))


def _are(factors: list[np.ndarray], rows: list[np.ndarray], weights: Any) -> bool:
    """Whether the factors of each pass are proportional to these weights of the data's rows or places."""
    for own, chosen in zip(factors, rows, strict=True):
        expected = np.asarray(weights, "float64")[chosen]
        if expected.size != own.size or not np.any(expected):
            return False
        expected, known = expected.reshape(own.shape), np.isfinite(own)
        a, b = own[known], expected[known]
        if not np.any(b) or np.linalg.norm(a * (b @ b) - b * (a @ b)) > SOLVED * np.linalg.norm(a) * (b @ b):
            return False
    return True


def _by_class(rows: list[np.ndarray], y: np.ndarray, factors: list[np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the weights of classes, if the factors of a class are equal."""
    classes, place = np.unique(y, return_inverse=True)
    if len(classes) > _FEW_CLASSES or place.size != len(y) or factors[0].size != rows[0].size:
        return
    own = [place.reshape(-1)[chosen] for chosen in rows]
    usual = np.bincount(np.concatenate(own)).argmax()
    pairs = [(each, f.reshape(-1) / f[each == usual][0]) for each, f in zip(own, factors, strict=True) if usual in each]
    every, values = (np.concatenate(part) for part in zip(*pairs, strict=True))
    if len(every) < _ROWS_OF_A_CLASS * len(classes):
        return
    by_class = np.array([np.nanmedian(values[every == i]) if np.any(every == i) else 1.0 for i in range(len(classes))])
    if np.all(np.isfinite(by_class)):
        yield "the class", by_class[place.reshape(-1)]


def _classes(derived: list[Derived]) -> list[tuple[np.ndarray, np.ndarray]] | None:
    """Return (rows, the class of each row or place) for which a cross entropy has these derivatives; None if not.

    Its derivative by logits is the probabilities minus 1 at the class. A class is -1 where the derivative is 0.
    """
    pairs = []
    for each in derived:
        if _is_single(each.output):
            return None
        classes = np.argmin(each.derivative, axis=-1)
        hot = np.eye(each.output.shape[-1])[classes]
        shares = each.output if are_shares(each.output) else shares_of(each.output)
        made = shares - hot
        factors = _factors(each.derivative, made)
        if factors is None or (made.shape[-1] < _FEWEST and not _even(factors)):
            return None
        pairs.append((each.rows, np.where(np.any(each.derivative, axis=-1), classes, -1)))
    return pairs or None
