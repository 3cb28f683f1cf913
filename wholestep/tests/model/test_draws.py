"""Random draws belong to rows: no cut changes them, and they are as random as they should be."""

import re
import threading
from functools import partial

import keras
import numpy as np
import pytest
from exact import differing, integers, snapshot, spread_over
from keras import layers as L  # noqa: N812
from keras import ops
from keras.src.backend import random as seam
from shares import later, on, share
from small import X, Y, model, values

import wholestep as ws
from wholestep import engines
from wholestep.model import distributions
from wholestep.model.distributions import RandomBits
from wholestep.model.draws import DrawRequest, Draws, compare, drawing
from wholestep.model.forward import Forward

JAX = keras.backend.backend() == "jax"
ROWS = 20
BATCH = 8
TIME = 5
DIM = 4  # batches of 8, 8 and 4 rows
IMAGE = (6, 6, 3)


# ---- the draws of each row, read from the gradient of a separate vector ----


class Told(ws.Objective):
    """The gradient of a row's vector equals the model's outputs for the row, bit for bit."""

    def __call__(self, model, batch, training):
        drawn = model(batch["x"], training=training)
        drawn = ops.concatenate(
            [ops.reshape(ops.cast(d, "float32"), (d.shape[0], -1)) for d in drawn], axis=1
        )
        own = ops.take(model.told, batch["row"], axis=0)
        return ws.Sum(ops.sum(drawn * own[:, : drawn.shape[1]], axis=-1))


class Telling(keras.Model):
    """Parallel layers, each with separate inputs; the gradient of `told` has each row's outputs."""

    def __init__(self, layers):
        super().__init__()
        self.parts = layers()
        self.told = self.add_weight(shape=(ROWS, 1000), initializer="zeros")

    def call(self, x, training=False):
        return [layer(x[name], training=training) for name, layer in self.parts.items()]


def numbers(name):
    shape = IMAGE if name.startswith("Random") else (TIME, DIM)
    return np.random.default_rng(len(name)).random((ROWS, *shape), np.float32) + 0.5


def told(layers, size="auto", replicas=None, epochs=1):
    """Return what each row drew in the last of some epochs, and all else that came out."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(5)
    with spread_over(replicas):
        made = Telling(layers)
        optimizer = keras.optimizers.SGD(1.0)
    trainer = ws.Trainer(made, Told(), optimizer=optimizer, microbatch_size=size, replicas=replicas)
    batches = ws.Batches(data_of(made), BATCH, seed=1)
    for _ in range(epochs):
        made.told.assign(np.zeros(made.told.shape))
        trainer.fit(batches, verbose=0)
    # The seeds among them have moved as well, once for each update.
    return {v.path: ops.convert_to_numpy(v) for v in made.variables}, trainer


def data_of(made):
    return {
        "x": {name: numbers(name) for name in made.parts},
        "row": np.arange(ROWS, dtype="int32"),
    }


def kept(found):
    (name,) = [
        name for name in found if name.endswith("variable") and found[name].shape == (ROWS, 1000)
    ]
    return found[name]


class Attention(L.MultiHeadAttention):
    """What attention drops of its scores alone: products of matrices are rounded otherwise in
    another batch.
    """

    def build(self, shape):
        super().build(shape, shape)

    def call(self, x, training=False):
        return self._dropout_layer(ops.matmul(x, ops.swapaxes(x, 1, 2)) * 0 + 1, training=training)


class Masks(L.GRU):
    """The masks of a recurrent layer, of its inputs and of its state."""

    def build(self, shape):
        super().build(shape)

    def call(self, x, training=False):
        self.cell.reset_dropout_mask()
        self.cell.reset_recurrent_dropout_mask()
        masks = self.cell.get_dropout_mask(x[:, 0]), self.cell.get_recurrent_dropout_mask(x[:, 0])
        return ops.concatenate([mask for several in masks for mask in several], axis=-1)


class Function(L.Layer):
    """A layer of one function's draws; its seed is in the state of the model."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw
        self.seed_generator = keras.random.SeedGenerator(3)

    def call(self, x, training=False):
        drawn = ops.cast(self.draw(x, seed=self.seed_generator), "float32")
        num = x.shape[0] if drawn.shape[:1] == x.shape[:1] else 1
        return ops.reshape(drawn, (num, -1)) * ops.ones((x.shape[0], 1)) + 0 * x[:, :1, 0]

    def compute_output_shape(self, shape):
        return (shape[0], None)


