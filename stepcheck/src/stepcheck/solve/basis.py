"""The parts of the gradient of one update, counts and sets of rows for their coefficients, and solutions by row."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from stepcheck import tree
from stepcheck.port import OneLoss
from stepcheck.solve.evidence import AtOutputs, Evidence, narrowed
from stepcheck.solve.forms import BASE, Form
from stepcheck.solve.ratios import Counts, least
from stepcheck.trace.windows import PAD, Piece
from stepcheck.values import NOTHING, Changed, Count, Counted, Group, Known, Rows

MOST_ROWS = 64  # rows of an update that get a coefficient each
_OF_ROWS = (
    Known.WEIGHT_OF_MICROBATCH,
    Known.WEIGHT_OF_REPLICA,
    Known.WEIGHT_OF_ROW,
    Known.SAMPLE_WEIGHT_OF_ROW,
    Known.NUMBER_OF_BATCH,
)
_NEARLY = (  # counts that are mistaken by one, or come under a root
    Known.WEIGHT_OF_UPDATE,
    Known.ROWS_OF_UPDATE,
    Known.SUM_OF_SAMPLE_WEIGHTS,
    Known.MICROBATCHES,
)
_NTH = 2, 3, 4
_OF_REPLICAS = Known.REPLICAS, Known.WEIGHT_OF_REPLICA


class Basis:
    """One update: the gradients of forms of its loss, by piece, row and term.

    Args:
        most_rows: of any piece of the updates.

    Attributes:
        unit: the right coefficient of a row, in the first term.
        is_small: whether a gradient for each row is cheap.
        before: the update before, if the same parameters were handed over.
    """

    def __init__(self, e: Evidence, most_rows: int):
        self.e, self.most_rows = e, most_rows
        self.sizes = [*e.update.sizes]
        self.starts = np.cumsum([0, *self.sizes])[:-1]
        self.before = (
            e.before if e.before is not None and len(e.before.handed) == len(e.handed) else None
        )
        self.has_penalty = e.meant.has_penalty and bool(np.any(e.penalty))
        first = e.terms[0]
        self.is_divided = bool(first.divided[0])
        self.is_small = len(e.handed) <= NUM_SOLVED and sum(self.sizes) <= MOST_ROWS
        self.unit = 1 / e.whole[0] if self.is_divided and e.whole[0] else 1.0
        self._made: dict[Any, Any] = {}

    @cached_property
    def counts(self) -> Counts:
        """Known counts, one number for each row: numerators and denominators of coefficients."""
        weights = np.concatenate([w[0] for w in self.e.weights])
        num = sum(self.sizes)
        whole = self._of_update(weights)
        found: Counts = {known: np.full(num, float(number)) for known, number in whole.items()}
        by_piece = self._by_piece(weights)
        found |= {k: np.repeat(np.asarray(own, float), self.sizes) for k, own in by_piece.items()}
        found[Known.WEIGHT_OF_ROW] = weights
        found[Known.SAMPLE_WEIGHT_OF_ROW] = self._sample_weights()
        if self.has_replicas:  # of equal counts, the first gives its name
            return dict(sorted(found.items(), key=lambda each: each[0] not in _OF_REPLICAS))
        return found

    def _of_update(self, weights: np.ndarray) -> dict[Counted, float]:
        e, meant, pieces = self.e, self.e.meant, self.e.update.pieces
        assert meant.full is not None
        loss = sum(float(terms.values[0].sum()) for terms in e.terms)
        found: dict[Counted, float] = {
            Known.WEIGHT_OF_UPDATE: e.whole[0],
            Known.ROWS_OF_UPDATE: sum(self.sizes) - sum(e.pads),
            Known.ROWS_WITH_A_WEIGHT: int(np.count_nonzero(weights)),
            Known.ROWS_WITH_PADDING: sum(self.sizes),
            Known.PLACES_OF_UPDATE: e.num_places,
            Known.SUM_OF_SAMPLE_WEIGHTS: self._sample_weights().sum(),
            Known.MICROBATCHES: len(pieces),
            Known.MICROBATCHES_OF_FULL_WINDOW: meant.usual,
            Known.REPLICAS: e.num_replicas,
            Known.WEIGHT_OF_FULL_BATCH: meant.full[0],
            Known.ROWS_OF_DATA: meant.replay.num_rows,
            Known.NUMBER_OF_UPDATE: e.update.number,
            Known.WEIGHT_OF_LAST_UPDATE: (self.before or e).whole[0],
            Known.LOSS: loss / (e.whole[0] if self.is_divided else 1.0),
        }
        for known in _NEARLY if meant.usual > 1 else _NEARLY[:-1]:
            number = found[known]
            found[known, Changed.PLUS_ONE] = number + 1
            found[known, Changed.MINUS_ONE] = number - 1
            found[known, Changed.ROOT] = abs(number) ** 0.5
        found[Known.LOSS, Changed.ROOT] = abs(found[Known.LOSS]) ** 0.5
        return found

    def _by_piece(self, weights: np.ndarray) -> dict[Known, Sequence[float] | np.ndarray]:
        e, pieces = self.e, self.e.update.pieces
        own = np.array([part.sum() for part in self.cut(weights)])
        replica = np.array([piece.called.replica for piece in pieces])
        return {
            Known.WEIGHT_OF_MICROBATCH: own,
            Known.ROWS_OF_MICROBATCH: np.array(self.sizes) - e.pads,
            Known.WEIGHT_OF_REPLICA: [own[replica == each].sum() for each in replica],
            Known.NUMBER_OF_BATCH: [1 + e.place(piece)[1] // self.most_rows for piece in pieces],
        }

    @property
    def has_replicas(self) -> bool:
        """Whether each piece is a replica's."""
        return 1 < len(self.sizes) == self.e.num_replicas

    @cached_property
    def sets(self) -> dict[Rows, np.ndarray]:
        """Which rows are in a set of rows."""
        num = len(self.sizes)
        piece = np.repeat(np.arange(num), self.sizes)
        place = np.concatenate([np.arange(size) for size in self.sizes])
        by_piece = [self.e.place(each)[0] for each in self.e.update.pieces]
        passes = np.repeat(by_piece, self.sizes)
        last = np.repeat(self.sizes, self.sizes) - 1
        found = {
            Rows(Group.LAST_MICROBATCH): piece == num - 1,
            Rows(Group.FIRST_MICROBATCH): piece == 0,
            **{Rows(Group.MICROBATCH, (i + 1,)): piece == i for i in range(1, 4)},
            Rows(Group.MICROBATCHES_OF_LAST_PASS): passes == passes[-1],
            Rows(Group.FIRST_ROW_OF_BATCH): place == 0,
            Rows(Group.LAST_ROW_OF_BATCH): place == last,
            Rows(Group.FIRST_HALF_OF_BATCH): place < (last + 1) // 2,
        }
        for num, i in ((n, i) for n in _NTH for i in range(n)):
            found[Rows(Group.EACH_NTH_ROW, (num, i + 1))] = place % num == i
        return found

    @cached_property
    def shapes(self) -> dict[Count, np.ndarray]:
        """Factors of the rows: a count, 1 / a count, and 1 for a set of rows or for all others."""
        found: dict[Count, np.ndarray] = {}
        for known in _OF_ROWS:
            column = self.counts[known]
            is_known = column > 0
            inverse = 1 / np.where(is_known, column, 1.0)
            found[Count(above=(known,))] = np.where(is_known, column, 0.0)
            found[Count(below=(known,))] = np.where(is_known, inverse, 0.0)
        for rows, own in self.sets.items():
            found[Count(rows=rows, others=NOTHING)] = own.astype(float)
            found[replace(NOTHING, rows=rows, others=Count())] = (~own).astype(float)
        return found

    def cut(self, values: np.ndarray) -> list[np.ndarray]:
        """Cut numbers of all rows into pieces."""
        return np.split(values, self.starts[1:])

    def _sample_weights(self) -> np.ndarray:
        own = self.e.meant.replay.data[2]
        rows = self.e.update.rows
        if own is None or not hasattr(own, "shape"):
            return np.where(rows == PAD, 0.0, 1.0)
        return np.where(rows == PAD, 0.0, np.asarray(own)[rows].reshape(len(rows), -1).sum(axis=1))

    def parts(self, form: Form = BASE) -> list[np.ndarray]:
        """Return the part of each piece in the gradient, with the right factors of its rows."""
        if form == BASE:
            return self.e.parts
        return self._kept(form, lambda: [self._part(form, i, 1.0) for i in range(len(self.sizes))])

    def used(self, form: Form) -> list[np.ndarray]:
        """Return the parts of the pieces that are no padding as a whole."""
        return [part for part in self.parts(form) if np.any(part)]

    def at(self, form: Form) -> np.ndarray:
        """Return the first row of each of them."""
        return self.starts[[bool(np.any(part)) for part in self.parts(form)]]

    def by_row(self, at: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Return by row the numbers of the pieces that begin there; 0 for the others."""
        by_piece = np.zeros(len(self.sizes))
        by_piece[np.searchsorted(self.starts, at)] = numbers
        return np.repeat(by_piece, self.sizes)

    def whole(self, form: Form = BASE) -> np.ndarray:
        """Return the gradient of the data."""
        return sum(self.parts(form), np.zeros_like(self.e.handed))

    def shaped(self, form: Form, by_row: np.ndarray) -> np.ndarray:
        """Return the same with a factor for each row."""
        if self.is_small:  # many shapes are sums of few rows
            return by_row @ self._kept(("rows", form), lambda: self._by_row(form))
        parts = (self._part(form, i, factors) for i, factors in enumerate(self.cut(by_row)))
        return self._kept(
            (form, by_row.tobytes()), lambda: sum(parts, np.zeros_like(self.e.handed))
        )

    def _by_row(self, form: Form) -> np.ndarray:
        if form == BASE:
            return np.stack(self.rows())
        ones = [(i, one) for i, size in enumerate(self.sizes) for one in np.eye(size)]
        return np.stack([self._part(form, i, one) for i, one in ones])

    def of_term(self, i: int) -> np.ndarray:
        """Return the part of one term."""
        chosen = (np.arange(len(self.e.whole)) == i)[:, None]
        return sum(
            (self._part(BASE, j, chosen) for j in range(len(self.sizes))),
            np.zeros_like(self.e.handed),
        )

    def rows(self) -> list[np.ndarray]:
        """Return the part of each row, of all terms."""
        pairs = zip(self.e.rows, self.e.factors, strict=True)
        parts = (
            np.einsum("tr,trp->rp", factors, rows.reshape(*factors.shape, -1))
            for rows, factors in pairs
        )
        return self._kept("rows", lambda: [row for part in parts for row in part])

    def forget(self) -> None:
        """Free the results of forms: in a large model each takes as much memory as its gradient."""
        self._made = {}

    def _kept(self, key: Any, made: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = made()
        return self._made[key]

    def _part(self, form: Form, i: int, by_row: Any) -> np.ndarray:
        e, piece = self.e, self.e.update.pieces[i]
        if form.is_of_pairs:
            return self._of_pairs(form, i, by_row)
        weights = self._weights(form)
        factors = e.counted(weights[i], np.sum([w.sum(axis=1) for w in weights], axis=0)) * by_row
        batch, objective = self._batch(form, piece), form.objective or e.meant.objective
        if not form.is_at_outputs:
            return e.gradient(i, factors, form.objective, batch=batch)
        made = partial(e.derivative, piece, objective, batch, form.outputs)
        derivative = self._kept(("derivative", form, i), made)
        chosen = derivative * factors[0].reshape(-1, *(1 for _ in derivative.shape[1:]))
        return e.pulled(i, chosen)

    def _of_pairs(self, form: Form, i: int, by_row: Any) -> np.ndarray:
        e, piece = self.e, self.e.update.pieces[i]
        num, factors = len(piece.rows), e.factors[i] * by_row
        moved = partial(e.meant.replay.batch, piece, has_their_weights=form.has_their_weights)
        batches = (moved(shift=shift) for shift in range(num))
        return sum(
            (e.gradient(i, factors / num, batch=batch) for batch in batches),
            np.zeros_like(e.handed),
        )

    def _batch(self, form: Form, piece: Piece) -> tuple:
        replay = self.e.meant.replay
        rows = (
            None if form.rows is None else np.where(piece.rows == PAD, 0, form.rows(self.e, piece))
        )
        x, labels, *weight = replay.batch(piece, labels=rows)
        labels = labels if form.labels is None else tree.map_leaves(form.labels, labels)
        if (own := form.weights) is not None and weight:
            weight = [
                tree.map_leaves(
                    lambda leaf: replay.as_wide(own(self.e, piece, leaf), piece), replay.data[2]
                )
            ]
        return x, labels, *weight

    def _weights(self, form: Form) -> list[np.ndarray]:
        """Return the rows' weights in a form, by piece (terms, rows)."""
        e, meant = self.e, self.e.meant
        if form.has_pads:
            return [terms.weights for terms in e.terms]
        if form.is_at_outputs and form.weights is None:
            return e.weights
        is_of_meant = form.objective is None or (form.is_at_outputs and form.labels is None)
        objective = meant.objective if is_of_meant else form.objective

        def found() -> list[np.ndarray]:
            terms = [
                e.terms_of(p, objective, self._batch(form, p)).weights for p in e.update.pieces
            ]
            return [
                np.where(p.rows[None] == PAD, 0.0, w)
                for p, w in zip(e.update.pieces, terms, strict=True)
            ]

        return self._kept(("weights", form), found)


NUM_FREE = 64  # rows whose factors are solved for
NUM_SOLVED = 8_000  # numbers of a gradient from which they are solved
_NUM_UNROLLED = 1000  # calls of a function that returns a single number, in one program
NUM_PAIRS = 2_000_000  # numbers of the outputs' derivatives for all labels
_NEAR, _FEW_FIT = 1e-2, 0.1


def factors_of_rows(e: Evidence) -> tuple[np.ndarray, np.ndarray] | None:
    """Return (the factors of the rows that make the handed gradient, the right ones), if some do."""
    used = np.flatnonzero(np.concatenate([w.reshape(-1) for w in e.weights]))
    if not 0 < len(used) <= min(NUM_FREE, len(e.handed) // 2):
        return None
    rows = np.concatenate(e.rows)[used]
    some = np.random.default_rng(0).permutation(rows.shape[1])[:NUM_SOLVED]
    solved = least(list(rows[:, some].astype("float64")), (e.handed - e.penalty)[some])[0]
    if e.apart(solved.astype("float32") @ rows + e.penalty) > e.meant.replay.tolerance.fits:
        return None
    return solved, np.concatenate([factors.reshape(-1) for factors in e.factors])[used]


def derivatives(e: Evidence) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the derivatives by the outputs of the loop's loss and of the meant one; None if another part counts."""
    found = [e] if isinstance(e, AtOutputs) else narrowed([e])
    return None if found is None else (found[0].handed, found[0].reference)


def are_too_many(objective: OneLoss, out: np.ndarray, num: int) -> bool:
    """Whether it takes too long to compute the derivatives by an output with each of many labels."""
    is_unrolled = getattr(getattr(objective, "loss", None), "is_unrolled", False)
    return out.size * num > NUM_PAIRS or (is_unrolled and len(out) * num > _NUM_UNROLLED)


def labels_of_others(e: Evidence) -> list[np.ndarray] | None:
    """Return, by piece, rows whose labels make the gradient if each row may have any; None if none do."""
    replay, objective = e.meant.replay, e.meant.objective
    labels = replay.data[1]
    outputs = [piece.called.outputs for piece in e.update.pieces]
    is_by_row = replay.by_pass is None and replay.data[2] is None and hasattr(labels, "shape")
    if not isinstance(objective, OneLoss) or not is_by_row:
        return None
    labels = np.asarray(labels)
    _, first = np.unique(labels.reshape(len(labels), -1), axis=0, return_index=True)
    if any(
        len(leaves) != 1 or are_too_many(objective, leaves[0], len(first)) for leaves in outputs
    ):
        return None
    if (solved := derivatives(e)) is None:
        return None
    found, start = [], 0
    for piece, (leaf,), factors in zip(e.update.pieces, outputs, e.factors, strict=True):
        had = solved[0][start : start + leaf.size].reshape(len(leaf), 1, -1)
        start += leaf.size
        given = np.repeat(leaf, len(first), axis=0), np.concatenate([labels[first]] * len(leaf))
        could = (
            replay.derivative(objective, *given).reshape(len(leaf), len(first), -1)
            * factors[0][:, None, None]
        )
        apart = np.linalg.norm(had - could, axis=2)
        fits = apart <= _NEAR * np.linalg.norm(had, axis=2).max()
        most = max(1, _FEW_FIT * len(first))  # a mere sign has the labels of half the rows
        if not np.all(fits.any(axis=1)) or np.median(fits.sum(axis=1)) > most:
            return None
        found.append(np.where(piece.rows == PAD, 0, first[np.argmin(apart, axis=1)]))
    return None if _is_rule(e.update.rows, np.concatenate(found), labels) else found


def _is_rule(rows: np.ndarray, others: np.ndarray, labels: np.ndarray) -> bool:
    """Whether classes always have the label of one other: then classes are renamed, and no rows mixed."""
    told: dict[bytes, set[bytes]] = {}
    for row, other in zip(rows, others, strict=True):
        told.setdefault(labels[row].tobytes(), set()).add(labels[other].tobytes())
    is_one = len(told) <= len(rows) // 2 and all(len(each) == 1 for each in told.values())
    return is_one and any(own not in each for own, each in told.items())
