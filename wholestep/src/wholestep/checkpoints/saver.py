"""The saver of a call: it saves the run at boundaries, and resumes it from a saved one."""

import math
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import keras

from wholestep.callbacks import CallbackRunner
from wholestep.checkpoints import settings
from wholestep.checkpoints.configuration import Settings, environment
from wholestep.checkpoints.manifest import Manifest
from wholestep.checkpoints.position import Stateful
from wholestep.checkpoints.resume import (
    CheckSnapshot,
    ResumePoint,
    Script,
    Span,
    settings_of_script,
)
from wholestep.checkpoints.safetensors import check_dtype
from wholestep.checkpoints.settings import Checkpoints, Value
from wholestep.checkpoints.shards import Numbers
from wholestep.checkpoints.shared_folder import BoundaryFlags, SharedFolder, slowly
from wholestep.checkpoints.snapshot import to_json
from wholestep.checkpoints.writer import CopyBuffers, Writer
from wholestep.data import Batches
from wholestep.engines import connect
from wholestep.errors import CheckpointError, SpecificationError, message, tell, warn
from wholestep.executor import Executor
from wholestep.processes import Processes
from wholestep.run import Run
from wholestep.safety import Ended, TerminatedWaiting, Termination, uninterrupted


class Saver:
    """Saves a run at the boundaries of one call of `fit` or `steps`.

    The caller's thread waits for the device and copies the state; another thread writes. Inside of
    its block the folder is locked, and SIGTERM is held back until the next boundary. Several
    processes save at the same boundaries.

    Args:
        call: "fit" or "steps", with its `batches`.
        check: raises a SpecificationError for a snapshot of another model.

    Raises:
        SpecificationError: the run cannot resume with these arguments; nothing has been changed.
        CheckpointError: the folder is in use, has checkpoints despite resume=False, or only damaged
            ones; or the last checkpoint could not be written.
    """

    def __init__(
        self,
        asked: Checkpoints,
        run: Run,
        call: str,
        batches: Batches,
        model: keras.Model,
        check: CheckSnapshot,
        processes: Processes,
    ):
        self.also = asked.also or {}
        self._asked = asked
        self._run = run
        self._batches = batches
        self._processes = processes
        self._common = SharedFolder.of(asked.folder, processes, asked.local)
        self._start = ResumePoint(asked, run, self._common, call, batches, model, check)
        self._room, self._writer, self._termination = CopyBuffers(), Writer(), Termination()
        # the metric by which checkpoints are compared
        self._best, self._num_best = (asked.keep_best or ("", 0))[:2]
        self._values: dict[int, Value] = {}
        self._environment: dict[str, Any] = {}
        self._settings: Settings = {}
        self._mode = "min"
        # whether logs had the metric, or a warning said that they had not
        self._has_seen = self._has_warned = False
        self._may_validate = False
        self._ends = False  # whether SIGTERM has come, to this process or another
        self._saved = 0  # the number of updates at the newest checkpoint
        self._name = 0  # the step in its name
        self._stood = self._here  # the position of the run
        self._since = time.monotonic()

    def __enter__(self) -> "Saver":
        if self._run.is_in_call:
            must = "One call at a time may train a run with checkpoints."
            received = f"{self._start.call} inside of another call"
            raise SpecificationError(message(must, received, "leave checkpoints out."))
        with slowly(self._processes):
            how = ("every_steps", "every_seconds", *settings.RULES, "resume", "learning_rate")
            said = {f"{name} of checkpoints": repr(getattr(self._asked, name)) for name in how}
            self._processes.check_equal(said | {"also of checkpoints": repr(sorted(self.also))})
            self._common.lock()
            try:
                self._name = self._start.find()
                self._saved = self._run.number if self._name else 0
                if self._name and self._num_best:
                    best = partial(settings.values_of, self._common.folders[-1], self._best)
                    known = self._common.together.first(
                        lambda: [*best().items()], "looking for the best checkpoints"
                    )
                    self._values = {step: Value(*value) for step, value in known}
                self._termination.__enter__()
            except BaseException:
                self._common.release()
                raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._termination.__exit__()
        try:
            # With several processes, the others may not come to this boundary.
            if isinstance(error, TerminatedWaiting) and self._processes.count == 1:
                self._ends = True
                self.save()
            with uninterrupted(twice=False):
                self._wait()
            if isinstance(error, KeyboardInterrupt) and self._processes.index == 0:
                print(self._interrupted(), file=sys.stderr, flush=True)
        except Exception as failure:
            if error is None or isinstance(error, GeneratorExit):
                raise
            error.add_note(f"In addition, {type(failure).__name__}: {failure}")
        finally:
            self._writer.then(self._common.release)
        if error is None:
            self._ask("at the end", now=True)
            if self._ends:
                raise Ended
        if self._termination.has_come and isinstance(error, GeneratorExit):
            # the code that left the loop would not see an error
            signal.raise_signal(signal.SIGTERM)

    def _interrupted(self) -> str:
        """Return where the next run resumes after an interrupt, as text."""
        folder = self._common.folders[-1].folder
        here = f"Interrupted after update {self._run.number}"
        if not self._name:
            return (
                f"{here}. {folder} has no checkpoint yet: `every_steps` and `every_seconds` "
                "set when one is saved."
            )
        return (
            f"{here}. The newest checkpoint in {folder} is that of update {self._saved}: the "
            "next run resumes there."
        )

    # ---- going on ----

    def open(
        self, executor: Executor, span: Span, watch: CallbackRunner | None = None, **arguments: Any
    ) -> None:
        """Print where the run resumes, if it does, and the differences to the saved run's callbacks
        and arguments.
        """
        self._stood = self._here
        self._environment, self._settings = _script_of(executor, **arguments)
        self._may_validate = "validation_data" in arguments
        self._mode = _direction(executor, self._asked.keep_best)
        if self._start.found is None:
            self._saved = self._run.number
            line = span.told_if_complete(self._run) or self._start.told_of_others()
        else:
            script = Script(self._environment, self._settings, self._run.engine_variables())
            line = self._start.told(script, watch, span)
        if line and self._processes.index == 0:
            tell(line)

    def check(self, callbacks: Sequence[tuple[str, Stateful]]) -> None:
        """Refuse, before the first update, state of these objects or callbacks that the first save
        could not write.

        Then nothing refuses the start, and the run becomes the one that writes to the store, if
        there is one.
        """

        def check() -> None:
            states = [
                (f"{name}.get_state()", held.get_state())
                for name, held in [*callbacks, *self.also.items()]
            ]
            arrays: dict[str, Numbers] = {}
            for name, state in [
                *states,
                ("the stream's get_state()", self._batches.known_stream_state()),
            ]:
                to_json(state, name, arrays)
            for name, array in arrays.items():
                check_dtype(name, array.dtype)

        self._common.together.all(check, "checking the state to be saved")
        with slowly(self._processes):
            self._common.publish()

    # ---- saving ----

    def left(self) -> int:
        """Return the number of updates until the next required boundary."""
        every = self._asked.every_steps
        return sys.maxsize if every is None else every - self._run.number % every

    def is_due(self) -> bool:
        """Ask all processes whether to save the run, or raise an error, at this boundary."""
        every = self._asked.every_steps
        is_wanted = self._ask("between updates")
        return is_wanted or (
            every is not None and self._run.number % every == 0 and self._has_moved
        )

    def _ask(self, boundary: str, *, now: bool = False) -> bool:
        """Ask all processes for reasons to save, and record whether the processes must end."""
        seconds = self._asked.every_seconds
        is_late = seconds is not None and time.monotonic() - self._since >= seconds
        signs = BoundaryFlags(self._termination.has_come, self._writer.has_failed, is_late)
        found = self._common.together.ask(boundary, signs, now=now)
        self._ends |= found.terminated
        return found.terminated or found.failed or (found.late and self._has_moved)

    @property
    def _has_moved(self) -> bool:
        return self._run.number != self._saved

    @property
    def _here(self) -> tuple[Any, ...]:
        place = self._run.place
        return place.epoch, place.done, place.logs is None

    def save(self, value: Value | None = None) -> None:
        """Save the run at this boundary, after callbacks have received all updates; exit if SIGTERM
        has come.
        """
        self._wait(tells=self._processes.index == 0)
        is_judged = value is not None and self._name not in self._values
        is_elsewhere = is_judged or self._stood != self._here
        if self._has_moved or (is_elsewhere and self._name > 0):
            has_moved = self._has_moved
            snapshot = self._run.snapshot(self._common.copies(self._room))
            number = self._run.number  # which the snapshot may have corrected
            # A dynamic loss scale may count back; the newest checkpoint must still have the highest
            # name.
            name = max(number, self._name + 1) if has_moved else self._name
            rest = {"time": _now(), "run": self._environment, "content": self._start.content}
            rest |= {"settings": self._settings, "rates": self._start.rates}
            if value is not None:
                self._values[name] = value
            if name in self._values:
                rest |= settings.as_told(self._best, self._values[name])
            manifest = Manifest(name, [], [], snapshot.facts, rest)
            then = partial(self._retain, name)
            write = partial(
                self._common.write, manifest, snapshot.arrays, then, replaces=not has_moved
            )
            self._writer.start(write)
            self._saved = number
            self._name = name
            self._stood = self._here
        self._since = time.monotonic()
        if self._ends:
            self._wait()
            raise Ended

    def poll(self) -> None:
        """Save the run and end the process if SIGTERM has come; see `save`."""
        self._ask("in a validation")
        if self._ends:
            self.save()

    def end_epoch(self, logs: Mapping[str, Any]) -> None:
        """Save the run at the end of an epoch, if a save is due or the epoch is among the best; see
        `save`.
        """
        value = self._value(logs)
        prefix = "val_" if self._best.startswith("val_") else ""
        if not (prefix and self._may_validate) or any(name.startswith(prefix) for name in logs):
            self._warn_if_unseen(logs)
        if self._is_best(value) or self.is_due():
            self.save(value)

    def finish(self) -> None:
        """Save the run at the end of its call, and wait until it is written."""
        self.save()
        self._wait()
        self._warn_if_unseen({})

    def _warn_if_unseen(self, logs: Mapping[str, Any]) -> None:
        """Warn, once, that no logs have had the metric of `keep_best`."""
        if self._num_best and not self._has_seen and not self._has_warned:
            self._has_warned = True
            must = (
                f"keep_best needs {self._best} in the logs of an epoch. Without it, no "
                "checkpoint is kept as the best."
            )
            warn(
                message(
                    must,
                    f"logs with {', '.join(logs)}" if logs else "other logs",
                    "a name in the logs.",
                )
            )

    def _value(self, logs: Mapping[str, Any]) -> Value | None:
        """Return the metric of `keep_best` in process 0; None if there is none."""
        if not self._num_best:
            return None
        own = float(logs[self._best]) if self._best in logs and self._processes.index == 0 else None
        number = self._processes.broadcast(own, f"sharing {self._best} of keep_best")
        self._has_seen |= number is not None
        return None if number is None else Value(number, self._mode)

    def _is_best(self, value: Value | None) -> bool:
        """Whether an epoch is among the best, and is not saved yet."""
        if (
            value is None
            or math.isnan(value.number)
            or (not self._has_moved and self._name in self._values)
        ):
            return False
        here = self._name + 1
        return here in settings.best_first(self._values | {here: value})[: self._num_best]

    def _wait(self, *, tells: bool = False) -> None:
        with slowly(self._processes):
            self._writer.wait(tells=tells)

    def _retain(self, newest: int) -> None:
        """Remove older checkpoints, here and in the store; a temporary folder keeps the newest
        only.
        """
        for folder in self._common.folders:
            is_temporary = folder is self._common.folder and self._common.is_temporary
            asked = Checkpoints(folder.folder, keep=1) if is_temporary else self._asked
            for old in settings.to_remove(folder, asked, newest):
                folder.remove(old)


