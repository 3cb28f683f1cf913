"""What nobody has asked for is told when the script ends, or when its trainer is gone; nothing else
is.
"""

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
from wholestep.reports import update_ledger as ending
from wholestep.run import Run

BAD = np.full_like(X, np.nan)


class Owner:
    def __init__(self, error=None):
        self.error = error

    def raise_pending_failure(self, run):
        if self.error is not None:
            raise self.error


@pytest.fixture
def hooks(monkeypatch):
    """What is to be called when the script ends."""
    # the executors of other tests, which would take back hooks that are not known here
    gc.collect()
    gc.freeze()  # and are not looked through again
    known = []
    monkeypatch.setattr(
        ending, "atexit", SimpleNamespace(register=known.append, unregister=known.remove)
    )
    return known


def report(applied):
    return np.array([[0.5, 0.7, applied]], "float32")


def said(capsys):
    """What was said of updates; not that one takes long to compile."""
    return [
        line for line in capsys.readouterr().err.splitlines() if not line.startswith("wholestep: ")
    ]


@pytest.mark.slow
def test_a_last_update_that_was_not_applied_is_told_when_the_script_ends_unless_it_was_before(
    hooks, capsys
):
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
def test_a_trainer_that_is_gone_is_told_of_and_not_kept_alive(hooks, capsys, on_nonfinite):
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
    ("last", "told"), [(None, ""), (report(1), ""), (report(0), "Update 3 must"), ("?", "")]
)
def test_an_owner_that_is_gone_is_told_of_once(hooks, capsys, last, told):
    owner = Owner()
    ending.UnreadFailure(owner, Run()).last = None if last is None else (3, last)
    del owner
    gc.collect()
    assert hooks == []
    lines = said(capsys)
    assert told in "".join(lines)
    assert len(lines) == bool(told)


def test_a_forked_process_and_a_closed_stream_are_silent(hooks, capsys, monkeypatch):
    owner = Owner(ws.NonFiniteError("Update 3 must", 3))
    ending.UnreadFailure(owner, Run()).last = (3, report(0))
    (hook,) = hooks
    monkeypatch.setattr(ending.os, "getpid", lambda: -1)
    hook()
    assert said(capsys) == []
    monkeypatch.undo()
    hook()
    assert said(capsys) == ["NonFiniteError: Update 3 must"]

    class Closed:
        def write(self, words):
            raise ValueError("closed")

    monkeypatch.setattr(ending.sys, "stderr", Closed())
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
