"""Several sequences share a row: every one once an epoch, none cut apart, and few places left
empty.
"""

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from keras import ops
from shares import on

import wholestep as ws
from wholestep.data.packing import find_patterns

LENGTHS = st.lists(st.integers(0, 20), min_size=1, max_size=60)
PAD = -7


def rows_of(lengths):
    """Distinct ragged rows: place p of row i holds 1000 i + p."""
    return [
        {"text": 1000 * i + np.arange(n), "more": np.full((n, 2), float(i))}
        for i, n in enumerate(lengths)
    ]


def packed(lengths, tokens=64, **arguments):
    return ws.Batches(
        rows_of(lengths), tokens=tokens, length=np.array(lengths), pack=True, **arguments
    )


def unpacked(batch):
    """Return what stands in the segments of a batch, row by row."""
    found = []
    for text, more, segments, positions in zip(
        *(batch[k] for k in ("text", "more", "segment_ids", "positions")), strict=True
    ):
        for segment in range(1, segments.max() + 1):
            at = np.flatnonzero(segments == segment)
            if at.size:
                assert (np.diff(at) == 1).all()
                assert positions[at].tolist() == list(range(len(at)))
                assert (more[at] == text[at[0]] // 1000).all()
                found.append(text[at].tolist())
        assert (text[segments == 0] == PAD).all()
        assert (more[segments == 0] == PAD).all()
        assert (positions[segments == 0] == 0).all()
    return found


@on("jax")
@given(LENGTHS, st.integers(20, 100), st.integers(0, 5))
def test_every_row_once_an_epoch_whole_and_within_the_budget(lengths, tokens, seed):
    data = packed(lengths, tokens, seed=seed, pad=PAD)
    width = max(1, *lengths, 1)
    for epoch in range(2):
        seen = []
        ids = []
        for step, batch in enumerate(data):
            assert batch["text"].shape[0] <= data.shapes[0][0] <= tokens // width
            assert batch["text"].shape[1] == data.shapes[0][1] == width
            found = unpacked(batch)
            rows = data.rows(epoch, step)
            assert found == [
                (1000 * row + np.arange(lengths[row])).tolist() for row in rows if lengths[row]
            ]
            assert np.concatenate(data.select(epoch, step).names).tolist() == rows.tolist()
            assert len(data.select(epoch, step).names) == len(batch["text"])
            seen += found
            ids += rows.tolist()
        assert sorted(ids) == list(range(len(lengths)))
        assert sum(map(len, seen)) == sum(lengths)


@on("jax")
@given(st.lists(st.integers(0, 9), min_size=1, max_size=16).filter(any), st.integers(15, 40))
def test_patterns_are_those_of_best_fit_decreasing(counts, width):
    """Against the plain algorithm, one sequence after the other."""
    patterns = find_patterns(np.array(counts), width)
    rooms = []
    for length in np.repeat(np.arange(len(counts)), counts)[::-1].tolist():
        need = max(length, 1)
        fitting = [room for room in rooms if room >= need]
        room = min(fitting, default=width)
        if fitting:
            rooms.remove(room)
        rooms.append(room - need)
    assert patterns.first_pack[-1] == len(rooms)
    at, length, place = patterns.places(np.arange(len(rooms)))
    assert sorted(width - np.bincount(at, np.maximum(length, 1))) == sorted(rooms)
    for n, count in enumerate(counts):
        assert sorted(place[length == n]) == list(range(count))


@on("jax")
def test_few_places_are_left_empty():
    lengths = np.clip(np.random.default_rng(0).lognormal(3, 0.7, 5000), 1, 128).astype(int)
    data = packed(lengths, 1024)
    assert data.sampler.num_packs * 128 <= 1.01 * lengths.sum() + 128


@on("jax")
@given(LENGTHS, st.integers(0, 20))
def test_the_order_goes_on_from_any_place(lengths, steps):
    data = packed(lengths, seed=2)
    other = packed(lengths, seed=2)
    for _ in range(steps):
        next(data)
    other.seek(*data.position)
    assert [next(data)["text"].tolist() for _ in range(3)] == [
        next(other)["text"].tolist() for _ in range(3)
    ]


@on("jax")
def test_other_rows_meet_each_epoch_and_every_row_meets_many():
    data = packed([5, 6, 7] * 40, 20 * 18, boundaries=[18])
    packs = [{frozenset(ids.tolist()) for ids in data.select(epoch, 0).names} for epoch in range(8)]
    assert len(set().union(*packs)) > 0.95 * sum(map(len, packs))
    assert [ids.tolist() for ids in data.select(0, 1).names] != [
        ids.tolist() for ids in data.select(1, 1).names
    ]
    still = data.in_order()
    assert still.rows(0, 1).tolist() == still.rows(1, 1).tolist()


def test_rows_of_one_length_meet_any_of_another():
    """Each packed row holds a row of length 5 and a row of length 6, of 40 rows each."""
    data = packed([5, 6] * 40, 40 * 11, boundaries=[11])
    packs = [frozenset(ids.tolist()) for epoch in range(8) for ids in data.select(epoch, 0).names]
    assert {len(pack) for pack in packs} == {2}
    assert len(set(packs)) > 0.8 * len(packs)


def test_arrays_are_packed_too_and_sequences_cut_off():
    lengths = np.array([2, 5, 3])
    text = 1000 * np.arange(3)[:, None] + np.arange(6)
    data = ws.Batches(
        {"text": text},
        tokens=8,
        length=lengths,
        pack=True,
        boundaries=[4],
        truncate=True,
        shuffle=False,
    )
    found = {}
    for batch in data:
        for text, segments in zip(batch["text"], batch["segment_ids"], strict=True):
            for segment in range(1, segments.max() + 1):
                values = text[segments == segment].tolist()
                found[values[0] // 1000] = values
    assert found == {0: [0, 1], 1: [1000, 1001, 1002, 1003], 2: [2000, 2001, 2002]}


@pytest.mark.parametrize(
    ("rows", "arguments", "error", "message"),
    [
        (
            [{"text": np.zeros(3), "label": 1}],
            {},
            ws.SpecificationError,
            r"row\['label'\] must have an axis",
        ),
        ([np.zeros(3)], {}, ws.SpecificationError, "Packed rows must be dicts"),
        (
            [{"segment_ids": np.zeros(3)}],
            {},
            ws.SpecificationError,
            "Packed rows must be dicts.*keys segment_ids",
        ),
        (
            [{"a": np.zeros(3), "b": np.zeros(3)}],
            {"length": {"a": [3], "b": [3]}},
            ws.SpecificationError,
            "one sequence",
        ),
        (
            [{"text": np.zeros(3)}],
            {"boundaries": [4, 8]},
            ws.SpecificationError,
            "one length. Received: 2 boundaries",
        ),
        (
            [{"text": np.zeros(3)}],
            {"boundaries": [2]},
            ws.BatchError,
            r"largest shape \(length 2\). Received: row 0",
        ),
        (
            [{"text": np.zeros(3)}],
            {"tokens": 2},
            ws.BatchError,
            "row 0, length 3, which takes 3 places",
        ),
    ],
)
def test_rows_that_cannot_be_packed_are_refused(rows, arguments, error, message):
    source = rows if isinstance(rows[0], dict) else Rows(rows)
    with pytest.raises(error, match=message):
        ws.Batches(source, **{"tokens": 64, "length": [3], "pack": True} | arguments)


class Rows:
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


# ---- training ----


class Sums(ws.Objective):
    """The squared distance of every segment's running sum to its label: a model that sees a segment
    only.
    """

    def __call__(self, model, batch, training):
        segments = ops.convert_to_tensor(batch["segment_ids"])
        sees = (segments[:, :, None] == segments[:, None, :]) & (segments[:, :, None] > 0)
        earlier = batch["positions"][:, :, None] >= batch["positions"][:, None, :]
        values = model(batch["ids"], training=training)[..., 0]
        sums = ops.einsum("rij,rj->ri", ops.cast(sees & earlier, "float32"), values)
        weight = ops.cast(segments > 0, "float32")
        return ws.Mean(ops.square(sums - ops.cast(batch["labels"], "float32")), weight)


def summer():
    inputs = keras.Input((None,), dtype="int32")
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Embedding(5, 3)(inputs)))
    for i, variable in enumerate(model.weights):
        variable.assign(np.random.default_rng(i).integers(-1, 2, variable.shape))
    return ws.Trainer(model, Sums(), optimizer=keras.optimizers.SGD(0.5))


