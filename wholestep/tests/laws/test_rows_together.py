"""A loss in which rows meet is that of the whole batch, however the batch is cut."""

import functools
import itertools

import keras
import numpy as np
import pytest
from exact import differing, integers, snapshot, spread_over
from keras import layers, ops
from shares import share

import wholestep as ws

ROWS = 14
SIZES = 1, 3, 7
JAX = keras.backend.backend() == "jax"


# ---- losses of (queries, answers), each (rows, features) ----


def contrastive(queries, answers):
    scores = ops.matmul(queries, ops.transpose(answers)) / 2
    return ws.Mean(-ops.diagonal(ops.log_softmax(scores)))


def triplet(queries, answers):
    """Each query is nearer to its answer than to any other."""
    scores = ops.matmul(queries, ops.transpose(answers))
    return ws.Mean(ops.relu(scores - ops.diagonal(scores)[:, None] + 1))


def ranking(queries, answers):
    """The rows' order by their queries is that by their answers."""
    by_query = queries[:, :1] - ops.transpose(queries[:, :1])
    by_answer = answers[:, :1] - ops.transpose(answers[:, :1])
    return ops.sum(ops.relu(1 - by_query * by_answer)) / 100


def correlation(queries, answers):
    centred = [side - ops.mean(side, axis=0) for side in (queries, answers)]
    products = [ops.sum(a * b) for a in centred for b in centred]
    return -products[1] / ops.sqrt(products[0] * products[3])


def twins(queries, answers):
    """Barlow Twins: the features' correlations over rows."""
    centred = [
        (side - ops.mean(side, axis=0)) / ops.std(side, axis=0) for side in (queries, answers)
    ]
    correlations = ops.matmul(ops.transpose(centred[0]), centred[1]) / ROWS
    return ops.sum((correlations - ops.eye(correlations.shape[0])) ** 2)


LOSSES = contrastive, triplet, ranking, correlation, twins


class OfBoth(ws.Objective):
    """A loss of the outputs of both towers."""

    def __init__(self, loss):
        self.loss = loss

    def __call__(self, model, batch, training):
        outputs = model(batch, training=training)  # a list, as Keras returns it
        return ws.Whole(self.loss, outputs), {"hits": ws.Whole(_hits, tuple(outputs))}


def _hits(queries, answers):
    best = ops.argmax(ops.matmul(queries, ops.transpose(answers)), axis=1)
    own = ops.arange(best.shape[0], dtype=best.dtype)
    return ws.Mean(ops.cast(best == own, "float32"))


def towers(rate):
    inputs = keras.Input((6,)), keras.Input((5,))
    outputs = []
    for i, each in enumerate(inputs):
        hidden = layers.Dense(8, activation="tanh")(each)
        outputs.append(layers.Dense(4)(layers.Dropout(rate, seed=i)(hidden)))
    return keras.Model(list(inputs), outputs)


def gradient(loss, size, *, replicas=None, rate=0.5, dtype="float32"):
    """Return one gradient, and the logs of its update."""
    numbers = np.random.default_rng(0)
    batch = tuple(numbers.normal(size=(ROWS, n)).astype(dtype) for n in (6, 5))
    keras.utils.set_random_seed(1)
    with spread_over(replicas):
        model = towers(rate)
        model.compile(keras.optimizers.SGD(1.0))
    before = model.get_weights()
    trainer = ws.Trainer(model, OfBoth(loss), microbatch_size=size, replicas=replicas)
    (step,) = trainer.steps(ws.Batches(batch, ROWS, shuffle=False))
    logs = dict(step.logs)
    assert ("one more forward pass" in trainer.explain()) or size == "auto"
    return [a - b for a, b in zip(before, model.get_weights(), strict=True)], logs


@functools.cache
def whole(loss, dtype="float32"):
    return gradient(loss, "auto", dtype=dtype)


