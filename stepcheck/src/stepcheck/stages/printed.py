"""The stage of the printed loss."""

from collections.abc import Iterator
from itertools import accumulate, takewhile
from statistics import mean

import numpy as np

from stepcheck.faults import Fault, Stage
from stepcheck.solve.evidence import Evidence
from stepcheck.stages.proofs import proof_of
from stepcheck.trace.measure import farthest
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
    real = [
        each
        for each in seen.pieces
        if each.is_known and np.any(each.rows != PAD)
    ]
    cut = [[piece.called.order for piece in each] for each in passes(real)]
    whole = [*takewhile(lambda orders: {*orders} <= {*of}, cut)]
    is_last = len(numbers) == 1 and len(whole) == len(cut)
    if not whole or not (is_last or len(numbers) == len(cut)):
        yield Unjudged(Reason.FEW_PASSES, Stage.PRINTED)
        return
    batches = [[of[order] for order in each] for each in whole]
    own = np.array(numbers[: len(whole)])
    known = [each for has in (True, False) for each in _known(batches, has)]
    every = [
        (fault, np.array(numbers)[-len(own) :]) for fault, numbers in known
    ]
    fits, differs = evidence[0].meant.replay.tolerance
    right = [farthest(own, meant) for fault, meant in every if fault is None]
    if min(right) <= differs:
        return
    for fault, wrong in every:
        with_error = farthest(own, wrong)
        if fault is not None and with_error <= fits:
            updates = tuple(e.update.number for e in evidence)
            _, meant = every[0]
            proof = proof_of(updates[-1], Shown.LOSS, str, [own, meant, wrong])
            where = Where(updates)
            yield Finding(Change(fault), min(right), with_error, where, proof)
            return
    yield Unjudged(Reason.PRINTED_UNLIKE, Stage.PRINTED)


def _known(
    batches: list[list[_Batch]], has_penalty: bool
) -> Iterator[tuple[Fault | None, list[float]]]:
    """Yield the numbers that a loop may print, by pass over the data, with the fault;
    first without one.

    Args:
        has_penalty: whether the model's own losses are a part of them.
    """
    alone = [
        [_loss([batch], has_penalty) for batch in each] for each in batches
    ]
    rows = [[int(_is_real(batch).sum()) for batch in each] for each in batches]
    pairs = [*zip(alone, rows, strict=True)]
    num_updates = [len({id(e) for e, _ in each}) for each in batches]
    so_far = [_loss(each, has_penalty) for each in accumulate(batches)]
    yield None, [_loss(each, has_penalty) for each in batches]
    # Keras
    yield (
        None,
        [float(np.average(each, weights=num)) for each, num in pairs],
    )
    yield Fault.PRINTED_MEAN_OF_MEANS, [mean(each) for each in alone]
    yield Fault.PRINTED_LAST_BATCH, [each[-1] for each in alone]
    yield Fault.PRINTED_NOT_RESET, so_far
    yield Fault.PRINTED_NOT_RESET, [mean(each) for each in accumulate(alone)]
    sums = [sum(each) for each in alone]
    by_update = np.divide(sums, num_updates)
    yield Fault.PRINTED_SUMMED_OVER_MICROBATCHES, by_update.tolist()
    yield Fault.PRINTED_SUM, sums
    yield (
        Fault.PRINTED_MEANS_OVER_ROWS,
        [sum(each) / sum(num) for each, num in pairs],
    )


def _is_real(batch: _Batch) -> np.ndarray:
    e, i = batch
    return e.update.pieces[i].rows != PAD


def _loss(batches: list[_Batch], has_penalty: bool) -> float:
    """Return the loss of all rows of some batches."""
    terms, real = [e.terms[i] for e, i in batches], [*map(_is_real, batches)]
    pairs = [*zip(terms, real, strict=True)]
    values = sum((own.values * used).sum(axis=1) for own, used in pairs)
    weights = sum((own.weights * used).sum(axis=1) for own, used in pairs)
    divisor = np.where(terms[0].divided, weights, len(batches))
    loss = float(np.sum(terms[0].coefficients * values / divisor))
    penalties = [own.penalty for own in terms]
    penalty = float(
        np.average(penalties, weights=[used.sum() for used in real])
    )
    return loss + penalty if has_penalty else loss
