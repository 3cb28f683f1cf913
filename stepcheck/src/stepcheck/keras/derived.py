"""The loss of a loop, solved for: the usual loss and labels whose derivative by the outputs the loop's loss has."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from stepcheck.keras.usual import shares_of, softened
from stepcheck.port import ByPass, Port
from stepcheck.report.found import Likely
from stepcheck.solve.forms import MOST_STEPS
from stepcheck.solve.ratios import least
from stepcheck.trace.log import Called, Log
from stepcheck.trace.measure import SOLVED, are_shares, distance, is_padded
from stepcheck.trace.windows import PAD, Rows, assembled

_MOST_PASSES, _MOST_ROWS = 12, 1024  # on which a loss is tried, and of one in which all labels are
_SHARE = 0.02  # of labels that are others: fewer may be marks of no label
_FEWEST, _FEW_CLASSES = 3, 20  # of two classes, any loss of the difference has such a derivative
APART = "Are inputs and labels shuffled apart, or is another array read?"
_ROWS_OF_A_CLASS = 3  # and more show that a factor belongs to the class


class Derived(NamedTuple):
    """A forward pass: its rows of the data, and the derivative of the loop's loss by one output.

    `whole`: the same with the rows whose labels are not clear, as others of the data have equal inputs.
    """

    rows: np.ndarray
    output: np.ndarray
    derivative: np.ndarray
    whole: "Derived | None" = None


class Solved(NamedTuple):
    """A loss with the derivative of the loop's.

    Attributes:
        labels: one for each row of the data.
        weights: one for each row or place of the data; None if all count the same.
        told: the loss, the labels and the weights in words.
        note: an observation on the loss; "" for none.
    """

    loss: Any
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
                one = Derived(own, called.outputs[i], by_logits(called.outputs[i], called.derivatives[i][-1]))
                clear = np.flatnonzero([len(rows.equal(row)) < 2 for row in own.tolist()])
                eighth = len(own) // 8 + 1
                some = clear[: len(clear) // eighth * eighth]  # of few shapes, as each is compiled
                cut = Derived(own[some], one.output[some], one.derivative[some], one)
                found.append(cut if len(own) > len(clear) and 2 * len(some) > len(own) else one)
    return found


def by_logits(output: np.ndarray, derivative: np.ndarray) -> np.ndarray:
    """Return the derivative by the logits if outputs are a softmax' probabilities or their logarithms, else unchanged.

    Derivatives by probabilities are known up to a constant, if a loss took the logits.
    """
    derivative = np.asarray(derivative, "float64")
    if is_single(output):
        return derivative
    if are_shares(output):
        return output * (derivative - np.sum(output * derivative, axis=-1, keepdims=True))
    if output.max() <= 0 and are_shares(shares := np.exp(output)):
        return derivative - shares * np.sum(derivative, axis=-1, keepdims=True)
    return derivative


def solved(
    port: Port,
    derived: list[Derived],
    labels: dict[str, np.ndarray],
    beside: dict[str, np.ndarray],
    losses: Sequence[Any] = (),
) -> Iterator[Solved]:
    """Yield the losses that have these derivatives, the most usual first.

    Args:
        labels: the arrays that may hold the labels, by name, a row for each row of the data.
        beside: other arrays with as many rows, such as weights and masks.
        losses: functions of the script that may be a part of its loss.
    """
    own = {name: y for name, y in labels.items() if hasattr(y, "shape")}
    pairs, note = classes_of(derived), ""
    if pairs is not None and not (same := [name for name, y in own.items() if not any(differing(pairs, y))]):
        of_classes = {name: y for name, y in own.items() if _are_classes(y, derived[0].output)}
        notes = [told for name, y in of_classes.items() for told in of_other_labels(derived, name, y)]
        note = notes[0] if len(notes) == 1 else ""
        yield from _with_an_error(port, derived[:_MOST_PASSES], of_classes)
        read = assembled(port.num_rows, [(rows, np.maximum(classes, 0)) for rows, classes in pairs])
        own = own if read is None else {"the classes that its derivative shows": read}
    elif pairs is not None:
        own = {name: own[name] for name in same}
    padded = {name or "labels": y for name, y in (own | beside).items() if is_padded(np.asarray(y))}
    masks = {f"at the places whose {name} are not 0": y != 0 for name, y in padded.items()}
    usual = {name: list(port.losses.usual([derived[0].output], y)) for name, y in own.items()}
    for name, y in own.items():
        for loss in [*usual[name], *losses]:
            for found in _fitted(port, derived[:_MOST_PASSES], loss, (name, y), beside | masks):
                yield found._replace(note=note)
    first, arrays = derived[0], {name: y for name, y in (own | beside).items() if hasattr(y, "shape")}
    for soft in softened(first.rows, first.output, first.derivative, arrays):
        whole = port.losses.soft(soft)
        for found in _fitted(port, derived[:_MOST_PASSES], whole, ("", soft.labels), beside | masks):
            yield found._replace(note=soft.note)
    for name, y in own.items():
        for _, loss in (pair for one in usual[name][:1] for pair in port.losses.others(one, y)):
            yield from _fitted(port, derived[:_MOST_PASSES], loss, (name, y), beside | masks)
    for name, y in own.items():
        if y.dtype.kind == "f" and y.shape[1:] == derived[0].output.shape[1:] and np.any(is_nan := np.isnan(y)):
            places = [d._replace(output=d.output[..., None], derivative=d.derivative[..., None]) for d in derived]
            mask = {f"at the places whose {name or 'labels'} are no NaN": ~is_nan}
            for each in solved(port, places, {name: np.nan_to_num(y)[..., None]}, mask):
                yield each._replace(loss=port.losses.by_place(each.loss))
    yield from _with_an_error(port, derived[:_MOST_PASSES], own)
    if first.output.size == len(first.rows) <= _MOST_ROWS:
        for name, y in own.items():
            for loss in usual[name]:
                yield from _of_pairs(port, derived[:_MOST_PASSES], loss, (name, y), beside)


def _of_pairs(
    port: Port, derived: list[Derived], loss: Any, labels: tuple[str, np.ndarray], beside: dict[str, np.ndarray]
) -> Iterator[Solved]:
    """Yield the loss, and weights, that have these derivatives where each output meets the labels of all rows.

    Of labels that are not clear nothing is known but their sum.
    """
    (name, y), objective = labels, port.objective(loss)
    passes = [each.whole or each for each in derived]
    every = []
    for each in passes:
        num = len(each.rows)
        given = each.output.repeat(num, axis=0), np.tile(y[each.rows], (num, *[1] * (y.ndim - 1)))
        try:
            every.append(port.derivative(objective, *given, is_once=True).reshape(num, num))
        except Exception:  # the loss does not take the outputs of this pass
            return
    told = f"{loss.name} of {name} as labels" if name else str(loss.name)
    weights = {by: w for by, w in beside.items() if np.shape(w) == (len(y),) and w.dtype.kind == "f" and w is not y}
    fitting: list[tuple[float, int, Solved]] = []
    for by, w in [("", np.ones(len(y))), *weights.items()]:
        apart, parts = [], []
        for made, one, clear in zip(every, passes, derived, strict=True):
            columns, wanted = [made @ w[one.rows]], one.derivative.reshape(-1)
            columns += [np.ones(len(wanted))] * (clear.whole is not None)
            factors = least(columns, wanted)[0]
            apart.append(distance(wanted, factors @ np.stack(columns)))
            parts.append(abs(float(factors[-1])) / float(np.linalg.norm(wanted)) if clear.whole else 0.0)
        if max(apart) <= SOLVED:
            own = np.asarray(w, "float32") if by else None
            found = Solved(loss, y, own, f"{told}{', by the weights ' * bool(by)}{by}")
            fitting.append((max(parts), len(fitting), found))
    if fitting:
        yield min(fitting)[-1]


def _with_an_error(port: Port, derived: list[Derived], labels: dict[str, np.ndarray]) -> Iterator[Solved]:
    """Yield the losses that have these derivatives except for an error that the judge names."""
    for name, y in labels.items():
        for loss in port.losses.usual([derived[0].output], y):
            if _has_an_error(port, derived, loss, y):
                yield Solved(loss, y, None, f"{loss.name} of {name} as labels" if name else str(loss.name))


def _has_an_error(port: Port, derived: list[Derived], loss: Any, y: np.ndarray) -> bool:
    """Whether it has these derivatives by labels of other rows, or by outputs that go through one more function."""
    num = len(y)

    def moved(change: Callable[[np.ndarray], np.ndarray]) -> list[Derived]:
        return [each._replace(rows=change(each.rows)) for each in derived]

    others: list[Callable[[np.ndarray], np.ndarray]] = [lambda rows: rows[::-1]]
    for by in (sign * steps for steps in range(1, MOST_STEPS + 1) for sign in (1, -1)):
        others += [partial(np.roll, shift=by), partial(_behind, num, by)]
    tries = [(moved(change), None) for change in others]
    tries += [(derived, change) for _, change, _ in port.losses.changes(loss, derived[0].output.shape[-1])]
    found = (factors_of(port, given, loss, y, change) for given, change in tries)
    return any(factors is not None and all(map(are_even, factors)) for factors in found)


def _behind(num: int, by: int, rows: np.ndarray) -> np.ndarray:
    return (rows + by) % num


def _are_classes(y: np.ndarray, output: np.ndarray) -> bool:
    """Whether these are classes of such outputs, as numbers or one-hot, of several."""
    if y.dtype.kind not in "iuf":
        return False
    width = output.shape[-1]
    is_hot = y.shape[1:] == output.shape[1:] and bool(np.all(y.sum(-1) == 1))
    is_number = y[:1].size * width == output[:1].size and bool(np.all((y >= 0) & (y < width)))
    return (is_hot or is_number) and bool(np.all(y == np.round(y)) and np.ptp(y) > 0)


def of_other_labels(derived: list[Derived], name: str, y: np.ndarray) -> Iterator[str]:
    """Yield a note if the loss is a cross entropy of classes, and of other ones than the labels of the same rows."""
    if (pairs := classes_of(derived)) is None or not (found := list(differing(pairs, y))):
        return
    (_, used, own), num = found[0], sum(np.count_nonzero(classes >= 0) for _, classes in pairs)
    if own < 0 or len(found) < _SHARE * num:
        return
    told = f"The gradient is that of a cross entropy of other classes than {name} has for the rows of the inputs: in "
    yield Likely(f"{told}{len(found) / num:.0%} of the rows (the first: class {used}, and not {own}). {APART}")


def by_pass(port: Port, called: list[Called], values: dict[str, np.ndarray]) -> Iterator[tuple[Solved, ByPass]]:
    """Yield the losses that have the derivatives of these passes, and their labels and weights by pass.

    Args:
        values: arrays with a row for each row of the passes, one pass after the other.
    """
    ends = np.cumsum([len(each.outputs[0]) for each in called])
    starts = [0, *ends[:-1].tolist()]
    outputs = as_wide([each.outputs[0] for each in called])
    derivatives = as_wide([by_logits(each.outputs[0], each.derivatives[0][-1]) for each in called])
    derived = [
        Derived(np.arange(start, end), output, derivative)
        for start, end, output, derivative in zip(starts, ends, outputs, derivatives, strict=True)
    ]
    places = as_wide([np.ones(each.outputs[0].shape[:2], bool) for each in called]) if outputs[0].ndim > 2 else []
    beside = values | ({"at the places of each batch": np.concatenate(places)} if places else {})
    for one in chain(solved(port, derived, values, beside), _picked(port, derived, values)):
        parts = [np.split(each, ends[:-1]) for each in (one.labels, one.weights) if each is not None]
        if outputs[0].ndim > 2 and one.labels.shape[1:2] == outputs[0].shape[1:2]:
            parts = [[y[:, : c.outputs[0].shape[1]] for y, c in zip(own, called, strict=True)] for own in parts]
        yield one, {c.order: own for c, own in zip(called, zip(*parts, strict=True), strict=True)}


def as_wide(parts: list[np.ndarray]) -> list[np.ndarray]:
    """Return arrays of places, which end with zeros where others have more places."""
    if len({each.shape[1:2] for each in parts}) < 2 or min(each.ndim for each in parts) < 2:
        return parts
    width = max(each.shape[1] for each in parts)
    return [np.pad(p, [(0, 0), (0, width - p.shape[1]), *[(0, 0)] * (p.ndim - 2)]) for p in parts]


def as_narrow(values: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return values of the data's rows with as many places as a batch has, which is padded to its longest row."""
    is_wider = values.ndim > 1 < places.ndim and values.shape[1] > places.shape[1]
    return values[:, : places.shape[1]] if is_wider else values


