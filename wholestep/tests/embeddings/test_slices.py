"""Updates of embeddings equal those of `keras.Model.fit` on each engine, for any cut."""

import itertools

import keras
import numpy as np
import pytest
from exact import differing, integers, snapshot, spread_over
from shares import on, share

import wholestep as ws

TENSORFLOW = keras.backend.backend() == "tensorflow"
ROWS = 40
LENGTH = 4
WORDS = 12
WIDTH = 4
RNG = np.random.default_rng(3)
# words come again
X = RNG.choice(WORDS, (ROWS, LENGTH), p=np.arange(WORDS, 0, -1) / 78).astype("int32")
Y = RNG.normal(size=(ROWS, 1)).astype("float32")
FIT = {"batch_size": 16, "epochs": 3, "shuffle": False, "verbose": 0}
CUTS = {"whole": (None, "auto"), "microbatches": (None, 5), "replicas": (2, "auto"), "both": (2, 6)}

OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.05),
    "adamw": lambda: keras.optimizers.AdamW(0.05),
    "amsgrad": lambda: keras.optimizers.Adam(0.05, amsgrad=True),
    "nadam": lambda: keras.optimizers.Nadam(0.05),
    "adamax": lambda: keras.optimizers.Adamax(0.05),
    "adafactor": lambda: keras.optimizers.Adafactor(0.05),
    "adadelta": lambda: keras.optimizers.Adadelta(1.0),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.05),
    "ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "lamb": lambda: keras.optimizers.Lamb(0.05),
    "lion": lambda: keras.optimizers.Lion(0.01),
    "muon": lambda: keras.optimizers.Muon(0.05),
    "sgd": lambda: keras.optimizers.SGD(0.5),
    "momentum": lambda: keras.optimizers.SGD(0.5, momentum=0.9),
    "clipnorm": lambda: keras.optimizers.Adam(0.05, clipnorm=0.01),
    "global clipnorm": lambda: keras.optimizers.SGD(0.5, global_clipnorm=0.01),
    "clipvalue": lambda: keras.optimizers.SGD(0.5, clipvalue=1e-3),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.05)),
    "moving average": lambda: keras.optimizers.Adam(0.05, use_ema=True),
}


class Positions(keras.layers.Layer):
    """Adds the vectors of positions, which all rows share."""

    def build(self, shape):
        self.table = keras.layers.Embedding(LENGTH, WIDTH)
        self.table.build(None)

    def call(self, x):
        return x + self.table(keras.ops.arange(LENGTH))


class Both(keras.layers.Layer):
    """Looks up words, and positions, in one table."""

    def build(self, shape):
        self.table = keras.layers.Embedding(WORDS, WIDTH)
        self.table.build(None)

    def call(self, words):
        return self.table(words) + self.table(keras.ops.arange(LENGTH))


class Tied(keras.layers.Layer):
    """Multiplies vectors of words by the table in which they were looked up."""

    def build(self, shape):
        self.table = keras.layers.Embedding(WORDS, WIDTH)
        self.table.build(None)

    def call(self, words):
        return keras.ops.matmul(self.table(words), keras.ops.transpose(self.table.embeddings))


class Taken(keras.layers.Layer):
    """Takes rows of an extra weight."""

    def build(self, shape):
        self.table = self.add_weight(shape=(WORDS, WIDTH))

    def call(self, words):
        return keras.ops.take(self.table, words, axis=0)


class OneMore(keras.layers.Layer):
    """Looks up one word more than the rows have in all."""

    def build(self, shape):
        self.table = keras.layers.Embedding(WORDS, WIDTH)
        self.table.build(None)

    def call(self, words):
        flat = keras.ops.reshape(words, (-1,))
        asked = keras.ops.concatenate([flat, flat[:1]])
        return keras.ops.reshape(self.table(asked)[:-1], (-1, LENGTH, WIDTH))


def twice(words):
    table = keras.layers.Embedding(WORDS, WIDTH)
    return keras.layers.Multiply()([table(words), table(keras.ops.flip(words, 1))])


LOOKUPS = {
    "an embedding": lambda words: keras.layers.Embedding(WORDS, WIDTH)(words),
    "positions": lambda words: Positions()(keras.layers.Embedding(WORDS, WIDTH)(words)),
    "one table twice": twice,
    "words and positions in one table": lambda words: Both()(words),
    "a weight": lambda words: Taken()(words),
    "a tied table": lambda words: Tied()(words),
    "a regularised table": lambda words: keras.layers.Embedding(
        WORDS, WIDTH, embeddings_regularizer="l2"
    )(words),
    "a mask": lambda words: keras.layers.Embedding(WORDS, WIDTH, mask_zero=True)(words),
}


OTHERS = [
    pytest.param(*case, marks=pytest.mark.slow) for case in itertools.product(LOOKUPS, [*CUTS][:3])
]


def build(lookup, optimizer, replicas=None):
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    with spread_over(replicas):
        words = keras.Input((LENGTH,), dtype="int32")
        vectors = keras.layers.GlobalAveragePooling1D()(LOOKUPS[lookup](words))
        model = keras.Model(words, keras.layers.Dense(1)(vectors))
        model.compile(OPTIMIZERS[optimizer](), "mse")
    return model


