"""Explain batches that a model cannot take: an error of a layer or backend becomes a BatchError."""

import linecache
import re
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import keras
import numpy as np

from wholestep import tree
from wholestep.data import NUMBER_CLASSES, Batch
from wholestep.errors import BatchError, SpecificationError, WholestepError, message
from wholestep.keras_private import LOSSES
from wholestep.model.compiled import is_overridden, layers, unpack, without_labels
from wholestep.model.losses import CompiledObjective, axes_to_compare, text_of_shape
from wholestep.model.objective import Objective
from wholestep.tree import Tensor, Tree

_MISFITS = (
    "is incompatible with the layer",
    "Missing data for input",
    "Invalid input shape for input",
    "is not optional",
    "of `inputs`",
)
_SHAPES = "ncompatible shapes", "imensions must be equal"  # of JAX, and of TensorFlow


@contextmanager
def explained(
    model: keras.Model, objective: Objective | None, batch: Tree, *, inputs_only: bool = False
) -> Iterator[None]:
    """Context of a call of the model: an error because of the batch becomes a chained BatchError.

    The parts that a compiled model needs are known; for an objective's batch, only the model's
    error message is. All other errors are raised unchanged.

    Args:
        inputs_only: whether the batch consists of the model's inputs alone.

    Raises:
        BatchError: the batch does not fit the model.
        SpecificationError: a layer computes on the host, which a compiled program cannot.
    """
    is_compiled = objective is None or isinstance(objective, CompiledObjective)
    x, y, weight = None, None, None
    if inputs_only:
        x = batch
    elif is_compiled:
        x, y, weight = unpack(batch)
    _check_text(model, x)
    try:
        yield
    except WholestepError:
        raise
    except Exception as error:
        needs_labels = is_compiled and not inputs_only
        explanation = (
            (without_labels(model, batch) if needs_labels else None)
            or _of_inputs(model, x, str(error))
            or _of_keys(x if is_compiled else batch, error, "x" if is_compiled else "The batch")
            or _of_missing(y)
            or _of_labels(error)
            or _of_weights(y, weight, str(error))
        )
        if explanation is not None:
            raise BatchError(explanation) from error
        if (untraceable := _untraceable(model, error)) is not None:
            raise SpecificationError(untraceable) from error
        raise


class named:  # noqa: N801  it is used as a function
    """Context that adds a loaded batch's position to its error; no generator, for speed."""

    def __init__(self, batch: Batch):
        self._batch = batch

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if isinstance(error, BatchError) and not self._batch.is_resident:
            error.at(*self._batch.start)


def check_parts(model: keras.Model, batch: Tree) -> None:
    """Refuse a batch without labels for a model that was compiled with a loss.

    Raises:
        BatchError: the batch has no labels.
    """
    if missing := without_labels(model, batch):
        raise BatchError(missing)


def check_fits(model: keras.Model, batch: Tree, like: Tree, whose: str) -> None:
    """Refuse a batch that the model cannot take, where it can take another one.

    Args:
        like: the other batch. One that does not fit either is refused when it is used.

    Raises:
        BatchError: inputs do not fit the model, or labels are missing.
    """

    def misfit(batch: Tree) -> str | None:
        inputs = unpack(batch)[0]
        unlike = _of_inputs(model, inputs, "")
        is_taken = unlike is None or _takes(model, inputs)
        return without_labels(model, batch) or (None if is_taken else unlike)

    explanation = misfit(batch)
    if explanation is not None and misfit(like) is None:
        raise BatchError(f"In {whose}: {explanation}")


def _takes(model: keras.Model, inputs: Tree) -> bool:
    """Whether the model has outputs for a row: some layers take images of other sizes, too."""
    try:
        with keras.StatelessScope(), warnings.catch_warnings(action="ignore"):
            model(tree.map_leaves(lambda leaf: leaf[:1], inputs), training=False)
    except Exception:  # any: the caller explains it
        return False
    return True


def check_labels_are_numbers(model: keras.Model, batch: Tree) -> None:
    """Refuse text among the labels and weights, except for a custom `compute_loss`.

    Raises:
        BatchError: the labels or weights hold text or ragged rows.
    """
    if is_overridden(model, "compute_loss"):
        return
    _, y, weight = unpack(batch)
    if names := _of_objects(y, "y"):
        received = f"text or ragged rows in {names}"
        raise BatchError(message("Labels must be numbers.", received, NUMBER_CLASSES))
    if names := _of_objects(weight, "sample_weight"):
        received = f"text or ragged rows in {names}"
        attempt = "one number for each row."
        raise BatchError(message("Sample weights must be numbers.", received, attempt))


def _of_objects(part: Tree, root: str) -> str:
    """Return the names of the leaves that hold text or ragged rows."""
    return ", ".join(name for name, leaf in tree.named_leaves(part, root) if leaf.dtype == object)


