"""Blocks name every row once, in order; unused batches come again."""

import traceback
from typing import NamedTuple

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small import X, Y, model

import wholestep as ws
from wholestep import engines
from wholestep.cut import Cut
from wholestep.data import order
from wholestep.data.block import Batch, FeedCache, share_out, stage
from wholestep.data.feed import Loaded, Resident, open_feed


class Host:
    """An engine whose device is the host."""

    num_replicas = 1
    local_replicas = (0,)

    @staticmethod
    def place(data):
        return data

    stage = place

    @staticmethod
    def resident(data):
        return data, lambda: None


class Plan(NamedTuple):
    """A plan of full updates, with a limit on the updates of a dispatch."""

    cut: Cut
    length: int = 9
    most: int = 9
    num_stacked: int = 1


def whole(batch):
    return Plan(Cut(((1, batch.num_rows),), batch.num_rows))


def filled(batch):
    return Plan(Cut(((1, batch.full),), batch.full, padded=True))


def resident(batches, plan=whole):
    return Resident(Host, batches, plan, lambda batch, program: None)


def loaded(batches, plan=whole):
    return Loaded(Host, batches, plan, lambda batch, program: None)


def seen(blocks):
    return [row for block in blocks for update in range(block.num) for row in block.names(update)]


def test_resident_blocks_name_every_row_once():
    feed = resident(ws.Batches(np.arange(23), 4, seed=1))
    blocks = list(feed.blocks(None, lambda: 3))
    assert sorted(seen(blocks)) == list(range(23))
    assert [b.num for b in blocks] == [3, 2, 1]
    assert (blocks[0].start, blocks[-1].end) == ((0, 0), (1, 0))


def test_updates_that_are_sent_one_by_one_share_the_table_of_their_rows():
    def one_by_one(batch):
        return whole(batch)._replace(most=1)

    blocks = list(
        resident(ws.Batches(np.arange(23), 4, seed=1), one_by_one).blocks(None, lambda: 3)
    )
    assert sorted(seen(blocks)) == list(range(23))
    assert [(block.first, block.num) for block in blocks] == [*((i, 1) for i in range(5)), (0, 1)]
    assert len({id(block.table) for block in blocks[:-1]}) == 1


def test_every_epoch_has_its_own_order_however_many_updates_go_at_once():
    batches = ws.Batches(np.arange(23), 4, seed=1)
    for at_once in (1, 3):
        feed = resident(ws.Batches(np.arange(23), 4, seed=1))
        rows = [
            row
            for block in feed.blocks(18, lambda at_once=at_once: at_once)
            for row in seen([block])
        ]
        assert rows == [
            row for epoch in range(3) for step in range(6) for row in batches.rows(epoch, step)
        ]
        for step in (4, 2):  # and back before the rows that were named ahead
            feed.batches.seek(1, step)
            assert seen(feed.blocks(1, lambda: 1)) == list(batches.rows(1, step))


def test_a_number_of_updates_goes_on_into_the_next_epoch():
    feed = resident(ws.Batches(np.arange(8), 4, shuffle=False))
    assert seen(feed.blocks(3, lambda: 9)) == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]


class Items:
    def __len__(self):
        return 7

    def __getitem__(self, i):
        if i == 6 and self.broken:
            raise OSError("the disk is gone")
        return np.float32(i)

    broken = False


def test_loaded_blocks():
    feed = open_feed(
        Host,
        ws.Batches(Items(), 3, shuffle=False),
        0,
        whole,
        lambda batch, program: None,
        FeedCache({}, {}),
    )
    assert isinstance(feed, Loaded)
    blocks = list(feed.blocks(None, lambda: 1))
    assert [b.data.tolist() for b in blocks] == [[0, 1, 2], [3, 4, 5], [6]]


def test_a_loop_that_ends_early_leaves_no_gap():
    batches = ws.Batches(Items(), 2, shuffle=False)
    feed = loaded(batches)
    for block in feed.blocks(None, lambda: 1):
        assert block.data.tolist() == [0, 1]
        batches.position = block.end
        break
    assert batches.position == (0, 1)
    assert [b.data.tolist() for b in feed.blocks(None, lambda: 1)] == [[2, 3], [4, 5], [6]]


