"""The user's choices for checkpoints: where, how often, and which to keep."""

import math
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from wholestep.checkpoints.folder import Folder
from wholestep.checkpoints.manifest import Manifest
from wholestep.checkpoints.place import Keeps
from wholestep.checks import count, is_count, is_number
from wholestep.errors import CheckpointError, DamagedError, SpecificationError, message, shown

_MODES = ("auto", "min", "max")
_WATCHED = "watched"  # an entry of a manifest


@dataclass(frozen=True)
class Checkpoints:
    """Where and how often `fit` and `steps` save checkpoints, and which checkpoints are kept.

    A checkpoint holds the whole run. A call of `fit` or `steps` with the same arguments, also in another process,
    resumes from the newest checkpoint, with the same bits. A checkpoint is also written at the end, and after SIGTERM,
    which then ends the process with exit code 143; Ctrl-C saves nothing. A thread writes the checkpoints while training
    continues. They do not include the global random states of Python and numpy.

    Args:
        folder: a local or network folder, made if it is missing. One run at a time writes to it. A relative path is
            resolved in the current working directory at once.
        every_steps: save when the number of updates is a multiple of this.
        every_seconds: save when this many seconds have passed since the last checkpoint; None for never.
        keep: the number of newest checkpoints to keep.
        keep_best: (name, number) or (name, number, mode): `fit` also keeps this number of epochs with the best value of
            this metric: ("val_loss", 2). The mode is "min", "max", or "auto" for Keras' direction of the metric.
        resume: whether to resume from the newest checkpoint; if not, the folder must have no checkpoint.
        learning_rate: the learning rate from here on. A resumed run has the saved learning rate, unless this differs
            from the rate given before. Not for an optimizer with a schedule.
        also: further state to save, by name: objects with `get_state()`, which returns nested numbers, strings and
            arrays, and `set_state(state)`. With several processes, the state of process 0 is saved for all.

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

    folder: str | os.PathLike[str]
    _: KW_ONLY
    every_steps: int | None = None
    every_seconds: float | None = 600
    keep: int = 3
    keep_best: tuple[str, int] | tuple[str, int, str] | None = None
    resume: bool = True
    learning_rate: float | None = None
    also: Mapping[str, Keeps] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.folder, str | os.PathLike):
            raise SpecificationError(message("folder must be a path.", shown(self.folder), '"runs/a".'))
        object.__setattr__(self, "folder", Folder(self.folder).folder)
        if self.every_steps is not None:
            count("every_steps", self.every_steps, "every_steps=100, or leave it out.")
        count("keep", self.keep, "keep=3, or leave it out.")
        seconds = self.every_seconds
        if seconds is not None and not (is_number(seconds) and seconds > 0):
            raise SpecificationError(message("every_seconds must be above 0.", shown(seconds), "600, or None."))
        if self.keep_best is not None:
            _check_best(self.keep_best)
        if not isinstance(self.resume, bool):
            raise SpecificationError(message("resume must be True or False.", shown(self.resume), "leave it out."))
        rate = self.learning_rate
        if rate is not None and not (is_number(rate) and 0 <= rate < float("inf")):
            must = "learning_rate must be at least 0."
            raise SpecificationError(message(must, shown(rate), "1e-3, or leave it out."))
        if self.also is not None:
            _check_also(self.also)

    @classmethod
    def of(cls, given: "str | os.PathLike[str] | Checkpoints | None") -> "Checkpoints | None":
        """Return a call's argument `checkpoints`; a path means the defaults in that folder."""
        return given if given is None or isinstance(given, cls) else cls(given)  # type: ignore[arg-type]

    @property
    def best(self) -> Path:
        """The path of the best checkpoint so far, by the metric of `keep_best`.

        Raises:
            SpecificationError: there is no `keep_best`.
            CheckpointError: no checkpoint has this metric.
        """
        if self.keep_best is None:
            must = "The best checkpoint needs a metric."
            raise SpecificationError(message(must, "no keep_best", 'keep_best=("val_loss", 1).'))
        folder = Folder(self.folder)
        if not (ordered := best_first(values_of(folder, self.keep_best[0]))):
            must = f"The best checkpoint must have been saved at an epoch's end with {self.keep_best[0]}."
            raise CheckpointError(message(must, f"none in {self.folder}", "train with keep_best."))
        return folder.path(ordered[0])


