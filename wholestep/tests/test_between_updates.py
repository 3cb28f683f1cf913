"""Between two updates, callbacks and loops see the state of the update before; what they change
counts from the next one on.
"""

import keras
import numpy as np
import pytest
from small import count_calls, model, same, values

import wholestep as ws
from wholestep.dispatcher import Dispatcher

X = np.random.default_rng(0).normal(size=(104, 6)).astype("float32")
Y = np.random.default_rng(1).integers(0, 4, 104)
SIZE = 4
NUM = 26  # batches in an epoch
JAX = keras.backend.backend() == "jax"


class Loader(keras.utils.PyDataset):
    """Ready batches that are loaded one after the other."""

    def __init__(self, x=X):
        super().__init__()
        self.x = x
        self.newest = 0

    def __len__(self):
        return NUM

    def __getitem__(self, i):
        self.newest = max(self.newest, i)
        rows = slice(SIZE * i, SIZE * (i + 1))
        return self.x[rows], Y[rows]


def arrays(x=X):
    return ws.Batches((x, Y), SIZE, shuffle=False)


def loaded(x=X):
    return ws.Batches(Loader(x), shuffle=False)


DATA = pytest.mark.parametrize("data", [arrays, loaded])


class Calling(keras.callbacks.Callback):
    """Calls `look(model, batch)` after every batch, and keeps the results and the logs."""

    def __init__(self, look):
        super().__init__()
        self.look = look
        self.found = []
        self.logs = []

    def on_train_batch_end(self, batch, logs=None):
        self.found.append(self.look(self.model, batch))
        self.logs.append(logs)


def fresh():
    return model(keras.layers.Dropout(0.5, seed=1), keras.layers.BatchNormalization())


def by_fit(look, data):
    calling = Calling(look)
    made = fresh()
    ws.Trainer(made).fit(data(), callbacks=[calling], verbose=0)
    return made, calling.found


def by_steps(look, data):
    made = fresh()
    return made, [look(made, step.batch) for step in ws.Trainer(made).steps(data())]


def by_update(look, data):
    made = fresh()
    trainer = ws.Trainer(made)
    found = []
    for i, batch in enumerate(Loader()[j] for j in range(NUM)):
        trainer.update(batch)
        found.append(look(made, i))
    return made, found


# ---- what is seen ----


def weights(made, batch):
    return [value.tobytes() for value in values(made)[: len(made.weights)]]


def every_seventh(made, batch):
    return weights(made, batch) if batch % 7 == 6 else None


def a_prediction(made, batch):
    return made.predict(X[:3], verbose=0).tobytes() if batch == 5 else None


def a_call(made, batch):
    return np.asarray(made(X[:3])).tobytes() if batch in (3, 11) else None


@DATA
@pytest.mark.parametrize("run", [by_fit, by_steps])
@pytest.mark.parametrize("look", [weights, every_seventh, a_prediction, a_call])
def test_who_looks_sees_the_state_of_the_update_before(look, run, data):
    made, found = run(look, data)
    alone, expected = by_update(look, data)
    assert found == expected
    assert same(made, alone)


@pytest.mark.parametrize("each", [2, 5])
def test_the_hooks_of_several_updates_are_called_at_the_same_places_on_any_data(each):
    seen = []
    for data in (arrays, loaded):
        made = fresh()
        made.steps_per_execution = each
        calling = Calling(lambda made, batch: (batch, weights(made, batch)))
        ws.Trainer(made).fit(data(), callbacks=[calling], verbose=0)
        seen.append(calling.found)
    assert seen[0] == seen[1]
    assert [batch for batch, _ in seen[0]][:3] == [each - 1, 2 * each - 1, 3 * each - 1]


@DATA
def test_a_callback_that_says_that_it_reads_no_model_gets_the_same_logs_from_fewer_dispatches(
    data, monkeypatch
):
    def logs_and_dispatches(**attributes):
        calling = Calling(lambda made, batch: None)
        vars(calling).update(attributes)
        trainer = ws.Trainer(fresh())
        trainer.fit(data(), verbose=0)
        with monkeypatch.context() as patch:
            calls = count_calls(patch, Dispatcher, "send")
            trainer.fit(data(), callbacks=[calling], verbose=0)
        return calling.logs, len(calls)

    monkeypatch.setattr("wholestep.dispatcher._SECONDS_PER_DISPATCH", 1e9)
    singly, num = logs_and_dispatches()
    together, fewer = logs_and_dispatches(reads_model=False)
    assert together == singly
    assert num == NUM
    assert fewer < NUM / 2


# ---- what is changed ----


def nothing(made, batch):
    pass


def set_rate(made, batch):
    if batch % 6 == 4:
        made.optimizer.learning_rate = 0.01 / (batch + 1)


def set_weights(made, batch):
    if batch == 10:
        made.layers[0].bias.assign(np.full(8, 0.25, "float32"))


def set_iterations(made, batch):
    if batch == 10:
        made.optimizer.iterations.assign(100)


@DATA
@pytest.mark.parametrize("run", [by_fit, by_steps])
@pytest.mark.parametrize("change", [set_rate, set_weights, set_iterations])
def test_a_change_counts_from_the_next_update_on(change, run, data):
    changed = run(change, data)[0]
    assert same(changed, by_update(change, data)[0])
    assert not same(changed, by_update(nothing, data)[0])


