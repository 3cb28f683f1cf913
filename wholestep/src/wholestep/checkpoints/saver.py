"""The saver of a call: it saves the run at boundaries, and resumes it from a saved one."""

import math
import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import keras

from wholestep.callbacks import CallbackRunner
from wholestep.checkpoints import settings
from wholestep.checkpoints.configuration import environment
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
from wholestep.checks import nearest
from wholestep.data import Batches
from wholestep.engines import connect
from wholestep.errors import CheckpointError, SpecificationError, message, tell, warn
from wholestep.executor import Executor
from wholestep.keras_private import direction
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
        checkpoints: Checkpoints,
        run: Run,
        call: str,
        batches: Batches,
        model: keras.Model,
        check: CheckSnapshot,
        processes: Processes,
    ):
        self.also = checkpoints.also or {}
        self._checkpoints = checkpoints
        self._run = run
        self._batches = batches
        self._processes = processes
        self._common = SharedFolder.of(checkpoints.folder, processes, checkpoints.local)
        self._start = ResumePoint(checkpoints, run, self._common, call, batches, model, check)
        self._room, self._writer, self._termination = CopyBuffers(), Writer(), Termination()
        # the metric by which checkpoints are compared
        self._best, self._num_best = (checkpoints.keep_best or ("", 0))[:2]
        self._values: dict[int, Value] = {}
        self._script = Script({}, {}, ())
        self._mode = "min"
        # whether no logs had the metric so far, and no warning said so
        self._lacks_metric = self._num_best > 0
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
            names = ("every_steps", "every_seconds", *settings.RULES, "resume", "learning_rate")
            facts = {
                f"{name} of checkpoints": repr(getattr(self._checkpoints, name)) for name in names
            }
            facts["also of checkpoints"] = repr(sorted(self.also))
            self._processes.check_equal(facts)
            self._common.lock()
            try:
                self._name = self._start.find()
                self._saved = self._run.number if self._name else 0
                if self._name and self._num_best:
                    self._values = self._read_values()
                self._termination.__enter__()
            except BaseException:
                self._common.release()
                raise
        return self

    def _read_values(self) -> dict[int, Value]:
        """Return the values by which the checkpoints of the folder are compared."""
        folder = self._common.folders[-1]
        values = self._common.together.first(
            lambda: [*settings.values_of(folder, self._best).items()],
            "looking for the best checkpoints",
        )
        return {step: Value(*value) for step, value in values}

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
        if self._name:
            newest = f"The newest checkpoint in {folder} is that of update {self._saved}"
            return f"{here}. {newest}: the next run resumes there."
        when = "`every_steps` and `every_seconds` set when one is saved"
        return f"{here}. {folder} has no checkpoint yet: {when}."

    # ---- going on ----

    def open(
        self, executor: Executor, span: Span, watch: CallbackRunner | None = None, **arguments: Any
    ) -> None:
        """Print where the run resumes, if it does, and the differences to the saved run."""
        self._stood = self._here
        self._script = _script_of(executor, self._run.engine_variables(), **arguments)
        self._may_validate = "validation_data" in arguments
        self._mode = _direction(executor, self._checkpoints.keep_best)
        if self._start.checkpoint is None:
            self._saved = self._run.number
            line = span.complete_message(self._run) or self._start.others_message()
        else:
            line = self._start.resume_message(self._script, watch, span)
        if line and self._processes.index == 0:
            tell(line)

    def check(self, callbacks: Sequence[tuple[str, Stateful]]) -> None:
        """Refuse, before the first update, state that the first save could not write.

        Then nothing refuses the start, and the run becomes the one that writes to the store, if
        there is one.
        """

        def check() -> None:
            arrays: dict[str, Numbers] = {}
            for name, stateful in [*callbacks, *self.also.items()]:
                to_json(stateful.get_state(), f"{name}.get_state()", arrays)
            to_json(self._batches.known_stream_state(), "the stream's get_state()", arrays)
            for name, array in arrays.items():
                check_dtype(name, array.dtype)

        self._common.together.all(check, "checking the state to be saved")
        with slowly(self._processes):
            self._common.publish()

    # ---- saving ----

    def left(self) -> int:
        """Return the number of updates until the next required boundary."""
        every = self._checkpoints.every_steps
        return sys.maxsize if every is None else every - self._run.number % every

    def is_due(self) -> bool:
        """Ask all processes whether to save the run, or raise an error, at this boundary."""
        every = self._checkpoints.every_steps
        is_wanted = self._ask("between updates")
        is_multiple = every is not None and self._run.number % every == 0
        return is_wanted or (is_multiple and self._has_moved)

    def _ask(self, boundary: str, *, now: bool = False) -> bool:
        """Ask all processes for reasons to save, and record whether the processes must end."""
        seconds = self._checkpoints.every_seconds
        is_late = seconds is not None and time.monotonic() - self._since >= seconds
        flags = BoundaryFlags(self._termination.has_come, self._writer.has_failed, is_late)
        flags = self._common.together.ask(boundary, flags, now=now)
        self._ends |= flags.terminated
        return flags.terminated or flags.failed or (flags.late and self._has_moved)

    @property
    def _has_moved(self) -> bool:
        return self._run.number != self._saved

    @property
    def _here(self) -> tuple[Any, ...]:
        place = self._run.place
        return place.epoch, place.done, place.logs is None

    def save(self, value: Value | None = None) -> None:
        """Save the run at this boundary, after callbacks have received all updates; see `Ended`."""
        self._wait(tells=self._processes.index == 0)
        is_judged = value is not None and self._name not in self._values
        is_elsewhere = is_judged or self._stood != self._here
        if self._has_moved or (is_elsewhere and self._name > 0):
            self._write(value, replaces=not self._has_moved)
        self._since = time.monotonic()
        if self._ends:
            self._wait()
            raise Ended

    def _write(self, value: Value | None, *, replaces: bool) -> None:
        """Start to write a checkpoint, with the metric of its epoch."""
        snapshot = self._run.snapshot(self._common.copies(self._room))
        number = self._run.number  # which the snapshot may have corrected
        if not replaces:
            # A dynamic loss scale may count back; the newest checkpoint still has the highest name.
            self._name = max(number, self._name + 1)
        rest = {
            "time": _now(),
            "run": self._script.environment,
            "content": self._start.content,
            "settings": self._script.settings,
            "rates": self._start.rates,
        }
        if value is not None:
            self._values[self._name] = value
        if self._name in self._values:
            rest |= settings.entry_of(self._best, self._values[self._name])
        manifest = Manifest(self._name, [], [], snapshot.facts, rest)
        then = partial(self._retain, self._name)
        write = self._common.write
        self._writer.start(partial(write, manifest, snapshot.arrays, then, replaces=replaces))
        self._saved = number
        self._stood = self._here

    def poll(self) -> None:
        """Save the run and end the process if SIGTERM has come; see `save`."""
        self._ask("in a validation")
        if self._ends:
            self.save()

    def end_epoch(self, logs: Mapping[str, Any]) -> None:
        """Save the run at the end of an epoch, if it is among the best or a save is due."""
        value = self._value(logs)
        awaits_validation = self._may_validate and self._best.startswith("val_")
        if not awaits_validation or any(name.startswith("val_") for name in logs):
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
        if self._lacks_metric:
            self._lacks_metric = False
            must = (
                f"keep_best needs {self._best} in the logs of an epoch. Without it, no checkpoint "
                "is kept as the best."
            )
            received = f"logs with {', '.join(logs)}" if logs else "other logs"
            warn(message(must, received, "a name in the logs."))

    def _value(self, logs: Mapping[str, Any]) -> Value | None:
        """Return the metric of `keep_best` in process 0; None if there is none."""
        if not self._num_best:
            return None
        is_here = self._best in logs and self._processes.index == 0
        own = float(logs[self._best]) if is_here else None
        number = self._processes.broadcast(own, f"sharing {self._best} of keep_best")
        if number is None:
            return None
        self._lacks_metric = False
        return Value(number, self._mode)

    def _is_best(self, value: Value | None) -> bool:
        """Whether an epoch is among the best, and is not saved yet."""
        is_saved = not self._has_moved and self._name in self._values
        if value is None or math.isnan(value.number) or is_saved:
            return False
        here = self._name + 1
        return here in settings.best_first(self._values | {here: value})[: self._num_best]

    def _wait(self, *, tells: bool = False) -> None:
        with slowly(self._processes):
            self._writer.wait(tells=tells)

    def _retain(self, newest: int) -> None:
        """Remove older checkpoints; a temporary folder keeps the newest only."""
        for folder in self._common.folders:
            is_temporary = folder is self._common.folder and self._common.is_temporary
            asked = Checkpoints(folder.folder, keep=1) if is_temporary else self._checkpoints
            for old in settings.to_remove(folder, asked, newest):
                folder.remove(old)


