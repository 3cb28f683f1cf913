"""Facts that a log leaves open, solved for: rows that pad a batch, rows with equal inputs, optimizers by hand."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np

from wholestep import tree
from wholestep.audit.basis import among
from wholestep.audit.evidence import Evidence, Meant, narrowed
from wholestep.audit.found import Likely
from wholestep.audit.measure import FINE, all_same, are_finite, distance, in_part
from wholestep.audit.ratios import least
from wholestep.audit.windows import PAD, Piece, Rows, Rule, Update, Windows, doubled, placed
from wholestep.tree import Tree

Schedule = Callable[[int], float]  # the learning rate by update, from 0
UNMOVED = Likely(
    "No weight moves: gradients are taken of the same rows again, and at the same weights. Write each step to the "
    "variables, `v.assign_sub(rate * g)`, or carry the new weights to the next step; `v = v - rate * g` does neither."
)

NUM_SETTLED = 8  # updates whose rows of equal inputs are solved for
_NUM_TRIED = 3  # updates by which one of several derivatives is chosen
_ROUNDING = 4e-7  # of a move, for a unit of the weights


def read(meant: Meant, seen: Windows, rows: Rows, data: tuple[Tree, Tree, Tree], schedule: Schedule | None) -> Windows:
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
    updates = [changed.get(u.number, u) for u in seen.updates]
    new = {piece.called.order: piece for u in updates for piece in u.pieces}
    pieces = [new.get(piece.called.order, piece) for piece in seen.pieces]
    updates = [replace(u, pieces=_real(u.pieces)) if u.number in changed else u for u in updates]
    seen = replace(seen, updates=updates, pieces=pieces, place=placed(pieces))
    seen = replace(seen, settled={n for n, u in changed.items() if rows.twins(u.rows)})
    if seen.is_by_hand:
        whole = [u for u in updates if any(u.number == each.number for each in known)]
        return _rated(meant, seen, whole, schedule) if len(whole) == len(updates) else seen
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
        if Evidence(meant, replace(changed, pieces=_real(changed.pieces))).without <= fits:
            return changed
    same = int(np.argmin([*(rows[::-1] == last), False]))
    repeated = int(np.argmin([*(row in rows[:i] for i, row in reversed([*enumerate(rows)])), False]))
    is_suspect = same < len(rows) and (same > 1 or repeated > 0 or int(last) in often)
    if last == PAD or not is_suspect or Evidence(meant, update).without <= differs:
        return update
    for num in dict.fromkeys([same, same - 1, repeated]):
        if 0 < num < len(rows):
            changed = replace(update, pieces=_without(update.pieces, np.arange(len(rows)) >= len(rows) - num))
            if Evidence(meant, replace(changed, pieces=_real(changed.pieces))).without <= fits:
                return changed
    return update


def _without(pieces: list[Piece], left_out: np.ndarray) -> list[Piece]:
    parts = np.split(left_out, np.cumsum([len(piece.rows) for piece in pieces])[:-1])
    return [Piece(p.called, np.where(part, PAD, p.rows)) for p, part in zip(pieces, parts, strict=True)]


def _real(pieces: list[Piece]) -> list[Piece]:
    return [piece for piece in pieces if np.any(piece.rows != PAD)]


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
    return replace(update, pieces=[Piece(piece.called, own) for piece, own in pieces])


def _rated(meant: Meant, seen: Windows, updates: list[Update], schedule: Schedule | None) -> Windows:
    """Return updates by hand with their rates, if all are steps of one optimizer on the gradients that were meant."""
    replay, evidence = meant.replay, [Evidence(meant, update) for update in updates]
    if not evidence:
        return seen
    params = [replay.flat(list(update.applied.params)) for update in updates]
    lengths = [float(np.linalg.norm(each)) / max(e.norm, 1e-30) for each, e in zip(params, evidence, strict=True)]
    near = [max(replay.tolerance.differs, _ROUNDING * length) for length in lengths]
    falls, grads = [e.handed for e in evidence], [e.reference for e in evidence]
    rates = [e.share for e in evidence]
    rule: Rule | None = Rule(rates, "")
    is_plain = all(r and distance(f, r * g) <= n for f, r, g, n in zip(falls, rates, grads, near, strict=True))
    if not is_plain:
        are_kernels = replay.flat([np.full(shape, float(len(shape) > 1)) for shape in replay.shapes])
        rule = solved(Moves(params, falls, grads, near, are_kernels > 0))
    if rule is None:
        return seen
    found, meant_rates = [], _meant_rates(evidence, np.abs(rule.rates), schedule)
    for update, fall, grad, rate, own in zip(updates, falls, grads, rule.rates, meant_rates, strict=True):
        handed = fall / own if is_plain else rate / own * grad  # of an ascent: of the other sign
        applied = replace(update.applied, grads=list(replay.parts(handed).values()), learning_rate=own)
        found.append(replace(update, applied=applied))
    return replace(seen, updates=found, rule=rule._replace(rates=meant_rates))


def _meant_rates(evidence: list[Evidence], rates: np.ndarray, schedule: Schedule | None) -> list[float]:
    """Return the rates that are meant: the others have a factor that belongs to the gradient, as a sum of rows has."""
    rows, parts = np.array([(e.whole[0], len(e.update.pieces)) for e in evidence]).T
    most = max(float(rows.max()), 1e-30)
    shares, counts = rows / most, [rows, 0 * rows + most]
    if schedule is not None:
        meant, counts = np.array([schedule(e.update.number - 1) for e in evidence]), [*counts, shares, parts]
    else:
        meant = np.full(len(rates), float(np.asarray(getattr(evidence[0].meant.optimizer, "learning_rate", 0.0))))
        counts = counts if np.log10(most) % 1 else []  # a loop without this optimizer may have ten times its rate
    if np.all(meant > 0) and any(_is_even(rates / (meant * each), 1.0) for each in counts):
        return meant.tolist()
    is_of_rows = np.all(rows > 0) and _is_even(rates / rows) and not _is_even(rates)
    return (rates / (rows if rates.max() > 1 else shares) if is_of_rows else rates).tolist()


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
    return [replace(w[-1], number=n, pieces=p) for n, (w, p) in enumerate(zip(windows, whole, strict=True), start=1)]


def _is_void(one: Update, two: Update) -> bool:
    old, new = one.applied, two.applied
    is_again = all_same(in_part(old.params), in_part(new.params)) and all_same(old.slots, new.slots)
    return is_again and not all_same(in_part(old.params), in_part(old.params_after))


NUM_SPARE = 8  # numbers of a move beyond those that are solved for: no chance fits them
_BETAS = (0.9, 0.5, 0.0, 0.8, 0.95), (0.999, 0.99, 0.9, 0.95, 0.98, 1.0)  # of both moments; 1 adds the squares up
_EPSILONS = 1e-8, 1e-7, 0.0, 1e-6, 1e-5, 1e-3
_SHARE = 0.01  # of a move: else it is made without the gradient
_TINY = 1e-3  # a gradient that is so much smaller than most is known with few digits, and its step with none
_UNCORRECTED = (
    "The moments are corrected in no update, or in each as in the first: does the count of updates move? Is that meant?"
)

_SURE = 3  # times the distance up to which moves are reproduced
_MOST_DECAY = 0.0099  # of the weights in an update, and more than the rate: no decay times a rate is that large
_SHRUNK = (
    "Each update shrinks the weights by the share {:.3g}, so that they forget all but the last {:.0f} updates. A decay "
    "is multiplied by the rate, which makes it {:.3g}: is that missing?"
)
_FROZEN = (
    "Each update corrects its moments as the first one, with a rate of {:g}: the count of updates stands still. Add 1 "
    "to it in each."
)


class Moves(NamedTuple):
    """The updates as vectors: the weights before, the weights minus those after, and the meant gradients.

    Attributes:
        near: by update, the distance up to which a move is reproduced.
        are_kernels: of each weight, whether it is in a parameter of more than one axis: often these alone decay.
    """

    params: list[np.ndarray]
    falls: list[np.ndarray]
    grads: list[np.ndarray]
    near: list[float]
    are_kernels: np.ndarray


def solved(moves: Moves) -> Rule | None:
    """Return the optimizer whose steps all moves are, on the meant gradients; None if they are none's."""
    return _with_momentum(moves) or _with_moments(moves)


