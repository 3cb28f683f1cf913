"""The contract of every verb, on whichever engine this process has; and both engines draw one
curve.
"""

import contextlib
import gc
import inspect
import json
import math
import re
import subprocess
import sys
import weakref
from functools import partial

import keras
import numpy as np
import pytest
from exact import spread_over
from keras import ops
from scripts import lean
from small import model

from wholestep import engines, tree
from wholestep.embeddings.rows import for_rows
from wholestep.engines.protocol import PARTS
from wholestep.errors import BatchError, SpecificationError
from wholestep.slices import Slices
from wholestep.state import EmbeddingTable, State, TableRows, Variables

JAX = keras.backend.backend() == "jax"
FACT = re.compile(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", re.M)


def contracts_of(part):
    """Return the lines of contract of a part: of its facts, then of its verbs."""
    verbs = {name: verb.__doc__ for name, verb in vars(part).items() if not name.startswith("_")}
    facts = {name: " ".join(fact.split()) for name, fact in FACT.findall(inspect.getdoc(part))}
    return facts | verbs


VERBS = {name: line for part in PARTS for name, line in contracts_of(part).items()}

# relu, not tanh: TensorFlow's tanh of 64-bit numbers is right to 1e-8 only.
CURVE = """
import json, keras, numpy as np, sys
keras.config.set_floatx("float64")
import wholestep as ws
rng = np.random.default_rng(0)
x, y = rng.normal(size=(60, 6)), rng.integers(0, 3, 60)
start, weight = [rng.normal(size=shape) for shape in ((6, 9), (9,), (9, 3), (3,))], rng.random(60)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
for size in sys.argv[1:]:
    noise = keras.layers.AlphaDropout(0.1, seed=4), keras.layers.Dropout(0.25, seed=5)  # of normal numbers: to 1e-9
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(9, "relu"), *noise, keras.layers.Dense(3)])
    for variable, value in zip(model.trainable_weights, start, strict=True):
        variable.assign(value)
    model.compile(keras.optimizers.SGD(0.0625, momentum=0.5), loss)  # Keras rounds Adam's constants on one engine
    history = ws.Trainer(model, seed=3, microbatch_size=int(size)).fit(
        x, y, batch_size=8, epochs=4, verbose=0, sample_weight=weight)
    found = [np.asarray(w.value).tolist() for w in model.trainable_weights]
    print(json.dumps([history.history["loss"], found]))
"""


def curves(backend, *microbatch_sizes):
    """Return what a run of each of these sizes says and leaves behind."""
    environment = lean(KERAS_BACKEND=backend, JAX_ENABLE_X64="1", TF_CPP_MIN_LOG_LEVEL="3")
    command = [sys.executable, "-c", CURVE, *map(str, microbatch_sizes)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=True
    )
    found = [json.loads(line) for line in done.stdout.splitlines()[-len(microbatch_sizes) :]]
    return [np.concatenate([losses, *(np.ravel(w) for w in weights)]) for losses, weights in found]


@pytest.mark.skipif(
    keras.backend.backend() != "jax", reason="starts both engines itself; once is enough"
)
@pytest.mark.large
def test_jax_and_tensorflow_draw_one_curve_however_it_is_cut():
    pytest.importorskip("tensorflow")
    reference, *others = [
        curve for backend in ("jax", "tensorflow") for curve in curves(backend, 8, 3)
    ]
    assert len(others) == 3
    for other in others:
        np.testing.assert_allclose(other, reference, rtol=1e-10, atol=1e-12)


@pytest.fixture
def engine():
    return engines.choose(model().optimizer)


def test_only_known_backends(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "torch")
    with pytest.raises(ValueError, match="must be jax or tensorflow"):
        engines.choose()


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="TensorFlow keeps 64 bits")
def test_integers_never_wrap_around(engine):
    assert engine.devices.place(np.array([2**31 - 1])).dtype == np.int32
    with pytest.raises(BatchError, match="fit in 32 bits"):
        engine.devices.place(np.array([2**31]))


@pytest.mark.parametrize("shape", [(3,), (64, 5), (1 << 22, 2)])
def test_resident_data_do_not_change_with_the_user_s_array(engine, shape):
    kinds = "float32", "int32", "int64", "float64", "bool"
    for leaf in [
        tree.aligned(shape, np.dtype("float32")),
        *(np.empty(shape, kind) for kind in kinds),
    ]:
        leaf[...] = 1
        placed, wait = engine.devices.resident(leaf)
        wait()
        leaf[...] = 0
        np.testing.assert_array_equal(engine.devices.fetch(placed), np.ones(shape))


@pytest.mark.parametrize("dtype", ["float32", "int64", "uint8", "bool", "float16"])
def test_staged_data_are_the_arrays_however_these_lie_in_memory(engine, dtype):
    whole = np.arange(48).reshape(8, 6).astype(dtype)
    read_only = whole.copy()
    read_only.flags.writeable = False
    for leaf in (
        whole,
        whole[1:],
        whole[:, ::2],
        whole.T,
        read_only,
        whole[:0],
        np.array(3, dtype),
    ):
        staged = engine.devices.fetch(engine.devices.stage(leaf))
        np.testing.assert_array_equal(staged, leaf)
        assert staged.shape == leaf.shape


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("repeats", [False, True])
def test_one_number_that_is_not_finite_is_found_wherever_it_stands(engine, dtype, repeats):
    for num in (1, 7, 1000):
        values = np.random.default_rng(0).normal(size=num)
        example = keras.ops.convert_to_tensor(values, dtype)
        options = {"spends": False, "repeats": repeats}
        program = engine.programs.compile(
            lambda v: engine.ops.is_finite([v, v[:1]]), (example,), **options
        ).call
        assert bool(program(example))
        for bad in (np.nan, np.inf, -np.inf):
            for place in {0, num // 2, num - 1}:
                spoilt = np.where(np.arange(num) == place, bad, values)
                assert not bool(program(keras.ops.convert_to_tensor(spoilt, dtype))), (
                    num,
                    bad,
                    place,
                )


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="JAX has no sparse gradients")
def test_the_gradient_of_a_table_has_a_shape_that_is_known_when_it_is_compiled(engine):
    import tensorflow as tf

    def program(table, rows):
        (grad,), _ = engine.ops.differentiate(
            lambda params: (tf.reduce_sum(tf.gather(params[0], rows) ** 2), ()), [table]
        )
        return grad

    compiled = engine.programs.compile(
        program, (tf.ones((20, 3)), tf.constant([1, 1, 4])), spends=False
    ).call
    (summed,) = [
        op for op in compiled.traced.graph.get_operations() if op.type == "UnsortedSegmentSum"
    ]
    assert summed.inputs[2].op.type == "Const"  # or XLA compiles anew for every value of the table
    np.testing.assert_array_equal(
        compiled(tf.ones((20, 3)), tf.constant([1, 1, 4]))[:5, 0], [0, 4, 0, 0, 2]
    )


