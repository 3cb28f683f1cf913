"""The stages of the forward pass and of the state: in which mode it ran, and what became of what it moved."""

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from wholestep.audit.causes import BY_NAME
from wholestep.audit.found import Found, far, found
from wholestep.audit.keeping import all_same
from wholestep.audit.log import Called, Log
from wholestep.audit.proof import Proof, of_values
from wholestep.audit.replay import Replay
from wholestep.audit.windows import PAD, Piece, Update, Windows

_FEW = 3  # evaluations whose mode is found out


@dataclass
class Modes:
    """The mode of every forward pass, as its outputs show it.

    Attributes:
        inferring: updates that ran in inference mode where that matters, with the distance from both modes.
        unlike: updates whose outputs are those of neither mode.
        moved: by the order of a pass, what the forward pass makes of the model's other values in training.
    """

    inferring: list[tuple[Update, Piece, float, float]] = field(default_factory=list)
    unlike: list[int] = field(default_factory=list)
    moved: dict[int, list[np.ndarray]] = field(default_factory=dict)
    _training: dict[int, bool] = field(default_factory=dict)
    _proof: Proof | None = None

    def of(self, piece: Piece) -> bool:
        """Whether a forward pass ran in training mode."""
        return self._training[piece.called.order]

    def note(self, replay: Replay, update: Update) -> None:
        """Find out the modes of an update's forward passes."""
        fits, differs = replay.tolerance
        for piece in update.pieces:
            outputs, moved = replay.outputs(piece, training=True)
            training = far(outputs, piece.called.outputs)
            self.moved[piece.called.order] = moved
            self._training[piece.called.order] = True
            if training <= fits:
                continue
            inference = far(replay.outputs(piece, training=False)[0], piece.called.outputs)
            self._training[piece.called.order] = inference > fits
            if inference <= fits and training > differs:
                if not self.inferring:
                    as_meant = [outputs, replay.outputs(piece, training=False)[0]]
                    self._proof = _proved(update, [piece.called.outputs, *as_meant])
                self.inferring.append((update, piece, training, inference))
            elif inference > fits and update.number not in self.unlike:
                self.unlike.append(update.number)

    def causes(self) -> list[Found]:
        """Return what is wrong with the modes."""
        if not self.inferring:
            return []
        without = max(training for *_, training, _ in self.inferring)
        with_change = max(inference for *_, inference in self.inferring)
        numbers = sorted({update.number for update, *_ in self.inferring})
        line = self.inferring[0][1].called.line
        return [found(BY_NAME["inference mode"], without, with_change, line, numbers, proof=self._proof)]


def state(replay: Replay, modes: Modes, updates: list[Update]) -> list[Found]:
    """Return whether what the forward passes make of statistics and seeds is thrown away."""
    updates = [u for u in updates if u.is_known and all(modes.of(p) for p in u.pieces)]
    variables = replay.model.non_trainable_variables
    seeds = np.array(["seed" in v.path.split("/")[-1] for v in variables], bool)
    causes = []
    for name, chosen in (("statistics thrown away", ~seeds), ("seeds thrown away", seeds)):
        kept = 0
        lost: list[int] = []
        distances: list[float] = []
        for before, after in pairwise(updates):
            if after.number != before.number + 1:
                continue
            old, new = (_of(u.pieces[0].called.buffers, chosen) for u in (before, after))
            should = _of(modes.moved[before.pieces[-1].called.order], chosen)
            if all_same(old, should):
                continue
            if all_same(old, new):
                lost.append(after.number)
                distances.append(
                    float(np.mean(np.concatenate([np.ravel(a != b) for a, b in zip(new, should, strict=True)])))
                )
            else:
                kept += 1
        if lost and not kept:
            line = updates[0].pieces[0].called.line
            causes.append(found(BY_NAME[name], max(distances), 0.0, line, lost))
    return causes or _inside(updates, modes)


def _inside(updates: list[Update], modes: Modes) -> list[Found]:
    """Find microbatches that begin with what those before them began with."""
    lost, kept, worst = [], 0, 0.0
    for update in updates:
        by_replica = [
            [p for p in update.pieces if p.called.replica == r] for r in {p.called.replica for p in update.pieces}
        ]
        for one, two in (pair for pieces in by_replica for pair in pairwise(pieces)):
            old, new, should = one.called.buffers, two.called.buffers, modes.moved[one.called.order]
            if all_same(old, should):
                continue
            kept += not all_same(old, new)
            if all_same(old, new):
                lost.append(update.number)
                worst = max(worst, float(np.mean([not np.array_equal(a, b) for a, b in zip(new, should, strict=True)])))
    if not lost or kept:
        return []
    line = updates[0].pieces[-1].called.line
    return [found(BY_NAME["state of one microbatch"], worst, 0.0, line, sorted(set(lost)))]


def second_passes(log: Log, seen: Windows) -> list[Found]:
    """Find forward passes without gradient, on the rows of the update before, that move what the model keeps."""
    last = {u.pieces[-1].called.order: u for u in seen.updates if u.pieces and u.is_known}
    numbers, worst, line = [], 0.0, None
    update = None
    for one, two in pairwise([called for called in log.called if called.is_whole]):
        update = last.get(one.order, update)
        if update is None or one.order in last or one.differentiated is not False or two.order < one.order:
            continue
        own = [leaf for piece in update.pieces[-1:] for leaf in piece.called.inputs]
        moves = [not np.array_equal(a, b) for a, b in zip(one.buffers, two.buffers, strict=True)]
        if any(moves) and all_same(one.inputs, own):
            numbers.append(update.number)
            worst, line = max(worst, float(np.mean(moves))), line or one.line
    return [found(BY_NAME["second pass in training mode"], worst, 0.0, line, numbers)] if len(numbers) > 1 else []


def evaluations(replay: Replay, log: Log, seen: Windows) -> list[str]:
    """Return a note if forward passes without gradient, on rows of no update, ran in training mode."""
    used = {piece.called.order for piece in seen.pieces}
    own = [called for called in log.called if called.differentiated is False and called.order not in used]
    line = in_training(replay, own)
    if line is None:
        return []
    told = "A forward pass without a gradient ran in training mode: dropout drops, and BatchNormalization "
    told += "takes the batch's statistics, and moves its own. If it is an evaluation, call the model with "
    return [f"{told}`training=False`.{line}"]


def in_training(replay: Replay, calls: list[Called]) -> str | None:
    """Return the line of the first forward pass, of a few, that ran in training mode, where that matters."""
    fits, differs = replay.tolerance
    for called in [called for called in calls if called.is_whole][:_FEW]:
        piece = Piece(called, np.full(len(called.inputs[0]), PAD))
        training, inference = (far(replay.outputs(piece, training=t)[0], called.outputs) for t in (True, False))
        if training <= fits and inference > differs:
            return f" ({called.line})" if called.line else ""
    return None


def _proved(update: Update, outputs: list[list[np.ndarray]]) -> Proof:
    values = [np.concatenate([np.ravel(leaf) for leaf in leaves]) for leaves in outputs]
    return of_values(f"update {update.number}", lambda i: f"output {i}", values)


def _of(values: list[np.ndarray], chosen: np.ndarray) -> list[np.ndarray]:
    return [value for value, is_one in zip(values, chosen, strict=True) if is_one]
