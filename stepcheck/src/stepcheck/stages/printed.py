"""The stage of the printed loss."""

from collections.abc import Iterator
from itertools import accumulate, groupby, takewhile
from statistics import mean

import numpy as np

from stepcheck.faults import Fault, Stage
from stepcheck.solve.evidence import Evidence
from stepcheck.stages.proofs import proof_of
from stepcheck.trace.measure import FINE, farthest
from stepcheck.trace.windows import PAD, Windows, passes
from stepcheck.values import Change, Finding, Reason, Shown, Unjudged, Where


class Losses:
    """The losses of all forward passes of the updates, cut into passes over the data,
    with the model's own or without.

    Attributes:
        alone, rows: by pass over the data, the mean over the rows of each batch, and
            their number.
        means: over all rows of each pass over the data.
    """

    def __init__(self, evidence: list[Evidence], *, penalty: bool):
        of = {
            p.called.order: (e, i)
            for e in evidence
            for i, p in enumerate(e.update.pieces)
        }
        pieces = [
            piece
            for e in evidence
            for piece in e.update.pieces
            if np.any(piece.rows != PAD)
        ]
        self._cuts = [
            [of[piece.called.order] for piece in cut] for cut in passes(pieces)
        ]
        self._penalty = penalty
        batches = [_batches(cut) for cut in self._cuts]
        self.alone = [[self._mean(batch) for batch in each] for each in batches]
        self.rows = [
            [sum(int(_real(part).sum()) for part in batch) for batch in each]
            for each in batches
        ]
        self.means = list(map(self._mean, self._cuts))

    @property
    def by_rows(self) -> list[float]:
        """The mean over the batches of each pass, each by its rows."""
        return [
            float(np.average(means, weights=num))
            for means, num in zip(self.alone, self.rows, strict=True)
        ]

    def changed(self) -> Iterator[tuple[Fault, list[float]]]:
        """Yield (the fault, the numbers that are printed by mistake)."""
        sums, updates = (
            list(map(sum, self.alone)),
            [len({id(e) for e, _ in cut}) for cut in self._cuts],
        )
        yield Fault.PRINTED_MEAN_OF_MEANS, list(map(mean, self.alone))
        yield Fault.PRINTED_LAST_BATCH, [each[-1] for each in self.alone]
        yield Fault.PRINTED_NOT_RESET, list(map(self._mean, accumulate(self._cuts)))
        yield Fault.PRINTED_NOT_RESET, list(map(mean, accumulate(self.alone)))
        yield (
            Fault.PRINTED_SUMMED_OVER_MICROBATCHES,
            [each / n for each, n in zip(sums, updates, strict=True)],
        )
        yield Fault.PRINTED_SUM, sums
        yield (
            Fault.PRINTED_MEANS_OVER_ROWS,
            [each / sum(num) for each, num in zip(sums, self.rows, strict=True)],
        )

    def _mean(self, cut: list[tuple[Evidence, int]]) -> float:
        terms, real = [e.terms[i] for e, i in cut], list(map(_real, cut))
        values = sum(
            (t.values * own).sum(axis=1) for t, own in zip(terms, real, strict=True)
        )
        weights = sum(
            (t.weights * own).sum(axis=1) for t, own in zip(terms, real, strict=True)
        )
        penalty = float(
            np.average([t.penalty for t in terms], weights=[own.sum() for own in real])
        )
        divisor = np.where(terms[0].divided, weights, len(cut))
        return (
            float(np.sum(terms[0].coefficients * values / divisor))
            + penalty * self._penalty
        )


def _batches(cut: list[tuple[Evidence, int]]) -> list[list[tuple[Evidence, int]]]:
    """Cut a pass over the data into its batches: the batches of all replicas are one."""
    keyed = groupby(
        cut, key=lambda one: (id(one[0]), 0 if one[0].num_replicas > 1 else one[1])
    )
    return [[*batch] for _, batch in keyed]


def _real(one: tuple[Evidence, int]) -> np.ndarray:
    e, i = one
    return e.update.pieces[i].rows != PAD


def printed(
    evidence: list[Evidence], numbers: list[float], seen: Windows, num_left: int
) -> Iterator[Finding | Unjudged]:
    """Yield the finding on printed losses, of each pass or the last.

    Of many updates only the first are known: then the first passes are judged, if each
    has a number.

    Args:
        num_left: the number of updates that have no evidence, and are no part of the
            loss.
    """
    if len(evidence) + num_left < len(seen.updates) or seen.rest:
        used = {piece.called.order for e in evidence for piece in e.update.pieces}
        cut = passes([piece for piece in seen.pieces if piece.is_known])
        whole = [
            *takewhile(lambda one: {piece.called.order for piece in one} <= used, cut)
        ]
        first = {
            piece.called.order
            for one in whole
            for piece in one
            if len(numbers) == len(cut)
        }
        evidence = [
            e
            for e in evidence
            if {piece.called.order for piece in e.update.pieces} <= first
        ]
        numbers = numbers[: len(whole)]
    both, num = (
        [Losses(evidence, penalty=penalty) for penalty in (True, False)],
        len(numbers),
    )
    if not evidence or num not in (1, len(both[0].means)):
        yield Unjudged(Reason.FEW_PASSES, Stage.PRINTED)
        return
    right = [farthest(numbers, losses.means[-num:]) for losses in both]
    as_keras = [farthest(numbers, losses.by_rows[-num:]) for losses in both]
    fits, differs = evidence[0].meant.replay.tolerance
    if min(right) <= differs or min(as_keras) <= FINE.fits:
        return
    updates = tuple(e.update.number for e in evidence)
    for losses in both:
        for fault, every in losses.changed():
            wrong = every[-num:]
            if (apart := farthest(numbers, wrong)) <= fits:
                columns = [
                    np.array(each) for each in (numbers, losses.means[-num:], wrong)
                ]
                proof = proof_of(updates[-1], Shown.LOSS, str, columns)
                yield Finding(Change(fault), min(right), apart, Where(updates), proof)
                return
    yield Unjudged(Reason.PRINTED_UNLIKE, Stage.PRINTED)
