"""Draws the pictures of docs/gallery.md, and docs/train.png for the README of the repository.

KERAS_BACKEND=jax python wholestep/docs/pictures.py
"""

import io
import json
import re
import sys
import tempfile
import textwrap
from base64 import b64decode
from collections.abc import Iterator
from contextlib import chdir, redirect_stdout
from html.parser import HTMLParser
from pathlib import Path

import matplotlib
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

matplotlib.use("Agg")
from matplotlib import pyplot as plt

DOCS = Path(__file__).parent
EXAMPLES = DOCS.parents[1] / "examples"
PAGES = {"report.png": ("report.html", 1), "run.png": ("run.html", 2)}  # and how many pictures
WIDTH = 960  # pixels, as the pictures of the pages have
MARGIN = 16
INK, GREY, GREEN = "#222222", "#8a8a8a", "#1a7f3c"
SIZES = {"h1": 22, "h2": 20, "figcaption": 18}  # of letters, in pixels; 16 elsewhere
COLOURS = {"0": INK, "1": INK, "32": GREEN, "37": "#c8c8c8"}  # by number of an escape sequence
GROUPS = {  # colour and label of the runs of examples/digits.py, by a part of their names
    "resumed": ("tab:green", "killed and resumed: equal to the bit"),
    "microbatches": ("tab:blue", "microbatches of 6 or 7, in fit and in a loop"),
    "keras fit, whole": ("tab:grey", "Keras' fit, full batch"),
    "accumulation": ("tab:red", "Keras' fit, gradient accumulation"),
}
FLOOR = 1e-8  # a logarithmic axis cannot show 0


def programs() -> list[str]:
    """Return the blocks of the gallery's code."""
    return re.findall(r"```python\n(.*?)```", (DOCS / "gallery.md").read_text(), re.S)


def drawn_from(path: Path) -> str:
    """Return the code that a picture was drawn from."""
    with Image.open(path) as image:
        return image.info["Source"]


def draw_gallery(folder: Path) -> dict:
    """Run the gallery's code, draw its pages and its progress bar into a folder, and return the
    names of the code.
    """
    names: dict = {}
    blocks = programs()
    code = "\n".join(blocks)
    with tempfile.TemporaryDirectory() as here, chdir(here):
        Path("train.py").write_text(code)  # whose lines the report shows
        with redirect_stdout(Terminal()) as terminal:
            exec(compile(code, "train.py", "exec"), names)
        pages = {name: Path(file).read_text() for name, (file, _) in PAGES.items()}
    setup, *each = blocks
    for (name, (_, most)), block in zip(PAGES.items(), each, strict=False):
        save(stacked([*parts(pages[name], most)]), folder / name, setup + block)
    save(stacked([*screens(terminal.getvalue())]), folder / "progress.png", setup + each[2])
    return names


def save(image: Image.Image, path: Path, code: str) -> None:
    """Write a picture of few colours, which holds the code that it was drawn from."""
    info = PngInfo()
    info.add_text("Source", code)
    image.quantize(64).save(path, pnginfo=info, optimize=True)


# ---- pages of HTML, and a terminal, as pictures ----