LAYERS = {
    "Dropout": partial(L.Dropout, 0.3),
    "noise_shape": partial(L.Dropout, 0.5, noise_shape=(None, 1, DIM)),
    "SpatialDropout": partial(L.SpatialDropout1D, 0.5),
    "GaussianNoise": partial(L.GaussianNoise, 0.5),
    "GaussianDropout": partial(L.GaussianDropout, 0.5),
    "AlphaDropout": partial(L.AlphaDropout, 0.5),
    "in time": lambda: L.TimeDistributed(L.Dropout(0.5)),
    "MultiHeadAttention": lambda: Attention(1, DIM, dropout=0.5),
    "recurrent": lambda: Masks(DIM, dropout=0.5, recurrent_dropout=0.5),
    "RandomFlip": L.RandomFlip,
    "RandomRotation": partial(L.RandomRotation, 0.25),
    "RandomZoom": partial(L.RandomZoom, 0.25),
    "RandomContrast": partial(L.RandomContrast, 0.5),
}
if not JAX:  # where Keras' own layer cannot be compiled
    LAYERS["RandomCrop"] = partial(L.RandomCrop, 4, 4)

R = keras.random
FUNCTIONS = {
    "normal": lambda x, seed: R.normal(x.shape, 1.0, 2.0, seed=seed),
    "uniform": lambda x, seed: R.uniform(x.shape, -1.0, 1.0, seed=seed),
    "truncated_normal": lambda x, seed: R.truncated_normal(x.shape, seed=seed),
    "randint": lambda x, seed: R.randint((x.shape[0], 9), -5, 1000, seed=seed),
    "categorical": lambda x, seed: R.categorical(ops.log(x[:, 0]), 6, seed=seed),
    "gamma": lambda x, seed: R.gamma(x.shape, ops.sum(x, -1, keepdims=True), seed=seed),
    "beta": lambda x, seed: R.beta(x.shape, 0.5, x, seed=seed),
    "binomial": lambda x, seed: R.binomial(x.shape, 30.0, x - 0.5, seed=seed),
    "shuffle": lambda x, seed: R.shuffle(x, axis=1, seed=seed),
    "half": lambda x, seed: (
        R.normal(x.shape, dtype="float16", seed=seed) + R.uniform(x.shape, dtype="float16", seed=3)
    ),
    "brain": lambda x, seed: R.dropout(ops.cast(x, "bfloat16"), 0.5, seed=seed),
    "depth": lambda x, seed: R.uniform((), seed=seed),
    "weights": lambda x, seed: R.normal((23, 2), seed=seed),  # of more rows than any program has
    "rows times heads": lambda x, seed: ops.reshape(
        R.uniform((3 * x.shape[0], 2), seed=seed), (x.shape[0], 6)
    ),
    "rows last": lambda x, seed: ops.transpose(R.uniform((2, 2 * x.shape[0]), seed=seed)[:, ::2]),
}


# TensorFlow computes a logarithm or a sine at an array's end by another routine: its last bit may
# be another.
ROUNDED = {
    *("GaussianNoise", "GaussianDropout", "RandomRotation", "RandomZoom"),
    *("normal", "truncated_normal", "gamma", "beta", "half", "weights"),
}
LEFT_OUT = set() if JAX else ROUNDED


def layers():
    return {name: make() for name, make in LAYERS.items() if name not in LEFT_OUT}


def functions():
    return {name: Function(draw) for name, draw in FUNCTIONS.items() if name not in LEFT_OUT}


def rounded():
    made = {name: make() for name, make in LAYERS.items() if name in ROUNDED}
    return made | {name: Function(draw) for name, draw in FUNCTIONS.items() if name in ROUNDED}


WHOLE: dict = {}


