"""The page on stopping and going on runs as it stands."""

import re
from importlib.util import find_spec
from pathlib import Path

from wholestep.checkpoints.folder import Folder

TEXT = (Path(__file__).parents[2] / "docs" / "resume.md").read_text()


def test_the_page_runs_and_leaves_what_it_says():
    names: dict = {}
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    assert len(blocks) == 6
    for block in (
        blocks if find_spec("fsspec") else [block for block in blocks if "://" not in block]
    ):
        exec(compile(block, "resume.md", "exec"), names)
    folder = names["folder"]
    assert Folder(folder).steps() == [18, 15, 6]
    assert names["path"].name == "step-00000012"
    assert len(Folder(f"{folder}-b").steps()) in range(3, 6)
    assert Path(folder, "best.keras").is_file()


def test_its_commands_and_links_exist():
    assert re.findall(r"wholestep checkpoint (\w+)", TEXT) == ["prune", "copy", "ls"]
    for link in re.findall(r"\]\(([\w/.]+)\)", TEXT):
        assert (Path(__file__).parents[2] / "docs" / link).exists()
