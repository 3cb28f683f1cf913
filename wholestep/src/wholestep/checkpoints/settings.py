"""The user's choices for checkpoints: where, how often, and which to keep."""

import math
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from wholestep.checkpoints.address import Location, as_location, is_remote
from wholestep.checkpoints.folder import Folder
from wholestep.checkpoints.manifest import Manifest, parsed
from wholestep.checkpoints.position import Stateful
from wholestep.checkpoints.store import CheckpointFolder, find
from wholestep.checks import count, is_count, is_number, made_with
from wholestep.errors import CheckpointError, DamagedError, SpecificationError, message, shown

_MODES = ("auto", "min", "max")
_WATCHED = "watched"  # an entry of a manifest


@made_with("Checkpoints need a folder, and settings by name.", 'Checkpoints("runs/a", keep=5).')
@dataclass(frozen=True)
class Checkpoints:
    """Where and how often `fit` and `steps` save checkpoints, and which checkpoints are kept.

    A checkpoint holds the whole run. A call of `fit` or `steps` with the same arguments, also in
    another process, resumes from the newest checkpoint, with the same bits. A checkpoint is also
    written at the end, and after SIGTERM, which then ends the process with exit code 143. Ctrl-C
    saves nothing, and prints where the next run resumes. A thread writes the checkpoints while
    training continues. They do not include the global random states of Python and numpy.

    Args:
        folder: a local or network folder, made if it is missing. One run at a time writes to it. A
            relative path is resolved in the current working directory at once. Or a remote address,
            such as "s3://bucket/runs/a": each checkpoint is written to `local`, and then copied
            there and verified. Its text shows no password.
        local: the local folder of a run with a remote address; None for a temporary folder, removed
            at the end.
        every_steps: save when the number of updates is a multiple of this.
        every_seconds: save when this many seconds have passed since the last checkpoint; None for
            never.
        keep: the number of newest checkpoints to keep. A checkpoint is removed if no rule keeps it.
        keep_period: also keep the first checkpoint at or after each multiple of this number of
            updates.
        keep_seconds: also keep checkpoints that are at most this many seconds older than the
            newest.
        keep_best: (name, number) or (name, number, mode): `fit` also keeps this number of epochs
            with the best value of this metric: ("val_loss", 2). The mode is "min", "max", or "auto"
            for Keras' direction of the metric. `steps` refuses it.
        resume: whether to resume from the newest checkpoint; if not, the folder must have no
            checkpoint.
        learning_rate: the learning rate from here on. A resumed run has the saved learning rate,
            unless this differs from the rate given before. Not for an optimizer with a schedule.
        also: further state to save, by name: objects with `get_state()`, which returns nested
            numbers, strings and arrays, and `set_state(state)`. With several processes, the state
            of process 0 is saved for all.

    Raises:
        SpecificationError: an invalid choice.

    >>> import tempfile, keras, numpy as np, wholestep as ws
    >>> x, y = np.arange(24, dtype="float32").reshape(8, 3), np.ones((8, 1), "float32")
    >>> def fresh():
    ...     model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    ...     model.compile("adam", "mse")
    ...     return ws.Trainer(model)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     first = fresh().fit(x, y, epochs=3, verbose=0, checkpoints=folder)
    ...     ended = fresh().fit(x, y, epochs=3, verbose=0, checkpoints=folder)
    ...     first.history == ended.history
    True
    """

    folder: Location
    _: KW_ONLY
    local: Location | None = None
    every_steps: int | None = None
    every_seconds: float | None = 600
    keep: int = 3
    keep_period: int | None = None
    keep_seconds: float | None = None
    keep_best: tuple[str, int] | tuple[str, int, str] | None = None
    resume: bool = True
    learning_rate: float | None = None
    also: Mapping[str, Stateful] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.folder, str | os.PathLike):
            raise SpecificationError(
                message("folder must be a path.", shown(self.folder), '"runs/a".')
            )
        is_store = is_remote(self.folder)
        folder = as_location(self.folder) if is_store else Folder(self.folder).folder
        object.__setattr__(self, "folder", folder)
        if self.local is not None:
            if not is_store:
                must = "local is the local folder of checkpoints with a remote address."
                received = f"the folder {self.folder}"
                raise SpecificationError(message(must, received, "leave it out."))
            object.__setattr__(self, "local", Folder(self.local).folder)
        self._check_numbers()
        _check_best(self.keep_best)
        if not isinstance(self.resume, bool):
            must = "resume must be True or False."
            raise SpecificationError(message(must, shown(self.resume), "leave it out."))
        _check_also({} if self.also is None else self.also)

    def _check_numbers(self) -> None:
        count("keep", self.keep, "keep=3.")
        for name, example in (("every_steps", 100), ("keep_period", 1000)):
            if getattr(self, name) is not None:
                count(name, getattr(self, name), f"{name}={example}, or leave it out.")
        for name in ("every_seconds", "keep_seconds"):
            seconds = getattr(self, name)
            if seconds is not None and not (is_number(seconds) and seconds > 0):
                must = f"{name} must be above 0."
                raise SpecificationError(message(must, shown(seconds), "600, or None."))
        rate = self.learning_rate
        if rate is not None and not (is_number(rate) and 0 <= rate < math.inf):
            must = "learning_rate must be at least 0."
            raise SpecificationError(message(must, shown(rate), "1e-3, or leave it out."))

    @classmethod
    def of(cls, value: "str | os.PathLike[str] | Checkpoints | None") -> "Checkpoints | None":
        """Return a call's argument `checkpoints`; a path means the defaults in that folder."""
        if value is None or isinstance(value, Checkpoints):
            return value
        return cls(value)

    @property
    def best(self) -> Path | str:
        """The path or address of the best checkpoint so far, by the metric of `keep_best`.

        Raises:
            SpecificationError: there is no `keep_best`.
            CheckpointError: no checkpoint has this metric.
        """
        if self.keep_best is None:
            must = "The best checkpoint needs a metric."
            raise SpecificationError(message(must, "no keep_best", 'keep_best=("val_loss", 1).'))
        folder, _ = find(self.folder)
        name = self.keep_best[0]
        ordered = best_first(values_of(folder, name))
        if not ordered:
            must = f"The best checkpoint must have been saved at an epoch's end with {name}."
            raise CheckpointError(message(must, f"none in {self.folder}", "train with keep_best."))
        return folder.path(ordered[0])


