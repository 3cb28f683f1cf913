"""The workers of a PyDataset load ahead, and training data stay the same."""

import gc
import multiprocessing
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import keras
import numpy as np
import pytest
from scripts import lean
from shares import later

import wholestep as ws
from wholestep.data import workers
from wholestep.data.workers import Threads, Workers

SECONDS = 0.02
X = np.arange(24, dtype="float32").reshape(8, 3)


class Numbers(keras.utils.PyDataset):
    """Eight batches; each holds its number and how often the epoch's beginning and end were
    told.
    """

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


def drawn(batches, epochs=2):
    return [batch for _ in range(epochs) for batch in batches]


def as_told(seen):
    return [[int(batch[name][0]) for name in ("number", "told")] for batch in seen]


@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_come_in_the_same_order_and_of_their_own_epoch(shuffle):
    alone = ws.Batches(Numbers(), seed=3, shuffle=shuffle)
    several = ws.Batches(data := Numbers(workers=4), seed=3, shuffle=shuffle)
    assert as_told(drawn(several)) == as_told(drawn(alone))
    assert len([name for name in data.threads if name.startswith("wholestep-load")]) > 1


def test_an_example_loads_one_batch_alone():
    loaded = []

    class Listed(Numbers):
        def __getitem__(self, number):
            loaded.append(number)
            return super().__getitem__(number)

    batches = ws.Batches(Listed(workers=3), shuffle=False)
    batches.example()
    time.sleep(2 * SECONDS)
    assert loaded == [0]
    drawn(batches, epochs=1)
    assert sorted(loaded) == [0, *range(8)]


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

    def get(number):
        asked.append(number)
        return number

    workers = Workers(Threads(get, 1), get, 4)
    workers.expect([1, 2])
    assert [workers.take(1), workers.take(2), workers.take(9)] == [1, 2, 9]
    workers.expect([5])
    assert workers.take(5) == 5
    workers.end()
    assert workers.take(5) == 5
    assert asked == [1, 2, 9, 5, 5]


@pytest.mark.parametrize("how", [{"workers": 3}, {"workers": 1, "use_multiprocessing": True}])
def test_a_model_trains_alike(how):
    class Rows(keras.utils.PyDataset):
        def __len__(self):
            return 4

        def __getitem__(self, number):
            return X[2 * number : 2 * number + 2], X[2 * number : 2 * number + 2, :1]

    def weights(**how):
        model = keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")]
        )
        model.compile(keras.optimizers.Adam(0.1), "mse")
        ws.Trainer(model).fit(Rows(**how), epochs=2, verbose=0)
        return model.get_weights()[0]

    np.testing.assert_array_equal(weights(**how), weights())


@pytest.mark.parametrize("workers", [1, 3])
def test_an_iterator_that_ends_inside_a_data_set_is_named(workers):
    class Ends(Numbers):
        def __getitem__(self, number):
            return super().__getitem__(number) if number < 2 else next(iter([]))

    batches = ws.Batches(Ends(workers=workers), shuffle=False)
    with pytest.raises(ws.BatchError, match="batch 2"):
        drawn(batches)


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
    assert not [
        thread
        for thread in {*threading.enumerate()} - before
        if thread.name.startswith("wholestep-load")
    ]
    assert next(batches)[0].shape == (8, 3)


class Forked(Numbers):
    """As above, and with a draw, and the process that loads it."""

    def __init__(self, **how):
        super().__init__(**{"workers": 3, "use_multiprocessing": True, **how})

    def __getitem__(self, number):
        own = {
            "draw": np.random.random(1),
            "other": np.array([random.random()]),
            "process": np.array([os.getpid()]),
        }
        return super().__getitem__(number) | own


def in_forks(data, epochs=2):
    batches = ws.Batches(data, shuffle=False)
    try:
        return drawn(batches, epochs)
    finally:
        batches.source.workers.end()


@pytest.mark.parametrize("num", [1, 3])
def test_processes_load_the_same_batches_in_order_and_know_what_an_epoch_has_changed(num):
    seen = in_forks(Forked(workers=num))
    assert as_told(seen) == as_told(drawn(ws.Batches(Numbers(), shuffle=False)))
    processes = {int(batch["process"][0]) for batch in seen[1:]}
    assert os.getpid() not in processes
    assert num == 1 or len(processes) > 1
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_no_two_batches_have_the_same_draws_and_a_seed_brings_them_back():
    def draws(num):
        keras.utils.set_random_seed(4)
        return [
            (float(b["draw"][0]), float(b["other"][0])) for b in in_forks(Forked(workers=num))[1:]
        ]

    first = draws(3)
    assert len({draw for both in first for draw in both}) == 2 * len(first)
    assert draws(2) == first


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(keras.distribution, "list_devices", lambda: ["gpu:0"])


