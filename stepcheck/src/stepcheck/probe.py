"""A metamorphic test of one training step: changes that must not matter, and changes
that must.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stepcheck.batches import Batch, leaves, numbers, read
from stepcheck.errors import SpecificationError, attempt, message
from stepcheck.report.probed import Cause, Effect, Outcome, ProbeReport, Variation
from stepcheck.trace.measure import COARSE, FINE, tolerance
from stepcheck.variations import Plan, Values, fitted, numbers_of_cuts

_DIGITS = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}  # of a mantissa
_SUMS = Variation.ORDER, Variation.CUTS  # which add up in another order
_TENTH = (
    0.1  # an equal call that moves this part of what other values move is no rounding
)


def probe(
    update: Callable[..., Any],
    batch: Any,
    *,
    padding: Any = None,
    weights: Any = None,
    cuts: int | Sequence[int] | None = None,
    order: bool = True,
) -> ProbeReport:
    """Change a batch in ways that must not matter, and report which of them move the
    new weights.

    No reference is needed, and no framework in particular. `update` is called about ten
    times, with a copy of the batch each time, in its types and on its devices. Switch
    dropout off in it.

    Args:
        update: trains one step from the same beginning and returns the new weights: a
            model of Keras or PyTorch, or arrays, in dicts or lists. With `cuts` it is
            called as `update(batch, num_microbatches)`.
        batch: an array or tensor of shape (rows, ...), or dicts, lists, tuples or
            dataclasses of them. `update` takes all that belongs to a row from it.
        padding: the places whose values must not matter: an array of booleans of shape
            (rows, places), True where padding; a dict of them by the names of the
            leaves to change; or a function of the batch that returns one.
        weights: of the rows (or places), an array of the batch or a function of it.
            Rows of weight 0 must not matter.
        cuts: numbers of microbatches that must give the same update, such as (1, 2, 4);
            4 is (1, 4).
        order: whether any order of the rows must give the same update.

    Returns:
        A `ProbeReport`: print it, call its `require()` in a test, or read its
            `effects`.

    Raises:
        SpecificationError: an argument is not valid; nothing has run. Or `update`
            returned no weights.

    >>> import numpy as np, stepcheck
    >>> x, y = np.arange(6.0), np.array([1.0, 0.0, 2.0, 5.0, 3.0, 1.0])
    >>> def update(batch):  # least squares of y = w x, one step from w = 0
    ...     return {"w": 0.1 * np.mean(batch["x"] * batch["y"], keepdims=True)}
    >>> stepcheck.probe(update, {"x": x, "y": y}).is_right
    True
    """
    rows, num_parts = read(batch), numbers_of_cuts(cuts)
    plan = Plan(rows, padding, weights)
    if not (order or plan.pads or num_parts) and plan.weights is None:
        must = "At least one change must be asked for."
        raise SpecificationError(
            message(must, "order=False alone", "padding=, weights= or cuts=.")
        )
    tried = _Experiment(update, rows, num_parts[:1])
    for name in plan.content:
        tried.add(Variation.VALUE, (name,), plan.other_rows(name, first_alone=True))
        tried.add(Variation.VALUES, (name,), plan.other_rows(name, first_alone=False))
    if order and rows.num_rows > 1:
        tried.add(Variation.ORDER, (), *plan.orders())
    for name in plan.padded:
        mask = plan.pads[name]
        changed = rows.others(name, mask, ~mask, plan.draw)
        tried.add(Variation.PADDING, (name,), changed, told=plan.marks(name))
    if plan.weights is not None:
        _try_weights(tried, plan, plan.weights)
    for num in num_parts[1:]:
        tried.add(Variation.CUTS, (str(num),), {}, cut=(num,))
    return tried.report()


def _try_weights(tried: "_Experiment", plan: Plan, weights: np.ndarray) -> None:
    """Change the rows of weight 0, and add one; the last row gets this weight if none
    has it.
    """
    rows, zeroed = plan.rows, weights.copy()
    if np.all(weights != 0):
        zeroed[-1] = 0
    begin: Values = dict.fromkeys(plan.of_weights, zeroed)
    for name in plan.content:
        where = fitted(zeroed == 0, rows.values[name])
        if where.any():
            changed = rows.others(name, where, ~where, plan.draw)
            changed = None if changed is None else {**begin, **changed}
            tried.add(Variation.WEIGHTS, (name,), changed, begin=begin)
    if plan.of_weights:
        more = {
            name: np.concatenate([old, old[:1]]) for name, old in rows.values.items()
        }
        for name in plan.of_weights:
            more[name][-1] = 0
        tried.add(Variation.ROW, (), more)


@dataclass(frozen=True)
class _Tried:
    change: Variation
    of: tuple[str, ...]
    moves: np.ndarray | None = None
    cause: Cause | None = None
    told: tuple[str, ...] = ()


class _Experiment:
    """The calls of an update, and how far each parameter moved."""

    def __init__(self, update: Callable[..., Any], rows: Batch, cut: tuple[int, ...]):
        self._update, self._rows, self._cut = update, rows, cut
        result = self._result({}, cut)
        self._dtypes = [_dtype(leaf) for leaf in result.values()]
        self._base = {name: numbers(name, leaf) for name, leaf in result.items()}
        if not self._base:
            must = "update must return the new weights: a model, or arrays of floats."
            raise SpecificationError(
                message(must, "no such array", "return model.state_dict().")
            )
        self._again = self._moves({})
        self._tried: list[_Tried] = []

    def add(
        self,
        change: Variation,
        of: tuple[str, ...],
        *changed: Values | None,
        cut: tuple[int, ...] = (),
        begin: Values | None = None,
        told: tuple[str, ...] = (),
    ) -> None:
        """Keep how far the weights move by changed values, from those with the values
        `begin`.
        """
        known = [values for values in changed if values is not None]
        if not known:
            self._tried.append(_Tried(change, of, cause=Cause.CONSTANT))
            return
        moves, error = attempt(
            lambda: np.max(
                [self._moves(values, cut, begin) for values in known], axis=0
            )
        )
        if error is not None:
            first_line = f"{type(error).__name__}: {error}".splitlines()[0]
            self._tried.append(
                _Tried(change, of, cause=Cause.REFUSED, told=(first_line,))
            )
        else:
            self._tried.append(_Tried(change, of, moves, told=told))

    def report(self) -> ProbeReport:
        """Judge all changes, once it is known how far equal calls are apart."""
        last = self._moves({})
        noise = np.maximum(self._again, last)
        sizes = np.array(
            [np.linalg.norm(values) for values in map(_wide, self._base.values())]
        )
        stored = 2 * sizes * [2.0 ** -_DIGITS[each] for each in self._dtypes]
        scale = self._scale()
        total, least = _length(scale), _length(stored)
        if not np.isfinite(least):
            return ProbeReport(cause=Cause.NOT_FINITE)
        if _length(noise) > max(_TENTH * total, least):
            is_growing = _length(last) > 2 * _length(self._again)
            return ProbeReport(cause=Cause.DRIFTS if is_growing else Cause.DRAWS)
        if _TENTH * total <= least:
            return ProbeReport(cause=Cause.UNSEEN)
        allowed = tolerance(self._dtypes)
        rounding = np.max(
            [stored, 4 * noise, np.full_like(noise, allowed.fits * total)], axis=0
        )
        is_precise = {*self._dtypes} == {"float64"}
        by_sums = FINE.differs if is_precise else COARSE.differs
        limits = _Limits(tuple(self._base), scale, rounding, total, by_sums)
        effects = tuple(map(limits.judge, self._tried))
        return ProbeReport(effects, float(np.max(rounding)) / total)

    def _scale(self) -> np.ndarray:
        """Return how far each parameter moves at most by other real values."""
        seen = [
            each.moves
            for each in self._tried
            if each.moves is not None
            and each.change in (Variation.VALUE, Variation.VALUES)
        ]
        finite = [moves for moves in seen if np.all(np.isfinite(moves))]
        return np.max([np.zeros(len(self._base)), *finite], axis=0)

    def _result(self, values: Values, cut: tuple[int, ...]) -> dict[str, Any]:
        """Return the new weights of an update, by name, as the user's function returns
        them.
        """
        found = self._update(self._rows.changed(values), *(cut or self._cut))
        if hasattr(found, "state_dict"):
            found = found.state_dict()
        elif hasattr(found, "get_weights"):
            found = found.weights
        elif isinstance(found, Iterator):
            found = [*found]
        named: dict[str, Any] = {}
        for name, leaf in leaves(found, "weights"):
            path = getattr(leaf, "path", name)  # of a variable of Keras
            if _dtype(leaf) in _DIGITS:
                named[name if path in named else path] = leaf
        return named

    def _moves(
        self, values: Values, cut: tuple[int, ...] = (), begin: Values | None = None
    ) -> np.ndarray:
        """Return how far each parameter is from its value with the batch, or with
        `begin`.
        """
        base = self._weights(begin) if begin else self._base
        weights = self._weights(values, cut)
        if {n: w.shape for n, w in weights.items()} != {
            n: w.shape for n, w in base.items()
        }:
            must = (
                "update must return the same weights, by name and shape, in each call."
            )
            raise SpecificationError(
                message(must, ", ".join(weights), "return those of one model.")
            )
        apart = [
            np.linalg.norm(_wide(weights[name]) - _wide(base[name])) for name in base
        ]
        return np.nan_to_num(apart, nan=np.inf)

    def _weights(
        self, values: Values, cut: tuple[int, ...] = ()
    ) -> dict[str, np.ndarray]:
        return {
            name: numbers(name, leaf)
            for name, leaf in self._result(values, cut).items()
        }


@dataclass(frozen=True)
class _Limits:
    """How far parameters move by other values, and by rounding."""

    names: tuple[str, ...]
    scale: np.ndarray
    rounding: np.ndarray
    total: float
    by_sums: (
        float  # as far as other sums move most parameters, at a lower precision perhaps
    )

    def judge(self, tried: _Tried) -> Effect:
        """Return the effect of a change."""
        change, of, moves, told = tried.change, tried.of, tried.moves, tried.told
        if moves is None:
            return Effect(change, of, Outcome.UNJUDGED, cause=tried.cause, told=told)
        apart, num = _length(moves) / self.total, len(self.names)
        farthest = np.argsort(-moves, kind="stable")
        moved = [i for i in farthest if moves[i] > self.rounding[i]]
        parameters = tuple((self.names[i], float(moves[i]) / self.total) for i in moved)
        if not moved:
            return Effect(change, of, Outcome.SAME, apart)
        cause = None
        if change is Variation.PADDING and told:
            cause = Cause.MARKS
        elif change in _SUMS and self._is_like_rounding(moves):
            cause = Cause.SMALL
        outcome = Outcome.MOVES if cause is None else Outcome.UNJUDGED
        return Effect(change, of, outcome, apart, parameters, num, cause, told)

    def _is_like_rounding(self, moves: np.ndarray) -> bool:
        """Whether most parameters move by little or nothing: another sum touches all
        gradients.
        """
        is_moving = self.scale > self.rounding
        ratios = moves[is_moving] / self.scale[is_moving]
        return float(np.quantile(ratios, 0.5, method="lower")) <= self.by_sums


def _dtype(leaf: Any) -> str:
    return str(
        getattr(getattr(leaf, "dtype", ""), "name", getattr(leaf, "dtype", ""))
    ).rpartition(".")[2]


def _wide(values: np.ndarray) -> np.ndarray:
    return np.asarray(values, "float64")


def _length(vector: np.ndarray) -> float:
    return float(np.linalg.norm(vector))
