"""A module as a function of recorded values: a copy of it runs each pass again."""

import copy
import io
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from stepcheck.errors import attempt
from stepcheck.port import ByPass, OneLoss, Port, Terms
from stepcheck.seams import replaced
from stepcheck.torch import families, optimizers
from stepcheck.torch.beside import Draws, as_then
from stepcheck.torch.device import CPU, device_of, is_reduced, on
from stepcheck.torch.losses import Function, Objective
from stepcheck.torch.objective import ByTerm, OfModel
from stepcheck.torch.state import (
    Random,
    Setting,
    array,
    modes,
    set_modes,
    tensor,
    tensors_of,
    trained,
    trained_in,
    unpacked,
    untouched,
    untrained,
    values,
)
from stepcheck.torch.steps import rules
from stepcheck.trace.log import Called, Log, Values
from stepcheck.trace.measure import distance, tolerance
from stepcheck.trace.windows import Piece
from stepcheck.tree import Tree
from stepcheck.values import Line

# Passes whose graphs are kept, and the weights or inputs that all these may have.
_MOST_PASSES, _MOST_NUMBERS = 64, 1_000_000
_HALF = torch.bfloat16, torch.float16
_AT_ONCE = 64  # gradients that are taken of a graph at once


@dataclass
class _Pass:
    """A forward pass that was run again: its output with the graph, and the values that
    it left.

    `leaves`: of the output, in single precision at least.
    """

    output: Any
    leaves: list[Tensor]
    params: list[nn.Parameter]
    others: list[Tensor]
    after: list[np.ndarray]