class Reader(HTMLParser):
    """Collects the texts and the pictures of a page, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []
        self._tag = ""

    def handle_starttag(self, tag: str, attrs: list) -> None:
        """Begin a text, or collect a picture."""
        self._tag = tag
        if tag == "img":
            self.found.append(("img", dict(attrs)["src"].partition(",")[2]))

    def handle_data(self, data: str) -> None:
        """Collect a text."""
        if self._tag not in ("style", "title") and data.strip():
            self.found.append((self._tag, data.strip("\n")))


def parts(page: str, most: int) -> Iterator[Image.Image]:
    """Yield the texts and pictures of a page up to a number of pictures, each as a picture."""
    reader = Reader()
    reader.feed(page)
    seen = 0
    term = ""
    for tag, content in reader.found:
        if seen == most and tag != "figcaption":
            return
        if tag == "img":
            seen += 1
            yield Image.open(io.BytesIO(b64decode(content))).convert("RGB")
        elif tag == "pre":
            yield text([each for line in content.splitlines() for each in folded(line, 16)])
        elif tag == "dt":
            term = content
        else:
            content = f"{term:15}  {content}" if tag == "dd" else content
            yield text(folded(content, SIZES.get(tag, 16)), SIZES.get(tag, 16))


class Terminal(io.StringIO):
    """A text for which programs write as for a terminal."""

    def isatty(self) -> bool:
        """Say so."""
        return True


def screens(output: str) -> Iterator[Image.Image]:
    """Yield the output of a terminal at its compilation, and at its end."""
    lines = [
        [state.strip() for state in re.split(r"[\r\x08]+", line)] for line in output.split("\n")
    ]
    compiling = next(i for i, state in enumerate(lines[1]) if state.startswith("compiling"))
    yield text([lines[0][0], lines[1][compiling]])
    yield text(["..."])
    yield text([[state for state in line if state][-1] for line in lines if any(line)])


def font(size: int) -> ImageFont.FreeTypeFont:
    """Return letters of equal width, which matplotlib ships."""
    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    return ImageFont.truetype(fonts / "DejaVuSansMono.ttf", size)


def folded(words: str, size: int) -> list[str]:
    """Return the lines of a text; the later ones begin where the first one does."""
    most = int((WIDTH - 2 * MARGIN) / font(size).getlength("m"))
    indent = " " * (len(words) - len(words.lstrip()))
    return textwrap.wrap(words, most, subsequent_indent=indent, drop_whitespace=False) or [""]


def text(lines: list[str], size: int = 16) -> Image.Image:
    """Return lines as a picture; escape sequences set the colour."""
    letters = font(size)
    height = round(1.4 * size)
    image = Image.new("RGB", (WIDTH, height * len(lines)), "white")
    draw = ImageDraw.Draw(image)
    for i, line in enumerate(lines):
        x = float(MARGIN)
        colour = INK
        for number, piece in re.findall(r"(?:\x1b\[(\d+)m)?([^\x1b]*)", line):
            colour = COLOURS.get(number, colour)
            draw.text((x, i * height), piece, fill=colour, font=letters)
            x += letters.getlength(piece)
    return image


def stacked(images: list[Image.Image]) -> Image.Image:
    """Return pictures, one below the other, in a frame."""
    height = sum(image.height for image in images) + MARGIN * (len(images) + 1)
    sheet = Image.new("RGB", (WIDTH + 2, height), "white")
    y = MARGIN
    for image in images:
        sheet.paste(image, (1, y))
        y += image.height + MARGIN
    ImageDraw.Draw(sheet).rectangle((0, 0, sheet.width - 1, height - 1), outline=GREY)
    return sheet


# ---- the picture of the README ----


def differences() -> dict[str, tuple[float, ...]]:
    """Run examples/digits.py; return the distance of the weights from the first run's, by run."""
    sys.path.insert(0, str(EXAMPLES))
    import digits

    with tempfile.TemporaryDirectory() as folder:
        rows = digits.run(30, folder)
    return {row.name: row.differences for row in rows[1:]}


def draw_train(path: Path, runs: dict[str, tuple[float, ...]]) -> None:
    """Draw the distance of the weights from the first run's, after each epoch."""
    figure, axes = plt.subplots(figsize=(5.25, 3.5), layout="constrained")
    for name, curve in runs.items():
        colour, label = next(told for part, told in GROUPS.items() if part in name)
        known = {line.get_label() for line in axes.lines}
        epochs = range(1, len(curve) + 1)
        drawn = [max(each, FLOOR) for each in curve]
        label = "_" if label in known else label
        axes.plot(epochs, drawn, color=colour, linewidth=2, label=label)
    axes.set(xlabel="epoch", yscale="log", ylim=(FLOOR / 2, 10), xlim=(1, len(epochs)))
    axes.set_title("Distance of the weights from full batches", fontsize=12)
    axes.set_yticks([1e-8, 1e-6, 1e-4, 1e-2, 1], ["0", "1e-6", "1e-4", "1e-2", "1"])
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=1, frameon=False, fontsize=10.5)
    told = json.dumps({name: curve[-1] for name, curve in runs.items()})
    figure.savefig(path, dpi=160, metadata={"Source": told})
    plt.close(figure)


if __name__ == "__main__":
    draw_gallery(DOCS)
    draw_train(DOCS / "train.png", differences())
