"""The report of a run as one page of HTML: losses, rows per second, memory, learning rate."""

import os
import time
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import keras
import numpy as np
from numpy.typing import ArrayLike

from wholestep.errors import invalid, warn
from wholestep.keras_private import learning_rate
from wholestep.logged import Logged
from wholestep.reports.page import (
    LEGEND,
    assert_drawable,
    bare,
    figure,
    styled,
    write_page,
)
from wholestep.reports.report import UPDATE_LOSS, VERDICT, Report

_NUM_UNMERGED = 64  # dispatches, of up to hundreds of updates
_MOST = 2048  # lines are kept; up to twice as many before they are merged
_MOST_CUTS = 20  # are shown
_SECONDS = 60.0  # between two writes of the page at an epoch's end
_DARK = "#222222"
_LIGHT = "#7f9fbf"
_RED = "#c8553d"
_GREEN = "#1a7f3c"
# A line: consecutive updates, each column folded. The loss is of the updates whose loss is finite.
_FOLDS = {
    "number": np.minimum,
    "updates": np.add,
    "finite": np.add,
    "loss": np.add,
    "least": np.fmin,
    "most": np.fmax,
    "rows": np.add,
    "seconds": np.add,
    "bytes": np.maximum,
    "skipped": np.add,
    "gradient_norm": np.fmax,
    "update_norm": np.fmax,
}
_NORMS = {"gradient_norm": "Norm of the gradient", "update_norm": "Norm of the update"}
_REPORTED = UPDATE_LOSS, VERDICT, Logged.GRADIENT_NORM, Logged.UPDATE_NORM