class Unsaved:
    """The counterpart of `Saver` for a call without checkpoints, which saves nothing."""

    also: Mapping[str, Stateful] = {}

    def __init__(self, run: Run):
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
        line = span.complete_message(self._run)
        if line and executor.engine.processes.index == 0:
            tell(line)

    def save(self, *_: object) -> None:
        """Do nothing."""

    check = end_epoch = poll = finish = __exit__ = save

    def __enter__(self) -> "Unsaved":
        return self


def save_once(path: str | os.PathLike[str], run: Run, executor: Executor | None) -> Path | str:
    """Write and verify a checkpoint by hand, and return its folder, or its address in a store."""
    processes = connect()
    common = SharedFolder.of(path, processes)
    target = common.folders[-1]
    with slowly(processes):
        snapshot = common.together.all(
            lambda: run.snapshot(common.copies(CopyBuffers())), f"saving to {common.folder.folder}"
        )
        what = f"reading the steps of {target.folder}"
        if run.number in common.together.first(target.steps, what):
            must = f"A checkpoint saved by hand must be the first of its step in {target.folder}."
            attempt = "another folder." if common.store is None else "another address."
            raise CheckpointError(message(must, f"step {run.number}, which exists", attempt))
        common.lock()
        try:
            script = _script_of(executor) if executor else Script({}, {}, ())
            rest = {"time": _now(), "run": script.environment, "settings": script.settings}
            common.write(Manifest(run.number, [], [], snapshot.facts, rest), snapshot.arrays)
        finally:
            common.release()
    return target.path(run.number)


