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
from wholestep.model.forward import Forward, Rows
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
    """

    couples: bool = False
    moves: bool = False
    whole: bool = False
    extra: str = "none"
    unknown: bool = False
    keeps: bool = False
    draws: bool = False
    custom: str = ""

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
        return self.cut_is_exact and self.extra == "none"

    def why(self, movers: Sequence[str] = ()) -> str:
        """Return the reasons why the batch may not be cut, as text; `movers` are the layers whose
        state moves.
        """
        names = [
            *movers[:_MOST_NAMED],
            *([f"{len(movers) - _MOST_NAMED} others"] if len(movers) > _MOST_NAMED else []),
        ]
        as_in = (
            f", as in {' and '.join(filter(None, (', '.join(names[:-1]), *names[-1:])))}"
            if names
            else ""
        )
        where = as_in if self.moves and names else ", in a layer or in the loss"
        reasons = {
            f"the rows of a batch see each other{where}": self.couples,
            f"the forward pass moves statistics of the batch{as_in}": self.moves
            and not self.couples,
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
        moves = "moving statistics move once per update, by the mean over the microbatches"
        known = f"If they do, {meets}." if self.unknown else f"{meets.capitalize()}."
        sentences = {known: self.couples or self.unknown, f"{moves.capitalize()}.": self.moves}
        means = " ".join(sentence for sentence, holds in sentences.items() if holds)
        will = "will" if self.couples else "may"
        return f"{will} not give the weights of whole batches: {self.why(movers)}. {means}"

    def explanation(self, movers: Sequence[str], *, is_cut: bool) -> str:
        """Return whether microbatches give the update of the whole batch, as text."""
        if self.cut_is_exact:
            return "Microbatches of any size give the update of the whole batch, up to rounding."
        if not self.cut_is_possible:
            return f"The batch cannot be cut into microbatches: {self.why(movers)}."
        will, would = ("will", "would") if self.couples else ("may", "might")
        first = (
            f"The weights {will} not be those"
            if is_cut
            else f"Microbatches {would} not give the weights"
        )
        return f"{first} of whole batches: {self.why(movers)}."


@dataclass
class Findings:
    """Measurements of a run. They are saved with it, so that it resumes on another machine with the
    same bits.

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
        """Return the number of rows to pad a batch of `count` rows to: the size of an earlier
        batch, or a power of two.

        So batches of many sizes need few programs.
        """
        shape = _text_of(tuple([(leaf.shape[1:], leaf.dtype) for leaf in tree.leaves(host)]))
        known = self.sizes.setdefault(shape, [])
        power = 1 << (count - 1).bit_length()
        fitting = [size for size in known if count <= size <= 2 * power]
        if not fitting:
            fitting = [power if known else count]
            known.extend(fitting)
        return min(fitting)


@lru_cache(maxsize=1024)
def _text_of(shapes: tuple[tuple[tuple[int, ...], np.dtype], ...]) -> str:
    return str([(shape, str(dtype)) for shape, dtype in shapes])


_ROWS = 4

Moved = Callable[[Rows, Rows], np.ndarray]


