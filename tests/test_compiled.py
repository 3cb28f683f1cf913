"""A compiled model means what Keras says: one update equals keras.Model.fit's wherever Keras is right."""

import keras
import numpy as np
import pytest

import wholestep as ws
from wholestep import compiled

L, K = keras.layers, keras.losses
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
    "binary logits, smoothed": (K.BinaryCrossentropy(from_logits=True, label_smoothing=0.1), ONE_HOT, None),
    "binary focal": (K.BinaryFocalCrossentropy(), ONE_HOT, "sigmoid"),
    "categorical, smoothed": (K.CategoricalCrossentropy(label_smoothing=0.1), ONE_HOT, "softmax"),
    "categorical focal": (K.CategoricalFocalCrossentropy(), ONE_HOT, "softmax"),
    "sparse": (K.SparseCategoricalCrossentropy(), LABELS, "softmax"),
    "sparse, ignoring a class": (K.SparseCategoricalCrossentropy(from_logits=True, ignore_class=2), LABELS, None),
    "dice": (K.Dice(axis=-1), ONE_HOT, "softmax"),
    "tversky": (K.Tversky(axis=-1), ONE_HOT, "softmax"),
    "by name": ("mse", TARGETS, None),
    "crossentropy by name": ("crossentropy", LABELS, "softmax"),
    "function": (lambda y, p: keras.ops.sum((y - p) ** 2, axis=-1), TARGETS, None),
    "scalar function": (lambda y, p: keras.ops.mean((y - p) ** 4), TARGETS, None),
}
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
EXTRAS = {
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.01),
    "global clipnorm": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.01),
    "clipvalue": lambda: keras.optimizers.SGD(0.1, clipvalue=0.01),
    "weight decay": lambda: keras.optimizers.SGD(0.1, weight_decay=0.1),
    "ema": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 3)),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(), dynamic_growth_steps=2),
    "fixed loss scale": lambda: keras.optimizers.SGD(0.1, loss_scale_factor=8.0),
}


def dense(activation=None, **arguments):
    hidden = L.Dense(5, activation="tanh", **arguments)
    return keras.Sequential([keras.Input((6,)), hidden, L.Dense(4, activation=activation)])


def check_like_keras(
    make, x, y, *, sample_weight=None, class_weight=None, cuts=("auto", 5), rows=6, tol=2e-6, **compile_with
):
    """Train for two epochs of unshuffled batches by keras.Model.fit and by ours: equal but for rounding."""

    def prepared():
        keras.utils.set_random_seed(2)
        model = make()
        model.compile(**{k: v() if k == "optimizer" else v for k, v in compile_with.items()})
        return model

    how = {"batch_size": rows, "epochs": 2, "shuffle": False, "verbose": 0}
    given = {"sample_weight": sample_weight, "class_weight": class_weight}
    theirs = prepared()
    history = theirs.fit(x, y, **given, **how)
    for cut in cuts:
        ours = prepared()
        ours_history = ws.Trainer(ours, microbatch_size=cut).fit(x, y, **given, **how)
        assert ours_history.history.keys() == history.history.keys()
        for a, b in zip(theirs.get_weights(), ours.get_weights(), strict=True):
            np.testing.assert_allclose(a, b, rtol=tol, atol=tol)
        for name, values in history.history.items():
            np.testing.assert_allclose(values, ours_history.history[name], rtol=1e-5, atol=1e-6, err_msg=name)
        for a, b in zip(theirs.optimizer.variables, ours.optimizer.variables, strict=True):
            np.testing.assert_allclose(*map(keras.ops.convert_to_numpy, (a, b)), rtol=1e-4, atol=tol)
    evaluated = theirs.evaluate(x, y, sample_weight=sample_weight, batch_size=rows, verbose=0)
    again = ws.Trainer(ours).evaluate(x, y, sample_weight=sample_weight, batch_size=rows, verbose=0)
    np.testing.assert_allclose(evaluated, again, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.filterwarnings("ignore:microbatch_size=5 has no effect")
def test_every_loss(name):
    loss, y, activation = LOSSES[name]
    # Keras averages batches by their rows, ours by what they weigh: one batch an epoch where that differs.
    rows = ROWS if "ignoring" in name else 6
    sgd = lambda: keras.optimizers.SGD(0.1)  # noqa: E731
    check_like_keras(lambda: dense(activation), X, y, loss=loss, optimizer=sgd, cuts=(5,), rows=rows)


@pytest.mark.parametrize("name", [*OPTIMIZERS, *EXTRAS])
@pytest.mark.filterwarnings("ignore:run_eagerly has no effect")
def test_every_optimizer(name):
    make = OPTIMIZERS.get(name) or EXTRAS[name]
    # Compiled by TensorFlow, keras.Model.fit goes wrong with this one; run eagerly it is right.
    how = {"run_eagerly": True} if name == "ScheduleFreeAdamW" else {}
    check_like_keras(dense, X, TARGETS, loss="mse", optimizer=make, cuts=(4,), tol=2e-5, **how)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean", "sum", "mean_with_sample_weight"])
def test_every_reduction(reduction, weighted):
    loss = K.MeanSquaredError(reduction=reduction)
    sgd = lambda: keras.optimizers.SGD(0.01)  # noqa: E731
    # Keras averages the weighted means of batches; ours are exact over the epoch, so give one batch an epoch.
    rows = ROWS if weighted else 6
    weight = WEIGHT if weighted else None
    check_like_keras(dense, X, TARGETS, loss=loss, optimizer=sgd, sample_weight=weight, rows=rows)


def masked():
    return keras.Sequential([keras.Input((5,)), L.Embedding(7, 3, mask_zero=True), L.Dense(4)])


TOKENS = RNG.integers(0, 7, (ROWS, 5))
TOKEN_TARGETS = RNG.normal(size=(ROWS, 5, 4)).astype("float32")


@pytest.mark.parametrize("weight", [None, RNG.random((ROWS, 5)).astype("float32")])
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
    trained = ws.Trainer(model, microbatch_size=5).fit(TOKENS, TOKEN_TARGETS, batch_size=ROWS, verbose=0)
    assert trained.history["mae"][0] == pytest.approx(model.evaluate(TOKENS, TOKEN_TARGETS, verbose=0)[1], rel=1e-6)


def two_outputs():
    x = keras.Input((6,), name="x")
    return keras.Model(x, {"a": L.Dense(4, name="a")(x), "b": L.Dense(4, activation="softmax", name="b")(x)})


def listed_outputs():
    x = keras.Input((6,), name="x")
    return keras.Model(x, [L.Dense(4, name="a")(x), L.Dense(4, activation="softmax", name="b")(x)])


def nested_outputs():
    x = keras.Input((6,), name="x")
    return keras.Model(x, {"one": [L.Dense(4, name="a")(x)], "two": L.Dense(4, activation="softmax", name="b")(x)})


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
                keras.backend.backend() == "tensorflow", reason="keras.Model.fit fails on nested outputs there"
            ),
        ),
    ],
    ids=["dict", "list", "plain list", "nested"],
)
def test_several_outputs(make, y, loss, weights, metrics):
    check_like_keras(
        make, X, y, loss=loss, loss_weights=weights, metrics=metrics, optimizer=lambda: keras.optimizers.SGD(0.1)
    )


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
    check_like_keras(lambda: dense(**arguments), X, TARGETS, loss="mse", optimizer=lambda: keras.optimizers.SGD(0.1))


