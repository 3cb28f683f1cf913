"""The loss that is meant, as an objective over (x, y[, sample_weight]), and the losses that it is mistaken for."""

from collections.abc import Callable, Iterator
from functools import partial
from inspect import signature
from typing import Any

import keras
import numpy as np
from keras import ops

from wholestep import tree
from wholestep.audit.found import Likely
from wholestep.audit.measure import SOLVED
from wholestep.errors import SpecificationError, message
from wholestep.model import CompiledObjective, LossCall, Mean, Objective, Sum, Term, Whole, unpack, unreduced
from wholestep.tree import Tensor, Tree

NUM_PROBES, NUM_WEIGHED, NUM_COUPLED = 3, 512, 4
_ENOUGH = 16  # numbers: all of fewer logits may lie between 0 and 1
_LOSSES = (
    *("MeanSquaredError", "MeanAbsoluteError", "Huber", "LogCosh", "MeanSquaredLogarithmicError"),
    *("MeanAbsolutePercentageError", "Poisson", "KLDivergence", "Hinge", "SquaredHinge", "CosineSimilarity"),
    *("BinaryCrossentropy", "BinaryFocalCrossentropy", "CategoricalCrossentropy", "CategoricalFocalCrossentropy"),
    "SparseCategoricalCrossentropy",
)


