"""Every metric of Keras, compared with `keras.Model.fit`, for outputs of any rank and all cuts."""

import keras
import numpy as np
import pytest
from exact import spread_over
from keras import layers as L  # noqa: N812
from keras import metrics as M  # noqa: N812
from shares import later, on

import wholestep as ws

ROWS = 20
BATCH = 8
# axis -2 is as long as a batch: weights must not meet it
PLACES = {1: (), 2: (), 3: (8,), 4: (2, 8), 5: (2, 2, 8)}
ANY = tuple(PLACES)
EXCLUDED = {
    "Mean": "takes values, not labels and predictions",
    "Sum": "takes values, not labels and predictions",
    "Metric": "is abstract",
}
OF_NUMBERS = (
    *(
        "MeanSquaredError",
        "RootMeanSquaredError",
        "MeanAbsoluteError",
        "MeanAbsolutePercentageError",
    ),
    *(
        "MeanSquaredLogarithmicError",
        "LogCoshError",
        "Poisson",
        "Hinge",
        "SquaredHinge",
        "CategoricalHinge",
    ),
    *("KLDivergence", "CosineSimilarity", "PearsonCorrelation", "ConcordanceCorrelation"),
)
OF_BINS = (
    "SensitivityAtSpecificity",
    "SpecificityAtSensitivity",
    "PrecisionAtRecall",
    "RecallAtPrecision",
)
COUNTS = (
    "TruePositives",
    "TrueNegatives",
    "FalsePositives",
    "FalseNegatives",
    "Precision",
    "Recall",
)


def differences(y_true, y_pred):
    """Return a value for each row, of outputs of any rank."""
    return keras.ops.mean(
        keras.ops.reshape(keras.ops.abs(y_true - y_pred), (keras.ops.shape(y_true)[0], -1)), axis=-1
    )


# By what the labels are: the metrics (made by Keras' names or functions) and the ranks of outputs
# that they take.
KINDS = {
    "numbers": [
        *((ANY, name, {}) for name in OF_NUMBERS),
        (ANY, "Accuracy", {}),
        ((2,), "R2Score", {}),
    ],
    "other_axes": [
        ((2, 3, 4, 5), "CosineSimilarity", {"axis": 1}),
        ((2, 3), "CosineSimilarity", {"axis": 0}),
        (ANY, "MeanMetricWrapper", {"fn": differences, "name": "wrapped"}),
        (
            ANY,
            "MeanMetricWrapper",
            {"fn": lambda y, p: keras.ops.reshape(keras.ops.abs(y - p), (-1,)), "name": "flat"},
        ),
    ],
    "yes_or_no": [
        *((ANY, name, {}) for name in COUNTS),
        (ANY, "Precision", {"thresholds": [0.3, 0.6]}),
        ((3, 4), "Recall", {"class_id": 0}),
        *((ANY, name, {"num_thresholds": 9, name.split("At")[1].lower(): 0.5}) for name in OF_BINS),
        (ANY, "AUC", {"num_thresholds": 9}),
        (ANY, "AUC", {"thresholds": [0.1, 0.55], "from_logits": True}),
        (ANY, "BinaryAccuracy", {}),
        (ANY, "BinaryCrossentropy", {}),
        (ANY, "BinaryIoU", {}),
        (ANY, "MeanIoU", {"num_classes": 2}),
    ],
    "one_hot": [
        *((ANY[1:], name, {}) for name in ("CategoricalAccuracy", "CategoricalCrossentropy")),
        (ANY[1:], "TopKCategoricalAccuracy", {"k": 2}),
        (ANY[1:], "OneHotIoU", {"num_classes": 3, "target_class_ids": [0, 2]}),
        (ANY[1:], "OneHotMeanIoU", {"num_classes": 3}),
        (ANY[1:], "Precision", {"top_k": 1}),
        ((2,), "F1Score", {"average": "macro"}),
        ((2,), "FBetaScore", {"average": "micro", "threshold": 0.3}),
        ((2,), "AUC", {"num_thresholds": 9, "multi_label": True}),
        ((2,), "AUC", {"num_thresholds": 9, "multi_label": True, "label_weights": [1.0, 0.5, 2.0]}),
    ],
    "classes": [
        *(
            (ANY[1:], name, {})
            for name in ("SparseCategoricalAccuracy", "SparseCategoricalCrossentropy")
        ),
        (ANY[1:], "SparseTopKCategoricalAccuracy", {"k": 2}),
        (ANY[1:], "MeanIoU", {"num_classes": 3, "sparse_y_pred": False}),
        (
            ANY[1:],
            "IoU",
            {"num_classes": 3, "target_class_ids": [1], "sparse_y_pred": False, "ignore_class": 0},
        ),
    ],
}
OUTPUTS = {"numbers": (2, "softplus"), "other_axes": (2, "softplus"), "yes_or_no": (1, "sigmoid")}