def losses(lookup, optimizer, replicas=None, microbatch_size="auto", **options):
    model = build(lookup, optimizer, replicas)
    trainer = ws.Trainer(model, microbatch_size=microbatch_size, replicas=replicas, **options)
    return trainer.fit(X, Y, **FIT).history["loss"]


def keras_losses(lookup, optimizer):
    return build(lookup, optimizer).fit(X, Y, **FIT).history["loss"]


@on("tensorflow")
@pytest.mark.parametrize(("lookup", "cut"), [*((lookup, "both") for lookup in LOOKUPS), *OTHERS])
def test_an_update_of_tables_is_that_of_keras(lookup, cut):
    np.testing.assert_allclose(
        losses(lookup, "adam", *CUTS[cut]), keras_losses(lookup, "adam"), rtol=1e-5
    )


@on("tensorflow")
@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_each_optimizer_takes_the_steps_of_keras(optimizer):
    expected = keras_losses("an embedding", optimizer)
    for cut in CUTS.values():
        np.testing.assert_allclose(
            losses("an embedding", optimizer, *cut), expected, rtol=1e-5, err_msg=str(cut)
        )


@pytest.mark.large
def test_vectors_of_words_train_as_in_keras():
    """Pairs of words by Zipf's law, where a few words are in most pairs."""
    num_words = 200
    num_pairs = 26_388
    share_of_word = 1 / np.arange(1, num_words + 1)
    draw = np.random.default_rng(0)
    pairs = draw.choice(num_words, (2, num_pairs), p=share_of_word / share_of_word.sum()).astype(
        "int32"
    )
    counts = draw.normal(size=(num_pairs, 1)).astype("float32")

    def model(replicas=None):
        keras.utils.set_random_seed(3)
        with spread_over(replicas):
            words = keras.Input((), dtype="int32")
            contexts = keras.Input((), dtype="int32")
            vectors = keras.layers.Embedding(num_words, 100)
            biases = keras.layers.Embedding(num_words, 1)
            product = keras.layers.Dot(1)([vectors(words), vectors(contexts)])
            made = keras.Model(
                [words, contexts], keras.layers.Add()([product, biases(words), biases(contexts)])
            )
            made.compile(keras.optimizers.Adam(0.01), "mse")
        return made

    how = {"batch_size": 512, "epochs": 5, "shuffle": False, "verbose": 0}
    expected = model().fit([*pairs], counts, **how).history["loss"]
    for replicas, size in ((None, "auto"), (None, 100), (2, "auto"), (2, 100)):
        trainer = ws.Trainer(model(replicas), replicas=replicas, microbatch_size=size)
        np.testing.assert_allclose(
            trainer.fit([*pairs], counts, **how).history["loss"], expected, rtol=1e-5
        )


@on("tensorflow")
def test_dense_gradients_are_those_of_jax_and_others_than_those_of_keras_on_tensorflow():
    """If Keras' part fails, Keras sums the gradients of equal rows first; then the option and its
    lines in docs go.

    Keras 3.15.1 does not; https://github.com/keras-team/keras/issues/19992 is about its sparse
    gradients.
    """
    x = np.array([[3], [3], [3], [5]], "int32")
    y = -np.ones((4, 1), "float32")

    def squares(train):
        layers = [
            keras.Input((1,), dtype="int32"),
            keras.layers.Embedding(20, 1, "zeros"),
            keras.layers.Flatten(),
        ]
        model = keras.Sequential(layers)
        model.compile(keras.optimizers.Adagrad(1.0, initial_accumulator_value=0.0), "mse")
        train(model)
        return keras.ops.convert_to_numpy(model.optimizer.variables[2])[[3, 5], 0].tolist()

    of_lookups = [3 * (2 / 4) ** 2, (2 / 4) ** 2]
    of_rows = [(3 * 2 / 4) ** 2, (2 / 4) ** 2]
    assert squares(lambda model: model.fit(x, y, verbose=0)) == (
        of_lookups if TENSORFLOW else of_rows
    )
    assert squares(lambda model: ws.Trainer(model).update((x, y))) == (
        of_lookups if TENSORFLOW else of_rows
    )
    assert squares(lambda model: ws.Trainer(model, dense_gradients=True).update((x, y))) == of_rows


@pytest.mark.parametrize("dense_gradients", [False, True])
@pytest.mark.parametrize("cut", share(["microbatches", "replicas", "both"]))
def test_no_bit_differs_between_cuts(cut, dense_gradients):
    def updated(replicas, microbatch_size):
        model = build("one table twice", "adam", replicas)
        for i, variable in enumerate(model.weights):
            variable.assign(integers(*variable.shape, seed=100 + i))
        options = {
            "replicas": replicas,
            "microbatch_size": microbatch_size,
            "dense_gradients": dense_gradients,
        }
        trainer = ws.Trainer(model, **options)
        logs = trainer.update((X[:16], integers(16, 1, seed=7)))
        return snapshot(model) | dict(logs)

    assert differing(updated(*CUTS["whole"]), updated(*CUTS[cut])) == []


