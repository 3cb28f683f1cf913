"""What a script's loop is to be compared with: its model, the data and the loss, as far as they can be found out."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import keras
import numpy as np

from wholestep import tree
from wholestep.audit.chain import Chain, joined
from wholestep.audit.holdings import agrees, assembled, different, holding, read
from wholestep.audit.log import Called
from wholestep.audit.scout import Asked, Scout, Watched
from wholestep.audit.supposing import name_of
from wholestep.audit.surroundings import Named, Surroundings, is_stream
from wholestep.audit.windows import PAD, Rows
from wholestep.data.class_weight import class_weighted
from wholestep.tree import Tree

_LABELS = ("y", "label", "target", "count", "output")
_NO_LABELS = ("weight", "mask", "index", "indices", "order", "perm", "ids", "rows")


class UnknownError(Exception):
    """What has to be known cannot be found out; the message says what."""


@dataclass
class Meaning:
    """What was taken for meant.

    Attributes:
        is_supposed: whether the loss has to be supposed, as the script computes it by itself, or calls several.
        called: the losses of Keras that the script calls, if they are several.
        told: the same in words.
        unseen: what cannot be looked at as the data are only known from what was seen of them.
    """

    watched: Watched
    data: tuple
    loss: Any
    optimizer: keras.optimizers.Optimizer | None
    is_supposed: bool = False
    called: list[Any] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)


class _Labels(NamedTuple):
    """What a forward pass and the loss after it were given."""

    called: Called
    y: np.ndarray
    weight: np.ndarray | None


def inquire(scout: Scout) -> Meaning:
    """Return what the loop of a script is to be compared with.

    Raises:
        UnknownError: it cannot be found out.
    """
    watched = _trained(scout)
    model, log = watched.model, watched.log
    loss, asked, told = _loss(model, scout)
    calls = [c for c in log.called if c.differentiated is not False]
    labels = max((list(_labels(calls, log.called, each)) for each in asked), key=len, default=[])
    meaning = Meaning(watched, (), loss, _optimizer(watched, scout.around), is_supposed=not told)
    meaning.called = [] if told else [each.loss for each in asked]
    meaning.told = [f"model: {_name(model)}", *([told] if told else [])]
    unknown = UnknownError("the data: no array or dataset of the script holds the rows that the model was given")
    for find in (_fitted, _from_arrays, _from_datasets, _from_labels):
        try:
            found = find(scout, meaning, calls, labels)
        except UnknownError as error:
            unknown = error
            continue
        if found is not None:
            meaning.data = found
            return meaning
    raise unknown


def _trained(scout: Scout) -> Watched:
    trained = joined([each for each in scout.watched.values() if each.log.applied])
    if not scout.watched:
        raise UnknownError("the model: no Keras model was called")
    if trained:
        return max(trained, key=lambda each: (len(each.log.applied), len(each.model.trainable_variables)))
    if scout.fitted:
        return scout.watched[next(iter(scout.fitted))]
    moved = [each for each in scout.watched.values() if each.log.called]
    return moved[0] if moved else next(iter(scout.watched.values()))


def _loss(model: keras.Model, scout: Scout) -> tuple[Any, list[Asked], str]:
    """Return (the loss that is meant, those that get its labels, the same in words); no words if it is not known."""
    asked = [each for each in scout.losses.values() if each.calls] or list(scout.losses.values())
    if getattr(model, "compiled", False) and model._compile_loss is not None:
        same = [each for each in asked if each.loss is model.loss or len(asked) == 1]
        return None, same, f"loss: {name_of(model.loss)}, as the model is compiled"
    if len(asked) == 1:
        told = "as the script calls it: whether it fits the model is not judged"
        return asked[0].loss, asked, f"loss: {name_of(asked[0].loss)}, {told}"
    return None, asked, ""


def _name(model: keras.Model) -> str:
    num = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    if isinstance(model, Chain):
        return f"{', '.join(repr(part.name) for part in model.parts)}, one after the other, {num:,} weights"
    return f"{type(model).__name__} {model.name!r}, {num:,} weights"


def _labels(calls: list[Called], every: list[Called], asked: Asked) -> Iterator[_Labels]:
    """Yield each forward pass with what the loss after it got."""
    if not calls:
        return
    orders = sorted(c.order for c in every)
    wanted = {c.order: c for c in calls}
    for order, y, weight in sorted(asked.calls, key=lambda call: call[0]):
        before = int(np.searchsorted(orders, order)) - 1
        called = wanted.get(orders[before]) if before >= 0 else None
        if called is not None and called.inputs and y.ndim and len(y) == len(called.inputs[0]):
            fits = weight is not None and weight.ndim and len(weight) == len(y)
            yield _Labels(called, y, weight if fits else None)


def _optimizer(watched: Watched, around: Surroundings) -> keras.optimizers.Optimizer | None:
    used = {step.optimizer for step in watched.log.applied}
    own = getattr(watched.model, "optimizer", None)
    known = [getattr(o, "inner_optimizer", o) for o in [own, *around.of(keras.optimizers.Optimizer)]]
    return next((o for o in known if o is not None and id(o) in used), None)


# ---- the data, by the ways in which they are found ----


def _fitted(scout: Scout, meaning: Meaning, calls: list[Called], labels: list[_Labels]) -> tuple | None:
    """Take the arrays that `fit` was given."""
    x, y, weight, by_class = scout.fitted.get(id(meaning.watched.model), (None, None, None, None))
    leaves = tree.leaves((x, y))
    if x is None or y is None or not all(hasattr(leaf, "__array__") and len(leaf.shape) for leaf in leaves):
        return None
    meaning.told.append("data: what `fit` was given")
    if by_class is not None:
        return class_weighted(by_class)((x, np.asarray(y)))  # Keras takes no sample weights beside them
    return (x, y) if weight is None else (x, y, weight)


def _from_arrays(scout: Scout, meaning: Meaning, calls: list[Called], labels: list[_Labels]) -> tuple | None:
    """Find arrays whose rows are the model's inputs and, beside them, the labels."""
    arrays = scout.around.arrays()
    inputs = [c.inputs for c in calls if c.inputs and c.inputs[0].ndim]
    if not inputs:
        return None
    chosen = holding(arrays, inputs)
    if chosen is None:
        return None
    x = [named.value for named in chosen]
    others = [a for a in arrays if len(a.value) == len(x[0]) and not any(a.value is each for each in x)]
    try:
        y, name = _beside(chosen, others, x, labels)
    except UnknownError:
        if not (meaning.is_supposed and reconstructs(x, calls)):
            raise
        y, name = x[0], "the same as labels"
    data = _nested(meaning, x), y
    weight, weight_name = _weights(others, x, labels)
    names = ", ".join([*(named.name for named in chosen), name, *([weight_name] if weight is not None else [])])
    meaning.told.append(f"data: {names}, {len(y)} rows")
    return data if weight is None else (*data, weight)


