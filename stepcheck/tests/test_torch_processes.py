"""Loops in several processes of PyTorch: each keeps its record, and process 0 judges the loop of all."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("triton") and find_spec(
    "tensorflow"
):  # whose libraries end a process that loads both
    pytest.skip(
        "PyTorch with Triton, beside TensorFlow", allow_module_level=True
    )
pytest.importorskip("torch")

from stepcheck.values import Reason

HOME = Path(__file__).parent
LOOPS = "right", "other weights"


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What each of two processes has of each loop."""
    out = tmp_path_factory.mktemp("processes") / "told"
    subprocess.run(
        [sys.executable, "two_processes.py", out],
        cwd=HOME,
        check=True,
        timeout=200,
    )
    return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(2)]


def reasons(report):
    return [each["reason"] for each in report["unjudged"]]


def test_each_process_trains_the_same_bits(told):
    same = [
        {
            name: report["is_same"]
            for name, report in each.items()
            if "is_same" in report
        }
        for each in told
    ]
    assert same == [dict.fromkeys(LOOPS, True)] * 2


def test_process_0_judges_the_loop_of_all(told):
    report = told[0]["right"]
    assert report["is_right"]
    assert (report["updates"], report["batches"]) == (18, 18)
    assert [name for name, each in told[0].items() if each["failures"]] == []


def test_the_others_say_where_the_report_is(told):
    here = "This is process 1 of 2: process 0 judges the loop of all, and has the report."
    others = [told[1][name] for name in (*LOOPS, "ended")]
    expected = {"elsewhere": here, "found": 0, "required": None}
    assert [report | expected for report in others] == others


def test_processes_that_begin_with_other_weights_are_not_judged(told):
    report = told[0]["other weights"]
    assert reasons(report)[0] == Reason.PROCESSES_APART.name.lower()
    assert (report["findings"], report["judged"]) == ([], [])


@pytest.mark.parametrize("name", ["watched by one", "ended"])
def test_a_record_that_is_missing_is_a_reason(told, name):
    report = told[0][name]
    assert reasons(report)[0] == Reason.PROCESS_MISSING.name.lower()
    assert (report["findings"], report["judged"]) == ([], [])
