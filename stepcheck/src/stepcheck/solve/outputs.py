"""An update at an output of its passes, where no form of a loss needs a backward pass."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np

from stepcheck.port import OfOutput
from stepcheck.solve.evidence import Evidence, Meant, all_taken, taken_at
from stepcheck.solve.ratios import least
from stepcheck.trace.windows import Piece, Update

_MADE = "penalty", "reference", "parts", "rows"  # which an evidence computes once


class AtOutput(Evidence):
    """An update as derivatives by one output; the other outputs keep those of the loop's loss.

    Args:
        of: the update whose gradients these derivatives give.
        own: the same with this output alone.
        index: of this output.
        factors: of the derivatives of each pass in the handed gradient.
        name: of this output, where there are several.
    """

    def __init__(
        self, of: Evidence, own: Evidence, index: int, factors: np.ndarray, name: str = ""
    ):
        kept = {key: value for key, value in vars(own).items() if key not in _MADE}
        vars(self).update(kept)
        self.of, self._index, self._factors, self.name = of, index, factors, name
        self.before, self.scale, self.is_by_outputs = None, 0.0, True
        pairs = [*zip(factors, self.update.pieces, strict=True)]
        taken = [np.ravel(factor * taken_at(piece)) for factor, piece in pairs]
        self._ends = np.cumsum([len(each) for each in taken])
        self.handed = np.concatenate(taken)
        self.mask = np.ones(len(self.handed), bool)
        self.penalty = np.zeros_like(self.handed)  # the model's losses are no function of outputs

    def pulled(self, i: int, *derivatives: np.ndarray) -> np.ndarray:
        """Return the derivative by the output of a pass, with zeros for all other passes."""
        found = [np.zeros_like(part) for part in np.split(self.handed, self._ends[:-1])]
        found[i] = np.ravel(derivatives[0])
        return np.concatenate(found)

    def cut(self, vector: np.ndarray) -> dict[str, np.ndarray]:
        """Return no parameters."""
        return {}

    def by_piece(self, made: np.ndarray) -> list[np.ndarray]:
        """Cut derivatives into those of the passes, in the shape of their outputs."""
        parts = np.split(made, self._ends[:-1])
        shapes = [piece.called.outputs[0].shape for piece in self.update.pieces]
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    def proven(self, made: np.ndarray) -> tuple[np.ndarray, float]:
        """Return the gradient of these derivatives, and the distance of the handed one."""
        if (apart := self.apart(made)) > self.meant.replay.tolerance.fits:
            return made, apart
        found = self.of.penalty
        for i, part in enumerate(self.by_piece(made)):
            given = [self._factors[i] * each for each in all_taken(self.of.update.pieces[i])]
            given[self._index] = part
            found = found + self.of.pulled(i, *given)
        return self.of.proven(found)


def narrowed(chosen: Sequence[Evidence]) -> list[AtOutput] | None:
    """Return updates at their output; None unless their gradients are the loop's derivatives'."""
    factors = [factors_of(e) if e.is_plain else None for e in chosen]
    pairs = zip(chosen, factors, strict=True)
    found = [AtOutput(e, e, 0, own) for e, own in pairs if own is not None]
    return found if len(found) == len(chosen) else None


def factors_of(e: Evidence) -> np.ndarray | None:
    """Return how much each pass counts, if its derivatives by all outputs make the gradient."""
    parts = e.taken()
    factors = least(parts, e.handed - e.penalty)[0]
    apart = e.apart(factors @ np.stack(parts) + e.penalty)
    return factors if apart <= e.meant.replay.tolerance.fits else None


def differing_outputs(chosen: Sequence[Evidence]) -> list[list[AtOutput]]:
    """Return the updates by each output whose loss is not the meant one; none if they are no sum."""
    meant = chosen[0].meant
    losses = meant.replay.by_output(meant.objective)
    factors = [factors_of(e) if losses else None for e in chosen]
    pairs = [(e, own) for e, own in zip(chosen, factors, strict=True) if own is not None]
    if not losses or len(pairs) < len(chosen):
        return []
    found = []
    for one in losses:
        by_output = _by_output(meant, pairs, one)
        differs = meant.replay.tolerance.differs
        if any(e.without > differs for e in by_output):
            found.append(by_output)
    return found


def _by_output(
    meant: Meant, pairs: list[tuple[Evidence, np.ndarray]], one: OfOutput
) -> list[AtOutput]:
    pieces = [[_alone(piece, one.place) for piece in e.update.pieces] for e, _ in pairs]
    replay, objective = meant.replay.of(one, [piece for own in pieces for piece in own])
    if replay.is_masked:
        return []
    own = Meant(replay, objective, meant.modes, meant.place, [])
    own.is_by_outputs = True
    found = []
    for (e, factors), alone in zip(pairs, pieces, strict=True):
        by_one = Evidence(own, replace(e.update, pieces=alone))
        terms = by_one.terms
        by_one.terms = [t._replace(coefficients=one.coefficient * t.coefficients) for t in terms]
        found.append(AtOutput(e, by_one, one.place, factors, one.name))
    return found


def _alone(piece: Piece, i: int) -> Piece:
    output, taken = piece.called.outputs[i], taken_at(piece, i)
    return replace(piece, called=replace(piece.called, outputs=[output], derivatives={0: [taken]}))


def taken(e: Evidence) -> np.ndarray:
    """Return the gradient of the loop's derivatives by all outputs of a pass; empty if not known."""
    if len(e.update.pieces) != 1 or not e.mask.all():
        return np.zeros(0)
    called, meant = e.update.pieces[0].called, e.meant
    has_all = {*called.derivatives} == {*range(len(called.outputs))}
    is_sum = not meant.is_by_row and not meant.replay.is_masked
    is_sum = is_sum and has_all and bool(meant.replay.by_output(meant.objective))
    return e.taken()[0] if e.is_plain or is_sum else np.zeros(0)


def other_gradients(evidence: list[Evidence]) -> Iterator[list[np.ndarray]]:
    """Yield gradients on which an optimizer may have made its steps, one for each update.

    The penalty is forgotten, or divided by the rows; or they are of the loop's own loss.
    """
    if evidence[0].meant.has_penalty:
        yield [e.reference - e.penalty for e in evidence]
        yield [e.reference - e.penalty + e.penalty / max(e.whole[0], 1) for e in evidence]
    own = [taken(e) for e in evidence]
    if all(len(each) for each in own):
        yield [each + e.penalty for each, e in zip(own, evidence, strict=True)]


def are_in_turn(updates: Sequence[Update]) -> bool:
    """Whether the losses of several outputs are applied in turn, each in an update on the same rows.

    Their sum in one update is another training: neither shows an error of the other.
    """
    rounds = [[*each] for _, each in groupby(updates, lambda update: update.rows.tolist())]
    whole = [each for each in rounds[:-1] if all(update.is_known for update in each)]
    return len(whole) > 1 and all(map(_is_a_round, whole))


def _is_a_round(updates: Sequence[Update]) -> bool:
    """Whether each update takes derivatives by other outputs, and all outputs have one."""
    used = [{i for p in update.pieces for i in p.called.derivatives} for update in updates]
    num = max(len(piece.called.outputs) for update in updates for piece in update.pieces)
    are_apart = sum(map(len, used)) == len(set[int]().union(*used)) == num
    return len(updates) > 1 and all(used) and are_apart