@pytest.mark.slow
def test_beside_a_gpu_no_process_is_forked(gpu, monkeypatch):
    monkeypatch.delattr(os, "fork")
    seen = in_forks(Forked(workers=1), epochs=1)
    assert as_told(seen) == as_told(drawn(ws.Batches(Numbers(), shuffle=False), epochs=1))
    assert os.getpid() not in {int(batch["process"][0]) for batch in seen[1:]}
    assert multiprocessing.active_children() == []


def test_beside_a_gpu_a_data_set_must_be_picklable(gpu):
    data = Forked()
    data.lock = threading.Lock()
    with pytest.raises(ws.BatchError, match="must be picklable"):
        in_forks(data)
    assert multiprocessing.active_children() == []


def test_what_fails_in_a_process_is_raised_where_its_batch_would_come():
    with pytest.raises(OSError, match="no such file"):
        in_forks(Forked(fails_at=3))


@pytest.mark.slow
def test_a_killed_process_is_reported_and_the_next_epoch_begins_anew():
    class Killed(Forked):
        def __getitem__(self, number):
            if number == 4 and self.told == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__getitem__(number)

    data = Killed()
    batches = ws.Batches(data, shuffle=False)
    with pytest.raises(ws.BatchError, match="processes of a PyDataset must live"):
        list(batches)
    data.told = 2
    batches.seek(0, 0)
    assert [int(batch["number"][0]) for batch in batches] == list(range(8))
    batches.source.workers.end()


def load_on(pool):
    while True:
        pool.result(pool.submit(1))


@pytest.mark.parametrize("times", [10, *later([30])])
@pytest.mark.slow
def test_a_process_killed_while_no_thread_waits_is_reported(times):
    pool = workers.Forks(lambda number: os.getpid(), 2)
    for _ in range(times):  # the one that is killed may hold or await anything
        os.kill(pool.result(pool.submit(0)), signal.SIGKILL)
        with pytest.raises(ws.BatchError, match="processes of a PyDataset must live"):
            load_on(pool)
    assert multiprocessing.active_children() == []


def test_a_process_that_waits_for_ever_is_reported_and_ended(monkeypatch):
    class Waits(Forked):
        def __getitem__(self, number):
            if number == 2 and os.getpid() != parent:
                time.sleep(0.5)
            if number == 5:
                time.sleep(1000)
            return super().__getitem__(number)

    parent = os.getpid()
    monkeypatch.setattr(workers, "_PATIENCE_WITH_FORKS", 0.2)
    batches = ws.Batches(Waits(), shuffle=False)
    next(batches), next(batches)
    with pytest.warns(UserWarning, match="a fork cannot use keras.ops"):
        assert next(batches)["number"] == [2]
    began = time.monotonic()
    batches.source.workers.end()
    assert time.monotonic() - began < 10
    assert multiprocessing.active_children() == []


ORPHANS = """
import os, signal
import numpy as np
from wholestep.data.workers import Forks
forks = Forks(lambda number: os.getpid(), 1)
print(forks.submit(0).result(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_processes_end_with_the_one_that_they_load_for():
    done = subprocess.run(
        [sys.executable, "-c", ORPHANS], capture_output=True, text=True, env=lean(), timeout=60
    )
    until = time.monotonic() + 20
    while Path(f"/proc/{int(done.stdout)}").exists():
        assert time.monotonic() < until
        time.sleep(0.1)


def test_generators_copied_to_every_process_cause_a_warning():
    data = Forked()
    data.noise = np.random.default_rng(0)
    with pytest.warns(UserWarning, match=r"Forked\.noise, a Generator: each process has a copy"):
        ws.Batches(data)


def test_threads_end_with_an_unreferenced_data_set():
    before = threading.enumerate()
    workers = Workers(Threads(lambda number: number, num=2), lambda number: number, most=3)
    workers.expect([1, 2, 3])
    assert workers.take(2) == 2
    threads = [thread for thread in threading.enumerate() if thread not in before]
    assert len(threads) == 2
    del workers
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


def test_an_epoch_leaves_no_queue_behind():
    def queues():
        gc.collect()
        return sum(isinstance(each, queue.SimpleQueue) for each in gc.get_objects())

    gc.freeze()  # objects of other tests, which would be searched each time
    workers = Workers(Threads(lambda number: number, num=2), lambda number: number, most=3)
    found = []
    for _ in range(4):
        workers.expect([1, 2, 3])
        assert workers.take(1) == 1
        workers.end()
        found.append(queues())
    assert len(set(found)) == 1
