"""Text and ragged rows: on TensorFlow they reach the model as they are, on JAX they are refused
with the way out.
"""

import itertools

import keras
import numpy as np
import pytest
from exact import spread_over
from keras import layers, ops
from shares import ENGINE, later

import wholestep as ws
from wholestep import tree

WORDS = np.array(["a b", "b c", "c a d", "a a", "d", "b", "a d", "c", "a"])
Y = np.arange(len(WORDS), dtype="float32")[:, None] / len(WORDS)
LENGTHS = [1, 3, 2, 1, 4, 2, 2, 3, 1]

on_tensorflow = pytest.mark.skipif(
    ENGINE != "tensorflow", reason="Keras computes with text on TensorFlow alone."
)


def rows():
    return tree.ragged(np.arange(sum(LENGTHS)) % 7, np.cumsum([0, *LENGTHS]))


def of_text(**compiled):
    """Return a model of two inputs: text, and the numbers of words in it."""
    keras.utils.set_random_seed(3)
    vocabulary = layers.TextVectorization(vocabulary=["a", "b", "c", "d"], output_sequence_length=3)
    text = keras.Input((), dtype="string", name="text")
    number = keras.Input((1,), name="number")
    found = layers.GlobalAveragePooling1D()(layers.Embedding(6, 4)(vocabulary(text)))
    model = keras.Model(
        {"text": text, "number": number}, layers.Dense(1)(layers.Concatenate()([found, number]))
    )
    model.compile("sgd", "mse", metrics=["mae"], **compiled)
    return model