# ---- the contract of each verb ----

ROWS = np.array([5, 0, 2, 7, 1, 1, 4, 6], "int32")
DATA = np.arange(24, dtype="float32").reshape(8, 3)


class Case:
    """A small model, its engine for `replicas`, and its state. Everything is a whole
    number.
    """

    def __init__(self, replicas):
        self.replicas = replicas
        self.model = self.build(None if replicas == 1 else replicas)
        self.engine = self.choose()
        metric = keras.metrics.Sum()
        own = (
            self.model.trainable_variables,
            self.model.optimizer.variables,
            self.model.non_trainable_variables,
        )
        self.variables = Variables(*map(list, own), metric.variables)
        self.data, self.rows = self.engine.devices.place((DATA, ROWS))

    def build(self, replicas):
        with spread_over(replicas):
            layers = keras.layers.Dense(2), keras.layers.BatchNormalization()
            made = keras.Sequential([keras.Input((3,)), *layers])
            made.optimizer = keras.optimizers.SGD(0.5, momentum=0.5)
            made.optimizer.build(made.trainable_variables)
        for number, variable in enumerate(made.variables):
            variable.assign(np.arange(np.prod(variable.shape)).reshape(variable.shape) + number)
        return made

    def choose(self, **options):
        optimizer = self.model.optimizer
        return engines.choose(
            optimizer, self.model, None if self.replicas == 1 else self.replicas, **options
        )

    def compile(self, function, examples, **options):
        return self.engine.programs.compile(function, examples, **options).call

    def read(self):
        params, slots, buffers = self.engine.variables.read(self.variables)
        stopped, metrics = self.engine.devices.place((np.int32(0), [np.zeros((), "float32")]))
        return State(params, slots, buffers, metrics, (), stopped, ())

    def grads(self):
        return [np.full(v.shape, 2.0 * i, "float32") for i, v in enumerate(self.variables.params)]

    def run(self, function, *arguments):
        program = self.compile(lambda *arguments: function(*arguments), arguments, spends=False)
        return self.engine.devices.fetch(program(*arguments))

    def update(self, function, *given):
        """Carry out (state, *given) -> state, let the variables hold the result, and return what is
        kept of it.
        """
        arguments = (
            self.engine.variables.between_programs(self.read()),
            *self.engine.devices.place(given),
        )
        program = self.engine.variables.load_and_store(dispatched(function))
        state, _ = self.compile(program, arguments)(*arguments)
        self.engine.variables.write(self.variables, state)
        return state

    def each(self, function, data, *given):
        """Return what every replica returns: (replicas, ...)."""

        def work(data, carried, given):
            found = function(data, *given)
            number = self.engine.replicas.part(ops.arange(self.replicas))[1]
            own = ops.one_hot(number, self.replicas, dtype=found.dtype)
            return ops.reshape(own, (-1, *[1] * len(found.shape))) * found, carried, ()

        return self.run(lambda *arguments: self.total(work, *arguments)[0], data, given)

    def total(self, function, data, given, *, carried=None, split=None, syncs=False):
        """Return the totals of a function, which runs on each replica if they are split (None: if
        they can be).
        """
        carried = ops.zeros(()) if carried is None else carried
        if self.engine.replicas.can_split if split is None else split:
            return self.engine.replicas.total(function, data, carried, given, syncs=syncs)
        return function(data, carried, given)

    def use_table(self):
        """Have a model with an embedding table of 9 rows instead."""
        table = keras.layers.Embedding(9, 2, embeddings_initializer="ones")
        self.model = keras.Sequential(
            [keras.Input((3,), dtype="int32"), table, keras.layers.LayerNormalization(scale=False)]
        )
        optimizer = self.model.optimizer = keras.optimizers.Adagrad(
            0.5, initial_accumulator_value=7.0, epsilon=0.0
        )
        optimizer.build(self.model.trainable_variables)
        metrics = keras.metrics.Sum().variables
        self.variables = Variables(self.model.trainable_variables, optimizer.variables, [], metrics)
        self.engine = self.choose()

    def slots_of(self, num_rows):
        return tuple(i for i, v in enumerate(self.variables.slots) if v.shape[:1] == (num_rows,))

    def held(self):
        """Return what the Keras variables hold: params, slots, buffers and metrics."""
        v = self.variables
        return [
            [keras.ops.convert_to_numpy(one) for one in group]
            for group in (v.params, v.slots, v.buffers, v.metrics)
        ]


def grown(state):
    """Return a state in which every number is larger by 1."""
    groups = [[v + ops.ones((), v.dtype) for v in group] for group in state[:4]]
    return state._replace(params=groups[0], slots=groups[1], buffers=groups[2], metrics=groups[3])


def dispatched(function):
    """Return the function (state, ...) -> state as one that is sent to the device: beside the state
    a report.
    """
    return lambda *arguments: (function(*arguments), ops.ones((1,)))


def equal(one, two):
    keras.tree.assert_same_structure(one, two)
    for a, b in zip(keras.tree.flatten(one), keras.tree.flatten(two), strict=True):
        np.testing.assert_array_equal(a, b)


def seen_buffers(state):
    return state, state.buffers


def is_one_of(variable, variables):
    return any(variable is v for v in variables)


# ---- variables ----


def holds_shows_changes(case):
    variable = case.variables.params[0]
    before = variable._value
    variable.assign(variable + 1)
    assert (variable._value is not before) == case.engine.variables.shows_changes


def holds_read(case):
    # they may share an array, which cannot be spent twice
    case.variables.params[2].assign(case.variables.params[1])
    state = case.read()
    held = case.held()
    for values, known in zip(state[:3], held[:3], strict=True):
        equal(case.engine.devices.fetch(values), known if values else [])
    assert len(state.buffers) == len(held[2])
    case.variables.buffers[0].assign([9, 9])  # which the state does not see
    after = case.engine.devices.fetch(case.compile(dispatched(grown), (state,))(state)[0])
    for values, known in zip(after[:3], held[:3], strict=True):
        equal(values, [value + 1 for value in known] if values else [])


