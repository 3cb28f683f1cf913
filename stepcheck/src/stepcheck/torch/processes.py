"""The record of a loop in several processes: each keeps its own, and process 0 judges.

The records go through the store by which the processes have met: no collective
operation, which could meet one of the loop.
"""

import itertools
import pickle
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from torch import distributed

from stepcheck.errors import attempt
from stepcheck.trace.log import Applied, Event, Log
from stepcheck.trace.measure import all_same
from stepcheck.user_code.source import line_here
from stepcheck.values import Reason, Unjudged

_PATIENCE, _FEW, _OFTEN = (
    120.0,
    10.0,
    0.02,
)  # seconds for a process that is still in its loop, for another
_PART = 16 << 20  # bytes that the store is given at once
_WATCHES = Counter[str]()  # of this process, by their lines
_NAMES = "called", "applied", "scaled", "others"
_YES, _NO = b"yes", b"no"

_ELSEWHERE = (
    "This is process {} of {}: process 0 judges the loop of all, and has the report."
)
_NONE = "each process runs its loop under its own watch, at the same line"
_LONG = f"it was not over {_PATIENCE:.0f} seconds after that of process 0"
_FAILED = "its loop has ended with an error"


@dataclass
class Group:
    """The processes that train a model together.

    Attributes:
        rank: the number of this one, from 0; `num`: of all.
        store: holds values by name for all of them.
    """

    rank: int
    num: int
    store: Any

    @classmethod
    def now(cls) -> "Group | None":
        """Return the group of this process; None if it trains alone."""
        if (
            not distributed.is_available()
            or not distributed.is_initialized()
            or distributed.get_world_size() < 2
        ):
            return None
        here = str(line_here())
        _WATCHES[here] += 1
        whole = distributed.distributed_c10d._get_default_store()
        store = distributed.PrefixStore(f"stepcheck {here} {_WATCHES[here]}", whole)
        group = cls(distributed.get_rank(), distributed.get_world_size(), store)
        store.set(f"{group.rank} begins", _YES)
        return group

    def orders(self) -> Iterator[int]:
        """Yield the numbers of this process's records, which no other process has."""
        return itertools.count(self.rank, self.num)

    def gather(self, watcher: Any, calls: Any, *, has_failed: bool = False) -> str:
        """Add the records of all processes to the log of process 0, which waits for
        them.

        Args:
            has_failed: whether the loop of this process has ended with an error.

        Returns:
            Where the report is, in the other processes; "" in process 0.
        """
        if self.rank:
            with suppress(
                Exception
            ):  # process 0 is gone, or watches nothing: no report is missed here
                self._send(None if has_failed else _Record.of(watcher, calls))
            return _ELSEWHERE.format(self.rank, self.num)
        if has_failed:
            self.store.set("asked", _NO)
            _leave_out(
                watcher.log,
                Reason.PROCESS_MISSING,
                f"process 0 of {self.num}: {_FAILED}",
            )
            return ""
        records = []
        for rank in range(1, self.num):
            record, error = attempt(
                partial(self._asked, rank)
            )  # the store may be gone, too
            if record is None:
                told = f"process {rank} of {self.num}: {error}"
                _leave_out(watcher.log, Reason.PROCESS_MISSING, told)
                return ""
            records.append(record)
        _join(watcher, calls, records)
        return ""

    def _asked(self, rank: int) -> "_Record":
        self.store.set("asked", _YES)
        return self._received(rank)

    def _has(self, name: str, patience: float) -> bool:
        """Whether the store has a value of this name, or gets one within `patience`
        seconds.
        """
        until = time.monotonic() + patience
        while not (found := self.store.check([name])) and time.monotonic() < until:
            time.sleep(_OFTEN)
        return found

    def _send(self, record: "_Record | None") -> None:
        """Put a record into the store once process 0 asks for it; the number of parts
        is last.
        """
        if not self._has("asked", _PATIENCE) or self.store.get("asked") != _YES:
            return
        told, error = attempt(lambda: b"" if record is None else pickle.dumps(record))
        if told is None:  # of what the module is called with
            told = pickle.dumps(RuntimeError(f"it cannot be sent: {error}"))
        parts = [told[start : start + _PART] for start in range(0, len(told), _PART)]
        for i, part in enumerate(parts):
            self.store.set(f"{self.rank} {i}", part)
        self.store.set(str(self.rank), str(len(parts)))

    def _received(self, rank: int) -> "_Record":
        """Return the record of another process; it is in the store no longer."""
        for name, patience, why in (
            (f"{rank} begins", _FEW, _NONE),
            (str(rank), _PATIENCE, _LONG),
        ):
            if not self._has(name, patience):
                raise TimeoutError(why)
        names = [f"{rank} {i}" for i in range(int(self.store.get(str(rank))))]
        told = b"".join(map(self.store.get, names))
        for name in names:
            self.store.delete_key(name)
        record = pickle.loads(told) if told else RuntimeError(_FAILED)
        if isinstance(record, Exception):
            raise record
        return record


