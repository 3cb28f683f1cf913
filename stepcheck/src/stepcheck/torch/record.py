"""The record of a training of PyTorch that is compared with another."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from stepcheck.torch.hooks import Watcher, listening
from stepcheck.torch.state import RECORDED, bare, trained, untrained, values
from stepcheck.trace.log import Log, Values, room
from stepcheck.trace.measure import NUM_PLACES, in_part
from stepcheck.trace.trace import Parameter, Run, Trace


@contextmanager
def recording(trace: Trace, models: list[nn.Module]) -> Iterator[None]:
    """Add the record of each module that is trained inside to a trace.

    Args:
        models: those that are recorded; none for all that are called by no other, and
            are trained.
    """
    order = itertools.count()
    watchers: list[Watcher] = []

    def found(module: nn.Module) -> Watcher:
        """Return the new watcher of a module."""
        RECORDED.add(module)
        sizes = [min(p.numel(), NUM_PLACES) for _, p in trained(module)]
        log = Log(room=room(sum(sizes)), is_run=True)
        log.begin(in_part(values(module).params))
        watchers.append(Watcher(module, log, None, order))
        return watchers[-1]

    for model in models:
        found(bare(model))
    try:
        with listening(watchers, None if models else found):
            yield
    finally:
        trace.versions["torch"] = torch.__version__
        trace.runs += [_run(each) for each in watchers if _is_trained(each.log)]
        for watcher in watchers:
            RECORDED.discard(watcher.module)


def _is_trained(log: Log) -> bool:
    """Whether steps were made; without an optimizer, whether gradients were taken, and
    weights moved.
    """
    has_moved = log.num_moves and any(
        called.differentiated for called in log.called
    )
    return bool(log.applied or has_moved)


def _run(watcher: Watcher) -> Run:
    module, log = watcher.module, watcher.log
    named = trained(module)
    ended = Values([], []) if log.is_cut else values(module)  # else it went on
    dtypes = {str(p.dtype) for _, p in named}
    if any(called.setting.is_cast for called in log.called):
        dtypes.add("bfloat16")
    return Run(
        name=type(module).__name__,
        parameters=_described(named),
        others=_described(untrained(module)),
        ended=Values(in_part(ended.params), in_part(ended.buffers)),
        dtypes=tuple(dtypes),
        log=log,
    )


def _described(named: list[tuple[str, Any]]) -> tuple[Parameter, ...]:
    return tuple(
        Parameter(
            name, tuple(value.shape), str(value.dtype).removeprefix("torch.")
        )
        for name, value in named
    )