def holds_values(case):
    case.variables.metrics[0].assign(4)
    state = case.read()._replace(metrics=case.engine.variables.values(case.variables.metrics))
    case.variables.metrics[0].assign(9)  # which the state does not see
    after = case.engine.devices.fetch(case.compile(dispatched(grown), (state,))(state)[0])
    equal(after.metrics, [np.full((), 5)])


def holds_captured(case):
    other = keras.Variable(np.zeros((3, 2)))
    state = case.read()
    program = case.compile(dispatched(grown), (state,))
    for _ in range(2):
        # they may share an array, which is spent with the state
        other.assign(case.variables.params[0])
        kernel = case.held()[0][0]
        values = case.engine.variables.captured([other], state)
        assert len(values) == case.engine.traces.freezes_reads
        state, _ = program(state)
        case.engine.variables.write(case.variables, state)
        equal(case.engine.devices.fetch(values), [kernel] * len(values))
    other.assign(kernel + 5)
    equal(
        case.engine.devices.fetch(case.engine.variables.captured([other], state)),
        [kernel + 5] * len(values),
    )


@pytest.mark.slow
def test_nothing_is_kept_of_a_variable_that_is_gone():
    case = Case(2)
    captured = keras.Variable(np.ones(3))
    captured_of = [
        weakref.ref(value) for value in case.engine.variables.captured([captured], case.read())
    ]
    del captured
    gc.collect()
    assert [kept() for kept in captured_of] == [None] * JAX  # TensorFlow reads them where they are


def holds_params(case):
    state = case.read()
    before = case.held()[0]

    def program(state, grads, rows):
        params = case.engine.variables.params(state, {0})
        first = [case.engine.ops.gather(params[0], rows), *params[1:]]
        state = case.engine.optimizer.apply(state, state, grads, ops.ones((), "bool"), {})
        return state, (first, case.engine.variables.params(state))

    arguments = state, *case.engine.devices.place((case.grads(), np.array([2, 0], "int32")))
    first, after = case.engine.devices.fetch(case.compile(program, arguments)(*arguments)[1])
    equal(first, [before[0][[2, 0]], *before[1:]])
    equal(after, [p - 0.5 * g for p, g in zip(before, case.grads(), strict=True)])


def holds_replica_params(case):
    state = case.read()
    kernels = [case.held()[0][0]] * case.replicas
    params = case.engine.variables.params(state)
    if case.engine.replicas.is_split:
        kernels = [kernel + i for i, kernel in enumerate(kernels)]
        for own, kernel in zip(case.variables.params[0].value.values, kernels, strict=True):
            own.assign(kernel)
    found = case.each(
        lambda data, *params: case.engine.variables.replica_params(list(params))[0],
        case.data,
        *params,
    )
    equal(found, np.stack(kernels))
    equal(
        case.run(lambda *params: case.engine.variables.replica_params(list(params))[0], *params),
        kernels[0],
    )


def holds_are_current(case):
    state = case.update(grown)
    assert case.engine.variables.are_current(case.variables, state)
    for variable in (case.variables.params[0], case.variables.slots[-1], case.variables.buffers[0]):
        variable.assign(variable + 1)
        held = case.held()[:3]
        if not case.engine.variables.are_current(case.variables, state):
            params, slots, buffers = case.engine.variables.read(case.variables)
            state = case.engine.variables.between_programs(
                state._replace(params=params, slots=slots, buffers=buffers)
            )
        seen = case.compile(
            case.engine.variables.load_and_store(seen_buffers), (state,), spends=False
        )(state)[1]
        equal(case.engine.devices.fetch(seen), held[2])
        equal(case.engine.devices.fetch(case.engine.variables.params(state)), held[0])
        case.engine.variables.write(case.variables, state)
        assert case.engine.variables.are_current(case.variables, state)


def holds_changed_outside(case):
    case.update(grown)
    known = [*case.variables.params, *case.variables.buffers]
    known[0].assign(known[0] + 1)
    known[-1].assign(known[-1] + 1)
    changed = case.engine.variables.changed_outside(known)
    assert is_one_of(known[0], changed)
    assert is_one_of(known[-1], changed)


def holds_between_programs(case):
    state = case.read()
    before = case.held()
    rest = case.engine.variables.between_programs(state)
    equal(case.engine.devices.fetch(rest.metrics), [np.zeros(())])
    for values, known in zip(rest[:3], before[:3], strict=True):
        equal(case.engine.devices.fetch(values), known if values else [])


def holds_load_and_store(case):
    before = case.held()
    for times in (1, 2):
        state = case.update(grown)
        equal(case.held()[2], [value + times for value in before[2]])
        equal(case.engine.devices.fetch(state.metrics), [np.ones(())])
        assert len(state.buffers) == len(
            case.engine.variables.between_programs(case.read()).buffers
        )
    case.variables.buffers[0].assign([9, 9])  # which a program reads where it stays
    state = case.read()
    seen = case.compile(
        case.engine.variables.load_and_store(seen_buffers),
        (case.engine.variables.between_programs(state),),
        spends=False,
    )
    equal(
        case.engine.devices.fetch(seen(case.engine.variables.between_programs(state))[1]),
        case.held()[2],
    )
    before = case.held()
    state = case.read()
    moved = Variables([], [], case.variables.buffers, case.variables.metrics)
    engine = case.engine.evaluation or case.engine
    program = engine.variables.load_and_store(dispatched(grown), moved)
    state = state._replace(params=[], slots=[])
    state, _ = engine.programs.compile(program, (state,), spends=False).call(state)
    engine.variables.write(moved, state)
    equal(case.held(), [*before[:2], [value + 1 for value in before[2]], [np.ones(())]])


def holds_write(case):
    before = case.held()
    kept = case.read()
    case.update(grown)
    for values, known, parts in zip(case.held()[:3], before[:3], kept[:3], strict=True):
        equal(values, [value + 1 if parts else value for value in known])
    equal(case.held()[3], [np.ones(())])


def holds_assign(case):
    before, (metric,) = case.held(), case.variables.metrics
    values = case.engine.devices.place(
        [np.full((), 5, "float32"), *[value + 3 for value in before[2]]]
    )
    case.engine.variables.assign([metric, *case.variables.buffers], values)
    equal(case.held(), [*before[:2], [value + 3 for value in before[2]], [np.full((), 5)]])