def check(loss, size, *, tolerance=2e-6, dtype="float32", **options):
    expected, logs = whole(loss, dtype)
    found, its_logs = gradient(loss, size, dtype=dtype, **options)
    largest = max(np.abs(g).max() for g in expected)
    for a, b in zip(expected, found, strict=True):
        assert np.abs(a - b).max() <= tolerance * largest
    np.testing.assert_allclose(list(its_logs.values()), list(logs.values()), rtol=1e-5)


@pytest.mark.own
@pytest.mark.parametrize(("loss", "size"), share(itertools.product(LOSSES, SIZES)))
def test_the_gradient_of_a_cut_batch_is_that_of_the_whole(loss, size):
    check(loss, size)


@pytest.mark.own
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("replicas", "size"), [(2, 3), (3, 7), (2, "auto")])
def test_the_gradient_on_several_replicas_is_that_of_the_whole(loss, replicas, size):
    check(loss, size, replicas=replicas)


@pytest.mark.own
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.slow
def test_the_gradient_in_float64(loss):
    keras.config.set_floatx("float64")
    with x64():
        check(loss, 3, tolerance=1e-12, dtype="float64")


def x64():
    if not JAX:
        return spread_over(None)
    import jax

    return jax.enable_x64(True)


# ---- whole numbers ----


def squares(queries, answers):
    return ops.sum(ops.matmul(queries, ops.transpose(answers)) ** 2) / 1024


def weighted(queries, answers, weights):
    return ws.Mean(ops.matmul(queries, ops.transpose(answers))[:, :2], weights)


class OfWholeNumbers(ws.Objective):
    """Terms of all rows, a term by rows, and one that is reported alone."""

    def __init__(self):
        self.scale = keras.Variable(2.0, trainable=False)

    def __call__(self, model, batch, training):
        x, y = batch
        outputs = model(x, training=training)
        scaled = lambda *sides: self.scale * squares(*sides)  # noqa: E731
        terms = {
            "squares": ws.Whole(scaled, (outputs, y), 0.5),
            "weighted": ws.Whole(weighted, (outputs, y, y[:, 0] > 0)),
            "rows": ws.Mean((outputs - y) ** 2),
        }
        return terms, {"largest": ws.Whole(ops.max, (outputs,))}


def of_whole_numbers(size, replicas=None, optimizer="adam", *, eager=False):
    keras.utils.clear_session()
    with spread_over(replicas):
        model = keras.Sequential(
            [keras.Input((4,)), layers.Dense(4), layers.Dropout(0.5, seed=3), layers.Dense(4)]
        )
        for i, variable in enumerate(model.trainable_weights):
            variable.assign(integers(*variable.shape, seed=i))
        model.compile(optimizer, run_eagerly=eager)
    batch = integers(16, 4, seed=8), integers(16, 4, seed=9)
    batch[1][:, 0] = np.resize([1, 0], 16)
    trainer = ws.Trainer(model, OfWholeNumbers(), microbatch_size=size, replicas=replicas)
    (step,) = trainer.steps(ws.Batches(batch, 16, shuffle=False))
    return snapshot(model) | step.logs | {"own loss": step.loss}


@functools.cache
def whole_numbers():
    return of_whole_numbers("auto")


@pytest.mark.own
@pytest.mark.parametrize(
    ("size", "replicas"), [(1, None), (3, None), (7, None), (8, None), ("auto", 2), (5, 2), (6, 3)]
)
def test_no_bit_differs_between_cuts(size, replicas):
    assert differing(whole_numbers(), of_whole_numbers(size, replicas)) == []


@pytest.mark.own
def test_no_bit_differs_where_every_operation_is_called_with_values():
    assert differing(whole_numbers(), of_whole_numbers(5, eager=True)) == []


# ---- what else meets it ----


class Clip(keras.Model):
    """Two towers, and a temperature that is trained."""

    def __init__(self):
        super().__init__()
        self.words = layers.Embedding(50, 4)
        self.tower = layers.Dense(4, kernel_regularizer="l2", activity_regularizer="l1")
        self.temperature = self.add_weight(name="temperature", initializer="ones")

    def call(self, inputs):
        words, pixels = inputs
        return ops.mean(self.words(words), axis=1), self.tower(pixels)


