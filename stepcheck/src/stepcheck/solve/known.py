"""The faults that the field has names for, by the factors that they give rows, gradients and penalties."""

from collections.abc import Callable

import numpy as np

from stepcheck.faults import Fault
from stepcheck.solve.basis import Basis
from stepcheck.trace.measure import SOLVED
from stepcheck.values import Group, Known, Rows

LAST_PASS = Rows(Group.MICROBATCHES_OF_LAST_PASS)
_FIRST, _LAST = Rows(Group.FIRST_MICROBATCH), Rows(Group.LAST_MICROBATCH)
_SAME = 2 * SOLVED  # of factors of rows
_LEAST_SCALE = 24.0  # a factor that no count of a small loop is: loss scales are larger
_OF_PENALTY, _OF_POWER = 1e-2, 0.05
_Ways = dict[Fault, list[np.ndarray]]


def of_rows(
    bases: list[Basis], counted: list[np.ndarray], *, is_of_last: bool = False
) -> tuple[Fault, ...]:
    """Return the names of these factors; `is_of_last`: rows of the pass before the last are in no update."""
    tables = [_known(basis, bases, is_of_last) for basis in bases]
    used = [basis.counts[Known.WEIGHT_OF_ROW] > 0 for basis in bases]
    if is_of_last:
        rests = [basis.sets[LAST_PASS] for basis in bases]
        is_beside = any(np.any(own[~rest]) for own, rest in zip(counted, rests, strict=True))
        if is_beside or all(map(np.all, rests)):
            return ()
        used = [own & rest for own, rest in zip(used, rests, strict=True)]

    def is_so(fault: Fault, way: int) -> bool:
        every = zip(counted, tables, used, strict=True)
        pairs = ((own[rows], table[fault][way][rows]) for own, table, rows in every)
        return all(np.allclose(*pair, rtol=_SAME, atol=0) for pair in pairs)

    num_ways = {fault: min(len(table.get(fault, ())) for table in tables) for fault in tables[0]}
    return tuple(
        fault for fault, num in num_ways.items() if any(is_so(fault, i) for i in range(num))
    )


def _known(basis: Basis, bases: list[Basis], is_of_last: bool) -> _Ways:
    """Return the factors of the rows by each fault that is possible here: an array for each way to write it."""
    counts, rest = basis.counts, basis.sets[LAST_PASS].astype(float)
    whole, own = counts[Known.WEIGHT_OF_UPDATE], counts[Known.WEIGHT_OF_MICROBATCH]
    num, usual = counts[Known.MICROBATCHES], counts[Known.MICROBATCHES_OF_FULL_WINDOW]
    weight, full = counts[Known.WEIGHT_OF_ROW], counts[Known.WEIGHT_OF_FULL_BATCH]
    lane = counts[Known.WEIGHT_OF_REPLICA] * counts[Known.REPLICAS]
    has_windows = bases[0].e.meant.usual > max(each.e.num_replicas for each in bases)
    if is_of_last:
        whole = np.full_like(whole, (weight * rest).sum())
        num = np.full_like(num, rest[basis.starts].sum())
    with np.errstate(divide="ignore", invalid="ignore"):
        short = [1 / (own * np.minimum(num, usual))] * bool(np.ptp(own))
        found: _Ways = {
            Fault.MEAN_OF_MEANS: [1 / (own * num), 1 / lane, *short],
            Fault.PADDING_COUNTED: [1 / (whole + sum(basis.e.pads))],
            **({Fault.DIVIDED_BY_A_FULL_WINDOW: [1 / (own * usual)]} if has_windows else {}),
            Fault.DIVIDED_BY_THE_FULL_BATCH: [1 / full],
            Fault.NEVER_DIVIDED: [np.ones_like(whole)],
            Fault.MEAN_OF_ROW_MEANS: [1 / (counts[Known.ROWS_WITH_A_WEIGHT] * weight)],
            Fault.DIVIDED_BY_THE_ROWS: [1 / counts[Known.ROWS_OF_UPDATE]],
            Fault.ASCENT: [-1 / whole],
        }
        if any(len(each.sizes) > each.e.num_replicas for each in bases):
            found |= _of_microbatches(basis, whole, own, num)
        if any(each.e.num_replicas > 1 for each in bases):
            replicas = counts[Known.REPLICAS]
            found[Fault.SUMMED_OVER_REPLICAS] = [replicas / each for each in (lane, whole)]
            found[Fault.DIVIDED_BY_THE_REPLICAS_TWICE] = [1 / (whole * replicas)]
        if not all(each.sets[LAST_PASS].all() for each in bases):
            found[Fault.LAST_WINDOW_DROPPED] = [rest / (weight * rest).sum(), rest / full]
        if basis.e.meant.replay.data[2] is not None:
            found[Fault.DIVIDED_BY_THE_WEIGHTS] = [1 / counts[Known.SUM_OF_SAMPLE_WEIGHTS]]
        if (places := counts[Known.PLACES_OF_UPDATE])[0]:
            found[Fault.PADDED_PLACES_COUNTED] = [1 / places]
    return found


