"""The port: all that the stages ask of a framework. `keras.replay` has it for Keras,
`torch.replay` for PyTorch.
"""

import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import numpy as np

from stepcheck import tree
from stepcheck.steps import StepRule
from stepcheck.trace.log import Called, Line, Log, Values
from stepcheck.trace.measure import Tolerance, places, tolerance
from stepcheck.trace.windows import PAD, Piece, packed
from stepcheck.tree import Tree

ByPass = dict[int, tuple[np.ndarray, ...]]


class OneLoss:
    """An objective of one loss of the model's one output."""

    loss: Any


class NoLoss:
    """An objective in place of an unknown loss: gradients are not judged."""


class Terms(NamedTuple):
    """The loss of a piece, by term and row: (terms, rows) of values times weights, and
    of weights.

    `coefficients`, `names` and `divided` (whether a term is divided by its weights) are
    by term. `penalty` is the sum of the model's own losses.
    """

    values: np.ndarray
    weights: np.ndarray
    coefficients: np.ndarray
    divided: np.ndarray
    penalty: float
    names: tuple[str, ...]


class Port(ABC):
    """A model as a function of recorded values: nothing of the model is moved.

    Args:
        model: the model that a loop trains.
        data: (x, y, sample_weight), the last one perhaps None.
        by_pass: the labels, and the weights if there are some, by the order of a pass,
            where they belong to no row.

    Attributes:
        losses: its losses, and the relatives that one may be mistaken for: the
            functions of `families`.
        trained: the trainable variables, as the passes of a log have them.
        names, shapes, sizes: of the trainable variables.
        names_of_others: of the other variables.
        num_recurrent: how many of these, the last ones, are the states of recurrent
            layers.
        are_seeds: of each other variable, whether it is the state of random draws.
        is_masked: whether the outputs have a mask, as its first `outputs` show.
        is_sparse: whether some gradients are of a few rows of a table.
        has_losses: whether layers of the model have losses, as its first `outputs`
            show.
        hears_scales: whether every scaling of a loss is recorded.
        most_shapes: of how many shapes of batches updates are judged, the most frequent
            ones; None for all.
        moves_weights: whether layers assign their own weights in a forward pass, as its
            first `outputs` show.
    """

    losses: Any
    trained: tuple[int, ...]
    names_of_others: list[str]
    num_recurrent = 0
    are_seeds: list[bool]
    is_masked = False
    is_sparse = False
    has_losses = False
    hears_scales = False
    moves_weights = False
    most_shapes: int | None = None

    def __init__(
        self,
        model: Any,
        data: tuple[Tree, ...],
        *,
        by_pass: ByPass | None = None,
    ):
        self.model = model
        self.data = data
        self.by_pass = by_pass
        self.num_rows = len(tree.leaves(data[0])[0])

    def _measure(
        self, named: list[tuple[str, tuple[int, ...]]], dtypes: list[str]
    ) -> None:
        """Take the names and shapes of the trainable variables, and the dtypes in which
        is computed.
        """
        names, self.shapes = (
            [name for name, _ in named],
            [shape for _, shape in named],
        )
        self.names = [
            n if names.count(n) == 1 else f"{n} ({names[:i].count(n) + 1})"
            for i, n in enumerate(names)
        ]
        self.sizes = [int(np.prod(shape)) for shape in self.shapes]
        self._kept = list(map(places, self.sizes))
        pairs = zip(self.sizes, self._kept, strict=True)
        self._nums = [
            size if kept is None else len(kept) for size, kept in pairs
        ]
        self.is_in_part = any(chosen is not None for chosen in self._kept)
        self.is_half = any("float16" in dtype for dtype in dtypes)
        self.tolerance: Tolerance = tolerance(dtypes)

    @staticmethod
    @abstractmethod
    def engine() -> str:
        """Return the name of the engine, for reports."""

    @staticmethod
    @abstractmethod
    def as_then(model: Any, log: Log) -> AbstractContextManager[None]:
        """Let the variables be set to be trained as at the end of a log, for the time
        of a `with`.
        """

    @abstractmethod
    def values(self) -> Values | None:
        """Return the model's present values; None if they cannot be read."""

    @abstractmethod
    def frozen(self) -> list[int]:
        """Return the other variables that would be trained if their layer were set to
        be trainable.
        """

    @abstractmethod
    def rules(self, optimizer: Any) -> tuple[StepRule | None, ...]:
        """Return the settings of an optimizer's step, at its present rate, by
        parameter; None for those not known.
        """

    @abstractmethod
    def outputs(
        self, piece: Piece, *, training: bool
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return (leaves of the output, the model's other values afterwards) of a
        forward pass.
        """

    @abstractmethod
    def terms(
        self,
        piece: Piece,
        objective: Any,
        batch: Any,
        *,
        training: bool,
        is_by_outputs: bool = False,
    ) -> Terms:
        """Return the loss of a piece, unreduced.

        Args:
            is_by_outputs: whether the objective is one loss of the one output: then the
                model itself need not run.
        """

    @abstractmethod
    def gradient(
        self,
        piece: Piece,
        objective: Any,
        batch: Any,
        factors: np.ndarray,
        *,
        training: bool,
        penalty: float = 0.0,
    ) -> np.ndarray:
        """Return the gradient of the sum of factors (terms, rows) times values and
        weights, flat.

        Args:
            penalty: the factor of the model's own losses.
        """

    @abstractmethod
    def derivative(
        self,
        objective: Any,
        outputs: np.ndarray,
        labels: Tree,
        weights: Tree = None,
        change: Callable | None = None,
    ) -> np.ndarray:
        """Return the derivative of the sum of the rows' losses by a model's one output.

        Args:
            objective: a `OneLoss`.
            change: a function that the outputs go through before the loss.
        """

    @abstractmethod
    def pulled(
        self, piece: Piece, chosen: list[np.ndarray], *, training: bool
    ) -> np.ndarray:
        """Return the gradient of the sum of the outputs times the chosen factors, flat."""

    @staticmethod
    @abstractmethod
    def numbers_of(optimizer: Any) -> dict[str, Any]:
        """Return the arguments of an optimizer that change a step, by Keras' names."""

    def differing(self, used: Any, stated: Any) -> dict[str, tuple[Any, Any]]:
        """Return the arguments, by name, that change a step and differ: (used, stated)."""
        own, meant = self.numbers_of(used), self.numbers_of(stated)
        pairs = {
            name: (own[name], meant[name]) for name in meant if name in own
        }
        return {
            name: pair for name, pair in pairs.items() if pair[0] != pair[1]
        }

    def decay(self, optimizer: Any) -> float | None:
        """Return the weight decay of an optimizer, if it has one."""
        return getattr(optimizer, "weight_decay", None)

    @abstractmethod
    def line_of_loss(
        self, called: Called, *, is_penalty: bool = False
    ) -> Line | None:
        """Return the line that computes the loss of a pass, or adds its penalty; None
        where it cannot be read.
        """

    @abstractmethod
    def objective(self, loss: Any, *, is_masked: bool = True) -> OneLoss:
        """Return a loss as an objective, by the mask that the model makes or without."""

    def gradients(
        self,
        piece: Piece,
        objective: Any,
        batch: Any,
        factors: list[np.ndarray],
        *,
        training: bool,
    ) -> Iterator[np.ndarray]:
        """Yield the gradient by each of several factors."""
        for each in factors:
            yield self.gradient(
                piece, objective, batch, each, training=training
            )

    def flat(self, grads: list[np.ndarray | None]) -> np.ndarray:
        """Return gradients as one vector, a missing one as zeros; of large parameters
        the entries at some places.

        A large gradient may be passed in whole, or as a log keeps it.
        """
        parts = []
        for num, grad, kept in zip(self._nums, grads, self._kept, strict=True):
            part = np.zeros(num) if grad is None else np.reshape(grad, -1)
            parts.append(
                (part if len(part) == num else part[kept]).astype("float64")
            )
        return np.concatenate(parts)

    def name_at(self, i: int) -> str:
        """Return the parameter of the i-th entry of such a vector, with its index."""
        ends = np.cumsum(self._nums)
        owner = int(np.searchsorted(ends, i, side="right"))
        place, kept = (
            i - int(ends[owner]) + self._nums[owner],
            self._kept[owner],
        )
        place = place if kept is None else int(kept[place])
        index = ", ".join(map(str, np.unravel_index(place, self.shapes[owner])))
        return f"{self.names[owner]}[{index}]"

    def parts(self, vector: np.ndarray) -> dict[str, np.ndarray]:
        """Cut such a vector into the parameters."""
        cut = np.split(vector, np.cumsum(self._nums)[:-1])
        return dict(zip(self.names, cut, strict=True))

    def batch(
        self,
        piece: Piece,
        *,
        shift: int = 0,
        labels: np.ndarray | None = None,
        has_their_weights: bool = False,
    ) -> Any:
        """Return (x, y[, sample_weight]) of a piece: inputs as the model had them, the
        rest by row.

        Args:
            shift: the number of rows by which the labels are moved.
            labels: the rows whose labels are used, if they are others.
            has_their_weights: whether the weights belong to the labels' rows, too.
        """
        if self.by_pass is not None:
            return self._packed(piece.called.inputs), *self.by_pass[
                piece.called.order
            ]
        rows = piece.rows if piece.copied is None else piece.copied
        rows, are_others = np.where(rows == PAD, 0, rows), rows == PAD
        shifted = np.roll(rows if labels is None else labels, shift)

        def taken(leaf: Any) -> np.ndarray:
            chosen = np.asarray(leaf)[shifted]
            chosen[np.roll(are_others, shift)] = 0  # as in padding
            return self.as_wide(chosen, piece)

        batch = (
            self._packed(piece.called.inputs),
            tree.map_leaves(taken, self.data[1]),
        )
        if self.data[2] is None:
            return batch
        rows = shifted if has_their_weights else rows
        return *batch, tree.map_leaves(
            lambda leaf: self.as_wide(np.asarray(leaf)[rows], piece),
            self.data[2],
        )

    def as_wide(self, leaf: np.ndarray, piece: Piece) -> np.ndarray:
        """Return labels or weights of rows as wide as the outputs, where the batch is
        narrower than the data.
        """
        pairs = zip(
            tree.leaves(self.data[0]), piece.called.inputs, strict=False
        )
        shapes = ((np.shape(whole), given.shape) for whole, given in pairs)
        is_narrow = any(one[1:2] > two[1:2] for one, two in shapes)
        outputs = piece.called.outputs
        width = outputs[0].shape[1:2] if is_narrow and outputs else ()
        return leaf[:, : width[0]] if width and leaf.ndim > 1 else leaf

    def _packed(self, inputs: list) -> Tree:
        return packed(inputs, self.data[0])


@contextmanager
def quiet() -> Iterator[None]:
    """Hide the warnings of Keras and the engine: inside, losses and steps are
    hypotheses, and not the user's.
    """
    logger = logging.getLogger("tensorflow")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
