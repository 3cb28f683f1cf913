"""Keras behind the port of the judge: a model as a function of recorded values."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import keras
import numpy as np
from keras import ops

from stepcheck import tree
from stepcheck.keras import families
from stepcheck.keras.meaning import LossObjective, is_masked, tensors
from stepcheck.keras.optimizers import numbers_of
from stepcheck.keras.programs import (
    Kind,
    at_outputs,
    by_term,
    changed,
    counted,
    kinds_of,
    traced,
)
from stepcheck.keras.state import flags, set_flags, trained_in, untrained, values
from stepcheck.keras.steps import at_rate, rules, stepped
from stepcheck.port import ByPass, Port, Terms
from stepcheck.steps import StepRule
from stepcheck.trace.log import Applied, Called, Line, Log, Values
from stepcheck.trace.measure import distance
from stepcheck.trace.windows import PAD, Piece, packed
from stepcheck.tree import Tensor, Tree
from stepcheck.user_code.source import line_of_loss
from wholestep.engines import choose
from wholestep.model import Objective, Reading, mask_of, read, unpack

_FEW, _FEW_ROWS = 3, 16  # passes, and rows, that show whether a loss is one of rows
_SAME = 1e-3
_BY_WEIGHT = "mean_with_sample_weight"


class Replay(Port):
    """A Keras model as a function of recorded values; its methods are those of the
    port.
    """

    losses, numbers_of = families, staticmethod(numbers_of)
    most_shapes = 6  # programs for each shape take a compiler seconds

    def __init__(
        self,
        model: keras.Model,
        data: tuple[Tree, ...],
        *,
        by_pass: ByPass | None = None,
    ):
        super().__init__(model, data, by_pass=by_pass)
        layers = model._flatten_layers()
        dtypes = [layer.compute_dtype for layer in layers]
        self.trained = trained_in(model)
        self._measure(
            [(v.path, tuple(v.shape)) for v in model.trainable_variables], dtypes
        )
        self._others = untrained(model)
        self.names_of_others = [v.path for v in self._others]
        self.num_recurrent = len(self._others) - len(model.non_trainable_variables)
        self.are_seeds = [
            "seed" in name.split("/")[-1] for name in self.names_of_others
        ]
        self.is_masked = is_masked(model)
        self.is_sparse = any(
            isinstance(layer, keras.layers.Embedding) for layer in layers
        )
        self._ops = choose().ops
        self._programs: dict[Any, Any] = {}
        self._is_plain = (
            False  # one tensor for an output, of which Keras knows no logits
        )
        self._alike: set[tuple[int, bool]] = (
            set()
        )  # (pass, mode) with the outputs of the record
        # Small gradients are zeros in float16: they are computed of a larger loss, and divided.
        self._scale = 1024.0 if "float16" in dtypes else 1.0

    @staticmethod
    def engine() -> str:
        return str(keras.backend.backend())

    @staticmethod
    @contextmanager
    def as_then(model: keras.Model, log: Log) -> Iterator[None]:
        trained = next(
            (each.trained for each in reversed(log.called) if each.is_whole), ()
        )
        then = log.flags.get(trained, []) if trained != trained_in(model) else []
        now = flags(model) if then else []
        try:
            set_flags(then)
            yield
        finally:
            set_flags(now)

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
            self.is_masked
            and is_known
            and self.by_pass is None
            and isinstance(labels, np.ndarray)
        ):
            return objective
        known = [piece for piece in pieces if piece.is_known and piece.called.is_whole]
        masks = [
            (piece.rows, mask)
            for piece in known
            if (mask := self._mask(piece)) is not None
        ]
        if masks:
            made, used = (
                np.zeros(labels.shape[:2], "float32"),
                np.zeros(len(labels), bool),
            )
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
            _is_of_all(loss, p.called.outputs[0], *self.batch(p)[1:])
            for p in known[:_FEW]
        )

    def _mask(self, piece: Piece) -> np.ndarray | None:
        """Return the mask of the output of a pass; None if it has none."""

        def run(params: list, buffers: list, inputs: list) -> Tensor:
            with self._scope(params, buffers):
                mask = mask_of(
                    tree.leaves(self.model(self._packed(inputs), training=False))[0]
                )
            return ops.zeros(()) if mask is None else mask

        found = np.asarray(
            self._program(("mask",), run)(
                piece.called.params, piece.called.buffers, piece.called.inputs
            )
        )
        return found if found.ndim else None

    def values(self) -> Values | None:
        return values(self.model)

    def frozen(self) -> list[int]:
        own = {
            id(v)
            for layer in self.model._flatten_layers()
            for v in layer._trainable_variables
        }
        return [i for i, v in enumerate(self._others) if id(v) in own]

    def stepped(
        self, optimizer: Any, steps: list[tuple[Applied, list[np.ndarray | None]]]
    ) -> list | None:
        return stepped(self.model, optimizer, steps)

    def rules(self, optimizer: Any) -> tuple[StepRule | None, ...]:
        variables = self.model.trainable_variables
        rate = float(ops.convert_to_numpy(optimizer.learning_rate))
        found = rules(optimizer, variables, [None] * len(variables))
        return at_rate(found, rate)

    def outputs(
        self, piece: Piece, *, training: bool
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        own = piece.called.outputs
        zeros = [np.zeros(leaf.shape, "float32") for leaf in own]
        found, after, *_ = self._pass(piece, zeros, training=training)
        outputs = [np.asarray(leaf) for leaf in found]
        if distance(outputs, own) <= self.tolerance.fits:
            self._alike.add((piece.called.order, training))
        return outputs, [np.asarray(leaf) for leaf in after]

    def _pass(
        self,
        piece: Piece,
        factors: list[np.ndarray],
        penalty: float = 0.0,
        *,
        training: bool,
    ) -> tuple:
        """Run a pass forward and back.

        Args:
            factors: of the outputs, leaf by leaf.
            penalty: the factor of the model's own losses.

        Returns:
            The outputs, the other values afterwards, the sum of the model's own losses,
            and the gradient of outputs and losses times their factors.
        """
        calls = getattr(piece.called.setting, "calls", 1)

        def run(
            params: list, buffers: list, inputs: list, factors: list, penalty: Tensor
        ) -> tuple:
            def total(params: list) -> tuple:
                with (scope := self._scope(params, buffers)):
                    outputs = self._forward(scope, inputs, calls, training=training)
                    own = self._penalty()
                pairs = zip(outputs, factors, strict=True)
                sums = [ops.sum(ops.cast(o, "float32") * factor) for o, factor in pairs]
                return sum(sums, penalty * own), (
                    outputs,
                    self._after(scope, buffers),
                    own,
                )

            found: Any
            grads, found = self._ops.differentiate(total, params)
            return *found, grads

        called = piece.called
        params = [ops.convert_to_tensor(value) for value in called.params]
        program = self._program(("pass", training, calls), run)
        return program(
            params, called.buffers, called.inputs, factors, np.float32(penalty)
        )

    def _forward(
        self, scope: keras.StatelessScope, inputs: list, calls: int, *, training: bool
    ) -> list[Tensor]:
        """Return the leaves of the outputs of one call, or of several one after
        another.
        """
        variables = self.model.trainable_variables
        before = [scope.get_current_value(v) for v in variables]
        found = []
        for x in self._calls(inputs, calls):
            outputs = self.model(x, training=training)
            self._is_plain = ops.is_tensor(outputs) and not hasattr(
                outputs, "_keras_logits"
            )
            found += tensors(outputs)
        after = [scope.get_current_value(v) for v in variables]
        self.has_losses |= bool(self.model.losses)
        self.moves_weights |= any(
            a is not b for a, b in zip(before, after, strict=True)
        )
        return found

    def _calls(self, inputs: list, calls: int) -> list[Tree]:
        """Return the inputs of each call."""
        if calls == 1:
            return [self._packed(inputs)]
        num, like = len(inputs) // calls, self.data[0]
        parts = [inputs[i * num : (i + 1) * num] for i in range(calls)]
        if len(like) != calls:
            return parts
        return [packed(own, nest) for own, nest in zip(parts, like, strict=True)]

    def _is_of_outputs(self, piece: Piece, objective: Any) -> bool:
        """Whether a loss can be computed at the model's one output, apart from the
        model.
        """
        is_one = len(piece.called.outputs) == 1 and self._is_plain
        is_masked = self.is_masked and getattr(objective, "is_masked", False)
        return is_one and isinstance(objective, LossObjective) and not is_masked

    def _output(self, piece: Piece, *, training: bool) -> tuple[Any, float]:
        """Return (the one output of a pass, the sum of the model's own losses)."""
        if (piece.called.order, training) in self._alike and not self.has_losses:
            return piece.called.outputs[0], 0.0
        zeros = np.zeros(piece.called.outputs[0].shape, "float32")
        (output,), _, own, _ = self._pass(piece, [zeros], training=training)
        return output, float(own)

    def terms(
        self,
        piece: Piece,
        objective: Any,
        batch: Any,
        *,
        training: bool,
        is_by_outputs: bool = False,
    ) -> Terms:
        num, called = len(piece.called.inputs[0]), piece.called
        if is_by_outputs and not self.has_losses:
            return self._terms_at(objective, called.outputs[0], batch, 0.0)
        if self._is_of_outputs(piece, objective):
            output, penalty = self._output(piece, training=training)
            return self._terms_at(objective, output, batch, penalty)
        kinds: list[Kind] = []

        def run(params: list, buffers: list, batch: Any) -> tuple:
            with self._scope(params, buffers):
                outcome = read(objective(self.model, batch, training), {})
                own = self._penalty(outcome)
            kinds[:] = kinds_of(outcome)
            return *by_term(outcome, num), own

        program, kinds = self._program(
            ("terms", training, id(objective), num), run, kinds
        )
        values, weights, own = program(called.params, called.buffers, batch)
        return _terms(kinds, values, weights, float(own))

    def try_out(self, piece: Piece, objective: Objective) -> None:
        """Call an objective on the shapes of a pass alone."""

        def run(params: list, buffers: list, batch: Any) -> list[Tensor]:
            with self._scope(params, buffers):
                outcome = read(objective(self.model, batch, True), {})
            return [*by_term(outcome, len(piece.called.inputs[0]))]

        called = piece.called
        choose().programs.shapes(run, called.params, called.buffers, self.batch(piece))

    def _terms_at(
        self, objective: Any, output: Any, batch: Any, penalty: float
    ) -> Terms:
        _, labels, weights = unpack(batch)
        function, kinds = at_outputs(objective, len(output))
        ones = np.ones((1, len(output)), "float32")
        values, own, _ = function(ops.convert_to_tensor(output), labels, weights, ones)
        return _terms(kinds, values, own, penalty)

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
        given = (
            np.asarray(self._scale * factors, "float32"),
            np.float32(self._scale * penalty),
        )
        if self._is_of_outputs(piece, objective):
            grads = self._by_outputs(piece, objective, batch, *given, training=training)
        else:
            grads = self._by_model(piece, objective, batch, *given, training=training)
        return self.flat([np.asarray(grad) for grad in grads]) / self._scale

    def _by_outputs(
        self,
        piece: Piece,
        objective: Any,
        batch: Any,
        factors: np.ndarray,
        penalty: Any,
        *,
        training: bool,
    ) -> list[Tensor]:
        """Return the gradient of values times factors by the derivative by the output."""
        output, _ = self._output(piece, training=training)
        _, labels, weights = unpack(batch)
        function, _ = at_outputs(objective, len(output))
        *_, derivative = function(
            ops.convert_to_tensor(output), labels, weights, factors
        )
        pulled = ops.cast(derivative, "float32")
        return self._pass(piece, [pulled], penalty, training=training)[-1]

    def _by_model(
        self,
        piece: Piece,
        objective: Any,
        batch: Any,
        factors: np.ndarray,
        penalty: Any,
        *,
        training: bool,
    ) -> list[Tensor]:
        """Return the gradient of the values times factors of an objective that calls
        the model.
        """
        num = len(piece.called.inputs[0])

        def run(
            params: list, buffers: list, batch: Any, factors: Tensor, penalty: Tensor
        ) -> tuple:
            def total(params: list) -> tuple:
                with self._scope(params, buffers):
                    outcome = read(objective(self.model, batch, training), {})
                    values, own = by_term(outcome, num)[0], self._penalty(outcome)
                return counted(values, factors) + penalty * own, own

            return self._ops.differentiate(total, params)

        program = self._program(("gradient", training, id(objective), num), run)
        params = [ops.convert_to_tensor(value) for value in piece.called.params]
        grads, _ = program(params, piece.called.buffers, batch, factors, penalty)
        return grads

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
        given = ops.convert_to_tensor(np.asarray(outputs, "float32"))
        loss, _ = at_outputs(objective, len(outputs), is_once=is_once)
        ones = np.ones((1, len(outputs)), "float32")
        if change is None:
            return np.asarray(loss(given, labels, weights, ones)[-1], "float64")
        pulled = self._program(("change", id(change)), changed(change))
        _, made = pulled(given, ops.zeros(given.shape, "float32"))
        derivative = loss(made, labels, weights, ones)[-1]
        return np.asarray(pulled(given, derivative)[0], "float64")

    def pulled(
        self, piece: Piece, chosen: list[np.ndarray], *, training: bool
    ) -> np.ndarray:
        factors = [np.asarray(self._scale * each, "float32") for each in chosen]
        *_, grads = self._pass(piece, factors, training=training)
        return self.flat([np.asarray(grad) for grad in grads]) / self._scale

    def batch(self, piece: Piece, **others: Any) -> Any:
        found, setting = super().batch(piece, **others), piece.called.setting
        return found if setting is None else (*found, setting.beside)

    def _penalty(self, outcome: Reading | None = None) -> Tensor:
        is_complete = outcome is not None and outcome.is_complete
        losses = (
            [] if is_complete else self.model.losses
        )  # which `compute_loss` has added
        sums = (ops.cast(ops.sum(loss), "float32") for loss in losses)
        return sum(sums, ops.zeros((), "float32"))

    def _scope(self, params: list, buffers: list) -> keras.StatelessScope:
        held = [*zip(self.model.trainable_variables, params, strict=True)]
        held += [*zip(self._others, buffers, strict=True)]
        return keras.StatelessScope(held, collect_losses=True)

    def _after(self, scope: keras.StatelessScope, buffers: list) -> list:
        found = [scope.get_current_value(v) for v in self._others]
        return [
            old if new is None else new for new, old in zip(found, buffers, strict=True)
        ]

    def _program(self, key: Any, function: Callable, kept: Any = None) -> Any:
        """Return the traced function of this key, with the values kept by its first
        trace.
        """
        if key not in self._programs:
            made = traced(function)
            self._programs[key] = made if kept is None else (made, kept)
        return self._programs[key]


def _terms(kinds: list[Kind], values: Any, weights: Any, penalty: float) -> Terms:
    names, coefficients, divided = zip(*kinds, strict=True)
    counted, are_divided = np.array(coefficients), np.array(divided)
    return Terms(
        np.array(values), np.array(weights), counted, are_divided, penalty, names
    )


def _is_of_all(
    loss: Any, outputs: np.ndarray, labels: Tree, weights: Tree = None
) -> bool:
    """Whether a loss's number for a batch is neither the mean nor the sum of its rows'."""
    some = np.unique(np.linspace(0, len(outputs) - 1, _FEW_ROWS).astype(int))

    def number_of(rows: np.ndarray) -> np.ndarray:
        own = tree.map_leaves(lambda leaf: np.asarray(leaf)[rows], labels)
        return np.asarray(
            ops.convert_to_numpy(loss.whole(own, outputs[rows])), "float64"
        )

    number = number_of(some)
    if number.ndim:
        return False
    alone = np.array([float(number_of(some[i : i + 1])) for i in range(len(some))])
    own = (
        np.ones(len(some)) if weights is None else np.asarray(weights, "float64")[some]
    )
    if own.shape != alone.shape or not own.sum():
        return False
    near = _SAME * np.sum(np.abs(np.where(own == 0, 0.0, own * alone)))
    total = np.sum(np.where(own == 0, 0.0, own * alone))
    return not any(
        abs(number * divisor - total) <= near for divisor in (own.sum(), 1.0)
    )
