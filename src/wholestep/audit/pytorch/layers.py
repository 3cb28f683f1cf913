"""Layers and functions that do not do as they say: hidden parameters, moving statistics, masks, shapes, derivatives."""

import io
import linecache
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout
from typing import Any

import numpy as np
import torch
from torch import Tensor, autograd, nn
from torch.nn.modules.batchnorm import _NormBase

from wholestep.audit.found import Likely, many
from wholestep.audit.log import Line
from wholestep.audit.pytorch.hooks import Watcher
from wholestep.audit.pytorch.ledger import Finding
from wholestep.audit.pytorch.state import untouched, untrained

NORMS = _NormBase, nn.LayerNorm, nn.GroupNorm, getattr(nn, "RMSNorm", nn.LayerNorm)
_FEW = 3  # passes that show that statistics move
_HIDDEN = (
    "`{}.{}` is a plain {}{}: the {} in it are no part of the module for PyTorch, and no optimizer has their "
    "parameters, although gradients reach them. Make it an `nn.ModuleList` (or `nn.ModuleDict`, `nn.ParameterList`)."
)
_DRIFT = (
    "The running statistics of {} move, although all weights up to there are frozen: `train()` of the module ({}) puts "
    "them in training mode, too. Call `eval()` on the frozen part after each `train()`."
)
_BACKWARD = "`{}.backward` {} ({}). Compare it with `torch.autograd.gradcheck`."
_UNUSED = "does not use the gradient that it is given: a factor or a weight on its output is lost"
_FACTOR = "returns {:.4g} times the derivative of `forward` by input {}"
_OTHER = "returns another gradient than the derivative of `forward` by input {}"
_SAVED = "_saved_other", "_saved_self"
_ELEMENTWISE = "Sub", "Rsub", "Add", "Mul", "Div", "Pow"
_PRECISIONS = (True, 1e-6, 1e-3, 0.02), (False, 1e-2, 0.05, 0.2)  # in float64?; step, error of a slope, fault
_NUM_PLACES = 6


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


def _set_at(part: nn.Module, name: str) -> str:
    """Return the line that sets an attribute of a module; "" if it is not found."""
    file = type(part).forward.__code__.co_filename
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


def is_inverted(masked: Tensor, key: Tensor) -> bool:
    """Whether a mask leaves out the first places of every row, and the other places hold no data, but padding."""
    nums = masked.sum(1)
    if not torch.equal(masked, torch.arange(masked.shape[1], device=masked.device) < nums[:, None]):
        return False
    if not bool((nums > 0).all()) or nums.unique().numel() < 2:
        return False
    is_alike = torch.isclose(key, key[int(nums.argmin())]).all(-1) | masked
    return bool((nums == masked.shape[1]).any() or is_alike.all())


def rows_met(roots: Iterable[Any]) -> int:
    """Return the rows of outputs that a loss sets against all rows of numbers without a gradient; 0 for none.

    Such a table is summed up as a whole; one that is made of two outputs, row by row, is meant.
    """
    nodes, seen, found = [*roots], set[Any](), set[int]()
    tables: list[Any] = []
    while nodes or tables:
        is_table = bool(tables)
        node = tables.pop() if is_table else nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        below = [(child, child._input_metadata[i].shape) for child, i in node.next_functions if child is not None]
        num, shapes = node._input_metadata[0].shape[:1], [[*shape] for _, shape in below]
        if is_table and any(math.prod(shape) < num[0] ** 2 for shape in shapes):
            is_one = len(shapes) == 1 and node.name().startswith(_ELEMENTWISE) and shapes[0] in ([*num, 1], [*num])
            other = next((getattr(node, name) for name in _SAVED if isinstance(getattr(node, name, 0), Tensor)), None)
            is_one &= other is None or other.numel() == num[0]
            found.add(num[0] if is_one else 0)
        is_whole = node.name() in ("MeanBackward0", "SumBackward0")
        for child, shape in below:
            is_square = len(shape) == 2 and shape[0] == shape[1] > 1
            (tables if is_square and (is_table or is_whole) else nodes).append(child)
    return found.pop() if len(found) == 1 else 0


