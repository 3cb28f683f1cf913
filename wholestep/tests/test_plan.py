"""The plan of an update changes no result, and nothing is compiled or waited for twice."""

import contextlib

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shares import on
from small import ROWS, X, Y, count_calls, model, values

import wholestep as ws
from wholestep import engines

ENGINE = keras.backend.backend()


def counted(made, trainer=None, **how):
    trainer = trainer or ws.Trainer(made)
    trainer.fit(X, Y, **{"batch_size": 5, "verbose": 0} | how)
    return trainer


def test_one_compilation_serves_every_epoch_and_ones_own_loop(monkeypatch):
    made = model()
    compilations = count_calls(monkeypatch, type(engines.choose().programs), "compile")
    trainer = counted(made, epochs=3)
    assert len(compilations) == 1
    list(trainer.steps(ws.Batches((X, Y), 5)))
    assert len(compilations) == 1


def test_a_short_batch_is_padded_into_the_same_program(monkeypatch):
    compilations = count_calls(monkeypatch, type(engines.choose().programs), "compile")
    counted(model(), batch_size=6, epochs=3)
    # the probe, which looks whether rows may be padded, and the program
    assert len(compilations) == 2


@pytest.mark.slow
def test_a_short_batch_of_a_coupled_model_keeps_its_own_shape():
    made = model(keras.layers.BatchNormalization())
    trainer = counted(made, batch_size=6)
    assert sorted(p.cut.rows for p in trainer.executor.planner.programs.values()) == [2, 6]


def test_the_host_waits_once_a_dispatch(monkeypatch):
    trainer = counted(model(), batch_size=1, epochs=1)
    waits = count_calls(monkeypatch, type(trainer.executor.engine.devices), "fetch")
    counted(None, trainer, batch_size=1, epochs=4)
    dispatches = len(waits) / 4
    assert dispatches <= 6  # 1 + 4 + 15 updates and the like; 20 would be one wait an update


@pytest.mark.filterwarnings("ignore:memory_limit has no effect", "ignore:Even one row at a time")
def test_a_memory_limit_cuts_the_batch_where_the_engine_can_tell():
    made = model()
    whole = model()
    trainer = ws.Trainer(made, memory_limit=1)
    trainer.fit(X, Y, batch_size=4, verbose=0)
    ws.Trainer(whole).fit(X, Y, batch_size=4, verbose=0)
    cut = next(iter(trainer.executor.planner.programs.values())).cut
    assert cut.num_microbatches == {"jax": 4, "tensorflow": 1}[ENGINE]
    for a, b in zip(values(made), values(whole), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(("free", "num_parts"), [(1 << 30, 1), (4, 4)])
@pytest.mark.skipif(ENGINE != "jax", reason="only XLA tells what a program needs")
@pytest.mark.filterwarnings("ignore:Even one row at a time")
def test_a_program_may_use_three_quarters_of_the_memory_that_is_free(monkeypatch, free, num_parts):
    monkeypatch.setattr(type(engines.choose().devices), "memory", lambda devices: free)
    trainer = ws.Trainer(model())
    trainer.fit(X, Y, batch_size=4, verbose=0)
    assert trainer.executor.planner.limit == free * 3 // 4
    assert next(iter(trainer.executor.planner.programs.values())).cut.num_microbatches == num_parts


@pytest.mark.skipif(ENGINE != "jax", reason="TensorFlow's own error names the tensor")
def test_a_device_without_enough_memory_is_an_error_that_says_what_to_try():
    class Large(keras.layers.Layer):
        def call(self, inputs):
            many = keras.ops.stop_gradient(inputs[:, :1, None]) * keras.ops.ones((10**7, 10**6))
            return inputs + keras.ops.sum(keras.ops.sort(many, axis=0))

    trainer = ws.Trainer(model(Large()), microbatch_size=4)
    with pytest.raises(RuntimeError, match="Out of memory") as caught:
        trainer.fit(X, Y, batch_size=4, verbose=0)
    (note,) = caught.value.__notes__
    assert "Try: a smaller microbatch_size" in note


@pytest.mark.skipif(ENGINE != "jax", reason="only XLA tells what a program needs")
def test_a_row_that_does_not_fit_alone_is_said_so():
    trainer = ws.Trainer(model(), memory_limit=1)
    with pytest.warns(
        UserWarning,
        match="Even one row at a time needs .* and may use 1: the update runs nevertheless",
    ):
        trainer.fit(X, Y, batch_size=4, verbose=0)
    explained = trainer.explain()
    assert "in 4 microbatches (4 x 1 rows)" in explained
    assert "of 0 it may use" in explained
    assert "The data stay on the device (0.0 MiB)." in explained  # another question


@on("jax")
@pytest.mark.parametrize(
    ("data", "where"),
    [
        (lambda: (X, Y), "The data stay on the device"),
        (
            lambda: list(zip(X, Y, strict=True)),
            "Batches are loaded as they are needed (rows come one by one).",
        ),
        (lambda: iter([(X, Y)]), "Batches are loaded as they are needed (they come ready-made)."),
    ],
)
def test_where_the_data_are_is_explained(data, where):
    trainer = ws.Trainer(model())
    trainer.fit(ws.Batches(data()), verbose=0)
    assert where in trainer.explain()


def of_lengths(numbers):
    return [
        (np.ones((2, n, 3), "float32"), np.ones((2, 1), "float32"))
        for n in numbers
        for _ in range(3)
    ]


def of_any_length():
    layers = keras.Input((None, 3)), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)
    made = keras.Sequential(layers)
    made.compile("sgd", "mse")
    return made


