"""Rows that are updated alone: the same numbers as the whole table, at a cost that does not know of its size."""

import keras
import numpy as np
import pytest
from exact import differing, integers, snapshot

import wholestep as ws
from wholestep import tables

ENGINE = keras.backend.backend()
L = keras.layers
ROWS, SIZE, DIM = 16, 200, 4
RNG = np.random.default_rng(5)
FOCAL = RNG.integers(0, 6, ROWS).astype("int32")  # few numbers, so that many rows ask for the same one
CONTEXT = np.append(RNG.integers(-SIZE, SIZE, ROWS - 2), [SIZE - 1, -1]).astype("int32")
Y = integers(ROWS, 1, seed=8)
WEIGHT = np.resize(np.array([1, 0, 2, 1], "float32"), ROWS)

TABLES = ("words", "contexts", "biases")

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.5),
    "adagrad": lambda: keras.optimizers.Adagrad(0.5, initial_accumulator_value=1.0),
    "adagrad, clip": lambda: keras.optimizers.Adagrad(0.5, clipvalue=1.0),
    "sgd, clip": lambda: keras.optimizers.SGD(0.5, global_clipnorm=2.0),
    "sgd, schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)),
}


def build(optimizer="sgd", *, size=SIZE, dim=DIM, embedding=L.Embedding, **arguments):
    """Return a compiled model that looks up twice in one table, once in two others, and has a dense layer."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    focal, context = keras.Input((), dtype="int32"), keras.Input((), dtype="int32")
    words = embedding(size, dim, name="words", **arguments)
    product = L.Dot(1)([words(focal), L.Add()([words(context), L.Embedding(size, dim, name="contexts")(context)])])
    bias = L.Embedding(size, 1, name="biases")(focal)
    model = keras.Model([focal, context], L.Dense(1)(L.Add()([product, bias])))
    for i, variable in enumerate(model.weights):
        variable.assign(integers(*variable.shape, seed=100 + i))
    model.layers[-1].kernel.assign([[1.0]])
    model.compile(OPTIMIZERS.get(optimizer, lambda: optimizer)(), "mse")
    return model


def updated(optimizer="sgd", microbatch_size="auto", *, updates=1, **arguments):
    """Carry out updates on all rows; return what they changed and said, and the trainer."""
    model = build(optimizer, **arguments)
    trainer = ws.Trainer(model, microbatch_size=microbatch_size)
    data = ws.Batches(((FOCAL, CONTEXT), Y, WEIGHT), ROWS, shuffle=False)
    step = list(trainer.steps(data, epochs=updates))[-1]
    return snapshot(model) | step.logs | {"own loss": step.loss}, trainer


def as_wholes(monkeypatch):
    monkeypatch.setattr(tables, "pays", lambda num, table: False)
    monkeypatch.setattr("wholestep.step.pays", lambda num, table: False)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("size", ["auto", 5])
def test_no_bit_differs_between_rows_and_whole_tables(optimizer, size, monkeypatch):
    alone, trainer = updated(optimizer, size)
    assert "Of the 200 rows of 'words', the " in trainer.explain()
    as_wholes(monkeypatch)
    whole, trainer = updated(optimizer, "auto")
    assert "All rows of 'words/embeddings' are updated" in trainer.explain()
    assert differing(alone, whole) == []
    before = snapshot(build(optimizer))
    assert all(np.any(alone[f"{name}/embeddings"] != before[f"{name}/embeddings"]) for name in TABLES)


def test_several_updates_are_those_of_keras():
    # Keras' Adagrad on TensorFlow squares the gradients of equal rows before it sums them.
    optimizer = "sgd" if ENGINE == "tensorflow" else "adagrad"
    ours, _ = updated(optimizer, 5, updates=3)
    model = build(optimizer)
    for _ in range(3):
        model.fit([FOCAL, CONTEXT], Y, sample_weight=WEIGHT, batch_size=ROWS, shuffle=False, verbose=0)
    for name, value in snapshot(model).items():
        np.testing.assert_allclose(ours[name], value, rtol=2e-6, atol=1e-6, err_msg=name)


def test_gradients_of_equal_rows_are_summed_before_they_are_squared():
    model = keras.Sequential([keras.Input((), dtype="int32"), L.Embedding(20, 1, embeddings_initializer="zeros")])
    model.compile(keras.optimizers.Adagrad(1.0, initial_accumulator_value=0.0), "mse")
    trainer = ws.Trainer(model)
    trainer.update((np.array([3, 3, 3, 5], "int32"), -np.ones((4, 1), "float32")))
    assert "the 4 looked up" in trainer.explain()
    accumulator = keras.ops.convert_to_numpy(model.optimizer.variables[2])[:, 0]
    assert accumulator[3] == (3 * 2 / 4) ** 2
    assert accumulator[5] == (2 / 4) ** 2
    assert np.count_nonzero(accumulator) == 2


def test_steps_equal_fit_to_the_bit():
    fitted, looped = build("adagrad"), build("adagrad")
    data = ((FOCAL, CONTEXT), Y, WEIGHT)
    ws.Trainer(fitted, seed=7).fit(data[0], Y, sample_weight=WEIGHT, batch_size=4, epochs=3, verbose=0)
    list(ws.Trainer(looped, seed=7).steps(ws.Batches(data, 4, seed=7), epochs=3))
    assert differing(snapshot(fitted), snapshot(looped)) == []


def test_gradients_that_are_not_summed_first_are_caught(monkeypatch):
    honest = tables.Touching.touch

    def each_its_own(touching, marks, ids):
        marks, touched, _ = honest(touching, marks, ids)
        return marks, touched, [keras.ops.arange(i.shape[0], dtype="int32") for i in ids]

    whole, _ = updated("adagrad")
    monkeypatch.setattr(tables.Touching, "touch", each_its_own)
    assert "words/embeddings" in differing(whole, updated("adagrad")[0])


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        (keras.optimizers.Adam, "Adam changes rows"),
        (lambda: keras.optimizers.SGD(0.5, momentum=0.5), "momentum moves rows"),
        (lambda: keras.optimizers.SGD(0.5, weight_decay=0.5), "weight decay moves rows"),
        (lambda: keras.optimizers.Adagrad(0.5, use_ema=True), "moving average"),
    ],
)
def test_an_optimizer_that_moves_other_rows_updates_them_all(optimizer, why):
    assert why in updated(optimizer())[1].explain()


class Scaled(L.Embedding):
    def call(self, inputs):
        return 2 * super().call(inputs)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"embeddings_regularizer": "l2"}, "regularised as a whole"),
        ({"embeddings_constraint": "non_neg"}, "constrained as a whole"),
        ({"embedding": Scaled}, "more than look up"),
        ({"size": 20}, "looks up 32 of its 20 rows"),
    ],
)
def test_a_table_that_is_needed_as_a_whole_is_updated_as_one(arguments, why, monkeypatch):
    if "size" in arguments:
        monkeypatch.setattr("test_tables.CONTEXT", CONTEXT % 20)
    trainer = updated(**arguments)[1]
    assert "All rows of 'words/embeddings' are updated: " in trainer.explain()
    assert why in trainer.explain()


class Tied(keras.Model):
    """Looks up, and predicts by the same table."""

    def __init__(self):
        super().__init__()
        self.words = L.Embedding(SIZE, DIM, name="words")

    def call(self, ids):
        return keras.ops.matmul(self.words(ids), keras.ops.transpose(self.words.embeddings))


def test_a_table_that_is_used_elsewhere_is_updated_as_one():
    model = Tied()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    trainer = ws.Trainer(model)
    trainer.update((FOCAL, FOCAL))
    assert "used other than by looking up" in trainer.explain()


class Cell(L.Layer):
    """Looks up in every step of a recurrent layer."""

    def __init__(self):
        super().__init__()
        self.words = L.Embedding(SIZE, 2)
        self.state_size = self.output_size = 2

    def build(self, shape):
        self.words.build()

    def call(self, ids, states):
        found = self.words(keras.ops.cast(ids[:, 0], "int32")) + states[0]
        return found, [found]


def test_a_table_that_is_looked_up_inside_a_loop_is_updated_as_one():
    model = keras.Sequential([keras.Input((3, 1)), L.RNN(Cell()), L.Dense(1)])
    model.compile(keras.optimizers.SGD(0.5), "mse")
    before = snapshot(model)
    trainer = ws.Trainer(model)
    trainer.update((FOCAL[:15].reshape(5, 3, 1).astype("float32"), Y[:5]))
    assert "looked up inside a loop" in trainer.explain()
    assert any("embeddings" in name for name in before if np.any(before[name] != snapshot(model)[name]))


@pytest.mark.skipif(ENGINE == "tensorflow", reason="it does not tell what a program needs")
def test_the_memory_of_an_update_does_not_grow_with_the_table():
    needs = []
    for size in (2_000, 200_000):
        _, trainer = updated("adagrad", size=size)
        needs.append(next(iter(trainer._machine.planner.programs.values())).memory)
    assert needs[1] <= needs[0] + 1024


def test_a_row_that_the_table_does_not_have_stops_the_update():
    model = build("adagrad")
    model.optimizer.build(model.trainable_variables)
    before = snapshot(model)
    ids = np.where(np.arange(ROWS) == 11, SIZE, FOCAL)
    with pytest.raises(ws.NonFiniteError, match="rows 11") as caught:
        ws.Trainer(model).update(((ids, CONTEXT), Y))
    assert caught.value.rows == (11,)
    assert differing(before, snapshot(model)) == []


def test_half_precision():
    keras.config.set_dtype_policy("mixed_bfloat16")
    ours, trainer = updated("sgd", 5)
    assert "Of the 200 rows of 'words'" in trainer.explain()
    assert differing(ours, updated("sgd")[0]) == []


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad, clip", "sgd, clip"])
def test_an_update_that_is_not_finite_leaves_every_bit(optimizer):
    model = build(optimizer)
    model.optimizer.build(model.trainable_variables)
    before = snapshot(model)
    trainer = ws.Trainer(model, on_nonfinite="skip")
    trainer.update(((FOCAL, CONTEXT), np.where(np.arange(ROWS)[:, None] == 3, np.nan, Y).astype("float32"), WEIGHT + 1))
    assert "Of the 200 rows" in trainer.explain()
    assert trainer.num_skipped == 1
    assert differing(before, snapshot(model)) == []
    assert trainer.update(((FOCAL, CONTEXT), Y, WEIGHT))["loss"] > 0
    assert len(differing(before, snapshot(model))) > 4