def holds_sharded(case):
    assert case.engine.variables.sharded(case.variables.params) == []
    if JAX and case.replicas > 1:
        mesh = keras.distribution.DeviceMesh(
            (2, 2), ("batch", "model"), keras.distribution.list_devices()[:4]
        )
        places = keras.distribution.LayoutMap(mesh)
        places[".*dense.*/kernel"] = (None, "model")
        keras.distribution.set_distribution(
            keras.distribution.ModelParallel(layout_map=places, batch_dim_name="batch")
        )
        try:
            made = case.build(None)
            engine = engines.choose(made.optimizer, made)
            assert engine.variables.sharded(made.trainable_variables) == [
                f"{made.layers[0].kernel.path} (None, 'model')"
            ]
            assert not engine.replicas.can_split
        finally:
            keras.distribution.set_distribution(None)


# ---- optimizer ----


def holds_keeps_assigned(case):
    before = case.held()[0]

    def assign(state, grads, ok, value):
        return case.engine.optimizer.apply(state, state, grads, ok, {0: value})

    case.update(assign, case.grads(), np.bool_(True), np.full((3, 2), 7, "float32"))
    equal(
        case.held()[0][0], np.full((3, 2), 7) if case.engine.optimizer.keeps_assigned else before[0]
    )


def holds_clipped(case):
    case.read()
    grads = case.grads()
    case.model.optimizer.clipvalue = 3.0
    placed = case.engine.devices.place(grads)
    found = case.run(case.engine.optimizer.clipped, placed)
    equal(found, [np.minimum(grad, 3.0) for grad in grads])
    if keras.backend.backend() == "tensorflow":  # of each lookup alone, as Keras clips it
        rows = np.array([[2.0, 1.0], [2.0, 2.0]], "float32"), np.array([1, 1], "int32")
        by_lookups = Slices((rows[0],), (rows[1],))
        found = case.run(
            lambda *rest: case.engine.optimizer.clipped([by_lookups, *rest]), *placed[1:]
        )
        equal(found[0], np.array([[0, 0], [4.0, 3.0], [0, 0]]))


def holds_apply(case):
    _apply_to_whole_tables(case)
    _apply_to_rows(case)


def _apply_to_whole_tables(case):
    keras.utils.clear_session()
    twin = case.build(None)

    def update(state, grads, ok):
        new = state._replace(
            buffers=[b + 1 for b in state.buffers], metrics=[m + 1 for m in state.metrics]
        )
        return case.engine.optimizer.apply(state, new, grads, ok, {})

    for ok in (False, True, True):
        before = case.held()
        case.update(update, case.grads(), np.bool_(ok))
        if ok:
            twin.optimizer.apply(
                [ops.convert_to_tensor(g) for g in case.grads()], twin.trainable_variables
            )
        params, slots, buffers, metrics = case.held()
        equal(params, [ops.convert_to_numpy(v) for v in twin.trainable_variables])
        equal(slots, [ops.convert_to_numpy(v) for v in twin.optimizer.variables])
        equal((buffers, metrics), ([b + ok for b in before[2]], [np.full((), ok)]))


def _apply_to_rows(case):
    if case.engine.replicas.is_split:  # then all rows of a table are updated, see `embeddings.find`
        return
    rows = np.array([1, 4, 1], "int32")
    row_slots = np.array([0, 1, 0], "int32")
    # 7 + 3 ** 2 = 16: nothing is rounded, in whatever instructions a root and a division are
    # compiled
    of_rows = np.array([[3, -3], [-3, 3], [0, 0]], "float32")
    of_others = np.full(2, 3, "float32")
    whole = np.zeros((9, 2), "float32")
    whole[[1, 4]] = of_rows[:2]  # the gradients of row 1 have been summed in the first place
    found = {}
    for by_rows in (False, True):
        case.use_table()
        table = EmbeddingTable(case.model.layers[0], 0, case.slots_of(9))
        twin = for_rows(case.model.optimizer, [table], [3], case.variables)

        def update(state, grads, ok, rows, row_slots, table=table, twin=twin, by_rows=by_rows):
            new = state._replace(metrics=[m + 1 for m in state.metrics])
            if not by_rows:
                return case.engine.optimizer.apply(state, new, grads, ok, {})
            return case.engine.optimizer.apply(
                state, new, grads, ok, {}, [TableRows(table, rows, row_slots)], twin
            )

        found[by_rows] = [case.held()]
        for ok in (False, True):
            case.update(
                update, [of_rows if by_rows else whole, of_others], np.bool_(ok), rows, row_slots
            )
            found[by_rows].append(case.held())
    equal(found[True], found[False])
    before, skipped, once = (params[0] for params, *_ in found[True])
    equal(skipped, before)
    assert np.flatnonzero(np.any(once != skipped, axis=1)).tolist() == [1, 4]


# ---- steps ----


def custom(case, function, *given):
    """Carry out (state, *given) -> (state, found), let the variables hold the result; return what
    was found.
    """
    arguments = (
        case.engine.variables.between_programs(case.read()),
        *case.engine.devices.place(given),
    )
    state, found = case.compile(lambda *arguments: function(*arguments), arguments)(*arguments)
    case.engine.variables.write(case.variables, state)
    return case.engine.devices.fetch(found)


def taken(case, other, state, data, note):
    """Take a step of a model's own that adds to parameters, and assigns a metric that it is not
    handed.
    """
    params, (metric,) = case.variables.params, case.variables.metrics

    def step(*given):
        metric.assign_add(ops.cast(other.value, "float32"))
        if JAX:
            (values, buffers), data = given
            return {"sum": data}, ([value + data for value in values], buffers)
        for variable in params:
            variable.assign(variable + given[0])
        return {"sum": given[0]}

    groups = [params, case.variables.buffers, [metric], []]
    values = [state.params, state.buffers, state.metrics, []]
    found, (params, buffers, metrics, _) = case.engine.steps.call(
        step, groups, values, 2, data, note
    )
    return state._replace(params=params, buffers=buffers, metrics=metrics), found["sum"]


