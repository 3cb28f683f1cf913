"""The variables that steps leave out, and the statistics that a loop leaves in the
model.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from stepcheck.errors import attempt
from stepcheck.faults import Fault, Stage
from stepcheck.port import Port
from stepcheck.trace.log import Applied, Values
from stepcheck.trace.measure import FINE, all_same, distance, in_part, same
from stepcheck.trace.windows import Piece, Update, Windows
from stepcheck.values import Change, Finding, Reason, Unjudged, Where


def left_out(
    replay: Port,
    objective: Any,
    updates: list[Update],
    steps: list[Applied],
    *,
    is_thawed: bool = False,
) -> Iterator[Finding | Unjudged]:
    """Yield the finding on variables that steps get no gradient of, though the loss has
    one.

    A variable that is not handed to an optimizer may be left out by choice, which is
    said.

    Args:
        is_thawed: whether the loop itself has set them to be trained.
    """
    whole = [step for step in steps if step.is_whole]
    pieces = [piece for u in updates if u.is_known for piece in u.pieces]
    num, now = len(replay.names), replay.values()
    if (
        not pieces
        or now is None
        or any(len(step.grads) != num for step in whole)
    ):
        return
    first = pieces[0].called.params
    missing = [
        i for i in range(num) if all(step.grads[i] is None for step in whole)
    ]
    still = [i for i in missing if same(first[i], now.params[i])]
    if not still or len(missing) == num:
        return
    shares = _shares(replay, objective, pieces[0])
    bare = [i for i in still if shares[i] > FINE.differs]
    wrong = [
        i for i in bare if is_thawed or any(i in step.lost for step in whole)
    ]
    names = tuple(replay.names[i] for i in wrong or bare)
    numbers = tuple(u.number for u in updates if u.applied.is_whole)
    if wrong:
        where = Where(numbers, parameters=names, line=whole[0].line)
        apart = float(np.linalg.norm(shares[wrong]))
        yield Finding(Change(Fault.VARIABLE_LEFT_OUT), apart, where=where)
    elif bare:
        told = ", ".join(names)
        yield Unjudged(Reason.NOT_HANDED, Stage.GRADIENT, len(numbers), told)


def _shares(replay: Port, objective: Any, piece: Piece) -> np.ndarray:
    """Return the length of each variable's gradient of a sum over rows as a share of
    the whole; zeros if it is not known.
    """

    def gradient() -> np.ndarray:
        batch = replay.batch(piece)
        terms = replay.terms(piece, objective, batch, training=False)
        known = piece, objective, batch, np.ones_like(terms.weights)
        return replay.gradient(*known, training=False, penalty=len(piece.rows))

    whole, _ = attempt(gradient)
    if whole is None or not np.all(np.isfinite(whole)):
        return np.zeros(len(replay.names))
    parts = np.array(
        [np.linalg.norm(part) for part in replay.parts(whole).values()]
    )
    return parts / (np.linalg.norm(whole) or 1.0)


def lost_statistics(
    replay: Port, now: Values, seen: Windows
) -> Iterator[Finding]:
    """Yield the finding on statistics that the loop moved, and that the model does not
    have after it.

    The loop has the values in its own hands, and has written its weights back into the
    model.
    """
    known = [u for u in seen.updates if u.pieces and u.is_known]
    if not known:
        return
    is_back = not all_same(
        in_part(now.params), in_part(known[0].applied.params)
    )
    called = known[-1].pieces[-1].called
    first, last = known[0].pieces[0].called.buffers, called.buffers
    if not is_back or not len(first) == len(last) == len(now.buffers):
        return
    lost = [
        i
        for i, value in enumerate(now.buffers)
        if same(value, first[i])
        and not same(value, last[i])
        and not replay.are_seeds[i]
    ]
    if lost:
        apart = distance([first[i] for i in lost], [last[i] for i in lost])
        names = tuple(replay.names_of_others[i] for i in lost)
        where = Where((known[-1].number,), parameters=names, line=called.line)
        yield Finding(
            Change(Fault.STATISTICS_NEVER_WRITTEN_BACK), apart, where=where
        )