def _check_best(best: object) -> None:
    if best is None:
        return
    parts = best if isinstance(best, tuple | list) else ()
    is_good = len(parts) in (2, 3) and isinstance(parts[0], str) and is_count(parts[1])
    if not is_good or (len(parts) == 3 and parts[2] not in _MODES):
        must = (
            "keep_best must be a name, a number of at least 1, and perhaps a mode (auto, min "
            "or max)."
        )
        raise SpecificationError(message(must, shown(best), '("val_loss", 2).'))


def _check_also(also: object) -> None:
    if not isinstance(also, Mapping) or not all(isinstance(name, str) for name in also):
        must = "also must be a dict of objects by name."
        raise SpecificationError(message(must, shown(also), '{"name": object}.'))
    for name, stateful in also.items():
        if name == "callbacks":
            must = "The name callbacks is reserved: callbacks are saved with a run."
            raise SpecificationError(message(must, "also={'callbacks': ...}", "another name."))
        verbs = (getattr(stateful, verb, None) for verb in ("get_state", "set_state"))
        if not all(map(callable, verbs)):
            must = f"{name} must have get_state() and set_state(state)."
            attempt = "give its class these two methods."
            raise SpecificationError(message(must, type(stateful).__name__, attempt))


# ---- the checkpoints to keep: the newest, the best, one of each period, the recent ----

