"""The checks of a trainer's arguments, made before anything runs."""

import sys
from collections.abc import Iterable
from inspect import signature
from operator import itemgetter
from typing import Any, cast

import keras
from keras.optimizers import LossScaleOptimizer, Optimizer

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
from wholestep.errors import BatchError, invalid, message, shown, warn
from wholestep.keras_private import compile_loss, struct_of, trainable_variables, user_argument
from wholestep.logged import Logged
from wholestep.model import Objective, is_overridden, layers, values_for_tensors
from wholestep.nonfinite import RAISE, Skip
from wholestep.program import Options
from wholestep.tree import Tree

_MOST_NAMED = 3
_ON_NONFINITE = {"raise": RAISE, "skip": Skip()}


def check_model(model: object, objective: object) -> None:
    """Refuse a model or an objective of another type."""
    if not isinstance(model, keras.Model):
        raise invalid(
            "model must be a keras.Model.",
            type(model).__name__,
            "wrap the layers in keras.Sequential or keras.Model.",
        )
    if objective is None:
        return
    if not isinstance(objective, Objective):
        attempt = "subclass it and write __call__."
        if isinstance(objective, type):
            attempt = f"an object of this class, {objective.__name__}()."
        elif isinstance(objective, str) or callable(objective):
            attempt = "model.compile(optimizer, loss) for a loss of Keras, then Trainer(model)."
        raise invalid("objective must be a wholestep.Objective.", shown(objective), attempt)
    try:
        signature(objective.__call__).bind(model, {}, True)
    except TypeError as error:
        raise invalid(
            "An objective must take (model, batch, training).",
            f"{type(objective).__name__}.__call__{signature(objective.__call__)}",
            "def __call__(self, model, batch, training).",
        ) from error


def check_compiled(model: keras.Model, objective: Objective | None) -> None:
    """Refuse to train or evaluate a model without a loss, or with losses of outputs that it does
    not have; prediction needs none.
    """
    if objective is None and not model.compiled:
        raise invalid(
            "To train and to evaluate, a trainer needs a compiled model or an objective.",
            "a model that is not compiled",
            "call model.compile(optimizer, loss), or pass Trainer(model, MyObjective(), "
            "optimizer=...).",
        )
    own = "train_step", "test_step", "compute_loss"  # which may read losses by any names
    if objective is None and not any(is_overridden(model, name) for name in own):
        _check_loss_names(model)


def _check_loss_names(model: keras.Model) -> None:
    losses = user_argument(compile_loss(model), "loss")
    if not isinstance(losses, dict):
        return
    must = "The losses must be those of the model's outputs, by name."
    received = f"losses of {', '.join(map(repr, losses))}"
    if isinstance(model, keras.Sequential):
        raise invalid(must, received, "the loss alone, as a Sequential model has one output.")
    outputs = struct_of(model, "output")
    known = [*getattr(model, "output_names", ()), *(outputs if isinstance(outputs, dict) else ())]
    if known and not losses.keys() <= {*known}:
        names = ", ".join(map(repr, dict.fromkeys(known)))
        raise invalid(must, received, f"the names {names}.")


def options(
    microbatch_size: object,
    memory_limit: object,
    on_nonfinite: object,
    replicas: object,
    jit_compile: object,
    dense_gradients: object,
    log: object,
) -> Options:
    """Return the settings of a trainer.

    Raises:
        SpecificationError: a setting has no valid value.
    """
    if not isinstance(jit_compile, bool | str) or jit_compile not in (True, False, "auto"):
        raise invalid(
            'jit_compile must be True, False or "auto".',
            shown(jit_compile),
            "leave it out for the fastest.",
        )
    if memory_limit is not None and not (is_number(memory_limit) and memory_limit > 0):
        raise invalid(
            "memory_limit must be a number of bytes above 0.",
            shown(memory_limit),
            "2**30 for one gibibyte, or leave it out.",
        )
    is_word = isinstance(on_nonfinite, str) and on_nonfinite in _ON_NONFINITE
    if not is_word and not isinstance(on_nonfinite, Skip):
        raise invalid(
            'on_nonfinite must be "raise", "skip" or a wholestep.Skip.',
            shown(on_nonfinite),
            "leave it out to raise, or Skip(in_a_row=5).",
        )
    skip = cast(Skip, on_nonfinite)
    if isinstance(on_nonfinite, str):
        skip = _ON_NONFINITE[on_nonfinite]
    if not isinstance(dense_gradients, bool):
        raise invalid(
            "dense_gradients must be True or False.",
            shown(dense_gradients),
            "leave it out for the gradients of keras.Model.fit.",
        )
    size = _count_or("auto", "microbatch_size", microbatch_size, "leave it out for the fastest.")
    num_replicas = None
    if replicas is not None:
        num_replicas = _count_or("all", "replicas", replicas, "leave it out for one device.")
    limit = None if memory_limit is None else int(min(memory_limit, sys.maxsize))
    logged = _logged(log)
    return Options(size, limit, skip, num_replicas, jit_compile, dense_gradients, logged)


