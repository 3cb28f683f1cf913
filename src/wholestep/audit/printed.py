"""The stage of the report: the loss that the loop prints, against the loss of its updates."""

from collections.abc import Iterator
from statistics import mean

import numpy as np

from wholestep.audit.causes import BY_NAME
from wholestep.audit.evidence import Evidence
from wholestep.audit.found import Finding, found, of_values
from wholestep.audit.measure import FINE, farthest
from wholestep.audit.windows import PAD, passes


class Losses:
    """The losses of all forward passes of the updates, cut into passes over the data."""

    def __init__(self, evidence: list[Evidence]):
        self.line = evidence[0].update.pieces[0].called.line
        self.numbers = [e.update.number for e in evidence]
        of = {p.called.order: (e, i) for e in evidence for i, p in enumerate(e.update.pieces)}
        pieces = [piece for e in evidence for piece in e.update.pieces]
        self.passes = [[of[piece.called.order] for piece in cut] for cut in passes(pieces)]

    def means(self, *, penalty: bool) -> list[float]:
        """Return the mean over all rows of each pass."""
        return [self._mean(cut, penalty=penalty) for cut in self.passes]

    def by_rows(self, *, penalty: bool) -> list[float]:
        """Return the mean over the batches of each pass, each by its rows."""
        found = []
        for cut in self.passes:
            means, num = [self._mean([each], penalty=penalty) for each in cut], [self._num([each]) for each in cut]
            found.append(float(np.average(means, weights=num)))
        return found

    def changed(self, *, penalty: bool) -> Iterator[tuple[str, list[float]]]:
        """Yield (the cause, the numbers that are printed by mistake)."""
        alone = [[self._mean([each], penalty=penalty) for each in cut] for cut in self.passes]
        so_far = [[each for cut in self.passes[: n + 1] for each in cut] for n in range(len(self.passes))]
        firsts = [[one for each in alone[: n + 1] for one in each] for n in range(len(alone))]
        sums, updates = list(map(sum, alone)), [len({id(e) for e, _ in cut}) for cut in self.passes]
        yield "printed: mean of means", list(map(mean, alone))
        yield "printed: last batch", [each[-1] for each in alone]
        yield "printed: not reset", [self._mean(each, penalty=penalty) for each in so_far]
        yield "printed: not reset", list(map(mean, firsts))
        yield "printed: summed over microbatches", [each / n for each, n in zip(sums, updates, strict=True)]
        yield "printed: sum", sums
        yield "printed: means over rows", [each / n for each, n in zip(sums, map(self._num, self.passes), strict=True)]

    @staticmethod
    def _num(cut: list[tuple[Evidence, int]]) -> int:
        """Return the number of rows."""
        return sum(int(np.count_nonzero(e.update.pieces[i].rows != PAD)) for e, i in cut)

    @staticmethod
    def _mean(cut: list[tuple[Evidence, int]], *, penalty: bool) -> float:
        values, weights, extra = 0.0, 0.0, []
        for e, i in cut:
            terms, piece = e.terms[i], e.update.pieces[i]
            real = piece.rows != PAD
            values = values + (terms.values * real).sum(axis=1)
            weights = weights + (terms.weights * real).sum(axis=1)
            extra.append((terms.penalty, int(real.sum())))
        coefficients, divided = cut[0][0].terms[0].coefficients, cut[0][0].terms[0].divided
        rows = np.array([num for _, num in extra])
        own = float(np.average([p for p, _ in extra], weights=rows)) if penalty else 0.0
        return float(np.sum(coefficients * values / np.where(divided, weights, len(cut)))) + own


def printed(evidence: list[Evidence], numbers: list[float], is_whole: bool) -> Iterator[Finding]:
    """Yield the finding on printed losses: one number for each pass, or for the last.

    Args:
        is_whole: whether the evidence is of all updates that the loop made.
    """
    if not evidence or not is_whole:
        yield "The printed loss is not judged: not all updates could be computed again."
        return
    losses, num = Losses(evidence), len(numbers)
    if num not in (1, len(losses.passes)):
        yield f"The printed loss is not judged: {num} printed numbers for {len(losses.passes)} passes over the data."
        return
    right, as_keras = (
        [means(penalty=penalty)[-num:] for penalty in (True, False)] for means in (losses.means, losses.by_rows)
    )
    without = min(farthest(numbers, each) for each in right)
    fits, differs = evidence[0].meant.replay.tolerance
    if without <= differs or min(farthest(numbers, each) for each in as_keras) <= FINE.fits:
        if min(farthest(numbers, each) for each in (right[0], as_keras[0])) > differs:
            yield BY_NAME["printed: without penalty"].explanation
        return
    for penalty, meant in zip((True, False), right, strict=True):
        for name, wrong in losses.changed(penalty=penalty):
            if (apart := farthest(numbers, wrong[-num:])) <= fits:
                columns = [np.array(each) for each in (numbers, meant, wrong[-num:])]
                proof = of_values("the printed loss", lambda i: f"of pass {len(losses.passes) - num + 1 + i}", columns)
                yield found(name, without, losses.line, losses.numbers, with_change=apart, proof=proof)
                return
    told = ", ".join(f"{n:.6g}" for n in right[0])
    yield f"The printed loss has no known cause; the mean over all rows, as they were trained on, is {told}."


def as_numbers(loss: object) -> list[float]:
    """Return printed losses as a list."""
    return [float(number) for number in np.ravel(np.asarray(loss, "float64"))]
