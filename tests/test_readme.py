"""Every block of the README runs as it stands, and its commands exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_programs_run(capsys):
    names: dict = {}
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(blocks) == 4
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    out = capsys.readouterr().out
    assert "60 rows in 10 microbatches (10 x 6 rows)" in out
    assert "looked up are updated" in names["trainer"].explain()
    assert names["history"].history["loss"][-1] < names["history"].history["loss"][0]


@pytest.mark.parametrize("command", re.findall(r"^    make (\w+)", README, re.M))
def test_the_commands_exist(command):
    assert re.search(rf"^{command}:", (ROOT / "Makefile").read_text(), re.M)


@pytest.mark.parametrize("path", re.findall(r"\]\(([\w/.]+)\)", README))
def test_the_links_lead_somewhere(path):
    assert (ROOT / path).exists()
