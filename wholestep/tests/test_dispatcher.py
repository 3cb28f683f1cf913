"""Updates sent ahead are invisible, whenever and however variables are read."""

import copy
import gc
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import NamedTuple

import keras
import numpy as np
import pytest
from scripts import lean
from small import model, same, values

import wholestep as ws
from wholestep import ahead, dispatcher

JAX = keras.backend.backend() == "jax"
pytestmark = pytest.mark.skipif(
    not JAX, reason="test_engines holds that looks are not seen there: nothing is ahead"
)
X = np.random.default_rng(0).normal(size=(104, 6)).astype("float32")
Y = np.random.default_rng(1).integers(0, 4, 104)
SIZE = 4
NUM = 26  # of a batch, and of batches in an epoch


@pytest.fixture
def sent(monkeypatch):
    """How many updates went in each dispatch, of which many go ahead; or by `sent.one_by_one()`
    none.
    """

    class Sent(list):
        def one_by_one(self):
            monkeypatch.setattr(ahead, "_MOST_SECONDS", -1.0)
            self.clear()

    def num_to_send(*arguments):
        num = decide(*arguments)
        sent.extend([num] if num else [])
        return num

    sent = Sent()
    decide = ahead.Ahead.num_to_send
    monkeypatch.setattr(ahead, "_MOST_SECONDS", 1e9)
    monkeypatch.setattr(ahead, "_SECONDS_PER_DISPATCH", 1e9)
    monkeypatch.setattr(ahead, "_MOST_DEBT", -1e9)
    monkeypatch.setattr(ahead.Ahead, "num_to_send", num_to_send)
    return sent


class Watching(keras.callbacks.Callback):
    """Calls `look(callback, batch)` after every batch, and keeps what it returns."""

    def __init__(self, look):
        super().__init__()
        self.look = look
        self.logs = []
        self.found = []

    def on_train_batch_end(self, batch, logs=None):
        self.logs.append(logs)
        self.found.append(self.look(self, batch))


class Outcome(NamedTuple):
    """What two epochs leave behind."""

    values: list
    logs: list
    found: list


class Fresh:
    """A trainer that begins anew for every training, and keeps its compiled programs."""

    def __init__(self, **options):
        self.trainer = ws.Trainer(
            model(keras.layers.Dropout(0.5, seed=1), keras.layers.BatchNormalization()), **options
        )
        self.trainer.fit(X, Y, batch_size=SIZE, steps_per_epoch=1, verbose=0)
        self.begin = values(self.trainer.model)

    def fit(self, look, steps_per_execution=1, data=None):
        made = self.trainer.model
        watching = Watching(look)
        made.steps_per_execution = steps_per_execution
        for variable, value in zip(
            [*made.variables, *made.optimizer.variables], self.begin, strict=True
        ):
            variable.assign(value)
        data = data or ws.Batches((X, Y), SIZE, seed=5)
        self.trainer.fit(data, epochs=2, callbacks=[watching], verbose=0)
        assert_nothing_is_watched(made)
        return Outcome([v.tobytes() for v in values(made)], watching.logs, watching.found)


@pytest.fixture(scope="module")
def fresh():
    return Fresh()


def weights(callback, batch):
    return [w.tobytes() for w in callback.model.get_weights()]


def assert_nothing_is_watched(made):
    for variable in [*made.variables, *made.optimizer.variables]:
        assert type(variable) is keras.Variable
        assert not any("watch" in name for name in vars(variable))


# ---- reads ----


def every(num):
    return lambda callback, batch: weights(callback, batch) if batch % num == num - 1 else None


def at_random(callback, batch):
    return weights(callback, batch) if hash((batch, 5)) % 3 == 0 else None


def the_rate(callback, batch):
    return float(callback.model.optimizer.learning_rate) if batch % 6 == 2 else None


def a_prediction(callback, batch):
    return callback.model.predict(X[:3], verbose=0).tobytes() if batch == 5 else None


def a_call(callback, batch):
    return np.asarray(callback.model(X[:3])).tobytes() if batch in (3, 11) else None


def a_metric(callback, batch):
    return (
        {k: float(v) for k, v in callback.model.get_metrics_result().items()}
        if batch % 5 == 3
        else None
    )


def a_copy(callback, batch):
    return (
        [w.tobytes() for w in copy.deepcopy(callback.model.weights[0]).numpy()]
        if batch == 9
        else None
    )


