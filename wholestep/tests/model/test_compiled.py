"""A compiled model means what Keras says: one update equals keras.Model.fit's wherever Keras is
right.
"""

from functools import partial

import keras
import numpy as np
import pytest
from shares import later, on, share

import wholestep as ws
from wholestep.model import compiled

L = keras.layers
K = keras.losses
ROWS = 12
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 6)).astype("float32")
LABELS = RNG.integers(0, 4, ROWS)
ONE_HOT = np.eye(4, dtype="float32")[LABELS]
TARGETS = RNG.normal(size=(ROWS, 4)).astype("float32")
SIGNS = np.sign(TARGETS).astype("float32")
WEIGHT = RNG.random(ROWS).astype("float32") + 0.1

LOSSES = {
    "mse": (K.MeanSquaredError(), TARGETS, None),
    "mae": (K.MeanAbsoluteError(), TARGETS, None),
    "mape": (K.MeanAbsolutePercentageError(), TARGETS + 50, None),
    "msle": (K.MeanSquaredLogarithmicError(), abs(TARGETS), "relu"),
    "huber": (K.Huber(0.5), TARGETS, None),
    "log cosh": (K.LogCosh(), TARGETS, None),
    "cosine": (K.CosineSimilarity(), TARGETS, None),
    "poisson": (K.Poisson(), abs(TARGETS), "softplus"),
    "kl": (K.KLDivergence(), ONE_HOT, "softmax"),
    "hinge": (K.Hinge(), SIGNS, None),
    "squared hinge": (K.SquaredHinge(), SIGNS, None),
    "categorical hinge": (K.CategoricalHinge(), ONE_HOT, None),
    "binary": (K.BinaryCrossentropy(), ONE_HOT, "sigmoid"),
    "binary logits, smoothed": (
        K.BinaryCrossentropy(from_logits=True, label_smoothing=0.1),
        ONE_HOT,
        None,
    ),
    "binary focal": (K.BinaryFocalCrossentropy(), ONE_HOT, "sigmoid"),
    "categorical, smoothed": (K.CategoricalCrossentropy(label_smoothing=0.1), ONE_HOT, "softmax"),
    "categorical focal": (K.CategoricalFocalCrossentropy(), ONE_HOT, "softmax"),
    "sparse": (K.SparseCategoricalCrossentropy(), LABELS, "softmax"),
    "sparse, ignoring a class": (
        K.SparseCategoricalCrossentropy(from_logits=True, ignore_class=2),
        LABELS,
        None,
    ),
    "dice": (K.Dice(axis=-1), ONE_HOT, "softmax"),
    "tversky": (K.Tversky(axis=-1), ONE_HOT, "softmax"),
    "by name": ("mse", TARGETS, None),
    "crossentropy by name": ("crossentropy", LABELS, "softmax"),
    "function": (lambda y, p: keras.ops.sum((y - p) ** 2, axis=-1), TARGETS, None),
    "scalar function": (lambda y, p: keras.ops.mean((y - p) ** 4), TARGETS, None),
}
# Each a function of one row, as others above: reduced, weighed and cut by the same lines.
ALIKE = (
    "mae",
    "msle",
    "huber",
    "log cosh",
    "poisson",
    "hinge",
    "squared hinge",
    "categorical hinge",
    "binary",
)
ALIKE += ("binary focal", "categorical focal")
OPTIMIZERS = {
    name: getattr(keras.optimizers, name)
    for name in (
        "SGD",
        "RMSprop",
        "Adam",
        "AdamW",
        "Adadelta",
        "Adagrad",
        "Adamax",
        "Adafactor",
        "Nadam",
        "Ftrl",
        "Lion",
        "Lamb",
        "Muon",
        "ScheduleFreeAdamW",
    )
    if hasattr(keras.optimizers, name)
}
# Each a rule for one variable, as others above: called by the same lines.
ALIKE_TOO = [
    name
    for name in ("RMSprop", "Adadelta", "Adagrad", "Adamax", "Nadam", "Ftrl", "Lamb")
    if name in OPTIMIZERS
]
EXTRAS = {
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.01),
    "global clipnorm": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.01),
    "clipvalue": lambda: keras.optimizers.SGD(0.1, clipvalue=0.01),
    "weight decay": lambda: keras.optimizers.SGD(0.1, weight_decay=0.1),
    "ema": lambda: keras.optimizers.SGD(
        0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2
    ),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 3)),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1, global_clipnorm=0.01), dynamic_growth_steps=2
    ),
    "fixed loss scale": lambda: keras.optimizers.SGD(
        0.1, global_clipnorm=0.01, loss_scale_factor=8.0
    ),
}


