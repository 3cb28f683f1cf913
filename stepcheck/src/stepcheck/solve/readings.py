"""Facts that a log leaves open, solved for: rows that pad a batch, rows with equal inputs, optimizers by hand."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise, product

import numpy as np

from stepcheck import tree
from stepcheck.solve.basis import NUM_SOLVED, are_too_many
from stepcheck.solve.changes import Schedule
from stepcheck.solve.evidence import AtOutputs, Evidence, Meant, narrowed
from stepcheck.solve.optimizers import rated
from stepcheck.solve.ratios import least
from stepcheck.trace.measure import FINE, all_same, in_part
from stepcheck.trace.windows import PAD, Piece, Rows, Update, Windows, passes, placed
from stepcheck.tree import Tree

NUM_SETTLED = 8  # updates whose rows of equal inputs are solved for
NUM_OPTIONS, NUM_COMBINED = (
    80,
    14,
)  # rows that may be others, and those that are tried in all combinations
_WAYS = (
    (False, True),
    (True, True),
    (True, False),
)  # of pairs of outputs and labels? with the weights of their rows?
FEW_TWINS = 0.1  # of the rows: few that stand for one another change no order
_OFTEN = 1.5  # times as often as most rows


def read(
    meant: Meant,
    seen: Windows,
    rows: Rows,
    data: tuple[Tree, Tree, Tree],
    schedule: Schedule | None,
) -> Windows:
    """Return the updates of a log, with the open facts chosen so that they make the gradients.

    Args:
        schedule: the learning rate that is meant; None if it is not known.
    """
    known = [u for u in seen.updates if meant.modes.knows(u)]
    often, again = _often([piece.rows for piece in seen.pieces]), doubled(seen.updates, rows.num)
    changed: dict[int, Update] = {}
    unclear = [u for u in known if rows.twins(u.rows) and not rows.agree(u.rows, data[1:])]
    tried = unclear if seen.is_by_hand else unclear[:: -(-len(unclear) // NUM_SETTLED) or 1]
    for update in known:
        if update in unclear:
            found = settled(meant, update, rows) if update in tried else None
        else:
            found = None if seen.is_by_hand else unfilled(meant, update, often, again)
        if found is not None:
            changed[update.number] = found
    for update in _filled(seen.updates, rows.num):
        if all(update.number != u.number for u in unclear) and not np.any(
            changed.get(update.number, update).rows == PAD
        ):
            changed[update.number] = update
    updates = [changed.get(u.number, u) for u in seen.updates]
    new = {piece.called.order: piece for u in updates for piece in u.pieces}
    pieces = [new.get(piece.called.order, piece) for piece in seen.pieces]
    seen = replace(seen, updates=updates, pieces=pieces, place=placed(pieces))
    seen = replace(seen, settled={n for n, u in changed.items() if rows.twins(u.rows)})
    if seen.is_by_hand:
        whole = [u for u in updates if any(u.number == each.number for each in known)]
        return rated(meant, seen, whole, schedule) if len(whole) == len(updates) else seen
    return _without_idle(meant, seen)


def _often(lists: list[np.ndarray]) -> set[int]:
    """Return the rows that come more often than most."""
    rows, counts = np.unique(np.concatenate([*lists, [PAD]]).astype(int), return_counts=True)
    return set(rows[counts > np.median(counts[rows != PAD] if len(rows) > 1 else counts)].tolist())


def _without_idle(meant: Meant, seen: Windows) -> Windows:
    """Merge steps of zeros with the update after them, if its gradient has all their rows."""
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
            update = replace(update, pieces=[p for each in (*wait, update) for p in each.pieces])
        merged.append(update)
        wait = []
    if sum(map(len, idle.values())) - len(idle) < 2:
        return seen
    tried = [u for u in merged if u.number in idle and u.is_known]
    fits = [Evidence(meant, u).without <= meant.replay.tolerance.differs for u in tried]
    return replace(seen, updates=[*merged, *wait], idle=idle) if fits and all(fits) else seen


def unfilled(meant: Meant, update: Update, often: set[int], again: dict[int, np.ndarray]) -> Update:
    """Return an update with its last rows as padding, if they repeat others and the gradient leaves them out."""
    rows, last = update.rows, update.rows[-1]
    differs, fits = meant.replay.tolerance.differs, meant.replay.tolerance.fits
    if update.number in again and Evidence(meant, update).without > differs:
        changed = replace(update, pieces=_without(update.pieces, again[update.number]))
        if Evidence(meant, changed).without <= fits:
            return changed
    same = _same(rows)
    repeated = int(
        np.argmin([*(row in rows[:i] for i, row in reversed([*enumerate(rows)])), False])
    )
    is_suspect = same < len(rows) and (same > 1 or repeated > 0 or int(last) in often)
    if last == PAD or not is_suspect or Evidence(meant, update).without <= differs:
        return update
    late = again.get(update.number, np.zeros(len(rows), bool))[::-1]
    if 0 < (num := _uncounted(update)) <= max(same, repeated, int(np.argmin([*late, False]))):
        return _cut(update, num)
    for num in dict.fromkeys([same, same - 1, repeated]):
        if 0 < num < len(rows) and Evidence(meant, changed := _cut(update, num)).without <= fits:
            return changed
    return update


def _same(rows: np.ndarray) -> int:
    """Return how many rows at the end are the same."""
    return int(np.argmin([*(rows[::-1] == rows[-1]), False]))


def _uncounted(update: Update) -> int:
    """Return at how many rows at the end, but not at all, the derivative of the loop's loss by the output is 0."""
    taken = [(piece, piece.called.derivatives.get(0, [np.zeros(0)])[-1]) for piece in update.pieces]
    if any(len(own) != len(piece.rows) or not len(own) for piece, own in taken):
        return 0
    counts = np.concatenate([np.any(np.reshape(own, (len(own), -1)), axis=1) for _, own in taken])
    return int(np.argmax(counts[::-1]))


