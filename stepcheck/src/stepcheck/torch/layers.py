"""Layers and functions that do not do as they say: hidden parameters, moving statistics, masks, shapes, derivatives."""

import io
import linecache
import math
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from typing import Any

import numpy as np
import torch
from torch import Tensor, autograd, nn
from torch.nn.modules.batchnorm import _NormBase

from stepcheck.report.found import Likely, many, some
from stepcheck.torch.hooks import Watcher
from stepcheck.torch.ledger import Finding
from stepcheck.torch.state import trained, untouched, untrained
from stepcheck.trace.log import Line
from stepcheck.user_code.source import is_of_user, line_here

NORMS = _NormBase, nn.LayerNorm, nn.GroupNorm, getattr(nn, "RMSNorm", nn.LayerNorm)
_FEW = 3  # passes that show that statistics move
_UNHELD = (
    "{} were set after the optimizer was made, which does not have them: they get gradients, and never move. Make the "
    "optimizer once the model is whole."
)
_HIDDEN = (
    "`{}.{}` is a plain {}{}: the {} in it are no part of the module for PyTorch, and no optimizer has their "
    "parameters, although gradients reach them. Make it an `nn.ModuleList` (or `nn.ModuleDict`, `nn.ParameterList`)."
)
_MISSPELT = "requires_grad", "require_grad", "required_grad", "requires_grads"
_NO_EFFECT = "`{}` is set to {} on {}, and has no effect{}: they are {}."
_RESTORED = (
    "`load_state_dict` gets the module's own parameters, and restores nothing ({}): a `state_dict()` is no copy, and "
    "moves with each step. Keep `copy.deepcopy(model.state_dict())`."
)
_DRIFT = (
    "The running statistics of {} move, although all weights up to there are frozen: `train()` of the module ({}) puts "
    "them in training mode, too. Call `eval()` on the frozen part after each `train()`."
)
_INVERTED = (
    "`key_padding_mask` is True for the first places of every row, up to another one in each row ({}), and attention "
    "leaves out the places where it is True. If these are the valid ones, pass `~mask`."
)
_BROADCAST = (
    "In the loss, outputs of shape ({0}, 1) or ({0},) meet numbers of another shape, and each row meets the numbers of "
    "all rows ({1}). Give both one shape, as by `squeeze(-1)`."
)
_BACKWARD = "`{}.backward` {} ({}). Compare it with `torch.autograd.gradcheck`."
_UNUSED = "does not use the gradient that it is given: a factor or a weight on its output is lost"
_FACTOR = "returns {:.4g} times the derivative of `forward` by input {}"
_OTHER = "returns another gradient than the derivative of `forward` by input {}"
_ELEMENTWISE = "Sub", "Rsub", "Add", "Mul", "Div", "Pow"
_PRECISIONS = (True, 1e-6, 1e-3, 0.02), (False, 1e-2, 0.05, 0.2)  # in float64?; step, error of a slope, fault
_NUM_PLACES, _MOST_NUMBERS = 6, 10**6  # of slopes; of the arguments of a function that are kept


def hidden(module: nn.Module, reached: set[int], held: set[int]) -> Iterator[Finding]:
    """Yield the plain lists and dicts of a module whose parameters get gradients, and which no optimizer has.

    `reached`: the ids of the leaves that losses reach; `held`: of the parameters that optimizers have.
    """
    known = held | {id(p) for p in module.parameters()}
    for part in module.modules():
        for name, value in vars(part).items():
            inside = [*value.values()] if isinstance(value, dict) else value if isinstance(value, list | tuple) else []
            layers = [each for each in inside if isinstance(each, nn.Module)]
            params = [each for each in inside if isinstance(each, nn.Parameter)]
            params += [p for layer in layers for p in layer.parameters()]
            if held and any(id(p) in reached and id(p) not in known for p in params):
                told = many(len(layers), "module") if layers else many(len(params), "parameter")
                note = _HIDDEN.format(type(part).__name__, name, type(value).__name__, _set_at(part, name), told)
                yield Likely(note), {id(p) for p in module.parameters()}


def unheld(watcher: Watcher, held: set[int]) -> Iterator[Finding]:
    """Yield the parameters that a module has got since its first pass, which have gradients, and no optimizer has."""
    own = trained(watcher.module)
    new = [(name, p) for name, p in own if id(p) not in held | watcher.first]
    names = [name for name, p in new if p.grad is not None and bool(p.grad.any())]
    if names and held & {id(p) for _, p in own}:
        yield Likely(_UNHELD.format(some(names, 4))), {id(p) for _, p in own}


