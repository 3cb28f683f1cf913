"""The results of the probe, seen by a user."""

import keras
import numpy as np
import pytest
from shares import on, share
from small import ROWS, X, Y, model, values

import wholestep as ws
from wholestep.model.coupling import Coupling

L = keras.layers


def found(made, objective=None, **arguments):
    trainer = ws.Trainer(made, objective, microbatch_size=5, **arguments)
    trainer.fit(X, Y, batch_size=10, verbose=0)
    return trainer.executor.planner.findings.coupling


@pytest.mark.parametrize(
    "layers",
    share(
        [
            [],
            [L.Dropout(0.5)],
            [L.LayerNormalization()],
            [L.GaussianNoise(0.1)],
            [L.BatchNormalization(trainable=False)],
        ]
    ),
    ids=["dense", "dropout", "layer norm", "noise", "frozen batch norm"],
)
def test_rows_that_do_not_see_each_other(layers):
    assert found(model(*layers)) == Coupling()


def test_batch_normalisation_couples_and_moves():
    both = (
        r"microbatch_size=5 will not give the weights of whole batches: the rows of a batch see "
        r"each other, as in one "
        r"and two\. Each row meets only the rows of its own microbatch\. Moving statistics move "
        r"once"
    )
    frozen = L.BatchNormalization(trainable=False)
    with pytest.warns(UserWarning, match=both):
        coupling = found(
            model(L.BatchNormalization(name="one"), L.BatchNormalization(name="two"), frozen)
        )
    assert (coupling.couples, coupling.moves) == (True, True)
    assert not coupling.cut_is_exact
    assert coupling.cut_is_possible


@pytest.mark.filterwarnings("ignore:microbatch_size=5 .* not give the weights")
@pytest.mark.parametrize(
    ("layer", "cut", "whole", "why"),
    [
        (
            lambda: L.BatchNormalization(name="norm"),
            "The weights will not be those of whole batches",
            "Microbatches would not give the weights of whole batches",
            "the rows of a batch see each other, as in norm.",
        ),
        (
            lambda: Watching(name="watch"),
            "The weights may not be those of whole batches",
            "Microbatches might not give the weights of whole batches",
            "the forward pass moves statistics of the batch, as in watch.",
        ),
    ],
)
def test_whether_the_weights_are_those_of_whole_batches_is_explained(layer, cut, whole, why):
    for size, said in ((5, cut), ("auto", whole)):
        trainer = ws.Trainer(model(layer()), microbatch_size=size)
        trainer.fit(X, Y, batch_size=8, verbose=0)
        assert f"{said}: {why}" in trainer.explain()


def test_of_many_layers_the_first_are_named():
    assert (
        Coupling(couples=True, moves=True)
        .why(["a", "b", "c", "d", "e"])
        .endswith(", as in a, b, c and 2 others")
    )
    assert Coupling(couples=True, moves=True).why([]).endswith(", in a layer or in the loss")


class Contrast(ws.Objective):
    def __call__(self, model, batch, training):
        x, _ = batch
        logits = model(x, training=training)
        others = keras.ops.mean(logits, axis=0, keepdims=True)
        return ws.Mean(keras.ops.sum((logits - others) ** 2, axis=-1))


def test_a_cut_loss_over_pairs_says_whom_a_row_meets():
    with pytest.warns(
        UserWarning, match="microbatch_size=5 will not give the weights of whole batches"
    ) as caught:
        coupling = found(model(), Contrast(), optimizer="sgd")
    said = " ".join(str(warning.message) for warning in caught)
    assert coupling.couples
    assert (
        "see each other, in a layer or in the loss. Each row meets only the rows of its own "
        "microbatch."
    ) in said
    assert "statistics" not in said


class Watching(L.Layer):
    """Keep a moving mean of the inputs, and return them unchanged."""

    def build(self, shape):
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.mean.assign(0.5 * self.mean + 0.5 * keras.ops.mean(x, axis=0))
        return x


@pytest.mark.filterwarnings("ignore:microbatch_size=5 .* not give the weights")
def test_state_that_moves_without_being_looked_at():
    coupling = found(model(Watching()))
    assert (coupling.couples, coupling.moves, coupling.padding_is_exact) == (False, True, False)


def test_moving_statistics_move_once_by_the_mean_over_the_microbatches():
    whole = model(Watching())
    cut = model(Watching())
    ws.Trainer(whole).fit(X, Y, batch_size=ROWS, verbose=0)
    with pytest.warns(
        UserWarning, match="microbatch_size=6 .* not give the weights of whole batches"
    ):
        ws.Trainer(cut, microbatch_size=6).fit(X, Y, batch_size=ROWS, verbose=0)
    for a, b in zip(values(whole), values(cut), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)


class Adding(L.Layer):
    def __init__(self, reduce):
        super().__init__()
        self.reduce = reduce

    def call(self, x):
        self.add_loss(self.reduce(x**2))
        return x