@on("tensorflow")
@pytest.mark.skipif(not TENSORFLOW, reason="on JAX gradients are dense")
def test_lookups_that_belong_to_no_row_refuse_a_cut(monkeypatch):
    monkeypatch.setitem(LOOKUPS, "one more", lambda words: OneMore()(words))
    assert losses("one more", "adam") == pytest.approx(keras_losses("one more", "adam"), rel=1e-5)
    with pytest.raises(
        ws.SpecificationError,
        match=r"each row must look up equally many .*17 for 4 rows and 65 for 16",
    ) as error:
        losses("one more", "adam", microbatch_size=5)
    assert "dense_gradients=True" in str(error.value)
    losses("one more", "adam", microbatch_size=5, dense_gradients=True)


class OfTheBatch(keras.layers.Layer):
    """Multiplies by the vector of the first word of a batch, as of a sample that is drawn for
    it.
    """

    def build(self, shape):
        self.table = keras.layers.Embedding(WORDS, WIDTH)
        self.table.build(None)

    def call(self, words):
        return keras.ops.cast(1 + words[..., None], "float32") * self.table(words[:1, 0])


@on("tensorflow")
def test_rows_that_each_microbatch_reads_for_itself_are_those_that_move(monkeypatch):
    monkeypatch.setitem(LOOKUPS, "of the batch", lambda words: OfTheBatch()(words))

    def moved(**options):
        model = build("of the batch", "adam")
        (table,) = (v for v in model.trainable_variables if v.shape == (WORDS, WIDTH))
        before = keras.ops.convert_to_numpy(table)
        ws.Trainer(model, microbatch_size=4, **options).update((X[:16], Y[:16]))
        return np.flatnonzero(np.any(keras.ops.convert_to_numpy(table) != before, axis=1)).tolist()

    with pytest.warns(UserWarning, match="the rows of a batch see each other"):
        assert moved() == sorted({*X[:16:4, 0].tolist()})
    with pytest.warns(UserWarning, match="the rows of a batch see each other"):
        assert moved(dense_gradients=True) == moved()


class RowByRow(keras.Model):
    def __init__(self):
        super().__init__()
        self.table = keras.layers.Embedding(WORDS, WIDTH)
        self.head = keras.layers.Dense(1)

    def call(self, words):
        vectors = [self.table(words[i : i + 1]) for i in range(words.shape[0])]
        return self.head(keras.ops.mean(keras.ops.concatenate(vectors), axis=1))


@on("tensorflow")
def test_rows_that_are_looked_up_one_by_one_in_python_are_those_of_a_full_batch():
    def updated(microbatch_size):
        keras.utils.set_random_seed(1)
        model = RowByRow()
        trainer = ws.Trainer(model, Squares(), optimizer="adam", microbatch_size=microbatch_size)
        trainer.update((X[:8], Y[:8]))
        return model.get_weights()

    for whole, cut in zip(updated("auto"), updated(4), strict=True):
        np.testing.assert_allclose(cut, whole, rtol=1e-5, atol=1e-7)


class Squares(ws.Objective):
    def __call__(self, model, batch, training):
        return ws.Mean((model(batch[0], training=training) - batch[1]) ** 2)


@on("tensorflow")
def test_a_replica_without_rows_adds_no_lookup(monkeypatch):
    """A last batch of one row that is not padded, as its rows see each other: the second replica
    has none.
    """
    normalised = lambda words: keras.layers.BatchNormalization()(LOOKUPS["positions"](words))  # noqa: E731
    monkeypatch.setitem(LOOKUPS, "normalised positions", normalised)

    def trained(replicas):
        model = build("normalised positions", "adam", replicas)
        trainer = ws.Trainer(model, replicas=replicas)
        trainer.fit(X[:9], Y[:9], batch_size=8, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    for alone, shared in zip(trained(None), trained(2), strict=True):
        np.testing.assert_allclose(shared, alone, rtol=1e-4, atol=1e-5)


@on("tensorflow")
def test_explain_says_in_which_form_the_optimizer_gets_gradients():
    def explained(optimizer, lookup="an embedding", **options):
        model = build(lookup, optimizer)
        trainer = ws.Trainer(model, **options)
        trainer.update((X, Y))
        return trainer.explain().splitlines()[-1].replace(model.layers[1].name, "embedding")

    by_lookups = (
        "Adam squares or clips the gradient of each lookup in embedding/embeddings before "
        "those of equal rows"
    )
    by_rows = (
        "The gradients of equal rows of embedding are summed before Adam squares or clips them"
    )
    assert explained("adam").startswith(by_lookups) is TENSORFLOW
    assert explained("adam", dense_gradients=True).startswith(by_rows) is TENSORFLOW
    assert "equal rows" not in explained("sgd")
    assert "equal rows" not in explained("adam", "a regularised table")


def test_an_option_that_is_no_bool_is_refused():
    with pytest.raises(
        ws.SpecificationError, match=r"dense_gradients must be True or False.*'keras'"
    ):
        ws.Trainer(build("an embedding", "adam"), dense_gradients="keras")
