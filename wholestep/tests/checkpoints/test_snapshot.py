"""A snapshot of any boundary, restored elsewhere, resumes with the same bits."""

import enum
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import keras
import numpy as np
import pytest
from runs import (
    BATCHES,
    NO_XLA,
    ROWS,
    SIZE,
    Takes,
    X,
    Y,
    carried,
    check_same_bits,
    leaves,
    made,
    small,
)
from scripts import HERE, lean
from shares import on, share

import wholestep as ws
from wholestep.checkpoints.snapshot import RunFacts, from_json, to_json
from wholestep.errors import DamagedError


def check_goes_on(data, *batches, make=None, epochs=(), first=0, **how):
    """Fit with snapshots in between; go on from each of them in a trainer of another model; compare
    all.

    That trainer is a fresh one for snapshot number `first`; then it has trained to the end, and
    goes back.
    """
    how = {"epochs": 3, "verbose": 0, **how}
    make = make or made
    whole = ws.Trainer(make())
    other = ws.Trainer(make(seed=1))
    takes = Takes(whole.run, *batches, epochs=epochs)
    history = whole.fit(*data(), callbacks=[takes], **how)
    assert len(takes.taken) == len(batches) + len(epochs)
    for told, snapshot in [*takes.taken[first:], *takes.taken[:first]]:
        other.run.restore(snapshot)
        again = Takes(other.run)
        resumed = other.fit(*data(), callbacks=[again], **how)
        check_same_bits(leaves(whole.model), leaves(other.model))
        assert resumed.history == history.history
        assert resumed.epoch == history.epoch
        assert again.told == takes.told[told:]


def arrays():
    return X, Y


def rows():
    return (ws.Batches([(x, y) for x, y in zip(X, Y, strict=True)], SIZE),)


class Shuffles(keras.utils.PyDataset):
    """Batches that the data set shuffles itself, in its own hook."""

    def __init__(self):
        super().__init__()
        self.rng, self.order = np.random.default_rng(0), np.arange(ROWS)

    def __len__(self):
        return BATCHES

    def __getitem__(self, i):
        rows = self.order[i * SIZE : (i + 1) * SIZE]
        return X[rows], Y[rows]

    def on_epoch_end(self):
        self.order = self.rng.permutation(ROWS)


def generator():
    while True:
        for start in np.random.default_rng(0).integers(0, ROWS - SIZE, size=100):
            yield X[start : start + SIZE], Y[start : start + SIZE]


class Restarts:
    """A stream that begins again, in another order each time."""

    def __init__(self):
        self.passes = 0

    def __iter__(self):
        order = np.random.default_rng(self.passes).permutation(ROWS)
        self.passes += 1
        for start in range(0, ROWS, SIZE):
            yield X[order[start : start + SIZE]], Y[order[start : start + SIZE]]


def by_length(**how):
    lengths = np.random.default_rng(1).integers(1, 9, size=ROWS)
    source = [
        {"x": np.full(n, i / ROWS, "float32"), "y": np.full(n, i % 2, "float32")}
        for i, n in enumerate(lengths)
    ]
    boundaries = [8] if how["pack"] else [4, 8]
    return (
        ws.Batches(
            source, tokens=16, length=lambda row: len(row["x"]), boundaries=boundaries, **how
        ),
    )


class PerPlace(ws.Objective):
    """A loss of every place of a padded sequence."""

    def __call__(self, model, batch, training):
        found = model(batch["x"][..., None], training=training)[..., 0]
        return ws.Mean((found - batch["y"]) ** 2, batch.get("weight", batch["x"] != 0))


SOURCES = {
    "arrays": (arrays, {"batch_size": SIZE}),
    "rows": (rows, {}),
    "PyDataset": (lambda: (Shuffles(),), {}),
    "generator": (lambda: (generator(),), {"steps_per_epoch": BATCHES}),
    "begins again": (lambda: (Restarts(),), {}),
    "arrays, short epochs": (arrays, {"batch_size": SIZE, "steps_per_epoch": 4}),
}


