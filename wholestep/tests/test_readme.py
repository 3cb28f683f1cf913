"""The first pages: their programs run in the environment that their own words make, and their commands exist."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import keras
import pytest
from scripts import ENGINES, imported, program
from shares import on

ROOT = Path(__file__).parents[1]
TOP = ROOT.parent
README = (ROOT / "README.md").read_text()
PAGES = {"README.md": README, "docs/index.md": (ROOT / "docs" / "index.md").read_text()}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def installation(page, engine):
    """Return the page's commands for an environment with this engine, in the order of the page."""
    commands = re.findall(r"^    ((?:python3|pip) .*?)(?:  +#.*)?$", PAGES[page], re.M)
    return [command for command in commands if "KERAS_BACKEND" not in command or f"KERAS_BACKEND={engine}" in command]


def without_numbers(report):
    return " ".join(re.sub(r"-?\d+(\.\d+)?(e-\d+)?", "0", report).split())


@pytest.mark.own
@pytest.mark.slow
def test_the_program_of_the_readme(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    code, engine, names = tmp_path / "train.py", keras.backend.backend(), {}
    code.write_text(program(README, engine))
    exec(compile(code.read_text(), str(code), "exec"), names)
    assert "60 rows in 10 microbatches (10 x 6 rows)" in capsys.readouterr().out
    assert names["history"].history["loss"][-1] < names["history"].history["loss"][0]
    assert list((tmp_path / "runs" / "a").iterdir())
    if engine == "tensorflow":
        report = str(names["report"]).replace(f"{tmp_path}/", "")
        (shown,) = re.findall(r"```text\n(.*?)```", README, re.S)
        assert without_numbers(report) == without_numbers(shown)
        (line,) = re.findall(r"your code: .*", shown)
        assert line in report


@pytest.mark.own
@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="the loop of the picture calls TensorFlow")
@pytest.mark.slow
def test_the_picture_is_of_the_loop_of_the_readme(tmp_path):
    path = ROOT / "docs" / "picture.py"
    spec = importlib.util.spec_from_file_location("picture", path)
    picture = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(picture)
    assert picture.drawn_from(ROOT / "docs" / "loop.png") == picture.program()  # or draw it again
    assert picture.FIX in README
    written, mended = picture.draw(tmp_path / "loop.png").values()
    assert written[-1] == pytest.approx(2, abs=0.1)
    assert mended[-1] == pytest.approx(0.04, abs=0.02)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("page", PAGES)
def test_a_page_installs_before_it_imports_and_imports_no_more(page, engine):
    _, install = installation(page, engine)
    assert PAGES[page].index(install) < PAGES[page].index("```python")
    extra = re.search(r"'\.\[(\w+)\]'", install)[1]
    installed = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"][extra]]
    known = {re.match(r"[\w-]+", each)[0].removesuffix("-cpu") for each in installed} | {"wholestep"}
    assert imported(program(PAGES[page], engine)) <= known | sys.stdlib_module_names


@pytest.mark.large
@pytest.mark.parametrize("page", PAGES)
def test_a_page_runs_in_the_environment_that_it_makes(page, tmp_path):
    engine, clone = keras.backend.backend(), tmp_path / "clone"
    clone.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    shutil.copytree(ROOT / "src", clone / "src", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "program.py").write_text(program(PAGES[page], engine))
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
    assert re.search(rf"^{command}:", (TOP / "Makefile").read_text(), re.M)
