"""Every block of the README runs as it stands, and its commands exist."""

import re
from pathlib import Path

import pytest
from shares import on

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


@on("jax")
def test_the_programs_run(capsys):
    names: dict = {}
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(blocks) == 3
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    out = capsys.readouterr().out
    assert "60 rows in 10 microbatches (10 x 6 rows)" in out
    assert "looked up are updated" in names["trainer"].explain()
    assert names["history"].history["loss"][-1] < names["history"].history["loss"][0]


@on("tensorflow")
def test_the_program_that_packs_runs():
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "sequences.md").read_text(), re.S)
    names: dict = {}
    exec(compile(block, "sequences.md", "exec"), names)
    assert {"segment_ids", "positions", "words"} == set(next(names["data"]))


@pytest.mark.parametrize("command", re.findall(r"^    make (\w+)", README, re.M))
def test_the_commands_exist(command):
    assert re.search(rf"^{command}:", (ROOT / "Makefile").read_text(), re.M)


@pytest.mark.parametrize("path", re.findall(r"\]\(([\w/.]+)\)", README))
def test_the_links_lead_somewhere(path):
    assert (ROOT / path).exists()