RULES = "keep", "keep_period", "keep_seconds", "keep_best"
TIME = "%Y-%m-%dT%H:%M:%S%z"  # the format of an entry of a manifest


@dataclass(frozen=True)
class _Watched:
    """The entry of a manifest with the metric of its epoch."""

    name: str
    number: float
    mode: str


class Value(NamedTuple):
    """The metric by which checkpoints are compared, in the checkpoint's epoch."""

    number: float
    mode: str  # "min" if less is better, else "max"


def best_first(values: Mapping[int, Value]) -> list[int]:
    """Return the steps, the best first, and the earlier of equal steps first; NaNs are left out.

    >>> numbers = {4: 0.5, 8: 0.3, 12: 0.3, 16: float("nan")}
    >>> best_first({step: Value(number, "min") for step, number in numbers.items()})
    [8, 12, 4]
    >>> best_first({4: Value(0.5, "max"), 8: Value(0.3, "max")})
    [4, 8]
    """
    keys = [(-value if mode == "max" else value, step) for step, (value, mode) in values.items()]
    return [step for value, step in sorted(keys) if not math.isnan(value)]


def to_remove(folder: CheckpointFolder, rules: Checkpoints, newest: int) -> list[int]:
    """Return the steps that no rule keeps, of those up to `newest`, which has been verified."""
    steps = sorted(step for step in folder.steps() if step <= newest)
    stay = {*steps[-rules.keep :], newest}
    if rules.keep_best is not None:
        name, number, *_ = rules.keep_best
        values = values_of(folder, name)
        best = best_first({step: value for step, value in values.items() if step <= newest})
        stay.update(best[:number])
    if rules.keep_period is not None:
        stay |= first_of_periods(steps, rules.keep_period)
    if rules.keep_seconds is not None:
        times = {step: _seconds(manifest) for step, manifest in _manifests(folder).items()}
        oldest = times.get(newest, 0.0) - rules.keep_seconds
        stay.update(step for step, seconds in times.items() if seconds >= oldest)
    return [step for step in steps if step not in stay]


def first_of_periods(steps: Iterable[int], period: int) -> set[int]:
    """Return the first step at or after each multiple of `period`, up to the next multiple.

    >>> sorted(first_of_periods([5, 10, 15, 20, 32, 35, 48], 10))
    [10, 20, 32, 48]
    """
    firsts = {step // period: step for step in sorted(steps, reverse=True) if step >= period}
    return {*firsts.values()}


def _seconds(manifest: Manifest) -> float:
    """Return the time at which a checkpoint was written; 0 if it is unknown."""
    with suppress(KeyError, TypeError, ValueError, OverflowError):
        return datetime.strptime(manifest.rest["time"], TIME).timestamp()
    return 0.0


def entry_of(name: str, value: Value) -> dict[str, Any]:
    """Return the manifest entry of a checkpoint's value."""
    return {_WATCHED: {"name": name, **value._asdict()}}


def value_in(manifest: Manifest, name: str | None = None) -> Value | None:
    """Return the value in a manifest; None if there is none of this name."""
    with suppress(TypeError, OverflowError):
        watched = parsed(_Watched, manifest.rest.get(_WATCHED))
        if name in (None, watched.name) and watched.mode in ("min", "max"):
            return Value(float(watched.number), watched.mode)
    return None


def values_of(folder: CheckpointFolder, name: str) -> dict[int, Value]:
    """Return the values of a folder's checkpoints by step, without damaged checkpoints."""
    values = {step: value_in(manifest, name) for step, manifest in _manifests(folder).items()}
    return {step: value for step, value in values.items() if value is not None}


def _manifests(folder: CheckpointFolder) -> dict[int, Manifest]:
    """Return the manifests of a folder's checkpoints by step, without damaged ones."""
    manifests = {}
    for step in folder.steps():
        with suppress(DamagedError):
            manifests[step] = folder.manifest(step)
    return manifests