def wrong_backward(kind: Any, calls: list[list]) -> str:
    """Return the note on a function whose backward pass is not the derivative of its forward pass; "" for none."""
    told = [_difference(kind, arguments) for arguments in calls]
    if not told or not all(told):
        return ""
    code = kind.backward.__code__
    first = min(line for *_, line in code.co_lines() if line and line > code.co_firstlineno + 1)
    return Likely(_BACKWARD.format(kind.__name__, told[-1], Line(code.co_filename, first)))


def _difference(kind: Any, arguments: list) -> str:
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
    draws = torch.Generator().manual_seed(0)
    own = [i for i, v in enumerate(arguments) if isinstance(v, Tensor) and v.requires_grad]
    given = [v.detach() if isinstance(v, Tensor) else v for v in arguments]
    given = [v.double() if is_double and isinstance(v, Tensor) and v.is_floating_point() else v for v in given]
    for i in own:  # away from kinks, as zeros are
        noise = 1e-3 * torch.randn(given[i].shape, generator=draws).to(given[i])
        given[i] = torch.where(given[i] == 0, noise, given[i] * (1 + noise))

    def run(values: list, leaves: list) -> list[Tensor]:
        passed = [leaves[own.index(i)].clone() if i in own else v for i, v in enumerate(values)]
        out = kind.apply(*(v.clone() if isinstance(v, Tensor) else v for v in passed))
        return [v for v in (out if isinstance(out, tuple) else (out,)) if isinstance(v, Tensor) and v.requires_grad]

    def graded(factor: float) -> list[Tensor | None]:
        leaves = [given[i].clone().requires_grad_() for i in own]
        return [*autograd.grad(run(given, leaves), leaves, [factor * w for w in weights], allow_unused=True)]

    leaves = [given[i].clone().requires_grad_() for i in own]
    one, two = run(given, leaves), run(given, leaves)
    is_same = any(v.numel() == x.numel() and torch.equal(v.ravel(), x.ravel()) for v in one for x in leaves)
    if is_same or not all(map(torch.equal, one, two)):  # it changes gradients only, or it draws
        return ""
    weights = [torch.randn(v.shape, generator=draws).to(v) for v in one]
    found = ""
    for at, (grad, doubled) in enumerate(zip(graded(1.0), graded(2.0), strict=True)):
        if grad is None or doubled is None or not grad.any():
            continue

        def value(place: int, by: float, at: int = at) -> float:
            moved = [given[i].clone().requires_grad_() for i in own]
            moved[at].data.view(-1)[place] += by
            return float(sum((v.detach() * w).sum(dtype=torch.float64) for v, w in zip(run(given, moved), weights, strict=True)))

        flat, h = grad.reshape(-1), step * float(given[own[at]].abs().mean())
        places = {*flat.abs().topk(min(_NUM_PLACES, flat.numel())).indices.tolist()}
        places |= {*torch.randperm(flat.numel(), generator=draws)[:_NUM_PLACES].tolist()}
        slopes = [[(value(p, k) - value(p, -k)) / (2 * k) for k in (h, h / 2)] for p in sorted(places)]
        (numeric, again), own_grad = np.array(slopes).T, flat[sorted(places)].double().numpy()
        if not np.any(numeric):  # constant nearby: another gradient is taken in its place on purpose
            return ""
        is_sure = (np.abs(numeric - again) <= error * np.abs(numeric)) & (np.abs(numeric) > error * np.abs(numeric).max())
        if not is_sure.any():
            return None
        ratios = own_grad[is_sure] / numeric[is_sure]
        if np.mean(np.abs(ratios - 1) > fault) > 0.5:
            is_factor = np.ptp(ratios) <= fault * abs(ratios[0])
            other = _FACTOR.format(np.median(ratios), at + 1) if is_factor else _OTHER.format(at + 1)
            found = found or (_UNUSED if torch.equal(grad, doubled) else other)
    return found