def misspelt(module: nn.Module, file: str) -> Iterator[Finding]:
    """Yield the attributes that were to freeze or to thaw parameters, and do not; `file`: that may set them."""
    own = {id(p) for p in module.parameters()}
    for name in _MISSPELT:
        for value, now in ((False, "trained"), (True, "not trained")):
            wrong = [p for p in module.parameters() if vars(p).get(name) is value is not p.requires_grad]
            if wrong:
                told = _NO_EFFECT.format(name, value, f"{len(wrong)} of the parameters", _line_of(file, name), now)
                yield Likely(f"{told} The attribute is `requires_grad`."), own
            for at, part in module.named_modules() if not wrong else ():
                if vars(part).get(name) is value and any(p.requires_grad is not value for p in part.parameters()):
                    told = f"the module `{at or type(part).__name__}`"
                    told = _NO_EFFECT.format(name, value, told, _line_of(file, name), now)
                    yield Likely(f"{told} Call `requires_grad_({value})`."), own
                    break


def _line_of(file: str, name: str) -> str:
    """Return the first line of a file that sets an attribute; "" if there is none."""
    texts = enumerate(linecache.getlines(file), start=1)
    found = next((i for i, text in texts if re.search(rf"\.{name}\s*=", text)), 0)
    return f" ({Line(file, found)})" if found else ""


class States:
    """The parameters that `state_dict` gives out, and whether a module gets its own ones back.

    Args:
        num_moves: the number of optimizer steps so far that have some of these parameters.
    """

    def __init__(self, num_moves: Callable[[set[int]], int]):
        self._num_moves = num_moves
        self._given: list[tuple[weakref.ref, int]] = []  # tensors, and the moves before
        self._num_loads = Counter[int]()
        self.found: dict[str, set[int]] = {}  # by line the parameters

    def keep(self, arguments: tuple, others: dict, result: Any) -> None:
        """Note the tensors of a `state_dict`."""
        if others.get("destination") is None and (own := trained(arguments[0])):
            self._given = [each for each in self._given if each[0]() is not None]
            tensors = [result[name] for name, _ in own[:1] if isinstance(result.get(name), Tensor)]
            self._given += [(weakref.ref(tensor), self._age(arguments[0])) for tensor in tensors]

    def load(self, arguments: tuple, others: dict, _: Any) -> None:
        """Note that a module gets a state, and whether it is older than its last move, and in its own memory."""
        module, state = arguments[0], [*arguments[1:], others.get("state_dict")][0]
        given = [(p, state.get(name)) for name, p in trained(module)]
        if given and not others.get("assign") and all(_is_in(value, p) for p, value in given):
            ages = [age for ref, age in self._given if ref() is given[0][1]]
            if ages and max(ages) < self._age(module):
                self.found[str(line_here())] = {id(p) for p, _ in given}
        self._num_loads[id(module)] += 1

    def _age(self, module: nn.Module) -> int:
        return self._num_moves({id(p) for _, p in trained(module)}) + self._num_loads[id(module)]

    def findings(self) -> Iterator[Finding]:
        """Yield the states that were not restored."""
        yield from ((Likely(_RESTORED.format(line)), own) for line, own in self.found.items())


def _is_in(value: Any, p: nn.Parameter) -> bool:
    """Whether a tensor is in the memory of a parameter."""
    return isinstance(value, Tensor) and value.layout is torch.strided and value.data_ptr() == p.data_ptr() != 0


def _set_at(part: nn.Module, name: str) -> str:
    """Return the line that sets an attribute of a module; "" if it is not found."""
    code = getattr(getattr(type(part), "forward", None), "__code__", None)
    if code is None:
        return ""
    file = code.co_filename
    texts = enumerate(linecache.getlines(file), start=1)
    found = next((i for i, text in texts if re.search(rf"\bself\.{name}\b[^=]*=", text)), 0)
    return f" ({Line(file, found)})" if found else ""