def holds_call(case):
    if case.engine.replicas.is_split:  # several replicas are refused
        return
    read = []
    before = case.held()
    other = keras.Variable(3.0)
    found = custom(
        case, lambda state, data: taken(case, other, state, data, read.append), np.float32(5)
    )
    params, _, buffers, (metric,) = case.held()
    equal(found, np.float32(5))
    equal(params, [value + 5 for value in before[0]])
    equal((buffers, metric), (before[2], np.float32(3)))
    assert all(v is other for v in read)
    assert bool(read) == JAX
    if JAX:
        groups = [case.variables.params, case.variables.buffers]
        values = [[v.value for v in group] for group in groups]
        with pytest.raises(
            SpecificationError, match=r"must return \(results, state\).*Received: a state that is"
        ):
            case.engine.steps.call(lambda state, data: (data, 7), groups, values, 2, 0, read.append)
        step = lambda state, data: (other.assign(5.0), state)  # noqa: E731
        with pytest.raises(
            SpecificationError, match="must assign only variables that the trainer keeps"
        ):
            case.engine.steps.call(
                step, [*groups, [other]], [*values, [other.value]], 2, 0, read.append
            )


def holds_attempt(case):
    if case.engine.replicas.is_split:  # several replicas are refused
        return

    other = keras.Variable(3.0)

    def update(state, ok):
        def attempt(state):
            return (
                taken(case, other, state, ops.ones((), "float32"), lambda variable: None)[0],
                ok,
                7,
            )

        state, good, found = case.engine.steps.attempt(attempt, state, case.variables)
        return state, ops.cast(good, "int32") * found

    for ok in (False, True):
        before = case.held()
        assert custom(case, update, np.bool_(ok)) == 7 * ok
        after = case.held()
        equal(after[0], [value + ok for value in before[0]])
        equal((after[1], after[2]), (before[1], before[2]))
        equal(after[3], [before[3][0] + 3 * ok])


# ---- programs ----


def holds_is_eager(case):
    assert not case.engine.programs.is_eager
    if case.replicas == 1:
        case.model.run_eagerly, seen = True, []
        engine = case.choose()
        assert engine.programs.is_eager
        call = engine.programs.compile(
            lambda x: seen.append(ops.convert_to_numpy(x)), (case.data,), spends=False
        ).call
        call(case.data)
        equal(seen, [DATA])


def holds_always_xla(case):
    assert not case.engine.programs.always_xla
    assert case.choose(jit_compile=True).programs.always_xla == (not JAX)


def holds_loops_once(case):
    assert case.engine.programs.loops_once == JAX
    assert case.choose(jit_compile=True).programs.loops_once


def holds_why_no_xla(case):
    engine = case.choose(jit_compile="auto")
    if JAX:
        assert engine.programs.why_no_xla == ""
        return
    engine.programs.why_no_xla = (
        "" if engine.devices.num_replicas == 1 else engine.programs.why_no_xla
    )
    for why in ("", "another run found so"):
        engine.programs.why_no_xla = why
        given = engine.devices.place((DATA, np.int32(0)))
        call = engine.programs.compile(times, given, repeats=True, spends=False).call
        is_xla = getattr(call, "traced", call).function_def.attr["_XlaMustCompile"].b
        assert is_xla == (why == "" and engine.devices.num_replicas == 1)


def holds_compile(case):
    def program(data, rows):
        return {"x": data * 2}, [rows + 1]

    kept = case.compile(program, (case.data, case.rows), spends=False)
    for _ in range(2):
        equal(case.engine.devices.fetch(kept(case.data, case.rows)), ({"x": DATA * 2}, [ROWS + 1]))
        equal(case.engine.devices.fetch(case.data), DATA)
    state = case.read()
    before = case.held()

    def several(state, grads, num):
        def step(i, state):
            return case.engine.optimizer.apply(
                state, state, grads, ops.ones((), "bool"), {}
            ), ops.ones((1,))

        return case.engine.ops.repeat(step, num, state, ops.zeros((4, 1)))

    grads, none, two = case.engine.devices.place((case.grads(), np.int32(0), np.int32(2)))
    spending = case.compile(several, (state, grads, none), repeats=True)
    equal(case.held(), before)
    state, reports = spending(state, grads, two)
    case.engine.variables.write(case.variables, state)
    equal(case.engine.devices.fetch(reports)[:, 0], np.array([1, 1, 0, 0]))
    # 0.5, 0.75
    equal(case.held()[0], [p - 1.25 * g for p, g in zip(before[0], case.grads(), strict=True)])


def test_a_program_says_how_it_is_executed():
    how = {}
    for asked in (True, "auto") if JAX else (True, False):
        engine = engines.choose(model().optimizer, jit_compile=asked)
        given = engine.devices.place((DATA, np.int32(0)))
        call, _, how[asked] = engine.programs.compile(times, given, repeats=True, spends=False)
        if not JAX:
            assert call.traced.function_def.attr["_XlaMustCompile"].b == (
                how[asked] == "XLA compiles it."
            )
    assert set(how.values()) == {""} if JAX else "jit_compile=False" in how[False]


def times(x, num):
    return x * ops.cast(num, x.dtype)


def test_a_program_says_how_much_memory_it_needs(engine):
    def program(x):
        return ops.sum(ops.sort(ops.broadcast_to(x[:, None], (8, 10000, 3)) * 2, axis=1))

    needs = engine.programs.compile(program, (engine.devices.place(DATA),), spends=False).memory
    assert needs is None if not JAX else needs >= 8 * 10000 * 3 * 4


def holds_loops_slowly(case):
    image = case.engine.devices.place(np.ones((1, 8, 8, 3), "float32"))
    kernel = np.ones((3, 3, 3, 2), "float32")
    assert not case.engine.programs.loops_slowly(lambda x: ops.matmul(x, kernel[0, 0]), image)
    on_cpu = all("cpu" in name for name in keras.distribution.list_devices())
    assert case.engine.programs.loops_slowly(lambda x: ops.conv(x, kernel), image) == (
        JAX and on_cpu
    )


def holds_traced(case):
    seen = []

    def double(x):
        seen.append(x.shape)
        return 2 * x

    function = case.engine.programs.traced(double)
    found = case.run(lambda x: (function(x), function(x + 1), function(x[0])), case.data)
    equal(found, (2 * DATA, 2 * DATA + 2, 2 * DATA[0]))
    assert case.engine.replicas.is_split or len(seen) == 2