def whole(kind):
    """Return the draws of rows in uncut updates, computed once."""
    if kind not in WHOLE:
        WHOLE[kind] = told(kind)[0]
        assert np.all(np.isfinite(kept(WHOLE[kind])))
    return WHOLE[kind]


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        *share([(layers, 3), (functions, 8)]),
        *later(
            [
                (layers, 8),
                (functions, 3),
                *((kind, parts) for parts in (2, 5) for kind in (layers, functions)),
            ]
        ),
    ],
)
@pytest.mark.slow
def test_no_bit_of_what_a_row_draws_differs_between_cuts(kind, parts):
    """Batches of 8, 8 and 4 rows: in parts of one size or not, the last one filled up."""
    found, trainer = told(kind, -(-BATCH // parts))
    assert differing(whole(kind), found) == []
    assert (
        "Microbatches of any size give the update of the whole batch, up to rounding."
        in trainer.explain()
    )


@pytest.mark.large
def test_draws_of_rounded_functions_differ_between_cuts_by_rounding():
    np.testing.assert_allclose(
        kept(told(rounded, 3)[0]), kept(whole(rounded)), rtol=2e-6, atol=2e-6
    )


@on("jax")
@pytest.mark.parametrize(
    ("kind", "replicas", "size"),
    [(functions, 3, "auto"), *later([(layers, 2, "auto"), (functions, 2, 4), (layers, 2, 4)])],
)
@pytest.mark.slow
def test_no_bit_of_what_a_row_draws_differs_between_replicas(kind, replicas, size):
    assert differing(whole(kind), told(kind, size, replicas)[0]) == []


@on("jax")
@pytest.mark.slow
def test_rows_and_updates_draw_apart():
    rows = kept(whole(layers))[:, : TIME * DIM]  # what dropout keeps of them, in three updates
    assert len(np.unique(rows != 0, axis=0)) == ROWS
    again = kept(told(layers, epochs=2)[0])[:, : TIME * DIM]
    assert np.all(np.any((rows != 0) != (again != 0), axis=1))


@pytest.mark.large
def test_a_run_goes_on_as_it_would_have_however_it_is_cut_from_then_on():
    unbroken, _ = told(layers, epochs=2)
    _, trainer = told(layers)
    made = trainer.model
    made.told.assign(np.zeros(made.told.shape))
    batches = ws.Batches(data_of(made), BATCH, seed=1)
    batches.seek(1, 0)
    ws.Trainer(made, Told(), optimizer=keras.optimizers.SGD(1.0), microbatch_size=3).fit(
        batches, verbose=0
    )
    assert differing(unbroken, {v.path: ops.convert_to_numpy(v) for v in made.variables}) == []


@pytest.mark.large  # `test_no_bit_of_what_a_row_draws_differs_between_cuts` fails on such draws
@pytest.mark.parametrize("kind", [functions, layers])
def test_draws_that_belong_to_places_in_the_microbatch_are_caught(kind, monkeypatch):
    honest = Forward._drawing
    of_its_own = lambda self, batch, first: honest(self, batch, None if first is None else 0)  # noqa: E731
    monkeypatch.setattr(Forward, "_drawing", of_its_own)
    assert differing(whole(kind), told(kind, 4)[0])


# ---- whole updates, of whole numbers ----


def trained(size, *middle, replicas=None, num_rows=16, rate=0.5):
    """Carry out an update of whole numbers with dropout, and return everything it changed and
    said.
    """
    keras.utils.clear_session()
    with spread_over(replicas):
        inputs = [
            keras.Input((4,)),
            L.Dense(4),
            L.Dropout(rate, seed=7),
            *[make() for make in middle],
            L.ReLU(),
        ]
        made = keras.Sequential([*inputs, L.Dropout(rate, seed=8), L.Dense(4)])
        for i, variable in enumerate(made.trainable_weights):
            variable.assign(integers(*variable.shape, seed=i))
        made.compile(keras.optimizers.SGD(0.5, momentum=0.5), "mse", metrics=["mae"])
    x = integers(num_rows, 4, seed=1)
    y = integers(num_rows, 4, seed=2)
    trainer = ws.Trainer(made, microbatch_size=size, replicas=replicas)
    (step,) = trainer.steps(ws.Batches((x, y), num_rows, shuffle=False))
    return snapshot(made) | step.logs | {"own loss": step.loss}


@pytest.mark.parametrize("parts", share((2, 3, 5, 16)))
@pytest.mark.slow
def test_no_bit_of_an_update_with_dropout_differs_between_cuts(parts):
    assert differing(trained("auto"), trained(-(-16 // parts))) == []


@pytest.mark.parametrize(("replicas", "size"), share([(8, 8), (2, "auto"), (2, 6), (4, "auto")]))
@pytest.mark.slow
def test_no_bit_of_an_update_with_dropout_differs_between_replicas(replicas, size):
    assert differing(trained("auto"), trained(size, replicas=replicas)) == []


@on("jax")
def test_dropout_beside_batch_normalization_which_is_not_cut():
    normalised = partial(L.BatchNormalization, momentum=0.5)
    one = trained("auto", normalised)
    two = trained("auto", normalised, replicas=2)
    for name, value in one.items():
        np.testing.assert_allclose(two[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


@on("jax")
def test_update_steps_and_fit_draw_alike():
    found = []
    for train in (
        lambda trainer: trainer.fit(X, Y, batch_size=10, shuffle=False, verbose=0),
        lambda trainer: list(trainer.steps(ws.Batches((X, Y), 10, shuffle=False))),
        lambda trainer: [trainer.update((X[:10], Y[:10])), trainer.update((X[10:], Y[10:]))],
    ):
        made = model(L.Dropout(0.5, seed=1))
        train(ws.Trainer(made))
        found.append(values(made))
    for one, two, three in zip(*found, strict=True):
        np.testing.assert_array_equal(one, two)
        np.testing.assert_allclose(one, three, rtol=1e-5, atol=1e-6)


def zero_by(function, first):
    """Return a 0 that the host is asked for whenever the program needs what it is added to: of rows
    from this place.
    """

    def answer(first):
        function()
        return np.uint32(0)

    if JAX:
        import jax

        return jax.pure_callback(answer, jax.ShapeDtypeStruct((), "uint32"), first)
    import tensorflow as tf

    return tf.numpy_function(answer, [first], tf.uint32, stateful=False)


@on("jax")
def test_a_cut_batch_draws_no_more_words(monkeypatch):
    """An update in microbatches draws, in all of them together, as much as the whole batch does.

    The pass that weighs the rows beforehand requests draws, too, which are not used.
    """
    drawn = []
    honest = type(engines.choose().random).words

    def counting(engine, seed, stream, first, num_rows, num_words):
        zero = zero_by(lambda: drawn.append((num_rows, num_words)), first)
        return honest(engine, seed, stream, first, num_rows, num_words) + zero

    monkeypatch.setattr(type(engines.choose().random), "words", counting)
    for size in (16, 8, 2):
        drawn.clear()
        trained(size)
        # Two layers of 4 features, for each of as many rows as there are.
        assert [one for one in drawn if one[0] == size] == [(size, 4)] * 2 * (16 // size)


# ---- nothing of Keras stays changed ----


def keras_own():
    return {name: getattr(seam, name) for name in (*FUNCTIONS, "dropout") if hasattr(seam, name)}


class Failing(L.Dropout):
    def call(self, x, training=False):
        dropped = super().call(x, training=training)
        if training:
            assert seam.dropout.__wrapped__
            raise RuntimeError("in the middle of a trace")
        return dropped


def test_nothing_stays_patched_after_a_trace_or_an_error():
    before = keras_own()
    made = model(L.Dropout(0.5, seed=1))
    expected = ops.convert_to_numpy(made(X, training=True))
    ws.Trainer(made).fit(X, Y, verbose=0)
    assert keras_own() == before
    made = model(L.Dropout(0.5, seed=1))
    np.testing.assert_array_equal(made(X, training=True), expected)
    with pytest.raises(RuntimeError, match="middle of a trace"):
        ws.Trainer(model(Failing(0.5))).fit(X, Y, verbose=0)
    assert keras_own() == before


def nobody(rows=2, facts=None):
    return Draws(engines.choose(), 0, rows, facts)


def test_another_thread_draws_as_ever_while_one_traces():
    expected = ops.convert_to_numpy(R.normal((2, 3), seed=1))
    found = []
    facts = compare([DrawRequest("normal", (2, 3))], 2, [DrawRequest("normal", (4, 3))])
    with drawing(nobody(2, facts)):
        thread = threading.Thread(
            target=lambda: found.append(ops.convert_to_numpy(R.normal((2, 3), seed=1)))
        )
        thread.start()
        thread.join()
        own = ops.convert_to_numpy(R.normal((2, 3), seed=1))
    np.testing.assert_array_equal(found[0], expected)
    assert np.all(own != expected)


def test_replicas_are_traced_in_turns_and_the_last_takes_the_functions_out():
    before = keras_own()
    inside = threading.Event()
    leave = threading.Event()

    def first():
        with drawing(nobody()):
            inside.set()
            leave.wait()

    thread = threading.Thread(target=first)
    thread.start()
    inside.wait()
    with drawing(nobody()):
        leave.set()
        thread.join()
        assert keras_own() != before
    assert keras_own() == before


# ---- what cannot be given to rows is said ----


class Weighed(ws.Objective):
    def __call__(self, model, batch, training):
        return ws.Mean(ops.mean(model(batch["x"], training=training), axis=-1), batch["weight"])


def test_rows_that_weigh_unlike_draw_for_themselves():
    made = model(L.Dropout(0.5, seed=1))
    trainer = ws.Trainer(made, Weighed(), optimizer=keras.optimizers.SGD(0.1), microbatch_size=5)
    trainer.fit(
        {"x": X, "weight": np.resize([1.0, 0.0, 3.0], len(X)).astype("float32")},
        batch_size=10,
        verbose=0,
    )
    assert "give the update of the whole batch, up to rounding" in trainer.explain()


class Square(L.Layer):
    def __init__(self):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(1)

    def call(self, x, training=False):
        return x + R.uniform(2 * ops.shape(x)[:1], seed=self.seed_generator)[:, :1]

    def compute_output_shape(self, shape):
        return shape


class Behind(Square):
    """Draws what Keras does not know of."""

    def call(self, x, training=False):
        return x * np.random.default_rng(0).normal(size=(x.shape[0] or 1, 1)).astype("float32")


class HeadsFirst(Square):
    """An axis of heads times rows, heads outermost: it is no other by its shape."""

    def call(self, x, training=False):
        num = ops.shape(x)[0]
        return x * ops.reshape(R.uniform((2 * num, 1), seed=self.seed_generator), (2, num, 1))[1]


class RarelyHeadsFirst(HeadsFirst):
    """The same, for a mask that hardly ever drops anything."""

    def call(self, x, training=False):
        num = ops.shape(x)[0]
        kept = ops.reshape(R.uniform((2 * num, 1), seed=self.seed_generator), (2, num, 1))[1] > 1e-6
        return x * ops.cast(kept, x.dtype)


class MixedSometimes(Square):
    """One draw for all rows decides whether they are mixed; mostly they are not."""

    def call(self, x, training=False):
        is_mixed = R.uniform((), seed=self.seed_generator) < 1e-6
        return ops.where(is_mixed, (x + ops.flip(x, 0)) / 2, x)


class TakesParts(Square):
    """Rows take the first of as many numbers as there may ever be."""

    def call(self, x, training=False):
        return ops.where(R.uniform((64, 1), seed=self.seed_generator)[: x.shape[0]] < 1e-6, 0.0, x)


class Shuffled(Square):
    def call(self, x, training=False):
        return x + R.shuffle(x, seed=self.seed_generator)


class Odd(Square):
    """Draws more for batches of some sizes."""

    def call(self, x, training=False):
        for _ in range(2 if x.shape[0] == 10 else 1):
            x = x + R.uniform(ops.shape(x), seed=self.seed_generator)
        return x


SAID = {
    Square: r"differ between cuts: keras\.random\.uniform \(its shape is \(10, 10\) of 10 rows and "
    r"\(20, 20\)",
    Behind: "Random draws differ between cuts: something draws behind Keras' back",
    HeadsFirst: "Random draws differ between cuts: an axis that is a multiple of the rows",
    RarelyHeadsFirst: "Random draws differ between cuts: an axis that is a multiple of the rows",
    MixedSometimes: "The weights will not be those of whole batches: the rows of a batch see each "
    "other",
    TakesParts: "Random draws differ between cuts: rows take parts of a draw whose shape does not "
    "grow "
    "with them",
    Shuffled: "The weights will not be those of whole batches: the rows of a batch see each other",
    Odd: r"Random draws differ between cuts: keras\.random\.uniform \(of another number of rows "
    r"the objective draws",
}


@pytest.mark.filterwarnings("ignore:microbatch_size=5 .* not give the weights")
@pytest.mark.parametrize("layer", SAID)
def test_what_does_not_belong_to_rows_is_said(layer):
    trainer = ws.Trainer(model(layer()), microbatch_size=5)
    trainer.fit(X, Y, batch_size=10, verbose=0)
    said = trainer.explain()
    assert re.search(SAID[layer], said), said
    assert "give the update of the whole batch, up to rounding" not in said


def test_who_draws_otherwise_than_before_draws_as_ever_and_is_told(recwarn):
    """A layer may ask Python's own random numbers what to draw."""
    facts = compare([DrawRequest("uniform", (4, 3))] * 2, 4, [DrawRequest("uniform", (8, 3))] * 2)
    with drawing(nobody(4, facts)):
        expected = [ops.convert_to_numpy(R.uniform((4, 3), seed=1)) for _ in range(2)]
    assert not recwarn
    np.testing.assert_array_equal(*expected)
    with drawing(nobody(4, facts)):
        with pytest.warns(
            UserWarning,
            match=(
                r"An objective must make the same random draws .* keras\.random\.normal of "
                r"shape \(4, 3\)"
            ),
        ):
            assert R.normal((4, 3), seed=1).shape == (4, 3)
        # which may be another's fact
        assert np.all(ops.convert_to_numpy(R.uniform((4, 3), seed=1)) != expected[1])
    assert len(recwarn) == 0


class Places(ws.Objective):
    """The squared error of each place."""

    def __call__(self, model, batch, training):
        return ws.Mean(ops.square(model(batch["x"], training=training) - batch["y"])[..., 0])


def test_as_many_rows_as_places_draw_as_other_numbers_of_rows_do(recwarn):
    """Values with as many places as rows are read a second time, on one row less, for a loss that
    pairs all rows.
    """
    found = []
    for size in (TIME, 8):
        keras.utils.set_random_seed(3)
        made = keras.Sequential([keras.Input((TIME, DIM)), L.Dropout(0.5, seed=4), L.Dense(1)])
        trainer = ws.Trainer(
            made, Places(), optimizer=keras.optimizers.SGD(0.1), microbatch_size=size
        )
        trainer.fit({"x": numbers("Dropout"), "y": numbers("")[..., :1]}, batch_size=20, verbose=0)
        found.append(values(made))
    assert [str(w.message) for w in recwarn if "random draws" in str(w.message)] == []
    for one, two in zip(*found, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)


def compiled_by_itself(function):
    if JAX:
        import jax

        return jax.jit(function)
    import tensorflow as tf

    return tf.function(function)


def drawn_again(x, seed):
    """Dropout that draws its mask once more for the gradient, instead of keeping it."""
    if not JAX:
        return keras.remat(lambda x: R.dropout(x, 0.5, seed=seed))(x)
    import jax

    again = jax.custom_vjp(lambda x: R.dropout(x, 0.5, seed=seed))
    again.defvjp(
        lambda x: (again(x), ()), lambda _, upstream: (R.dropout(upstream, 0.5, seed=seed),)
    )
    return again(x)


@pytest.mark.parametrize("size", ["auto", 6])
def test_what_is_drawn_again_for_the_gradient_is_the_same(size):
    found = []
    for drop in (R.dropout, drawn_again):
        made = model(
            L.Lambda(
                lambda x, drop=drop: (
                    drop(x, seed=4) if drop is drawn_again else drop(x, 0.5, seed=4)
                )
            )
        )
        ws.Trainer(made, microbatch_size=size).fit(X, Y, batch_size=20, shuffle=False, verbose=0)
        found.append(values(made))
    for one, two in zip(*found, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)


class NoisyGradient(Square):
    def call(self, x, training=False):
        noisy = ops.custom_gradient(
            lambda x: (x * 1.0, lambda *up: up[-1] + R.normal(ops.shape(up[-1]), seed=4))
        )
        return noisy(x)


def test_what_is_drawn_for_the_gradient_alone_is_drawn_as_ever_and_said():
    made = model(NoisyGradient())
    with pytest.warns(
        UserWarning, match=r"keras\.random\.normal of shape .* was not drawn in the first trace"
    ):
        ws.Trainer(made).fit(X, Y, verbose=0)
    assert np.all(np.isfinite(values(made)[0]))


@pytest.mark.skipif(not JAX, reason="TensorFlow traces a loop's gradient where its value is")
def test_what_a_loop_draws_again_for_the_gradient_is_refused():
    layer = L.Lambda(lambda x: ops.scan(lambda c, row: (c, drawn_again(row, 4)), 0.0, x)[1])
    with pytest.raises(
        ws.SpecificationError,
        match=r"must draw in its forward pass only\. .* keras\.random\.dropout",
    ):
        ws.Trainer(model(layer)).fit(X, Y, verbose=0)


@pytest.mark.parametrize("is_called_before", [False, True])
@pytest.mark.filterwarnings("ignore:microbatch_size=5 .* not give the weights")
def test_a_function_compiled_by_itself_that_draws_trains_and_keeps_nothing_of_ours(
    is_called_before,
):
    """On JAX it is traced anew, and draws for rows; on TensorFlow it keeps its trace, draws as
    ever, which is said.
    """
    noisy = compiled_by_itself(lambda x: x + R.uniform(ops.shape(x), seed=4))

    class Noisy(L.Layer):
        def call(self, x, training=False):
            return noisy(noisy(x)) if training else x

    made = model(Noisy())
    before = ops.convert_to_numpy(noisy(ops.ones((20, 6)))) if is_called_before else None
    trainer = ws.Trainer(made, microbatch_size=5)
    trainer.fit(X, Y, batch_size=20, shuffle=False, epochs=2, verbose=0)
    cut = values(made)
    said = (
        "give the update of the whole batch"
        if JAX
        else "Random draws differ between cuts: something draws behind Keras' back"
    )
    assert said in trainer.explain()
    after = ops.convert_to_numpy(noisy(ops.ones((20, 6))))
    if is_called_before:
        np.testing.assert_array_equal(after, before)
    if JAX:
        made = model(Noisy())
        ws.Trainer(made).fit(X, Y, batch_size=20, shuffle=False, epochs=2, verbose=0)
        for one, two in zip(values(made), cut, strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)


# ---- how random it is ----

SEED = (7, 1)


def drawn(function, *shape, first=0, seed=SEED, **arguments):
    """Return what a function draws for rows along the first axis, as numpy."""
    engine = engines.choose()
    given = engine.devices.place((state_of(seed), np.int32(first)))

    def draw(state, first):
        return function(RandomBits(engine, state, first, shape[0], 0), shape, **arguments)

    return np.asarray(
        engine.devices.fetch(engine.programs.compile(draw, given, spends=False).call(*given))
    )


def state_of(seed):
    return np.array(seed, "uint32" if JAX else "int64")


def philox(counter, key):
    """Return the words of Philox-4x32-10, a plain version of its paper."""
    c = [int(word) for word in counter]
    k = [int(word) for word in key]
    for _ in range(10):
        a = 0xD2511F53 * c[0]
        b = 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def test_words_are_those_of_philox():
    # of the paper's own implementation (Random123)
    known = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox([0] * 4, [0] * 2) == known
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0]
    assert philox(*pi) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]
    for seed, stream, first, num_words in (
        ((0, 0), 0, 0, 4),
        ((7, 3), 5, 2, 10),
        (pi[1], 1, 2**31 - 3, 9),
    ):
        found = drawn(RandomBits.words, 3, num_words, first=first, seed=seed, stream=stream)
        blocks = -(-num_words // 4)
        for row in range(3):
            counts = [(first + row) * blocks + i for i in range(blocks)]
            words = [philox([n & 0xFFFFFFFF, n >> 32, stream, 0], seed) for n in counts]
            np.testing.assert_array_equal(found[row], np.ravel(np.transpose(words))[:num_words])


def chi_square(counts):
    """Return chi-square of counts that should be equal, in standard deviations from its mean."""
    expected = np.mean(counts)
    freedom = np.size(counts) - 1
    return (np.sum((counts - expected) ** 2) / expected - freedom) / np.sqrt(2 * freedom)


def pairs(one, two):
    """Return the counts of pairs of the upper four bits of neighbouring words, (16, 16)."""
    return np.histogram2d(np.ravel(one >> 28), np.ravel(two >> 28), bins=16)[0]


def test_words_are_independent_of_those_of_other_rows_places_streams_seeds_and_updates():
    """Chi-square of 255 degrees of freedom, at most 4 deviations off (one in 16 000); the seed is
    fixed.
    """
    words = drawn(RandomBits.words, 64, 4096)
    others = {
        "bytes": (words << 4, words),
        "place in the row": (words[:, :-1], words[:, 1:]),
        "row": (words[:-1], words[1:]),
        "stream": (words, drawn(RandomBits.words, 64, 4096, stream=1)),
        "layer": (words, drawn(RandomBits.words, 64, 4096, seed=(8, 1))),
        "update": (words, drawn(RandomBits.words, 64, 4096, seed=(7, 2))),
    }
    for name, (one, two) in others.items():
        assert abs(chi_square(pairs(one, two))) < 4, name
    assert len(np.unique(words)) > words.size * (1 - 1e-4)  # of so many, some 8 come twice


def test_words_of_later_rows_do_not_depend_on_those_before():
    words = drawn(RandomBits.words, 9, 7)
    np.testing.assert_array_equal(drawn(RandomBits.words, 3, 7, first=4), words[4:7])


# function, arguments, mean, variance
MOMENTS = {
    "uniform": (distributions.uniform, {"minval": -1.0, "maxval": 3.0}, 1.0, 16 / 12),
    "normal": (distributions.normal, {"mean": 2.0, "stddev": 3.0}, 2.0, 9.0),
    "truncated_normal": (distributions.truncated_normal, {}, 0.0, 0.7737),
    "randint": (distributions.randint, {"minval": -3, "maxval": 8}, 2.0, (11**2 - 1) / 12),
    "gamma": (distributions.gamma, {"alpha": 3.5}, 3.5, 3.5),
    "small gamma": (distributions.gamma, {"alpha": 0.3}, 0.3, 0.3),
    "beta": (distributions.beta, {"alpha": 2.0, "beta": 3.0}, 0.4, 0.04),
    "small beta": (distributions.beta, {"alpha": 0.2, "beta": 0.2}, 0.5, 0.25 / 1.4),
    "few of binomial": (distributions.binomial, {"counts": 20.0, "probabilities": 0.1}, 2.0, 1.8),
    "many of binomial": (
        distributions.binomial,
        {"counts": 100.0, "probabilities": 0.7},
        70.0,
        21.0,
    ),
    "none of binomial": (distributions.binomial, {"counts": 10.0, "probabilities": 0.0}, 0.0, 0.0),
}


@pytest.mark.parametrize("name", share(MOMENTS))
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_mean_and_variance(name, dtype):
    """40 000 numbers: the mean is at most 4.5 deviations off, the variance 5 %."""
    function, arguments, mean, variance = MOMENTS[name]
    dtype = "int32" if name == "randint" else dtype
    found = drawn(function, 40, 1000, dtype=dtype, **arguments)
    assert str(found.dtype) == dtype
    found = found.astype("float64")
    assert abs(np.mean(found) - mean) <= 4.5 * np.sqrt(variance / found.size) + 1e-3 * abs(mean) * (
        dtype == "float16"
    )
    assert np.var(found) == pytest.approx(variance, rel=0.05)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_rate_of_dropout(rate):
    """Kept numbers are at most 4.5 deviations from their mean, over all and in every column, and
    scaled up.
    """
    found = drawn(
        lambda words, shape: distributions.dropout(words, ops.ones(shape), rate, shape), 400, 1000
    )
    np.testing.assert_allclose(np.unique(found), [0, 1 / (1 - rate)], rtol=1e-6)
    deviation = np.sqrt(rate * (1 - rate))
    assert abs(np.mean(found > 0) - (1 - rate)) < 4.5 * deviation / np.sqrt(found.size)
    for axis, num in ((0, 400), (1, 1000)):
        assert np.max(
            np.abs(np.mean(found > 0, axis=axis) - (1 - rate))
        ) < 4.5 * deviation / np.sqrt(num)


def test_every_class_is_drawn_as_often_as_its_logits_say():
    logits = np.log(np.array([[0.1, 0.2, 0.7]], "float32").repeat(40, 0))
    found = drawn(
        lambda words, shape: distributions.categorical(words, ops.convert_to_tensor(logits), 1000),
        40,
        1000,
    )
    np.testing.assert_allclose(
        np.bincount(found.ravel()) / found.size, [0.1, 0.2, 0.7], atol=4.5 * 0.5 / 200
    )


def test_the_gradient_of_a_gamma_number_by_its_parameter():
    """The mean of a gamma number is its parameter: the mean of its derivative is 1, 4.5 deviations
    aside.
    """
    engine = engines.choose()

    def slopes(state):
        alpha = ops.full((40, 500), 2.0)
        words = RandomBits(engine, state, 0, 40, 0)
        return engine.ops.differentiate(
            lambda p: (ops.sum(distributions.gamma(words, (40, 500), p[0])), ()), [alpha]
        )[0][0]

    state = engine.devices.place((state_of(SEED),))
    found = engine.devices.fetch(engine.programs.compile(slopes, state, spends=False).call(*state))
    assert np.mean(found) == pytest.approx(1, abs=4.5 * np.std(found) / np.sqrt(found.size))


@pytest.mark.parametrize("name", ["gamma", "beta", "binomial"])
@pytest.mark.slow
def test_a_parameter_that_means_nothing_gives_nan_and_takes_no_longer(name, monkeypatch):
    monkeypatch.setattr(distributions, "_MOST_TRIALS", 200)  # in place of which it would try
    words = RandomBits(engines.choose(), ops.convert_to_tensor([3, 4], "uint32"), 0, 3, 0)
    parameters = {"gamma": [[2.0, np.nan, -1.0]], "beta": [[2.0, np.nan, -1.0], [3.0, 1.0, 1.0]]}
    parameters["binomial"] = [[100.0, 100.0, -1.0], [0.4, np.nan, 0.4]]
    given = [ops.convert_to_tensor(p, "float32")[:, None] for p in parameters[name]]
    drawn = ops.convert_to_numpy(
        getattr(distributions, name)(words, (3, 50), *given, dtype="float32")
    )
    assert np.isfinite(drawn[0]).all()
    assert np.isnan(drawn[1:]).all()


@pytest.mark.skipif(JAX, reason="JAX has no 64-bit numbers unless asked")
def test_whole_numbers_of_more_than_a_word_are_the_engines_own():
    asked = Draws(engines.choose(), 0, 4, None)
    with drawing(asked):
        keras.random.randint((4, 3), 0, 2**40, dtype="int64", seed=1)
        keras.random.randint((4, 3), 0, 2**31, dtype="int64", seed=1)
    assert [bool(a.why) for a in asked.requests] == [True, False]
    with drawing(Draws(engines.choose(), 0, 4, compare(asked.requests, 4, None))):
        assert int(ops.max(keras.random.randint((4, 3), 0, 2**40, dtype="int64", seed=1))) > 2**32


def test_seeds_and_logits_that_keras_takes_are_taken():
    keys = [7]
    if JAX:
        import jax

        keys.append(jax.random.key(3))
    for seed in keys:
        asked = Draws(engines.choose(), 0, 4, None)
        for facts in (
            None,
            (
                compare(
                    [DrawRequest("uniform", (4, 3), why="" if isinstance(seed, int) else "a key")],
                    4,
                    None,
                )
            ),
        ):
            with drawing(asked if facts is None else Draws(engines.choose(), 0, 4, facts)):
                assert keras.random.uniform((4, 3), seed=seed).shape == (4, 3)
    if not JAX:
        with drawing(Draws(engines.choose(), 0, 1, None)):
            assert keras.random.categorical([[0.0, 0.0]], 5, seed=3).shape == (1, 5)
