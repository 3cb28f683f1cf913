"""Blocks name every row once, in order; a thread that loads ahead ends with its loop."""

import subprocess
import sys
import threading

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import wholestep as ws
from wholestep import engines
from wholestep.cut import Cut
from wholestep.data.feed import Loaded, Resident, open_feed, pad_to, share_out, stage
from wholestep.processes.single import SingleProcess


class Host:
    """An engine whose device is the host."""

    num_replicas = 1
    processes = SingleProcess()

    @staticmethod
    def place(data):
        return data

    resident = place


def seen(blocks):
    return [
        row for block in blocks for rows, count in zip(block.rows, block.counts, strict=True) for row in rows[:count]
    ]


def test_resident_blocks_name_every_row_once():
    feed = Resident(Host, ws.Batches(np.arange(23), 4, seed=1))
    blocks = list(feed.blocks(None, lambda: 3))
    assert sorted(seen(blocks)) == list(range(23))
    assert [len(b.counts) for b in blocks] == [3, 2, 1]
    assert (blocks[0].start, blocks[-1].end) == ((0, 0), (1, 0))


def test_every_epoch_has_its_own_order_however_many_updates_go_at_once():
    batches = ws.Batches(np.arange(23), 4, seed=1)
    for at_once in (1, 3):
        feed = Resident(Host, ws.Batches(np.arange(23), 4, seed=1))
        rows = [row for block in feed.blocks(18, lambda at_once=at_once: at_once) for ids in block.ids for row in ids]
        assert rows == [row for epoch in range(3) for step in range(6) for row in batches.rows(epoch, step)]
        for step in (4, 2):  # and back before the rows that were named ahead
            feed.batches.seek(1, step)
            assert list(next(feed.blocks(1, lambda: 1)).ids[0]) == list(batches.rows(1, step))


def test_a_number_of_updates_goes_on_into_the_next_epoch():
    feed = Resident(Host, ws.Batches(np.arange(8), 4, shuffle=False))
    assert seen(feed.blocks(3, lambda: 9)) == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]


class Items:
    def __len__(self):
        return 7

    def __getitem__(self, i):
        if i == 6 and self.broken:
            raise OSError("the disk is gone")
        return np.float32(i)

    broken = False


def threads():
    return [t for t in threading.enumerate() if t.name == "wholestep-feed"]


def test_loaded_blocks_and_their_thread():
    feed = open_feed(Host, ws.Batches(Items(), 3, shuffle=False), limit=0)
    assert isinstance(feed, Loaded)
    blocks = list(feed.blocks(None, lambda: 1))
    assert [b.data.tolist() for b in blocks] == [[0, 1, 2], [3, 4, 5], [6]]
    assert not threads()


def test_a_loop_that_ends_early_leaves_no_thread_and_no_gap():
    batches = ws.Batches(Items(), 2, shuffle=False)
    feed = Loaded(Host, batches)
    for block in feed.blocks(None, lambda: 1):
        assert block.data.tolist() == [0, 1]
        batches.position = block.end
        break
    assert not threads()
    assert batches.position == (0, 1)
    assert [b.data.tolist() for b in feed.blocks(None, lambda: 1)] == [[2, 3], [4, 5], [6]]


def test_a_stream_left_early_loses_nothing():
    batches, seen = ws.Batches(np.full((2,), i) for i in range(9)), []
    feed = Loaded(Host, batches)

    def use(num, most=9):
        for block in feed.blocks(num, lambda: 1):
            seen.append(int(block.data[0]))
            batches.position = block.end
            if len(seen) == most:
                break

    use(3)
    use(None, 5)
    for _ in feed.blocks(None, lambda: 1):
        break  # not used
    use(None)
    assert seen == list(range(9))


def test_an_error_while_loading_reaches_the_loop(monkeypatch):
    monkeypatch.setattr(Items, "broken", True)
    with pytest.raises(OSError, match="the disk is gone"):
        list(Loaded(Host, ws.Batches(Items(), 3, shuffle=False)).blocks(None, lambda: 1))
    assert not threads()


