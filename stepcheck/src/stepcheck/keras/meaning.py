"""The loss that is meant, as an objective over (x, y[, sample_weight])."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
from keras import ops

from stepcheck import port, tree
from stepcheck.errors import SpecificationError, attempt, message
from stepcheck.keras.families import Function, averaging, mean_of
from stepcheck.port import OneLoss
from stepcheck.trace.measure import NUM_PROBES, SOLVED, shares
from stepcheck.tree import Tensor, Tree
from wholestep.model import (
    CompiledObjective,
    LossCall,
    Mean,
    Objective,
    Term,
    Whole,
    is_overridden,
    unpack,
    unreduced,
)

NUM_COUPLED = 4
_AT_ONCE = 1 << 22  # outputs of the rows whose own weights are computed at once
_FEW = 8  # rows by which weights of their own are told


def _shares(
    objective: Objective, data: tuple[Any, Any, Any], outputs: tuple[int, ...]
) -> np.ndarray | None:
    """Return the rows' weights in a function of one number for a batch; None if equal.

    Args:
        data: (x, y, sample_weight).
        outputs: the shape of the model's output.
    """
    loss, (_, labels, weight) = getattr(objective, "loss", None), data
    if (
        not isinstance(loss, Function)
        or weight is not None
        or not hasattr(labels, "shape")
    ):
        return None

    def value(rows: list[int], outputs: np.ndarray) -> float:
        found = keras.ops.convert_to_numpy(loss.whole(labels[rows], outputs))
        return float(found) if np.ndim(found) == 0 else float("nan")

    return shares(value, len(labels), outputs[1:])


def _own_weights(
    loss: Function, labels: Any, outputs: tuple[int, ...]
) -> np.ndarray | None:
    """Return the weights of all rows if a function returns (values, weights); else
    None.

    Raises:
        SpecificationError: they depend on the outputs.
    """

    def weights(own: Any, level: float) -> Any:
        values, found = loss.pair(
            own, np.full((len(own), *outputs[1:]), level, "float32")
        )
        return (
            None
            if found is None
            else np.broadcast_to(keras.ops.convert_to_numpy(found), values.shape)
        )

    first, _ = attempt(
        lambda: weights(labels[:_FEW], 0.3)
    )  # an error: of a function of batches of one size
    if first is None:
        return None
    if not np.array_equal(first, weights(labels[:_FEW], 0.6), equal_nan=True):
        must = (
            "The weights that a loss returns must be those of the labels, whatever "
            "the outputs are."
        )
        raise SpecificationError(
            message(must, loss.name, "the weights in its values, and values alone.")
        )
    size = max(1, _AT_ONCE // max(1, int(np.prod(outputs[1:]))))
    parts = [
        weights(labels[start : start + size], 0.3)
        for start in range(0, len(labels), size)
    ]
    return np.concatenate([np.asarray(part, "float32") for part in parts])


def _couples(loss: Function, labels: Any, outputs: Tree) -> bool:
    """Whether a row's share of a batch's number depends on other rows' outputs.

    Args:
        labels: of `NUM_COUPLED` rows.
        outputs: symbols of the model's outputs.
    """
    draw = np.random.default_rng(1)

    def drawn_as(leaf: Any) -> np.ndarray:
        return draw.uniform(0.05, 0.95, (NUM_COUPLED, *leaf.shape[1:])).astype(
            "float32"
        )

    def moves(pair: list[Tree], others: Tree) -> float:
        """Return the effect of another first row on the number, beside these other
        rows.
        """
        both = (
            tree.map_leaves(
                lambda row, other: np.concatenate([row[:1], other[1:]]), each, others
            )
            for each in pair
        )
        one, two = (
            keras.ops.convert_to_numpy(loss.whole(labels, each)) for each in both
        )
        return float(two) - float(one) if np.ndim(one) == 0 else float("nan")

    first, second, *others = (
        tree.map_leaves(drawn_as, outputs) for _ in range(2 + NUM_PROBES)
    )
    found, error = attempt(lambda: [moves([first, second], each) for each in others])
    if error is not None or found is None:  # a function of batches of one size
        return True
    return bool(
        np.all(np.isfinite(found)) and np.ptp(found) > SOLVED * np.max(np.abs(found))
    )


def _is_of_a_batch(
    objective: "LossObjective", data: tuple[Tree, Tree, Tree], outputs: Tree
) -> bool:
    """Whether a loss of the user's own class gives one number for several rows."""
    num = min(NUM_COUPLED, tree.num_rows(data[:2]))
    made = tree.map_leaves(
        lambda leaf: np.full((num, *leaf.shape[1:]), 0.5, "float32"), outputs
    )
    labels, weight = (
        tree.map_leaves(lambda leaf: leaf[:num], part) for part in data[1:]
    )
    term, _ = attempt(
        lambda: objective.of(labels, made, weight)
    )  # an error: of a loss of batches of one size
    return isinstance(term, Whole)


