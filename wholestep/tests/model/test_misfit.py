"""A batch that a model cannot take is answered in our words; what else is raised stays as it is."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest

import wholestep as ws
from wholestep.errors import BatchError
from wholestep.model.misfit import check_parts, explained, named

L = keras.layers
ROWS = np.zeros((5, 3), "float32")
LABELS = np.zeros((5, 2), "float32")


class Other(ws.Objective):
    def __call__(self, model, batch, training):
        raise AssertionError


def one_input(loss="mse"):
    made = keras.Sequential([keras.Input((3,), name="features"), L.Dense(2)])
    made.compile("sgd", loss)
    return made


def two_inputs():
    inputs = [keras.Input((3,), name=name) for name in ("left", "right")]
    made = keras.Model(inputs, L.Dense(2)(L.Add()(inputs)))
    made.compile("sgd", "mse")
    return made


def told(model, batch, error=None, objective=None, **how):
    """Return what is said of a batch, where calling the model raises this error."""
    error = error or ValueError("any message of the backend")
    with pytest.raises(BatchError) as caught, explained(model, objective, batch, **how):
        raise error
    assert caught.value.__cause__ is error
    return str(caught.value)


@pytest.mark.parametrize(
    ("make", "x", "received", "attempt"),
    [
        (one_input, ROWS[:, :2], "x of shape (rows, 2)", "give the rows this shape"),
        (
            one_input,
            [ROWS, ROWS],
            "x[1] of shape (rows, 3)",
            "as many arrays as the model has inputs",
        ),
        (
            one_input,
            {"other": ROWS},
            "x['other'] of shape (rows, 3)",
            "name the Input as the dict does",
        ),
        (two_inputs, ROWS, "x of shape (rows, 3)", "as many arrays as the model has inputs"),
        (two_inputs, {"left": ROWS}, "x['left'] of shape (rows, 3)", "right missing"),
    ],
)
def test_inputs_that_the_model_was_not_built_for(make, x, received, attempt):
    words = told(make(), (x, LABELS))
    assert words.startswith("The model takes ")
    assert received in words.split("Received: ")[1]
    assert attempt in words.split("Try: ")[1]


def test_labels_that_are_missing_are_the_first_thing_to_say():
    assert "needs labels. Received: a batch without y." in told(one_input(), (ROWS[:, :2],))
    with pytest.raises(BatchError, match="needs labels"):
        check_parts(one_input(), (ROWS,))
    check_parts(one_input(), (ROWS, LABELS))
    check_parts(one_input(loss=None), ROWS)
    assert told(one_input(), ROWS[:, :2], inputs_only=True).startswith(
        "The model takes features of shape (rows, 3)."
    )


@pytest.mark.parametrize("weight", [np.ones((5, 3)), np.ones((5, 2))])
def test_weights_that_no_place_of_the_labels_has(weight):
    words = told(one_input(), (ROWS, LABELS, weight))
    assert words.startswith("sample_weight must hold one number for each row")
    assert "beside labels of shape (rows, 2)" in words


CLASSES = np.array([0, 2, 1, 3, 0])
ONE_HOT = np.eye(4, dtype="float32")[CLASSES]


@pytest.mark.own
@pytest.mark.parametrize(
    ("loss", "labels", "attempt"),
    [
        (
            "categorical_crossentropy",
            CLASSES,
            "'sparse_categorical_crossentropy' for class numbers",
        ),
        ("categorical_crossentropy", CLASSES[:, None], r"or keras.ops.one_hot\(y, 4\)"),
        ("categorical_focal_crossentropy", CLASSES, r"Try: keras.ops.one_hot\(y, 4\)"),
        ("sparse_categorical_crossentropy", ONE_HOT, "'categorical_crossentropy' for one-hot"),
        ("binary_crossentropy", ONE_HOT[:, :3], "as many units as labels"),
    ],
)
@pytest.mark.parametrize("call", ["fit", "evaluate"])
def test_labels_of_another_loss_are_answered_with_the_loss_that_they_fit(
    loss, labels, attempt, call
):
    classifier = keras.Sequential([keras.Input((3,)), L.Dense(4, "softmax")])
    classifier.compile("sgd", loss)
    with pytest.raises(BatchError, match=f"The loss '{loss}' takes .*{attempt}") as caught:
        getattr(ws.Trainer(classifier), call)(ROWS, labels, verbose=0)
    assert "labels of shape (rows" in str(caught.value)


def test_an_error_of_a_loss_whose_labels_fit_stays_as_it_is():
    def failing(y_true, y_pred):
        raise ValueError("the user's own")

    made = one_input(loss=failing)
    with pytest.raises(ValueError, match="the user's own"):
        ws.Trainer(made).fit(ROWS, LABELS, verbose=0)


class Named(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = L.Dense(2)
        self.table = {"one": 1}

    def call(self, x):
        return self.dense(x["left"]) + self.dense(x["right"])


class Table(Named):
    def call(self, x):
        return self.dense(x["left"]) * self.table["two"]


@pytest.mark.filterwarnings("ignore:Layer 'named:UserWarning")
@pytest.mark.parametrize("call", ["fit", "evaluate", "update", "predict"])
@pytest.mark.parametrize("is_built", [False, True])
def test_a_key_of_the_inputs_that_the_model_reads_and_does_not_get_is_named(call, is_built):
    made = Named()
    made.compile("sgd", "mse")
    trainer = ws.Trainer(made)
    if is_built:
        trainer.update(({"left": ROWS, "right": ROWS}, LABELS))
    x = {"left": ROWS, "rigth": ROWS}
    run = {
        "update": lambda: trainer.update((x, LABELS)),
        "predict": lambda: trainer.predict(x, verbose=0),
    }
    must = r"'right' is missing. Received: x\['left'\] of shape \(rows, 3\), x\['rigth'\] of shape"
    with pytest.raises(BatchError, match=must):
        run.get(call, lambda: getattr(trainer, call)(x, LABELS, verbose=0))()


@pytest.mark.filterwarnings("ignore:Layer 'table:UserWarning")
def test_a_key_of_another_dict_is_not_called_a_key_of_the_inputs():
    made = Table()
    made.compile("sgd", "mse")
    with pytest.raises(KeyError, match="two"):
        ws.Trainer(made).predict({"left": ROWS}, verbose=0)


@pytest.mark.parametrize("call", ["fit", "evaluate", "update"])
def test_weights_of_some_outputs_alone_are_refused_with_the_way_out(call):
    inputs = keras.Input((3,))
    made = keras.Model(inputs, {name: L.Dense(2, name=name)(inputs) for name in "ab"})
    made.compile("sgd", {"a": "mse", "b": "mse"})
    batch = ROWS, {"a": LABELS, "b": LABELS}, {"a": np.ones(5)}
    trainer = ws.Trainer(made)
    with pytest.raises(BatchError, match=r"weights for a beside labels for a, b. Try: give None"):
        trainer.update(batch) if call == "update" else getattr(trainer, call)(
            *batch[:2], sample_weight=batch[2]
        )
    batch[2]["b"] = None
    assert trainer.fit(*batch[:2], sample_weight=batch[2], verbose=0)


@pytest.mark.parametrize("is_masked", [True, False])
def test_weights_of_rows_for_an_output_with_places_are_refused_with_the_way_out(is_masked):
    masking = [L.Masking()] if is_masked else []
    made = keras.Sequential(
        [keras.Input((4, 3)), *masking, L.LSTM(2, return_sequences=True), L.Dense(1)]
    )
    made.compile("sgd", "mse")
    x = np.ones((6, 4, 3), "float32")
    y = np.ones((6, 4, 1), "float32")
    weights = np.ones(6, "float32")
    trainer = ws.Trainer(made)
    with pytest.raises(
        BatchError,
        match=r"shape \(rows\) beside labels of shape .*Try: pass sample_weight\[:, None\]",
    ):
        trainer.fit(x, y, sample_weight=weights, verbose=0)
    assert trainer.fit(x, y, sample_weight=weights[:, None], verbose=0)


@pytest.mark.parametrize("weight", [None, np.ones(5), np.ones((5, 1))])
@pytest.mark.parametrize("x", [ROWS, [ROWS], {"features": ROWS}, ROWS[..., None]])
def test_a_batch_that_fits_leaves_the_users_own_error_alone(x, weight):
    with pytest.raises(ZeroDivisionError), explained(one_input(), None, (x, LABELS, weight)):
        raise ZeroDivisionError


def test_an_error_of_ours_is_not_explained_again():
    own = ws.SpecificationError("said already")
    with (
        pytest.raises(ws.SpecificationError) as caught,
        explained(one_input(), None, (ROWS[:, :2],)),
    ):
        raise own
    assert caught.value is own


def test_of_an_objectives_batch_only_the_models_own_words_tell():
    error = ValueError(
        '\x1b[1mInput 0 of layer "dense" is incompatible with the layer: expected 3\x1b[0m\nmore'
    )
    words = told(one_input(), (ROWS[:, :2],), error, Other())
    assert (
        'Received: Input 0 of layer "dense" is incompatible with the layer: expected 3. Try:'
        in words
    )
    with (
        pytest.raises(ValueError, match="of the user's own"),
        explained(one_input(), Other(), (ROWS[:, :2],)),
    ):
        raise ValueError("of the user's own")


def test_a_loaded_batch_is_named_once():
    error = BatchError("does not fit")
    block = SimpleNamespace(is_resident=False, start=(1, 4))
    with pytest.raises(BatchError), named(block), named(block):
        raise error
    assert error.__notes__ == [
        "This was batch 4 of epoch 1, both counted from 0; no update has used it."
    ]
    resident = BatchError("does not fit")
    with pytest.raises(BatchError), named(SimpleNamespace(is_resident=True, start=(0, 0))):
        raise resident
    assert not hasattr(resident, "__notes__")