def drifting(watcher: Watcher, line: str) -> Iterator[Finding]:
    """Yield the frozen layers whose running statistics move in training."""
    module, kept = watcher.module, [c.buffers for c in watcher.log.called if c.is_whole and c.differentiated]
    names = [name for name, _ in untrained(module)]
    if len(kept) < _FEW or any(len(each) != len(names) for each in kept):
        return
    moving = {name for i, name in enumerate(names) if not np.array_equal(kept[0][i], kept[-1][i])}
    has_frozen, found = False, []
    for name, part in module.named_modules():
        own = [*part.parameters(recurse=False)]
        if any(p.requires_grad for p in own):
            break
        has_frozen |= any(p.ndim > 1 for p in own)
        if has_frozen and isinstance(part, _NormBase) and f"{name}.running_mean" in moving:
            found.append(name)
    if found:
        told = f"`{found[0]}`" if len(found) == 1 else f"{len(found)} layers"
        yield Likely(_DRIFT.format(told, line)), set(map(id, module.parameters()))


class Parts:
    """The arguments of functions of the user's, masks of attention, and shapes in losses."""

    def __init__(self) -> None:
        self._applied: dict[Any, list[list]] = {}  # by function, of its first calls
        self._masks: dict[str, list[bool]] = {}  # by line, whether a mask is inverted
        self._met: list[tuple[int, str]] = []  # by graph, the rows that meet all rows, and the line

    def apply(self, kind: Any, arguments: tuple) -> None:
        """Note a call of a function, before it changes its arguments."""
        given, kept = [v for v in arguments if isinstance(v, Tensor)], self._applied.setdefault(kind, [])
        is_small = len(kept) < _FEW and sum(v.numel() for v in given) <= _MOST_NUMBERS
        if is_small and any(v.requires_grad for v in given) and is_of_user(kind.forward.__code__.co_filename):
            flags = [isinstance(v, Tensor) and v.requires_grad for v in arguments]
            copies = [v.detach().clone() if isinstance(v, Tensor) else v for v in arguments]
            kept.append([v.requires_grad_() if flag else v for v, flag in zip(copies, flags, strict=True)])

    def attend(self, arguments: tuple, others: dict, _: Any) -> None:
        """Note whether attention leaves out the valid places."""
        names = "self", "query", "key", "value", "key_padding_mask"
        given = {"key_padding_mask": None, **dict(zip(names, arguments, strict=False)), **others}
        mask, key = given["key_padding_mask"], given["key"].detach()
        if mask is not None and mask.ndim == 2 and torch.is_grad_enabled():
            key, masked = key if given["self"].batch_first else key.transpose(0, 1), mask.bool()
            self._masks.setdefault(str(line_here()), []).append(_is_inverted(masked, key))

    def meet(self, roots: list[Tensor]) -> None:
        """Note the shapes in the graph of a loss."""
        self._met.append((_rows_met([root.grad_fn for root in roots]), str(line_here())))

    def findings(self, watchers: list[Watcher]) -> Iterator[Finding]:
        """Yield the faults that were seen."""
        for line, are_inverted in self._masks.items():
            if len(are_inverted) >= _FEW and all(are_inverted):
                yield Likely(_INVERTED.format(line)), set()
        sizes = {each.shape[:1] for watcher in watchers for c in watcher.log.called for each in c.inputs[:1]}
        if self._met[1:] and all((num,) in sizes for num, _ in self._met):
            yield Likely(_BROADCAST.format(*self._met[-1])).of("broadcast"), set()
        for kind, calls in self._applied.items():
            told = [_difference(kind, arguments) for arguments in calls]
            if told and all(told):
                code = kind.backward.__code__
                first = min(line for *_, line in code.co_lines() if line and line > code.co_firstlineno + 1)
                yield Likely(_BACKWARD.format(kind.__name__, told[-1], Line(code.co_filename, first))), set()


def _is_inverted(masked: Tensor, key: Tensor) -> bool:
    """Whether a mask leaves out the first places of every row, and the other places hold no data, but padding."""
    nums = masked.sum(1)
    is_prefix = torch.equal(masked, torch.arange(masked.shape[1], device=masked.device) < nums[:, None])
    if not is_prefix or not bool((nums > 0).all()) or nums.unique().numel() < 2:
        return False
    are_alike = torch.isclose(key, key[int(nums.argmin())]).all(-1) | masked
    return bool((nums == masked.shape[1]).any() or are_alike.all())


