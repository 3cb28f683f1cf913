"""The point where a run resumes: the newest good checkpoint, a restored one, or the beginning."""

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import keras

from wholestep.callbacks import CallbackRunner
from wholestep.checkpoints.configuration import (
    Settings,
    changed_settings,
    differences,
    environment,
    optimizer_kind,
    rate_variable,
    rates_of,
    settings_of_run,
    value_of,
)
from wholestep.checkpoints.data import check_content, check_goes_on
from wholestep.checkpoints.files import on_disk
from wholestep.checkpoints.folder import Folder
from wholestep.checkpoints.manifest import Manifest
from wholestep.checkpoints.paths import reading, runs_inside
from wholestep.checkpoints.position import other_run
from wholestep.checkpoints.safetensors import DTYPES
from wholestep.checkpoints.settings import Checkpoints
from wholestep.checkpoints.shards import Numbers, hollow
from wholestep.checkpoints.shared_folder import SharedFolder, slowly
from wholestep.checkpoints.snapshot import RunFacts, Snapshot, from_json
from wholestep.checkpoints.store import CheckpointFolder, Store, fetch, find
from wholestep.data import Batches, content_of
from wholestep.engines import connect, num_replicas
from wholestep.errors import (
    CheckpointError,
    DamagedError,
    GoneError,
    SpecificationError,
    message,
    shown,
    tell,
)
from wholestep.model import Objective
from wholestep.processes import Processes
from wholestep.program import Options
from wholestep.run import Run

CheckSnapshot = Callable[[Snapshot], None]
CheckManifest = Callable[[Snapshot, Manifest], None]
_GONE = "gone"


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """A checkpoint that has been read and verified."""

    manifest: Manifest
    snapshot: Snapshot
    path: Path
    aside: list[str]  # descriptions of newer checkpoints, which are damaged


def newest(
    common: SharedFolder,
    check: CheckManifest,
    *,
    sets_aside: bool,
    step: int | None = None,
    source: str = "",
) -> VerifiedCheckpoint | None:
    """Return the newest checkpoint that is good in all processes; None for a new folder.

    Args:
        check: raises a SpecificationError for a snapshot of another model or other data; gets
            hollow arrays. If it raises a DamagedError, the checkpoint counts as damaged.
        sets_aside: whether to rename damaged checkpoints, for which the caller must hold the lock.
        step: the step of the only checkpoint to read.
        source: the folder or the store to name in errors; "" for the last of `common`.

    Raises:
        CheckpointError: all checkpoints are damaged; or one, which may be good, cannot be read
            here.
    """
    folder = common.folder
    together = common.together
    source = source or str(common.folders[-1].folder)
    search = _Search(folder, together.share, check, sets_aside, step, source)
    what = f"reading checkpoints from {folder.folder}"
    together.all(partial(_check_any, folder), what)
    tried: list[int] = []
    # A writer may have removed a listed checkpoint after writing others.
    while (steps := together.first(search.left, what)) and steps != tried:
        tried = steps
        candidate = steps[0]
        checkpoint, why = together.all(partial(search.read, candidate), what)
        whys = [words for words in together.exchange.all_gather(why, what) if words]
        if not whys:
            return checkpoint
        if _GONE not in whys:
            search.damaged.add(candidate)
            name = together.first(partial(search.set_aside, candidate, whys[0]), what)
            search.aside.append(f"{name} ({whys[0].rstrip('.')})")
    if steps:
        must = f"Checkpoints that are listed in {folder.folder} must exist."
        raise CheckpointError(message(must, f"steps {steps}, all gone", "again."))
    if search.aside:
        must = f"At least one checkpoint in {folder.folder} must be good."
        try_next = "copy a good one there; or begin anew in another folder."
        raise CheckpointError(message(must, "; ".join(search.aside), try_next))
    return None


