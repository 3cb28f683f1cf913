"""Facts that a log leaves open, solved for: rows that pad a batch, rows with equal
inputs.
"""

from dataclasses import replace
from itertools import pairwise

import numpy as np

from stepcheck import tree
from stepcheck.solve.changes import Schedule
from stepcheck.solve.evidence import Evidence, Meant
from stepcheck.solve.optimizers import rated
from stepcheck.solve.outputs import narrowed
from stepcheck.solve.ratios import least
from stepcheck.trace.measure import all_same, in_part
from stepcheck.trace.windows import PAD, Rows, Update, Windows, passes, placed
from stepcheck.tree import Tree

_NUM_SETTLED = 8  # updates whose rows of equal inputs are solved for
_MOST_OPTIONS = 80  # rows of an update that may be others


def read(
    meant: Meant,
    seen: Windows,
    rows: Rows,
    data: tuple[Tree, Tree, Tree],
    schedule: Schedule | None,
) -> Windows:
    """Return the updates of a log, with the open facts chosen so that they make the
    gradients.

    Args:
        schedule: the learning rate that is meant; None if it is not known.
    """
    known = [u for u in seen.updates if meant.modes.knows(u)]
    unclear = [
        u
        for u in known
        if rows.twins(u.rows) and not rows.agree(u.rows, data[1:])
    ]
    tried = (
        unclear
        if seen.is_by_hand
        else unclear[:: -(-len(unclear) // _NUM_SETTLED) or 1]
    )
    found = [settled(meant, update, rows) for update in tried]
    numbers = {update.number for update in unclear}
    again = {} if seen.is_by_hand else doubled(seen.updates, rows.num)
    full = [update for update in known if update.number in {*again} - numbers]
    found += [unfilled(meant, update, again[update.number]) for update in full]
    changed = {update.number: update for update in found if update is not None}
    updates = [changed.get(update.number, update) for update in seen.updates]
    new = {
        piece.called.order: piece
        for update in updates
        for piece in update.pieces
    }
    pieces = [new.get(piece.called.order, piece) for piece in seen.pieces]
    told = numbers & {*changed}
    seen = replace(
        seen, updates=updates, pieces=pieces, place=placed(pieces), settled=told
    )
    if seen.is_by_hand:
        is_whole = len(known) == len(updates)
        return rated(meant, seen, updates, schedule) if is_whole else seen
    return _without_idle(meant, seen)


def unfilled(meant: Meant, update: Update, again: np.ndarray) -> Update | None:
    """Return the last update of a pass with padding for rows that fill up its batch, or
    None.

    They are copies of one row, or they have come before, and count nothing.

    Args:
        again: which of its rows come again.
    """
    changed = _padded(update, again)
    if len({*update.rows[again].tolist()}) == 1:
        return changed
    is_wrong = Evidence(meant, update).without > meant.replay.tolerance.differs
    return changed if is_wrong and Evidence(meant, changed).is_along else None


def _padded(update: Update, left_out: np.ndarray) -> Update:
    """Return an update with some rows as padding."""
    parts = np.split(left_out, np.cumsum(update.sizes)[:-1])
    pieces = [
        replace(
            piece,
            rows=np.where(part, PAD, piece.rows),
            fills=True,
            copied=piece.rows,
        )
        for piece, part in zip(update.pieces, parts, strict=True)
    ]
    return replace(update, pieces=pieces)


def settled(meant: Meant, update: Update, rows: Rows) -> Update | None:
    """Return an update with the rows of equal inputs that make its gradient; None if
    none do.

    A gradient is linear in the choice of each label, so the choice is solved for.
    """
    e = Evidence(meant, update)
    at_output = narrowed([e])
    view: Evidence = at_output[0] if at_output else e
    leaves = [np.asarray(leaf) for leaf in tree.leaves(meant.replay.data[1:])]
    free = []
    for i, piece in enumerate(update.pieces):
        for place, row in enumerate(piece.rows.tolist()):
            equal = rows.equal(row) if row != PAD else []
            told = {_told(leaves, each): (i, place, each) for each in equal}
            free += [
                each for key, each in told.items() if key != _told(leaves, row)
            ]
    if not 0 < len(free) <= _MOST_OPTIONS:
        return None
    changes = [_moved(view, *each) for each in free]
    shares = least(changes, view.handed - view.reference)[0]
    chosen = [piece.rows.copy() for piece in update.pieces]
    for (i, place, other), share in zip(free, shares, strict=True):
        if share > 0.5:
            chosen[i][place] = other
    pairs = zip(update.pieces, chosen, strict=True)
    found = replace(
        update, pieces=[replace(piece, rows=own) for piece, own in pairs]
    )
    return (
        found
        if Evidence(meant, found).without <= meant.replay.tolerance.differs
        else None
    )


def _told(leaves: list[np.ndarray], row: int) -> bytes:
    return b"".join(leaf[row].tobytes() for leaf in leaves)


def _moved(e: Evidence, i: int, place: int, other: int) -> np.ndarray:
    """Return how the gradient moves if the row at a place has the label of another one."""
    piece, factors = e.update.pieces[i], e.factors[i]
    factors = factors * (np.arange(factors.shape[1]) == place)
    labels = np.full(len(piece.rows), other)
    batch = e.meant.replay.batch(piece, labels=labels, has_their_weights=True)
    return e.gradient(i, factors, batch=batch) - e.gradient(i, factors)


def _without_idle(meant: Meant, seen: Windows) -> Windows:
    """Merge steps of zeros with the update after them, if its gradient has all their
    rows.
    """
    wait: list[Update] = []
    merged: list[Update] = []
    idle: dict[int, list[Update]] = {}
    for update in seen.updates:
        grads = [g for g in update.applied.grads if g is not None]
        if update.is_known and grads and not any(np.any(g) for g in grads):
            wait.append(update)
            continue
        if wait:
            idle[update.number] = [*wait, update]
            update = replace(
                update,
                pieces=[p for each in (*wait, update) for p in each.pieces],
            )
        merged.append(update)
        wait = []
    if sum(map(len, idle.values())) - len(idle) < 2:
        return seen
    tried = [u for u in merged if u.number in idle and u.is_known]
    fits = [
        Evidence(meant, u).without <= meant.replay.tolerance.differs
        for u in tried
    ]
    return (
        replace(seen, updates=[*merged, *wait], idle=idle)
        if fits and all(fits)
        else seen
    )


def doubled(updates: list[Update], num_rows: int) -> dict[int, np.ndarray]:
    """Return which rows of the last update of each pass came before, if all passes end
    so.

    The last update of such a pass completes the rows of the data, and is padded with
    rows of the same pass. If the microbatches give each row once in every pass, no pass
    is padded.
    """
    cuts = passes([piece for update in updates for piece in update.pieces])[:-1]
    if cuts and all(
        sum(np.count_nonzero(piece.rows != PAD) for piece in cut) == num_rows
        for cut in cuts
    ):
        return {}
    found: dict[int, np.ndarray] = {}
    used = np.zeros(num_rows, bool)
    for update in updates:
        _, first = np.unique(update.rows, return_index=True)
        is_first = np.isin(np.arange(len(update.rows)), first)
        again = (update.rows != PAD) & (used[update.rows] | ~is_first)
        used[update.rows[update.rows != PAD]] = True
        is_whole = bool(used.all())
        if bool(again.any()) != is_whole:
            return {}
        if is_whole:
            found[update.number] = again
            used[:] = False
    return found


def without_void(updates: list[Update]) -> list[Update]:
    """Return updates where each window is one: its last step, as by `jnp.where(is_full,
    new, old)`.

    All windows must be equally long, else the updates are returned unchanged.
    """
    known = [u for u in updates if u.applied.is_whole]
    kept = [i for i, (a, b) in enumerate(pairwise(known)) if not _is_void(a, b)]
    size = kept[0] + 1 if kept else 1
    is_regular = all(i + 1 == size * (n + 1) for n, i in enumerate(kept))
    if (
        size < 2
        or len(kept) < 2
        or not is_regular
        or len(kept) < (len(known) - 1) // size
    ):
        return updates
    windows = [
        updates[start : start + size]
        for start in range(0, len(updates) - size + 1, size)
    ]
    whole = [[piece for u in each for piece in u.pieces] for each in windows]
    return [
        replace(w[-1], number=n, pieces=p)
        for n, (w, p) in enumerate(zip(windows, whole, strict=True), start=1)
    ]


def _is_void(one: Update, two: Update) -> bool:
    old, new = one.applied, two.applied
    is_again = all_same(in_part(old.params), in_part(new.params)) and all_same(
        old.slots, new.slots
    )
    return is_again and not all_same(
        in_part(old.params), in_part(old.params_after)
    )
