"""What is recorded of a loop: values that move, calls that make one update, batches of rare shapes."""

from types import SimpleNamespace

import numpy as np
import pytest

from stepcheck.solve.modes import rare
from stepcheck.solve.readings import without_void
from stepcheck.trace.log import Applied, Called, Log
from stepcheck.trace.measure import NUM_PLACES, all_same, in_part, once, places
from stepcheck.trace.windows import Rows, Update


def test_what_has_not_moved_is_kept_once_and_of_what_is_large_some_numbers():
    large, small = np.arange(NUM_PLACES + 5.0), np.arange(3.0)
    kept = once([large, small], [])
    assert not any(
        np.shares_memory(a, b)
        for a, b in zip(kept, [large, small], strict=True)
    )
    again = once([large, small + 1], kept)
    assert again[0] is kept[0]
    assert again[1] is not kept[1]
    assert all_same(in_part([large, small]), [large[places(large.size)], small])
    assert not all_same([large], [np.nextafter(large, 1e9)])


def step(order, replica=0, accumulates=1, num_calls=0, values=None):
    states = values or [[np.full(3, float(order))] for _ in range(5)]
    return Applied(
        order, 1, *states, 0.1, order, None, replica, accumulates, num_calls
    )


def test_calls_that_make_one_update_count_as_one():
    log = Log()
    for order in range(6):
        log.add(
            step(order, replica=order % 2, accumulates=3, num_calls=order // 2)
        )
    assert (len(log.applied), log.num_updates) == (6, 1)


def test_beyond_its_room_a_log_keeps_the_first_batch_of_another_size():
    log = Log(room=1)
    for order, num in enumerate((8, 8, 5, 8, 5)):
        inputs = [np.zeros((num, 2))]
        is_kept = log.wants(inputs)
        numbers = (
            ([np.zeros(1)], [np.full(3, float(order))], [])
            if is_kept
            else ([], [], [])
        )
        log.add(Called(2 * order, inputs, *numbers, True, None))
        assert log.wants_step(0) is is_kept
        log.add(step(2 * order + 1))
    assert [called.is_whole for called in log.called] == [
        True,
        False,
        True,
        False,
        False,
    ]


def test_updates_whose_batches_have_rare_shapes_are_left():
    shapes = [(8, 5), (8, 5), (8, 6), (8, 7), (8, 7), (8, 9), (3, 9), (8, 5)]
    updates = [
        SimpleNamespace(
            number=i,
            is_known=i != 2,
            pieces=[
                SimpleNamespace(called=SimpleNamespace(inputs=[np.zeros(each)]))
            ],
        )
        for i, each in enumerate(shapes)
    ]
    assert rare(updates, None) == []
    assert (
        rare(updates, 2) == [5]
    )  # the one of fewest rows is kept, and what cannot be judged is not counted
    assert rare(updates, 1) == [3, 4, 5]
    assert rare([], 1) == []


def made(*kept):
    """Return steps, of which those that are kept lead on to the next one's state."""
    updates, now = [], 0
    for order, is_kept in enumerate(kept):
        values = [
            [np.array([float(n)])] for n in (0, now, now, now + 1, now + 1)
        ]
        updates.append(Update(order + 1, [], step(order, values=values)))
        now += is_kept
    return updates


@pytest.mark.parametrize(
    ("kept", "numbers"),
    [
        ((0, 1, 0, 1, 0, 1), [1, 3, 5]),  # orders of the steps that are left
        ((0, 0, 1, 0, 0, 1, 0), [2, 5]),
        ((1, 1, 1, 1), [0, 1, 2, 3]),
        ((0, 0, 0, 0), [0, 1, 2, 3]),  # thrown away, all of them
        (
            (0, 1, 1, 0, 1, 0),
            [0, 1, 2, 3, 4, 5],
        ),  # now and then, as a step back when the loss has risen
    ],
)
def test_steps_that_are_selected_are_the_windows_last_ones(kept, numbers):
    found = without_void(made(*kept))
    assert [update.applied.order for update in found] == numbers
    assert [update.number for update in found] == list(range(1, len(found) + 1))


def test_rows_that_begin_alike_are_not_equal():
    rows = Rows(
        np.array([[7, 8, 0, 0], [1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 5, 6]])
    )
    assert rows.find([np.array([[7, 8]])]).tolist() == [0]  # a narrow batch
    assert rows.find([np.array([[1, 2, 3, 4], [1, 2, 5, 6]])]).tolist() == [
        1,
        2,
    ]
    assert [rows.twins(np.array([row])) for row in range(4)] == [
        False,
        False,
        True,
        True,
    ]


def test_short_batches_on_replicas_are_kept_beyond_the_first_updates():
    log = Log(room=40)

    def call(replica, rows):
        x = np.zeros((rows, 2))
        log.add(Called(0, [x], [], [], [], True, None, replica))
        return log.wants([x], replica)

    assert all(call(replica, 32) for replica in range(4))
    log.room = 0
    assert [
        log.wants([np.zeros((rows, 2))], replica)
        for replica in range(4)
        for rows in (32, 27)
    ] == [False, True] * 4