def _with_momentum(moves: Moves) -> Rule | None:
    """Return the rule where each move is a sum of the gradient, of the move and the gradient before, and of decay."""
    for has_before in (False, True) if len(moves.falls) > 2 else (False,):
        numbers = []
        for t, grad in enumerate(moves.grads):
            before = [moves.falls[t - 1], *[moves.grads[t - 1]] * has_before] if t else []
            if (found := _fitted(moves, t, [grad, *before], np.ones(len(grad), bool))) is None:
                break
            numbers.append(found)
        else:
            rates = [float(parts[0] + (parts[2] if len(parts) > 2 else 0.0)) for parts, _ in numbers]
            if has_before:  # the second move and gradient before are one direction
                rates[:2] = rates[2:3] * 2
            told = f", and {numbers[-1][0][1]:.4g} times the move before" if len(numbers) > 1 else ""
            return _decaying(Rule(rates, told), moves, [decay for _, decay in numbers])
    return None


def _with_moments(moves: Moves) -> Rule | None:
    """Return the rule of Adam, RMSprop or Adagrad: a mean of the gradients, divided by a root of their squares."""
    for betas, epsilon, is_corrected in product(product(*_BETAS), _EPSILONS, (True, False)):
        numbers = []
        for t, (first, second) in enumerate(_moments(moves.grads, *betas)):
            root = np.sqrt(second)
            are_known = root > _TINY * np.sqrt(np.mean(second))
            size = epsilon * np.sqrt(1 - betas[1] ** (t + 1)) if is_corrected else epsilon
            found = _fitted(moves, t, [first / np.maximum(root + size, 1e-30)], are_known)
            if found is None:
                break
            numbers.append(found)
        if len(numbers) == len(moves.falls):
            rule = _named(np.array([float(parts[0]) for parts, _ in numbers]), *betas)
            return _decaying(rule, moves, [decay for _, decay in numbers])
    return None


