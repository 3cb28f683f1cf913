"""An installed stepcheck is typed, and brings no framework that the loop does not use."""

import importlib
import json
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
from scripts import program
from shares import on

import stepcheck
from stepcheck import errors

ROOT = Path(__file__).parents[1]
TOP = ROOT.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FRAMEWORKS = ("keras", "jax", "tensorflow", "torch", "wholestep")

SCRIPT = """
from typing import Any

import stepcheck


def check(model: Any, data: tuple[Any, Any]) -> str:
    with stepcheck.watch(model, data=data, loss="mse", learning_rate=lambda update: 0.1) as report:
        print(report.is_right)
    try:
        return report.first_line.upper()
    except stepcheck.SpecificationError as error:
        return str(error)
"""
WRONG = "print(report.first_line + 1)"  # found only if a report's attributes have types


@on("jax")
@pytest.mark.slow
def test_a_users_script_has_types(tmp_path, monkeypatch):
    api = pytest.importorskip("mypy.api")
    wrong = SCRIPT.replace("print(report.is_right)", WRONG)
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "wrong.py").write_text(wrong)
    settings = (
        "[mypy]\nfollow_imports = silent\nignore_missing_imports = True\n"
    )
    (tmp_path / "mypy.ini").write_text(settings)
    monkeypatch.setenv("MYPYPATH", str(ROOT / "src"))
    monkeypatch.chdir(tmp_path)
    options = ["--strict", "--config-file", "mypy.ini", "--no-color-output"]
    out, err, _ = api.run([*options, "script.py", "wrong.py"])
    assert err == ""
    number = wrong.splitlines().index(f"        {WRONG}") + 1
    (error,) = re.findall(r"^.*: error: .*$", out, re.M)
    assert error.startswith(
        f"wrong.py:{number}: error: Unsupported operand types for +"
    )
    assert (
        ROOT / "src" / "stepcheck" / "py.typed"
    ).exists()  # or checkers ignore an installed one


def test_a_version_is_the_same_everywhere():
    assert PROJECT["project"]["version"] == stepcheck.__version__


def test_no_framework_is_needed_without_an_extra():
    names = {
        re.match(r"[\w-]+", each)[0]
        for each in PROJECT["project"]["dependencies"]
    }
    assert not names & {*FRAMEWORKS, "tensorflow-cpu"}


def test_what_goes_into_a_source_archive_is_there():
    included = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert all((ROOT / path.strip("/")).exists() for path in included)


def test_every_link_of_the_project_leads_to_one_repository():
    urls = PROJECT["project"]["urls"]
    (repository,) = re.findall(
        r"^repo_url: (.*)$", (ROOT / "mkdocs.yml").read_text(), re.M
    )
    assert set(urls) >= {"Documentation", "Source", "Issues"}
    assert all(url.startswith(repository) for url in urls.values())


@on("jax")
@pytest.mark.slow
def test_a_loop_of_torch_is_judged_where_no_other_framework_is_installed(
    tmp_path,
):
    home = tmp_path / "environment"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    install = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--constraint",
        TOP / "constraints.txt",
    ]
    subprocess.run([*install, f"{ROOT}[torch]"], check=True)
    found = f"from importlib.util import find_spec; print(*filter(find_spec, {FRAMEWORKS}))"
    (tmp_path / "train.py").write_text(
        program((ROOT / "README.md").read_text(), "torch")
    )
    how = {"cwd": tmp_path, "check": True, "capture_output": True, "text": True}
    installed = subprocess.run([python, "-I", "-c", found], **how).stdout
    report = subprocess.run([python, "-I", "train.py"], **how).stdout
    assert installed.split() == ["torch"]
    assert report.startswith(
        "8 updates, all as meant: rows, forward pass, gradient, optimizer step, state"
    )


def test_without_wholestep_an_error_says_what_to_install(monkeypatch):
    package = pytest.importorskip("stepcheck.keras")
    monkeypatch.setitem(
        sys.modules, "wholestep", None
    )  # as if it were not installed
    told = re.escape(errors.pip_install("wholestep", "stepcheck[keras]"))
    with pytest.raises(ModuleNotFoundError, match=told):
        importlib.reload(package)


class Installed:
    """A distribution, with the file of its origin."""

    def __init__(self, origin):
        self.origin = origin

    def read_text(self, name):
        assert name == "direct_url.json"
        return self.origin and json.dumps(self.origin)


CLONE = {"url": "file:///home/me/a%20clone/stepcheck", "dir_info": {}}
REMOTE = {"url": "https://a.b/c", "vcs_info": {"vcs": "git"}}
WHEEL = {
    "url": "file:///tmp/stepcheck-0.1-py3-none-any.whl",
    "archive_info": {},
}
COMMANDS = [
    ([Installed(CLONE)], "'/home/me/a clone/stepcheck[keras]'"),
    (
        [Installed(REMOTE)],
        "'stepcheck[keras] @ git+https://a.b/c#subdirectory=stepcheck'",
    ),
    ([Installed(WHEEL)], "'stepcheck[keras]'"),
    ([Installed(None)], "'stepcheck[keras]'"),
    ([], "'stepcheck[keras]'"),
]


@pytest.mark.parametrize(("found", "told"), COMMANDS)
def test_a_command_installs_from_where_stepcheck_came(found, told, monkeypatch):
    monkeypatch.setattr(errors, "distributions", lambda name: found)
    assert errors.pip_install("stepcheck[keras]") == f"pip install {told}"


def test_messages_install_what_exists_and_leave_the_command_to_one_function():
    texts = {
        path: path.read_text()
        for path in (ROOT / "src" / "stepcheck").rglob("*.py")
    }
    by_hand = [
        line
        for path, text in texts.items()
        if path.name != "errors.py"
        for line in text.splitlines()
        if "pip install " in line
    ]
    assert [line for line in by_hand if "install matplotlib" not in line] == []
    calls = re.findall(r"pip_install\((['\"].*?)\)", "".join(texts.values()))
    named = re.findall(r"(\w+)\[(\w+)\]", " ".join(calls))
    assert {("stepcheck", "keras"), ("stepcheck", "pictures")} <= {*named}
    for name, extra in named:
        file = TOP / name / "pyproject.toml"
        extras = tomllib.loads(file.read_text())["project"]
        assert extra in extras["optional-dependencies"]