class Scaled(ws.Objective):
    """A loss that is scaled by a variable, which is none of the model's."""

    def __init__(self):
        self.scale = keras.Variable(1.0, trainable=False)

    def __call__(self, model, batch, training):
        x, y = batch
        losses = keras.losses.sparse_categorical_crossentropy(
            y, model(x, training=training), from_logits=True
        )
        return ws.Mean(losses * keras.ops.convert_to_tensor(self.scale))


@DATA
def test_a_variable_of_the_objective_counts_from_the_next_update_on(data):
    objective = Scaled()
    losses = []
    for step in ws.Trainer(model(), objective).steps(data()):
        losses.append(step.loss)
        objective.scale.assign(0.0 if step.batch % 9 == 3 else 1.0)
    assert [i for i, loss in enumerate(losses) if loss == 0] == [4, 13, 22]


def test_a_callback_that_stops_is_asked_after_each_update():
    made = fresh()

    def stop(made, batch):
        made.stop_training = batch == 13

    calling = Calling(stop)
    ws.Trainer(made).fit(loaded(), callbacks=[calling], verbose=0)
    assert len(calling.found) == 14
    assert int(made.optimizer.iterations.numpy()) == 14


# ---- when data are drawn ----


def test_the_next_batch_is_loaded_while_the_device_computes():
    loader = Loader()
    calling = Calling(lambda made, batch: loader.newest)
    ws.Trainer(model()).fit(loader, shuffle=False, callbacks=[calling], verbose=0)
    assert calling.found == [*range(1, NUM), NUM - 1]


class Growing(Loader):
    """Batches of two rows, and then of four."""

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        num = 2 if i < 16 else 4
        return x[:num], y[:num]


def test_a_run_knows_nothing_of_a_batch_that_was_loaded_before_its_turn():
    trainer = ws.Trainer(model())
    calling = Calling(lambda made, batch: max(trainer.run.data.largest.values()))
    trainer.fit(ws.Batches(Growing(), shuffle=False), callbacks=[calling], verbose=0)
    assert calling.found == 16 * [2] + 10 * [4]


def test_a_generator_is_drawn_from_when_its_batch_is_asked_for():
    drawn = []

    def batches():
        for i in range(NUM):
            drawn.append(i)
            yield Loader()[i]

    for step in ws.Trainer(model()).steps(batches()):
        assert len(drawn) == step.number


@DATA
def test_a_loop_that_is_left_goes_on_where_it_was_left(data):
    whole = fresh()
    for _ in ws.Trainer(whole).steps(data()):
        pass
    made = fresh()
    trainer = ws.Trainer(made)
    batches = data()
    seen = []
    for last in (9, 17, 99):
        for step in trainer.steps(batches):
            seen.append((step.number, step.batch))
            if step.number == last:
                break
    assert seen == [(i + 1, i) for i in range(NUM)]
    assert same(made, whole)


# ---- what goes wrong ----


def with_a_bad_row():
    x = np.array(X)
    x[70] = np.nan
    return x


@DATA
def test_an_update_that_is_not_finite_is_told_in_its_turn(data):
    calling = Calling(weights)
    made = model()
    trainer = ws.Trainer(made)
    batches = data(with_a_bad_row())
    with pytest.raises(ws.NonFiniteError, match="Update 18 "):
        trainer.fit(batches, callbacks=[calling], verbose=0)
    assert len(calling.found) == 18
    assert calling.found[-1] == calling.found[-2] == weights(made, 17)
    assert np.isnan(calling.logs[-1]["loss"])
    assert trainer.run.number == 17
    assert batches.position == (0, 17)


@DATA
def test_a_skipped_update_is_counted_in_its_turn(data):
    trainer = ws.Trainer(model(), on_nonfinite="skip")
    counts = [trainer.num_skipped for _ in trainer.steps(data(with_a_bad_row()))]
    assert counts == 17 * [0] + 9 * [1]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_in_a_callback_leaves_the_state_of_its_update(error):
    def fail(made, batch):
        if batch == 19:
            raise error("of the user's")

    made = fresh()
    trainer = ws.Trainer(made)
    with pytest.raises(error):
        trainer.fit(arrays(), callbacks=[Calling(fail)], verbose=0)
    assert trainer.run.number == 20
    other = fresh()
    for step in ws.Trainer(other).steps(arrays()):
        if step.number == 20:
            break
    assert same(made, other)


@pytest.mark.skipif(not JAX, reason="a callback of JAX")
def test_what_a_program_tells_the_host_is_told_once_and_in_its_turn():
    import jax

    told = []

    class Telling(ws.Objective):
        def __call__(self, model, batch, training):
            x, y = batch
            losses = keras.losses.sparse_categorical_crossentropy(
                y, model(x, training=training), from_logits=True
            )
            jax.debug.callback(told.append, x[0, 0])
            return ws.Mean(losses)

    for step in ws.Trainer(model(), Telling()).steps(arrays()):
        if step.batch in (5, 9):
            jax.effects_barrier()
            assert len(set(map(float, told))) == step.number
    assert len(told) == NUM
