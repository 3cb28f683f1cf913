"""What one update handed to its optimizer, what it should have, and what both are made of."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from wholestep.audit import weightings
from wholestep.audit.found import distance
from wholestep.audit.modes import Modes
from wholestep.audit.replay import Replay
from wholestep.audit.weightings import Divisors, Weighting, Window
from wholestep.audit.windows import PAD, Piece, Update
from wholestep.model.objective import Objective
from wholestep.tree import Tree

NUM_DRAWN = 4  # rows whose gradients stand for all rows' where their size is asked for
_NEARLY = 1e-3


class Meant:
    """How the gradients of updates are computed: a replay, the objective that is meant, and the modes that were seen.

    `place` is that of `Windows`; `is_scaled`: whether an optimizer scales the loss. `optimizer`: the one whose steps
    can be made once more, if it is known.

    `largest` and `full` are of the whole loop, see `Window`, and so is `has_penalty`, whether the model has losses of
    its own; valid once all updates have been looked at.
    """

    def __init__(
        self,
        replay: Replay,
        objective: Objective,
        modes: Modes,
        place: dict[int, tuple[int, int]],
        is_scaled: bool,
        optimizer: Any = None,
    ):
        self.replay, self.objective, self.modes, self.optimizer = replay, objective, modes, optimizer
        self.place, self.is_scaled = place, is_scaled
        self.largest, self.has_penalty = 1, False
        self.full: np.ndarray | None = None


class Evidence:
    """One update: the gradient as handed over beside those of the reference and of its changes.

    All vectors hold the parameters that were handed over, and no others. `before` is the update before, if it is known.
    """

    def __init__(self, meant: Meant, update: Update, before: "Evidence | None" = None):
        self.meant, self.update = meant, update
        self.before = before
        replay = meant.replay
        grads = update.applied.grads
        self.mask = replay.flat([None if g is None else np.ones_like(g) for g in grads]) > 0
        self.handed = replay.flat(grads)[self.mask]
        self.norm = float(np.sqrt(sum(np.sum(np.square(g, dtype="float64")) for g in grads if g is not None)))
        self.pads = [int(np.count_nonzero(piece.rows == PAD)) for piece in update.pieces]
        self.terms = [
            replay.terms(piece, meant.objective, replay.batch(piece), training=meant.modes.of(piece))
            for piece in update.pieces
        ]
        self.weights = [
            np.where(piece.rows[None] == PAD, 0.0, terms.weights)
            for piece, terms in zip(update.pieces, self.terms, strict=True)
        ]
        whole = np.sum([w.sum(axis=1) for w in self.weights], axis=0)
        meant.largest = max(meant.largest, len(update.pieces))
        meant.has_penalty |= any(terms.penalty != 0 for terms in self.terms)
        meant.full = whole if meant.full is None else np.maximum(meant.full, whole)
        self._scale = 0.0
        self._rows: list[np.ndarray] | None = None
        self._groups: dict[tuple[int, int, str], tuple[np.ndarray, np.ndarray]] = {}
        self._weighed = {"": self.weights}

    @property
    def window(self) -> Window:
        """What weightings depend on."""
        first, full = self.terms[0], self.meant.full
        assert full is not None
        own = self.meant.replay.data[2]
        own = None if own is None or not hasattr(own, "shape") else np.asarray(own)
        rows = [
            np.where(p.rows == PAD, 0.0, 1.0 if own is None else own[p.rows].reshape(len(p.rows), -1).sum(axis=1))
            for p in self.update.pieces
        ]
        given = first.coefficients, first.divided, self.pads, self.meant.largest, full
        replicas = [piece.called.replica for piece in self.update.pieces]
        leaves = [leaf for piece in self.update.pieces for leaf in piece.called.outputs]
        places = sum(leaf.size // leaf.shape[-1] for leaf in leaves) if all(leaf.ndim > 2 for leaf in leaves) else 0
        passes = [self.place(piece)[0] for piece in self.update.pieces]
        return Window(self.weights, rows, *given, replicas, passes, places)

    def place(self, piece: Piece) -> tuple[int, int]:
        """Return (the number of its pass over the data, the rows before it in this pass)."""
        return self.meant.place[piece.called.order]

    @property
    def num_replicas(self) -> int:
        """Of how many replicas its pieces are."""
        return len({piece.called.replica for piece in self.update.pieces})

    @cached_property
    def penalty(self) -> np.ndarray:
        """The gradient of the model's own losses, once."""
        if not self.meant.has_penalty:
            return np.zeros_like(self.handed)
        num = sum(len(piece.rows) for piece in self.update.pieces)
        return sum(
            (
                self.gradient(i, np.zeros_like(terms.weights), penalty=len(piece.rows) / num)
                for i, (piece, terms) in enumerate(zip(self.update.pieces, self.terms, strict=True))
            ),
            np.zeros_like(self.handed),
        )

    @cached_property
    def reference(self) -> np.ndarray:
        """The gradient that was meant."""
        return self.data(weightings.right(self.window)) + self.penalty

    def data(
        self, divisors: Divisors, batches: Callable[[Piece], Tree] | None = None, window: Window | None = None
    ) -> np.ndarray:
        """Return the gradient of all rows with these divisors, in one go, of other batches or weights if given."""
        return sum(self.pieces(divisors, batches, window), np.zeros_like(self.handed))

    def pieces(
        self, divisors: Divisors, batches: Callable[[Piece], Tree] | None = None, window: Window | None = None
    ) -> list[np.ndarray]:
        """Return what each piece adds to that."""
        parts = weightings.factors(window or self.window, divisors)
        batches = batches or self.meant.replay.batch
        return [
            self.gradient(i, part, batch=batches(piece))
            for i, (piece, part) in enumerate(zip(self.update.pieces, parts, strict=True))
        ]

    def by_term(self) -> list[np.ndarray]:
        """Return the gradient of each term by itself, as if it counted 1."""
        window = self.window
        alone = (replace(window, coefficients=row) for row in np.eye(len(window.coefficients)))
        return [self.data(weightings.right(each), window=each) for each in alone]

    def rows(self) -> list[np.ndarray]:
        """Return the gradient of each row: by piece (terms x rows, parameters)."""
        if self._rows is None:
            self._rows = [
                np.stack([self._one(i, entry) for entry in range(weights.size)])
                for i, weights in enumerate(self.weights)
            ]
        return self._rows

    def weighed(self, way: Weighting, objective: Objective | None = None, weigh: str = "") -> np.ndarray:
        """Return the sum of the rows' gradients, weighed in one way; of another objective or batch if given."""
        window = replace(self.window, weights=self.weights_of(weigh))
        parts = weightings.factors(window, way(window))
        return sum(
            (self._sum(i, part, objective, weigh) for i, part in enumerate(parts)),
            np.zeros_like(self.handed),
        )

    def _sum(self, i: int, part: np.ndarray, objective: Objective | None, weigh: str) -> np.ndarray:
        """Return the sum of a piece's rows with these factors (terms, rows).

        Rows of one weight have one factor, whatever is wrong: their gradient is computed in one go, and kept.
        """
        key = i, id(objective), weigh
        if key not in self._groups:
            self._groups[key] = self._grouped(i, objective, weigh)
        of_rows, grads = self._groups[key]
        first = [np.flatnonzero(of_rows == group)[0] for group in range(of_rows.max() + 1)]
        by_group = part[:, first]
        if not np.array_equal(by_group[:, of_rows], part):
            return self.gradient(i, part, objective, weigh=weigh)
        return by_group.T.reshape(-1).astype(grads.dtype) @ grads

    def _grouped(self, i: int, objective: Objective | None, weigh: str) -> tuple[np.ndarray, np.ndarray]:
        """Return (of each row the number of its group, gradients (groups x terms, parameters)) of a piece."""
        weights = self.weights_of(weigh)[i]
        columns, of_rows = np.unique(weights, axis=1, return_inverse=True)
        of_rows = np.reshape(of_rows, -1)
        grads = np.zeros((columns.size, len(self.handed)), "float32")  # as the engine computes them
        for entry, (group, term) in enumerate(np.ndindex(*columns.T.shape)):
            if columns[term, group]:
                factors = np.zeros(weights.shape)
                factors[term, of_rows == group] = 1.0
                grads[entry] = self.gradient(i, factors, objective, weigh=weigh)
        return of_rows, grads

    def weights_of(self, weigh: str) -> list[np.ndarray]:
        """Return what the rows weigh, where the sample weights are changed in this way."""
        meant, replay = self.meant, self.meant.replay
        if weigh not in self._weighed:
            self._weighed[weigh] = []
            for piece in self.update.pieces:
                batch = replay.batch(piece, weigh=weigh)
                terms = replay.terms(piece, meant.objective, batch, training=meant.modes.of(piece))
                self._weighed[weigh].append(np.where(piece.rows[None] == PAD, 0.0, terms.weights))
        return self._weighed[weigh]

    def measure(self) -> None:
        """Let distances be relative to what the gradient is summed from, where that nearly cancels.

        That is the sum of the rows' lengths. It is drawn from a few rows, but where it matters much.
        """
        parts = weightings.factors(self.window, weightings.right(self.window))
        entries = [(i, entry) for i, part in enumerate(parts) for entry in np.flatnonzero(part).tolist()]
        if not entries or self._scale:
            return
        some = entries[:: -(-len(entries) // NUM_DRAWN)]
        whole = sum(float(np.abs(part).sum()) for part in parts)
        drawn = _NEARLY * whole * float(np.mean([np.linalg.norm(self._one(*entry)) for entry in some]))
        if len(some) < len(entries) and 8 * drawn > np.linalg.norm(self.reference):
            sizes = [abs(parts[i].flat[entry]) * np.linalg.norm(self._one(i, entry)) for i, entry in entries]
            drawn = _NEARLY * float(np.sum(sizes))
        self._scale = drawn

    def apart(self, candidate: np.ndarray) -> float:
        """Return the distance of what was handed over from a candidate, relative to it and to the reference."""
        scale = max(self._scale, float(np.linalg.norm(self.reference)))
        return distance(self.handed, candidate, scale)

    @property
    def without(self) -> float:
        """The distance from the reference."""
        return self.apart(self.reference)

    @property
    def kind(self) -> tuple[int, ...]:
        """What tells updates apart: the rows of their pieces."""
        return tuple(len(piece.rows) for piece in self.update.pieces)

    def by_parameter(self, candidate: np.ndarray) -> dict[str, float]:
        """Return the distance from a candidate for every parameter."""
        full = [np.zeros(len(self.mask)), np.zeros(len(self.mask))]
        full[0][self.mask], full[1][self.mask] = self.handed, candidate
        one, two = (self.meant.replay.parts(vector) for vector in full)
        return {name: distance(one[name], two[name], self._scale) for name in one}

    def gradient(
        self,
        i: int,
        factors: np.ndarray,
        objective: Objective | None = None,
        *,
        penalty: float = 0.0,
        weigh: str = "",
        batch: Tree = None,
    ) -> np.ndarray:
        """Return the gradient of one piece, a factor for each row and term, of another objective or batch if given."""
        piece, replay = self.update.pieces[i], self.meant.replay
        training = self.meant.modes.of(piece)
        batch = replay.batch(piece, weigh=weigh) if batch is None else batch
        objective = self.meant.objective if objective is None else objective
        return replay.gradient(piece, objective, batch, factors, training=training, penalty=penalty)[self.mask]

    def _one(self, i: int, entry: int) -> np.ndarray:
        """Return the gradient of one row's loss, and one term's: the entry is its place in (terms, rows)."""
        if not self.weights[i].flat[entry]:
            return np.zeros(len(self.handed), "float32")
        factors = np.zeros(self.weights[i].shape)
        factors.flat[entry] = 1.0
        return self.gradient(i, factors).astype("float32")  # as the engine computes them
