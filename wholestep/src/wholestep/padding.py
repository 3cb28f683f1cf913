"""Does padding enter an update? Other padding of a batch must move no weight."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Any

import keras
import numpy as np

from wholestep import tree
from wholestep.checks import is_number
from wholestep.errors import BatchError, NonFiniteError, invalid, message
from wholestep.keras_private import flatten_layers
from wholestep.patches import replaced
from wholestep.setup import Setup
from wholestep.steps import run_update
from wholestep.tree import Tree

_MOST_NAMED = 4
_TRIES = 2  # other values of each leaf
_ROUNDING = {True: 2e-2, False: 1e-4}  # of the update's length; True: computed in 16 bits
Values = list[np.ndarray]


class Effect(Enum):
    """The effect of a change of padding on the update."""

    NONE = auto()
    ENTERS = auto()
    MARKS = auto()  # not tried: the model may know padding by the value that would change
    DRAWS = auto()  # not tried: random numbers that belong to places would be others
    REFUSED = auto()  # the model does not take such a batch


@dataclass(frozen=True)
class PaddingChange:
    """A change of the padding of a batch.

    Args:
        what: the change, as a phrase.
        moves: by the paths of the weights that it moves, how far, as a part of the length of the
            whole update.
        error: the model's error about the changed batch.
    """

    what: str
    effect: Effect
    moves: dict[str, float] = field(default_factory=dict)
    error: str = ""

    def __str__(self) -> str:
        if self.effect is Effect.MARKS:
            return f"{self.what}: not tried, as all have one value, which may mark padding"
        if self.effect is Effect.DRAWS:
            return (
                f"{self.what}: not tried, as the model draws random numbers, not for dropout alone"
            )
        if self.effect is Effect.REFUSED:
            return f"{self.what}: refused by the model ({self.error})"
        if self.effect is Effect.NONE:
            return f"{self.what}: no weight moves"
        farthest = sorted(self.moves, key=lambda path: -self.moves[path])[:_MOST_NAMED]
        names = ", ".join(f"{path} ({self.moves[path]:.2g})" for path in farthest)
        return f"{self.what}: {len(self.moves)} weights move: {names}"


@dataclass(frozen=True)
class PaddingReport:
    """Whether padding enters an update; see `Trainer.check_padding`.

    Args:
        changes: those that were tried, or could not be.
        is_named: whether the padded leaves were named.
    """

    changes: tuple[PaddingChange, ...]
    is_named: bool

    @property
    def is_right(self) -> bool:
        """Whether some padding was changed, and no weight moved."""
        effects = {change.effect for change in self.changes}
        return Effect.NONE in effects and Effect.ENTERS not in effects

    def __str__(self) -> str:
        lines = list(map(str, self.changes))
        head = "Padding does not enter the update."
        if any(change.effect is Effect.ENTERS for change in self.changes):
            head = "Padding enters the update. Distances are parts of the update's length."
            if not self.is_named:
                lines.append("If some of these leaves are not padded, name those that are.")
        elif not self.is_right:
            head = "No padding could be changed."
        return "\n  ".join([head, *lines])


def check_padding(setup: Setup, batch: Tree, padding: Tree) -> PaddingReport:
    """Return whether the padding of a batch enters an update; see `Trainer.check_padding`."""
    with setup.trial() as trial, ExitStack() as without_dropout:
        for layer, name in _dropouts(setup.model):
            without_dropout.enter_context(replaced(layer, **{name: 0.0}))
        host = trial.single_batch(batch, "fit")
        masks = _masks(host, padding)
        trained = _Trained(trial, host)
        try:
            trained.begin(host)
            changes = tuple(_changes(trained, host, masks))
        finally:
            trained.restore()
    return PaddingReport(changes, isinstance(padding, dict | list | tuple))


def _dropouts(model: keras.Model) -> Iterator[tuple[keras.Layer, str]]:
    """Yield (layer, name of its rate) for every layer of Keras with dropout."""
    for layer in flatten_layers(model)():
        if type(layer).__module__.startswith("keras."):
            for name in ("rate", "dropout", "recurrent_dropout"):
                if is_number(getattr(layer, name, None)):
                    yield layer, name


def _masks(host: Tree, padding: Tree) -> dict[tuple, np.ndarray]:
    """Return the padded places of leaves, by their paths.

    Raises:
        BatchError: a mask fits no leaf, or has no place.
    """
    known = dict(_leaves(host))
    if isinstance(padding, dict | list | tuple):
        masks = {path: np.asarray(places) for path, places in _leaves(padding)}
        for path, places in masks.items():
            if path not in known or not _fits(places, known[path]):
                raise _misfit(places, f"for {tree.name(path)}", host)
    else:
        places = np.asarray(padding)
        masks = {path: places for path, leaf in known.items() if _fits(places, leaf)}
        if not masks:
            raise _misfit(places, "for any leaf", host)
    if not any(places.any() for places in masks.values()):
        must = "Some place of the batch must be padded."
        raise BatchError(message(must, "a mask without one", "padding=tokens == 0."))
    return masks


def _misfit(places: np.ndarray, whose: str, host: Tree) -> BatchError:
    must = "A mask of padding must be of booleans, with the first axes of its leaf."
    leaves = ", ".join(f"{tree.name(path)} {leaf.shape}" for path, leaf in _leaves(host))
    attempt = "tokens == 0; or such masks, nested as the batch is, for the leaves that are padded."
    return BatchError(
        message(must, f"{places.dtype} {places.shape} {whose} of a batch of {leaves}", attempt)
    )


def _leaves(nest: Tree) -> Iterator[tuple[tuple, Any]]:
    return ((p, leaf) for p, leaf in keras.tree.flatten_with_path(nest) if leaf is not None)


def _fits(places: np.ndarray, leaf: np.ndarray) -> bool:
    return places.dtype == bool and places.ndim > 0 and leaf.shape[: places.ndim] == places.shape


def _changes(
    trained: "_Trained", host: Tree, masks: dict[tuple, np.ndarray]
) -> Iterator[PaddingChange]:
    draw = np.random.default_rng(0)
    known = dict(_leaves(host))
    for path, places in masks.items():
        leaf = known[path]
        is_mask = any(np.array_equal(leaf, m) or np.array_equal(leaf, ~m) for m in masks.values())
        if is_mask or not places.any():
            continue
        what = f"other values at {int(places.sum())} padded places of {tree.name(path)}"
        if _has_one_value(leaf[places]):
            yield PaddingChange(what, Effect.MARKS)
            continue
        others = [_with(host, {path: _others(leaf, places, draw)}) for _ in range(_TRIES)]
        yield trained.changed(what, others)
    for side in Side:
        padded = {path: places for path, places in masks.items() if side.pads(places)}
        if padded:
            num = max(1, min(places.shape[1] for places in padded.values()) // 4)
            what = f"{num} more padded place{'s' * (num != 1)} at the {side.value}"
            yield trained.longer(what, partial(_longer, host, padded, side, num, draw))


class Side(Enum):
    """The side of a sequence on which it is padded."""

    BEGIN = "begin"
    END = "end"

    def pads(self, places: np.ndarray) -> bool:
        """Whether all padding of these (rows, places) is on this side."""
        if places.ndim != 2 or not places.any():
            return False
        ordered = places[:, ::-1] if self is Side.BEGIN else places
        return bool(np.all(ordered[:, 1:] >= ordered[:, :-1]))


def _longer(
    host: Tree,
    padded: dict[tuple, np.ndarray],
    side: Side,
    num: int,
    draw: np.random.Generator,
) -> Tree:
    """Return the batch with more padding in these leaves: values of their padded places."""
    known = dict(_leaves(host))
    longer = {}
    for path, places in padded.items():
        leaf = known[path]
        pool = leaf[places]
        more = pool[draw.integers(len(pool), size=(len(leaf), num))]
        longer[path] = np.concatenate([more, leaf] if side is Side.BEGIN else [leaf, more], axis=1)
    return _with(host, longer)


def _has_one_value(values: np.ndarray) -> bool:
    return bool(np.all(values == values.reshape(-1)[0]))


def _others(leaf: np.ndarray, places: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Return the leaf with values of other places, if there are some, at the padded ones."""
    changed = leaf.copy()
    pool = leaf if places.all() else leaf[~places]
    pool = pool.reshape(-1, *leaf.shape[places.ndim :])
    changed[places] = pool[draw.integers(len(pool), size=int(places.sum()))]
    return changed