@pytest.mark.parametrize("name", share(SOURCES))
def test_fit_goes_on_after_any_batch(name):
    data, how = SOURCES[name]
    after = [2, BATCHES, BATCHES + 1, 11 if "short" in name else 2 * BATCHES]
    check_goes_on(data, *after, first=list(SOURCES).index(name) % len(after), **how)


@pytest.mark.parametrize("name", share(["arrays", "PyDataset", "begins again"]))
@pytest.mark.slow
def test_fit_goes_on_after_an_epoch(name):
    data, how = SOURCES[name]
    first = int(name == "arrays")
    check_goes_on(
        data, make=small, epochs=(0, 2), first=first, validation_data=(X[:9], Y[:9]), **how
    )


@pytest.mark.parametrize("pack", share([False, True]))
def test_buckets_and_packs_go_on(pack):
    class Per(PerPlace):
        def __call__(self, model, batch, training):
            batch = (
                batch
                if not pack
                else {**batch, "weight": batch["segments"] > 0}
                if "segments" in batch
                else batch
            )
            return super().__call__(model, batch, training)

    def trained(at):
        keras.utils.set_random_seed(0 if at is None else 1)
        model = keras.Sequential(
            [keras.Input((None, 1)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)]
        )
        return ws.Trainer(model, Per(), optimizer="adam", seed=4)

    whole = trained(None)
    takes = Takes(whole.run, 1, 4)
    other = trained(1)
    history = whole.fit(*by_length(pack=pack), epochs=2, callbacks=[takes], verbose=0).history
    for told, snapshot in takes.taken[:: -1 if pack else 1]:
        other.run.restore(snapshot)
        again = Takes(other.run)
        assert (
            other.fit(*by_length(pack=pack), epochs=2, callbacks=[again], verbose=0).history
            == history
        )
        check_same_bits(leaves(whole.model), leaves(other.model))
        assert again.told == takes.told[told:]


@pytest.mark.parametrize(
    "name", share(["arrays", "batches", "generator", "PyDataset", "begins again"])
)
@pytest.mark.slow
def test_ones_own_loop_goes_on_after_every_step(name):
    def data():
        if name in ("arrays", "batches"):
            return (X, Y) if name == "arrays" else ws.Batches((X, Y), SIZE)
        return SOURCES[name][0]()[0]

    def loop(trainer, wanted=(), most=14):
        told = []
        taken = {}
        for step in trainer.steps(data(), epochs=2):
            told.append((step.number, step.epoch, step.batch, step.loss, step.logs))
            if step.number in wanted:
                taken[step.number] = carried(trainer.run.snapshot())
            if step.number == most:
                break
        return told, taken

    whole = ws.Trainer(small())
    told, taken = loop(whole, wanted=range(1, 2 * BATCHES + 1))
    assert len(taken) == 2 * (1 if name == "arrays" else BATCHES)  # which come in batches of 32
    other = ws.Trainer(small(seed=1))
    for number in {1, BATCHES - 1, BATCHES, BATCHES + 3, 2 * BATCHES} & set(taken):
        other.run.restore(taken[number])
        assert loop(other)[0] == told[number:]
        check_same_bits(leaves(whole.model), leaves(other.model))


@on("jax")
@pytest.mark.slow
def test_a_fit_between_two_steps_leaves_the_loop_where_it_stood():
    first = ws.Trainer(made())
    second = ws.Trainer(made(1))
    told = []
    taken = None
    for step in first.steps(ws.Batches((X, Y), SIZE), epochs=2):
        told.append((step.epoch, step.batch, step.loss))
        if step.batch == 2:
            first.fit(X[:8], Y[:8], epochs=1, verbose=0)
        if (step.epoch, step.batch) == (0, 4):
            taken = first.run.snapshot()
            place = len(told)
            with pytest.raises(ws.SpecificationError, match="between calls"):
                first.run.restore(taken)
    second.run.restore(carried(taken))
    rest = []
    for step in second.steps(ws.Batches((X, Y), SIZE), epochs=2):
        rest.append((step.epoch, step.batch, step.loss))
        if step.batch == 2:
            second.fit(X[:8], Y[:8], epochs=1, verbose=0)
    assert rest == told[place:]
    check_same_bits(leaves(first.model), leaves(second.model))