def test_filling_repeats_rows():
    feed = Loaded(Host, ws.Batches(Items(), 7, shuffle=False))
    (block,) = feed.blocks(1, lambda: 1)
    filled = pad_to(Host, block, 9)
    assert filled.data.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1]
    assert filled.counts.tolist() == [7]
    assert pad_to(Host, block, 7) is block
    data, rows = stage(Host, block, Cut(((2, 4),), 7))
    assert data.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert rows.tolist() == [[0, 1, 2, 3, 4, 5, 6, 0]]


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9)), min_size=1, max_size=3), st.integers(1, 8))
def test_every_replica_gets_an_equal_share_of_every_microbatch(sections, num):
    cut = Cut(tuple(sections), sum(count * size for count, size in sections))
    shares, rows = share_out(cut, num)
    start = width = 0
    for size in (size for count, size in sections for _ in range(count)):
        each = -(-size // num)
        for place in range(size):
            replica = place // each
            assert shares[replica, rows[start + place]] == start + place
            assert width <= rows[start + place] < width + each
        start, width = start + size, width + each
    assert shares.shape == (num, width)
    assert shares.max() < cut.places


def test_ready_made_batches_are_filled_to_the_most_rows_of_their_own_shape():
    sizes = [(4, 2), (2, 8), (3, 2), (1, 8), (5, 2), (4, 2)]
    blocks = Loaded(Host, ws.Batches(np.zeros(size) for size in sizes)).blocks(None, lambda: 1)
    assert [block.full for block in blocks] == [4, 2, 4, 2, 5, 5]


def test_a_block_knows_the_rows_of_a_full_one():
    assert [b.full for b in Resident(Host, ws.Batches(np.arange(7), 3)).blocks(None, lambda: 1)] == [3, 3, 3]
    assert [b.full for b in Loaded(Host, ws.Batches(Items(), 3)).blocks(None, lambda: 1)] == [3, 3, 3]


def test_small_arrays_become_resident():
    assert isinstance(open_feed(engines.choose(), ws.Batches(np.zeros(4)), limit=10**6), Resident)


def test_a_block_that_waited_goes_back_before_those_that_still_wait():
    """The loop ends while the thread has one of three blocks in its hands."""
    data = ws.Batches(np.full((2,), i) for i in range(5))
    waiting = [Loaded(Host, data)._block(next(data), None, (0, i), (0, i + 1)) for i in range(3)]
    data.unused, data.position = waiting.copy(), (0, 0)
    feed = Loaded(Host, data)
    for _ in feed.blocks(None, lambda: 1):
        break
    assert [block.start for block in data.unused][:3] == [(0, 0), (0, 1), (0, 2)]


class Again:
    """A stream that begins again."""

    def __init__(self, num=5):
        self.num = num

    def __iter__(self):
        return (np.full((2,), float(i), "float32") for i in range(self.num))


def use(feed, num, most=None):
    """Return the numbers of the batches that a loop uses, which leaves during the next one."""
    seen = []
    for block in feed.blocks(num, lambda: 1):
        if len(seen) == most:
            break
        seen.append(int(block.data[0]))
        feed.batches.position = block.end
    return seen


def test_a_stream_that_begins_again_uses_every_batch_once():
    feed = Loaded(Host, ws.Batches(Again()))
    assert [use(feed, 3) for _ in range(4)] == [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 0, 1]]
    assert feed.batches.position == (2, 2)


def test_an_evaluation_that_is_left_early_leaves_nothing_behind():
    batches = ws.Batches(Items(), 2, shuffle=False)
    ordered = batches.in_order()
    assert use(Loaded(Host, ordered), None, 1) == [0]
    assert (batches.position, batches.unused) == ((0, 0), [])
    assert use(Loaded(Host, batches.in_order()), None) == [0, 2, 4, 6]


class Reshuffled(keras.utils.PyDataset):
    """Six batches in an order that is turned round whenever an epoch ends."""

    order, ends = list(range(6)), 0

    def __len__(self):
        return 6

    def __getitem__(self, i):
        return np.full((2,), float(self.order[i]), "float32")

    def on_epoch_end(self):
        self.order, self.ends = self.order[::-1], self.ends + 1


def test_a_dataset_that_shuffles_itself_is_left_and_taken_up_again():
    data = Reshuffled()
    feed = Loaded(Host, ws.Batches(data, shuffle=False))
    assert use(feed, None, 3) == [0, 1, 2]
    assert use(feed, None) == [3, 4, 5]
    assert data.ends == 1
    assert use(feed, None, 2) == [5, 4]
    assert feed.batches.unused
    feed.batches.seek(1, 0)
    assert not feed.batches.unused


def test_a_batch_that_was_not_carried_out_comes_again():
    feed = Loaded(Host, ws.Batches(np.full((2,), i) for i in range(4)))
    for block in feed.blocks(3, lambda: 1):
        feed.batches.position = block.end
    feed.go_back(block, 0)
    assert feed.batches.position == (0, 2)
    assert use(feed, None) == [2, 3]


LEFT = """
import atexit, itertools, threading
import keras, numpy as np, wholestep as ws

atexit.register(lambda: print([thread.name for thread in threading.enumerate()]))
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
steps = ws.Trainer(model).steps(ws.Batches(itertools.repeat((np.ones((3, 2)), np.ones((3, 1))))))
next(steps)
"""


def test_no_thread_is_left_when_a_script_ends_inside_a_loop():
    ended = subprocess.run([sys.executable, "-c", LEFT], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "['MainThread']\n"), ended.stderr