def dense(activation=None, **arguments):
    hidden = L.Dense(5, activation="tanh", **arguments)
    return keras.Sequential([keras.Input((6,)), hidden, L.Dense(4, activation=activation)])


def check_like_keras(
    make,
    x,
    y,
    *,
    sample_weight=None,
    class_weight=None,
    cuts=(5,),
    rows=6,
    tol=2e-6,
    evaluates=True,
    **compile_with,
):
    """Train two epochs of unshuffled batches by keras.Model.fit and by ours; equal up to rounding."""

    def prepared(**also):
        keras.utils.set_random_seed(2)
        model = make()
        model.compile(
            **{k: v() if k == "optimizer" else v for k, v in (compile_with | also).items()}
        )
        return model

    how = {"batch_size": rows, "epochs": 2, "shuffle": False, "verbose": 0}
    given = {"sample_weight": sample_weight, "class_weight": class_weight}
    theirs = prepared()
    history = theirs.fit(x, y, **given, **how)
    for cut in cuts:
        ours = prepared(run_eagerly=False)
        ours_history = ws.Trainer(ours, microbatch_size=cut).fit(x, y, **given, **how)
        assert ours_history.history.keys() == history.history.keys()
        for a, b in zip(theirs.get_weights(), ours.get_weights(), strict=True):
            np.testing.assert_allclose(a, b, rtol=tol, atol=tol)
        for name, values in history.history.items():
            np.testing.assert_allclose(
                values, ours_history.history[name], rtol=1e-5, atol=1e-6, err_msg=name
            )
        for a, b in zip(theirs.optimizer.variables, ours.optimizer.variables, strict=True):
            np.testing.assert_allclose(
                *map(keras.ops.convert_to_numpy, (a, b)), rtol=1e-4, atol=tol
            )
    if not evaluates:
        return
    evaluated = theirs.evaluate(x, y, sample_weight=sample_weight, batch_size=rows, verbose=0)
    again = ws.Trainer(ours).evaluate(x, y, sample_weight=sample_weight, batch_size=rows, verbose=0)
    np.testing.assert_allclose(evaluated, again, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", share(name for name in LOSSES if name not in ALIKE) + later(ALIKE))
@pytest.mark.filterwarnings("ignore:microbatch_size=5 has no effect")
def test_every_loss(name):
    loss, y, activation = LOSSES[name]
    # Keras averages batches by their rows, ours by their weights: one batch an epoch where these
    # differ.
    rows = ROWS if "ignoring" in name else 6
    sgd = lambda: keras.optimizers.SGD(0.1)  # noqa: E731
    check_like_keras(
        lambda: dense(activation), X, y, loss=loss, optimizer=sgd, cuts=(5,), rows=rows
    )


@pytest.mark.parametrize(
    "name",
    share([*EXTRAS, *(name for name in OPTIMIZERS if name not in ALIKE_TOO)]) + later(ALIKE_TOO),
)
@pytest.mark.slow
def test_every_optimizer(name):
    make = OPTIMIZERS.get(name) or EXTRAS[name]
    # Compiled by TensorFlow, keras.Model.fit goes wrong with this one; run eagerly it is right.
    how = {"run_eagerly": True} if name == "ScheduleFreeAdamW" else {}
    check_like_keras(
        dense, X, TARGETS, loss="mse", optimizer=make, cuts=(4,), tol=2e-5, evaluates=False, **how
    )


# Repeated rows of an embedding: keras.Model.fit on TensorFlow squares and clips their gradients one
# by one.
SUMS_FIRST = {
    "SGD": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "Lion": lambda: keras.optimizers.Lion(0.1),
}
SUMS_LAST = {
    name: partial(OPTIMIZERS[name], 0.1)
    for name in ("Adagrad", "Adam", "AdamW", "Nadam", "RMSprop")
} | {
    name: partial(keras.optimizers.SGD, 0.1, **{name: 0.01})
    for name in ("clipvalue", "clipnorm", "global_clipnorm")
}


HOWS = "keras", "keras, one-hot", "ours", "summed"


def table_after_an_update(optimizer, how):
    """Return an embedding's table; how: "keras", "keras, one-hot" (a dense layer in its place) or
    "ours".
    """
    keras.utils.set_random_seed(2)
    x = keras.Input((3,), dtype="int32")
    one_hot = L.CategoryEncoding(5, output_mode="one_hot") if how == "keras, one-hot" else None
    table = L.Embedding(5, 2) if one_hot is None else L.Dense(2, use_bias=False)
    rows = table(x) if one_hot is None else table(one_hot(x))
    model = keras.Model(x, L.Dense(3)(L.Flatten()(rows)))
    table.weights[0].assign(np.arange(10).reshape(5, 2) / 10)
    model.compile(optimizer, "mse", run_eagerly=how.startswith("keras"))
    batch = np.array([[1, 1, 2], [1, 2, 1], [0, 1, 1]]), TARGETS[:3, :3]
    if how.startswith("keras"):
        model.train_on_batch(*batch)
    else:
        ws.Trainer(model, dense_gradients=how == "summed").update(batch)
    return table.get_weights()[0]


@pytest.mark.parametrize("name", share([*SUMS_FIRST, *SUMS_LAST]))
def test_gradients_of_equal_rows_reach_the_optimizer_as_in_keras_or_summed(name):
    make = (SUMS_FIRST | SUMS_LAST)[name]
    theirs, one_hot, ours, summed = (table_after_an_update(make(), how) for how in HOWS)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(summed, one_hot, rtol=1e-5, atol=1e-6)
    differs = keras.backend.backend() == "tensorflow" and name in SUMS_LAST
    assert (abs(theirs - summed).max() > 1e-5) == differs


REDUCTIONS = ("sum_over_batch_size", "mean", "sum", "mean_with_sample_weight")


@pytest.mark.parametrize(
    ("reduction", "weighted"),
    share((r, (i + j) % 2 == 0) for i, r in enumerate(REDUCTIONS) for j in range(2)),
)
def test_every_reduction(reduction, weighted):
    loss = K.MeanSquaredError(reduction=reduction)
    sgd = lambda: keras.optimizers.SGD(0.01)  # noqa: E731
    # Keras averages the weighted means of batches; ours are exact over the epoch, so give one batch
    # an epoch.
    rows = ROWS if weighted else 6
    weight = WEIGHT if weighted else None
    check_like_keras(dense, X, TARGETS, loss=loss, optimizer=sgd, sample_weight=weight, rows=rows)


def masked():
    return keras.Sequential([keras.Input((5,)), L.Embedding(7, 3, mask_zero=True), L.Dense(4)])


TOKENS = RNG.integers(0, 7, (ROWS, 5))
TOKEN_TARGETS = RNG.normal(size=(ROWS, 5, 4)).astype("float32")


@pytest.mark.parametrize("weight", share([None, RNG.random((ROWS, 5)).astype("float32")]))
@pytest.mark.slow
def test_masks(weight):
    # On JAX keras.Model.fit loses the mask on its way to the metrics (evaluate does not).
    shown = {"metrics": ["mae"], "weighted_metrics": ["mse"]}
    metrics = shown if keras.backend.backend() == "tensorflow" else {}
    check_like_keras(
        masked,
        TOKENS,
        TOKEN_TARGETS,
        loss="mse",
        optimizer=lambda: keras.optimizers.SGD(0.1),
        sample_weight=weight,
        rows=ROWS,
        **metrics,
    )


def test_a_metric_sees_the_mask_in_training_as_in_evaluation():
    model = masked()
    model.compile(keras.optimizers.SGD(0.0), "mse", metrics=["mae"])
    trained = ws.Trainer(model, microbatch_size=5).fit(
        TOKENS, TOKEN_TARGETS, batch_size=ROWS, verbose=0
    )
    assert trained.history["mae"][0] == pytest.approx(
        model.evaluate(TOKENS, TOKEN_TARGETS, verbose=0)[1], rel=1e-6
    )


def two_outputs():
    x = keras.Input((6,), name="x")
    return keras.Model(
        x, {"a": L.Dense(4, name="a")(x), "b": L.Dense(4, activation="softmax", name="b")(x)}
    )


def listed_outputs():
    x = keras.Input((6,), name="x")
    return keras.Model(x, [L.Dense(4, name="a")(x), L.Dense(4, activation="softmax", name="b")(x)])


def nested_outputs():
    x = keras.Input((6,), name="x")
    return keras.Model(
        x, {"one": [L.Dense(4, name="a")(x)], "two": L.Dense(4, activation="softmax", name="b")(x)}
    )


@pytest.mark.parametrize(
    ("make", "y", "loss", "weights", "metrics"),
    [
        (
            two_outputs,
            {"a": TARGETS, "b": LABELS},
            {"a": "mse", "b": "sparse_categorical_crossentropy"},
            {"a": 0.5, "b": 2.0},
            {"b": ["accuracy"]},
        ),
        (
            listed_outputs,
            [TARGETS, LABELS],
            ["mse", "sparse_categorical_crossentropy"],
            [0.5, 2.0],
            [["mae"], ["accuracy"]],
        ),
        (listed_outputs, [TARGETS, LABELS], ["mse", "sparse_categorical_crossentropy"], None, None),
        pytest.param(
            nested_outputs,
            {"one": [TARGETS], "two": LABELS},
            {"one": ["mse"], "two": "sparse_categorical_crossentropy"},
            None,
            None,
            marks=pytest.mark.skipif(
                keras.backend.backend() == "tensorflow",
                reason="keras.Model.fit fails on nested outputs there",
            ),
        ),
    ],
    ids=["dict", "list", "plain list", "nested"],
)
def test_several_outputs(make, y, loss, weights, metrics):
    check_like_keras(
        make,
        X,
        y,
        loss=loss,
        loss_weights=weights,
        metrics=metrics,
        optimizer=lambda: keras.optimizers.SGD(0.1),
    )


@on("jax")
def test_sample_weights_for_each_output():
    check_like_keras(
        listed_outputs,
        X,
        [TARGETS, LABELS],
        loss=["mse", "sparse_categorical_crossentropy"],
        optimizer=lambda: keras.optimizers.SGD(0.1),
        sample_weight=[WEIGHT, WEIGHT[::-1].copy()],
    )


def test_class_weights():
    check_like_keras(
        lambda: dense("softmax"),
        X,
        LABELS,
        loss="sparse_categorical_crossentropy",
        weighted_metrics=["accuracy"],
        optimizer=lambda: keras.optimizers.SGD(0.1),
        class_weight={0: 3.0, 2: 0.5},
    )


@pytest.mark.parametrize("regulariser", ["kernel", "activity"])
def test_regularisers(regulariser):
    arguments = {f"{regulariser}_regularizer": keras.regularizers.L1L2(0.01, 0.02)}
    check_like_keras(
        lambda: dense(**arguments),
        X,
        TARGETS,
        loss="mse",
        optimizer=lambda: keras.optimizers.SGD(0.1),
    )


class Penalised(L.Layer):
    def __init__(self, reduce):
        super().__init__()
        self.reduce = reduce

    def call(self, x):
        self.add_loss(0.1 * self.reduce(x))
        return x


@pytest.mark.parametrize(
    "reduce",
    share([keras.ops.sum, keras.ops.mean, lambda x: keras.ops.max(x)]),
    ids=["sum", "mean", "max"],
)
@pytest.mark.filterwarnings("ignore:microbatch_size=5 has no effect")
def test_add_loss(reduce):
    def make():
        return keras.Sequential([keras.Input((6,)), L.Dense(5), Penalised(reduce), L.Dense(4)])

    check_like_keras(make, X, TARGETS, loss="mse", optimizer=lambda: keras.optimizers.SGD(0.1))


def test_frozen_layers_and_constraints():
    def make():
        model = dense(kernel_constraint=keras.constraints.MaxNorm(0.5))
        model.layers[-1].trainable = False
        return model

    check_like_keras(make, X, TARGETS, loss="mse", optimizer=lambda: keras.optimizers.SGD(0.5))


def test_batch_normalisation_runs_whole_as_in_keras():
    def make():
        return keras.Sequential([keras.Input((6,)), L.Dense(5), L.BatchNormalization(), L.Dense(4)])

    check_like_keras(
        make,
        X,
        TARGETS,
        loss="mse",
        optimizer=lambda: keras.optimizers.SGD(0.1),
        cuts=("auto",),
        rows=5,
    )


@pytest.mark.parametrize("policy", share(["mixed_float16", "mixed_bfloat16"]))
def test_mixed_precision(policy):
    keras.config.set_dtype_policy(policy)
    sgd = lambda: keras.optimizers.SGD(0.1)  # noqa: E731
    how = {"cuts": ("auto",), "tol": 2e-3, "rows": ROWS}
    check_like_keras(dense, X, TARGETS, loss="mse", optimizer=sgd, **how)


class Own(keras.Model):
    """All losses that Keras adds to the compiled one: penalties of weights and outputs, add_loss."""

    def __init__(self):
        super().__init__()
        l2 = keras.regularizers.L2(0.1)
        self.layer = L.Dense(
            4, kernel_regularizer=l2, activity_regularizer=keras.regularizers.L2(0.05)
        )
        self.penalised = Penalised(keras.ops.mean)

    def call(self, x):
        return self.penalised(self.layer(x))


class CallsSuper(Own):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return 2 * super().compute_loss(x, y, y_pred, sample_weight, training)


class LeavesThemOut(Own):
    def compute_loss(self, x, y, y_pred, sample_weight):  # as in Keras before 3.3
        return keras.ops.mean((y - y_pred) ** 2) + 1.0


class WithMetric(Own):
    def __init__(self):
        super().__init__()
        self.shown = keras.metrics.Mean(name="shown")

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **rest):
        loss = super().compute_loss(x, y, y_pred, sample_weight) + self.losses[0]
        self.shown.update_state(loss)
        return loss


