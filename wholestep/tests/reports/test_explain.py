"""Every sentence of `explain()` is true of the program that ran, for the kinds of models that users
bring.
"""

import re
from dataclasses import replace

import keras
import numpy as np
import pytest
from keras import ops
from shares import share

import wholestep as ws
from wholestep.plan import Planner

L = keras.layers
ROWS = 10
BATCH = 4
SHORT = 2
X = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
ON_TENSORFLOW = keras.backend.backend() == "tensorflow"


class Negatives(ws.Objective):
    """Rows meet in the loss: each against all others of the batch."""

    def __call__(self, model, batch, training):
        rows = model(batch, training=training)
        return ws.Mean(ops.mean(ops.square(rows @ ops.transpose(rows)), axis=1))


class Own(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(ops.square(y_pred))


class Penalised(L.Layer):
    def call(self, x):
        self.add_loss(0.1 * ops.mean(ops.square(x)))
        return x


def model(*layers, kind=keras.Sequential, optimizer="sgd", inputs=(4,)):
    made = kind([keras.Input(inputs), *layers, L.Dense(2)])
    made.compile(optimizer, "mse")
    return ws.Trainer(made)


def contrasted():
    return ws.Trainer(
        keras.Sequential([keras.Input((4,)), L.Dense(2)]), Negatives(), optimizer="sgd"
    )


def looked_up():
    return model(
        L.Embedding(50, 2, name="words"), L.Flatten(), optimizer=keras.optimizers.Adagrad(0.1)
    )


KINDS = {  # what is trained, and whether short batches may be filled up
    "rows alone": (lambda: model(L.Dense(3)), True),
    "in microbatches": (lambda: ws.Trainer(model(L.Dense(3)).model, microbatch_size=2), True),
    "batch normalization": (lambda: model(L.BatchNormalization()), False),
    "dropout": (lambda: model(L.Dropout(0.5)), True),
    "recurrent": (lambda: model(L.Reshape((2, 2)), L.GRU(2)), True),
    "convolution": (lambda: model(L.Reshape((2, 2, 1)), L.Conv2D(2, 2), L.Flatten()), True),
    "negatives": (contrasted, False),
    "compute_loss": (lambda: model(kind=Own), False),
    "add_loss": (lambda: model(Penalised()), False),
    "table": (looked_up, True),
    "spectral": (lambda: model(L.SpectralNormalization(L.Dense(3))), False),
}


@pytest.fixture
def calls(monkeypatch):
    """What every program was given: (program, rows that it has places for, real rows of each
    update).
    """
    seen = []
    program = Planner.program
    known = Planner.known

    def noting(found):
        def call(state, captured, data, rows, counts, which):
            first, num, _ = np.asarray(which)
            seen.append((found, tuple(rows.shape), np.asarray(counts)[first : first + num]))
            return found.call(state, captured, data, rows, counts, which)

        return None if found is None else replace(found, call=call)

    monkeypatch.setattr(Planner, "program", lambda *given: noting(program(*given)))
    monkeypatch.setattr(Planner, "known", lambda *given: noting(known(*given)))
    return seen


@pytest.mark.parametrize("name", share(KINDS))
def test_every_sentence_is_true(name, calls):
    make, fills = KINDS[name]
    trainer = make()
    x = np.abs(X * 10).astype("int32") if name == "table" else X
    y = None if name == "negatives" else np.ones((ROWS, 2), "float32")
    trainer.fit(x[:8], None if y is None else y[:8], batch_size=BATCH, verbose=0)
    said_before = trainer.explain()
    trainer.fit(x, y, batch_size=BATCH, verbose=0)
    said = trainer.explain()
    assert "Shorter batches" not in said_before  # the first data had none
    assert SHORT in calls[-1][2]
    # which is explained
    program, shape, _ = next(call for call in reversed(calls) if call[1][1] == BATCH)

    assert ("Shorter batches are filled up with rows of weight 0." in said) == fills
    assert (
        "Shorter batches run in their own shape" in said or "No row is padding." in said
    ) != fills
    assert calls[-1][1][1] == (BATCH if fills else SHORT)
    assert int(re.search(r"One update takes (\d+) rows", said)[1]) == BATCH
    if cut := re.search(r"in (\d+) microbatches \((\d+) x (\d+) rows\)", said):
        assert [int(number) for number in cut.groups()] == [2, 2, 2]
    assert bool(cut) == (name == "in microbatches")

    several = re.search(r"Up to (\d+) updates go to the device in one dispatch", said)
    assert max(len(counts) for _, _, counts in calls) <= (int(several[1]) if several else 1)
    assert several is None or shape[0] == int(several[1])
    assert bool(several) or "Each update is a separate dispatch" in said
    if ON_TENSORFLOW:
        assert program.call.traced.function_def.attr["_XlaMustCompile"].b == (
            "XLA compiles it." in said
        )
    assert ("Microbatches of any size give the update of the whole batch" in said) == (
        fills or name == "add_loss"
    )
    assert ("Of the 50 rows of 'words'" in said) == (name == "table")
    assert "The data stay on the device" in said
    assert ("programs for updates of several shapes" in said) == (
        len(trainer.executor.planner.programs) > 1
    )


@pytest.mark.parametrize(
    ("rows", "size", "told"),
    [(8, 3, "The last place is padding"), (10, 4, "The last 2 places are padding")],
)
def test_places_of_padding_are_counted(rows, size, told):
    linear = keras.Sequential([keras.Input((4,)), L.Dense(2)])
    linear.compile("sgd", "mse")
    trainer = ws.Trainer(linear, microbatch_size=size)
    trainer.fit(X[:rows], X[:rows, :2], batch_size=rows, verbose=0)
    assert f"{told} of weight 0." in trainer.explain()


def frozen(layer):
    layer.trainable = False
    return layer


def with_lora(layer):
    layer.build((None, 4))
    layer.enable_lora(1)
    return layer


TRAINED = {  # the layers before Dense(2), and the weights that train
    "a layer": (lambda: [frozen(L.Dense(3))], "Trains 8 of 23 weights, in 2 of 4 variables."),
    "statistics": (
        lambda: [frozen(L.BatchNormalization())],
        "Trains 10 of 18 weights, in 2 of 4 variables.",
    ),
    "lora": (lambda: [with_lora(L.Dense(3))], "Trains 18 of 30 weights, in 5 of 6 variables."),
    "many": (lambda: [frozen(L.Dense(400))], "Trains 802 of 2,802 weights, in 2 of 4 variables."),
    "statistics that no layer trains": (lambda: [L.BatchNormalization()], None),
    "a draw": (lambda: [L.Dropout(0.5)], None),
}


@pytest.mark.parametrize("name", TRAINED)
def test_the_weights_that_train_are_counted_where_others_are_frozen(name):
    make, told = TRAINED[name]
    trainer = model(*make())
    before = {v.path: v.numpy() for v in trainer.model.weights}
    trainer.fit(X, np.ones((ROWS, 2), "float32"), batch_size=BATCH, epochs=2, verbose=0)
    said = [line for line in trainer.explain().split("\n") if line.startswith("Trains ")]
    assert said == ([told] if told else [])
    moved = [
        v
        for v in trainer.model.weights
        if np.any(v.numpy() != before[v.path]) and "moving" not in v.path
    ]
    if told:
        assert f"in {len(moved)} of" in told
        assert f"Trains {sum(v.numpy().size for v in moved)} of" in told