@pytest.mark.parametrize("are_given", share([False, True]))
def test_the_next_call_goes_on_with_the_next_epochs_order(are_given):
    def data():
        return (ws.Batches((X, Y), SIZE),) if are_given else (X, Y)

    size = {} if are_given else {"batch_size": SIZE}
    whole = ws.Trainer(small())
    other = ws.Trainer(small(seed=1))
    given = data()
    whole.fit(*given, verbose=0, **size)
    other.run.restore(carried(whole.run.snapshot()))
    whole.fit(*given, verbose=0, **size)
    other.fit(*data(), verbose=0, **size)
    check_same_bits(leaves(whole.model), leaves(other.model))


@on("jax")
@pytest.mark.slow
def test_updates_in_hand_go_on():
    whole = ws.Trainer(made())
    other = ws.Trainer(made(seed=1))
    first = [(X[i : i + n], Y[i : i + n]) for i, n in ((0, 5), (5, 7), (2, 5))]
    for batch in first:
        whole.update(batch)
    other.run.restore(carried(whole.run.snapshot()))
    for batch in first[::-1]:
        assert dict(whole.update(batch)) == dict(other.update(batch))
    check_same_bits(leaves(whole.model), leaves(other.model))
    assert other.run.number == whole.run.number == 6


def watchers():
    stops = keras.callbacks.EarlyStopping(
        "val_loss", patience=2, min_delta=0.5, restore_best_weights=True
    )
    return [
        stops,
        keras.callbacks.ReduceLROnPlateau("val_loss", patience=1, factor=0.5, min_delta=0.5),
    ]


@on("jax")
def test_callbacks_go_on_with_what_they_have_seen():
    data, how = SOURCES["arrays"]
    how = {"epochs": 6, "validation_data": (X[:9], Y[:9]), "batch_size": SIZE, "verbose": 0}
    whole = ws.Trainer(small())
    other = ws.Trainer(small(seed=1))
    takes = Takes(whole.run, epochs=(0, 1, 2))
    history = whole.fit(*data(), callbacks=[*watchers(), takes], **how)
    assert len(history.epoch) == len(takes.taken) == 3  # it stopped early
    assert "learning_rate" in history.history
    for _, snapshot in takes.taken:
        other.run.restore(snapshot)
        again = other.fit(*data(), callbacks=[*watchers(), Takes(other.run)], **how)
        assert again.history == history.history
        check_same_bits(leaves(whole.model), leaves(other.model))


def test_skipped_updates_and_a_loss_scale_go_on():
    bad = X.copy()
    bad[[1, 9]] = np.nan

    def make(seed=0):
        keras.utils.set_random_seed(seed)
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        model.compile(
            keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), dynamic_growth_steps=3),
            "mse",
        )
        return model

    for wraps in (False, True):

        def trainer(seed, wraps=wraps):
            model = make(seed)
            if not wraps:
                model.compile(keras.optimizers.SGD(0.1), "mse")
            return ws.Trainer(model, on_nonfinite="skip")

        whole = trainer(0)
        other = trainer(1)
        takes = Takes(whole.run, 8)
        whole.fit(bad, Y, batch_size=SIZE, epochs=3, callbacks=[takes], verbose=0)
        other.run.restore(takes.only())
        other.fit(bad, Y, batch_size=SIZE, epochs=3, callbacks=[Takes(other.run)], verbose=0)
        check_same_bits(leaves(whole.model), leaves(other.model))
        assert other.num_skipped == whole.num_skipped > 0
        assert other.run.number == whole.run.number


