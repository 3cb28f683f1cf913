"""The data of a script: the arrays, datasets or batches that hold its model's inputs, and the labels of its loss."""

import itertools
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import keras
import numpy as np

from stepcheck import tree
from stepcheck.keras.surroundings import Named, columns, cut, is_stream
from stepcheck.trace.log import Called
from stepcheck.trace.loops import Asked, Loop, Watched, outputs_beside
from stepcheck.trace.windows import PAD, Rows, agrees, assembled, keys, packed
from stepcheck.tree import Tree
from wholestep.data import class_weighted

_LABELS = ("y", "label", "target", "count", "output")
UNKNOWN_ROWS = "whether all rows of the data are used: the data are not known"
_FIRST_LABELS = f"{UNKNOWN_ROWS}, and a row's label is the first that it was given"
_MOST = 3  # arrays that may be the labels
_SECONDS, _ROWS = 30.0, 200_000  # the most for reading a dataset once more
_NO_LABELS = ("weight", "mask", "index", "indices", "order", "perm", "ids", "rows")


class UnknownError(Exception):
    """A part of the script's intention cannot be found; the message names it."""


@dataclass
class Meaning:
    """The intention of a script.

    Attributes:
        is_supposed: whether the loss has to be supposed: the script computes its own, or calls several.
        called: the losses of Keras that may be meant then, or that the script reduces.
        own: the functions of the script that get labels and the model's outputs.
        labels: the possible labels, by name, where several arrays may be the labels.
        beside: the arrays of as many rows, by name: several outputs may have labels in each.
        has_labels: whether the data have labels; else they have zeros.
        by_pass: by name and pass (its order), possible labels: tensors beside it, outputs of models before or after it.
        weights: the possible weights of the rows, by name, if the loss has to be supposed.
        unseen: checks that are not possible, as the data are only known from the updates.
        notes: observations on how the script calls its losses.
    """

    watched: Watched
    data: tuple
    loss: Any
    optimizer: keras.optimizers.Optimizer | None
    is_supposed: bool = False
    called: list[Any] = field(default_factory=list)
    own: list[Any] = field(default_factory=list)
    labels: dict[str, np.ndarray] = field(default_factory=dict)
    beside: dict[str, np.ndarray] = field(default_factory=dict)
    has_labels: bool = True
    by_pass: dict[str, dict[int, np.ndarray]] = field(default_factory=dict)
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Labels(NamedTuple):
    """The inputs of a forward pass, and the labels and weights of the loss after it."""

    called: Called
    label: np.ndarray
    weight: np.ndarray | None


def search(loop: Loop, meaning: Meaning, calls: list[Called], labels: list[Labels]) -> tuple:
    """Return (x, y) or (x, y, sample_weight), and note in the meaning how they were found, or raise `UnknownError`."""
    why = "; ".join(meaning.watched.log.unseen) if not calls else ""
    why = why or "no array or dataset of the script holds the rows that the model was given"
    unknown = UnknownError(f"the data: {why}")
    beside = {name: list(labels_of(calls, meaning.watched.log.called, each)) for name, each in loop.beside.items()}
    named = {name: {each.called.order: each.label for each in own} for name, own in beside.items()}
    meaning.by_pass = named | dict(outputs_beside(loop, meaning.watched.log))
    data = _Data(loop, meaning, calls, labels, beside)
    ways = (data.fitted, data.whole_arrays, data.datasets, data.arrays, data.of_losses, data.of_batches)
    for find in (*ways, data.inputs_alone):
        try:
            found = find()
        except UnknownError as error:
            unknown = error
            continue
        if found is not None:
            return found
    raise unknown


