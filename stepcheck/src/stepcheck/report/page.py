"""The page of a report: one HTML file without scripts, with pictures; only drawing them
needs matplotlib.
"""

import os
from base64 import b64encode
from collections.abc import Callable, Iterable
from html import escape
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from stepcheck.errors import SpecificationError, message, pip_install

LEGEND: dict[str, Any] = {"framealpha": 1.0, "edgecolor": "none", "fontsize": 9}
_STYLE = """
.stepcheck-report {font: 15px/1.5 system-ui, sans-serif; color: #222;
  background: #fff; max-width: 52rem; padding: 0.5rem 1rem;}
.stepcheck-report h1 {font-size: 1.35rem; line-height: 1.35; margin: 0.4rem 0;}
.stepcheck-report h2 {font-size: 1.1rem; margin: 1.6rem 0 0.3rem;}
.stepcheck-report pre {font-size: 0.85rem; white-space: pre-wrap; overflow-wrap: anywhere;}
.stepcheck-report figure {margin: 0 0 0.5rem;} .stepcheck-report img {max-width: 100%;}
.stepcheck-report figcaption {color: #666;}
@media (max-width: 40rem) {.stepcheck-report figure {overflow-x: auto;}
  .stepcheck-report img {max-width: none; width: 36rem;}}
"""


class Picture(NamedTuple):
    """A picture as PNG, its title, and its description for readers who cannot see it."""

    title: str
    caption: str
    png: bytes


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def assert_drawable() -> None:
    """Raise if matplotlib is not installed.

    Raises:
        SpecificationError: it is not.
    """
    if not can_draw():
        must = "The pictures of a report need matplotlib."
        attempt = f"{pip_install('stepcheck[pictures]')}, or print(report)."
        raise SpecificationError(message(must, "none installed", attempt))


def drawn(draw: Callable[[Any], tuple[str, str]], height: float) -> Picture:
    """Return the picture that a function draws into a figure; the function returns
    title and caption.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, height), layout="constrained")
    title, caption = draw(figure)
    file = BytesIO()
    figure.savefig(file, format="png", dpi=120)
    return Picture(title, caption, file.getvalue())


def bare(axes: Any, x: str, y: str = "") -> None:
    """Label axes, with a light grid and without a box."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def part_of_page(parts: Iterable[str]) -> str:
    """Return pieces of HTML as one part of a page or a notebook, with its style."""
    return f'<div class="stepcheck-report"><style>{_STYLE}</style>{"".join(parts)}</div>'


def write_page(path: str | os.PathLike[str], title: str, body: str) -> None:
    """Write a page to a file."""
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    head += f"<title>{escape(title)}</title>"
    page = f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{body}</body></html>\n'
    Path(path).write_text(page, encoding="utf-8")


def figure(picture: Picture) -> str:
    """Return a picture with its title and caption as HTML."""
    source = f"data:image/png;base64,{b64encode(picture.png).decode()}"
    title, caption = escape(picture.title), escape(picture.caption)
    image = f'<img alt="{title}. {caption}" src="{source}">'
    return f"<h2>{title}</h2><figure>{image}<figcaption>{caption}</figcaption></figure>"
