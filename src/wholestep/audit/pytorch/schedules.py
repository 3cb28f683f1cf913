"""The steps of a loop's schedules of the learning rate."""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from wholestep.audit.found import Likely
from wholestep.audit.log import Line
from wholestep.audit.pytorch.hooks import Watcher
from wholestep.audit.pytorch.state import rate_of
from wholestep.audit.source import line_here
from wholestep.audit.steps import Schedule

_FEW = 3  # updates by which a schedule is judged
_OF_EPOCHS = (
    "StepLR",
    "MultiStepLR",
    "ExponentialLR",
    "ReduceLROnPlateau",
)  # schedules whose numbers are mostly those of epochs
_FAR, _SOON = 0.01, 200  # of the first rate: such a rate trains no more; updates in which a schedule of epochs has it


class Schedules:
    """The schedules of the optimizer's learning rate.

    Attributes:
        moves: of each move of a schedule: (the optimizer's steps before it, the rate before, the rate after).
        line: of the last one.
    """

    def __init__(self, watcher: Watcher):
        self.watcher = watcher
        self.moves: list[tuple[int, float, float]] = []
        self.line: Line | None = None
        self._is_given, self._num_inside, self._schedulers = False, 0, dict[int, Any]()

    def replacements(self) -> Iterator[tuple[Any, str, Callable]]:
        """Yield (class, name, function) of the functions by which steps are noted."""
        for kind in kinds(LRScheduler):
            for name, how in (("step", self._move), ("_initial_step", self._silent)):
                if name in vars(kind):
                    yield kind, name, how(vars(kind)[name])

    def fall(self) -> str | None:
        """Return the note on a schedule of epochs that moves in each update, and lets the rate fall."""
        kinds = {type(each).__name__ for each in self._schedulers.values()}
        at = {steps for steps, *_ in self.moves}
        if len(kinds) != 1 or not kinds <= {*_OF_EPOCHS} or len(at) < _FEW or len(at) < max(at) - min(at):
            return None
        first, last = self.moves[0][1], self.moves[-1][2]
        told = f"{next(iter(kinds))} makes a step in each update ({self.line}): the learning rate "
        told += f"falls from {first:.4g} to {last:.4g} in {len(at)} updates. If its numbers are those of epochs, call "
        told += "`scheduler.step()` once per epoch."
        is_soon = any(after <= _FAR * first for *_, after in self.moves[:_SOON])
        return (Likely(told) if is_soon else told) if last < first else None

    def rates(self) -> Schedule | None:
        """Return the rates by update, if a schedule moves in each update, but at another place or more than once.

        The schedule that moves once for each update after the optimizer's step is right, and so is one that moves after
        each pass: None for these, and for one that is given a number or a metric, and does not count its steps.
        """
        at = [steps for steps, *_ in self.moves]
        counts = [at.count(step) for step in range(max(at, default=0))]  # of the updates that are over
        is_right = counts[:1] == [0] and set(counts[1:]) == {1}
        if len(counts) < _FEW or not all(counts[1:]) or is_right or len(self._schedulers) > 1 or self._is_given:
            return None
        rates = [self.moves[0][1], *(after for *_, after in self.moves)]
        return lambda number: rates[min(number, len(rates) - 1)]

    def _silent(self, function: Callable) -> Callable:
        """Return a function inside of which no step of a scheduler is noted: the first one, or those of its parts."""

        @wraps(function)
        def told(*arguments: Any, **others: Any) -> Any:
            self._num_inside += 1
            try:
                return function(*arguments, **others)
            finally:
                self._num_inside -= 1

        return told

    def _move(self, step: Callable) -> Callable:
        """Return the step of a schedule, of which the rates before and after are noted."""

        @wraps(step)
        def told(scheduler: Any, *arguments: Any, **others: Any) -> Any:
            if self._num_inside:
                return step(scheduler, *arguments, **others)
            optimizer = scheduler.optimizer
            before = rate_of(optimizer)
            result = self._silent(step)(scheduler, *arguments, **others)
            if self.watcher.log.is_open and self.watcher.is_own(optimizer):
                self._schedulers[id(scheduler)] = scheduler
                self._is_given |= bool(arguments or others)
                self.line = line_here() or self.line
                self.moves.append((self.watcher.num_steps(optimizer), before, rate_of(optimizer)))
            return result

        return told


def kinds(base: Any) -> Iterator[Any]:
    """Yield a class and all that are derived of it."""
    yield base
    for kind in base.__subclasses__():
        yield from kinds(kind)
