"""The gradient that an update handed to its optimizer, the meant gradient, and the parts of both."""

from collections import Counter
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from stepcheck.port import OneLoss, Port, Terms
from stepcheck.solve.modes import Modes
from stepcheck.solve.ratios import least
from stepcheck.trace.log import Scaled
from stepcheck.trace.measure import distance
from stepcheck.trace.windows import PAD, Piece, Update
from stepcheck.tree import Tree

NUM_DRAWN = 4  # rows whose gradients represent those of all rows in an estimate of their size
_NEARLY = 1e-3
_MADE = "penalty", "reference", "parts", "rows"  # which an evidence computes once


class Meant:
    """The means to compute gradients: a replay, the objective that is meant, and the modes that were seen.

    Args:
        place: as in `Windows`.
        scaled: the checks of an optimizer that scales the loss.
        optimizer: the optimizer whose steps can be replayed, if it is known.

    Attributes:
        is_scaled, clips_scaled: whether an optimizer scales the loss, and whether clipped gradients have the scale.
        scales: all that were seen.
        windows: how many updates have how many pieces. This and the next two are valid once all have an `Evidence`.
        full: the weight of the heaviest update, by term.
        has_penalty: whether the model itself has losses.
        length: the mean length of the rows' gradients that was measured last; 0 for none.
        is_by_outputs: whether gradients are pulled derivatives; None before the first update was looked at.
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
        self.replay, self.objective, self.modes, self.optimizer = (
            replay,
            objective,
            modes,
            optimizer,
        )
        self.place, self.scaled, self.is_scaled = place, scaled, bool(scaled)
        self.scales = {each.scale for each in scaled if each.scale}
        self.clips_scaled = any(each.is_last for each in scaled)
        self.windows, self.has_penalty = Counter[int](), False
        self.full: np.ndarray | None = None
        self.is_masked, self.length = replay.is_masked, 0.0
        self.is_by_outputs: bool | None = None

    def of(self, objective: Any) -> "Meant":
        """Return the same of another objective."""
        return Meant(self.replay, objective, self.modes, self.place, self.scaled, self.optimizer)

    @property
    def usual(self) -> int:
        """The number of pieces of a full window: of most updates."""
        return max(self.windows, key=lambda num: (self.windows[num], num))


class Evidence:
    """One update: the handed gradient, the reference, and the gradients of its changes.

    All vectors hold the parameters that were handed over, and no others.

    Attributes:
        before: the update before, if it is known.
        whole: the weight of all rows, by term.
    """

    def __init__(self, meant: Meant, update: Update, before: "Evidence | None" = None):
        self.meant, self.update = meant, update
        self.before = before
        replay = meant.replay
        grads = update.applied.grads
        self.mask = replay.flat([None if g is None else np.ones_like(g) for g in grads]) > 0
        self.handed = replay.flat(grads)[self.mask]
        self.norm = float(
            np.sqrt(sum(np.sum(np.square(g, dtype="float64")) for g in grads if g is not None))
        )
        self.pads = [int(np.count_nonzero(piece.rows == PAD)) for piece in update.pieces]
        self.terms = [
            self.terms_of(piece, meant.objective, replay.batch(piece)) for piece in update.pieces
        ]
        pairs = zip(update.pieces, self.terms, strict=True)
        self.weights = [
            np.where(piece.rows[None] == PAD, 0.0, terms.weights) for piece, terms in pairs
        ]
        self.whole = np.sum([w.sum(axis=1) for w in self.weights], axis=0)
        meant.windows[len(update.pieces)] += 1
        meant.has_penalty |= any(terms.penalty != 0 for terms in self.terms)
        meant.full = self.whole if meant.full is None else np.maximum(meant.full, self.whole)
        self.scale = 0.0

    def terms_of(self, piece: Piece, objective: Any, batch: Tree) -> Terms:
        """Return the terms of a loss of one piece."""
        is_by_outputs = self.is_by_outputs and isinstance(objective, OneLoss)
        training = self.meant.modes.of(piece)
        return self.meant.replay.terms(
            piece, objective, batch, training=training, is_by_outputs=is_by_outputs
        )

    @property
    def of(self) -> "Evidence":
        """The evidence whose gradients it gives: itself."""
        return self

    @property
    def factors(self) -> list[np.ndarray]:
        """The factor of each row in the gradient that was meant: by piece (terms, rows)."""
        return [self.counted(weights, self.whole) for weights in self.weights]

    def counted(self, weights: np.ndarray, whole: np.ndarray) -> np.ndarray:
        """Return the factors of rows with these weights: a mean is divided once by the weight of all, a sum is not."""
        first = self.terms[0]
        with np.errstate(divide="ignore", invalid="ignore"):
            by_term = first.coefficients / np.where(first.divided, whole, 1.0)
        return np.where((weights == 0) | ~np.isfinite(by_term[:, None]), 0.0, by_term[:, None])

    def place(self, piece: Piece) -> tuple[int, int]:
        """Return (the number of its pass over the data, the rows before it in this pass)."""
        return self.meant.place[piece.called.order]

    @property
    def num_replicas(self) -> int:
        """The number of replicas of its pieces."""
        return len({piece.called.replica for piece in self.update.pieces})

    @property
    def num_places(self) -> int:
        """The number of places of its outputs, padding included; 0 if rows have none."""
        leaves = [leaf for piece in self.update.pieces for leaf in piece.called.outputs]
        return (
            sum(leaf.size // leaf.shape[-1] for leaf in leaves)
            if all(leaf.ndim > 2 for leaf in leaves)
            else 0
        )

    @cached_property
    def penalty(self) -> np.ndarray:
        """The gradient of the model's own losses, once."""
        if not self.meant.has_penalty:
            return np.zeros_like(self.handed)
        num = self.update.sizes
        parts = (
            self.gradient(i, np.zeros_like(w), penalty=num[i] / sum(num))
            for i, w in enumerate(self.weights)
        )
        return sum(parts, np.zeros_like(self.handed))

    @cached_property
    def reference(self) -> np.ndarray:
        """The gradient that was meant."""
        return sum(self.parts, self.penalty)

    @cached_property
    def parts(self) -> list[np.ndarray]:
        """The part of each piece in the gradient that was meant."""
        return [self.gradient(i, factors) for i, factors in enumerate(self.factors)]

    @cached_property
    def rows(self) -> list[np.ndarray]:
        """The gradient of each row: by piece (terms x rows, parameters)."""
        return [np.stack(self._some(i, [*range(w.size)])) for i, w in enumerate(self.weights)]

    def measure(self) -> None:
        """Let distances be relative to the sum of the rows' lengths, where the gradients of rows nearly cancel.

        The sum is estimated from a few rows, and computed where it matters.
        """
        parts = self.factors
        entries = [
            (i, entry) for i, part in enumerate(parts) for entry in np.flatnonzero(part).tolist()
        ]
        if not entries or self.scale:
            return
        most, length = (
            float(np.linalg.norm(self.reference)),
            _NEARLY * sum(float(np.abs(part).sum()) for part in parts),
        )
        if 8 * length * self.meant.length > most or not self.meant.length:
            some = entries[:: -(-len(entries) // NUM_DRAWN)]
            self.meant.length = float(
                np.mean([np.linalg.norm(self._some(i, [entry])) for i, entry in some])
            )
        self.scale = length * self.meant.length
        if len(entries) > NUM_DRAWN and 8 * self.scale > most:
            sizes = [
                abs(parts[i].flat[entry]) * np.linalg.norm(self._some(i, [entry]))
                for i, entry in entries
            ]
            self.scale = _NEARLY * float(np.sum(sizes))

    def apart(self, candidate: np.ndarray) -> float:
        """Return the distance of the handed gradient from a candidate, relative to the larger or to its parts."""
        size = float(np.linalg.norm(self.reference))
        scale = self.scale * min(1.0, float(np.linalg.norm(self.handed)) / size if size else 1.0)
        return (
            distance(self.handed, candidate, scale)
            if np.all(np.isfinite(candidate))
            else float("inf")
        )

    def proven(self, made: np.ndarray) -> tuple[np.ndarray, float]:
        """Return an explanation's numbers as a gradient, and how far the handed one is apart from it."""
        return made, self.apart(made)

    @property
    def without(self) -> float:
        """The distance from the reference."""
        return self.apart(self.reference)

    @property
    def is_along(self) -> bool:
        """Whether the handed gradient is the meant one times some number above 0."""
        return (
            self.share > 0
            and self.apart(self.share * self.reference) <= self.meant.replay.tolerance.fits
        )

    @property
    def share(self) -> float:
        """The number of meant gradients that are nearest to the handed one."""
        size = float(self.reference @ self.reference)
        return float(self.handed @ self.reference) / size if size else 0.0

    def by_parameter(self, candidate: np.ndarray) -> dict[str, float]:
        """Return the distance from a candidate for every parameter."""
        one, two = self.cut(self.handed), self.cut(candidate)
        return {name: distance(one[name], two[name], self.scale) for name in one}

    def cut(self, vector: np.ndarray) -> dict[str, np.ndarray]:
        """Return a vector by parameter, of the parameters that were handed over."""
        full = np.full(len(self.mask), np.nan)
        full[self.mask] = vector
        return {
            name: part
            for name, part in self.meant.replay.parts(full).items()
            if not np.isnan(part).any()
        }

    @cached_property
    def is_plain(self) -> bool:
        """Whether the loss depends on one output, row by row, and the loop took a derivative by this output."""
        objective, pieces = self.meant.objective, self.update.pieces
        is_by_row = isinstance(objective, OneLoss) and not getattr(
            objective.loss, "is_coupled", False
        )
        has_one = all(
            set(p.called.derivatives) == {0} and len(p.called.outputs) == 1 for p in pieces
        )
        return is_by_row and has_one and not self.meant.is_masked

    @cached_property
    def is_by_outputs(self) -> bool:
        """Whether its gradients are pulled derivatives, as the loop's are in the first update.

        They are not where Keras' loss takes the logits behind an activation.
        """
        if self.meant.is_by_outputs is None and self.is_plain:
            parts = self.taken() if not self.meant.replay.has_losses else []
            factors = least(parts, self.handed)[0] if parts else np.zeros(0)
            fits = self.meant.replay.tolerance.fits
            is_made = bool(parts) and distance(self.handed, factors @ np.stack(parts)) <= fits
            self.meant.is_by_outputs = is_made
        return self.is_plain and bool(self.meant.is_by_outputs)

    def taken(self) -> list[np.ndarray]:
        """Return the gradients that the derivatives of the loop's loss by the pieces' outputs give."""
        return [self.pulled(i, taken_at(piece)) for i, piece in enumerate(self.update.pieces)]

    @cached_property
    def _derived(self) -> list[np.ndarray]:
        return [
            self.derivative(p, self.meant.objective, self.meant.replay.batch(p))
            for p in self.update.pieces
        ]

    def derivative(
        self, piece: Piece, objective: Any, batch: Any, change: Callable | None = None
    ) -> np.ndarray:
        """Return the derivative of the sum of the rows' losses by a piece's one output, perhaps changed before them."""
        weights = batch[2] if len(batch) > 2 else None
        return self.meant.replay.derivative(
            objective, piece.called.outputs[0], batch[1], weights, change
        )

    def gradient(
        self,
        i: int,
        factors: np.ndarray,
        objective: Any = None,
        *,
        penalty: float = 0.0,
        batch: Tree = None,
    ) -> np.ndarray:
        """Return the gradient of one piece, with a factor for each row and term; by default of the meant objective."""
        piece, is_meant = self.update.pieces[i], objective is None and batch is None
        objective = self.meant.objective if objective is None else objective
        batch = self.meant.replay.batch(piece) if batch is None else batch
        if self.is_by_outputs and isinstance(objective, OneLoss) and not penalty:
            made = self._derived[i] if is_meant else self.derivative(piece, objective, batch)
            by_row = np.reshape(factors, (-1, *(1 for _ in made.shape[1:])))
            return self.pulled(i, np.where(by_row == 0, 0.0, made * by_row))
        training = self.meant.modes.of(piece)
        found = self.meant.replay.gradient(
            piece, objective, batch, factors, training=training, penalty=penalty
        )
        return found[self.mask]

    def pulled(self, i: int, derivative: np.ndarray) -> np.ndarray:
        """Return the gradient that a derivative by one piece's one output gives."""
        piece = self.update.pieces[i]
        return self.meant.replay.pulled(piece, [derivative], training=self.meant.modes.of(piece))[
            self.mask
        ]

    def _some(self, i: int, entries: list[int]) -> list[np.ndarray]:
        """Return gradients of one term of one row each: an entry is its index in (terms, rows), flat."""
        zeros, shape = np.zeros(len(self.handed), "float32"), self.weights[i].shape
        found = {entry: zeros for entry in entries if not self.weights[i].flat[entry]}
        others = [entry for entry in entries if entry not in found]
        factors = [
            np.reshape(np.arange(np.prod(shape)) == entry, shape).astype("float64")
            for entry in others
        ]
        found |= zip(others, self._by_factors(i, factors), strict=True)
        return [found[entry] for entry in entries]

    def _by_factors(self, i: int, factors: list[np.ndarray]) -> list[np.ndarray]:
        """Return the gradient of one piece by several factors of its rows and terms, as the engine computes it."""
        piece, replay, meant = self.update.pieces[i], self.meant.replay, self.meant
        if self.is_by_outputs:
            return [self.gradient(i, each).astype("float32") for each in factors]
        given = piece, meant.objective, replay.batch(piece), factors
        return [
            g[self.mask].astype("float32")
            for g in replay.gradients(*given, training=meant.modes.of(piece))
        ]


class AtOutputs(Evidence):
    """An update as derivatives by its outputs, times `factors`: no form of a loss needs a backward pass."""

    def __init__(self, of: Evidence, factors: np.ndarray):
        vars(self).update({name: value for name, value in vars(of).items() if name not in _MADE})
        self._of, self.before, self.scale, self.is_by_outputs = of, None, 0.0, True
        self._starts = np.cumsum([0, *(p.called.outputs[0].size for p in self.update.pieces)])
        self.mask = np.ones(int(self._starts[-1]), bool)
        own = (
            factor * taken_at(piece)
            for factor, piece in zip(factors, self.update.pieces, strict=True)
        )
        self.handed = np.concatenate([np.ravel(each) for each in own])
        self.norm = float(np.linalg.norm(self.handed))

    @property
    def of(self) -> Evidence:
        """The evidence whose gradients these derivatives give."""
        return self._of

    @cached_property
    def penalty(self) -> np.ndarray:
        """Zeros: the model's own losses are no function of the outputs."""
        return np.zeros_like(self.handed)

    def pulled(self, i: int, derivative: np.ndarray) -> np.ndarray:
        """Return the derivative by the outputs of a piece, with zeros for all other outputs."""
        found = np.zeros_like(self.handed)
        found[self._starts[i] : self._starts[i + 1]] = np.ravel(derivative)
        return found

    def cut(self, vector: np.ndarray) -> dict[str, np.ndarray]:
        """Return no parameters."""
        return {}

    def proven(self, made: np.ndarray) -> tuple[np.ndarray, float]:
        """Return derivatives by the outputs that give the gradient of the loop, and the distance."""
        if (apart := self.apart(made)) > self.meant.replay.tolerance.fits:
            return made, apart
        parts = np.split(made, self._starts[1:-1])
        shaped = [
            part.reshape(p.called.outputs[0].shape)
            for part, p in zip(parts, self.update.pieces, strict=True)
        ]
        return self.of.proven(
            sum((self.of.pulled(i, part) for i, part in enumerate(shaped)), self.of.penalty)
        )


def taken_at(piece: Piece, i: int = 0) -> np.ndarray:
    """Return the derivative of the loop's loss by the i-th output of a pass; zeros if none was taken."""
    found = piece.called.derivatives.get(i)
    return np.asarray(found[-1] if found else np.zeros_like(piece.called.outputs[i]), "float64")


def narrowed(chosen: list[Evidence]) -> list[AtOutputs] | None:
    """Return the updates by their outputs; None unless their gradients are the derivatives' of the loop's loss."""
    if not all(e.is_plain for e in chosen):
        return None
    found = []
    for e in chosen:
        parts = e.taken()
        factors = least(parts, e.handed - e.penalty)[0]
        if e.apart(factors @ np.stack(parts) + e.penalty) > e.meant.replay.tolerance.fits:
            return None
        found.append(AtOutputs(e, factors))
    return found


_NOTHING = 1e-4  # of the largest derivative


def without_derivative(e: Evidence) -> tuple[str, ...]:
    """Return the outputs, from 1, by which the loop takes no derivative, if it takes some by others."""
    called = [piece.called for piece in e.update.pieces]
    used = {i for own in called for i in own.derivatives}
    num = max(len(own.outputs) for own in called)
    return tuple(str(i + 1) for i in range(num) if used and i not in used)


def left_out(e: Evidence, solved: np.ndarray, should: np.ndarray) -> list[int]:
    """Return the forward passes, from 1, that have no part in derivatives by the outputs; none if all have none."""
    sizes = [piece.called.outputs[0].size for piece in e.update.pieces]
    if len(solved) != sum(sizes):
        return []
    ends = np.cumsum(sizes)[:-1]
    pairs = zip(np.split(np.abs(solved), ends), np.split(np.abs(should), ends), strict=True)
    most = [(own.max(initial=0), meant.max(initial=0)) for own, meant in pairs]
    empty = [i for i, (own, meant) in enumerate(most, 1) if own <= _NOTHING * meant]
    return empty if len(empty) < len(sizes) else []
