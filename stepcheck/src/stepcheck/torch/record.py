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

    def found(module: nn.Module, known: Watcher | None = None) -> Watcher:
        """Return the watcher of a module, or the one that had its parameters alone."""
        RECORDED.add(module)
        if known is not None:
            known.module = module
            return known
        sizes = [min(p.numel(), NUM_PLACES) for _, p in trained(module)]
        log = Log(room=room(sum(sizes)), is_run=True)
        log.begin(in_part(values(module).params))
        return Watcher(module, log, None, order)

    watchers = [found(bare(model)) for model in models]
    try:
        with listening(watchers, None if models else found):
            yield
    finally:
        trace.versions["torch"] = torch.__version__
        trace.runs += [
            _run(each) for each in watchers if each.log.applied or _is_moved(each)
        ]
        for watcher in watchers:
            RECORDED.discard(watcher.module)


def _is_moved(watcher: Watcher) -> bool:
    """Whether a module is trained without an optimizer: gradients were taken, and
    weights moved.
    """
    log = watcher.log
    return bool(log.num_moves) and any(called.differentiated for called in log.called)


def _run(watcher: Watcher) -> Run:
    module, log = watcher.module, watcher.log
    named = trained(module)
    ended = Values([], []) if log.is_cut else values(module)  # else it went on
    slots = {
        step.optimizer: tuple(
            f"{name} of {named[i][0]}" for i, name, _ in step.setting.slots
        )
        for step in log.applied
        if step.is_whole
    }
    casts = [called for called in log.called if called.setting.is_cast]
    return Run(
        name=type(module).__name__,
        parameters=_described(named),
        others=_described(untrained(module)),
        slots=slots,
        ended=Values(in_part(ended.params), in_part(ended.buffers)),
        dtypes=tuple(
            {str(p.dtype) for _, p in named} | {"bfloat16" for _ in casts[:1]}
        ),
        log=log,
    )


def _described(named: list[tuple[str, Any]]) -> tuple[Parameter, ...]:
    return tuple(
        Parameter(name, tuple(value.shape), str(value.dtype).removeprefix("torch."))
        for name, value in named
    )
