"""A stream gives every batch once, also those that were looked at; it begins again with an epoch alone."""

import numpy as np
import pytest

from wholestep.data.stream import BatchStream


class Counted:
    """Two batches, and how often they were asked for."""

    def __init__(self):
        self.passes = 0

    def __iter__(self):
        self.passes += 1
        return iter([{"x": np.array([1, 2])}, {"x": np.array([3])}])


def of(batches):
    return BatchStream(batches, lambda batch: batch["x"].tolist())


def test_what_was_looked_at_is_drawn_next():
    stream = of(Counted())
    assert [stream.peek(0), stream.peek(0), stream.draw(0), stream.draw(1)] == [[1, 2], [1, 2], [1, 2], [3]]
    with pytest.raises(StopIteration):
        stream.draw(2)
    assert stream.has_ended


def test_a_stream_that_has_ended_begins_again_with_an_epoch_and_not_before():
    batches = Counted()
    stream = of(batches)
    assert [stream.draw(0), stream.draw(1)] == [[1, 2], [3]]
    for _ in range(2):
        assert stream.peek(2) is None
        with pytest.raises(StopIteration):
            stream.draw(2)
    assert batches.passes == 1
    assert stream.draw(0) == [1, 2]
    assert (batches.passes, stream.has_ended) == (2, False)


def test_an_iterator_ends_for_good():
    stream = of(iter(Counted()))
    assert not stream.begins_again
    assert [stream.draw(0), stream.draw(1), stream.peek(2)] == [[1, 2], [3], None]
    assert stream.has_ended
    assert stream.peek(0) is None


def test_a_restart_forgets_what_was_looked_at():
    stream = of(Counted())
    stream.draw(0)
    assert stream.peek(1) == [3]
    stream.restart()
    assert stream.draw(0) == [1, 2]


def test_a_first_batch_of_another_pass_uses_nothing_up():
    stream = of(Counted())
    stream.draw(0)
    assert stream.first() == [1, 2]
    assert stream.draw(1) == [3]