def of_rows():
    """Return a model of ragged rows, without variables as yet."""
    import tensorflow as tf

    class Mean(layers.Layer):
        def __init__(self):
            super().__init__()
            self.table = layers.Embedding(7, 4)

        def call(self, ragged):
            return tf.reduce_mean(tf.ragged.map_flat_values(self.table, ragged), axis=1)

    keras.utils.set_random_seed(3)
    model = keras.Sequential([Mean(), layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    return model


def inputs(kind):
    import tensorflow as tf

    if kind == "ragged":
        return tf.RaggedTensor.from_row_lengths(np.arange(sum(LENGTHS)) % 7, LENGTHS)
    return {
        "text": tf.constant(WORDS),
        "number": np.array([len(w.split()) for w in WORDS], "float32")[:, None],
    }


def told(model, data, **how):
    """Return what a training, an evaluation and a prediction tell, by Keras or a trainer."""
    (x, y), size = data, how.pop("batch_size", 4)
    given = (x, y) if y is not None else (x,)
    history = model.fit(
        *given, batch_size=None if y is None else size, shuffle=False, verbose=0, epochs=2, **how
    )
    x, y = how["validation_data"]
    numbers = [
        *itertools.chain(*history.history.values()),
        *model.evaluate(x, y, batch_size=size, verbose=0),
    ]
    return [*numbers, *np.ravel(model.predict(x, batch_size=size, verbose=0))]


@on_tensorflow
@pytest.mark.parametrize(
    ("make", "kind", "stream"),
    [
        (of_text, "text", False),
        (of_rows, "ragged", True),
        *later([(of_text, "text", True), (of_rows, "ragged", False)]),
    ],
)
def test_text_and_ragged_rows_train_as_in_keras(make, kind, stream):
    import tensorflow as tf

    x = inputs(kind)
    data = (tf.data.Dataset.from_tensor_slices((x, Y)).batch(4), None) if stream else (x, Y)
    held = {"validation_data": (x, Y)}
    ours = told(ws.Trainer(make(), microbatch_size=3), data, **held)
    np.testing.assert_allclose(ours, told(make(), data, **held), rtol=2e-5, atol=1e-6)


@on_tensorflow
@pytest.mark.parametrize(
    ("make", "kind", "stream"),
    [
        (of_rows, "ragged", False),
        *later([(of_rows, "ragged", True), (of_text, "text", False), (of_text, "text", True)]),
    ],
)
@pytest.mark.slow
def test_replicas_share_text_and_ragged_rows(make, kind, stream):
    import tensorflow as tf

    def logs(replicas):
        with spread_over(replicas):
            model = make()
        trainer = ws.Trainer(model, microbatch_size=3)
        data = (inputs(kind), Y)
        stream_of = (
            tf.data.Dataset.from_tensor_slices(data).batch(4) if stream else ws.Batches(data, 4)
        )
        # the last batch of an epoch is one row
        told = [step.logs for step in trainer.steps(stream_of, epochs=2)]
        return [number for each in told for number in each.values()]

    np.testing.assert_allclose(logs(2), logs(None), rtol=2e-5, atol=1e-6)


@on_tensorflow
@pytest.mark.parametrize(
    "text", [list(WORDS), *later([WORDS, WORDS.astype(object), np.char.encode(WORDS)])]
)
@pytest.mark.slow
def test_text_of_every_kind_is_the_same_text(text):
    x = inputs("text")
    trainer = ws.Trainer(of_text())
    other = of_text()
    trainer.fit({**x, "text": text}, Y, batch_size=9, epochs=2, verbose=0)
    for _ in range(2):
        other.train_on_batch(x, Y)
    assert trainer.evaluate(x, Y, verbose=0) == pytest.approx(
        other.evaluate(x, Y, verbose=0), rel=1e-5
    )


@on_tensorflow
@pytest.mark.parametrize(("make", "kind"), [(of_rows, "ragged"), *later([(of_text, "text")])])
@pytest.mark.slow
def test_steps_and_single_batches_take_them(make, kind):
    x = inputs(kind)
    one = ws.Trainer(make())
    two = ws.Trainer(make())
    keras_own = make()
    losses = [step.loss for step in one.steps(ws.Batches((x, Y), 9, shuffle=False), epochs=2)]
    assert losses == pytest.approx([two.update((x, Y))["loss"] for _ in range(2)], rel=1e-6)
    assert losses == pytest.approx([keras_own.train_on_batch(x, Y)[0] for _ in range(2)], rel=1e-5)


@on_tensorflow
def test_xla_is_left_out_with_a_word():
    import tensorflow as tf

    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [layers.Lambda(lambda text: tf.cast(tf.strings.length(text), "float32")), layers.Dense(1)]
    )
    model.compile("sgd", "mse")
    trainer = ws.Trainer(model, jit_compile=True)
    with pytest.warns(UserWarning, match="jit_compile=True has no effect: it takes text"):
        trainer.fit(WORDS[:, None], Y, batch_size=4, verbose=0)


@on_tensorflow
def test_labels_that_are_text_are_refused():
    with pytest.raises(ws.BatchError, match="Labels must be numbers"):
        ws.Trainer(of_text()).fit(inputs("text"), WORDS, verbose=0)


@on_tensorflow
@pytest.mark.parametrize("kind", [str, object])
@pytest.mark.parametrize("verb", ["fit", "update", "predict"])
def test_text_for_a_model_of_numbers_is_refused(verb, kind):
    model = keras.Sequential([keras.Input((1,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    trainer = ws.Trainer(model)
    x = WORDS[:, None].astype(kind)
    given = {"fit": lambda: trainer.fit(x, Y, verbose=0), "update": lambda: trainer.update((x, Y))}
    given["predict"] = lambda: trainer.predict(x, verbose=0)
    with pytest.raises(
        ws.BatchError, match=r"numbers of type float32. Received: text in x. Try: encode strings"
    ):
        given[verb]()


@pytest.mark.skipif(ENGINE != "jax", reason="TensorFlow computes with text.")
@pytest.mark.parametrize("data", [WORDS, list(WORDS), rows()])
def test_what_jax_cannot_hold_is_refused_with_the_way_out(data):
    model = keras.Sequential([keras.Input((1,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ws.BatchError, match=r"must hold numbers.*(dataset\.map\(layer\)|tokens=)"):
        ws.Trainer(model).fit(data, Y, verbose=0)


@pytest.mark.parametrize("data", [(WORDS[:4], Y[:4]), iter([(list(WORDS[:4]), Y[:4])])])
def test_text_may_be_made_numbers_by_a_transform(data):
    batches = ws.Batches(
        data, transform=lambda batch: (ops.convert_to_tensor([len(t) for t in batch[0]]), batch[1])
    )
    assert sorted(next(batches)[0].tolist()) == [3, 3, 3, 5]


@on_tensorflow
def test_text_in_lists_is_text_to_its_last_byte():
    import tensorflow as tf

    class Length(layers.Layer):
        def call(self, text):
            return ops.cast(tf.strings.length(text), "float32")[:, None]

    model = keras.Sequential([keras.Input((), dtype="string"), Length()])
    model.compile(loss="mse")
    trainer = ws.Trainer(model)
    texts = [b"ab\0\0", b"abcd"]
    assert trainer.predict(texts, verbose=0).tolist() == [[4.0], [4.0]]
    rows = [(text, np.zeros(1, "float32")) for text in texts]
    assert trainer.evaluate(ws.Batches(rows, 2), verbose=0) == 16.0


@on_tensorflow
def test_ragged_rows_are_not_blamed_for_an_error_of_the_model():
    class Broken(layers.Layer):
        def call(self, ragged):
            raise ValueError("broken on purpose")

        def compute_output_spec(self, ragged):
            return keras.KerasTensor((None, 1))

    rows = keras.Input((None,), dtype="int64")
    model = keras.Model(rows, Broken()(rows))
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="broken on purpose"):
        ws.Trainer(model).fit(inputs("ragged"), Y, batch_size=4, verbose=0)


@on_tensorflow
@pytest.mark.slow
def test_an_objective_builds_all_parts_of_a_model_of_ragged_rows():
    class Two(keras.Model):
        def __init__(self):
            super().__init__()
            self.one, self.other = of_rows(), of_rows()

        def build(self, shape):
            pass

        def call(self, ragged, training=False):
            return (self.one if training else self.other)(ragged)

    class Squares(ws.Objective):
        def __call__(self, model, batch, training):
            return ws.Mean((model(batch[0], training=training) - batch[1]) ** 2)

    model = Two()
    trainer = ws.Trainer(model, Squares(), optimizer="sgd")
    trainer.fit(inputs("ragged"), Y, batch_size=4, verbose=0)
    assert np.isfinite(trainer.evaluate(inputs("ragged"), Y, batch_size=4, verbose=0))
    assert all(part.built for part in (model.one, model.other))
