"""On any number of replicas, zero bits differ; coupled rows see the rows of all replicas."""

import contextlib
import functools
import itertools
import json
import re
import socket
import subprocess
import sys
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from exact import OPTIMIZERS, REGULARISERS, WEIGHTINGS, differing, one_update, snapshot, spread_over
from scripts import lean
from shares import halves, later, on, share

import wholestep as ws
from wholestep import update
from wholestep.plan import Planner
from wholestep.update import ObjectiveUpdate

JAX = keras.backend.backend() == "jax"
PAIRS = list(itertools.product(WEIGHTINGS, REGULARISERS))
CASES = [(*pair, list(OPTIMIZERS)[i % len(OPTIMIZERS)]) for i, pair in enumerate(PAIRS)]
PLANS = [(2, "auto"), (3, 6), (8, 6), (2, 6), (3, "auto"), (8, "auto")]
# TensorFlow traces every replica; a short batch is on 8
SMALL = [plan for plan in PLANS if JAX or plan[0] < 8]
# Each weighting with one regulariser on TensorFlow, with another one on JAX; `-m large` has all of
# all.
SOME = [
    i
    for i in range(len(CASES))
    if (i // len(REGULARISERS) + i) % len(REGULARISERS) == (0 if JAX else 1)
]
ALL = list(itertools.product(itertools.product(WEIGHTINGS, REGULARISERS, OPTIMIZERS), PLANS))
only_jax = pytest.mark.skipif(not JAX, reason="JAX alone has arrays that are spread over devices")
only_tensorflow = pytest.mark.skipif(JAX, reason="on JAX every replica sees the rows of all")


def check(case, replicas, size, **options):
    alone, _ = one_update(case, "auto", **options)
    shared, trainer = one_update(case, size, replicas=replicas, **options)
    assert f"1 host x {replicas} replicas" in trainer.explain()
    assert "1 microbatches" not in trainer.explain()
    assert differing(alone, shared) == [], trainer.explain()


@pytest.mark.own
@pytest.mark.parametrize(
    ("case", "plan"), [(CASES[i], SMALL[n % len(SMALL)]) for n, i in enumerate(SOME)], ids=str
)
def test_no_bit_differs_between_replicas(case, plan):
    check(case, *plan)


@pytest.mark.large
@pytest.mark.parametrize(("case", "plan"), ALL, ids=str)
def test_no_bit_differs_between_replicas_in_all_cases(case, plan):
    check(case, *plan)


@pytest.mark.parametrize(("weighting", "plan"), share(zip(WEIGHTINGS, PLANS, strict=True)), ids=str)
def test_no_bit_differs_between_replicas_of_a_short_batch(weighting, plan):
    check((weighting, "l2", "adam"), *plan, short=True)


@pytest.mark.large
@pytest.mark.parametrize(("weighting", "plan"), list(itertools.product(WEIGHTINGS, PLANS)), ids=str)
def test_no_bit_differs_between_replicas_of_any_short_batch(weighting, plan):
    check((weighting, "l2", "adam"), *plan, short=True)


@pytest.mark.slow
def test_padding_that_counts_is_caught(monkeypatch):
    """The mutant: rows that fill up the shares of three replicas weigh 1."""
    monkeypatch.setattr(update, "weights_of_rows", lambda *_: None)
    with pytest.raises(AssertionError, match="kernel"):
        check(("none", "none", "sgd"), 3, "auto")


@on("tensorflow")
@pytest.mark.slow
def test_each_optimizer_of_several_clips_the_gradient_of_all_replicas():
    def trained(replicas):
        keras.utils.set_random_seed(0)
        with spread_over(replicas):
            kernels = keras.optimizers.SGD(0.1, clipnorm=0.1)
            biases = keras.optimizers.Adam(0.01)
            model = keras.Sequential(
                [keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)]
            )
            choose = lambda variable: kernels if variable.path.endswith("kernel") else biases  # noqa: E731
            model.compile(keras.optimizers.MultiOptimizer(choose), "mse")
        ws.Trainer(model).fit(x, x.sum(1), batch_size=8, epochs=2, verbose=0)
        return model.get_weights()

    x = np.random.default_rng(0).random((16, 3), "float32")
    for alone, shared in zip(trained(None), trained(2), strict=True):
        np.testing.assert_allclose(shared, alone, rtol=2e-6, atol=1e-7)


