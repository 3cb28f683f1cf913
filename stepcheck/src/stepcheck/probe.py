"""A metamorphic test of one training step: changes of a batch that must not matter, and
changes that must.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from stepcheck.batches import Batch, Values, leaves, numbers, read
from stepcheck.errors import SpecificationError, attempt, message
from stepcheck.report.probed import (
    Cause,
    Effect,
    Outcome,
    ProbeReport,
    Variation,
)
from stepcheck.trace.measure import COARSE, FINE, tolerance

_DIGITS = {
    "float64": 52,
    "float32": 23,
    "float16": 10,
    "bfloat16": 7,
}  # of a mantissa
_TENTH = 0.1  # equal calls that move so much of what other values move are no rounding


def probe(
    update: Callable[..., Any],
    batch: Any,
    *,
    padding: Any = None,
    weights: Any = None,
    cuts: int | Sequence[int] | None = None,
    order: bool = True,
) -> ProbeReport:
    """Change a batch in ways that must not matter; report which move the new weights.

    No reference is needed, and no framework in particular. `update` is called a dozen
    times, with a copy of the batch each time, in its types and on its devices.

    Args:
        update: trains one step from the same beginning, without dropout, and returns
            the new weights: a model, or arrays, in dicts or lists. With `cuts` it is
            called as `update(batch, num_microbatches)`.
        batch: an array or tensor of shape (rows, ...), or dicts, lists or tuples of
            them: all that belongs to a row.
        padding: the places whose values must not matter: an array of booleans of shape
            (rows, places), or a dict of them by the names of the arrays to change.
        weights: of the rows (or places), with a 0: values of weight 0 must not matter.
        cuts: numbers of microbatches that must give one update: (1, 2, 4); 4 is (1, 4).
        order: whether any order of the rows must give the same update.

    >>> import numpy as np, stepcheck
    >>> x, y = np.arange(6.0), np.array([1.0, 0.0, 2.0, 5.0, 3.0, 1.0])
    >>> def update(batch):  # least squares of y = w x, one step from w = 0
    ...     return {"w": 0.1 * np.mean(batch["x"] * batch["y"], keepdims=True)}
    >>> stepcheck.probe(update, {"x": x, "y": y}).is_right
    True
    """
    rows = read(batch)
    counts = (1, cuts) if isinstance(cuts, int) else tuple(cuts or ())
    changes = [*_changes(rows, padding, weights)]
    if order:
        draw = np.random.default_rng(0)
        orders = np.arange(rows.num_rows)[::-1], draw.permutation(rows.num_rows)
        ways = [
            {name: v[at] for name, v in rows.values.items()} for at in orders
        ]
        changes.append(_Change(Variation.ORDER, (), ways))
    changes += [
        _Change(Variation.CUTS, (str(n),), [{}], (n,)) for n in counts[1:]
    ]
    made = {each.kind for each in changes}
    stated = {"padding": padding, "weights": weights, "cuts": cuts}
    missing = {
        name for name, given in stated.items() if given is not None
    } - made
    padded = {each.of[0] for each in changes if each.kind is Variation.PADDING}
    missing |= {*padding} - padded if isinstance(padding, Mapping) else set()
    if missing or made <= {Variation.VALUES} or 0 in counts:
        must = (
            "There must be a change: padding (of booleans) and weights (with a 0) leave out some "
            "values of an array of the batch, by its first axes; cuts are numbers, two or more."
        )
        received = (
            f"nothing to change for {', '.join(sorted(missing)) or 'the batch'}"
        )
        raise SpecificationError(message(must, received, "padding=ids == 0."))
    return _report(_Trained(update, rows, counts[:1]), changes)


class _Change(NamedTuple):
    """A change of a batch: other values in some arrays, or another number of cuts."""

    kind: Variation
    of: tuple[str, ...]
    ways: list[Values]
    cut: tuple[int, ...] = ()
    # an update may know the places by the values that they had
    is_marked: bool = False


def _changes(rows: Batch, padding: Any, weights: Any) -> Iterator[_Change]:
    """Yield the changes of values; an array whose values are all equal has none."""
    draw, none = np.random.default_rng(0), np.zeros(rows.num_rows, bool)
    stated = [] if weights is None else [numbers(weights)]
    pads = _fitted(rows, padding)
    zeros = _fitted(rows, stated[0] == 0 if stated else None)
    masks = [*pads.values(), *zeros.values()]
    told = [*masks, *(~mask for mask in masks), *stated]
    for name, values in rows.values.items():
        is_named = isinstance(padding, Mapping) and name in padding
        if any(np.array_equal(values, each) for each in told) and not is_named:
            continue
        pad, zero = pads.get(name, none), zeros.get(name, none)
        is_one = len(np.unique(values[pad])) == 1
        is_marked = (
            is_one and values[pad].flat[0] not in values[~pad] and not is_named
        )
        for kind, where, real, is_known in (
            (Variation.VALUES, ~pad, ~pad, False),
            (Variation.PADDING, pad, ~pad, is_marked),
            (Variation.WEIGHTS, zero, ~zero, False),
        ):
            others = [_others(values, where, real, draw) for _ in range(2)]
            ways = [{name: other} for other in others if other is not None]
            if ways:
                yield _Change(kind, (name,), ways, is_marked=is_known)


def _fitted(rows: Batch, stated: Any) -> dict[str, np.ndarray]:
    """Return the places that must not matter of the arrays that have them."""
    is_named = isinstance(stated, Mapping)
    by_name = stated if is_named else dict.fromkeys(rows.values, stated)
    given = {name: by_name.get(name) for name in rows.values}
    masks = {
        name: numbers(mask) for name, mask in given.items() if mask is not None
    }
    return {
        name: mask
        for name, mask in masks.items()
        if mask.dtype == bool
        and rows.values[name].shape[: mask.ndim] == mask.shape
    }


def _others(
    values: np.ndarray,
    where: np.ndarray,
    real: np.ndarray,
    draw: np.random.Generator,
) -> np.ndarray | None:
    """Return an array with other values somewhere, of its real places, if it has some."""
    pool, present = values[real], values[where]
    if not len(pool) or not len(present):
        return None
    chosen = present.copy()
    for _ in range(8):  # a draw may be the present value
        is_equal = (chosen == present).reshape(len(present), -1).all(axis=1)
        chosen[is_equal] = pool[draw.integers(len(pool), size=is_equal.sum())]
    changed = values.copy()
    changed[where] = chosen
    return None if np.array_equal(changed, values) else changed


class _Trained:
    """The new weights of an update of the batch, and how far those of others are apart."""

    def __init__(
        self, update: Callable[..., Any], rows: Batch, cut: tuple[int, ...]
    ):
        self._update = update
        self._rows = rows
        self._cut = cut
        self._base = self._weights({}, cut)
        self.names = [name for name, *_ in self._base]
        self.dtypes = [dtype for _, dtype, _ in self._base]
        lengths = np.array([_length(values) for *_, values in self._base])
        self.rounding = (
            2 * lengths * [2.0 ** -_DIGITS[dtype] for dtype in self.dtypes]
        )

    def _weights(
        self, values: Values, cut: tuple[int, ...]
    ) -> list[tuple[str, str, np.ndarray]]:
        """Return (name, dtype, values) of each parameter that the user's function gives."""
        found = self._update(self._rows.changed(values), *(cut or self._cut))
        if hasattr(found, "state_dict"):
            found = found.state_dict()
        elif hasattr(found, "get_weights"):
            found = found.weights
        elif isinstance(found, Iterator):
            found = [*found]
        return [
            (getattr(leaf, "path", name), _dtype(leaf), numbers(leaf))
            for name, leaf in leaves(found, "weights")
            if _dtype(leaf) in _DIGITS
        ]

    def moves(
        self, ways: list[Values], cut: tuple[int, ...] = ()
    ) -> np.ndarray:
        """Return how far each parameter moves at most from its value with the batch."""
        pairs = (
            zip(self._weights(v, cut), self._base, strict=True) for v in ways
        )
        apart = [
            [
                _length(np.subtract(a[-1], b[-1], dtype="float64"))
                for a, b in each
            ]
            for each in pairs
        ]
        return np.nan_to_num(np.max(apart, axis=0), nan=np.inf)


