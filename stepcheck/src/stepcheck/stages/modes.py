"""The stages of the forward pass and of the state: its mode, its outputs, and whether values that it moved are kept."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from stepcheck.port import Port
from stepcheck.stages.proofs import proof_of
from stepcheck.trace.log import Called, Log
from stepcheck.trace.measure import all_same, distance
from stepcheck.trace.windows import Piece, Update, Windows
from stepcheck.values import Change, Fault, Finding, Line, Proof, Shown, Stage, Where


@dataclass
class Modes:
    """The mode of every forward pass, as its outputs show it.

    Attributes:
        left: updates that are not judged, as their batches have rare shapes.
        inferring: updates that ran in inference mode where that matters, with the distance from both modes.
        unlike: updates whose outputs fit neither mode.
        moved: by the order of a pass, the model's other values after it in training mode.
    """

    left: list[int] = field(default_factory=list)
    inferring: list[tuple[Update, Piece, float, float]] = field(default_factory=list)
    unlike: list[int] = field(default_factory=list)
    moved: dict[int, list[np.ndarray]] = field(default_factory=dict)
    _training: dict[int, bool] = field(default_factory=dict)
    _proof: Proof | None = None

    def of(self, piece: Piece) -> bool:
        """Whether a forward pass ran in training mode."""
        return self._training[piece.called.order]

    def knows(self, update: Update) -> bool:
        """Whether the outputs of an update were computed again."""
        return update.is_known and update.number not in self.left and update.number not in self.unlike

    def unlooked(self, updates: list[Update]) -> set[Stage]:
        """Return the stages of which updates show nothing: no pass was run again, or no numbers of a step are kept."""
        own = [u for u in updates if any(piece.called.order in self._training for piece in u.pieces)]
        is_alike = any(u.number not in self.unlike for u in own)
        found = set[Stage]() if is_alike else {Stage.MODE, Stage.STATE}
        return found if any(u.applied.is_whole for u in updates) else {*found, Stage.STEP}

    def note(self, replay: Port, update: Update) -> None:
        """Compare the outputs of an update's forward passes with both modes."""
        fits, differs = replay.tolerance
        for piece in update.pieces:
            own, order = piece.called.outputs, piece.called.order
            outputs, self.moved[order] = replay.outputs(piece, training=True)
            training = distance(outputs, own)
            self._training[order] = True
            if training <= fits:
                continue
            others, _ = replay.outputs(piece, training=False)
            inference = distance(others, own)
            self._training[order] = inference > fits
            if inference <= fits and training > differs:
                if not self.inferring:
                    values = [np.concatenate([np.ravel(leaf) for leaf in each]) for each in (own, outputs, others)]
                    self._proof = proof_of(update.number, Shown.OUTPUT, str, values)
                self.inferring.append((update, piece, training, inference))
            elif inference > fits and update.number not in self.unlike:
                self.unlike.append(update.number)

    def findings(self) -> Iterator[Finding]:
        """Yield the finding on updates in inference mode."""
        if self.inferring:
            updates, pieces, training, inference = zip(*self.inferring, strict=True)
            numbers = tuple(sorted({update.number for update in updates}))
            where = Where(updates=numbers, line=pieces[0].called.line)
            change = Change(Fault.INFERENCE_MODE)
            yield Finding(change, max(training), max(inference), where, self._proof)


def rare(updates: list[Update], most: int | None) -> list[int]:
    """Return the updates whose batches have rare shapes: none of the `most` frequent, and not the fewest rows."""
    known = {u.number: tuple(leaf.shape for p in u.pieces for leaf in p.called.inputs) for u in updates if u.is_known}
    kept = {shape for shape, _ in Counter(known.values()).most_common(most)}
    kept |= {min(known.values(), key=lambda shapes: shapes[0][0])} if known else set()
    return [number for number, shape in known.items() if shape not in kept]


