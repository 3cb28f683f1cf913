"""Pairs of runs by an author who did not know stepcheck: where they differ first, or that they do not."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from shares import ENGINE

FOLDER = Path(__file__).parents[2] / "corpus" / "pairs"
PROGRAM = """
import json, sys
from importlib.util import module_from_spec, spec_from_file_location
modules = []
for name in sys.argv[1:]:
    spec = spec_from_file_location(f"pair{len(modules)}", name)
    modules.append(module_from_spec(spec))
    sys.modules[spec.name] = modules[-1]
    spec.loader.exec_module(modules[-1])
import stepcheck
traces = []
for module in modules:
    with stepcheck.record() as trace:
        module.main()
    traces.append(trace)
print(json.dumps(stepcheck.diff(*traces).as_json()))
"""
PAIRS = {
    path.parent.name: json.loads(path.read_text())
    for path in FOLDER.glob("*/expected.json")
}


def of(engine):
    return [
        name
        for name, expected in sorted(PAIRS.items())
        if expected["engine"] == engine
    ]


def first_of(name):
    """Return (the first difference of a pair or None, whether its runs are equal)."""
    files = [str(FOLDER / name / f"{each}.py") for each in "ab"]
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, *files], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    return next(iter(found["differences"]), None), found["is_equal"]


def check(name):
    expected, (first, is_equal) = PAIRS[name], first_of(name)
    assert is_equal == expected["is_equal"], first
    if not is_equal:
        assert (first["part"], first["update"]) == (
            expected["stage"],
            expected["update"],
        ), first


def test_the_pairs_are_there():
    assert (
        sum(each["is_equal"] for each in PAIRS.values()) == len(PAIRS) / 2 == 10
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", of(ENGINE))
def test_two_runs_of_keras(name):
    check(name)


@pytest.mark.skipif(
    find_spec("torch") is None, reason="PyTorch is not installed"
)
@pytest.mark.parametrize("name", of("torch"))
def test_two_runs_of_torch(name):
    check(name)
