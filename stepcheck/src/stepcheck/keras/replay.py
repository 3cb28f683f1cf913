"""Keras behind the port of the judge: a model as a function of recorded values."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any

import keras
import numpy as np
from keras import ops

from stepcheck import tree
from stepcheck.errors import attempt
from stepcheck.keras import families
from stepcheck.keras.meaning import LossObjective, Pulled, by_output, is_masked, tensors
from stepcheck.keras.optimizers import numbers_of
from stepcheck.port import ByPass, OfOutput, Port, Terms
from stepcheck.trace.log import Applied, Called, Flags, Line, Log, Values
from stepcheck.trace.windows import PAD, Piece
from stepcheck.tree import Tensor, Tree
from stepcheck.user_code.source import line_of_loss
from wholestep.engines import choose
from wholestep.model import Mean, Objective, Reading, Term, Whole, checked, mask_of, read
from wholestep.program import ProgramCache

_FEW, _FEW_ROWS, _SAME = (
    3,
    16,
    1e-3,
)  # passes, and rows, by which it is seen that a loss is one of rows
_PULLED, _BY_WEIGHT = Pulled(), "mean_with_sample_weight"
_OF_LOSSES = ProgramCache(
    128
)  # the derivatives of Keras' losses, for all replays: a search tries the same ones anew


class Replay(Port):
    """A Keras model as a function of recorded values; its methods are those of the port."""

    losses, numbers_of = families, staticmethod(numbers_of)
    most_shapes = 6  # programs for each shape take a compiler seconds

    def __init__(
        self, model: keras.Model, data: tuple[Tree, ...], *, by_pass: ByPass | None = None
    ):
        super().__init__(model, data, by_pass=by_pass)
        layers = model._flatten_layers()
        dtypes = [layer.compute_dtype for layer in layers]
        self.trained = trained_in(model)
        self._measure([(v.path, tuple(v.shape)) for v in model.trainable_variables], dtypes)
        self._others = untrained(model)
        self.names_of_others = [v.path for v in self._others]
        self.num_recurrent = len(self._others) - len(model.non_trainable_variables)
        self.are_seeds = ["seed" in name.split("/")[-1] for name in self.names_of_others]
        self.is_masked = is_masked(model)
        self.is_sparse = any(isinstance(layer, keras.layers.Embedding) for layer in layers)
        self._ops, self._traced = (engine := choose()).ops, engine.programs.traced
        self._programs: dict[Any, Any] = {}
        # Small gradients are zeros in float16: they are computed of a larger loss, and divided.
        self._scale = 1024.0 if "float16" in dtypes else 1.0

    @staticmethod
    def engine() -> str:
        return str(keras.backend.backend())

    @staticmethod
    @contextmanager
    def as_then(model: keras.Model, log: Log) -> Iterator[None]:
        trained = next((each.trained for each in reversed(log.called) if each.is_whole), ())
        then = log.flags.get(trained, []) if trained != trained_in(model) else []
        now = flags(model) if then else []
        try:
            _set(then)
            yield
        finally:
            _set(now)

    def line_of_loss(self, called: Called, *, is_penalty: bool = False) -> Line | None:
        return line_of_loss(called.line, is_penalty=is_penalty)

    def objective(self, loss: Any, *, is_masked: bool = True) -> LossObjective:
        return LossObjective(loss, is_masked=is_masked)

    def unmasked(self, objective: Any, pieces: list[Piece]) -> Any:
        loss: Any = getattr(objective, "loss", None)
        labels, weight = self.data[1], self.data[2]
        is_own = (
            not isinstance(loss, families.Function)
            or loss.has_own_weights
            or loss.reduction == _BY_WEIGHT
        )
        reductions = (_BY_WEIGHT, *("sum_over_batch_size", "mean") * (weight is None))
        is_known = (
            type(objective) is LossObjective
            and is_own
            and getattr(loss, "reduction", "") in reductions
        )
        if not (
            self.is_masked and is_known and self.by_pass is None and isinstance(labels, np.ndarray)
        ):
            return objective
        known = [piece for piece in pieces if piece.is_known and piece.called.is_whole]
        masks = [(piece.rows, mask) for piece in known if (mask := self._mask(piece)) is not None]
        if masks:
            made, used = np.zeros(labels.shape[:2], "float32"), np.zeros(len(labels), bool)
            for rows, mask in masks:
                if mask.ndim != 2 or made.ndim != 2 or mask.shape[1] > made.shape[1]:
                    return objective
                own = rows[rows != PAD]
                made[own, : mask.shape[1]], used[own] = mask[rows != PAD], True
            if weight is None:
                loss = copy(loss)
                loss.reduction, self.data = _BY_WEIGHT, (self.data[0], labels, made)
            elif (w := np.asarray(weight)).shape != made.shape or np.any(
                w[used] * (made[used] == 0)
            ):
                return objective
        self.is_masked = False
        return LossObjective(loss, is_masked=False)

    def settle(self, objective: Any, pieces: list[Piece]) -> None:
        loss: Any = getattr(objective, "loss", None)
        if not isinstance(loss, families.Function) or loss.is_coupled:
            return
        known = [
            piece
            for piece in pieces
            if piece.is_known and len(piece.called.outputs) == 1 < len(piece.rows)
        ]
        loss.is_coupled = any(
            _is_of_all(loss, p.called.outputs[0], *self.batch(p)[1:]) for p in known[:_FEW]
        )

    def by_output(self, objective: Any) -> list[OfOutput]:
        return [] if self.by_pass else by_output(self.model, objective, self.data)

    def _mask(self, piece: Piece) -> np.ndarray | None:
        """Return the mask of the output of a pass; None if it has none."""

        def run(params: list, buffers: list, inputs: list) -> Tensor:
            with self._scope(params, buffers):
                mask = mask_of(
                    tree.leaves(self.model(self._packed(inputs), training=False))[self.output]
                )
            return ops.zeros(()) if mask is None else mask

        found = np.asarray(
            self._program(("mask", self.output), run)(
                piece.called.params, piece.called.buffers, piece.called.inputs
            )
        )
        return found if found.ndim else None

    def values(self) -> Values | None:
        return values(self.model)

    def beside(self, i: int) -> list[int]:
        variables = self.model.trainable_variables
        homes = [
            {id(v) for v in layer._trainable_variables} for layer in self.model._flatten_layers()
        ]
        beside = set[int]().union(*(home for home in homes if id(variables[i]) in home))
        return [j for j, v in enumerate(variables) if id(v) in beside]

    def frozen(self) -> list[int]:
        own = {id(v) for layer in self.model._flatten_layers() for v in layer._trainable_variables}
        return [i for i, v in enumerate(self._others) if id(v) in own]

    def stepped(
        self, optimizer: Any, steps: list[tuple[Applied, list[np.ndarray | None]]]
    ) -> list | None:
        config, _ = attempt(
            optimizer.get_config
        )  # an error: of a step of JAX that was ended halfway
        if not config or "inner_optimizer" in config or config.get("gradient_accumulation_steps"):
            return None
        other, _ = attempt(lambda: type(optimizer).from_config(config))
        if other is None:  # an error of an optimizer with arguments of its own
            return None
        other.loss_scale_factor = None  # the gradients are divided already
        if any(
            a.optimizer != id(optimizer) or not a.is_whole or any(g is None for g in grads)
            for a, grads in steps
        ):
            return None
        variables = [keras.Variable(value, name="replayed") for value in steps[0][0].params]
        other.build(variables)
        slots = steps[0][0].slots
        if len(slots) == len(
            other.variables
        ):  # else the optimizer was not built: its state is as it begins
            for variable, value in zip(other.variables, slots, strict=True):
                variable.assign(value)
        for applied, grads in steps:
            for variable, value in zip(variables, applied.params, strict=True):
                variable.assign(value)
            if not callable(getattr(other, "_learning_rate", None)):
                other.learning_rate = applied.learning_rate
            tensors = [
                ops.convert_to_tensor(g, dtype=v.dtype)
                for g, v in zip(grads, variables, strict=True)
            ]
            other.apply(tensors, variables)
        return [np.array(ops.convert_to_numpy(v)) for v in variables]

    def outputs(self, piece: Piece, *, training: bool) -> tuple[list[np.ndarray], list[np.ndarray]]:
        def run(params: list, buffers: list, inputs: list) -> tuple:
            scope = self._scope(params, buffers)
            with scope:
                given = [scope.get_current_value(v) for v in self.model.trainable_variables]
                outputs = self.model(self._packed(inputs), training=training)
                self.has_losses |= bool(self.model.losses)
                after = [scope.get_current_value(v) for v in self.model.trainable_variables]
                self.moves_weights |= any(a is not b for a, b in zip(given, after, strict=True))
                found = tensors(outputs)
            return found, self._after(scope, buffers)

        program = self._program(("outputs", training), run)
        outputs, buffers = program(piece.called.params, piece.called.buffers, piece.called.inputs)
        return [np.asarray(leaf) for leaf in outputs], [np.asarray(leaf) for leaf in buffers]

    def terms(
        self,
        piece: Piece,
        objective: Any,
        batch: Any,
        *,
        training: bool,
        is_by_outputs: bool = False,
    ) -> Terms:
        num = len(piece.called.inputs[0])
        found: dict = {}

        def summed(outcome: Reading) -> list[tuple[Tensor, Tensor]]:
            terms = checked(outcome.terms, num)
            is_mean = outcome.is_complete  # a custom `compute_loss` returns the mean of its batch
            found["terms"] = [
                (float(t.coefficient), is_mean or isinstance(t, Mean)) for t in terms.values()
            ]
            found["names"] = tuple(map(str, terms))
            return [_by_row(term, num) for term in terms.values()]

        def run(params: list, buffers: list, batch: Any) -> tuple:
            with self._scope(params, buffers):
                outcome = read(objective(self.model, batch, training), {})
                sums, penalty = summed(outcome), self._penalty(outcome)
            return ops.stack([s[0] for s in sums]), ops.stack([s[1] for s in sums]), penalty

        if is_by_outputs and not self.has_losses:
            term = objective.of(
                batch[1], ops.convert_to_tensor(piece.called.outputs[0]), *batch[2:]
            )
            parts = summed(read(term, {}))
            values, weights, penalty = *zip(*parts, strict=True), 0.0
        else:
            program, found = self._program(("terms", training, id(objective), num), run, found)
            values, weights, penalty = program(piece.called.params, piece.called.buffers, batch)
        coefficients, divided = (np.array(each) for each in zip(*found["terms"], strict=True))
        return Terms(
            np.array(values),
            np.array(weights),
            coefficients,
            divided,
            float(penalty),
            found["names"],
        )

    def gradient(
        self,
        piece: Piece,
        objective: Objective,
        batch: Any,
        factors: np.ndarray,
        *,
        training: bool,
        penalty: float = 0.0,
    ) -> np.ndarray:
        num = len(piece.called.inputs[0])

        def run(params: list, buffers: list, batch: Any, factors: Tensor, penalty: Tensor) -> tuple:
            def loss(params: list) -> tuple:
                with self._scope(params, buffers):
                    outcome = read(objective(self.model, batch, training), {})
                    sums, own = _sums(outcome, num), self._penalty(outcome)
                total = (
                    ops.sum(ops.where(factors == 0, ops.zeros_like(sums), sums) * factors)
                    + penalty * own
                )
                return total, own

            return self._ops.differentiate(loss, params)

        program, _ = self._program(("gradient", training, id(objective), num), run, {})
        given = np.asarray(self._scale * factors, "float32"), np.float32(self._scale * penalty)
        params = [ops.convert_to_tensor(value) for value in piece.called.params]
        grads, _ = program(params, piece.called.buffers, batch, *given)
        return self.flat([np.asarray(grad) for grad in grads]) / self._scale

    def derivative(
        self,
        objective: Any,
        outputs: np.ndarray,
        labels: Tree,
        weights: Tree = None,
        change: Callable | None = None,
        *,
        is_once: bool = False,
    ) -> np.ndarray:
        # A program for each loss and one for each change, not one for each pair.
        given = [ops.convert_to_tensor(np.asarray(outputs, "float32"))]
        loss = self._by_loss(objective, len(outputs), is_once=is_once)
        if change is None:
            return np.asarray(loss(given, labels, weights)[0][0], "float64")
        pulled = self._program(("change", id(change)), partial(_by_change, self._ops, change))
        _, changed = pulled(given, ops.zeros(given[0].shape, "float32"))
        return np.asarray(pulled(given, loss([changed], labels, weights)[0][0])[0][0], "float64")

    def _by_loss(self, objective: Any, num: int, *, is_once: bool) -> Callable:
        """Return the function whose first result is the derivative by outputs; equal Keras losses share it."""
        function, key = partial(_by_loss, self._ops, objective, num), _key_of(objective)
        if key is None:
            return (
                function if is_once else self._program(("derivative", id(objective), num), function)
            )
        if (*key, num) not in _OF_LOSSES:
            _OF_LOSSES[*key, num] = self._traced(function)
        return _OF_LOSSES[*key, num]

    def of_frozen(
        self, piece: Piece, objective: Objective, i: int, *, training: bool
    ) -> np.ndarray:
        num = len(piece.called.inputs[0])

        def run(params: list, buffers: list, chosen: list, batch: Any) -> tuple:
            def loss(chosen: list) -> tuple:
                with self._scope(params, [*buffers[:i], *chosen, *buffers[i + 1 :]]):
                    total = ops.sum(_sums(read(objective(self.model, batch, training), {}), num))
                return total, total

            return self._ops.differentiate(loss, chosen)

        program = self._program(("frozen", training, id(objective), num, i), run)
        called = piece.called
        chosen = [ops.convert_to_tensor(called.buffers[i])]
        (grad,), _ = program(called.params, called.buffers, chosen, self.batch(piece))
        return np.asarray(grad, "float64")

    def pulled(self, piece: Piece, chosen: list[np.ndarray], *, training: bool) -> np.ndarray:
        batch = self._packed(piece.called.inputs), [np.asarray(each, "float32") for each in chosen]
        return self.gradient(
            piece, _PULLED, batch, np.ones((1, len(piece.called.inputs[0]))), training=training
        )

    def _penalty(self, outcome: Reading) -> Tensor:
        losses = (
            [] if outcome.is_complete else self.model.losses
        )  # which a custom `compute_loss` has added
        return sum(
            (ops.cast(ops.sum(loss), "float32") for loss in losses), ops.zeros((), "float32")
        )

    def _scope(self, params: list, buffers: list) -> keras.StatelessScope:
        held = [*zip(self.model.trainable_variables, params, strict=True)]
        held += [*zip(self._others, buffers, strict=True)]
        return keras.StatelessScope(held, collect_losses=True)

    def _after(self, scope: keras.StatelessScope, buffers: list) -> list:
        found = [scope.get_current_value(v) for v in self._others]
        return [old if new is None else new for new, old in zip(found, buffers, strict=True)]

    def _program(self, key: Any, function: Callable, kept: dict | None = None) -> Any:
        """Return the traced function of this key, with the values kept by its first trace."""
        if key not in self._programs:
            traced = self._traced(function)
            self._programs[key] = traced if kept is None else (traced, kept)
        return self._programs[key]


def _key_of(objective: Any) -> tuple | None:
    """Return the key of a Keras loss; None for other objectives."""
    loss: Any = getattr(objective, "loss", None)
    kind = type(loss)
    is_known = (
        kind.__module__.startswith("keras.src.") and kind.__name__ != "LossFunctionWrapper"
    )  # of any function
    if type(objective) is not LossObjective or not is_known:
        return None
    traced = keras.config.epsilon(), keras.config.floatx()
    return (
        kind,
        objective.is_masked,
        str(loss.dtype),
        repr(sorted(loss.get_config().items())),
        *traced,
    )


def _by_loss(
    operations: Any, objective: Any, num: int, given: list, labels: Tree, weights: Tree
) -> tuple:
    def total(given: list) -> tuple:
        return ops.sum(_by_row(objective.of(labels, given[0], weights), num)[0]), given[0]

    return operations.differentiate(total, given)


def _by_change(operations: Any, change: Callable, given: list, factors: Tensor) -> tuple:
    def total(given: list) -> tuple:
        changed = ops.cast(change(given[0]), "float32")
        return ops.sum(changed * factors), changed

    return operations.differentiate(total, given)


def _sums(outcome: Reading, num: int) -> Tensor:
    return ops.stack([_by_row(term, num)[0] for term in checked(outcome.terms, num).values()])


def _by_row(term: Term, num: int) -> tuple[Tensor, Tensor]:
    """Return (values times weights, weights) of every row, both (rows,); a loss of one number is its first row's."""
    if isinstance(term, Whole):
        first = ops.cast(ops.arange(num) == 0, term.values.dtype)
        return first * term.values, first
    values, weights = term.values, term.weights
    weights = ops.ones_like(values) if weights is None else ops.cast(weights, values.dtype)
    missing = len(values.shape) - len(weights.shape)
    weights = ops.reshape(weights, tuple(weights.shape) + (1,) * missing)
    weights = ops.broadcast_to(weights, values.shape)
    values = ops.where(weights == 0, ops.zeros_like(values), values) * weights
    by_row = (ops.reshape(ops.cast(each, "float32"), (num, -1)) for each in (values, weights))
    values, weights = (ops.sum(each, axis=1) for each in by_row)
    return values, weights