def reconstructs(x: list[np.ndarray], calls: list[Called]) -> bool:
    """Whether a model's outputs may be meant to be its inputs, by their shapes."""
    outputs = next((c.outputs for c in calls if c.outputs), [])
    return len(x) == len(outputs) == 1 and x[0].ndim > 1 and x[0].shape[1:] == outputs[0].shape[1:]


def _nested(meaning: Meaning, x: list[np.ndarray]) -> Tree:
    """Return the model's inputs as the script nests them."""
    like = meaning.watched.like
    if isinstance(like, dict) and len(keras.tree.flatten(like)) == len(x):
        return keras.tree.pack_sequence_as(like, x)
    return x[0] if len(x) == 1 else x


def _beside(chosen: list[Named], others: list[Named], x: list[np.ndarray], labels: list[_Labels]) -> tuple:
    """Return (labels by row, what they are called)."""
    if labels:
        pairs = [(Rows(x).find(each.called.inputs), each.y) for each in labels]
        for named in others:
            if agrees(named.value, pairs):
                return named.value, named.name
        if (y := assembled(len(x[0]), pairs)) is not None:
            return y, "the labels that the loss was given"
    told = [np.unique(each.y) for each in labels]
    others = [named for named in others if all(np.isin(values, named.value).all() for values in told)]
    home = [named for named in others if named.home == chosen[0].home] or others
    home = [n for n in home if not any(word in n.name.lower() for word in _NO_LABELS)]
    called = [n for n in home if any(word in n.name.lower() for word in _LABELS)]
    found = different(called if len(different(home)) > 1 else home)
    if len(found) == 1:
        return found[0].value, found[0].name
    names = ", ".join(n.name for n in found) or "none"
    raise UnknownError(
        f"the labels: the rows are those of {chosen[0].name}, and of the arrays beside it of the same length "
        f"({names}) it is not known which holds the labels"
    )


def _weights(others: list[Named], x: list[np.ndarray], labels: list[_Labels]) -> tuple[np.ndarray | None, str]:
    pairs = [(Rows(x).find(each.called.inputs), each.weight) for each in labels if each.weight is not None]
    if not pairs:
        return None, ""
    for named in others:
        if agrees(named.value, pairs):
            return named.value, named.name
    return assembled(len(x[0]), pairs, fill=1.0), "the weights that the loss was given"


def _from_datasets(scout: Scout, meaning: Meaning, calls: list[Called], labels: list[_Labels]) -> tuple | None:
    """Read the script's datasets once more, and take the first one that holds the model's inputs."""
    inputs = [c.inputs for c in calls if c.inputs and c.inputs[0].ndim]
    for dataset in scout.around.of(object):
        if not (isinstance(dataset, keras.utils.PyDataset) or is_stream(dataset)):
            continue
        known = read(dataset)
        if known is None or not inputs:
            continue
        rows = Rows(known[0])
        if np.mean([np.mean(rows.find(leaves) != PAD) for leaves in inputs]) > 0.5:
            meaning.told.append(f"data: a {type(dataset).__name__} of the script, read once more, {rows.num} rows")
            return known
    return None


def _from_labels(scout: Scout, meaning: Meaning, calls: list[Called], labels: list[_Labels]) -> tuple | None:
    """Put the data together from what the model and the loss were given, a row each."""
    if not labels:
        return None
    leaves = [np.concatenate(each) for each in zip(*(one.called.inputs for one in labels), strict=True)]
    y = np.concatenate([each.y for each in labels])
    weights = [each.weight for each in labels]
    keys = [b"".join(leaf[row].tobytes() for leaf in leaves) for row in range(len(y))]
    first = sorted({key: row for row, key in reversed(list(enumerate(keys)))}.values())
    x = [leaf[first] for leaf in leaves]
    meaning.told.append(f"data: what the model and the loss were given, {len(first)} different rows")
    meaning.unseen.append("whether all rows of the data are used, and with their own labels: the data are not known")
    data = _nested(meaning, x), y[first]
    if any(w is None for w in weights):
        return data
    return (*data, np.concatenate(weights)[first])  # type: ignore[arg-type]
