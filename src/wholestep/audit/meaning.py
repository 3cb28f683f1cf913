"""The loss that was meant, as an objective over (x, y[, sample_weight]), and the losses that it is mistaken for."""

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import keras
import numpy as np
from keras import ops

from wholestep import tree
from wholestep.errors import SpecificationError, message
from wholestep.model import CompiledObjective, LossCall, Objective, Term, Whole, unpack, unreduced
from wholestep.tree import Tensor, Tree

NUM_PROBES, NUM_WEIGHED, NUM_COUPLED = 3, 512, 4
_EVEN = 1e-3


class _Function(keras.losses.Loss):
    """A plain function as a Keras loss; labels and outputs are given the same rank, as Keras does."""

    has_own_weights = False
    is_coupled = False  # rows count by what is in the rows beside them: it is the number of a batch, and of no row

    def __init__(self, function: Callable):
        super().__init__(name=getattr(function, "__name__", None))
        self._function = function

    def call(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        """Return the function's values; of one that returns a single number, its number for each row by itself."""
        values = self.whole(y_true, y_pred)
        if len(values.shape):
            return values
        num = tree.leaves(y_pred)[0].shape[0]

        def row(i: int, nest: Tree) -> Tree:
            return tree.map_leaves(lambda leaf: leaf[i : i + 1], nest)

        return ops.stack([self.whole(row(i, y_true), row(i, y_pred)) for i in range(num)])

    def with_weights(self) -> "_Function":
        """Return the same with a mean that is divided by the weights of the rows, which are its own."""
        found = _Function(self._function)
        found.reduction, found.has_own_weights = "mean_with_sample_weight", True
        return found

    def whole(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        """Return what the function returns; nests of labels and outputs are given as they are."""
        if not hasattr(y_true, "shape") or not hasattr(y_pred, "shape"):
            return self._function(y_true, y_pred)
        if len(y_pred.shape) == len(y_true.shape) + 1 and y_pred.shape[-1] == 1:
            y_true = ops.expand_dims(y_true, -1)
        elif len(y_true.shape) == len(y_pred.shape) + 1 and y_true.shape[-1] == 1:
            y_true = ops.squeeze(y_true, -1)
        return self._function(y_true, y_pred)


def shares(objective: Objective, data: tuple[Tree, Tree, Tree], outputs: tuple[int, ...]) -> np.ndarray | None:
    """Return what each row weighs in a function that returns one number for a batch; None where all weigh the same.

    A masked mean gives a row with more places more weight: that shows in the number of two rows, which lies between
    those of each alone. Weights are looked at with random outputs, and are taken to depend on the labels alone.

    Args:
        data: (x, y, sample_weight).
        outputs: the shape of the model's output.
    """
    loss, (_, labels, weight) = getattr(objective, "loss", None), data
    if not isinstance(loss, _Function) or weight is not None or not hasattr(labels, "shape"):
        return None
    draw = np.random.default_rng(0)
    probes = draw.uniform(0.05, 0.95, (NUM_PROBES, 2, *outputs[1:])).astype("float32")
    num = len(labels)

    def value(rows: list[int], outputs: np.ndarray) -> float:
        found = keras.ops.convert_to_numpy(loss.whole(labels[rows], outputs))
        return float(found) if np.ndim(found) == 0 else float("nan")

    def weigh(row: int, anchor: int) -> float:
        ratios = []
        for one, two in probes:
            first, other = value([anchor], one[None]), value([row], two[None])
            both = value([anchor, row], np.stack([one, two]))
            ratios.append((first - both, both - other))
        above, below = np.transpose(ratios)
        return float(above @ below / (below @ below)) if np.all(np.isfinite(ratios)) and below.any() else 0.0

    some = range(num) if num <= NUM_WEIGHED else draw.permutation(num)[:NUM_WEIGHED].tolist()
    anchor = next((row for row in some if np.isfinite(value([row], probes[0, :1]))), None)
    if anchor is None:
        return None
    found = np.array([weigh(row, anchor) for row in some])
    if num > NUM_WEIGHED or np.all(np.abs(found - 1) < _EVEN) or not np.all(np.isfinite(found)) or found.min() < -_EVEN:
        return None
    return np.where(np.abs(found) < _EVEN, 0.0, found).astype("float32")


def _couples(loss: _Function, labels: Tree, outputs: Tree) -> bool:
    """Whether what a row adds to a batch's number depends on the outputs of other rows, as in contrastive losses.

    Args:
        labels: those of `NUM_COUPLED` rows.
        outputs: symbols of what the model returns.
    """
    draw = np.random.default_rng(1)

    def drawn() -> Tree:
        return tree.map_leaves(
            lambda leaf: draw.uniform(0.05, 0.95, (NUM_COUPLED, *leaf.shape[1:])).astype("float32"), outputs
        )

    def moves(first: Tree, second: Tree, others: Tree) -> float:
        """Return what it makes of a difference if the first row is another, beside these."""
        both = [
            tree.map_leaves(lambda row, other: np.concatenate([row[:1], other[1:]]), each, others)
            for each in (first, second)
        ]
        one, two = (keras.ops.convert_to_numpy(loss.whole(labels, each)) for each in both)
        return float(two) - float(one) if np.ndim(one) == 0 else float("nan")

    first, second = drawn(), drawn()
    try:
        found = [moves(first, second, drawn()) for _ in range(NUM_PROBES)]
    except Exception:  # a function of batches of one size
        return True
    return bool(np.all(np.isfinite(found)) and np.ptp(found) > _EVEN * np.max(np.abs(found)))


class LossObjective(Objective):
    """One Keras loss, on the model's one output, by the mask that the model makes or without."""

    def __init__(self, loss: keras.losses.Loss, *, is_masked: bool = True):
        self.loss, self.is_masked = loss, is_masked

    @property
    def given(self) -> Any:
        """What the user gave: a loss of Keras, or a function."""
        return getattr(self.loss, "_function", self.loss)

    def __call__(self, model: keras.Model, batch: Tree, training: bool) -> Term:
        """Return the loss before its reduction, with what Keras would have divided by."""
        x, y, weight = unpack(batch)
        y_pred = model(x, training=training)
        y_pred = y_pred if self.is_masked else tree.map_leaves(lambda leaf: leaf + 0, y_pred)  # which has none
        return self.of(y, y_pred, weight)

    def of(self, y: Tree, y_pred: Tree, weight: Tree = None) -> Term:
        """Return the loss of outputs; a number for a whole batch has no places that a mask could leave out."""
        if isinstance(self.loss, _Function) and not len((number := self.loss.whole(y, y_pred)).shape):
            if self.loss.is_coupled:
                return Whole(number)
            y_pred = tree.map_leaves(lambda leaf: leaf + 0, y_pred)
        return unreduced(LossCall(self.loss, 1.0, "loss", y, y_pred, weight))


class _AsCompiled(Objective):
    """Several losses, as `compile` takes them: in the place of those that the model is compiled with."""

    def __init__(self, model: keras.Model, loss: Any, x: Tree, y: Tree):
        symbols = outputs(model, x)
        of = keras.Model(model.inputs, model.outputs) if getattr(model, "inputs", None) else keras.Model()
        of.compile(loss=loss)
        of._compile_loss.build(y, symbols)
        self._loss, self._objective = of._compile_loss, CompiledObjective(model, [])

    def __call__(self, model: keras.Model, batch: Tree, training: bool) -> Any:
        """Return the terms of these losses."""
        before = vars(model).get("_compile_loss")
        vars(model)["_compile_loss"] = self._loss
        try:
            return self._objective(model, batch, training)
        finally:
            vars(model)["_compile_loss"] = before


def meant(model: keras.Model, loss: Any, x: Tree, y: Tree) -> Objective:
    """Return the objective that is meant, on such data.

    Raises:
        SpecificationError: there is no loss, or none that can be understood.
    """
    if isinstance(loss, Objective):
        return loss
    if loss is None:
        if not getattr(model, "compiled", False) or model._compile_loss is None:
            must, attempt = "The audit needs the loss that is meant.", "ws.audit(model, data=(x, y), loss=...)."
            raise SpecificationError(message(must, "loss=None, and a model without a compiled loss", attempt))
        loss = model.loss
        if isinstance(loss, dict | list | tuple):
            if not model._compile_loss.built:  # as `fit` does before its first batch
                model._compile_loss.build(y, outputs(model, x))
            return CompiledObjective(model, [])
    if isinstance(loss, dict | list | tuple):
        try:
            return _AsCompiled(model, loss, x, y)
        except (TypeError, ValueError, KeyError) as error:
            must, attempt = (
                "Several losses must fit the model's outputs and the labels, as in compile.",
                "one for each.",
            )
            raise SpecificationError(message(must, f"{loss}: {error}", attempt)) from error
    if isinstance(loss, str):
        loss = keras.losses.get(loss)
    if isinstance(loss, keras.losses.Loss):
        return LossObjective(loss)
    if callable(loss):
        return LossObjective(_Function(loss))
    must = "loss must be a Keras loss, a function of labels and outputs, or an Objective."
    raise SpecificationError(message(must, type(loss).__name__, "loss=keras.losses.MeanSquaredError()."))


def weighed(
    model: keras.Model, data: tuple[Tree, Tree, Tree], objective: Objective
) -> tuple[tuple[Tree, Tree, Tree], Objective]:
    """Return (data, objective) with the weights of the rows, if the objective is a function that has some itself."""
    if not isinstance(objective, LossObjective) or not isinstance(objective.loss, _Function) or not model.built:
        return data, objective
    symbol = outputs(model, data[0])
    if any(None in leaf.shape[1:] for leaf in tree.leaves(symbol)):  # it is not known what there is to draw
        return data, objective
    if data[2] is None and tree.num_rows(data[:2]) >= NUM_COUPLED:
        labels = tree.map_leaves(lambda leaf: leaf[:NUM_COUPLED], data[1])
        objective.loss.is_coupled = _couples(objective.loss, labels, symbol)
        if objective.loss.is_coupled:
            return data, objective
    found = shares(objective, data, symbol.shape) if hasattr(symbol, "shape") else None
    if found is None:
        return data, objective
    return (*data[:2], found), LossObjective(objective.loss.with_weights())


def outputs(model: keras.Model, x: Tree) -> Tree:
    """Return what the model returns for one row, as symbols."""
    return model.compute_output_spec(
        tree.map_leaves(lambda leaf: keras.KerasTensor((1, *leaf.shape[1:]), leaf.dtype), x)
    )


def flipped(loss: keras.losses.Loss) -> keras.losses.Loss | None:
    """Return a loss with `from_logits` the other way; None if it has none."""
    function, config = getattr(loss, "_function", None), {} if isinstance(loss, _Function) else loss.get_config()
    if function is not None and "from_logits" in signature(function).parameters:
        is_set = getattr(function, "keywords", {}).get("from_logits", False)
        return _Function(partial(function, from_logits=not is_set))
    return (
        type(loss).from_config(config | {"from_logits": not config["from_logits"]}) if "from_logits" in config else None
    )


def is_masked(model: keras.Model) -> bool:
    """Whether a layer of the model makes a mask."""
    layers = model._flatten_layers()
    return any(getattr(layer, "mask_zero", isinstance(layer, keras.layers.Masking)) for layer in layers)
