"""The variables of a Keras model: which are trained, and their values."""

import keras
import numpy as np

from stepcheck.errors import attempt
from stepcheck.trace import log as logs
from stepcheck.trace.log import Flags, Values
from stepcheck.trace.measure import NUM_PLACES, outline, places
from stepcheck.tree import Tensor


def untrained(model: keras.Model) -> list[keras.Variable]:
    """Return the variables that no gradient moves, and the states of recurrent layers."""
    layers = model._flatten_layers()
    kept = [
        getattr(each, "states", None)
        for each in layers
        if hasattr(each, "stateful")
    ]
    states = keras.tree.flatten(kept)
    recurrent = (state for state in states if isinstance(state, keras.Variable))
    return [*model.non_trainable_variables, *recurrent]


def trained_in(model: keras.Model) -> tuple[int, ...]:
    """Return the identities of the variables that are set to be trained."""
    return tuple(map(id, model.trainable_variables))


def flags(model: keras.Model) -> Flags:
    """Return whether each layer and variable is to be trained, a model before its
    parts.
    """
    layers = [(layer, layer.trainable) for layer in model._flatten_layers()]
    return [
        *layers,
        *((variable, variable.trainable) for variable in model.variables),
    ]


def set_flags(wanted: Flags) -> None:
    """Set layers and variables to be trained, or not."""
    for each, is_trained in wanted:
        if each.trainable != is_trained:
            each.trainable = is_trained


def values(model: keras.Model) -> Values | None:
    """Return copies of a model's values; None in a trace, or if JAX has donated them."""

    def copies(variables: list[keras.Variable]) -> list[np.ndarray]:
        return [np.array(keras.ops.convert_to_numpy(v)) for v in variables]

    groups = model.trainable_variables, untrained(model)
    return attempt(lambda: Values(*map(copies, groups)))[0]


def is_outdated_in(model: keras.Model) -> bool:
    """Whether `fit` trains other variables than the trainable ones: those of `compile`."""
    optimizer = vars(model).get("optimizer")
    has_trained = vars(model).get("train_function") is not None
    if not has_trained or not getattr(optimizer, "built", False):
        return False
    both = optimizer._trainable_variables, model.trainable_variables
    ours, theirs = ({id(v) for v in each} for each in both)
    return ours != theirs


def in_part(values: list[Tensor]) -> list[Tensor]:
    """Return tensors, of each large one its entries at some places."""
    flat, take = keras.ops.reshape, keras.ops.take
    chosen = [places(int(np.prod(value.shape))) for value in values]
    pairs = zip(values, chosen, strict=True)
    return [v if own is None else take(flat(v, (-1,)), own) for v, own in pairs]


def outlined(values: list) -> np.ndarray:
    """Return the outlines of a parameter's numbers each; of a missing gradient zeros."""
    return np.stack(
        [outline(np.zeros(1) if each is None else each) for each in values]
    )


def room(model: keras.Model, *, is_run: bool = False) -> int:
    """Return the number of updates of a model that a log keeps with all numbers.

    >>> room(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]))
    40
    """
    sizes = [int(np.prod(v.shape)) for v in model.trainable_variables]
    return logs.room(
        sum(min(size, NUM_PLACES) if is_run else size for size in sizes)
    )