@only_tensorflow
def test_a_mean_of_the_replicas_means_is_caught(monkeypatch):
    """The mutant: each replica divides by the weight of its local rows."""
    fold = ObjectiveUpdate._fold

    def own_weights(*given, syncs):
        return fold(*given, syncs=True) if syncs else SimpleNamespace(carried=None)

    monkeypatch.setattr(ObjectiveUpdate, "_fold", own_weights)
    with pytest.raises(AssertionError, match="kernel"):
        check(("sample weights", "none", "sgd"), 2, "auto")


# ---- whole runs, on real numbers ----

ROWS = 50
FEW = 3 if JAX else 2


class Items:
    def __init__(self, *columns):
        self.columns = columns

    def __len__(self):
        return len(self.columns[0])

    def __getitem__(self, i):
        return tuple(column[i] for column in self.columns)


def make(replicas, *, couples=False, metrics=("accuracy",), dropout=0.0, distribution=None):
    keras.utils.clear_session()
    keras.distribution.set_distribution(distribution)
    keras.utils.set_random_seed(3)
    with spread_over(replicas):
        layers = [keras.layers.Dense(8, "relu", kernel_regularizer="l2")]
        layers += [keras.layers.BatchNormalization()] * couples + [
            keras.layers.Dropout(dropout)
        ] * bool(dropout)
        model = keras.Sequential([keras.Input((5,)), *layers, keras.layers.Dense(1, "sigmoid")])
        model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=list(metrics))
    return model


def numbers():
    rng = np.random.default_rng(0)
    return rng.normal(size=(ROWS, 5)).astype("float32"), rng.integers(0, 2, (ROWS, 1)).astype(
        "float32"
    )


def run(replicas, *, size="auto", loaded=False, **options):
    """Fit two epochs of batches of 16, the last of 2 rows; return everything that came out."""
    model, (x, y) = make(replicas, **options), numbers()
    trainer = ws.Trainer(model, microbatch_size=size, replicas=replicas, seed=1)
    data = (Items(x, y), None) if loaded else (x, y)
    history = (
        trainer.fit(ws.Batches(data[0], 16, seed=1), epochs=2, verbose=0)
        if loaded
        else trainer.fit(x, y, batch_size=16, epochs=2, verbose=0)
    )
    evaluated = trainer.evaluate(x, y, batch_size=16, verbose=0, return_dict=True)
    return (
        history.history
        | evaluated
        | snapshot(model)
        | {"outputs": trainer.predict(x, 16, verbose=0)}
    )


def assert_close(one, two, tolerance):
    assert one.keys() == two.keys()
    for name, value in one.items():
        np.testing.assert_allclose(two[name], value, rtol=tolerance, atol=tolerance, err_msg=name)


@functools.cache
def alone(couples=False):
    """Return what a run on one device comes to."""
    return run(None, couples=couples)


@pytest.mark.parametrize(
    ("replicas", "couples", "loaded"),
    share([(2, False, False), (2, True, True), (3, False, True), (3, True, False)]),
)
@pytest.mark.slow
def test_a_run_is_the_same_on_several_replicas(replicas, couples, loaded):
    shared = run(replicas, couples=couples, loaded=loaded)
    assert_close(alone(couples), shared, 2e-6 if JAX or not couples else 2e-5)


@pytest.mark.large
@pytest.mark.parametrize(
    ("replicas", "couples", "loaded"), list(itertools.product((2, 3), *[[False, True]] * 2))
)
def test_a_run_is_the_same_on_several_replicas_in_all_cases(replicas, couples, loaded):
    test_a_run_is_the_same_on_several_replicas(replicas, couples, loaded)


@pytest.mark.parametrize(("replicas", "couples"), halves([(3, False), (2, True)]))
@pytest.mark.slow
def test_a_run_on_arrays_that_do_not_stay_is_the_same_on_several_replicas(
    replicas, couples, monkeypatch
):
    stayed = alone(couples)
    monkeypatch.setattr(Planner, "room_for_data", 0)
    assert_close(stayed, run(replicas, couples=couples), 2e-6 if JAX or not couples else 2e-5)


UNTRAINED = {
    "seeds of noise": lambda: [keras.layers.GaussianNoise(1e-9)],
    "statistics": lambda: [keras.layers.Normalization(mean=0.5, variance=2.0)],
    "frozen kernels": lambda: [adapted(keras.layers.Dense(5))],
    "seeds of a recurrent layer": lambda: [keras.layers.Reshape((5, 1)), keras.layers.GRU(2)],
}


