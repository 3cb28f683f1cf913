"""The ledger of gradients: each that a backward pass computes is to reach a step; the walk along autograd's graph."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from stepcheck.report.found import Likely
from stepcheck.trace.log import Line

_NOT_RESET = (
    "The gradients that an optimizer step has used are still there when the next ones are taken, which are added to "
    "them. Call `zero_grad()` once per update ({})."
)
_THROWN = (
    "The gradients of {} of {} backward passes are set to zero before an optimizer step has used them ({}). Call "
    "`zero_grad()` once per update."
)
_ANEW = (
    "{} is made anew {} times with the same parameters, and each time the state of the one before (its moments, its "
    "count of steps) is lost ({}). Make it once, before the first epoch."
)
_CLIPPED = (
    "The gradients are clipped ({}) while they have the scale of the loss, {:.4g}, and divided by it afterwards: the "
    "limit holds for the scaled ones. Unscale them first, then clip."
)
_WITHOUT = (
    "`{}` is called under `no_grad()` ({}), and never trained: none of its {} parameters has a gradient in any of the "
    "{} steps of the optimizer that holds them. Call it with gradients, or leave them out of the optimizer."
)
_FEW = 2  # updates that show a fault
_SAME = 1e-3  # of factors
_NUM_NUMBERS = 8  # of a parameter, by which it is seen to be the same
_OF_A_WINDOW = (
    *("only the last microbatch", "only the first microbatch", "first microbatch lost", "last microbatch lost"),
    "last window dropped",
)

Finding = tuple[str, set[int]]  # a note, and the ids of the parameters that it is about


@dataclass
class Taken:
    """A backward pass: the line that takes it, the parameters that it reaches, those that lose its gradient unused.

    `is_read`: whether anything but a step has used or changed its gradients.
    """

    line: str
    reached: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    is_used: bool = False
    is_read: bool = False


class _Held(NamedTuple):
    """A parameter's gradient: where and in which version it is, the passes in it, whether a step has used it.

    `is_mixed`: whether a pass has added to a gradient that a step had used.
    """

    place: Any
    version: int
    takes: tuple[Taken, ...] = ()
    is_old: bool = False
    is_mixed: bool = False


class Ledger:
    """Notes of each backward pass which steps use its gradients; of the parameters of all optimizers that were seen.

    Attributes:
        optimizers: those that have made steps, in the order of their first ones.
        zeroed: the line that has set gradients to zero last.
        scale: by which the last loss was multiplied.
        read: the lines of backward passes that take gradients of other tensors too, as of inputs.
        made: by optimizer, the line that has made it.
    """

    def __init__(self) -> None:
        self.optimizers: list[Optimizer] = []
        self.zeroed, self.read, self.made = "", set[str](), dict[int, Line]()
        self.scale = 1.0
        self._params: dict[int, nn.Parameter] = {}
        self._with_gradient = set[int]()  # of the parameters, at any step
        self._held: dict[int, _Held] = {}
        self._takes: list[Taken] = []
        self._lines: dict[int, Line | None] = {}  # by optimizer, of its steps
        self._num_steps, self._num_mixed = Counter[int](), Counter[int]()
        self._after: dict[int, list[float]] = {}  # by optimizer, some of its parameters' numbers after its last step
        self._anew: dict[frozenset[int], list[Any]] = {}
        self._clipped: dict[int, float] = {}  # the sizes of the gradients after a clip
        self._clips: dict[int, list[bool]] = {}  # by optimizer, of its clipped steps: whether it was of scaled ones
        self._line_of_clip: Line | None = None

    @property
    def held(self) -> set[int]:
        """The ids of the parameters of all optimizers."""
        return {*self._params}

    def num_steps(self, optimizer: Optimizer) -> int:
        """Return the number of steps of an optimizer that were seen."""
        return self._num_steps[id(optimizer)]

    def num_moves(self, params: set[int]) -> int:
        """Return the number of steps of the optimizers that have some of these parameters, by their ids."""
        return sum(self.num_steps(each) for each in self.optimizers if ids(each) & params)

    def place_of(self, optimizer: Optimizer) -> Line | None:
        """Return the line that has made an optimizer, or that makes its steps."""
        return self.made.get(id(optimizer), self._lines[id(optimizer)])

    def settle(self) -> None:
        """Strike out gradients that were set to zero, or replaced, since the last event."""
        for i, held in [*self._held.items()]:
            p = self._params[i]
            is_gone = p.grad is None or not bool(p.grad.any())
            if not is_gone and _place(p) == held.place:
                continue
            for take in held.takes:
                take.is_read |= not is_gone or p._version != held.version  # or the weights were moved by it
                take.lost |= {i} if is_gone else set()
            if is_gone or (held.is_old and not held.is_mixed):
                del self._held[i]
            else:
                self._held[i] = held._replace(place=_place(p), takes=())

    def begin(self) -> dict[int, Any]:
        """Begin a backward pass; return the places of all gradients."""
        self.settle()
        return {i: _place(p) for i, p in self._params.items()}

    def end(self, before: dict[int, Any], line: Line | None) -> None:
        """End a backward pass that has begun with these places."""
        take = Taken(str(line))
        for i, p in self._params.items():
            if _place(p) not in (None, before.get(i)):
                held = self._held.get(i, _Held((0, 0), 0))
                is_mixed = held.is_mixed or held.is_old
                self._held[i] = _Held(_place(p), p._version, (*held.takes, take), held.is_old, is_mixed)
                take.reached.add(i)
        self._takes += [take] * bool(take.reached)

    def moved(self) -> None:
        """Note that gradients were changed on purpose, as by a clip."""
        self._held = {i: held._replace(place=_place(self._params[i])) for i, held in self._held.items()}

    def clipped(self, line: Line | None) -> None:
        """Note that gradients were clipped."""
        self.moved()
        self._line_of_clip = line
        self._clipped = {i: _size(p) for i, p in self._params.items() if _place(p) is not None}

    def before_step(self, optimizer: Optimizer) -> None:
        """Note the gradients that a step is going to use, and whether the optimizer is a new one."""
        self.settle()
        own = _own(optimizer)
        self._with_gradient |= {id(p) for p in own if p.grad is not None}
        pairs = [(self._clipped.pop(id(p), 0.0), _size(p)) for p in own if _place(p) is not None]
        factors = [now * self.scale / before for before, now in pairs if before]
        if factors:
            is_scaled = self.scale != 1.0 and all(abs(factor - 1) < _SAME for factor in factors)
            self._clips.setdefault(id(optimizer), []).append(is_scaled)
        if all(optimizer is not each for each in self.optimizers):
            self._meet(optimizer, frozenset(map(id, own)))
        held = [self._held[id(p)] for p in own if id(p) in self._held]
        self._num_mixed[id(optimizer)] += any(each.is_mixed for each in held)
        for take in (take for each in held for take in each.takes):
            take.is_used = True

    def after_step(self, optimizer: Optimizer, line: Line | None) -> None:
        """Note that a step was made."""
        own = _own(optimizer)
        self._params |= {id(p): p for p in own}
        self._held |= {id(p): _Held(_place(p), p._version, is_old=True) for p in own if _place(p) is not None}
        self._num_steps[id(optimizer)] += 1
        self._lines[id(optimizer)] = line
        self._after[id(optimizer)] = _numbers(own)

    def _meet(self, optimizer: Optimizer, own: frozenset[int]) -> None:
        """Note a new optimizer, and whether it takes the place of one whose state is lost."""
        alike = [each for each in self.optimizers if {*map(id, _own(each))} == own and type(each) is type(optimizer)]
        self.optimizers.append(optimizer)
        last = alike[-1] if alike else None
        if last is None or last.defaults != optimizer.defaults or any(map(optimizer.state.get, _own(optimizer))):
            return
        has_state = any(_has_moments(last, p) for p in _own(last))
        if has_state and self._after[id(last)] == _numbers(_own(last)):  # else the weights are others
            self._anew.setdefault(own, [type(last).__name__]).append(self.place_of(last))

    def without(self, module: nn.Module, line: Line | None) -> Iterator[Finding]:
        """Yield the note on a module that is called without a gradient, and that an optimizer was given to train."""
        own = {id(p) for p in module.parameters() if p.requires_grad}
        for optimizer in self.optimizers:
            others = ids(optimizer) - own
            is_meant = own and own <= ids(optimizer) and others & self._with_gradient
            if is_meant and not own & self._with_gradient and self.num_steps(optimizer) > _FEW:
                told = _WITHOUT.format(type(module).__name__, line, len(own), self.num_steps(optimizer))
                yield Likely(told), others

    def findings(self) -> list[Finding]:
        """Return the faults that were seen."""
        found: list[Finding] = []
        for optimizer in self.optimizers:
            num, own = self._num_mixed[id(optimizer)], ids(optimizer)
            if num >= _FEW and 2 * num >= self._num_steps[id(optimizer)] - 1:
                told = Likely(_NOT_RESET.format(self._lines[id(optimizer)]))
                found.append((told.of("not reset"), own))
            if len(clips := self._clips.get(id(optimizer), [])) >= _FEW and all(clips):
                told = Likely(_CLIPPED.format(self._line_of_clip, self.scale))
                found.append((told.of("clip before unscale"), own))
        self.settle()
        for line in dict.fromkeys(take.line for take in self._takes if take.line not in self.read):
            takes = [take for take in self._takes if take.line == line]
            thrown = [take for take in takes if take.lost == take.reached and not (take.is_used or take.is_read)]
            at = [i for i, take in enumerate(takes) if any(take is each for each in thrown)]
            is_rule = len(takes) <= 2 * len(thrown) or _is_periodic(at)
            if len(thrown) > _FEW and is_rule and any(take.is_used for take in takes):
                told = Likely(_THROWN.format(len(thrown), len(takes), self.zeroed or line))
                found.append((told.of(*_OF_A_WINDOW), thrown[0].reached))
        for params, (name, *lines) in self._anew.items():
            if len(lines) >= _FEW:
                told = Likely(_ANEW.format(name, len(lines), lines[-1]))
                found.append((told.of("optimizer re-created"), {*params}))
        return found


def _is_periodic(at: list[int]) -> bool:
    """Whether numbers are runs of one length, at equal distances, as the ends of passes are."""
    starts = [i for i in at if i - 1 not in at]
    if len(starts) <= _FEW:
        return False
    runs = [sum(start <= i < end for i in at) for start, end in zip(starts, [*starts[1:], math.inf], strict=True)]
    return len({*runs}) == 1 and len({b - a for a, b in pairwise(starts)}) == 1


def _own(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _place(p: nn.Parameter) -> tuple[int, int] | None:
    """Return where a dense gradient is, and its version; None for none."""
    return None if p.grad is None or p.grad.layout is not torch.strided else (p.grad.data_ptr(), p.grad._version)


def _size(p: nn.Parameter) -> float:
    return 0.0 if p.grad is None else float(p.grad.abs().sum(dtype=torch.float64))


def ids(optimizer: Optimizer) -> set[int]:
    """Return the ids of an optimizer's parameters."""
    return {*map(id, _own(optimizer))}