def num_stacked(trainer):
    return [program.num_stacked for program in trainer.executor.planner.programs.values()]


@pytest.mark.skipif(
    ENGINE != "tensorflow", reason="on JAX every update is a loop, and XLA compiles it"
)
@pytest.mark.slow
def test_the_first_kinds_of_loaded_batches_alone_are_looped():
    trainer = ws.Trainer(of_any_length())
    trainer.fit(iter(of_lengths([5, 6, 7, 8, 9, 5])), verbose=0)
    assert num_stacked(trainer) == [16, 16, 16, 16, 1]


@pytest.mark.skipif(
    ENGINE != "tensorflow", reason="on JAX every update is a loop, and XLA compiles it"
)
@pytest.mark.slow
def test_a_run_that_goes_on_loops_the_same_kinds_of_batches():
    first = ws.Trainer(of_any_length())
    second = ws.Trainer(of_any_length())
    first.fit(iter(of_lengths([5, 6, 7, 8, 9])), verbose=0)
    second.run.restore(first.run.snapshot())
    second.fit(iter(of_lengths([9, 8])), verbose=0)
    assert num_stacked(second) == [1, 16]


@pytest.mark.skipif(
    ENGINE != "tensorflow", reason="on JAX every update is a loop, and XLA compiles it"
)
def test_batches_in_hand_or_of_many_shapes_are_compiled_alone():
    trainer = ws.Trainer(of_any_length())
    trainer.update(of_lengths([5])[0])
    rows = [(np.ones((n, 3), "float32"), 1.0) for n in (5, 6, 7, 8)]
    trainer.fit(ws.Batches(rows, tokens=16, boundaries=[6, 8], length=[5, 6, 7, 8]), verbose=0)
    assert set(num_stacked(trainer)) == {1}