def a_pickle(callback, batch):
    return (
        pickle.loads(pickle.dumps(callback.model)).get_weights()[0].tobytes()
        if batch == 9
        else None
    )


def another_thread(callback, batch):
    found = []
    thread = threading.Thread(target=lambda: found.append(weights(callback, batch)))
    if batch % 8 == 6:
        thread.start()
        thread.join()
    return found


LOOKS = {
    "never": lambda callback, batch: None,
    "every": every(1),
    "every 7": every(7),
    **{
        look.__name__: look
        for look in (
            at_random,
            the_rate,
            a_prediction,
            a_call,
            a_metric,
            a_copy,
            a_pickle,
            another_thread,
        )
    },
}


@pytest.mark.parametrize("name", LOOKS)
def test_whoever_looks_finds_the_state_of_the_update_that_was_told(sent, fresh, name):
    ahead = fresh.fit(LOOKS[name])
    assert max(sent[-NUM + 2 :]) == 1 if name == "every" else len(sent) < 1.5 * NUM
    sent.one_by_one()
    assert ahead == fresh.fit(LOOKS[name])


def test_who_looks_as_often_as_before_costs_no_update_twice(sent, fresh):
    fresh.fit(LOOKS["never"])
    fresh.fit(every(13))
    assert sum(sent) > 4 * NUM  # the first looks were not expected
    sent.clear()
    fresh.fit(every(13))
    assert sum(sent) == 2 * NUM
    assert max(sent) == 13


def test_a_variable_that_is_read_while_jax_traces_holds_numbers(sent, fresh):
    import jax

    def look(callback, batch):
        kernel = callback.model.layers[0].kernel
        return float(jax.jit(lambda x: (x * kernel.value).sum())(2.0)) if batch % 10 == 8 else None

    ahead = fresh.fit(look)
    assert max(sent) > 8
    sent.one_by_one()
    assert ahead == fresh.fit(look)


def test_a_model_that_is_compiled_anew_is_not_traced_again(sent):
    def look(callback, batch):
        if batch == 9:
            callback.model.compile("sgd", callback.model.loss, metrics=["accuracy"])
            return callback.model.evaluate(X[:4], Y[:4], verbose=0)
        return None

    found = Fresh().fit(look).found
    assert max(sent) > 8
    sent.one_by_one()
    assert found == Fresh().fit(look).found


# ---- batches that are loaded ----


class Loader(keras.utils.PyDataset):
    """Ready batches, one of which may be bad."""

    def __init__(self, x=X, y=Y):
        super().__init__()
        self.x = x
        self.y = y
        self.asked = 0

    def __len__(self):
        return NUM

    def __getitem__(self, i):
        self.asked += 1
        rows = slice(SIZE * i, SIZE * (i + 1))
        return self.x[rows], self.y[rows]


@pytest.mark.parametrize("name", ["never", "every", "every 7", "at_random", "a_call"])
def test_whoever_looks_between_loaded_batches_finds_the_state_of_the_update_that_was_told(
    sent, fresh, name
):
    ahead = fresh.fit(LOOKS[name], data=ws.Batches(Loader(), seed=5))
    assert max(sent[-NUM + 2 :]) == 1 if name == "every" else len(sent) < 1.5 * NUM
    sent.one_by_one()
    assert ahead == fresh.fit(LOOKS[name], data=ws.Batches(Loader(), seed=5))


def test_the_next_batches_are_loaded_while_the_device_works(sent):
    loader = Loader()
    watching = Watching(lambda callback, batch: loader.asked)
    ws.Trainer(model()).fit(loader, callbacks=[watching], verbose=0)
    starts = np.cumsum([NUM - sum(sent), *sent[:-1]])  # the first is sent before anybody is watched
    several = [(start, num) for start, num in zip(starts, sent, strict=True) if num > 1]
    assert max(sent) > 4
    assert all(watching.found[start] >= min(NUM, start + 2 * num) for start, num in several)


class Growing(Loader):
    """Batches of two rows, and then of four."""

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        num = 2 if i < 16 else 4
        return x[:num], y[:num]


def test_a_run_knows_nothing_of_batches_that_were_loaded_before_their_turn(sent):
    trainer = ws.Trainer(model())
    watching = Watching(lambda callback, batch: max(trainer.run.data.largest.values()))
    trainer.fit(ws.Batches(Growing(), shuffle=False), callbacks=[watching], verbose=0)
    assert max(sent) > 2
    assert watching.found == 16 * [2] + 10 * [4]


