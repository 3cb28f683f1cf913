"""The stage of the printed loss."""

from collections.abc import Iterator
from itertools import accumulate, groupby, takewhile
from statistics import mean

import numpy as np

from stepcheck.report.causes import BY_NAME
from stepcheck.report.found import Finding, Likely, found, of_values
from stepcheck.solve.evidence import Evidence
from stepcheck.trace.measure import FINE, farthest
from stepcheck.trace.windows import PAD, Windows, passes


class Losses:
    """The losses of all forward passes of the updates, cut into passes over the data, with the model's own or without.

    Attributes:
        alone, rows: by pass over the data, the mean over the rows of each batch, and their number.
        means: over all rows of each pass over the data.
    """

    def __init__(self, evidence: list[Evidence], *, penalty: bool):
        of = {p.called.order: (e, i) for e in evidence for i, p in enumerate(e.update.pieces)}
        pieces = [piece for e in evidence for piece in e.update.pieces if np.any(piece.rows != PAD)]
        self._cuts = [[of[piece.called.order] for piece in cut] for cut in passes(pieces)]
        self._penalty = penalty
        batches = [_batches(cut) for cut in self._cuts]
        self.alone = [[self._mean(batch) for batch in each] for each in batches]
        self.rows = [[sum(int(_real(part).sum()) for part in batch) for batch in each] for each in batches]
        self.means = list(map(self._mean, self._cuts))

    @property
    def by_rows(self) -> list[float]:
        """The mean over the batches of each pass, each by its rows."""
        return [float(np.average(means, weights=num)) for means, num in zip(self.alone, self.rows, strict=True)]

    def changed(self) -> Iterator[tuple[str, list[float]]]:
        """Yield (the cause, the numbers that are printed by mistake)."""
        sums, updates = list(map(sum, self.alone)), [len({id(e) for e, _ in cut}) for cut in self._cuts]
        yield "printed: mean of means", list(map(mean, self.alone))
        yield "printed: last batch", [each[-1] for each in self.alone]
        yield "printed: not reset", list(map(self._mean, accumulate(self._cuts)))
        yield "printed: not reset", list(map(mean, accumulate(self.alone)))
        yield "printed: summed over microbatches", [each / n for each, n in zip(sums, updates, strict=True)]
        yield "printed: sum", sums
        yield "printed: means over rows", [each / sum(num) for each, num in zip(sums, self.rows, strict=True)]

    def _mean(self, cut: list[tuple[Evidence, int]]) -> float:
        terms, real = [e.terms[i] for e, i in cut], list(map(_real, cut))
        values = sum((t.values * own).sum(axis=1) for t, own in zip(terms, real, strict=True))
        weights = sum((t.weights * own).sum(axis=1) for t, own in zip(terms, real, strict=True))
        penalty = float(np.average([t.penalty for t in terms], weights=[own.sum() for own in real]))
        divisor = np.where(terms[0].divided, weights, len(cut))
        return float(np.sum(terms[0].coefficients * values / divisor)) + penalty * self._penalty


def _batches(cut: list[tuple[Evidence, int]]) -> list[list[tuple[Evidence, int]]]:
    """Cut a pass over the data into its batches: the batches of all replicas are one."""
    keyed = groupby(cut, key=lambda one: (id(one[0]), 0 if one[0].num_replicas > 1 else one[1]))
    return [[*batch] for _, batch in keyed]


def _real(one: tuple[Evidence, int]) -> np.ndarray:
    e, i = one
    return e.update.pieces[i].rows != PAD


def printed(evidence: list[Evidence], numbers: list[float], seen: Windows, num_left: int) -> Iterator[Finding]:
    """Yield the finding on printed losses, of each pass or the last.

    Of many updates only the first are known: then the first passes are judged, if each has a number.

    Args:
        num_left: the number of updates that have no evidence, and are no part of the loss.
    """
    if len(evidence) + num_left < len(seen.updates) or seen.rest:
        used = {piece.called.order for e in evidence for piece in e.update.pieces}
        cut = passes([piece for piece in seen.pieces if piece.is_known])
        whole = [*takewhile(lambda one: {piece.called.order for piece in one} <= used, cut)]
        first = {piece.called.order for one in whole for piece in one if len(numbers) == len(cut)}
        evidence = [e for e in evidence if {piece.called.order for piece in e.update.pieces} <= first]
        numbers = numbers[: len(whole)]
    if not evidence:
        yield "The printed loss is not judged: not all updates could be computed again."
        return
    both, num = [Losses(evidence, penalty=penalty) for penalty in (True, False)], len(numbers)
    num_passes = len(both[0].means)
    if num not in (1, num_passes):
        yield f"The printed loss is not judged: {num} printed numbers for {num_passes} passes over the data."
        return
    right = [farthest(numbers, losses.means[-num:]) for losses in both]
    as_keras = [farthest(numbers, losses.by_rows[-num:]) for losses in both]
    fits, differs = evidence[0].meant.replay.tolerance
    if min(right) <= differs or min(as_keras) <= FINE.fits:
        if min(right[0], as_keras[0]) > differs:
            yield BY_NAME["printed: without penalty"].explanation
        return
    for losses in both:
        for name, every in losses.changed():
            wrong = every[-num:]
            if (apart := farthest(numbers, wrong)) <= fits:
                columns = [np.array(each) for each in (numbers, losses.means[-num:], wrong)]
                proof = of_values("the printed loss", lambda i: f"of pass {num_passes - num + 1 + i}", columns)
                updates = [e.update.number for e in evidence]
                yield found(name, min(right), None, updates, with_change=apart, proof=proof)
                return
    shares = [each[-num:] for losses in both for each in (losses.means, list(map(mean, losses.alone)))]
    for count, of in ((evidence[0].num_replicas, "replicas"), (len(evidence[0].update.pieces), "forward passes")):
        for factor in (1 / count, count) if count > 1 else ():
            if min(farthest(numbers, [factor * n for n in each]) for each in shares) <= fits:
                told = f"The printed loss is {factor:.4g} times the mean of the rows, or of the batches. An update has "
                yield Likely(f"{told}{count} {of}: are their losses added up, or divided, once too often?")
                return
    told = ", ".join(f"{n:.6g}" for n in both[0].means[-num:])
    yield f"The printed loss has no known cause; the mean over all rows, as they were trained on, is {told}."
