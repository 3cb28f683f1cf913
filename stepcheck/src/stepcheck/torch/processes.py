"""The record of a loop in several processes: each keeps its own, and process 0 judges.

The records go through the store by which the processes have met: no collective
operation, which could meet one of the loop.
"""

import itertools
import pickle
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import numpy as np
from torch import distributed

from stepcheck.errors import attempt
from stepcheck.trace.log import Applied, Event, Log
from stepcheck.trace.measure import all_same
from stepcheck.user_code.source import line_here
from stepcheck.values import Reason, Unjudged

# Seconds for a process that is still in its loop, and for one that has begun none.
_PATIENCE, _FEW = 120.0, 10.0
_PART = 4 << 20  # bytes that the store is given at once
_WATCHES = Counter[str]()  # of this process, by their lines
_NAMES = "called", "applied", "scaled", "others"
_ELSEWHERE = "This is process {} of {}: process 0 judges the loop of all, and has the report."
# Events by their names, the stages that are not judged, labels and own losses by pass.
_Record = tuple[dict[str, list], list[Unjudged], dict[int, Any], dict[int, Any]]


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
        is_ready = distributed.is_available() and distributed.is_initialized()
        if not is_ready or distributed.get_world_size() < 2:
            return None
        here = str(line_here())
        _WATCHES[here] += 1
        whole = distributed.distributed_c10d._get_default_store()
        store = distributed.PrefixStore(
            f"stepcheck {here} {_WATCHES[here]}", whole
        )
        group = cls(distributed.get_rank(), distributed.get_world_size(), store)
        store.set(f"{group.rank} begins", "yes")
        return group

    def orders(self) -> Iterator[int]:
        """Yield the numbers of this process's records, which no other process has."""
        return itertools.count(self.rank, self.num)

    def gather(self, watcher: Any, *, has_failed: bool = False) -> str:
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
            ):  # process 0 is gone: no report is missed here
                self._send(None if has_failed else _record(watcher))
            return _ELSEWHERE.format(self.rank, self.num)
        records, error = (None, None) if has_failed else attempt(self._received)
        if records is None:
            told = str(error or "the loop of process 0 has failed")
            watcher.log.leave(Reason.PROCESS_MISSING, told=told)
        else:
            _join(watcher, records)
        return ""

    def _send(self, record: _Record | None) -> None:
        """Put a record into the store; the number of parts is last."""
        told, error = attempt(lambda: pickle.dumps(record))
        if told is None:  # of what the module is called with
            told = pickle.dumps(f"it cannot be sent: {error}")
        starts = range(0, len(told), _PART)
        for i, start in enumerate(starts):
            self.store.set(f"{self.rank} {i}", told[start : start + _PART])
        self.store.set(str(self.rank), str(len(starts)))

    def _received(self) -> list[_Record]:
        """Return the records of the other processes; they are in the store no longer."""
        records = []
        for rank in range(1, self.num):
            self.store.wait([f"{rank} begins"], timedelta(seconds=_FEW))
            self.store.wait([str(rank)], timedelta(seconds=_PATIENCE))
            names = [
                f"{rank} {i}" for i in range(int(self.store.get(str(rank))))
            ]
            record = pickle.loads(b"".join(map(self.store.get, names)))
            for name in names:
                self.store.delete_key(name)
            if not isinstance(record, tuple):
                raise ValueError(
                    record or f"the loop of process {rank} has failed"
                )
            records.append(record)
        return records


def _record(watcher: Any) -> _Record:
    log: Log = watcher.log
    events = {name: getattr(log, name) for name in _NAMES}
    return events, log.unjudged, watcher.labels, watcher.own


def _join(watcher: Any, records: list[_Record]) -> None:
    """Add records to the log of process 0 as replicas'; those of other steps, or of
    models that begin with other weights, leave nothing to judge.
    """
    log: Log = watcher.log
    begin = _first_params(log.called)
    own = [*dict.fromkeys(step.optimizer for step in log.applied)]
    for events, *_ in records:
        is_like = all_same(_first_params(events["called"]), begin)
        if not is_like or len(events["applied"]) != len(log.applied):
            log.leave(Reason.PROCESSES_APART)
            return
    log.is_shared = True
    for rank, (events, unjudged, labels, own_losses) in enumerate(
        records, start=1
    ):
        others = dict.fromkeys(step.optimizer for step in events["applied"])
        same = dict(zip(others, own, strict=False))
        for name in _NAMES:
            replicas = (_as_replica(each, rank, same) for each in events[name])
            getattr(log, name).extend(replicas)
        log.unjudged += [each for each in unjudged if each not in log.unjudged]
        watcher.labels.update(labels)
        watcher.own.update(own_losses)
    log.close()


def _first_params(called: list) -> list[np.ndarray]:
    return next((each.params for each in called if each.is_whole), [])


def _as_replica(event: Event, rank: int, optimizers: dict[int, int]) -> Event:
    if isinstance(event, Applied):
        own = optimizers.get(event.optimizer, event.optimizer)
        event = replace(event, optimizer=own)
    return replace(event, replica=rank)
