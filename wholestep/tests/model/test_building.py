"""A model that was never called is built by the first batch, which changes no value."""

import keras
import numpy as np
import pytest
from small import ROWS, X, Y, model, values

import wholestep as ws

L = keras.layers
TARGETS = Y[:, None].astype("float32")


def dense(units):
    return L.Dense(units, kernel_initializer=keras.initializers.RandomNormal(seed=units))


class Squared(ws.Objective):
    def __init__(self):
        self.calls = 0

    def __call__(self, model, batch, training):
        self.calls += 1
        x, y = batch
        return ws.Mean((model(x, training=training) - y) ** 2)


class Encoding(keras.Model):
    """A model as in the guides of Keras: parts, a custom `train_step`, and no `call`."""

    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential([dense(3), L.BatchNormalization(), L.Dropout(0.5, seed=1)])
        self.head = dense(1)
        self.tracker = keras.metrics.Mean(name="tracker")

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, data):
        raise AssertionError


class OfParts(Squared):
    def __call__(self, model, batch, training):
        self.calls += 1
        x, y = batch
        return ws.Mean((model.head(model.encoder(x, training=training)) - y) ** 2)


def sequence():
    return keras.Sequential([dense(3), L.BatchNormalization(), L.Dropout(0.5, seed=1), dense(1)])


def build_by_hand(made):
    if isinstance(made, Encoding):
        made.encoder.build((None, 6))
        made.head.build((None, 3))
    else:
        made.build((None, 6))


@pytest.mark.parametrize(("make", "objective"), [(sequence, Squared), (Encoding, OfParts)])
def test_an_objectives_model_is_built_from_the_first_batch(make, objective):
    ours = make()
    by_hand = make()
    build_by_hand(by_hand)
    counted = objective()
    trainer = ws.Trainer(ours, counted, optimizer=keras.optimizers.SGD(0.1))
    trainer.update((X, TARGETS))
    ws.Trainer(by_hand, objective(), optimizer=keras.optimizers.SGD(0.1)).update((X, TARGETS))
    for a, b in zip(values(ours), values(by_hand), strict=True):
        assert a.tobytes() == b.tobytes()
    calls = counted.calls
    trainer.update((X, TARGETS))
    assert counted.calls == calls  # nothing is traced again


@pytest.mark.parametrize("how", ["fit", "evaluate", "steps"])
def test_whatever_comes_first_builds_it(how):
    made = sequence()
    trainer = ws.Trainer(made, Squared(), optimizer="sgd")
    call = {
        "fit": trainer.fit,
        "evaluate": trainer.evaluate,
        "steps": lambda x, verbose: list(trainer.steps(x)),
    }[how]
    call(ws.Batches((X, TARGETS), ROWS), verbose=0)
    assert made.built


def test_a_prediction_builds_it_too_and_moves_nothing():
    class Counting(L.Layer):
        def build(self, shape):
            self.count = self.add_weight(
                shape=(), dtype="int32", initializer="zeros", trainable=False
            )

        def call(self, x):
            self.count.assign_add(1)
            return x

    made = keras.Sequential([Counting(), dense(3)])
    found = ws.Trainer(made, Squared()).predict(X, verbose=0)
    counted = int(made.layers[0].count)
    assert counted <= 1  # the one batch that was predicted
    np.testing.assert_allclose(found, made.predict(X, verbose=0), atol=1e-6)


class Loads(keras.utils.PyDataset):
    """Batches of 5 rows, which are counted."""

    def __init__(self):
        super().__init__()
        self.num_loads = 0

    def __len__(self):
        return ROWS // 5

    def __getitem__(self, i):
        self.num_loads += 1
        return X[5 * i : 5 * i + 5], Y[5 * i : 5 * i + 5]


def test_a_call_loads_no_batch_but_those_of_its_pass():
    made = model()
    trainer = ws.Trainer(made)
    trainer.fit(X, Y, verbose=0)  # which builds the metrics
    data = Loads()
    held_out = Loads()
    trainer.fit(data, validation_data=held_out, epochs=3, verbose=0)
    assert (data.num_loads, held_out.num_loads) == (3 * len(data), 3 * len(held_out))
    trainer.evaluate(held_out, verbose=0)
    trainer.predict(held_out, verbose=0)
    assert held_out.num_loads == 5 * len(held_out)


@pytest.mark.parametrize("objective", [None, Squared()])
def test_a_look_at_data_builds_no_optimizer_and_the_next_update_does(objective):
    made = model(loss="mse")
    expected = model(loss="mse")
    trainer = ws.Trainer(made, objective)
    targets = keras.ops.one_hot(Y, 4)
    trainer.predict(X, verbose=0)
    trainer.evaluate(X, targets, verbose=0)
    assert not made.optimizer.built
    trainer.update((X, targets))
    ws.Trainer(expected, objective).update((X, targets))
    assert len(made.optimizer.variables) == len(expected.optimizer.variables)
    for a, b in zip(values(made), values(expected), strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("how", ["fit", "trainer", "build"])
def test_an_optimizer_that_others_build_after_an_evaluation_is_part_of_the_run(how):
    made = model()
    expected = model()
    trainer = ws.Trainer(made)
    trainer.evaluate(X, Y, verbose=0)
    builds = {
        "fit": lambda made: made.fit(X, Y, verbose=0, shuffle=False),
        "trainer": lambda made: ws.Trainer(made).fit(X, Y, verbose=0),
        "build": lambda made: made.optimizer.build(made.trainable_variables),
    }
    for one in (made, expected):
        builds[how](one)
    trainer.fit(X, Y, verbose=0)
    ws.Trainer(expected).fit(X, Y, verbose=0)
    for a, b in zip(values(made), values(expected), strict=True):
        assert a.tobytes() == b.tobytes()
    assert len(trainer.run.snapshot().facts["paths"]["slots"]) == len(made.optimizer.variables)


class Adding(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = dense(3)

    def call(self, x):
        hidden = self.dense(x)
        self.add_loss(keras.ops.mean(hidden**2))
        return hidden


def test_a_model_compiled_with_losses_of_its_layers_alone():
    ours = Adding()
    theirs = Adding()
    for made in (ours, theirs):
        made.compile(keras.optimizers.SGD(0.1))
    how = {"batch_size": 10, "epochs": 2, "shuffle": False, "verbose": 0}
    trainer = ws.Trainer(ours)
    one = trainer.fit(X, **how).history
    two = theirs.fit(X, **how).history
    np.testing.assert_allclose(one["loss"], two["loss"], rtol=1e-5)
    for a, b in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    np.testing.assert_allclose(
        trainer.evaluate(X, verbose=0), theirs.evaluate(X, verbose=0), rtol=1e-5
    )


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("fit", "Encoding, which has none.*write the loss as a wholestep.Objective"),
        ("predict", "sub-model itself"),
    ],
)
def test_what_asks_for_a_call_says_so(how, message):
    class Plain(Encoding):
        train_step = keras.Model.train_step

    made = Plain()
    made.compile("sgd")
    with pytest.raises(
        ws.SpecificationError, match=rf"must have a `call`.*{message.replace('Encoding', 'Plain')}"
    ):
        getattr(ws.Trainer(made), how)(X, verbose=0)