@on("jax")
def test_a_callback_of_ones_own_keeps_what_it_says():
    class Counts(keras.callbacks.Callback):
        seen = 0

        def on_train_batch_end(self, batch, logs=None):
            self.seen += 1

        def get_state(self):
            return {"seen": self.seen}

        def set_state(self, state):
            self.seen = state["seen"]

    whole = ws.Trainer(small())
    other = ws.Trainer(small(seed=1))
    takes = Takes(whole.run, 4)
    one = Counts()
    two = Counts()
    whole.fit(X, Y, batch_size=SIZE, epochs=2, callbacks=[one, takes], verbose=0)
    other.run.restore(takes.only())
    other.fit(X, Y, batch_size=SIZE, epochs=2, callbacks=[two, Takes(other.run)], verbose=0)
    assert one.seen == two.seen == 2 * BATCHES


def test_what_an_objective_assigns_besides_goes_on():
    class Centres(ws.Objective):
        """Subtracts a moving mean, whose variable belongs to no model."""

        def __init__(self):
            self.mean = keras.Variable(0.0)

        def __call__(self, model, batch, training):
            found = model(batch, training=training)[:, 0]
            self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(found))
            return ws.Mean((found - self.mean) ** 2)

    def trainer(seed):
        keras.utils.set_random_seed(seed)
        return ws.Trainer(
            keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)]), Centres(), optimizer="sgd"
        )

    whole = trainer(0)
    other = trainer(1)
    takes = Takes(whole.run, 3)
    history = whole.fit(X, batch_size=SIZE, epochs=2, callbacks=[takes], verbose=0).history
    other.run.restore(takes.only())
    assert (
        other.fit(X, batch_size=SIZE, epochs=2, callbacks=[Takes(other.run)], verbose=0).history
        == history
    )
    check_same_bits(leaves(whole.model), leaves(other.model))


def test_what_was_found_by_trying_is_not_tried_again(monkeypatch):
    first = ws.Trainer(small(), microbatch_size=2)
    first.fit(X, Y, batch_size=SIZE, verbose=0)
    snapshot = carried(first.run.snapshot())
    monkeypatch.setattr("wholestep.plan.probe", None)
    monkeypatch.setattr("wholestep.plan.metrics_ignore_padding", None)
    second = ws.Trainer(small(seed=1), microbatch_size=2)
    second.run.restore(snapshot)
    second.fit(X, Y, batch_size=SIZE, verbose=0)
    assert second.run.findings == first.run.findings


SCRIPT = """
import json, sys
sys.path.insert(0, {tests!r})
import conftest  # the engine is set up as here, or other bits would be no wonder
import numpy as np
import wholestep as ws
from runs import NO_XLA, SIZE, Takes, X, Y, leaves, made
from wholestep.checkpoints.snapshot import Snapshot
held = np.load({arrays!r})
trainer = ws.Trainer(made(seed=1), **NO_XLA)
trainer.run.restore(Snapshot(dict(held), json.load(open({facts!r}))))
history = trainer.fit(X, Y, batch_size=SIZE, epochs=3, callbacks=[Takes(trainer.run)], verbose=0)
np.savez({out!r}, *leaves(trainer.model), loss=history.history["loss"])
"""


@pytest.mark.slow
def test_a_fresh_process_goes_on_with_the_same_bits(tmp_path):
    trainer = ws.Trainer(made(), **NO_XLA)
    takes = Takes(trainer.run, 8)
    history = trainer.fit(X, Y, batch_size=SIZE, epochs=3, callbacks=[takes], verbose=0)
    names = {name: str(tmp_path / name) for name in ("arrays.npz", "facts.json", "out.npz")}
    np.savez(names["arrays.npz"], **takes.only().arrays)
    Path(names["facts.json"]).write_text(json.dumps(takes.only().facts))
    script = SCRIPT.format(
        tests=str(Path(__file__).parents[1]),
        arrays=names["arrays.npz"],
        facts=names["facts.json"],
        out=names["out.npz"],
    )
    subprocess.run([sys.executable, "-c", script], check=True, env=lean(HERE), timeout=300)
    found = np.load(names["out.npz"])
    check_same_bits(leaves(trainer.model), [found[f"arr_{i}"] for i in range(len(found.files) - 1)])
    assert found["loss"].tolist() == history.history["loss"]


