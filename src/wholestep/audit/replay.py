"""Forward passes and gradients once more, at the values that the loop had: nothing of the model is read or moved."""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from wholestep import tree
from wholestep.audit.found import COARSE, FINE
from wholestep.audit.keeping import places
from wholestep.audit.windows import PAD, Piece
from wholestep.engines import choose
from wholestep.model.objective import Objective, read
from wholestep.model.terms import Mean, Term, Whole, checked
from wholestep.tree import Tensor, Tree


class Terms(NamedTuple):
    """The loss of a piece, by term and row: (terms, rows) of values times weights, and of weights.

    `coefficients`, `names` and `divided` (whether a term is divided by its weights) are by term. `penalty`: the model's
    own.
    """

    values: np.ndarray
    weights: np.ndarray
    coefficients: np.ndarray
    divided: np.ndarray
    penalty: float
    names: tuple[str, ...]


class Replay:
    """A model as a function of values.

    Args:
        data: (x, y, sample_weight), the last one perhaps None.
    """

    def __init__(self, model: keras.Model, data: tuple[Tree, Tree, Tree]):
        self.model, self.data = model, data
        self.engine = choose()
        self.num_rows = len(tree.leaves(data[0])[0])
        self.names = [v.path for v in model.trainable_variables]
        self._kept = [places(int(np.prod(v.shape))) for v in model.trainable_variables]
        self.is_in_part = any(chosen is not None for chosen in self._kept)
        self._programs: dict[Any, Any] = {}
        self.is_half = any("float16" in layer.compute_dtype for layer in model._flatten_layers())
        self.is_sparse = any(isinstance(layer, keras.layers.Embedding) for layer in model._flatten_layers())
        self.tolerance = COARSE if self.is_half else FINE
        # Small gradients are zeros in float16: they are computed of a larger loss, and divided.
        self._scale = 1024.0 if any(layer.compute_dtype == "float16" for layer in model._flatten_layers()) else 1.0

    def flat(self, grads: list[np.ndarray | None]) -> np.ndarray:
        """Return gradients as one vector, a missing one as zeros; of large parameters some places, always the same.

        Of a large one either all is given, or what a log keeps of it.
        """
        parts = []
        for variable, grad, kept in zip(self.model.trainable_variables, grads, self._kept, strict=True):
            num = int(np.prod(variable.shape)) if kept is None else len(kept)
            part = np.zeros(num) if grad is None else np.reshape(grad, -1)
            parts.append((part if len(part) == num else part[kept]).astype("float64"))
        return np.concatenate(parts)

    def parts(self, vector: np.ndarray) -> dict[str, np.ndarray]:
        """Cut such a vector into the parameters."""
        sizes = [
            int(np.prod(v.shape)) if k is None else len(k) for v, k in zip(self._variables(), self._kept, strict=True)
        ]
        return dict(zip(self.names, np.split(vector, np.cumsum(sizes)[:-1]), strict=True))

    def outputs(self, piece: Piece, *, training: bool) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return (leaves of the output, the model's other values afterwards) of a forward pass."""

        def run(params: list, buffers: list, inputs: list) -> tuple:
            scope = self._scope(params, buffers)
            with scope:
                outputs = self.model(self._packed(inputs), training=training)
            return tree.leaves(outputs), self._after(scope, buffers)

        program = self._program(("outputs", training), run)
        outputs, buffers = program(piece.called.params, piece.called.buffers, piece.called.inputs)
        return [np.asarray(leaf) for leaf in outputs], [np.asarray(leaf) for leaf in buffers]

    def batch(self, piece: Piece, *, shift: int = 0, labels: np.ndarray | None = None) -> Tree:
        """Return (x, y[, sample_weight]) of a piece: inputs as the model had them, the rest by row.

        Args:
            shift: by how many rows the labels are moved on.
            labels: the rows that the labels are taken from, if they are others.
        """
        rows = np.where(piece.rows == PAD, 0, piece.rows)
        shifted = np.roll(rows if labels is None else labels, shift)

        def taken(leaf: Any) -> np.ndarray:
            chosen = np.asarray(leaf)[shifted]
            chosen[np.roll(piece.rows == PAD, shift)] = 0  # as what fills up a batch has them
            return self._as_wide(chosen, piece)

        y, weight = tree.map_leaves(taken, self.data[1]), self.data[2]
        if weight is None:
            return self._packed(piece.called.inputs), y
        return (
            self._packed(piece.called.inputs),
            y,
            tree.map_leaves(lambda leaf: self._as_wide(np.asarray(leaf)[rows], piece), weight),
        )

    def _as_wide(self, leaf: np.ndarray, piece: Piece) -> np.ndarray:
        """Return labels or weights of rows as wide as the outputs, where the batch is narrower than the data."""
        pairs = zip(tree.leaves(self.data[0]), piece.called.inputs, strict=False)
        is_narrow = any(np.shape(whole)[1:2] > given.shape[1:2] for whole, given in pairs)
        if not is_narrow or leaf.ndim < 2 or not piece.called.outputs:
            return leaf
        return leaf[:, : piece.called.outputs[0].shape[1]] if piece.called.outputs[0].ndim > 1 else leaf

    def terms(self, piece: Piece, objective: Objective, batch: Tree, *, training: bool) -> Terms:
        """Return the loss of a piece, unreduced."""
        num = len(piece.called.inputs[0])
        found: dict = {}

        def run(params: list, buffers: list, batch: Tree) -> tuple:
            with self._scope(params, buffers):
                terms = checked(read(objective(self.model, batch, training), {}).terms, num)
                penalty = self._penalty()
                sums = [_by_row(term, num) for term in terms.values()]
            found["terms"] = [(float(t.coefficient), isinstance(t, Mean)) for t in terms.values()]
            found["names"] = tuple(map(str, terms))
            return ops.stack([s[0] for s in sums]), ops.stack([s[1] for s in sums]), penalty

        program, found = self._program(("terms", training, id(objective), num), run, found)
        values, weights, penalty = program(piece.called.params, piece.called.buffers, batch)
        coefficients, divided = (np.array(each) for each in zip(*found["terms"], strict=True))
        return Terms(np.array(values), np.array(weights), coefficients, divided, float(penalty), found["names"])

    def gradient(
        self,
        piece: Piece,
        objective: Objective,
        batch: Tree,
        factors: np.ndarray,
        *,
        training: bool,
        penalty: float = 0.0,
    ) -> np.ndarray:
        """Return the gradient of the sum of factors (terms, rows) times values and weights, flat.

        Args:
            penalty: the factor of the model's own losses.
        """
        num = len(piece.called.inputs[0])

        def run(params: list, buffers: list, batch: Tree, factors: Tensor, penalty: Tensor) -> tuple:
            def loss(params: list) -> tuple:
                with self._scope(params, buffers):
                    terms = checked(read(objective(self.model, batch, training), {}).terms, num)
                    own = self._penalty()
                    sums = ops.stack([_by_row(term, num)[0] for term in terms.values()])
                total = ops.sum(ops.where(factors == 0, ops.zeros_like(sums), sums) * factors) + penalty * own
                return total, own

            return self.engine.ops.differentiate(loss, params)

        program, _ = self._program(("gradient", training, id(objective), num), run, {})
        given = np.asarray(self._scale * factors, "float32"), np.float32(self._scale * penalty)
        params = [ops.convert_to_tensor(value) for value in piece.called.params]
        grads, _ = program(params, piece.called.buffers, batch, *given)
        return self.flat([np.asarray(grad) for grad in grads]) / self._scale

    def derivative(
        self, objective: Any, outputs: np.ndarray, labels: Tree, weights: Tree = None, change: Callable | None = None
    ) -> np.ndarray:
        """Return the derivative of the sum of the rows' losses by a model's one output.

        Args:
            objective: a `LossObjective`.
            change: a function of the outputs, of which the loss is one then.
        """
        num = len(outputs)

        def by_loss(given: list, labels: Tree, weights: Tree) -> tuple:
            def total(given: list) -> tuple:
                values = ops.sum(_by_row(objective.of(labels, given[0], weights), num)[0])
                return values, given[0]

            return self.engine.ops.differentiate(total, given)

        def by_change(given: list, factors: Tensor) -> tuple:
            def total(given: list) -> tuple:
                changed = ops.cast(change(given[0]), "float32")  # type: ignore[misc]
                return ops.sum(changed * factors), changed

            return self.engine.ops.differentiate(total, given)

        # A program for each loss and one for each change, not one for each pair.
        given = [ops.convert_to_tensor(np.asarray(outputs, "float32"))]
        loss = self._program(("derivative", id(objective), num), by_loss)
        if change is None:
            return np.asarray(loss(given, labels, weights)[0][0], "float64")
        pulled = self._program(("change", id(change)), by_change)
        _, changed = pulled(given, ops.zeros(given[0].shape))
        return np.asarray(pulled(given, loss([changed], labels, weights)[0][0])[0][0], "float64")

    def of_frozen(self, piece: Piece, objective: Objective, i: int, *, training: bool) -> np.ndarray:
        """Return the gradient of the sum of the rows' losses by one of the model's values that are not trained."""
        num = len(piece.called.inputs[0])

        def run(params: list, buffers: list, chosen: list, batch: Tree) -> tuple:
            def loss(chosen: list) -> tuple:
                with self._scope(params, [*buffers[:i], *chosen, *buffers[i + 1 :]]):
                    terms = checked(read(objective(self.model, batch, training), {}).terms, num)
                    total = sum((ops.sum(_by_row(term, num)[0]) for term in terms.values()), ops.zeros(()))
                return total, total

            return self.engine.ops.differentiate(loss, chosen)

        program = self._program(("frozen", training, id(objective), num, i), run)
        called = piece.called
        chosen = [ops.convert_to_tensor(called.buffers[i])]
        (grad,), _ = program(called.params, called.buffers, chosen, self.batch(piece))
        return np.asarray(grad, "float64")

    def pulled(self, piece: Piece, chosen: list[np.ndarray], *, training: bool) -> np.ndarray:
        """Return the gradient of the sum of the outputs, each number times the one that is chosen for it, flat."""

        def run(params: list, buffers: list, inputs: list, chosen: list) -> tuple:
            def total(params: list) -> tuple:
                with self._scope(params, buffers):
                    outputs = tree.leaves(self.model(self._packed(inputs), training=training))
                parts = [ops.sum(ops.cast(o, "float32") * c) for o, c in zip(outputs, chosen, strict=True)]
                return sum(parts, ops.zeros(())), ops.zeros(())

            return self.engine.ops.differentiate(total, params)

        program = self._program(("pulled", training, len(piece.called.inputs[0])), run)
        params = [ops.convert_to_tensor(value) for value in piece.called.params]
        given = [np.asarray(self._scale * leaf, "float32") for leaf in chosen]
        grads, _ = program(params, piece.called.buffers, piece.called.inputs, given)
        return self.flat([np.asarray(grad) for grad in grads]) / self._scale

    def _variables(self) -> list:
        return self.model.trainable_variables

    def _penalty(self) -> Tensor:
        return sum((ops.sum(loss) for loss in self.model.losses), ops.zeros(()))

    def _packed(self, inputs: list) -> Tree:
        leaves = iter(inputs)
        return tree.map_leaves(lambda _: next(leaves), self.data[0])

    def _scope(self, params: list, buffers: list) -> keras.StatelessScope:
        held = [*zip(self._variables(), params, strict=True)]
        held += [*zip(self.model.non_trainable_variables, buffers, strict=True)]
        return keras.StatelessScope(held, collect_losses=True)

    def _after(self, scope: keras.StatelessScope, buffers: list) -> list:
        found = [scope.get_current_value(v) for v in self.model.non_trainable_variables]
        return [old if new is None else new for new, old in zip(found, buffers, strict=True)]

    def _program(self, key: Any, function: Callable, kept: dict | None = None) -> Any:
        """Return the traced function of this key, with what its first trace found."""
        if key not in self._programs:
            traced = self.engine.programs.traced(function)
            self._programs[key] = traced if kept is None else (traced, kept)
        return self._programs[key]


def _by_row(term: Term, num: int) -> tuple[Tensor, Tensor]:
    """Return (values times weights, weights) of every row, both (rows,); a loss of one number is its first row's."""
    if isinstance(term, Whole):
        first = ops.cast(ops.arange(num) == 0, term.values.dtype)
        return first * term.values, first
    weights = ops.ones_like(term.values) if term.weights is None else ops.cast(term.weights, term.values.dtype)
    weights = ops.reshape(weights, tuple(weights.shape) + (1,) * (len(term.values.shape) - len(weights.shape)))
    weights = ops.broadcast_to(weights, term.values.shape)
    values = ops.cast(ops.where(weights == 0, ops.zeros_like(term.values), term.values) * weights, "float32")
    weights = ops.cast(weights, "float32")
    return ops.sum(ops.reshape(values, (num, -1)), axis=1), ops.sum(ops.reshape(weights, (num, -1)), axis=1)
