"""The checks of a trainer's arguments, made before anything runs."""

import sys
from operator import itemgetter
from typing import Any

import keras
from keras.optimizers import Optimizer

from wholestep import tree
from wholestep.checkpoints import Checkpoints
from wholestep.checks import count, is_count, is_number
from wholestep.data import (
    Batches,
    Data,
    as_rows,
    holds_numbers,
    refuse_lists,
    text_as_arrays,
    without_none,
)
from wholestep.errors import BatchError, SpecificationError, message, shown, warn
from wholestep.model import Objective, values_for_tensors
from wholestep.program import Options
from wholestep.tree import Tree

_MOST_NAMED = 3


def check_model(model: object, objective: object) -> None:
    """Refuse a model or an objective of another type."""
    if not isinstance(model, keras.Model):
        must = "model must be a keras.Model."
        received = type(model).__name__
        raise SpecificationError(
            message(must, received, "wrap the layers in keras.Sequential or keras.Model.")
        )
    if objective is not None and not isinstance(objective, Objective):
        must = "objective must be a wholestep.Objective."
        raise SpecificationError(
            message(must, type(objective).__name__, "subclass it and write __call__.")
        )


def check_compiled(model: keras.Model, objective: Objective | None) -> None:
    """Refuse to train or evaluate a model without a loss; prediction needs none."""
    if objective is None and not model.compiled:
        must = "To train and to evaluate, a trainer needs a compiled model or an objective."
        attempt = (
            "call model.compile(optimizer, loss), or pass Trainer(model, MyObjective(), "
            "optimizer=...)."
        )
        raise SpecificationError(message(must, "a model that is not compiled", attempt))


def options(
    microbatch_size: object,
    memory_limit: object,
    on_nonfinite: object,
    replicas: object,
    jit_compile: object,
    dense_gradients: object,
) -> Options:
    """Return the settings of a trainer.

    Raises:
        SpecificationError: a setting has no valid value.
    """
    if not isinstance(jit_compile, bool | str) or jit_compile not in (True, False, "auto"):
        must = 'jit_compile must be True, False or "auto".'
        attempt = "leave it out for the fastest."
        raise SpecificationError(message(must, shown(jit_compile), attempt))
    if memory_limit is not None and not (is_number(memory_limit) and memory_limit > 0):
        must = "memory_limit must be a number of bytes above 0."
        attempt = "2**30 for one gibibyte, or leave it out."
        raise SpecificationError(message(must, shown(memory_limit), attempt))
    if not isinstance(on_nonfinite, str) or on_nonfinite not in ("raise", "skip"):
        must = 'on_nonfinite must be "raise" or "skip".'
        raise SpecificationError(message(must, shown(on_nonfinite), "leave it out to raise."))
    if not isinstance(dense_gradients, bool):
        must = "dense_gradients must be True or False."
        attempt = "leave it out for the gradients of keras.Model.fit."
        raise SpecificationError(message(must, shown(dense_gradients), attempt))
    size = _count_or("auto", "microbatch_size", microbatch_size, "leave it out for the fastest.")
    num = (
        None
        if replicas is None
        else _count_or("all", "replicas", replicas, "leave it out for one device.")
    )
    limit = None if memory_limit is None else int(min(memory_limit, sys.maxsize))
    return Options(size, limit, on_nonfinite, num, jit_compile, dense_gradients)


def _count_or(word: str, name: str, value: object, attempt: str) -> int | str:
    if isinstance(value, str) and value == word:
        return word
    return count(name, value, attempt, otherwise=f'"{word}" or ')


