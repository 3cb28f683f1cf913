"""Random configurations against keras.Model.fit: differences beyond rounding are known."""

import re
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers as L  # noqa: N812
from keras import losses as K  # noqa: N812
from keras import ops
from shares import on, share

import wholestep as ws

JAX = keras.backend.backend() == "jax"
ROWS = 14

# ---- what is drawn from ----

BODIES = {
    "dense": lambda x: L.Dense(3, "tanh")(x),
    "regularised": lambda x: L.Dense(3, "relu", kernel_regularizer="l2", activity_regularizer="l1")(
        x
    ),
    "normalized": lambda x: L.LayerNormalization()(L.Dense(3)(x)),
    "batch normalization": lambda x: L.BatchNormalization(momentum=0.5)(
        L.Dense(3, use_bias=False)(x)
    ),
    "two ways": lambda x: L.Concatenate()([L.Dense(2)(x), L.Dense(1, "sigmoid")(x)]),
    "convolution": lambda x: L.Flatten()(L.Conv1D(2, 2, activation="relu")(L.Reshape((4, 1))(x))),
    "recurrent": lambda x: L.SimpleRNN(2)(L.Reshape((2, 2))(x)),
}
TASKS = {
    "numbers": (
        [
            "mse",
            K.MeanAbsoluteError,
            K.Huber,
            K.LogCosh,
            lambda: lambda y, p: ops.sum((y - p) ** 4, axis=-1),
        ],
        [
            "mae",
            keras.metrics.RootMeanSquaredError,
            "cosine_similarity",
            lambda: lambda y, p: ops.abs(y - p)[:, 0],
        ],
    ),
    "classes": (
        [lambda: K.SparseCategoricalCrossentropy(from_logits=True)],
        [
            "accuracy",
            lambda: keras.metrics.SparseTopKCategoricalAccuracy(2),
            "sparse_categorical_accuracy",
        ],
    ),
    "one hot": (
        [
            lambda: K.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1),
            lambda: K.CategoricalFocalCrossentropy(from_logits=True),
            K.SquaredHinge,
        ],
        [
            "accuracy",
            "categorical_accuracy",
            lambda: keras.metrics.Precision(0.5),
            keras.metrics.MeanSquaredError,
        ],
    ),
    "yes or no": (
        [
            lambda: K.BinaryCrossentropy(from_logits=True),
            lambda: K.BinaryFocalCrossentropy(from_logits=True),
        ],
        [
            lambda: keras.metrics.BinaryAccuracy(threshold=0.0),
            lambda: keras.metrics.AUC(num_thresholds=9),
        ],
    ),
}
OPTIMIZERS = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Nadam", "Adamax", "Lion")
SETTINGS = (
    {},
    {},
    {"clipnorm": 0.05},
    {"global_clipnorm": 0.05},
    {"clipvalue": 0.01},
    {"use_ema": True, "ema_momentum": 0.5},
    {"weight_decay": 0.01},
)
INPUTS = ("arrays", "arrays", "dataset", "generator", "py dataset")


def draw(number: int) -> dict[str, Any]:
    """Return one configuration, all in words and numbers: the same for a number, ever."""
    random = np.random.default_rng([7, number])

    def one_of(options):
        return options[int(random.integers(len(options)))]

    task = one_of(list(TASKS))
    losses, metrics = TASKS[task]
    chosen = {
        "task": task,
        "body": one_of(list(BODIES)),
        "loss": int(random.integers(len(losses))),
        "reduction": one_of(
            ("sum_over_batch_size", "sum_over_batch_size", "sum", "mean_with_sample_weight")
        ),
        "metrics": sorted(random.permutation(len(metrics))[: random.integers(3)].tolist()),
        "weighted metrics": bool(random.integers(2)),
        "optimizer": one_of(OPTIMIZERS),
        "settings": one_of(SETTINGS),
        "input": one_of(INPUTS),
        "weights": one_of(("none", "none", "rows", "classes")),
        "batch size": one_of((4, 7, 14)),
        "epochs": one_of((1, 2)),
        "validation": one_of(("none", "none", "arrays", "split")),
        "microbatch size": one_of(("auto", "auto", 3)),
    }
    if chosen["weights"] == "classes" and task == "numbers":
        chosen["weights"] = "rows"
    if chosen["input"] != "arrays" and chosen["validation"] == "split":
        chosen["validation"] = "arrays"
    if chosen["input"] == "generator" and chosen["weights"] == "classes":
        chosen["weights"] = "none"  # which Keras refuses
    if chosen["body"] == "batch normalization":
        chosen["microbatch size"] = "auto"  # cut, it means something else
    return chosen