class Unsaved:
    """The counterpart of `Saver` for a call without checkpoints."""

    def __init__(self, run: Run):
        self.also: Mapping[str, Stateful] = {}
        self._run = run

    def is_due(self) -> bool:
        """Return False: no save is due."""
        return False

    def left(self) -> int:
        """Return the largest integer: no boundary is required."""
        return sys.maxsize

    def open(
        self, executor: Executor, span: Span, watch: CallbackRunner | None = None, **arguments: Any
    ) -> None:
        """Print that a restored run has nothing left to train, if so."""
        line = span.told_if_complete(self._run)
        if line and executor.engine.processes.index == 0:
            tell(line)

    def check(self, callbacks: Sequence[tuple[str, Stateful]]) -> None:
        """Do nothing."""

    def save(self) -> None:
        """Do nothing."""

    def end_epoch(self, logs: Mapping[str, Any]) -> None:
        """Do nothing."""

    def poll(self) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing."""

    def __enter__(self) -> "Unsaved":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def save_once(path: str | os.PathLike[str], run: Run, executor: Executor | None) -> Path | str:
    """Write and verify a checkpoint of a run by hand, and return its folder, or its address in a
    store.
    """
    processes = connect()
    common = SharedFolder.of(path, processes)
    kept = common.folders[-1]
    with slowly(processes):
        snapshot = common.together.all(
            lambda: run.snapshot(common.copies(CopyBuffers())), f"saving to {common.folder.folder}"
        )
        if run.number in common.together.first(kept.steps, f"reading the steps of {kept.folder}"):
            must = f"A checkpoint saved by hand must be the first of its step in {kept.folder}."
            attempt = "another folder." if common.store is None else "another address."
            raise CheckpointError(message(must, f"step {run.number}, which exists", attempt))
        common.lock()
        try:
            here, settings = ({}, {}) if executor is None else _script_of(executor)
            rest = {"time": _now(), "run": here, "settings": settings}
            common.write(Manifest(run.number, [], [], snapshot.facts, rest), snapshot.arrays)
        finally:
            common.release()
    return kept.path(run.number)


def _script_of(executor: Executor, **call: Any) -> tuple[dict[str, Any], Settings]:
    """Return the environment and the settings of a run; `call` holds the arguments of its call."""
    options = executor.context.options
    settings = settings_of_script(executor.model, executor.objective, options, **call)
    return environment(executor.model, *_sizes(executor), options), settings


def _now() -> str:
    return time.strftime(settings.TIME)


def _direction(executor: Executor, keep_best: tuple[str, int] | tuple[str, int, str] | None) -> str:
    """Return the direction in which the metric of `keep_best` improves: "min" or "max"."""
    name, _, mode = (*(keep_best or ("loss", 1)), "auto")[:3]
    bare = name.removeprefix("val_")
    if mode != "auto":
        return mode
    of_model = (part for m in executor.model.metrics for part in (m, *getattr(m, "metrics", ())))
    known = [*executor.context.metrics, *of_model]
    ways = [
        metric._direction
        for metric in known
        if metric.name == bare and hasattr(metric, "_direction")
    ]
    if bare != "loss" and not ways:
        must = "keep_best must say whether less or more is better, where Keras does not know."
        raise SpecificationError(message(must, name, f'("{name}", 1, "max"), or "min".'))
    return "max" if ways and ways[0] == "up" else "min"


def _sizes(executor: Executor) -> tuple[int, int]:
    """Return (the number of replicas, the number of processes)."""
    return executor.engine.devices.num_replicas, executor.engine.processes.count
