"""Layers that do not do as their module says: parameters that it does not know, statistics that move while frozen."""

import linecache
import re
from collections.abc import Iterator

import numpy as np
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from wholestep.audit.found import Likely, many
from wholestep.audit.log import Line
from wholestep.audit.pytorch.hooks import Watcher
from wholestep.audit.pytorch.ledger import Finding
from wholestep.audit.pytorch.state import untrained

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
