"""One thread and one process at a time may use a trainer; errors name the cause."""

import os
import signal
import subprocess
import sys
import threading
import warnings

import keras
import numpy as np
import pytest
from scripts import HERE, lean
from shares import halves
from small import ROWS, X, Y, model

import wholestep as ws
from wholestep import safety as guards
from wholestep.run import Run
from wholestep.setup import Setup

QUIET = {"verbose": 0, "batch_size": 10}


def elsewhere(call):
    """Run the call in another thread to its end, and return the error that it raised."""
    raised = []

    def work():
        try:
            call()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=work, name="second")
    thread.start()
    thread.join(100)
    assert not thread.is_alive()
    return raised[0] if raised else None


def test_a_trainer_takes_one_thread_at_a_time_which_may_come_in_again():
    trainer = ws.Trainer(model())
    errors = []
    inside = []
    calls = [
        lambda: trainer.fit(X, Y, **QUIET),
        lambda: trainer.evaluate(X, Y, **QUIET),
        lambda: trainer.predict(X, **QUIET),
        lambda: trainer.update((X, Y)),
        lambda: next(trainer.steps((X, Y))),
        lambda: trainer.num_skipped,
        trainer.explain,
    ]

    def look(*_):
        inside.append(trainer.evaluate(X, Y, **QUIET))
        errors.extend(elsewhere(call) for call in calls)

    trainer.fit(X, Y, **QUIET, callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=look)])
    assert len(inside) == 1
    assert int(trainer.model.optimizer.iterations.numpy()) == 2
    assert [type(error) for error in errors] == [ws.SpecificationError] * 7
    for error in errors:
        assert "thread 'second', while thread 'MainThread' is in it" in str(error)
    assert elsewhere(calls[1]) is None


def test_the_trainers_of_one_model_take_one_thread_at_a_time():
    made = model()
    errors = []
    first = ws.Trainer(made)
    second = ws.Trainer(made)

    def look(*_):
        assert second.evaluate(X, Y, **QUIET) is not None
        errors.append(elsewhere(lambda: second.predict(X, **QUIET)))
        errors.append(elsewhere(lambda: ws.Trainer(made).fit(X, Y, **QUIET)))
        errors.append(elsewhere(lambda: ws.Trainer(model()).fit(X, Y, **QUIET)))

    first.fit(X, Y, **QUIET, callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=look)])
    assert errors.pop() is None
    assert [type(error) for error in errors] == [ws.SpecificationError] * 2
    assert "One thread at a time may be in the trainers of a model" in str(errors[0])


def test_between_two_steps_another_thread_may_train():
    trainer = ws.Trainer(model())
    numbers = []
    for step in trainer.steps(ws.Batches((X, Y), 10)):
        numbers.append(step.number)
        assert elsewhere(lambda: trainer.fit(X, Y, **QUIET)) is None
    assert len(numbers) == 2
    assert int(trainer.model.optimizer.iterations.numpy()) == 6


class Meeting(ws.Objective):
    """A loss whose computation waits until another one is computed as well."""

    def __init__(self, barrier):
        self.barrier = barrier
        self.met = []

    def wait(self, outputs):
        try:
            self.met.append(self.barrier.wait(20) >= 0)
        except threading.BrokenBarrierError:
            self.met.append(False)
        return np.zeros_like(outputs)

    def __call__(self, model, batch, training):
        outputs = model(batch[0], training=training)
        return ws.Mean((outputs - 1) ** 2 + self.waited(keras.ops.stop_gradient(outputs)))

    def waited(self, outputs):
        if keras.backend.backend() == "jax":
            import jax

            return jax.pure_callback(
                self.wait, jax.ShapeDtypeStruct(outputs.shape, outputs.dtype), outputs
            )
        import tensorflow as tf

        return tf.ensure_shape(
            tf.numpy_function(self.wait, [outputs], outputs.dtype), outputs.shape
        )


def test_at_the_end_of_a_loop_no_other_thread_may_train(monkeypatch):
    trainer = ws.Trainer(model())
    errors = []
    ends = [(Setup, "finish"), (Run, "end_call")]
    for kind, name in ends:
        method = getattr(kind, name)

        def look(*given, method=method):
            errors.append(elsewhere(lambda: trainer.update((X, Y))))
            return method(*given)

        monkeypatch.setattr(kind, name, look)
    for _ in trainer.steps(ws.Batches((X, Y), 10), epochs=1):
        pass
    assert [type(error) for error in errors] == [ws.SpecificationError] * 2