@pytest.mark.parametrize("steps_per_execution", [2, 5])
def test_loaded_batches_are_told_several_at_a_time_where_that_is_asked(
    sent, fresh, steps_per_execution
):
    told = [
        fresh.fit(lambda callback, batch: batch, steps_per_execution, ws.Batches(data, **how)).found
        for data, how in ((Loader(), {"seed": 5}), ((X, Y), {"batch_size": SIZE, "seed": 5}))
    ]
    assert told[0] == told[1]
    assert max(sent) > steps_per_execution


def test_a_loop_over_loaded_batches_that_is_left_goes_on_where_it_was_left(sent):
    def train():
        made = model(keras.layers.Dropout(0.5, seed=1))
        trainer = ws.Trainer(made)
        data = ws.Batches(Loader(), seed=5)
        seen = []
        for last in (9, 17, 99):
            for step in trainer.steps(data):
                seen.append((step.number, step.batch, step.loss if step.number % 5 == 0 else None))
                if step.number == last:
                    break
        assert_nothing_is_watched(made)
        return seen, [value.tobytes() for value in values(made)]

    ahead = train()
    assert max(sent) > 4
    assert [number for number, *_ in ahead[0]] == list(range(1, NUM + 1))
    sent.one_by_one()
    assert ahead == train()


def test_a_loaded_batch_that_is_not_finite_is_told_in_its_turn(sent):
    def train():
        made = model()
        told = Watching(lambda callback, batch: None)
        trainer = ws.Trainer(made)
        data = ws.Batches(Loader(with_a_bad_row(70)), shuffle=False)
        with pytest.raises(ws.NonFiniteError) as caught:
            trainer.fit(data, callbacks=[told], verbose=0)
        return made, told.logs, str(caught.value), trainer.run.number, data.position

    ahead, *found = train()
    assert max(sent) > 4
    sent.one_by_one()
    alone, *expected = train()
    assert repr(found) == repr(expected)
    assert found[-2:] == [17, (0, 17)]
    assert same(ahead, alone)


def test_a_generator_is_drawn_from_when_its_batch_is_asked_for(sent):
    drawn = []

    def batches():
        for i in range(NUM):
            drawn.append(i)
            yield Loader()[i]

    for step in ws.Trainer(model()).steps(batches()):
        assert len(drawn) == step.number
    assert set(sent) <= {1}


# ---- changes ----


def set_rate(callback, batch):
    if batch % 6 == 4:
        callback.model.optimizer.learning_rate = 0.01 / (batch + 1)


def set_weights(callback, batch):
    if batch == 10:
        callback.model.layers[0].bias.assign(np.full(8, 0.25, "float32"))


def set_iterations(callback, batch):
    if batch == 10:
        callback.model.optimizer.iterations.assign(100)


def train_in_between(callback, batch):
    if batch == 7:
        callback.model.train_on_batch(X[:4], Y[:4])


def stop(callback, batch):
    callback.model.stop_training = batch == 13


@pytest.mark.parametrize("change", [set_rate, set_weights, set_iterations, train_in_between, stop])
def test_what_is_changed_between_two_updates_counts_from_the_next_one_on(sent, fresh, change):
    ahead = fresh.fit(change)
    sent.one_by_one()
    assert ahead == fresh.fit(change)


class Annealed(ws.Objective):
    """A loss that is scaled by a variable, which is none of the model's."""

    def __init__(self):
        self.scale = keras.Variable(1.0, trainable=False)

    def __call__(self, model, batch, training):
        x, y = batch
        values = keras.losses.sparse_categorical_crossentropy(
            y, model(x, training=training), from_logits=True
        )
        return ws.Mean(values * keras.ops.convert_to_tensor(self.scale))


def test_a_variable_of_the_objectives_counts_from_the_next_update_on(sent):
    def train():
        made = model(keras.layers.Dropout(0.5, seed=1))
        objective = Annealed()
        watching = Watching(
            lambda callback, batch: (
                objective.scale.assign(1 / (batch + 1)) if batch % 9 == 3 else None
            )
        )
        trainer = ws.Trainer(made, objective)
        trainer.fit((X, Y), batch_size=SIZE, epochs=2, callbacks=[watching], verbose=0)
        return made, watching.logs

    ahead, logs = train()
    sent.one_by_one()
    alone, expected = train()
    assert logs == expected
    assert same(ahead, alone)