def _numbers(params: list[nn.Parameter]) -> list[float]:
    return [float(p.detach().reshape(-1)[:_NUM_NUMBERS].sum()) for p in params]


def _has_moments(optimizer: Optimizer, p: nn.Parameter) -> bool:
    return any(isinstance(v, torch.Tensor) and v.shape == p.shape for v in optimizer.state.get(p, {}).values())


VIEWS = (
    "Squeeze",
    "Unsqueeze",
    "Select",
    "View",
    "UnsafeView",
    "Reshape",
    "Transpose",
    "Permute",
    "ToCopy",
)  # for autograd
SCALES = "Div", "Mul"
MOST = 8  # losses since the last gradient that are kept, with their graphs


def roots_of(arguments: tuple, others: dict[str, Any]) -> tuple[list[Any], tuple, dict[str, Any]]:
    """Return the tensors of which `autograd.backward` or `grad` is asked for gradients, and its arguments with them.

    They may be given as a generator, which can be read once.
    """
    name = next((name for name in ("tensors", "outputs") if name in others), "")
    given: Any = arguments[0] if arguments else others.get(name, ())
    if isinstance(given, Tensor) or not hasattr(given, "__iter__"):
        return [given], arguments, others
    roots = [*given]
    if arguments:
        return roots, (tuple(roots), *arguments[1:]), others
    return roots, arguments, {**others, name: tuple(roots)} if name else others


