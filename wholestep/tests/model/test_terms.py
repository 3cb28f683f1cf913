"""Values and weights are merged before they are divided, in any cut."""

import itertools

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from shares import ENGINE

from wholestep.errors import SpecificationError
from wholestep.model.objective import Mean, ScalarTerm, Sum, check
from wholestep.sums import accumulate, ratio

on_tensorflow = pytest.mark.skipif(ENGINE != "tensorflow", reason="shapes are known on JAX")
small = st.integers(-8, 8).map(float)


def tensor(values):
    return keras.ops.convert_to_tensor(np.asarray(values, "float32"))


def sums(term, row_weights=None):
    return tuple(float(s) for s in term.sums(None if row_weights is None else tensor(row_weights)))


@given(
    hnp.arrays("float32", (7, 3), elements=small),
    st.lists(st.integers(0, 7), max_size=4),
    st.data(),
)
@pytest.mark.slow
def test_any_cut_sums_to_the_whole(values, cuts, data):
    weights = data.draw(hnp.arrays("float32", (7,), elements=st.integers(0, 4).map(float)))
    whole = sums(Mean(tensor(values), tensor(weights)))
    edges = [0, *sorted(cuts), 7]
    parts = [
        sums(Mean(tensor(values[a:b]), tensor(weights[a:b])))
        for a, b in itertools.pairwise(edges)
        if b > a
    ]
    assert whole == (sum(p[0] for p in parts), sum(p[1] for p in parts))


@given(
    hnp.arrays("float32", (5, 2), elements=small),
    hnp.arrays("float32", (5,), elements=st.sampled_from([0.0, 1.0])),
)
def test_a_row_of_weight_zero_is_absent(values, present):
    assert sums(Mean(tensor(values)), present) == (values[present > 0].sum(), 2 * present.sum())


def test_a_value_of_weight_zero_is_never_looked_at():
    assert sums(Mean(tensor([1.0, np.nan]), tensor([1.0, 0.0]))) == (1.0, 1.0)
    assert sums(Sum(tensor([1.0, np.inf])), [1.0, 0.0]) == (1.0, 1.0)


def test_a_sum_is_not_divided_and_a_whole_is_as_it_is():
    assert sums(Sum(tensor([1.0, 2.0]))) == (3.0, 1.0)
    assert sums(ScalarTerm(tensor(5.0))) == (5.0, 1.0)


def test_running_totals_do_not_stop_growing():
    plain = np.float32(2**24)
    total = (tensor(2**24), tensor(0))
    for _ in range(100):
        plain = plain + np.float32(1)
        total = accumulate(total, tensor(1))
    assert plain == 2**24  # what a single float32 makes of it
    assert float(total[0]) + float(total[1]) == 2**24 + 100
    high, low = (
        keras.ops.stack([part, other])
        for part, other in zip(total, (tensor(2), tensor(0)), strict=True)
    )
    assert float(ratio(high, low)) == 2**23 + 50


def test_nothing_weighed_yet_is_zero():
    assert float(ratio(tensor([0, 0]), tensor([0, 0]))) == 0


@pytest.mark.parametrize(
    ("term", "message"),
    [
        (Mean(tensor(1.0)), "must have the 4 rows"),
        (Mean(tensor(np.zeros((3, 2)))), "must have the 4 rows"),
        (
            Mean(tensor(np.zeros((4, 2))), tensor(np.zeros((2,)))),
            "weights of the loss must have the shape",
        ),
        (
            Mean(tensor(np.zeros((4,))), tensor(np.zeros((4, 2)))),
            "weights of the loss must have the shape",
        ),
    ],
)
def test_wrong_shapes_are_named(term, message):
    with pytest.raises(SpecificationError, match=message):
        check(term, "the loss", 4)


def test_whole_numbers_become_floats():
    assert "float32" in str(check(Mean(keras.ops.zeros((4,), "int32")), "the loss", 4).values.dtype)


def of_unknown_shape(function, *values, shape=None):
    """Return what a function makes of values whose static shape TensorFlow does not know."""
    import tensorflow as tf

    traced = tf.function(function, input_signature=[tf.TensorSpec(shape, "float32")] * len(values))
    return traced(*map(tf.constant, values))


@on_tensorflow
def test_rows_that_nobody_counted_are_never_mixed():
    import tensorflow as tf

    def checked(values):
        return check(Mean(values), "the loss", 2).values

    two = np.array([[1.0, 10.0], [1.0, 10.0]], "float32")
    np.testing.assert_array_equal(of_unknown_shape(checked, two, shape=(None, None)), two)
    with pytest.raises(tf.errors.InvalidArgumentError):
        of_unknown_shape(
            checked, np.array([[1.0, 10.0]] * 3 + [[2.0, 20.0]], "float32"), shape=(None, None)
        )


@on_tensorflow
@pytest.mark.parametrize("weighs", ["rows", "tokens", "nobody"])
def test_a_loss_per_token_of_any_length_is_weighed(weighs):
    values = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], "float32")
    mask = np.array([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]], "float32")

    def summed(values, mask):
        term = check(Mean(values, mask if weighs == "tokens" else None), "the loss", 2)
        return term.sums(tensor([0.0, 2.0]) if weighs == "rows" else None)

    expected = {"rows": (30.0, 6.0), "tokens": (7.0, 3.0), "nobody": (21.0, 6.0)}[weighs]
    assert tuple(map(float, of_unknown_shape(summed, values, mask, shape=(None, None)))) == expected


@pytest.mark.parametrize("kind", [Mean, Sum])
@pytest.mark.parametrize("weighs", [False, True])
def test_sums_of_half_precision_count_as_far_as_single_precision(kind, weighs):
    # float16 ends at 65504, and bfloat16 does not know 257
    ones = keras.ops.ones((300, 300), "float16")
    assert sums(kind(ones, ones if weighs else None)) == (90000.0, 90000.0 if kind is Mean else 1.0)
    few = keras.ops.ones((257,), "bfloat16")
    assert sums(kind(few, few if weighs else None)) == (257.0, 257.0 if kind is Mean else 1.0)