@pytest.mark.parametrize("make", share([CallsSuper, LeavesThemOut, WithMetric]))
@pytest.mark.filterwarnings("ignore:microbatch_size=3 has no effect")
def test_what_compute_loss_returns_is_the_loss(make):
    check_like_keras(
        make, X, TARGETS, loss="mse", optimizer=lambda: keras.optimizers.SGD(0.1), cuts=(3,)
    )


@on("jax")
def test_an_own_compute_loss_moves_the_trackers_of_two_losses():
    class Twice(Two):
        def compute_loss(self, *arguments, **named):
            return 2 * super().compute_loss(*arguments, **named)

    sgd = lambda: keras.optimizers.SGD(0.1)  # noqa: E731
    check_like_keras(
        Twice, X, [TARGETS, ONE_HOT], loss=["mse", "mae"], optimizer=sgd, cuts=("auto",)
    )


def test_a_compute_loss_must_return_one_number():
    class Rows(Own):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return keras.ops.mean((y - y_pred) ** 2, axis=-1)

    model = Rows()
    model.compile("sgd", "mse")
    with pytest.raises(ws.SpecificationError, match=r"must return one number.*shape \(12,\)"):
        ws.Trainer(model).fit(X, TARGETS, verbose=0)


class Two(keras.Model):
    """Two outputs without names, so that equal losses have one name."""

    def __init__(self):
        super().__init__()
        self.layers_ = [L.Dense(4), L.Dense(4)]

    def call(self, x):
        return [layer(x) for layer in self.layers_]


