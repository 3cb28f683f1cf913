"""Messages while programs are compiled, by the test's clock."""

import io
import re
import sys
import time
import warnings

import keras
import numpy as np
import pytest
from shares import share
from small import X, Y, model

import wholestep as ws
from wholestep import engines
from wholestep.callbacks import CallbackRunner
from wholestep.data.block import Batch
from wholestep.reports.compile_notices import Compilations, ProgbarLogger


class Timer:
    """A `threading.Timer` that rings when it starts, or never; `log` records the calls."""

    def __init__(self, log, rings):
        self.log = log
        self.rings = rings

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


def test_a_long_compilation_prints_a_line():
    log = []
    lines = []
    clock = iter([0.0, 3.21, 5.0, 5.4, 6.0, 8.0])  # before and after each compilation
    compilations = Compilations(Timer(log, True), lines.append, lambda: next(clock))
    see(compilations, batch(7), batch(7), batch(9), batch(8), num_shapes=7)
    assert lines == [
        "wholestep: compiling shape 1 of 7 (batch[0] (4, 7), batch[1] (4,)), for more than 2 "
        "seconds so far",
        "wholestep: compiling shape 2 of 7 (batch[0] (4, 9), batch[1] (4,)), for more than 2 "
        "seconds so far; the last one took 3.2 s",
        "wholestep: compiling shape 3 of 7 (batch[0] (4, 8), batch[1] (4,)), for more than 2 "
        "seconds so far",
    ]
    assert log == [2.0, "cancel", "join"] * 3  # no thread is left


def test_a_line_begins_below_the_bar_of_keras(capsys):
    bar = keras.callbacks.ProgbarLogger()
    bar.set_params({"verbose": 1, "epochs": 2, "steps": None})
    bar.on_epoch_begin(0)
    compilations = Compilations(Timer([], True), print)
    with compilations.shown_by(bar):
        for i in range(2):
            see(compilations, batch(7 + 2 * i), batch(8 + 2 * i))
            bar.on_train_batch_end(i, {"loss": 1.0})
            bar.progbar._last_update = 0
    text = re.sub(r"\x1b\[\d+m|[\x08\r]", "", capsys.readouterr().out)
    starts = [line.split()[0] for line in text.splitlines()]
    assert starts == [
        "Epoch",
        "wholestep:",
        "wholestep:",
        "1/Unknown",
        "wholestep:",
        "wholestep:",
        "2/Unknown",
    ]


@pytest.mark.parametrize("call", ["fit", "evaluate", "predict"])
def test_a_line_begins_below_the_bar_in_each_call(call, monkeypatch, capsys):
    monkeypatch.setattr(
        sys.modules["keras.src.utils.progbar"].Progbar, "update", lambda bar, *_, **__: show(bar)
    )
    monkeypatch.setattr(
        Compilations.__init__, "__defaults__", (Timer([], True), print, time.perf_counter)
    )

    def show(bar):
        print("bar", end="")
        bar._prev_total_width = 3

    x = [(X[:num], Y[:num]) for num in (5, 6, 7)]
    getattr(ws.Trainer(model()), call)(
        iter(x if call != "predict" else [each[:1] for each in x]), verbose=1
    )
    assert "barwholestep:" not in capsys.readouterr().out


def test_a_quick_or_quiet_compilation_prints_nothing():
    lines = []
    see(Compilations(Timer([], False), lines.append), batch(7))
    quiet = Compilations(Timer([], True), lines.append)
    quiet.is_quiet = True
    see(quiet, batch(7))
    assert lines == []


def test_the_number_of_shapes_is_printed_only_if_it_is_known():
    lines = []
    see(Compilations(Timer([], True), lines.append), batch(7))
    assert "shape 1 (" in lines[0]


def test_ever_new_shapes_are_named_in_one_warning():
    compilations = Compilations(Timer([], False))
    with pytest.warns(
        UserWarning, match=r"5 shapes in 6 batches: batch\[0\] \(4, 1\), .*\(4, 5\)\. Try: pad"
    ) as seen:
        see(compilations, *[batch(length) for length in (1, 1, 2, 3, 4, 5, 6, 7)])
    assert len(seen) == 1
    assert "tokens=" in str(seen[0].message)
    assert "batch[1]" not in str(seen[0].message)


