"""Every bad input is answered in our words, before it has moved a weight: what must hold, what
came, what to try.
"""

import re

import keras
import numpy as np
import pytest
from small import ROWS, X, Y, model, values

import wholestep as ws

L = keras.layers
WORDS = np.array(["cat", "dog"] * (ROWS // 2))


class Rows:
    """Rows by number; says that it has `told` of them."""

    def __init__(self, told, real=ROWS):
        self.told = told
        self.real = real

    def __len__(self):
        return self.told

    def __getitem__(self, number):
        if number >= self.real:
            raise IndexError("list index out of range")
        return X[number], Y[number]


class Files(keras.utils.PyDataset):
    """Batches by number, of which one is missing."""

    def __len__(self):
        return 2

    def __getitem__(self, number):
        return [][number]


class Uneven(Files):
    """Batches with more rows than labels."""

    def __getitem__(self, number):
        return X, Y[:-1]


class Endless(Files):
    @property
    def num_batches(self):
        return -1


class Reader:
    """Batches one after the other; says that there are `told`."""

    def __init__(self, told, real=2):
        self.told = told
        self.real = real

    def __len__(self):
        return self.told

    def __iter__(self):
        return iter([(X, Y)] * self.real)


def two_inputs():
    inputs = {"a": keras.Input((6,), name="a"), "b": keras.Input((6,), name="b")}
    made = keras.Model(inputs, L.Dense(4)(inputs["a"] + inputs["b"]))
    made.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return made


def two_outputs():
    x = keras.Input((6,))
    made = keras.Model(x, [L.Dense(1)(x), L.Dense(1)(x)])
    made.compile("sgd", ["mse", "mse"])
    return made


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = L.Dense(4)
        self.dense.build((None, 6))

    def call(self, x):
        return self.dense(x)


def subclassed():
    made = Subclassed()
    made.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return made


def fit(x, y=None, **how):
    return lambda trainer: trainer.fit(x, y, **{"verbose": 0} | how)


def stream():
    yield X, Y


def made_with(**arguments):
    return lambda trainer: ws.Trainer(trainer.model, **arguments)


MODELS = {
    "one": model,
    "two inputs": two_inputs,
    "two outputs": two_outputs,
    "subclassed": subclassed,
}
MISSING = r"IndexError \(list index out of range\) from"
BAD = {
    # the trainer's own arguments
    "epochs in words": (
        fit(X, Y, epochs="3"),
        "epochs must be a whole number of at least 0. Received: '3'",
    ),
    "half an epoch": (fit(X, Y, epochs=1.5), "epochs must be a whole number"),
    "epochs below 0": (fit(X, Y, epochs=-1), "epochs must be a whole number"),
    "first epoch in words": (fit(X, Y, initial_epoch="1"), "initial_epoch must be a whole number"),
    "epochs of a loop": (
        lambda t: list(t.steps((X, Y), epochs="3")),
        "epochs must be a whole number",
    ),
    "memory in words": (
        made_with(memory_limit="1GB"),
        "number of bytes above 0. Received: '1GB'. Try: 2",
    ),
    "memory that is true": (made_with(memory_limit=True), "number of bytes above 0"),
    "split in words": (
        fit(X, Y, validation_split="0.2"),
        "validation_split must lie between 0 and 1.*'0.2'",
    ),
    "validation never": (
        fit(X, Y, validation_freq=0),
        "validation_freq must be a whole number of at least 1",
    ),
    "validated batch": (
        fit(X, Y, validation_data=(X, Y), validation_batch_size="2"),
        "validation_batch_size must be",
    ),
    # class weights
    "class by name": (
        fit(X, Y, class_weight={"a": 1.0}),
        r"map class numbers to .*\{'a': 1.0\}.*the classes' numbers",
    ),
    "half a class": (fit(X, Y, class_weight={1.5: 1.0}), "class_weight must map class numbers"),
    "no class": (
        fit(X, Y, class_weight={}),
        r"class_weight must map class numbers .* Received: \{\}",
    ),
    "classes in a list": (fit(X, Y, class_weight=[1.0, 2.0]), r"dict\(enumerate\(weights\)\)"),
    "class weight in words": (fit(X, Y, class_weight={0: "a"}), "to finite weights"),
    "class weight is not finite": (fit(X, Y, class_weight={0: np.nan}), "to finite weights"),
    # sample weights
    "weights of wrong rank": (
        fit(X, Y, sample_weight=np.ones((ROWS, 3))),
        r"one number for each row.*shape \(rows, 3\) beside labels of shape \(rows\).*pass weights "
        r"of shape \(rows,\)",
    ),
    "weights of wrong rank for one row": (
        lambda trainer: trainer.update((X[:1], Y[:1], np.ones((1, 3)))),
        r"one number for each row.* weights of shape \(1, 3\) beside losses of shape \(1,\)",
    ),
    "weights without rank": (fit(X, Y, sample_weight=np.float32(1)), "leading row axis"),
    "no weights": (
        fit(X, Y, sample_weight=[]),
        "sample_weight must hold arrays. Received: an empty list. Try: leave",
    ),
    "no labels": (fit(X, []), "y must hold arrays. Received: an empty list"),
    "no inputs": (fit({}, Y), "x must hold arrays. Received: an empty dict"),
    "inputs in lists": (
        fit(X.tolist(), Y),
        r"x must hold arrays.*a list of lists of numbers.*np.asarray\(x\)",
    ),
    "labels in lists": (
        fit(X, Y[:, None].tolist()),
        r"y must hold arrays.*lists of numbers.*np.asarray\(y\)",
    ),
    "weights in lists": (fit(X, Y, sample_weight=[[1.0]] * ROWS), r"np.asarray\(sample_weight\)"),
    "an input in lists": (
        fit({"a": X, "b": X.tolist()}, Y),
        "two inputs",
        r"x\['b'\] must hold arrays",
    ),
    "all in lists": (
        fit((X.tolist(), Y.tolist())),
        r"data\[0\] must hold arrays.*np.asarray\(data\[0\]\)",
    ),
    "validation in lists": (
        fit(X, Y, validation_data=(X, Y.tolist())),
        r"data\[1\] must hold arrays",
    ),
    "a batch in lists": (
        lambda t: t.update((X.tolist(), Y)),
        r"leading row axis.*np.asarray\(a_list\)",
    ),
    "inputs of None": (fit([None], Y), "x must hold arrays. Received: a list of None"),
    # what the model takes
    "input left out": (
        fit({"a": X, "b": None}, Y),
        "two inputs",
        r"x\['a'\] of shape .*'b' is not optional",
    ),
    "output left out": (
        fit(X, [Y, None]),
        "two outputs",
        r"Every output with a loss needs labels.*None for y\[1\]",
    ),
    "no input named": (
        fit({"q": X}, Y),
        r"takes .* of shape \(rows, 6\).*x\['q'\] of shape .*pass the array itself",
    ),
    "wrong inputs named": (
        fit({"q": X, "b": X}, Y),
        "two inputs",
        "takes a of shape .*: a missing",
    ),
    "wrong inputs predicted": (
        lambda trainer: trainer.predict({"q": X, "r": X}, verbose=0),
        "two inputs",
        "takes a of shape .*: a, b missing",
    ),
    "too few inputs": (fit([X], Y), "two inputs", "as many arrays as the model has inputs"),
    "rows": (
        fit(X, Y[:-1]),
        rf"All arrays .* Received: x \(data\[0\]\): {len(X)} rows, y \(data\[1\]\): {len(Y) - 1}",
    ),
    "rows of weights": (
        fit(X, Y, sample_weight=np.ones(len(X) - 1)),
        r"sample_weight \(data\[2\]\): ",
    ),
    "rows of a named input": (
        fit({"a": X, "b": X[1:]}, Y),
        "two inputs",
        r"x \(data\[0\]\['b'\]\): ",
    ),
    "features": (fit(X[:, :5], Y), r"takes .*\(rows, 6\). Received: x of shape \(rows, 5\)"),
    "features evaluated": (
        lambda trainer: trainer.evaluate(X[:, :5], Y, verbose=0),
        r"x of shape \(rows, 5\)",
    ),
    "features predicted": (
        lambda trainer: trainer.predict(X[:, :5], verbose=0),
        r"x of shape \(rows, 5\)",
    ),
    "features of a subclass": (
        fit(X[:, :5], Y),
        "subclassed",
        r"x of shape \(rows, 5\) .*have value 6.*built for",
    ),
    # batches
    "no labels in a stream": (fit(iter([(X,)])), "needs labels"),
    "length below 0": (
        fit(Rows(-1)),
        r"length of Rows must be .* at least 0. Received: __len__\(\) should return",
    ),
    "length of a reader": (fit(Reader(-1)), "length of Reader must be .* at least 0"),
    "length of files": (fit(Endless()), "length of Endless must be .* Received: -1"),
    "length too long": (
        fit(Rows(8, 7), shuffle=False),
        rf"{MISSING} row 7 in step 0 of epoch 0, .* is 8. Try: mend",
    ),
    "place of the row": (
        lambda trainer: ws.Batches(Rows(8, 7), 3, shuffle=False).load(1, 2),
        rf"must have every row, or batch, below its length. Received: {MISSING} row 7 in step 2 of "
        r"epoch 1",
    ),
    "file that is missing": (
        fit(Files()),
        rf"{MISSING} batch [01] in step 0 of epoch 0, where the length is 2",
    ),
    "uneven data set": (
        fit(Uneven()),
        r"same number of rows.*x \(batch\[0\]\): 20 rows, y \(batch\[1\]\): 19 rows",
    ),
    "generator not called": (
        fit(stream),
        r"Received: stream, not called. Try: call it, as in fit\(stream\(\)\)",
    ),
    "data set not made": (fit(Files), r"Received: Files, not called. .*fit\(Files\(\)\)"),
    "a dict of labels": (
        lambda t: t.update({"x": X, "y": Y}),
        r"needs labels. Received: a dict of x, y, which are all inputs, without y. Try: the tuple "
        r"\(x, y\)",
    ),
    # numbers
    "complex": (
        fit(X.astype("complex64"), Y),
        "must hold real numbers. Received: dtype complex64.*imaginary part",
    ),
    "strings": (fit(X.astype(str), Y), "encode strings as integers first"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_answered_in_our_words(case):
    run, *kind, message = BAD[case]
    made = MODELS[kind[0] if kind else "one"]()
    made.optimizer.build(made.trainable_variables)
    before = values(made)
    with pytest.raises(ws.WholestepError, match=message) as caught:
        run(ws.Trainer(made))
    assert isinstance(caught.value, ws.SpecificationError | ws.BatchError)
    assert " Received: " in str(caught.value)
    assert " Try: " in str(caught.value)
    for a, b in zip(before, values(made), strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ((X[:5],), "needs labels"),
        ((X[:5, :4], Y[:5]), r"Received: x of shape \(rows, 4\)"),
        (
            (X[:5], Y[:4]),
            r"same number of rows.*x \(batch\[0\]\): 5 rows, y \(batch\[1\]\): 4 rows",
        ),
    ],
)
@pytest.mark.parametrize("how", ["fit", "evaluate"])
def test_a_bad_batch_in_the_middle_of_a_stream_is_named(how, bad, message):
    made = model(optimizer=keras.optimizers.SGD(0.1))
    good = (X[:5], Y[:5])
    with pytest.raises(ws.BatchError, match=message) as caught:
        getattr(ws.Trainer(made), how)(iter([good, good, bad, good]), verbose=0)
    assert "batch 2 of epoch 0" in caught.value.__notes__[-1]
    assert int(made.optimizer.iterations) == (2 if how == "fit" else 0)


@pytest.mark.parametrize("kind", [str, object])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((X, WORDS), r"(y|Labels)\b.* numbers.*Try: number the classes: np.unique.*StringLookup"),
        ((X, Y, WORDS), r"(sample_weight|Sample weights)\b.* numbers"),
    ],
)
def test_labels_and_weights_that_are_text_are_named(given, message, kind):
    with pytest.raises(ws.BatchError, match=message):
        ws.Trainer(model()).update((*given[:-1], given[-1].astype(kind)))


@pytest.mark.parametrize("told", [1, 3])
def test_a_reader_that_counts_wrongly_is_said_so_and_used_up(told):
    made = model(optimizer=keras.optimizers.SGD(0.1))
    with pytest.warns(UserWarning, match=rf"2 batches of Reader, whose length says {told}"):
        ws.Trainer(made).fit(Reader(told), verbose=0)
    assert int(made.optimizer.iterations) == 2


def test_what_an_objective_raises_itself_stays_its_own():
    class Broken(ws.Objective):
        def __call__(self, model, batch, training):
            raise ValueError("of my own")

    with pytest.raises(ValueError, match="of my own") as caught:
        ws.Trainer(model(), Broken(), optimizer="sgd").update(X)
    assert caught.value.args == ("of my own",)


def test_features_under_an_objective_are_named():
    class First(ws.Objective):
        def __call__(self, model, batch, training):
            return ws.Mean(model(batch, training=training)[:, 0])

    with pytest.raises(ws.BatchError, match=r"able to take the batch.*shape to have value 6"):
        ws.Trainer(model(), First(), optimizer="sgd").update(X[:, :5])


@pytest.mark.skipif(
    keras.backend.backend() != "jax", reason="TensorFlow looks numbers up in a graph"
)
@pytest.mark.parametrize("how", ["fit", "predict"])
def test_a_layer_that_cannot_be_compiled_is_named(how):
    lookup = L.IntegerLookup(vocabulary=[3, 5], name="lookup")
    made = keras.Sequential(
        [keras.Input((1,), dtype="int32"), lookup, L.Embedding(3, 2), L.Flatten(), L.Dense(1)]
    )
    made.compile("sgd", "mse")
    data = (np.ones((4, 1), "int32"), np.ones((4, 1)))[: 1 if how == "predict" else 2]
    with pytest.raises(
        ws.SpecificationError, match=r"every layer must .* lookup \(Tracer.*call these layers"
    ):
        getattr(ws.Trainer(made), how)(*data, verbose=0)


@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="only TensorFlow's strategies share data out"
)
def test_a_data_set_that_a_strategy_has_shared_out():
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    shared = strategy.experimental_distribute_dataset(
        tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    )
    for data in (shared, iter(shared)):
        with pytest.raises(
            ws.BatchError, match=r"Distributed.*give the tf.data.Dataset itself; the trainer shares"
        ):
            ws.Trainer(model()).fit(data, verbose=0)


