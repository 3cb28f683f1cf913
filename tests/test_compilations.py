"""What is told while programs are compiled, by a clock that the test holds."""

import warnings

import numpy as np
import pytest
from small import X, Y, model

import wholestep as ws
from wholestep.data.block import Batch
from wholestep.reports.compilations import Compilations


class Timer:
    """A `threading.Timer` that has rung when it starts, or never rings; `log` notes what is done with it."""

    def __init__(self, log, rings):
        self.log, self.rings = log, rings

    def __call__(self, seconds, function):
        self.log.append(seconds)
        self.function = function
        return self

    def start(self):
        if self.rings:
            self.function()

    def cancel(self):
        self.log.append("cancel")

    def join(self):
        self.log.append("join")


def batch(length, rows=4, *, is_ready=True):
    ids = None if is_ready else np.arange(rows)
    host = (np.zeros((rows, length), "float32"), np.zeros((rows,), "int32"))
    return Batch(host, None, np.arange(rows, dtype=np.int32), rows, ids, None, (0, 0), (0, 1))


def see(compilations, *batches, num_shapes=0):
    known = set()
    for each in batches:
        compilations.num_batches += 1
        if each.host[0].shape not in known:
            with compilations.watched(each, num_shapes):
                known.add(each.host[0].shape)


def test_a_line_is_told_where_compiling_takes_long():
    log, told = [], []
    see(Compilations(Timer(log, True), told.append), batch(7), batch(7), batch(9), num_shapes=7)
    assert told == [
        "wholestep: compiling shape 1 of 7 (batch[0] (4, 7), batch[1] (4,)), for more than 2 seconds so far",
        "wholestep: compiling shape 2 of 7 (batch[0] (4, 9), batch[1] (4,)), for more than 2 seconds so far",
    ]
    assert log == [2.0, "cancel", "join"] * 2  # no thread is left


def test_nothing_is_told_where_it_is_quick_or_quiet():
    told = []
    see(Compilations(Timer([], False), told.append), batch(7))
    quiet = Compilations(Timer([], True), told.append)
    quiet.is_quiet = True
    see(quiet, batch(7))
    assert told == []


def test_the_number_of_shapes_is_told_only_if_it_is_known():
    told = []
    see(Compilations(Timer([], True), told.append), batch(7))
    assert "shape 1 (" in told[0]


def test_ever_new_shapes_are_warned_of_once_by_name():
    compilations = Compilations(Timer([], False))
    with pytest.warns(UserWarning, match=r"5 shapes in 6 batches: batch\[0\] \(4, 1\), .*\(4, 5\)\. Try: pad") as seen:
        see(compilations, *[batch(length) for length in (1, 1, 2, 3, 4, 5, 6, 7)])
    assert len(seen) == 1
    assert "tokens=" in str(seen[0].message)
    assert "batch[1]" not in str(seen[0].message)


def test_a_few_shapes_that_come_again_and_those_of_a_plan_are_no_reason_to_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        see(Compilations(Timer([], False)), *[batch(length) for length in [1, 2, 3, 4] * 3 + [5, 6]])
        see(Compilations(Timer([], False)), *[batch(length, is_ready=False) for length in range(1, 9)])


@pytest.mark.parametrize("how", ["fit", "evaluate"])
def test_a_stream_whose_batches_have_ever_new_shapes(how):
    stream = [(X[:rows], Y[:rows]) for rows in (2, 3, 4, 5, 6, 7)]
    with pytest.warns(UserWarning, match=r"5 shapes in 5 batches: batch\[0\] \(2, 6\), \(3, 6\)") as seen:
        getattr(ws.Trainer(model()), how)(iter(stream), verbose=0)
    assert len([w for w in seen if "few shapes" in str(w.message)]) == 1


def test_verbose_decides_whether_the_line_is_told():
    trainer = ws.Trainer(model())
    for verbose, is_quiet in ((0, True), (2, False)):
        trainer.evaluate(X, Y, verbose=verbose)
        assert trainer.executor.compilations.is_quiet is is_quiet
        assert trainer.executor.evaluation.compilations.is_quiet is is_quiet