def holds_inlined(case):
    function = case.engine.programs.inlined(
        case.engine.programs.traced(lambda x: ops.sum(ops.transpose(x) ** 2))
    )

    def program(x):
        return function(x), case.engine.ops.differentiate(
            lambda params: (function(params[0]), ()), [x]
        )[0]

    equal(case.run(program, case.data), (np.sum(DATA**2), [2 * DATA]))


def holds_shapes(case):
    big = 10**6  # which no machine computes

    def function(x):
        return {
            "sum": ops.sum(x),
            "big": ops.cast(ops.broadcast_to(x[0, 0], (big, big)), "float16"),
        }

    found = case.engine.programs.shapes(case.engine.programs.traced(function), case.data)
    assert {
        k: (tuple(v.shape), keras.backend.standardize_dtype(v.dtype)) for k, v in found.items()
    } == {
        "sum": ((), "float32"),
        "big": ((big, big), "float16"),
    }
    case.model.run_eagerly = case.replicas == 1
    engine = case.choose()
    before = case.held()
    engine.variables.read(case.variables)

    def step(x):
        with keras.StatelessScope() if JAX else contextlib.nullcontext():  # as `steps.call` has it
            for variable in case.variables.params:
                variable.assign_add(ops.ones(variable.shape))
        return x

    engine.programs.shapes(engine.programs.traced(step), case.data)
    equal(case.held(), before)


# ---- traces ----


def holds_freezes_reads(case):
    variable = keras.Variable(1.0)
    program = case.compile(lambda x: x + variable.value, (case.data,), spends=False)
    variable.assign(2.0)
    equal(
        case.engine.devices.fetch(program(case.data)),
        DATA + (1 if case.engine.traces.freezes_reads else 2),
    )


def compiled_by_itself(function):
    if keras.backend.backend() == "jax":
        import jax

        return jax.jit(function)
    import tensorflow as tf

    return tf.function(function)


def holds_closes_over(case):
    """A function that is compiled separately, and multiplies its gradient by a value of the
    program.
    """

    def program(x):
        outside = ops.sum(x)

        @ops.custom_gradient
        def scaled(x):
            return x * 1.0, lambda *upstream: upstream[-1] * outside

        inside = compiled_by_itself(scaled)
        return case.engine.ops.differentiate(lambda params: (ops.sum(inside(params[0])), ()), [x])[
            0
        ][0]

    if case.engine.traces.closes_over:
        equal(case.run(program, case.data), np.full_like(DATA, np.sum(DATA)))
    else:
        with pytest.raises(TypeError, match="Tracer"):
            case.run(program, case.data)


def holds_frame(case):
    seen = {}

    def program(x, state, num):
        frame = case.engine.traces.frame()

        def inside(i, state):
            frames = [case.engine.traces.frame(value) for value in (None, i, x)]
            seen["inside"] = any(other is frame for other in frames)
            return state, ops.ones((1,))

        def of_one(row):
            seen["one row of several"] = case.engine.traces.frame(row) is frame
            return row * 2

        seen["here"] = frame is case.engine.traces.frame() is case.engine.traces.frame(x + 1)
        return case.engine.ops.repeat(inside, num, state, ops.zeros((2, 1)))[1], ops.vectorized_map(
            of_one, x
        )

    case.run(program, case.data, case.read(), case.engine.devices.place(np.int32(2)))
    assert seen == {"here": True, "inside": False, "one row of several": False}


def holds_is_kept(case):
    """A function that is compiled separately, called twice in a program; JAX keeps no trace for
    others.
    """
    seen = {}

    def program(x, state, num):
        frame = case.engine.traces.frame()

        def inside(i, state):
            seen["in a loop"] = case.engine.traces.is_kept(frame)
            return state, ops.ones((1,))

        def of_its_own(x):
            seen["in a function"] = case.engine.traces.is_kept(frame)
            return x * 2

        seen["here"] = case.engine.traces.is_kept(frame)
        return case.engine.ops.repeat(inside, num, state, ops.zeros((2, 1)))[1], compiled_by_itself(
            of_its_own
        )(x)

    case.run(program, case.data, case.read(), case.engine.devices.place(np.int32(2)))
    assert seen == {"here": False, "in a loop": False, "in a function": not JAX}


def holds_tracing_anew(case):
    calls = []
    function = compiled_by_itself(lambda x: calls.append(1) or x * 2)

    def program(x):
        with case.engine.traces.tracing_anew():
            return function(x)

    for num in range(2):
        calls.clear()
        equal(case.run(lambda x, num=num: program(x) + num, case.data), 2 * DATA + num)
        assert len(calls) == (JAX or num == 0)


# ---- ops ----


def holds_has_slices(case):
    def program(table, rows):
        grads, _ = case.engine.ops.differentiate(
            lambda params: (ops.sum(ops.take(params[0], rows, axis=0) ** 2), ()),
            [table],
            slices=True,
        )
        is_slices.append(isinstance(grads[0], Slices))
        return grads[0].dense(len(DATA)) if is_slices[-1] else grads[0]

    is_slices = []
    table = np.zeros_like(DATA)
    np.add.at(table, ROWS, 2 * DATA[ROWS])
    equal(case.run(program, case.data, case.rows), table)
    assert set(is_slices) == {case.engine.ops.has_slices}


def holds_differentiate(case):
    def scalar(params):
        table, x, _ = params
        return ops.sum(ops.take(table, case.rows[4:6], axis=0)) + ops.sum(x**2), {
            "found": ops.sum(x)
        }

    def program(*params):
        return case.engine.ops.differentiate(scalar, list(params))

    grads, auxiliary = case.run(program, case.data, case.data, case.data)
    table = np.zeros_like(DATA)
    table[1] = 2
    equal(grads, [table, 2 * DATA, np.zeros_like(DATA)])
    equal(auxiliary, {"found": DATA.sum()})


def holds_fold(case):
    def append(carry, piece):
        return {"digits": carry["digits"] * 10 + piece[0]}

    for num, digits in ((1, 1), (2, 12), (4, 1234)):
        pieces = case.engine.devices.place((np.arange(1, num + 1, dtype="float32"),))
        found = case.run(
            partial(case.engine.ops.fold, append, num=num),
            {"digits": case.engine.devices.place(np.float32(0))},
            pieces,
        )
        equal(found, {"digits": digits})