def _rows_met(nodes: list[Any]) -> int:
    """Return the rows of outputs that a loss sets against all rows of numbers without a gradient; 0 for none.

    Such a table is summed up as a whole; one that is made of two outputs, row by row, is meant.
    """
    seen, found, tables = set[Any](), set[int](), list[Any]()
    while nodes or tables:
        is_table = bool(tables)
        node = tables.pop() if is_table else nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        below = [(child, [*child._input_metadata[i].shape]) for child, i in node.next_functions if child is not None]
        num = [*node._input_metadata[0].shape[:1]]
        if is_table and any(math.prod(shape) < num[0] ** 2 for _, shape in below):
            is_one = [shape for _, shape in below] in ([[*num, 1]], [num]) and node.name().startswith(_ELEMENTWISE)
            saved = [getattr(node, name, None) for name in ("_saved_other", "_saved_self")]
            are_rows = all(v.numel() == num[0] for v in saved if isinstance(v, Tensor))
            found.add(num[0] if is_one and are_rows else 0)
        is_inside = is_table or node.name() in ("MeanBackward0", "SumBackward0")
        for child, shape in below:
            (tables if is_inside and len(shape) == 2 and shape[0] == shape[1] > 1 else nodes).append(child)
    return found.pop() if len(found) == 1 else 0


def _difference(kind: Any, arguments: list) -> str:
    """Return how a backward pass differs from the derivative of its forward pass; "" if it does not."""
    for precision in _PRECISIONS:
        try:
            with untouched(), redirect_stdout(io.StringIO()), torch.enable_grad():
                told = _compared(kind, arguments, *precision)
        except Exception:  # the user's own code: it cannot be run again, or not with such numbers
            continue
        if told is not None:
            return told
    return ""


def _compared(kind: Any, arguments: list, is_double: bool, step: float, error: float, fault: float) -> str | None:
    """Return how the gradients differ from slopes of the forward pass; None if these have too large errors."""
    draws, leaves, given = torch.Generator().manual_seed(0), list[Tensor](), []
    for v in arguments:
        own = v.detach().clone() if isinstance(v, Tensor) else v
        own = own.double() if is_double and isinstance(v, Tensor) and v.is_floating_point() else own
        if isinstance(v, Tensor) and v.requires_grad:  # away from kinks, as zeros are
            noise = 1e-3 * torch.randn(own.shape, generator=draws).to(own)
            own = torch.where(own == 0, noise, own * (1 + noise)).contiguous().requires_grad_()
            leaves.append(own)
        given.append(own)

    def run() -> list[Tensor]:
        out = kind.apply(*(v.clone() if isinstance(v, Tensor) else v for v in given))
        return [v for v in (out if isinstance(out, tuple) else (out,)) if isinstance(v, Tensor) and v.requires_grad]

    def value(leaf: Tensor, place: int, by: float) -> float:
        leaf.data.view(-1)[place] += by
        total = sum(float((v.detach() * w).sum(dtype=torch.float64)) for v, w in zip(run(), weights, strict=True))
        leaf.data.view(-1)[place] -= by
        return total

    first, found = run(), ""
    is_same = any(v.numel() == x.numel() and torch.equal(v.ravel(), x.ravel()) for v in first for x in leaves)
    if is_same or not all(map(torch.equal, first, run())):  # it changes gradients only, or it draws
        return ""
    weights = [torch.randn(v.shape, generator=draws).to(v) for v in first]
    grads, doubled = (autograd.grad(run(), leaves, [k * w for w in weights], allow_unused=True) for k in (1, 2))
    for i, (leaf, grad) in enumerate(zip(leaves, grads, strict=True)):
        if grad is None or not grad.any():
            continue
        flat, h = grad.reshape(-1), step * float(leaf.detach().abs().mean())
        largest, some = flat.abs().sort(descending=True).indices, torch.randperm(flat.numel(), generator=draws)
        places = torch.cat([largest[:_NUM_PLACES], some[:_NUM_PLACES]]).unique().tolist()
        slopes = [[(value(leaf, p, k) - value(leaf, p, -k)) / (2 * k) for k in (h, h / 2)] for p in places]
        numeric, again = np.array(slopes).T
        if not np.any(numeric):  # constant nearby: another gradient is taken in its place on purpose
            return ""
        sizes = np.abs(numeric)
        is_sure = (np.abs(numeric - again) <= error * sizes) & (sizes > error * sizes.max())
        if not is_sure.any():
            return None
        ratios = flat[places].double().numpy()[is_sure] / numeric[is_sure]
        if np.median(np.abs(ratios - 1)) > fault:
            is_factor = np.ptp(ratios) <= fault * abs(ratios[0])
            told = _FACTOR.format(np.median(ratios), i + 1) if is_factor else _OTHER.format(i + 1)
            found = found or (_UNUSED if torch.equal(grad, doubled[i]) else told)
    return found
