"""Observations that need no reference: each gradient, parameter, random layer, statistic and loss does as it says."""

import inspect
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor, autograd, nn
from torch.amp import GradScaler
from torch.nn import functional
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from stepcheck.report.found import Likely, on_one_line
from stepcheck.torch.calls import clips
from stepcheck.torch.hooks import Watcher
from stepcheck.torch.layers import NORMS, Parts, States, drifting, hidden, misspelt, unheld
from stepcheck.torch.ledger import MOST, Finding, Ledger, ids, made_by, made_of, roots_of, scale_of
from stepcheck.torch.losses import LOGITS
from stepcheck.torch.settings import Moves, decaying, grow, kinds
from stepcheck.torch.state import array, is_transformed, rate_of, replaced
from stepcheck.trace.log import Line
from stepcheck.trace.measure import is_padded
from stepcheck.user_code.source import is_of_user, line_here

_OFF = (
    "`{}` is called with training=False in all passes that gradients may be taken of, although its module is in "
    "training mode: nothing is dropped ({}; the model is called in {}). Pass `training=self.training`, or what says so."
)
_ON = "`{}` drops numbers after `eval()` too ({}). Pass `training=self.training`, unless passes are averaged."
_TWICE = {  # by the loss and the operation that made its input
    ("binary_cross_entropy_with_logits", "Sigmoid"): (
        f"BCEWithLogitsLoss takes logits, and gets the outputs of a sigmoid: is that one too many? {LOGITS}"
    ),
    ("cross_entropy", "Softmax"): (
        f"CrossEntropyLoss takes logits, and gets numbers that add up to 1: is a softmax too many? {LOGITS}"
    ),
    ("kl_div", "Softmax"): "`kl_div` takes log probabilities, and gets others: is a `log_softmax` missing?",
    ("poisson_nll_loss", "ExpBackward"): (
        "PoissonNLLLoss takes logarithms, and gets the outputs of `exp`: pass `log_input=False`, or leave `exp` out."
    ),
    ("nll_loss", "Softmax"): "NLLLoss takes log probabilities, and gets others: is a `log_softmax` missing?",
}
_UNCONNECTED = (
    "`{}` gets numbers that were cut off from the model (`detach()`, numpy, `no_grad()`?), and its value is a part of "
    "the loss: it has no gradient ({})."
)
_FOR_FREQUENT = (
    "The more labels a class has, the larger is its weight in the loss: {} for {} labels ({}). Are they in the wrong "
    "order, or not inverted?"
)
_PADDED = (
    "All rows of labels end with zeros, after more or fewer places, as if they were filled up, and these places count "
    "in the loss ({}). If 0 is padding, pass `ignore_index=0`."
)
_FAILED = "gradients, layers and losses one by one: the audit has failed there ({})"
_FEW, _NUM_GRAPHS = 3, 3  # calls that show a fault; backward passes whose graphs are walked
_SAME = 1e-3  # of factors
_DROPOUTS = "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"
_LOSSES = (
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "poisson_nll_loss", "gaussian_nll_loss", "kl_div"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "soft_margin_loss", "cross_entropy", "nll_loss"),
    *("multi_margin_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss", "margin_ranking_loss", "ctc_loss"),
    *("triplet_margin_loss", "triplet_margin_with_distance_loss", "cosine_embedding_loss", "hinge_embedding_loss"),
)


