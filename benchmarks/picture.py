"""`python -m benchmarks.picture out/benchmarks.jsonl docs/benchmarks.png`: how many times as fast ours is, by path."""

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

_COLOURS = {"jax": "tab:blue", "tensorflow": "tab:orange"}
_BY_HAND = ("by hand", "hand-written", "bare call")


def draw(lines: str, path: Path) -> None:
    """Draw the rows of a whole run: beside Keras, and beside loops by hand, one dot for each engine."""
    rows = [row for row in map(json.loads, lines.splitlines()) if row.get("work", "").startswith(("P, ", "A, s/"))]
    is_limit = {name: any(word in name for word in _BY_HAND) for name in map(_title, rows)}
    panels = {"Keras' time / ours": False, "time of a loop by hand / ours": True}
    heights = [max(1, sum(kind == limit for kind in is_limit.values())) for limit in panels.values()]
    figure, axes = plt.subplots(
        2, 1, figsize=(8, 1.6 + 0.27 * sum(heights)), height_ratios=heights, layout="constrained"
    )
    for axis, (label, limit) in zip(axes, panels.items(), strict=True):
        _panel(axis, label, [row for row in rows if is_limit[_title(row)] == limit])
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _title(row: dict[str, Any]) -> str:
    work, other = row["work"].removeprefix("P, ").removesuffix(", us/batch"), row["other"][0]
    if row["work"].startswith("P, "):
        return work
    return f"A: {row['ours'][0].removeprefix('wholestep, ')} beside {other}"


def _panel(axis: Any, label: str, rows: list[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(map(_title, rows)))[::-1]
    for engine, colour in _COLOURS.items():
        own = [row for row in rows if row["engine"] == engine]
        places, middles = [names.index(_title(row)) for row in own], [median(row["results"]) for row in own]
        axis.hlines(
            places, *([end(row["results"]) for row in own] for end in (min, max)), color=colour, alpha=0.35, linewidth=4
        )
        axis.plot(middles, places, "o", color=colour, label=engine)
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set(xscale="log", xlim=(0.2, 60), xlabel=label, yticks=range(len(names)), yticklabels=names)
    axis.set_ylim(-0.7, len(names) - 0.3)
    ticks = [0.3, 0.5, 1, 2, 5, 10, 20, 50]
    axis.set_xticks(ticks, map(str, ticks))
    axis.minorticks_off()
    axis.grid(axis="x", alpha=0.3)
    axis.legend(fontsize="small")


if __name__ == "__main__":
    draw(Path(sys.argv[1]).read_text(), Path(sys.argv[2]))
