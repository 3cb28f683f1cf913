"""Several batches in a block: only what goes together, no more than is wanted, and none is lost."""

import signal
from typing import NamedTuple

import keras
import numpy as np
import pytest
from small import X, Y, model, same

import wholestep as ws
from wholestep.cut import Cut
from wholestep.data.feed import Loaded
from wholestep.dispatcher import Dispatcher


class Host:
    """An engine whose device is the host."""

    num_replicas = 1
    local_replicas = (0,)

    @staticmethod
    def place(data):
        return data

    stage = place


class Plan(NamedTuple):
    cut: Cut
    length: int = 4
    num_stacked: int = 4


def stacking(batches, check=lambda batch, program: None):
    """Return a feed with a program for every shape, which takes four updates."""
    programs = {}

    def plan(batch):
        return programs.setdefault(
            (batch.signature, batch.num_rows), Plan(Cut(((1, batch.num_rows),), batch.num_rows))
        )

    return Loaded(Host, batches, plan, check)


def many():
    return 4 * 16  # of which a part is stacked


def stream(shapes, drawn=None):
    """Yield a batch of every shape, filled with its number; note which were drawn."""
    for i, shape in enumerate(shapes):
        if drawn is not None:
            drawn.append(i)
        yield np.full(shape, float(i), "float32")


def numbers(block):
    """Return the number of every batch of a block, by the rows of its table."""
    table = block.table
    updates = range(block.first, block.first + block.num)
    found = [set(np.ravel(block.data[table.rows[i][: table.counts[i]]]).tolist()) for i in updates]
    return [int(number) for each in found for number in each]


def use(feed, num_blocks=None, num_of_last=None):
    """Return the numbers of the batches that a loop uses; of its last block only some may count."""
    used = []
    for i, block in enumerate(feed.blocks(None, many)):
        if i == num_blocks:
            break
        used += numbers(block)
        feed.batches.position = block.end
        if i + 1 == num_blocks and num_of_last is not None:
            feed.go_back(block, num_of_last)
            return used[: len(used) - block.num + num_of_last]
    return used


def test_batches_that_are_alike_are_stacked():
    blocks = list(stacking(ws.Batches(stream(10 * [(2,)]))).blocks(None, many))
    assert [numbers(block) for block in blocks] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [(block.start, block.end) for block in blocks] == [
        ((0, 0), (0, 4)),
        ((0, 4), (0, 8)),
        ((0, 8), (0, 10)),
    ]
    assert {len(block.data) for block in blocks} == {8}  # for which the program is compiled
    assert len({id(block.table) for block in blocks}) == 1


class Three(keras.utils.PyDataset):
    """Three batches."""

    def __len__(self):
        return 3

    def __getitem__(self, i):
        return np.full((2,), float(i), "float32")


def test_other_shapes_and_sizes_and_epochs_go_apart():
    by_shape = 2 * [(2, 3), (2, 3), (2, 4)]
    by_size = [(2,), (2,), (1,), (1,)]
    for shapes, expected in ((by_shape, [[0, 1], [2], [3, 4], [5]]), (by_size, [[0, 1], [2, 3]])):
        assert [
            numbers(b) for b in stacking(ws.Batches(stream(shapes))).blocks(None, many)
        ] == expected
    for source in (type("Again", (), {"__iter__": lambda self: stream(3 * [(2,)])})(), Three()):
        batches = ws.Batches(source, shuffle=False)
        assert [numbers(b) for b in stacking(batches).blocks(5, many)] == [[0, 1, 2], [0, 1]]


@pytest.mark.parametrize(("size", "expected"), [(1, 1), (16, 1), (32, 2), (999, 4)])
def test_no_more_is_drawn_than_goes_in_a_block(size, expected):
    drawn = []
    for _ in stacking(ws.Batches(stream(10 * [(2,)], drawn))).blocks(None, lambda: size):
        break
    assert len(drawn) == expected


def broken(num):
    yield from stream(num * [(2,)])
    raise OSError("the disk is gone")


def refuse(batch, program):
    if batch.start == (0, 6):
        raise OSError("the disk is gone")


@pytest.mark.parametrize(
    "feed", [stacking(ws.Batches(broken(6))), stacking(ws.Batches(broken(9)), refuse)]
)
def test_updates_before_an_error_run(feed):
    used = []
    with pytest.raises(OSError, match="the disk is gone"):
        use_all(feed, used)
    assert used == [0, 1, 2, 3, 4, 5]


def use_all(feed, used):
    for block in feed.blocks(None, many):
        used += numbers(block)
        feed.batches.position = block.end