# ---- odd moments ----


class At(keras.callbacks.Callback):
    """Takes a snapshot in the first call of a hook whose first argument is this."""

    def __init__(self, run, hook, at=None):
        super().__init__()
        self.taken = None
        setattr(self, hook, self.take)
        self.run = run
        self.at = at

    def take(self, number=None, logs=None):
        if self.taken is None and (self.at is None or number == self.at):
            self.taken = carried(self.run.snapshot())


MOMENTS = {  # those of a batch for themselves: with one of them every update is sent alone
    "epochs": [
        ("on_train_begin", None),
        ("on_epoch_begin", 1),
        ("on_test_begin", None),
        ("on_test_end", None),
        ("on_train_end", None),
    ],
    "batches": [("on_train_batch_begin", 3), ("on_test_batch_end", 1)],
}


@pytest.mark.parametrize("of", share(MOMENTS))
@pytest.mark.slow
def test_a_snapshot_may_be_taken_in_any_hook(of):
    how = {"epochs": 2, "batch_size": SIZE, "validation_data": (X[:9], Y[:9]), "verbose": 0}
    whole = ws.Trainer(small())
    other = ws.Trainer(small(seed=1))
    for trainer in (whole, other):  # a second call: it is about the place in that one
        trainer.fit(X, Y, batch_size=SIZE, verbose=0)
    moments = [At(whole.run, hook, at) for hook, at in MOMENTS[of]]
    history = whole.fit(X, Y, callbacks=moments, **how).history
    for (hook, _), moment in zip(MOMENTS[of], moments, strict=True):
        if hook == "on_train_end":
            history = whole.fit(X, Y, **how).history
        other.run.restore(moment.taken)
        assert other.fit(X, Y, **how).history == history
        check_same_bits(leaves(whole.model), leaves(other.model))


def test_a_run_goes_back_in_the_same_process():
    trainer = ws.Trainer(small())
    data = ws.Batches((X, Y), SIZE)
    takes = Takes(trainer.run, 2)
    history = trainer.fit(data, epochs=3, callbacks=[takes], verbose=0).history
    after = leaves(trainer.model)
    trainer.run.restore(takes.only())
    assert trainer.fit(data, epochs=3, callbacks=[Takes(trainer.run)], verbose=0).history == history
    check_same_bits(leaves(trainer.model), after)
    stream = ws.Batches(Restarts())
    trainer.fit(stream, verbose=0)
    taken = trainer.run.snapshot()
    next(stream)
    trainer.run.restore(taken)
    with pytest.raises(ws.SpecificationError, match="pass it at its first batch"):
        trainer.fit(stream, verbose=0)


def test_the_values_are_there_at_once():
    whole = ws.Trainer(small())
    other = ws.Trainer(small(seed=1))
    whole.fit(X, Y, batch_size=SIZE, verbose=0)
    taken = carried(whole.run.snapshot())
    other.run.restore(taken)
    check_same_bits(whole.model.get_weights(), other.model.get_weights())
    assert other.run.snapshot() is taken
    serving = ws.Trainer(small(seed=2), Centred())
    serving.model.optimizer = None
    serving.run.restore(taken)
    check_same_bits(whole.model.get_weights(), serving.model.get_weights())
    loop = other.steps((X, Y))
    next(loop)
    with pytest.raises(ws.SpecificationError, match="between calls"):
        other.run.restore(taken)
    loop.close()
    other.run.restore(carried(other.run.snapshot()), goes_on=False)
    assert len(other.fit(X, Y, batch_size=SIZE, epochs=2, verbose=0).epoch) == 2