def labels_of(calls: list[Called], every: list[Called], asked: Asked) -> Iterator[Labels]:
    """Yield each forward pass with the labels and weights of the loss after it."""
    if not calls:
        return
    orders = sorted(c.order for c in every)
    wanted = {c.order: c for c in calls}
    for order, y, weight in sorted(asked.calls, key=lambda call: call[0]):
        before = int(np.searchsorted(orders, order)) - 1
        called = wanted.get(orders[before]) if before >= 0 else None
        if called is not None and called.inputs and y.ndim and len(y) == len(called.inputs[0]):
            fits = weight is not None and weight.ndim and len(weight) == len(y)
            yield Labels(called, y, weight if fits else None)


class _Data:
    """The ways to find the data of a script; each returns (x, y[, sample_weight]), or None."""

    def __init__(
        self, loop: Loop, meaning: Meaning, calls: list[Called], labels: list[Labels], beside: dict[str, list[Labels]]
    ):
        self.loop, self.meaning, self.labels, self.beside = loop, meaning, labels, beside
        given = [called for called in calls if called.inputs and called.inputs[0].ndim]
        self.has_several = any(len(called.outputs) > 1 for called in calls)  # outputs, each with its labels
        self.inputs, self.kept = [c.inputs for c in given], [c.inputs for c in given if c.is_whole]

    def fitted(self) -> tuple | None:
        """Take the arguments of `fit`."""
        x, y, weight, by_class = self.loop.fitted.get(id(self.meaning.watched.model), (None, None, None, None))
        leaves = tree.leaves((x, y))
        if x is None or y is None or not all(hasattr(leaf, "__array__") and len(leaf.shape) for leaf in leaves):
            return None
        self.meaning.told.append("data: what `fit` was given")
        if by_class is not None:
            return class_weighted(by_class)((x, np.asarray(y)))  # Keras takes no sample weights beside them
        return (x, y) if weight is None else (x, y, weight)

    @cached_property
    def held(self) -> tuple[list[Named], list[Named]]:
        """The arrays whose rows are the model's inputs, and the others of their length."""
        arrays = self.loop.scout.around.arrays()
        chosen = (holding(arrays, self.inputs) if self.inputs else None) or []
        if not chosen and self.inputs:
            first, *more = self.inputs[0]
            arrays = [*arrays, *columns(arrays)] if more else cut(arrays, first.shape)
            chosen = holding(arrays, self.inputs) or []
        num = len(chosen[0].value) if chosen else 0
        others = [a for a in arrays if len(a.value) == num and not any(a.value is each.value for each in chosen)]
        return chosen, others

    def whole_arrays(self) -> tuple | None:
        """Find arrays that hold every row of the model's inputs: of others a dataset may hold more."""
        x = [named.value for named in self.held[0]]
        if not x:
            return None
        table = Rows(x)
        is_whole = all(np.all(table.anew().find(leaves) != PAD) for leaves in self.inputs)
        return self.arrays() if is_whole else None

    def arrays(self) -> tuple | None:
        """Find arrays whose rows are the model's inputs, and the labels with them."""
        chosen, others = self.held
        if not chosen:
            return None
        x = [named.value for named in chosen]
        y, name = self._labels(x)
        beside = [n for n in different(others) if not any(word in n.name.lower() for word in _NO_LABELS)]
        self.meaning.beside = {n.name: n.value for n in beside[: 2 * _MOST]}
        weights = [each for each in others if each.value is not y and _are_weights(each.value)]
        self.meaning.weights = {each.name: each.value for each in weights}
        weight, weight_name = self._given("weight", x, 1.0)
        names = [*(named.name for named in chosen), name, *([weight_name] if weight is not None else [])]
        self.meaning.told.append(f"data: {', '.join(names)}, {len(y)} rows")
        data = nested(self.meaning.watched, x), y
        return data if weight is None else (*data, weight)

    def _given(self, what: str, x: list[np.ndarray], fill: float = 0.0) -> tuple[np.ndarray | None, str]:
        """Return (the labels or weights by row that the loss was given, their name); None if it was given none."""
        given = [(each.called.inputs, getattr(each, what)) for each in self.labels]
        table = Rows(x)
        pairs = [(table.anew().find(inputs), values) for inputs, values in given if values is not None]
        if not pairs:
            return None, ""
        for named in self.held[1]:
            if agrees(named.value, pairs):
                return named.value, named.name
        if what == "weight" and (known := _first_changed(pairs)) < len(pairs):
            orders = [each.called.order for each in self.labels if each.weight is not None]
            self.meaning.watched.log.cut("from there on rows have other weights than before", orders[known])
            pairs = pairs[:known]
        return assembled(len(x[0]), pairs, fill), f"the {what}s that the loss was given"

    def _labels(self, x: list[np.ndarray]) -> tuple[np.ndarray, str]:
        y, name = self._given("label", x)
        if y is not None:
            return y, name
        ((first, *_), others), table, rows = self.held, Rows(x), dict[int, np.ndarray]()
        for each in (label for labels in self.beside.values() for label in labels):
            rows.setdefault(each.called.order, table.find_clear(each.called.inputs))
        pairs = {name: [(rows[each.called.order], each.label) for each in own] for name, own in self.beside.items()}
        others = [n for n in others if any(agrees(n.value, own) for own in pairs.values() if own)] or others
        told = [np.unique(each.label) for each in self.labels]
        others = [named for named in others if all(np.isin(values, named.value).all() for values in told)]
        home = [named for named in others if named.home == first.home] or others
        home = [n for n in home if not any(word in n.name.lower() for word in _NO_LABELS)]
        called = [n for n in home if any(word in n.name.lower() for word in _LABELS)]
        found = different(called if len(different(home)) > 1 else home)
        if (self.meaning.is_supposed or self.has_several) and home:
            found = different([*called, *home])[:_MOST]
            self.meaning.labels = {n.name: n.value for n in found}
        if len(found) == 1 or self.meaning.labels:
            return found[0].value, " or ".join(n.name for n in found)
        names = f"({', '.join(n.name for n in found or different(home)) or 'none'})"
        which = f"the labels: the rows are those of {first.name}, and of the arrays beside it of the same length "
        raise UnknownError(f"{which}{names} it is not known which holds the labels")

    def datasets(self) -> tuple | None:
        """Read the script's datasets once more, and take the first that holds the model's inputs."""
        for dataset in self.loop.scout.around.of(object) if self.inputs else ():
            is_one = isinstance(dataset, keras.utils.PyDataset) or is_stream(dataset)
            if is_one and (known := read(dataset, self.inputs)) is not None:
                num = len(tree.leaves(known)[0])
                self.meaning.told.append(f"data: a {type(dataset).__name__} of the script, read once more, {num} rows")
                return known
        return None

    def of_losses(self) -> tuple | None:
        """Assemble the data from the inputs of the model and the labels of the loss, each row once."""
        if not self.labels:
            return None
        weights = [each.weight for each in self.labels if each.weight is not None]
        beside = [joined(each.label for each in self.labels)]
        beside += [joined(weights)] if len(weights) == len(self.labels) else []
        inputs = [each.called.inputs for each in self.labels]
        (x, first), (more, pairs) = (once(self.meaning.watched, inputs, other) for other in ((), beside))
        # Equal by chance, as mixed images, or inputs of several labels, as words; else labels come apart from rows.
        if len(pairs) < 1.05 * len(first) or any(len({*own}) < len(own) for own in map(keys, inputs)):
            x, first = more, pairs
        self.meaning.told.append(f"data: what the model and the loss were given, {len(first)} different rows")
        self.meaning.unseen.append(_FIRST_LABELS)
        return x, *(leaf[first] for leaf in beside)

    def of_batches(self) -> tuple | None:
        """Assemble the data from the inputs of the model and the tensors that the script names beside them."""
        used = {each.called.order: each.called for own in self.beside.values() for each in own}
        whole = {name: own for name, own in self.beside.items() if used and len(own) == len(used)}
        if not whole or not self.meaning.is_supposed:
            return None
        x, first = once(self.meaning.watched, [called.inputs for called in used.values()])
        leaves = tree.leaves(x)
        named = [Named(0, name, joined(each.label for each in own)[first]) for name, own in whole.items()]
        found = different([*named, *cut(named, leaves[0].shape)])
        found = [n for n in found if not any(np.array_equal(n.value, leaf) for leaf in leaves)]
        labels = [n for n in found if not any(word in n.name.lower() for word in _NO_LABELS)]
        labels.sort(key=lambda named: not any(word in named.name.lower() for word in _LABELS))
        if not labels:
            return None
        self.meaning.labels = {n.name: n.value for n in labels[:_MOST]}
        self.meaning.beside = {n.name: n.value for n in labels[: 2 * _MOST]}
        self.meaning.weights = {n.name: n.value for n in found if _are_weights(n.value)}
        names = " or ".join(self.meaning.labels)
        self.meaning.told.append(f"data: what the model was given, with {names}, {len(first)} different rows")
        self.meaning.unseen.append(_FIRST_LABELS)
        return x, labels[0].value

    def inputs_alone(self) -> tuple | None:
        """Take the arrays of the model's inputs, or else these, without labels, if no loss of Keras has them."""
        chosen, _ = self.held
        if not self.meaning.is_supposed or not (chosen or self.kept):
            return None
        x, names = nested(self.meaning.watched, [n.value for n in chosen]), ", ".join(n.name for n in chosen)
        if not chosen:
            x, names = once(self.meaning.watched, self.kept)[0], "what the model was given"
            self.meaning.unseen.append(UNKNOWN_ROWS)
        num, self.meaning.has_labels = len(tree.leaves(x)[0]), False
        self.meaning.told.append(f"data: {names}, without labels, {num} rows")
        return x, np.zeros(num)