def test_a_stream_left_early_loses_nothing():
    batches = ws.Batches(np.full((2,), i) for i in range(9))
    seen = []
    feed = loaded(batches)

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
        list(loaded(ws.Batches(Items(), 3, shuffle=False)).blocks(None, lambda: 1))


def test_filling_repeats_rows():
    (block,) = loaded(ws.Batches(Items(), 7, shuffle=False)).blocks(1, lambda: 1)
    batch = block.batches[0].padded(9)
    assert batch.host.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1]
    assert block.batches[0].padded(7) is block.batches[0]
    data, rows = stage(Host, block.batches[0], Cut(((2, 4),), 7))
    assert data.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert rows.tolist() == [0, 1, 2, 3, 4, 5, 6, 0]


@pytest.mark.parametrize("feed", [resident(ws.Batches(np.arange(7.0), 3, shuffle=False), filled)])
def test_a_short_update_is_filled_up_where_the_plan_says_so(feed):
    *_, last = feed.blocks(None, lambda: 1)
    assert last.table.rows[last.first].tolist() == [6, 6, 6]
    assert (last.table.counts[last.first], last.names(0).tolist()) == (1, [6])
    *_, last = loaded(ws.Batches(Items(), 3, shuffle=False), filled).blocks(None, lambda: 1)
    assert last.data.tolist() == [6, 6, 6]
    assert (last.table.counts[last.first], last.names(0).tolist()) == (1, [6])


def test_one_table_serves_many_dispatches():
    feed = resident(ws.Batches(np.arange(40), 4, seed=1))
    blocks = [block for _ in range(2) for block in feed.blocks(None, lambda: 1)]
    assert len({id(block.table) for block in blocks}) == 4  # nine updates, and one, of each epoch
    assert [block.first for block in blocks[:10]] == [*range(9), 0]


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9)), min_size=1, max_size=3),
    st.integers(1, 8),
)
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
        start = start + size
        width = width + each
    assert shares.shape == (num, width)
    assert shares.max() < cut.places


def test_ready_made_batches_are_filled_to_the_most_rows_of_their_own_shape():
    sizes = [(4, 2), (2, 8), (3, 2), (1, 8), (5, 2), (4, 2)]
    blocks = loaded(ws.Batches(np.zeros(size) for size in sizes)).blocks(None, lambda: 1)
    assert [block.batches[0].full for block in blocks] == [4, 2, 4, 2, 5, 5]


def test_a_block_knows_the_rows_of_a_full_one():
    assert [
        b.batches[0].full for b in resident(ws.Batches(np.arange(7), 3)).blocks(None, lambda: 1)
    ] == [3, 3, 3]
    assert [b.batches[0].full for b in loaded(ws.Batches(Items(), 3)).blocks(None, lambda: 1)] == [
        3,
        3,
        3,
    ]


def test_resident_arrays_are_complete_before_a_block_is_sent(monkeypatch):
    waited = []
    monkeypatch.setattr(
        Host, "resident", staticmethod(lambda data: (data, lambda: waited.append("complete")))
    )
    feed = resident(ws.Batches(np.arange(6), 2))
    assert waited == []
    assert [waited.copy() for _ in feed.blocks(None, lambda: 1)] == [["complete"]] * 3


def test_small_arrays_become_resident():
    devices = engines.choose().devices

    def check(batch, program):
        return None

    feed = open_feed(devices, ws.Batches(np.zeros(4)), 10**6, whole, check, FeedCache({}, {}))
    assert isinstance(feed, Resident)


def test_a_block_that_waited_goes_back_before_those_that_still_wait():
    """The loop ends while another has three batches waiting."""
    data = ws.Batches(np.full((2,), i) for i in range(5))
    waiting = [
        Batch(next(data), None, np.arange(2, dtype=np.int32), 2, None, None, (0, i), (0, i + 1))
        for i in range(3)
    ]
    data.unused = waiting.copy()
    data.position = (0, 0)
    feed = loaded(data)
    for _ in feed.blocks(None, lambda: 1):
        break
    assert [block.start for block in data.unused][:3] == [(0, 0), (0, 1), (0, 2)]


