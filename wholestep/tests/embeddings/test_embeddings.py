"""Rows that are updated alone: the same numbers as the whole table, at a cost that does not know of
its size.
"""

from functools import partial

import keras
import numpy as np
import pytest
from exact import differing, integers, snapshot
from shares import on, share

import wholestep as ws
from wholestep.embeddings import rows as embeddings

ENGINE = keras.backend.backend()
L = keras.layers
ROWS = 16
SIZE = 200
DIM = 4
RNG = np.random.default_rng(5)
# few numbers, so that many rows ask for the same one
FOCAL = RNG.integers(0, 6, ROWS).astype("int32")
CONTEXT = np.append(RNG.integers(-SIZE, SIZE, ROWS - 2), [SIZE - 1, -1]).astype("int32")
Y = integers(ROWS, 1, seed=8)
WEIGHT = np.resize(np.array([1, 0, 2, 1], "float32"), ROWS)

TABLES = ("words", "contexts", "biases")

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.5),
    "adagrad": lambda: keras.optimizers.Adagrad(0.5, initial_accumulator_value=1.0),
    "adagrad, clip": lambda: keras.optimizers.Adagrad(0.5, clipvalue=1.0),
    "sgd, clip": lambda: keras.optimizers.SGD(0.5, global_clipnorm=2.0),
    "sgd, schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)
    ),
}


def build(optimizer="sgd", *, size=SIZE, dim=DIM, embedding=L.Embedding, **arguments):
    """Return a compiled model that looks up twice in one table, once in two others, and has a dense
    layer.
    """
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    focal = keras.Input((), dtype="int32")
    context = keras.Input((), dtype="int32")
    words = embedding(size, dim, name="words", **arguments)
    product = L.Dot(1)(
        [words(focal), L.Add()([words(context), L.Embedding(size, dim, name="contexts")(context)])]
    )
    bias = L.Embedding(size, 1, name="biases")(focal)
    model = keras.Model([focal, context], L.Dense(1)(L.Add()([product, bias])))
    for i, variable in enumerate(model.weights):
        variable.assign(integers(*variable.shape, seed=100 + i))
    model.layers[-1].kernel.assign([[1.0]])
    model.compile(OPTIMIZERS.get(optimizer, lambda: optimizer)(), "mse")
    return model


def updated(optimizer="sgd", microbatch_size="auto", *, updates=1, **arguments):
    """Run updates on all rows; return the changed values, the logs and the trainer."""
    model = build(optimizer, **arguments)
    trainer = ws.Trainer(model, microbatch_size=microbatch_size)
    data = ws.Batches(((FOCAL, CONTEXT), Y, WEIGHT), ROWS, shuffle=False)
    step = list(trainer.steps(data, epochs=updates))[-1]
    return snapshot(model) | step.logs | {"own loss": step.loss}, trainer


def as_wholes(monkeypatch):
    monkeypatch.setattr(embeddings, "worth_it", lambda num, table: False)
    monkeypatch.setattr("wholestep.embeddings.rows.worth_it", lambda num, table: False)


@pytest.mark.parametrize(
    ("optimizer", "size"), share(zip(OPTIMIZERS, ["auto", "auto", 5, 5, "auto"], strict=True))
)
@pytest.mark.slow
def test_no_bit_differs_between_rows_and_whole_tables(optimizer, size, monkeypatch):
    alone, trainer = updated(optimizer, size)
    assert "Of the 200 rows of 'words', the " in trainer.explain()
    as_wholes(monkeypatch)
    whole, trainer = updated(optimizer, "auto")
    assert "All rows of 'words/embeddings' are updated" in trainer.explain()
    assert differing(alone, whole) == []
    before = snapshot(build(optimizer))
    assert all(
        np.any(alone[f"{name}/embeddings"] != before[f"{name}/embeddings"]) for name in TABLES
    )


def test_several_updates_are_those_of_keras():
    ours, _ = updated("adagrad", 5, updates=3)
    model = build("adagrad")
    how = {"sample_weight": WEIGHT, "batch_size": ROWS, "epochs": 3, "shuffle": False, "verbose": 0}
    model.fit([FOCAL, CONTEXT], Y, **how)
    for name, value in snapshot(model).items():
        np.testing.assert_allclose(ours[name], value, rtol=2e-6, atol=1e-6, err_msg=name)


