"""Every row once an epoch, in a shape that holds it, within the budget, in an order of (seed,
epoch, step) alone.
"""

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from keras import ops
from shares import on
from small import count_calls

import wholestep as ws
from wholestep import engines

LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=60)
PAD = -7


def rows_of(lengths):
    """Distinct ragged rows: place p of row i holds 1000 i + p."""
    return [{"text": 1000 * i + np.arange(n), "label": i} for i, n in enumerate(lengths)]


def bucketed(lengths, tokens=64, **arguments):
    return ws.Batches(rows_of(lengths), tokens=tokens, length=np.array(lengths), **arguments)


def epoch(data):
    return [data.rows(data.position[0], step) for step in range(len(data))]


@on("jax")
@given(LENGTHS, st.integers(30, 200), st.integers(0, 5))
def test_every_row_once_an_epoch_within_the_budget_and_as_it_was(lengths, tokens, seed):
    data = bucketed(lengths, tokens, seed=seed, pad=PAD)
    shapes = {length: size for size, length in data.shapes}
    assert len(shapes) == len(data.shapes) <= 12
    for _ in range(2):
        seen = []
        for batch in data:
            seen += batch["label"].tolist()
            size, length = batch["text"].shape
            assert size * length <= tokens
            assert size <= shapes[length] <= tokens // length
            for label, text in zip(batch["label"].tolist(), batch["text"], strict=True):
                kept = lengths[label]
                assert text[:kept].tolist() == (1000 * label + np.arange(kept)).tolist()
                assert (text[kept:] == PAD).all()
        assert sorted(seen) == list(range(len(lengths)))


@on("jax")
@given(LENGTHS, st.sets(st.integers(1, 40), min_size=1, max_size=6))
def test_a_row_is_in_the_smallest_of_the_given_shapes_that_holds_it(lengths, boundaries):
    boundaries = sorted({*boundaries, 30})
    for batch in bucketed(lengths, boundaries=boundaries):
        for label in batch["label"].tolist():
            assert batch["text"].shape[1] == min(b for b in boundaries if b >= lengths[label])


@on("jax")
@given(LENGTHS, st.integers(0, 50))
def test_the_order_goes_on_from_any_place(lengths, steps):
    data = bucketed(lengths, seed=2)
    other = bucketed(lengths, seed=2)
    for _ in range(steps):
        next(data)
    other.seek(*data.position)
    assert [next(data)["label"].tolist() for _ in range(3)] == [
        next(other)["label"].tolist() for _ in range(3)
    ]


def test_another_order_each_epoch_of_batches_and_within_them():
    data = bucketed(np.resize([5, 10], 400), 200, boundaries=[5, 10])
    batches = [
        [frozenset(data.rows(e, step).tolist()) for step in range(len(data))] for e in range(2)
    ]
    assert not set(batches[0]) & set(batches[1])
    shapes = [[data.load(e, step)["text"].shape[1] for step in range(len(data))] for e in range(2)]
    assert sorted(shapes[0]) == sorted(shapes[1])
    assert shapes[0] != shapes[1]


def test_seeds_and_buckets_have_orders_of_their_own():
    one, two = (bucketed([9] * 50 + [10] * 50, 40, seed=seed) for seed in (1, 2))
    assert one.shapes == [(4, 9), (4, 10)]
    assert [b.tolist() for b in epoch(one)] != [b.tolist() for b in epoch(two)]
    short, long = (
        {frozenset(b % 50) for b in epoch(one) if (b >= 50).all() == is_long}
        for is_long in (False, True)
    )
    assert len(short) == len(long) == 13
    assert not short & long


def test_shapes_alternate_as_often_as_chance_has_it():
    data = bucketed(np.resize([5, 10, 15, 20], 800), 40, boundaries=[5, 10, 15, 20])
    kinds = np.array([data.load(0, step)["text"].shape[1] for step in range(len(data))])
    rng = np.random.default_rng(0)
    by_chance = [longest_run(rng.permutation(kinds)) for _ in range(300)]
    assert min(by_chance) <= longest_run(kinds) <= max(by_chance)


