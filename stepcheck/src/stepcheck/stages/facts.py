"""The facts of a loop: numbers and names that need no judgement."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from stepcheck.port import Port
from stepcheck.solve.modes import Modes
from stepcheck.stages.moves import written
from stepcheck.stages.rows import Pass, batches, passes
from stepcheck.trace.log import Applied, Log
from stepcheck.trace.measure import Arrays, all_same, same
from stepcheck.trace.windows import PAD, Piece, Rows, Windows


@dataclass(frozen=True)
class Span:
    """The least and the most of several numbers."""

    least: float
    most: float


@dataclass(frozen=True)
class Use:
    """How often the rows of the data were used: rows that were and were not, and uses
    of one of the former.
    """

    rows: int
    unused: int
    times: Span | None


@dataclass(frozen=True)
class Order:
    """Of `passes` over the data after the first one, how many are as the pass before,
    and how many of all are sorted.

    Attributes:
        same: in the order of the pass before.
        same_batches: with the batches of the pass before, in any order.
        as_data: of all passes, those in the order of the data.
        across: updates with rows of two passes.
    """

    passes: int
    same: int
    same_batches: int
    as_data: int
    across: int


@dataclass(frozen=True)
class Calls:
    """Forward passes: in updates, with the outputs of inference mode, without a
    gradient, and of a skipped step.
    """

    used: int
    inferring: int
    without_gradient: int
    skipped_steps: int


@dataclass(frozen=True)
class Rate:
    """The learning rate of the first and the last update, the least and the most."""

    first: float
    last: float
    least: float
    most: float


@dataclass(frozen=True)
class Moved:
    """Forward passes that moved statistics or seeds, and those of them whose values the
    next pass begins with.
    """

    passes: int
    kept: int


@dataclass(frozen=True)
class Facts:
    """Numbers and names of a loop. A pass over the data ends where a row comes again;
    names are of variables.

    Attributes:
        use: of the rows of the data.
        passes: the number of rows in each pass over the data.
        updates, rows, microbatches: their number, and the rows and the forward passes
            of one, on one replica.
        replicas: their number.
        padded: rows that fill up batches.
        labels: distinct labels in a batch, if the data have classes; `classes`: in the
            data.
        without_gradient, unmoved: trainable variables that no step has a gradient of,
            and that never moved.
        frozen_moved: variables that are set to be frozen, and moved.
        written: updates before whose step something else wrote weights, or slots of
            the optimizer.
        state: of statistics and seeds.
    """

    use: Use
    passes: tuple[int, ...]
    order: Order
    updates: int
    rows: Span | None
    microbatches: Span | None
    replicas: int
    calls: Calls
    padded: int
    labels: Span | None
    classes: int
    without_gradient: tuple[str, ...]
    unmoved: tuple[str, ...]
    frozen_moved: tuple[str, ...]
    rate: Rate | None
    written: tuple[int, ...]
    state: Moved


def facts(
    replay: Port,
    log: Log,
    seen: Windows,
    rows: Rows,
    modes: Modes,
    classes: np.ndarray | None,
) -> Facts:
    """Return the facts of a loop.

    Args:
        modes: of the forward passes that were run again.
        classes: by row the number of its class; None if the labels are no classes.
    """
    pieces = [piece for u in seen.updates for piece in u.pieces]
    replicas = len({piece.called.replica for piece in pieces}) or 1
    per_update = [u for u in seen.updates if u.pieces]
    num_trials = sum(len(u.trials) for u in seen.updates)
    num_others = len(log.called) - len(seen.pieces) - num_trials
    num_skipped = sum(
        not each.is_finite and not each.replica for each in log.scaled
    )
    real = [piece.rows[piece.rows != PAD] for piece in seen.pieces]
    every = np.concatenate([np.zeros(0, int), *real])
    _, times = np.unique(every, return_counts=True)
    labels = [
        classes[each] for each in real if classes is not None and len(each)
    ]
    steps = [
        u.applied
        for u in seen.updates
        if len(u.applied.params) == len(replay.names)
    ]
    return Facts(
        use=Use(rows.num, rows.num - len(times), _span(times.tolist())),
        **_of_passes(passes(batches(seen, rows), rows)),
        updates=len(seen.updates),
        rows=_span([float(np.sum(u.rows != PAD)) for u in per_update]),
        microbatches=_span([len(u.pieces) / replicas for u in per_update]),
        replicas=replicas,
        calls=Calls(len(pieces), len(modes.inferring), num_others, num_skipped),
        padded=sum(int(np.sum(p.rows == PAD)) for p in pieces if p.is_known),
        labels=_span([len(np.unique(each)) for each in labels]),
        classes=0 if classes is None else len(np.unique(classes)),
        without_gradient=_without_gradient(replay, steps),
        unmoved=_unmoved(
            replay.names, [(s.params, s.params_after) for s in steps]
        ),
        frozen_moved=_frozen_moved(replay, pieces),
        rate=_rate(seen),
        written=tuple(u.number for u in written(seen.updates)),
        state=_state(replay, modes, pieces),
    )


def _span(numbers: Sequence[float]) -> Span | None:
    return Span(float(min(numbers)), float(max(numbers))) if numbers else None


def _of_passes(cut: list[Pass]) -> dict[str, Any]:
    pairs = [*pairwise(cut)]
    order = Order(
        passes=len(cut),
        same=sum(b.repeats(a) for a, b in pairs),
        same_batches=sum(a.batches == b.batches for a, b in pairs),
        as_data=sum(each.rows == sorted(each.rows) for each in cut),
        across=len(
            {each.again for each in cut if each.is_inside and each.again}
        ),
    )
    return {"passes": tuple(len(each.rows) for each in cut), "order": order}


def _without_gradient(replay: Port, steps: list[Applied]) -> tuple[str, ...]:
    """Return the names of the variables of which no step has a gradient."""
    every = zip(replay.names, *(step.grads for step in steps), strict=True)
    are_zero = {
        name: [g is None or not np.any(g) for g in own] for name, *own in every
    }
    return tuple(
        name for name, zeros in are_zero.items() if zeros and all(zeros)
    )


def _unmoved(
    names: Sequence[str], states: list[tuple[Arrays, Arrays]]
) -> tuple[str, ...]:
    """Return the names of values that are the same in both of all two states."""
    still = [
        all(same(one[i], two[i]) for one, two in states)
        for i in range(len(names))
    ]
    return tuple(
        name
        for name, is_so in zip(names, still, strict=True)
        if states and is_so
    )


def _frozen_moved(replay: Port, pieces: list[Piece]) -> tuple[str, ...]:
    names = replay.names_of_others
    states = [piece.called.buffers for piece in pieces]
    states = [each for each in states if len(each) == len(names)]
    still = _unmoved(names, [*pairwise(states)]) if len(states) > 1 else names
    return tuple(names[i] for i in replay.frozen() if names[i] not in still)


def _rate(seen: Windows) -> Rate | None:
    steps = [u.applied.learning_rate for u in seen.updates]
    rates = steps if seen.rule is None else seen.rule.rates
    known = [float(rate) for rate in rates if np.isfinite(rate)]
    return Rate(known[0], known[-1], min(known), max(known)) if known else None


def _state(replay: Port, modes: Modes, pieces: list[Piece]) -> Moved:
    """Compare the statistics and seeds after each pass in training mode that ran again
    with those before the next pass.
    """
    num = len(replay.are_seeds) - replay.num_recurrent
    kept = []
    whole = [piece for piece in pieces if piece.called.is_whole]
    for one, two in pairwise(whole):
        after = modes.moved.get(one.called.order, [])[:num]
        has_moved = bool(after) and not all_same(
            after, one.called.buffers[:num]
        )
        if has_moved and modes.of(one):
            kept.append(all_same(after, two.called.buffers[:num]))
    return Moved(len(kept), sum(kept))
