"""The variables that steps leave out, and the statistics that a loop leaves in the
model.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from stepcheck import tree
from stepcheck.errors import attempt
from stepcheck.faults import Fault, Stage
from stepcheck.port import Port
from stepcheck.trace.log import Applied, Called, Values
from stepcheck.trace.measure import FINE, all_same, distance, in_part, same
from stepcheck.trace.windows import Piece, Update, Windows
from stepcheck.values import Change, Finding, Reason, Unjudged, Where

NUM_ROWS = 32  # on this many rows the gradient is computed if no forward pass was seen


def left_out(
    replay: Port,
    objective: Any,
    updates: list[Update],
    steps: list[Applied],
    before: list[np.ndarray],
    *,
    is_thawed: bool = False,
) -> Iterator[Finding | Unjudged]:
    """Yield the finding on variables that steps get no gradient of, though the loss has
    one.

    A variable that is not handed to an optimizer may be left out by choice, which is
    said.

    Args:
        before: the weights when the loop began.
        is_thawed: whether the loop itself has set them to be trained.
    """
    whole = [step for step in steps if step.is_whole]
    num = len(replay.names)
    before = before if len(before) == num else _first_params(updates)
    if not whole or len(before) != num or any(len(step.grads) != num for step in whole):
        return
    missing = [i for i in range(num) if all(step.grads[i] is None for step in whole)]
    if not missing or len(missing) == num:
        return
    shares = _shares(replay, objective, updates, before)
    still = [i for i in missing if not _moves(replay, updates, before, i)]
    bare = [i for i in still if shares[i] > FINE.differs]
    wrong = [i for i in bare if is_thawed or any(i in step.lost for step in whole)]
    numbers = tuple(u.number for u in updates if u.applied.is_whole)
    if wrong:
        names = tuple(replay.names[i] for i in wrong)
        where = Where(numbers, parameters=names, line=whole[0].line)
        apart = float(np.linalg.norm(shares[wrong]))
        yield Finding(Change(Fault.VARIABLE_LEFT_OUT), apart, where=where)
    elif bare:
        told = ", ".join(replay.names[i] for i in bare)
        yield Unjudged(Reason.NOT_HANDED, Stage.GRADIENT, len(numbers), told)


def _first_params(updates: list[Update]) -> list[np.ndarray]:
    """Return the weights of the first forward pass, of a model that was not built
    before the loop.
    """
    pieces = (piece for u in updates for piece in u.pieces)
    return next((piece.called.params for piece in pieces if piece.called.is_whole), [])


def _moves(
    replay: Port, updates: list[Update], before: list[np.ndarray], i: int
) -> bool:
    """Whether a variable moves, perhaps by something else than the known steps."""
    called = [piece.called for u in updates for piece in u.pieces]
    states = [each.params[i] for each in called if each.is_whole]
    now = replay.values()
    states += [] if now is None else [now.params[i]]
    return not all(same(before[i], state) for state in states)


def _shares(
    replay: Port, objective: Any, updates: list[Update], before: list[np.ndarray]
) -> np.ndarray:
    """Return the length of each variable's gradient of a sum over rows as a share of
    the whole; NaN if not known.
    """
    known = (piece for u in updates if u.is_known for piece in u.pieces)
    piece = next(known, None) or _first(replay, before)

    def gradient() -> np.ndarray:
        batch = replay.batch(piece)
        ones = np.ones_like(
            replay.terms(piece, objective, batch, training=False).weights
        )
        penalty = len(piece.rows)
        return replay.gradient(
            piece, objective, batch, ones, training=False, penalty=penalty
        )

    whole, _ = attempt(
        gradient
    )  # an error: of a model that does not take the data as they are
    size = 0.0 if whole is None else float(np.linalg.norm(whole))
    if whole is None or not 0 < size < np.inf:
        return np.full(len(replay.names), np.nan)
    return (
        np.array([np.linalg.norm(part) for part in replay.parts(whole).values()]) / size
    )


def _first(replay: Port, before: list[np.ndarray]) -> Piece:
    inputs = [np.asarray(leaf)[:NUM_ROWS] for leaf in tree.leaves(replay.data[0])]
    now = replay.values()
    buffers = now.buffers if now else []
    return Piece(
        Called(0, inputs, [], before, buffers, True, None), np.arange(len(inputs[0]))
    )


def lost_statistics(replay: Port, now: Values, seen: Windows) -> Iterator[Finding]:
    """Yield the finding on statistics that the loop moved, and that the model does not
    have after it.

    The loop has the values in its own hands, and has written its weights back into the
    model.
    """
    known = [u for u in seen.updates if u.applied.is_whole and u.pieces and u.is_known]
    if not known:
        return
    is_back = not all_same(in_part(now.params), in_part(known[0].applied.params))
    first, last = (known[i].pieces[i].called.buffers for i in (0, -1))
    if not is_back or not len(first) == len(last) == len(now.buffers):
        return
    values = enumerate(zip(now.buffers, first, last, strict=True))
    back = [i for i, (value, a, b) in values if same(value, a) and not same(value, b)]
    lost = [i for i in back if not replay.are_seeds[i]]
    if lost:
        apart = distance([now.buffers[i] for i in lost], [last[i] for i in lost])
        names = tuple(replay.names_of_others[i] for i in lost)
        line = known[-1].pieces[-1].called.line
        where = Where((known[-1].number,), parameters=names, line=line)
        yield Finding(Change(Fault.STATISTICS_NEVER_WRITTEN_BACK), apart, where=where)