def build(chosen: dict) -> keras.Model:
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)
    inputs = keras.Input((4,))
    outputs = L.Dense({"numbers": 2, "yes or no": 1}.get(chosen["task"], 3))(
        BODIES[chosen["body"]](inputs)
    )
    model = keras.Model(inputs, outputs)
    losses, metrics = TASKS[chosen["task"]]
    loss = _made(losses[chosen["loss"]])
    if isinstance(loss, K.Loss):
        loss.reduction = chosen["reduction"]
    # A gradient that cancels to nothing but rounding moves nothing: divided by its own size it
    # would.
    bounded = {} if chosen["optimizer"] in ("SGD", "Lion") else {"epsilon": 1e-4}
    optimizer = getattr(keras.optimizers, chosen["optimizer"])(
        0.02, **bounded, **chosen["settings"]
    )
    seen = [_made(metrics[i]) for i in chosen["metrics"]]
    more = {"weighted_metrics": [_made(metrics[0])]} if chosen["weighted metrics"] else {}
    model.compile(optimizer, loss, metrics=seen, **more)
    return model


def _made(given: Any) -> Any:
    return given if isinstance(given, str) else given()


def data(chosen: dict) -> tuple:
    random = np.random.default_rng(4)
    x = random.normal(size=(ROWS, 4)).astype("float32")
    classes = random.integers(0, 3, ROWS)
    y = {
        "numbers": random.normal(size=(ROWS, 2)).astype("float32"),
        "classes": classes,
        "one hot": np.eye(3, dtype="float32")[classes],
        "yes or no": random.integers(0, 2, (ROWS, 1)).astype("float32"),
    }[chosen["task"]]
    weights = random.integers(0, 4, ROWS).astype("float32") + 0.25
    return (x, y, weights) if chosen["weights"] == "rows" else (x, y)


class Sequence(keras.utils.PyDataset):
    def __init__(self, batches):
        super().__init__()
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, i):
        return self.batches[i]


def fed(chosen: dict) -> tuple[tuple, dict]:
    """Return the arguments of `fit` that say what is trained on."""
    parts = data(chosen)
    size = chosen["batch size"]
    kind = chosen["input"]
    if kind == "arrays":
        named = dict(zip(("x", "y", "sample_weight"), parts, strict=False))
        return (), named | {"batch_size": size, "shuffle": False}
    batches = [tuple(part[i : i + size] for part in parts) for i in range(0, ROWS, size)]
    if kind == "py dataset":
        return (Sequence(batches),), {"shuffle": False}
    if kind == "generator":
        endless = (batch for _ in range(9) for batch in batches)
        return (endless,), {"steps_per_epoch": len(batches), "shuffle": False}
    import tensorflow as tf

    return (tf.data.Dataset.from_tensor_slices(parts).batch(size),), {"shuffle": False}


def train(chosen: dict, model: Any, trains: Any) -> dict:
    place, named = fed(chosen)
    named |= {"epochs": chosen["epochs"], "verbose": 0}
    if chosen["weights"] == "classes":
        named["class_weight"] = {0: 0.5, 1: 2.0, 2: 1.25}
    if chosen["validation"] == "split":
        named["validation_split"] = 0.25
    if chosen["validation"] == "arrays":
        named["validation_data"] = data(chosen)
    return trains.fit(*place, **named).history


def weighs_unlike(chosen: dict) -> bool:
    """Whether an epoch's loss is weighed otherwise than by Keras: by what its rows weigh, not by
    their number.
    """
    return chosen["reduction"] != "sum_over_batch_size" and chosen["weights"] != "none"


