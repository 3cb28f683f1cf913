"""The device of a module: recorded passes are replayed on it."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

CPU = torch.device("cpu")


def devices(module: nn.Module) -> list[torch.device]:
    """Return the devices of a module's parameters and buffers, each once.

    >>> devices(nn.Linear(2, 1))
    [device(type='cpu')]
    """
    values = [*module.parameters(), *module.buffers()]
    return [*dict.fromkeys(value.device for value in values)]


def device_of(module: nn.Module) -> torch.device:
    """Return the device of a module; the CPU for one without values."""
    return next(iter(devices(module)), CPU)


def generators() -> Any:
    """Return the home of the random state of the accelerator, if there is one; else
    None.
    """
    accelerator = torch.accelerator.current_accelerator()
    return None if accelerator is None else torch.get_device_module(accelerator)


def states() -> list[Tensor]:
    """Return the random states of all devices, the CPU's first."""
    home, own = generators(), torch.get_rng_state()
    if home is None:
        return [own]
    has_all = hasattr(home, "get_rng_state_all")
    return [
        own,
        *(home.get_rng_state_all() if has_all else [home.get_rng_state()]),
    ]


def set_states(kept: list[Tensor]) -> None:
    """Let the generators of all devices continue from these states."""
    first, *others = kept
    torch.set_rng_state(first)
    home = generators()
    if home is not None and others:
        has_all = hasattr(home, "set_rng_state_all")
        home.set_rng_state_all(others) if has_all else home.set_rng_state(
            *others
        )


@contextmanager
def on(device: torch.device) -> Iterator[None]:
    """Make new tensors on a device, inside."""
    with nullcontext() if device == CPU else device:
        yield


def is_reduced(device: torch.device, module: nn.Module) -> bool:
    """Whether a device may compute products of float32 with fewer digits, as with TF32."""
    parts = module.modules()
    has_convolution = any(
        isinstance(part, nn.modules.conv._ConvNd) for part in parts
    )
    is_fine = torch.get_float32_matmul_precision() == "highest"
    may_convolve = has_convolution and torch.backends.cudnn.allow_tf32
    return device.type == "cuda" and (may_convolve or not is_fine)
