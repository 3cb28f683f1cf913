"""The mode of each forward pass, as its outputs show it when they are computed again."""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from stepcheck.faults import Stage
from stepcheck.port import Port
from stepcheck.trace.measure import distance
from stepcheck.trace.windows import Piece, Update


class Inferring(NamedTuple):
    """A forward pass in inference mode, with the distance of its outputs from those in
    both modes.
    """

    update: Update
    piece: Piece
    training: float
    inference: float


@dataclass
class Modes:
    """The mode of every forward pass, as its outputs show it.

    Attributes:
        left: updates that are not judged, as their batches have rare shapes.
        inferring: passes that ran in inference mode where that matters.
        outputs: of the first one its outputs, and those in training and in inference
            mode, as vectors.
        unlike: updates whose outputs fit neither mode.
        moved: by the order of a pass, the model's other values after it in training
            mode.
    """

    left: list[int] = field(default_factory=list)
    inferring: list[Inferring] = field(default_factory=list)
    unlike: list[int] = field(default_factory=list)
    moved: dict[int, list[np.ndarray]] = field(default_factory=dict)
    _training: dict[int, bool] = field(default_factory=dict)
    outputs: list[np.ndarray] = field(default_factory=list)

    def of(self, piece: Piece) -> bool:
        """Whether a forward pass ran in training mode."""
        return self._training[piece.called.order]

    def knows(self, update: Update) -> bool:
        """Whether the outputs of an update were computed again."""
        return (
            update.is_known
            and update.number not in self.left
            and update.number not in self.unlike
        )

    def unlooked(self, updates: list[Update]) -> set[Stage]:
        """Return the stages of which updates show nothing: no pass was run again, or no
        numbers of a step are kept.
        """
        own = [
            u
            for u in updates
            if any(piece.called.order in self._training for piece in u.pieces)
        ]
        is_alike = any(u.number not in self.unlike for u in own)
        found = set[Stage]() if is_alike else {Stage.MODE, Stage.STATE}
        return (
            found
            if any(u.applied.is_whole for u in updates)
            else {*found, Stage.STEP}
        )

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
                self.inferring.append(
                    Inferring(update, piece, training, inference)
                )
                if len(self.inferring) == 1:
                    every = own, outputs, others
                    self.outputs = [
                        np.concatenate([np.ravel(leaf) for leaf in each])
                        for each in every
                    ]
            elif inference > fits and update.number not in self.unlike:
                self.unlike.append(update.number)


def rare(updates: list[Update], most: int | None) -> list[int]:
    """Return the updates whose batches have rare shapes: none of the `most` frequent,
    and not the fewest rows.
    """
    known = {
        u.number: tuple(
            leaf.shape for p in u.pieces for leaf in p.called.inputs
        )
        for u in updates
        if u.is_known
    }
    kept = {shape for shape, _ in Counter(known.values()).most_common(most)}
    kept |= (
        {min(known.values(), key=lambda shapes: shapes[0][0])}
        if known
        else set()
    )
    return [number for number, shape in known.items() if shape not in kept]