class Centred(ws.Objective):
    def __call__(self, model, batch, training):
        return ws.Mean(model(batch[0], training=training)[:, 0] ** 2)


@on("jax")
def test_a_run_that_failed_is_taken_out_with_what_its_callbacks_have_seen():
    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if self.model.optimizer.iterations == 8:
                raise KeyboardInterrupt

    how = {"epochs": 4, "batch_size": SIZE, "validation_data": (X[:9], Y[:9]), "verbose": 0}

    whole = ws.Trainer(small())
    other = ws.Trainer(small(1))
    history = whole.fit(X, Y, callbacks=[*watchers(), Takes(whole.run)], **how)
    left = ws.Trainer(small())
    with pytest.raises(KeyboardInterrupt):
        left.fit(X, Y, callbacks=[*watchers(), Takes(left.run), Fails()], **how)
    other.run.restore(carried(left.run.snapshot()))
    again = other.fit(X, Y, callbacks=[*watchers(), Takes(other.run)], **how)
    assert (again.epoch, again.history) == (history.epoch, history.history)
    check_same_bits(leaves(whole.model), leaves(other.model))


def test_a_snapshot_counts_no_skipped_update_twice():
    bad = X.copy()
    bad[5] = np.nan
    trainer = ws.Trainer(small(), on_nonfinite="skip")
    numbers = []
    for step in trainer.steps(ws.Batches((bad, Y), SIZE, shuffle=False), epochs=2):
        numbers.append(step.number)
        if step.number == 2:
            assert trainer.run.snapshot().facts["num_skipped"] == 1
    assert numbers == list(range(1, 2 * BATCHES + 1))
    assert trainer.num_skipped == 2


def test_a_run_that_failed_goes_on_before_the_failed_update():
    bad = X.copy()
    bad[6] = np.nan
    trainer = ws.Trainer(small())
    other = ws.Trainer(small(seed=1))
    with pytest.raises(ws.NonFiniteError):
        trainer.fit(bad, Y, batch_size=SIZE, shuffle=False, verbose=0)
    other.run.restore(carried(trainer.run.snapshot()))
    other.fit(X, Y, batch_size=SIZE, shuffle=False, verbose=0)
    assert other.run.number == BATCHES


# ---- what cannot be ----


@on("jax")
@pytest.mark.slow
def test_what_cannot_go_on_is_refused_before_anything_changes():
    trainer = ws.Trainer(made())
    with pytest.raises(ws.SpecificationError, match="has begun"):
        trainer.run.snapshot()
    takes = Takes(trainer.run, 2)
    trainer.fit(X, Y, batch_size=SIZE, callbacks=[takes], verbose=0)
    with pytest.raises(ws.SpecificationError, match="takes what snapshot"):
        trainer.run.restore({"params/0": X})
    narrow = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1, activation="sigmoid")])
    narrow.compile("adam", "binary_crossentropy")
    other = ws.Trainer(narrow)
    before = leaves(narrow)
    with pytest.raises(
        ws.SpecificationError, match="The restored run is another one: its model's weights"
    ):
        other.run.restore(takes.only())
    assert other.run.restored is None
    check_same_bits(before, leaves(narrow)[: len(before)])
    again = ws.Trainer(made())
    again.run.restore(takes.only())
    with pytest.raises(ws.SpecificationError, match="it was trained by fit"):
        list(again.steps(ws.Batches((X, Y), SIZE)))
    with pytest.raises(ws.SpecificationError, match="The restored run is another one: its data"):
        again.fit(X[:8], Y[:8], batch_size=SIZE, verbose=0)
    assert again.run.number == 2
    again.fit(X, Y, batch_size=SIZE, verbose=0)  # nothing was lost
    check_same_bits(leaves(trainer.model), leaves(again.model))
    trainer.model.compile("sgd", "binary_crossentropy")
    with pytest.raises(ws.SpecificationError, match="as it was trained"):
        trainer.run.snapshot()
    trainer.fit(X, Y, verbose=0)
    assert len(trainer.run.snapshot().facts["paths"]["slots"]) == 2