def check_optimizer(optimizer: Optimizer | None) -> None:
    """Refuse an optimizer that accumulates gradients itself."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    steps = getattr(inner, "gradient_accumulation_steps", None)
    if steps:
        must = (
            "The optimizer must not accumulate gradients itself: that is a mean of means, and "
            "counts schedules and "
        )
        must += "moving averages once per microbatch."
        attempt = (
            f"leave it out, make batch_size {steps} times as large, and pass Trainer(model, "
            "microbatch_size=...)."
        )
        raise SpecificationError(message(must, f"gradient_accumulation_steps={steps}", attempt))


def check_trainable(model: keras.Model, optimizer: Optimizer | None, *, is_given: bool) -> None:
    """Refuse an optimizer that was built for other variables; `is_given`: whether to the trainer,
    not to `compile`.
    """
    if optimizer is None:
        return
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    known = {id(v) for v in inner._trainable_variables}
    changed = [v.path for v in model.trainable_variables if id(v) not in known]
    if changed or len(known) != len(model.trainable_variables):
        must = "The optimizer must know just the model's trainable variables."
        received = (
            f"{len(model.trainable_variables)} trainable variables, {len(known)} known; new: "
            f"{changed[:3]}"
        )
        again = (
            "make a new Trainer, with a new optimizer," if is_given else "compile the model again"
        )
        raise SpecificationError(message(must, received, f"{again} after changing `trainable`."))


def warn_if_frozen(model: keras.Model) -> None:
    """Warn of a model without a trainable variable, which no update changes."""
    if model.trainable_variables:
        return
    frozen = [
        layer.name
        for layer in [model, *model._flatten_layers(include_self=False)]
        if not layer.trainable
    ]
    where = f"trainable=False on {frozen[0]!r}" if frozen else "the model has no weights"
    warn(
        f"Nothing trains: none of the {len(model.variables)} variables of {model.name!r} is "
        f"trainable now ({where}). "
        "What counts is `trainable` when the model trains, not when it was compiled: set it to "
        "True before this model "
        "trains, and to False again before a model that shares its layers does."
    )


def warn_of_values(model: keras.Model) -> None:
    """Warn of a functional model that was built with a Python value in place of a mask."""
    found = values_for_tensors(model)
    if not found:
        return
    must = (
        "A mask in a functional model must be a tensor: a Python value is the same for all "
        "positions."
    )
    more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    received = ", ".join(found[:_MOST_NAMED]) + more
    attempt = "keras.ops.equal(a, b) in place of a == b, which compares identity on a keras.Input."
    warn(message(must, received, attempt))


def with_loss_scale(optimizer: Optimizer, model: keras.Model) -> Optimizer:
    """Wrap the optimizer in a dynamic loss scale where `compile` would."""
    if model.dtype_policy.name != "mixed_float16" or isinstance(
        optimizer, keras.optimizers.LossScaleOptimizer
    ):
        return optimizer
    return keras.optimizers.LossScaleOptimizer(optimizer)


def split(x: Data, y: Tree, sample_weight: Tree, fraction: float) -> tuple[tuple, tuple]:
    """Split off the last rows of arrays for validation, before any shuffling; return both parts as
    (x, y, weight).
    """
    parts = tuple(map(text_as_arrays, (x.content, y, sample_weight)))
    if (
        not is_number(fraction)
        or not 0 < fraction < 1
        or not x.with_labels(y, sample_weight).are_arrays
    ):
        must = "validation_split must lie between 0 and 1, and needs arrays."
        received = f"validation_split={shown(fraction)} of {type(x.content).__name__}"
        raise SpecificationError(
            message(must, received, "pass arrays, np.asarray(x) of a list, or validation_data.")
        )
    arrays = tree.map_leaves(as_rows, parts)
    num_rows = int(tree.leaves(arrays[0])[0].shape[0])
    at = int(num_rows * (1 - fraction))
    if at in (0, num_rows):
        must = "Both parts of the split must have rows."
        raise SpecificationError(
            message(must, f"{num_rows} rows", "pass validation_data, or more rows.")
        )
    first, last = (
        tree.map_leaves(itemgetter(rows), arrays) for rows in (slice(0, at), slice(at, None))
    )
    return first, without_none(last)


def is_due(epoch: int, frequency: int | list[int] | tuple[int, ...] | set[int]) -> bool:
    """Whether validation is due after this epoch."""
    return (
        epoch + 1 in frequency
        if isinstance(frequency, list | tuple | set)
        else (epoch + 1) % frequency == 0
    )


def count_or_none(name: str, value: object) -> int | None:
    """Return a number of steps or rows as a Python number; None stays None."""
    return None if value is None else count(name, value, "leave it out.")


def limit_epochs(epochs: int) -> int:
    """Return the number of epochs, at most `keras.config.max_epochs()`."""
    limit = keras.config.max_epochs()
    if not limit or epochs <= limit:
        return epochs
    warn(f"Limiting epochs to {limit}: keras.config.max_epochs().")
    return limit


def limit_steps(steps: int | None, num_batches: int | None) -> int | None:
    """Return the number of batches of an epoch, at most `keras.config.max_steps_per_epoch()`; None
    for all.

    Where only that limit gives a number, the data may hold fewer.
    """
    limit = keras.config.max_steps_per_epoch()
    wished = steps or num_batches
    if not limit or (wished is not None and wished <= limit):
        return steps
    warn(f"Limiting an epoch to {limit} batches: keras.config.max_steps_per_epoch().")
    return limit


def check_frequency(validation_freq: object) -> None:
    """Refuse a frequency that is no count and no list of counts."""
    several = (
        validation_freq if isinstance(validation_freq, list | tuple | set) else [validation_freq]
    )
    if not all(is_count(number) for number in several):
        must = (
            "validation_freq must be a whole number of at least 1, or a list of the epochs, "
            "the first being 1."
        )
        raise SpecificationError(
            message(must, shown(validation_freq), "validation_freq=1, after every epoch.")
        )


def check_data(x: Data, y: Tree, sample_weight: Tree) -> None:
    """Refuse lists of numbers in place of arrays, and labels passed with a data set.

    Raises:
        BatchError: an argument is of such a kind.
    """
    parts: dict[str, Any] = {"x": x.content, "y": y, "sample_weight": sample_weight}
    for name, part in parts.items():
        inner = part.values() if isinstance(part, dict) else part
        if isinstance(part, list | tuple | dict) and all(each is None for each in inner):
            received = (
                f"a {type(part).__name__} of None" if part else f"an empty {type(part).__name__}"
            )
            attempt = (
                "pass arrays of (rows, ...)."
                if name == "x"
                else f"leave {name} out if there is none."
            )
            raise BatchError(message(f"{name} must hold arrays.", received, attempt))
        if (
            name != "x"
            or y is not None
            or sample_weight is not None
            or holds_numbers(part, depth=1)
        ):
            refuse_lists(part, name)
    if not x.are_arrays and (y is not None or sample_weight is not None):
        must = "Labels and weights can be passed with arrays only; a data set must contain them."
        received = f"{type(x.content).__name__} and {'y' if y is not None else 'sample_weight'}"
        raise BatchError(
            message(must, received, "let the data set yield (x, y) or (x, y, sample_weight).")
        )


def check_row_order(batches: Batches) -> None:
    """Refuse to predict batches grouped by length: outputs would be in another order than the rows.

    Raises:
        SpecificationError: the batches are grouped by length.
    """
    if batches.shapes:
        must = "Predictions must be in the order of the rows, and equally long."
        attempt = "predict Batches(source, batch_size), or call the model on each of these batches."
        raise SpecificationError(message(must, "Batches under a token budget", attempt))


def refuse(**arguments: object) -> None:
    """Refuse arguments that Batches already define."""
    given = [name for name, value in arguments.items() if value is not None]
    if given:
        must = "Batches define these arguments themselves."
        raise SpecificationError(
            message(must, f"{', '.join(given)} as well", "pass them to the Batches.")
        )


def check_trains(model: keras.Model) -> None:
    """Refuse to train a model that has no optimizer."""
    if getattr(model, "optimizer", None) is None:
        must = "Training needs an optimizer."
        raise SpecificationError(
            message(must, "none", "pass Trainer(..., optimizer=...), or compile the model.")
        )


def check_weighting(class_weight: object, sample_weight: Tree) -> None:
    """Refuse two kinds of weights at once."""
    if class_weight is not None and sample_weight is not None:
        must = "class_weight and sample_weight cannot both be given."
        raise SpecificationError(message(must, "both", "multiply them into sample_weight."))


def check_saves_steps(asked: Checkpoints | None) -> None:
    """Refuse settings that checkpoints of `steps` do not support."""
    if asked is not None and asked.keep_best is not None:
        must = "keep_best needs the logs of an epoch, which only fit has."
        raise SpecificationError(
            message(must, "keep_best for steps", "trainer.save(path) after a good step.")
        )


def check_restores(only: object) -> None:
    """Refuse a part of a checkpoint that cannot be restored alone."""
    if only is not None and not (isinstance(only, str) and only == "weights"):
        raise SpecificationError(
            message("only must be 'weights'.", shown(only), "leave it out to restore all.")
        )
