"""The values of a module, and the rest that a call of it or an optimizer step needs."""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from stepcheck.steps import StepRule
from stepcheck.torch import device
from stepcheck.torch.steps import SLOTS, rule_of
from stepcheck.trace.log import Called, Line, Values
from stepcheck.trace.measure import in_part, outline, places

_OWN: list[bool] = []  # judgements that run
RECORDED: WeakSet[nn.Module] = WeakSet()  # modules that `stepcheck.record` records


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


@dataclass(frozen=True)
class Setting:
    """All that a forward pass needs beside its values.

    Attributes:
        packed: makes the arguments of their leaves; `output` does it for the output.
        flags: which parameters were set to be trained, by the order of
            `named_parameters`.
        dtypes: of the inputs; `are_on_cpu`, `needs`: which are on the CPU, and require
            a gradient.
        has_graph: whether a gradient can be taken; `is_through`: by its inputs.
        draws: whether the pass moved the random state.
        cast: the dtype of the `torch.autocast` around the pass, or None; `is_cast`:
            whether one is around it or in it.
        lines: that call a loss after the pass, or `backward`.
        parts: the passes that it is made of, if these are several.
        beside: other modules before its backward pass.
    """

    packed: Callable[[list], Any]
    modes: tuple[bool, ...]
    random: Random
    flags: tuple[bool, ...]
    dtypes: tuple[torch.dtype, ...] = ()
    needs: tuple[bool, ...] = ()
    are_on_cpu: tuple[bool, ...] = ()
    output: Callable[[list], Any] = list
    has_graph: bool = False
    draws: bool = False
    is_through: bool = False
    cast: torch.dtype | None = None
    is_cast: bool = False
    lines: list[Line] = field(default_factory=list)
    parts: tuple[Called, ...] = ()
    beside: dict[int, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Rates:
    """All that an optimizer step needs beside its values.

    Attributes:
        places: of each of the model's parameters: its group, its place there, its
            index.
        groups: the options of each group.
        slots: of each slot: the index of its parameter, its name, its device, if it has
            one.
        rules: of each of the model's parameters.
    """

    places: list[tuple[int, int, int]]
    groups: list[dict[str, Any]]
    slots: list[tuple[int, str, torch.device | None]]
    rules: tuple[StepRule | None, ...] = ()

    @property
    def names(self) -> tuple[tuple[int, str], ...]:
        """Of each slot the index of its parameter, and its name in a step rule."""
        return tuple((i, SLOTS.get(name, "")) for i, name, _ in self.slots)


class Step(NamedTuple):
    """A module's parameters, an optimizer's slots of them, and the rest."""

    params: list[np.ndarray]
    slots: list[np.ndarray]
    rates: Rates


class Own(NamedTuple):
    """The loss that a module computes itself: its labels, its value, the divisor of a
    sum.
    """

    labels: np.ndarray
    loss: float
    num: float | None


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


class Nest(NamedTuple):
    """Arguments or outputs without their tensors: `packed(leaves)` puts tensors in
    their places.
    """

    packed: Callable[[list], Any]
    leaves: list[Tensor]


def unpacked(nest: Any) -> Nest:
    """Take tensors out of tuples, lists, dataclasses, and mappings in the order of
    names.

    >>> nest = unpacked({"b": torch.ones(1), "a": (torch.zeros(1), 5)})
    >>> nest.leaves, nest.packed([1, 2])
    ([tensor([0.]), tensor([1.])], {'b': 2, 'a': (1, 5)})
    """
    kind: Any = type(nest)  # and no tensor is kept
    if isinstance(nest, Tensor):
        return Nest(_first, [nest])
    if isinstance(nest, Mapping):
        names = sorted(nest, key=str)
        parts = unpacked([nest[name] for name in names])
        return Nest(
            partial(_as_mapping, kind, names, [*nest], parts.packed), parts.leaves
        )
    if isinstance(nest, tuple | list):
        every = [unpacked(part) for part in nest]
        packed = partial(
            _as_sequence, kind, [(part.packed, len(part.leaves)) for part in every]
        )
        return Nest(packed, [leaf for part in every for leaf in part.leaves])
    if is_dataclass(nest) and not isinstance(nest, type):
        names = [each.name for each in fields(nest)]
        parts = unpacked([getattr(nest, name) for name in names])
        return Nest(partial(_as_object, kind, names, parts.packed), parts.leaves)
    return Nest(partial(_constant, nest), [])


# ---- the functions that put leaves in their places, which another process can be sent ----


def _first(leaves: list) -> Any:
    return leaves[0]


def _constant(value: Any, leaves: list) -> Any:
    return value


def _as_mapping(
    kind: Any,
    names: list[str],
    order: list[str],
    packed: Callable[[list], Any],
    leaves: list,
) -> Any:
    found = dict(zip(names, packed(leaves), strict=True))
    ordered = {name: found[name] for name in order}
    return ordered if kind is dict else kind(ordered)


def _as_sequence(
    kind: Any, parts: list[tuple[Callable[[list], Any], int]], leaves: list
) -> Any:
    rest, found = list(leaves), []
    for packed, num in parts:
        found.append(packed(rest[:num]))
        rest = rest[num:]
    return kind(*found) if hasattr(kind, "_fields") else kind(found)


def _as_object(
    kind: Any, names: list[str], packed: Callable[[list], Any], leaves: list
) -> Any:
    new = object.__new__(kind)
    for name, value in zip(names, packed(leaves), strict=True):
        object.__setattr__(new, name, value)
    return new


def filled(
    packed: Callable[[list], Any], chosen: list[int], rest: list, leaves: list
) -> Any:
    """Return a nest with leaves at the chosen places, and the rest at the others."""
    own = dict(zip(chosen, leaves, strict=True))
    return packed([own.get(i, leaf) for i, leaf in enumerate(rest)])


def bare(module: nn.Module) -> nn.Module:
    """Return the module inside of `torch.compile` and of modules for several devices."""
    is_parallel = isinstance(
        module, nn.DataParallel | nn.parallel.DistributedDataParallel
    )
    inner = module.module if is_parallel else getattr(module, "_orig_mod", None)
    return module if inner is None else bare(inner)


def array(tensor: Tensor) -> np.ndarray:
    """Return a copy of a tensor of any device as an array, of one in bfloat16 as
    float32.
    """
    plain = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return np.array(
        (plain.float() if plain.dtype == torch.bfloat16 else plain).cpu().numpy()
    )


def tensor(values: np.ndarray, like: Tensor | None = None) -> Tensor:
    """Return an array as a tensor; where one is given, on its device."""
    found = torch.tensor(np.asarray(values))
    return found if like is None else found.to(like.device)


def sampled(given: Tensor) -> np.ndarray:
    """Return a copy of a tensor, of a large one in part, as `in_part` does it."""
    chosen = places(given.numel())
    if chosen is None or given.is_sparse:
        return in_part([array(given)])[0]
    return array(
        given.detach().reshape(-1)[torch.as_tensor(chosen, device=given.device)]
    )


def split(
    leaves: list[Tensor], num: int, like: list[tuple[int, ...]] | None = None
) -> list[int]:
    """Return which tensors have rows, as many as `num` at most.

    Args:
        like: the shapes of these rows, in their order; the first axis may be shorter.

    >>> split([torch.ones(4, 2), torch.ones(1, 2), torch.ones(4)], 1)
    [0]
    >>> split([torch.ones(1, 4, 2), torch.ones(4, 3), torch.ones(4)], 2, [(), (3,)])
    [2, 1]
    """
    chosen: list[int] = []
    for shape in like or []:
        fits = (
            i
            for i, leaf in enumerate(leaves)
            if leaf.ndim and i not in chosen and _is_like(leaf.shape[1:], shape)
        )
        chosen += itertools.islice(fits, 1)
    if like and len(chosen) == len(like) and len({len(leaves[i]) for i in chosen}) == 1:
        return chosen
    num_rows = next((len(leaf) for leaf in leaves if leaf.ndim), 0)
    return [i for i, leaf in enumerate(leaves) if leaf.ndim and len(leaf) == num_rows][
        :num
    ]


def _is_like(one: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return len(one) == len(shape) and one[1:] == shape[1:] and one[:1] <= shape[:1]


def trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that a gradient is taken of, each once; all, of a recorded
    module.
    """
    is_recorded = module in RECORDED  # whose layers may be thawed
    return [
        (name, p)
        for name, p in module.named_parameters()
        if is_recorded or p.requires_grad
    ]


def trained_in(module: nn.Module) -> tuple[int, ...]:
    """Return the numbers of the parameters that a gradient is taken of."""
    return tuple(i for i, p in enumerate(module.parameters()) if p.requires_grad)


def untrained(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the frozen parameters, and then the buffers."""
    own = {id(p) for _, p in trained(module)}
    frozen = [(name, p) for name, p in module.named_parameters() if id(p) not in own]
    return [*frozen, *module.named_buffers()]


def values(module: nn.Module) -> Values:
    """Return copies of all values."""
    return Values(
        *(
            [array(value) for _, value in group]
            for group in (trained(module), untrained(module))
        )
    )


def modes(module: nn.Module) -> tuple[bool, ...]:
    """Return of each part, the module itself first, whether it is in training mode."""
    return tuple(part.training for part in module.modules())


def alike(modes: tuple[bool, ...]) -> tuple[bool, ...]:
    """Return the modes of all parts, one for all where they agree.

    >>> alike((True, True)), alike((True, False))
    ((True,), (True, False))
    """
    return modes[:1] if len({*modes}) == 1 else modes


def outlines(module: nn.Module) -> list[np.ndarray]:
    """Return the outlines of the gradient and the weights of each trained parameter."""
    params = [p for _, p in trained(module)]
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
    return [
        np.stack([outline(sampled(each)) for each in part]) for part in (grads, params)
    ]


def set_modes(module: nn.Module, wanted: tuple[bool, ...]) -> None:
    """Set the mode of each part by itself."""
    for part, is_training in zip(module.modules(), wanted, strict=True):
        part.training = is_training


def own_loss(
    args: tuple, given: dict, output: Any
) -> tuple[Tensor, Tensor, Own] | None:
    """Return the loss that a module computes of labels, the labels, and all in numbers."""
    numbers = (
        [o for o in output if isinstance(o, Tensor) and not o.ndim]
        if isinstance(output, tuple | list)
        else []
    )
    loss = output.get("loss") if isinstance(output, dict) else next(iter(numbers), None)
    named = (given.get(name) for name in ("labels", "targets", "target"))
    labels = next((value for value in named if isinstance(value, Tensor)), None)
    if (
        labels is None
        and len(args) == 2
        and isinstance(args[1], Tensor)
        and not args[1].is_floating_point()
    ):
        labels = args[1]
    if (
        labels is None
        or not isinstance(loss, Tensor)
        or loss.grad_fn is None
        or loss.ndim
    ):
        return None
    num = given.get("num_items_in_batch")
    is_one = isinstance(num, int | float) or (
        isinstance(num, Tensor) and num.numel() == 1
    )
    divisor = float(num) if is_one else None  # type: ignore[arg-type]
    own = Own(array(labels), float(loss.detach()), divisor)
    return loss, labels, own


def tensors_of(output: Any) -> Any:
    """Return the tensors of an output, of a distribution its parameters.

    A cache beside them would hold its graph.
    """
    if isinstance(output, torch.distributions.Distribution):
        own = {
            name: value
            for name, value in vars(output).items()
            if not name.startswith("_")
        }
        return {name: value for name, value in own.items() if isinstance(value, Tensor)}
    if isinstance(output, dict):
        own = {name: tensors_of(value) for name, value in output.items()}
        return type(output)(
            {name: value for name, value in own.items() if unpacked(value).leaves}
        )
    if type(output) in (tuple, list):
        return type(output)(map(tensors_of, output))
    return output


def is_silent() -> bool:
    """Whether nothing is recorded: a judgement runs, or a function of `torch.func`."""
    is_compiling = torch.compiler.is_compiling()
    return (
        is_compiling
        or bool(_OWN)
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def rate_of(optimizer: Optimizer, group: int = 0) -> float:
    """Return the learning rate of a group of an optimizer; NaN if it has none."""
    rate = optimizer.param_groups[group].get("lr")
    return float("nan") if rate is None else float(rate)


def grads_of(
    module: nn.Module, optimizer: Optimizer, *, is_kept: bool
) -> list[np.ndarray | None]:
    """Return the gradients that the optimizer has of the parameters, of large ones in
    part.

    A fused step divides by the loss scale itself.

    Args:
        is_kept: whether their numbers are needed; else each is empty.
    """
    scale = getattr(optimizer, "grad_scale", None)
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    grads = [p.grad if id(p) in own else None for _, p in trained(module)]
    if not is_kept:
        return [None if g is None else np.zeros(0) for g in grads]
    grads = (
        grads if scale is None else [None if g is None else g / scale for g in grads]
    )
    return [None if g is None else sampled(g) for g in grads]


def states_of(module: nn.Module, optimizer: Optimizer, *, is_kept: bool) -> Step:
    """Return the state before or after a step, without numbers if none are kept."""
    own = {id(p): i for i, (_, p) in enumerate(trained(module))}
    groups = optimizer.param_groups
    every = [
        (g, at, p)
        for g, group in enumerate(groups)
        for at, p in enumerate(group["params"])
    ]
    places = [(g, at, own[id(p)]) for g, at, p in every if id(p) in own]
    options = [
        {name: _copied(value) for name, value in group.items() if name != "params"}
        for group in groups
    ]
    if not is_kept:
        return Step([], [], Rates(places, options, []))
    rules: list[StepRule | None] = [None] * len(own)
    for g, at, i in places:
        parameter = groups[g]["params"][at]
        count = optimizer.state.get(parameter, {}).get("step", 0)
        is_real = not parameter.is_complex()
        rules[i] = rule_of(optimizer, options[g], float(count)) if is_real else None
    slots = [
        (own[id(p)], name, value)
        for _, _, p in every
        if id(p) in own
        for name, value in optimizer.state.get(p, {}).items()
        if isinstance(value, Tensor | int | float)
    ]
    # One after the other, for memory.
    arrays = [sampled(v) if isinstance(v, Tensor) else np.asarray(v) for *_, v in slots]
    params = [sampled(p) for _, p in trained(module)]
    named = [(i, name, getattr(value, "device", None)) for i, name, value in slots]
    return Step(params, arrays, Rates(places, options, named, tuple(rules)))


def _copied(option: Any) -> Any:
    """Return an option of a group; a rate in a tensor may move."""
    return option.detach().clone() if isinstance(option, Tensor) else option