class LossObjective(OneLoss, Objective):
    """One Keras loss, on the model's one output, by the mask that the model makes or
    without.
    """

    def __init__(self, loss: keras.losses.Loss, *, is_masked: bool = True):
        self.loss, self.is_masked = loss, is_masked

    @property
    def given(self) -> Any:
        """The user's argument: a loss of Keras, or a function."""
        return getattr(self.loss, "_function", self.loss)

    def __call__(self, model: keras.Model, batch: Tree, training: bool) -> Term:
        """Return the loss before its reduction, with the divisor of Keras."""
        x, y, weight = unpack(batch)
        y_pred = model(x, training=training)
        y_pred = (
            y_pred if self.is_masked else tree.map_leaves(lambda leaf: leaf + 0, y_pred)
        )  # without the mask
        return self.of(y, y_pred, weight)

    def of(self, y: Any, y_pred: Any, weight: Any = None) -> Term:
        """Return the loss of outputs; a single number for a batch cannot be masked."""
        if isinstance(self.loss, Function) and not len(
            (number := self.loss.whole(y, y_pred)).shape
        ):
            if self.loss.is_coupled:
                is_weighed = weight is not None and isinstance(
                    self.given, keras.losses.Loss
                )
                return Whole(self.given(y, y_pred, weight) if is_weighed else number)
            y_pred = tree.map_leaves(lambda leaf: leaf + 0, y_pred)
        return unreduced(LossCall(self.loss, 1.0, "loss", y, y_pred, weight))


class _AsCompiled(Objective):
    """Several losses, as `compile` takes them, in place of the model's compiled losses."""

    def __init__(self, model: keras.Model, loss: Any, x: Tree, y: Tree):
        symbols = outputs(model, x)
        given = (model.inputs, model.outputs) if getattr(model, "inputs", None) else ()
        of = keras.Model(
            *given, name="watched"
        )  # a default name would change those of later models
        of.compile(loss=loss)
        of._compile_loss.build(y, symbols)
        self._loss, self._objective = of._compile_loss, CompiledObjective([])

    def __call__(self, model: keras.Model, batch: Tree, training: bool) -> Any:
        """Return the terms of these losses."""
        with self._compiled(model):
            return self._objective(model, batch, training)

    def calls(
        self, model: keras.Model, y: Tree, y_pred: Tree, weight: Tree
    ) -> list[LossCall]:
        """Return the losses, each with its output, labels and weights."""
        with self._compiled(model):
            return self._objective.calls(model, y, y_pred, weight)

    @contextmanager
    def _compiled(self, model: keras.Model) -> Iterator[None]:
        before = vars(model).get("_compile_loss")
        vars(model)["_compile_loss"] = self._loss
        try:
            yield
        finally:
            vars(model)["_compile_loss"] = before


def meant(model: keras.Model, loss: Any, x: Tree, y: Tree) -> Objective:
    """Return the objective that is meant, on these data.

    Raises:
        SpecificationError: there is no loss, or it is not a loss.
    """
    if isinstance(loss, Objective):
        return loss
    if loss is None:
        loss = _compiled_loss(model)
        if isinstance(loss, dict | list | tuple) or is_overridden(
            model, "compute_loss"
        ):
            if not model._compile_loss.built:  # as `fit` does before its first batch
                model._compile_loss.build(y, outputs(model, x))
            return CompiledObjective([])
    if isinstance(loss, dict | list | tuple):
        try:
            return _AsCompiled(model, loss, x, y)
        except (TypeError, ValueError, KeyError) as error:
            must = "Several losses must fit the model's outputs and the labels, as in compile."
            raise SpecificationError(
                message(must, f"{loss}: {error}", "one for each.")
            ) from error
    return _one_loss(loss)


def _compiled_loss(model: keras.Model) -> Any:
    if not getattr(model, "compiled", False) or model._compile_loss is None:
        must = "The loss that is meant must be stated."
        received = "loss=None, and a model without a compiled loss"
        raise SpecificationError(
            message(must, received, "watch(model, data, loss=...).")
        )
    return model.loss


def _one_loss(stated: Any) -> "LossObjective":
    loss = stated
    if isinstance(stated, str):
        loss, _ = attempt(lambda: keras.losses.get(stated))
    if isinstance(loss, keras.losses.Loss):
        return LossObjective(averaging(loss))
    if callable(loss) and not isinstance(loss, type):
        return LossObjective(Function(loss))
    must = (
        "loss must be a Keras loss, a function of labels and outputs, or an Objective."
    )
    raise SpecificationError(
        message(must, repr(stated), "loss=keras.losses.MeanSquaredError().")
    )


