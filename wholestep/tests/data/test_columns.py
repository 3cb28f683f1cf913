"""A Hugging Face dataset by the names of its columns: which are inputs, and which are labels."""

import keras
import numpy as np
import pytest
from keras import layers

import wholestep as ws
from wholestep.model.compiled import Columns, find

X = np.random.default_rng(0).normal(size=(10, 3)).astype("float32")
TABLE = {
    "x": X,
    "more": 2 * X,
    "label": X.sum(1),
    "y": X[:, :1],
    "sample_weight": np.arange(10) / 9,
}


class Dataset:
    """As much of a `datasets.Dataset` as is asked for."""

    def __init__(self, columns):
        self.columns, self.column_names = columns, list(columns)

    def __len__(self):
        return 10

    def __getitem__(self, rows):
        assert isinstance(rows, list)
        return {name: column[rows].tolist() for name, column in self.columns.items()}

    def select_columns(self, names):
        return Dataset({name: self.columns[name] for name in names})


Dataset.__module__ = "datasets.arrow_dataset"


def of(*names):
    return Dataset({name: TABLE[name] for name in names})


def net(inputs=("x",), outputs=("out",), *, as_dict=False, compiled=True):
    keras.utils.set_random_seed(1)
    given = [keras.Input((3,), name=name) for name in inputs]
    hidden = given[0] if len(given) == 1 else layers.Add()(given)
    out = [layers.Dense(1, name=name)(hidden) for name in outputs]
    nested = dict(zip(outputs, out, strict=True)) if as_dict else out[0] if len(out) == 1 else out
    model = keras.Model(given[0] if len(given) == 1 else given, nested)
    if compiled:
        model.compile("sgd", "mse")
    return model


class OwnCall(keras.Model):
    pass


@pytest.mark.parametrize(
    ("model", "names", "found"),
    [
        (net(), ["x", "y"], Columns("x", "y")),
        (net(), ["more", "x", "labels"], Columns("x", "labels")),
        (net(), ["x", "label", "sample_weight"], Columns("x", "label", "sample_weight")),
        (net(), ["x", "sample_weight", "y"], Columns("x", "y", "sample_weight")),
        (net(), ["image", "label"], Columns("image", "label")),
        (net(outputs=("label",)), ["label", "x", "labels"], Columns("x", "label")),
        (net(("x", "more")), ["x", "more", "y"], Columns({"x": "x", "more": "more"}, "y")),
        (net(outputs=("a", "b")), ["a", "b", "x"], Columns("x", ["a", "b"])),
        (
            net(outputs=("a", "b"), as_dict=True),
            ["b", "a", "x"],
            Columns("x", {"a": "a", "b": "b"}),
        ),
        (
            keras.Sequential([keras.Input((3,)), layers.Dense(1, name="a")]),
            ["a", "x"],
            Columns("x", "a"),
        ),
        (net(compiled=False), ["x", "other", "third"], Columns("x")),
    ],
)
def test_names_tell_what_a_column_is(model, names, found):
    assert find(model, names) == found


def test_a_model_without_names_takes_all_but_the_label():
    model = OwnCall()
    model.compile("sgd", "mse")
    assert find(model, ["a", "b", "label"]) == Columns({"a": "a", "b": "b"}, "label")
    assert find(model, ["a", "labels"]) == Columns("a", "labels")


@pytest.mark.parametrize(
    ("model", "names", "what"),
    [
        (net(), ["x", "id"], "which column is the label"),
        (net(), ["x", "v", "z"], "which column is the label"),
        (net(outputs=("a", "b")), ["x", "a", "label"], "which column is the label"),
        (net(compiled=False), ["x", "sample_weight"], "which column is the label"),
        (net(), ["x"], "which column is the label"),
        (net(), ["a", "b"], "which column is the label"),
        (net(), ["x", "label", "labels"], "which column is the label"),
        (net(), ["a", "b", "label"], "which columns are the inputs"),
        (net(("x", "more")), ["x", "label"], "which columns are the inputs"),
    ],
)
def test_names_that_do_not_tell_are_refused(model, names, what):
    with pytest.raises(
        ws.SpecificationError, match=rf"must show {what}: the model has the inputs .*x.*transform="
    ):
        find(model, names)


def test_a_dataset_trains_validates_and_predicts_as_its_arrays():
    data = of("x", "sample_weight", "y")
    arrays = (X, TABLE["y"], TABLE["sample_weight"])
    one, two = (ws.Trainer(net()) for _ in range(2))
    ours = one.fit(data, batch_size=4, epochs=2, validation_data=data, verbose=0).history
    given = dict(zip(("x", "y", "sample_weight"), arrays, strict=True))
    theirs = two.fit(**given, batch_size=4, epochs=2, validation_data=arrays, verbose=0).history
    assert {name: pytest.approx(values, rel=1e-5) for name, values in theirs.items()} == ours
    assert one.evaluate(data, batch_size=4, verbose=0) == pytest.approx(
        two.evaluate(**given, verbose=0), rel=1e-5
    )
    np.testing.assert_allclose(
        one.predict(of("x"), verbose=0), two.predict(X, verbose=0), rtol=1e-5, atol=1e-6
    )


def test_several_datasets_by_name_are_refused():
    several = of("x", "y")
    several.column_names = {"train": ["x", "y"], "test": ["x", "y"]}
    with pytest.raises(ws.SpecificationError, match=r"several: train, test.*dataset\['train'\]"):
        ws.Trainer(net()).fit(several, verbose=0)


class Scaled(keras.Model):
    """A task whose preprocessor takes the raw column."""

    def __init__(self):
        super().__init__()
        self.last = layers.Dense(1, kernel_initializer="ones")

    def call(self, x):
        return self.last(x)

    def preprocessor(self, x, y=None, sample_weight=None):
        return keras.utils.pack_x_y_sample_weight(x / 2, y, sample_weight)

    def fit(self, *args, **kwargs):
        raise NotImplementedError

    evaluate = predict = fit


def test_columns_are_selected_before_preprocessing():
    found = []
    for data in (of("more", "y"), (2 * X, TABLE["y"])):
        model = Scaled()
        model.compile("sgd", "mse")
        given = {"x": data} if isinstance(data, Dataset) else dict(zip("xy", data, strict=True))
        losses = ws.Trainer(model).fit(**given, batch_size=5, verbose=0).history["loss"]
        found.append([*losses, ws.Trainer(model).evaluate(**given, verbose=0)])
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)


class FitsAnotherWay(OwnCall):
    """Overrides `fit` alone, without a preprocessor."""

    def fit(self, *given, **others):
        raise AssertionError("the trainer replaces it")


def test_a_prediction_asks_for_the_preprocessing_of_predict_alone():
    inputs = keras.Input((3,), name="x")
    model = FitsAnotherWay(inputs, layers.Dense(1)(inputs))
    outputs = ws.Trainer(model).predict(of("x"), batch_size=4, verbose=0)
    np.testing.assert_allclose(outputs, ws.Trainer(model).predict(X, verbose=0), rtol=1e-5)
