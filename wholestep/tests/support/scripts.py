"""Scripts that tests start in new processes, the programs of pages, and pages of HTML."""

import ast
import html.parser
import os
import re
from pathlib import Path

ENGINES = ("jax", "tensorflow")
FRAMEWORKS = (*ENGINES, "torch")
HERE = Path(__file__).parent
TESTS = HERE.parent


def lean(*folders: Path, **variables: str) -> dict[str, str]:
    """Return this process's environment, in which Keras starts in half the time (support/lean), with
    these beside.

    Args:
        folders: from which a script may import, too.
    """
    known = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    paths = [str(HERE / "lean"), *map(str, folders), *known]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | variables


def imported(block: str) -> set[str]:
    """Return the packages that a block imports."""
    nodes = list(ast.walk(ast.parse(block)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return {name.partition(".")[0] for name in names}


def program(text: str, framework: str) -> str:
    """Return the blocks of a page as one program, without those for another framework."""
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    others = {*FRAMEWORKS} - {framework}
    if framework == "torch":
        others.add("keras")
    return "\n".join(block for block in blocks if not imported(block) & others)


class Tags(html.parser.HTMLParser):
    """Collects the tags of a page, and checks that they are closed."""

    def __init__(self, text: str):
        super().__init__()
        self.open = []
        self.tags = []
        self.words = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)