def test_rows_are_updated_after_an_evaluation_whose_optimizer_has_no_slots_yet(monkeypatch):
    ids = np.stack([FOCAL, FOCAL + 1, FOCAL + 2], axis=1)
    how = {"batch_size": ROWS, "shuffle": False, "verbose": 0}

    def evaluated_then_fitted():
        keras.utils.clear_session()
        layers = [keras.Input((3,), dtype="int32"), L.Embedding(SIZE, 2), L.Flatten(), L.Dense(1)]
        model = keras.Sequential(layers)
        for i, variable in enumerate(model.weights):
            variable.assign(integers(*variable.shape, seed=100 + i))
        model.compile(keras.optimizers.Adagrad(0.5), "mse")
        trainer = ws.Trainer(model)
        trainer.evaluate(ids, Y, verbose=0)
        trainer.fit(ids, Y, epochs=2, **how)
        return snapshot(model), trainer.explain()

    alone, told = evaluated_then_fitted()
    assert "are updated" in told
    assert "All rows" not in told
    as_wholes(monkeypatch)
    assert differing(alone, evaluated_then_fitted()[0]) == []


@on("jax")
def test_steps_equal_fit_to_the_bit():
    fitted = build("adagrad")
    looped = build("adagrad")
    data = ((FOCAL, CONTEXT), Y, WEIGHT)
    ws.Trainer(fitted, seed=7).fit(
        data[0], Y, sample_weight=WEIGHT, batch_size=4, epochs=3, verbose=0
    )
    list(ws.Trainer(looped, seed=7).steps(ws.Batches(data, 4, seed=7), epochs=3))
    assert differing(snapshot(fitted), snapshot(looped)) == []


@on("jax")
def test_gradients_that_are_not_summed_first_are_caught(monkeypatch):
    honest = embeddings.RowPlan.deduplicate

    def each_its_own(row_plan, scratch, ids):
        scratch, touched, _ = honest(row_plan, scratch, ids)
        return scratch, touched, [keras.ops.arange(i.shape[0], dtype="int32") for i in ids]

    whole, _ = updated("adagrad")
    monkeypatch.setattr(embeddings.RowPlan, "deduplicate", each_its_own)
    assert "words/embeddings" in differing(whole, updated("adagrad")[0])


@pytest.mark.parametrize(
    ("optimizer", "why"),
    share(
        [
            (
                keras.optimizers.Adam,
                "only plain SGD and Adagrad are known to leave other rows alone, not Adam",
            ),
            (
                lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5)),
                "alone, not LossScaleOptimizer",
            ),
            (lambda: keras.optimizers.SGD(0.5, momentum=0.5), "momentum moves rows"),
            (lambda: keras.optimizers.SGD(0.5, weight_decay=0.5), "weight decay moves rows"),
            (lambda: keras.optimizers.Adagrad(0.5, use_ema=True), "moving average"),
        ]
    ),
)
def test_an_optimizer_that_moves_other_rows_updates_them_all(optimizer, why):
    assert why in updated(optimizer())[1].explain()


class Scaled(L.Embedding):
    def call(self, inputs):
        return 2 * super().call(inputs)


@pytest.mark.parametrize(
    ("arguments", "why"),
    share(
        [
            ({"embeddings_regularizer": "l2"}, "regularised as a whole"),
            ({"embeddings_constraint": "non_neg"}, "constrained as a whole"),
            ({"embedding": Scaled}, "more than look up"),
            ({"size": 40}, "looks up 32 of its 40 rows"),
        ]
    ),
)
def test_a_table_that_is_needed_as_a_whole_is_updated_as_one(arguments, why, monkeypatch):
    if "size" in arguments:
        monkeypatch.setattr("test_embeddings.CONTEXT", CONTEXT % 40)
    trainer = updated(**arguments)[1]
    assert "All rows of 'words/embeddings' are updated: " in trainer.explain()
    assert why in trainer.explain()


