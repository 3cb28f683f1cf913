"""A record is cut into the passes of each optimizer step."""

import numpy as np

from stepcheck.trace.cuts import steps
from stepcheck.trace.log import Applied, Called, Log, Other

NOISE, ROWS = np.ones((4, 3), "float32"), np.zeros((4, 3), "float32")


def passed(order, inputs, derivative=None):
    """Return a forward pass, with the derivative of a loss by its output."""
    called = Called(order, [inputs], [inputs[:, :1]], [ROWS], [], True, None)
    if derivative is not None:
        called.derivatives[0] = [np.full((4, 1), derivative, "float32")]
    return called


def stepped(order):
    return Applied(order, 7, [ROWS], [ROWS], [], [NOISE], [], 0.1, 0, None)


def test_passes_of_another_models_step_are_no_microbatches():
    log = Log()
    for event in (
        passed(1, ROWS),
        stepped(2),
        passed(3, NOISE),
        Other(4),
        passed(5, ROWS),
        stepped(6),
    ):
        log.add(event)
    assert [
        [called.order for called in step.called] for step in steps(log)
    ] == [
        [1],
        [5],
        [],
    ]
    log.others.clear()
    assert [
        [called.order for called in step.called] for step in steps(log)
    ] == [
        [1],
        [3, 5],
        [],
    ]