def _of_microbatches(basis: Basis, whole: np.ndarray, own: np.ndarray, num: np.ndarray) -> _Ways:
    first, last = (basis.sets[rows].astype(float) for rows in (_FIRST, _LAST))
    return {
        Fault.SUMMED_OVER_MICROBATCHES: [1 / own],
        Fault.DIVIDED_TWICE: [1 / (whole * num)],
        Fault.ONLY_THE_LAST_MICROBATCH: [last / own, last / (own * num), last / whole],
        Fault.ONLY_THE_FIRST_MICROBATCH: [first / own, first / whole],
        Fault.FIRST_MICROBATCH_LOST: [(1 - first) / (own * num), (1 - first) / whole],
        Fault.LAST_MICROBATCH_LOST: [(1 - last) / (own * num), (1 - last) / whole],
    }


def of_scale(bases: list[Basis], factors: np.ndarray) -> tuple[Fault, ...]:
    """Return the name of a factor of whole gradients in half precision, or with a scaled loss."""
    middle, meant = float(np.median(factors)), bases[0].e.meant
    if meant.scales:
        at = {
            Fault.LOSS_SCALE_LEFT_IN: middle,
            Fault.LOSS_NOT_SCALED: 1 / middle if middle else 0.0,
        }
        fits = meant.replay.tolerance.differs
        scales = meant.scales
        return tuple(f for f, own in at.items() if any(abs(own / s - 1) <= fits for s in scales))
    is_scaled = meant.is_scaled or (meant.replay.is_half and not meant.replay.hears_scales)
    if not is_scaled or middle <= 0:
        return ()
    if not 1 / _LEAST_SCALE < middle < _LEAST_SCALE:
        return (Fault.LOSS_SCALE_LEFT_IN if middle > 1 else Fault.LOSS_NOT_SCALED,)
    power = np.log2(middle)
    is_power = bool(abs(power - np.round(power)) < _OF_POWER)
    return (Fault.LOSS_SCALE_FROZEN_IN_A_TRACE,) * (meant.is_scaled and is_power)


def of_penalty(bases: list[Basis], counted: np.ndarray) -> tuple[Fault, ...]:
    """Return the names of these factors of the model's own losses."""
    pairs = zip(bases, counted, strict=True)
    own = [(basis, number) for basis, number in pairs if basis.has_penalty]
    has_replicas = any(basis.e.num_replicas > 1 for basis in bases)

    def num_pieces(basis: Basis) -> int:
        return 1 if has_replicas else len(basis.sizes)

    ways: dict[Fault, Callable[[Basis], float]] = {
        Fault.PENALTY_FORGOTTEN: lambda basis: 0.0,
        Fault.PENALTY_ONCE_PER_REPLICA: lambda basis: basis.e.num_replicas if has_replicas else 1,
        Fault.PENALTY_ONCE_PER_MICROBATCH: num_pieces,
        Fault.PENALTY_ADDED_TWICE: lambda basis: 2.0,
        Fault.PENALTY_DIVIDED: lambda basis: 1 / num_pieces(basis),
    }

    def is_so(way: Callable[[Basis], float]) -> bool:
        is_other = any(way(basis) != 1 for basis, _ in own)
        return is_other and all(abs(way(basis) - number) < _OF_PENALTY for basis, number in own)

    return tuple(fault for fault, way in ways.items() if is_so(way))