class Flow:
    """Listens to the calls of a script, for the time of a `with`; the findings are shared among its modules."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self._leaves: dict[int, Tensor] = {}  # that losses reach
        self._failure, self._num_graphs, self._depth = "", 0, 0
        self._dropped: dict[bool, list[str]] = {True: [], False: []}  # by whether dropout was on: names and lines
        self._kept: list[str] = []  # names and lines of dropouts that are on in evaluations
        self._misfits: Counter[str] = Counter()
        self._weights: dict[tuple[float, ...], tuple[Counter[int], str]] = {}
        self._of_losses: deque[tuple[Any, float]] = deque(
            maxlen=MOST
        )  # of the losses since the last gradient: node and value
        self._unconnected: list[tuple[float, str, str]] = []
        self._factors: dict[str, list[tuple[float, str]]] = {}
        self._trained: dict[int, str] = {}  # by module, the line of its last `train()`
        self._padded: dict[str, list[bool]] = {}  # by the line of a loss, of its calls
        self._moves: dict[int, Moves] = {}
        self.parts, self._states = Parts(), States(self.ledger.num_moves)
        self.without: dict[int, tuple[nn.Module, Line | None]] = {}  # modules that are called without a gradient
        self.notes: list[str] = []  # of all modules, once they were shared

    @contextmanager
    def on(self) -> Iterator[None]:
        """Listen inside; afterwards PyTorch is as it was."""
        ledger = self.ledger
        steps = (
            register_optimizer_step_pre_hook(lambda optimizer, *_: self._try(ledger.before_step, optimizer)),
            register_optimizer_step_post_hook(
                lambda optimizer, *_: self._try(ledger.after_step, optimizer, line_here())
            ),
        )
        with ExitStack() as stack:
            for handle in steps:
                stack.callback(handle.remove)
            for owner, name, told in self._replacements():
                stack.enter_context(replaced(owner, name, told(getattr(owner, name))))
            yield

    def _replacements(self) -> Iterator[tuple[Any, str, Callable]]:
        """Yield (owner, name, decorator) of all functions that are listened to."""
        yield autograd, "backward", self._taking
        for owner in (Optimizer, nn.Module):
            yield owner, "zero_grad", self._zeroing
        yield Optimizer, "__init__", self._making
        yield nn.Module, "state_dict", self._after(self._states.keep)
        yield nn.Module, "load_state_dict", self._after(self._states.load)
        yield nn.Module, "train", self._after(self._note_mode)
        for owner, name in clips():
            yield owner, name, self._after(lambda *_: self.ledger.clipped(line_here()))
        yield GradScaler, "unscale_", self._after(lambda *_: self.ledger.moved())
        yield autograd.Function, "apply", self._applying
        yield nn.MultiheadAttention, "forward", self._after(self.parts.attend)
        for name in _DROPOUTS:
            yield functional, name, self._dropping
        for name in _LOSSES:
            yield functional, name, self._losing
        for kind in kinds(LRScheduler):
            if "step" in vars(kind):
                yield kind, "step", self._scheduling

    def _try(self, note: Callable, *arguments: Any) -> Any:
        """Call a function of the audit, whose error is no error of the user's."""
        try:
            return None if self._failure else note(*arguments)
        except Exception as error:
            self._failure = on_one_line(error)
            return None

    def _after(self, note: Callable) -> Callable:
        """Return a decorator for functions after which something is noted: of (arguments, others, the result)."""

        def decorator(function: Callable) -> Callable:
            @wraps(function)
            def told(*arguments: Any, **others: Any) -> Any:
                result = function(*arguments, **others)
                if not is_transformed():
                    self._try(note, arguments, others, result)
                return result

            return told

        return decorator

    def _zeroing(self, zero: Callable) -> Callable:
        def note(*_: Any) -> None:
            self.ledger.zeroed = str(line_here())

        return self._after(note)(zero)

    def _making(self, make: Callable) -> Callable:
        def note(arguments: tuple, *_: Any) -> None:
            if (line := line_here()) is not None:
                self.ledger.made[id(arguments[0])] = line

        return self._after(note)(make)

    def _note_mode(self, arguments: tuple, others: dict, result: Any) -> None:
        """Note the line that puts a module in training mode."""
        if [*arguments, *others.values(), True][1]:
            self._trained[id(arguments[0])] = str(line_here())

    def _taking(self, take: Callable) -> Callable:
        @wraps(take)
        def told(*arguments: Any, **others: Any) -> Any:
            roots, arguments, others = roots_of(arguments, others)
            self._try(self._read_graph, [root for root in roots if isinstance(root, Tensor)])
            before = self._try(self.ledger.begin)
            result = take(*arguments, **others)
            self._try(self.ledger.end, before, line_here())
            return result

        return told

    def _read_graph(self, roots: list[Tensor]) -> None:
        """Note the leaves of the first graphs, and losses that are added without a gradient."""
        for root in roots:
            self._note_unconnected(root)
            self.ledger.scale = scale_of(root.grad_fn)
        self._of_losses.clear()
        self._unconnected.clear()
        if self._num_graphs < _NUM_GRAPHS:
            self._num_graphs += 1
            self.parts.meet(roots)
            nodes, seen = [root.grad_fn for root in roots], set[Any]()
            while nodes:
                node = nodes.pop()
                if node is not None and node not in seen:
                    seen.add(node)
                    nodes += [each for each, _ in node.next_functions]
                    if isinstance(leaf := getattr(node, "variable", None), Tensor):
                        self._leaves[id(leaf)] = leaf
                        if not isinstance(leaf, nn.Parameter):
                            self.ledger.read.add(str(line_here()))

    def _note_unconnected(self, root: Tensor) -> None:
        """Note the factor by which a loss without a gradient is in the one that a gradient is taken of."""
        known = dict(self._of_losses)
        parts = made_of(root.grad_fn, known) if root.numel() == 1 and len(self._unconnected) == 1 else None
        if parts is not None and parts[1]:
            value, name, line = self._unconnected[0]
            if value:
                self._factors.setdefault(name, []).append(((float(root.detach()) - parts[0]) / parts[1] / value, line))

    def _dropping(self, drop: Callable) -> Callable:
        """Return a dropout that notes whether it is on, where the user's own module calls it."""
        names = inspect.signature(drop)

        def note(caller: Any, arguments: tuple, others: dict) -> None:
            owner = caller.f_locals.get("self")
            if not is_of_user(caller.f_code.co_filename) or not isinstance(owner, nn.Module):
                return
            given = names.bind(*arguments, **others)
            is_said = "training" in given.arguments
            given.apply_defaults()
            if not given.arguments["p"]:
                return
            is_on, told = bool(given.arguments["training"]), f"F.{drop.__name__}@{line_here()}"
            if owner.training and torch.is_grad_enabled():
                self._dropped[is_on].append(told)
            elif not (owner.training or torch.is_grad_enabled() or is_said):
                self._kept.append(told)

        @wraps(drop)
        def told(*arguments: Any, **others: Any) -> Any:
            if is_transformed():
                return drop(*arguments, **others)
            self._try(note, sys._getframe(1), arguments, others)
            return drop(*arguments, **others)

        return told

    def _applying(self, apply: Any) -> Any:
        own = inspect.getattr_static(autograd.Function, "apply")  # of Python or built in, by the version

        @wraps(apply)
        def told(kind: Any, *arguments: Any, **others: Any) -> Any:
            if torch.is_grad_enabled() and not others and not is_transformed():
                self._try(self.parts.apply, kind, arguments)
            return own.__get__(None, kind)(*arguments, **others)

        return classmethod(told)

    def _losing(self, loss: Callable) -> Callable:
        """Return a loss that notes from where its inputs come, its weights, and whether it has a gradient."""
        names = inspect.signature(loss)

        def note(given: dict, result: Tensor) -> None:
            name, line, first = loss.__name__, line_here(), next(iter(given.values()))
            if not result.requires_grad:
                if result.numel() == 1 and not any(isinstance(v, Tensor) and v.requires_grad for v in given.values()):
                    self._unconnected.append((float(result.detach()), f"F.{name}", str(line)))
                return
            if result.numel() == 1:
                self._of_losses.append((result.grad_fn, float(result.detach())))
            for (of, operation), told in _TWICE.items():
                if of == name and made_by(first.grad_fn, operation) and given.get("log_input", True):
                    self._misfits[f"{told} ({line})"] += 1
            if name in ("cross_entropy", "nll_loss"):
                self._look_for_padding(_by_place(array(given["target"]), first), given, str(line))
            weight, target = given.get("pos_weight", given.get("weight")), given.get("target")
            is_by_class = name in ("cross_entropy", "nll_loss") or "pos_weight" in given
            if (
                is_by_class
                and isinstance(weight, Tensor)
                and isinstance(target, Tensor)
                and target.unique().numel() > 1
            ):
                self._count(array(weight).ravel(), array(target), given.get("ignore_index", -100), str(line))

        @wraps(loss)
        def told(*arguments: Any, **others: Any) -> Any:
            if is_transformed():
                return loss(*arguments, **others)
            self._depth += 1
            try:
                result = loss(*arguments, **others)
            finally:
                self._depth -= 1
            if not self._depth and torch.is_grad_enabled() and isinstance(result, Tensor):
                self._try(note, names.bind(*arguments, **others).arguments, result)
            return result

        return told

    def _look_for_padding(self, target: np.ndarray, given: dict, line: str) -> None:
        """Note whether labels look as if they were filled up with zeros, which are not ignored."""
        counts, weight = given.get("reduction", "mean") != "none", given.get("weight")
        is_ignored = given.get("ignore_index", -100) == 0 or (weight is not None and not weight[0]) or not counts
        is_filled = not is_ignored and len(np.unique(target)) > _FEW and (is_padded(target) or is_padded(target.T))
        self._padded.setdefault(line, []).append(is_filled)

    def _count(self, weights: np.ndarray, target: np.ndarray, ignored: int, line: str) -> None:
        """Count the labels of each class that a loss with weights is given."""
        if target.dtype.kind not in "iub" and (len(weights) > 1 or not np.isin(target, (0, 1)).all()):
            return
        by_class = (1.0, float(weights[0])) if len(weights) == 1 else tuple(map(float, weights))
        counts, _ = self._weights.setdefault(by_class, (Counter(), line))
        counts.update(int(label) for label in target.ravel() if label != ignored)

    def _scheduling(self, step: Callable) -> Callable:
        """Return a step of a schedule, of which the number it is given and the rates are noted."""

        @wraps(step)
        def told(scheduler: Any, *arguments: Any, **others: Any) -> Any:
            before = rate_of(scheduler.optimizer)
            result = step(scheduler, *arguments, **others)
            self._try(note, scheduler, before, next(iter((*arguments, *others.values())), np.nan))
            return result

        def note(scheduler: Any, before: float, given: Any) -> None:
            metric = float(given) if np.size(given) == 1 and not isinstance(given, str) else np.nan
            moved = before - rate_of(scheduler.optimizer)
            if scheduler.last_epoch:  # else it is made
                own = self._moves.setdefault(id(scheduler), Moves(scheduler))
                own.line = str(line_here())
                own.steps.append((self.ledger.num_steps(scheduler.optimizer), metric, moved))

        return told

    def share(self, watchers: list[Watcher]) -> None:
        """Write the findings to the logs of the modules that have the parameters, or else to the first log."""
        found = self._try(lambda: [*self._findings(watchers)]) or []
        self.notes = [note for note, _ in found]
        owned = [{id(p) for p in watcher.module.parameters()} for watcher in watchers]
        for note, about in found if watchers else []:
            place = next((i for i, own in enumerate(owned) if own & about), 0)
            watchers[place].log.notes[note] = None
        if self._failure and watchers:
            watchers[0].log.unseen[_FAILED.format(self._failure)] = None

    def _findings(self, watchers: list[Watcher]) -> Iterator[Finding]:
        yield from self._states.findings()
        for watcher in watchers:
            files = [called.line.file for called in watcher.log.called[-1:] if called.line is not None]
            yield from misspelt(watcher.module, next(iter(files), ""))
        for module, place in self.without.values():
            yield from self.ledger.without(module, place)
        yield from self.ledger.findings()
        for watcher in watchers:
            yield from hidden(watcher.module, {*self._leaves}, self.ledger.held)
            yield from unheld(watcher, self.ledger.held)
            yield from drifting(watcher, self._trained.get(id(watcher.module), "in no line"))
        off, on = self._dropped[False], self._dropped[True]
        if len(off) >= _FEW and not on:
            (name, line), called = off[-1].split("@", 1), [c for watcher in watchers[:1] for c in watcher.log.called]
            yield Likely(_OFF.format(name, line, called[-1].line if called else line)), set()
        if self._kept:
            yield Likely(_ON.format(*self._kept[-1].split("@", 1))), set()
        yield from ((Likely(told), set[int]()) for told, num in self._misfits.items() if num >= _FEW)
        for line, are_padded in self._padded.items():
            if len(are_padded) >= _FEW and all(are_padded):
                yield Likely(_PADDED.format(line)), set()
        yield from self.parts.findings(watchers)
        for name, factors in self._factors.items():
            first = factors[0][0]
            if len(factors) >= _FEW and abs(first) > _SAME and np.ptp([w for w, _ in factors]) <= _SAME * abs(first):
                yield Likely(_UNCONNECTED.format(name, factors[-1][1])), set()
        for weights, (counts, line) in self._weights.items():
            if grow(weights, counts):
                told = [
                    ", ".join(f"{each:.4g}" for each in part)
                    for part in (weights, [counts[c] for c in range(len(weights))])
                ]
                yield Likely(_FOR_FREQUENT.format(*told, line)), set()
        for moves in self._moves.values():
            yield from ((Likely(told), ids(moves.scheduler.optimizer)) for told in moves.notes())
        norms = [part for watcher in watchers for part in watcher.module.modules() if isinstance(part, NORMS)]
        own = {id(p) for part in norms for p in part.parameters(recurse=False)}
        for optimizer in self.ledger.optimizers:
            yield from decaying(optimizer, own, self.ledger.place_of(optimizer))


def _by_place(target: np.ndarray, outputs: Tensor) -> np.ndarray:
    """Return labels of outputs that were made flat before the loss, by row and place as these were."""
    node = outputs.grad_fn
    shape = getattr(node, "_saved_self_sym_sizes", ())[:-1] if node is not None and "View" in node.name() else ()
    return target.reshape(shape) if len(shape) > 1 and target.shape == (np.prod(shape),) else target