def _check_best(asked: object) -> None:
    parts = asked if isinstance(asked, tuple | list) else ()
    is_good = len(parts) in (2, 3) and isinstance(parts[0], str) and is_count(parts[1])
    if not is_good or (len(parts) == 3 and parts[2] not in _MODES):
        must = "keep_best must be a name, a number of at least 1, and perhaps a mode (auto, min or max)."
        raise SpecificationError(message(must, shown(asked), '("val_loss", 2).'))


def _check_also(also: object) -> None:
    if not isinstance(also, Mapping) or not all(isinstance(name, str) for name in also):
        raise SpecificationError(message("also must be a dict of objects by name.", shown(also), '{"name": object}.'))
    for name, held in also.items():
        if name == "callbacks":
            must = "The name callbacks is reserved: callbacks are saved with a run."
            raise SpecificationError(message(must, "also={'callbacks': ...}", "another name."))
        if not all(callable(getattr(held, verb, None)) for verb in ("get_state", "set_state")):
            must = f"{name} must have get_state() and set_state(state)."
            raise SpecificationError(message(must, type(held).__name__, "give its class these two methods."))


# ---- the checkpoints to keep: the newest, and the best ----


class Value(NamedTuple):
    """The metric by which checkpoints are compared, in the checkpoint's epoch."""

    number: float
    mode: str  # "min" if less is better, else "max"


def best_first(values: Mapping[int, Value]) -> list[int]:
    """Return the steps, the best first, and the earlier of equal steps first; NaNs are left out.

    >>> best_first({4: Value(0.5, "min"), 8: Value(0.3, "min"), 12: Value(0.3, "min"), 16: Value(float("nan"), "min")})
    [8, 12, 4]
    >>> best_first({4: Value(0.5, "max"), 8: Value(0.3, "max")})
    [4, 8]
    """
    known = [(number if mode == "min" else -number, step) for step, (number, mode) in values.items()]
    return [step for number, step in sorted(known) if not math.isnan(number)]


def to_remove(steps: Iterable[int], keep: int, values: Mapping[int, Value], num_best: int) -> list[int]:
    """Return the steps to remove: all but the `keep` newest and the `num_best` best.

    >>> to_remove([1, 2, 3, 4], 1, {1: Value(0.1, "min"), 2: Value(0.2, "min")}, 1)
    [2, 3]
    """
    known = sorted(steps)
    stay = {*known[-keep:], *best_first({step: values[step] for step in known if step in values})[:num_best]}
    return [step for step in known if step not in stay]


def as_told(name: str, value: Value) -> dict[str, Any]:
    """Return the manifest entry of a checkpoint's value."""
    return {_WATCHED: {"name": name, "number": value.number, "mode": value.mode}}


def value_in(manifest: Manifest, name: str | None = None) -> Value | None:
    """Return the value in a manifest; None if there is none of this name."""
    told = manifest.rest.get(_WATCHED)
    if not isinstance(told, dict) or (name is not None and told.get("name") != name):
        return None
    number, mode = told.get("number"), told.get("mode")
    if not isinstance(number, int | float) or mode not in ("min", "max"):
        return None
    return Value(float(number), mode)


def values_of(folder: Folder, name: str) -> dict[int, Value]:
    """Return the values of a folder's checkpoints by step, without damaged checkpoints."""
    values = {}
    for step in folder.steps():
        with suppress(DamagedError):
            values[step] = value_in(folder.manifest(step), name)
    return {step: value for step, value in values.items() if value is not None}
