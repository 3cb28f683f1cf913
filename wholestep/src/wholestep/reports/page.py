"""The page of a report: one HTML file without scripts; its pictures need matplotlib."""

import os
from base64 import b64encode
from collections.abc import Callable, Iterable
from html import escape
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

from wholestep.errors import invalid, pip_install

LEGEND: dict[str, Any] = {"framealpha": 1.0, "edgecolor": "none", "fontsize": 9}
_STYLE = """
.ws-report {font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 52rem;
  padding: 0.5rem 1rem;}
.ws-report h1 {font-size: 1.35rem; line-height: 1.35; margin: 0.4rem 0;}
.ws-report h2 {font-size: 1.1rem; margin: 1.6rem 0 0.3rem;}
.ws-report table {border-collapse: collapse; margin: 0.6rem 0; font-variant-numeric: tabular-nums;}
.ws-report th, .ws-report td {
  padding: 0.15rem 0.9rem 0.15rem 0; text-align: right; border-bottom: 1px solid #ddd;
  background: #fff; color: #222; font-weight: normal;}
.ws-report th:first-child, .ws-report td:first-child {text-align: left;}
.ws-report thead th {font-weight: bold;}
.ws-report dl {
  display: grid; grid-template-columns: max-content auto; gap: 0.1rem 1rem; margin: 0.6rem 0;}
.ws-report dt {color: #666;} .ws-report dd {margin: 0; overflow-wrap: anywhere;}
.ws-report code {background: #f3f3f3; padding: 0 0.2rem;}
.ws-report figure {margin: 0 0 0.5rem;} .ws-report img {max-width: 100%;}
.ws-report figcaption, .ws-report footer {color: #666;}
@media (max-width: 40rem) {.ws-report dl {display: block;} .ws-report figure {overflow-x: auto;}
  .ws-report img {max-width: none; width: 36rem;}}
"""


def assert_drawable() -> None:
    """Raise if matplotlib is not installed.

    Raises:
        SpecificationError: it is not.
    """
    if find_spec("matplotlib") is None:
        raise invalid(
            "The pictures of a report need matplotlib.",
            "none installed",
            f"{pip_install('wholestep[demo]')}, or print(report).",
        )


def figure(draw: Callable[[Any], tuple[str, str]], height: float) -> str:
    """Return a picture with title and caption as HTML, drawn by (figure) -> (title, caption)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, height), layout="constrained")
    title, caption = map(escape, draw(figure))
    file = BytesIO()
    figure.savefig(file, format="png", dpi=120)
    source = f"data:image/png;base64,{b64encode(file.getvalue()).decode()}"
    image = f'<img alt="{title}. {caption}" src="{source}">'
    return f"<h2>{title}</h2><figure>{image}<figcaption>{caption}</figcaption></figure>"


def bare(axes: Any, x: str, y: str = "") -> None:
    """Label axes, with a light grid and without a box."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def styled(parts: Iterable[str]) -> str:
    """Return pieces of HTML as one part of a page or a notebook, with its style."""
    return f'<div class="ws-report"><style>{_STYLE}</style>{"".join(parts)}</div>'


def write_page(path: str | os.PathLike[str], title: str, parts: Iterable[str]) -> None:
    """Write parts of a page to a file."""
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    head += f"<title>{escape(title)}</title>"
    begin = '<!doctype html>\n<html lang="en">'
    page = f"{begin}<head>{head}</head>\n<body>{'<hr>'.join(parts)}</body></html>\n"
    Path(path).write_text(page, encoding="utf-8")