def test_an_update_that_failed_unseen_is_in_no_snapshot():
    bad = X.copy()
    bad[6] = np.nan
    trainer = ws.Trainer(small())
    for step in trainer.steps(ws.Batches((bad, Y), SIZE, shuffle=False)):
        if step.number == 2:
            with pytest.raises(ws.NonFiniteError, match="Update 2"):
                trainer.run.snapshot()
            break
    assert trainer.run.number == 2


def test_a_trainer_without_an_optimizer_has_no_run_to_take_out():
    trainer = ws.Trainer(keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)]), Centred())
    trainer.evaluate((X, Y), verbose=0)
    with pytest.raises(ws.SpecificationError, match="A snapshot needs a run that has begun"):
        trainer.run.snapshot()


def test_what_is_kept_is_numbers_words_and_arrays():
    arrays = {}
    kept = to_json(
        {"a": [1, 2.5, None, np.float32(3)], "b": {"c": np.arange(3), "d": "word"}}, "it", arrays
    )
    assert json.loads(json.dumps(kept)) == kept
    back = from_json(kept, arrays)
    assert back["a"] == [1, 2.5, None, np.float32(3)]
    assert isinstance(back["a"][3], np.float32)
    np.testing.assert_array_equal(back["b"]["c"], [0, 1, 2])
    same = {"a/b": np.ones(1), "a": {"b": np.zeros(1)}, "a/b+": b"word"}
    arrays = {}
    assert from_json(to_json(same, "it", arrays), arrays) == same


class Colour(enum.IntEnum):
    RED = 1


class Word(enum.StrEnum):
    YES = "yes"


@pytest.mark.parametrize(
    "wrong",
    [
        *(
            {"a": object()},
            {1: 2},
            {"array": "name"},
            {"bytes": "name"},
            {"float": "nan"},
            {Word.YES: 1},
        ),
        *(
            Colour.RED,
            Word.YES,
            bytearray(b"word"),
            memoryview(b"word"),
            np.ma.masked_array([1, 2], [True, False]),
        ),
    ],
    ids=lambda wrong: type(wrong).__name__,
)
def test_what_would_come_back_as_something_else_is_refused(wrong):
    with pytest.raises(ws.SpecificationError, match=r"[Aa] state must be"):
        to_json({"held": wrong}, "it", {})


def nested(levels):
    held = 1
    for _ in range(levels):
        held = [held]
    return held


class Endless(Sequence):
    def __len__(self):
        return 1

    def __getitem__(self, at):
        return self


def test_a_state_that_holds_itself_is_refused_with_its_path():
    own = {"seen": 1}
    own["own"] = own
    listed = []
    listed.append(listed)
    for wrong, path in [
        (own, "it/own/own/own"),
        ([own], "it/0/own/own"),
        (listed, "it/0/0"),
        (Endless(), "it/0/0"),
    ]:
        with pytest.raises(
            ws.SpecificationError, match=f"at most 100 levels of dicts and lists.*more at {path}"
        ):
            to_json(wrong, "it", {})
    with pytest.raises(ws.SpecificationError, match="at most 100 levels"):
        to_json(nested(600), "it", {})
    assert from_json(to_json(nested(100), "it", {}), {}) == nested(100)