def test_a_few_shapes_that_come_again_and_those_of_a_plan_are_no_reason_to_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        see(
            Compilations(Timer([], False)), *[batch(length) for length in [1, 2, 3, 4] * 3 + [5, 6]]
        )
        see(
            Compilations(Timer([], False)),
            *[batch(length, is_ready=False) for length in range(1, 9)],
        )


@pytest.mark.parametrize("how", ["fit", "evaluate"])
@pytest.mark.slow
def test_a_stream_whose_batches_have_ever_new_shapes(how):
    stream = [(X[:rows], Y[:rows]) for rows in (2, 3, 4, 5, 6, 7)]
    with pytest.warns(
        UserWarning, match=r"5 shapes in 5 batches: batch\[0\] \(2, 6\), \(3, 6\)"
    ) as seen:
        getattr(ws.Trainer(model()), how)(iter(stream), verbose=0)
    assert len([w for w in seen if "few shapes" in str(w.message)]) == 1


@pytest.fixture
def are_quiet(monkeypatch):
    """Return a list of booleans, one for each compilation: whether its line is off."""
    seen = []
    watched = Compilations.watched

    def noting(compilations, *given):
        seen.append(compilations.is_quiet)
        return watched(compilations, *given)

    monkeypatch.setattr(Compilations, "watched", noting)
    return seen


def test_verbose_decides_whether_the_line_is_printed(are_quiet):
    trainer = ws.Trainer(model())
    for size, verbose in ((5, 0), (4, 2), (10, 0)):
        trainer.evaluate(X, Y, batch_size=size, verbose=verbose)
        trainer.fit(X, Y, batch_size=size, verbose=verbose)
    assert are_quiet == [True, True, False, False, True, True]


def evaluate_in_vain(trainer, verbose):
    def fails(batch, logs):
        raise ValueError("a callback")

    look = keras.callbacks.LambdaCallback(on_test_batch_end=fails)
    with pytest.raises(ValueError, match="a callback"):
        trainer.evaluate(X, Y, verbose=verbose, callbacks=[look])


INNER = {
    "evaluate": lambda trainer, verbose: trainer.evaluate(X, Y, verbose=verbose),
    "predict": lambda trainer, verbose: trainer.predict(X, verbose=verbose),
    "test_on_batch": lambda trainer, verbose: trainer.test_on_batch(X, Y),
    "an error": evaluate_in_vain,
}


@pytest.mark.parametrize("outer", ["fit", "steps"])
@pytest.mark.parametrize("name", share(INNER))
@pytest.mark.slow
def test_a_quiet_call_in_another_call_leaves_that_as_it_was(name, outer, are_quiet):
    trainer = ws.Trainer(model())
    inner = INNER[name]
    data = [(X[:rows], Y[:rows]) for rows in (4, 5, 6)]
    look = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: inner(trainer, 0))
    if outer == "fit":
        trainer.fit(iter(data), verbose=2, callbacks=[look])
    else:
        for _ in trainer.steps(iter(data)):
            inner(trainer, 0)
    assert are_quiet == [False, True, False, False]
    inner(trainer, 0)
    trainer.update((X[:3], Y[:3]))
    assert not are_quiet[-1]


def test_a_loud_call_in_a_quiet_one_leaves_it_quiet(are_quiet):
    trainer = ws.Trainer(model())
    data = [(X[:rows], Y[:rows]) for rows in (4, 5)]
    look = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: trainer.evaluate(X, Y, verbose=2)
    )
    trainer.fit(iter(data), verbose=0, callbacks=[look])
    assert are_quiet == [True, False, True]


# ---- the progress bar ----


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def lines(self):
        """Return the lines that were shown, one after the other, without colours."""
        text = re.sub(r"\x1b\[\d+m|\x08", "", self.getvalue())
        return [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()]


