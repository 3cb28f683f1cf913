"""Batches that grow: their sizes by the update or the epoch, as runs of batches of one size."""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import signature
from typing import Any, NamedTuple, cast

from wholestep.checks import count, is_count
from wholestep.errors import SpecificationError, message, shown

_EXAMPLE = "batch_size=[(0, 64), (1000, 256)]: 64 rows, and 256 from update 1000 on."


BatchSize = int | list[tuple[int, int]] | Callable[[int], Any] | None  # as users pass it


class Run(NamedTuple):
    """Consecutive batches of one size in an epoch.

    Args:
        first: the number of the first of them in the epoch.
        start: the place of its first row in the epoch.
        size: the rows of a batch; the last batch of an epoch may have fewer.
        num: the number of batches.
    """

    first: int
    start: int
    size: int
    num: int

    def place(self, step: int) -> int:
        """Return the place of the first row of batch `step` of the epoch."""
        return self.start + (step - self.first) * self.size


@dataclass(frozen=True)
class SizeSteps:
    """Sizes that change at some updates, counted from the first of the data.

    >>> sizes = SizeSteps(((0, 64), (1000, 256)))
    >>> sizes.at(epoch=0, update=10), sizes.at(epoch=9, update=1000)
    ((64, 1000), (256, inf))
    """

    changes: tuple[tuple[int, int], ...]

    def at(self, epoch: int, update: int) -> tuple[int, float]:
        """Return the rows of an update, and the next update that may have others."""
        after = bisect_right(self.changes, update, key=lambda change: change[0])
        until = self.changes[after][0] if after < len(self.changes) else math.inf
        return self.changes[after - 1][1], until

    def __str__(self) -> str:
        (_, first), *later = self.changes
        return ", ".join([str(first), *(f"{size} from update {at}" for at, size in later)])


@dataclass(frozen=True)
class SizeFunction:
    """Sizes that are a function of the update or the epoch, as `by` says."""

    function: Callable[[int], Any]
    by: str

    def at(self, epoch: int, update: int) -> tuple[int, float]:
        """Return the rows of an update, and the next update that may have others."""
        of_epoch = self.by == "epoch"
        size = self.function(epoch if of_epoch else update)
        attempt = f"a function such as lambda {self.by}: 64 * 2 ** min({self.by} // 10, 4)."
        return count("batch_size", size, attempt), math.inf if of_epoch else update + 1

    def __str__(self) -> str:
        return f"a function of the {self.by}"


SizeSchedule = SizeSteps | SizeFunction


def size_schedule(batch_size: object) -> SizeSchedule | None:
    """Return the schedule that a user passed as `batch_size`; None if it is none.

    Raises:
        SpecificationError: a function of something else, or changes that are not in order.
    """
    if callable(batch_size):
        names = _arguments(batch_size)
        if names not in (["update"], ["epoch"]):
            must = "batch_size as a function must take one argument, named update or epoch."
            received = f"{shown(batch_size)} of ({', '.join(names)})"
            attempt = "lambda update: 64 if update < 1000 else 256."
            raise SpecificationError(message(must, received, attempt))
        return SizeFunction(batch_size, names[0])
    if not isinstance(batch_size, list | tuple | dict):
        return None
    changes = [_change(change) for change in batch_size]
    updates = [-1 if change is None else change[0] for change in changes]
    if not updates or updates[0] != 0 or updates != sorted(set(updates)):
        must = (
            "batch_size as a list must hold pairs (update, rows) in the order of the updates, "
            "the first at update 0."
        )
        raise SpecificationError(message(must, shown(batch_size), _EXAMPLE))
    return SizeSteps(tuple(change for change in changes if change is not None))


def _arguments(function: Callable) -> list[str]:
    """Return the names of a function's arguments without a default."""
    try:
        parameters = signature(function).parameters.values()
    except ValueError:  # of a class such as int
        return []
    return [each.name for each in parameters if each.default is each.empty]


def first_size(batch_size: BatchSize) -> int | None:
    """Return the rows of the first update; None if they are not given."""
    schedule = size_schedule(batch_size)
    if schedule is None:
        return cast(int | None, batch_size)
    return schedule.at(0, 0)[0]


def _change(change: object) -> tuple[int, int] | None:
    if not isinstance(change, list | tuple) or len(change) != 2:
        return None
    update, size = change
    return (int(update), int(size)) if is_count(update, 0) and is_count(size) else None


def runs_of(schedule: SizeSchedule, num_rows: int, epoch: int, update: int) -> Iterator[Run]:
    """Yield the runs of an epoch that begins with this update.

    >>> list(runs_of(SizeSteps(((0, 2), (3, 4))), 11, epoch=0, update=0))
    [Run(first=0, start=0, size=2, num=3), Run(first=3, start=6, size=4, num=2)]
    """
    run = Run(0, 0, 0, 0)
    step = 0
    place = 0
    while place < num_rows:
        size, until = schedule.at(epoch, update + step)
        size = min(size, num_rows)
        num = -(-(num_rows - place) // size)
        num = int(min(num, until - update - step))
        if run.size == size:
            run = run._replace(num=run.num + num)
        else:
            if run.num:
                yield run
            run = Run(step, place, size, num)
        step += num
        place += num * size
    yield run