class Replay(Port):
    """A PyTorch module as a function of recorded values."""

    losses = families
    hears_scales = True

    def __init__(
        self, model: nn.Module, data: tuple[Tree, ...], *, by_pass: ByPass | None = None
    ):
        super().__init__(model, data, by_pass=by_pass)
        named, self.trained = trained(model), trained_in(model)
        self._measure(
            [(name, tuple(p.shape)) for name, p in named],
            [str(p.dtype) for _, p in named],
        )
        self.names_of_others = [name for name, _ in untrained(model)]
        self.are_seeds = [False] * len(self.names_of_others)
        self._passes: OrderedDict[Any, _Pass] = OrderedDict()
        self._most = _MOST_PASSES
        self._drops_hooks: bool | None = None
        self._device = device_of(model)
        if is_reduced(self._device, model):
            self.is_half, self.tolerance = True, tolerance(["bfloat16"])

    @staticmethod
    def engine() -> str:
        """Return the name of the engine."""
        return "torch"

    @staticmethod
    @contextmanager
    def as_then(model: nn.Module, log: Log) -> Iterator[None]:
        """Set the parameters to be trained as at the end of a log, in a `with`."""
        then = next(
            (
                called.setting.flags
                for called in reversed(log.called)
                if called.is_whole
            ),
            (),
        )
        params = list(model.parameters())
        now = [p.requires_grad for p in params]
        try:
            for p, is_trained in zip(params, then, strict=False):
                p.requires_grad_(is_trained)
            with untouched(), on(device_of(model)):  # losses and checkpoints may draw
                yield
        finally:
            for p, is_trained in zip(params, now, strict=True):
                p.requires_grad_(is_trained)

    def values(self) -> Values:
        """Return the module's present values."""
        return values(self.model)

    def frozen(self) -> list[int]:
        """Return the parameters that are set not to be trained."""
        own = {name for name, _ in self.model.named_parameters()}
        return [i for i, name in enumerate(self.names_of_others) if name in own]

    stepped = staticmethod(optimizers.stepped)
    numbers_of = staticmethod(optimizers.numbers_of)
    decay = staticmethod(optimizers.decay)
    rules = rules

    def differing(self, used: Any, stated: Any) -> dict[str, tuple[Any, Any]]:
        """Return the options that change a step and differ: (used, stated)."""
        return optimizers.differing(used, stated, trained(self.model))

    def outputs(
        self, piece: Piece, *, training: bool
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return (leaves of the output, the module's other values afterwards) of a
        forward pass.
        """
        run = self._run(piece, training=training)
        return list(map(array, run.leaves)), run.after

    def terms(
        self,
        piece: Piece,
        objective: Any,
        batch: Any,
        *,
        training: bool,
        is_by_outputs: bool = False,
    ) -> Terms:
        """Return the loss of a piece, unreduced."""
        if isinstance(objective, OfModel):
            made: ByTerm = self._run(
                piece, training=training, objective=objective
            ).output
            values, weights = map(array, made[:2])
            ones = np.ones(len(values))
            values, weights = _doubles(values, weights)
            return Terms(values, weights, ones, ones > 0, 0.0, made.names)
        own = piece.called.outputs
        output = (
            tensor(own[0])
            if is_by_outputs
            else self._run(piece, training=training).output
        )
        found = objective.of(output, *batch[1:])
        rows, weights = _doubles(array(found.values)[None], array(found.weights)[None])
        return Terms(
            rows, weights, np.ones(1), np.array([found.is_divided]), 0.0, ("loss",)
        )

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
        """Return the gradient of the sum of factors (terms, rows) times values, flat."""
        return next(
            self.gradients(piece, objective, batch, [factors], training=training)
        )

    def gradients(
        self,
        piece: Piece,
        objective: Any,
        batch: Any,
        factors: list[np.ndarray],
        *,
        training: bool,
    ) -> Iterator[np.ndarray]:
        """Yield the gradient by each of several factors: backward passes through one
        graph.
        """
        if isinstance(objective, OfModel):
            run = self._run(piece, training=training, objective=objective)
            values = run.output.values
        else:
            run = self._run(piece, training=training)
            values = objective.of(run.output, *batch[1:]).values[None]
        for start in range(0, len(factors), _AT_ONCE):
            some = factors[start : start + _AT_ONCE]
            wide = np.stack([np.broadcast_to(each, values.shape) for each in some])
            with self._as_beside(piece, objective):
                yield from [
                    *self._pulled(run.params, [values], [tensor(wide).to(values.dtype)])
                ]

    @contextmanager
    def _as_beside(self, piece: Piece, objective: Any) -> Iterator[None]:
        """Let other modules be as they were at a pass, where the objective may call
        them.
        """
        modules = getattr(objective, "modules", [])
        then = piece.called.setting.beside if modules else {}
        with as_then(modules, then):
            yield

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
        """Return the derivative of the sum of the rows' losses by a module's one
        output.
        """
        out = tensor(outputs).requires_grad_()
        with torch.enable_grad():
            total = objective.of(
                out if change is None else change(out), labels, weights
            ).values.sum()
            (grad,) = torch.autograd.grad(
                total, [out], allow_unused=True, materialize_grads=True
            )
        return array(grad).astype("float64")

    def pulled(
        self, piece: Piece, chosen: list[np.ndarray], *, training: bool
    ) -> np.ndarray:
        """Return the gradient of the sum of the outputs times the chosen factors, flat."""
        run = self._run(piece, training=training)
        pairs = [
            (leaf, tensor(c))
            for leaf, c in zip(run.leaves, chosen, strict=True)
            if leaf.grad_fn is not None
        ]
        leaves, factors = (
            [leaf for leaf, _ in pairs],
            [c.to(leaf.dtype)[None] for leaf, c in pairs],
        )
        return next(self._pulled(run.params, leaves, factors))

    def settle(self, objective: Any, pieces: list[Piece]) -> None:
        """Note in a function whether its number for a batch is one of the rows'
        numbers.
        """
        loss = getattr(objective, "loss", None)
        if not isinstance(loss, Function):
            return
        for piece in (
            piece for piece in pieces if piece.is_known and piece.called.is_whole
        ):
            outputs = piece.called.setting.output(
                list(map(tensor, piece.called.outputs))
            )
            objective.of(outputs, *self.batch(piece)[1:])

    def line_of_loss(self, called: Called, *, is_penalty: bool = False) -> Line | None:
        """Return the line that calls a loss after a pass, or else its `backward`."""
        return next(iter(called.setting.lines), None)

    def objective(self, loss: Any, *, is_masked: bool = True) -> OneLoss:
        """Return a loss as an objective."""
        return Objective(loss)

    def _run(
        self,
        piece: Piece,
        *,
        training: bool,
        objective: "OfModel | None" = None,
    ) -> _Pass:
        """Return a pass, or a loss of its module and rows, run again in one of both
        modes.
        """
        key = piece.called.order, training, objective is None
        if key not in self._passes:
            largest = max(
                sum(self.sizes), *(leaf.size for leaf in piece.called.inputs), 1
            )
            self._most = max(1, min(self._most, _MOST_NUMBERS // largest))
            while len(self._passes) >= self._most:
                self._passes.popitem(last=False)
            with untouched():
                if self._drops_hooks is None:
                    self._drops_hooks = self._can_drop_hooks(piece)
                self._passes[key] = self._made(
                    piece, training, drops_hooks=self._drops_hooks, objective=objective
                )
        self._passes.move_to_end(key)
        return self._passes[key]

    def _can_drop_hooks(self, piece: Piece) -> bool:
        """Whether a pass has its outputs without the user's hooks, which change
        objects.
        """
        if not any(own for part in self.model.modules() for own in _hooks(part)):
            return False
        training = any(self._setting(piece).modes)

        def without() -> tuple[_Pass, list[np.ndarray]]:
            run = self._made(piece, training, drops_hooks=True)
            return run, self._made(
                piece, training
            ).after if run.after else []  # which a hook may move

        made, _ = attempt(without)
        if made is None:  # an error: the model needs its hooks
            return False
        run, after = made
        known = [
            (array(leaf), out)
            for leaf, out in zip(run.leaves, piece.called.outputs, strict=False)
        ]
        are_same = bool(known) and all(map(np.array_equal, run.after, after))
        return are_same and all(
            one.shape == two.shape
            and distance(one.astype("float64"), two.astype("float64"))
            <= self.tolerance.fits
            for one, two in known
        )

    def _made(
        self,
        piece: Piece,
        training: bool,
        *,
        drops_hooks: bool = False,
        objective: "OfModel | None" = None,
    ) -> _Pass:
        setting = self._setting(piece)
        model = _copied(self.model)
        for own in (
            own for part in model.modules() for own in _hooks(part) if drops_hooks
        ):
            own.clear()
        params, others = (
            [value for _, value in group]
            for group in (trained(model), untrained(model))
        )
        _set([*params, *others], [*piece.called.params, *piece.called.buffers])
        if setting.is_cast:
            self.is_half, self.tolerance = True, tolerance(["bfloat16"])
        has_compiled = "torch._dynamo" in sys.modules  # whose parts run as they are
        stance = (
            torch.compiler.set_stance("force_eager") if has_compiled else nullcontext()
        )
        direct = staticmethod(
            lambda run, _, *given: run(*given)
        )  # as `autograd.grad` does not go through checkpoints
        with (
            torch.enable_grad(),
            stance,
            replaced(CheckpointFunction, "apply", direct),
            redirect_stdout(io.StringIO()),
        ):
            if objective is not None:
                with self._as_beside(piece, objective):
                    found = self._of_model(
                        piece, model, others, objective, training=training
                    )
                return _Pass(found, [], params, others, [])
            outs = [
                unpacked(self._again(part, model, others, training=training))
                for part in setting.parts or (piece.called,)
            ]
        after = [array(value) for _, value in untrained(model)]
        every = [leaf for out in outs for leaf in out.leaves]
        leaves = [
            leaf.float() if leaf.dtype in _HALF else leaf for leaf in every
        ]  # as the log has them
        output = outs[0].packed(leaves) if len(outs) == 1 else leaves
        return _Pass(output, leaves, params, others, after)

    def _again(
        self, called: Called, model: nn.Module, others: list[Tensor], *, training: bool
    ) -> Any:
        """Return the tensors of the output of a recorded call of a module."""
        setting = self._prepared(called, model, others, training=training)
        arguments, named = setting.packed(_inputs(called))
        dtype = setting.cast or torch.bfloat16
        kind = self._device.type
        with torch.autocast(kind, dtype, enabled=setting.cast is not None):
            return tensors_of(model(*arguments, **named))

    def _prepared(
        self, called: Called, model: nn.Module, others: list[Tensor], *, training: bool
    ) -> Setting:
        """Let a module have the state in which it was called, and return the rest of
        it.
        """
        setting = self._setting(Piece(called, np.zeros(0, int)))
        _set(others, called.buffers)
        set_modes(model, _modes(setting.modes, training=training))
        setting.random.set()
        return setting

    def _of_model(
        self,
        piece: Piece,
        model: nn.Module,
        others: list[Tensor],
        objective: OfModel,
        *,
        training: bool,
    ) -> ByTerm:
        """Return the loss of a piece by term and row; each call of the module is a
        recorded one.
        """
        parts = self._setting(piece).parts or (piece.called,)
        left = [*parts]
        self._prepared(parts[0], model, others, training=training)
        draws = Draws()

        def begin(model: nn.Module, inputs: tuple) -> None:
            if torch.is_grad_enabled():
                _must_call(objective, are_left=bool(left))
                draws.check()
                self._prepared(left.pop(0), model, others, training=training)

        def end(model: nn.Module, inputs: tuple, output: Any) -> None:
            if torch.is_grad_enabled():
                draws.end()

        model.register_forward_pre_hook(begin, prepend=True)
        model.register_forward_hook(end)
        given = [leaf for part in parts for leaf in _inputs(part)]
        with draws.at(objective.modules, piece.called.setting.beside):
            found = objective.of(model, given, self.batch(piece)[1])
        draws.check()
        _must_call(objective, are_left=not left)
        return found

    def _setting(self, piece: Piece) -> Setting:
        """Return the setting of a recorded pass, or else that of the plainest call."""
        if piece.called.setting is not None:
            return piece.called.setting
        return Setting(lambda leaves: (leaves, {}), modes(self.model), Random.now(), ())

    def _pulled(
        self, params: list[nn.Parameter], outputs: list[Tensor], factors: list[Tensor]
    ) -> Iterator[np.ndarray]:
        """Yield gradients of outputs times factors (many, *output), each flat."""
        ask = {"retain_graph": True, "allow_unused": True}
        num = len(factors[0]) if factors else 1
        if not outputs or not any(each.requires_grad for each in outputs):
            yield from (self.flat([None] * len(params)) for _ in range(num))
            return
        if num > 1:
            try:
                grads = torch.autograd.grad(
                    outputs, params, factors, is_grads_batched=True, **ask
                )
                many = [None if g is None else array(g) for g in grads]
                yield from (
                    self.flat([None if g is None else g[j] for g in many])
                    for j in range(num)
                )
                return
            except RuntimeError:  # an operation without a rule for many at once
                pass
        for j in range(num):
            grads = torch.autograd.grad(
                outputs, params, [each[j] for each in factors], **ask
            )
            yield self.flat([None if g is None else array(g) for g in grads])


def _set(own: list[Tensor], recorded: list[np.ndarray]) -> None:
    """Let tensors have recorded values, where they are others."""
    for value, kept in zip(own, recorded, strict=True):
        if not np.array_equal(array(value), kept):
            value.data = tensor(kept, value).to(value.dtype)


def _inputs(called: Called) -> list[Tensor]:
    """Return the inputs of a pass as its module got them."""
    inputs, setting = [*map(tensor, called.inputs)], called.setting
    if setting is None or not setting.dtypes:
        return inputs
    kinds = zip(inputs, setting.dtypes, setting.needs, setting.are_on_cpu, strict=True)
    return [
        leaf.to(dtype=dtype, device=CPU if is_on_cpu else leaf.device).requires_grad_(
            needs
        )
        for leaf, dtype, needs, is_on_cpu in kinds
    ]


def _doubles(*arrays: np.ndarray) -> list[np.ndarray]:
    return [each.astype("float64") for each in arrays]


def _must_call(objective: OfModel, *, are_left: bool) -> None:
    if not are_left:
        calls = objective.given.calls
        raise ValueError(
            f"the function must call the model {calls} times, as calls={calls} says"
        )


def _modes(recorded: tuple[bool, ...], *, training: bool) -> tuple[bool, ...]:
    """Return the modes of all parts: those of the pass, if any part was in that mode."""
    return recorded if any(recorded) is training else (training,) * len(recorded)


def _hooks(part: nn.Module) -> list[dict]:
    """Return the hooks of a part of a module, by kind, that are not PyTorch's."""
    every = (
        part._forward_hooks,
        part._forward_pre_hooks,
        part._backward_hooks,
        part._backward_pre_hooks,
    )
    are_own = (
        all(
            not getattr(hook, "__module__", "").startswith("torch.")
            for hook in own.values()
        )
        for own in every
    )
    return [own for own, is_own in zip(every, are_own, strict=True) if own and is_own]


def _copied(model: nn.Module) -> nn.Module:
    """Return a copy of a module; results that it keeps of a pass are copied without
    their graph.
    """
    kept = [
        leaf
        for part in model.modules()
        for value in vars(part).values()
        for leaf in unpacked(value).leaves
    ]
    memo = {
        id(value): value.detach().clone() for value in kept if value.grad_fn is not None
    }
    return copy.deepcopy(model, memo)
