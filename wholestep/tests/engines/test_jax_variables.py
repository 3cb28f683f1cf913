"""The variables of a model on JAX, as they are created."""

import functools
import threading

import keras
import numpy as np
import pytest

if keras.backend.backend() != "jax":
    pytest.skip("of the JAX engine", allow_module_level=True)

import jax

from wholestep import engines
from wholestep.keras_private import backend_numpy


def test_the_zeros_of_an_optimizer_compile_no_program():
    """JAX would compile one for each shape, a tenth of the time to the first update."""
    model = keras.Sequential([keras.Input((71,)), keras.layers.Dense(37, dtype="bfloat16")])
    model.compile(keras.optimizers.AdamW(0.1))
    compiled = []

    def note(event, seconds, **how):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(note)  # JAX 0.8 cannot end it
    engines.build_optimizer(model.optimizer, model.trainable_variables)
    num_compiled = len(compiled)
    moments = [v for v in model.optimizer.variables if v.shape == (71, 37)]
    assert len(moments) == 2
    assert all(not np.any(v.numpy()) for v in moments)
    assert [v.value.dtype for v in moments] == [v.dtype for v in moments]
    assert num_compiled == 0
    jax.numpy.zeros((71, 38))
    assert compiled, "the event has another name"


def test_two_threads_build_one_after_the_other():
    """Keras' `zeros` is replaced for all threads, and must be Keras' afterwards."""
    before = backend_numpy.zeros
    inside, go_on = threading.Event(), threading.Event()
    seen = []

    class Slow:
        def build(self, params):
            seen.append(backend_numpy.zeros)
            inside.set()
            assert go_on.wait(60)

    build = functools.partial(engines.build_optimizer, Slow(), [])
    threads = [threading.Thread(target=build) for _ in range(2)]
    for thread in threads:
        thread.start()
        assert inside.wait(60)
    assert len(seen) == 1
    go_on.set()
    for thread in threads:
        thread.join()
    assert len(seen) == 2
    assert before not in seen
    assert backend_numpy.zeros is before


def test_under_a_distribution_keras_makes_the_zeros():
    """A copy from the host would first be whole on one device."""
    before = backend_numpy.zeros
    seen = []

    class Sharded:
        def build(self, params):
            seen.append(backend_numpy.zeros)

    keras.distribution.set_distribution(keras.distribution.DataParallel())
    try:
        engines.build_optimizer(Sharded(), [])
    finally:
        keras.distribution.set_distribution(None)
    assert seen == [before]
