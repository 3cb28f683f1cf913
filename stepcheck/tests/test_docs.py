"""The blocks of code on the pages run."""

import re
from pathlib import Path

import keras
import pytest
from scripts import ENGINES, imported

HERE = Path(__file__).parents[1]
PAGES = [HERE / "README.md", *sorted(HERE.glob("docs/**/*.md"))]
pytestmark = pytest.mark.own  # on both engines


def blocks(page):
    """Return the blocks of a page for this engine, apart from those of PyTorch."""
    others = {*ENGINES, "torch"} - {keras.backend.backend()}
    found = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    return [block for block in found if not imported(block) & others]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.stem)
def test_the_code_of_a_page_runs(page):
    names: dict = {"__name__": page.stem}
    for block in blocks(page):
        exec(compile(block, page.name, "exec"), names)
