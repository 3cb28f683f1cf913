"""A module as a function of recorded values: a copy of it runs each pass again."""

import copy
import io
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from stepcheck.errors import attempt
from stepcheck.port import ByPass, OneLoss, Port, Terms
from stepcheck.seams import replaced
from stepcheck.torch import families, optimizers
from stepcheck.torch.beside import Begins, as_then, beginning
from stepcheck.torch.device import CPU, device_of, is_reduced, on
from stepcheck.torch.losses import ByRow, Objective
from stepcheck.torch.nests import packed, unpacked
from stepcheck.torch.objective import OfModel
from stepcheck.torch.state import (
    Setting,
    array,
    set_modes,
    tensor,
    trained,
    trained_in,
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
    params: list[Tensor]
    after: list[np.ndarray]


class Replay(Port):
    """A PyTorch module as a function of recorded values."""

    losses = families
    hears_scales = True

    def __init__(
        self,
        model: nn.Module,
        data: tuple[Tree, ...],
        *,
        by_pass: ByPass | None = None,
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
        self._drops_hooks: bool | None = None
        self._device = device_of(model)
        if is_reduced(self._device, model):
            self._coarsen()

    def _coarsen(self) -> None:
        self.is_half, self.tolerance = True, tolerance(["bfloat16"])

    @staticmethod
    def engine() -> str:
        """Return the name of the engine."""
        return "torch"

    @staticmethod
    @contextmanager
    def as_then(model: nn.Module, log: Log) -> Iterator[None]:
        """Set the parameters to be trained as at the end of a log, in a `with`."""
        params = [*model.parameters()]
        now = trained_in(model)
        then = next(
            (each.trained for each in reversed(log.called) if each.is_whole),
            now,
        )
        try:
            for i, p in enumerate(params):
                p.requires_grad_(i in then)
            with (
                untouched(),
                on(device_of(model)),
            ):  # losses and checkpoints may draw
                yield
        finally:
            for i, p in enumerate(params):
                p.requires_grad_(i in now)

    def values(self) -> Values:
        """Return the module's present values."""
        return values(self.model)

    def frozen(self) -> list[int]:
        """Return the parameters that are set not to be trained."""
        own = {name for name, _ in self.model.named_parameters()}
        return [i for i, name in enumerate(self.names_of_others) if name in own]

    numbers_of = staticmethod(optimizers.numbers_of)
    decay = staticmethod(optimizers.decay)
    differing = staticmethod(optimizers.differing)
    rules = rules

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
        found = self._loss(piece, objective, batch, training=training)[0]
        values, weights = (array(each).astype("float64") for each in found[:2])
        ones = np.ones(len(values))
        return Terms(
            values, weights, ones, ones * found.is_divided, 0.0, found.names
        )

    def _loss(
        self, piece: Piece, objective: Any, batch: Any, *, training: bool
    ) -> tuple[ByRow, list[Tensor]]:
        """Return the loss of a piece with its graph, and the parameters in it."""
        if isinstance(objective, OfModel):
            run = self._run(piece, training=training, objective=objective)
            return run.output, run.params
        run = self._run(piece, training=training)
        return objective.of(run.output, *batch[1:]), run.params

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
        every = self.gradients(
            piece, objective, batch, [factors], training=training
        )
        return next(every)

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
        loss, params = self._loss(piece, objective, batch, training=training)
        for start in range(0, len(factors), _AT_ONCE):
            some = factors[start : start + _AT_ONCE]
            wide = np.stack(
                [np.broadcast_to(each, loss.values.shape) for each in some]
            )
            with self._as_beside(piece, objective):
                factors_of_some = [tensor(wide, loss.values)]
                yield from [
                    *self._pulled(params, [loss.values], factors_of_some)
                ]

    @contextmanager
    def _as_beside(self, piece: Piece, objective: Any) -> Iterator[None]:
        """Let other modules be as they were at a pass, where the objective may call
        them.
        """
        modules = getattr(objective, "modules", [])
        with as_then(modules, piece.called.setting.beside if modules else {}):
            yield

    def derivative(
        self,
        objective: Any,
        outputs: np.ndarray,
        labels: Tree,
        weights: Tree = None,
        change: Callable | None = None,
    ) -> np.ndarray:
        """Return the derivative of the sum of the rows' losses by a module's one
        output.
        """
        out = tensor(outputs).requires_grad_()
        with torch.enable_grad():
            changed = out if change is None else change(out)
            total = objective.of(changed, labels, weights).values.sum()
            ask = {"allow_unused": True, "materialize_grads": True}
            (grad,) = torch.autograd.grad(total, [out], **ask)
        return array(grad).astype("float64")

    def pulled(
        self, piece: Piece, chosen: list[np.ndarray], *, training: bool
    ) -> np.ndarray:
        """Return the gradient of the sum of the outputs times the chosen factors, flat."""
        run = self._run(piece, training=training)
        every = zip(run.leaves, chosen, strict=True)
        pairs = [(leaf, own) for leaf, own in every if leaf.grad_fn is not None]
        factors = [tensor(own, leaf)[None] for leaf, own in pairs]
        return next(
            self._pulled(run.params, [leaf for leaf, _ in pairs], factors)
        )

    def line_of_loss(
        self, called: Called, *, is_penalty: bool = False
    ) -> Line | None:
        """Return the line that calls a loss after a pass, or else its `backward`."""
        return next(iter(called.setting.lines), None)

    def objective(self, loss: Any, *, is_masked: bool = True) -> OneLoss:
        """Return a loss as an objective."""
        return Objective(loss)

    def _run(
        self, piece: Piece, *, training: bool, objective: OfModel | None = None
    ) -> _Pass:
        """Return a pass, or a loss of its module and rows, run again in one of both
        modes.
        """
        key = piece.called, training, objective is None
        if key not in self._passes:
            inputs = (leaf.size for leaf in piece.called.inputs)
            most = _MOST_NUMBERS // max(sum(self.sizes), *inputs, 1)
            while len(self._passes) >= np.clip(most, 1, _MOST_PASSES):
                self._passes.popitem(last=False)
            with untouched():
                if self._drops_hooks is None:
                    self._drops_hooks = self._can_drop_hooks(piece)
                self._passes[key] = self._made(
                    piece,
                    training,
                    drops_hooks=self._drops_hooks,
                    objective=objective,
                )
        self._passes.move_to_end(key)
        return self._passes[key]

    def _can_drop_hooks(self, piece: Piece) -> bool:
        """Whether a pass has its outputs, and moves other values alike, without the
        user's hooks, which change objects.
        """
        if not any(_hooks(self.model)):
            return False
        training = any(piece.called.mode)
        run, _ = attempt(lambda: self._made(piece, training, drops_hooks=True))
        if run is None:  # the model needs its hooks
            return False
        if run.after:
            whole = self._made(piece, training, drops_hooks=False)
            if not all(map(np.array_equal, run.after, whole.after)):
                return False
        leaves, kept = [*map(array, run.leaves)], piece.called.outputs
        is_alike = [x.shape for x in leaves] == [x.shape for x in kept]
        return is_alike and distance(leaves, kept) <= self.tolerance.fits

    def _made(
        self,
        piece: Piece,
        training: bool,
        *,
        drops_hooks: bool,
        objective: OfModel | None = None,
    ) -> _Pass:
        called, setting = piece.called, Setting.of(piece.called)
        model = _copied(self.model)
        for own in _hooks(model) if drops_hooks else ():
            own.clear()
        params: list[Tensor] = [p for _, p in trained(model)]
        others = [value for _, value in untrained(model)]
        _set(params, called.params)
        if setting.is_cast:
            self._coarsen()
        parts = setting.parts or (called,)
        prepare = partial(self._prepare, model, others, training=training)
        with torch.enable_grad(), _plainly():
            if objective is not None:
                begins: Begins = {
                    model: [partial(prepare, part) for part in parts]
                }
                for i, held in (
                    setting.beside.items() if objective.modules else ()
                ):
                    begins[objective.modules[i]] = [held.random.set]
                prepare(parts[0])
                given = [leaf for part in parts for leaf in _inputs(part)]
                with (
                    self._as_beside(piece, objective),
                    beginning(model, begins),
                ):
                    found = objective.of(model, given, self.batch(piece)[1])
                return _Pass(found, [], params, [])
            outs = [
                unpacked(self._again(model, prepare, part)) for part in parts
            ]
        after = [array(value) for _, value in untrained(model)]
        every = [leaf for out in outs for leaf in out.leaves]
        leaves = [
            leaf.float() if leaf.dtype in _HALF else leaf for leaf in every
        ]
        output = packed(outs[0].form, leaves) if len(outs) == 1 else leaves
        return _Pass(output, leaves, params, after)

    def _prepare(
        self,
        model: nn.Module,
        others: list[Tensor],
        called: Called,
        *,
        training: bool,
    ) -> None:
        """Let a module have the state in which it was called, or the other mode."""
        _set(others, called.buffers)
        is_then = bool(called.mode) and any(called.mode) is training
        set_modes(model, called.mode if is_then else (training,))
        Setting.of(called).random.set()

    def _again(
        self,
        model: nn.Module,
        prepare: Callable[[Called], None],
        called: Called,
    ) -> Any:
        """Return the output of a recorded call of a module."""
        prepare(called)
        setting = Setting.of(called)
        arguments, named = packed(setting.given, _inputs(called))
        dtype, is_cast = (
            setting.cast or torch.bfloat16,
            setting.cast is not None,
        )
        with torch.autocast(self._device.type, dtype, enabled=is_cast):
            return model(*arguments, **named)

    def _pulled(
        self, params: list[Tensor], outputs: list[Tensor], factors: list[Tensor]
    ) -> Iterator[np.ndarray]:
        """Yield gradients of outputs times factors (many, *output), each flat."""
        num = len(factors[0]) if factors else 1
        if not any(each.requires_grad for each in outputs):
            yield from [self.flat([None] * len(params))] * num
            return
        pull = partial(
            torch.autograd.grad,
            outputs,
            params,
            retain_graph=True,
            allow_unused=True,
        )
        many = None
        if num > 1:
            with suppress(
                RuntimeError
            ):  # an operation without a rule for many at once
                many = pull(factors, is_grads_batched=True)
        for j in range(num):
            if many is None:
                grads = pull([each[j] for each in factors])
            else:
                grads = tuple(None if g is None else g[j] for g in many)
            yield self.flat([None if g is None else array(g) for g in grads])


@contextmanager
def _plainly() -> Iterator[None]:
    """Run modules without compiled parts, reentrant checkpoints, and prints."""
    has_compiled = "torch._dynamo" in sys.modules  # whose parts run as they are
    stance = (
        torch.compiler.set_stance("force_eager")
        if has_compiled
        else nullcontext()
    )
    # `autograd.grad` does not go through checkpoints.
    direct = staticmethod(lambda run, _, *given: run(*given))
    once = replaced(CheckpointFunction, "apply", direct)
    with stance, once, redirect_stdout(io.StringIO()):
        yield


def _set(own: list[Tensor], recorded: list[np.ndarray]) -> None:
    """Let tensors have recorded values, where they are others."""
    for value, kept in zip(own, recorded, strict=True):
        if not np.array_equal(array(value), kept):
            value.data = tensor(kept, value)


def _inputs(called: Called) -> list[Tensor]:
    """Return the inputs of a pass as its module got them."""
    inputs = [*map(tensor, called.inputs)]
    for i, kind in enumerate(Setting.of(called).kinds):
        home = CPU if kind.is_on_cpu else inputs[i].device
        inputs[i] = (
            inputs[i].to(home, kind.dtype).requires_grad_(kind.requires_grad)
        )
    return inputs


def _hooks(model: nn.Module) -> Iterator[dict]:
    """Yield the hooks of all parts of a module, by kind, that are not PyTorch's."""
    for part in model.modules():
        for own in (
            part._forward_hooks,
            part._forward_pre_hooks,
            part._backward_hooks,
            part._backward_pre_hooks,
        ):
            homes = [getattr(hook, "__module__", "") for hook in own.values()]
            if not any(home.startswith("torch.") for home in homes):
                yield own


def _copied(model: nn.Module) -> nn.Module:
    """Return a copy of a module; results that it keeps of a pass are copied without
    their graph.
    """
    parts = (vars(part).values() for part in model.modules())
    kept = [
        leaf
        for own in parts
        for value in own
        for leaf in unpacked(value).leaves
    ]
    results = (value for value in kept if value.grad_fn is not None)
    return copy.deepcopy(
        model, {id(each): each.detach().clone() for each in results}
    )
