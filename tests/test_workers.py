"""A PyDataset's workers load ahead, and change nothing of what is trained on."""

import threading
import time

import keras
import numpy as np
import pytest

import wholestep as ws
from wholestep.data.workers import Workers

SECONDS = 0.02
X = np.arange(24, dtype="float32").reshape(8, 3)


class Numbers(keras.utils.PyDataset):
    """Eight batches; each holds its number and how often the epoch's beginning and end were told."""

    def __init__(self, fails_at=None, **how):
        super().__init__(**how)
        self.told, self.threads, self.fails_at = 0, set(), fails_at

    def __len__(self):
        return 8

    def __getitem__(self, number):
        self.threads.add(threading.current_thread().name)
        if number == self.fails_at:
            raise OSError("no such file")
        time.sleep(SECONDS)
        return {"number": np.array([number]), "told": np.array([self.told])}

    def on_epoch_begin(self):
        self.told += 1

    def on_epoch_end(self):
        self.told += 10


def told(batches, epochs=2):
    return [[int(batch[name][0]) for name in ("number", "told")] for _ in range(epochs) for batch in batches]


@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_come_in_the_same_order_and_of_their_own_epoch(shuffle):
    alone = ws.Batches(Numbers(), seed=3, shuffle=shuffle)
    several = ws.Batches(data := Numbers(workers=4), seed=3, shuffle=shuffle)
    assert told(several) == told(alone)
    assert len([name for name in data.threads if name.startswith("wholestep-load")]) > 1


def test_going_elsewhere_loads_what_is_there():
    batches = ws.Batches(Numbers(workers=3), shuffle=False)
    seen = [int(next(batches)["number"][0]) for _ in range(3)]
    batches.seek(0, 6)
    seen += [int(next(batches)["number"][0]) for _ in range(2)]
    assert seen == [0, 1, 2, 6, 7]


def test_what_a_worker_cannot_load_is_raised_where_its_batch_would_come():
    batches = ws.Batches(Numbers(fails_at=2, workers=4), shuffle=False)
    assert [int(next(batches)["number"][0]) for _ in range(2)] == [0, 1]
    with pytest.raises(OSError, match="no such file"):
        next(batches)


def test_workers_keep_to_what_is_expected():
    asked = []
    workers = Workers(lambda number: asked.append(number) or number, 1, 4)
    workers.expect([1, 2])
    assert [workers.take(1), workers.take(2), workers.take(9)] == [1, 2, 9]
    workers.expect([5])
    assert workers.take(5) == 5
    workers.forget()
    assert workers.take(5) == 5
    assert asked == [1, 2, 9, 5, 5]


def test_a_model_trains_alike():
    class Rows(keras.utils.PyDataset):
        def __len__(self):
            return 4

        def __getitem__(self, number):
            return X[2 * number : 2 * number + 2], X[2 * number : 2 * number + 2, :1]

    def weights(**how):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(keras.optimizers.Adam(0.1), "mse")
        ws.Trainer(model).fit(Rows(**how), epochs=2, verbose=0)
        return model.get_weights()[0]

    np.testing.assert_array_equal(weights(workers=3), weights())


def test_processes_are_said_to_be_threads():
    with pytest.warns(UserWarning, match="use_multiprocessing=True has no effect"):
        ws.Batches(Numbers(workers=2, use_multiprocessing=True))


@pytest.mark.parametrize("workers", [1, 3])
def test_an_iterator_that_ends_inside_a_data_set_is_named(workers):
    class Ends(Numbers):
        def __getitem__(self, number):
            return super().__getitem__(number) if number < 2 else next(iter([]))

    batches = ws.Batches(Ends(workers=workers), shuffle=False)
    with pytest.raises(ws.BatchError, match="batch 2"):
        told(batches)


def test_an_order_of_another_name_is_refused():
    with pytest.raises(ws.SpecificationError, match='True, False or "batch"'):
        ws.Batches(X, 4, shuffle="Batch")


def test_the_first_batch_is_drawn_again_once_an_epoch_has_begun():
    batches = ws.Batches(Numbers(), shuffle=False)
    assert batches.example()["told"].tolist() == [0]
    assert next(batches)["told"].tolist() == [1]


def test_a_loop_that_is_left_ends_its_workers():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    batches = ws.Batches(Numbers(workers=2), transform=lambda batch: (X, X[:, :1]))
    before = {*threading.enumerate()}
    for step in ws.Trainer(model).steps(batches):
        if step.number == 2:
            break
    assert not [thread for thread in {*threading.enumerate()} - before if thread.name.startswith("wholestep-load")]
    assert next(batches)[0].shape == (8, 3)
