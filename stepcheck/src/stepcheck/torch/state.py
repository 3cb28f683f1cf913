"""The values of a module, and the rest that a call of it needs."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from inspect import signature
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn

from stepcheck.torch import device
from stepcheck.torch.nests import Place
from stepcheck.trace.log import Called, Line, Values
from stepcheck.trace.measure import in_part, places

_OWN: list[bool] = []  # judgements that run
# modules that `stepcheck.record` records
RECORDED: WeakSet[nn.Module] = WeakSet()
# arguments of which a model computes its loss
LABELS = (
    "labels",
    "targets",
    "target",
)


class Random(NamedTuple):
    """The state of the generators that a pass may draw from; PyTorch's on each device."""

    of_torch: list[Tensor]
    of_numpy: Any
    of_python: Any

    @staticmethod
    def now() -> "Random":
        """Return the present state."""
        return Random(device.states(), np.random.get_state(), random.getstate())

    def digest(self) -> str:
        """Return a digest of PyTorch's states."""
        states = b"".join(each.numpy().tobytes() for each in self.of_torch)
        return blake2b(states, digest_size=8).hexdigest()

    def set(self) -> None:
        """Let the generators continue from this state."""
        device.set_states(self.of_torch)
        np.random.set_state(self.of_numpy)
        random.setstate(self.of_python)

    @property
    def is_now(self) -> bool:
        """Whether nothing has drawn from PyTorch's generators since."""
        return all(map(torch.equal, self.of_torch, device.states()))


class Kind(NamedTuple):
    """The dtype of an input, whether it requires a gradient, and is on the CPU."""

    dtype: torch.dtype
    requires_grad: bool
    is_on_cpu: bool


@dataclass(frozen=True)
class Setting:
    """All that a forward pass needs beside its values.

    Attributes:
        given: the arguments, with places for the inputs; `output` is the output's form.
        kinds: of the inputs.
        has_graph: whether a gradient can be taken; `is_through`: by its inputs.
        cast: the dtype of the `torch.autocast` around the pass, or None; `is_cast`:
            whether one is around it or in it.
        lines: that call a loss after the pass, or `backward`.
        parts: the passes that it is made of, if these are several.
        beside: other modules before its backward pass.
    """

    given: Any
    random: Random
    kinds: list[Kind] = field(default_factory=list)
    output: Any = ()
    has_graph: bool = False
    is_through: bool = False
    cast: torch.dtype | None = None
    is_cast: bool = False
    lines: list[Line] = field(default_factory=list)
    parts: tuple[Called, ...] = ()
    beside: dict[int, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, called: Called) -> "Setting":
        """Return the setting of a pass; of one that is made up, the plainest call."""
        places = map(Place, range(len(called.inputs)))
        return called.setting or cls(((*places,), {}), Random.now())


def of_torch(function: Callable) -> Callable:
    """Return a function that `torch.compile` takes for a part of PyTorch, not for user
    code.
    """
    home = nn.Module.forward.__code__.co_filename
    function.__code__ = function.__code__.replace(co_filename=home)
    return function


@contextmanager
def untouched() -> Iterator[None]:
    """Inside, draws move no random state of the user's, and other watches hear nothing."""
    before = Random.now()
    _OWN.append(True)
    try:
        yield
    finally:
        _OWN.pop()
        before.set()


def is_silent() -> bool:
    """Whether nothing is recorded: a judgement runs, or a function of `torch.func`."""
    is_compiling = torch.compiler.is_compiling()
    inner = torch._C._functorch.peek_interpreter_stack
    return is_compiling or bool(_OWN) or inner() is not None


def bare(module: nn.Module) -> nn.Module:
    """Return the module inside of `torch.compile` and of modules for several devices."""
    parallel = nn.DataParallel, nn.parallel.DistributedDataParallel
    name = "module" if isinstance(module, parallel) else "_orig_mod"
    inner = getattr(module, name, None)
    return module if inner is None else bare(inner)


def array(tensor: Tensor) -> np.ndarray:
    """Return a copy of a tensor of any device as an array, of one in bfloat16 as
    float32.
    """
    plain = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    wide = plain.float() if plain.dtype == torch.bfloat16 else plain
    return np.array(wide.cpu().numpy())


def tensor(values: np.ndarray, like: Tensor | None = None) -> Tensor:
    """Return an array as a tensor; where one is given, of its device and dtype."""
    found = torch.tensor(np.asarray(values))
    return found if like is None else found.to(like.device, like.dtype)


def sampled(given: Tensor) -> np.ndarray:
    """Return a copy of a tensor, of a large one in part, as `in_part` does it."""
    chosen = places(given.numel())
    if chosen is None or given.is_sparse:
        return in_part([array(given)])[0]
    some = torch.as_tensor(chosen, device=given.device)
    return array(given.detach().reshape(-1)[some])


def rows_in(
    leaves: list[Tensor], num: int | None, labels: Tensor | None = None
) -> list[int]:
    """Return which tensors, without the labels, have rows, as many as the first one;
    the first `num`.

    >>> rows_in([torch.ones(4, 2), torch.ones(1, 2), torch.ones(4)], None)
    [0, 2]
    """
    known = [i for i, x in enumerate(leaves) if x.ndim and x is not labels]
    return [i for i in known if len(leaves[i]) == len(leaves[known[0]])][:num]


def trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that a gradient is taken of, each once; all, of a recorded
    module.
    """
    is_recorded = module in RECORDED  # whose layers may be thawed
    named = module.named_parameters()
    return [(name, p) for name, p in named if is_recorded or p.requires_grad]


def trained_in(module: nn.Module) -> tuple[int, ...]:
    """Return the numbers of the parameters that a gradient is taken of."""
    return tuple(
        i for i, p in enumerate(module.parameters()) if p.requires_grad
    )


def untrained(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the frozen parameters, and then the buffers."""
    own = {id(p) for _, p in trained(module)}
    frozen = [
        (name, p) for name, p in module.named_parameters() if id(p) not in own
    ]
    return [*frozen, *module.named_buffers()]


def values(module: nn.Module) -> Values:
    """Return copies of all values."""
    params, others = trained(module), untrained(module)
    return Values(
        [array(p) for _, p in params], [array(each) for _, each in others]
    )


def modes(module: nn.Module) -> tuple[bool, ...]:
    """Return of each part, the module first, whether it is in training mode; one for
    all where they agree.
    """
    every = tuple(part.training for part in module.modules())
    return every[:1] if len({*every}) == 1 else every


def set_modes(module: nn.Module, wanted: tuple[bool, ...]) -> None:
    """Set the mode of each part by itself."""
    parts = [*module.modules()]
    every = wanted * len(parts) if len(wanted) == 1 else wanted
    for part, is_training in zip(parts, every, strict=True):
        part.training = is_training


def own_loss(
    module: nn.Module, args: tuple, kwargs: dict
) -> tuple[Tensor | None, float | None]:
    """Return the labels of which a module computes its loss, and the divisor of a sum."""
    given = signature(module.forward).bind(*args, **kwargs).arguments
    given |= given.get("kwargs", {})
    num = given.get("num_items_in_batch")
    named = (
        given[name] for name in LABELS if isinstance(given.get(name), Tensor)
    )
    return next(named, None), None if num is None else float(num)
