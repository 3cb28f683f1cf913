"""Preprocessing of batches by a model's overridden `fit`, `evaluate` and `predict`, as in the tasks of keras-hub."""

import inspect
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from wholestep import tree
from wholestep.data.batches import Batches, sized
from wholestep.data.leaves import is_nest_of_arrays, text_as_arrays, to_numpy, without_none
from wholestep.errors import SpecificationError, message
from wholestep.model.compiled import is_overridden, unpack
from wholestep.tree import Tree

Prepare = Callable[[Tree], Tree]


def preparation(model: keras.Model, method: str) -> Prepare | None:
    """Return the preprocessing that the model's `method` applies to every batch; None if the method is Keras'.

    Raises:
        SpecificationError: the method is overridden, and the model has no preprocessor.
    """
    if not is_overridden(model, method):
        return None
    samples = getattr(model, "preprocess_samples", None)
    if samples is None and not hasattr(model, "preprocessor"):
        must = f"The model must not override `{method}`, which the trainer replaces."
        attempt = "preprocess the data beforehand, or in `model.preprocessor(x, y, sample_weight)`"
        attempt += "; then delete the method."
        raise SpecificationError(message(must, f"`{method}` of {type(model).__name__}", attempt))

    def prepare(batch: Tree) -> Tree:
        preprocess = samples or model.preprocessor
        found = unpack(batch)
        if preprocess is not None:
            takes_all = "y" in inspect.signature(getattr(preprocess, "call", preprocess)).parameters
            before = getattr(model, "_in_pipeline_execution", False)
            model._in_pipeline_execution = True  # or keras-hub warns at every call that the data are not preprocessed
            try:
                found = preprocess(*found) if takes_all else (preprocess(found[0]), *found[1:])
            finally:
                model._in_pipeline_execution = before
            found = keras.utils.unpack_x_y_sample_weight(found)
        return tree.map_leaves(to_numpy, without_none(tuple(found)))

    return prepare


def open_prepared(source: object, batch_size: int | None, prepare: Prepare | None, **how: Any) -> Batches:
    """Return the batches of a source, each prepared; the source may then hold text on every engine."""
    if isinstance(source, Batches):
        return source if prepare is None else Prepared(source, prepare)
    if prepare is None:
        return sized(source, batch_size, **how)
    source = text_as_arrays(source)
    rows = _Rows(source) if is_nest_of_arrays(source) else source
    return sized(rows, batch_size, transform=in_turn(prepare, how.pop("transform", None)), **how)


def in_turn(first: Prepare | None, then: Prepare | None) -> Prepare | None:
    """Return the composition of both functions; None if there is neither."""
    if first is None or then is None:
        return first or then
    return lambda batch: then(first(batch))


def open_in_sequence(source: object, batch_size: int | None, prepare: Prepare | None) -> Batches:
    """Return the batches of a source in sequence; `batch_size` applies unless the source is already batched."""
    how = {} if isinstance(source, Batches) else {"shuffle": False}
    return open_prepared(source, batch_size, prepare, **how)


def as_input(x: Tree) -> Any:
    """Return arrays of inputs as the batch (x,), ready to be prepared; other data sets unchanged."""
    return (x,) if not isinstance(x, Batches) and is_nest_of_arrays(text_as_arrays(x)) else x


class Prepared(Batches):
    """The batches of another source, each prepared; both share all their attributes, and so their position."""

    __slots__ = "_batches", "_prepare"

    def __init__(self, batches: Batches, prepare: Prepare):
        self.__dict__ = vars(batches)
        self._batches = batches
        self._prepare = prepare

    @property
    def arrays(self) -> None:
        """None: the arrays' rows are not the rows that the model gets."""
        return None

    def run_forward(self, epoch: int, step: int) -> None:
        """Run from the beginning to a position, as `Batches.run_forward`. No batch is returned to be compared."""
        super().run_forward(epoch, step)

    def in_order(self) -> Batches:
        """Return the same batches in one order, prepared."""
        return Prepared(self._batches.in_order(), self._prepare)

    def load(self, epoch: int, step: int, places: np.ndarray | slice = slice(None)) -> Tree:
        """Return a batch, or its rows at these places."""
        return self._prepare(self._batches.load(epoch, step, places))

    def take(self, position: tuple[int, int], places: np.ndarray | slice = slice(None)) -> tuple[Tree, tuple[int, int]]:
        """Return the batch at a position and the position after it."""
        is_used = not self.unused
        batch, after = self._batches.take(position, places)
        return self._prepare(batch) if is_used else batch, after

    def example(self) -> Tree:
        """Return a first batch."""
        return self.unused[0].host if self.unused else self._prepare(self._batches.example())


class _Rows:
    """Arrays as a sequence of rows, of which each batch is loaded."""

    def __init__(self, arrays: Tree):
        self.arrays = arrays

    def __len__(self) -> int:
        return tree.num_rows(self.arrays, "data")

    def __getitem__(self, row: int) -> Tree:
        return tree.map_leaves(lambda leaf: leaf[row], self.arrays)