def labelled(lengths):
    rng = np.random.default_rng(3)
    return [{"ids": rng.integers(1, 5, n), "labels": rng.integers(-2, 3, n)} for n in lengths]


def test_packed_rows_make_the_update_of_the_rows_alone():
    """16 tokens in all, so that all is exact: five packed rows of 8 places, and five rows of their
    own.
    """
    lengths = [5, 3, 4, 2, 2]
    rows = labelled(lengths)
    together = summer()
    alone = summer()
    (step,) = together.steps(ws.Batches(rows, tokens=40, length=lengths, pack=True, boundaries=[8]))
    assert together.executor.planner.programs
    padded = {k: np.stack([np.pad(row[k], (0, 5 - len(row[k]))) for row in rows]) for k in rows[0]}
    segments = (np.arange(5) < np.array(lengths)[:, None]).astype(np.int32)
    logs = alone.update(
        padded | {"segment_ids": segments, "positions": np.arange(5)[None] * segments}
    )
    assert logs["loss"] == step.loss
    weights = [
        [ops.convert_to_numpy(v).tobytes() for v in t.model.weights]
        for t in (together, alone, summer())
    ]
    assert weights[0] == weights[1] != weights[2]


def test_one_program_for_all_packed_batches():
    lengths = np.random.default_rng(1).integers(1, 9, 61)
    data = ws.Batches(labelled(lengths), tokens=32, length=lengths, pack=True)
    assert data.has_short_batch
    trainer = summer()
    trainer.model.optimizer.learning_rate = 0.001
    assert len(list(trainer.steps(data, epochs=2))) == 2 * len(data)
    assert len(trainer.executor.planner.programs) == 1


def test_an_error_names_the_rows_that_are_packed_together():
    rows = [{"ids": np.ones(n, int), "labels": np.full(n, 1.0)} for n in (3, 2, 4, 1)]
    rows[2]["labels"][1] = np.nan
    data = ws.Batches(rows, tokens=10, length=[3, 2, 4, 1], pack=True, boundaries=[5])
    with pytest.raises(ws.NonFiniteError, match="not finite in rows 2, 3") as caught:
        list(summer().steps(data))
    assert caught.value.rows == (2, 3)
