"""`python -m benchmarks.page`: from docs/benchmarks.jsonl and docs/gpu.jsonl, their pages' tables
and the picture.
"""

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib

from benchmarks.table import Row

matplotlib.use("Agg")
from matplotlib import pyplot as plt

DOCS = Path(__file__).parent.parent / "wholestep" / "docs"
PAGES = "benchmarks", "gpu"
SECTIONS = {  # the headings of the page's tables, and their comparisons; the first that fits has it
    "How far from the limit?": r".*(by hand|bare call|hand-written)",
    "How fast is `fit`?": r"(?!.*first update)[ABDE], .*against Keras|P, fit, (arrays|validation)",
    "How fast are ordinary models?": r"[\w-]+, s/epoch",
    "What do loaders, callbacks, own loops and evaluation cost?": r"P, |inputs, ",
    "How fast are embeddings and sequences of uneven length?": r"C, |D', ",
    "How long is the first update, and how much memory is "
    "needed?": r".*first update|import|growth|memory",
    "What do checkpoints, audits, draws, replicas and processes cost?": r".*",
}
_COLOURS = {"jax": "tab:blue", "tensorflow": "tab:orange"}


def rows_of(lines: str) -> list[Row]:
    """Return the comparisons of a run."""
    return [
        Row(**{field: line[field] for field in Row._fields})
        for line in map(json.loads, lines.splitlines()[1:])
    ]


def by_section(rows: list[Row]) -> dict[str, dict[tuple[str, str, str], dict[str, Row]]]:
    """Return for each section the comparisons, by work and contestants, and in each the engines."""
    found: dict[str, dict] = {section: {} for section in SECTIONS}
    for row in rows:
        section = next(section for section, words in SECTIONS.items() if re.match(words, row.name))
        found[section].setdefault((row.work, row.ours[0], row.other[0]), {})[row.engine] = row
    return found


def written(page: str, lines: str) -> str:
    """Return the page with the tables and the circumstances of a run."""
    told = "\n".join(f"- {line}" for line in json.loads(lines.splitlines()[0])["circumstances"])
    texts = {"run": told} | {
        section: _table(rows) for section, rows in by_section(rows_of(lines)).items()
    }
    for name, text in texts.items():
        begin = f"<!-- {name} -->\n"
        end = "<!-- end -->"
        page = re.sub(
            rf"(?<={re.escape(begin)}).*?(?={end})",
            lambda _, text=text: f"{text}\n",
            page,
            count=1,
            flags=re.S,
        )
    return page


def _table(rows: dict[tuple[str, str, str], dict[str, Row]]) -> str:
    """Return a table with the result of each engine: other / ours, or how much more ours takes; and
    missed bars.
    """
    shown = [engine for engine in _COLOURS if any(engine in engines for engines in rows.values())]
    lines = [f"| work | ours | other | {' | '.join(shown)} |", "|---" * (3 + len(shown)) + "|"]
    for names, engines in rows.items():
        cells = [_cell(engines[engine]) if engine in engines else "" for engine in shown]
        lines.append(f"| {' | '.join([*names, *cells])} |")
    return "\n".join(lines)


def _cell(row: Row) -> str:
    *_, result, bar, verdict, _ = row.cells()
    return f"{result}, missed: {bar}" if verdict == "missed" else result


def draw(rows: list[Row], path: Path) -> None:
    """Draw the results of the paths of `fit` and the like: against loops by hand, and against
    Keras.
    """
    found = [row for row in rows if row.work.startswith(("P, ", "A, s/"))]
    limit = [row for row in found if re.match(SECTIONS["How far from the limit?"], row.name)]
    panels = {
        "time of a loop by hand / ours": limit,
        "Keras' time / ours": [row for row in found if row not in limit],
    }
    heights = [1 + len(set(map(_label, own))) for own in panels.values()]
    sizes: dict[str, Any] = {"figsize": (8, 1 + 0.27 * sum(heights)), "height_ratios": heights}
    figure, axes = plt.subplots(2, 1, **sizes, layout="constrained")
    for axis, (title, own) in zip(axes, panels.items(), strict=True):
        _panel(axis, title, own)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _label(row: Row) -> str:
    work = row.work.removeprefix("P, ").removesuffix(", us/batch")
    return (
        work
        if row.work.startswith("P, ")
        else f"A: {row.ours[0].removeprefix('wholestep, ')} against {row.other[0]}"
    )


def _panel(axis: Any, title: str, rows: list[Row]) -> None:
    labels = list(dict.fromkeys(map(_label, rows)))[::-1]
    for engine, colour in _COLOURS.items():
        own = [row for row in rows if row.engine == engine]
        places = [labels.index(_label(row)) for row in own]
        ends = [[end(row.results) for row in own] for end in (min, max)]
        axis.hlines(places, *ends, color=colour, alpha=0.35, linewidth=4)
        axis.plot([median(row.results) for row in own], places, "o", color=colour, label=engine)
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set(
        xscale="log", xlim=(0.2, 60), xlabel=title, yticks=range(len(labels)), yticklabels=labels
    )
    axis.set_ylim(-0.7, len(labels) - 0.3)
    ticks = [0.3, 0.5, 1, 2, 5, 10, 20, 50]
    axis.set_xticks(ticks, map(str, ticks))
    axis.minorticks_off()
    axis.grid(axis="x", alpha=0.3)
    axis.legend(fontsize="small")


def main() -> None:
    """Write the pages and the picture."""
    for name in PAGES:
        page = DOCS / f"{name}.md"
        page.write_text(written(page.read_text(), (DOCS / f"{name}.jsonl").read_text()))
    draw(rows_of((DOCS / "benchmarks.jsonl").read_text()), DOCS / "benchmarks.png")


if __name__ == "__main__":
    main()