def test_stacked_batches_that_were_not_used_come_again():
    feed = stacking(ws.Batches(stream(12 * [(2,)])))
    # the last three of the second block did not run
    assert use(feed, 2, 1) == [0, 1, 2, 3, 4]
    assert [batch.start for batch in feed.batches.unused] == [(0, 5), (0, 6), (0, 7)]
    assert use(feed, 0) == []  # and these were drawn, but not used
    assert use(feed) == [5, 6, 7, 8, 9, 10, 11]


def test_a_stacked_block_goes_back_when_its_loop_has_ended():
    feed = stacking(ws.Batches(stream(4 * [(2,)])))
    *_, block = feed.blocks(None, many)
    feed.batches.position = block.end
    feed.go_back(block, 1)
    assert use(feed) == [1, 2, 3]


def test_an_interrupt_while_batches_are_drawn_loses_none():
    def interrupted():
        for i, batch in enumerate(stream(6 * [(2,)])):
            if i == 2:
                signal.raise_signal(signal.SIGINT)
            yield batch

    feed = stacking(ws.Batches(interrupted()))
    with pytest.raises(KeyboardInterrupt):
        next(feed.blocks(None, many))
    assert use(feed) == [0, 1, 2, 3, 4, 5]


class Looks(keras.callbacks.Callback):
    """Nothing is sent together where it looks."""

    def on_train_batch_end(self, batch, logs=None):
        pass


NUM = 60
BATCHES = [(np.roll(X, i, axis=0)[:8], np.roll(Y, i)[:8]) for i in range(NUM)]


@pytest.fixture
def sent(monkeypatch):
    """Return how many updates go in each dispatch, as soon as there is no telling how long they
    take.
    """
    nums = []
    send = Dispatcher.send

    def note(self, run, feed, block):
        nums.append(block.num)
        return send(self, run, feed, block)

    monkeypatch.setattr(Dispatcher, "send", note)
    monkeypatch.setattr("wholestep.dispatcher._SECONDS_PER_DISPATCH", 1e9)
    return nums


@pytest.mark.slow
def test_stacked_updates_are_those_that_go_alone(sent):
    batches = [*BATCHES, (X[:3], Y[:3])]
    trainers = [ws.Trainer(model(keras.layers.Dropout(0.5, seed=1))) for _ in range(3)]
    first, second = (
        trainer.fit(iter(batches), verbose=0, callbacks=callbacks)
        for trainer, callbacks in zip(trainers, ([], [Looks()]), strict=False)
    )
    assert (sum(sent), sent[-61:]) == (122, [1] * 61)
    assert len(sent) < 100
    steps = [step.logs for step in trainers[2].steps(iter(batches))]
    assert first.history == second.history == {name: [value] for name, value in steps[-1].items()}
    assert same(trainers[0].model, trainers[1].model)
    assert same(trainers[0].model, trainers[2].model)


def test_a_failure_within_a_stack_is_that_of_its_own_update(sent):
    bad = np.where(np.arange(8)[:, None] == 5, np.nan, X[:8]), Y[:8]
    data = ws.Batches(iter([*BATCHES[:50], bad, *BATCHES[50:]]))
    trainer = ws.Trainer(model())
    other = ws.Trainer(model())
    with pytest.raises(ws.NonFiniteError) as caught:
        trainer.fit(data, verbose=0)
    assert (caught.value.update, caught.value.rows) == (51, (5,))
    assert data.position == (0, 50)
    other.fit(iter(BATCHES[:50]), verbose=0)
    assert same(trainer.model, other.model)
    next(data)
    trainer.fit(data, verbose=0)
    other.fit(iter(BATCHES[50:]), verbose=0)
    assert same(trainer.model, other.model)


def test_updates_of_a_stack_that_are_left_out_are_counted(sent):
    bad = np.full_like(X[:8], np.nan), Y[:8]
    trainer = ws.Trainer(model(), on_nonfinite="skip")
    other = ws.Trainer(model())
    trainer.fit(iter([*BATCHES[:40], bad, bad, *BATCHES[40:]]), verbose=0)
    other.fit(iter(BATCHES), verbose=0)
    assert trainer.num_skipped == 2
    assert same(trainer.model, other.model)


@pytest.mark.parametrize("callbacks", [[], [Looks()]])
def test_a_generator_sees_the_model_between_dispatches(sent, callbacks):
    made = model()
    counts = []

    def watching():
        for i, batch in enumerate(BATCHES):
            counts.append(i - int(made.optimizer.iterations.numpy()))
            yield batch

    ws.Trainer(made).fit(watching(), verbose=0, callbacks=callbacks)
    late = counts[1:]  # the first batch is drawn to build the model
    assert max(late) < 16
    assert max(late) == 0 if callbacks else min(late) == 0