def test_trainers_in_two_threads_compute_at_the_same_time():
    barrier = threading.Barrier(2)
    threads = []
    objectives = [Meeting(barrier), Meeting(barrier)]

    def train(objective):
        made = model()
        for _ in ws.Trainer(made, objective, optimizer="sgd").steps(
            ws.Batches((X, Y), ROWS), epochs=3
        ):
            made.get_weights()

    for objective in objectives:
        threads.append(threading.Thread(target=train, args=(objective,)))
        threads[-1].start()
    for thread in threads:
        thread.join(100)
    assert [objective.met for objective in objectives] == [[True] * 3] * 2


def forked(work):
    """Return what `work` says in a forked process, which ends after 20 seconds if it hangs."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=r"os\.fork\(\) was called", category=RuntimeWarning
        )
        warnings.filterwarnings("ignore", message=".*use of fork", category=DeprecationWarning)
        child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        try:
            os.write(writing, work().encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as said:
        words = said.read()
    os.waitpid(child, 0)
    return words


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_is_told_not_to_train():
    made = model()
    trainer = ws.Trainer(made)
    calls = [
        lambda: trainer.fit(X, Y, **QUIET),
        lambda: next(trainer.steps((X, Y))),
        lambda: ws.Trainer(made),
    ]

    def work():
        said = []
        for call in calls:
            with pytest.raises(ws.SpecificationError) as caught:
                call()
            said.append(str(caught.value))
        return "\n".join(said)

    words = forked(work).splitlines()
    assert len(words) == 3
    for said in words:
        assert f"forked after process {os.getpid()} had made a trainer" in said
        assert '"spawn"' in said


FORKS = """
import os, sys, warnings
import keras
import wholestep as ws
from small import X, Y, model

warnings.simplefilter("ignore")
left = []

def leave(*_, **__):
    if not left:
        left.append(os.fork())
        if left[0] == 0:
            print("in the child", flush=True)
            sys.exit(3)

trainer = ws.Trainer(model())
if sys.argv[1] == "fit":
    callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=leave)]
    trainer.fit(X, Y, batch_size=5, verbose=0, callbacks=callbacks, checkpoints=sys.argv[2])
else:
    for step in trainer.steps(ws.Batches((X, Y), 5), checkpoints=sys.argv[2]):
        leave()
_, status = os.waitpid(left[0], 0)
print("left with", os.waitstatus_to_exitcode(status), "after", trainer.run.number)
os.kill(os.getpid(), 9)  # how the parent ends is not asked
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.parametrize("call", halves(["fit", "steps"]))
@pytest.mark.slow
def test_a_forked_process_that_leaves_in_the_middle_of_a_call_ends(call, tmp_path):
    command = [sys.executable, "-c", FORKS, call, str(tmp_path / "saved")]
    with subprocess.Popen(
        command, env=lean(HERE), stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as script:
        timer = threading.Timer(100, os.killpg, (script.pid, signal.SIGKILL))
        timer.start()
        words, _ = script.communicate()
        timer.cancel()
    assert words.splitlines() == ["in the child", "left with 3 after 4"]


def test_the_first_process_with_a_trainer_is_the_one_that_may_train(monkeypatch):
    monkeypatch.setattr(guards, "_first_process", None)
    # forked from one that has imported us, and no more
    monkeypatch.setattr(os, "getpid", lambda: 7)
    guards.check_process()
    guards.check_process()
    monkeypatch.setattr(os, "getpid", lambda: 8)
    with pytest.raises(ws.SpecificationError, match="process 8, forked after process 7"):
        guards.check_process()


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("what", ["parameter", "buffer"])
def test_weights_that_are_not_finite_are_blamed_before_any_row(what, value):
    made = model(Shift())
    shift = made.layers[1].shift
    kernel = made.layers[2].kernel
    bad, good = (kernel, shift) if what == "parameter" else (shift, kernel)
    bad.assign(np.full(bad.shape, value))
    with pytest.raises(ws.NonFiniteError, match=r"Update 1 .*before this update already") as caught:
        ws.Trainer(made).fit(X, Y, **QUIET)
    assert caught.value.rows == ()
    assert bad.path in str(caught.value)
    assert good.path not in str(caught.value)


def test_a_buffer_that_is_infinite_on_purpose_is_not_blamed_for_a_row():
    made = model(Shift(hides=True))
    made.layers[1].shift.assign([-np.inf] + [0.0] * 7)
    x = np.array(X)
    x[3] = np.nan
    with pytest.raises(ws.NonFiniteError, match="rows 3") as caught:
        ws.Trainer(made).fit(x, Y, verbose=0, batch_size=ROWS)
    assert caught.value.rows == (3,)


class Shift(keras.layers.Layer):
    """Adds a buffer, which may hide features: they are minus infinity, and their share is 0."""

    def __init__(self, hides=False):
        super().__init__()
        self.hides = hides

    def build(self, shape):
        self.shift = self.add_weight(shape=(shape[-1],), trainable=False, name="shift")

    def call(self, x):
        return keras.ops.softmax(x + self.shift) if self.hides else x + self.shift
