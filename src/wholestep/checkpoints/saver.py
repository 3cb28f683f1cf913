"""Who saves a run at the boundaries of a call, and lets it go on from what was saved before."""

import math
import signal
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from wholestep.checkpoints import retention
from wholestep.checkpoints.arrays import check_dtype
from wholestep.checkpoints.data import check_goes_on, unlike
from wholestep.checkpoints.facts import differences, direction, facts_of
from wholestep.checkpoints.folder import Folder
from wholestep.checkpoints.manifest import Manifest
from wholestep.checkpoints.place import DataPlace, Keeps, Place
from wholestep.checkpoints.reading import Found, newest
from wholestep.checkpoints.retention import Value
from wholestep.checkpoints.settings import Checkpoints
from wholestep.checkpoints.snapshot import Snapshot, taken_apart
from wholestep.checkpoints.writer import Room, Writer
from wholestep.data.batches import Batches
from wholestep.data.facts import content_of
from wholestep.errors import CheckpointError, SpecificationError, message
from wholestep.executor import Executor
from wholestep.run import Run
from wholestep.safety.interrupts import Termination, uninterrupted

Check = Callable[[Snapshot], None]
_TERMINATED = 128 + 15  # the exit code of a process that SIGTERM ended


class Saver:
    """Saves a run at the boundaries of one call of `fit` or `steps`.

    On the caller's thread it waits for the device and copies the state; a thread writes. Inside of its block the folder
    is locked, and SIGTERM is taken note of until the next boundary.

    Args:
        call: "fit" or "steps".
        batches: of the call.
        check: raises a SpecificationError if a snapshot is another model's.

    Raises:
        SpecificationError: the run cannot go on so; nothing has been changed.
        CheckpointError: the folder is in use, holds what it must not, or all in it is damaged.
    """

    def __init__(self, asked: Checkpoints, run: Run, call: str, batches: Batches, check: Check):
        self.also = asked.also or {}
        self._asked = asked
        self._run = run
        self._folder = Folder(asked.folder)
        self._call, self._batches, self._check = call, batches, check
        self._room, self._writer, self._termination = Room(), Writer(), Termination()
        self._values: dict[int, Value] = {}
        self._facts: dict[str, Any] = {}
        self._mode = "min"
        self._has_seen = False
        self._found: Found | None = None
        self._saved = 0  # the number of the update after which the newest checkpoint was taken
        self._name = 0  # and the step that it is called by
        self._stood = self._here  # and where the run stood
        self._given_up = 0  # updates of this process that the folder does not know of
        self._since = time.monotonic()

    def __enter__(self) -> "Saver":
        if self._run.is_under_way:
            must = "One call at a time moves a run with checkpoints."
            raise SpecificationError(message(must, f"{self._call} inside of another call", "leave checkpoints out."))
        self._lock = self._folder.lock()
        try:
            self._folder.clear()
            self._content = content_of(self._batches)
            self._resume()
            self._termination.__enter__()
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._termination.__exit__()
        try:
            with uninterrupted(twice=False):
                self._writer.wait()
        except Exception as failure:
            if error is None or isinstance(error, GeneratorExit):
                raise
            error.add_note(f"Beside this, {type(failure).__name__}: {failure}")
        finally:
            self._writer.then(self._lock.release)
        if not self._termination.has_come:
            return
        if error is None:
            raise SystemExit(_TERMINATED)
        if isinstance(error, GeneratorExit):  # whoever left the loop would not see an error
            signal.raise_signal(signal.SIGTERM)

    # ---- going on ----

    def _resume(self) -> None:
        run, folder = self._run, self._folder
        if not self._asked.resume:
            if folder.steps() or folder.bad():
                must = "resume=False begins anew in an empty folder."
                attempt = "another folder; or leave resume out, to go on."
                raise CheckpointError(message(must, f"{len(folder.steps())} checkpoints in {folder.folder}", attempt))
            return
        if run.restored is not None:  # by hand, and that is where it goes on
            self._saved = self._name = run.number
            if folder.steps() and folder.steps()[0] != run.number:
                must = "A run that was restored by hand saves in a folder without other checkpoints."
                received = f"update {run.number}, and step {folder.steps()[0]} in {folder.folder}"
                raise SpecificationError(message(must, received, "another folder; or do not restore by hand."))
            return
        self._found = found = newest(folder, self._check_found, sets_aside=True)
        if found is not None:
            if self._asked.keep_best is not None:
                self._values = retention.values_of(folder, self._asked.keep_best[0])
            self._given_up = run.number - found.snapshot.facts["number"]
            run.restore(found.snapshot)
            self._saved, self._name = run.number, found.manifest.step

    def _check_found(self, snapshot: Snapshot, manifest: Manifest) -> None:
        """Refuse other data and another model, before anything changes."""
        facts = snapshot.facts
        place, data = Place.of_json(facts["place"]), DataPlace.of_json(facts["data"])
        if place.call:
            check_goes_on(place, data, self._call, self._batches)
            if differing := unlike(manifest.rest.get("content") or self._content, self._content):
                must = f"A run goes on from {self._folder.folder} with the data that it had."
                attempt = "pass the same data; trainer.restore(path) goes on with data that were mended."
                raise SpecificationError(message(must, "; ".join(differing), attempt))
        self._check(snapshot)

    def open(self, executor: Executor, unknown: list[str]) -> None:
        """Say from where the run goes on, if it does, and what is otherwise than it was.

        Args:
            unknown: the callbacks whose state nobody knows.
        """
        self._facts, self._stood = facts_of(executor), self._here
        self._mode = direction(executor, self._asked.keep_best)
        found, place = self._found, self._run.place
        if found is None:
            self._saved = self._run.number
            return
        told = [f"wholestep: goes on from {found.path}, after update {self._run.number}"]
        told[0] += f" (epoch {place.epoch + 1}, batch {place.done})" if place.call else ""
        told += [f"given up: {self._given_up} updates since then"] if self._given_up > 0 else []
        told += [f"set aside: {', '.join(found.aside)}"] if found.aside else []
        otherwise = differences(found.manifest.rest.get("run") or {}, self._facts)
        told += [f"otherwise than before: {otherwise}"] if otherwise else []
        kept = found.snapshot.facts["also"]
        anew = [*(name for name in self.also if name not in kept), *unknown]
        told += [f"starts anew: {', '.join(anew)}"] if anew else []
        print("; ".join(told), file=sys.stderr, flush=True)

    def check(self, callbacks: Sequence[tuple[str, Keeps]]) -> None:
        """Refuse, before the first update, what could not be kept at the first save.

        Args:
            callbacks: those of the user's own that tell their state, each with its name.

        Raises:
            SpecificationError: what a `get_state()` returns is no nest of numbers, words and arrays.
            CheckpointError: it has an array of what no file holds.
        """
        states = [(f"{name}.get_state()", held.get_state()) for name, held in [*callbacks, *self.also.items()]]
        arrays: dict[str, np.ndarray] = {}
        for name, state in [*states, ("the stream's get_state()", self._batches.stream_state)]:
            taken_apart(state, name, arrays)
        for name, array in arrays.items():
            check_dtype(name, array.dtype)

    # ---- saving ----

    def left(self) -> int:
        """Return how many updates may go by before a boundary must be met."""
        every = self._asked.every_steps
        return sys.maxsize if every is None else every - self._run.number % every

    @property
    def is_due(self) -> bool:
        """Whether the run is to be saved at this boundary, or something is to be raised."""
        if self._termination.has_come or self._writer.has_failed:
            return True
        every, seconds = self._asked.every_steps, self._asked.every_seconds
        by_number = every is not None and self._run.number % every == 0
        by_time = seconds is not None and time.monotonic() - self._since >= seconds
        return (by_number or by_time) and self._has_moved

    @property
    def _has_moved(self) -> bool:
        return self._run.number != self._saved

    @property
    def _here(self) -> tuple:
        place = self._run.place
        return place.epoch, place.done, place.logs is None

    def save(self) -> None:
        """Save the run, as it stands at this boundary; the callbacks know of every update.

        Raises:
            CheckpointError: the checkpoint before this one could not be written.
            SystemExit: SIGTERM has come, and all is written.
        """
        self._save(None)

    def look(self) -> None:
        """Save the run if the process is to end, and end it; see `save`."""
        if self._termination.has_come:
            self._save(None)

    def end_epoch(self, logs: Mapping[str, Any]) -> None:
        """Save the run at the end of an epoch, if that is due or the epoch is one of the best; see `save`."""
        value = self._value(logs)
        if self._is_best(value) or self.is_due:
            self._save(value)

    def finish(self) -> None:
        """Save the run at the end of its call, and wait until all is written.

        Raises:
            CheckpointError: it could not be written.
        """
        self._save(None)
        self._writer.wait()
        if self._asked.keep_best is not None and not self._has_seen:
            must = f"keep_best needs {self._asked.keep_best[0]} at the end of an epoch. None was kept as the best."
            warnings.warn(message(must, "other numbers", "a name that the logs have."), UserWarning, stacklevel=4)

    def _value(self, logs: Mapping[str, Any]) -> Value | None:
        if self._asked.keep_best is None or self._asked.keep_best[0] not in logs:
            return None
        self._has_seen = True
        return Value(float(logs[self._asked.keep_best[0]]), self._mode)

    def _is_best(self, value: Value | None) -> bool:
        """Whether an epoch belongs to those that stay, and is not saved as one yet."""
        if self._asked.keep_best is None or value is None or math.isnan(value.number):
            return False
        if not self._has_moved and self._name in self._values:
            return False
        here = self._name + 1
        return here in retention.best_first(self._values | {here: value})[: self._asked.keep_best[1]]

    def _save(self, value: Value | None) -> None:
        self._writer.wait(tells=True)
        is_judged = value is not None and self._name not in self._values
        is_elsewhere = is_judged or self._stood != self._here
        if self._has_moved or (is_elsewhere and self._name > 0):
            number, has_moved = self._run.number, self._has_moved
            snapshot = self._run.snapshot(self._room.copy)
            # A dynamic loss scale may count back; the newest checkpoint is the one with the highest name all the same.
            name = max(number, self._name + 1) if has_moved else self._name
            rest = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "run": self._facts, "content": self._content}
            if value is not None and self._asked.keep_best is not None:
                self._values[name] = value
                rest |= retention.as_told(self._asked.keep_best[0], value)
            self._writer.start(partial(self._commit, name, snapshot, rest, dict(self._values), not has_moved))
            self._saved, self._name, self._stood = number, name, self._here
        self._since = time.monotonic()
        if self._termination.has_come:
            self._writer.wait()
            raise SystemExit(_TERMINATED)

    def _commit(self, step: int, snapshot: Snapshot, rest: dict, values: dict[int, Value], replaces: bool) -> None:
        """Write a checkpoint; only when it has been verified do older ones go."""
        folder, asked = self._folder, self._asked
        folder.write(step, snapshot.arrays, snapshot.facts, rest, replaces=replaces)
        num_best = 0 if asked.keep_best is None else asked.keep_best[1]
        for old in retention.to_remove(folder.steps(), asked.keep, values, num_best):
            folder.remove(old)
