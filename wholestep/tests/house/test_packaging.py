"""An installed wholestep is typed, and its requirements are complete."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import keras
import pytest
import release
from scripts import ENGINES, imported, lean, program
from shares import on

import stepcheck.cli
import wholestep as ws
from wholestep import cli, errors

ROOT = Path(__file__).parents[2]
TOP = ROOT.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

SCRIPT = """
from typing import Any

import keras
import numpy as np

import wholestep as ws


class Squared(ws.Objective):
    def __call__(self, model: keras.Model, batch: dict[str, Any], training: bool) -> ws.Mean:
        error = model(batch["x"], training=training) - batch["y"]
        return ws.Mean(error**2, batch["weight"])


def show(step: ws.Step) -> str:
    number: int = step.number
    loss: float = step.loss
    return f"{number} {loss} {step.logs['loss']}"


def train(model: keras.Model, data: ws.Batches) -> ws.Trainer:
    trainer = ws.Trainer(model, Squared(), optimizer="adam", microbatch_size=8)
    lines: list[str] = [show(step) for step in trainer.steps(data, epochs=2, checkpoints=ws.Checkpoints("runs/a"))]
    print(*lines, trainer.explain().upper())
    try:
        trainer.fit(data, epochs=4)
    except ws.NonFiniteError as error:
        print(error.update + 1, error.rows)
    return trainer


def doubled(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: leaf * 2 for name, leaf in batch.items()}


train(keras.Sequential(), ws.Batches({"x": np.ones((8, 3))}, batch_size=4, seed=7, transform=doubled))
"""
WRONG = "step.number.upper()"  # no such method: found only if a Step's attributes have types


@on("jax")
@pytest.mark.slow
def test_a_users_script_has_types(tmp_path, monkeypatch):
    api = pytest.importorskip("mypy.api")
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "wrong.py").write_text(
        SCRIPT + f"\n\ndef bad(step: ws.Step) -> Any:\n    return {WRONG}\n"
    )
    settings = "[mypy]\nfollow_imports = silent\n[mypy-keras.*]\nignore_missing_imports = True\n"
    (tmp_path / "mypy.ini").write_text(settings)
    monkeypatch.setenv("MYPYPATH", str(ROOT / "src"))
    monkeypatch.chdir(tmp_path)
    out, err, _ = api.run(
        ["--strict", "--config-file", "mypy.ini", "--no-color-output", "script.py", "wrong.py"]
    )
    assert err == ""
    assert re.findall(r"^.*: error: .*$", out, re.M) == [
        f'wrong.py:{len(SCRIPT.splitlines()) + 4}: error: "int" has no attribute "upper"  [attr-defined]'
    ]
    # or installed, the type checker would skip the types
    assert (ROOT / "src" / "wholestep" / "py.typed").exists()


ALONE = """
import sys
import numpy as np

sys.modules |= {"jax": None, "jaxlib": None}  # as if they were not installed
import keras
import wholestep as ws