def test_facts_that_no_run_has_written_are_damage_and_names_of_a_later_release_are_none():
    trainer = ws.Trainer(small())
    next(trainer.steps(ws.Batches((X, Y), SIZE)))
    taken = trainer.run.snapshot()
    facts = taken.facts
    later = facts | {
        "news": 1,
        "place": facts["place"] | {"news": 1},
        "findings": facts["findings"] | {"news": 1},
    }
    assert RunFacts.of(replace(taken, facts=later)) == RunFacts.of(taken)
    wrong = [{"number": word} for word in ("1", None, True, 1.5, [1])]
    wrong += [
        {"place": 3},
        {"place": facts["place"] | {"done": "1"}},
        {"data": {"position": [1]}},
        {"paths": {}},
    ]
    wrong += [
        {"layout": [["loss"]]},
        {"findings": {"sizes": [1]}},
        {"also": {"seen": {"array": "nowhere"}}},
    ]
    wrong += [{"paths": facts["paths"] | {"params": []}}, {"also": {"seen": nested(2000)}}]
    saved = {
        "stops": False,
        "told": [["CSVLogger", {"log": {"file": "a", "size": 1, "end": ""}}]],
        "settings": [{}],
    }
    assert (
        RunFacts.of(replace(taken, facts=facts | {"also": {"callbacks": saved}})).also["callbacks"]
        == saved
    )
    others = [
        {"stops": 1},
        {"told": None},
        {"told": [["A"]]},
        {"told": [["A", 3]]},
        {"settings": [{}, {}]},
    ]
    others += [
        {"told": [["A", {"log": 3}]]},
        {"told": [["A", {"log": {"file": "a"}}]]},
        {"settings": [3]},
    ]
    wrong += [{"also": {"callbacks": saved | other}} for other in others] + [
        {"also": {"callbacks": None}}
    ]
    for change in wrong:
        with pytest.raises(DamagedError, match="The manifest lacks facts of a run"):
            RunFacts.of(replace(taken, facts=facts | change))
    with pytest.raises(DamagedError):
        RunFacts.of(
            replace(taken, facts={key: value for key, value in facts.items() if key != "epochs"})
        )


class Counted:
    """An iterator of batches with a state, of which one may be bad."""

    def __init__(self, bad=None):
        self.at = 0
        self.bad = bad

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == BATCHES:
            raise StopIteration
        rows = slice(SIZE * self.at, SIZE * (self.at + 1))
        self.at += 1
        return (np.full_like(X[rows], np.nan) if self.at - 1 == self.bad else X[rows]), Y[rows]

    def get_state(self):
        return self.at

    def set_state(self, state):
        self.at = state


class Stateless(Counted):
    def __getattribute__(self, name):
        if name in ("get_state", "set_state"):
            raise AttributeError(name)
        return object.__getattribute__(self, name)


@pytest.mark.parametrize("kind", [Counted, Stateless])
@pytest.mark.parametrize("call", ["fit", "steps"])
@pytest.mark.slow
def test_a_stream_goes_on_at_the_batch_that_failed(kind, call):
    def train(trainer, data):
        if call == "fit":
            trainer.fit(data, verbose=0)
        else:
            held.extend(trainer.steps(data))

    held = []
    whole, failed, other = (ws.Trainer(small()) for _ in range(3))
    train(whole, kind())
    try:
        train(failed, kind(bad=2))
    except ws.NonFiniteError as error:
        held.append(error)  # and the loop's frames
        snapshot = carried(failed.run.snapshot())
    other.run.restore(snapshot)
    train(other, kind())
    assert other.run.number == BATCHES
    check_same_bits(leaves(whole.model), leaves(other.model))


@pytest.mark.slow
def test_a_batch_in_hand_is_no_batch_of_the_stream():
    class Updates(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(batch)
            trainer.update((X[:SIZE], Y[:SIZE]))
            if batch == 2:
                taken.append(carried(trainer.run.snapshot()))

    seen = []
    taken = []
    trainer = ws.Trainer(small())
    other = ws.Trainer(small())
    trainer.fit(Stateless(), callbacks=[Updates()], verbose=0)
    assert seen == list(range(BATCHES))
    other.run.restore(taken[0])
    other.fit(Stateless(), verbose=0)
    assert other.run.number == 3 + BATCHES