def _cut(update: Update, num: int) -> Update:
    """Return an update with its last rows as padding."""
    return replace(
        update,
        pieces=_without(update.pieces, np.arange(len(update.rows)) >= len(update.rows) - num),
    )


def _filled(updates: list[Update], num_rows: int) -> list[Update]:
    """Return the last updates of all passes, with copies of one row at the ends as padding, if all passes end so.

    Else no row comes twice in a pass, and the passes have as many rows, or one has all.
    """
    found: list[Update] = []
    sizes: list[int] = []
    used: set[int] = set()
    for update in updates:
        rows = update.rows
        if not len(rows) or np.any(rows == PAD):
            return []
        same = num = _same(rows)
        if same > 1:
            num -= rows[-1] not in used and rows[-1] not in rows[:-same]
            num = uncounted if (uncounted := _uncounted(update)) in (same, same - 1) else num
        fresh = rows if same == 1 else rows[:-num]
        if len(set(fresh)) < len(fresh) or used & set(fresh):
            return []
        used |= set(fresh)
        if same > 1:
            found.append(_cut(update, num))
            sizes.append(len(used))
            used = set()
        elif len(used) == num_rows:
            return []
    is_so = (
        len(found) < len(updates)
        and len(set(sizes)) == 1
        and (len(sizes) > 1 or sizes[0] == num_rows)
    )
    return found if is_so else []


def _without(pieces: list[Piece], left_out: np.ndarray) -> list[Piece]:
    parts = np.split(left_out, np.cumsum([len(piece.rows) for piece in pieces])[:-1])
    pairs = zip(pieces, parts, strict=True)
    return [
        replace(p, rows=np.where(part, PAD, p.rows), fills=True, copied=p.rows) for p, part in pairs
    ]


def doubled(updates: list[Update], num_rows: int) -> dict[int, np.ndarray]:
    """Return, by the number of the last update of each pass, which of its rows came before, if all passes end so.

    The last update of such a pass completes the rows of the data, and is padded with rows of the same pass. If the
    microbatches give each row once in every pass, no pass is padded.
    """
    cuts = passes([piece for update in updates for piece in update.pieces])[:-1]
    if cuts and all(
        sum(np.count_nonzero(piece.rows != PAD) for piece in cut) == num_rows for cut in cuts
    ):
        return {}
    found: dict[int, np.ndarray] = {}
    used = np.zeros(num_rows, bool)
    for update in updates:
        again = (update.rows != PAD) & used[update.rows]
        used[update.rows[update.rows != PAD]] = True
        is_whole = bool(used.all())
        if bool(again.any()) != is_whole:
            return {}
        if is_whole:
            found[update.number] = again
            used[:] = False
    return found


