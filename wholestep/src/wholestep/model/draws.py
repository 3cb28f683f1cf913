"""Random draws that belong to rows: the numbers depend on the row's place in the update, not on the
cut.

Inside `drawing`, the functions of `keras.random` draw so in this thread. Traces on two batch sizes
show which axis of a draw holds rows.
"""

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops
from keras.src.backend import random as seam
from keras.src.random.seed_generator import draw_seed

from wholestep.engines import Engine
from wholestep.errors import SpecificationError, message, warn
from wholestep.model import distributions
from wholestep.model.distributions import FLOATS, Words
from wholestep.tree import Tensor

_OURS = (
    *("uniform", "normal", "truncated_normal", "randint", "categorical", "dropout", "shuffle"),
    *("gamma", "beta", "binomial"),
)
_WHOLE_NUMBERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")
_OF_TENSORS = {"categorical": "logits", "shuffle": "x"}
_APART = 1000003
_STRAYED = (
    "An objective must make the same random draws for every number of rows. {} was not drawn in "
    "the first trace: this "
    "draw and all later draws depend on how the batch is cut."
)


class Asked(NamedTuple):
    """One call of `keras.random` by an objective.

    Args:
        name: the function.
        shape: of the drawn array; None if it is known only when the program runs.
        along: the axis along which elements change places, of a shuffle.
        why: why the function cannot be computed from the random words of rows; "" if it can.
        is_inside: whether a separately traced function, or the body of a loop, made the call.
    """

    name: str
    shape: tuple[int, ...] | None
    along: int | None = None
    why: str = ""
    is_inside: bool = False


@dataclass(frozen=True)
class DrawFact:
    """Properties of one draw.

    Args:
        axis: the axis that holds rows; None if there is none, or it is not known.
        couples: whether rows change places.
        why: why the draw cannot be assigned to rows; "" if it can.
        is_inside: whether it is drawn in a separately traced function, or in the body of a loop.
        of_row: the shape of the traced draw, where the axis of rows counts one row.
    """

    name: str
    axis: int | None = None
    couples: bool = False
    why: str = ""
    is_inside: bool = False
    of_row: tuple[int, ...] = ()

    @property
    def is_ours(self) -> bool:
        """Whether every cut of the batch draws the same numbers."""
        return not (self.why or self.couples)

    def fits(self, shape: tuple[int, ...] | None, num_rows: int) -> bool:
        """Whether a draw of this shape can be this draw, with equally many numbers for every
        row.
        """
        if shape is None or len(shape) != len(self.of_row):
            return False
        return self.axis is None or shape[self.axis] % max(1, num_rows) == 0

    def is_like(self, shape: tuple[int, ...] | None, num_rows: int) -> bool:
        """Whether a draw of this shape has the traced shape, `of_row`, for every row."""
        if shape is None or not self.fits(shape, num_rows):
            return False
        return (
            tuple(
                size // (max(1, num_rows) if i == self.axis else 1) for i, size in enumerate(shape)
            )
            == self.of_row
        )


def compare(
    one: Sequence[Asked], num_rows: int, two: Sequence[Asked] | None
) -> tuple[DrawFact, ...]:
    """Return the properties of draws, from calls on `num_rows` rows and on twice as many (None:
    refused).

    >>> one = [Asked("uniform", (3, 5)), Asked("normal", (5,)), Asked("uniform", (4, 6))]
    >>> two = [Asked("uniform", (6, 5)), Asked("normal", (5,)), Asked("uniform", (4, 12))]
    >>> [fact.axis for fact in compare(one, 3, two)]
    [0, None, 1]
    """
    if two is None or [a.name for a in one] != [a.name for a in two]:
        why = "of another number of rows the objective draws otherwise"
        return tuple(DrawFact(asked.name, why=why, is_inside=asked.is_inside) for asked in one)
    return tuple(
        replace(_fact(a, b, num_rows), is_inside=a.is_inside) for a, b in zip(one, two, strict=True)
    )


