"""Draws docs/path.svg and docs/owners.svg from the tables of docs/architecture.md.

python docs/drawings.py
"""

import re
from collections.abc import Iterator
from html import escape
from pathlib import Path

DOCS = Path(__file__).parent
INK = "#1f2933"
PALE = "#eef3f8"
WARM = "#fdf1e3"
LINE = "#8294a8"
STYLE = (
    f"<style>text{{font:13px "
    f"sans-serif;fill:{INK}}}.name{{font-family:monospace}}.part{{font-weight:bold}}</style>"
)
MARKER = '<marker id="to" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
ARROW = f'{MARKER}<path d="M0 0L8 4L0 8z" fill="{LINE}"/></marker>'
WHERE = {  # the part of the path, and where and how often its functions run
    "loop": "host, once a pass",
    "read": "host, for each batch",
    "place": "host, for each block",
    "send": "host, for each block",
    "program": "device, for each block",
    "update": "device, for each update",
}
OWNERS = {  # the place of each owner: column, row; and the things that it has
    "Trainer": (0, 1, ("Setup", "Run")),
    "Run": (1, 0, ("Snapshot",)),
    "Setup": (1, 1, ("Context", "Executor", "Saver")),
    "Saver": (1, 2, ("Snapshot", "Writer")),
    "Context": (2, 0, ()),
    "Executor": (2, 1, ("Dispatcher", "Planner", "UpdateLedger", "Evaluation")),
    "Snapshot": (2, 2, ()),
    "Writer": (2, 3, ("Folder",)),
    "Folder": (2, 4, ()),
    "Dispatcher": (3, 0, ()),
    "Planner": (3, 1, ("Update",)),
    "UpdateLedger": (3, 2, ()),
    "Evaluation": (3, 3, ()),
    "Update": (4, 1, ("Forward",)),
    "Forward": (4, 2, ()),
}


def table(title: str) -> list[list[str]]:
    """Return the cells of the table under a title of the page."""
    section = (
        (DOCS / "architecture.md").read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
    )
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """Return words at a place, in pixels from the upper left corner."""
    return f'<text x="{x}" y="{y}" class="{kind}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, fill: str) -> str:
    """Return a rectangle."""
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{fill}" stroke="{LINE}"/>'


def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    """Return an arrow."""
    return f'<path d="M{x} {y}L{to_x} {to_y}" stroke="{LINE}" stroke-width="1.5" marker-end="url(#to)"/>'


def page(width: int, height: int, title: str, parts: list[str]) -> str:
    """Return a drawing with a light background, which can be read on a dark page too."""
    begin = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"><title>{title}</title>'
    return "\n".join([begin, STYLE, ARROW, box(0, 0, width, height, "white"), *parts, "</svg>", ""])


def path_of_a_batch() -> str:
    """Return the functions that a batch crosses, in the order of the calls: on the host, then on
    the device.
    """
    rows = table("Every function that a batch crosses")
    parts = []
    bottom = {"host": 12, "device": 12}
    ends = dict[str, tuple[int, int]]()
    for part, where in WHERE.items():
        side = where.partition(",")[0]
        x = 12 if side == "host" else 400
        y = bottom[side]
        names = [short(name) for named, name, _ in rows if named == part]
        height = 19 * len(names) + 36
        parts += [
            box(x, y, 348, height, PALE if side == "host" else WARM),
            text(x + 12, y + 20, part, "part"),
        ]
        parts += [text(x + 84, y + 20, where)]
        parts += [text(x + 84, y + 41 + 19 * i, name, "name") for i, name in enumerate(names)]
        if y > 12:
            parts.append(arrow(x + 40, y - 18, x + 40, y - 2))
        bottom[side], ends[part] = y + height + 18, (x, y)
    (x, y), (to_x, to_y) = ends["send"], ends["program"]
    parts.append(arrow(x + 348, y + 30, to_x, to_y + 30))
    return page(
        760,
        max(bottom.values()) - 6,
        "The functions that a batch crosses: on the host, then on the device",
        parts,
    )


def short(name: str) -> str:
    """Return a function's name with its class, without its module."""
    return re.sub(r"^`(?:[a-z_]+\.)*(?=[A-Z])|^`(?:[a-z_]+\.)+(?=[a-z_]+`)|`", "", name)


def owners() -> str:
    """Return the objects of a training, and an arrow from each to the objects that it uses."""
    return page(
        1040, 376, "The objects of a training, and the objects that each one uses", [*_owners()]
    )


def _owners() -> Iterator[str]:
    does = {re.sub(r".*\.|`", "", name): words for name, words in table("Responsibilities")}
    for column, row, others in OWNERS.values():
        for other in others:
            to_column, to_row, _ = OWNERS[other]
            x = 20 + 206 * column
            y = 47 + 72 * row
            to_x = 20 + 206 * to_column
            to_y = 47 + 72 * to_row
            is_below = to_column == column
            yield (
                arrow(x + 88, y + 29, to_x + 88, to_y - 29)
                if is_below
                else arrow(x + 176, y, to_x, to_y)
            )
    for name, (column, row, _) in OWNERS.items():
        x = 20 + 206 * column
        y = 22 + 72 * row
        yield box(x, y - 4, 176, 58, PALE)
        yield text(x + 8, y + 12, name, "part")
        for i, line in enumerate(folded(does[name])):
            yield f'<text x="{x + 8}" y="{y + 25 + 11 * i}" style="font-size:10px">{escape(line)}</text>'


def folded(words: str, width: int = 31) -> list[str]:
    """Return at most three lines; words that do not fit are left out."""
    lines = [""]
    for word in re.sub(r";.*|\(.*|`", "", words).split():
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines if len(lines) <= 3 else [*lines[:2], f"{lines[2]} ..."]


DRAWINGS = {"path.svg": path_of_a_batch, "owners.svg": owners}

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (DOCS / name).write_text(draw())
