"""An unread failure is printed when the script ends, or when its trainer is gone."""

import gc
import subprocess
import sys
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from scripts import lean
from small import X, Y, model

import wholestep as ws
from wholestep.reports import update_ledger
from wholestep.run import Run

BAD = np.full_like(X, np.nan)


class Ledger:
    def __init__(self, error=None):
        self.error = error

    def raise_pending_failure(self, run):
        if self.error is not None:
            raise self.error


@pytest.fixture
def hooks(monkeypatch):
    """The functions that run when the script ends."""
    # the executors of other tests, which would take back hooks that are not known here
    gc.collect()
    gc.freeze()  # and are not looked through again
    known = []
    monkeypatch.setattr(
        update_ledger, "atexit", SimpleNamespace(register=known.append, unregister=known.remove)
    )
    return known


def report(applied):
    return np.array([[0.5, 0.7, applied]], "float32")


def said(capsys):
    """Return the printed lines about updates, without those about long compilations."""
    return [
        line for line in capsys.readouterr().err.splitlines() if not line.startswith("wholestep: ")
    ]


@pytest.mark.slow
def test_a_failed_last_update_is_printed_when_the_script_ends_unless_it_was_raised(hooks, capsys):
    trainer = ws.Trainer(model(optimizer="sgd"))
    trainer.update((X, Y))
    hooks[0]()
    assert said(capsys) == []
    logs = trainer.update((BAD, Y))
    hooks[0]()
    (line,) = said(capsys)
    assert line.startswith(
        "NonFiniteError: Update 2 must have a finite loss and gradient. It was not applied; "
    )
    assert "the loss is not finite in rows 0, 1, 2" in line
    with pytest.raises(ws.NonFiniteError, match="Update 2 "):
        logs["loss"]
    with pytest.raises(ws.NonFiniteError, match="Update 2 "):
        dict(trainer.update((BAD, Y)))
    hooks[0]()
    assert len(hooks) == 1
    assert said(capsys) == []


@pytest.mark.parametrize("on_nonfinite", ["raise", "skip"])
def test_the_failure_of_a_trainer_that_is_gone_is_printed_and_the_trainer_not_kept_alive(
    hooks, capsys, on_nonfinite
):
    trainer = ws.Trainer(model(optimizer="sgd"), on_nonfinite=on_nonfinite)
    trainer.update((BAD, Y))
    executor = weakref.ref(trainer.executor)
    del trainer
    gc.collect()
    assert executor() is None
    assert hooks == []
    words = "NonFiniteError: Update 1 must have a finite loss and gradient."
    assert [line.startswith(words) for line in said(capsys)] == [True] * (on_nonfinite == "raise")


@pytest.mark.parametrize(
    ("last", "text"), [(None, ""), (report(1), ""), (report(0), "Update 3 must"), ("?", "")]
)
def test_the_failure_of_a_ledger_that_is_gone_is_printed_once(hooks, capsys, last, text):
    ledger = Ledger()
    update_ledger.UnreadFailure(ledger, Run()).last = None if last is None else (3, last)
    del ledger
    gc.collect()
    assert hooks == []
    lines = said(capsys)
    assert text in "".join(lines)
    assert len(lines) == bool(text)


def test_a_forked_process_and_a_closed_stream_are_silent(hooks, capsys, monkeypatch):
    ledger = Ledger(ws.NonFiniteError("Update 3 must", 3))
    update_ledger.UnreadFailure(ledger, Run()).last = (3, report(0))
    (hook,) = hooks
    monkeypatch.setattr(update_ledger.os, "getpid", lambda: -1)
    hook()
    assert said(capsys) == []
    monkeypatch.undo()
    hook()
    assert said(capsys) == ["NonFiniteError: Update 3 must"]

    class Closed:
        def write(self, words):
            raise ValueError("closed")

    monkeypatch.setattr(update_ledger.sys, "stderr", Closed())
    hook()


SCRIPT = """
import keras, numpy as np, wholestep as ws
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
trainer = ws.Trainer(model)
x, y = np.ones((4, 3)), np.ones((4, 1))
"""
ENDS = [
    "trainer.update((x, y))",
    "steps = trainer.steps(ws.Batches((x, y), batch_size=2))\nnext(steps)",
]


@pytest.mark.parametrize("end", ENDS, ids=["an update", "an unfinished loop"])
@pytest.mark.slow
def test_a_script_ends_without_an_error_while_python_clears_its_modules(end, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT + end)
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py"], env=lean(), capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "Exception" not in done.stderr
