"""Updates that are skipped have a bound, in a row or in an epoch, however updates are sent."""

import itertools

import keras
import numpy as np
import pytest
from small import model, same

import wholestep as ws

DRAW = np.random.default_rng(0)
ROWS = 40  # ten updates of four rows
X = DRAW.normal(size=(ROWS, 6)).astype("float32")
Y = DRAW.integers(0, 4, ROWS)
SIZE = 4


def spoiled(*updates):
    """Return the inputs, of which a row of each of these updates of an epoch is not finite."""
    x = np.array(X)
    for update in updates:
        x[SIZE * (update - 1) + 1] = np.nan
    return x


class Rows:
    """Rows that are loaded one by one."""

    def __init__(self, x):
        self.x = x

    def __len__(self):
        return ROWS

    def __getitem__(self, row):
        return self.x[row], Y[row]


def by_fit(trainer, x, epochs=1, **how):
    trainer.fit(x, Y, batch_size=SIZE, shuffle=False, epochs=epochs, verbose=0, **how)


def by_loaded_batches(trainer, x, epochs=1):
    trainer.fit(Rows(x), shuffle=False, epochs=epochs, batch_size=SIZE, verbose=0)


def by_hooks(trainer, x, epochs=1):
    """Train with a hook that may read the model, so that updates are sent singly."""
    hook = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)
    by_fit(trainer, x, epochs, callbacks=[hook])


def by_steps(trainer, x, epochs=1):
    for _ in trainer.steps(ws.Batches((x, Y), SIZE, shuffle=False), epochs=epochs):
        pass


def by_updates(trainer, x, epochs=1):
    for _ in range(epochs):
        for i in range(0, ROWS, SIZE):
            trainer.update((x[i : i + SIZE], Y[i : i + SIZE]))["loss"]


RUNS = [by_fit, by_loaded_batches, by_hooks, by_steps]


def ended(run, bound, x, **how):
    """Return the trainer whose run a bound has ended, and the error."""
    made = model(optimizer="sgd")
    trainer = ws.Trainer(made, on_nonfinite=bound)
    with pytest.raises(ws.NonFiniteError, match="a bound of Skip") as caught:
        run(trainer, x, **how)
    return trainer, caught.value


def after(num, x, run):
    """Return a model after the first `num` updates of which none ends the run."""
    made = model(optimizer="sgd")
    trainer = ws.Trainer(made, on_nonfinite="skip")
    if run is by_updates:
        for i in range(0, SIZE * num, SIZE):
            trainer.update((x[i : i + SIZE], Y[i : i + SIZE]))
    else:
        loop = trainer.steps(ws.Batches((x, Y), SIZE, shuffle=False))
        for _ in itertools.islice(loop, num):
            pass
        loop.close()
    return made


@pytest.mark.own
@pytest.mark.filterwarnings("ignore:Update . was skipped")
@pytest.mark.parametrize("run", [*RUNS, by_updates])
def test_a_run_ends_at_the_bound_in_a_row(run):
    x = spoiled(2, 3, 5, 6, 7, 9)
    trainer, error = ended(run, ws.Skip(in_a_row=3), x)
    assert error.update == 7
    assert list(error.rows) == ([1] if run is by_updates else [25])
    assert trainer.run.number == 6
    assert trainer.num_skipped == 4
    assert same(trainer.model, after(6, x, run))


@pytest.mark.own
@pytest.mark.filterwarnings("ignore:Update . was skipped")
@pytest.mark.parametrize("run", RUNS)
def test_a_run_ends_at_the_bound_of_an_epoch(run):
    x = spoiled(2, 5, 7)
    trainer, error = ended(run, ws.Skip(in_epoch=3), x, epochs=2)
    assert error.update == 7
    assert trainer.num_skipped == 2
    within = ws.Trainer(model(optimizer="sgd"), on_nonfinite=ws.Skip(in_epoch=4))
    run(within, x, epochs=2)  # each epoch counts anew
    assert within.num_skipped == 6