class _Function(keras.losses.Loss):
    """A plain function as a Keras loss; labels and outputs are given the same rank, as Keras does."""

    has_own_weights = False
    is_coupled = False  # whether a row's loss depends on the rows beside it

    def __init__(self, function: Callable):
        super().__init__(name=getattr(function, "__name__", None))
        self._function = function

    def call(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        """Return the function's values; if it returns a single number, its number for each row alone."""
        values = self.whole(y_true, y_pred)
        if len(values.shape):
            return values
        num = tree.leaves(y_pred)[0].shape[0]

        def row(i: int, nest: Tree) -> Tree:
            return tree.map_leaves(lambda leaf: leaf[i : i + 1], nest)

        return ops.stack([self.whole(row(i, y_true), row(i, y_pred)) for i in range(num)])

    def with_weights(self) -> "_Function":
        """Return the same function with a mean that is divided by its own weights of the rows."""
        found = _Function(self._function)
        found.reduction, found.has_own_weights = "mean_with_sample_weight", True
        return found

    def whole(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        """Return the function's result; nests of labels and outputs are passed unchanged."""
        if not hasattr(y_true, "shape") or not hasattr(y_pred, "shape"):
            return self._function(y_true, y_pred)
        if len(y_pred.shape) == len(y_true.shape) + 1 and y_pred.shape[-1] == 1:
            y_true = ops.expand_dims(y_true, -1)
        elif len(y_true.shape) == len(y_pred.shape) + 1 and y_true.shape[-1] == 1:
            y_true = ops.squeeze(y_true, -1)
        return self._function(y_true, y_pred)


def shares(objective: Objective, data: tuple[Tree, Tree, Tree], outputs: tuple[int, ...]) -> np.ndarray | None:
    """Return the rows' weights in a function that returns one number for a batch; None if they are equal.

    A masked mean gives a row with more places more weight: the number of two rows lies between the numbers of each
    alone. Weights are measured with random outputs, and are assumed to depend on the labels alone.

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
    if (
        num > NUM_WEIGHED
        or np.all(np.abs(found - 1) < SOLVED)
        or not np.all(np.isfinite(found))
        or found.min() < -SOLVED
    ):
        return None
    return np.where(np.abs(found) < SOLVED, 0.0, found).astype("float32")


def _couples(loss: _Function, labels: Tree, outputs: Tree) -> bool:
    """Whether a row's share of a batch's number depends on the outputs of other rows, as in contrastive losses.

    Args:
        labels: of `NUM_COUPLED` rows.
        outputs: symbols of the model's outputs.
    """
    draw = np.random.default_rng(1)

    def drawn() -> Tree:
        return tree.map_leaves(
            lambda leaf: draw.uniform(0.05, 0.95, (NUM_COUPLED, *leaf.shape[1:])).astype("float32"), outputs
        )

    def moves(first: Tree, second: Tree, others: Tree) -> float:
        """Return the effect of another first row on the number, beside these other rows."""
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
    return bool(np.all(np.isfinite(found)) and np.ptp(found) > SOLVED * np.max(np.abs(found)))


class LossObjective(Objective):
    """One Keras loss, on the model's one output, by the mask that the model makes or without."""

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
        y_pred = y_pred if self.is_masked else tree.map_leaves(lambda leaf: leaf + 0, y_pred)  # without the mask
        return self.of(y, y_pred, weight)

    def of(self, y: Tree, y_pred: Tree, weight: Tree = None) -> Term:
        """Return the loss of outputs; a single number for a batch cannot be masked."""
        if isinstance(self.loss, _Function) and not len((number := self.loss.whole(y, y_pred)).shape):
            if self.loss.is_coupled:
                return Whole(number)
            y_pred = tree.map_leaves(lambda leaf: leaf + 0, y_pred)
        return unreduced(LossCall(self.loss, 1.0, "loss", y, y_pred, weight))


class ByRow(LossObjective):
    """The mean over the rows of a loss that Keras sums."""

    def of(self, y: Tree, y_pred: Tree, weight: Tree = None) -> Term:
        """Return the sum of each row's places, to be divided by the number of rows."""
        term = super().of(y, y_pred, weight)
        values, weights = term.values, getattr(term, "weights", None)
        if weights is not None:
            values = values * ops.reshape(weights, (*weights.shape, *[1] * (len(values.shape) - len(weights.shape))))
        return Mean(ops.sum(values, axis=tuple(range(1, len(values.shape)))))


class _AsCompiled(Objective):
    """Several losses, as `compile` takes them, in place of the model's compiled losses."""

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
    """Return the objective that is meant, on these data.

    Raises:
        SpecificationError: there is no loss, or it is not a loss.
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
    """Return (data, objective) with the weights of the rows, if the objective is a function with own weights."""
    if not isinstance(objective, LossObjective) or not isinstance(objective.loss, _Function) or not model.built:
        return data, objective
    symbol = outputs(model, data[0])
    if any(None in leaf.shape[1:] for leaf in tree.leaves(symbol)):  # of unknown size
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
    """Return the model's outputs for one row, as symbols."""
    return model.compute_output_spec(
        tree.map_leaves(lambda leaf: keras.KerasTensor((1, *leaf.shape[1:]), leaf.dtype), x)
    )


def flipped(loss: keras.losses.Loss) -> keras.losses.Loss | None:
    """Return a loss with `from_logits` the other way; None if it has no such argument."""
    function, config = getattr(loss, "_function", None), {} if isinstance(loss, _Function) else loss.get_config()
    if function is not None and "from_logits" in signature(function).parameters:
        is_set = getattr(function, "keywords", {}).get("from_logits", False)
        return _Function(partial(function, from_logits=not is_set))
    if "from_logits" not in config:
        return None
    return type(loss).from_config(config | {"from_logits": not config["from_logits"]})


def swapped(loss: keras.losses.Loss) -> keras.losses.Loss:
    """Return a loss that gets outputs and labels in the other order."""
    other = _Function(lambda y, y_pred: loss.call(ops.cast(y_pred, "float32"), ops.cast(y, "float32")))
    other.reduction = loss.reduction
    return other


def others(loss: keras.losses.Loss, labels: Any) -> Iterator[tuple[str, keras.losses.Loss]]:
    """Yield (in words, loss) for the other losses of Keras that take such labels."""
    reduction = loss.reduction if isinstance(loss.reduction, str) else "sum_over_batch_size"
    is_whole = np.issubdtype(np.asarray(labels).dtype, np.integer)
    for name in _LOSSES:
        kind = getattr(keras.losses, name)
        if kind is type(loss) or ("Sparse" in name and not is_whole):
            continue
        has_logits = "from_logits" in signature(kind).parameters
        for given in [{"from_logits": True}, {"from_logits": False}] if has_logits else [{}]:
            arguments = ", ".join(f"{key}={value}" for key, value in given.items())
            yield f"{name}({arguments})", kind(**given, reduction=reduction)


def changes(loss: keras.losses.Loss, width: int) -> Iterator[tuple[str, Callable, bool]]:
    """Yield (name, function, whether it is the loss's own activation) of functions that outputs may go through."""
    functions = {"softmax": _softmax, "log_softmax": ops.log_softmax} if width > 1 else {}
    functions |= {"sigmoid": _sigmoid, "tanh": ops.tanh, "relu": ops.relu, "exp": ops.exp, "square": ops.square}
    own = "sigmoid" if "Binary" in type(loss).__name__ else "softmax"
    yield from ((name, function, name == own) for name, function in functions.items())


def _softmax(outputs: Tensor) -> Tensor:
    return ops.exp(ops.log_softmax(outputs))  # written out, as `_sigmoid` is: Keras would undo its own activations


def _sigmoid(outputs: Tensor) -> Tensor:
    return 1 / (1 + ops.exp(-outputs))


def unsmoothed(loss: Any) -> tuple[keras.losses.Loss, float] | None:
    """Return (the loss without label smoothing, its smoothing), of dense labels; None if it takes no smoothing."""
    if type(loss).__name__ == "SparseCategoricalCrossentropy":
        return keras.losses.CategoricalCrossentropy(loss.get_config()["from_logits"], reduction=loss.reduction), 0.0
    if not hasattr(loss, "label_smoothing"):
        return None
    config = loss.get_config()
    return type(loss).from_config(config | {"label_smoothing": 0.0}), float(config.get("label_smoothing", 0.0))


def is_squared(loss: Any) -> bool:
    """Whether it is the mean squared error."""
    name = getattr(getattr(loss, "_function", None), "__name__", "")
    return type(loss).__name__ == "MeanSquaredError" or name in ("mse", "mean_squared_error")


def is_masked(model: keras.Model) -> bool:
    """Whether a layer of the model makes a mask."""
    layers = model._flatten_layers()
    return any(getattr(layer, "mask_zero", isinstance(layer, keras.layers.Masking)) for layer in layers)


class NoLoss(Objective):
    """Placeholder for an unknown loss: gradients are not judged."""

    def __call__(self, model: keras.Model, batch: Tree, training: bool) -> Mean:
        """Return zeros, one for each row."""
        output = tree.leaves(model(batch[0], training=training))[0]
        return Mean(ops.zeros(ops.shape(output)[:1]))


class Observed(Objective):
    """The loop's own loss, of which the derivative by the outputs is known: it is in the batch in place of labels."""

    def __call__(self, model: keras.Model, batch: Tree, training: bool) -> Sum:
        """Return the outputs times the derivative, by row: the sum of these has the gradient of the loop's loss."""
        outputs = tree.leaves(model(batch[0], training=training))
        num = outputs[0].shape[0]
        parts = [ops.reshape(ops.cast(o, "float32") * d, (num, -1)) for o, d in zip(outputs, batch[1], strict=True)]
        return Sum(sum((ops.sum(part, axis=1) for part in parts), ops.zeros((num,))))


def name_of(loss: object) -> str:
    """Return the name of a loss: a name, a Keras loss, a function, or a partial function.

    >>> name_of(keras.losses.Huber()), name_of(keras.losses.huber), name_of("huber")
    ('Huber', 'huber', 'huber')
    """
    if isinstance(loss, str):
        return loss
    function = getattr(loss, "func", loss)
    return getattr(function, "__name__", None) or type(loss).__name__


def are_shares(out: np.ndarray) -> bool:
    """Whether the numbers of each place are probabilities."""
    return bool(out.min() >= 0 and np.allclose(out.sum(-1), 1, atol=1e-3))


def misfits(loss: object, outputs: list[np.ndarray], activation: str = "") -> list[str]:
    """Return a note if a cross entropy takes logits and gets probabilities, or the other way round.

    It is likely the fault, unless the numbers may be so by chance, or be what Keras divides by their sum.

    Args:
        activation: of the model's last layer, by name.

    >>> misfits(keras.losses.BinaryCrossentropy(from_logits=True), [np.array([[0.2], [0.9]])] * 8)
    ['BinaryCrossentropy takes logits (from_logits=True), and gets numbers between 0 and 1: is an activation too many?']
    >>> misfits(keras.losses.BinaryCrossentropy(), [np.array([[-0.2], [3.0]])] * 8)
    ['BinaryCrossentropy takes numbers between 0 and 1, and gets others: is from_logits=True missing?']
    """
    config = loss.get_config() if isinstance(loss, keras.losses.Loss) else getattr(loss, "keywords", {})
    name = name_of(loss)
    many = [out for out in outputs if out.ndim > 1]
    if "crossentropy" not in name.lower() or sum(map(np.size, many)) < _ENOUGH:
        return []
    is_binary = "binary" in name.lower()
    has_shares = all((out.min() >= 0 and out.max() <= 1) if is_binary else are_shares(out) for out in many)
    kind = "numbers between 0 and 1" if is_binary else "numbers that add up to 1"
    if bool(config.get("from_logits")) is not has_shares:
        return []
    if has_shares:
        told = f"{name} takes logits (from_logits=True), and gets {kind}: is an activation too many?"
        is_certain = not is_binary or activation == "sigmoid"
        # On TensorFlow, Keras takes the logits behind such an activation, and the gradient is right.
        return [Likely(told) if is_certain and keras.backend.backend() != "tensorflow" else told]
    told = f"{name} takes {kind}, and gets others: is from_logits=True missing?"
    return [Likely(told) if is_binary or any(out.min() < 0 for out in many) else told]


def constant(outputs: list[np.ndarray]) -> list[str]:
    """Return a note if all outputs are one number, in every row.

    >>> constant([np.ones((4, 1))] * 4)
    ['All outputs are 1, in every row of every update: is it a softmax of a single number? That takes a sigmoid.']
    """
    many = np.concatenate([np.ravel(out) for out in outputs] or [np.zeros(0)])
    if many.size < _ENOUGH or np.any(many != many[0]):
        return []
    told = "is it a softmax of a single number? That takes a sigmoid." if many[0] == 1 else "do they see the inputs?"
    return [Likely(f"All outputs are {many[0]:g}, in every row of every update: {told}")]