def once(watched: Watched, given: list[list[np.ndarray]], beside: Sequence[np.ndarray] = ()) -> tuple[Tree, list[int]]:
    """Return (a model's inputs, each row once, the first position of each); a row that differs `beside` is another."""
    leaves = [joined(each) for each in zip(*given, strict=True)]
    first = sorted({key: row for row, key in reversed([*enumerate(keys([*leaves, *beside]))])}.values())
    return nested(watched, [leaf[first] for leaf in leaves]), first


def nested(watched: Watched, x: list[np.ndarray]) -> Tree:
    """Return a model's inputs as the script nests them."""
    like = watched.like
    if isinstance(like, dict) and len(keras.tree.flatten(like)) == len(x):
        return keras.tree.pack_sequence_as(like, x)
    return x[0] if len(x) == 1 else x


def _first_changed(pairs: list[tuple[np.ndarray, Any]]) -> int:
    """Return the number of passes before the first in which a row has another value than before."""
    known: dict[int, Any] = {}
    for i, (rows, values) in enumerate(pairs):
        seen = [(row, value) for row, value in zip(rows.tolist(), values.tolist(), strict=True) if row != PAD]
        if any(known.setdefault(row, value) != value for row, value in seen):
            return i
    return len(pairs)


def _are_weights(values: np.ndarray) -> bool:
    return values.size == len(values) and values.dtype.kind == "f" and bool(values.min() >= 0 < values.max())