def probe(engine: Engine, forward: Forward, state: State, batch: Batch) -> Coupling:
    """Run the objective on a few rows of an update, and return the coupling of the rows."""
    num_rows = batch.num_rows
    if any(getattr(layer, "stateful", False) for layer in layers(forward.model)):
        return Coupling(keeps=True)
    if num_rows < 2:
        return Coupling(unknown=True)
    size = min(_ROWS, num_rows)
    spread = np.linspace(0, num_rows - 1, min(2 * size, num_rows)).astype(int)
    few = engine.devices.fetch(engine.devices.place(batch.rows_at(spread)))
    run = _runner(engine, forward, state)
    first = _rows(few, np.arange(size))
    one = run(first)
    moved = partial(_moved, compute_dtype=_compute_dtype(forward.model))
    other = _rows(few, np.resize(np.append(np.arange(size, len(spread)), 0), size))
    if not moved(one, run(other)).any():
        other = _shaken(first)
    can_move = moved(one, run(other))
    extremes = (0, ALL, -ALL) if forward.facts.draws else (0,)
    couples = any(
        _sees_others(run, first, other, one, moved, can_move, extreme) for extreme in extremes
    )
    couples |= any(fact.couples for fact in forward.facts.draws)
    before = engine.devices.fetch(state.buffers)
    moves = any(
        is_float and not np.array_equal(old, new)
        for is_float, old, new in zip(forward.variables.floats, before, one.buffers, strict=True)
    )
    whole = forward.facts.has_whole
    extra = _extra(run, first, size, one) if forward.facts.has_extra else "none"
    draws = bool(moved(one, run(first)).any())
    if not (draws or couples or whole):
        extremes = (0, PAIRS, -PAIRS) if forward.facts.draws else (0,)
        draws = any(_are_redrawn(run, first, size, moved, extreme) for extreme in extremes)
        draws = draws or _draw_together(run, first, size, one, moved)
    return Coupling(
        not whole and couples, moves, whole, extra, not (whole or can_move.any()), draws=draws
    )


def _sees_others(
    run: Callable[..., Rows],
    batch: Tree,
    other: Tree,
    one: Rows,
    moved: Moved,
    can_move: np.ndarray,
    extreme: int,
) -> bool:
    """Whether a row's value moves with the content of other rows, with regular or with extreme
    draws.
    """
    one = run(batch, extreme=extreme) if extreme else one
    rows = np.flatnonzero(can_move).tolist()
    return any(moved(one, run(_but(other, batch, row), extreme=extreme))[row] for row in rows)


def _are_redrawn(
    run: Callable[..., Rows], batch: Tree, size: int, moved: Moved, extreme: int
) -> bool:
    """Whether uncoupled rows have other values as the first rows of a later microbatch."""
    start = size // 2
    later = run(_rows(batch, np.roll(np.arange(size), -start)), start, extreme)
    back = [
        np.roll(part, start, 0) if len(part) == size else part
        for pair in later.values.values()
        for part in pair
    ]
    values = dict(zip(later.values, zip(back[::2], back[1::2], strict=True), strict=True))
    one = run(batch, extreme=extreme)
    return bool(np.broadcast_to(moved(one, later._replace(values=values)), (size,))[start:].any())