@on("jax")
def test_tables_that_are_updated_as_wholes_are_explained_in_one_line(monkeypatch):
    said = [
        line
        for line in updated(keras.optimizers.Adam())[1].explain().split("\n")
        if line.startswith("All rows")
    ]
    why = "only plain SGD and Adagrad are known to leave other rows alone, not Adam"
    tables = "'words/embeddings', 'contexts/embeddings' and 1 more"
    assert said == [
        f"All rows of {tables} are updated: {why}. This takes time only if a table is large."
    ]

    monkeypatch.setattr("test_embeddings.CONTEXT", CONTEXT % 20)
    assert "'words/embeddings'" not in updated(size=20)[1].explain()  # 32 lookups in 20 rows


class Tied(keras.Model):
    """Looks up, and predicts by the same table."""

    def __init__(self):
        super().__init__()
        self.words = L.Embedding(SIZE, DIM, name="words")

    def call(self, ids):
        return keras.ops.matmul(self.words(ids), keras.ops.transpose(self.words.embeddings))


@on("jax")
def test_a_table_that_is_used_elsewhere_is_updated_as_one():
    model = Tied()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    trainer = ws.Trainer(model)
    trainer.update((FOCAL, FOCAL))
    assert (
        "'tied/words/embeddings' are updated: it is used outside of lookups." in trainer.explain()
    )


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
    assert "are updated: it is looked up inside a loop." in trainer.explain()
    assert any(
        "embeddings" in name for name in before if np.any(before[name] != snapshot(model)[name])
    )


class Mapped(keras.Model):
    """Looks up in a function that is mapped over the rows."""

    def __init__(self):
        super().__init__()
        self.words = L.Embedding(SIZE, DIM, name="words")
        self.last = L.Dense(1)

    def call(self, ids):
        return self.last(keras.ops.mean(keras.ops.vectorized_map(self.words, ids), axis=1))


def over_time():
    words = L.TimeDistributed(L.Embedding(SIZE, DIM, name="words"))
    return keras.Sequential([words, L.Flatten(), L.Dense(1)])


def prepared(make, ids, optimizer):
    model = make()
    model(ids)
    for i, variable in enumerate(model.weights):
        variable.assign(np.random.default_rng(i).normal(size=variable.shape, scale=0.3))
    model.compile(OPTIMIZERS[optimizer](), "mse")
    return model


def trained(make, ids, labels=Y, optimizer="sgd", **arguments):
    """Run three updates; return the resulting values and the trainer."""
    trainer = ws.Trainer(prepared(make, ids, optimizer), **arguments)
    for _ in range(3):
        trainer.update((ids, labels))
    return trainer.model.get_weights(), trainer


def trained_by_keras(make, ids, labels=Y):
    model = prepared(make, ids, "sgd")
    model.fit(ids, labels, batch_size=len(labels), epochs=3, shuffle=False, verbose=0)
    return model.get_weights()