def _with(host: Tree, others: dict[tuple, np.ndarray]) -> Tree:
    """Return the batch with other leaves, by their paths."""
    leaves = [others.get(path, leaf) for path, leaf in keras.tree.flatten_with_path(host)]
    return keras.tree.pack_sequence_as(host, leaves)


class _Trained:
    """The weights and moving statistics after an update of a batch, and how far others move them.

    Args:
        trial: a separate run, whose optimizer subtracts the gradient.
    """

    def __init__(self, trial: Setup, host: Tree):
        self._trial = trial
        self._executor = trial.executor_to_update(lambda: host)
        self._variables = self._executor.variables.all
        self._before = [np.array(keras.ops.convert_to_numpy(v)) for v in self._variables]
        known = self._executor.variables
        floats = [v for v, is_float in zip(known.buffers, known.floats, strict=True) if is_float]
        self._watched = [*known.params, *floats]
        layers = flatten_layers(self._trial.model)()
        in_16_bits = {"16" in str(layer.compute_dtype) for layer in layers}
        self._rounding = _ROUNDING[True in in_16_bits]
        self._base: Values = []
        self._length = 0.0

    def begin(self, host: Tree) -> None:
        """Update by the batch as it is.

        Raises:
            SpecificationError: no weight moves.
        """
        self._base = self._after(host)
        held = {id(v): before for v, before in zip(self._variables, self._before, strict=True)}
        steps = [self._base[i] - held[id(v)] for i, v in enumerate(self._watched)]
        self._length = _norm(steps)
        if not self._length:
            raise invalid(
                "The update must move the weights.",
                "an update of length 0",
                "let a layer train, or pass a batch from which the model learns.",
            )

    def changed(self, what: str, batches: Iterable[Tree]) -> PaddingChange:
        """Return the effect of a change, of which these are the batches."""
        moves: dict[str, float] = {}
        for batch in batches:
            try:
                after = self._after(batch)
            except NonFiniteError:
                after = [np.full_like(base, np.nan) for base in self._base]
            for variable, base, other in zip(self._watched, self._base, after, strict=True):
                distance = _norm([other - base]) / self._length
                if not distance <= self._rounding:  # or it is not finite
                    moves[variable.path] = max(distance, moves.get(variable.path, 0.0))
        return PaddingChange(what, Effect.ENTERS if moves else Effect.NONE, moves)

    def longer(self, what: str, longer: Callable[[], Tree]) -> PaddingChange:
        """Return the effect of a longer batch, which the model may refuse."""
        programs = self._executor.planner.programs.values()
        if any(program.forward.facts.draws for program in programs):
            return PaddingChange(what, Effect.DRAWS)
        batch = longer()
        try:
            self._after(batch)
        except NonFiniteError:
            error = "its update is not finite: a table of positions may end before"
            return PaddingChange(what, Effect.REFUSED, error=error)
        except Exception as error:  # of the user's model
            return PaddingChange(what, Effect.REFUSED, error=_brief(error))
        return self.changed(what, [batch])

    def restore(self) -> None:
        """Assign the values from before to all variables."""
        for variable, value in zip(self._variables, self._before, strict=True):
            variable.assign(value)

    def _after(self, host: Tree) -> Values:
        self.restore()
        logs = run_update(self._executor, self._trial.run, host)
        dict(logs)  # raises if the update is not finite
        return [np.array(keras.ops.convert_to_numpy(v)) for v in self._watched]


def _brief(error: Exception) -> str:
    """Return the first line of an error that is no heading, without its advice."""
    lines = [line for line in str(error).splitlines() if line and not line.endswith(":")]
    return next(iter(lines), type(error).__name__).split(" Try:")[0][:160]


def _norm(values: Values) -> float:
    return float(np.sqrt(sum(np.sum(np.square(value, dtype=float)) for value in values)))
