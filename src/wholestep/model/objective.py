"""The minimised function, user-defined or of a compiled model: (model, batch, training) -> Means."""

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
from keras import ops
from keras.metrics import AUC
from keras.src import backend
from keras.src.backend import get_keras_mask
from keras.src.backend.common.masking import set_keras_mask

from wholestep import tree
from wholestep.errors import SpecificationError, message
from wholestep.model.terms import Mean, Sum, Term, lengthened
from wholestep.tree import Tensor, Tree


class Objective(ABC):
    """A user-defined loss. Subclass it and return values and weights, never a mean.

    `__call__` gets the model, the batch as the source nests it (leaves of shape (rows, ...)) and `training`, and
    returns

    - a `Mean` or a `Sum`, or
    - a mapping of named ones, whose sum (each times its coefficient) is the loss, or
    - a pair (either of these, metrics), where metrics maps names to a `Mean` or `Sum` to report, or to a tuple
      (y_true, y_pred[, sample_weight]) for the Keras metric of that name in `Trainer(metrics=...)`.

    The model's own regularisation is added once by the update. Row i of the result must belong to row i of the batch.

    Any other `keras.Variable` that it reads (of another model, a metric or an optimizer, or free-standing) has its
    newest value whenever updates are sent to the device; a variable that it assigns is state, kept from update to
    update. Python numbers and bare arrays are read once: a changing value must be a `keras.Variable` or in the batch.

    >>> import keras, wholestep as ws
    >>> class Squared(ws.Objective):
    ...     def __call__(self, model, batch, training):
    ...         error = model(batch["x"], training=training) - batch["y"]
    ...         return ws.Mean(error**2, batch["weight"])
    """

    @abstractmethod
    def __call__(self, model: keras.Model, batch: Any, training: bool) -> Any:
        """Return the unreduced loss of the batch."""


def with_mask_of(value: Tensor, other: Tensor) -> Tensor:
    """Return a value with the mask that Keras keeps for another one."""
    if value is not other and (mask := get_keras_mask(other)) is not None:
        set_keras_mask(value, mask)
    return value


def uncast() -> AbstractContextManager:
    """Return a scope in which variables are read in their own dtype, not in the layer's compute dtype."""
    return backend.AutocastScope(None)


