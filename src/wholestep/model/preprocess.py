"""Preprocessing of batches by a model's overridden `fit`, `evaluate` and `predict`, as in the tasks of keras-hub."""

import inspect
from collections.abc import Callable

import keras

from wholestep import tree
from wholestep.data import to_numpy, without_none
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