class WithTemperature(ws.Objective):
    def __call__(self, model, batch, training):
        def loss(words, pixels):
            scores = ops.matmul(words, ops.transpose(pixels)) * ops.exp(model.temperature)
            return ws.Mean(-ops.diagonal(ops.log_softmax(scores)))

        return ws.Whole(loss, model(batch, training=training))


@pytest.mark.own
@pytest.mark.parametrize(
    "optimizer", ["sgd", keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))]
)
def test_a_function_may_read_a_weight_that_is_trained(optimizer):
    def trained(size):
        keras.utils.set_random_seed(2)
        numbers = np.random.default_rng(3)
        batch = numbers.integers(0, 50, (10, 6)), numbers.normal(size=(10, 5)).astype("float32")
        model = Clip()
        ws.Trainer(
            model,
            WithTemperature(),
            optimizer=keras.optimizers.deserialize(
                keras.optimizers.serialize(keras.optimizers.get(optimizer))
            ),
            microbatch_size=size,
        ).fit(batch, batch_size=10, epochs=3, verbose=0)
        return model.get_weights()

    for alone, cut in zip(trained("auto"), trained(4), strict=True):
        np.testing.assert_allclose(cut, alone, rtol=1e-5, atol=1e-6)


def rank_loss(y, scores):
    """A value for each row, in which rows meet."""
    pairs = (scores - ops.transpose(scores)) * ops.sign(y - ops.transpose(y))
    return ops.mean(ops.relu(1 - pairs), axis=1)


def correlation_loss(y, scores):
    y, scores = (side - ops.mean(side) for side in (y, scores))
    return -ops.sum(y * scores) / ops.sqrt(ops.sum(y**2) * ops.sum(scores**2))


RANKED = np.random.default_rng(0).normal(size=(22, 7))  # and a short last batch


def ranking_trainer(loss, size):
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [keras.Input((6,)), layers.Dense(8), layers.Dropout(0.5, seed=1), layers.Dense(1)]
    )
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=["mae"])
    return ws.Trainer(model, microbatch_size=size)


def ranked():
    return ws.Batches((RANKED[:, 1:], RANKED[:, :1]), 8)


@pytest.mark.own
@pytest.mark.parametrize("loss", [rank_loss, correlation_loss])
def test_a_compiled_loss_in_which_rows_meet_needs_no_change(loss):
    whole = ranking_trainer(loss, "auto")
    expected = whole.fit(ranked(), epochs=2, verbose=0).history
    cut = ranking_trainer(loss, 3)
    found = cut.fit(ranked(), epochs=2, verbose=0).history
    assert "one more forward pass" in cut.explain()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5)
    for a, b in zip(whole.model.get_weights(), cut.model.get_weights(), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)


def test_a_run_that_is_resumed_computes_the_same_bits():
    whole = ranking_trainer(rank_loss, 3)
    whole.fit(ranked(), epochs=2, verbose=0)
    first = ranking_trainer(rank_loss, 3)
    for step in first.steps(ranked(), epochs=2):
        if step.number == 2:
            break
    second = ranking_trainer(rank_loss, 3)
    second.run.restore(first.run.snapshot())
    for _ in second.steps(ranked(), epochs=2):
        pass
    for a, b in zip(whole.model.get_weights(), second.model.get_weights(), strict=True):
        assert np.array_equal(a, b)


@pytest.mark.filterwarnings("ignore:microbatch_size")
def test_rows_that_meet_inside_of_the_model_stay_as_they_are():
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((6,)), layers.BatchNormalization(), layers.Dense(1)])
    model.compile("sgd", rank_loss)
    x = np.random.default_rng(0).normal(size=(8, 6))
    trainer = ws.Trainer(model, microbatch_size=4)
    trainer.fit(x, x[:, :1], batch_size=8, verbose=0)
    assert "will not be those of whole batches" in trainer.explain()