def _check_text(model: keras.Model, x: Tree) -> None:
    """Refuse text for a model of numbers: TensorFlow would fail only inside its program."""
    names = [name for name, leaf in tree.named_leaves(x, "x") if _is_text(leaf)]
    kinds = [tensor.dtype for tensor in getattr(model, "inputs", None) or []]
    if names and kinds and "string" not in kinds:
        must = f"The model takes numbers of type {', '.join(dict.fromkeys(kinds))}."
        attempt = (
            "encode strings as integers first, or begin the model with keras.Input((1,), "
            "dtype='string') and a TextVectorization, StringLookup or Hashing."
        )
        raise BatchError(message(must, f"text in {', '.join(names)}", attempt))


def _is_text(leaf: Tensor) -> bool:
    if isinstance(leaf, np.ndarray):
        return leaf.dtype == object and not tree.is_ragged(leaf)
    return "string" in str(leaf.dtype)


def _of_inputs(model: keras.Model, x: Tree, words: str) -> str | None:
    wanted = _wanted(model)
    if x is not None and wanted and (attempt := _misfit(wanted, x)):
        if len(wanted) == 1:
            wanted = [(re.sub("^keras_tensor.*", "x", name), shape) for name, shape in wanted]
        return message(f"The model takes {_list(wanted)}.", _list(_given(x)), attempt)
    lines = [line for line in words.splitlines() if any(known in line for known in _MISFITS)]
    if not lines:
        return None
    received = lines[0].replace("\x1b[1m", "").replace("\x1b[0m", "").strip()
    if x is not None:
        received = f"{_list(_given(x))} ({received})"
    must = "The model must be able to take the batch."
    return message(must, received, "give it what it was built for.")


def _of_keys(x: Tree, error: BaseException, whose: str) -> str | None:
    """Refuse a dict of inputs that lacks a key which the user's code reads."""
    if not isinstance(x, dict):
        return None
    missing = None
    cause: BaseException | None = error
    while cause is not None:
        if type(cause) is KeyError and _reads(cause, x):
            missing = cause.args[0]
        cause = cause.__context__  # Keras raises other errors after the first, which is the model's
    if missing is None:
        return None
    reader = "model" if whose == "x" else "objective"
    must = f"{whose} must have every key that the {reader} reads, and {missing!r} is missing."
    root = "x" if whose == "x" else "batch"
    return message(must, _list(_given(x, root)), f"name its parts as the {reader}'s call does.")


def _reads(error: KeyError, x: dict) -> bool:
    """Whether an error's expression begins with a variable that has the keys of `x`."""
    if error.__traceback__ is None or error.args[0] in x:
        return False
    at = traceback.extract_tb(error.__traceback__)[-1]
    frame = [*traceback.walk_tb(error.__traceback__)][-1][0]
    code = linecache.getline(at.filename, at.lineno or 0)[at.colno :]
    name = re.match(r"\w*", code)
    variable = frame.f_locals.get(name[0]) if name else None
    return isinstance(variable, dict) and variable.keys() == x.keys()


def _of_missing(y: Tree) -> str | None:
    leaves = keras.tree.flatten_with_path(y)
    missing = [tree.name(path, "y") for path, leaf in leaves if leaf is None and path]
    if not missing:
        return None
    must = "Every output with a loss needs labels."
    attempt = "pass them, or compile that output with the loss None."
    return message(must, f"None for {', '.join(missing)}", attempt)


def _of_labels(error: BaseException) -> str | None:
    """Name the loss of Keras that the labels do not fit, and the one that they may fit."""
    calls = [
        (frame.f_code.co_name, frame.f_locals["y_true"], frame.f_locals["y_pred"])
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").startswith(LOSSES)
        and {"y_true", "y_pred"} <= frame.f_locals.keys()
    ]
    name = calls[-1][0] if calls else ""
    if name in ("", "call", "__call__"):  # not inside of a function of labels and outputs
        return None
    labels, outputs = (tuple(getattr(value, "shape", ())) for value in calls[0][1:])
    received = f"labels of shape {text_of_shape(labels)}, outputs of shape {text_of_shape(outputs)}"
    if name.startswith("sparse_"):
        if len(labels) < len(outputs) or labels[-1] == 1:
            return None
        must = f"The loss {name!r} takes class numbers, without an axis of the classes."
        attempt = (
            f"{name.removeprefix('sparse_')!r} for one-hot labels, or keras.ops.argmax(y, -1)."
        )
        return message(must, received, attempt)
    if labels[1:] == outputs[1:]:
        return None
    must = f"The loss {name!r} takes labels of the output's shape, {text_of_shape(outputs)}."
    attempt = "pass labels of the output's shape, or give the last layer as many units as labels."
    if name.startswith("categorical_") and (len(labels) < len(outputs) or labels[-1] == 1):
        attempt = f"keras.ops.one_hot(y, {outputs[-1]}) of class numbers."
        if name == "categorical_crossentropy":
            attempt = f"'sparse_{name}' for class numbers, or {attempt}"
    return message(must, received, attempt)


