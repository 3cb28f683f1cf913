"""The verbs, on whichever engine this process has; and both engines draw one curve."""

import json
import os
import subprocess
import sys

import keras
import numpy as np
import pytest
from small import model

from wholestep import engines
from wholestep.errors import BatchError
from wholestep.state import State

# relu, not tanh: TensorFlow's tanh of 64-bit numbers is right to 1e-8 only.
CURVE = """
import json, keras, numpy as np, sys
keras.config.set_floatx("float64")
import wholestep as ws
rng = np.random.default_rng(0)
x, y = rng.normal(size=(60, 6)), rng.integers(0, 3, 60)
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(9, "relu"), keras.layers.Dense(3)])
model.set_weights([rng.normal(size=w.shape) for w in model.weights])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.SGD(0.0625, momentum=0.5), loss)  # Keras rounds Adam's constants on one engine
history = ws.Trainer(model, seed=3, microbatch_size=int(sys.argv[1])).fit(
    x, y, batch_size=8, epochs=4, verbose=0, sample_weight=rng.random(60))
print(json.dumps([history.history["loss"], [w.tolist() for w in model.get_weights()]]))
"""


def curve(backend, microbatch_size):
    environment = os.environ | {"KERAS_BACKEND": backend, "JAX_ENABLE_X64": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", CURVE, str(microbatch_size)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    losses, weights = json.loads(done.stdout.splitlines()[-1])
    return np.concatenate([losses, *(np.ravel(w) for w in weights)])


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="starts both engines itself; once is enough")
def test_jax_and_tensorflow_draw_one_curve_however_it_is_cut():
    pytest.importorskip("tensorflow")
    reference = curve("jax", 8)
    for backend, size in (("jax", 3), ("tensorflow", 8), ("tensorflow", 3)):
        np.testing.assert_allclose(curve(backend, size), reference, rtol=1e-10, atol=1e-12)


@pytest.fixture
def engine():
    return engines.choose(model().optimizer)


def test_only_known_backends(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "torch")
    with pytest.raises(ValueError, match="must be jax or tensorflow"):
        engines.choose()


def test_place_and_fetch(engine):
    data = {"a": np.arange(3, dtype="int32"), "b": [np.ones((2, 2), "float32")]}
    fetched = engine.fetch(engine.place(data))
    np.testing.assert_array_equal(fetched["a"], data["a"])
    np.testing.assert_array_equal(fetched["b"][0], data["b"][0])
    assert engine.waits == 1


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="TensorFlow keeps 64 bits")
def test_integers_never_wrap_around(engine):
    assert engine.place(np.array([2**31 - 1])).dtype == np.int32
    with pytest.raises(BatchError, match="fit in 32 bits"):
        engine.place(np.array([2**31]))


def test_fold_and_gather(engine):
    data = engine.place(np.arange(12, dtype="float32").reshape(6, 2))
    rows = engine.place(np.array([[5, 0], [1, 1]], np.int32))

    def program(data, rows):
        return engine.fold(lambda total, piece: total + engine.gather(data, piece), data[:2] * 0, rows, 2)

    compiled = engine.compile(program, (data, rows), spends=False)
    np.testing.assert_array_equal(engine.fetch(compiled(data, rows)), [[12, 14], [2, 4]])


def test_repeat_stops_where_it_is_told(engine):
    def state(stopped):
        return State([], [], [], [], {}, engine.place(np.int32(stopped)), [])

    def program(state, num):
        def step(i, state):
            value = keras.ops.cast(i, "float32") + 1.0
            return state._replace(stopped=keras.ops.cast(i == 2, "int32")), keras.ops.reshape(value, (1,))

        return engine.repeat(step, num, state, keras.ops.zeros((5, 1)))

    num = engine.place(np.int32(5))
    compiled = engine.compile(program, (state(0), num), spends=False)
    for stopped, many, expected in ((0, 5, [1, 2, 3, 0, 0]), (0, 2, [1, 2, 0, 0, 0]), (1, 5, [0] * 5)):
        _, reports = compiled(state(stopped), engine.place(np.int32(many)))
        np.testing.assert_array_equal(engine.fetch(reports)[:, 0], expected)


def test_finite(engine):
    tensors = [keras.ops.ones((3,)), keras.ops.ones((2,))]
    assert bool(engine.is_finite(tensors))
    assert bool(engine.is_finite([*tensors, tensors[0][:0]]))
    assert bool(engine.is_finite([]))
    assert not bool(engine.is_finite([*tensors, keras.ops.convert_to_tensor([1.0, np.inf])]))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("repeats", [False, True])
def test_one_number_that_is_not_finite_is_found_wherever_it_stands(engine, dtype, repeats):
    for num in (1, 7, 1000):
        values = np.random.default_rng(0).normal(size=num)
        example = keras.ops.convert_to_tensor(values, dtype)
        program = engine.compile(lambda v: engine.is_finite([v, v[:1]]), (example,), spends=False, repeats=repeats)
        assert bool(program(example))
        for bad in (np.nan, np.inf, -np.inf):
            for place in {0, num // 2, num - 1}:
                spoilt = np.where(np.arange(num) == place, bad, values)
                assert not bool(program(keras.ops.convert_to_tensor(spoilt, dtype))), (num, bad, place)


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="JAX has no sparse gradients")
def test_the_gradient_of_a_table_has_a_shape_that_is_known_when_it_is_compiled(engine):
    import tensorflow as tf

    def program(table, rows):
        (grad,), _ = engine.differentiate(lambda params: (tf.reduce_sum(tf.gather(params[0], rows) ** 2), ()), [table])
        return grad

    compiled = engine.compile(program, (tf.ones((20, 3)), tf.constant([1, 1, 4])), spends=False)
    (summed,) = [op for op in compiled.graph.get_operations() if op.type == "UnsortedSegmentSum"]
    assert summed.inputs[2].op.type == "Const"  # or XLA compiles anew for every value of the table
    np.testing.assert_array_equal(compiled(tf.ones((20, 3)), tf.constant([1, 1, 4]))[:5, 0], [0, 4, 0, 0, 2])
