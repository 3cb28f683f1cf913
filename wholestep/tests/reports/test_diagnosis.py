"""Before an update, parameters must be finite; buffers may be infinite on purpose."""

import keras
import numpy as np
import pytest

import wholestep as ws
from wholestep import engines
from wholestep.reports.update_ledger import finite_flags, nonfinite_paths
from wholestep.state import State, Variables


def found(values, *, has_finite_rows=True):
    """Return the non-finite variables of (kernel, shift, count) with these values."""
    kernel = keras.Variable(np.array(values[0], "float32"), name="kernel")
    shift = keras.Variable(np.array(values[1], "float32"), name="shift")
    count = keras.Variable(np.array(values[2]), dtype="int32", trainable=False, name="count")
    variables = Variables([kernel], [], [count, shift], [])
    engine = engines.choose()
    params, slots, buffers = engine.variables.read(variables)
    seen = engine.devices.fetch(
        finite_flags(engine, variables, State(params, slots, buffers, [], (), (), ()))
    )
    assert len(seen) == 2  # whole numbers are always finite
    return nonfinite_paths(variables, seen, has_finite_rows=has_finite_rows)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_parameter_that_is_not_finite_is_named(bad):
    assert found(([1, bad], [0.0], 3)) == ["kernel"]
    assert found(([1, bad], [0.0], 3), has_finite_rows=False) == ["kernel"]


def test_a_buffer_is_named_if_it_has_nan_or_no_row_is_finite():
    assert found(([1.0], [0, -np.inf], 3)) == []
    assert found(([1.0], [0, -np.inf], 3), has_finite_rows=False) == ["shift"]
    assert found(([1.0], [0, np.nan], 3)) == ["shift"]
    assert found(([np.inf], [-np.inf, np.nan], 3)) == ["kernel", "shift"]


def test_finite_variables_are_not_named_if_no_row_is_finite():
    assert found(([3e38, -1], [0.0], 3), has_finite_rows=False) == []


class Sized(keras.layers.Layer):
    """Notes the numbers of rows that it is traced, or called, with."""

    sizes: list = []

    def call(self, x):
        type(self).sizes.append(x.shape[0])
        return x


@pytest.mark.parametrize("size", [2, 3])
def test_rows_are_named_through_the_cut(size):
    model = keras.Sequential([keras.Input((3,)), Sized(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    trainer = ws.Trainer(model, microbatch_size=size)
    x = np.ones((12, 3), "float32")
    how = {"batch_size": 8, "shuffle": False, "verbose": 0}
    trainer.fit(x, x[:, :1], **how)
    Sized.sizes.clear()
    x[[5, 7]] = np.nan
    with pytest.raises(ws.NonFiniteError) as error:
        trainer.fit(x, x[:, :1], **how)
    assert error.value.rows == (5, 7)
    assert Sized.sizes
    assert max(Sized.sizes) == size


@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.filterwarnings("ignore:microbatch_size=4 .* not give the weights")
def test_a_batch_that_spoils_statistics_is_not_applied(size):
    """The loss and the gradient of a huge row are finite; the variance of the batch is not."""
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.BatchNormalization(name="norm"), keras.layers.Dense(1)]
    )
    model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(16, 3)).astype("float32")
    x[9] = 3e30
    y = np.ones((16, 1), "float32")
    with pytest.raises(
        ws.NonFiniteError, match="norm/moving_variance would not be finite"
    ) as error:
        ws.Trainer(model, microbatch_size=size).fit(x, y, batch_size=8, shuffle=False, verbose=0)
    assert error.value.update == 2
    before = model.get_weights()
    trainer = ws.Trainer(model, microbatch_size=size, on_nonfinite="skip")
    with pytest.warns(UserWarning, match="was skipped"):
        trainer.fit(x[8:], y[8:], batch_size=8, verbose=0)
    assert trainer.num_skipped == 1
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


class Lowest(keras.layers.Layer):
    """Keeps the least input so far, and a number that stays infinite."""

    def build(self, shape):
        infinite = keras.initializers.Constant(np.inf)
        self.lowest = self.add_weight((2,), initializer=infinite, trainable=False)

    def call(self, x):
        self.lowest.assign(
            keras.ops.minimum(self.lowest, keras.ops.stack([keras.ops.min(x), np.inf]))
        )
        return x


def test_a_buffer_that_was_infinite_before_is_no_reason():
    model = keras.Sequential([keras.Input((3,)), Lowest(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    ws.Trainer(model).fit(np.ones((8, 3)), np.ones((8, 1)), batch_size=4, verbose=0)
    assert keras.ops.convert_to_numpy(model.layers[0].lowest).tolist() == [1.0, np.inf]


@pytest.mark.parametrize("ready", [False, True])
def test_a_missing_label_of_weight_0_is_named_as_its_derivative_is_nan(ready):
    x = np.ones((8, 3), "float32")
    y = np.ones((8, 1), "float32")
    weight = np.ones(8, "float32")
    y[5], weight[5] = np.nan, 0
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    trainer = ws.Trainer(model)
    batches = [(x[:4], y[:4], weight[:4]), (x[4:], y[4:], weight[4:])]
    data = ((each for each in batches),) if ready else (x, y)
    with pytest.raises(
        ws.NonFiniteError,
        match=rf"batch\[1\] is not finite in rows {1 if ready else 5}\. Try: replace",
    ):
        trainer.fit(
            *data,
            **({} if ready else {"sample_weight": weight, "batch_size": 4}),
            verbose=0,
            shuffle=False,
        )