class Rows:
    """Rows that come one by one."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


class Squares(ws.Objective):
    """The mean square of all outputs of a row, of any rank."""

    def __call__(self, model, batch, training):
        outputs = keras.ops.reshape(model(batch, training=training), (batch.shape[0], -1))
        return ws.Mean(keras.ops.mean(outputs**2, axis=-1))


@pytest.mark.own
@pytest.mark.parametrize("names", [("stay", "come"), ("come", "stay")])
@pytest.mark.slow
def test_data_that_stay_and_rows_of_the_same_shape_have_programs_of_their_own(names):
    """All of the data that stay have the shape of one row of the data that come."""
    rng = np.random.default_rng(0)
    stay = rng.normal(size=(ROWS, 6)).astype("float32")
    come = rng.normal(size=(8, ROWS, 6)).astype("float32")
    data = {
        "stay": ws.Batches(stay, 4, shuffle=False),
        "come": ws.Batches(Rows(come), 4, shuffle=False),
    }

    class PerRow(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(3, kernel_initializer="ones")
            self.dropout = keras.layers.Dropout(0.5, seed=1)

        def call(self, x, training=False):
            return self.dropout(self.dense(x), training=training)

    def found(is_one):
        model = PerRow()
        found = []
        model(stay)
        trainers = [
            ws.Trainer(model, Squares(), optimizer=keras.optimizers.SGD(0.01)) for _ in names
        ]
        for name, trainer in zip(names, trainers[:1] * 2 if is_one else trainers, strict=True):
            found += trainer.fit(data[name], verbose=0).history["loss"]
            found += [
                trainer.evaluate(data[name], verbose=0),
                trainer.predict(data[name], verbose=0).sum(),
            ]
        return found

    assert found(is_one=True) == found(is_one=False)


def test_arrays_that_are_too_large_do_not_stay(monkeypatch):
    monkeypatch.setattr("wholestep.plan._host_bytes", lambda: 64)
    trainer = ws.Trainer(model())
    with (
        pytest.warns(UserWarning, match="not cut to fit|one row")
        if ENGINE == "jax"
        else contextlib.nullcontext()
    ):
        trainer.fit(X, Y, batch_size=2, verbose=0)
    assert "arrays of 0 MiB may not stay" in trainer.explain()


@pytest.mark.skipif(ENGINE == "jax", reason="there the limit has an effect")
def test_a_memory_limit_without_effect_is_said_so():
    with pytest.warns(UserWarning, match="memory_limit has no effect"):
        ws.Trainer(model(), memory_limit=1).fit(X, Y, batch_size=16, verbose=0)


@pytest.mark.skipif(ENGINE != "jax", reason="only XLA tells what a program needs")
def test_a_memory_limit_never_cuts_a_coupled_model():
    trainer = ws.Trainer(model(keras.layers.BatchNormalization()), memory_limit=1)
    with pytest.warns(
        UserWarning, match="not cut to fit in 1 bytes: the rows of a batch see each other"
    ):
        trainer.fit(X, Y, batch_size=ROWS, verbose=0)
    (program,) = trainer.executor.planner.programs.values()
    assert program.cut.num_microbatches == 1


@pytest.mark.skipif(ENGINE != "jax", reason="only XLA tells what a program needs")
def test_the_peak_falls_with_the_microbatch():
    keras.utils.set_random_seed(1)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2048, 64))
    y = rng.normal(size=(2048, 1))

    def memory(size):
        made = keras.Sequential(
            [
                keras.Input((64,)),
                *(keras.layers.Dense(256, "relu") for _ in range(4)),
                keras.layers.Dense(1),
            ]
        )
        made.compile("sgd", "mse")
        trainer = ws.Trainer(made, microbatch_size=size)
        trainer.fit(x, y, batch_size=2048, verbose=0)
        return next(iter(trainer.executor.planner.programs.values())).memory

    assert memory(256) < 0.5 * memory("auto")


@on("jax")
@settings(max_examples=3)
@given(
    st.integers(1, 20),
    st.integers(1, 20),
    st.lists(st.floats(0.1, 2.0), min_size=ROWS, max_size=ROWS),
)
@pytest.mark.slow
def test_random_cuts_and_weights_change_nothing(batch_size, microbatch_size, weight):
    weight = np.asarray(weight, "float32")
    made = []
    for size in ("auto", microbatch_size):
        made.append(model(optimizer=keras.optimizers.SGD(0.1)))
        how = {"batch_size": batch_size, "sample_weight": weight, "verbose": 0}
        ws.Trainer(made[-1], microbatch_size=size).fit(X, Y, **how)
    for a, b in zip(*map(values, made), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6)


@pytest.mark.skipif(ENGINE != "jax", reason="only JAX tells what it compiles")
def test_the_first_call_finds_the_program_that_was_compiled():
    import jax

    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **said: (
            compiled.append(said.get("fun_name")) if "backend_compile" in event else None
        )
    )
    trainer = counted(model(), epochs=2)
    assert compiled.count("jit(program)") == 1
    list(trainer.steps(ws.Batches((X, Y), 5)))
    assert compiled.count("jit(program)") == 1