@pytest.mark.parametrize(
    ("make", "ids"),
    share([(over_time, np.resize(FOCAL, (8, 2, 3))), (Mapped, FOCAL.reshape(8, 2))]),
)
def test_a_table_that_is_looked_up_row_by_row_is_updated_as_one(make, ids):
    ours, trainer = trained(make, ids, Y[:8])
    for one, other in zip(ours, trained_by_keras(make, ids, Y[:8]), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    # TimeDistributed may call its layer once for each place instead.
    assert (
        "words/embeddings' are updated: it is looked up inside a loop" in trainer.explain()
        or make is over_time
    )


def shared():
    one = L.Embedding(SIZE, DIM, name="one")
    other = L.Embedding(SIZE, DIM, name="other")
    one.build()
    other._embeddings = one._embeddings
    other.built = True
    first = keras.Input((), dtype="int32")
    second = keras.Input((), dtype="int32")
    return keras.Model([first, second], L.Dot(1)([one(first), other(second)]))


@on("jax")
def test_a_table_of_two_layers_is_updated_as_one():
    ids = [FOCAL, FOCAL[::-1]]
    ours, trainer = trained(shared, ids)
    np.testing.assert_allclose(ours[0], trained_by_keras(shared, ids)[0], rtol=1e-5, atol=1e-6)
    assert "are updated: two layers share it" in trainer.explain()


def of_submodels():
    words = L.Embedding(SIZE, DIM, name="words")
    tower = keras.Sequential([words, L.Dense(3)])
    other = keras.Sequential([words])
    first = keras.Input((), dtype="int32")
    second = keras.Input((), dtype="int32")
    return keras.Model(
        [first, second], L.Dense(1)(L.Concatenate()([tower(first), other(second), words(second)]))
    )


def masking():
    return keras.Sequential(
        [L.Embedding(SIZE, DIM, mask_zero=True, name="words"), L.LSTM(3), L.Dense(1)]
    )


def flat(dtype="int32"):
    dtype = "int32" if (dtype, ENGINE) == ("int64", "jax") else dtype
    inputs = keras.Input((2,), dtype=dtype)
    return keras.Sequential([inputs, L.Embedding(SIZE, DIM, name="words"), L.Flatten(), L.Dense(1)])


@pytest.mark.parametrize(
    ("make", "ids", "size"),
    share(
        [
            (of_submodels, [FOCAL, np.abs(CONTEXT) // 2], 5),
            (masking, np.stack([FOCAL + 1, FOCAL, np.zeros_like(FOCAL)], axis=1), 5),
            (partial(flat, "uint8"), np.stack([FOCAL + 190, FOCAL], axis=1).astype("uint8"), 5),
            (
                partial(flat, "int64"),
                np.stack([FOCAL + 190, FOCAL], axis=1).astype("int64"),
                "auto",
            ),
            (flat, np.stack([FOCAL - 1, FOCAL - SIZE], axis=1), "auto"),
            (
                partial(flat, "float32"),
                np.stack([FOCAL + 190, FOCAL], axis=1).astype("float32"),
                "auto",
            ),
        ]
    ),
)
@pytest.mark.slow
def test_rows_of_any_lookup_are_those_of_the_whole_table(make, ids, size, monkeypatch):
    alone, trainer = trained(make, ids, optimizer="adagrad", microbatch_size=size)
    assert "rows of 'words', the" in trainer.explain()
    as_wholes(monkeypatch)
    keras.utils.clear_session()
    whole, trainer = trained(make, ids, optimizer="adagrad")
    assert "All rows of" in trainer.explain()
    for one, other in zip(alone, whole, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_row_number_beyond_32_bits_is_no_row():
    model = flat("int64")
    model.compile(OPTIMIZERS["sgd"](), "mse")
    trainer = ws.Trainer(model)
    ids = np.stack([FOCAL, FOCAL], axis=1).astype("int64")
    trainer.update((ids, Y))
    ids[7, 1] = 2**32 + 3
    error, message = (
        (ws.NonFiniteError, "rows 7")
        if ENGINE == "tensorflow"
        else (ws.BatchError, "fit in 32 bits")
    )
    with pytest.raises(error, match=message):
        trainer.update((ids, Y))["loss"]


def test_a_layer_with_lora_is_updated_as_a_whole():
    model = flat()
    model(np.stack([FOCAL, FOCAL], axis=1))
    model.layers[0].enable_lora(2)
    model.layers[0]._embeddings.trainable = True
    model.compile(OPTIMIZERS["sgd"](), "mse")
    trainer = ws.Trainer(model)
    trainer.update((np.stack([FOCAL, FOCAL], axis=1), Y))
    assert "its layer does more than look up" in trainer.explain()


class NextWord(ws.Objective):
    def __call__(self, model, batch, training):
        words = batch["words"][:, :-1]
        following = batch["words"][:, 1:]
        logits = model(words, training=training)
        loss = keras.losses.sparse_categorical_crossentropy(following, logits, from_logits=True)
        return ws.Mean(loss, following != 0)


@pytest.mark.slow
def test_an_update_that_looks_up_nothing():
    """Sentences of one word fill a separate bucket, without a next word."""
    rows = [{"words": np.arange(1, 1 + n)} for n in (1, 1, 1, 1, 5, 6, 5)]
    model = keras.Sequential([L.Embedding(SIZE, DIM, name="words"), L.Dense(9)])
    model.build((None, None))
    before = model.get_weights()[0]
    data = ws.Batches(
        rows, tokens=12, length=lambda row: len(row["words"]), boundaries=[1, 6], shuffle=False
    )
    trainer = ws.Trainer(model, NextWord(), optimizer=OPTIMIZERS["sgd"](), on_nonfinite="skip")
    trainer.update({"words": np.ones((3, 1), "int32")})
    assert "nothing is looked up in it" in trainer.explain()
    assert np.all(model.get_weights()[0] == before)
    trainer.fit(data, epochs=1, verbose=0)
    assert trainer.num_skipped == 2
    assert np.any(model.get_weights()[0] != before)
    strict = ws.Trainer(model, NextWord(), optimizer=OPTIMIZERS["sgd"]())
    with pytest.raises(ws.NonFiniteError, match="the weights of the loss sum to zero"):
        strict.update({"words": np.ones((3, 1), "int32")})["loss"]


@pytest.mark.parametrize(
    ("optimizer", "policy", "size"),
    share(
        [
            ("sgd", "float32", "auto"),
            ("sgd", "mixed_bfloat16", 5),
            ("adagrad", "mixed_bfloat16", "auto"),
            ("adagrad", "float32", 5),
        ]
    ),
)
@pytest.mark.slow
def test_real_numbers_differ_from_the_whole_table_by_rounding(optimizer, policy, size, monkeypatch):
    keras.config.set_dtype_policy(policy)

    def normal(*shape, seed):
        return np.random.default_rng(seed).normal(size=shape, scale=0.3).astype("float32")

    monkeypatch.setattr("test_embeddings.integers", normal)
    monkeypatch.setattr("test_embeddings.Y", normal(ROWS, 1, seed=4))
    alone, trainer = updated(optimizer, size, updates=4)
    assert "Of the 200 rows of 'words'" in trainer.explain()
    as_wholes(monkeypatch)
    whole, _ = updated(optimizer, size, updates=4)
    close = 1e-5 if policy == "float32" else 2**-7
    for name in alone:
        np.testing.assert_allclose(alone[name], whole[name], rtol=close, atol=close, err_msg=name)


@pytest.mark.skipif(ENGINE == "tensorflow", reason="it does not tell what a program needs")
@pytest.mark.slow
def test_the_memory_of_an_update_does_not_grow_with_the_table():
    needs = []
    for size in (2_000, 200_000):
        _, trainer = updated("adagrad", size=size)
        needs.append(next(iter(trainer.executor.planner.programs.values())).memory)
    assert needs[1] <= needs[0] + 1024


def test_a_row_that_the_table_does_not_have_stops_the_update():
    model = build("adagrad")
    model.optimizer.build(model.trainable_variables)
    before = snapshot(model)
    ids = np.where(np.arange(ROWS) == 11, SIZE, FOCAL)
    with pytest.raises(ws.NonFiniteError, match="rows 11") as caught:
        ws.Trainer(model).update(((ids, CONTEXT), Y))["loss"]
    assert caught.value.rows == (11,)
    assert differing(before, snapshot(model)) == []


@on("jax")
def test_half_precision():
    keras.config.set_dtype_policy("mixed_bfloat16")
    ours, trainer = updated("sgd", 5)
    assert "Of the 200 rows of 'words'" in trainer.explain()
    assert differing(ours, updated("sgd")[0]) == []


@pytest.mark.parametrize("optimizer", share(["sgd", "adagrad, clip", "sgd, clip"]))
def test_an_update_that_is_not_finite_leaves_every_bit(optimizer):
    model = build(optimizer)
    model.optimizer.build(model.trainable_variables)
    before = snapshot(model)
    trainer = ws.Trainer(model, on_nonfinite="skip")
    trainer.update(
        (
            (FOCAL, CONTEXT),
            np.where(np.arange(ROWS)[:, None] == 3, np.nan, Y).astype("float32"),
            WEIGHT + 1,
        )
    )
    assert "Of the 200 rows" in trainer.explain()
    assert trainer.num_skipped == 1
    assert differing(before, snapshot(model)) == []
    assert trainer.update(((FOCAL, CONTEXT), Y, WEIGHT))["loss"] > 0
    assert len(differing(before, snapshot(model))) > 4
