"""Every row once an epoch, from any kind of source; a place is two integers."""

from itertools import islice

import keras
import numpy as np
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st

import wholestep as ws
from wholestep.data import classify, open_batches

BY_LENGTH = {"tokens": 16, "length": [4] * 9}


def ids(batch):
    return np.asarray(batch["x"]).reshape(len(batch["x"]), -1)[:, 0].tolist()


@given(st.integers(1, 60), st.integers(1, 70), st.integers(0, 5))
def test_every_row_once_an_epoch(num_rows, batch_size, seed):
    data = ws.Batches({"x": np.arange(num_rows)}, batch_size, seed=seed)
    for epoch in range(2):
        assert data.position == (epoch, 0)
        seen = [ids(batch) for batch in data]
        assert sorted(row for rows in seen for row in rows) == list(range(num_rows))
        assert len(seen) == len(data)


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 50))
def test_seek_of_position_is_the_identity(num_rows, batch_size, steps):
    data = ws.Batches({"x": np.arange(num_rows)}, batch_size, seed=2)
    for _ in range(steps):
        next(data)
    other = ws.Batches({"x": np.arange(num_rows)}, batch_size, seed=2)
    other.seek(*data.position)
    assert [ids(next(data)) for _ in range(3)] == [ids(next(other)) for _ in range(3)]


def test_another_order_each_epoch():
    data = ws.Batches({"x": np.arange(30)}, 30, seed=1)
    assert ids(next(data)) != ids(next(data))


class Rows:
    def __len__(self):
        return 10

    def __getitem__(self, i):
        assert isinstance(i, int)
        return {"x": np.float64(i), "y": np.full(2, i)}


class ManyRows(Rows):
    def __getitems__(self, numbers):
        return [self[n] for n in numbers]


