"""Numbers that a user sets: class weights, groups with weight decay, rates and the steps of their schedules."""

import linecache
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import numpy as np
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR, PolynomialLR, ReduceLROnPlateau
from torch.optim.optimizer import Optimizer

from stepcheck.report.found import Likely, many
from stepcheck.solve.changes import Schedule
from stepcheck.torch.hooks import Watcher
from stepcheck.torch.ledger import Finding
from stepcheck.torch.state import rate_of
from stepcheck.trace.log import Line
from stepcheck.user_code.source import line_here

_BEYOND = (
    "{} makes a step in each update, {} of them, and its {} is {} ({}): the learning rate {}. If that counts epochs, "
    "call `scheduler.step()` once per epoch."
)
_SHORT = (
    "{} makes {} steps in {} updates, and its {} is that of the updates ({}): the learning rate goes through the "
    "beginning of its course alone. Call `scheduler.step()` in each update."
)
_OTHER_WAY = (
    "ReduceLROnPlateau has cut the learning rate while the metric went from {:.4g} to {:.4g}, and never {} the first "
    "one ({}): it has mode='{}'. For a metric that is to {}, pass mode='{}'."
)
_DECAYED = (
    "{} of normalisation layers decay, while a group of the same optimizer without weight decay has nothing but "
    "vectors, as biases are ({})."
)
_EMPTY = (
    "A group of the optimizer without weight decay has no parameters, and {} decay with the others ({}). Does the "
    "name by which parameters are to be left out fit none?"
)
_NO_FIT = "Does the name by which they are to be left out fit none?"
_NEAR, _UNLIKE = 0.25, 2.0  # of logarithms of weights and frequencies; how often the one class comes for the other
_FEW, _SAME, _MOST_ROWS = 3, 1e-3, 2000  # measurements, and updates, by which a schedule is judged
_NAME_OF_NORMS = re.compile(
    r"""["'][^"'\s]*(?:layer|batch|group|rms|ln|bn)[_.]?norm|["']\.?norms?\d*["'.]""", re.IGNORECASE
)


@dataclass
class Moves:
    """The steps of a schedule: (the optimizer's steps before, the number it is given, the fall of the rate)."""

    scheduler: Any
    steps: list[tuple[int, float, float]] = field(default_factory=list)
    line: str = ""

    def notes(self) -> Iterator[str]:
        """Yield a note if the schedule goes far beyond its end, or not near it, or has a metric to go the other way."""
        yield from self._beyond()
        yield from map(Likely, self._short())
        if isinstance(self.scheduler, ReduceLROnPlateau) and any(fall > 0 for *_, fall in self.steps):
            yield from self._upside_down()

    def _beyond(self) -> Iterator[str]:
        name = {CosineAnnealingLR: "T_max", PolynomialLR: "total_iters"}.get(type(self.scheduler), "")
        end, at = getattr(self.scheduler, name, np.inf), {num for num, *_ in self.steps}
        if len(at) > 2 * end and len(at) >= max(at) - min(at):
            then = "rises and falls again and again" if name == "T_max" else "is 0 from there on"
            yield _BEYOND.format(type(self.scheduler).__name__, len(at), name, end, self.line, then)

    def _short(self) -> Iterator[str]:
        name = {CosineAnnealingLR: "T_max", PolynomialLR: "total_iters", OneCycleLR: "total_steps"}
        end, at = getattr(self.scheduler, name.get(type(self.scheduler), ""), 0), {num for num, *_ in self.steps}
        if len(at) > 1 and max(at) == end >= 2 * len(at):
            yield _SHORT.format(type(self.scheduler).__name__, len(at), end, name[type(self.scheduler)], self.line)

    def _upside_down(self) -> Iterator[str]:
        metrics, is_min = np.array([metric for _, metric, _ in self.steps]), self.scheduler.mode == "min"
        if len(metrics) < _FEW or not (metrics[1:].min() > metrics[0] if is_min else metrics[1:].max() < metrics[0]):
            return
        nums = np.arange(2, _MOST_ROWS)[:, None] * (metrics / 100 if metrics.max() > 1 else metrics)
        are_shares = bool(np.any(np.all(np.abs(nums - np.round(nums)) <= _SAME, axis=1)))  # of rows, as an accuracy is
        if are_shares is is_min:
            words = ("below", "min", "grow", "max") if is_min else ("above", "max", "fall", "min")
            yield _OTHER_WAY.format(metrics[0], metrics[-1], words[0], self.line, *words[1:])


def grow(weights: tuple[float, ...], counts: Counter[int]) -> bool:
    """Whether the weights of classes are proportional to their frequencies, which differ, or have their order."""
    nums = np.array([counts[c] for c in range(len(weights))], float)
    if len(nums) < 2 or nums.min() <= 0 or min(weights) <= 0 or nums.max() < _UNLIKE * nums.min():
        return False
    logs, of_weights = np.log(nums), np.log(weights)
    is_proportional = np.ptp(of_weights - logs) <= _NEAR * np.ptp(logs)
    rises = np.diff(of_weights[np.argsort(logs)])
    return bool(is_proportional or (len(nums) > _FEW and np.all(rises > 0) and len({*nums}) == len(nums)))


def decaying(optimizer: Optimizer, norms: set[int], line: Line | None) -> Iterator[Finding]:
    """Yield the note on normalisation layers that decay, where other vectors do not."""
    plain = [p for group in optimizer.param_groups if not group.get("weight_decay") for p in group["params"]]
    own = [
        p for group in optimizer.param_groups if group.get("weight_decay") for p in group["params"] if id(p) in norms
    ]
    if own and plain and all(p.ndim < 2 for p in plain):
        told = _DECAYED.format(many(len(own), "parameter"), line)
        is_named = line is not None and any(map(_NAME_OF_NORMS.search, linecache.getlines(line.file)))
        yield Likely(f"{told} {_NO_FIT}") if is_named else told, {*map(id, own)}
    is_empty = any(not group.get("weight_decay") and not group["params"] for group in optimizer.param_groups)
    every = [p for group in optimizer.param_groups for p in group["params"] if group.get("weight_decay")]
    if is_empty and (vectors := [p for p in every if p.ndim < 2]):
        told = _EMPTY.format(many(len(vectors), "vector, as biases are,", "vectors, as biases are,"), line)
        yield told if {*map(id, vectors)} <= norms else Likely(told), {*map(id, vectors)}


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