def holds_repeat(case):
    def step(i, state):
        state = state._replace(stopped=ops.cast(i == 2, "int32"), metrics=[state.metrics[0] + 1])
        number = ops.cast(i, "float32") + 1.0
        return state, {"a": ops.reshape(number, (1,)), "b": [number]}

    def program(state, num):
        reports = {"a": ops.full((5, 1), -1.0), "b": [ops.full((5,), -1.0)]}
        state, reports = case.engine.ops.repeat(step, num, state, reports)
        return state.metrics, reports["a"][:, 0] + 0 * reports["b"][0], reports["b"][0]

    for stopped, num, calls in ((0, 5, 3), (0, 2, 2), (0, 0, 0), (1, 5, 0)):
        state = case.read()._replace(stopped=case.engine.devices.place(np.int32(stopped)))
        expected = [np.full((), calls)], [*range(1, calls + 1), *[-1] * (5 - calls)]
        metrics, reports, others = case.run(
            program, state, case.engine.devices.place(np.int32(num))
        )
        equal((metrics, list(reports)), expected)
        equal(list(others), expected[1])


def holds_gather(case):
    data = case.engine.devices.place({"x": DATA, "y": [ROWS]})
    found = case.run(lambda data, rows: case.engine.ops.gather(data, rows), data, case.rows)
    equal(found, {"x": DATA[ROWS], "y": [ROWS[ROWS]]})


def holds_lookup(case):
    places = np.array([7, 8, 0, 0, 100], "int32")
    found = case.run(case.engine.ops.lookup, case.data, case.engine.devices.place(places))
    nothing = np.full(3, np.nan)
    equal(found, np.stack([DATA[7], nothing, DATA[0], DATA[0], nothing]))


def holds_is_finite(case):
    def is_finite(numbers):
        placed = case.engine.devices.place((numbers, DATA))
        return case.run(lambda x, y: case.engine.ops.is_finite([y, x, x[:0]]), *placed)

    for shape in ((3,), (100, 100)):  # large ones are reduced in another way
        numbers = np.full(shape, np.finfo("float32").max)
        assert is_finite(numbers)
        for number in (np.inf, -np.inf, np.nan):
            numbers.flat[1] = number
            assert not is_finite(numbers)
    assert case.run(lambda x: case.engine.ops.is_finite([]), case.data)


# ---- random ----


def holds_shuffles_slices(case):
    order = ops.convert_to_numpy(
        keras.random.shuffle(np.tile(np.arange(50), (2, 1)), axis=1, seed=1)
    )
    assert case.engine.random.shuffles_slices == np.array_equal(order[0], order[1])


def holds_words(case):
    """tests/model/test_draws.py holds which words they are."""
    seed = case.engine.devices.place(np.array([3, 4], "uint32" if JAX else "int64"))
    words = case.run(lambda seed: case.engine.random.words(seed, 0, 0, 8, 5), seed)
    assert words.dtype == np.uint32

    def own(data, seed):
        first = case.engine.replicas.part(ops.arange(8))[1]
        num = 8 // case.replicas
        # of which there are sums
        return ops.cast(case.engine.random.words(seed, 0, first, num, 5), "int32")

    equal(case.each(own, case.data, seed), words.astype("int32").reshape(case.replicas, -1, 5))


def holds_gamma_slope(case):
    """A number x of parameter a moves so that P(a, x) stays: dx/da = -(dP/da) / (dP/dx), by
    differences.
    """
    alpha = np.full(3, 2.0)
    x = np.array([0.5, 2.0, 4.0])
    step = 1e-3
    t = (np.arange(40_000) + 0.5) / 40_000 * x[:, None]

    def share(a):
        return np.mean(t ** (a - 1) * np.exp(-t), axis=1) * x / math.gamma(a)

    expected = -(share(2 + step) - share(2 - step)) / (2 * step) / (x * np.exp(-x))
    given = case.engine.devices.place((alpha.astype("float32"), x.astype("float32")))
    np.testing.assert_allclose(
        case.run(case.engine.random.gamma_slope, *given), expected, rtol=1e-3
    )


# ---- devices ----


def holds_num_replicas(case):
    assert case.engine.devices.num_replicas == case.replicas


def holds_local_replicas(case):
    assert case.engine.devices.local_replicas == list(range(case.replicas))


def holds_memory(case):
    on_cpu = all("cpu" in name for name in keras.distribution.list_devices())
    assert (
        case.engine.devices.memory() is None
        if on_cpu or not JAX
        else case.engine.devices.memory() > 2**30
    )


def holds_place(case):
    data = {
        "a": (DATA, None),
        "b": [np.array([True, False]), np.int32(3), np.full(2, 0.5, "float16")],
    }
    placed = case.engine.devices.place(data)
    assert all(ops.is_tensor(leaf) for leaf in keras.tree.flatten(placed) if leaf is not None)
    assert placed["a"][1] is None
    fetched = case.engine.devices.fetch(placed)
    equal(fetched["a"][0], DATA)
    for one, two in zip(fetched["b"], data["b"], strict=True):
        assert one.dtype == two.dtype
        equal(one, two)


def holds_resident(case):
    data, wait = case.engine.devices.resident({"x": DATA, "none": None})
    wait()
    assert data["none"] is None
    for rows in (ROWS, ROWS[::-1].copy()):
        found = case.each(
            lambda data, rows: case.engine.replicas.batch(data, rows)["x"],
            data,
            case.engine.devices.place(rows),
        )
        equal(found, DATA[rows].reshape(case.replicas, -1, 3))


def holds_stage(case):
    program = case.compile(
        lambda data: data["x"] * 2, (case.engine.devices.stage({"x": DATA}),), spends=False
    )
    for given in (case.engine.devices.stage({"x": DATA}), case.engine.devices.place({"x": DATA})):
        equal(case.engine.devices.fetch(program(given)), DATA * 2)
    if case.replicas > 1:
        shares = np.array([[0, 3, 5, 7], [6, 4, 2, 2]])
        data = case.engine.devices.stage({"x": DATA}, shares)
        places = np.array([3, 1, 0, 2, 0, 1, 2, 3], "int32")
        place = case.engine.devices.place(places)
        found = case.each(
            lambda data, rows: case.engine.replicas.batch(data, rows)["x"], data, place
        )
        equal(found, np.stack([DATA[shares[0][places[:4]]], DATA[shares[1][places[4:]]]]))


def holds_fetch(case):
    values = case.engine.devices.place({"a": DATA, "b": [np.int32(3)]})
    fetched = case.engine.devices.fetch(values)
    assert all(type(leaf) is np.ndarray for leaf in keras.tree.flatten(fetched))
    equal(fetched, {"a": DATA, "b": [np.int32(3)]})