@dataclass
class _Search:
    """The search for a good checkpoint of a folder, in one process; see `newest`."""

    folder: Folder
    share: tuple[int, int]
    check: CheckManifest
    sets_aside: bool
    step: int | None
    source: str
    damaged: set[int] = field(default_factory=set)
    aside: list[str] = field(default_factory=list)  # descriptions of damaged checkpoints

    def left(self) -> list[int]:
        """Return the steps that are not known to be damaged, newest first."""
        steps = self.folder.steps() if self.step is None else [self.step]
        return [step for step in steps if step not in self.damaged]

    def read(self, step: int) -> tuple[VerifiedCheckpoint | None, str]:
        """Return a checkpoint and ""; or None and the reason."""
        path = self.folder.path(step)
        try:
            manifest, arrays = self.folder.read(step, self._check, self.share)
        except DamagedError as error:
            if self.step is not None:
                raise CheckpointError(f"{path} must be good. {error}") from error
            return None, _GONE if isinstance(error, GoneError) else str(error)
        snapshot = Snapshot(arrays, manifest.facts, self.source)
        return VerifiedCheckpoint(manifest, snapshot, path, self.aside), ""

    def _check(self, manifest: Manifest) -> None:
        arrays: dict[str, Numbers] = {
            name: hollow(shape, DTYPES[dtype]) for name, (shape, dtype) in manifest.arrays.items()
        }
        self.check(Snapshot(arrays, manifest.facts, self.source), manifest)

    def set_aside(self, step: int, why: str) -> str:
        """Rename a damaged checkpoint, if asked, and return its name."""
        path = self.folder.set_aside(step, why) if self.sets_aside else self.folder.path(step)
        return path.name


def _check_any(folder: Folder) -> None:
    """Refuse a folder in which all checkpoints have been set aside."""
    if folder.bad() and not folder.steps():
        names = ", ".join(path.name for path in folder.bad())
        must = f"At least one checkpoint in {folder.folder} must be good."
        attempt = "look at their why.json; to begin anew, move them away, or choose another folder."
        raise CheckpointError(message(must, f"{names} only", attempt))


def read_one(
    path: str | os.PathLike[str],
    check: Callable[[Snapshot], None],
    model: keras.Model | None = None,
) -> VerifiedCheckpoint:
    """Return the checkpoint at a path, or the newest good one in it (see `newest`).

    Damaged ones stay in place; a line on the error output names those that are newer.

    Args:
        model: whose optimizer must be of the saved kind; None for any.
    """
    if not isinstance(path, str | os.PathLike) or path == "":
        must = "path must be the path of a checkpoint, or of a folder with one."
        attempt = '"runs/a".'
        if isinstance(path, Checkpoints):
            attempt = "its folder: checkpoints.folder."
        raise SpecificationError(message(must, shown(path), attempt))
    source, step = find(path)
    processes = connect()

    def check_saved(snapshot: Snapshot, manifest: Manifest) -> None:
        RunFacts.of(snapshot)
        if model is not None:
            _check_optimizer(snapshot, manifest, model)
        check(snapshot)

    def read(folder: Folder) -> VerifiedCheckpoint | None:
        common = SharedFolder(folder, processes)
        name = str(source.folder)
        return newest(common, check_saved, sets_aside=False, step=step, source=name)

    with slowly(processes):
        if isinstance(source, Folder):
            checkpoint = read(source)
        else:
            _check_alone(source, processes)
            steps = source.steps if step is None else lambda: [step]
            with _copied(source, steps) as folder:
                checkpoint = None if folder is None else read(folder)
    if checkpoint is None:
        raise _no_checkpoint(source)
    if checkpoint.aside and processes.index == 0:
        names = ", ".join(checkpoint.aside)
        tell(f"wholestep: reads {checkpoint.path}; newer ones are damaged: {names}")
    return checkpoint


def _check_alone(store: Store, processes: Processes) -> None:
    if processes.count > 1:
        must = "Several processes restore from a folder that all hosts see."
        way = f"wholestep checkpoint copy {store.folder} FOLDER, and restore(FOLDER)."
        raise SpecificationError(message(must, store.folder, way))


@contextmanager
def _copied(store: Store, steps: Callable[[], list[int]]) -> Iterator[Folder | None]:
    """Context with a copy of the first good checkpoint of these steps; None if none is good."""
    must = f"A checkpoint in {store.folder} is read from a copy in a temporary folder."
    copy = f"wholestep checkpoint copy {store.folder} FOLDER"
    way = f"set TMPDIR to a folder with room; or {copy}, and pass FOLDER."
    with on_disk(must, way):
        temporary = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with temporary as path:
        folder = Folder(path)
        try:
            step = fetch(store, steps, folder)
        except CheckpointError as error:
            if str(folder.folder) not in str(error):
                raise
            raise CheckpointError(message(must, error.args[0], way)) from error
        yield None if step is None else folder