def _fact(one: Asked, two: Asked, num_rows: int) -> DrawFact:
    if one.why:
        return DrawFact(one.name, why=one.why)
    if one.shape is None or two.shape is None:
        return DrawFact(one.name, why="its shape is known only when the program runs")
    shapes = f"its shape is {one.shape} of {num_rows} rows and {two.shape} of twice as many"
    if len(one.shape) != len(two.shape):
        return DrawFact(one.name, why=shapes)
    differing = [i for i, (a, b) in enumerate(zip(one.shape, two.shape, strict=True)) if a != b]
    if not differing:
        return DrawFact(one.name, of_row=one.shape)
    axis = differing[0]
    is_odd = one.shape[axis] % num_rows or two.shape[axis] != 2 * one.shape[axis]
    if len(differing) > 1 or is_odd or (one.name == "categorical" and axis):
        return DrawFact(one.name, why=shapes)
    of_row = tuple(size // (num_rows if i == axis else 1) for i, size in enumerate(one.shape))
    return DrawFact(one.name, axis, couples=one.along == axis, of_row=of_row)


@dataclass(frozen=True)
class Draws:
    """The behaviour of `keras.random` while an objective is traced on some rows.

    Args:
        first: the place in the update of the first row.
        facts: the properties of each draw, in order; None to draw as Keras does.
        extreme: see `Words`.
        frame: the engine's trace in which this was made; None outside a trace.
        is_backward: whether the gradient is traced, not the objective.
        asked: the draws requested so far.
    """

    engine: Engine
    first: Tensor | int
    num_rows: int
    facts: tuple[DrawFact, ...] | None
    extreme: Tensor | None = None
    frame: object = None
    is_backward: bool = False
    asked: list[Asked] = field(default_factory=list)
    _strayed: list[Asked] = field(default_factory=list)

    def tracing(self) -> AbstractContextManager:
        """Return a context in which separately traced functions are traced again, and so request
        their draws again.
        """
        is_asked = self.facts is None or any(fact.is_inside for fact in self.facts)
        return (
            self.engine.traces.tracing_anew()
            if is_asked and not self.is_backward
            else nullcontext()
        )

    def draw(self, name: str, keras_own: Callable[..., Tensor], given: dict[str, Any]) -> Tensor:
        """Return the numbers of one call of `keras.random`: Keras' own, unless the draw is known to
        belong to rows.

        Raises:
            SpecificationError: the place of the first row is not available at this point of the
                trace.
        """
        is_kept = self.engine.traces.is_kept(self.frame)
        if is_kept or (name == "dropout" and _is_number(given["rate"]) and given["rate"] in (0, 1)):
            return keras_own(**given)
        if name == "dropout":
            given = given | {"noise_shape": _noise_shape(given["inputs"], given["noise_shape"])}
        if name in _OF_TENSORS:
            given = given | {_OF_TENSORS[name]: ops.convert_to_tensor(given[_OF_TENSORS[name]])}
        asked = _asked(name, given)._replace(is_inside=self.engine.traces.frame() is not self.frame)
        self.asked.append(asked)
        if self.facts is None or _is_typed_key(given["seed"]):
            return keras_own(**given)
        fact = self._fact(asked)
        if self.is_backward and asked.is_inside and not self.engine.traces.closes_over:
            if not fact.is_ours:
                return keras_own(**given)
            must = "A loop, or a separately compiled function, must draw in its forward pass only."
            received = f"keras.random.{name} in its backward pass"
            raise SpecificationError(
                message(must, received, "jax.checkpoint, which draws nothing again.")
            )
        seed = given.pop("seed")
        state = seed if ops.is_tensor(seed) else draw_seed(seed)
        if not fact.is_ours:
            return keras_own(**given, seed=_Given(_apart(state, self.first)))
        if name == "shuffle" and self.engine.random.shuffles_slices:
            words = Words(self.engine, state, self.first, self.num_rows, None, self.extreme)
            return distributions.shuffle_slices(words, **given)
        if name == "shuffle" and fact.axis is None:
            return keras_own(**given, seed=_Given(state))
        if "shape" in given:
            given["shape"] = asked.shape
        words = Words(self.engine, state, self.first, self.num_rows, fact.axis, self.extreme)
        return getattr(distributions, name)(words, **given)

    def _fact(self, asked: Asked) -> DrawFact:
        """Return the properties of the latest draw; once a draw was not recognised, only that it is
        unknown.
        """
        assert self.facts is not None
        if not self._strayed:
            number = len(self.asked) - 1
            # A gradient draws in another order, and a function with a custom gradient draws once
            # more.
            comes = () if self.is_backward else self.facts[number : number + 1]
            for fact in comes:
                if fact.name == asked.name and (
                    not fact.is_ours or fact.fits(asked.shape, self.num_rows)
                ):
                    return fact
            ours = [fact for fact in self.facts if fact.name == asked.name and fact.is_ours]
            alike = [fact for fact in ours if fact.is_like(asked.shape, self.num_rows)]
            if len({fact.axis for fact in alike}) == 1:
                return alike[0]
            self._strayed.append(asked)
            warn(_STRAYED.format(f"keras.random.{asked.name} of shape {asked.shape}"))
        return DrawFact(asked.name, why="the objective drew otherwise before")


def _is_typed_key(seed: object) -> bool:
    """Whether a seed is a typed key of JAX, which is no array of numbers."""
    return str(getattr(seed, "dtype", "")).startswith("key<")


class _Given(keras.random.SeedGenerator):
    """A seed generator that returns the state drawn from another one."""

    def __init__(self, state: Tensor):
        self._drawn = state

    def next(self, ordered: bool = True) -> Tensor:
        """Return the state."""
        return self._drawn


def _apart(state: Tensor, first: Tensor | int) -> Tensor:
    """Return another seed for each microbatch, so that draws that cannot belong to rows are at
    least not repeated.
    """
    first = ops.cast(first, state.dtype) * ops.cast(_APART, state.dtype)
    return state + ops.stack([first, ops.zeros_like(first)])


def _noise_shape(inputs: Tensor, noise_shape: Sequence | None) -> tuple:
    shape = tuple(ops.shape(inputs))
    pairs = zip(shape, shape if noise_shape is None else noise_shape, strict=True)
    return tuple(a if b is None else b for a, b in pairs)


def _asked(name: str, given: dict[str, Any]) -> Asked:
    """Return the request, with the reason if it cannot be computed from the random words of
    rows.
    """
    if name == "dropout":
        why = "" if _is_number(given["rate"]) else "its rate is a tensor"
        return Asked(name, _static(given["noise_shape"]), why=why)
    if name == "shuffle":
        shape = _static(given["x"].shape)
        return Asked(name, shape, along=None if shape is None else given["axis"] % len(shape))
    if name == "categorical":
        why = (
            ""
            if len(given["logits"].shape) == 2
            else f"its logits have the shape {tuple(given['logits'].shape)}"
        )
        return Asked(name, _static(given["logits"].shape), why=why)
    dtype = keras.backend.standardize_dtype(given["dtype"] or keras.config.floatx())
    why = (
        _why_no_randint(given, dtype)
        if name == "randint"
        else ""
        if dtype in FLOATS
        else f"its dtype is {dtype}"
    )
    return Asked(
        name,
        _static(given["shape"]),
        why="its seed is a key of JAX" if _is_typed_key(given["seed"]) else why,
    )


def _is_number(value: object) -> bool:
    """Whether a value is a number on the host."""
    return isinstance(value, int | float | np.number)


def _why_no_randint(given: dict[str, Any], dtype: str) -> str:
    """Return why the integers cannot be computed from 32-bit words, judged by bounds and dtype; ""
    if they can.
    """
    if dtype in ("int8", "int16", "int32", "uint8", "uint16"):
        return ""
    bounds = given["minval"], given["maxval"]
    if dtype not in _WHOLE_NUMBERS or not all(
        isinstance(bound, int | np.integer) for bound in bounds
    ):
        return f"its bounds are not known here, or its dtype ({dtype}) is not of whole numbers"
    is_known = 0 < int(bounds[1]) - int(bounds[0]) < 2**32
    return "" if is_known else "its bounds are 2**32 or more apart, or in the wrong order"


def _static(shape: Sequence) -> tuple[int, ...] | None:
    """Return a shape as numbers; None if it is known only when the program runs."""
    try:
        return tuple(int(size) for size in shape)
    except TypeError:
        return None


# ---- while an objective is traced ----

_CURRENT: ContextVar[Draws | None] = ContextVar("draws", default=None)
_KERAS_OWN: dict[str, Callable[..., Tensor]] = {}
_LOCK = threading.Lock()
_holders: list[Draws] = []


@contextmanager
def drawing(draws: Draws) -> Iterator[Draws]:
    """Make `keras.random` draw so in this thread; other threads draw as in Keras.

    Replicas are traced in threads that take turns: the first to enter patches the functions, the
    last restores them.
    """
    with _LOCK:
        if not _holders:
            for name in _OURS:
                _KERAS_OWN[name] = getattr(seam, name)
                setattr(seam, name, _instead(name, _KERAS_OWN[name]))
        _holders.append(draws)
    token = _CURRENT.set(draws)
    try:
        with draws.tracing():
            yield draws
    finally:
        _CURRENT.reset(token)
        with _LOCK:
            del _holders[-1]
            if not _holders:
                for name, keras_own in _KERAS_OWN.items():
                    setattr(seam, name, keras_own)


@contextmanager
def drawing_as_keras() -> Iterator[None]:
    """Make `keras.random` draw as Keras does in this thread, inside `drawing` too."""
    token = _CURRENT.set(None)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def _instead(name: str, keras_own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    signature = inspect.signature(keras_own)

    @wraps(keras_own)
    def draw(*args: Any, **kwargs: Any) -> Tensor:
        draws = _CURRENT.get()
        if draws is None:
            return keras_own(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return draws.draw(name, keras_own, dict(bound.arguments))

    return draw
