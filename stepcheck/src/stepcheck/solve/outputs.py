"""An update at the output of its passes, where no form of a loss needs a backward pass."""

from collections.abc import Iterator, Sequence

import numpy as np

from stepcheck.solve.evidence import Evidence, taken_at
from stepcheck.solve.ratios import least

# which an evidence computes once
_MADE = "penalty", "reference", "parts", "rows"
# derivatives that are solved for, and numbers of all their gradients
_MOST_FREE, _MOST_NUMBERS = 128, 20_000_000


class AtOutput(Evidence):
    """An update as derivatives by the one output of each pass.

    Args:
        of: the update whose gradients these derivatives give.
        taken: the derivatives of each pass, as often as they count in the handed
            gradient.
    """

    def __init__(self, of: Evidence, taken: Sequence[np.ndarray]):
        kept = {
            key: value for key, value in vars(of).items() if key not in _MADE
        }
        vars(self).update(kept)
        self.of, self.before = of, None
        self.scale, self.is_by_outputs = 0.0, True
        self._ends = np.cumsum([each.size for each in taken])
        self.handed = np.concatenate([np.ravel(each) for each in taken])
        self.mask = np.ones(len(self.handed), bool)
        # the model's losses are no function of outputs
        self.penalty = np.zeros_like(self.handed)

    def pulled(self, i: int, *derivatives: np.ndarray) -> np.ndarray:
        """Return the derivative by the output of a pass, with zeros for all other
        passes.
        """
        found = [
            np.zeros_like(part)
            for part in np.split(self.handed, self._ends[:-1])
        ]
        found[i] = np.ravel(derivatives[0])
        return np.concatenate(found)

    def by_piece(self, made: np.ndarray) -> list[np.ndarray]:
        """Cut derivatives into those of the passes, in the shape of their outputs."""
        parts = np.split(made, self._ends[:-1])
        shapes = [piece.called.outputs[0].shape for piece in self.update.pieces]
        return [
            part.reshape(shape)
            for part, shape in zip(parts, shapes, strict=True)
        ]

    def proven(self, made: np.ndarray) -> tuple[np.ndarray, float]:
        """Return the gradient of these derivatives, and the distance of the handed one."""
        if (apart := self.apart(made)) > self.meant.replay.tolerance.fits:
            return made, apart
        parts = (
            self.of.pulled(i, part)
            for i, part in enumerate(self.by_piece(made))
        )
        return self.of.proven(sum(parts, self.of.penalty))


def narrowed(chosen: Sequence[Evidence]) -> list[AtOutput] | None:
    """Return updates at their output; None unless their gradients are the loop's
    derivatives'.
    """
    found = []
    for e in chosen:
        factors = factors_of(e) if e.is_plain else None
        if factors is None:
            return None
        pairs = zip(factors, e.update.pieces, strict=True)
        found.append(
            AtOutput(e, [factor * taken_at(piece) for factor, piece in pairs])
        )
    return found


def factors_of(e: Evidence) -> np.ndarray | None:
    """Return how much each pass counts, if its derivatives by all outputs make the
    gradient.
    """
    parts = e.taken()
    factors = least(parts, e.handed - e.penalty)[0]
    apart = e.apart(factors @ np.stack(parts) + e.penalty)
    return factors if apart <= e.meant.replay.tolerance.fits else None


def solved(chosen: Sequence[Evidence]) -> list[AtOutput] | None:
    """Return updates at their output, by derivatives that are solved for, as none were
    recorded.

    None unless the gradients are those of derivatives by the outputs, which they are
    not by chance.
    """
    found = []
    for e in chosen:
        shapes = [
            piece.called.outputs[0].shape
            for piece in e.update.pieces
            if e.is_of_one_output
        ]
        sizes = [int(np.prod(shape)) for shape in shapes]
        num = sum(sizes)
        is_few = 0 < num <= min(_MOST_FREE, len(e.handed) // 2)
        if not is_few or num * len(e.handed) > _MOST_NUMBERS:
            return None
        columns = []
        for i, (shape, size) in enumerate(zip(shapes, sizes, strict=True)):
            columns += [
                e.pulled(i, one.reshape(shape))
                for one in np.eye(size, dtype="float32")
            ]
        numbers = least(columns, e.handed - e.penalty)[0]
        made = numbers @ np.stack(columns) + e.penalty
        if e.apart(made) > e.meant.replay.tolerance.fits:
            return None
        parts = np.split(numbers, np.cumsum(sizes)[:-1])
        found.append(
            AtOutput(
                e, [p.reshape(s) for p, s in zip(parts, shapes, strict=True)]
            )
        )
    return found


def taken(e: Evidence) -> np.ndarray:
    """Return the gradient of the loop's derivatives by all outputs of a pass, or an
    empty one.
    """
    if (
        len(e.update.pieces) != 1
        or not e.mask.all()
        or e.meant.replay.is_masked
    ):
        return np.zeros(0)
    called = e.update.pieces[0].called
    has_all = {*called.derivatives} == {*range(len(called.outputs))}
    return e.taken()[0] if has_all else np.zeros(0)


def other_gradients(evidence: list[Evidence]) -> Iterator[list[np.ndarray]]:
    """Yield gradients on which an optimizer may have made its steps, one for each
    update.

    The penalty is forgotten, or divided by the rows; or they are of the loop's own
    loss.
    """
    if evidence[0].meant.has_penalty:
        yield [e.reference - e.penalty for e in evidence]
        yield [
            e.reference - e.penalty + e.penalty / max(e.whole[0], 1)
            for e in evidence
        ]
    own = [taken(e) for e in evidence]
    if all(len(each) for each in own):
        yield [each + e.penalty for each, e in zip(own, evidence, strict=True)]