def test_a_whole_number_of_numpy_is_a_count():
    trainer = ws.Trainer(model(), microbatch_size=np.int64(5))
    history = trainer.fit(X, Y, batch_size=np.int32(ROWS), epochs=np.uint8(1), verbose=0)
    assert history.epoch == [0]


@pytest.mark.parametrize("number", [True, np.True_, np.float64(2.0), 2.5, 0, X])
@pytest.mark.parametrize("name", ["microbatch_size", "replicas"])
def test_what_is_no_whole_number_is_no_count(name, number):
    with pytest.raises(
        ws.SpecificationError, match=f"{name} must be .* a whole number of at least 1"
    ):
        ws.Trainer(model(), **{name: number})


@pytest.mark.parametrize("number", [True, np.float64(2.0)])
def test_what_is_no_whole_number_is_no_batch_size_and_no_number_of_epochs(number):
    with pytest.raises(ws.SpecificationError, match="batch_size must be a whole number"):
        ws.Batches((X, Y), batch_size=number)
    with pytest.raises(ws.SpecificationError, match="epochs must be a whole number"):
        ws.Trainer(model()).fit(X, Y, epochs=number)


CALLS = {
    "steps": (lambda: ws.Trainer(model()).steps(X, Y), r"Batches\(\(x, y\)"),
    "Batches": (lambda: ws.Batches(X, Y), r"Batches\(\(x, y\), batch_size=32\)"),
    "update": (
        lambda: ws.Trainer(model()).update(X, Y),
        r"one batch, a tuple .* Received: update\(ndarray, ndarray\). Try: update\(\(x, "
        r"y\)\)",
    ),
    "update by name": (
        lambda: ws.Trainer(model()).update(x=X, y=Y),
        r"Received: update\(x=..., y=...\)",
    ),
    "fit": (lambda: ws.Trainer(model()).fit([(X[:4], Y[:4])] * 9, verbose=0), "Batches"),
}


@pytest.mark.parametrize("name", CALLS)
def test_labels_in_a_place_of_their_own_are_answered_by_the_right_call_without_their_numbers(name):
    call, right = CALLS[name]
    with pytest.raises((ws.WholestepError, TypeError)) as caught:
        call()
    said = str(caught.value)
    assert re.search(right, said), said
    assert "[[" not in said
    assert "array(" not in said
    assert len(said) < 600