def untrained(model: keras.Model) -> list[keras.Variable]:
    """Return the variables that no gradient moves: the model's own list, and the states of its recurrent layers."""
    stateful = [layer for layer in model._flatten_layers() if getattr(layer, "stateful", False)]
    states = keras.tree.flatten([getattr(layer, "states", None) for layer in stateful])
    recurrent = (state for state in states if isinstance(state, keras.Variable))
    return [*model.non_trainable_variables, *recurrent]


def _is_of_all(loss: Any, outputs: np.ndarray, labels: Tree, weights: Tree = None) -> bool:
    """Whether a loss gives one number for a batch that is neither the mean nor the sum of its rows' losses."""
    some = np.unique(np.linspace(0, len(outputs) - 1, _FEW_ROWS).astype(int))

    def number_of(rows: np.ndarray) -> np.ndarray:
        own = tree.map_leaves(lambda leaf: np.asarray(leaf)[rows], labels)
        return np.asarray(ops.convert_to_numpy(loss.whole(own, outputs[rows])), "float64")

    number = number_of(some)
    if number.ndim:
        return False
    alone = np.array([float(number_of(some[i : i + 1])) for i in range(len(some))])
    own = np.ones(len(some)) if weights is None else np.asarray(weights, "float64")[some]
    if own.shape != alone.shape or not own.sum():
        return False
    near = _SAME * np.sum(np.abs(np.where(own == 0, 0.0, own * alone)))
    total = np.sum(np.where(own == 0, 0.0, own * alone))
    return not any(abs(number * divisor - total) <= near for divisor in (own.sum(), 1.0))


