"""The stage of the printed loss."""

from collections.abc import Iterator
from itertools import accumulate, takewhile
from statistics import mean

import numpy as np

from stepcheck.faults import Fault, Stage
from stepcheck.solve.evidence import Evidence
from stepcheck.stages.proofs import proof_of
from stepcheck.trace.measure import FINE, farthest
from stepcheck.trace.windows import PAD, Windows, passes
from stepcheck.values import Change, Finding, Reason, Shown, Unjudged, Where

_Batch = tuple[Evidence, int]  # the i-th forward pass of an update


def printed(
    evidence: list[Evidence], numbers: list[float], seen: Windows
) -> Iterator[Finding | Unjudged]:
    """Yield the finding on printed losses, of each pass over the data or of the last.

    Of many updates only the first are known: then the first passes are judged, if each
    has a number.
    """
    of: dict[int, _Batch] = {
        piece.called.order: (e, i)
        for e in evidence
        for i, piece in enumerate(e.update.pieces)
        if e.num_replicas == 1
    }
    real = [each for each in seen.pieces if each.is_known and np.any(each.rows != PAD)]
    cut = [[piece.called.order for piece in each] for each in passes(real)]
    whole = [*takewhile(lambda orders: {*orders} <= {*of}, cut)]
    is_last = len(numbers) == 1 and len(whole) == len(cut)
    if not whole or not (is_last or len(numbers) == len(cut)):
        yield Unjudged(Reason.FEW_PASSES, Stage.PRINTED)
        return
    batches = [[of[order] for order in each] for each in whole]
    own = np.array(numbers[: len(whole)])
    num = len(own)
    meant = np.array([*map(_loss, batches)])[-num:]
    by_row = [np.average(_alone(each), weights=_rows(each)) for each in batches][-num:]
    fits, differs = evidence[0].meant.replay.tolerance
    apart = farthest(own, meant)
    if apart <= differs or farthest(own, by_row) <= FINE.fits:  # the latter as Keras
        return
    for fault, every in _mistaken(batches):
        wrong = np.array(every[-num:])
        with_error = farthest(own, wrong)
        if with_error <= fits:
            updates = tuple(e.update.number for e in evidence)
            proof = proof_of(updates[-1], Shown.LOSS, str, [own, meant, wrong])
            yield Finding(Change(fault), apart, with_error, Where(updates), proof)
            return
    yield Unjudged(Reason.PRINTED_UNLIKE, Stage.PRINTED)


def _mistaken(batches: list[list[_Batch]]) -> Iterator[tuple[Fault, list[float]]]:
    """Yield (a fault, the numbers that are printed with it, by pass over the data)."""
    alone = [*map(_alone, batches)]
    sums = [sum(each) for each in alone]
    num_rows = [sum(_rows(each)) for each in batches]
    num_updates = [len({id(e) for e, _ in each}) for each in batches]
    yield Fault.PRINTED_MEAN_OF_MEANS, [mean(each) for each in alone]
    yield Fault.PRINTED_LAST_BATCH, [each[-1] for each in alone]
    yield Fault.PRINTED_NOT_RESET, [*map(_loss, accumulate(batches))]
    yield Fault.PRINTED_NOT_RESET, [*map(mean, accumulate(alone))]
    yield (
        Fault.PRINTED_SUMMED_OVER_MICROBATCHES,
        np.divide(sums, num_updates).tolist(),
    )
    yield Fault.PRINTED_SUM, sums
    yield Fault.PRINTED_MEANS_OVER_ROWS, np.divide(sums, num_rows).tolist()


def _alone(batches: list[_Batch]) -> list[float]:
    return [_loss([batch]) for batch in batches]


def _rows(batches: list[_Batch]) -> list[int]:
    return [int(_is_real(batch).sum()) for batch in batches]


def _is_real(batch: _Batch) -> np.ndarray:
    e, i = batch
    return e.update.pieces[i].rows != PAD


def _loss(batches: list[_Batch]) -> float:
    """Return the loss of all rows of some batches, with the model's own losses."""
    terms = [e.terms[i] for e, i in batches]
    pairs = [*zip(terms, map(_is_real, batches), strict=True)]
    values = sum((own.values * real).sum(axis=1) for own, real in pairs)
    weights = sum((own.weights * real).sum(axis=1) for own, real in pairs)
    divisor = np.where(terms[0].divided, weights, len(batches))
    penalty = np.average([own.penalty for own in terms], weights=_rows(batches))
    return float(np.sum(terms[0].coefficients * values / divisor) + penalty)