def _named(factors: np.ndarray, first: float, second: float) -> Rule:
    """Return the rule of Adam: its rates are the factors of the moments by their corrections, the meant ones if even.

    A correction divides a moment by 1 - beta ** count: by its beta, none, the other moment's, or of the next count.
    """
    counts, squares = np.arange(1, len(factors) + 1), second if second < 1 else 0.0

    def rates(one: float, two: float, late: int = 0) -> np.ndarray:
        return factors * (1 - one ** (counts + late)) / np.sqrt(1 - two ** (counts + late))

    told = f" (its mean with {first:g}, over the root of its mean square with {second:g})"
    meant, has_both = rates(first, squares), 0 < first != squares > 0
    if _is_even(meant) or not squares > 0:
        return Rule((meant if _is_even(meant) or not _is_even(factors) else factors).tolist(), told)
    if _is_even(factors):
        as_first = float(factors[0]) * (1 - first) / np.sqrt(1 - second)
        is_frozen = _is_round(as_first) and not _is_round(float(factors[0]))
        note = Likely(_FROZEN.format(float(f"{as_first:.2g}"))) if is_frozen else _UNCORRECTED
        return Rule(factors.tolist(), told, (note,) * (first > 0))
    for one, two, late in product((first, 0.0, squares), (squares, 0.0, first), (0, 1)) if has_both else ():
        if _is_even(found := rates(one, two, late)):
            used = ("mean", one, first), ("mean square", two, squares)
            wrong = [
                f"the {name} is {f'divided by 1 - {beta:g} ** count' if beta else 'not corrected'}, and not divided "
                f"by 1 - {own:g} ** count"
                for name, beta, own in used
                if beta != own
            ]
            note = "; ".join([*wrong, *["the count is that of the next update"] * late])
            return Rule(found.tolist(), told, (Likely(f"A moment is not corrected as in Adam: {note}."),))
    return Rule(meant.tolist(), told)


def _is_even(numbers: np.ndarray, *others: float) -> bool:
    return float(np.ptp([*numbers, *others])) <= FINE.differs * float(np.max(np.abs(numbers)))