def _no_checkpoint(source: CheckpointFolder) -> CheckpointError:
    must = "The path must be a good checkpoint, or a folder with one."
    usual = _lacking(source), "the folder that was passed to fit."
    return CheckpointError(message(must, *(reading(source.folder) or usual)))


def _lacking(source: CheckpointFolder) -> str:
    """Return the reason that no checkpoint was found."""
    parent = source.folder.parent
    name = source.folder.name
    is_step = name.startswith("step-") and not str(parent).endswith(":/")
    if is_step and (steps := find(parent)[0].steps()):
        return f"no {name} in {parent}, which has the steps {', '.join(map(str, steps))}"
    if isinstance(source, Folder) and not source.folder.exists():
        return f"no such folder: {source.folder}"
    damaged = [] if isinstance(source, Folder) else source.steps()
    return f"{'damaged ones only' if damaged else 'none'} in {source.folder}"


@dataclass
class ResumePoint:
    """The point from which a call of `fit` or `steps` starts or resumes."""

    checkpoints: Checkpoints
    run: Run
    common: SharedFolder
    call: str
    batches: Batches
    model: keras.Model
    check: CheckSnapshot  # raises a SpecificationError for a snapshot of another model
    checkpoint: VerifiedCheckpoint | None = None  # the checkpoint from which it resumes, if any
    content: dict[str, str] = field(default_factory=dict)  # digests of the call's data
    # that the scripts of the run set, by optimizer
    rates: dict[str, float] = field(default_factory=dict)
    _changed_rates: list[str] = field(default_factory=list)
    _num_discarded: int = 0  # updates of this process that are in no checkpoint

    def find(self) -> int:
        """Restore the run to its starting point; return its checkpoint's step, 0 for a new run."""
        self.content = content_of(self.batches)
        self.rates = rates_of(self.model)
        rate = self.checkpoints.learning_rate
        if rate is not None and "optimizer" not in self.rates:
            must = "learning_rate needs an optimizer with a constant learning rate."
            attempt = "change the schedule itself."
            raise SpecificationError(message(must, "a schedule, or no optimizer", attempt))
        step = self._find()
        if rate is not None and rate != self._saved_rates.get("optimizer"):
            variable = rate_variable(self.model.optimizer)
            assert variable is not None
            self._changed_rates = [f"learning rate {rate}, as asked ({value_of(variable)} before)"]
            variable.assign(rate)
            self.rates["optimizer"] = rate
        return step

    def _find(self) -> int:
        run = self.run
        resumes = self.checkpoints.resume
        if resumes:
            self.common.pull()
        # restored by hand: it resumes from there
        if not resumes or run.restored is not None:
            what = "looking for the checkpoint to resume from"
            self.common.together.all(self._check_folder, what)
            return run.number if resumes else 0
        self.checkpoint = checkpoint = newest(self.common, self._check_saved, sets_aside=True)
        if checkpoint is None:
            return 0
        self._num_discarded = run.number - checkpoint.snapshot.facts["number"]
        run.restore(checkpoint.snapshot)
        set_here = dict(self.rates)
        if self.checkpoints.learning_rate is not None:
            set_here.pop("optimizer")
        self._changed_rates = unused_rates(checkpoint, set_here, rates_of(self.model))
        self.rates |= self._saved_rates
        return checkpoint.manifest.step

    def _check_folder(self) -> None:
        """Refuse checkpoints of other runs; the run does not resume from the newest of them."""
        if not self.checkpoints.resume:
            for folder in self.common.folders:
                steps = folder.steps()
                if steps or folder.bad():
                    must = "resume=False begins anew in an empty folder."
                    received = f"{len(steps)} checkpoints in {folder.folder}"
                    attempt = "another folder; or leave resume out, to resume."
                    raise CheckpointError(message(must, received, attempt))
            return
        steps = self.common.folder.steps()
        if steps and steps[0] != self.run.number:
            must = "A manually restored run must save to a folder without other checkpoints."
            received = f"update {self.run.number}, and step {steps[0]} in {self.checkpoints.folder}"
            attempt = "another folder; or do not restore by hand."
            raise SpecificationError(message(must, received, attempt))

    def _check_saved(self, snapshot: Snapshot, manifest: Manifest) -> None:
        """Refuse other data, another optimizer and another model, before anything changes."""
        facts = RunFacts.of(snapshot)
        if facts.place.call:
            check_goes_on(facts.place, facts.data, self.call, self.batches, snapshot.source)
            before = manifest.rest.get("content") or self.content
            check_content(before, self.content, snapshot.source)
        _check_optimizer(snapshot, manifest, self.model)
        self.check(snapshot)

    @property
    def _saved_rates(self) -> dict[str, float]:
        """The learning rates that the script of the saved run set."""
        return {} if self.checkpoint is None else self.checkpoint.manifest.rest.get("rates") or {}

    def others_message(self) -> str:
        """Return the line of a new run that names other runs in subfolders; "" for none."""
        folder = self.checkpoints.folder
        is_new = self.checkpoint is None and self.run.restored is None and self.checkpoints.resume
        if is_new and (inside := runs_inside(folder)):
            return f"wholestep: begins anew in {folder}; other runs are in {', '.join(inside)}"
        return ""

    def resume_message(self, script: "Script", watch: CallbackRunner | None, span: "Span") -> str:
        """Return the line with the checkpoint of a resumed run, and what differs from that run."""
        checkpoint = self.checkpoint
        place = self.run.place
        assert checkpoint is not None
        where = f" (epoch {place.epoch + 1}, batch {place.done})" if place.call else ""
        resumed = (
            f"wholestep: resumes from {checkpoint.path}, after update {self.run.number}{where}"
        )
        parts = [span.complete_message(self.run) or resumed, *span.unused_message(self.run)]
        if self._num_discarded > 0:
            parts.append(f"discarded: {self._num_discarded} later updates")
        if checkpoint.aside:
            parts.append(f"set aside: {', '.join(checkpoint.aside)}")
        saved = checkpoint.snapshot.facts["also"]
        anew = [name for name in self.checkpoints.also or () if name not in saved]
        parts += differences_of(checkpoint, script, self._changed_rates, anew, watch)
        return "; ".join(parts)