def test_an_output_without_rows_is_refused():
    class Wrong(ws.Objective):
        def __call__(self, model, batch, training):
            return ws.Whole(ops.sum, (ops.mean(model(batch[0]), axis=0),))

    model = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
    trainer = ws.Trainer(model, Wrong(), optimizer="sgd")
    with pytest.raises(ws.SpecificationError, match="must have the 8 rows of the batch"):
        trainer.fit(np.ones((8, 6)), np.ones(8), batch_size=8, verbose=0)


@pytest.mark.own
@pytest.mark.parametrize("size", [4, "auto"])
def test_rows_that_the_function_closes_over_are_refused_where_the_batch_is_cut(size):
    class Wrong(ws.Objective):
        def __call__(self, model, batch, training):
            x, mask = batch
            return ws.Whole(lambda outputs: ops.sum(outputs * mask), (model(x),))

    model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
    trainer = ws.Trainer(model, Wrong(), optimizer="sgd", microbatch_size=size)
    run = lambda: trainer.fit((np.ones((8, 6)), np.ones((8, 1))), batch_size=8, verbose=0)  # noqa: E731
    if size == "auto":
        run()
        return
    with pytest.raises(ws.SpecificationError, match=r"all that has rows.*'mask'.*\(..., mask\)"):
        run()


@pytest.mark.parametrize("outputs", [(), None, np.ones((8, 1))])
def test_outputs_that_are_no_tuple_of_tensors_are_refused(outputs):
    class Wrong(ws.Objective):
        def __call__(self, model, batch, training):
            model(batch[0])
            return ws.Whole(ops.sum, outputs)

    model = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
    trainer = ws.Trainer(model, Wrong(), optimizer="sgd")
    with pytest.raises(ws.SpecificationError, match="must be a tuple or list, the arguments"):
        trainer.fit(np.ones((8, 6)), np.ones(8), batch_size=8, verbose=0)


class SquaredError(layers.Layer):
    def call(self, outputs, labels):
        return ops.mean((outputs - labels) ** 2)


def with_a_loss_as_output():
    inputs = keras.Input((6,)), keras.Input((1,))
    return keras.Model(inputs, SquaredError()(layers.Dense(1)(inputs[0]), inputs[1]))


def with_more_rows_than_the_batch():
    split = layers.Lambda(lambda outputs: ops.reshape(outputs, (-1, 1)))
    joined = layers.Lambda(lambda outputs: ops.concatenate(outputs, axis=1))
    inputs = keras.Input((6,)), keras.Input((1,))
    return keras.Model(inputs, split(layers.Dense(4)(joined(inputs))))


@pytest.mark.own
@pytest.mark.parametrize("make", [with_a_loss_as_output, with_more_rows_than_the_batch])
def test_outputs_that_have_no_rows_of_the_batch_are_computed_at_once(make):
    model = make()
    model.compile("sgd", lambda labels, outputs: ops.mean(outputs**2))
    trainer = ws.Trainer(model, microbatch_size=4)
    labels = RANKED[:16, :1]
    with pytest.warns(UserWarning, match="microbatch_size=4 has no effect"):
        history = trainer.fit([RANKED[:16, 1:], labels], labels, batch_size=8, verbose=0).history
    assert np.isfinite(history["loss"]).all()


@pytest.mark.own
def test_a_compiled_loss_that_is_one_number_is_called_at_most_twice_as_often():
    def calls(loss):
        made = []
        counted = lambda labels, outputs: made.append(1) or loss((labels - outputs) ** 2)  # noqa: E731
        model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
        model.compile("sgd", counted, run_eagerly=True)
        trainer = ws.Trainer(model)
        for _ in range(3):
            trainer.update((RANKED[:8, 1:], RANKED[:8, :1]))
        return len(made)

    assert calls(ops.mean) <= 2 * calls(lambda values: ops.mean(values, axis=-1))