def longest_run(kinds):
    ends = np.flatnonzero(np.concatenate([[True], np.diff(kinds) != 0, [True]]))
    return int(np.diff(ends).max())


def test_without_shuffling_one_bucket_comes_after_the_other():
    data = bucketed([9, 2, 8, 1, 2], 18, boundaries=[2, 9], shuffle=False)
    assert [b.tolist() for b in epoch(data)] == [[1, 3, 4], [0, 2]]
    shuffled = bucketed([9, 2, 8, 1, 2], 18, boundaries=[2, 9])
    assert [b.tolist() for b in epoch(shuffled.in_order())] == [[1, 3, 4], [0, 2]]


@on("jax")
@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=40))
def test_several_sequences_have_lengths_and_paddings_of_their_own(lengths):
    rows = [
        {
            "source": {"ids": i + np.zeros((s, 2), np.int32)},
            "target": np.arange(t),
            "label_ids": np.arange(t),
            "label": i,
        }
        for i, (s, t) in enumerate(lengths)
    ]
    source, target = np.array(lengths).T
    named = {"source": source, "target": target, "label_ids": target}
    data = ws.Batches(rows, tokens=120, length=named, pad={"source": -1, "label_ids": -100})
    seen = []
    for batch in data:
        widths = [batch[k].shape[1] for k in ("target", "label_ids")] + [
            batch["source"]["ids"].shape[1]
        ]
        assert len(batch["label"]) * sum(widths) <= 120
        for k, row in enumerate(batch["label"].tolist()):
            s, t = lengths[row]
            assert (batch["source"]["ids"][k, :s] == row).all()
            assert (batch["source"]["ids"][k, s:] == -1).all()
            assert batch["target"][k].tolist() == [*range(t), *[0] * (widths[0] - t)]
            assert batch["label_ids"][k].tolist() == [*range(t), *[-100] * (widths[1] - t)]
        seen += batch["label"].tolist()
    assert sorted(seen) == list(range(len(lengths)))


def test_parts_that_are_not_named_are_left_alone():
    rows = [{"text": np.arange(n), "image": np.zeros((3, 2))} for n in (2, 4)]
    (batch,) = ws.Batches(rows, tokens=100, length={"text": [2, 4]}, boundaries=[4])
    assert (batch["text"].shape, batch["image"].shape) == ((2, 4), (2, 3, 2))


def test_boundaries_by_name_and_rows_that_are_tuples():
    rows = [(np.arange(s), np.arange(t)) for s, t in ((2, 9), (5, 3), (8, 9))]
    lengths = (np.array([2, 5, 8]), np.array([9, 3, 9]))
    data = ws.Batches(rows, tokens=40, length=lengths, boundaries=[(8, 9), (5, 3), (2, 9)])
    assert data.shapes == [(1, 5, 3), (1, 2, 9), (1, 8, 9)]
    named = [{"s": row[0], "t": row[1]} for row in rows]
    boundaries = [{"s": 8, "t": 9}, {"s": 5, "t": 9}]
    data = ws.Batches(
        named,
        tokens=40,
        length=lambda row: {k: len(v) for k, v in row.items()},
        boundaries=boundaries,
    )
    assert data.shapes == [(2, 5, 9), (1, 8, 9)]


def test_arrays_are_sliced():
    lengths = np.array([1, 5, 2, 4])
    text = np.where(np.arange(8) < lengths[:, None], 1 + np.arange(4)[:, None], 0)
    data = ws.Batches((text, np.arange(4)), tokens=10, length=lengths, boundaries=[2, 5])
    for text, labels in data:
        assert text.shape[1] == (2 if 0 in labels or 2 in labels else 5)
        assert ((text != 0).sum(axis=1) == lengths[labels]).all()
    function = ws.Batches(
        (text, np.arange(len(text))), tokens=10, length=lambda row: int((row[0] != 0).sum())
    )
    assert sum(len(rows) for rows in epoch(function)) == len(text)