def holding(arrays: list[Named], inputs: list[list[np.ndarray]]) -> list[Named] | None:
    """Return the smallest arrays that hold all rows of all these inputs, a leaf each."""
    widths = [int(np.prod(leaf.shape[1:])) for leaf in inputs[0]]
    fitting = [
        [a for a in arrays if int(np.prod(a.value.shape[1:])) == width and _has_row(a.value, leaf[0])]
        for leaf, width in zip(inputs[0], widths, strict=True)
    ]
    found = []
    for choice in itertools.islice(itertools.product(*fitting), 200):
        if len({len(named.value) for named in choice}) > 1:
            continue
        rows = Rows([named.value for named in choice])
        held = [rows.find(leaves) for leaves in inputs if len(leaves) == len(choice)]
        share = np.mean([np.mean(each != PAD) for each in held if len(each)])
        found.append((share, -len(choice[0].value), list(choice)))
    if not found:
        return None
    share, _, best = max(found, key=lambda each: each[:2])
    return best if share > 0.5 else None


def _has_row(array: np.ndarray, row: np.ndarray) -> bool:
    flat = array.reshape(len(array), -1)
    with np.errstate(all="ignore"):
        wanted = row.reshape(-1)
        few = np.flatnonzero(flat[:, 0].astype(wanted.dtype) == wanted[0]) if wanted.size else np.arange(len(flat))
    return any(flat[i].astype(wanted.dtype).tobytes() == wanted.tobytes() for i in few[:10_000])