def check(number: int) -> None:
    chosen = draw(number)
    theirs = build(chosen)
    ours = None
    expected = train(chosen, theirs, theirs)
    ours = build(chosen)
    found = train(chosen, ours, ws.Trainer(ours, microbatch_size=chosen["microbatch size"]))
    said = f"draw {number}: {chosen}"
    assert list(found) == list(expected), said
    for variable, a, b in zip(
        ours.variables, ours.get_weights(), theirs.get_weights(), strict=False
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5, err_msg=f"{variable.path}, {said}")
    for name, value in expected.items():
        if name in ("loss", "val_loss") and weighs_unlike(chosen):
            continue
        np.testing.assert_allclose(
            found[name], value, rtol=1e-5, atol=1e-5, err_msg=f"{name}, {said}"
        )


@pytest.mark.filterwarnings("ignore:microbatch_size")
@pytest.mark.parametrize("number", share(range(6)))
@pytest.mark.slow
def test_a_random_configuration(number):
    check(number)


@pytest.mark.large
@pytest.mark.filterwarnings("ignore:microbatch_size")
@pytest.mark.parametrize("number", range(6, 720))
def test_many_random_configurations(number):
    check(number)


# ---- what is known to differ: docs/differences.md ----

X, Y, WEIGHT = (np.random.default_rng(8).normal(size=(12, n)).astype("float32") for n in (4, 2, 1))
WEIGHT = np.abs(WEIGHT[:, 0])
TOKENS = np.array([[1, 2, 3]] * 4 + [[4, 0, 0]] * 8, "int32")
HOW = {"batch_size": 4, "shuffle": False, "verbose": 0}


def still(loss="mse", **more):
    """Return a model that training does not move, so that the numbers of an epoch are those of its
    weights.
    """
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((4,)), L.Dense(2)])
    model.compile(keras.optimizers.SGD(0.0), loss, **more)
    return model


def masked():
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [keras.Input((3,), dtype="int32"), L.Embedding(5, 2, mask_zero=True), L.Dense(2)]
    )
    model.compile(keras.optimizers.SGD(0.0), "mse", metrics=["mae"])
    return model, np.resize(Y, (12, 3, 2))


def test_an_epoch_is_weighed_by_its_weights():
    model = still(K.MeanSquaredError(reduction="mean_with_sample_weight"))
    each = np.mean((model.predict(X, verbose=0) - Y) ** 2, axis=-1)
    exact = pytest.approx(np.sum(each * WEIGHT) / np.sum(WEIGHT), rel=1e-5)
    given = {"sample_weight": WEIGHT} | HOW
    theirs = model.fit(X, Y, **given).history["loss"]
    trainer = ws.Trainer(model)
    assert trainer.fit(X, Y, **given).history["loss"] == [exact]
    assert trainer.evaluate(X, Y, sample_weight=WEIGHT, batch_size=4, verbose=0) == exact
    assert theirs != [exact]


def test_an_epoch_is_weighed_by_its_masks():
    model, y = masked()
    each = np.mean((model.predict(TOKENS, verbose=0) - y) ** 2, axis=-1)
    exact = pytest.approx(np.mean(each[TOKENS != 0]), rel=1e-5)
    assert model.fit(TOKENS, y, **HOW).history["loss"] != [exact]
    assert ws.Trainer(model).fit(TOKENS, y, **HOW).history["loss"] == [exact]


def test_metrics_in_training_see_the_mask():
    model, y = masked()
    each = np.mean(np.abs(model.predict(TOKENS, verbose=0) - y), axis=-1)
    exact = pytest.approx(np.mean(each[TOKENS != 0]), rel=1e-5)
    assert (model.fit(TOKENS, y, **HOW).history["mae"] == [exact]) is not JAX
    assert ws.Trainer(model).fit(TOKENS, y, **HOW).history["mae"] == [exact]


@pytest.mark.slow
def test_draws_are_not_those_of_keras_and_those_of_every_compiler():
    def loss(made):
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((4,)), L.Dropout(0.5), L.Dense(2)])
        model.compile(keras.optimizers.SGD(0.0), "mse")
        return made(model).fit(X, Y, **HOW).history["loss"][0]

    expected = pytest.approx(loss(lambda model: ws.Trainer(model)), rel=1e-5)
    assert loss(lambda model: model) != expected
    if not JAX:
        for compiled in (False, True):
            assert (
                loss(lambda model, compiled=compiled: ws.Trainer(model, jit_compile=compiled))
                == expected
            )


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize(("steps", "theirs"), [(2, [[0, 1], [2]]), (4, [[0, 1, 2], [0, 1, 2]])])
def test_steps_per_epoch_is_a_number_of_updates(steps, theirs):
    """Three batches in two epochs of `steps` updates."""
    model = still()
    each = np.mean((model.predict(X, verbose=0) - Y) ** 2, axis=-1).reshape(3, 4).mean(axis=1)
    how = HOW | {"steps_per_epoch": steps, "epochs": 2}
    expected = [np.mean(each[seen]) for seen in theirs]
    np.testing.assert_allclose(model.fit(X, Y, **how).history["loss"], expected, rtol=1e-5)
    seen = np.arange(2 * steps).reshape(2, steps) % 3
    found = ws.Trainer(model).fit(X, Y, **how).history["loss"]
    np.testing.assert_allclose(found, [np.mean(each[batches]) for batches in seen], rtol=1e-5)