def weighed(
    model: keras.Model, data: tuple[Tree, Tree, Tree], objective: Objective
) -> tuple[tuple[Tree, Tree, Tree], Objective]:
    """Return (data, objective) with the rows' weights, of a function that returns some."""
    if not isinstance(objective, LossObjective) or not model.built:
        return data, objective
    if type(objective.loss).__module__.startswith("keras."):
        return data, objective
    symbol, _ = attempt(lambda: _symbol_of(model, data[0]))
    if symbol is None:  # an error of the model's, of batches of another size
        return data, objective
    if not isinstance(objective.loss, Function):
        if not _is_of_a_batch(objective, data, symbol):
            return data, objective
        objective = LossObjective(Function(objective.loss))
    return _weighed(data, objective, symbol)


def _symbol_of(model: keras.Model, x: Tree) -> Tree | None:
    """Return symbols of a model's outputs, of a single one it alone; None if sizes are
    unknown.
    """
    symbol = outputs(model, x)
    leaves = tree.leaves(symbol)
    if any(None in leaf.shape[1:] for leaf in leaves):
        return None
    return (
        leaves[0] if len(leaves) == 1 else symbol
    )  # perhaps in a list, as Keras takes it


def _weighed(
    data: tuple[Tree, Tree, Tree], objective: "LossObjective", symbol: Tree
) -> tuple[tuple[Tree, Tree, Tree], Objective]:
    x, labels, weight = data
    loss = objective.loss
    loss.is_coupled |= loss.is_class and weight is not None
    shape = getattr(symbol, "shape", None) if hasattr(labels, "shape") else None
    if shape is not None and (own := _own_weights(loss, labels, shape)) is not None:
        given = np.ones(1, "float32") if weight is None else np.asarray(weight)
        given = given.reshape(given.shape[: own.ndim] + (1,) * (own.ndim - given.ndim))
        return (x, labels, own * given), LossObjective(mean_of(loss, by_weight=True))
    if weight is None and tree.num_rows((x, labels)) >= NUM_COUPLED:
        some = tree.map_leaves(lambda leaf: leaf[:NUM_COUPLED], labels)
        loss.is_coupled = _couples(loss, some, symbol)
        if loss.is_coupled:
            return data, objective
    found = _shares(objective, data, symbol.shape) if hasattr(symbol, "shape") else None
    if found is None:
        return data, objective
    return (x, labels, found), LossObjective(loss.with_weights())


def outputs(model: keras.Model, x: Tree) -> Tree:
    """Return the outputs for one row as symbols; as numbers if the model has no trace."""
    symbols = tree.map_leaves(
        lambda leaf: keras.KerasTensor((1, *leaf.shape[1:]), leaf.dtype), x
    )
    found, error = attempt(lambda: model.compute_output_spec(symbols))
    if error is None:
        return found
    if not model.built:
        raise error
    return model(
        tree.map_leaves(lambda leaf: leaf[:1], x)
    )  # it reads numbers while it runs


def are_numbers(leaf: object) -> bool:
    """Whether a part of a model's outputs has numbers; others may be text or objects."""
    return ops.is_tensor(leaf) or isinstance(
        leaf, int | float | np.ndarray | np.generic | keras.Variable
    )


def tensors(outputs: Tree) -> list[Tensor]:
    """Return the numbers in a model's outputs, as tensors."""
    leaves = [leaf for leaf in tree.leaves(outputs) if are_numbers(leaf)]
    return [
        ops.convert_to_tensor(leaf.value if isinstance(leaf, keras.Variable) else leaf)
        for leaf in leaves
    ]


def is_result(leaf: object) -> bool:
    """Whether a part of a model's outputs is the result of operations."""
    return ops.is_tensor(leaf) and not isinstance(leaf, keras.Variable)


def is_masked(model: keras.Model) -> bool:
    """Whether a layer of the model makes a mask, and Keras keeps it."""
    return any(map(_makes_mask, model._flatten_layers()))


def _makes_mask(layer: keras.layers.Layer) -> bool:
    is_of_user = not type(layer).compute_mask.__module__.startswith("keras.")
    makes = getattr(layer, "mask_zero", isinstance(layer, keras.layers.Masking))
    return bool(makes or (is_of_user and layer.supports_masking))


class NoLoss(port.NoLoss, Objective):
    """Placeholder for an unknown loss: gradients are not judged."""

    def __call__(self, model: keras.Model, batch: Any, training: bool) -> Mean:
        """Return zeros, one for each row."""
        output = tensors(model(batch[0], training=training))[0]
        return Mean(ops.zeros(ops.shape(output)[:1]))
