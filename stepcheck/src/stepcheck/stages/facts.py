"""The facts of a loop: numbers and names that need no judgement."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from stepcheck.port import Port
from stepcheck.solve.modes import Modes
from stepcheck.stages.rows import Pass, batches, passes
from stepcheck.trace.log import Log
from stepcheck.trace.measure import all_same, in_part, same
from stepcheck.trace.windows import PAD, Piece, Rows, Update, Windows


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
        written: updates that begin with other weights than the update before ended
            with.
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
    num_others = (
        len(log.called) - len(seen.pieces) - sum(len(u.trials) for u in seen.updates)
    )
    num_skipped = sum(not each.is_finite and not each.replica for each in log.scaled)
    per_update = [u for u in seen.updates if u.pieces]
    cut = passes(batches(seen, rows), rows)
    labels = (
        []
        if classes is None
        else [_num_labels(piece, classes) for piece in seen.pieces]
    )
    whole = [u for u in seen.updates if u.applied.is_whole]
    return Facts(
        use=_use(seen, rows),
        passes=tuple(len(each.rows) for each in cut),
        order=_order(cut),
        updates=len(seen.updates),
        rows=_span(float(np.sum(u.rows != PAD)) for u in per_update),
        microbatches=_span(len(u.pieces) / replicas for u in per_update),
        replicas=replicas,
        calls=Calls(len(pieces), len(modes.inferring), num_others, num_skipped),
        padded=sum(
            int(np.sum(piece.rows == PAD)) for piece in pieces if piece.is_known
        ),
        labels=_span(num for num in labels if num),
        classes=0 if classes is None else len(np.unique(classes)),
        without_gradient=_named(replay, whole, _has_no_gradient),
        unmoved=_named(replay, whole, _has_not_moved),
        frozen_moved=_frozen_moved(replay, pieces),
        rate=_rate(seen),
        written=tuple(u.number for u in written(seen.updates)),
        state=_state(replay, modes, pieces),
    )


def _span(numbers: Iterable[float]) -> Span | None:
    found = list(numbers)
    return Span(float(min(found)), float(max(found))) if found else None


def _use(seen: Windows, rows: Rows) -> Use:
    used = [piece.rows[piece.rows != PAD] for piece in seen.pieces]
    numbers, times = np.unique(
        np.concatenate([np.zeros(0, int), *used]), return_counts=True
    )
    return Use(rows.num, rows.num - len(numbers), _span(times.tolist()))


def _order(cut: list[Pass]) -> Order:
    pairs = [*pairwise(cut)]
    return Order(
        passes=len(cut),
        same=sum(b.repeats(a) for a, b in pairs),
        same_batches=sum(a.batches == b.batches for a, b in pairs),
        as_data=sum(each.rows == sorted(each.rows) for each in cut),
        across=len({each.again for each in cut if each.is_inside and each.again}),
    )


def _num_labels(piece: Piece, classes: np.ndarray) -> int:
    return len(np.unique(classes[piece.rows[piece.rows != PAD]]))


def _named(replay: Port, whole: list[Update], has_it: Callable) -> tuple[str, ...]:
    """Return the names of the trainable variables of which that is so in all updates."""
    num = len(replay.names)
    own = [u for u in whole if len(u.applied.params) == len(u.applied.grads) == num]
    chosen = [i for i in range(num) if own and all(has_it(u, i) for u in own)]
    return tuple(replay.names[i] for i in chosen)


def _has_no_gradient(update: Update, i: int) -> bool:
    grad = update.applied.grads[i]
    return grad is None or not np.any(grad)


def _has_not_moved(update: Update, i: int) -> bool:
    return same(update.applied.params[i], update.applied.params_after[i])


def _frozen_moved(replay: Port, pieces: list[Piece]) -> tuple[str, ...]:
    states = [piece.called.buffers for piece in pieces if piece.called.is_whole]
    frozen = [i for i in replay.frozen() if states and i < len(states[0])]
    moved = [
        i for i in frozen if not all(same(a[i], b[i]) for a, b in pairwise(states))
    ]
    return tuple(replay.names_of_others[i] for i in moved)


def _rate(seen: Windows) -> Rate | None:
    steps = [u.applied.learning_rate for u in seen.updates]
    rates = steps if seen.rule is None else seen.rule.rates
    known = [float(rate) for rate in rates if np.isfinite(rate)]
    return Rate(known[0], known[-1], min(known), max(known)) if known else None


def written(updates: list[Update]) -> list[Update]:
    """Return the updates that begin with other weights than the update before them
    ended with.

    Variables that this one did not move are another's: a step of another process, or
    none.
    """
    found = []
    for before, update in pairwise([u for u in updates if u.applied.is_whole]):
        step = before.applied
        states = step.params, step.params_after, _first_weights(update)
        is_next = (
            update.follows(before) and len({*map(len, states)}) == 1
        )  # of parameters
        parts = zip(*map(in_part, states), strict=False)
        moved = [(made, new) for old, made, new in parts if not same(old, made)]
        if is_next and not all(same(made, new) for made, new in moved):
            found.append(update)
    return found


def _first_weights(update: Update) -> list[np.ndarray]:
    """Return the weights of an update's first forward pass, or those before its step."""
    first = next(iter([*update.trials, *update.pieces]), None)
    if first is None or not first.called.is_whole:
        return update.applied.params
    return first.called.params


def _state(replay: Port, modes: Modes, pieces: list[Piece]) -> Moved:
    """Compare the statistics and seeds after each pass that ran again with those before
    the next pass.
    """
    num = len(replay.are_seeds) - replay.num_recurrent
    moving = kept = 0
    for one, two in pairwise([piece for piece in pieces if piece.called.is_whole]):
        after = modes.moved.get(one.called.order, [])[:num]
        if after and not all_same(after, one.called.buffers[:num]):
            moving += 1
            kept += all_same(after, two.called.buffers[:num])
    return Moved(moving, kept)