def in_order(seen: Windows, rows: Rows, *, are_given: bool) -> Windows:
    """Return the updates with the rows by which their order is judged.

    A batch that an update has twice counts once. Of rows with equal inputs each pass takes the first one first, as
    which of them came may not be known.

    Args:
        are_given: whether the data have no row twice, as they were taken from the passes: rows that come more often
            than most are then unknown.
    """
    pieces = [
        p
        for u in seen.updates
        for p in {(p.called.replica, p.rows.tobytes()): p for p in u.pieces}.values()
    ]
    again = {p.called.order for u in seen.updates for p in u.pieces} - {
        p.called.order for p in pieces
    }
    pieces = [piece for piece in seen.pieces if piece.called.order not in again]
    numbers, counts = np.unique(
        np.concatenate([*(p.rows for p in pieces), [PAD]]).astype(int), return_counts=True
    )
    often = (
        numbers[(numbers != PAD) & (counts > _OFTEN * np.median(counts))]
        if are_given
        else numbers[:0]
    )
    often = often if len(often) <= FEW_TWINS * len(numbers) else often[:0]
    equal = {
        row: rows.equal(row) for row in numbers.tolist() if row != PAD and len(rows.equal(row)) > 1
    }
    unknown, new = [*equal, *often.tolist()], dict[int, Piece]()
    if not (unknown or again):
        return seen
    whole = {piece.called.order: piece.rows for piece in pieces}
    clear = [
        replace(piece, rows=np.where(np.isin(piece.rows, unknown), PAD, piece.rows))
        for piece in pieces
    ]
    for cut in passes(clear):
        uses = Counter[int]()
        for piece in cut:
            own = piece.rows.copy()
            for place, row in enumerate(whole[piece.called.order].tolist()):
                if row in equal:
                    first, num = equal[row][0], len(equal[row])
                    own[place] = equal[row][uses[first] % num]
                    uses[first] += 1
            new[piece.called.order] = replace(piece, rows=own)
    updates = [
        replace(u, pieces=[new[p.called.order] for p in u.pieces if p.called.order in new])
        for u in seen.updates
    ]
    pieces = [*new.values()]
    return replace(
        seen,
        updates=updates,
        pieces=pieces,
        place=placed(pieces),
        seen=seen.seen | {*often.tolist()},
    )


def settled(meant: Meant, update: Update, rows: Rows) -> Update | None:
    """Return an update with the rows of equal inputs that make its gradient; None if none do."""
    others = [np.asarray(leaf) for leaf in tree.leaves(meant.replay.data[1:])]

    def told(row: int) -> bytes:
        return b"".join(leaf[row].tobytes() for leaf in others)

    def options(row: int) -> list[int]:
        found = {told(each): each for each in rows.equal(row)} if row != PAD else {}
        return [row, *(each for key, each in found.items() if key != told(row))]

    e = Evidence(meant, update)
    every = [[*map(options, piece.rows.tolist())] for piece in update.pieces]
    at_outputs = narrowed([e])
    if (chosen := among(at_outputs[0] if at_outputs else e, every)) is None:
        return None
    pieces = zip(update.pieces, chosen, strict=True)
    return replace(update, pieces=[replace(piece, rows=own) for piece, own in pieces])


def among(e: Evidence, options: list[list[list[int]]]) -> list[np.ndarray] | None:
    """Return, by piece, the rows that make the handed gradient, if each place may have any of its options, or None."""
    free = [
        (i, place, row)
        for i, own in enumerate(options)
        for place, rows in enumerate(own)
        for row in rows[1:]
    ]
    if len(free) > NUM_OPTIONS:
        return None
    first = [np.array([rows[0] for rows in own]) for own in options]
    some = np.random.default_rng(0).permutation(len(e.handed))[:NUM_SOLVED]
    for is_of_pairs, has_weights in _WAYS if e.meant.replay.data[2] is not None else _WAYS[:2]:
        made = partial(_by_label, e, is_of_pairs=is_of_pairs, has_weights=has_weights)
        parts = [made(i, own) for i, own in enumerate(options)]
        pairs = zip(parts, first, strict=True)
        wholes = (
            [sum(map(part, range(len(own)), own)) for part, own in pairs]
            if is_of_pairs
            else e.parts
        )
        changes = [
            parts[i](place, row) - parts[i](place, first[i][place]) for i, place, row in free
        ]
        taken = _taken(
            free, *(np.stack(each)[:, some] for each in (wholes, changes, [e.penalty], [e.handed]))
        )
        if taken is not None:
            for i, place, row in taken:
                first[i][place] = row
            return first
    return None


def _by_label(
    e: Evidence, i: int, options: list[list[int]], *, is_of_pairs: bool, has_weights: bool
) -> Callable:
    """Return the function that computes the gradient that a row's label has at a place: by its output, or by all."""
    piece, num = e.update.pieces[i], len(options)
    replay, factors = e.meant.replay, e.factors[i] / (num if is_of_pairs else 1)
    out, (_, y, weights) = piece.called.outputs[0], replay.data

    def passed(place: int, row: int) -> np.ndarray:
        chosen = factors if is_of_pairs else np.where(np.arange(num) == place, factors, 0.0)
        batch = replay.batch(piece, labels=np.full(num, row), has_their_weights=has_weights)
        return e.gradient(i, chosen, batch=batch)

    rows = sorted({row for own in options for row in own})
    if not isinstance(e, AtOutputs) or are_too_many(e.meant.objective, out, len(rows)):
        return passed
    every = np.tile(rows, num)
    given = (y, every), (weights, every if has_weights else piece.rows.repeat(len(rows)))
    labels, own = (
        None if each is None else replay.as_wide(np.asarray(each)[by], piece) for each, by in given
    )
    made = replay.derivative(e.meant.objective, out.repeat(len(rows), axis=0), labels, own)
    made = made.reshape(num, len(rows), -1) * factors[0][:, None, None]

    def at_outputs(place: int, row: int) -> np.ndarray:
        own = made[:, rows.index(row)]
        return e.pulled(
            i, own if is_of_pairs else np.where(np.arange(num)[:, None] == place, own, 0.0)
        )

    return at_outputs