@pytest.mark.parametrize(("width", "pad"), [(5, 0), (5, PAD), (0, 0)])
def test_arrays_that_are_narrower_than_a_shape_are_padded(width, pad):
    lengths = np.minimum([3, 4, 5], width)
    text = np.ones((3, width, 2), np.int32)
    boundaries = [4, 16] if width else None
    data = ws.Batches(
        {"text": text}, tokens=64, length=lengths, boundaries=boundaries, pad=pad, shuffle=False
    )
    assert data.shapes == ([(2, 4), (1, 16)] if width else [(3, 1)])
    for (size, length), batch in zip(data.shapes, data, strict=True):
        assert batch["text"].shape == (size, length, 2)
        assert (batch["text"][:, width:] == pad).all()
        assert (batch["text"][:, :width] > 0).all()


@pytest.mark.parametrize(
    ("parts", "dtype"),
    [
        (([1, 2, 3], [0.5, 0.25]), np.float32),
        (([0.5, 0.25], [1, 2, 3]), np.float32),
        ((np.array([1, 2], np.uint8), np.array([300, 1000])), np.int64),
        ((np.array([True, False]), np.array([7], np.int32)), np.int32),
    ],
)
@pytest.mark.parametrize("pack", [False, True])
def test_numbers_of_several_dtypes_are_all_kept(parts, dtype, pack):
    rows = [{"text": part} for part in parts]
    length = [len(part) for part in parts]
    (batch,) = ws.Batches(rows, tokens=6, length=length, boundaries=[3], pack=pack, shuffle=False)
    assert batch["text"].dtype == dtype
    assert sorted(batch["text"][batch["text"] != 0]) == sorted(
        value for part in parts for value in part if value
    )


def test_a_batch_of_empty_lists_has_the_dtype_of_the_others():
    rows = [{"text": part} for part in ([], [], [4, 5])]
    data = ws.Batches(rows, tokens=2, length=[0, 0, 2], boundaries=[2])
    assert [batch["text"].dtype for batch in data] == [np.int64] * 3


@pytest.mark.parametrize("pack", [False, True])
def test_places_of_another_shape_are_not_repeated(pack):
    rows = [{"text": np.ones((2, 2))}, {"text": np.full((2, 1), 7.0)}]
    data = ws.Batches(rows, tokens=8, length=[2, 2], pack=pack, shuffle=False)
    with pytest.raises(
        ws.BatchError,
        match=r"\['text'\] must have one shape at every place.* \(1,\) in row 1, \(2,\)",
    ):
        list(data)


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("as_arrays", [False, True])
def test_a_transform_gets_batches_as_they_are_trained_on(as_arrays, pack):
    lengths = np.array([2, 3, 1])
    text = np.where(np.arange(3) < lengths[:, None], 1 + np.arange(3)[:, None], 0)
    rows = (
        {"text": text}
        if as_arrays
        else [{"text": row[:n]} for row, n in zip(text, lengths, strict=True)]
    )
    seen = []

    def transform(batch):
        seen.append(set(batch))
        return {key: value + 100 for key, value in batch.items()}

    data = ws.Batches(
        rows, tokens=3, length=lengths, boundaries=[3], pack=pack, transform=transform
    )
    assert seen == []
    batches = list(data)
    keys = {"text", "segment_ids", "positions"} if pack else {"text"}
    assert seen == [keys] * len(batches)
    assert {value for batch in batches for value in batch["text"].ravel().tolist()} <= {
        100,
        101,
        102,
        103,
    }
    assert sorted(np.concatenate([batch["text"].max(axis=1) for batch in batches])) == (
        [102, 103] if pack else [101, 102, 103]
    )


class Columns:
    """As a tokenised Hugging Face data set: columns of lists."""

    def __init__(self, lengths):
        self.lengths = lengths

    def __len__(self):
        return len(self.lengths)

    def __getitems__(self, numbers):
        return {"ids": [[n] * self.lengths[n] for n in numbers], "label": numbers}

    def __getitem__(self, number):
        return {"ids": [number] * self.lengths[number], "label": number}


def test_columns_of_lists_and_a_function_of_a_row():
    data = ws.Batches(Columns([2, 0, 3, 7]), tokens=14, length=lambda row: len(row["ids"]), pad=99)
    for batch in data:
        for label, ids in zip(batch["label"].tolist(), batch["ids"], strict=True):
            assert (ids[: data.source.items.lengths[label]] == label).all()
            assert (ids[data.source.items.lengths[label] :] == 99).all()