@dataclass(frozen=True)
class Span:
    """The epochs of a call of `fit` or `steps`, from which a saved run may resume."""

    num: int
    begin: int = 0

    def complete_message(self, run: Run) -> str:
        """Return the line about a resumed run that is complete in this call; "" if it is not."""
        if run.restored is None or not run.place.call:
            return ""
        is_over, has_stopped = _end_of_epoch(run, run.restored)
        epoch = run.place.epoch + 1
        if epoch < self.num + (not is_over) and not has_stopped:
            return ""
        where = f"epoch {epoch}"
        where += f" of {self.num}" if epoch <= self.num else f", with epochs={self.num}"
        where += "" if is_over else f", batch {run.place.done}"
        where += ", where a callback stopped it" if has_stopped and epoch < self.num else ""
        way = "use another folder" if has_stopped else "raise epochs, or use another folder"
        source = run.restored.source
        name = f"the run in {source}" if source else "the restored run"
        return f"wholestep: {name} is complete ({where}): nothing was trained (to train, {way})"

    def unused_message(self, run: Run) -> list[str]:
        """Return the description of an `initial_epoch` to which a resumed run has not come."""
        if run.restored is None or not run.place.call:
            return []
        is_over, _ = _end_of_epoch(run, run.restored)
        is_unused = self.begin > run.place.epoch + is_over
        return [f"initial_epoch {self.begin}, which is not used"] if is_unused else []


def _end_of_epoch(run: Run, snapshot: Snapshot) -> tuple[bool, bool]:
    """Return whether a run's epoch is over for all callbacks, and whether one stopped it."""
    place = run.place
    if place.call != "fit":
        return run.data.position[0] != place.began, False
    callbacks = snapshot.facts["also"].get("callbacks")
    if callbacks is None or place.logs is None or place.told < len(callbacks["told"]):
        return False, False
    return True, bool(callbacks["stops"])