model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile("adam", "mse")
trainer = ws.Trainer(model, microbatch_size=2)
trainer.fit(np.ones((8, 3)), np.ones((8, 1)), verbose=0)
print(trainer.explain())
"""


@pytest.mark.large
@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="JAX is this engine")
def test_tensorflow_trains_where_jax_is_not_installed():
    command = [sys.executable, "-c", ALONE]
    done = subprocess.run(
        command, env=lean(KERAS_BACKEND="tensorflow"), capture_output=True, text=True, timeout=300
    )
    assert "4 microbatches" in done.stdout, done.stderr


@on("jax")
def test_wholestep_imports_nothing_of_stepcheck():
    for path in (ROOT / "src").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = [
            alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names
        ]
        names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
        assert "stepcheck" not in {name.partition(".")[0] for name in names}, path


@on("jax")
def test_a_former_name_says_how_to_install_stepcheck(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "stepcheck", None)  # as if it were not installed
    for call in (ws.audit, ws.audit.torch):
        with pytest.raises(
            ws.SpecificationError, match=r"none installed.*pip install '\S*stepcheck\[keras\]'"
        ):
            call(None, data=())
    assert cli.main(["audit", "train.py"]) == 2
    assert f"{errors.pip_install('stepcheck[keras]')}." in capsys.readouterr().err


def test_a_version_is_the_same_everywhere():
    cited = dict(
        line.split(": ", 1)
        for line in (TOP / "CITATION.cff").read_text().splitlines()
        if ": " in line
    )
    assert PROJECT["project"]["version"] == ws.__version__ == cited["version"]
    assert cited["repository-code"] == PROJECT["project"]["urls"]["Source"]
    assert cited["license"] == PROJECT["project"]["license"]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_release_is_tried_with_a_program_and_two_examples(engine):
    assert len(release.EXAMPLES[engine]) == 2
    assert all((TOP / "examples" / f"{name}.py").exists() for name in release.EXAMPLES[engine])
    others = set(ENGINES) - {engine}
    assert not others & imported(program((ROOT / "README.md").read_text(), engine))


def test_what_goes_into_a_source_archive_is_there():
    included = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert all((ROOT / path.strip("/")).exists() for path in included)
    assert not [path for path in included if path.strip("/").startswith(".")]


@on("jax")
def test_the_words_on_both_packages_agree_everywhere():
    first = " ".join((TOP / "README.md").read_text().replace("*", "").split())
    for package, module in (("wholestep", cli), ("stepcheck", stepcheck.cli)):
        project = tomllib.loads((TOP / package / "pyproject.toml").read_text())["project"]
        site = (TOP / package / "mkdocs.yml").read_text()
        assert re.findall(r'^site_description: "?(.*?)"?$', site, re.M) == [project["description"]]
        assert module.command_line().description == project["description"]
        said = re.split(": prove |^Train ", project["description"].removesuffix("."))
        assert all(words in first for words in said)
        assert {"keras", "jax", "tensorflow", "training loop"} <= {*project["keywords"]}


def test_every_link_of_the_project_leads_to_one_repository():
    urls = PROJECT["project"]["urls"]
    assert set(urls) >= {"Documentation", "Source", "Issues", "Changes"}
    assert all(url.startswith(urls["Source"]) for url in urls.values())


class Installed:
    """A distribution, with the file of its origin."""

    def __init__(self, origin):
        self.origin = origin

    def read_text(self, name):
        assert name == "direct_url.json"
        return self.origin and json.dumps(self.origin)


COMMANDS = [
    (
        [Installed({"url": "file:///home/me/a%20clone/wholestep", "dir_info": {}})],
        "'/home/me/a clone/wholestep[demo]' '/home/me/a clone/stepcheck[keras]'",
    ),
    (
        [Installed({"url": "https://a.b/c", "vcs_info": {"vcs": "git"}})],
        "'wholestep[demo] @ git+https://a.b/c#subdirectory=wholestep' "
        "'stepcheck[keras] @ git+https://a.b/c#subdirectory=stepcheck'",
    ),
    ([Installed({"url": "file:///tmp/a.whl"})], "'wholestep[demo]' 'stepcheck[keras]'"),
    ([Installed(None)], "'wholestep[demo]' 'stepcheck[keras]'"),
    ([], "'wholestep[demo]' 'stepcheck[keras]'"),
]


@pytest.mark.parametrize(("found", "told"), COMMANDS)
def test_a_command_installs_from_where_wholestep_came(found, told, monkeypatch):
    monkeypatch.setattr(errors, "distributions", lambda name: found)
    assert errors.pip_install("wholestep[demo]", "stepcheck[keras]") == f"pip install {told}"


@on("jax")
def test_messages_install_what_exists_and_leave_the_command_to_one_function():
    texts = {path: path.read_text() for path in (ROOT / "src").rglob("*.py")}
    by_hand = [path.name for path, text in texts.items() if "pip install " in text]
    assert by_hand == ["errors.py"]
    calls = re.findall(r"pip_install\(f?(['\"].*?)\)", "".join(texts.values()))
    named = re.findall(r"(\w+)\[(\w+)\]", " ".join(calls))
    assert {("wholestep", "demo"), ("wholestep", "remote"), ("stepcheck", "keras")} <= {*named}
    for name, extra in named:
        project = tomllib.loads((TOP / name / "pyproject.toml").read_text())["project"]
        assert extra in project["optional-dependencies"]