def _draw_together(
    run: Callable[..., Rows], batch: Tree, size: int, one: Rows, moved: Moved
) -> bool:
    """Whether a row's value moves with the draws for later rows. At both extremes, as a mask may be
    rare.
    """
    extremes = (run(batch, extreme=extreme) for extreme in (LATER, -LATER))
    return any(np.broadcast_to(moved(one, other), (size,))[: size // 2].any() for other in extremes)


def metrics_ignore_padding(engine: Engine, forward: Forward, state: State, batch: Batch) -> bool:
    """Whether rows of weight 0 add nothing to the metrics, by experiment."""
    few = engine.devices.place(batch.rows_at(np.arange(_ROWS) % batch.num_rows))

    def both(state: State, batch: Tree) -> tuple[list, list]:
        return forward.padded(_values(engine, state), batch, _ROWS // 2)

    try:
        alone, among = engine.devices.fetch(
            engine.programs.compile(both, (state, few), spends=False).call(state, few)
        )
    except (
        Exception
    ):  # a user-defined metric may fail on row weights; the update raises its other errors
        return False
    return all(
        np.allclose(a, b, rtol=1e-3, atol=1e-6, equal_nan=True)
        for a, b in zip(alone, among, strict=True)
    )


def metrics_are_additive(engine: Engine, forward: Forward, state: State, batch: Batch) -> bool:
    """Whether the metrics' states are sums over rows, by experiment."""
    size = _ROWS // 2
    parts = [
        engine.devices.place(batch.rows_at((np.arange(size) + i) % batch.num_rows))
        for i in (0, size)
    ]

    def after(state: State, parts: list) -> tuple[list, list]:
        def update(metrics: list, batch: Tree) -> list:
            return forward.sums(
                _values(engine, state)._replace(metrics=metrics), batch, None
            ).metrics

        one, two = (update(state.metrics, part) for part in parts)
        both = update(one, parts[1])
        return [b - a for a, b in zip(one, both, strict=True)], [
            b - a for a, b in zip(state.metrics, two, strict=True)
        ]

    moves = engine.devices.fetch(
        engine.programs.compile(after, (state, parts), spends=False).call(state, parts)
    )
    return all(
        np.allclose(a, b, rtol=1e-3, atol=1e-6, equal_nan=True) for a, b in zip(*moves, strict=True)
    )


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
    rows = np.arange(tree.num_rows(batch)) == row
    return tree.map_leaves(
        lambda b, k: np.where(rows.reshape(-1, *[1] * (b.ndim - 1)), k, b), batch, kept
    )


def _rows(batch: Tree, rows: np.ndarray) -> Tree:
    return tree.map_leaves(lambda leaf: leaf[rows], batch)


def _shaken(batch: Tree) -> Tree:
    """Return the batch with changed floating values, for data whose rows are all alike."""

    def shake(leaf: np.ndarray) -> np.ndarray:
        return (leaf * 1.25 + 0.5).astype(leaf.dtype) if leaf.dtype.kind == "f" else leaf

    return tree.map_leaves(shake, batch)


def _runner(engine: Engine, forward: Forward, state: State) -> Callable[..., Rows]:
    programs: dict[int, Callable] = {}

    def function(state: State, batch: Tree, start: Tensor, extreme: Tensor) -> Rows:
        values = _values(engine, state)
        values = values._replace(params=[_wiggled(p) for p in values.params])
        return replace(forward, extreme=extreme).rows(values, batch, start)

    def run(batch: Tree, start: int = 0, extreme: int = 0) -> Rows:
        given = engine.devices.place((batch, np.int32(start), np.int32(extreme)))
        arguments = (state, *given)
        size = tree.num_rows(batch)
        if size not in programs:
            programs[size] = engine.programs.compile(function, arguments, spends=False).call
        return engine.devices.fetch(programs[size](*arguments))

    return run


def _wiggled(parameter: Tensor) -> Tensor:
    """Perturb a parameter: a layer initialised with zeros would hide the coupling in the layers
    before it.
    """
    if "float" not in str(parameter.dtype):
        return parameter
    numbers = np.cos(1.0 + np.arange(int(np.prod(parameter.shape)))).reshape(parameter.shape) * 0.05
    return parameter + ops.cast(numbers, parameter.dtype)


def _moved(one: Rows, two: Rows, compute_dtype: str) -> np.ndarray:
    """Return which rows' values moved by more than rounding: bool (rows,)."""
    tolerance = 64 * float(np.finfo(compute_dtype).eps)
    moved = np.zeros((1,), bool)
    for label, pair in one.values.items():
        for a, b in zip(pair, two.values[label], strict=True):
            a = np.asarray(a, np.float64)
            b = np.asarray(b, np.float64)
            moved = moved | ~np.isclose(a, b, rtol=tolerance, atol=tolerance * 1e-3, equal_nan=True)
    return moved


def _compute_dtype(model: keras.Model) -> str:
    """Return the coarsest dtype that the model computes in; bfloat16 counts as float16, as numpy
    has no bfloat16.
    """
    dtypes = {keras.backend.standardize_dtype(layer.compute_dtype) for layer in layers(model)}
    if dtypes & {"float16", "bfloat16"}:
        return "float16"
    return "float64" if dtypes == {"float64"} else "float32"


def _extra(run: Callable[..., Rows], batch: Tree, size: int, whole: Rows) -> str:
    half = size // 2
    value = float(whole.extra)
    if size != 2 * half or value == 0 or not np.isfinite(value):
        return "whole"
    later = run(_rows(batch, np.arange(half, size)), half)  # with the same draws as in the whole
    parts = float(run(_rows(batch, np.arange(half))).extra) + float(later.extra)
    if np.isclose(value, parts, rtol=1e-4):
        return "sum"
    return "mean" if np.isclose(value, parts / 2, rtol=1e-4) else "whole"