def state(replay: Port, modes: Modes, updates: list[Update]) -> Iterator[Finding]:
    """Yield the findings on statistics and seeds that a forward pass moves, and the next pass does not begin with."""
    updates = [u for u in updates if u.is_known and all(modes.of(p) for p in u.pieces)]
    if not updates:
        return
    steps = [
        _Moved(b.number, a.pieces[-1], a.pieces[0], b.pieces[0])
        for a, b in pairwise(updates)
        if b.follows(a)
    ]
    first, last = (updates[0].pieces[i].called.line for i in (0, -1))
    num = len(replay.are_seeds) - replay.num_recurrent
    statistics, seeds = ([i for i in range(num) if replay.are_seeds[i] == is_seed] for is_seed in (False, True))
    thrown_away = [
        *_thrown_away(Fault.STATISTICS_THROWN_AWAY, modes, steps, first, statistics),
        *_thrown_away(Fault.SEEDS_THROWN_AWAY, modes, steps, first, seeds),
    ]
    by_replica = [
        (u.number, [p for p in u.pieces if p.called.replica == replica])
        for u in updates
        for replica in {p.called.replica for p in u.pieces}
    ]
    inside = [_Moved(number, a, a, b) for number, pieces in by_replica for a, b in pairwise(pieces)]
    yield from thrown_away or _thrown_away(Fault.STATE_OF_ONE_MICROBATCH, modes, inside, last, [*range(num)])


class _Moved(NamedTuple):
    """An update, the pass that moves values last, the pass that began with the old ones, and the next pass."""

    update: int
    mover: Piece
    before: Piece
    after: Piece


def follows(replay: Port, pieces: list[Piece]) -> list[bool]:
    """Return, for each batch that begins with the states of the batch before, whether its rows follow that one's.

    They do if each row is as far behind the row at its place in the batch before as all others.
    """
    known = [piece for piece in pieces if piece.is_known and piece.called.is_whole]
    return [
        len(a.rows) == len(b.rows) and len(np.unique(b.rows - a.rows)) == 1
        for a, b in pairwise(known)
        if any(map(np.any, b.called.buffers[len(b.called.buffers) - replay.num_recurrent :]))
    ]


def _thrown_away(
    fault: Fault, modes: Modes, steps: list[_Moved], line: Line | None, chosen: list[int]
) -> Iterator[Finding]:
    """Yield the finding on values, at the `chosen` indices, that every pass moves, and that no next pass begins with."""
    lost, shares, num_kept = [], [], 0
    for i, step in reversed([*enumerate(steps, 1)]):
        every = step.before.called.buffers, step.after.called.buffers, modes.moved[step.mover.called.order]
        old, new, should = ([values[i] for i in chosen] for values in every)
        if all_same(old, should):
            continue
        if not all_same(old, new):
            num_kept = i
            break
        lost.append(step.update)
        differing = [np.ravel(a != b) for a, b in zip(new, should, strict=True)]
        shares.append(float(np.mean(np.concatenate(differing))))
    if lost and num_kept <= 1:  # those of the first pass may be the ones that are assigned
        where = Where(updates=tuple(sorted(set(lost))), line=line)
        yield Finding(Change(fault), max(shares), where=where)


def second_passes(log: Log, seen: Windows) -> Iterator[Finding]:
    """Yield the finding on passes without gradient, on the rows of the update before, that move statistics or seeds."""
    last = {u.pieces[-1].called.order: u for u in seen.updates if u.pieces and u.is_known}
    moving: list[tuple[Update, Called, float]] = []
    update = None
    for one, two in pairwise([called for called in log.called if called.is_whole]):
        update = last.get(one.order, update)
        if update is None or one.order in last or one.differentiated is not False:
            continue
        moves = [not np.array_equal(a, b) for a, b in zip(one.buffers, two.buffers, strict=True)]
        if any(moves) and all_same(one.inputs, update.pieces[-1].called.inputs):
            moving.append((update, one, float(np.mean(moves))))
    if len(moving) > 1:
        line = next((one.line for _, one, _ in moving if one.line), None)
        share = max(share for *_, share in moving)
        where = Where(updates=tuple(u.number for u, *_ in moving), line=line)
        yield Finding(Change(Fault.SECOND_PASS_IN_TRAINING_MODE), share, where=where)