def _taken(
    free: list[tuple[int, int, int]],
    wholes: np.ndarray,
    changes: np.ndarray,
    own: np.ndarray,
    handed: np.ndarray,
) -> list[tuple[int, int, int]] | None:
    """Return the changes that make a gradient of the sums of pieces, times a factor each, and of the model's losses.

    Least squares give the share of each change; they are rounded one after the other, the surest first, and the last
    in all combinations: the labels of pairs have little more than their mean in a gradient.
    """
    made = np.transpose(
        np.linalg.qr(np.concatenate([wholes, changes, own, handed]).T.astype("float64"))[1]
    )
    wholes, changes, own, (handed,) = np.split(
        made, np.cumsum([len(wholes), len(changes), len(own)])
    )
    of_piece, num = np.array([i for i, _, _ in free]), len(wholes)

    def solved(columns: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found = least([*columns], wanted)[0]
        return found, wanted - found @ columns

    def rest(factors: np.ndarray, taken: set[int]) -> np.ndarray:
        some = [*taken]
        return handed - factors @ wholes - factors[of_piece[some]] @ changes[some]

    most, factors = FINE.fits * float(np.linalg.norm(handed)), np.ones(num)
    if np.linalg.norm(solved(np.concatenate([changes, own]), rest(factors, set()))[1]) > most:
        found, apart = solved(np.concatenate([wholes, changes, own]), handed)
        factors = found[:num]
        if np.linalg.norm(apart) > most or not np.all(factors):
            return None
    taken, order, left = set[int](), list[int](), [*range(len(free))]
    while left:
        shares = solved(np.concatenate([changes[left], own]), rest(factors, taken))[0][: len(left)]
        shares /= factors[of_piece[left]]
        surest = int(np.argmax(np.abs(shares - 0.5)))
        order.append(last := left.pop(surest))
        if shares[surest] > 0.5:
            taken.add(last)
            left = [k for k in left if free[k][:2] != free[last][:2]]
    if np.linalg.norm(solved(own, rest(factors, taken))[1]) > most:
        some = [*{free[k][:2]: k for k in order}.values()][-NUM_COMBINED:]  # one of each place
        signs = np.array([-1 if k in taken else 1 for k in some])
        ways = np.array([*product((0, 1), repeat=len(some))])
        steps = ways @ ((signs * factors[of_piece[some]])[:, None] * changes[some])
        best = ways[np.argmin(np.linalg.norm(rest(factors, taken) - steps, axis=1))]
        taken ^= {k for k, is_changed in zip(some, best, strict=True) if is_changed}
    return (
        [free[k] for k in taken]
        if np.linalg.norm(solved(own, rest(factors, taken))[1]) <= most
        else None
    )


def without_void(updates: list[Update]) -> list[Update]:
    """Return updates where each window is one: only its last step is kept, as by `jnp.where(is_full, new, old)`.

    All windows must be equally long, else the updates are returned unchanged.
    """
    known = [u for u in updates if u.applied.is_whole]
    kept = [i for i, (a, b) in enumerate(pairwise(known)) if not _is_void(a, b)]
    size = kept[0] + 1 if kept else 1
    is_regular = all(i + 1 == size * (n + 1) for n, i in enumerate(kept))
    if size < 2 or len(kept) < 2 or not is_regular or len(kept) < (len(known) - 1) // size:
        return updates
    windows = [updates[start : start + size] for start in range(0, len(updates) - size + 1, size)]
    whole = [[piece for u in each for piece in u.pieces] for each in windows]
    return [
        replace(w[-1], number=n, pieces=p)
        for n, (w, p) in enumerate(zip(windows, whole, strict=True), start=1)
    ]


def _is_void(one: Update, two: Update) -> bool:
    old, new = one.applied, two.applied
    is_again = all_same(in_part(old.params), in_part(new.params)) and all_same(old.slots, new.slots)
    return is_again and not all_same(in_part(old.params), in_part(old.params_after))
