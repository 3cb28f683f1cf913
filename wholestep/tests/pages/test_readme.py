"""The first pages: their programs run in the environment that their own words make, and their
commands exist.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import keras
import numpy as np
import pytest
from scripts import ENGINES, imported, program
from shares import on

ROOT = Path(__file__).parents[2]
TOP = ROOT.parent
README, FIRST = ((folder / "README.md").read_text() for folder in (ROOT, TOP))
PAGES = {"README.md": README, "docs/index.md": (ROOT / "docs" / "index.md").read_text()}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def installation(page, engine):
    """Return the page's commands for an environment with this engine, in the order of the page."""
    commands = re.findall(r"^    ((?:python3|pip) .*?)(?:  +#.*)?$", PAGES[page], re.M)
    return [
        command
        for command in commands
        if "KERAS_BACKEND" not in command or f"KERAS_BACKEND={engine}" in command
    ]


@pytest.mark.own
@pytest.mark.slow
def test_the_program_of_the_readme(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    code = tmp_path / "train.py"
    engine = keras.backend.backend()
    names = {}
    code.write_text(program(README, engine))
    exec(compile(code.read_text(), str(code), "exec"), names)
    assert "60 rows in 10 microbatches (10 x 6 rows)" in capsys.readouterr().out
    assert names["history"].history["loss"][-1] < names["history"].history["loss"][0]
    assert list((tmp_path / "runs" / "a").iterdir())


@pytest.mark.own
@pytest.mark.slow
def test_the_first_page_changes_one_line_of_fit(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    (block,) = (
        each for each in re.findall(r"```python\n(.*?)```", FIRST, re.S) if "wholestep" in each
    )
    names = {"x": np.ones((600, 4), "float32"), "y": np.ones((600, 1), "float32")}
    names["model"] = model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    exec(block, names)
    printed = capsys.readouterr().out
    assert list((tmp_path / "runs" / "a").iterdir())
    shown = (
        text
        for page in (FIRST, README)
        for text in re.findall(r"```text\n(One update.*?)```", page, re.S)
    )
    lines = [line for text in shown for line in text.splitlines() if line != "..."]
    assert len(lines) > 5
    assert [line for line in lines if line not in printed] == []


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("page", PAGES)
def test_a_page_installs_before_it_imports_and_imports_no_more(page, engine):
    _, install = installation(page, engine)
    assert PAGES[page].index(install) < PAGES[page].index("```python")
    extra = re.search(r"'\./wholestep\[(\w+)\]'", install)[1]
    installed = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"][extra]]
    known = {re.match(r"[\w-]+", each)[0].removesuffix("-cpu") for each in installed} | {
        "wholestep"
    }
    assert imported(program(PAGES[page], engine)) <= known | sys.stdlib_module_names


@pytest.mark.large
@pytest.mark.parametrize("page", PAGES)
def test_a_page_runs_in_the_environment_that_it_makes(page, tmp_path):
    engine = keras.backend.backend()
    clone = tmp_path / "clone"
    folder = clone / "wholestep"
    folder.mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "program.py").write_text(program(PAGES[page], engine))
    others = [f"import {other}" for other in set(ENGINES) - {engine}]
    script = [
        "set -e",
        *installation(page, engine),
        *(f"! python -c '{each}' 2>/dev/null" for each in others),
    ]
    script += ["cd ..", "python program.py"]
    environment = {
        k: v
        for k, v in os.environ.items()
        if k not in ("PYTHONPATH", "KERAS_BACKEND", "VIRTUAL_ENV")
    }
    command = ["bash", "-c", "\n".join(script)]
    done = subprocess.run(
        command, cwd=clone, env=environment, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stdout + done.stderr


@on("jax")
def test_the_first_page_is_short():
    assert len(FIRST.splitlines()) <= 65


@on("jax")
def test_the_first_page_has_two_pictures_of_the_repository():
    raw = "https://raw.githubusercontent.com/wholestep/wholestep/main/"
    pictures = re.findall(rf"!\[([^]]+)\]\({raw}(\S+\.png)\)", FIRST)
    assert len(pictures) == 2
    assert all((TOP / path).exists() for _, path in pictures)


@on("jax")
@pytest.mark.parametrize(
    "command", sorted(set(re.findall(r"(?:`|^    )make (\w+)", README + FIRST, re.M)))
)
def test_the_commands_exist(command):
    assert re.search(rf"^{command}:", (TOP / "Makefile").read_text(), re.M)