def _script_of(executor: Executor, own: Iterable[str] = (), **call: Any) -> Script:
    """Return the environment and the settings of a run; `call` holds the arguments of its call."""
    options = executor.context.options
    settings = settings_of_script(executor.model, executor.objective, options, **call)
    engine = executor.engine
    num_replicas = engine.devices.num_replicas
    here = environment(executor.model, num_replicas, engine.processes.count, options)
    return Script(here, settings, own)


def _now() -> str:
    return time.strftime(settings.TIME)


def _direction(executor: Executor, keep_best: tuple[str, int] | tuple[str, int, str] | None) -> str:
    """Return the direction in which the metric of `keep_best` improves: "min" or "max"."""
    name, _, mode = (*(keep_best or ("loss", 1)), "auto")[:3]
    if mode != "auto":
        return mode
    metrics = list(executor.context.metrics)
    for metric in executor.model.metrics:
        metrics += [metric, *getattr(metric, "metrics", ())]
    bare = name.removeprefix("val_")
    named = [metric for metric in metrics if metric.name == bare and direction(metric)]
    if bare != "loss" and not named:
        names = ["loss", *(metric.name for metric in metrics)]
        meant = nearest(name, [*names, *(f"val_{each}" for each in names)])
        must = "keep_best must say whether less or more is better, where Keras does not know."
        way = f'("{name}", 1, "max"), or "min".'
        if meant is not None and meant != name:
            way = f'("{meant}", 1); or {way}'
        raise SpecificationError(message(must, name, way))
    return "max" if named and direction(named[0]) == "up" else "min"
