"""Which loss a script may mean that computes it by itself: what fits its labels and the model's outputs."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from keras import ops

from wholestep import tree
from wholestep.audit.evidence import Evidence
from wholestep.audit.found import Found, Likely
from wholestep.audit.gradients import is_along
from wholestep.model import Mean, Objective
from wholestep.tree import Tree

# What these find is a matter of scale or of what padding means: whoever wrote the loss may have meant it.
_MAY_BE_MEANT = (
    "never divided",
    "divided by the full batch",
    "divided twice",
    "mean of row means",
    "divided by the rows",
    "divided by the weights",
    "padding counted",
    "padded places counted",
)
_ENOUGH = 16  # numbers: of fewer logits all may lie between 0 and 1


class NoLoss(Objective):
    """Stands for a loss that nobody knows, where gradients are not judged."""

    def __call__(self, model: keras.Model, batch: Tree, training: bool) -> Mean:
        """Return zeros, one for each row."""
        output = tree.leaves(model(batch[0], training=training))[0]
        return Mean(ops.zeros(ops.shape(output)[:1]))


def losses(outputs: list[np.ndarray], y: Tree) -> Iterator[keras.losses.Loss]:
    """Yield the losses that fit labels and outputs, the most usual first.

    >>> [loss.name for loss in losses([np.array([[0.9, 0.1]])], np.array([0]))]
    ['sparse_categorical_crossentropy']
    >>> [loss.name for loss in losses([np.array([[7.0]])], np.array([2.5]))]
    ['mean_squared_error', 'mean_absolute_error', 'huber_loss']
    """
    if len(outputs) != 1 or not isinstance(y, np.ndarray) or not y.size or not outputs[0].ndim:
        return
    labels, out = y[..., 0] if y.ndim > 1 and y.shape[-1] == 1 else y, outputs[0]
    single = out[..., 0] if out.ndim > 1 and out.shape[-1] == 1 else out
    is_whole = labels.dtype.kind in "biuf" and bool(np.all(labels == np.round(labels)))
    if labels.ndim == out.ndim - 1 and out.shape[-1] > 1:
        if is_whole and labels.min() >= 0 and labels.max() < out.shape[-1]:
            yield keras.losses.SparseCategoricalCrossentropy(from_logits=not _are_shares(out))
        return
    if labels.ndim != single.ndim or labels.shape[1:] != single.shape[1:]:
        return
    if set(np.unique(labels)) <= {0, 1}:
        if out.shape[-1] > 1 and np.all(y.sum(-1) == 1):
            yield keras.losses.CategoricalCrossentropy(from_logits=not _are_shares(out))
        yield keras.losses.BinaryCrossentropy(from_logits=bool(out.min() < 0 or out.max() > 1))
    yield keras.losses.MeanSquaredError()
    yield keras.losses.MeanAbsoluteError()
    yield keras.losses.Huber()
    if not is_whole and labels.min() >= 0 and labels.max() <= 1:  # as of pixels
        yield keras.losses.BinaryCrossentropy(from_logits=bool(out.min() < 0 or out.max() > 1))


def name_of(loss: object) -> str:
    """Return what a loss is called that is a name, a Keras loss, a function, or one with some arguments set.

    >>> name_of(keras.losses.Huber()), name_of(keras.losses.huber), name_of("huber")
    ('Huber', 'huber', 'huber')
    """
    if isinstance(loss, str):
        return loss
    function = getattr(loss, "func", loss)
    return getattr(function, "__name__", None) or type(loss).__name__


def is_unreduced(loss: Any) -> bool:
    """Whether a loss returns a number for each row, of which the script makes one."""
    return not isinstance(loss, keras.losses.Loss) or loss.reduction in (None, "none")


def averaging(loss: Any, *, by_weight: bool = False) -> Any:
    """Return a loss; of one that returns a number for each row or place the mean, over these or their weights."""
    if not isinstance(loss, keras.losses.Loss) or not (by_weight or is_unreduced(loss)):
        return loss
    how = "mean_with_sample_weight" if by_weight else "sum_over_batch_size"
    return type(loss).from_config(loss.get_config() | {"reduction": how})


def _are_shares(out: np.ndarray) -> bool:
    return bool(out.min() >= 0 and np.allclose(out.sum(-1), 1, atol=1e-3))


def misfits(loss: object, outputs: list[np.ndarray]) -> list[str]:
    """Return a note where a cross entropy takes logits and gets what add up to 1, or the other way round.

    >>> misfits(keras.losses.BinaryCrossentropy(from_logits=True), [np.array([[0.2], [0.9]])] * 8)
    ['BinaryCrossentropy takes logits (from_logits=True), and gets numbers between 0 and 1: is an activation too many?']
    >>> misfits(keras.losses.BinaryCrossentropy(), [np.array([[-0.2], [3.0]])] * 8)
    ['BinaryCrossentropy takes numbers between 0 and 1, and gets others: is from_logits=True missing?']
    """
    config = loss.get_config() if isinstance(loss, keras.losses.Loss) else getattr(loss, "keywords", {})
    name = name_of(loss)
    many = [out for out in outputs if out.ndim > 1]
    if "crossentropy" not in name.lower() or sum(map(np.size, many)) < _ENOUGH:
        return []
    is_binary = "binary" in name.lower()
    are_shares = all((out.min() >= 0 and out.max() <= 1) if is_binary else _are_shares(out) for out in many)
    kind = "numbers between 0 and 1" if is_binary else "numbers that add up to 1"
    if bool(config.get("from_logits")) is not are_shares:
        return []
    if are_shares:
        return [f"{name} takes logits (from_logits=True), and gets {kind}: is an activation too many?"]
    return [f"{name} takes {kind}, and gets others: is from_logits=True missing?"]


def constant(outputs: list[np.ndarray]) -> list[str]:
    """Return a note if all outputs are one number, whatever the rows.

    >>> constant([np.ones((4, 1))] * 4)
    ['All outputs are 1, in every row of every update: is it a softmax of a single number? That takes a sigmoid.']
    """
    many = np.concatenate([np.ravel(out) for out in outputs] or [np.zeros(0)])
    if many.size < _ENOUGH or np.any(many != many[0]):
        return []
    told = "is it a softmax of a single number? That takes a sigmoid." if many[0] == 1 else "do they see the inputs?"
    return [Likely(f"All outputs are {many[0]:g}, in every row of every update: {told}")]


def is_padded(labels: np.ndarray) -> bool:
    """Whether rows of whole numbers end with zeros, and are of more than one length.

    >>> is_padded(np.array([[3, 1, 0], [2, 0, 0]])), is_padded(np.array([[0, 1, 3], [2, 0, 1]]))
    (True, False)
    """
    if labels.ndim < 2 or labels.dtype.kind not in "iu":
        return False
    used = np.reshape(labels, (len(labels), -1)) != 0
    lengths = used.sum(axis=1)
    return len(np.unique(lengths)) > 1 and bool(np.all(used == (np.arange(used.shape[1]) < lengths[:, None])))


def explains(causes: list[Found], evidence: list[Evidence]) -> bool:
    """Whether a loss is the one that was computed, be it with a fault that has a name, or times some number."""
    is_named = all(cause.is_listed for cause in causes if cause.stage == "gradient")
    return bool(evidence) and (is_named or all(is_along(each) for each in evidence))


def apart(causes: list[Found], loss: str, evidence: list[Evidence]) -> tuple[list[Found], list[str]]:
    """Return (causes, notes): what may be meant where the loss is supposed is a note."""
    are_along = all(map(is_along, evidence))
    may_be_meant = [c for c in causes if c.name in _MAY_BE_MEANT or (not c.is_listed and are_along)]
    notes = [f"The gradient is that of {loss}, but: {c.explanation} Is that meant?" for c in may_be_meant]
    return [c for c in causes if c not in may_be_meant], notes
