"""Keras behind the port of the judge: a model as a function of recorded values."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import keras
import numpy as np
from keras import ops

from stepcheck import tree
from stepcheck.keras import families
from stepcheck.keras import steps as own_steps
from stepcheck.keras.meaning import LossObjective, outputs, tensors
from stepcheck.keras.objective import OfModel
from stepcheck.keras.programs import at_outputs, by_term, counted, traced
from stepcheck.keras.state import (
    flags,
    set_flags,
    trained_in,
    untrained,
    values,
)
from stepcheck.port import ByPass, Port, Terms
from stepcheck.steps import StepRule
from stepcheck.trace.log import Called, Line, Log, Values
from stepcheck.trace.windows import Piece, packed
from stepcheck.tree import Tensor, Tree
from stepcheck.user_code.source import line_of_loss
from wholestep.engines import choose
from wholestep.model import ObjectiveOutput, ScalarTerm, mask_of, read, unpack

_objective = lru_cache(LossObjective)  # so that a program of it is found again
_FEW = 3  # passes that show whether a loss is one of rows


class Replay(Port):
    """A Keras model as a function of recorded values; its methods are those of the
    port.
    """

    losses = families
    most_shapes = 6  # programs for each shape take a compiler seconds
    numbers_of = staticmethod(own_steps.numbers_of)

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
        named = [(v.path, tuple(v.shape)) for v in model.trainable_variables]
        self._measure(named, dtypes)
        self._others = untrained(model)
        self.names_of_others = [v.path for v in self._others]
        self.num_recurrent = len(self._others) - len(
            model.non_trainable_variables
        )
        self.are_seeds = ["seed" in v.path.split("/")[-1] for v in self._others]
        self.is_sparse = any(
            isinstance(each, keras.layers.Embedding) for each in layers
        )
        self._ops = choose().ops
        self._programs: dict[Any, Any] = {}
        self._penalties: dict[tuple[int, bool], float] = {}  # by (pass, mode)
        self._names: dict[int, tuple[str, ...]] = {}  # of terms, by objective
        self._is_plain = False  # one tensor, of which Keras knows no logits
        # Small gradients are zeros in float16: they are computed of a larger loss, and divided.
        self._scale = 1024.0 if "float16" in dtypes else 1.0

    @staticmethod
    def engine() -> str:
        return str(keras.backend.backend())

    @staticmethod
    @contextmanager
    def as_then(model: keras.Model, log: Log) -> Iterator[None]:
        whole = (each for each in reversed(log.called) if each.is_whole)
        trained = next((each.trained for each in whole), ())
        then = (
            log.flags.get(trained, []) if trained != trained_in(model) else []
        )
        now = flags(model) if then else []
        try:
            set_flags(then)
            yield
        finally:
            set_flags(now)

    def line_of_loss(
        self, called: Called, *, is_penalty: bool = False
    ) -> Line | None:
        return line_of_loss(called.line, is_penalty=is_penalty)

    def objective(self, loss: Any, *, is_masked: bool = True) -> LossObjective:
        return _objective(loss, is_masked=is_masked)

    def settle(self, objective: Any, pieces: list[Piece]) -> None:
        known = [p for p in pieces if p.is_known and p.called.is_whole]
        if isinstance(objective, OfModel):
            for piece in [p for p in known if p.called.setting][:1]:
                run = partial(self._read, objective, piece, True)
                given = (
                    piece.called.params,
                    piece.called.buffers,
                    self.batch(piece),
                )
                choose().programs.shapes(run, *given)
        loss: Any = getattr(objective, "loss", None)
        is_of_keras = type(loss).__module__.startswith("keras.")
        if not isinstance(objective, LossObjective) or is_of_keras:
            return
        like, kinds = outputs(self.model, self.data[0]), set()
        for piece in known[:: -(-len(known) // _FEW) or 1]:
            made = packed(_tensors(piece.called.outputs), like)
            _, labels, weight = unpack(self.batch(piece))
            kinds.add(objective.kind_of(labels, made, weight))
        kinds.discard(None)
        loss.kind = kinds.pop() if len(kinds) == 1 else ScalarTerm
        loss.is_coupled = loss.kind is ScalarTerm

    def values(self) -> Values | None:
        return values(self.model)

    def frozen(self) -> list[int]:
        layers = self.model._flatten_layers()
        own = {id(v) for layer in layers for v in layer._trainable_variables}
        return [i for i, v in enumerate(self._others) if id(v) in own]

    def rules(self, optimizer: Any) -> tuple[StepRule | None, ...]:
        variables = self.model.trainable_variables
        rate = float(ops.convert_to_numpy(optimizer.learning_rate))
        found = own_steps.rules(optimizer, variables, variables)
        return own_steps.at_rate(found, rate)

    def outputs(
        self, piece: Piece, *, training: bool
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        zeros = [
            np.zeros(leaf.shape, "float32") for leaf in piece.called.outputs
        ]
        found, after, own, _ = self._pass(piece, zeros, training=training)
        self._penalties[piece.called.order, training] = float(own)
        return [*map(np.asarray, found)], [*map(np.asarray, after)]

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
        called = piece.called
        calls = getattr(called.setting, "calls", 1)

        def run(
            params: list,
            buffers: list,
            inputs: list,
            factors: list,
            penalty: Tensor,
        ) -> tuple:
            def total(params: list) -> tuple:
                with self._scope(params, buffers) as scope:
                    outputs = self._forward(
                        scope, inputs, calls, training=training
                    )
                    own = self._penalty()
                after = [scope.get_current_value(v) for v in self._others]
                pairs = zip(outputs, factors, strict=True)
                sums = [
                    ops.sum(ops.cast(o, "float32") * factor)
                    for o, factor in pairs
                ]
                return sum(sums, penalty * own), (outputs, after, own)

            found: Any
            grads, found = self._ops.differentiate(total, params)
            return *found, grads

        program = self._program(("pass", training, calls), run)
        given = _tensors(called.params), called.buffers, called.inputs
        return program(*given, factors, np.float32(penalty))

    def _forward(
        self,
        scope: keras.StatelessScope,
        inputs: list,
        calls: int,
        *,
        training: bool,
    ) -> list[Tensor]:
        """Return the leaves of the outputs of one call, or of several one after
        another.
        """
        variables = self.model.trainable_variables
        before = [scope.get_current_value(v) for v in variables]
        found = []
        for x in self._given(inputs, calls):
            made = self.model(x, training=training)
            has_logits = hasattr(made, "_keras_logits")
            self._is_plain = ops.is_tensor(made) and not has_logits
            masks = [mask_of(each) for each in tree.leaves(made)]
            self.is_masked |= any(mask is not None for mask in masks)
            found += tensors(made)
        self.has_losses |= bool(self.model.losses)
        pairs = zip(before, variables, strict=True)
        self.moves_weights |= any(
            value is not scope.get_current_value(v) for value, v in pairs
        )
        return found

    def _given(self, inputs: list, calls: int) -> list[Tree]:
        """Return the inputs of each call."""
        like, num = self.data[0], len(inputs) // calls
        if calls == 1:
            return [packed(inputs, like)]
        parts = [inputs[i * num : (i + 1) * num] for i in range(calls)]
        if len(like) != calls:
            return parts
        return [
            packed(own, nest) for own, nest in zip(parts, like, strict=True)
        ]

    def _is_of_outputs(self, piece: Piece, objective: Any) -> bool:
        """Whether a loss can be computed at the model's one output, apart from the
        model.
        """
        is_one = len(piece.called.outputs) == 1 and self._is_plain
        is_masked = self.is_masked and getattr(objective, "is_masked", False)
        return is_one and isinstance(objective, LossObjective) and not is_masked

    def terms(
        self,
        piece: Piece,
        objective: Any,
        batch: Any,
        *,
        training: bool,
        is_by_outputs: bool = False,
    ) -> Terms:
        ones = np.ones((1, len(piece.rows)), "float32")
        if is_by_outputs or self._is_of_outputs(piece, objective):
            found, _ = self._at_outputs(piece, objective, batch, ones)
            penalty = self._penalties.get((piece.called.order, training), 0.0)
        else:
            given = piece, objective, batch, 0 * ones
            (found, penalty), _ = self._by_model(*given, training=training)
        values, weights, factors, divided = map(np.array, found)
        names = self._names.get(id(objective), ("loss",))
        return Terms(values, weights, factors, divided, float(penalty), names)

    def gradient(
        self,
        piece: Piece,
        objective: Any,
        batch: Any,
        factors: np.ndarray,
        *,
        training: bool,
        penalty: float = 0.0,
    ) -> np.ndarray:
        scaled = np.asarray(self._scale * factors, "float32")
        others: Any = {"penalty": self._scale * penalty, "training": training}
        if self._is_of_outputs(piece, objective):
            *_, made = self._at_outputs(piece, objective, batch, scaled)
            pulled = ops.cast(made, "float32")
            *_, grads = self._pass(piece, [pulled], **others)
        else:
            *_, grads = self._by_model(
                piece, objective, batch, scaled, **others
            )
        return self._flat(grads)

    def _at_outputs(
        self, piece: Piece, objective: Any, batch: Any, factors: np.ndarray
    ) -> tuple[tuple, Tensor]:
        """Return the terms, and the derivative of their values times factors by the
        output.
        """
        _, labels, weights = unpack(batch)
        output = ops.convert_to_tensor(piece.called.outputs[0])
        program = at_outputs(objective, len(output))
        return program(output, labels, weights, factors)

    def _by_model(
        self,
        piece: Piece,
        objective: Any,
        batch: Any,
        factors: np.ndarray,
        penalty: float = 0.0,
        *,
        training: bool,
    ) -> tuple[tuple[tuple, Tensor], list[Tensor]]:
        """Return (the terms of an objective that calls the model, the model's own
        losses), and the gradient of values and losses times their factors.
        """

        def run(
            params: list,
            buffers: list,
            batch: Any,
            factors: Tensor,
            penalty: Tensor,
        ) -> tuple:
            def total(params: list) -> tuple:
                given = params, buffers, batch
                terms, own = self._read(objective, piece, training, *given)
                return counted(terms[0], factors) + penalty * own, (terms, own)

            return self._ops.differentiate(total, params)

        key = "model", training, id(objective), len(piece.rows)
        called = piece.called
        given = _tensors(called.params), called.buffers, batch, factors
        grads, found = self._program(key, run)(*given, np.float32(penalty))
        return found, grads

    def _read(
        self,
        objective: Any,
        piece: Piece,
        training: bool,
        params: list,
        buffers: list,
        batch: Any,
    ) -> tuple[tuple, Tensor]:
        """Return the terms of an objective, and the model's own losses."""
        with self._scope(params, buffers):
            outcome = read(objective(self.model, batch, training), {})
            own = self._penalty(outcome)
        self._names[id(objective)] = tuple(map(str, outcome.terms))
        return by_term(outcome, len(piece.rows)), own

    def derivative(
        self,
        objective: Any,
        outputs: np.ndarray,
        labels: Tree,
        weights: Tree = None,
        change: Callable | None = None,
    ) -> np.ndarray:
        given = ops.convert_to_tensor(np.asarray(outputs, "float32"))
        program = at_outputs(objective, len(outputs), change)
        ones = np.ones((1, len(outputs)), "float32")
        return np.asarray(program(given, labels, weights, ones)[-1], "float64")

    def pulled(
        self, piece: Piece, chosen: list[np.ndarray], *, training: bool
    ) -> np.ndarray:
        factors = [np.asarray(self._scale * each, "float32") for each in chosen]
        *_, grads = self._pass(piece, factors, training=training)
        return self._flat(grads)

    def _flat(self, grads: list[Tensor]) -> np.ndarray:
        return self.flat([*map(np.asarray, grads)]) / self._scale

    def batch(self, piece: Piece, **others: Any) -> Any:
        found, setting = super().batch(piece, **others), piece.called.setting
        return found if setting is None else (*found, setting.beside)

    def _penalty(self, outcome: ObjectiveOutput | None = None) -> Tensor:
        is_complete = outcome is not None and outcome.is_complete
        # added by `compute_loss`
        losses = [] if is_complete else self.model.losses
        sums = (ops.cast(ops.sum(loss), "float32") for loss in losses)
        return sum(sums, ops.zeros((), "float32"))

    def _scope(self, params: list, buffers: list) -> keras.StatelessScope:
        variables = [*self.model.trainable_variables, *self._others]
        held = zip(variables, [*params, *buffers], strict=True)
        return keras.StatelessScope(held, collect_losses=True)

    def _program(self, key: Any, function: Callable) -> Any:
        """Return the traced function of this key."""
        if key not in self._programs:
            self._programs[key] = traced(function)
        return self._programs[key]


def _tensors(values: list[np.ndarray]) -> list[Tensor]:
    return [*map(ops.convert_to_tensor, values)]