def holds_is_ready(case):
    program = case.compile(lambda x: ops.sum(x @ ops.transpose(x)), (case.data,), spends=False)
    found = program(case.data)
    case.engine.devices.fetch(found)  # on several devices it waits for one of them
    assert any(
        case.engine.devices.is_ready({"a": found, "b": [case.data]}) for _ in range(1_000_000)
    )


# ---- replicas ----


def holds_is_split(case):
    engine = case.engine

    def work(data, carried, rows):
        return (
            ops.sum(ops.ones_like(engine.replicas.batch(data, rows)[:, 0])),
            carried,
            ops.zeros((engine.replicas.batch(data, rows).shape[0],)),
        )

    def program(data, rows):
        return case.total(work, data, rows, split=engine.replicas.is_split)

    total, _, seen = case.run(program, case.data, case.rows)
    assert total == 8
    assert len(seen) == (8 // case.replicas if engine.replicas.is_split else 8)
    assert engine.replicas.is_split == (case.replicas > 1 and not JAX)


def holds_can_split(case):
    assert case.engine.replicas.can_split == (case.replicas > 1)
    seen = case.each(
        lambda data, rows: ops.sum(ops.ones_like(case.engine.replicas.batch(data, rows)[:, 0])),
        case.data,
        case.rows,
    )
    equal(seen, np.full(case.replicas, 8 / case.replicas))


def holds_coupling_layers(case):
    norm = case.model.layers[-1]
    assert list(case.engine.replicas.coupling_layers) == (
        [norm] if case.engine.replicas.is_split else []
    )

    def work(data, carried, rows):
        with keras.StatelessScope():
            return (
                ops.sum(norm(case.engine.replicas.batch(data, rows)[:, :2], training=True) ** 2),
                carried,
                (),
            )

    def program(data, rows):
        return case.total(work, data, rows, split=case.engine.replicas.is_split, syncs=True)[0]

    batch = DATA[ROWS][:, :2]
    gamma = keras.ops.convert_to_numpy(norm.gamma)
    beta = keras.ops.convert_to_numpy(norm.beta)
    whole = (batch - batch.mean(0)) / np.sqrt(batch.var(0) + norm.epsilon) * gamma + beta
    np.testing.assert_allclose(case.run(program, case.data, case.rows), np.sum(whole**2), rtol=1e-4)


def holds_total(case):
    def work(data, carried, given):
        rows, factor = given
        batch = case.engine.replicas.batch(data, rows)
        sums = {"x": factor * ops.sum(batch, axis=0)}
        return sums, [carried[0] + ops.sum(batch)], ops.zeros((batch.shape[0],)) + factor

    given = case.engine.devices.place((ROWS, np.full((), 2, "float32")))
    for split in {case.engine.replicas.is_split, case.engine.replicas.can_split}:

        def program(data, carried, given, split=split):
            return case.total(work, data, given, carried=carried, split=split)

        sums, carried, alike = case.run(
            program, case.data, [case.engine.devices.place(np.float32(100))], given
        )
        equal(sums, {"x": 2 * DATA[ROWS].sum(0)})
        equal(carried, [100 + DATA[ROWS].sum()])
        equal(alike, np.full(8 // case.replicas if split else 8, 2))


def holds_batch(case):
    found = case.each(case.engine.replicas.batch, case.data, case.rows)
    equal(found, DATA[ROWS].reshape(case.replicas, -1, 3))
    equal(case.run(case.engine.replicas.batch, case.data, case.rows), DATA[ROWS])
    if case.replicas > 1:
        shares = np.arange(8).reshape(2, 4)[::-1]
        sharded = case.engine.devices.stage(DATA, shares)
        places = np.array([0, 3, 1, 1, 2, 2, 0, 3], "int32")
        rows = np.concatenate([shares[0][places[:4]], shares[1][places[4:]]])
        equal(
            case.run(case.engine.replicas.batch, sharded, case.engine.devices.place(places)),
            DATA[rows],
        )


def holds_part(case):
    found = case.each(lambda data, rows: case.engine.replicas.part(rows)[0], case.data, case.rows)
    equal(found, ROWS.reshape(case.replicas, -1))
    equal(case.run(case.engine.replicas.part, case.rows), (ROWS, 0))

    def work(data, carried, rows):
        return ops.ones(()), ops.cast(case.engine.replicas.part(rows)[1], "float32"), ()

    found = case.run(lambda data, rows: case.total(work, data, rows)[1], case.data, case.rows)
    equal(found, np.arange(0, 8, 8 // case.replicas).sum())


# ---- all parts ----


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_engine_has_processes_and_evaluates_with_the_same_variables(replicas):
    case = Case(replicas)
    processes = case.engine.processes
    assert (processes.index, processes.count) == (0, 1)
    assert processes.all_gather(processes.broadcast(3, "sharing"), "sharing") == [3]
    state = case.read()
    engine = case.engine.evaluation or case.engine
    assert not engine.replicas.is_split

    def program(state, data, rows):
        return engine.variables.params(state), engine.replicas.batch(data, rows)

    arguments = state, *engine.devices.place((DATA, ROWS))
    found = engine.programs.compile(program, arguments, spends=False).call(*arguments)
    equal(engine.devices.fetch(found), (case.held()[0], DATA[ROWS]))


CONTRACTS = {
    name.removeprefix("holds_"): check
    for name, check in globals().items()
    if name.startswith("holds_")
}


@pytest.mark.parametrize("replicas", [1, 2], ids=["1 replica", "2 replicas"])
@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: f"{verb}: {VERBS[verb]}")
def test_contract(verb, replicas):
    CONTRACTS[verb](Case(replicas))


def test_every_verb_has_one_line_of_contract_and_a_test_of_it():
    assert list(CONTRACTS) == list(VERBS)
    # no two parts have a verb of one name
    assert len(VERBS) == sum(len(contracts_of(part)) for part in PARTS)
    verbs = [verb for kind in PARTS for verb in vars(kind) if not verb.startswith("_")]
    assert len(verbs) <= 55
    for part in PARTS:
        assert list(dict(FACT.findall(inspect.getdoc(part)))) == list(part.__annotations__)
    for contract in VERBS.values():
        assert contract.endswith(".")
        assert "\n" not in contract
