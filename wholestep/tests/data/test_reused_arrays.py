"""A transform may write all its batches to the same arrays, and a set of batches too."""

import keras
import numpy as np
import pytest
from shares import share
from small import model, same

import wholestep as ws
from wholestep import dispatcher, tree
from wholestep.data import block
from wholestep.data.leaves import copying

ROWS = 64
SIZE = 4
X = np.random.default_rng(0).normal(size=(ROWS, 6)).astype("float32")
Y = np.random.default_rng(1).integers(0, 4, ROWS)


class Rows:
    def __len__(self):
        return ROWS

    def __getitem__(self, row):
        return X[row], Y[row]


class Numbered(keras.utils.PyDataset):
    def __len__(self):
        return ROWS // SIZE

    def __getitem__(self, i):
        return X[i * SIZE : (i + 1) * SIZE], Y[i * SIZE : (i + 1) * SIZE]


class Stream:
    def __iter__(self):
        return map(Numbered().__getitem__, range(ROWS // SIZE))


def doubled(batch):
    return 2 * batch[0], batch[1]


class Doubled:
    """The same transform, which writes into arrays that it has made once, and returns them (in a
    nest made once).
    """

    def __init__(self):
        self.arrays = np.empty((SIZE, 6), "float32"), np.empty(SIZE, "int64")

    def __call__(self, batch):
        np.multiply(batch[0], 2, out=self.arrays[0])
        self.arrays[1][...] = batch[1]
        return self.arrays


def train(data, how, monkeypatch):
    """Return the trained model, and the most batches in a dispatch."""
    monkeypatch.setattr(dispatcher, "_SECONDS_PER_DISPATCH", 1e6)  # as if updates took no time
    made = model()
    num = []
    stack = block.stack
    monkeypatch.setattr(
        block, "stack", lambda batches, room: num.append(len(batches)) or stack(batches, room)
    )
    trainer = ws.Trainer(made)
    if how == "fit":
        trainer.fit(data, epochs=2, verbose=0)
    else:
        assert all(np.isfinite(step.loss) for step in trainer.steps(data, epochs=2))
    return made, max(num, default=1)


@pytest.mark.parametrize("how", ["fit", "steps"])
@pytest.mark.parametrize("source", share([Rows, Numbered, Stream]))
@pytest.mark.slow
def test_a_transform_that_reuses_its_arrays_trains_as_one_that_does_not(source, how, monkeypatch):
    def batches(transform):
        return ws.Batches(
            source(), SIZE if source is Rows else None, shuffle=False, transform=transform
        )

    fresh, most = train(batches(doubled), how, monkeypatch)
    assert most > 4 or how == "steps"
    assert same(fresh, train(batches(Doubled()), how, monkeypatch)[0])


def kept(data):
    """Return all batches of an epoch, drawn before one is looked at."""
    return [batch["x"].tolist() for batch in list(data)]


class Sums:
    """Adds one to `x`, in an array for each shape; another object may share its memory."""

    def __init__(self, convert=np.asarray):
        self.arrays = {}
        self.convert = convert

    def __call__(self, batch):
        x = self.arrays.setdefault(batch["x"].shape, np.empty_like(batch["x"]))
        np.add(batch["x"], 1, out=x)
        return {"x": self.convert(x), "same": batch["x"]}


def test_batches_that_are_padded_prepared_or_no_arrays_are_kept_too():
    rows = [
        {"x": np.arange(length, dtype="float32") + 10 * length} for length in (2, 2, 2, 2, 3, 3)
    ]
    lengths = [len(row["x"]) for row in rows]
    ready = [{"x": np.full((2, 2), number, "float32")} for number in range(3)]

    def cases(transform):
        yield ws.Batches(
            rows, tokens=6, length=lengths, boundaries=[3], shuffle=False, transform=transform
        )
        yield ws.Batches(iter(ready)).prepared(transform)
        yield ws.Batches(iter(ready), transform=transform)

    for convert in (np.asarray, memoryview):
        for reused, fresh in zip(
            cases(Sums(convert)), cases(lambda batch: {"x": batch["x"] + 1}), strict=True
        ):
            assert kept(reused) == kept(fresh)


def test_large_copies_are_aligned_and_arrays_that_pass_through_are_not_copied():
    given = np.zeros((256, 64), "float32"), np.zeros(256, "int64")
    large, same_labels = copying(lambda batch: (batch[0] + 1, batch[1]))(given)
    assert tree.address(large) % 64 == 0
    assert same_labels is given[1]