def adapted(layer):
    layer.build((None, 5))
    layer.enable_lora(1)
    return layer


@pytest.mark.parametrize(
    "names",
    [list(UNTRAINED), *(pytest.param([name], marks=pytest.mark.large) for name in UNTRAINED)],
    ids=str,
)
@pytest.mark.slow
def test_microbatches_on_replicas_of_a_model_with_state_that_is_not_trained(names):
    x, y = numbers()

    def weights(replicas, size):
        keras.utils.clear_session()
        keras.utils.set_random_seed(3)
        with spread_over(replicas):
            layers = [layer for name in names for layer in UNTRAINED[name]()]
            model = keras.Sequential([keras.Input((5,)), *layers, keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        ws.Trainer(model, microbatch_size=size, replicas=replicas).fit(
            x, y, batch_size=12, verbose=0
        )
        return snapshot(model)

    assert_close(weights(None, "auto"), weights(FEW, 6), 2e-6)


@pytest.mark.filterwarnings("ignore:microbatch_size")
@pytest.mark.parametrize(
    ("rows", "size", "couples", "said"),
    [
        (2 * FEW + 1, "auto", False, f"{3 * FEW} places = 1 host x {FEW} replicas x 3 rows."),
        (
            2 * FEW + 1,
            "auto",
            True,
            f"{2 * FEW + 1} places on 1 host x {FEW} replicas, at most 3 rows on each.",
        ),
        (
            4 * FEW,
            2 * FEW,
            True,
            f"{4 * FEW} places = 1 host x {FEW} replicas x 2 microbatches x 2 rows.",
        ),
        (
            2 * FEW + 1,
            FEW + 1,
            True,
            f"{2 * FEW + 1} places on 1 host x {FEW} replicas, at most (2 rows + 1 rows) on each.",
        ),
    ],
)
def test_the_layout_that_is_explained_adds_up(rows, size, couples, said):
    x, y = numbers()
    trainer = ws.Trainer(make(FEW, couples=couples), microbatch_size=size, replicas=FEW)
    trainer.fit(x[:rows], y[:rows], batch_size=rows, verbose=0)
    assert said in trainer.explain()


@pytest.mark.filterwarnings("ignore:microbatch_size")
@pytest.mark.parametrize(("size", "replicas"), [*share([(8, 2)]), *later([(5, FEW)])])
@pytest.mark.slow
def test_microbatches_that_mean_something_are_those_of_one_device(size, replicas):
    assert_close(run(None, size=size, couples=True), run(replicas, size=size, couples=True), 2e-5)


@on("jax")
@pytest.mark.slow
def test_float64():
    couples = not JAX  # Keras on JAX normalises in float32
    keras.config.set_floatx("float64")
    with x64():
        alone = run(None, couples=couples)
        shared = run(FEW, couples=couples)
    assert_close(alone, shared, 1e-12)


def x64():
    if not JAX:
        return spread_over(None)
    import jax

    return jax.enable_x64(True)


@on("jax")
@pytest.mark.slow
def test_draws_do_not_depend_on_replicas():
    assert_close(run(None, dropout=0.5), run(4, dropout=0.5), 2e-6)


class Draws(ws.Objective):
    """All rows are alike; `same` is 1 where the second half of them, on another replica, is drawn
    like the first.
    """

    def __call__(self, model, batch, training):
        x = keras.ops.ones((batch["x"].shape[0], 64))
        return {
            "sum": ws.Mean(keras.ops.sum(model(batch["x"], training=training), axis=-1)),
            "kept": ws.Mean(model.layers[-1](x, training=training)),
        }


def test_replicas_draw_apart():
    """Were their draws the same, so would be the rows that they keep: then the mean is a multiple
    of 2 / 128.
    """
    keras.utils.clear_session()
    with spread_over(2):
        model = keras.Sequential(
            [keras.Input((5,)), keras.layers.Dense(3), keras.layers.Dropout(0.5, seed=1)]
        )
        trainer = ws.Trainer(model, Draws(), optimizer=keras.optimizers.SGD(0.0), replicas=2)
    data = ws.Batches(iter([{"x": np.ones((2, 5), "float32")}] * 12))
    kept = [step.logs["kept"] for step in trainer.steps(data)]
    # of 128 numbers, each 0 or 2
    counts = np.diff([0, *(k * (i + 1) for i, k in enumerate(kept))]) * 64
    assert np.any(np.round(counts) % 2 == 1)


METRICS = {
    "auc": lambda: keras.metrics.AUC(name="auc"),
    "iou": lambda: keras.metrics.BinaryIoU(name="iou"),
    "precision": lambda: keras.metrics.Precision(thresholds=[0.25, 0.5, 0.75], name="precision"),
    "f1": lambda: keras.metrics.F1Score(threshold=0.5, name="f1"),
    "recall": lambda: keras.metrics.RecallAtPrecision(0.6, name="recall"),
    "r2": lambda: keras.metrics.R2Score(name="r2"),
}


@pytest.mark.filterwarnings(
    "ignore:Explicitly requested dtype int64", "ignore:You are passing weight"
)
@on("jax")
@pytest.mark.slow
def test_metrics_are_those_of_one_device():
    alone, shared = (
        run(replicas, metrics=[make() for make in METRICS.values()]) for replicas in (None, FEW)
    )
    for name in METRICS:
        np.testing.assert_allclose(shared[name], alone[name], rtol=1e-6, err_msg=name)


@pytest.mark.slow
def test_a_row_that_is_not_finite_is_named():
    model, (x, y) = make(FEW), numbers()
    # not x: relu of NaN is 0 on TensorFlow, and then the gradient alone is not finite
    y[[17, 40]] = np.nan
    before = snapshot(model)
    with pytest.raises(ws.NonFiniteError) as caught:
        ws.Trainer(model, replicas=FEW).fit(x, y, batch_size=50, verbose=0)
    assert sorted(caught.value.rows) == [17, 40]
    assert differing(before, {k: v for k, v in snapshot(model).items() if k in before}) == []
    with pytest.raises(ws.NonFiniteError) as caught:
        ws.Trainer(model, replicas=FEW, microbatch_size=6).update((x, y))["loss"]
    assert (caught.value.update, caught.value.rows) == (1, (17, 40))


@on("tensorflow")
@pytest.mark.slow
def test_a_last_batch_of_one_row_is_planned_by_the_batches_before_it():
    x, y = numbers()

    def trained(replicas, *, stops=False):
        trainer = ws.Trainer(make(replicas, couples=True), replicas=replicas, seed=1)
        for step in trainer.steps(ws.Batches((x[:33], y[:33]), batch_size=16, seed=1), epochs=2):
            if stops and step.number == 2:
                break
        return trainer

    whole = trained(None)
    shared = trained(2)
    stopped = trained(2, stops=True)
    resumed = ws.Trainer(make(2, couples=True), replicas=2, seed=1)
    resumed.run.restore(stopped.run.snapshot())  # its first batch has one row
    for _ in resumed.steps(ws.Batches((x[:33], y[:33]), batch_size=16, seed=1), epochs=2):
        pass
    assert_close(snapshot(whole.model), snapshot(shared.model), 1e-5)
    assert differing(snapshot(shared.model), snapshot(resumed.model)) == []


@on("jax")
@pytest.mark.slow
def test_batches_of_another_size_every_step():
    """A pipeline that buckets by length: other shapes and weights each step, and rows that do not
    divide.
    """
    rng = np.random.default_rng(0)
    sizes = [(5, 4), (7, 8), (3, 8), (1, 4), (8, 16)]
    batches = [rng.integers(1, 9, size) * (rng.random(size) < 0.7) for size in sizes]

    def trained(replicas):
        keras.utils.clear_session()
        keras.utils.set_random_seed(3)
        with spread_over(replicas):
            model = keras.Sequential(
                [
                    keras.Input((None,), dtype="int32"),
                    keras.layers.Embedding(9, 4),
                    keras.layers.Dense(9),
                ]
            )
            trainer = ws.Trainer(
                model, Next(), optimizer=keras.optimizers.Adam(0.1), replicas=replicas
            )
        losses = [step.loss for step in trainer.steps({"ids": b.astype("int32")} for b in batches)]
        return {"losses": losses} | snapshot(model)

    assert_close(trained(None), trained(FEW), 2e-6)


class Next(ws.Objective):
    """Guess every word from the one before it; a row's weight is its words."""

    def __call__(self, model, batch, training):
        ids = batch["ids"]
        loss = keras.losses.sparse_categorical_crossentropy(
            ids, model(ids, training=training), from_logits=True
        )
        return ws.Mean(loss, keras.ops.cast(ids > 0, "float32"))


# ---- JAX: keras.distribution, and the communication of replicas ----


@pytest.fixture(autouse=True)
def _alone():
    yield
    keras.distribution.set_distribution(None)


def model_parallel():
    mesh = keras.distribution.DeviceMesh(
        (2, 4), ("batch", "model"), keras.distribution.list_devices()
    )
    layouts = keras.distribution.LayoutMap(mesh)
    layouts[".*dense/kernel"] = (None, "model")
    layouts[".*dense/bias"] = ("model",)
    return keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")


@only_jax
@pytest.mark.parametrize("size", ["auto", 6])
def test_sharded_parameters_are_updated_like_whole_ones(size):
    model, (x, y) = make(None, distribution=model_parallel()), numbers()
    trainer = ws.Trainer(model, microbatch_size=size, seed=1)
    trainer.fit(x, y, batch_size=16, epochs=2, verbose=0)
    values = snapshot(model)
    assert_close({k: alone()[k] for k in values}, values, 2e-6)
    sharded = [v.path for v in model.optimizer.variables if "model" in str(v.value.sharding.spec)]
    assert len(sharded) == 4  # Adam's two moments of the kernel and of the bias
    assert (
        "Sharded, never gathered for the update: sequential/dense/kernel (None, 'model')"
        in trainer.explain()
    )
    assert not re.search(r"f32\[(5,8|8,5)\]\S* all-gather\(", program(trainer)), (
        "the kernel is gathered"
    )


@only_jax
def test_frozen_weights_stay_sharded_under_lora():
    model, (x, y) = make(None, distribution=model_parallel()), numbers()
    model.layers[0].enable_lora(2)
    model.compile("adam", "binary_crossentropy")
    trainer = ws.Trainer(model, microbatch_size=6, seed=1)
    trainer.fit(x, y, batch_size=16, verbose=0)
    kernel = model.layers[0]._kernel
    assert not kernel.trainable
    assert tuple(kernel.value.sharding.spec) == (None, "model")
    assert "sequential/dense/kernel (None, 'model')" in trainer.explain()
    assert not re.search(r"f32\[(5,8|8,5)\]\S* all-gather\(", program(trainer)), (
        "the kernel is gathered"
    )


@only_jax
def test_data_parallel_is_honoured():
    three = keras.distribution.DataParallel(devices=keras.distribution.list_devices()[:3])
    shared = run(None, distribution=three)
    assert_close(alone(), shared, 2e-6)
    with pytest.raises(ws.SpecificationError, match=r"keras\.distribution"):
        run(2, distribution=three)


def program(trainer):
    return next(iter(trainer.executor.planner.programs.values())).call.as_text()


def reduced(text):
    """Return (computation, operands) of every all-reduce."""
    found = []
    inside = ""
    for line in text.splitlines():
        inside = match[1] if (match := re.match(r"(?:ENTRY )?%?(\S+) \(", line)) else inside
        if " all-reduce(" in line or " all-reduce-start(" in line:
            found.append(
                (inside, len(re.findall(r"(?:f32|s32|pred)\[", line.split(" all-reduce")[0])))
            )
    return found


def innermost(text):
    """Return the bodies of loops that hold no loop themselves."""
    bodies = set(re.findall(r"while\(.*?body=%?([\w.\-]+)", text))
    return {name for name in bodies if " while(" not in computation(text, name)}


def computation(text, name):
    return re.search(rf"^(?:ENTRY )?%?{re.escape(name)} \(.*?^\}}", text, re.MULTILINE | re.DOTALL)[
        0
    ]


@only_jax
@pytest.mark.parametrize("size", ["auto", 4])
@pytest.mark.parametrize("loaded", [False, True], ids=["resident", "loaded"])
def test_one_all_reduce_an_update(loaded, size):
    """Gradients and the few scalars go over the wire together, once, however many microbatches
    there are.
    """
    model, (x, y) = make(2), (column[:48] for column in numbers())
    trainer = ws.Trainer(model, microbatch_size=size, replicas=2)
    data = Items(x, y) if loaded else (x, y)
    for _ in trainer.steps(ws.Batches(data, 16)):
        pass
    text = program(trainer)
    num = len(model.trainable_variables)
    (gradient,) = [(inside, several) for inside, several in reduced(text) if several >= num]
    assert gradient[1] <= num + 6
    # the weights, before the gradient
    assert sum(several for _, several in reduced(text)) <= num + 6 + 2 * (size == 4)
    assert not re.search(r" (all-gather|all-to-all|collective-permute|reduce-scatter)\(", text)
    if size == 4:
        assert gradient[0] not in innermost(text), "reduced for each microbatch"


@only_jax
@pytest.mark.slow
def test_the_variables_are_ordinary_ones_afterwards():
    model, (x, y) = make(2), numbers()
    ws.Trainer(model, replicas=2).fit(x, y, verbose=0)
    assert {len(v.value.devices()) for v in [*model.variables, *model.optimizer.variables]} == {1}
    model.evaluate(x, y, verbose=0)
    ws.Trainer(model).fit(x, y, verbose=0)
    ws.Trainer(model, replicas="all").fit(x, y, verbose=0)


@on("jax")
def test_one_replica_is_one_device():
    assert differing(alone(), run(1)) == []


# ---- what cannot be ----


@pytest.mark.parametrize("replicas", [0, -1, True, 2.0, "some"])
def test_a_number_of_replicas_that_means_nothing(replicas):
    with pytest.raises(
        ws.SpecificationError, match='replicas must be "all" or a whole number of at least 1'
    ):
        ws.Trainer(make(None), replicas=replicas)


def test_more_replicas_than_there_can_be():
    (x, y), trainer = numbers(), ws.Trainer(make(None), replicas=99)
    with pytest.raises(
        ws.SpecificationError, match="Every replica needs a device" if JAX else "was built under"
    ):
        trainer.fit(x, y, verbose=0)


class Ranked(ws.Objective):
    def __call__(self, model, batch, training):
        outputs = model(batch["x"], training=training)[:, 0]
        return ws.Mean(keras.ops.sum((outputs[:, None] - outputs[None]) ** 2, axis=1))


@only_tensorflow
def test_rows_that_see_each_other_are_refused_where_replicas_do_not():
    model = make(2)
    with model.distribute_strategy.scope():
        trainer = ws.Trainer(model, Ranked(), optimizer=keras.optimizers.SGD(0.1))
    with pytest.raises(ws.SpecificationError, match="the rows of a batch see each other"):
        trainer.update({"x": numbers()[0]})


class Largest(keras.metrics.Metric):
    def __init__(self, name="largest"):
        super().__init__(name=name)
        self.largest = self.add_variable((), "zeros", name="largest")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.largest.assign(self.largest + keras.ops.relu(-(self.largest - keras.ops.max(y_pred))))

    def result(self):
        return self.largest + 0.0


@on("tensorflow")
def test_a_metric_that_is_no_sum():
    if JAX:
        np.testing.assert_allclose(
            run(2, metrics=[Largest()])["largest"], run(None, metrics=[Largest()])["largest"], 1e-6
        )
    else:
        with pytest.raises(ws.SpecificationError, match="a metric's state is not a sum"):
            run(2, metrics=[Largest()])


@only_tensorflow
def test_other_strategies_are_refused():
    import tensorflow as tf

    keras.utils.clear_session()
    with tf.distribute.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"]).scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with pytest.raises(ws.SpecificationError, match="must mirror variables in one process"):
        ws.Trainer(model).fit(*numbers(), verbose=0)


WORKER = """
import tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
import keras, numpy as np, wholestep as ws
with strategy.scope():
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
ws.Trainer(model).fit(np.ones((8, 5)), np.ones((8, 1)))
"""


@only_tensorflow
@pytest.mark.large
def test_workers_of_tensorflow_are_told_what_to_use():
    """Keras 3.15 itself cannot train under this strategy."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        workers = [f"127.0.0.1:{s.getsockname()[1]}" for s in sockets]
    configs = [
        {"cluster": {"worker": workers}, "task": {"type": "worker", "index": i}} for i in range(2)
    ]
    command = [sys.executable, "-c", WORKER]
    started = [
        subprocess.Popen(
            command, env=lean(TF_CONFIG=json.dumps(c)), stderr=subprocess.PIPE, text=True
        )
        for c in configs
    ]
    for worker in started:
        errors = worker.communicate(timeout=120)[1]
        assert "SpecificationError: The strategy must mirror variables in one process" in errors
        assert "the JAX engine and `wholestep launch`" in errors
