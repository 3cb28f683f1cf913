"""The table: medians side by side, their ratio with its range, and whether the bar was met."""

import datetime
import platform
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import NamedTuple

_HEAD = ("work", "engine", "ours", "", "other", "", "other / ours (range)", "bar", "")
_PACKAGES = ("wholestep", "keras", "jax", "tensorflow-cpu", "numpy")

Contestant = tuple[str, list[float]]  # its name, and a value for each round


class Row(NamedTuple):
    """One line of the table, as text."""

    work: str
    engine: str
    ours: str
    our_value: str
    other: str
    other_value: str
    ratio: str
    bar: str
    verdict: str


def by_ratio(work: str, engine: str, ours: Contestant, other: Contestant, *, bar: float | None) -> Row:
    """Return the row that says how many times as fast (or as small) ours is; met if the median of the pairs' is."""
    ratios = [b / a for a, b in zip(ours[1], other[1], strict=True)]
    ratio = f"{_short(median(ratios))} ({_short(min(ratios))} to {_short(max(ratios))})"
    met = None if bar is None else median(ratios) >= bar
    return _row(work, engine, ours, other, ratio, "" if bar is None else f">= {bar:g}", met)


def by_difference(work: str, engine: str, ours: Contestant, other: Contestant, *, bar: float) -> Row:
    """Return the row that says how much more ours takes; met if the median of the pairs' differences is."""
    more = [a - b for a, b in zip(ours[1], other[1], strict=True)]
    text = f"{median(more):+.2f} ({min(more):+.2f} to {max(more):+.2f})"
    return _row(work, engine, ours, other, text, f"<= {bar:+g}", median(more) <= bar)


def markdown(rows: list[Row], circumstances: list[str]) -> str:
    """Return the table as markdown that is also readable as plain text, with the circumstances above it."""
    lines = [_HEAD, *rows]
    widths = [max(3, *(len(line[i]) for line in lines)) for i in range(len(_HEAD))]
    texts = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |" for line in lines]
    rule = "|" + "|".join("-" * (w + 2) for w in widths) + "|"
    return "\n".join([*(f"- {line}" for line in circumstances), "", texts[0], rule, *texts[1:]])


def circumstances(cores: int, *, quick: bool) -> list[str]:
    """Return what the figures depend on."""
    versions = ", ".join(f"{package} {version(package)}" for package in _PACKAGES)
    system = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    lines = [
        f"{_processor()}, {cores} cores used; {system}",
        f"{versions}; float32",
        f"{datetime.datetime.now().astimezone():%Y-%m-%d %H:%M %Z}; medians of paired runs in one process tree",
    ]
    return [*lines, "SMOKE RUN: one short pair each; the figures mean nothing"] if quick else lines


def _row(work, engine, ours: Contestant, other: Contestant, ratio: str, bar: str, met: bool | None) -> Row:
    verdict = "" if met is None else ("met" if met else "missed")
    values = [_short(median(contestant[1])) for contestant in (ours, other)]
    return Row(work, engine, ours[0], values[0], other[0], values[1], ratio, bar, verdict)


def _short(value: float) -> str:
    """Three digits that count."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _processor() -> str:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return names[0].split(":")[1].strip() if names else platform.processor()
