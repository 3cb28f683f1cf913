"""The gradient that an update handed to its optimizer, the meant one, and the parts of
both.
"""

from collections import Counter
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from stepcheck.port import OneLoss, Port, Terms
from stepcheck.solve.modes import Modes
from stepcheck.solve.ratios import least
from stepcheck.trace.log import Scaled
from stepcheck.trace.measure import COARSE, FINE, distance
from stepcheck.trace.windows import PAD, Piece, Update
from stepcheck.tree import Tree

# how many times the largest change by rounding, of a few tries, is no difference; the
# tolerance of half precision is ten roundings
_ROUNDINGS, _WAYS = {FINE: 10, COARSE: 1}, 4


class Meant:
    """The means to compute gradients: a replay, the meant objective, and the modes that
    were seen.

    Args:
        place: as in `Windows`.
        scaled: the checks of an optimizer that scales the loss.
        optimizer: the optimizer whose steps can be replayed, if it is known.

    Attributes:
        clips_scaled: whether clipped gradients have the scale.
        windows: how many updates have how many pieces; valid once all have an
            `Evidence`.
        full: the weight of the heaviest update, by term.
        longest: the length of the longest gradient.
        has_penalty: whether the model itself has losses.
        is_by_outputs: whether gradients are pulled derivatives; None before the first
            update.
    """

    def __init__(
        self,
        replay: Port,
        objective: Any,
        modes: Modes,
        place: dict[int, tuple[int, int]],
        scaled: list[Scaled],
        optimizer: Any = None,
    ):
        self.replay = replay
        self.objective = objective
        self.modes = modes
        self.place = place
        self.optimizer = optimizer
        self.is_scaled = bool(scaled)
        self.clips_scaled = any(each.is_last for each in scaled)
        self.windows = Counter[int]()
        self.full: np.ndarray | None = None
        self.longest, self.has_penalty = 0.0, False
        self.is_by_outputs: bool | None = None

    @property
    def usual(self) -> int:
        """The number of pieces of a full window: of most updates."""
        return max(self.windows, key=lambda num: (self.windows[num], num))

    @cached_property
    def is_by_row(self) -> bool:
        """Whether the loss depends on one output, row by row."""
        is_coupled = getattr(
            getattr(self.objective, "loss", None), "is_coupled", False
        )
        is_one = isinstance(self.objective, OneLoss) and not is_coupled
        return is_one and not self.replay.is_masked