@pytest.mark.skipif(JAX, reason="on JAX, Keras weighs them by rows as well")
def test_the_losses_of_outputs_add_up_to_the_total():
    def made():
        keras.utils.set_random_seed(3)
        inputs = keras.Input((4,))
        model = keras.Model(inputs, [L.Dense(2, name="a")(inputs), L.Dense(2, name="b")(inputs)])
        model.compile(keras.optimizers.SGD(0.0), ["mse", "mae"])
        return model

    short = (X[:6], [Y[:6], Y[:6]])  # a batch of four rows, and one of two
    theirs, ours = (
        run(made()).fit(*short, **HOW).history for run in (lambda model: model, ws.Trainer)
    )
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    assert ours["a_loss"][0] + ours["b_loss"][0] == pytest.approx(ours["loss"][0], rel=1e-5)
    assert theirs["a_loss"][0] + theirs["b_loss"][0] != pytest.approx(theirs["loss"][0], rel=1e-3)


def test_one_output_has_one_loss():
    theirs, ours, first = (still(loss) for loss in (["mse", "mae"], ["mse", "mae"], "mse"))
    trainer = ws.Trainer(ours)
    with pytest.warns(
        UserWarning, match="one output, and 2 losses: as in Keras, all but the first"
    ) as told:
        found = [
            trainer.fit(X, Y, **HOW).history,
            trainer.evaluate(X, Y, verbose=0, return_dict=True),
        ]
    assert len(told) == 1
    assert [list(logs) for logs in found] == [["loss"], ["loss"]]
    history = theirs.fit(X, Y, **HOW).history
    assert found[0]["loss"] == pytest.approx(history["loss"], rel=1e-5)
    assert found[0]["loss"] == pytest.approx(first.fit(X, Y, **HOW).history["loss"], rel=1e-5)
    assert (history["mse_loss"], history["mae_loss"]) == ([0.0], [0.0])


class Silent(keras.Model):
    def get_metrics_result(self):
        return {}


def test_results_of_a_models_own_that_are_empty_hide_nothing():
    inputs = keras.Input((4,))
    model = Silent(inputs, L.Dense(2)(inputs))
    model.compile("sgd", "mse", metrics=["mae"])
    if JAX:
        assert model.fit(X, Y, **HOW).history == {}
    else:
        with pytest.raises(ValueError, match="length 0 less than minimum 1"):
            model.fit(X, Y, **HOW)
    assert set(ws.Trainer(model).fit(X, Y, **HOW).history) == {"loss", "mae"}


@on("jax")
def test_run_eagerly_has_no_effect_on_several_devices():
    if not JAX:
        return
    model = still(run_eagerly=True)
    with pytest.warns(UserWarning, match="run_eagerly has no effect: on several devices"):
        ws.Trainer(model, replicas=2).fit(X, Y, **HOW)


def test_every_line_of_the_page_is_held_by_a_test():
    page = Path(__file__).parents[2] / "docs" / "differences.md"
    sources = [path.read_text(encoding="utf-8") for path in Path(__file__).parents[1].rglob("*.py")]
    known = {name for source in sources for name in re.findall(r"^def (\w+)", source, re.M)}
    rows = re.findall(r"^\| (?!what ).*\|$", page.read_text(encoding="utf-8"), re.M)
    assert rows
    for row in rows:
        cells = re.split(r" \| ", row.strip("| "))
        assert len(cells) == 5, row
        named = re.findall(r"`(\w+)`", cells[4])
        assert named, row
        assert set(named) <= known, row