def one_output_twice():
    x = keras.Input((6,))
    y = L.Dense(4, name="one")(x)
    return keras.Model(x, [y, y])


@pytest.mark.parametrize("make", share([Two, one_output_twice]))
@pytest.mark.slow
def test_two_losses_of_one_name_both_count(make):
    """The loss and weights are as in Keras; our History shows both losses, Keras' shows one."""
    keras.utils.set_random_seed(2)
    theirs = make()
    y = [TARGETS, ONE_HOT]
    how = {"epochs": 2, "shuffle": False, "batch_size": 6, "verbose": 0}
    theirs.compile(keras.optimizers.SGD(0.1), ["mse", "mse"])
    history = theirs.fit(X, y, **how).history
    keras.utils.set_random_seed(2)
    ours = make()
    ours.compile(keras.optimizers.SGD(0.1), ["mse", "mse"])
    trainer = ws.Trainer(ours, microbatch_size=4)
    found = trainer.fit(X, y, **how).history
    for a, b in zip(theirs.get_weights(), ours.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(found["loss"], history["loss"], rtol=1e-5)
    name = [k for k in history if k != "loss"]
    assert [k for k in found if k != "loss"] == [*name, f"{name[0]}_1"]
    np.testing.assert_allclose(found[f"{name[0]}_1"], history[name[0]], rtol=1e-5)
    loss, *parts = trainer.evaluate(X, y, verbose=0)
    assert len(parts) == 2
    assert parts[0] != parts[1]
    assert loss == pytest.approx(sum(parts), rel=1e-5) == theirs.evaluate(X, y, verbose=0)[0]


class Numbers(keras.callbacks.Callback):
    """Record the results of the model's metrics in every hook."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def note(self, *_, logs=None):
        by_metric = [m.result() for m in self.model.metrics]
        self.seen.append(
            keras.tree.map_structure(float, (by_metric, self.model.get_metrics_result()))
        )

    on_train_batch_end = on_test_batch_end = on_epoch_end = note


def said_by(train, model, y):
    """The numbers of a run of `train` (a trainer or a model), seen in callbacks, after `fit` and
    after `evaluate`.
    """
    notes = Numbers()
    train.fit(
        X,
        y,
        validation_data=(X[:4], [part[:4] for part in y]),
        callbacks=[notes],
        epochs=2,
        **CALMLY,
    )
    notes.set_model(model)
    notes.note()
    train.evaluate(X[:6], [part[:6] for part in y], batch_size=6, verbose=0)
    notes.note()
    return notes.seen


CALMLY = {"batch_size": 6, "shuffle": False, "verbose": 0}


@on("jax")
def test_the_models_metrics_show_the_numbers_of_the_run():
    models = []
    for _ in range(2):
        keras.utils.set_random_seed(2)
        models.append(listed_outputs())
        losses = ["mse", "sparse_categorical_crossentropy"]
        models[-1].compile(keras.optimizers.SGD(0.1), losses, metrics=[["mae"], ["accuracy"]])
    ours = said_by(ws.Trainer(models[0]), models[0], [TARGETS, LABELS])
    theirs = said_by(models[1], models[1], [TARGETS, LABELS])
    assert len(ours) == len(theirs) == 10
    for one, two in zip(ours, theirs, strict=True):
        assert keras.tree.flatten(one) == pytest.approx(keras.tree.flatten(two), rel=1e-5)
    assert all(by_metric[0] == by_name["loss"] != 0 for by_metric, by_name in ours)


class Renamed(keras.Sequential):
    """Results differ from the metrics', and one is not part of the program."""

    phase = 0.0

    def get_metrics_result(self):
        found = super().get_metrics_result()
        return {"root": found["loss"] ** 0.5, "phase": self.phase}


def _set_phase(model, epoch, logs=None):
    model.phase = float(epoch)


@on("jax")
def test_an_own_get_metrics_result_is_what_is_shown():
    shown = []
    for kind in (ws.Trainer, lambda model: model):
        keras.utils.set_random_seed(2)
        model = Renamed([keras.Input((6,)), L.Dense(4)])
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
        train = kind(model)
        phases = keras.callbacks.LambdaCallback(on_epoch_begin=partial(_set_phase, model))
        found = train.fit(
            X, TARGETS, validation_data=(X, TARGETS), callbacks=[phases], epochs=2, **CALMLY
        ).history
        shown.append((found, train.evaluate(X, TARGETS, return_dict=True, verbose=0)))
    ours, theirs = shown
    assert ours[0].keys() == theirs[0].keys() == {"root", "phase", "val_root", "val_phase"}
    assert ours[0]["phase"] == [0, 1]
    for one, two in ((ours[0], theirs[0]), ({"of": ours[1]}, {"of": theirs[1]})):
        for name, values in two.items():
            assert one[name] == pytest.approx(values, rel=1e-5), name
    (step,) = ws.Trainer(model).steps(ws.Batches((X, TARGETS), ROWS))
    assert step.logs["root"] == pytest.approx(step.loss**0.5)


@on("jax")
@pytest.mark.slow
def test_metrics_that_are_no_plain_sums():
    check_like_keras(
        lambda: dense("softmax"),
        X,
        ONE_HOT,
        loss="categorical_crossentropy",
        metrics=[
            keras.metrics.AUC(),
            keras.metrics.Precision(),
            keras.metrics.F1Score(average="macro"),
        ],
        optimizer=lambda: keras.optimizers.SGD(0.1),
    )


@on("jax")
def test_a_loss_without_reduction_is_refused():
    model = dense()
    model.compile("sgd", K.MeanSquaredError(reduction=None))
    with pytest.raises(ws.SpecificationError, match="must have a reduction"):
        ws.Trainer(model).fit(X, TARGETS, verbose=0)


def classifier(reduction="sum_over_batch_size"):
    model = dense("softmax")
    model.compile(keras.optimizers.SGD(0.1), K.SparseCategoricalCrossentropy(reduction=reduction))
    return model


def streamed(*arrays, rows=4):
    """Batches of these arrays, ready-made."""
    return [tuple(a[i : i + rows] for a in arrays) for i in range(0, ROWS, rows)]


class Rows:
    """A source that loads single rows."""

    def __init__(self, *arrays):
        self.arrays = arrays

    def __len__(self):
        return ROWS

    def __getitem__(self, row):
        return tuple(a[row] for a in self.arrays)


@pytest.mark.parametrize(
    ("call", "label"),
    share(
        [
            ("fit", -1),
            ("evaluate", -1),
            ("evaluate", 4),
            ("fit", 4),
            ("fit", np.nan),
            ("evaluate", np.nan),
        ]
    )
    + share([("evaluate", 2.5), ("fit", 2.5)]),
)
def test_labels_that_are_no_classes_are_refused_before_anything_ran(call, label):
    model = classifier()
    before = model.get_weights()
    labels = LABELS.astype("float32")
    labels[7] = label
    with pytest.raises(
        ws.BatchError, match=rf"whole and lie in 0\.\.3.*Received: {label}.* in row 7"
    ):
        getattr(ws.Trainer(model), call)(X, labels, batch_size=4, verbose=0)
    for a, b in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


@on("jax")
@pytest.mark.parametrize("call", ["fit", "evaluate"])
def test_labels_of_every_loaded_batch_are_checked(call):
    labels = LABELS.copy()
    labels[7] = 4
    trainer = ws.Trainer(classifier())
    for data, row in (
        (iter(streamed(X, labels)), 3),
        (ws.Batches(Rows(X, labels), 4, shuffle=False), 7),
    ):
        with pytest.raises(ws.BatchError, match=f"Received: 4 in row {row}"):
            getattr(trainer, call)(data, verbose=0)


@on("jax")
def test_an_ignored_class_is_no_class_and_allowed():
    model = dense()
    model.compile("sgd", K.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1))
    labels = LABELS.copy()
    labels[3] = -1
    assert np.isfinite(ws.Trainer(model).evaluate(X, labels, verbose=0))