def data(kind, rank):
    random = np.random.default_rng(rank)
    x = random.normal(size=(ROWS, *PLACES[rank], 3)).astype("float32")
    classes = random.integers(0, 3, x.shape[:-1])
    if kind in ("numbers", "other_axes"):
        y = random.uniform(0.5, 2, (*classes.shape, 2)).astype("float32")
    elif kind == "yes_or_no":
        y = (classes[..., None] > 0).astype("float32")
    else:
        y = np.eye(3, dtype="float32")[classes] if kind == "one_hot" else classes.astype("int32")
    return x, y[..., 0] if rank == 1 else y


def build(kind, rank, weighted):
    keras.utils.set_random_seed(3)
    width, activation = OUTPUTS.get(kind, (3, "softmax"))
    squeezed = [L.Lambda(lambda out: out[..., 0])] if rank == 1 else []
    model = keras.Sequential(
        [keras.Input((*PLACES[rank], 3)), L.Dense(width, activation), *squeezed]
    )
    made = [getattr(M, name)(**options) for ranks, name, options in KINDS[kind] if rank in ranks]
    loss = "sparse_categorical_crossentropy" if kind == "classes" else "mse"
    model.compile(
        keras.optimizers.SGD(0.1), loss, **{"weighted_metrics" if weighted else "metrics": made}
    )
    return model