class Penalised(L.Layer):
    def __init__(self, reduce):
        super().__init__()
        self.reduce = reduce

    def call(self, x):
        self.add_loss(0.1 * self.reduce(x))
        return x


@pytest.mark.parametrize(
    "reduce", [keras.ops.sum, keras.ops.mean, lambda x: keras.ops.max(x)], ids=["sum", "mean", "max"]
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

    check_like_keras(make, X, TARGETS, loss="mse", optimizer=lambda: keras.optimizers.SGD(0.1), cuts=("auto",), rows=5)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision(policy):
    keras.config.set_dtype_policy(policy)
    check_like_keras(
        dense, X, TARGETS, loss="mse", optimizer=lambda: keras.optimizers.SGD(0.1), cuts=("auto",), tol=2e-3, rows=ROWS
    )


def test_a_subclassed_model_with_its_own_compute_loss_runs_whole():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.layer = L.Dense(4)

        def call(self, x):
            return self.layer(x)

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return keras.ops.mean((y - y_pred) ** 2) + 1.0

    check_like_keras(Own, X, TARGETS, loss="mse", optimizer=lambda: keras.optimizers.SGD(0.1), cuts=("auto",))


def test_metrics_that_are_no_plain_sums():
    check_like_keras(
        lambda: dense("softmax"),
        X,
        ONE_HOT,
        loss="categorical_crossentropy",
        metrics=[keras.metrics.AUC(), keras.metrics.Precision(), keras.metrics.F1Score(average="macro")],
        optimizer=lambda: keras.optimizers.SGD(0.1),
    )


def test_an_overridden_train_step_is_refused():
    class Own(keras.Sequential):
        def train_step(self, *arguments):
            raise AssertionError

    model = Own([keras.Input((6,)), L.Dense(4)])
    model.compile("sgd", "mse")
    with pytest.raises(ws.SpecificationError, match=r"must not override `train_step`"):
        ws.Trainer(model).fit(X, TARGETS, verbose=0)


def test_a_loss_without_reduction_is_refused():
    model = dense()
    model.compile("sgd", K.MeanSquaredError(reduction=None))
    with pytest.raises(ws.SpecificationError, match="must have a reduction"):
        ws.Trainer(model).fit(X, TARGETS, verbose=0)


@pytest.mark.parametrize("label", [-1, 4])
def test_labels_out_of_range_are_refused_before_anything_ran(label):
    model = dense("softmax")
    model.compile("sgd", "sparse_categorical_crossentropy")
    before, labels = model.get_weights(), LABELS.copy()
    labels[7] = label
    with pytest.raises(ws.BatchError, match=rf"0\.\.3.*Received: {label} in row 7"):
        ws.Trainer(model).fit(X, labels, batch_size=4, verbose=0)
    for a, b in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_unpack():
    assert compiled.unpack(X)[1:] == (None, None)
    assert compiled.unpack((1, 2)) == (1, 2, None)
    with pytest.raises(ws.SpecificationError, match="4 parts"):
        compiled.unpack((1, 2, 3, 4))