SIGNED = np.resize(np.array([1, -1, 0.5], "float32"), ROWS)


@pytest.mark.parametrize("reduction", share(["sum_over_batch_size", "sum"]))
def test_negative_sample_weights_count_where_the_update_divides_by_rows(reduction):
    loss = K.SparseCategoricalCrossentropy(reduction=reduction)
    sgd = lambda: keras.optimizers.SGD(0.1)  # noqa: E731
    check_like_keras(
        lambda: dense("softmax"),
        X,
        LABELS,
        loss=loss,
        optimizer=sgd,
        sample_weight=SIGNED,
        cuts=(5,),
        rows=ROWS,
    )


@on("jax")
def test_negative_sample_weights_are_refused_where_a_mean_divides_by_them():
    trainer = ws.Trainer(classifier("mean_with_sample_weight"))
    with pytest.raises(
        ws.BatchError, match=r"must be finite and not negative: the loss is divided by it.*row 1"
    ):
        trainer.fit(X, LABELS, sample_weight=SIGNED, batch_size=ROWS, verbose=0)
    with pytest.raises(ws.BatchError, match="must be finite and not negative"):
        trainer.evaluate(iter(streamed(X, LABELS, SIGNED)), verbose=0)


@on("jax")
def test_only_the_weights_that_divide_must_not_be_negative():
    model = listed_outputs()
    model.compile(
        "sgd", [K.MeanSquaredError(), K.MeanSquaredError(reduction="mean_with_sample_weight")]
    )
    trainer = ws.Trainer(model)
    assert np.isfinite(
        trainer.evaluate(X, [TARGETS, ONE_HOT], sample_weight=[SIGNED, WEIGHT], verbose=0)[0]
    )
    with pytest.raises(ws.BatchError, match=r"sample_weight\[1\] must be finite and not negative"):
        trainer.evaluate(X, [TARGETS, ONE_HOT], sample_weight=[WEIGHT, SIGNED], verbose=0)