def test_truncate_cuts_at_the_largest_boundary():
    data = bucketed([3, 9, 30], 16, boundaries=[4, 8], truncate=True, pad=PAD)
    found = {
        label: text
        for batch in data
        for label, text in zip(batch["label"].tolist(), batch["text"], strict=True)
    }
    assert found[0].tolist() == [0, 1, 2, PAD]
    assert found[1].tolist() == (1000 + np.arange(8)).tolist()
    assert found[2].tolist() == (2000 + np.arange(8)).tolist()


def test_the_shapes_that_pad_least_are_few():
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(3, 0.7, 5000), 1, 400).astype(int)
    data = bucketed(lengths, 4096)
    least = ws.Batches(rows_of([1]), tokens=4096, length=[1]).shapes
    assert least == [(1, 1)]
    padded = sum(
        length * len(rows)
        for rows in epoch(data)
        for length in [padded_length(data, lengths[rows].max())]
    )
    assert len(data.shapes) <= 12
    assert padded <= 1.2 * lengths.sum()
    assert bucketed([7] * 99, 4096).shapes == [(99, 7)]
    assert bucketed([8] * 50 + [64] * 50, 640).shapes == [(50, 8), (10, 64)]


def padded_length(data, length):
    return min(shape[1] for shape in data.shapes if shape[1] >= length)


# ---- training ----


class Tagging(ws.Objective):
    """Squared distance of every token's value to its label; padding, label -100, weighs nothing."""

    def __call__(self, model, batch, training):
        weight = ops.cast(batch["labels"] != -100, "float32")
        values = ops.square(
            model(batch["ids"], training=training)[..., 0] - ops.cast(batch["labels"], "float32")
        )
        return ws.Mean(values, weight)


def tagger(learning_rate=0.5, **how):
    inputs = keras.Input((None,), dtype="int32")
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Embedding(5, 3)(inputs)))
    for i, variable in enumerate(model.weights):
        variable.assign(np.random.default_rng(i).integers(-2, 3, variable.shape))
    return ws.Trainer(model, Tagging(), optimizer=keras.optimizers.SGD(learning_rate), **how)


def tagged(lengths):
    rng = np.random.default_rng(3)
    return [{"ids": rng.integers(1, 5, n), "labels": rng.integers(-2, 3, n)} for n in lengths]


def bits(trainer):
    return [keras.ops.convert_to_numpy(v).tobytes() for v in trainer.model.weights]


def test_as_many_programs_as_shapes(monkeypatch):
    compilations = count_calls(monkeypatch, type(engines.choose().programs), "compile")
    lengths = np.random.default_rng(1).integers(1, 40, 300)
    data = ws.Batches(
        tagged(lengths), tokens=256, length=lengths, pad={"labels": -100}, boundaries=[10, 20, 40]
    )
    trainer = tagger(0.001)
    steps = list(trainer.steps(data, epochs=2))
    executor = trainer.executor
    assert len(steps) == 2 * len(data)
    assert len(executor.planner.programs) == len(data.shapes) == 3
    probes = len(compilations) - 3
    list(trainer.steps(data, epochs=1))
    assert len(compilations) == 3 + probes
    assert probes <= 2
    assert any(data.select(0, s).full > len(data.rows(0, s)) for s in range(len(data)))


def test_a_short_batch_of_one_row_needs_no_program_of_its_own():
    data = ws.Batches(
        tagged([4] * 5), tokens=8, length=[4] * 5, pad={"labels": -100}, shuffle=False
    )
    trainer = tagger(0.001)
    assert [len(rows) for rows in epoch(data)] == [2, 2, 1]
    assert len(list(trainer.steps(data))) == 3
    assert len(trainer.executor.planner.programs) == 1