def assert_like_keras(kind, rank, weighted, microbatch_size, replicas):
    x, y = data(kind, rank)
    shape = (ROWS, *PLACES[rank]) if weighted == "of places" else (ROWS,)
    weights = (
        None
        if weighted == "none"
        else np.random.default_rng(0).integers(1, 3, shape).astype("float32")
    )
    given = {
        "sample_weight": weights,
        "batch_size": BATCH,
        "shuffle": False,
        "verbose": 0,
        "validation_split": 0.25,
    }
    keras.utils.clear_session()
    theirs = build(kind, rank, weights is not None)
    expected = theirs.fit(x, y, **given).history
    keras.utils.clear_session()
    with spread_over(replicas):
        ours = build(kind, rank, weights is not None)
    trainer = ws.Trainer(ours, microbatch_size=microbatch_size, replicas=replicas)
    found = trainer.fit(x, y, **given).history
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    for num in (8, 5):
        theirs.reset_metrics()
        few = (x[:num], y[:num]) if weights is None else (x[:num], y[:num], weights[:num])
        logs = trainer.update(few)
        for name, value in theirs.train_on_batch(*few, return_dict=True).items():
            np.testing.assert_allclose(logs[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_every_metric_of_keras_is_tried():
    everything = {
        n for n, kind in vars(M).items() if isinstance(kind, type) and issubclass(kind, M.Metric)
    }
    assert {name for cases in KINDS.values() for _, name, _ in cases} | set(EXCLUDED) == everything


CASES = [
    (kind, rank)
    for kind, cases in KINDS.items()
    for rank in ANY
    if any(rank in ranks for ranks, *_ in cases)
]
IGNORED = pytest.mark.filterwarnings(
    "ignore:Explicitly requested dtype int64",
    "ignore:You are passing weight as `float`",
    "ignore:microbatch_size",
)


@IGNORED
@pytest.mark.parametrize(
    ("kind", "rank", "weights", "size"),
    [
        pytest.param("yes_or_no", 4, "none", 3, marks=on("jax")),
        pytest.param("classes", 3, "of places", "auto", marks=on("jax")),
        pytest.param("one_hot", 4, "none", 3, marks=on("tensorflow")),
        *later([("yes_or_no", 3, "none", "auto")]),
    ],
)
@pytest.mark.slow
def test_metrics_of_places(kind, rank, weights, size):
    assert_like_keras(kind, rank, weights, size, None)


@IGNORED
@pytest.mark.large
@pytest.mark.parametrize("replicas", [None, 2])
@pytest.mark.parametrize("microbatch_size", ["auto", 3])
@pytest.mark.parametrize("weights", ["none", "of rows", "of places"])
@pytest.mark.parametrize(("kind", "rank"), CASES)
def test_metrics_of_outputs_of_any_rank(kind, rank, weights, microbatch_size, replicas):
    if weights != "none" and (
        kind == "other_axes" or rank == 1 or (weights == "of rows" and rank > 2)
    ):
        pytest.skip("Keras itself cannot weigh these")
    if replicas and kind == "other_axes":
        pytest.skip("replicas need metrics that belong to rows")
    if replicas and (kind, rank) == ("numbers", 1) and keras.backend.backend() == "tensorflow":
        with pytest.raises(ws.SpecificationError, match="one number instead of one per row"):
            assert_like_keras(kind, rank, weights, microbatch_size, replicas)
        return
    assert_like_keras(kind, rank, weights, microbatch_size, replicas)


class OfTheBest(M.MeanIoU):
    """As users write it: class numbers from the outputs of a softmax."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        return super().update_state(y_true, keras.ops.argmax(y_pred, axis=-1), sample_weight)


class Picky(M.Mean):
    """Takes weights of its values' own shape and no others."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        right = keras.ops.cast(
            keras.ops.argmax(y_pred, axis=-1) == keras.ops.cast(y_true, "int32"), "float32"
        )
        assert sample_weight is None or sample_weight.shape == right.shape, (
            "these weights do not fit"
        )
        super().update_state(right, sample_weight)


@IGNORED
@pytest.mark.parametrize("kind", [OfTheBest, Picky])
@pytest.mark.slow
def test_user_defined_metrics_of_places(kind):
    x, y = data("classes", 4)

    def made():
        model = build("classes", 4, weighted=False)
        options = {"num_classes": 3} if kind is OfTheBest else {}
        model.compile(
            keras.optimizers.SGD(0.1),
            "sparse_categorical_crossentropy",
            metrics=[kind(name="m", **options)],
        )
        return model

    how = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    expected = made().fit(x, y, **how).history["m"]
    for cut in ("auto", 3):
        found = ws.Trainer(made(), microbatch_size=cut).fit(x, y, **how).history["m"]
        np.testing.assert_allclose(found, expected, rtol=1e-6)


@IGNORED
@on("jax")
@pytest.mark.slow
def test_weights_of_rows_weigh_all_places_of_a_row():
    x, y = data("yes_or_no", 4)
    rows = np.arange(ROWS, dtype="float32")
    places = np.broadcast_to(rows[:, None, None], (ROWS, *PLACES[4])).copy()
    model = build("yes_or_no", 4, weighted=True)
    expected = model.evaluate(
        x, y, sample_weight=places, batch_size=BATCH, verbose=0, return_dict=True
    )
    found = ws.Trainer(model).evaluate(
        x, y, sample_weight=rows, batch_size=BATCH, verbose=0, return_dict=True
    )
    for name in set(expected) - {"loss"}:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-6, err_msg=name)
