"""A stream returns every batch once, peeked ones too; it restarts with an epoch only."""

import signal
import sys
import warnings

import keras
import numpy as np
import pytest
from shares import share
from small import X, Y, model, same

import wholestep as ws
from wholestep import safety
from wholestep.data import stream as stream_module
from wholestep.data.stream import BatchStream
from wholestep.errors import BatchError


class Counted:
    """Two batches, and how often they were asked for."""

    def __init__(self):
        self.passes = 0

    def __iter__(self):
        self.passes += 1
        return iter([{"x": np.array([1, 2])}, {"x": np.array([3])}])


def of(batches):
    return BatchStream(batches, lambda batch: batch["x"].tolist())


def test_what_was_looked_at_is_drawn_next():
    stream = of(Counted())
    assert [stream.peek(0), stream.peek(0), stream.draw(0), stream.draw(1)] == [
        [1, 2],
        [1, 2],
        [1, 2],
        [3],
    ]
    with pytest.raises(StopIteration):
        stream.draw(2)
    assert stream.has_ended


def test_a_stream_that_has_ended_begins_again_with_an_epoch_and_not_before():
    batches = Counted()
    stream = of(batches)
    assert [stream.draw(0), stream.draw(1)] == [[1, 2], [3]]
    for _ in range(2):
        assert stream.peek(2) is None
        with pytest.raises(StopIteration):
            stream.draw(2)
    assert batches.passes == 1
    assert stream.draw(0) == [1, 2]
    assert (batches.passes, stream.has_ended) == (2, False)


def test_an_iterator_ends_for_good():
    stream = of(iter(Counted()))
    assert not stream.begins_again
    assert [stream.draw(0), stream.draw(1), stream.peek(2)] == [[1, 2], [3], None]
    assert stream.has_ended
    assert stream.peek(0) is None


def test_a_restart_forgets_what_was_looked_at():
    stream = of(Counted())
    stream.draw(0)
    assert stream.peek(1) == [3]
    stream.restart()
    assert stream.draw(0) == [1, 2]


def test_a_first_batch_of_another_pass_uses_nothing_up():
    stream = of(Counted())
    stream.draw(0)
    assert stream.first() == [1, 2]
    assert stream.draw(1) == [3]


class Failing:
    """Numbers as batches; the request for batch `at` fails once. Its iterator can go on, unlike a
    generator.
    """

    def __init__(self, at=2, num=4, length=None):
        self.at = at
        self.num = num
        self.length = length
        self.fails = True

    def __iter__(self):
        return Requests(self)

    def one_by_one(self):
        for number in range(self.num):
            if number == self.at and self.fails:
                self.fails = False
                raise OSError("the disk is away")
            yield {"x": np.array([number])}


class Requests:
    def __init__(self, source):
        self.source = source
        self.number = 0

    def __iter__(self):
        return self

    def __next__(self):
        source = self.source
        number = self.number
        if number == source.num:
            raise StopIteration
        if number == source.at and source.fails:
            source.fails = False
            raise OSError("the disk is away")
        self.number += 1
        return {"x": np.array([number])}


class Repeated:
    """An iterable, each iterator of which is a generator made by a function."""

    def __init__(self, make):
        self.make = make

    def __iter__(self):
        return self.make()


def drawn_until_error(stream, kind):
    drawn = []
    with pytest.raises(kind) as seen:
        drawn.extend(map(stream.draw, range(9)))
    return drawn, str(seen.value)


def test_an_iterator_that_has_raised_goes_on_with_the_batch_that_failed():
    stream = of(Failing())
    assert drawn_until_error(stream, OSError)[0] == [[0], [1]]
    assert [stream.draw(2), stream.draw(3)] == [[2], [3]]
    assert not stream.has_ended
    with pytest.raises(StopIteration):
        stream.draw(4)


def test_a_batch_whose_transform_fails_is_not_lost():
    fails = [True]

    def transform(batch):
        if batch["x"][0] == 2 and fails:
            raise fails.pop() and ValueError("2")
        return batch["x"].tolist()

    stream = BatchStream(Failing(at=None), transform)
    assert drawn_until_error(stream, ValueError)[0] == [[0], [1]]
    assert [stream.peek(2), stream.draw(2), stream.draw(3)] == [[2], [2], [3]]


def test_a_transform_cannot_end_a_stream():
    stream = BatchStream(Failing(at=None), lambda batch: next(iter([])))
    assert "StopIteration" in drawn_until_error(stream, RuntimeError)[1]
    assert not stream.has_ended


def test_a_generator_that_has_raised_is_not_taken_for_one_that_has_ended():
    stream = of(Repeated(Failing().one_by_one))
    assert drawn_until_error(stream, OSError)[0] == [[0], [1]]
    for ask in (stream.draw, stream.peek):
        with pytest.raises(
            BatchError, match=r"opened anew.*right after the error.*data.seek\(epoch\)"
        ):
            ask(2)
    stream.restart()
    assert stream.draw(0) == [0]