def _report(trained: _Trained, changes: list[_Change]) -> ProbeReport:
    """Try all changes, and judge them by the moves of equal calls and of other values."""
    noise = trained.moves([{}, {}])
    tried = [
        attempt(partial(trained.moves, each.ways, each.cut)) for each in changes
    ]
    by_values = [
        np.nan_to_num(moves, posinf=0)
        for each, (moves, _) in zip(changes, tried, strict=True)
        if each.kind is Variation.VALUES and moves is not None
    ]
    scale = np.max([np.zeros_like(noise), *by_values], axis=0)
    total, least = _length(scale), _length(trained.rounding)
    if not np.isfinite(least):
        return ProbeReport(cause=Cause.NOT_FINITE)
    if _length(noise) > max(_TENTH * total, least):
        return ProbeReport(cause=Cause.DRAWS)
    if _TENTH * total <= least:
        return ProbeReport(cause=Cause.UNSEEN)
    fits = tolerance(trained.dtypes).fits * total
    rounding = np.maximum(np.maximum(trained.rounding, 4 * noise), fits)
    is_precise = {*trained.dtypes} == {"float64"}
    by_sums = (
        FINE if is_precise else COARSE
    ).differs  # at a lower precision perhaps
    is_moving, effects = scale > rounding, []
    for change, (moves, error) in zip(changes, tried, strict=True):
        of = change.kind, change.of
        cause: Cause | None = Cause.REFUSED
        if moves is None:
            told = f"{type(error).__name__}: {error}"
            effects.append(
                Effect(*of, Outcome.UNJUDGED, cause=cause, told=told)
            )
            continue
        moved = [i for i in np.argsort(-moves) if moves[i] > rounding[i]]
        # Another sum touches all gradients: by rounding most parameters move by little.
        ratios = [0.0, *(moves[is_moving] / scale[is_moving])]
        is_sum = change.kind in (Variation.ORDER, Variation.CUTS)
        is_small = (
            is_sum and np.quantile(ratios, 0.5, method="higher") <= by_sums
        )
        doubt = (
            Cause.MARKS
            if change.is_marked
            else Cause.SMALL
            if is_small
            else None
        )
        cause = doubt if moved else None
        judged = Outcome.MOVES if moved else Outcome.SAME
        outcome = judged if cause is None else Outcome.UNJUDGED
        apart = tuple(
            (trained.names[i], float(moves[i]) / total) for i in moved
        )
        length = _length(moves) / total
        effects.append(Effect(*of, outcome, length, apart, len(moves), cause))
    return ProbeReport(tuple(effects), float(np.max(rounding)) / total)


def _dtype(leaf: Any) -> str:
    dtype = getattr(leaf, "dtype", "")
    return str(getattr(dtype, "name", dtype)).rpartition(".")[2]


def _length(vector: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(vector, "float64")))