# ---- what goes wrong ----


def with_a_bad_row(row):
    x = np.array(X)
    x[row] = np.nan
    return x


def test_an_update_that_is_not_finite_is_told_in_its_turn_and_leaves_the_state_before_it(sent):
    def train():
        made = model()
        told = Watching(lambda callback, batch: None)
        trainer = ws.Trainer(made)
        data = ws.Batches((with_a_bad_row(70), Y), SIZE, shuffle=False)
        with pytest.raises(ws.NonFiniteError) as caught:
            trainer.fit(data, callbacks=[told], verbose=0)
        return made, told.logs, str(caught.value), trainer.run.number, data.position

    ahead, *found = train()
    sent.one_by_one()
    alone, *expected = train()
    assert repr(found) == repr(expected)
    assert found[-2:] == [17, (0, 17)]
    assert same(ahead, alone)
    assert_nothing_is_watched(ahead)


def test_updates_that_are_left_out_are_counted_in_their_turn(sent):
    def train():
        made = model()
        trainer = ws.Trainer(made, on_nonfinite="skip")
        steps = trainer.steps(ws.Batches((with_a_bad_row(70), Y), SIZE, shuffle=False))
        counts = [
            (step.number, trainer.num_skipped if step.number % 3 == 0 else None) for step in steps
        ]
        return made, counts, trainer.num_skipped

    ahead, counts, num = train()
    sent.one_by_one()
    alone, expected, _ = train()
    assert num == 1
    assert (
        counts
        == expected
        == [(n, None if n % 3 else int(n > 70 // SIZE)) for n in range(1, NUM + 1)]
    )
    assert same(ahead, alone)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_in_a_callback_leaves_the_state_of_its_update(sent, error):
    def fail(callback, batch):
        if batch == 19:
            raise error("of the user's")

    def train():
        made = model(keras.layers.Dropout(0.5, seed=1))
        trainer = ws.Trainer(made)
        with pytest.raises(error):
            trainer.fit(X, Y, batch_size=SIZE, callbacks=[Watching(fail)], verbose=0)
        assert trainer.run.number == 20
        assert_nothing_is_watched(made)
        return made

    ahead = train()
    assert max(sent) > 8
    sent.one_by_one()
    assert same(ahead, train())


# ---- reads at a bad moment ----


def ahead_of(made, num=17):
    """Return the open loop of a trainer of the model, of which so many steps have been taken, and
    others been sent.
    """
    steps = ws.Trainer(made).steps(ws.Batches((X, Y), SIZE, seed=5))
    for _ in range(num):
        next(steps)
    return steps


def expected_after(sent, num=17):
    """Return the variables after `num` single steps."""
    sent.one_by_one()
    made = model(keras.layers.Dropout(0.5, seed=1))
    steps = ahead_of(made, num)
    assert sent == []
    steps.close()
    return [value.tobytes() for value in values(made)]


def held(made):
    return [np.asarray(v.value).tobytes() for v in [*made.variables, *made.optimizer.variables]]


@pytest.fixture
def made(sent):
    return model(keras.layers.Dropout(0.5, seed=1))


def test_several_threads_may_look_at_once(sent, made):
    steps = ahead_of(made)
    switch = sys.getswitchinterval()
    variables = [*made.variables, *made.optimizer.variables]
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            seen = list(
                pool.map(
                    lambda i: np.asarray(variables[i % len(variables)].value).tobytes(), range(800)
                )
            )
    finally:
        sys.setswitchinterval(switch)
    steps.close()
    assert max(sent) > 8
    assert seen[: len(variables)] == expected_after(sent)
    assert seen == (seen[: len(variables)] * 800)[:800]


def test_a_loop_that_garbage_collection_ends_loses_nothing(sent, made):
    class Owner:
        pass

    owner = Owner()
    owner.steps = ahead_of(made)
    owner.me = owner
    del owner
    gc.collect()
    assert held(made) == expected_after(sent)
    assert_nothing_is_watched(made)


LEFT = """
import keras, numpy as np, wholestep as ws
from wholestep import ahead

ahead._MOST_SECONDS = 1e9
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
steps = ws.Trainer(model).steps(ws.Batches((np.ones((90, 2)), np.ones((90, 1))), 3))
for _ in range(5):
    next(steps)
"""


@pytest.mark.slow
def test_a_script_may_end_while_updates_are_ahead():
    ended = subprocess.run(
        [sys.executable, "-c", LEFT], env=lean(), capture_output=True, text=True, timeout=100
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_two_loops_of_one_trainer_in_turns(sent, made):
    trainer = ws.Trainer(made)
    for _ in zip(
        *(trainer.steps(ws.Batches((X, Y), SIZE, seed=seed)) for seed in (5, 6)), strict=False
    ):
        pass
    trainer.update((X[:4], Y[:4]))
    del trainer
    gc.collect()
    assert int(made.optimizer.iterations.value) in (2 * NUM + 1, 2 * NUM + 2)
    assert_nothing_is_watched(made)
    seen = held(made)
    again = model(keras.layers.Dropout(0.5, seed=1))
    sent.one_by_one()
    trainer = ws.Trainer(again)
    for _ in zip(
        *(trainer.steps(ws.Batches((X, Y), SIZE, seed=seed)) for seed in (5, 6)), strict=False
    ):
        pass
    trainer.update((X[:4], Y[:4]))
    assert seen == held(again)


def test_a_look_just_before_updates_are_counted_takes_none_away(sent, made, monkeypatch):
    is_next = ahead._HeldUpdates.is_next
    looked = []

    def look_then(self, run, block):
        is_it = is_next(self, run, block)
        if is_it and not looked:
            looked.append(held(made))  # as a signal's handler may
        return is_it

    monkeypatch.setattr(ahead._HeldUpdates, "is_next", look_then)
    ahead_of(made).close()
    assert looked
    assert held(made) == expected_after(sent)


@pytest.mark.parametrize("context", ["disable_jit", "debug_nans", "transfer_guard"])
def test_a_reader_that_configured_jax_in_another_way_reads_the_same(sent, made, context):
    import jax

    steps = ahead_of(made)
    arguments = {"debug_nans": (True,), "transfer_guard": ("disallow_explicit",)}.get(context, ())
    with getattr(jax, context)(*arguments):
        value = made.layers[0].kernel.value
    steps.close()
    assert np.asarray(value).tobytes() == expected_after(sent)[0]


def test_updates_that_cannot_be_carried_out_again_are_not_lost(sent, made, monkeypatch):
    def fails(function):
        raise RuntimeError("out of memory")

    steps = ahead_of(made)
    monkeypatch.setattr(dispatcher, "_apart", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        made.get_weights()
    monkeypatch.undo()
    seen = held(made)
    steps.close()
    monkeypatch.setattr(ahead, "_MOST_SECONDS", -1.0)
    again = model(keras.layers.Dropout(0.5, seed=1))
    ahead_of(again).close()
    assert seen == held(again)


class Telling(ws.Objective):
    """A loss that tells the host of every batch."""

    def __init__(self, told):
        self.told = told

    def __call__(self, model, batch, training):
        import jax

        x, y = batch
        values = keras.losses.sparse_categorical_crossentropy(
            y, model(x, training=training), from_logits=True
        )
        jax.debug.callback(self.told.append, x[0, 0])
        return ws.Mean(values)


def test_what_a_program_tells_the_host_is_told_once_and_in_its_turn(sent):
    import jax

    told = []
    made = model()
    for step in ws.Trainer(made, Telling(told)).steps(ws.Batches((X, Y), SIZE)):
        if step.batch in (5, 9):
            made.get_weights()
            jax.effects_barrier()
            assert len(set(map(float, told))) == step.number
    assert len(told) == NUM


@pytest.mark.parametrize("reads", [True, False])
def test_only_who_sets_a_captured_variable_takes_back_what_was_sent(sent, reads):
    made = model()
    objective = Annealed()

    def look(callback, batch):
        return float(objective.scale.value) if reads else objective.scale.assign(0.5)

    watching = Watching(lambda callback, batch: look(callback, batch) if batch % 7 == 5 else None)
    ws.Trainer(made, objective).fit((X, Y), batch_size=SIZE, callbacks=[watching], verbose=0)
    assert (sum(sent) <= NUM) == reads


# ---- custom loops ----


def loop(look, **options):
    made = model(keras.layers.Dropout(0.5, seed=1))
    trainer = ws.Trainer(made, **options)
    found = []
    for step in trainer.steps(ws.Batches((X, Y), SIZE, seed=5), epochs=2):
        found.append((step.number, step.epoch, step.batch, look(trainer, step)))
        if found[-1][-1] == "leave":
            break
    return made, found


def unread(trainer, step):
    return None


def every_loss(trainer, step):
    return step.loss, step.logs["accuracy"]


def evaluate(trainer, step):
    return trainer.evaluate(X[:9], Y[:9], verbose=0) if step.batch == 12 else step.loss


def update_in_hand(trainer, step):
    return dict(trainer.update((X[:4], Y[:4]))) if step.batch == 12 else None


def fit_in_between(trainer, step):
    return trainer.fit(X[:9], Y[:9], batch_size=3, verbose=0).history if step.number == 12 else None


def leave(trainer, step):
    return "leave" if step.number == 39 else step.loss


WITHOUT = SimpleNamespace(
    is_holding=lambda run: False,
    num=lambda: 1,
    num_to_send=lambda block, state: 0,
    hand_out=lambda run, block: None,
    note_dispatch=lambda num: None,
    catch_up=lambda: False,
    finish=lambda: None,
)


@pytest.mark.parametrize(
    "look", [unread, every_loss, evaluate, update_in_hand, fit_in_between, leave]
)
@pytest.mark.slow
def test_steps_are_the_same_without_the_module_that_sends_ahead(sent, look, monkeypatch):
    made, found = loop(look)
    assert max(sent) > 8
    sent.clear()
    monkeypatch.setattr(dispatcher, "Ahead", lambda *_: WITHOUT)
    alone, expected = loop(look)
    assert not sent
    assert found == expected
    assert same(made, alone)
    assert_nothing_is_watched(made)


def test_a_snapshot_between_two_steps_is_of_the_update_that_was_told(sent):
    made = model(keras.layers.Dropout(0.5, seed=1))
    trainer = ws.Trainer(made)
    whole = []
    taken = {}
    for step in trainer.steps(ws.Batches((X, Y), SIZE, seed=5), epochs=2):
        whole.append((step.number, step.loss))
        if step.number in (20, 41):
            taken[step.number] = trainer.run.snapshot()
    assert max(sent) > 8
    for number, snapshot in taken.items():
        again = model(keras.layers.Dropout(0.5, seed=1), seed=9)
        second = ws.Trainer(again)
        second.run.restore(snapshot)
        rest = [
            (step.number, step.loss)
            for step in second.steps(ws.Batches((X, Y), SIZE, seed=5), epochs=2)
        ]
        assert rest == whole[number:]
        assert same(again, made)


def test_a_loop_that_is_left_open_can_be_looked_into(sent):
    made = model(keras.layers.Dropout(0.5, seed=1))
    other = model(keras.layers.Dropout(0.5, seed=1))
    steps = ws.Trainer(made).steps(ws.Batches((X, Y), SIZE, seed=5))
    for _ in range(17):
        next(steps)
    sent.one_by_one()
    for step in ws.Trainer(other).steps(ws.Batches((X, Y), SIZE, seed=5)):
        if step.number == 17:
            break
    assert same(made, other)
    assert len(values(made)) == len(made.variables) + len(made.optimizer.variables)


def test_a_state_that_is_large_is_not_copied(sent, fresh, monkeypatch):
    monkeypatch.setattr("wholestep.ahead._MOST_BYTES", 100)
    fresh.fit(lambda callback, batch: assert_nothing_is_watched(callback.model))
    assert sent == []


def test_several_in_a_call_of_the_callbacks_are_sent_ahead_too(sent, fresh):
    ahead = fresh.fit(every(6), steps_per_execution=3)
    assert max(sent) > 3
    assert all(num % 3 == 0 for num in sent if num > 2)
    sent.one_by_one()
    assert ahead == fresh.fit(every(6), steps_per_execution=3)


def test_replicas_send_ahead_too(sent):
    fresh = Fresh(replicas=2)
    ahead = fresh.fit(every(7))
    assert max(sent) > 4
    sent.one_by_one()
    assert ahead == fresh.fit(every(7))


def test_updates_may_be_written_by_another_thread_while_it_is_asked_whether_they_are_held(
    monkeypatch,
):
    class Held:
        run = object()

    reads = [Held(), None]
    monkeypatch.setattr(ahead.Ahead, "_held", property(lambda self: reads.pop(0)), raising=False)
    assert object.__new__(ahead.Ahead).is_holding(Held.run)