@pytest.mark.parametrize("source", [Rows(), ManyRows()])
def test_a_sequence_of_rows(source):
    batches = list(ws.Batches(source, 4, shuffle=False))
    assert [ids(b) for b in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert batches[0]["x"].dtype == np.float32
    assert batches[0]["y"].shape == (4, 2)


class Ready(keras.utils.PyDataset):
    began = ended = 0

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return np.full((i + 1, 1), i), np.zeros(i + 1)

    def on_epoch_begin(self):
        self.began += 1

    def on_epoch_end(self):
        self.ended += 1


def test_a_py_dataset_is_shuffled_by_batches():
    source = Ready()
    data = ws.Batches(source, seed=3)
    sizes = [sorted(len(batch[0]) for batch in data) for _ in range(2)]
    assert sizes == [[1, 2, 3, 4]] * 2
    assert (source.began, source.ended) == (2, 2)


class Growing(keras.utils.PyDataset):
    """One batch more, or fewer, in each epoch."""

    def __init__(self, num, by, **options):
        super().__init__(**options)
        self.num = num
        self.by = by
        self.drawn = []

    def __len__(self):
        return self.num

    def __getitem__(self, i):
        assert i < self.num
        self.drawn.append(i)
        return np.full((2, 1), i, "float32"), np.zeros(2)

    def on_epoch_end(self):
        self.num += self.by


@pytest.mark.parametrize(("num", "by"), [(2, 2), (7, -2)])
@pytest.mark.parametrize("workers", [1, 2])
def test_an_epoch_has_as_many_batches_as_a_py_dataset_has_then(num, by, workers):
    for shuffle in (False, True):
        source = Growing(num, by, workers=workers)
        data = ws.Batches(source, seed=3, shuffle=shuffle)
        epochs = [[int(x[0, 0]) for x, _ in data] for _ in range(3)]
        assert [sorted(each) for each in epochs] == [list(range(num + by * i)) for i in range(3)]
        assert shuffle or all(each == sorted(each) for each in epochs)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    ws.Trainer(model).fit(Growing(num, by, workers=workers), epochs=3, verbose=0)
    assert int(model.optimizer.iterations) == 3 * num + 3 * by


def test_a_generator_is_taken_as_it_comes_and_can_be_looked_into():
    data = ws.Batches(np.full((2,), i) for i in range(3))
    assert data.example().tolist() == [0, 0]
    assert [batch.tolist() for batch in data] == [[0, 0], [1, 1], [2, 2]]
    assert data.position == (1, 0)
    with pytest.raises(TypeError):
        len(data)


def test_a_list_of_batches_begins_again_and_can_be_sought_in():
    class Stream:
        def __iter__(self):
            return iter([(np.full((2, 1), i), np.zeros(2)) for i in range(3)])

    data = ws.Batches(Stream())
    assert [int(x[0, 0]) for x, _ in data] == [int(x[0, 0]) for x, _ in data] == [0, 1, 2]
    data.seek(2, 1)
    assert int(next(data)[0][0, 0]) == 1


def test_a_tf_dataset():
    tf = pytest.importorskip("tensorflow")
    source = tf.data.Dataset.from_tensor_slices((np.arange(5.0), np.arange(5))).batch(2)
    batches = list(ws.Batches(source))
    assert [len(x) for x, _ in batches] == [2, 2, 1]
    assert batches[0][0].dtype == np.float32


def test_a_size_leaves_ready_batches_their_size():
    assert open_batches(classify(Ready()), 7).is_ready
    assert open_batches(classify(np.zeros(9)), 7).sampler.size == 7


@pytest.mark.parametrize(
    ("source", "batch_size", "error", "message"),
    [
        (np.zeros((3, 2)), 0, ws.SpecificationError, "at least 1"),
        (np.zeros((3, 2)), 2.5, ws.SpecificationError, "whole number"),
        (Ready(), 4, ws.SpecificationError, "Ready-made batches have their own size"),
        (np.zeros((0, 2)), 4, ws.BatchError, "at least one row"),
        ({"a": np.zeros(3), "b": np.zeros(2)}, 4, ws.BatchError, "same number of rows"),
        (np.array(["a", None], object), 2, ws.BatchError, "must hold numbers"),
        (np.array([[1], [1, 2]], dtype=object), 2, ws.BatchError, "must hold numbers"),
        (3, 2, ws.BatchError, "Data must be nested arrays"),
        ((i for i in ()), None, None, None),
    ],
)
def test_bad_sources(source, batch_size, error, message):
    if error is None:
        with pytest.raises(ws.BatchError, match="at least one batch"):
            ws.Batches(source).example()
        return
    with pytest.raises(error, match=message):
        ws.Batches(source, batch_size)


@pytest.mark.parametrize("place", [(0, 4), (0, 1000), (0, -1), (-1, 0), (0, 1.5)])
@pytest.mark.parametrize("arguments", [{"batch_size": 4}, BY_LENGTH, BY_LENGTH | {"pack": True}])
def test_a_place_that_is_not_there(arguments, place):
    data = ws.Batches([{"x": np.arange(4)} for _ in range(9)], **arguments)
    assert len(data) == 3
    data.seek(1, 2)
    with pytest.raises(
        ws.BatchError, match=rf"epoch {place[0]}, step {place[1]} where an epoch has 3 batches"
    ):
        data.seek(*place)
    assert data.position == (1, 2)


@pytest.mark.parametrize("step", [3, 1000, -1])
@pytest.mark.parametrize("arguments", [{"batch_size": 4}, BY_LENGTH, BY_LENGTH | {"pack": True}])
def test_rows_of_a_place_that_is_not_there(arguments, step):
    data = ws.Batches([{"x": np.arange(4)} for _ in range(9)], **arguments)
    for ask in (data.rows, data.load):
        with pytest.raises(ws.BatchError, match=f"step {step} where an epoch has 3"):
            ask(0, step)


@pytest.mark.parametrize("arguments", [{"batch_size": 4}, BY_LENGTH, BY_LENGTH | {"pack": True}])
def test_the_place_after_the_last_batch_is_the_next_epoch(arguments):
    data = ws.Batches([{"x": np.arange(4)} for _ in range(9)], **arguments)
    data.seek(0, 3)
    assert data.position == (1, 0)
    assert [len(list(data)) for _ in range(2)] == [3, 3]


@pytest.mark.parametrize("seed", [None, 1.5, "7", True])
def test_a_seed_that_is_no_whole_number(seed):
    with pytest.raises(ws.SpecificationError, match="seed must be a whole number"):
        ws.Batches(np.arange(9), 4, seed=seed)


def test_a_seed_of_numpy_is_that_number():
    one, other = (ws.Batches(np.arange(9), 4, seed=seed) for seed in (np.int64(3), 3))
    assert [batch.tolist() for batch in one] == [batch.tolist() for batch in other]


class Pairs:
    """A stream of ten batches, (2i, 2i + 1); `is_counted` says whether it tells how many."""

    def __init__(self, num=10):
        self.num = num

    def __iter__(self):
        return iter([{"x": np.array([[2.0 * i], [2.0 * i + 1]])} for i in range(self.num)])


class Counted(Pairs):
    def __len__(self):
        return self.num


class Content(ws.Objective):
    """A loss that identifies the rows of a batch: their mean."""

    def __call__(self, model, batch, training):
        return ws.Mean(batch["x"][:, 0] + 0 * model(batch["x"], training=training)[:, 0])


def trained(data, stop=None):
    """Train for `num` updates or to the end of the epoch; return the first row of every batch."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    loop = ws.Trainer(model, Content(), optimizer=keras.optimizers.SGD(0.0)).steps(data)
    seen = [step.loss - 0.5 for step in islice(loop, stop)]
    loop.close()
    return seen


def first_rows(data):
    return [float(batch["x"][0, 0]) for batch in data]


LEFT = [(source, stop, first_rows) for source in (Pairs, Counted) for stop in (3, 7, 8, 9, 10)]


@pytest.mark.parametrize(
    ("source", "stop", "goes_on"),
    [*LEFT, (Pairs, 3, trained), (Counted, 9, trained), (Pairs, 10, trained)],
)
def test_a_loop_that_is_left_goes_on_where_it_stopped(source, stop, goes_on):
    data = ws.Batches(source())
    assert trained(data, stop) == list(range(0, 2 * stop, 2))
    assert data.position == (0, stop)
    assert data.example()["x"][0, 0] in (2 * stop, 0)
    assert goes_on(data) == list(range(2 * stop, 20, 2))
    assert data.position == (1, 0)
    assert goes_on(data) == list(range(0, 20, 2))


@pytest.mark.parametrize(
    ("place", "goes_on"),
    [
        ((0, 0), first_rows),
        ((0, 4), trained),
        ((0, 4), first_rows),
        ((3, 2), trained),
        ((0, 10), first_rows),
    ],
)
def test_a_stream_that_was_left_can_be_sought_in(place, goes_on):
    data = ws.Batches(Pairs())
    trained(data, 3)
    data.seek(*place)
    assert goes_on(data) == list(range(2 * place[1], 20, 2))
    assert data.position == (place[0] + 1, 0)


def test_an_iterator_keeps_batches_that_were_loaded_ahead():
    data = ws.Batches(iter(Pairs()))
    trained(data, 3)
    data.seek(0)
    assert first_rows(data) == list(range(6, 20, 2))


def test_a_stream_has_no_place_beyond_its_end():
    counted = ws.Batches(Counted())
    uncounted = ws.Batches(Pairs())
    counted.seek(0, 10)
    assert counted.position == (1, 0)
    for data in (counted, uncounted):
        with pytest.raises(ws.BatchError, match="epoch 0, step 99 where an epoch has 10 batches"):
            data.seek(0, 99)
        data.seek(0, 9)
        assert first_rows(data) == [18]


def test_running_forward_leaves_no_batch_of_before():
    class Again:
        def __iter__(self):
            return (np.full((2,), i) for i in range(3))

    data = ws.Batches(Again())
    next(data)
    data.unused.append("a batch that a loop did not use")
    data.run_forward(1, 0)
    assert (data.position, data.unused) == ((1, 0), [])
    assert next(data).tolist() == [0, 0]


class Numbered(keras.utils.PyDataset):
    def __len__(self):
        return 5

    def __getitem__(self, number):
        return np.full((4, 2), number, "float32")


class Stream:
    def __iter__(self):
        return iter([np.ones((4, 2), "float32")] * 5)


def spending(num):
    """Return a transform that raises StopIteration in its call after the first `num`."""
    held = iter(range(num))
    return lambda batch: (next(held), batch)[1]


@pytest.mark.parametrize(
    ("source", "how"),
    [
        ([{"x": np.ones(2, "float32")} for _ in range(20)], {"batch_size": 4}),
        ([{"x": np.ones(2, "float32")} for _ in range(20)], {"tokens": 8, "length": [2] * 20}),
        (scipy.sparse.csr_array(np.eye(20, 3, dtype="float32")), {"batch_size": 4}),
        (Numbered(), {}),
        (Stream(), {}),
    ],
    ids=["rows", "by length", "sparse", "numbered", "stream"],
)
@pytest.mark.parametrize("is_prepared", [False, True])
def test_a_transform_that_raises_stop_iteration_ends_no_epoch(source, how, is_prepared):
    data = ws.Batches(source, **how, transform=None if is_prepared else spending(2))
    data = data.prepared(spending(2)) if is_prepared else data
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(data)
