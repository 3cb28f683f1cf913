"""An interrupt leaves the weights after a whole update, and the data at the next batch."""

import contextlib
import signal
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from runs import steps_in
from shares import later, share
from small import X, Y, model

import wholestep as ws
from wholestep import safety as interrupts
from wholestep.plan import Planner
from wholestep.safety import Terminated, end_when_terminated, uninterrupted


def test_threads_and_absent_handlers_are_left_alone(monkeypatch):
    before = signal.getsignal(signal.SIGINT)
    during = []

    def look():
        with uninterrupted():
            during.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert during == [before]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        look()
    finally:
        signal.signal(signal.SIGINT, before)
    assert during == [before, signal.SIG_IGN]


def test_a_sigterm_that_comes_while_garbage_is_collected_is_not_lost(monkeypatch):
    """Python reports exceptions there as unraisable, and continues."""
    told = []

    class Garbage:
        def __init__(self, error=None):
            self.error = error

        def __del__(self):
            if self.error is None:
                signal.raise_signal(signal.SIGTERM)
            else:
                raise self.error

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    try:
        end_when_terminated()
        Garbage(ValueError("another"))
        assert [str(lost.exc_value) for lost in told] == ["another"]
        with pytest.raises(Terminated):  # noqa: PT012 - where in here it comes, nobody can say
            Garbage()
            for _ in range(200):
                time.sleep(0.01)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(told) == 1


def test_the_first_sigterm_ends_a_run_between_two_updates():
    before = signal.getsignal(signal.SIGTERM)
    done = []

    def update():
        with uninterrupted():
            signal.raise_signal(signal.SIGTERM)
            done.append("update")

    try:
        end_when_terminated()
        with pytest.raises(Terminated):
            update()
        signal.raise_signal(signal.SIGTERM)  # while it ends, it is not to be ended again
    finally:
        signal.signal(signal.SIGTERM, before)
    assert done == ["update"]


class Items:
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i], self.rows[i][:1]


def test_an_interrupt_inside_of_a_generator_does_not_end_the_generator():
    made = model()
    drawn = []
    again = []

    def stream():
        for i in range(8):
            drawn.append(i)
            if i == 3:
                signal.raise_signal(signal.SIGINT)
            yield X, Y

    trainer = ws.Trainer(made)
    data = ws.Batches(stream())
    with pytest.raises(KeyboardInterrupt):
        again.extend(step.batch for step in trainer.steps(data))
    again.extend(step.batch for step in trainer.steps(data))
    assert drawn == again == list(range(8))


def test_an_interrupt_says_where_the_next_run_resumes(tmp_path, capsys):
    def fit_until(last):
        trainer = ws.Trainer(model())
        kept = ws.Checkpoints(tmp_path / "run", every_steps=2)

        def stop(batch, logs=None):
            if trainer.run.number == last:
                raise KeyboardInterrupt

        look = keras.callbacks.LambdaCallback(on_train_batch_end=stop)
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(X, Y, batch_size=5, epochs=2, verbose=0, checkpoints=kept, callbacks=[look])
        return capsys.readouterr().err

    first = fit_until(1)
    second = fit_until(3)
    assert f"Interrupted after update 1. {tmp_path / 'run'} has no checkpoint yet" in first
    assert (
        f"Interrupted after update 3. The newest checkpoint in {tmp_path / 'run'} is that of "
        "update 2"
    ) in second


@pytest.mark.parametrize(
    "numbers", [(signal.SIGINT, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT)]
)
def test_each_signal_of_a_block_is_delivered(numbers):
    def receive():
        with uninterrupted():
            for number in numbers:
                signal.raise_signal(number)

    with interrupts.Termination() as termination, pytest.raises(KeyboardInterrupt):
        receive()
    assert termination.has_come


def test_a_second_interrupt_need_not_wait():
    seen = []

    def look():
        with uninterrupted(twice=False):
            signal.raise_signal(signal.SIGINT)
            seen.append("held")
            signal.raise_signal(signal.SIGINT)
            seen.append("too late")

    with pytest.raises(KeyboardInterrupt):
        look()
    assert seen == ["held"]


def test_a_second_signal_may_come_while_the_first_is_being_held_back(monkeypatch):
    start = threading.Timer.start

    def start_late(timer):
        signal.raise_signal(signal.SIGINT)
        start(timer)

    came = []
    before = signal.signal(signal.SIGINT, lambda *_: came.append("interrupt"))
    monkeypatch.setattr(threading.Timer, "start", start_late)
    monkeypatch.setattr(interrupts, "_ONE", 0.05)
    with interrupts.waiting():
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.2)
    signal.signal(signal.SIGINT, before)
    assert came == ["interrupt"]


def interrupted_at_line(n, num, block):
    """Raise signals before the n-th line of the context that holds signals back; whether it has so
    many lines.
    """
    lines = 0

    def enter(frame, event, _):
        nonlocal lines
        if frame.f_code.co_filename != interrupts.__file__ or frame.f_code.co_name not in vars(
            interrupts._Held
        ):
            return None
        lines += 1
        if lines == n:
            for _ in range(num):
                signal.raise_signal(signal.SIGINT)
        return enter

    sys.settrace(enter)
    try:
        block()
    finally:
        sys.settrace(None)
    return lines >= n


