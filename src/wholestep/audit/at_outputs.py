"""Updates whose gradient is that of the loop's loss by the outputs: their fault is in the loss, and is searched there.

Derivatives by the outputs take the place of gradients, so that no form of a loss needs a backward pass.
"""

from functools import cached_property

import numpy as np

from wholestep.audit.evidence import Evidence
from wholestep.audit.ratios import least
from wholestep.audit.windows import Piece

_MADE = "penalty", "reference", "parts", "rows"  # which an evidence computes once


class AtOutputs(Evidence):
    """An update as derivatives by the outputs of all its pieces, one after the other.

    Args:
        of: the same update as gradients.
        factors: by which the pieces' derivatives count in its gradient.
    """

    def __init__(self, of: Evidence, factors: np.ndarray):
        vars(self).update({name: value for name, value in vars(of).items() if name not in _MADE})
        self.of, self.before, self.scale = of, None, 0.0
        self._starts = np.cumsum([0, *(p.called.outputs[0].size for p in self.update.pieces)])
        self.mask = np.ones(int(self._starts[-1]), bool)
        own = (factor * _taken(piece) for factor, piece in zip(factors, self.update.pieces, strict=True))
        self.handed = np.concatenate([np.ravel(each) for each in own])
        self.norm = float(np.linalg.norm(self.handed))

    @cached_property
    def penalty(self) -> np.ndarray:
        """Zeros: the model's own losses are no function of the outputs."""
        return np.zeros_like(self.handed)

    def pulled(self, i: int, derivative: np.ndarray) -> np.ndarray:
        """Return the derivative by one piece's outputs as one by all outputs."""
        found = np.zeros_like(self.handed)
        found[self._starts[i] : self._starts[i + 1]] = np.ravel(derivative)
        return found

    def cut(self, vector: np.ndarray) -> dict[str, np.ndarray]:
        """Return no parameters."""
        return {}

    def proven(self, made: np.ndarray) -> tuple[np.ndarray, float]:
        """Return derivatives that make those of the loop as a gradient of the parameters, and its distance."""
        if (apart := self.apart(made)) > self.meant.replay.tolerance.fits:
            return made, apart
        parts = np.split(made, self._starts[1:-1])
        shaped = [part.reshape(p.called.outputs[0].shape) for part, p in zip(parts, self.update.pieces, strict=True)]
        return self.of.proven(sum((self.of.pulled(i, part) for i, part in enumerate(shaped)), self.of.penalty))


def _taken(piece: Piece) -> np.ndarray:
    """Return the derivative of the loop's loss by a piece's one output."""
    return np.asarray(piece.called.derivatives[0][-1], "float64")


def narrowed(chosen: list[Evidence]) -> list[AtOutputs] | None:
    """Return the updates by their outputs; None unless their gradients are the derivatives' of the loop's loss."""
    if not all(e.is_by_outputs for e in chosen):
        return None
    found = []
    for e in chosen:
        parts = [e.pulled(i, _taken(piece)) for i, piece in enumerate(e.update.pieces)]
        factors = least(parts, e.handed - e.penalty)[0]
        if e.apart(factors @ np.stack(parts) + e.penalty) > e.meant.replay.tolerance.fits:
            return None
        found.append(AtOutputs(e, factors))
    return found