@pytest.mark.filterwarnings("ignore:Update . was skipped")
@pytest.mark.parametrize("run", RUNS)
def test_failures_in_a_row_go_on_from_one_epoch_to_the_next(run):
    x = spoiled(1, 2, 9, 10)
    trainer, error = ended(run, ws.Skip(in_a_row=3), x, epochs=2)
    assert error.update == 11
    assert trainer.num_skipped == 4


@pytest.mark.filterwarnings("ignore:Update . was skipped")
@pytest.mark.parametrize("run", [*RUNS, by_updates])
def test_a_run_within_its_bounds_is_that_of_one_without(run):
    x = spoiled(2, 3, 6, 9)
    free = ws.Trainer(model(optimizer="sgd"), on_nonfinite="skip")
    run(free, x, epochs=2)
    bound = ws.Trainer(model(optimizer="sgd"), on_nonfinite=ws.Skip(in_a_row=3, in_epoch=5))
    run(bound, x, epochs=2)
    assert same(free.model, bound.model)
    assert bound.num_skipped == free.num_skipped == 8


@pytest.mark.filterwarnings("ignore:Update . was skipped")
@pytest.mark.parametrize("run", [by_fit, by_steps, by_updates])
def test_a_run_that_was_ended_can_go_on_with_other_rows(run):
    trainer, _ = ended(run, ws.Skip(in_a_row=2), spoiled(3, 4))
    before = int(trainer.model.optimizer.iterations)
    run(trainer, spoiled(5))  # counts anew
    assert int(trainer.model.optimizer.iterations) == before + 9


@pytest.mark.filterwarnings("ignore:Update . was skipped")
def test_a_resumed_run_counts_the_failures_before_it(tmp_path):
    x = spoiled(4, 5, 6, 7)
    how = {"batch_size": SIZE, "shuffle": False, "verbose": 0}

    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 4:
                raise KeyboardInterrupt

    saves = ws.Checkpoints(tmp_path, every_steps=1)
    first = ws.Trainer(model(optimizer="sgd"), on_nonfinite=ws.Skip(in_a_row=3))
    with pytest.raises(KeyboardInterrupt):
        first.fit(x, Y, **how, callbacks=[Stops()], checkpoints=saves)
    second = ws.Trainer(model(optimizer="sgd"), on_nonfinite=ws.Skip(in_a_row=3))
    with pytest.raises(ws.NonFiniteError) as caught:
        second.fit(x, Y, **how, checkpoints=saves)
    assert caught.value.update == 6
    assert second.num_skipped == 2


class Own(keras.Model):
    """A model with a step of its own."""

    def __init__(self):
        super().__init__()
        self.layer = keras.layers.Dense(4)

    def call(self, x):
        return self.layer(x)

    def train_step(self, *given):
        return super().train_step(*given)


@pytest.mark.filterwarnings("ignore:Update . was skipped")
def test_a_step_of_ones_own_has_bounds_too():
    own = Own()
    own.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    trainer = ws.Trainer(own, on_nonfinite=ws.Skip(in_a_row=2))
    with pytest.raises(
        ws.NonFiniteError, match=r"a bound of Skip\(in_a_row=2\) .* raise the bound"
    ):
        by_fit(trainer, spoiled(3, 5, 6, 8))
    assert trainer.run.number == 5
    assert trainer.num_skipped == 2


def test_a_bound_is_a_number_of_python():
    assert repr(ws.Skip(in_a_row=np.int64(3))) == "Skip(in_a_row=3)"


@pytest.mark.parametrize("bounds", [{"in_a_row": 0}, {"in_epoch": 1.5}, {"in_a_row": "all"}])
def test_a_bound_is_a_count(bounds):
    with pytest.raises(ws.SpecificationError, match="must be a whole number of at least 1"):
        ws.Skip(**bounds)
