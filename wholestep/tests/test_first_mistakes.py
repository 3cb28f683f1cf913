"""The mistakes of a first hour are answered with the way out, before anything ran."""

import keras
import numpy as np
import pytest
from small import X, Y, model

import wholestep as ws


class Reads(ws.Objective):
    def __call__(self, model, batch, training):
        return ws.Mean(model(batch["x"])[:, 0] - batch["labels"])


class Short(ws.Objective):
    def __call__(self, model, batch):
        return ws.Mean(model(batch)[:, 0])


def trainer(**how):
    return ws.Trainer(model(), **how)


MISTAKES = {
    "fit(batchsize=)": (
        lambda: trainer().fit(X, Y, batchsize=3),
        TypeError,
        r"fit has no argument 'batchsize'\. Received: fit\(.*batchsize=\.\.\.\)\. Try: batch_size\.",
    ),
    "fit(microbatch_size=)": (
        lambda: trainer().fit(X, Y, microbatch_size=3),
        TypeError,
        r"fit has no argument 'microbatch_size'\..*Try: Trainer\(\.\.\., microbatch_size=\.\.\.\)\.",
    ),
    "a data set of rows that nobody batched": (
        lambda: trainer().fit(iter(list(zip(X, Y, strict=True)))),
        ws.BatchError,
        r"batch\[1\] must be an array with a leading row axis.*; or batch the data set, as by \.batch\(32\)",
    ),
    "Trainer(micro_batch_size=)": (
        lambda: trainer(micro_batch_size=3),
        TypeError,
        r"Trainer has no argument 'micro_batch_size'\..*Try: microbatch_size\.",
    ),
    "Batches(shufle=)": (
        lambda: ws.Batches((X, Y), shufle=False),
        TypeError,
        r"Batches has no argument 'shufle'\..*Try: shuffle\.",
    ),
    "Checkpoints(every_step=)": (
        lambda: ws.Checkpoints("runs/a", every_step=5),
        TypeError,
        r"Checkpoints has no argument 'every_step'\..*Try: every_steps\.",
    ),
    "Checkpoints()": (lambda: ws.Checkpoints(), TypeError, r"need a folder.*Checkpoints\(\)"),
    "Skip(5)": (lambda: ws.Skip(5), TypeError, r"by name\. Received: Skip\(int\)"),
    "evaluate(nothing near)": (
        lambda: trainer().evaluate(X, Y, quux=1),
        TypeError,
        "evaluate has no argument 'quux'.*Try: one of x, y, batch_size",
    ),
    "a loss as the objective": (
        lambda: ws.Trainer(model(), "mse"),
        ws.SpecificationError,
        r"Received: 'mse'\. Try: model\.compile\(optimizer, loss\)",
    ),
    "a class as the objective": (
        lambda: ws.Trainer(model(), Reads),
        ws.SpecificationError,
        r"Try: an object of this class, Reads\(\)",
    ),
    "another signature": (
        lambda: ws.Trainer(model(), Short(), optimizer="sgd"),
        ws.SpecificationError,
        r"must take \(model, batch, training\)\. Received: Short\.__call__\(model, batch\)",
    ),
    "a key that the batch lacks": (
        lambda: ws.Trainer(model(), Reads(), optimizer="sgd").fit({"x": X}, verbose=0),
        ws.BatchError,
        r"the objective reads, and 'labels' is missing\. Received: batch\['x'\]",
    ),
    "a callback's class": (
        lambda: trainer().fit(X, Y, verbose=0, callbacks=[keras.callbacks.TerminateOnNaN]),
        ws.SpecificationError,
        r"Received: the class TerminateOnNaN\. Try: an object of it, TerminateOnNaN\(",
    ),
    "a tuple as x": (
        lambda: trainer().fit((X, Y), verbose=0),
        ws.BatchError,
        r"fit\(x, y\), not fit\(\(x, y\)\)",
    ),
    "a loss of another output": (
        lambda: ws.Trainer(model(loss={"out": "mse"})).fit(X, Y, verbose=0),
        ws.SpecificationError,
        "losses of 'out'. Try: the loss alone",
    ),
    "a method of the model": (
        lambda: trainer().summary(),
        AttributeError,
        r"A Trainer has no 'summary'\. It is the model's: trainer\.model\.summary",
    ),
    "one row without its axis": (
        lambda: trainer().predict(X[0]),
        ws.BatchError,
        r"The model takes x of shape \(rows, 6\)\.",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_it_is_answered_with_the_way_out(name):
    call, kind, words = MISTAKES[name]
    with pytest.raises(kind, match=words):
        call()


@pytest.mark.parametrize(
    ("data", "words"),
    [(X, "needs labels"), ((X[:, :3], Y), r"takes x of shape \(rows, 6\)")],
)
def test_validation_data_are_looked_at_before_the_first_epoch(data, words):
    made = model()
    with pytest.raises(ws.BatchError, match=f"In validation_data: .*{words}"):
        ws.Trainer(made).fit(X, Y, verbose=0, validation_data=data, epochs=2)
    assert int(made.optimizer.iterations) == 0


def test_validation_labels_that_do_not_fit_are_named_as_such():
    with pytest.raises(ws.BatchError, match=r"^In validation_data: Class numbers in y must"):
        trainer().fit(X, Y, verbose=0, validation_data=(X, Y + 7))


def test_validation_images_of_another_size_that_the_model_takes_are_validated():
    large, small = np.ones((8, 6, 6, 1), "float32"), np.ones((8, 4, 6, 1), "float32")
    layers = [keras.layers.Conv2D(2, 3), keras.layers.GlobalMaxPooling2D(), keras.layers.Dense(1)]
    images = keras.Sequential([keras.Input((6, 6, 1)), *layers])
    images.compile("sgd", "mse")
    labels = np.ones((8, 1), "float32")
    found = ws.Trainer(images).fit(large, labels, verbose=0, validation_data=(small, labels))
    assert len(found.history["val_loss"]) == 1


def test_of_training_and_validation_data_that_both_do_not_fit_the_first_are_named():
    narrow = X[:, :3]
    with pytest.raises(ws.BatchError, match=r"^The model takes x of shape \(rows, 6\)"):
        trainer().fit(narrow, Y, verbose=0, validation_data=(narrow, Y))


@pytest.mark.parametrize(
    ("monitored", "meant"), [("val_los", "val_loss"), ("los", "loss"), ("learning_rate", None)]
)
def test_a_misspelt_monitored_name_is_warned_of_after_the_first_update(monitored, meant, recwarn):
    class Stops(keras.callbacks.Callback):
        monitor = monitored

        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = True

    trainer().fit(X, Y, verbose=0, callbacks=[Stops()])
    found = [str(each.message) for each in recwarn if "monitor" in str(each.message)]
    among = (
        "Stops must monitor a name in the logs. Received: {!r}, among loss, accuracy. Try: {!r}."
    )
    assert found == ([among.format(monitored, meant)] if meant else [])


def test_a_misspelt_metric_of_the_best_is_answered_with_the_nearest_name(tmp_path):
    best = ws.Checkpoints(tmp_path, keep_best=("val_los", 1))
    with pytest.raises(
        ws.SpecificationError, match=r'Try: \("val_loss", 1\); or \("val_los", 1, "max"'
    ):
        trainer().fit(X, Y, verbose=0, validation_data=(X, Y), checkpoints=best)


def test_a_single_row_is_answered_with_its_batch():
    with pytest.raises(ws.BatchError, match=r"Try: pass x\[None\] for a single row; or"):
        trainer().predict(X[0])
    with pytest.raises(ws.BatchError, match="Try: give the rows this shape"):
        trainer().predict(X[:, 0])


def test_a_step_of_the_users_own_may_name_its_losses_as_it_likes():
    class Own(keras.Sequential):
        def train_step(self, state, *given):
            return {"seen": 1.0}, state

    own = Own([keras.Input((6,)), keras.layers.Dense(1)])
    own.compile("sgd", {"real": "mse", "fake": "mse"})
    with pytest.raises(Exception) as caught:  # noqa: PT011 (Keras builds the losses itself)
        ws.Trainer(own).fit(X, X[:, :1], verbose=0)
    assert "The losses must be" not in str(caught.value)


def test_an_error_inside_of_a_property_is_not_one_about_its_name(monkeypatch):
    made = trainer()
    monkeypatch.setattr(made, "_setup", object())
    with pytest.raises(AttributeError, match="'object' object has no attribute 'executor'"):
        made.executor  # noqa: B018


def test_the_outputs_of_a_functional_model_are_named():
    x = keras.Input((6,))
    two = keras.Model(x, {name: keras.layers.Dense(1, name=name)(x) for name in ("one", "two")})
    two.compile("sgd", {"one": "mse", "to": "mse"})
    with pytest.raises(ws.SpecificationError, match="the names 'one', 'two'"):
        ws.Trainer(two).fit(X, {"one": X[:, :1], "two": X[:, :1]}, verbose=0)


def test_a_type_error_of_the_users_code_stays_as_it_is():
    class Fails(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            raise TypeError("the user's own")

    with pytest.raises(TypeError, match="the user's own"):
        trainer().fit(X, Y, verbose=0, callbacks=[Fails()])
