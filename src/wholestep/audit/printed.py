"""The stage of the report: the loss that the loop prints, against the one that its updates had."""

from collections.abc import Callable, Iterator

import numpy as np

from wholestep.audit.causes import BY_NAME
from wholestep.audit.evidence import Evidence
from wholestep.audit.found import FINE, Found, found
from wholestep.audit.proof import of_values
from wholestep.audit.windows import PAD, passes


class Losses:
    """What every forward pass of the updates had for a loss, cut into passes over the data."""

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
        """Yield what is printed by mistake, by the name of the cause."""
        alone = [[self._mean([each], penalty=penalty) for each in cut] for cut in self.passes]
        yield "printed: mean of means", [float(np.mean(each)) for each in alone]
        yield "printed: last batch", [each[-1] for each in alone]
        so_far = [[each for cut in self.passes[: n + 1] for each in cut] for n in range(len(self.passes))]
        yield "printed: not reset", [self._mean(each, penalty=penalty) for each in so_far]
        firsts = [[one for each in alone[: n + 1] for one in each] for n in range(len(alone))]
        yield "printed: not reset", [float(np.mean(each)) for each in firsts]
        num = [len({id(e) for e, _ in cut}) for cut in self.passes]
        yield "printed: summed over microbatches", [float(np.sum(each)) / n for each, n in zip(alone, num, strict=True)]
        yield "printed: sum", [float(np.sum(each)) for each in alone]
        yield (
            "printed: means over rows",
            [np.sum(a) / self._num(cut) for a, cut in zip(alone, self.passes, strict=True)],
        )

    def name_of_last(self, num: int) -> Callable[[int], str]:
        """Return what the i-th of the last so many passes is called."""
        return lambda i: f"of pass {len(self.passes) - num + 1 + i}"

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


def printed(evidence: list[Evidence], numbers: list[float], is_whole: bool) -> tuple[list[Found], list[str]]:
    """Return (causes, notes) of printed losses: one number for each pass, or that of the last.

    Args:
        is_whole: whether the evidence is of all updates that the loop made.
    """
    if not evidence or not is_whole:
        return [], ["The printed loss is not judged: not all updates could be computed again."]
    losses = Losses(evidence)
    if len(numbers) not in (1, len(losses.passes)):
        told = f"{len(numbers)} printed numbers for {len(losses.passes)} passes over the data"
        return [], [f"The printed loss is not judged: {told}."]
    right = [losses.means(penalty=penalty)[-len(numbers) :] for penalty in (True, False)]
    without = min(_apart(numbers, each) for each in right)
    as_keras = [losses.by_rows(penalty=penalty)[-len(numbers) :] for penalty in (True, False)]
    fits, differs = evidence[0].meant.replay.tolerance
    if without <= differs or min(_apart(numbers, each) for each in as_keras) <= FINE.fits:
        has_none = min(_apart(numbers, each) for each in (right[0], as_keras[0])) > differs
        return [], [BY_NAME["printed: without penalty"].explanation] if has_none else []
    for penalty in (True, False):
        for name, wrong in losses.changed(penalty=penalty):
            if (apart := _apart(numbers, wrong[-len(numbers) :])) <= fits:
                columns = [np.array(c) for c in (numbers, right[0 if penalty else 1], wrong[-len(numbers) :])]
                proof = of_values("the printed loss", losses.name_of_last(len(numbers)), columns)
                return [found(BY_NAME[name], without, apart, losses.line, losses.numbers, proof=proof)], []
    told = ", ".join(f"{n:.6g}" for n in right[0])
    return [], [
        f"The printed loss is none that was looked for; the mean over all rows, as they were trained on, is {told}."
    ]


def _apart(one: list[float], two: list[float]) -> float:
    return max(abs(a - b) / max(abs(a), abs(b), 1e-12) for a, b in zip(one, two, strict=True))


def as_numbers(loss: object) -> list[float]:
    """Return printed losses as a list."""
    return [float(number) for number in np.ravel(np.asarray(loss, "float64"))]