def leads(node: Any, ends: list[Any], through: tuple[str, ...] = ()) -> bool:
    """Whether the graph leads from a node to one of the ends, by views and such operations alone."""
    while node is not None and not any(node is end for end in ends):
        before = [each for each, _ in node.next_functions if each is not None]
        if len(before) != 1 or not node.name().startswith((*VIEWS, *through)):
            return False
        (node,) = before
    return node is not None


def made_of(node: Any, known: dict[Any, float]) -> tuple[float, float] | None:
    """Return (the losses that make a number, the factor of numbers without a gradient); None if they are not known."""
    if node is None or node in known:
        return (0.0, 1.0) if node is None else (known[node], 0.0)
    name, children = node.name(), [child for child, _ in node.next_functions]
    if name.startswith(("Add", "Sub")):
        factors = [1.0, (-1.0 if name.startswith("Sub") else 1.0) * float(node._saved_alpha)]
    elif name.startswith(("Mul", "Div")) and children[1:] in ([], [None]) and isinstance(node._saved_other, Tensor):
        other = float(node._saved_other)
        factors, children = [other if name.startswith("Mul") else 1 / other], children[:1]
    else:
        return None
    total, factor = 0.0, 0.0
    for child, own in zip(children, factors, strict=True):
        part = made_of(child, known)
        if part is None:
            return None
        total, factor = total + own * part[0], factor + own * part[1]
    return total, factor


def scale_of(node: Any) -> float:
    """Return the number by which a loss is multiplied last; 1.0 for none."""
    other = getattr(node, "_saved_other", None) if node is not None and node.name().startswith("Mul") else None
    return float(other) if isinstance(other, Tensor) and other.numel() == 1 else 1.0


def made_by(node: Any, operation: str) -> bool:
    """Whether a tensor is the result of an operation, perhaps in another shape."""
    while node is not None and node.name().startswith(VIEWS):
        node = node.next_functions[0][0]
    return node is not None and node.name().startswith(operation)
