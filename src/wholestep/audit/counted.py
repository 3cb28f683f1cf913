"""What a script's metrics have counted: whether they begin anew with every pass over the data."""

from collections.abc import Iterable
from typing import NamedTuple

import keras
import numpy as np

from wholestep.audit.log import Called, Log
from wholestep.audit.windows import Windows

_SLACK = 1  # batch: the script may be ended before its metrics get the last one, or while it computes the next


class _Round(NamedTuple):
    """A pass over the data, or an evaluation between two: its batches, and their rows."""

    num: int
    rows: int


def running(metrics: Iterable[keras.metrics.Metric], log: Log, seen: Windows) -> list[str]:
    """Return a note of the metrics that have counted since the beginning, though several passes were made.

    A mean counts the batches that it gets, or the rows.
    """
    kinds = [kind for kind in (_passes(seen), _evaluations(log, seen)) if len(kind) > 1]
    whole = [_Round(sum(each.num for each in kind), sum(each.rows for each in kind)) for kind in kinds]
    single = [each for kind in kinds for each in kind]
    size = max((each.rows / each.num for each in single), default=0.0) or 1.0  # rows of a batch
    counts = {metric.name: _count(metric) for metric in metrics}
    most = _SLACK + log.num_late
    names = sorted(n for n, c in counts.items() if _is_of(c, whole, size, most) and not _is_of(c, single, size, _SLACK))
    if not names:
        return []
    one = len(names) == 1
    told = f"The {'metric' if one else 'metrics'} {', '.join(names)} {'has' if one else 'have'} counted since the "
    told += "beginning, over several passes: what is read is no number of the last one."
    return [f"{told} Is `reset_state()` missing where a pass begins?"]


def _passes(seen: Windows) -> list[_Round]:
    numbers = sorted({number for number, _ in seen.place.values()})
    rounds = [[piece for piece in seen.pieces if seen.place[piece.called.order][0] == number] for number in numbers]
    return [_Round(len(own), sum(len(piece.rows) for piece in own)) for own in rounds]


def _evaluations(log: Log, seen: Windows) -> list[_Round]:
    """Return the runs of forward passes without gradient between two with one."""
    own = {piece.called.order for piece in seen.pieces}
    runs: list[list[Called]] = [[]]
    for called in log.called:
        if called.order not in own:
            runs[-1].append(called)
        elif runs[-1]:
            runs.append([])
    return [_Round(len(run), sum(map(_rows, run))) for run in runs if run]


def _rows(called: Called) -> int:
    return len(called.inputs[0]) if called.inputs and called.inputs[0].ndim else 0


def _is_of(count: float, rounds: list[_Round], size: float, most: int) -> bool:
    """Whether a count is that of the batches, or the rows, of one of these, or of at most so many batches more."""
    more = [delta for r in rounds for delta in (count - r.num, (count - r.rows) / size)]
    return any(-_SLACK <= delta <= most for delta in more)


def _count(metric: keras.metrics.Metric) -> float:
    """Return what a mean has counted; no number if it is none, or is traced just now."""
    try:
        return float(np.asarray(keras.ops.convert_to_numpy(metric.count)))
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return float("nan")