@pytest.mark.parametrize("twice", [True, False])
@pytest.mark.parametrize("num", [1, 2])
def test_interrupts_at_any_line_of_what_holds_them_back_are_raised_and_leave_the_handlers(
    num, twice
):
    def block():
        with uninterrupted(twice=twice):
            pass

    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    n = 1
    while True:
        try:
            assert not interrupted_at_line(n, num, block)
            break
        except KeyboardInterrupt:
            assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
        n += 1
    assert n > 15


def test_an_interrupt_is_not_lost_after_a_sigterm_that_raised_while_handlers_were_restored(
    monkeypatch,
):
    def raises(number, handler):
        seen.append(number)
        set_handler(number, handler)
        if len(seen) == 3:  # the first that is restored
            raise Terminated("SIGTERM came")

    seen = []
    set_handler = signal.signal
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    with monkeypatch.context() as patch:
        fake = SimpleNamespace(signal=raises, getsignal=signal.getsignal)
        patch.setattr(interrupts, "_signals", fake)
        with pytest.raises(Terminated), uninterrupted():
            pass
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGTERM, before)


def intercept(patch, changed):
    """Let the planner give every program as `changed` makes it."""
    program = Planner.program
    known = Planner.known
    patch.setattr(Planner, "program", lambda *given: changed(program(*given)))
    patch.setattr(
        Planner,
        "known",
        lambda *given: None if (found := known(*given)) is None else changed(found),
    )


def interrupted_at(call, when, monkeypatch):
    """Interrupt at the third dispatch, before or after its program; return what `when` says of the
    program's call.
    """
    calls = []

    def with_interrupts(found):
        def interrupting(*values):
            calls.append(values)
            if when == "before" and len(calls) == 3:
                signal.raise_signal(signal.SIGINT)
            results = found.call(*values)
            if when == "after" and len(calls) == 3:
                signal.raise_signal(signal.SIGINT)
            return results

        if when == "planning" and len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        return replace(found, call=interrupting)

    with monkeypatch.context() as patch:
        intercept(patch, with_interrupts)
        with pytest.raises(KeyboardInterrupt):
            call()


KINDS = ("fit", "watched", "steps", "stream")
MOMENTS = ("planning", "before", "after")


@pytest.mark.parametrize(
    ("kind", "when"),
    share((kind, MOMENTS[(i + j) % 3]) for i, kind in enumerate(KINDS) for j in range(3)),
)
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(kind, when, monkeypatch):
    rows = np.random.default_rng(0).integers(-3, 4, (48, 4)).astype("float32")

    def start():
        keras.utils.clear_session()
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        )
        model.compile(keras.optimizers.Adam(0.125), "mse")
        stream = ((part, part[:, :1]) for part in np.split(rows, 6))
        return model, ws.Batches(stream) if kind == "stream" else ws.Batches(Items(rows), 8, seed=3)

    def run(trainer, batches):
        look = (
            [keras.callbacks.LambdaCallback(on_train_batch_end=lambda *_, **__: None)]
            if kind == "watched"
            else []
        )
        if kind == "steps":
            for _ in trainer.steps(batches):
                pass
        else:
            trainer.fit(batches, verbose=0, callbacks=look)

    model, batches = start()
    run(ws.Trainer(model), batches)
    expected = [v.numpy() for v in [*model.variables, *model.optimizer.variables]]
    model, batches = start()
    trainer = ws.Trainer(model)
    interrupted_at(lambda: run(trainer, batches), when, monkeypatch)
    assert (
        int(model.optimizer.iterations.numpy())
        == batches.position[1]
        == (2 if when == "planning" else 3)
    )
    assert all(np.isfinite(v.numpy()).all() for v in model.variables)
    run(trainer, batches)
    for value, known in zip([*model.variables, *model.optimizer.variables], expected, strict=True):
        np.testing.assert_array_equal(value.numpy(), known)


class Again:
    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


def test_a_fit_that_is_interrupted_in_the_last_update_of_a_stream_goes_on_with_the_next_epoch(
    monkeypatch,
):
    x = np.ones((4, 4), "float32")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    batches = ws.Batches(Again([(x, x[:, :1])] * 3))
    trainer = ws.Trainer(model)
    interrupted_at(lambda: trainer.fit(batches, verbose=0), "after", monkeypatch)
    assert batches.position == (0, 3)
    trainer.fit(batches, verbose=0)
    assert (batches.position, int(model.optimizer.iterations.numpy())) == ((2, 0), 6)


