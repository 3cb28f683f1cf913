"""Known counts of an update by row, and the names in the field of the fractions that
rows count.
"""

import numpy as np

from stepcheck.faults import Fault
from stepcheck.solve.evidence import Evidence, Meant
from stepcheck.solve.ratios import Counts
from stepcheck.trace.windows import PAD
from stepcheck.values import MEANT, NOTHING, Count, Known

# a factor that no count of a small loop is: loss scales are larger
_LEAST_SCALE = 24.0
_OF_POWER = 0.05  # of the logarithm of a power of two, in half precision
_OF_ROWS = {  # by (what a row's gradient is multiplied with, what it is divided by)
    ((), ()): Fault.NEVER_DIVIDED,
    ((), (Known.WEIGHT_OF_MICROBATCH,)): Fault.SUMMED_OVER_MICROBATCHES,
    ((), (Known.MICROBATCHES, Known.WEIGHT_OF_MICROBATCH)): Fault.MEAN_OF_MEANS,
    (
        (),
        (Known.MICROBATCHES_OF_FULL_WINDOW, Known.WEIGHT_OF_MICROBATCH),
    ): Fault.DIVIDED_BY_A_FULL_WINDOW,
    ((), (Known.WEIGHT_OF_FULL_BATCH,)): Fault.DIVIDED_BY_THE_FULL_BATCH,
    ((), (Known.ROWS_WITH_PADDING,)): Fault.PADDING_COUNTED,
    ((), (Known.PLACES_OF_UPDATE,)): Fault.PADDED_PLACES_COUNTED,
    ((), (Known.ROWS_OF_UPDATE,)): Fault.DIVIDED_BY_THE_ROWS,
    ((), (Known.SUM_OF_SAMPLE_WEIGHTS,)): Fault.DIVIDED_BY_THE_WEIGHTS,
    ((), (Known.ROWS_OF_UPDATE, Known.WEIGHT_OF_ROW)): Fault.MEAN_OF_ROW_MEANS,
    ((), (Known.WEIGHT_OF_REPLICA,)): Fault.SUMMED_OVER_REPLICAS,
    ((Known.REPLICAS,), (Known.WEIGHT_OF_UPDATE,)): Fault.SUMMED_OVER_REPLICAS,
    ((), (Known.REPLICAS, Known.WEIGHT_OF_REPLICA)): Fault.MEAN_OF_MEANS,
    (MEANT.above, (Known.REPLICAS,)): Fault.DIVIDED_BY_THE_REPLICAS_TWICE,
    (MEANT.above, (Known.MICROBATCHES,)): Fault.DIVIDED_TWICE,
}
_OF_PENALTY = {
    NOTHING: Fault.PENALTY_FORGOTTEN,
    Count(2.0, MEANT.above): Fault.PENALTY_ADDED_TWICE,
    Count(above=(Known.MICROBATCHES,)): Fault.PENALTY_ONCE_PER_MICROBATCH,
    Count(above=(Known.REPLICAS,)): Fault.PENALTY_ONCE_PER_REPLICA,
    Count(below=(Known.MICROBATCHES,)): Fault.PENALTY_DIVIDED,
    Count(below=(Known.REPLICAS,)): Fault.PENALTY_DIVIDED,
}


def unit(e: Evidence) -> float:
    """Return the right coefficient of a row of weight 1, in the first term."""
    return 1 / e.whole[0] if e.terms[0].divided[0] and e.whole[0] else 1.0


def counts_of(e: Evidence) -> Counts:
    """Return known counts, one number for each row; of equal ones, the first gives its
    name.
    """
    meant, sizes = e.meant, np.array(e.update.sizes)
    weights = np.concatenate([own[0] for own in e.weights])
    by_piece = np.array([own[0].sum() for own in e.weights])
    replica = np.array([piece.called.replica for piece in e.update.pieces])
    of_replica = [by_piece[replica == each].sum() for each in replica]
    assert meant.full is not None
    whole = {
        Known.REPLICAS: e.num_replicas,
        Known.WEIGHT_OF_UPDATE: e.whole[0],
        Known.ROWS_OF_UPDATE: sizes.sum() - sum(e.pads),
        Known.ROWS_WITH_PADDING: sizes.sum(),
        Known.PLACES_OF_UPDATE: e.num_places,
        Known.SUM_OF_SAMPLE_WEIGHTS: _sample_weights(e),
        Known.MICROBATCHES: len(sizes),
        Known.MICROBATCHES_OF_FULL_WINDOW: meant.usual,
        Known.WEIGHT_OF_FULL_BATCH: meant.full[0],
    }
    found = {
        known: np.full(len(weights), float(own)) for known, own in whole.items()
    }
    if e.num_replicas > 1:
        found = {Known.WEIGHT_OF_REPLICA: np.repeat(of_replica, sizes), **found}
    found[Known.WEIGHT_OF_MICROBATCH] = np.repeat(by_piece, sizes)
    found[Known.ROWS_OF_MICROBATCH] = np.repeat(sizes - e.pads, sizes)
    found[Known.WEIGHT_OF_ROW] = weights
    return found


def _sample_weights(e: Evidence) -> float:
    own, rows = e.meant.replay.data[2], e.update.rows
    used = rows[rows != PAD]
    return (
        float(np.sum(np.asarray(own)[used]))
        if hasattr(own, "shape")
        else float(len(used))
    )


def name_of_rows(count: Count, meant: Meant) -> Fault:
    """Return the name of a count of rows."""
    if count.above == MEANT.above and not count.below:
        return _of_scale(np.array(count.numbers or [count.number]), meant)
    if count.number < 0:
        return Fault.ASCENT
    for (above, below), fault in _OF_ROWS.items():
        is_so = (count.number, count.above) == (1, above) and {
            *count.below
        } == {*below}
        if is_so and len(count.below) == len(below):
            return fault
    return Fault.ROWS_COUNTED_OTHERWISE


def name_of_penalty(count: Count) -> Fault:
    """Return the name of a count of the model's own losses."""
    return _OF_PENALTY.get(count, Fault.PENALTY_COUNTED_OTHERWISE)


def _of_scale(numbers: np.ndarray, meant: Meant) -> Fault:
    """Return the name of factors of whole gradients, where a loss is scaled."""
    if np.all(numbers < 0):
        return Fault.ASCENT
    replay, number = meant.replay, float(numbers[0])
    is_scaled = meant.is_scaled or (replay.is_half and not replay.hears_scales)
    if not is_scaled or np.any(numbers <= 0):
        return Fault.ROWS_COUNTED_OTHERWISE
    powers = np.log2(numbers)
    is_power = len(numbers) > 1 and np.all(
        np.abs(powers - np.round(powers)) <= _OF_POWER
    )
    if is_power or not 1 / _LEAST_SCALE < number < _LEAST_SCALE:
        return Fault.LOSS_SCALE_LEFT_IN if number > 1 else Fault.LOSS_NOT_SCALED
    return Fault.ROWS_COUNTED_OTHERWISE
