"""The comparisons: as a table, as lines for programs, and against those of an earlier run."""

import datetime
import json
import platform
import shutil
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

_HEAD = ("work", "engine", "ours", "", "other", "", "other / ours (range)", "bar", "", "MiB")
_PACKAGES = ("wholestep", "keras", "jax", "tensorflow-cpu", "numpy")

Contestant = tuple[str, list[float]]  # its name, and a value for each round


class Row(NamedTuple):
    """One comparison. Its result in a round is how many times as fast (or as small) ours is, or how
    much more it takes.

    Args:
        bar: the least factor, or the largest difference; None: for information.
        peak: the peak memory of the processes that measured this work on this engine, all
            contestants together, MiB.
    """

    work: str
    engine: str
    ours: Contestant
    other: Contestant
    bar: float | None
    is_difference: bool = False
    peak: float = 0.0

    @property
    def name(self) -> str:
        """The comparison, in words."""
        return f"{self.work} ({self.engine}): {self.ours[0]} against {self.other[0]}"

    @property
    def results(self) -> list[float]:
        """The result of each round."""
        pairs = zip(self.ours[1], self.other[1], strict=True)
        return [a - b if self.is_difference else b / a for a, b in pairs]

    @property
    def is_met(self) -> bool | None:
        """Whether the median of the results meets the bar; None without one."""
        if self.bar is None:
            return None
        return (
            median(self.results) <= self.bar
            if self.is_difference
            else median(self.results) >= self.bar
        )

    def cells(self) -> tuple[str, ...]:
        """Return the row of the table."""
        show = "{:+.2f}".format if self.is_difference else _short
        result = (
            f"{show(median(self.results))} ({show(min(self.results))} to {show(max(self.results))})"
        )
        bar = (
            ""
            if self.bar is None
            else f"<= {self.bar:+g}"
            if self.is_difference
            else f">= {self.bar:.3g}"
        )
        values = [
            part
            for name, numbers in (self.ours, self.other)
            for part in (name, _short(median(numbers)))
        ]
        verdict = {None: "", True: "met", False: "missed"}[self.is_met]
        return self.work, self.engine, *values, result, bar, verdict, f"{self.peak:.0f}"

    def is_worse(self, earlier: list[float]) -> bool:
        """Whether each result is worse than all earlier ones: the ranges are the noise of the two
        runs.
        """
        if self.is_difference:
            return min(self.results) > max(earlier)
        return max(self.results) < min(earlier)


def by_ratio(
    work: str, engine: str, ours: Contestant, other: Contestant, *, bar: float | None
) -> Row:
    """Return the row that says how many times as fast (or as small) ours is."""
    return Row(work, engine, ours, other, bar)


def by_difference(
    work: str, engine: str, ours: Contestant, other: Contestant, *, bar: float
) -> Row:
    """Return the row that says how much more ours takes."""
    return Row(work, engine, ours, other, bar, is_difference=True)


def markdown(rows: list[Row], circumstances: list[str]) -> str:
    """Return the table as markdown that is also readable as plain text, with the circumstances
    above it.
    """
    lines = [_HEAD, *(row.cells() for row in rows)]
    widths = [max(3, *(len(line[i]) for line in lines)) for i in range(len(_HEAD))]
    texts = [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    ]
    rule = "|" + "|".join("-" * (w + 2) for w in widths) + "|"
    return "\n".join([*(f"- {line}" for line in circumstances), "", texts[0], rule, *texts[1:]])


def lines(rows: list[Row], circumstances: list[str]) -> str:
    """Return the circumstances and each row as a line of JSON."""
    shown = [{"name": row.name, "results": row.results, **row._asdict()} for row in rows]
    return "\n".join(map(json.dumps, [{"circumstances": circumstances}, *shown])) + "\n"


def worse(rows: list[Row], earlier: str) -> list[str]:
    """Return, in words, the rows that are worse than in an earlier run beyond the noise of both;
    see `lines`.

    Raises:
        ValueError: no row of these has been measured before.
    """
    known: dict[str, Any] = {
        found.get("name"): found for found in map(json.loads, earlier.splitlines())
    }
    if not any(row.name in known for row in rows):
        raise ValueError(
            "The file must hold a comparison that was made now. It holds none: choose --work as it "
            "was."
        )
    return [
        f"{row.name}: {median(row.results):.3g} now, {median(known[row.name]['results']):.3g} then"
        for row in rows
        if row.name in known and row.is_worse(known[row.name]["results"])
    ]


def circumstances(cores: int, *, quick: bool) -> list[str]:
    """Return what the figures depend on."""
    versions = ", ".join(
        _version(each) for each in _PACKAGES if find_spec(each.removesuffix("-cpu"))
    )
    system = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    lines = [
        f"{_gpu()}{_processor()}, {cores} cores used; {system}",
        f"{versions}; float32",
        f"{datetime.datetime.now().astimezone():%Y-%m-%d %H:%M %Z}; medians of paired runs in one "
        "process tree",
    ]
    return [*lines, "SMOKE RUN: one short pair each; the figures mean nothing"] if quick else lines


def _version(package: str) -> str:
    with suppress(PackageNotFoundError):
        return f"{package} {version(package)}"
    return f"{package}, not installed"  # found on the path


def _short(value: float) -> str:
    """Three digits that count."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _gpu() -> str:
    tool = shutil.which("nvidia-smi")
    asked = [tool, "--query-gpu=name", "--format=csv,noheader"]
    return (
        ""
        if tool is None
        else subprocess.run(asked, capture_output=True, text=True).stdout.splitlines()[0] + ", "
    )


def _processor() -> str:
    names = [
        line
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return names[0].split(":")[1].strip() if names else platform.processor()
