"""What a loop did, in the order in which it did it: forward passes and optimizer steps with their numbers."""

import linecache
import re
import sys
import sysconfig
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Any, NamedTuple

import keras
import numpy as np

from wholestep.audit.keeping import once
from wholestep.audit.trainable import Flags
from wholestep.engines import running
from wholestep.errors import WholestepError

MOST, MOST_SIZES = 40, 3  # updates that are kept of a small model, and sizes of batches beyond the room of a large one
OWN_TRAINER = (
    "Updates by `wholestep.Trainer` need no audit: each is the gradient of its whole batch, divided once. "
    "`trainer.explain()` shows how they run"
)
_PACKAGE = Path(__file__).parent.parent
_KERAS = str(Path(keras.__file__).parent)
_COMMAND = "cli.py", "__main__.py"  # from where `wholestep audit` runs a script
_LIBRARIES = (
    str(Path(keras.__file__).parent.parent),
    str(_PACKAGE),
    sysconfig.get_paths()["stdlib"],
)
_NUMPY = str(Path(np.__file__).parent)


class Line(NamedTuple):
    """A line of the user's code."""

    file: str
    number: int

    @property
    def text(self) -> str:
        """What stands there, if it can be read."""
        return linecache.getline(self.file, self.number).strip()

    def __str__(self) -> str:
        return f"{self.file}:{self.number}: {self.text}".rstrip(": ")


def line_of_user(stack: Iterable[tuple[str, int]]) -> Line | None:
    """Return the innermost line of a stack outside of Keras, the engine, Python's own library and this one."""
    line = _innermost(stack)
    main = threading.main_thread()
    if line is None and threading.current_thread() is not main:  # a replica's thread, for which the main one waits
        line = _innermost(running(sys._current_frames().get(main.ident or 0)))
    return line


def is_of_user(file: str) -> bool:
    """Whether a file holds code of the user: no library's, and none that was generated."""
    return not (file.startswith((*_LIBRARIES, "<")) or "__autograph_generated" in file)


def is_in_trainer() -> bool:
    """Whether a step of this library's own trainer runs here."""
    files = (Path(file) for file, _ in _under_way())
    return any(file.parent == _PACKAGE and file.name not in _COMMAND for file in files)


def is_in_fit() -> bool:
    """Whether the `fit` of some Keras model runs here."""
    return any(name == "fit" and file.startswith(_KERAS) for file, name in _under_way())


def _under_way() -> Iterator[tuple[str, str]]:
    """Yield (file, name) of the functions that run now."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_code.co_name
        frame = frame.f_back


def _innermost(stack: Iterable[tuple[str, int]]) -> Line | None:
    return next((Line(file, number) for file, number in stack if is_of_user(file)), None)


def own_fault(error: BaseException) -> str:
    """Return in words that an error is one of this library's own code; "" if the user, Keras or the engine raised it.

    Asked is the innermost function outside of numpy and Python's library, also of those in the text of an error that an
    engine's program passes on.
    """
    places = [(frame.f_code.co_filename, number) for frame, number in walk_tb(error.__traceback__)]
    places += [(file, int(number)) for file, number in re.findall(r'File "(.+?)", line (\d+)', str(error))]
    file, number = next((place for place in reversed(places) if not _is_called(place[0])), ("", 0))
    if isinstance(error, WholestepError) or not file.startswith(str(_PACKAGE)):
        return ""
    what = f"{type(error).__name__}: {error}".splitlines()[0]
    where = f"{Path(file).name}:{number}"
    return f"an error inside of wholestep, and no fault of the script ({what}, {where}): please report it"


def _is_called(file: str) -> bool:
    """Whether a file is one of Python's library or of numpy, which raise errors in the place of their callers."""
    is_pythons = file.startswith(sysconfig.get_paths()["stdlib"]) and "site-packages" not in file
    return is_pythons or file.startswith((_NUMPY, "<"))


def clips_of(optimizer: Any) -> tuple[float, float, float]:
    """Return the bounds of an optimizer: of each gradient's norm, of the norm of all, of each number; 0 for none."""
    norm, whole, value = (getattr(optimizer, name, None) for name in ("clipnorm", "global_clipnorm", "clipvalue"))
    return float(norm or 0), float(whole or 0), float(value or 0)


@dataclass(frozen=True)
class Called:
    """A forward pass: the leaves of its input and output, and all values that the model had before.

    `differentiated`: whether a gradient was taken; None where nobody can tell. Beyond the log's room only the inputs
    are kept.
    """

    order: int
    inputs: list[np.ndarray]
    outputs: list[np.ndarray]
    params: list[np.ndarray]
    buffers: list[np.ndarray]
    differentiated: bool | None
    line: Line | None
    replica: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether its numbers were kept."""
        return bool(self.params)


@dataclass(frozen=True)
class Applied:
    """An optimizer step: the gradients as handed over (by parameter; None where there was none), before and after.

    Of what is large these are the numbers at some places, those of `wholestep.audit.keeping.places`.

    `built`: of which parameters of the model the optimizer has slots, by their places.
    `lost`: the places of the parameters that were handed over with None for a gradient.
    `kind`: the class of the optimizer.
    `clips`: the optimizer's own bounds, of each gradient's norm, of the norm of all and of each number; 0 for none.
    `accumulates`: how many of its calls the optimizer itself makes one update of; `num_calls`: those before this one.
    """

    order: int
    optimizer: int
    grads: list[np.ndarray | None]
    params: list[np.ndarray]
    slots: list[np.ndarray]
    params_after: list[np.ndarray]
    slots_after: list[np.ndarray]
    learning_rate: float
    iterations: int
    line: Line | None
    replica: int = 0
    accumulates: int = 1
    num_calls: int = 0
    clips: tuple[float, float, float] = (0.0, 0.0, 0.0)
    built: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    kind: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether its numbers were kept."""
        return bool(self.params_after)