@dataclass
class _Record:
    """The record of another process: its events, and labels by the order of their pass."""

    events: dict[str, list]
    unjudged: list[Unjudged]
    own: dict[int, Any]
    targets: dict[int, np.ndarray]

    @classmethod
    def of(cls, watcher: Any, calls: Any) -> "_Record":
        log: Log = watcher.log
        events = {name: getattr(log, name) for name in _NAMES}
        return cls(events, log.unjudged, watcher.own, calls.targets)


def _leave_out(log: Log, reason: Reason, told: str = "") -> None:
    """Empty a record that cannot be judged."""
    log.leave(reason, told=told)
    for name in _NAMES:
        getattr(log, name).clear()


def _join(watcher: Any, calls: Any, records: list[_Record]) -> None:
    """Add records to the log of process 0 as replicas', unless the weights are
    different.
    """
    log: Log = watcher.log
    passes = _each("called", log, records)
    begin: list[list[np.ndarray]] = [
        next((each.params for each in of if each.is_whole), []) for of in passes
    ]
    is_one_model = all(
        not values or not begin[0] or all_same(values, begin[0]) for values in begin
    )
    if not is_one_model and _share(_each("applied", log, records)):
        _leave_out(log, Reason.PROCESSES_APART)
        return
    if not is_one_model:  # the report is of process 0 alone
        return
    log.is_shared = True
    own = [*dict.fromkeys(step.optimizer for step in log.applied)]
    num = min(map(len, _each("applied", log, records)))
    _cut(vars(log), num)
    for rank, record in enumerate(records, start=1):
        _cut(record.events, num)
        others = dict.fromkeys(step.optimizer for step in record.events["applied"])
        same = dict(zip(others, own, strict=False))
        for name in _NAMES:
            getattr(log, name).extend(
                _as_replica(event, rank, same) for event in record.events[name]
            )
        log.unjudged += [each for each in record.unjudged if each not in log.unjudged]
        watcher.own.update(record.own)
        calls.targets.update(record.targets)
    log.close()


def _each(name: str, log: Log, records: list[_Record]) -> list[list]:
    """Return the events of one kind of each process."""
    return [getattr(log, name), *(record.events[name] for record in records)]


def _cut(events: dict[str, list], num: int) -> None:
    """Leave out all events after the `num`-th step: another process has no more."""
    if len(steps := events["applied"]) > num:
        last = steps[num - 1].order if num else -1
        events |= {
            name: [event for event in events[name] if event.order <= last]
            for name in _NAMES
        }


def _as_replica(event: Event, rank: int, optimizers: dict[int, int]) -> Event:
    if isinstance(event, Applied):
        event = replace(
            event, optimizer=optimizers.get(event.optimizer, event.optimizer)
        )
    return replace(event, replica=rank)


def _share(steps: list[list[Applied]]) -> bool:
    """Whether all processes hand the same gradients over in their first steps."""
    first = [next((step.grads for step in of if step.is_whole), None) for of in steps]
    given = [
        None if grads is None else [g for g in grads if g is not None]
        for grads in first
    ]
    return all(g and given[0] and all_same(g, given[0]) for g in given)
