"""The stages of the forward pass and of the state: its mode, its outputs, and whether values that it moved are kept."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from stepcheck.port import Port
from stepcheck.report.found import Finding, Likely, Proof, found, of_values, some
from stepcheck.trace.log import Called, Line, Log
from stepcheck.trace.measure import ENOUGH, all_same, are_shares, distance
from stepcheck.trace.windows import PAD, Piece, Update, Windows, keys

_FEW = 3  # evaluations whose mode is compared
_SEEDED = (
    "All replicas draw from the same seeds, so that the rows of each have the same dropout masks. Add "
    "`jax.lax.axis_index(axis)` to the seeds that each replica is given."
)


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

    def unlooked(self, updates: list[Update]) -> set[str]:
        """Return the stages of which updates show nothing: no pass was run again, or no numbers of a step are kept."""
        own = [u for u in updates if any(piece.called.order in self._training for piece in u.pieces)]
        found = set[str]() if any(u.number not in self.unlike for u in own) else {"mode", "state"}
        return found if any(u.applied.is_whole for u in updates) else {*found, "step"}

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
                    self._proof = of_values(f"update {update.number}", lambda i: f"output {i}", values)
                self.inferring.append((update, piece, training, inference))
            elif inference > fits and update.number not in self.unlike:
                self.unlike.append(update.number)

    def findings(self) -> Iterator[Finding]:
        """Yield the finding on updates in inference mode."""
        if self.inferring:
            updates, pieces, training, inference = zip(*self.inferring, strict=True)
            numbers, line = sorted({update.number for update in updates}), pieces[0].called.line
            apart = max(inference)
            yield found("inference mode", max(training), line, numbers, with_change=apart, proof=self._proof)


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
    yield from _statistics(replay, modes, updates)
    yield from _seeds(replay, modes, updates)
    steps = [(b.number, a.pieces[-1], a.pieces[0], b.pieces[0]) for a, b in pairwise(updates) if b.follows(a)]
    line, last_line = (updates[0].pieces[i].called.line for i in (0, -1))
    num = len(replay.are_seeds) - replay.num_recurrent
    thrown_away = list[Finding]()
    for name, is_seed in (("statistics thrown away", False), ("seeds thrown away", True)):
        chosen = [i for i in range(num) if replay.are_seeds[i] == is_seed]
        thrown_away += _thrown_away(name, modes, steps, line, chosen)
    by_replica = [
        (u.number, [p for p in u.pieces if p.called.replica == replica])
        for u in updates
        for replica in {p.called.replica for p in u.pieces}
    ]
    inside = [(number, a, a, b) for number, pieces in by_replica for a, b in pairwise(pieces)]
    if not thrown_away:
        yield from _set_back(modes, steps, [i for i in range(num) if replay.are_seeds[i]])
    found_so_far = thrown_away or [*_thrown_away("state of one microbatch", modes, inside, last_line, [*range(num)])]
    yield from found_so_far
    if not found_so_far and all(len({p.called.replica for p in u.pieces}) == 1 for u in updates):
        yield from _otherwise(replay, modes, steps, [i for i in range(num) if not replay.are_seeds[i]])


def _seeds(replay: Port, modes: Modes, updates: list[Update]) -> Iterator[str]:
    """Yield the note on replicas that draw from equal seeds; on TensorFlow a strategy keeps them equal."""
    own = [i for i, is_seed in enumerate(replay.are_seeds) if is_seed]

    def of(values: list[np.ndarray]) -> list[np.ndarray]:
        return [values[i] for i in own]

    by_replica = [{p.called.replica: p.called for p in u.pieces[::-1]} for u in updates]
    states = [[of(called.buffers) for called in each.values()] for each in by_replica]
    are_same = all(len(each) > 1 and all(all_same(each[0], other) for other in each) for each in states)
    first = updates[0].pieces[0].called
    if are_same and replay.engine() == "jax" and not all_same(of(first.buffers), of(modes.moved[first.order])):
        yield _SEEDED


def _statistics(replay: Port, modes: Modes, updates: list[Update]) -> Iterator[str]:
    """Yield the notes on moving statistics that include padding, or come from one replica."""
    num = len(replay.are_seeds) - replay.num_recurrent
    chosen = [i for i in range(num) if not replay.are_seeds[i]]

    def of(buffers: list[np.ndarray]) -> list[np.ndarray]:
        return [buffers[i] for i in chosen]

    def has_padding(piece: Piece) -> bool:
        is_padding = piece.rows == PAD
        moved = not all_same(of(piece.called.buffers), of(modes.moved[piece.called.order]))
        return bool(is_padding.any() and not is_padding.all()) and moved

    if padded := [u.number for u in updates if any(map(has_padding, u.pieces))]:
        told = f"The rows that fill up the batches of updates {some(padded, 6)} count in the statistics of the batch, "
        yield Likely(f"{told}and in the moving ones: BatchNormalization knows no padding, and no weight of a row.")
    for update in updates if replay.engine() == "jax" else ():  # TensorFlow's variables have the mean of all replicas
        states = {p.called.replica: of(p.called.buffers) for p in update.pieces[::-1]}
        first, *others = states.values()
        if any(distance(first, each) > replay.tolerance.differs for each in others):
            told = (
                "The moving statistics of each replica are those of its own rows, and the model keeps one replica's: "
            )
            yield f"{told}make them the same, by `jax.lax.pmean(statistics, axis)`."
            return


def _set_back(modes: Modes, steps: list, chosen: list[int]) -> Iterator[Likely]:
    """Yield a note on seeds of random draws that go back to the first ones, as where a pass begins anew."""
    if not steps or not chosen:
        return
    first = steps[0][2].called.buffers
    numbers = [
        number + 1
        for number, mover, _, after in steps
        if all_same([after.called.buffers[i] for i in chosen], [first[i] for i in chosen])
        and not all_same([modes.moved[mover.called.order][i] for i in chosen], [first[i] for i in chosen])
    ]
    if numbers:
        told = f"The seeds of the random draws go back to the first ones at update {some(numbers, 6)}: the dropout "
        yield Likely(f"{told}masks of the first updates come again. Carry the seeds from pass to pass, as the weights.")


def _otherwise(replay: Port, modes: Modes, steps: list, chosen: list[int]) -> Iterator[Finding]:
    """Yield a note on statistics with which no update begins as the pass before it has left them."""
    every = [(modes.moved[mover.called.order], after.called.buffers) for _, mover, _, after in steps]
    names, (fits, differs) = replay.names_of_others, replay.tolerance
    wrong = [i for i in chosen if every and all(distance(made[i], new[i]) > differs for made, new in every)]
    told = "The moving statistics with which an update begins are not those that the update before made:"
    for i in wrong:
        alike = [j for j in wrong if j != i and every[0][0][j].shape == every[0][1][i].shape]
        others = [j for j in alike if all(distance(made[j], new[i]) <= fits for made, new in every)]
        if others:
            yield Likely(f"{told} {names[i]} has the value of {names[others[0]]}. Are they assigned in another order?")
            return
    pairs = [(made[i].astype("float64"), new[i]) for i in wrong for made, new in every if np.any(made[i])]
    shares = [float(np.vdot(made, new) / np.vdot(made, made)) for made, new in pairs]
    apart = max((distance(share * made, new) for share, (made, new) in zip(shares, pairs, strict=True)), default=1.0)
    if apart <= fits and min(shares) > 0 and max(shares) < 1 and np.ptp(shares) <= differs:
        told += (
            f" {some([names[i] for i in wrong])} are these times {shares[0]:.4g}. Is a decay for the weights applied "
        )
        yield Likely(f"{told}to all variables? `model.trainable_variables` has the weights alone.")
        return
    if wrong:
        yield f"{told} {some([names[i] for i in wrong])}. Does another pass of the model, or other code, change them?"


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


def carried(following: list[bool]) -> Iterator[Finding]:
    """Yield a note if the states of recurrent layers go from batch to batch, and no rows follow each other."""
    if len(following) > 1 and not any(following):
        told = "The states of a recurrent layer (`stateful=True`) go on from each batch to the next, whose rows are "
        told += "not the next parts of the same sequences: a row begins with another's state. Is a reset missing?"
        yield Likely(told)


def _thrown_away(name: str, modes: Modes, steps: list, line: Line | None, chosen: list[int]) -> Iterator[Finding]:
    """Yield the finding on values that every pass moves, and that no next pass begins with.

    Args:
        steps: (the update, the pass that moves them last, the pass that began with the old ones, the next pass).
        chosen: the values that are compared.
    """
    lost, shares, num_kept = [], [], 0
    for i, (number, mover, before, after) in reversed([*enumerate(steps, 1)]):
        every = before.called.buffers, after.called.buffers, modes.moved[mover.called.order]
        old, new, should = ([values[i] for i in chosen] for values in every)
        if all_same(old, should):
            continue
        if not all_same(old, new):
            num_kept = i
            break
        lost.append(number)
        shares.append(float(np.mean(np.concatenate([np.ravel(a != b) for a, b in zip(new, should, strict=True)]))))
    if lost and num_kept <= 1:  # those of the first pass may be the ones that are assigned
        yield found(name, max(shares), line, sorted(set(lost)))


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
        yield found("second pass in training mode", share, line, [u.number for u, *_ in moving])


def evaluations(replay: Port, log: Log, seen: Windows) -> Iterator[Finding]:
    """Yield a note if forward passes without gradient, on rows of no update, ran in training mode.

    It is very likely the fault if they move statistics, their rows train nothing, and they stand between few updates:
    on rows of the updates, statistics may be estimated anew; beside each update, rows may be attacked.
    """
    used = {piece.called.order for piece in seen.pieces}
    own = [called for called in log.called if called.differentiated is False and called.order not in used]
    is_known = bool(own) or not any(called.derivatives for called in log.called)
    if not is_known:  # beside passes with the derivative of a loss those without one are evaluations
        own = [c for c in log.called if c.is_whole and not c.derivatives and c.order not in used]
    if (first := in_training(replay, own)) is None:
        return
    called, line, moves = first
    told = "A forward pass without a gradient ran in training mode: dropout drops, and BatchNormalization "
    told += "takes the batch's statistics, and moves its own. Are they estimated anew? If it is an evaluation, "
    trained = {key for update in seen.updates for piece in update.pieces for key in keys(piece.called.inputs)}
    steps = [update.applied.order for update in seen.updates]
    gaps = {sum(order < each.order for order in steps) for each in own}
    is_apart = len(gaps) <= len(steps) / 2 and trained.isdisjoint(keys(called.inputs))
    if moves and is_apart:
        yield Likely(f"{told}{replay.evaluating}.{line}")
    elif is_known:
        yield f"{told}{replay.evaluating}.{line}"


def in_training(replay: Port, calls: list[Called]) -> tuple[Called, str, bool] | None:
    """Return the first forward pass, of a few, that ran in training mode, where that matters.

    With it, its line in words, and whether it moves statistics.
    """
    fits, differs = replay.tolerance
    kept = [called for called in calls if called.outputs and len(called.params) == len(replay.names)]
    for called in kept[:_FEW]:
        piece = Piece(called, np.full(len(called.inputs[0]), PAD))
        (training, after), (inference, _) = (replay.outputs(piece, training=t) for t in (True, False))
        if distance(training, called.outputs) <= fits and distance(inference, called.outputs) > differs:
            before = called.buffers[: len(after)]
            moved = [not np.array_equal(*pair) for pair in zip(before, after, strict=True)]
            moves = any(has for has, is_seed in zip(moved, replay.are_seeds, strict=False) if not is_seed)
            return called, f" ({called.line})" if called.line else "", moves
    return None


def across(outputs: list[np.ndarray]) -> list[str]:
    """Return a note if the outputs are probabilities over the rows of each batch, and not over the classes.

    >>> across([np.array([[0.9, 0.2], [0.1, 0.8]])] * 8)[0][:59]
    'The outputs of each class add up to 1 over the rows of a ba'
    """
    whole = [out for out in outputs if out.ndim == 2 and min(out.shape) > 1]
    many = [np.exp(out) if out.max() <= 0 else out for out in whole]
    if sum(map(np.size, many)) < ENOUGH or not all(are_shares(out.T) and not are_shares(out) for out in many):
        return []
    told = "The outputs of each class add up to 1 over the rows of a batch, and those of a row do not: the softmax is "
    return [Likely(f"{told}taken along the wrong axis. `axis=-1` is meant.")]


def constant(outputs: list[np.ndarray]) -> list[str]:
    """Return a note if all outputs are one number, in every row.

    >>> constant([np.ones((4, 1))] * 4)
    ['All outputs are 1, in every row of every update: is it a softmax of a single number? That takes a sigmoid.']
    """
    many = np.concatenate([np.ravel(out) for out in outputs] or [np.zeros(0)])
    if many.size < ENOUGH or np.any(many != many[0]):
        return []
    told = "is it a softmax of a single number? That takes a sigmoid." if many[0] == 1 else "do they see the inputs?"
    return [Likely(f"All outputs are {many[0]:g}, in every row of every update: {told}")]