@pytest.mark.parametrize("iterates", [False, True], ids=["a feed", "a loop over the batches"])
def test_batches_that_wait_for_the_next_pass_are_no_part_of_this_one(iterates):
    """They were drawn ahead, beyond the end of the pass, by a loop that ended with an error."""

    class Numbered(keras.utils.PyDataset):
        def __len__(self):
            return 3

        def __getitem__(self, i):
            return np.full((2,), i)

    data = ws.Batches(Numbered(), shuffle=False)
    rows = np.arange(2, dtype=np.int32)
    for start, end in (((0, 2), (1, 0)), ((1, 0), (1, 1))):
        data.unused.append(Batch(np.full((2,), start[1]), None, rows, 2, None, None, start, end))
    data.position = (0, 2)
    if iterates:
        assert [batch[0] for batch in data] == [2]
    else:
        feed = loaded(data)
        assert [feed.advance(block) or block.start for block in feed.blocks(None, lambda: 1)] == [
            (0, 2)
        ]
    assert [batch.start for batch in data.unused] == [(1, 0)]


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
    feed = loaded(ws.Batches(Again()))
    assert [use(feed, 3) for _ in range(4)] == [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 0, 1]]
    assert feed.batches.position == (2, 2)


def test_an_evaluation_that_is_left_early_leaves_nothing_behind():
    batches = ws.Batches(Items(), 2, shuffle=False)
    ordered = batches.in_order()
    assert use(loaded(ordered), None, 1) == [0]
    assert (batches.position, batches.unused) == ((0, 0), [])
    assert use(loaded(batches.in_order()), None) == [0, 2, 4, 6]


class Reshuffled(keras.utils.PyDataset):
    """Six batches in an order that is turned round whenever an epoch ends."""

    order = list(range(6))
    ends = 0

    def __len__(self):
        return 6

    def __getitem__(self, i):
        return np.full((2,), float(self.order[i]), "float32")

    def on_epoch_end(self):
        self.order = self.order[::-1]
        self.ends = self.ends + 1


def test_a_dataset_that_shuffles_itself_is_left_and_taken_up_again():
    data = Reshuffled()
    feed = loaded(ws.Batches(data, shuffle=False))
    assert use(feed, None, 3) == [0, 1, 2]
    assert use(feed, None) == [3, 4, 5]
    assert data.ends == 1
    assert use(feed, None, 2) == [5, 4]
    assert feed.batches.unused
    feed.batches.seek(1, 0)
    assert not feed.batches.unused


def test_a_batch_that_was_not_carried_out_comes_again():
    feed = loaded(ws.Batches(np.full((2,), i) for i in range(4)))
    for block in feed.blocks(3, lambda: 1):
        feed.batches.position = block.end
    feed.go_back(block, 0)
    assert feed.batches.position == (0, 2)
    assert use(feed, None) == [2, 3]


def test_the_order_of_the_next_epoch_is_computed_once_the_last_update_is_sent(monkeypatch):
    seen = []
    permuted = order._permuted

    def noted(of, epoch, start, stop):
        seen.append((epoch, any(frame.name == "note_sent" for frame in traceback.extract_stack())))
        return permuted(of, epoch, start, stop)

    monkeypatch.setattr(order, "_permuted", noted)
    order._chunk.cache_clear()
    ws.Trainer(model()).fit(X, Y, batch_size=4, epochs=3, verbose=0)
    assert seen == [(0, False), (1, True), (2, True), (3, True)]


def test_metrics_are_emptied_by_their_known_values(monkeypatch):
    trainer = ws.Trainer(model())
    trainer.fit(X, Y, batch_size=4, verbose=0)
    trainer.model.optimizer.learning_rate = 0.0
    others = (Y + 1) % 3
    wanted = [trainer.evaluate(X, y, verbose=0, return_dict=True)["accuracy"] for y in (Y, others)]
    monkeypatch.setattr(
        keras.metrics.SparseCategoricalAccuracy, "reset_state", lambda _: pytest.fail("on the host")
    )
    found = [trainer.fit(X, y, batch_size=4, verbose=0).history["accuracy"][0] for y in (Y, others)]
    assert found == pytest.approx(wanted)
    assert wanted[0] != wanted[1]
