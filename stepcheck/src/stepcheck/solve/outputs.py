"""The losses of several outputs: each is compared at its own output, to find an error in the loss that has it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from stepcheck.port import OfOutput
from stepcheck.solve.evidence import AtOutputs, Evidence, Meant, taken_at
from stepcheck.solve.ratios import least
from stepcheck.trace.windows import Piece


@dataclass(frozen=True)
class Output:
    """One of several outputs, whose loss is not the meant one; `evidence`: the updates by this output alone."""

    name: str
    meant: Meant
    evidence: Sequence["AtOutput"]

    @cached_property
    def without_error(self) -> list[np.ndarray | None]:
        """The gradients with the meant loss of this output, and the loop's of the others."""
        return [e.gradient_with(e.reference) for e in self.evidence]


class AtOutput(AtOutputs):
    """An update as derivatives by one of several outputs; the other outputs keep the loop's derivatives."""

    def __init__(self, whole: "_Whole", meant: Meant, one: OfOutput):
        pieces = [_alone(piece, one.place) for piece in whole.e.update.pieces]
        own = Evidence(meant, replace(whole.e.update, pieces=pieces))
        own.terms = [
            terms._replace(coefficients=one.coefficient * terms.coefficients) for terms in own.terms
        ]
        super().__init__(own, whole.factors)
        self._of, self._whole, self._index = whole.e, whole, one.place

    def gradient_with(self, made: np.ndarray) -> np.ndarray:
        """Return the gradient of all outputs, with these derivatives by this one."""
        return self._whole.gradient(self._index, np.split(made, self._starts[1:-1]))

    def proven(self, made: np.ndarray) -> tuple[np.ndarray, float]:
        """Return the gradient from derivatives by this output and the loop's by all other outputs, and its distance."""
        if (apart := self.apart(made)) > self.meant.replay.tolerance.fits:
            return made, apart
        return self._whole.e.proven(self.gradient_with(made))


class _Whole:
    """An update whose gradient comes from the derivatives by all outputs, times `factors` of its pieces."""

    def __init__(self, e: Evidence):
        self.e = e
        self._taken = [
            [taken_at(piece, i) for i in range(len(piece.called.outputs))]
            for piece in e.update.pieces
        ]
        parts = [self._pulled(i, taken) for i, taken in enumerate(self._taken)]
        self.factors = least(parts, e.handed - e.penalty)[0]
        self.fits = (
            e.apart(self.factors @ np.stack(parts) + e.penalty) <= e.meant.replay.tolerance.fits
        )

    def gradient(self, index: int, made: list[np.ndarray]) -> np.ndarray:
        """Return the gradient with the derivatives `made` by one output, by piece; `factors` are in them."""
        found = self.e.penalty
        for i, (factor, taken, own) in enumerate(zip(self.factors, self._taken, made, strict=True)):
            given = [
                own.reshape(each.shape) if j == index else factor * each
                for j, each in enumerate(taken)
            ]
            found = found + self._pulled(i, given)
        return found

    def _pulled(self, i: int, derivatives: list[np.ndarray]) -> np.ndarray:
        e, piece = self.e, self.e.update.pieces[i]
        return e.meant.replay.pulled(piece, derivatives, training=e.meant.modes.of(piece))[e.mask]


def taken(e: Evidence) -> np.ndarray:
    """Return the gradient that the loop's derivatives by all outputs give, of one forward pass; empty if not known."""
    if len(e.update.pieces) != 1 or not e.mask.all():
        return np.zeros(0)
    if e.is_plain:
        return e.taken()[0]
    (piece,), replay = e.update.pieces, e.meant.replay
    if (
        e.meant.is_masked
        or not replay.by_output(e.meant.objective)
        or len(piece.called.derivatives) < 2
    ):
        return np.zeros(0)
    if {*piece.called.derivatives} != {*range(len(piece.called.outputs))}:
        return np.zeros(0)
    derivatives = [taken_at(piece, i) for i in range(len(piece.called.outputs))]
    return replay.pulled(piece, derivatives, training=e.meant.modes.of(piece))


def other_gradients(evidence: list[Evidence]) -> Iterator[list[np.ndarray]]:
    """Yield gradients on which an optimizer may have made its steps in place of the meant ones, one for each update.

    The penalty is forgotten, or divided by the rows; or they are of the loop's own loss.
    """
    if evidence[0].meant.has_penalty:
        yield [e.reference - e.penalty for e in evidence]
        yield [e.reference - e.penalty + e.penalty / max(e.whole[0], 1) for e in evidence]
    own = [taken(e) for e in evidence]
    if all(len(each) for each in own):
        yield [each + e.penalty for each, e in zip(own, evidence, strict=True)]


def _alone(piece: Piece, i: int) -> Piece:
    called = replace(
        piece.called, outputs=[piece.called.outputs[i]], derivatives={0: [taken_at(piece, i)]}
    )
    return replace(piece, called=called)


def differing_outputs(meant: Meant, chosen: Sequence[Evidence]) -> list[Output]:
    """Return the outputs whose losses are not the meant ones; none if their derivatives do not make the gradients."""
    if not (losses := meant.replay.by_output(meant.objective)):
        return []
    wholes = [_Whole(e) for e in chosen]
    if not all(whole.fits for whole in wholes):
        return []
    pieces = [piece for e in chosen for piece in e.update.pieces]
    outputs = [_of(meant, wholes, pieces, one) for one in losses]
    return [
        one
        for one in outputs
        if one is not None and any(e.without > meant.replay.tolerance.differs for e in one.evidence)
    ]


def _of(meant: Meant, wholes: list[_Whole], pieces: list[Piece], one: OfOutput) -> Output | None:
    replay, objective = meant.replay.of(one, [_alone(piece, one.place) for piece in pieces])
    if replay.is_masked:
        return None
    own = Meant(replay, objective, meant.modes, meant.place, meant.scaled)
    own.is_by_outputs = True
    return Output(one.name, own, [AtOutput(whole, own, one) for whole in wholes])