def terminal(monkeypatch):
    """Return a terminal to which the test prints from here on."""
    monkeypatch.setattr(sys, "stdout", Terminal())
    return sys.stdout


def test_the_bar_shows_reasons_of_waits_and_rows_per_second(monkeypatch):
    shown = terminal(monkeypatch)
    ws.Trainer(model()).fit(X, Y, batch_size=5, epochs=3, validation_data=(X, Y))
    first, second, _ = re.split(
        r"^Epoch 2/3$|^Epoch 3/3 - \d+s left$", "\n".join(shown.lines()), flags=re.M
    )
    waits = [
        "reading the first batch",
        "tracing the model",
        "compiling shape 1 (batch[0] (5, 6), batch[1] (5,))",
    ]
    assert first.splitlines()[:5] == ["Epoch 1/3", *waits, "running the program"]
    assert re.search(r"^4/4 .* [\d,]+ rows/s - accuracy: .* - val_loss: ", first, re.M)
    assert "compiling" not in second


@pytest.mark.parametrize("verbose", [0, 2])
def test_other_verbosities_are_keras_own(monkeypatch, verbose):
    shown = terminal(monkeypatch)
    ws.Trainer(model()).fit(X, Y, batch_size=5, epochs=2, verbose=verbose)
    assert len(shown.lines()) == 2 * verbose
    assert "rows/s" not in shown.getvalue()


def test_output_that_is_no_terminal_is_keras_own(capsys, monkeypatch):
    monkeypatch.setattr(sys.modules["keras.src.utils.progbar"].time, "time", lambda: 0.0)
    shown = []
    for fits in (ws.Trainer(model()), model()):
        fits.fit(X, Y, batch_size=5, epochs=2, shuffle=False)
        shown.append(re.sub(r"\d+(us|ms|s)\b|: [\d.e-]+", "", capsys.readouterr().out))
    assert shown[0] == shown[1]


def test_the_bar_reads_no_state_and_a_bar_of_the_user_stays(monkeypatch):
    terminal(monkeypatch)

    def watch(*callbacks, gather=list):
        how = {
            "verbose": "auto",
            "epochs": 1,
            "steps": 4,
            "history": True,
            "engine": engines.choose(),
        }
        return CallbackRunner(model(), gather(callbacks), **how)

    assert isinstance(watch().bar, ProgbarLogger)
    assert not watch().needs_state
    assert not watch().has_hooks  # once for each dispatch
    assert watch(keras.callbacks.TerminateOnNaN()).has_hooks
    assert not watch().has_test_hooks
    assert watch().unknown == []
    for gather in (list, lambda callbacks: [list(callbacks)], lambda callbacks: callbacks[0]):
        assert watch(keras.callbacks.ProgbarLogger(), gather=gather).bar is None
        assert watch(keras.callbacks.EarlyStopping("loss"), gather=gather).bar is not None


def test_a_rate_leaves_out_the_dispatch_that_was_compiled():
    class Sent:
        def row_counts(self, num):
            return np.full(num, 10)

    times = iter([100.0, 110.0, 111.0, 115.0])
    bar = ProgbarLogger(clock=lambda: next(times))
    bar.set_params({"verbose": 1, "epochs": 1, "steps": 50})
    bar.on_epoch_begin(0)
    bar.note(Sent(), 1)
    assert bar.progbar.pace.tolist() == [0.1, 1.0]
    bar.note(Sent(), 2)
    bar.note(Sent(), 18)
    assert bar.progbar.pace.tolist() == [4.0, 40.0]


def test_a_wait_replaces_a_longer_line_and_is_replaced(monkeypatch):
    shown = terminal(monkeypatch)
    bar = ProgbarLogger()
    bar.set_params({"verbose": 1, "epochs": 1, "steps": 3})
    bar.on_epoch_begin(0)
    bar.wait("compiling " + "x" * 500)
    bar.wait("running")
    last = shown.getvalue().split("\r")[-2]
    width = bar.progbar._prev_total_width
    assert last == "running".ljust(width)
    assert width < 500