def _of_weights(y: Tree, weight: Tree, words: str) -> str | None:
    """Refuse weights that do not lead the labels' axes; a loss sums the last, except of classes."""
    if y is None or weight is None:
        return None
    if isinstance(y, dict) and isinstance(weight, dict) and y.keys() != weight.keys():
        must = "sample_weight must name the outputs that the labels name."
        received = f"weights for {', '.join(weight)} beside labels for {', '.join(y)}"
        attempt = "give None to an output without weights, as in {'a': weights, 'b': None}."
        return message(must, received, attempt)
    places = []
    for leaf in tree.leaves(y):
        shape = tuple(leaf.shape)
        places.append(shape if "int" in str(leaf.dtype) else shape[:-1])
    for name, leaf in tree.named_leaves(weight, "sample_weight"):
        shape = tuple(leaf.shape)
        received = f"{_list([(name, shape)])} beside {_list(_given(y, 'labels'))}"
        has_places = max(map(len, places)) > 1
        if len(shape) == 1 and has_places and any(known in words for known in _SHAPES):
            must = (
                f"{name} must have an axis beside the rows where the output has places, as a "
                "sequence has."
            )
            attempt = f"pass {name}[:, None], one number for each row, or one for each place."
            return message(must, received, attempt)
        while len(shape) > 1 and shape[-1] == 1:
            shape = shape[:-1]
        if len(shape) > 1 and shape not in [known[: len(shape)] for known in places]:
            must = (
                f"{name} must hold one number for each row, or for each of the places that the "
                "loss tells apart."
            )
            return message(must, received, "pass weights of shape (rows,).")
    return None


def _wanted(model: keras.Model) -> list[tuple[str, tuple]]:
    """Return the names and shapes of the inputs that a model was built for; [] if it has none."""
    inputs = getattr(model, "inputs", None)
    return [(tensor.name, tuple(tensor.shape)) for tensor in inputs] if inputs else []


def _given(x: Tree, root: str = "x") -> list[tuple[str, tuple]]:
    return [(name, _shape(leaf)) for name, leaf in tree.named_leaves(x, root)]


def _misfit(wanted: list[tuple[str, tuple]], x: Tree) -> str | None:
    """Return the advice for inputs that the model does not take; None if it takes them."""
    names = [name for name, _ in wanted]
    if isinstance(x, dict):
        if len(wanted) == 1 and names[0] not in x:
            return "pass the array itself, or name the Input as the dict does."
        if missing := [name for name in names if name not in x]:
            return (
                f"name the parts of x as the model's inputs: {', '.join(missing)} missing (None, "
                "for an input that is optional)."
            )
        given = [x[name] for name in names]
    else:
        given = keras.tree.flatten(x)
    if len(given) != len(wanted):
        return "pass as many arrays as the model has inputs."
    for leaf, (_, shape) in zip(given, wanted, strict=True):
        if leaf is not None and not _fits(_shape(leaf), shape):
            single = "pass x[None] for a single row; or " * (_shape(leaf) == shape[1:])
            return f"{single}give the rows this shape, or build the model for theirs."
    return None


def _shape(leaf: Tensor) -> tuple:
    """Return a leaf's shape; the axis of ragged rows has the length None."""
    if tree.is_ragged(leaf):
        return len(leaf), None, *leaf[0].shape[1:]
    return tuple(leaf.shape)


def _fits(given: tuple, wanted: tuple) -> bool:
    """Whether a shape fits the wanted one; a last axis of length 1 may be missing or added."""
    given, wanted = axes_to_compare(given, wanted)
    if len(given) != len(wanted):
        return False
    return all(w is None or g == w for g, w in zip(given, wanted, strict=True))


def _untraceable(model: keras.Model, error: Exception) -> str | None:
    names = [layer.name for layer in layers(model) if not layer.supports_jit]
    cause: BaseException | None = error
    while cause is not None and not type(cause).__module__.startswith("jax"):
        cause = cause.__context__  # Keras rewrites error messages, and fails at JAX's
    if not names or cause is None:
        return None
    must = "On JAX every layer must be able to be compiled."
    attempt = (
        "call these layers on the data first, as in dataset.map, and train the model that "
        "takes what they return."
    )
    return message(must, f"{', '.join(names)} ({type(cause).__name__})", attempt)


def _list(named: list[tuple[str, tuple]]) -> str:
    return ", ".join(f"{name} of shape {text_of_shape(shape)}" for name, shape in named)