def _decaying(rule: Rule, moves: Moves, decays: list[np.ndarray]) -> Rule:
    """Return a rule with the share by which each update shrinks the weights beside its step, if it does."""
    for i, are_own in enumerate((moves.are_kernels, ~moves.are_kernels)):
        shares, rates = np.array([each[i] for each in decays]), np.array(rule.rates)
        lengths = shares * [np.linalg.norm(w[are_own]) for w in moves.params]
        bounds = [_SURE * near * np.linalg.norm(fall) for near, fall in zip(moves.near, moves.falls, strict=True)]
        if not np.all(lengths > bounds) or not (_is_even(shares) or _is_even(shares / rates)):
            continue
        by_rate = f"{shares[0] / rates[0]:.4g} times the rate"
        size = f"{shares[0]:.4g}, {by_rate}" if _is_even(rates) else by_rate
        size = size if _is_even(shares / rates) else f"{shares[0]:.4g}, at any rate"
        told = f"{rule.told}, and shrinks the weights by {size}"
        note = _SHRUNK.format(float(shares[0]), 1 / float(shares[0]), float(shares[0] * rates[0]))
        is_likely = bool(shares.min() >= _MOST_DECAY and np.all(shares > rates))
        return Rule(rule.rates, told, (*rule.notes, *[Likely(note)] * is_likely))
    return rule


def _is_round(rate: float) -> bool:
    """Whether a rate has no more than two digits, as those that people write."""
    return abs(rate - float(f"{rate:.2g}")) <= FINE.differs * abs(rate)


def _moments(grads: list[np.ndarray], one: float, two: float) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    first, second = np.zeros_like(grads[0]), np.zeros_like(grads[0])
    for grad in grads:
        first = one * first + (1 - one) * grad
        second = two * second + (1 - two if two < 1 else 1.0) * np.square(grad)
        yield first, second


def _fitted(
    moves: Moves, t: int, parts: list[np.ndarray], are_known: np.ndarray
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the factors of parts, and of the weights of kernels and others, that make a move; None if none do."""
    kernels = moves.are_kernels[are_known]
    weights, fall = moves.params[t][are_known], moves.falls[t][are_known]
    basis = np.stack([*(part[are_known] for part in parts), weights * kernels, weights * ~kernels])
    are_there = basis.any(axis=1)
    if len(fall) < are_there.sum() + NUM_SPARE or 2 * len(fall) < np.count_nonzero(moves.falls[t]):
        return None
    factors = np.zeros(len(basis))
    factors[are_there] = least(list(basis[are_there]), fall)[0]
    is_made = distance(fall, factors @ basis) <= moves.near[t]
    share = abs(float(factors[0])) * float(np.linalg.norm(parts[0][are_known]))  # of the gradient, or its mean
    return (factors[:-2], factors[-2:]) if is_made and share > _SHARE * float(np.linalg.norm(fall)) else None


def stays(pieces: list[Piece]) -> bool:
    """Whether gradients are taken of the same rows again, and always at the same weights."""
    own = [piece for piece in pieces if piece.called.differentiated and piece.called.is_whole]
    rows = np.concatenate([piece.rows[piece.rows != PAD] for piece in own]) if own else np.zeros(0)
    return len(np.unique(rows)) < len(rows) and all(all_same(p.called.params, own[0].called.params) for p in own)


def choose(meant: Meant, updates: list[Update]) -> None:
    """Choose of several derivatives by an output, one for each loss, those that make the gradients."""
    for place in (-1, 0):
        meant.replay.place = place
        if all(Evidence(meant, update).is_along for update in updates[:_NUM_TRIED]):
            return
    meant.replay.place = -1


def by_hand(seen: Windows, framework: str) -> list[str]:
    """Return a note if no optimizer of the framework moves the weights, with the rate if it is known."""
    if not seen.is_by_hand:
        return []
    rates = [u.applied.learning_rate for u in seen.updates]
    least, most = min(rates), max(rates)
    same = f"{most:.4g} times the gradient in each"
    others = f"{rates[0]:.4g} times the gradient first, {rates[-1]:.4g} last"
    told = same if most - least <= FINE.differs * most else others
    told = f", here {told}{seen.rule.told}" if seen.rule is not None else ""
    notes = [*seen.rule.notes] if seen.rule is not None else []
    if not all(are_finite(piece.called.params) for piece in seen.rest):
        notes.append(f"The weights are not finite from update {seen.updates[-1].number + 1} on, which is not judged.")
    return [f"The weights are moved by no optimizer of {framework}: an update is any move of them{told}.", *notes]