def _logged(log: object) -> tuple[Logged, ...]:
    names: list[Any] = [log] if isinstance(log, str) or not isinstance(log, Iterable) else [*log]
    known = [name.value for name in Logged]
    if not all(name in known for name in names):
        raise invalid(
            f"log must hold names among {', '.join(known)}.",
            shown(log),
            'log=["gradient_norm", "learning_rate"].',
        )
    return tuple(dict.fromkeys(map(Logged, names)))


def _count_or(word: str, name: str, value: object, attempt: str) -> int | str:
    if isinstance(value, str) and value == word:
        return word
    return count(name, value, attempt, otherwise=f'"{word}" or ')


def check_optimizer(optimizer: Optimizer | None) -> None:
    """Refuse an optimizer that accumulates gradients itself."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    steps = getattr(inner, "gradient_accumulation_steps", None)
    if steps:
        raise invalid(
            "The optimizer must not accumulate gradients itself: that is a mean of means, and "
            "counts schedules and moving averages once per microbatch.",
            f"gradient_accumulation_steps={steps}",
            f"leave it out, make batch_size {steps} times as large, and pass Trainer(model, "
            "microbatch_size=...).",
        )


def check_trainable(model: keras.Model, optimizer: Optimizer | None, *, is_given: bool) -> None:
    """Refuse an optimizer that was built for other variables.

    Args:
        is_given: whether the optimizer was passed to the trainer, and not to `compile`.
    """
    if optimizer is None:
        return
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    known = {id(v) for v in trainable_variables(inner)}
    num = len(model.trainable_variables)
    changed = [v.path for v in model.trainable_variables if id(v) not in known]
    if changed or len(known) != num:
        again = "compile the model again"
        if is_given:
            again = "make a new Trainer, with a new optimizer,"
        raise invalid(
            "The optimizer must know just the model's trainable variables.",
            f"{num} trainable variables, {len(known)} known; new: {changed[:3]}",
            f"{again} after changing `trainable`.",
        )


def warn_if_frozen(model: keras.Model) -> None:
    """Warn of a model without a trainable variable, which no update changes."""
    if model.trainable_variables:
        return
    frozen = [layer.name for layer in layers(model) if not layer.trainable]
    where = f"trainable=False on {frozen[0]!r}" if frozen else "the model has no weights"
    warn(
        f"Nothing trains: none of the {len(model.variables)} variables of {model.name!r} is "
        f"trainable now ({where}). What counts is `trainable` when the model trains, not when it "
        "was compiled: set it to True before this model trains, and to False again before a model "
        "that shares its layers does."
    )


def warn_of_values(model: keras.Model) -> None:
    """Warn of a functional model that was built with a Python value in place of a mask."""
    paths = values_for_tensors(model)
    if not paths:
        return
    num_more = len(paths) - _MOST_NAMED
    more = f" and {num_more} more" if num_more > 0 else ""
    text = message(
        "A mask in a functional model must be a tensor: a Python value is the same for all "
        "positions.",
        ", ".join(paths[:_MOST_NAMED]) + more,
        "keras.ops.equal(a, b) in place of a == b, which compares identity on a keras.Input.",
    )
    warn(text)


def with_loss_scale(optimizer: Optimizer, model: keras.Model) -> Optimizer:
    """Wrap the optimizer in a dynamic loss scale where `compile` would."""
    is_scaled = isinstance(optimizer, LossScaleOptimizer)
    if is_scaled or model.dtype_policy.name != "mixed_float16":
        return optimizer
    return LossScaleOptimizer(optimizer)


def split(x: Data, y: Tree, sample_weight: Tree, fraction: float) -> tuple[tuple, tuple]:
    """Split off the last rows of arrays for validation, before any shuffling.

    Returns:
        Both parts as (x, y, weight).
    """
    parts = tuple(map(text_as_arrays, (x.content, y, sample_weight)))
    is_fraction = is_number(fraction) and 0 < fraction < 1
    if not is_fraction or not x.with_labels(y, sample_weight).are_arrays:
        raise invalid(
            "validation_split must lie between 0 and 1, and needs arrays.",
            f"validation_split={shown(fraction)} of {type(x.content).__name__}",
            "pass arrays, np.asarray(x) of a list, or validation_data.",
        )
    arrays = tree.map_leaves(as_rows, parts)
    num_rows = int(tree.leaves(arrays[0])[0].shape[0])
    at = int(num_rows * (1 - fraction))
    if at in (0, num_rows):
        raise invalid(
            "Both parts of the split must have rows.",
            f"{num_rows} rows",
            "pass validation_data, or more rows.",
        )
    first = tree.map_leaves(itemgetter(slice(at)), arrays)
    last = tree.map_leaves(itemgetter(slice(at, None)), arrays)
    return first, without_none(last)


def is_due(epoch: int, frequency: int | list[int] | tuple[int, ...] | set[int]) -> bool:
    """Whether validation is due after this epoch."""
    if isinstance(frequency, list | tuple | set):
        return epoch + 1 in frequency
    return (epoch + 1) % frequency == 0


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
    """Return the batches of an epoch, at most `keras.config.max_steps_per_epoch()`; None for all.

    Where only that limit gives a number, the data may hold fewer.
    """
    limit = keras.config.max_steps_per_epoch()
    num = steps or num_batches
    if not limit or (num is not None and num <= limit):
        return steps
    warn(f"Limiting an epoch to {limit} batches: keras.config.max_steps_per_epoch().")
    return limit


def check_frequency(validation_freq: object) -> None:
    """Refuse a frequency that is no count and no list of counts."""
    is_list = isinstance(validation_freq, list | tuple | set)
    numbers: Any = validation_freq if is_list else [validation_freq]
    if not all(is_count(number) for number in numbers):
        raise invalid(
            "validation_freq must be a whole number of at least 1, or a list of the epochs, "
            "the first being 1.",
            shown(validation_freq),
            "validation_freq=1, after every epoch.",
        )


def check_data(x: Data, y: Tree, sample_weight: Tree) -> None:
    """Refuse lists of numbers in place of arrays, and labels passed with a data set.

    Raises:
        BatchError: an argument is of such a kind.
    """
    has_labels = y is not None or sample_weight is not None
    parts: dict[str, Any] = {"x": x.content, "y": y, "sample_weight": sample_weight}
    for name, part in parts.items():
        _refuse_empty(part, name)
        if name != "x" or has_labels or holds_numbers(part, depth=1):
            refuse_lists(part, name)
    if has_labels and not x.are_arrays:
        label = "y" if y is not None else "sample_weight"
        text = message(
            "Labels and weights can be passed with arrays only; a data set must contain them.",
            f"{type(x.content).__name__} and {label}",
            "let the data set yield (x, y) or (x, y, sample_weight).",
        )
        raise BatchError(text)


def _refuse_empty(part: Any, name: str) -> None:
    """Refuse a list or dict without an array."""
    if not isinstance(part, list | tuple | dict):
        return
    values = part.values() if isinstance(part, dict) else part
    if any(value is not None for value in values):
        return
    kind = type(part).__name__
    attempt = f"leave {name} out if there is none."
    if name == "x":
        attempt = "pass arrays of (rows, ...)."
    received = f"a {kind} of None" if part else f"an empty {kind}"
    raise BatchError(message(f"{name} must hold arrays.", received, attempt))


def check_row_order(batches: Batches) -> None:
    """Refuse to predict batches grouped by length: outputs would be in another order than the rows.

    Raises:
        SpecificationError: the batches are grouped by length.
    """
    if batches.shapes:
        raise invalid(
            "Predictions must be in the order of the rows, and equally long.",
            "Batches under a token budget",
            "predict Batches(source, batch_size), or call the model on each of these batches.",
        )


def refuse(**arguments: object) -> None:
    """Refuse arguments that Batches already define."""
    names = [name for name, value in arguments.items() if value is not None]
    if names:
        raise invalid(
            "Batches define these arguments themselves.",
            f"{', '.join(names)} as well",
            "pass them to the Batches.",
        )


def check_trains(model: keras.Model) -> None:
    """Refuse to train a model that has no optimizer."""
    if getattr(model, "optimizer", None) is None:
        attempt = "pass Trainer(..., optimizer=...), or compile the model."
        raise invalid("Training needs an optimizer.", "none", attempt)


def check_saves_steps(settings: Checkpoints | None) -> None:
    """Refuse settings that checkpoints of `steps` do not support."""
    if settings is not None and settings.keep_best is not None:
        raise invalid(
            "keep_best needs the logs of an epoch, which only fit has.",
            "keep_best for steps",
            "trainer.save(path) after a good step.",
        )


def check_restores(only: object) -> None:
    """Refuse a part of a checkpoint that cannot be restored alone."""
    if only is not None and not (isinstance(only, str) and only == "weights"):
        raise invalid("only must be 'weights'.", shown(only), "leave it out to restore all.")
