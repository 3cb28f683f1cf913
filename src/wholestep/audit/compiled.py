"""What `compile` has made of a model, and what has become of it since."""

import keras

OUTDATED = (
    "Layers were frozen or thawed after the model was compiled. Keras' `fit` trains what it did before, until "
    "`compile` is called again. The audit ran it as if that had been done."
)


def compiled_in(model: keras.Model) -> list:
    """Return what `compile` makes anew."""
    return [vars(model).get(name) for name in ("optimizer", "_compile_loss", "_compile_metrics")]


def is_outdated_in(model: keras.Model) -> bool:
    """Whether `fit` would go on with variables that are no longer those to be trained: it was not compiled again."""
    optimizer = vars(model).get("optimizer")
    if vars(model).get("train_function") is None or not getattr(optimizer, "built", False):
        return False
    return {id(v) for v in optimizer._trainable_variables} != {id(v) for v in model.trainable_variables}