class RunReport(keras.callbacks.Callback):
    """Writes an HTML file about a run, at the ends of epochs (at most once a minute) and of `fit`.

    The file has no scripts. It shows the loss of every update (the loss of an epoch is a sum over
    its updates), with the cuts into microbatches, restarts and skipped updates, rows per second,
    the memory of the process, the learning rate, and the norms that `Trainer(log=...)` asks for. A
    resumed run includes the updates before the
    restart. `fit` reads the same numbers anyway. Many updates are merged.

    Args:
        path: the HTML file; None to write none: then call `html`.

    Raises:
        SpecificationError: matplotlib is not installed, or `path` is not a path.

    >>> import keras, numpy as np, tempfile, wholestep as ws
    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> report = ws.RunReport()
    >>> x = np.ones((8, 3))
    >>> y = np.zeros((8, 1))
    >>> _ = ws.Trainer(model).fit(x, y, epochs=2, verbose=0, callbacks=[report])
    >>> report.html(tempfile.mkdtemp() + "/run.html")
    >>> print(report)
    2 updates, 2 epochs, 16 rows, 0 restarts; 0 not applied
    """

    def __init__(self, path: str | os.PathLike[str] | None = None):
        super().__init__()
        assert_drawable()
        if path is not None and not isinstance(path, str | os.PathLike):
            raise invalid(
                "RunReport takes the path of the HTML file.",
                path,
                'RunReport("run.html"), or RunReport() and its html(path).',
            )
        self._path = None if path is None else Path(path).absolute()  # `os.chdir` does not move it
        if self._path is not None and (self._path.is_dir() or not self._path.parent.is_dir()):
            raise invalid(
                "RunReport takes a file in a folder that exists.",
                str(self._path),
                f"mkdir -p {self._path.parent}, and a file there.",
            )
        self._since = self._written = self._measured = 0.0
        self._bytes = 0
        self._begin()

    def _begin(self) -> None:
        """Begin with no updates."""
        self._lines = np.zeros((0, len(_FOLDS)))
        # of each dispatch: numbers, (loss, applied), rows, seconds, bytes
        self._unmerged: list[tuple[range, np.ndarray, np.ndarray, float, int]] = []
        self._updates_in_line = 1  # except in the newest
        # of each epoch: the last update, the validation loss, the learning rate
        self._epochs = np.zeros((0, 3))
        self._cuts: dict[str, int] = {}  # the first update of each kind
        self._restarts: list[int] = []
        self._program: Any = None

    # ---- a run ----

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Start the clock of the page."""
        self._written = time.perf_counter()

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Start the clock of the updates: a validation is not part of their time."""
        self._since = time.perf_counter()

    def note(self, report: Report, num: int) -> None:
        """Add `num` updates of a dispatch that has been read."""
        if report.first == 1 and self._last:
            self._begin()  # of another trainer
        now = time.perf_counter()
        if now - self._measured > 0.1:
            self._measured = now
            self._bytes = _resident_bytes()
        numbers = range(report.first, report.first + num)
        logs = np.stack([report.column(name)[:num] for name in _REPORTED], axis=1)
        seconds = now - self._since
        self._unmerged.append((numbers, logs, report.row_counts(num), seconds, self._bytes))
        if len(self._unmerged) >= _NUM_UNMERGED:
            self._merge()
        program = report.block.program
        if program is not self._program:
            self._program = program
            self._cuts.setdefault(_cut_of(program), report.first)
        self._since = now

    def _merge(self) -> None:
        """Add a line for each update of the new dispatches; merge lines if there are too many."""
        if not self._unmerged:
            return
        numbers, logs, rows, seconds, memory = zip(*self._unmerged, strict=True)
        self._unmerged = []
        nums = [*map(len, numbers)]
        loss, applied, gradient, update = np.concatenate(logs).T.astype(float)
        is_finite = np.isfinite(loss)
        finite_loss = np.where(is_finite, loss, np.nan)
        columns = {
            "number": np.concatenate(numbers),
            "updates": np.ones(len(loss)),
            "finite": is_finite,
            "loss": np.nan_to_num(finite_loss),
            "least": finite_loss,
            "most": finite_loss,
            "rows": np.concatenate(rows),
            "seconds": np.repeat(np.divide(seconds, nums), nums),
            "bytes": np.repeat(memory, nums),
            "skipped": applied != 1,
            "gradient_norm": np.where(np.isfinite(gradient), gradient, np.nan),
            "update_norm": np.where(np.isfinite(update), update, np.nan),
        }
        lines = np.stack([columns[name] for name in _FOLDS], axis=1)
        self._lines = np.concatenate([self._lines, lines])
        while len(self._lines) > 2 * _MOST:
            groups = (self._column("number") - 1) // self._updates_in_line
            self._lines = _merged(self._lines, groups)
            if len(self._lines) > _MOST:
                self._updates_in_line *= 2

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Note the validation loss and the learning rate; write the page if the last is old."""
        logs = logs or {}
        optimizer = _inner(self.model)
        # as before a change at its end
        rate = logs.get("learning_rate", getattr(optimizer, "learning_rate", np.nan))
        row = [self._last, logs.get("val_loss", np.nan), _as_float(rate)]
        self._epochs = np.concatenate([self._epochs, [row]])
        if time.perf_counter() - self._written > _SECONDS:
            self._write()

    def on_train_end(self, logs: dict | None = None) -> None:
        """Write the page."""
        self._write()

    def get_state(self) -> dict[str, Any]:
        """Return the numbers so far."""
        self._merge()
        return {
            "lines": self._lines,
            "each": self._updates_in_line,
            "epochs": self._epochs,
            "restarts": self._restarts,
            "cuts": [[cut, number] for cut, number in self._cuts.items()],
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the numbers of the run before its restart."""
        lines = state["lines"]
        missing = len(_FOLDS) - lines.shape[1]  # of a run before there were norms
        self._lines = np.pad(lines, ((0, 0), (0, missing)), constant_values=np.nan)
        self._epochs = state["epochs"]
        self._updates_in_line = state["each"]
        self._cuts = dict(state["cuts"])
        self._unmerged = []
        self._restarts = [*state["restarts"], self._last]

    @property
    def _last(self) -> int:
        """The number of the last update, 0 if there is none."""
        self._merge()
        return int(self._lines[-1, :2].sum()) - 1 if len(self._lines) else 0

    # ---- the page ----

    def html(self, path: str | os.PathLike[str]) -> None:
        """Write the page to a file.

        Raises:
            SpecificationError: no update has run.
        """
        if not self._last:
            raise invalid(
                "A report of a run needs its updates.",
                "no update of a wholestep.Trainer",
                "Trainer(model).fit(..., callbacks=[report]).",
            )
        write_page(path, "Report of a run", [self._repr_html_()])

    def _write(self) -> None:
        if self._path is None:
            return
        if not self._last:
            warn(
                f"{self._path} is not written: RunReport has seen no update. Pass it to the fit of "
                "a wholestep.Trainer."
            )
            return
        self._written = time.perf_counter()
        try:
            self.html(self._path)
        except OSError as error:  # a full disk ends no run
            warn(
                f"{self._path} is not written: {error}. The report's html(path) writes it "
                "elsewhere."
            )

    def __str__(self) -> str:
        self._merge()
        updates, rows, skipped = (
            int(self._column(name).sum()) for name in ("updates", "rows", "skipped")
        )
        counts = {
            "update": updates,
            "epoch": len(self._epochs),
            "row": rows,
            "restart": len(self._restarts),
        }
        parts = [f"{num:,} {name}{'s' * (num != 1)}" for name, num in counts.items()]
        return f"{', '.join(parts)}; {skipped:,} not applied"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return the page for a notebook."""
        if not self._last:
            return f"<p>{self}</p>"
        cuts = [*self._cuts.items()][:_MOST_CUTS]
        facts = [("engine", keras.backend.backend())]
        facts += [(f"from update {number}", cut) for cut, number in cuts]
        facts += [
            (f"restart after update {number}", "resumed from a checkpoint")
            for number in self._restarts
        ]
        entries = [f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts]
        title = f"<h1>{escape(self.model.name)}: {escape(str(self))}</h1>"
        head = f"{title}<dl>{''.join(entries)}</dl>"
        return styled([head, *self._pictures()])

    def _pictures(self) -> Iterator[str]:
        yield figure(self._draw_loss, 3.6)
        yield self._speed()
        parts = self._in_parts(self._column("number"))
        yield self._curve(
            "Memory",
            "The resident memory of this process on the host, without a GPU's.",
            parts["middle"],
            parts["bytes"] / 2**20,
            "MiB",
        )
        for name, title in _NORMS.items():
            if np.isfinite(parts[name]).any():
                caption = "The largest of each part, where it is finite."
                yield self._curve(title, caption, parts["middle"], parts[name], "norm")
        schedule = learning_rate(_inner(self.model))
        if callable(schedule):
            iterations = parts["number"] - 1 - np.cumsum(parts["skipped"])
            rates = [_as_float(schedule(max(int(number), 0))) for number in iterations]
            caption = "The optimizer's schedule."
            yield self._curve("Learning rate", caption, parts["number"], rates, "learning rate")
        elif np.isfinite(self._epochs[:, 2]).any():
            numbers, _, ends = self._epochs.T
            caption = "At the end of each epoch."
            yield self._curve("Learning rate", caption, numbers, ends, "learning rate")

    def _speed(self) -> str:
        seconds = self._column("seconds")
        elapsed = np.cumsum(np.minimum(seconds, seconds.sum() / 60))  # a compilation fills one part
        num = int(np.clip(elapsed[-1] / 0.2, 5, 60))  # parts of several dispatches each
        parts = self._in_parts(elapsed, num)
        return self._curve(
            "Rows per second",
            "Without validation; the first updates include the compilation.",
            parts["middle"],
            parts["rows"] / np.maximum(parts["seconds"], 1e-9),
            "rows per second",
        )

    def _column(self, name: str) -> np.ndarray:
        return self._lines[:, list(_FOLDS).index(name)]

    def _in_parts(self, position: np.ndarray, num: int = 200) -> dict[str, np.ndarray]:
        """Return the columns, merged to `num` lines or fewer of equal extent in `position`.

        Args:
            position: of each line, ascending.
        """
        offsets = position - position[0]
        extent = max(float(offsets[-1]), 1e-9)
        merged = _merged(self._lines, np.floor(offsets * num / extent))
        columns = dict(zip(_FOLDS, merged.T, strict=True))
        return columns | {"middle": columns["number"] + (columns["updates"] - 1) / 2}

    def _curve(self, title: str, caption: str, x: np.ndarray, y: ArrayLike, unit: str) -> str:
        def draw(figure: Any) -> tuple[str, str]:
            axes = figure.subplots()
            axes.plot(x, y, color=_DARK, lw=1.2, marker=_marker(x))
            axes.yaxis.set_major_formatter("{x:,g}")
            axes.set_ylim(0, float(np.nanmax(y)) * 1.1 or 1)
            self._mark(axes)
            bare(axes, "update", unit)
            return title, caption

        return figure(draw, 2.4)

    def _draw_loss(self, figure: Any) -> tuple[str, str]:
        axes = figure.subplots()
        parts = self._in_parts(self._column("number"))
        x = parts["middle"]
        mean = parts["loss"] / np.where(parts["finite"] > 0, parts["finite"], np.nan)
        axes.fill_between(x, parts["least"], parts["most"], color=_LIGHT, alpha=0.4, lw=0)
        axes.plot(x, mean, color=_DARK, lw=1.2, marker=_marker(x), label="loss of the updates")
        numbers, validation, _ = self._epochs.T
        if np.isfinite(validation).any():
            axes.plot(numbers, validation, "D", color=_GREEN, ms=5, label="validation loss")
        finite = mean[np.isfinite(mean)]
        if len(finite) and 0 < 20 * finite.min() < finite.max():
            axes.set_yscale("log")
        self._mark(axes)
        lines = {line.get_label(): line for line in axes.lines}  # each name once
        place = "outside lower center"
        figure.legend(lines.values(), lines.keys(), loc=place, ncols=5, **LEGEND)
        bare(axes, "update", "loss")
        caption = "The loss of each update alone."
        if parts["updates"].max() > 1:
            caption += " The line is a mean over neighbouring updates, the band their range."
        return "Loss", caption

    def _mark(self, axes: Any) -> None:
        """Mark other cuts, restarts and skipped updates."""
        for number in [*self._cuts.values()][1:_MOST_CUTS]:
            axes.axvline(number - 0.5, color=_DARK, lw=0.8, ls=":", label="another cut")
        for number in self._restarts:
            axes.axvline(number + 0.5, color=_GREEN, lw=1.2, ls="--", label="restart")
        skipped = self._column("number")[self._column("skipped") > 0]
        if len(skipped):
            low = np.full(len(skipped), 0.02)
            on_axis = axes.get_xaxis_transform()
            axes.plot(skipped, low, "x", color=_RED, transform=on_axis, label="not applied")
        axes.xaxis.get_major_locator().set_params(integer=True)


def _cut_of(program: Any) -> str:
    """Return the cut of a program, with the memory it needs."""
    if program.memory is None:
        return str(program.cut)
    return f"{program.cut}, {program.memory / 2**20:,.3g} MiB besides data and weights"


def _marker(points: np.ndarray) -> str:
    return "." if len(points) < 30 else ""


def _as_float(number: Any) -> float:
    return float(keras.ops.convert_to_numpy(number))


def _merged(curve: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Return the curve with neighbouring lines of one key merged.

    >>> _merged(np.arange(24.0).reshape(2, 12), np.zeros(2)).tolist()
    [[0.0, 14.0, 16.0, 18.0, 4.0, 17.0, 24.0, 26.0, 20.0, 30.0, 22.0, 23.0]]
    """
    starts = np.flatnonzero(np.diff(key, prepend=np.nan) != 0)
    folds = zip(_FOLDS.values(), curve.T, strict=True)
    return np.stack([fold.reduceat(column, starts) for fold, column in folds], axis=1)


def _inner(model: keras.Model) -> Any:
    """Return the model's optimizer, without a loss scale around it; None if there is none."""
    optimizer = getattr(model, "optimizer", None)
    return getattr(optimizer, "inner_optimizer", optimizer)


def _resident_bytes() -> int:
    """Return the memory of this process; 0 where the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
