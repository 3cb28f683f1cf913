"""The operations that replace XLA's on CPUs give the same numbers, in this library's programs
alone.
"""

from contextlib import nullcontext

import keras
import numpy as np
import pytest
from shares import ENGINE
from small import count_calls

import wholestep as ws

if ENGINE != "jax":
    pytest.skip("JAX alone", allow_module_level=True)

import jax
from jax import lax

from wholestep.engines import jax_cpu
from wholestep.engines.jax_cpu import elementwise

pytestmark = pytest.mark.own  # TensorFlow skips all of them
RANDOM = np.random.default_rng(0)
LAYOUTS = [("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")]


def whole(*shape):
    """Return whole numbers, many of them equal: no sum of them is rounded."""
    return RANDOM.integers(-3, 4, size=shape).astype("float32")


def lowered(function, arguments, context):
    with context:
        return jax.jit(lambda *given: function(*given)).lower(*arguments)


def same(function, *arguments, gone):
    """Whether both give the same numbers, and XLA's operation is gone from ours."""
    xla, ours = (
        lowered(function, arguments, context) for context in (nullcontext(), elementwise())
    )
    assert gone in xla.as_text()
    assert gone not in ours.as_text()
    return np.array_equal(*(program.compile()(*arguments) for program in (xla, ours)))


def gradients(function, x, kernel):
    """Return the gradients by both arguments, each a function of (x, kernel, the gradient by the
    result).
    """
    by_x = lambda x, kernel, g: jax.vjp(lambda x: function(x, kernel), x)[1](g)[0]  # noqa: E731
    by_kernel = lambda x, kernel, g: jax.vjp(lambda kernel: function(x, kernel), kernel)[1](g)[0]  # noqa: E731
    return by_x, by_kernel, whole(*function(x, kernel).shape)


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize("window", [(1, 2, 2, 1), (1, 3, 2, 1), (1, 1, 4, 1)])
@pytest.mark.parametrize("strides", [(1, 2, 2, 1), (1, 1, 1, 1), (1, 3, 2, 1)])
def test_the_gradient_of_max_pooling_goes_to_the_first_of_equal_values(window, strides, padding):
    def pool(x):
        return lax.reduce_window(x, -np.inf, lax.max, window, strides, padding)

    x = np.maximum(whole(2, 9, 8, 3), 0)
    g = whole(*pool(x).shape)
    assert same(lambda x, g: jax.vjp(pool, x)[1](g)[0], x, g, gone="stablehlo.select_and_scatter")


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout[0])
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize(
    ("strides", "dilation"), [((1, 1), (1, 1)), ((2, 1), (1, 1)), ((1, 1), (2, 2))]
)
def test_a_depthwise_convolution_and_its_gradient(strides, dilation, padding, layout):
    def convolve(x, kernel):
        how = {"rhs_dilation": dilation, "dimension_numbers": layout, "feature_group_count": 5}
        return lax.conv_general_dilated(x, kernel, strides, padding, **how)

    is_last = layout[0] == "NHWC"
    x, kernel = (
        (whole(2, 9, 8, 5), whole(3, 2, 1, 5))
        if is_last
        else (whole(2, 5, 9, 8), whole(5, 1, 3, 2))
    )
    by_x, _, g = gradients(convolve, x, kernel)
    assert same(convolve, x, kernel, gone="stablehlo.convolution")
    assert same(by_x, x, kernel, g, gone="stablehlo.convolution")


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout[0])
def test_the_gradient_by_a_kernel_of_one_place_is_a_product(layout):
    def convolve(x, kernel):
        return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=layout)

    is_last = layout[0] == "NHWC"
    x, kernel = (
        (whole(3, 6, 5, 4), whole(1, 1, 4, 7))
        if is_last
        else (whole(3, 4, 6, 5), whole(7, 4, 1, 1))
    )
    _, by_kernel, g = gradients(convolve, x, kernel)
    assert same(by_kernel, x, kernel, g, gone="stablehlo.convolution")


@pytest.mark.parametrize(
    ("of", "start", "length"),
    [(lax.max, -np.inf, 6), (lax.min, np.inf, 2)],
    ids=["large", "minima"],
)
def test_other_windows_are_left_to_xla(of, start, length):
    def pool(x):
        return lax.reduce_window(x, start, of, (length, length), (length, length), "VALID")

    x = whole(12, 12)
    g = whole(*pool(x).shape)
    program = lowered(lambda x, g: jax.vjp(pool, x)[1](g)[0], [x, g], elementwise())
    assert "stablehlo.select_and_scatter" in program.as_text()


def test_a_model_is_trained_as_by_keras_and_other_programs_keep_their_operations(monkeypatch):
    used = {
        name: count_calls(monkeypatch, jax_cpu, name)
        for name in ("pooling_gradient", "depthwise", "product")
    }

    def made():
        keras.utils.set_random_seed(0)
        inputs = keras.Input((12, 12, 3))
        x = keras.layers.Conv2D(8, 1, activation="relu")(inputs)
        x = keras.layers.MaxPooling2D(padding="same")(
            keras.layers.DepthwiseConv2D(3, padding="same")(x)
        )
        x = keras.layers.MaxPooling2D(3, 2)(
            keras.layers.SeparableConv2D(6, 3, activation="relu")(x)
        )
        model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(x)))
        model.compile("adam", "mse")
        return model

    x = RANDOM.normal(size=(24, 12, 12, 3)).astype("float32")
    y = RANDOM.normal(size=(24, 1)).astype("float32")
    ours = made()
    its = made()
    ws.Trainer(ours).fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    before = {name: len(calls) for name, calls in used.items()}
    assert all(before.values())
    its.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    for one, other in zip(ours.get_weights(), its.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)
    assert {name: len(calls) for name, calls in used.items()} == before
    pool = jax.jit(
        jax.grad(lambda x: lax.reduce_window(x, -np.inf, lax.max, (2,), (2,), "VALID").sum())
    )
    assert "stablehlo.select_and_scatter" in pool.lower(np.ones(4, "float32")).as_text()