def _picked(port: Port, derived: list[Derived], values: dict[str, np.ndarray]) -> Iterator[Solved]:
    """Yield the losses of one output of each row, whose index its derivative shows."""
    if not all(d.output.ndim == 2 < d.output.shape[1] + 1 and np.all((d.derivative != 0).sum(1) < 2) for d in derived):
        return
    places = [np.abs(each.derivative).argmax(1)[:, None] for each in derived]
    own = [
        d._replace(output=np.take_along_axis(d.output, p, 1), derivative=np.take_along_axis(d.derivative, p, 1))
        for d, p in zip(derived, places, strict=True)
    ]
    for one in solved(port, own, {name: y for name, y in values.items() if y.size == len(y)}, {}):
        labels = np.concatenate([np.concatenate(places), one.labels.reshape(-1, 1)], axis=1).astype("float32")
        yield Solved(port.losses.picked(one.loss), labels, None, f"{one.told}, by one output of each row")


def is_single(output: np.ndarray) -> bool:
    """Whether there is one number for each row or place."""
    return output.ndim < 2 or output.shape[-1] == 1


def differing(pairs: list[tuple[np.ndarray, np.ndarray]], y: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Yield (row, the class of the loss, the label) where these are not the same; nothing if these are no labels."""
    for rows, classes in pairs:
        own = as_narrow(np.asarray(y)[rows], classes)
        if own.ndim == classes.ndim + 1 and own.shape[-1] > 1:
            own = own.argmax(-1)
        if own.size != classes.size or own.dtype.kind not in "biuf":
            yield int(rows[0]), int(classes.flat[0]), -1
            return
        own = own.reshape(classes.shape)
        for place in np.argwhere((own != classes) & (classes >= 0) & (own >= 0)):
            yield int(rows[place[0]]), int(classes[tuple(place)]), int(own[tuple(place)])


def _fitted(
    port: Port, derived: list[Derived], loss: Any, labels: tuple[str, np.ndarray], beside: dict[str, np.ndarray]
) -> Iterator[Solved]:
    """Yield the loss with the weights of rows or places by which it has the derivatives, if there are some."""
    name, y = labels
    if (factors := factors_of(port, derived, loss, y)) is None:
        return
    told = f"{loss.name} of {name} as labels" if name else str(loss.name)
    if all(are_even(each) for each in factors):
        yield Solved(loss, y, None, told)
        return
    rows = [each.rows for each in derived]
    for by, w in [*beside.items(), *_by_class(rows, y, factors)]:
        if are_weights(factors, rows, w):
            weighed, by = port.losses.mean_of(loss, by_weight=True), by.replace(f"whose {name} are", "whose labels are")
            yield Solved(weighed, y, np.asarray(w, "float32"), f"{told} {'by the weights ' * (w.dtype != bool)}{by}")
            return


def factors_of(
    port: Port, derived: list[Derived], loss: Any, y: np.ndarray, change: Callable | None = None
) -> list[np.ndarray] | None:
    """Return the factors of the rows or places of each pass by which this loss has the derivatives; None if none do."""
    factors, objective = [], port.objective(loss)
    for each in derived:
        given = as_narrow(y[each.rows], each.output[..., 0])
        try:
            made = by_logits(each.output, port.derivative(objective, each.output, given, None, change, is_once=True))
        except Exception:  # the loss does not take such labels
            return None
        if (found := factors_by(each.derivative, made)) is None:
            return None
        factors.append(found)
    return factors


def factors_by(observed: np.ndarray, made: np.ndarray) -> np.ndarray | None:
    """Return how often the derivative of each row or place counts, NaN where it is 0; None if that does not make it."""
    is_one = is_single(made)
    axis = () if is_one else (-1,)
    size = np.sum(made * made, axis=axis)
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = np.where(size > 0, np.sum(observed * made, axis=axis) / size, np.nan)
    spread = np.nan_to_num(factors)
    rest = observed - made * (spread if is_one else spread[..., None])
    if np.linalg.norm(rest) > SOLVED * np.linalg.norm(observed) or not np.any(observed):
        return None
    return factors if np.all(factors[np.isfinite(factors)] > -SOLVED) else None


def are_even(factors: np.ndarray) -> bool:
    """Whether all rows or places count the same."""
    known = factors[np.isfinite(factors)]
    return known.size > 0 and bool(np.ptp(known) <= SOLVED * np.max(np.abs(known)))


def are_weights(factors: list[np.ndarray], rows: list[np.ndarray], weights: Any) -> bool:
    """Whether the factors of each pass are proportional to these weights of the data's rows or places."""
    for own, chosen in zip(factors, rows, strict=True):
        expected = as_narrow(np.asarray(weights, "float64")[chosen], own)
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


def classes_of(derived: list[Derived]) -> list[tuple[np.ndarray, np.ndarray]] | None:
    """Return (rows, the class of each row or place) for which a cross entropy has these derivatives; None if not.

    Its derivative by logits is the probabilities minus 1 at the class. A class is -1 where the derivative is 0.
    """
    pairs = []
    for each in derived:
        if is_single(each.output):
            return None
        classes = np.argmin(each.derivative, axis=-1)
        hot = np.eye(each.output.shape[-1])[classes]
        shares = each.output if are_shares(each.output) else shares_of(each.output)
        made = shares - hot
        factors = factors_by(each.derivative, made)
        if factors is None or (made.shape[-1] < _FEWEST and not are_even(factors)):
            return None
        pairs.append((each.rows, np.where(np.any(each.derivative, axis=-1), classes, -1)))
    return pairs or None
