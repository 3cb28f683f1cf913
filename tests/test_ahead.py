"""A thread draws ahead from what takes long, and from nothing else; it ends with its loop and with the script."""

import subprocess
import sys
import threading

import pytest
from scripts import lean
from small import X, Y, model

import wholestep as ws
from wholestep.data import ahead
from wholestep.data.ahead import Ahead


def threads():
    return [t for t in threading.enumerate() if t.name == "wholestep-feed"]


@pytest.fixture
def slow(monkeypatch):
    """Let every iterator count as one that takes long."""
    monkeypatch.setattr(ahead, "_LONG", 0.0)


def test_what_is_quick_needs_no_thread():
    seen = []
    for item in Ahead(iter(range(9))):
        seen.append(item)
        assert not threads()
    assert seen == list(range(9))


def test_what_takes_long_is_drawn_by_a_thread_in_order(slow):
    drawn = Ahead(iter(range(99)))
    seen, alive = [], []
    for item in drawn:
        seen.append(item)
        alive.append(len(threads()))
    assert seen == list(range(99))
    assert alive[:5] == [0, 0, 0, 0, 1]
    drawn.close()
    assert not threads()


def test_what_was_drawn_and_not_used_comes_back(slow):
    source = iter(range(99))
    drawn, seen = Ahead(source), []
    for item in drawn:
        seen.append(item)
        if item == 6:
            break
    assert [*seen, *drawn.close(), *source] == list(range(99))
    assert not threads()


@pytest.mark.parametrize("after", [2, 7])
def test_an_error_comes_where_its_item_would_have(slow, after):
    def broken():
        yield from range(after)
        raise OSError("the disk is gone")

    drawn = Ahead(broken())
    items = iter(drawn)
    assert [next(items) for _ in range(after)] == list(range(after))
    with pytest.raises(OSError, match="the disk is gone"):
        next(items)
    drawn.close()
    assert not threads()


class Items:
    """Rows that note which thread asked for them."""

    def __init__(self):
        self.asked = []

    def __len__(self):
        return 24

    def __getitem__(self, i):
        self.asked.append(threading.current_thread().name)
        return X[i % len(X)], Y[i % len(Y)]


def test_rows_that_take_long_are_loaded_by_a_thread_and_none_is_lost(slow):
    items, numbers = Items(), []
    trainer, batches = ws.Trainer(model()), ws.Batches(items, 2)
    while len(numbers) < 12:
        for step in trainer.steps(batches):
            numbers.append(step.batch)
            if len(numbers) % 7 == 0:
                break
    assert numbers == list(range(12))
    assert "wholestep-feed" in items.asked
    assert not threads()


def test_a_generator_stays_in_the_thread_of_its_loop(slow):
    """It may hold what belongs to a thread, and a thread that is in it cannot be interrupted."""
    asked = []

    def stream():
        for _ in range(9):
            asked.append(threading.current_thread())
            yield X, Y

    ws.Trainer(model()).fit(stream(), verbose=0)
    assert set(asked) == {threading.main_thread()}


LEFT = """
import atexit, threading
import keras, numpy as np, wholestep as ws
from wholestep.data import ahead

ahead._LONG = 0.0
names = lambda: [thread.name for thread in threading.enumerate()]
atexit.register(lambda: print("wholestep-feed" in names()))
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
steps = ws.Trainer(model).steps(ws.Batches([(np.ones(2), np.ones(1))] * 30, 3))
for _ in range(6):
    next(steps)
print("wholestep-feed" in names())
"""


def test_no_thread_is_left_when_a_script_ends_inside_a_loop():
    ended = subprocess.run([sys.executable, "-c", LEFT], env=lean(), capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stdout) == (0, "True\nFalse\n"), ended.stderr