@pytest.mark.parametrize("microbatch_size", ["auto", 3])
def test_a_short_batch_filled_up_is_the_same_rows_alone(microbatch_size):
    """The last three rows have 8 tokens, so that all is exact."""
    lengths = [3, 3, 3, 3, 3, 3, 2]
    rows = tagged(lengths)
    data = ws.Batches(
        rows, tokens=16, length=lengths, pad={"labels": -100}, boundaries=[4], shuffle=False
    )
    data.seek(0, 1)
    filled = tagger(microbatch_size=microbatch_size)
    alone = tagger()
    (step,) = filled.steps(data)
    (program,) = filled.executor.planner.programs.values()
    assert program.cut.rows == 4
    parts = [
        {
            k: np.pad(v, (0, 6 - len(v)), constant_values=-100 if k == "labels" else 0)
            for k, v in row.items()
        }
        for row in rows[4:]
    ]
    logs = alone.update({k: np.stack([part[k] for part in parts]) for k in parts[0]})
    assert logs["loss"] == step.loss
    assert bits(filled) == bits(alone)
    assert bits(filled) != bits(tagger())


def test_evaluation_sums_over_all_shapes():
    lengths = [3, 9, 5, 3, 3, 2]
    rows = tagged(lengths)
    trainer = tagger()
    data = ws.Batches(rows, tokens=18, length=lengths, pad={"labels": -100})
    loss = trainer.evaluate(data, return_dict=True, verbose=0)["loss"]
    embeddings, kernel, bias = (np.asarray(v, np.float64) for v in trainer.model.get_weights())
    value = (embeddings @ kernel + bias)[:, 0]
    squares = [np.square(value[row["ids"]] - row["labels"]).sum() for row in rows]
    assert loss == pytest.approx(sum(squares) / sum(lengths), rel=1e-6)
    assert data.position == (0, 0)


def test_predictions_would_stand_in_another_order():
    data = ws.Batches(tagged([3, 4]), tokens=18, length=[3, 4])
    with pytest.raises(ws.SpecificationError, match="in the order of the rows"):
        tagger().predict(data, verbose=0)


@on("jax")
@pytest.mark.slow
def test_a_stream_that_buckets_by_itself_is_exact():
    tf = pytest.importorskip("tensorflow")
    lengths = np.random.default_rng(2).integers(1, 17, 75)
    rows = tagged(lengths)
    signature = {k: tf.TensorSpec((None,), tf.int64) for k in rows[0]}
    ragged = tf.data.Dataset.from_generator(lambda: iter(rows), output_signature=signature)
    stream = ragged.bucket_by_sequence_length(
        lambda row: tf.shape(row["ids"])[0],
        bucket_boundaries=[5, 9, 17],
        bucket_batch_sizes=[8, 8, 4, 4],
        padding_values={"ids": np.int64(0), "labels": np.int64(-100)},
        pad_to_bucket_boundary=True,
    )
    trainer = tagger(learning_rate=0.0)
    for step in trainer.steps(ws.Batches(stream)):
        loss = step.logs["loss"]
    embeddings, kernel, bias = trainer.model.get_weights()
    value = (embeddings @ kernel + bias)[:, 0]
    total = sum(np.square(value[row["ids"]] - row["labels"]).sum() for row in rows)
    assert loss == np.float32(total) / np.float32(lengths.sum())
    assert sorted(p.cut.rows for p in trainer.executor.planner.programs.values()) == [4, 8, 8]


@pytest.mark.large
def test_ten_million_rows():
    num = 10_000_000
    lengths = np.clip(np.random.default_rng(0).lognormal(3.3, 0.8, num), 1, 1000).astype(np.int32)

    class Rows:
        def __len__(self):
            return num

        def __getitem__(self, i):
            return {"text": np.full(lengths[i], i)}

    data = ws.Batches(Rows(), tokens=16_384, length=lengths)
    buckets = data.sampler
    assert len(data.shapes) <= 12
    assert (np.bincount(buckets.by_bucket, minlength=num) == 1).all()
    for k, (_, length) in enumerate(data.shapes):
        assert lengths[buckets.by_bucket[buckets.starts[k] : buckets.starts[k + 1]]].max() <= length
    ids = np.concatenate([data.rows(7, step) for step in range(300)])
    assert len(np.unique(ids)) == len(ids)
    assert (data.load(7, 299)["text"].max(axis=1) == data.rows(7, 299)).all()