@dataclass(frozen=True)
class Scaled:
    """An optimizer that scales the loss has looked whether the gradients are finite; it skips the step if not."""

    order: int
    is_finite: bool
    replica: int = 0


@dataclass
class Log:
    """Everything that was told, and what could not be.

    Args:
        room: how many optimizer steps are kept with all their numbers; of later ones the log knows that they were, but
            for the first ones on a batch of another size than all before.

    Attributes:
        notes: what the hooks have changed in how it runs, in words.
        unseen: what ran and could not be looked at, in words.
        has_evaluated: whether the model's own `evaluate` or `predict` has looked at rows that are not known.
        has_others: whether optimizers made steps that move no trainable variable of the model.
        has_fitted: whether the `fit` of this model, or of one around it, has cut the batches.
        elsewhere: in words, that the loop's gradients are taken by another engine than the model's.
        flags: by how many parameters a forward pass had, which layers were set to be trained.
        num_late: forward passes that ran between the end of the log and that of the script, which a compiled step runs
            ahead of.
        targets: shapes of what a gradient was asked of that are no scalars, with the line.
    """

    room: int = MOST
    called: list[Called] = field(default_factory=list)
    applied: list[Applied] = field(default_factory=list)
    scaled: list[Scaled] = field(default_factory=list)
    notes: dict[str, None] = field(default_factory=dict)
    unseen: dict[str, None] = field(default_factory=dict)
    targets: list[tuple[tuple[int, ...], Line | None]] = field(default_factory=list)
    has_evaluated: bool = False
    has_fitted: bool = False
    has_others: bool = False
    elsewhere: str = ""
    is_open: bool = True
    num_late: int = 0
    flags: dict[int, Flags] = field(default_factory=dict)
    _last: dict[str, list[np.ndarray]] = field(default_factory=dict)
    _num_moved: int = 0

    @property
    def has_room(self) -> bool:
        """Whether numbers are still kept."""
        is_small = self.room >= MOST
        return max(len(self.applied), 0 if self.applied or is_small else self._num_moved) < self.room

    @property
    def num_updates(self) -> int:
        """How many updates were told by all replicas: one for all calls of which the optimizer makes one."""
        counts = Counter(each.replica for each in self.applied if not (each.num_calls + 1) % each.accumulates)
        return min(counts.values(), default=0)

    def begin(self, params: list[np.ndarray]) -> None:
        """Keep the model's weights of the beginning; as long as they have not moved, they are not kept again."""
        self._last["params"] = params

    def wants(self, inputs: list[np.ndarray]) -> bool:
        """Whether the numbers of a forward pass on such inputs are kept: there is room, or none was as large."""
        sizes = {called.inputs[0].shape[:1] for called in self.called if called.inputs}
        is_new = bool(inputs) and len(sizes) in range(1, MOST_SIZES) and inputs[0].shape[:1] not in sizes
        return self.has_room or is_new

    def wants_step(self, replica: int) -> bool:
        """Whether the numbers of an optimizer step are kept: there is room, or those of the passes before it are."""
        events: list[Called | Applied] = [*self.called[-2 * MOST :], *self.applied[-MOST:]]
        own = [event for event in events if event.replica == replica]
        last = max(own, key=lambda event: event.order, default=None)
        return self.has_room or (isinstance(last, Called) and last.is_whole)

    def add(self, event: Called | Applied | Scaled) -> None:
        """Keep what was told, its arrays as copies; values that have not moved are kept once."""
        if not self.is_open:
            self.num_late += isinstance(event, Called)
        elif isinstance(event, Scaled):
            self.scaled.append(event)
        elif isinstance(event, Called):
            event.params[:] = self._once("params", event.params)
            event.buffers[:] = self._once("buffers", event.buffers)
            self.called.append(event)
        else:
            for values in (event.params, event.params_after):
                values[:] = self._once("params of steps", values)
            for values in (event.slots, event.slots_after):
                values[:] = self._once("slots", values)
            self.applied.append(event)

    def _once(self, kind: str, new: list[np.ndarray]) -> list[np.ndarray]:
        if not new:
            return new
        old = self._last.get(kind, [])
        kept = once(new, old)
        self._num_moved += kind == "params" and any(a is not b for a, b in zip(kept, old, strict=False))
        self._last[kind] = kept
        return kept

    def since(self, order: int) -> "Log":
        """Return what was told after this."""
        called = [each for each in self.called if each.order > order]
        applied = [each for each in self.applied if each.order > order]
        scaled = [each for each in self.scaled if each.order > order]
        notes, unseen = dict(self.notes), dict(self.unseen)
        return replace(self, called=called, applied=applied, scaled=scaled, notes=notes, unseen=unseen)

    def close(self) -> None:
        """Keep nothing more, and bring what is kept into the order in which it ran."""
        self.is_open = False
        self.called.sort(key=lambda event: event.order)
        self.applied.sort(key=lambda event: event.order)
        self.scaled.sort(key=lambda event: event.order)
