"""Messages while updates run: the progress bar of `fit`, long compilations, ever new shapes."""

import shutil
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import keras
import numpy as np

from wholestep import tree
from wholestep.data import Batch
from wholestep.errors import message, notify_if_long, tell, warn
from wholestep.keras_private import total_width
from wholestep.reports.report import Report

_LONG = 2.0  # seconds
_SHORT = 0.5
_MANY = 5  # shapes, if at least every other batch so far had a new shape

Shape = tuple[tuple[str, tuple[int, ...]], ...]


class Compilations:
    """The shapes for which programs were compiled.

    Args:
        timer: makes the thread that calls a function after a delay, like `threading.Timer`.
        clock: returns the time in seconds.
        tell: is called with the line about a long compilation, unless `is_quiet`. The warning is
            always shown, once.

    Attributes:
        num_batches: the number of batches that needed a program.
    """

    def __init__(
        self,
        timer: Callable = threading.Timer,
        tell: Callable[[str], None] = tell,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.is_quiet = False
        self.num_batches = 0
        self.bar: keras.callbacks.ProgbarLogger | None = None
        self._timer = timer
        self._tell = tell
        self._clock = clock
        self._seconds = 0.0  # of the last compilation
        self._shapes: list[Shape] = []
        self._has_warned = False

    def shown_by(self, bar: keras.callbacks.ProgbarLogger | None) -> AbstractContextManager[None]:
        """Context in which waits are shown in a progress bar, or in lines below Keras' bar."""
        return self._with(bar=bar)

    def quiet(self, is_quiet: bool) -> AbstractContextManager[None]:
        """Context in which the line about a long compilation is off or on."""
        return self._with(is_quiet=is_quiet)

    @contextmanager
    def _with(self, **attributes: Any) -> Iterator[None]:
        before = {name: getattr(self, name) for name in attributes}
        vars(self).update(attributes)
        try:
            yield
        finally:
            vars(self).update(before)

    def show(self, reason: str) -> None:
        """Show the reason of a wait in the progress bar, if it can."""
        if isinstance(self.bar, ProgbarLogger):
            self.bar.wait(reason)

    @contextmanager
    def watched(self, batch: Batch, num_shapes: int = 0) -> Iterator[None]:
        """Context in which the program for a batch is compiled.

        Args:
            num_shapes: the number of shapes in all; 0 if unknown.
        """
        shape = _shape_of(batch)
        if shape not in self._shapes:
            self._shapes.append(shape)
        if batch.ids is None and not batch.is_resident:
            self._warn_of_many()
        number = self._shapes.index(shape) + 1
        of = f" of {num_shapes}" if number <= num_shapes else ""
        parts = ", ".join(f"{name} {size}" for name, size in shape)
        last = f"; the last one took {self._seconds:.1f} s" if self._seconds >= _SHORT else ""
        reason = f"compiling shape {number}{of} ({parts})"
        line = f"wholestep: {reason}, for more than {_LONG:g} seconds so far{last}"
        self.show(reason + last)
        begin = self._clock()
        try:
            with notify_if_long(line, _LONG, self._print_below, self._timer):
                yield
        finally:
            self._seconds = self._clock() - begin
            self.show("running the program")

    def _print_below(self, line: str) -> None:
        """Print a line below Keras' bar, unless our bar shows the wait or notices are off."""
        if self.is_quiet or isinstance(self.bar, ProgbarLogger):
            return
        progbar = None if self.bar is None else self.bar.progbar
        if progbar is not None and total_width(progbar):
            progbar._prev_total_width = 0  # it is drawn anew below
            print(flush=True)
        self._tell(line)

    def _warn_of_many(self) -> None:
        """Warn of user-made batches that keep having new shapes."""
        num = len(self._shapes)
        if self._has_warned or num < _MANY or 2 * num < self.num_batches:
            return
        self._has_warned = True
        warn(
            message(
                "Batches should come in a few shapes: each new one compiles a program anew, for "
                "seconds.",
                f"{num} shapes in {self.num_batches} batches: {_differing(self._shapes)}",
                "pad them to a few lengths and numbers of rows, or give the rows to Batches(rows, "
                "tokens=..., length=...).",
            )
        )


class ProgbarLogger(keras.callbacks.ProgbarLogger):
    """Keras' progress bar of `fit`, with rows per second, the time left, and reasons of waits.

    Only for terminals and notebooks, where a line can be replaced. It has the name of Keras' class
    in checkpoints.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        super().__init__()
        self._clock = clock
        self._begun = 0.0
        self._num_begun = 0
        self._first: float | None = None  # when the first dispatch of the epoch had finished
        self._counts = np.zeros(2, int)  # updates and rows since then

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Print the epoch and, from the third one on, the time left.

        It is estimated by the last epoch; the first one compiles.
        """
        now = self._clock()
        left = ""
        if self._num_begun > 1:
            seconds = (now - self._begun) * (self.epochs - epoch)
            left = f" - {_duration(seconds)} left"
        self._begun = now
        self._first = None
        self._counts = np.zeros(2, int)
        self._num_begun += 1
        self._reset_progbar()
        self._maybe_init_progbar()
        if self.epochs > 1:
            print(f"Epoch {epoch + 1}/{self.epochs}{left}")
        self.wait("reading the first batch")

    def _maybe_init_progbar(self) -> None:
        if self.progbar is None:
            self.progbar: _Bar | None = _Bar(
                self.target, verbose=self.verbose, stateless_metrics=set(), unit_name="step"
            )

    def note(self, report: Report, num: int) -> None:
        """Count `num` finished updates; an epoch's first dispatch, which may compile, alone."""
        now = self._clock()
        begun = self._begun
        counts = np.array([num, report.row_counts(num).sum()])
        if self._first is None:
            self._first = now
        else:
            begun = self._first
            self._counts = counts = self._counts + counts
        if self.progbar is not None:
            self.progbar.pace = counts / max(now - begun, 1e-9)

    def wait(self, reason: str) -> None:
        """Show a reason in place of the bar; the next output replaces it."""
        if self.progbar is not None:
            width = self.progbar._prev_total_width
            shown = reason[: shutil.get_terminal_size().columns - 1]
            print(f"\r{shown.ljust(width)}\r", end="", flush=True)
            self.progbar._prev_total_width = max(width, len(shown))


class _Bar(keras.utils.Progbar):
    """Keras' bar, with rows per second after the time of a step.

    Keras' estimate of that time takes a dispatch for one step.
    """

    pace: np.ndarray | None = None  # updates and rows per second

    def _format_time(self, time_per_unit: float, unit_name: str) -> str:
        text = super()._format_time(time_per_unit, unit_name)
        if self.pace is None:
            return text
        rate = self.pace[1]
        shown = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
        return f"{text} {shown} rows/s"

    def _estimate_step_duration(self, current: int, now: float) -> float:
        if self.pace is None:
            return super()._estimate_step_duration(current, now)
        return 1 / self.pace[0]


def can_replace_lines() -> bool:
    """Whether the output is a terminal or a notebook, and Keras prints to it."""
    is_shown = sys.stdout.isatty() or "ipykernel" in sys.modules
    return is_shown and keras.config.is_interactive_logging_enabled()


def _duration(seconds: float) -> str:
    """Return a duration as in Keras' bar.

    >>> _duration(59.4), _duration(61), _duration(3_661)
    ('59s', '1:01', '1:01:01')
    """
    minutes, seconds = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{seconds}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def _shape_of(batch: Batch) -> Shape:
    leaves = tree.named_leaves(batch.host)
    return tuple((name, (batch.num_rows, *map(int, leaf.shape[1:]))) for name, leaf in leaves)


def _differing(shapes: list[Shape]) -> str:
    """Return the shapes of the leaves whose shapes differ between batches."""
    sizes: dict[str, dict[tuple, None]] = defaultdict(dict)  # a dict keeps the order
    for shape in shapes:
        for name, size in shape:
            sizes[name][size] = None
    texts = {name: ", ".join(map(str, known)) for name, known in sizes.items() if len(known) > 1}
    return "; ".join(f"{name} {text}" for name, text in texts.items())