@pytest.mark.parametrize(
    ("reduce", "extra"),
    share([(keras.ops.sum, "sum"), (keras.ops.mean, "mean"), (keras.ops.max, "whole")]),
)
@pytest.mark.filterwarnings("ignore:microbatch_size=5 has no effect")
def test_what_add_loss_adds_up_to(reduce, extra):
    assert found(model(Adding(reduce))).extra == extra


@on("jax")
@pytest.mark.filterwarnings("ignore:microbatch_size=5 has no effect")
def test_a_loss_by_compute_loss_is_whole_and_said_once():
    class Own(keras.Sequential):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return keras.ops.mean(y_pred**2)

    scalar = Own(model().layers)
    scalar.compile("sgd")
    assert found(scalar).whole
    with pytest.warns(UserWarning, match="one number instead of one per row") as said:
        ws.Trainer(scalar, microbatch_size=5).fit(X, Y, batch_size=10, epochs=3, verbose=0)
    assert sum("has no effect" in str(warning.message) for warning in said) == 1


class Centred(L.Layer):
    def call(self, x):
        return x - keras.ops.mean(x, axis=0, keepdims=True)


@on("jax")
@pytest.mark.filterwarnings("ignore:microbatch_size=5 .* not give the weights")
def test_a_first_row_that_weighs_nothing_hides_nothing():
    made = model(Centred())
    weight = np.ones(ROWS)
    weight[0] = 0
    trainer = ws.Trainer(made, microbatch_size=5)
    trainer.fit(X, Y, batch_size=10, sample_weight=weight, shuffle=False, verbose=0)
    assert trainer.executor.planner.findings.coupling.couples


@on("jax")
@pytest.mark.filterwarnings("ignore:microbatch_size=5 .* not give the weights")
def test_a_head_that_begins_with_zeros_hides_nothing():
    made = model(Centred())
    made.layers[-1].kernel.assign(np.zeros((8, 4)))
    assert found(made).couples


@on("jax")
def test_rows_that_repeat_are_told_apart_from_rows_that_see_each_other():
    made = model()
    trainer = ws.Trainer(made, microbatch_size=5)
    trainer.fit(np.ones((ROWS, 6)), np.zeros(ROWS), batch_size=10, verbose=0)
    assert trainer.executor.planner.findings.coupling == Coupling()


def test_one_row_tells_nothing():
    assert not Coupling(unknown=True).padding_is_exact
    assert "could not be found out" in Coupling(unknown=True).why()


class Deaf(keras.metrics.Metric):
    """Takes weights, and counts every row all the same."""

    def __init__(self):
        super().__init__(name="deaf")
        self.count = self.add_weight(initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign_add(keras.ops.cast(keras.ops.shape(y_pred)[0], "float32"))

    def result(self):
        return self.count.value + 0.0


class Hearing(Deaf):
    """Counts what the weights tell it to."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        weights = keras.ops.ones_like(y_pred[:, 0]) if sample_weight is None else sample_weight
        self.count.assign_add(keras.ops.sum(weights))


@pytest.mark.parametrize(("metric", "shapes"), share([(Hearing, [6]), (Deaf, [2, 6])]))
@pytest.mark.slow
def test_a_metric_that_takes_weights_and_does_not_use_them_is_never_shown_padding(metric, shapes):
    made = model(keras.layers.Dropout(0.5), metrics=[metric()])
    trainer = ws.Trainer(made)
    history = trainer.fit(X, Y, batch_size=6, verbose=0, epochs=2)
    assert history.history["deaf"] == [ROWS, ROWS]
    assert sorted({p.cut.rows for p in trainer.executor.planner.programs.values()}) == shapes


def test_a_stateful_layer_runs_whole_and_says_why_a_microbatch_has_no_effect():
    def made():
        keras.utils.set_random_seed(3)
        x = keras.Input(batch_shape=(10, 3, 2))
        recurrent = keras.Model(
            x, keras.layers.Dense(4)(keras.layers.SimpleRNN(2, stateful=True)(x))
        )
        recurrent.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return recurrent

    whole = made()
    cut = made()
    ws.Trainer(whole).fit(X.reshape(-1, 3, 2), Y, batch_size=10, verbose=0)
    trainer = ws.Trainer(cut, microbatch_size=4)
    with pytest.warns(
        UserWarning,
        match="microbatch_size=4 has no effect: a stateful layer keeps a state for every row",
    ):
        trainer.fit(X.reshape(-1, 3, 2), Y, batch_size=10, verbose=0)
    assert "The batch cannot be cut into microbatches: a stateful layer" in trainer.explain()
    for one, other in zip(values(whole), values(cut), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_penalty_of_activities_behind_dropout_is_a_mean_over_rows():
    keras.utils.set_random_seed(1)
    penalised = keras.layers.Dense(6, "relu", activity_regularizer=keras.regularizers.L2(0.01))
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dropout(0.3), penalised, keras.layers.Dense(1)]
    )
    model.compile("sgd", "mse")
    trainer = ws.Trainer(model, microbatch_size=3)
    x = np.random.default_rng(0).normal(size=(8, 4))
    trainer.update((x, x[:, :1]))
    assert trainer.executor.planner.findings.coupling.extra == "mean"
    assert "3 microbatches" in trainer.explain()