@dataclass(frozen=True)
class Script:
    """The environment and settings of this script, to be compared with those of a saved run."""

    environment: dict[str, Any]
    settings: Settings
    own: Iterable[str]  # the paths of the engine's own variables


def differences_of(
    checkpoint: VerifiedCheckpoint,
    script: Script,
    rates: list[str],
    anew: list[str],
    watch: CallbackRunner | None = None,
) -> list[str]:
    """Return the differences between a saved run and this script, as parts of a line.

    Args:
        rates: descriptions of learning rates; see `unused_rates`.
        anew: the names of further state that starts anew.
    """
    facts = checkpoint.snapshot.facts
    rest = checkpoint.manifest.rest
    parts = list(rates)
    environment = differences(rest.get("run") or {}, script.environment)
    changed = changed_settings(rest.get("settings") or script.settings, script.settings)
    if watch is not None:
        state = from_json(facts["also"].get("callbacks"), checkpoint.snapshot.arrays)
        changed += watch.changes(state)
        anew = anew + watch.unknown
    anew = anew + [path for path in script.own if path not in (facts.get("own") or {})]
    if environment:
        parts.insert(0, f"changed environment: {environment}")
    if changed:
        parts.append(f"changed settings: {', '.join(changed)}")
    if anew:
        parts.append(f"starts anew: {', '.join(anew)}")
    return parts


def unused_rates(
    checkpoint: VerifiedCheckpoint, script: dict[str, float], now: dict[str, float]
) -> list[str]:
    """Describe the learning rates that a script sets, and that are not used.

    Args:
        script: the rates that this script has set, by optimizer.
        now: the restored rates.
    """
    before = checkpoint.manifest.rest.get("rates") or {}
    return [
        _unused(name, rate, now[name])
        for name, rate in script.items()
        if rate not in (before.get(name, now[name]), now[name])
    ]


def changed_since(
    checkpoint: VerifiedCheckpoint,
    model: keras.Model,
    objective: Objective,
    options: Options,
    own: Iterable[str],
    rates: dict[str, float],
) -> str:
    """Return the line with the differences to a manually restored run; "" without any.

    Args:
        own: the paths of the engine's own variables.
        rates: the learning rates that the script has set, by optimizer.
    """
    here = environment(model, num_replicas(model, options.replicas), connect().count, options)
    script = Script(here, settings_of_script(model, objective, options), own)
    parts = differences_of(checkpoint, script, unused_rates(checkpoint, rates, rates_of(model)), [])
    return "; ".join([f"wholestep: restored {checkpoint.path}", *parts]) if parts else ""


def settings_of_script(
    model: keras.Model, objective: Objective, options: Options, **call: Any
) -> Settings:
    """Return the settings of a run; `call` holds the arguments of its call."""
    held = {
        "optimizer": getattr(model, "optimizer", None),
        "on_nonfinite": str(options.on_nonfinite),
    }
    return settings_of_run(model, objective, **held, **call)


def _check_optimizer(snapshot: Snapshot, manifest: Manifest, model: keras.Model) -> None:
    """Refuse an optimizer of another class."""
    kind = type(getattr(model, "optimizer", None)).__name__
    before = optimizer_kind(manifest.rest.get("settings") or {})
    if before is not None and before != kind:
        # `compile` makes it under this policy
        wrapper = keras.optimizers.LossScaleOptimizer.__name__
        policies = {
            kind: " without the policy mixed_float16",
            before: " (the policy mixed_float16)",
        }
        way = f"{before}{policies.get(wrapper, '')}; to keep its weights alone, "
        way += f'trainer.restore("{snapshot.source}", only="weights").'
        why = "its optimizer is not this one"
        raise other_run(snapshot.source, why, f"{kind} (saved: {before})", way)


def _unused(name: str, rate: float, now: float) -> str:
    """Return the line that says that the script's learning rate is not used."""
    if name == "optimizer":
        line = f"learning rate {now}, as saved"
        way = f"pass Checkpoints(folder, learning_rate={rate})"
    else:
        line = f"learning rate of {name} {now}, as saved"
        way = "assign it in on_train_begin"
    return f"{line} (here: {rate}, which is not used; to use it, {way})"