def test_the_third_part_of_an_own_objectives_batch_is_no_sample_weight():
    class Triplet(ws.Objective):
        def __call__(self, model, batch, training):
            one, same, other = (model(part, training=training) for part in batch)
            return ws.Mean(keras.ops.sum((one - same) ** 2 - (one - other) ** 2, axis=-1))

    trainer = ws.Trainer(dense(), Triplet(), optimizer="sgd")
    assert np.isfinite(trainer.update((X, X + 1, -abs(X)))["loss"])


def test_unpack():
    assert compiled.unpack(X)[1:] == (None, None)
    assert compiled.unpack((1, 2)) == (1, 2, None)
    with pytest.raises(ws.SpecificationError, match="4 parts"):
        compiled.unpack((1, 2, 3, 4))


class Adding(keras.layers.Layer):
    def call(self, x):
        self.add_loss(keras.ops.mean(x**2))
        return x


@pytest.mark.parametrize("call", ["fit", "steps", "update"])
def test_training_without_a_loss_is_refused_and_an_evaluation_is_not(call):
    x = np.ones((8, 3), "float32")
    made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    made.compile("sgd", metrics=["mae"])
    trainer = ws.Trainer(made)
    calls = {
        "fit": lambda: trainer.fit(x, x[:, :1], verbose=0),
        "steps": lambda: next(trainer.steps((x, x[:, :1]))),
        "update": lambda: trainer.update((x, x[:, :1])),
    }
    with pytest.raises(ws.SpecificationError, match="Training needs a loss"):
        calls[call]()
    assert trainer.evaluate(x, x[:, :1], verbose=0, return_dict=True)["mae"] > 0


@pytest.mark.parametrize("kind", ["add_loss", "regularizer"])
def test_a_loss_that_layers_add_is_trained_without_another(kind):
    x = np.ones((8, 3), "float32")
    dense = keras.layers.Dense(2, kernel_regularizer="l2" if kind == "regularizer" else None)
    made = keras.Sequential([keras.Input((3,)), dense, *([Adding()] if kind == "add_loss" else [])])
    made.compile("sgd")
    before = made.get_weights()[0]
    history = ws.Trainer(made).fit(x, verbose=0)
    assert history.history["loss"][0] > 0
    assert not np.array_equal(before, made.get_weights()[0])