def joined(parts: Iterable[np.ndarray]) -> np.ndarray:
    """Return arrays one after the other; batches of several widths are padded with zeros.

    >>> joined([np.array([[1, 2]]), np.array([[3]])]).tolist()
    [[1, 2], [3, 0]]
    """
    parts = list(parts)
    width = max((part.shape[1] for part in parts if part.ndim > 1), default=0)

    def filled(part: np.ndarray) -> np.ndarray:
        more = width - part.shape[1] if part.ndim > 1 else 0
        return np.pad(part, [(0, 0), (0, more), *[(0, 0)] * (part.ndim - 2)]) if more else part

    return np.concatenate(list(map(filled, parts)))


def different(arrays: Iterable[Named]) -> list[Named]:
    """Return those whose values differ."""
    return list({(n.value.shape, n.value.dtype.str, n.value.tobytes()): n for n in arrays}.values())


def read(dataset: Any, inputs: list[list[np.ndarray]]) -> tuple | None:
    """Return (x, y[, sample_weight]) of a dataset that holds most of these inputs; None if it does not.

    A shuffled dataset without its last, shorter batch leaves out other rows in each pass: it is read until it has all
    inputs, or until a pass has no new rows.
    """
    until, known = time.monotonic() + _SECONDS, None
    while True:
        num = 0 if known is None else len(tree.leaves(known)[0])
        if (found := _pass(dataset, until)) is None:
            return None
        known = found if known is None else _united(known, found)
        rows = Rows(known[0])
        share = np.mean([np.mean(rows.find(leaves) != PAD) for leaves in inputs])
        if share == 1 or share <= 0.5 or len(tree.leaves(known)[0]) == num or time.monotonic() > until:
            return known if share > 0.5 else None


def _united(known: tuple, more: tuple) -> tuple:
    """Return the rows of two passes over one dataset; equal rows as often as in the pass that has most of them."""
    num = len(tree.leaves(known)[0])
    both = [joined(pair) for pair in zip(tree.leaves(known), tree.leaves(more), strict=True)]
    rows = keys(both)
    counts = Counter(rows[:num])
    chosen = list(range(num))
    for row, key in enumerate(rows[num:], start=num):
        counts[key] -= 1
        if counts[key] < 0:
            chosen.append(row)
    return packed([leaf[chosen] for leaf in both], known)


def _pass(dataset: Any, until: float) -> tuple | None:
    num, parts = 0, []
    seen: set[int] = set()
    for batch in (dataset[i] for i in range(len(dataset))) if not is_stream(dataset) else dataset:
        if not isinstance(batch, tuple) or len(batch) not in (2, 3):
            return None
        batch = tree.map_leaves(np.asarray, batch)
        leaves = tree.leaves(batch)
        if not all(leaf.ndim for leaf in leaves):
            return None
        key = hash(b"".join(leaf.tobytes() for leaf in leaves))
        num += len(leaves[0])
        if key in seen or num > _ROWS or time.monotonic() > until:  # it repeats, or is too long
            break
        seen.add(key)
        parts.append(batch)
    if not parts:
        return None
    return packed([joined(each) for each in zip(*map(tree.leaves, parts), strict=True)], parts[0])
