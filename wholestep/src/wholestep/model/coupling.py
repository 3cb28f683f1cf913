"""Whether the rows of a batch see each other: the results of the probes, and the probes."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import keras
import numpy as np
from keras import ops

from wholestep import tree
from wholestep.data import Batch
from wholestep.engines import Engine
from wholestep.model.compiled import layers
from wholestep.model.distributions import ALL, LATER, PAIRS
from wholestep.model.forward import Forward, RowResults
from wholestep.state import State, Values
from wholestep.tree import Tensor, Tree

_MOST_NAMED = 3  # layers in a sentence


@dataclass(frozen=True)
class Coupling:
    """The result of the probe: how the rows of a batch depend on each other.

    Args:
        couples: a row's value depends on the other rows.
        moves: the forward pass moves floating state, such as moving statistics.
        whole: a loss or a metric is a single number.
        extra: how the model's other losses add up over microbatches: "none", "sum", "mean", or
            "whole" (not at all).
        unknown: no row's value changed with its content, so nothing is known.
        keeps: a layer keeps a state for every row of the full batch (`stateful=True`), so the
            number of rows is fixed.
        draws: random draws depend on the cut, or change from one call to the next.
        custom: the name of the custom step that computes an update; "" if there is none.
        joins: a term is a function of the outputs of all rows; the rest is about the outputs.
        in_losses: the rows meet in compiled losses alone, which may be joined.
    """

    couples: bool = False
    moves: bool = False
    whole: bool = False
    extra: str = "none"
    unknown: bool = False
    keeps: bool = False
    draws: bool = False
    custom: str = ""
    joins: bool = False
    in_losses: bool = False

    @property
    def cut_is_exact(self) -> bool:
        """Whether any cut of the batch gives the same update."""
        return self.cut_is_possible and not (self.couples or self.moves or self.unknown)

    @property
    def cut_is_possible(self) -> bool:
        """Whether a cut batch can be computed, even with another result than the full batch."""
        return not (self.whole or self.keeps or self.extra == "whole" or self.custom)

    @property
    def padding_is_exact(self) -> bool:
        """Whether rows of weight 0 change nothing."""
        return self.cut_is_exact and self.extra == "none" and not self.joins

    def why(self, movers: Sequence[str] = ()) -> str:
        """Return the reasons why the batch may not be cut, as text.

        Args:
            movers: the layers whose state moves.
        """
        as_in = f", as in {_listed(movers)}" if movers else ""
        where = as_in if self.moves and movers else ", in a layer or in the loss"
        reasons = {
            f"the rows of a batch see each other{where}": self.couples,
            f"the forward pass moves statistics of the batch{as_in}": (
                self.moves and not self.couples
            ),
            "whether the rows see each other could not be found out from these rows": self.unknown,
            "a loss or metric came as one number instead of one per row": self.whole,
            "a loss from add_loss is neither a sum nor a mean over rows": self.extra == "whole",
            f"the model's own {self.custom} is run whole": bool(self.custom),
            "a stateful layer keeps a state for every row of the whole batch": self.keeps,
        }
        return "; ".join(reason for reason, holds in reasons.items() if holds)

    def warning(self, movers: Sequence[str]) -> str:
        """Return the effect of cutting a batch where that is not exact, as text."""
        meets = "each row meets only the rows of its own microbatch"
        sentences = []
        if self.unknown:
            sentences.append(f"If they do, {meets}.")
        elif self.couples:
            sentences.append(f"{meets.capitalize()}.")
        if self.moves:
            sentences.append(
                "Moving statistics move once per update, by the mean over the microbatches."
            )
        will = "will" if self.couples else "may"
        reasons = self.why(movers)
        return f"{will} not give the weights of whole batches: {reasons}. {' '.join(sentences)}"

    def explanation(self, movers: Sequence[str], *, is_cut: bool) -> str:
        """Return whether microbatches give the update of the whole batch, as text."""
        if self.cut_is_exact and self.joins:
            passes = "" if is_cut else "would "
            return (
                "Rows meet in the loss alone, a function of the outputs of all rows: microbatches "
                f"{passes}compute these first, with one more forward pass, and give the update of "
                "the whole batch, up to rounding."
            )
        if self.cut_is_exact:
            return "Microbatches of any size give the update of the whole batch, up to rounding."
        if not self.cut_is_possible:
            return f"The batch cannot be cut into microbatches: {self.why(movers)}."
        if is_cut:
            first = f"The weights {'will' if self.couples else 'may'} not be those"
        else:
            first = f"Microbatches {'would' if self.couples else 'might'} not give the weights"
        return f"{first} of whole batches: {self.why(movers)}."


def _listed(layers: Sequence[str]) -> str:
    """Return the first names, and the number of the others, as text."""
    names = list(layers[:_MOST_NAMED])
    if len(layers) > _MOST_NAMED:
        names.append(f"{len(layers) - _MOST_NAMED} others")
    if len(names) == 1:
        return names[0]
    return f"{', '.join(names[:-1])} and {names[-1]}"


@dataclass
class Findings:
    """Measurements of a run.

    They are saved with it, so that it resumes on another machine with the same bits.

    Args:
        coupling: the coupling of the rows; None if it is not measured yet.
        apart: the coupling where layers with statistics of all replicas only apply them; None if
            not measured yet.
        pads: whether every metric ignores rows of weight 0; None if it is not measured yet.
        adds: whether the states of the metrics are sums over rows; None if it is not measured yet.
        limit: the bytes that a program may use in addition to its arguments, unless the user sets
            them.
        room: the bytes that arrays resident on the device may take.
        why_no_xla: why programs are not compiled by XLA, though they could be; "" if they are.
        sizes: by the shapes of a row, the numbers of rows to which batches passed one at a time are
            padded.
        looped: the kinds of loaded batches with a program of several updates, on an engine with
            programs of one too.
    """

    coupling: Coupling | None = None
    apart: Coupling | None = None
    pads: bool | None = None
    adds: bool | None = None
    limit: int | None = None
    room: int | None = None
    why_no_xla: str = ""
    sizes: dict[str, list[int]] = field(default_factory=dict)
    looped: list[str] = field(default_factory=list)

    def plans_as(self, other: "Findings") -> bool:
        """Whether both findings lead to the same plan of an update."""
        names = "coupling", "pads", "adds", "limit", "why_no_xla"
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def as_json(self) -> dict[str, Any]:
        """Return the findings as JSON."""
        return asdict(self)

    def rows_to_fill(self, host: Tree, count: int) -> int:
        """Return the number of rows to which a batch of `count` rows is padded.

        It is the size of an earlier batch, or a power of two: so batches of many sizes need few
        programs.
        """
        leaves = tree.leaves(host)
        shapes = tuple([(leaf.shape[1:], leaf.dtype) for leaf in leaves])
        known = self.sizes.setdefault(_text_of(shapes), [])
        power = 1 << (count - 1).bit_length()
        fitting = [size for size in known if count <= size <= 2 * power]
        if fitting:
            return min(fitting)
        size = power if known else count
        known.append(size)
        return size


@lru_cache(maxsize=1024)
def _text_of(shapes: tuple[tuple[tuple[int, ...], np.dtype], ...]) -> str:
    return str([(shape, str(dtype)) for shape, dtype in shapes])


_ROWS = 4


class _Probe:
    """Runs of the objective on a few rows of an update.

    Attributes:
        rows: the rows of the first run.
        results: their results.
        others: as many rows of other content.
        can_move: which rows' values differ between these and the first run.
    """

    def __init__(self, engine: Engine, forward: Forward, state: State, batch: Batch):
        num_rows = batch.num_rows
        self.engine = engine
        self.forward = forward
        self.state = state
        self.size = min(_ROWS, num_rows)
        self.tolerance = 64 * float(np.finfo(_compute_dtype(forward.model)).eps)
        self._programs: dict[int, Callable] = {}
        num_few = min(2 * self.size, num_rows)
        spread = np.linspace(0, num_rows - 1, num_few).astype(int)
        few = engine.devices.fetch(engine.devices.place(batch.rows_at(spread)))
        self.rows = _rows(few, np.arange(self.size))
        self.results = self.run(self.rows)
        others = np.append(np.arange(self.size, len(spread)), 0)
        self.others = _rows(few, np.resize(others, self.size))
        self.can_move = self.moved(self.results, self.run(self.others))
        if not self.can_move.any():
            self.others = _shaken(self.rows)
            self.can_move = self.moved(self.results, self.run(self.others))

    def run(self, batch: Tree, start: int = 0, extreme: int = 0) -> RowResults:
        """Return the objective's results on rows, of which the first has the place `start`."""
        devices = self.engine.devices
        given = devices.place((batch, np.int32(start), np.int32(extreme)))
        size = tree.num_rows(batch)
        if size not in self._programs:
            program = self.engine.programs.compile(
                self._function, (self.state, *given), spends=False
            )
            self._programs[size] = program.call
        return devices.fetch(self._programs[size](self.state, *given))

    def _function(self, state: State, batch: Tree, start: Tensor, extreme: Tensor) -> RowResults:
        values = _values(self.engine, state)
        values = values._replace(params=[_wiggled(p) for p in values.params])
        return replace(self.forward, extreme=extreme).rows(values, batch, start)

    def moves(self, batch: Tree, *, extreme: int = 0) -> np.ndarray:
        """Return which rows' values differ from the first run's: bool (rows,)."""
        moved = self.moved(self.results, self.run(batch, extreme=extreme))
        return np.broadcast_to(moved, (self.size,))

    def moved(self, one: RowResults, two: RowResults) -> np.ndarray:
        """Return which rows' values differ by more than rounding: bool (rows,), or (1,)."""
        atol = self.tolerance * 1e-3
        moved = np.zeros((1,), bool)
        for label, pair in one.values.items():
            for a, b in zip(pair, two.values[label], strict=True):
                a = np.asarray(a, np.float64)
                b = np.asarray(b, np.float64)
                moved = moved | ~np.isclose(a, b, self.tolerance, atol, equal_nan=True)
        return moved

    def is_redrawn(self) -> bool:
        """Whether the same rows have other values in the second run."""
        return bool(self.moves(self.rows).any())

    def moves_buffers(self) -> bool:
        """Whether the first run changed floating state."""
        before = self.engine.devices.fetch(self.state.buffers)
        floats = self.forward.variables.floats
        triples = zip(floats, before, self.results.buffers, strict=True)
        return any(is_float and not np.array_equal(old, new) for is_float, old, new in triples)

    def sees_others(self, extreme: int) -> bool:
        """Whether a row's value moves with the content of other rows, in draws of this kind."""
        results = self.run(self.rows, extreme=extreme) if extreme else self.results
        for row in np.flatnonzero(self.can_move).tolist():
            other = self.run(_but(self.others, self.rows, row), extreme=extreme)
            if self.moved(results, other)[row]:
                return True
        return False

    def draws_by_place(self, extreme: int) -> bool:
        """Whether uncoupled rows have other values as the first rows of a later microbatch."""
        start = self.size // 2
        order = np.roll(np.arange(self.size), -start)
        later = self.run(_rows(self.rows, order), start, extreme)

        def rolled_back(part: Tensor) -> Any:
            if len(part) != self.size:
                return part
            return np.roll(np.asarray(part), start, 0)

        values = {}
        for label, (value, weight) in later.values.items():
            values[label] = rolled_back(value), rolled_back(weight)
        results = self.run(self.rows, extreme=extreme)
        moved = self.moved(results, later._replace(values=values))
        moved = np.broadcast_to(moved, (self.size,))
        return bool(moved[start:].any())

    def draws_together(self) -> bool:
        """Whether a row's value moves with the draws for later rows.

        At both extremes, as a mask may be rare.
        """
        for extreme in (LATER, -LATER):
            moves = self.moves(self.rows, extreme=extreme)
            if moves[: self.size // 2].any():
                return True
        return False

    def extra(self) -> str:
        """Return how the model's other losses add up: "sum", "mean" or "whole"."""
        half = self.size // 2
        value = float(self.results.extra)
        if self.size != 2 * half or value == 0 or not np.isfinite(value):
            return "whole"
        early = self.run(_rows(self.rows, np.arange(half)))
        # with the same draws as in the whole
        rest = _rows(self.rows, np.arange(half, self.size))
        later = self.run(rest, half)
        parts = float(early.extra) + float(later.extra)
        if np.isclose(value, parts, rtol=1e-4):
            return "sum"
        return "mean" if np.isclose(value, parts / 2, rtol=1e-4) else "whole"


def probe(engine: Engine, forward: Forward, state: State, batch: Batch) -> Coupling:
    """Run the objective on a few rows of an update, and return the coupling of the rows."""
    if any(getattr(layer, "stateful", False) for layer in layers(forward.model)):
        return Coupling(keeps=True)
    if batch.num_rows < 2:
        return Coupling(unknown=True)
    facts = forward.facts
    runs = _Probe(engine, forward, state, batch)
    extremes = (0, ALL, -ALL) if facts.draws else (0,)
    couples = any(map(runs.sees_others, extremes))
    couples |= any(fact.couples for fact in facts.draws)
    extra = runs.extra() if facts.has_extra else "none"
    draws = runs.is_redrawn()
    if not (draws or couples or facts.has_whole):
        extremes = (0, PAIRS, -PAIRS) if facts.draws else (0,)
        draws = any(map(runs.draws_by_place, extremes)) or runs.draws_together()
    return Coupling(
        couples=couples and not facts.has_whole,
        moves=runs.moves_buffers(),
        whole=facts.has_whole,
        extra=extra,
        unknown=not (facts.has_whole or runs.can_move.any()),
        draws=draws,
        joins=facts.joins,
    )


def metrics_ignore_padding(engine: Engine, forward: Forward, state: State, batch: Batch) -> bool:
    """Whether rows of weight 0 add nothing to the metrics, by experiment."""
    rows = np.arange(_ROWS) % batch.num_rows
    few = engine.devices.place(batch.rows_at(rows))

    def both(state: State, batch: Tree) -> tuple[list, list]:
        return forward.padded(_values(engine, state), batch, _ROWS // 2)

    try:
        return _are_close(engine, both, state, few)
    # a user-defined metric may fail on row weights; the update raises its other errors
    except Exception:
        return False


def metrics_are_additive(engine: Engine, forward: Forward, state: State, batch: Batch) -> bool:
    """Whether the metrics' states are sums over rows, by experiment."""
    size = _ROWS // 2
    places = [(np.arange(size) + start) % batch.num_rows for start in (0, size)]
    parts = [engine.devices.place(batch.rows_at(rows)) for rows in places]

    def moves(state: State, parts: list) -> tuple[list, list]:
        def update(metrics: list, batch: Tree) -> list:
            values = _values(engine, state)._replace(metrics=metrics)
            return forward.sums(values, batch, None).metrics

        def minus(after: list, before: list) -> list:
            return [b - a for a, b in zip(before, after, strict=True)]

        one, two = (update(state.metrics, part) for part in parts)
        both = update(one, parts[1])
        return minus(both, one), minus(two, state.metrics)

    return _are_close(engine, moves, state, parts)


def _are_close(
    engine: Engine, function: Callable[..., tuple[list, list]], state: State, data: Tree
) -> bool:
    """Whether the two results of a function are equal up to rounding."""
    program = engine.programs.compile(function, (state, data), spends=False)
    results = engine.devices.fetch(program.call(state, data))
    pairs = zip(*results, strict=True)
    close = [np.allclose(a, b, rtol=1e-3, atol=1e-6, equal_nan=True) for a, b in pairs]
    return all(close)


@contextmanager
def inference(layers: Iterable[keras.layers.Layer]) -> Iterator[None]:
    """Run these BatchNormalization layers in inference mode, in which they do not couple rows."""
    layers = list(layers)
    for layer in layers:
        vars(layer)["call"] = partial(_without_training, layer)
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["call"]


def _without_training(
    layer: keras.layers.Layer,
    inputs: Tensor,
    training: bool | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    return type(layer).call(layer, inputs, training=False, mask=mask)


def _values(engine: Engine, state: State) -> Values:
    return Values(engine.variables.params(state), state.buffers, state.metrics)


def _but(batch: Tree, kept: Tree, row: int) -> Tree:
    """Return `batch` with one row replaced by the same row of `kept`."""

    def replaced(leaf: np.ndarray, other: np.ndarray) -> np.ndarray:
        changed = leaf.copy()
        changed[row] = other[row]
        return changed

    return tree.map_leaves(replaced, batch, kept)


def _rows(batch: Tree, rows: np.ndarray) -> Tree:
    return tree.map_leaves(lambda leaf: leaf[rows], batch)


def _shaken(batch: Tree) -> Tree:
    """Return the batch with changed floating values, for data whose rows are all alike."""

    def shake(leaf: np.ndarray) -> np.ndarray:
        if leaf.dtype.kind != "f":
            return leaf
        return (leaf * 1.25 + 0.5).astype(leaf.dtype)

    return tree.map_leaves(shake, batch)


def _wiggled(parameter: Tensor) -> Tensor:
    """Perturb a parameter: initial zeros would hide the coupling in the layers before."""
    if "float" not in str(parameter.dtype):
        return parameter
    size = int(np.prod(parameter.shape))
    numbers = np.cos(1.0 + np.arange(size)) * 0.05
    return parameter + ops.cast(numbers.reshape(parameter.shape), parameter.dtype)


def _compute_dtype(model: keras.Model) -> str:
    """Return the coarsest dtype that the model computes in: numpy's float16 for bfloat16."""
    dtypes = {keras.backend.standardize_dtype(layer.compute_dtype) for layer in layers(model)}
    if dtypes & {"float16", "bfloat16"}:
        return "float16"
    return "float64" if dtypes == {"float64"} else "float32"