@dataclass(frozen=True)
class Score:
    """The arguments of one Keras metric's update on a batch."""

    metric: keras.metrics.Metric
    y_true: Tree
    y_pred: Any  # a tree
    weight: Tensor | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the metric is a function that does not return one value per row."""
        fn = getattr(self.metric, "_fn", None)
        if not isinstance(self.metric, keras.metrics.MeanMetricWrapper) or fn is None:
            return False
        options = self.metric._fn_kwargs
        if options.get("axis") in (0, -len(getattr(self.y_pred, "shape", ()))):
            return True
        values = fn(self.y_true, self.y_pred, **options)
        return tuple(getattr(values, "shape", ()))[:1] not in ((tree.num_rows(self.y_pred),), (None,))

    def part(self, rows: slice) -> "Score":
        """Return the arguments of the metric for these rows."""
        mask = get_keras_mask(self.y_pred)
        y_true, y_pred, weight = (
            None if given is None else tree.map_leaves(lambda leaf: leaf[rows], given)
            for given in (self.y_true, self.y_pred, self.weight)
        )
        if mask is not None:
            set_keras_mask(y_pred, mask[rows])
        return Score(self.metric, y_true, y_pred, weight)

    def update(self, row_weights: Tensor | None) -> None:
        """Update the metric; rows of weight 0 count for nothing."""
        given = [w for w in (self.weight, row_weights) if w is not None]
        if not given or self.is_whole:
            self.metric.update_state(self.y_true, self.y_pred)
            return
        rank = max(self._least_rank, *(len(w.shape) for w in given))
        weight = math.prod(ops.cast(lengthened(w, rank), keras.config.floatx()) for w in given)
        if isinstance(self.metric, keras.metrics.IoU):  # which flattens labels and weights
            shape = self._shape_of_classes(rank)
            weight = ops.broadcast_to(lengthened(weight, len(shape)), shape)
            weight = weight if self.weight is not None else ops.cast(weight, self.metric.dtype)
        self.metric.update_state(self.y_true, self.y_pred, sample_weight=weight)

    @property
    def _least_rank(self) -> int:
        """The least rank at which weights lead the axes of the values: Keras aligns lower ranks with the last axes.

        It is the mask's rank; for AUC and its kin, the predictions' rank minus 1, as they add the last axis.
        """
        if any(kind.__module__ == AUC.__module__ for kind in type(self.metric).__mro__):
            return max(1, len(self.y_pred.shape) - 1)
        mask = get_keras_mask(self.y_pred)
        return 1 if mask is None else len(mask.shape)

    def _shape_of_classes(self, rank: int) -> tuple:
        """Return the shape of the labels as class numbers, with axes of length 1 if the weights have more."""
        shape = [*ops.shape(self.y_true)]
        if not self.metric.sparse_y_true:
            del shape[self.metric.axis]
        return (*shape, *[1] * (rank - len(shape)))


def leave_rows_out(metrics: list[keras.metrics.Metric] | None) -> bool | None:
    """Whether all metrics ignore rows of weight 0; None if an experiment must decide.

    Keras' metrics do. A user-defined `update_state` may take weights and not use them.
    """
    if metrics is None or not all("sample_weight" in inspect.signature(m.update_state).parameters for m in metrics):
        return False
    return True if all(type(m).update_state.__module__.split(".")[0] == "keras" for m in metrics) else None


class Reading(NamedTuple):
    """The normalised result of an objective: loss terms, terms that are only reported, and metric updates.

    `is_complete`: the terms already include the model's regularisation and `add_loss`.
    """

    terms: dict[str, Term]
    reported: dict[str, Term]
    scores: list[Score]
    is_complete: bool = False


def read(result: object, metrics: dict[str, keras.metrics.Metric]) -> Reading:
    """Normalise the result of an objective.

    Raises:
        SpecificationError: the result is neither a Mean, a Sum nor a mapping of them.
    """
    if isinstance(result, Reading):
        return result
    given, extra = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    named = given if isinstance(given, Mapping) else {"": given}
    terms = {label: _term(term, label) for label, term in named.items()}
    reported: dict[str, Term] = {label: term for label, term in extra.items() if isinstance(term, Mean | Sum)}
    scores = [_score(label, given, metrics) for label, given in extra.items() if label not in reported]
    clash = {"loss", *(label for label in terms if label)} & (set(extra) | ({"loss"} & set(terms)))
    if clash:
        must, attempt = "Terms and metrics must have distinct names.", "rename them ('loss' is the total)."
        raise SpecificationError(message(must, sorted(clash), attempt))
    return Reading(terms, reported, scores)


def _term(term: object, label: str) -> Term:
    if isinstance(term, Term):
        return term
    shape = getattr(term, "shape", None)
    received = type(term).__name__ if shape is None else f"an array of shape {tuple(shape)}"
    must = f"An objective must return a Mean, a Sum or a mapping of them{f' (term {label!r})' if label else ''}."
    attempt = "return Mean(values, weights) with one unreduced value per row; the update divides once."
    raise SpecificationError(message(must, received, attempt))


def _score(label: str, given: object, metrics: dict[str, keras.metrics.Metric]) -> Score:
    if label not in metrics or not isinstance(given, tuple):
        must = f"The metric {label!r} must be a Mean, a Sum, or a tuple for a Keras metric of that name."
        attempt = f"pass Trainer(metrics=[...]) with one named {label!r}; it has {sorted(metrics)}."
        raise SpecificationError(message(must, type(given).__name__, attempt))
    return Score(metrics[label], *given)
