"""The first pages: their programs run in the environment that their own words make, and their commands exist."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import keras
import pytest
from shares import on

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = {"README.md": README, "docs/index.md": (ROOT / "docs" / "index.md").read_text()}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ENGINES = ("jax", "tensorflow")


def imported(block):
    """Return the packages that a block imports."""
    nodes = list(ast.walk(ast.parse(block)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


def program(page, engine):
    """Return the blocks of a page as one program, without those for the other engine: as many as for this one."""
    blocks = re.findall(r"```python\n(.*?)```", PAGES[page], re.S)
    of_one = {each: [block for block in blocks if each in imported(block)] for each in ENGINES}
    assert len({len(found) for found in of_one.values()}) == 1
    return "\n".join(block for block in blocks if block in of_one[engine] or not imported(block) & set(ENGINES))


def installation(page, engine):
    """Return the page's commands for an environment with this engine, in the order of the page."""
    commands = re.findall(r"^    ((?:python3|pip) .*?)(?:  +#.*)?$", PAGES[page], re.M)
    return [command for command in commands if "KERAS_BACKEND" not in command or f"KERAS_BACKEND={engine}" in command]


@pytest.mark.own
def test_the_program_of_the_readme(capsys):
    names: dict = {}
    exec(compile(program("README.md", keras.backend.backend()), "README.md", "exec"), names)
    assert "60 rows in 10 microbatches (10 x 6 rows)" in capsys.readouterr().out
    assert names["history"].history["loss"][-1] < names["history"].history["loss"][0]
    assert [cause.name for cause in names["report"].causes] == ["broadcast"]
    assert not names["report"].notes


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("page", PAGES)
def test_a_page_installs_before_it_imports_and_imports_no_more(page, engine):
    _, install = installation(page, engine)
    assert PAGES[page].index(install) < PAGES[page].index("```python")
    extra = re.search(r"'\.\[(\w+)\]'", install)[1]
    installed = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"][extra]]
    known = {re.match(r"[\w-]+", each)[0].removesuffix("-cpu") for each in installed} | {"wholestep"}
    assert imported(program(page, engine)) <= known | sys.stdlib_module_names


@pytest.mark.large
@pytest.mark.parametrize("page", PAGES)
def test_a_page_runs_in_the_environment_that_it_makes(page, tmp_path):
    engine, clone = keras.backend.backend(), tmp_path / "clone"
    clone.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    shutil.copytree(ROOT / "src", clone / "src", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "program.py").write_text(program(page, engine))
    others = [f"import {other}" for other in set(ENGINES) - {engine}]
    script = ["set -e", *installation(page, engine), *(f"! python -c '{each}' 2>/dev/null" for each in others)]
    script += ["cd ..", "python program.py"]
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "KERAS_BACKEND", "VIRTUAL_ENV")}
    command = ["bash", "-c", "\n".join(script)]
    done = subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr


@on("jax")
@pytest.mark.parametrize("command", sorted(set(re.findall(r"`make (\w+)`", README))))
def test_the_commands_exist(command):
    assert re.search(rf"^{command}:", (ROOT / "Makefile").read_text(), re.M)