def trained_in(model: keras.Model) -> tuple[int, ...]:
    """Return the identities of the variables that are set to be trained."""
    return tuple(map(id, model.trainable_variables))


def flags(model: keras.Model) -> Flags:
    """Return every layer and variable with whether it is set to be trained, a model before its parts."""
    layers = [(layer, layer.trainable) for layer in model._flatten_layers()]
    return [*layers, *((variable, variable.trainable) for variable in model.variables)]


def _set(wanted: Flags) -> None:
    for each, is_trained in wanted:
        if each.trainable != is_trained:
            each.trainable = is_trained


def values(model: keras.Model) -> Values | None:
    """Return copies of a model's values; None in a trace, or if a step of JAX has taken them (`donate_argnums`)."""
    groups = model.trainable_variables, untrained(model)
    try:
        return Values(
            *([np.array(keras.ops.convert_to_numpy(v)) for v in group] for group in groups)
        )
    except (TypeError, RuntimeError, AttributeError):  # raised by Keras, JAX and TensorFlow
        return None


def is_outdated_in(model: keras.Model) -> bool:
    """Whether `fit` would train other variables than the trainable ones, as it was not compiled again."""
    optimizer = vars(model).get("optimizer")
    if vars(model).get("train_function") is None or not getattr(optimizer, "built", False):
        return False
    return {id(v) for v in optimizer._trainable_variables} != {
        id(v) for v in model.trainable_variables
    }