def test_a_generator_whose_first_batch_fails_is_asked_for_another():
    sources = [Failing(at=0), Failing(at=None)]
    stream = of(Repeated(lambda: sources.pop(0).one_by_one()))
    assert drawn_until_error(stream, OSError)[0] == []
    assert [stream.draw(step) for step in range(4)] == [[0], [1], [2], [3]]


def test_an_iterator_that_has_raised_cannot_be_opened_anew():
    stream = of(Failing().one_by_one())
    assert drawn_until_error(stream, OSError)[0] == [[0], [1]]
    with pytest.raises(BatchError, match="pass a new iterator"):
        stream.draw(2)


def test_an_interrupt_right_after_a_batch_has_come_does_not_lose_it():
    """The handler of a signal runs between two calls, as a profiler does."""
    asked = []

    def number(i):
        asked.append(i)
        return {"x": np.array([i])}

    def interrupt(frame, event, called):
        if (
            event == "c_return"
            and frame.f_code.co_filename == stream_module.__file__
            and asked[-1:] == [2]
        ):
            sys.setprofile(None)
            raise KeyboardInterrupt

    stream = of(Repeated(lambda: map(number, range(4))))
    sys.setprofile(interrupt)
    try:
        assert drawn_until_error(stream, KeyboardInterrupt)[0] == [[0], [1]]
    finally:
        sys.setprofile(None)
    assert [stream.draw(2), stream.draw(3)] == [[2], [3]]
    with pytest.raises(StopIteration):
        stream.draw(4)


class Lengthy(Failing):
    """A source that says it has five batches, and can go on from a state."""

    def __len__(self):
        return 5

    def __iter__(self):
        return Stateful(self)


class Stateful(Requests):
    def get_state(self):
        return self.number

    def set_state(self, state):
        self.number = state


def test_a_wrong_length_is_warned_of_once_and_counts_the_batches_before_a_state():
    stream = of(Lengthy(at=None))
    assert len([stream.draw(step) for step in range(4)]) == 4
    with pytest.warns(UserWarning, match="4 batches of Lengthy, whose length says 5"):
        assert stream.peek(4) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert stream.peek(4) is None
    stream = of(Lengthy(at=None, num=5))
    stream.restore(3)
    assert [stream.draw(3), stream.draw(4)] == [[3], [4]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert stream.peek(5) is None


class Parts(Failing):
    """Batches of the rows of a small data set; the request for one may fail, be interrupted, or its
    transform fail.
    """

    def __init__(self, what=""):
        super().__init__(at=3 if what in ("source", "generator") else None, num=5)
        self.what = what
        self.trained = []

    def __iter__(self):
        return self.one_by_one() if self.what == "generator" else super().__iter__()

    def transform(self, batch):
        number = int(batch["x"][0])
        if number == 3 and self.fails and self.what in ("transform", "interrupt"):
            self.fails = False
            if self.what == "transform":
                raise OSError("the disk is away")
            signal.raise_signal(signal.SIGINT)
        return X[4 * number : 4 * number + 4], Y[4 * number : 4 * number + 4]


def test_a_batch_whose_preparation_fails_is_not_lost():
    fails = [True]

    def prepare(batch):
        if batch["x"][0] == 2 and fails:
            raise fails.pop() and ValueError("2")
        return batch["x"].tolist()

    data = ws.Batches(Failing(at=None)).prepared(prepare)
    seen = []
    with pytest.raises(ValueError, match="2"):
        seen.extend(data)
    assert data.position == (0, 2)
    seen.extend(data)
    assert (seen, data.position) == ([[0], [1], [2], [3]], (1, 0))
    assert next(data) == [0]


@pytest.mark.parametrize("how", ["fit", "steps"])
@pytest.mark.parametrize("what", share(["source", "transform", "interrupt", "generator"]))
def test_training_goes_on_where_its_data_failed(how, what, monkeypatch):
    monkeypatch.setattr(safety, "_ONE", 0.0)  # the interrupt comes while the data are waited for

    def train(trainer, data):
        seen = []
        look = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: seen.append(trainer.run.number)
        )
        if how == "fit":
            trainer.fit(data, verbose=0, callbacks=[look])
        else:
            seen.extend(step.number for step in trainer.steps(data))
        return seen

    source = Parts(what)
    made = model()
    whole = model()
    trainer = ws.Trainer(made)
    data = ws.Batches(source, transform=source.transform)
    with pytest.raises(KeyboardInterrupt if what == "interrupt" else OSError):
        train(trainer, data)
    assert (trainer.run.number, data.position) == (3, (0, 3))
    if what == "generator":
        for _ in range(2):
            with pytest.raises(BatchError, match=r"opened anew.*data.seek\(epoch\)"):
                train(trainer, data)
            assert (trainer.run.number, data.position) == (3, (0, 3))
        data.seek(0)
        assert train(trainer, data) == [4, 5, 6, 7, 8]
        return
    assert train(trainer, data) == [4, 5]
    assert data.position == (1, 0)
    other = Parts()
    train(ws.Trainer(whole), ws.Batches(other, transform=other.transform))
    assert same(whole, made)