class Evidence:
    """One update: the handed gradient, the reference, and the gradients of its changes.

    All vectors hold the parameters that were handed over, and no others.

    Attributes:
        before: the update before, if it is known.
        whole: the weight of all rows, by term.
        scale: the length to which distances are relative, if it is larger than the
            gradient's; by `rounding`, the length of what rounding may change.
    """

    def __init__(
        self, meant: Meant, update: Update, before: "Evidence | None" = None
    ):
        self.meant, self.update, self.before = meant, update, before
        replay, grads = meant.replay, update.applied.grads
        known = [None if grad is None else np.ones_like(grad) for grad in grads]
        self.mask = replay.flat(known) > 0
        self.handed = replay.flat(grads)[self.mask]
        lengths = [
            np.linalg.norm(np.ravel(grad)) for grad in grads if grad is not None
        ]
        self.norm = float(np.linalg.norm(lengths))
        pieces = update.pieces
        self.pads = [
            int(np.count_nonzero(piece.rows == PAD)) for piece in pieces
        ]
        self.terms = [
            self.terms_of(piece, meant.objective, replay.batch(piece))
            for piece in pieces
        ]
        self.weights = [
            own.weights * (p.rows != PAD)
            for p, own in zip(pieces, self.terms, strict=True)
        ]
        self.whole = np.sum(
            [weights.sum(axis=1) for weights in self.weights], axis=0
        )
        self.scale = self.rounding = 0.0
        meant.longest = max(meant.longest, self.norm)
        meant.windows[len(pieces)] += 1
        meant.has_penalty |= any(terms.penalty != 0 for terms in self.terms)
        meant.full = (
            self.whole
            if meant.full is None
            else np.maximum(meant.full, self.whole)
        )

    def terms_of(self, piece: Piece, objective: Any, batch: Tree) -> Terms:
        """Return the terms of a loss of one piece."""
        is_by_outputs = self.is_by_outputs and isinstance(objective, OneLoss)
        training = self.meant.modes.of(piece)
        given = piece, objective, batch
        return self.meant.replay.terms(
            *given, training=training, is_by_outputs=is_by_outputs
        )

    @property
    def factors(self) -> list[np.ndarray]:
        """The factor of each row in the gradient that was meant: by piece (terms,
        rows).
        """
        return [self.counted(weights, self.whole) for weights in self.weights]

    def counted(self, weights: np.ndarray, whole: np.ndarray) -> np.ndarray:
        """Return the factors of rows: a mean is divided once by the weight of all, a
        sum is not.
        """
        first = self.terms[0]
        with np.errstate(divide="ignore", invalid="ignore"):
            by_term = first.coefficients / np.where(first.divided, whole, 1.0)
        by_row = np.broadcast_to(by_term[:, None], weights.shape)
        return np.where((weights == 0) | ~np.isfinite(by_row), 0.0, by_row)

    @property
    def num_replicas(self) -> int:
        """The number of replicas of its pieces."""
        return len({piece.called.replica for piece in self.update.pieces})

    @property
    def num_places(self) -> int:
        """The number of places of its outputs, padding included; 0 if rows have none."""
        leaves = [
            leaf
            for piece in self.update.pieces
            for leaf in piece.called.outputs
        ]
        if any(leaf.ndim < 3 for leaf in leaves):
            return 0
        return sum(leaf.size // leaf.shape[-1] for leaf in leaves)

    @cached_property
    def penalty(self) -> np.ndarray:
        """The gradient of the model's own losses, once."""
        found = np.zeros_like(self.handed)
        if self.meant.has_penalty:
            sizes = self.update.sizes
            for i, weights in enumerate(self.weights):
                share = sizes[i] / sum(sizes)
                found = found + self.gradient(
                    i, np.zeros_like(weights), penalty=share
                )
        return found

    @cached_property
    def parts(self) -> list[np.ndarray]:
        """The part of each piece in the gradient that was meant."""
        return [
            self.gradient(i, factors) for i, factors in enumerate(self.factors)
        ]

    @cached_property
    def reference(self) -> np.ndarray:
        """The gradient that was meant."""
        return sum(self.parts, self.penalty)

    def of_term(self, i: int) -> np.ndarray:
        """Return the part of one term in the gradient that was meant."""
        chosen = (np.arange(len(self.whole)) == i)[:, None]
        parts = (
            self.gradient(j, factors * chosen)
            for j, factors in enumerate(self.factors)
        )
        return sum(parts, np.zeros_like(self.handed))

    @cached_property
    def rows(self) -> list[np.ndarray]:
        """The gradient of each row: by piece (terms x rows, parameters)."""
        every = (
            (i, range(weights.size)) for i, weights in enumerate(self.weights)
        )
        return [np.stack(self._some(i, [*entries])) for i, entries in every]

    def measure(self) -> None:
        """Let distances be relative to what rounding makes of the gradient, which may be
        much: where rows nearly cancel, or in a deep model.
        """
        tolerance = self.meant.replay.tolerance
        made = (self._rounded(seed) for seed in range(_WAYS))
        apart = [float(np.linalg.norm(g - self.reference)) for g in made]
        self.rounding = _ROUNDINGS[tolerance] * max(apart)
        self.scale = self.rounding / tolerance.differs

    def _rounded(self, seed: int) -> np.ndarray:
        """Return the gradient that was meant, at weights that are rounded otherwise."""
        is_fine = self.meant.replay.tolerance == FINE
        eps, draw = 2.0 ** (-23 if is_fine else -9), np.random.default_rng(seed)
        pieces = []
        for piece in self.update.pieces:
            params = [
                (p * (1 + eps * draw.choice([-1, 1], p.shape))).astype(p.dtype)
                for p in piece.called.params
            ]
            called = replace(piece.called, params=params)
            pieces.append(replace(piece, called=called))
        other = copy(self)
        other.update = replace(self.update, pieces=pieces)
        parts = (other.gradient(i, own) for i, own in enumerate(self.factors))
        return sum(parts, self.penalty)

    def apart(self, candidate: np.ndarray) -> float:
        """Return the distance of the handed gradient from a candidate, relative to
        both.
        """
        if not np.all(np.isfinite(candidate)):
            return float("inf")
        size = float(np.linalg.norm(self.reference))
        share = float(np.linalg.norm(self.handed)) / size if size else 1.0
        return distance(self.handed, candidate, self.scale * min(1.0, share))

    def proven(self, made: np.ndarray) -> tuple[np.ndarray, float]:
        """Return an explanation's numbers as a gradient, and the distance of the handed
        one.
        """
        return made, self.apart(made)

    @property
    def without(self) -> float:
        """The distance from the reference."""
        return self.apart(self.reference)

    @property
    def is_blurred(self) -> bool:
        """Whether rounding alone may make its distance, which is too large for a proof."""
        length = float(np.linalg.norm(self.reference))
        least = COARSE.differs * max(length, FINE.differs * self.meant.longest)
        is_near = self.without <= self.meant.replay.tolerance.differs
        return is_near and self.rounding > least

    @property
    def is_along(self) -> bool:
        """Whether the handed gradient is the meant one times some number above 0."""
        is_near = (
            self.apart(self.share * self.reference)
            <= self.meant.replay.tolerance.fits
        )
        return self.share > 0 and is_near

    @property
    def share(self) -> float:
        """The number of meant gradients that are nearest to the handed one."""
        size = float(self.reference @ self.reference)
        return float(self.handed @ self.reference) / size if size else 0.0

    def by_parameter(self, candidate: np.ndarray) -> dict[str, float]:
        """Return the distance from a candidate for every parameter."""
        one, two = self.cut(self.handed), self.cut(candidate)
        return {
            name: distance(one[name], two[name], self.scale) for name in one
        }

    def cut(self, vector: np.ndarray) -> dict[str, np.ndarray]:
        """Return a vector by parameter, of the parameters that were handed over."""
        full = np.full(len(self.mask), np.nan)
        full[self.mask] = vector
        parts = self.meant.replay.parts(full)
        return {
            name: part
            for name, part in parts.items()
            if not np.isnan(part).any()
        }

    @property
    def is_of_one_output(self) -> bool:
        """Whether the loss depends on one output of each pass, row by row."""
        has_one = all(
            len(piece.called.outputs) == 1 for piece in self.update.pieces
        )
        return has_one and self.meant.is_by_row

    @cached_property
    def is_plain(self) -> bool:
        """Whether the loop took the derivative of such a loss by the output of each
        pass.
        """
        has_one = all(
            {*piece.called.derivatives} == {0} for piece in self.update.pieces
        )
        return has_one and self.is_of_one_output

    @cached_property
    def is_by_outputs(self) -> bool:
        """Whether its gradients are pulled derivatives, as the loop's are in the first
        update.

        They are not where Keras' loss takes the logits behind an activation.
        """
        if self.meant.is_by_outputs is None and self.is_plain:
            parts = [] if self.meant.replay.has_losses else self.taken()
            made = (
                least(parts, self.handed)[0] @ np.stack(parts)
                if parts
                else 0 * self.handed
            )
            apart = distance(self.handed, made)
            self.meant.is_by_outputs = (
                bool(parts) and apart <= self.meant.replay.tolerance.fits
            )
        return self.is_plain and bool(self.meant.is_by_outputs)

    def taken(self) -> list[np.ndarray]:
        """Return the gradients of the pieces that the derivatives of the loop's loss
        give.
        """
        return [
            self.pulled(i, *all_taken(piece))
            for i, piece in enumerate(self.update.pieces)
        ]

    def derivative(
        self,
        piece: Piece,
        objective: Any,
        batch: Any,
        change: Callable | None = None,
    ) -> np.ndarray:
        """Return the derivative of the sum of the rows' losses by a piece's one output.

        Args:
            change: a function that the outputs go through before the loss.
        """
        weights = batch[2] if len(batch) > 2 else None
        output = piece.called.outputs[0]
        return self.meant.replay.derivative(
            objective, output, batch[1], weights, change
        )

    def gradient(
        self,
        i: int,
        factors: np.ndarray,
        objective: Any = None,
        *,
        penalty: float = 0.0,
        batch: Tree = None,
        change: Callable | None = None,
    ) -> np.ndarray:
        """Return the gradient of one piece, with a factor for each row and term.

        Args:
            objective: by default the meant one.
            change: a function that the one output goes through before the loss.
        """
        piece, replay = self.update.pieces[i], self.meant.replay
        objective = self.meant.objective if objective is None else objective
        batch = replay.batch(piece) if batch is None else batch
        is_pulled = (
            self.is_by_outputs
            and isinstance(objective, OneLoss)
            and not penalty
        )
        if is_pulled or change is not None:
            made = self.derivative(piece, objective, batch, change)
            return self.pulled(i, _times(made, factors))
        training = self.meant.modes.of(piece)
        given = piece, objective, batch, factors
        return replay.gradient(*given, training=training, penalty=penalty)[
            self.mask
        ]

    def pulled(self, i: int, *derivatives: np.ndarray) -> np.ndarray:
        """Return the gradient that derivatives by one piece's outputs give."""
        piece = self.update.pieces[i]
        training = self.meant.modes.of(piece)
        return self.meant.replay.pulled(
            piece, [*derivatives], training=training
        )[self.mask]

    def _some(self, i: int, entries: list[int]) -> list[np.ndarray]:
        """Return gradients of one term of one row each; an entry is its index in
        (terms, rows).
        """
        weights = self.weights[i]
        used = [entry for entry in entries if weights.flat[entry]]
        factors = [
            1.0 * (np.arange(weights.size) == entry).reshape(weights.shape)
            for entry in used
        ]
        found = dict(zip(used, self._by_factors(i, factors), strict=True))
        zeros = np.zeros(len(self.handed), "float32")
        return [found.get(entry, zeros) for entry in entries]

    def _by_factors(
        self, i: int, factors: list[np.ndarray]
    ) -> list[np.ndarray]:
        """Return the gradient of one piece by several factors of its rows and terms."""
        piece, meant = self.update.pieces[i], self.meant
        given = piece, meant.objective, meant.replay.batch(piece)
        if self.is_by_outputs:
            made = self.derivative(*given)
            return [
                self.pulled(i, _times(made, each)).astype("float32")
                for each in factors
            ]
        found = meant.replay.gradients(
            *given, factors, training=meant.modes.of(piece)
        )
        return [gradient[self.mask].astype("float32") for gradient in found]


def _times(derivative: np.ndarray, factors: np.ndarray) -> np.ndarray:
    by_row = np.reshape(factors, (-1, *(1 for _ in derivative.shape[1:])))
    return np.where(by_row == 0, 0.0, derivative * by_row)


def all_taken(piece: Piece) -> list[np.ndarray]:
    """Return the derivatives of the loop's loss by all outputs of a pass."""
    return [taken_at(piece, i) for i in range(len(piece.called.outputs))]


def taken_at(piece: Piece, i: int = 0) -> np.ndarray:
    """Return the derivative of the loop's loss by the i-th output of a pass; zeros for
    none.
    """
    found = piece.called.derivatives.get(i)
    taken = found[-1] if found else np.zeros_like(piece.called.outputs[i])
    return np.asarray(taken, "float64")
