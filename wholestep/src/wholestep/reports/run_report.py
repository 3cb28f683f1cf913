"""The report of a run: the loss of its updates, rows per second, memory and learning rate, as one
page of HTML.
"""

import os
import time
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import keras
import numpy as np

from wholestep.errors import SpecificationError, message, warn
from wholestep.reports.page import (
    LEGEND,
    Picture,
    assert_drawable,
    bare,
    drawn,
    figure,
    part_of_page,
    write_page,
)
from wholestep.reports.report import Report

_NUM_UNMERGED = 64  # dispatches, of up to hundreds of updates
_MOST = 2048  # lines are kept; up to twice as many before they are merged
_SECONDS = 60.0  # between two writes of the page at an epoch's end
_DARK = "#222222"
_LIGHT = "#7f9fbf"
_RED = "#c8553d"
_GREEN = "#1a7f3c"
# A line: consecutive updates, each column folded. The loss is of the updates whose loss is finite.
_FOLDS = {
    **{
        "number": np.minimum,
        "updates": np.add,
        "finite": np.add,
        "loss": np.add,
        "least": np.fmin,
        "most": np.fmax,
    },
    **{"rows": np.add, "seconds": np.add, "bytes": np.maximum, "skipped": np.add},
}


class RunReport(keras.callbacks.Callback):
    """Writes one HTML file about a run, without scripts, at the ends of epochs (at most once a
    minute) and of `fit`.

    It shows the loss of every update (the loss of an epoch is a sum over its updates), with the
    cuts into microbatches, restarts and skipped updates, rows per second, the memory of the
    process, and the learning rate. A resumed run includes the updates before the restart. `fit`
    reads the same numbers anyway. Many updates are merged.

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
            must = "RunReport takes the path of the HTML file."
            raise SpecificationError(
                message(must, path, 'RunReport("run.html"), or RunReport() and its html(path).')
            )
        self._path = None if path is None else Path(path).absolute()  # `os.chdir` does not move it
        if self._path is not None and (self._path.is_dir() or not self._path.parent.is_dir()):
            must = "RunReport takes a file in a folder that exists."
            raise SpecificationError(
                message(must, str(self._path), f"mkdir -p {self._path.parent}, and a file there.")
            )
        self._since = self._written = self._measured = 0.0
        self._bytes = 0
        self._begin()

    def _begin(self) -> None:
        """Begin with no updates."""
        self._lines = np.zeros((0, len(_FOLDS)))
        self._unmerged: list[tuple[int, np.ndarray, np.ndarray, float, int]] = []  # dispatches
        self._each = 1  # updates in a line, except for the newest
        # the last update of each, its validation loss and learning rate
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
        block = report.block
        if now - self._measured > 0.1:
            self._measured, self._bytes = now, _resident_bytes()
        counts = block.table.counts[block.first : block.first + num]
        self._unmerged.append(
            (report.first, report.values[:num, -2:], counts, now - self._since, self._bytes)
        )
        if len(self._unmerged) >= _NUM_UNMERGED:
            self._merge()
        if block.program is not self._program:
            self._program = block.program
            memory = block.program.memory
            needs = (
                "" if memory is None else f", {memory / 2**20:,.3g} MiB besides data and weights"
            )
            self._cuts.setdefault(f"{block.program.cut}{needs}", report.first)
        self._since = now

    def _merge(self) -> None:
        """Add the new dispatches to the lines, one for each update; merge lines if there are too
        many.
        """
        if not self._unmerged:
            return
        firsts, values, counts, seconds, memory = zip(*self._unmerged, strict=True)
        nums = [*map(len, values)]
        (loss, applied), rows = np.concatenate(values).T.astype(float), np.concatenate(counts)
        is_good = np.isfinite(loss)
        each = np.ones(len(loss))
        known = np.where(is_good, loss, np.nan)
        parts = {
            "number": np.concatenate(
                [first + np.arange(num) for first, num in zip(firsts, nums, strict=True)]
            )
        }
        parts |= {"updates": each, "finite": each * is_good, "loss": np.where(is_good, loss, 0)}
        parts |= {
            "least": known,
            "most": known,
            "rows": rows,
            "seconds": np.repeat(np.divide(seconds, nums), nums),
        }
        parts |= {"bytes": np.repeat(memory, nums), "skipped": applied != 1}
        lines = np.stack([parts[name] for name in _FOLDS], axis=1)
        self._lines = np.concatenate([self._lines, lines])
        self._unmerged = []
        while len(self._lines) > 2 * _MOST:
            self._lines = _merged(self._lines, (self._column("number") - 1) // self._each)
            self._each *= 2 if len(self._lines) > _MOST else 1

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Note the validation loss and the learning rate, and write the page if the last one is
        old.
        """
        logs = logs or {}
        optimizer = _inner(self.model)
        # as before a change at its end
        rate = logs.get("learning_rate", getattr(optimizer, "learning_rate", np.nan))
        row = [self._last, logs.get("val_loss", np.nan), float(keras.ops.convert_to_numpy(rate))]
        self._epochs = np.concatenate([self._epochs, [row]])
        if time.perf_counter() - self._written > _SECONDS:
            self._write()

    def on_train_end(self, logs: dict | None = None) -> None:
        """Write the page."""
        self._write()

    def get_state(self) -> dict[str, Any]:
        """Return the numbers so far."""
        self._merge()
        numbers = {
            "lines": self._lines,
            "each": self._each,
            "epochs": self._epochs,
            "restarts": self._restarts,
        }
        return numbers | {"cuts": [[cut, number] for cut, number in self._cuts.items()]}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the numbers of the run before its restart."""
        self._lines, self._epochs, self._each = state["lines"], state["epochs"], state["each"]
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
            must = "A report of a run needs its updates."
            attempt = "Trainer(model).fit(..., callbacks=[report])."
            raise SpecificationError(message(must, "no update of a wholestep.Trainer", attempt))
        write_page(path, "Report of a run", [self._repr_html_()])

    def _write(self) -> None:
        if self._path is not None and not self._last:
            warn(
                f"{self._path} is not written: RunReport has seen no update. Pass it to the fit of "
                "a wholestep.Trainer."
            )
        elif self._path is not None:
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
        known = {
            "update": updates,
            "epoch": len(self._epochs),
            "row": rows,
            "restart": len(self._restarts),
        }
        counts = [f"{num:,} {name}{'s' * (num != 1)}" for name, num in known.items()]
        return f"{', '.join(counts)}; {skipped:,} not applied"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return the page for a notebook."""
        if not self._last:
            return f"<p>{self}</p>"
        name = escape(self.model.name)
        facts = [
            ("engine", keras.backend.backend()),
            *((f"from update {at}", cut) for cut, at in self._shown_cuts),
        ]
        facts += [
            (f"restart after update {number}", "resumed from a checkpoint")
            for number in self._restarts
        ]
        listed = "".join(f"<dt>{escape(what)}</dt><dd>{escape(text)}</dd>" for what, text in facts)
        parts = [
            f"<h1>{name}: {escape(str(self))}</h1><dl>{listed}</dl>",
            *map(figure, self._pictures()),
        ]
        return part_of_page(parts)

    def _pictures(self) -> Iterator[Picture]:
        yield drawn(self._draw_loss, 3.6)
        seconds = self._column("seconds")
        of_time = np.cumsum(np.minimum(seconds, seconds.sum() / 60))  # a compilation fills one part
        # of several dispatches each
        parts = self._in_parts(of_time, int(np.clip(of_time[-1] / 0.2, 5, 60)))
        speed = parts["rows"] / np.maximum(parts["seconds"], 1e-9)
        caption = "Without validation; the first updates include the compilation."
        yield self._drawn("Rows per second", caption, parts["middle"], speed, "rows per second")
        parts = self._in_parts(self._column("number"))
        caption = "The resident memory of this process on the host, without a GPU's."
        yield self._drawn("Memory", caption, parts["middle"], parts["bytes"] / 2**20, "MiB")
        schedule = getattr(_inner(self.model), "_learning_rate", None)
        if callable(schedule):
            applied = np.maximum(parts["number"] - 1 - np.cumsum(parts["skipped"]), 0)
            rates = np.array(
                [float(keras.ops.convert_to_numpy(schedule(int(number)))) for number in applied]
            )
            yield self._drawn(
                "Learning rate",
                "The optimizer's schedule.",
                parts["number"],
                rates,
                "learning rate",
            )
        elif np.isfinite(self._epochs[:, 2]).any():
            ends = self._epochs[:, 0], self._epochs[:, 2]
            yield self._drawn("Learning rate", "At the end of each epoch.", *ends, "learning rate")

    @property
    def _shown_cuts(self) -> list[tuple[str, int]]:
        return [*self._cuts.items()][:20]

    def _column(self, name: str) -> np.ndarray:
        return self._lines[:, list(_FOLDS).index(name)]

    def _in_parts(self, position: np.ndarray, num: int = 200) -> dict[str, np.ndarray]:
        """Return the columns of the lines, merged to `num` or fewer of equal extent in `position`,
        which ascends.
        """
        extent = max(float(position[-1] - position[0]), 1e-9)
        merged = _merged(self._lines, np.floor((position - position[0]) * num / extent))
        columns = dict(zip(_FOLDS, merged.T, strict=True))
        return columns | {"middle": columns["number"] + (columns["updates"] - 1) / 2}

    def _drawn(self, title: str, caption: str, x: np.ndarray, y: np.ndarray, unit: str) -> Picture:
        def draw(figure: Any) -> tuple[str, str]:
            axes = figure.subplots()
            axes.plot(x, y, color=_DARK, lw=1.2, marker="." if len(x) < 30 else "")
            axes.yaxis.set_major_formatter("{x:,g}")
            axes.set_ylim(0, float(np.nanmax(y)) * 1.1 or 1)
            self._mark(axes)
            bare(axes, "update", unit)
            return title, caption

        return drawn(draw, 2.4)

    def _draw_loss(self, figure: Any) -> tuple[str, str]:
        axes = figure.subplots()
        parts = self._in_parts(self._column("number"))
        mean = parts["loss"] / np.where(parts["finite"] > 0, parts["finite"], np.nan)
        axes.fill_between(
            parts["middle"], parts["least"], parts["most"], color=_LIGHT, alpha=0.4, lw=0
        )
        dots = "." if len(mean) < 30 else ""
        axes.plot(
            parts["middle"], mean, color=_DARK, lw=1.2, marker=dots, label="loss of the updates"
        )
        axes.plot(*self._epochs.T[:2], "D", color=_GREEN, ms=5, label="validation loss")
        known = mean[np.isfinite(mean)]
        if len(known) and 0 < 20 * known.min() < known.max():
            axes.set_yscale("log")
        self._mark(axes)
        figure.legend(*_named(axes), loc="outside lower center", ncols=5, **LEGEND)
        bare(axes, "update", "loss")
        several = " The line is a mean over neighbouring updates, the band their range."
        return (
            "Loss",
            f"The loss of each update alone.{several if parts['updates'].max() > 1 else ''}",
        )

    def _mark(self, axes: Any) -> None:
        """Mark other cuts, restarts and skipped updates."""
        for number in [at for _, at in self._shown_cuts][1:]:
            axes.axvline(number - 0.5, color=_DARK, lw=0.8, ls=":", label="another cut")
        for number in self._restarts:
            axes.axvline(number + 0.5, color=_GREEN, lw=1.2, ls="--", label="restart")
        if len(at := self._column("number")[self._column("skipped") > 0]):
            low = np.full(len(at), 0.02)
            axes.plot(
                at, low, "x", color=_RED, transform=axes.get_xaxis_transform(), label="not applied"
            )
        axes.xaxis.get_major_locator().set_params(integer=True)


def _named(axes: Any) -> tuple[list, list[str]]:
    """Return the lines of a legend that have points, each name once."""
    lines = {line.get_label(): line for line in axes.lines if np.isfinite(line.get_ydata()).any()}
    return [*lines.values()], [*lines]


def _merged(curve: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Return the curve with neighbouring lines of one key merged.

    >>> _merged(np.arange(20.0).reshape(2, 10), np.zeros(2)).tolist()
    [[0.0, 12.0, 14.0, 16.0, 4.0, 15.0, 22.0, 24.0, 18.0, 28.0]]
    """
    starts = np.flatnonzero(np.diff(key, prepend=np.nan) != 0)
    columns = (
        fold.reduceat(column, starts) for fold, column in zip(_FOLDS.values(), curve.T, strict=True)
    )
    return np.stack([*columns], axis=1)


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