def unbuilt():
    """Return a model of which nothing is built, with an optimizer that has slots."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    layers = [
        keras.layers.Dense(8, "relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(4),
    ]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model


@pytest.mark.parametrize("where", share(["optimizer", "layer"]))
def test_what_an_interrupt_finds_half_built_is_built_to_the_end(where, monkeypatch):
    kind, name = {"optimizer": (keras.optimizers.Optimizer, "add_variable_from_reference")}.get(
        where, (keras.layers.Layer, "add_weight")
    )
    made = []
    add = getattr(kind, name)

    def interrupted(*arguments, **options):
        made.append(name)
        if len(made) == 2:
            signal.raise_signal(signal.SIGINT)
        return add(*arguments, **options)

    trainer = ws.Trainer(unbuilt())
    monkeypatch.setattr(kind, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(X, Y, batch_size=10, verbose=0)
    trainer.fit(X, Y, batch_size=10, verbose=0)
    assert int(trainer.model.optimizer.iterations) == 2


@pytest.mark.parametrize("num", [2, *later([200])])
def test_a_trainer_trains_on_after_an_interrupt_at_any_time(num):
    """Ctrl-C at random times of a short fit: while variables are made, programs compiled, data
    drawn, numbers read.
    """
    how = {"batch_size": 5, "epochs": 2, "verbose": 0}
    rng = np.random.default_rng(num)
    look = keras.callbacks.LambdaCallback(on_train_batch_end=lambda *_, **__: None)
    kinds = [{}, {"validation_data": (X, Y)}, {"callbacks": [look]}]
    for _ in range(2):  # the first takes longer than those that are interrupted
        begin = time.perf_counter()
        ws.Trainer(unbuilt()).fit(X, Y, **how)
        seconds = time.perf_counter() - begin
    for i in range(num):
        trainer = ws.Trainer(unbuilt())
        main = threading.main_thread().ident
        stop = threading.Timer(rng.uniform(0, seconds), signal.pthread_kill, (main, signal.SIGINT))
        with contextlib.suppress(KeyboardInterrupt):
            try:
                stop.start()
                trainer.fit(X, Y, **how, **kinds[i % 3])
            finally:
                stop.join()
        optimizer = trainer.model.optimizer
        before = int(optimizer.iterations)
        history = trainer.fit(X, Y, **how).history
        assert np.isfinite(history["loss"]).all()
        assert int(optimizer.iterations) - before == 8


@pytest.mark.parametrize("call", share(["fit", "evaluate"]))
def test_an_interrupt_waits_until_a_model_is_traced(call):
    """Keras and TensorFlow may be left half way by one that comes while they trace: their state is
    global.
    """
    traces = []
    whole = []

    def run(at):
        keras.utils.clear_session()
        traces.clear()
        whole.clear()

        def body(x):
            traces.append(x)
            if len(traces) == at:
                signal.raise_signal(signal.SIGINT)
                whole.append(at)
            return x

        made = keras.Sequential(
            [keras.Input((X.shape[1],)), keras.layers.Lambda(body), keras.layers.Dense(1)]
        )
        made.compile("sgd", "mse")
        trainer = ws.Trainer(made)
        return partial(
            {"fit": trainer.fit, "evaluate": trainer.evaluate}[call], X, X[:, :1], verbose=0
        )

    run(0)()
    num = len(traces)
    assert num > 1
    for at in range(2, num + 1):  # the first is Keras' own, of symbols
        again = run(at)
        with pytest.raises(KeyboardInterrupt):
            again()
        assert whole == [at]
        again()


class Blocks(keras.utils.PyDataset):
    """Waits for a batch for long; a signal comes when the updates before it, but for one, are
    reported.
    """

    def __init__(self, number, at=3, **how):
        super().__init__(**how)
        self.number = number
        self.at = at
        self.told = []

    def __len__(self):
        return 8

    def __getitem__(self, i):
        if i == self.at:
            threading.Thread(target=self.send).start()
            threading.Event().wait(20)
        return X, Y

    def send(self):
        while len(self.told) < self.at - 1:
            time.sleep(0.01)
        time.sleep(0.05)
        signal.pthread_kill(threading.main_thread().ident, self.number)

    def one_by_one(self):
        yield from map(self.__getitem__, range(8))


BLOCKED = {  # how it is trained: arguments of the data set
    "generator": {},
    "first batch": {"at": 0},
    "data set": {},
    "workers": {"workers": 2},
    "steps": {},
}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("how", share(BLOCKED))
def test_a_source_that_blocks_holds_a_signal_back_for_a_moment_only(
    how, number, tmp_path, monkeypatch
):
    monkeypatch.setattr(interrupts, "_ONE", 0.1)
    data = Blocks(number, **BLOCKED[how])
    look = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: data.told.append(batch)
    )
    trainer = ws.Trainer(model())
    saves = ws.Checkpoints(tmp_path, every_steps=100)

    def train():
        if how == "steps":
            data.told.extend(
                step.batch
                for step in trainer.steps(ws.Batches(data, shuffle=False), checkpoints=saves)
            )
        else:
            x = data if how in ("data set", "workers") else data.one_by_one()
            trainer.fit(x, shuffle=False, verbose=0, callbacks=[look], checkpoints=saves)

    since = time.monotonic()
    with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else interrupts.Ended):
        train()
    assert time.monotonic() - since < 10
    done = data.at
    assert int(trainer.model.optimizer.iterations) == done
    assert data.told == list(range(done))
    assert steps_in(tmp_path) == ([done] if done and number == signal.SIGTERM else [])
