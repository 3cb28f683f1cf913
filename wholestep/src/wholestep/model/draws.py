"""Random draws of rows: the numbers depend on a row's place in the update, not on the cut.

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

from wholestep.engines import Engine
from wholestep.errors import SpecificationError, message, warn
from wholestep.keras_private import backend_random as seam
from wholestep.keras_private import draw_seed
from wholestep.model import distributions
from wholestep.model.distributions import RandomBits
from wholestep.tree import Tensor

_OURS = (
    "uniform",
    "normal",
    "truncated_normal",
    "randint",
    "categorical",
    "dropout",
    "shuffle",
    "gamma",
    "beta",
    "binomial",
)
_FLOATS = "float16", "bfloat16", "float32", "float64"
_SMALL_INTEGERS = "int8", "int16", "int32", "uint8", "uint16"
_INTEGERS = *_SMALL_INTEGERS, "int64", "uint32"
_TENSOR_OF = {"categorical": "logits", "shuffle": "x"}
_APART = 1000003
_UNEXPECTED = (
    "An objective must make the same random draws for every number of rows. {} was not drawn in "
    "the first trace: this draw and all later draws depend on how the batch is cut."
)


class DrawRequest(NamedTuple):
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
        """Whether a draw of this shape can be this draw, with equally many numbers for each row."""
        if shape is None or len(shape) != len(self.of_row):
            return False
        return self.axis is None or shape[self.axis] % max(1, num_rows) == 0

    def is_like(self, shape: tuple[int, ...] | None, num_rows: int) -> bool:
        """Whether a draw of this shape has the traced shape, `of_row`, for every row."""
        sizes = list(self.of_row)
        if self.axis is not None:
            sizes[self.axis] *= max(1, num_rows)
        return shape == tuple(sizes)


def compare(
    one: Sequence[DrawRequest], num_rows: int, two: Sequence[DrawRequest] | None
) -> tuple[DrawFact, ...]:
    """Return the properties of draws, by the requests on `num_rows` rows and on twice as many.

    Args:
        two: None if the objective refuses twice as many rows.

    >>> one = [DrawRequest(*draw) for draw in [("uniform", (3, 5)), ("normal", (5,))]]
    >>> two = [DrawRequest(*draw) for draw in [("uniform", (6, 5)), ("normal", (5,))]]
    >>> [fact.axis for fact in compare(one, 3, two)]
    [0, None]
    """
    if two is None or [draw.name for draw in one] != [draw.name for draw in two]:
        why = "of another number of rows the objective draws otherwise"
        return tuple(DrawFact(draw.name, why=why, is_inside=draw.is_inside) for draw in one)
    facts = (_compared(a, b, num_rows) for a, b in zip(one, two, strict=True))
    return tuple(
        replace(fact, is_inside=draw.is_inside) for fact, draw in zip(facts, one, strict=True)
    )


def _compared(one: DrawRequest, two: DrawRequest, num_rows: int) -> DrawFact:
    name, shape = one.name, one.shape
    if one.why:
        return DrawFact(name, why=one.why)
    if shape is None or two.shape is None:
        return DrawFact(name, why="its shape is known only when the program runs")
    different = f"its shape is {shape} of {num_rows} rows and {two.shape} of twice as many"
    if len(shape) != len(two.shape):
        return DrawFact(name, why=different)
    axes = np.flatnonzero(np.not_equal(shape, two.shape)).tolist()
    if not axes:
        return DrawFact(name, of_row=shape)
    axis = axes[0]
    is_odd = shape[axis] % num_rows or two.shape[axis] != 2 * shape[axis]
    if len(axes) > 1 or is_odd or (name == "categorical" and axis):
        return DrawFact(name, why=different)
    of_row = list(shape)
    of_row[axis] //= num_rows
    return DrawFact(name, axis, couples=one.along == axis, of_row=tuple(of_row))


@dataclass(frozen=True)
class Draws:
    """The behaviour of `keras.random` while an objective is traced on some rows.

    Args:
        first: the place in the update of the first row.
        facts: the properties of each draw, in order; None to draw as Keras does.
        extreme: see `RandomBits`.
        frame: the engine's trace in which this was made; None outside a trace.
        is_backward: whether the gradient is traced, not the objective.
        requests: the draws requested so far.
    """

    engine: Engine
    first: Tensor | int
    num_rows: int
    facts: tuple[DrawFact, ...] | None
    extreme: Tensor | None = None
    frame: object = None
    is_backward: bool = False
    requests: list[DrawRequest] = field(default_factory=list)
    _unexpected: list[DrawRequest] = field(default_factory=list)

    def tracing(self) -> AbstractContextManager:
        """Return a context that traces separately traced functions again, for their requests."""
        has_requests = self.facts is None or any(fact.is_inside for fact in self.facts)
        if has_requests and not self.is_backward:
            return self.engine.traces.tracing_anew()
        return nullcontext()

    def draw(self, name: str, keras_draw: Callable[..., Tensor], given: dict[str, Any]) -> Tensor:
        """Return the numbers of one call of `keras.random`: Keras' unless the draw has known rows.

        Args:
            given: the arguments of the call by name.

        Raises:
            SpecificationError: the place of the first row is not available at this point of the
                trace.
        """
        traces = self.engine.traces
        is_constant = name == "dropout" and _is_number(given["rate"]) and given["rate"] in (0, 1)
        if is_constant or traces.is_kept(self.frame):
            return keras_draw(**given)
        if name == "dropout":
            given["noise_shape"] = _noise_shape(given["inputs"], given["noise_shape"])
        if tensor := _TENSOR_OF.get(name):
            given[tensor] = ops.convert_to_tensor(given[tensor])
        request = _request(name, given)._replace(is_inside=traces.frame() is not self.frame)
        self.requests.append(request)
        if self.facts is None or _is_typed_key(given["seed"]):
            return keras_draw(**given)
        fact = self._fact(request)
        if request.is_inside and self.is_backward and not traces.closes_over:
            if not fact.is_ours:
                return keras_draw(**given)
            must = "A loop, or a separately compiled function, must draw in its forward pass only."
            received = f"keras.random.{name} in its backward pass"
            attempt = "jax.checkpoint, which draws nothing again."
            raise SpecificationError(message(must, received, attempt))
        return self._draw_rows(request, fact, keras_draw, given)

    def _draw_rows(
        self,
        request: DrawRequest,
        fact: DrawFact,
        keras_draw: Callable[..., Tensor],
        given: dict[str, Any],
    ) -> Tensor:
        seed = given.pop("seed")
        state = seed if ops.is_tensor(seed) else draw_seed(seed)
        if not fact.is_ours:
            return keras_draw(**given, seed=_FixedSeed(_apart(state, self.first)))
        axis = fact.axis
        function = getattr(distributions, request.name)
        if request.name == "shuffle":
            if self.engine.random.shuffles_slices:
                axis = None
                function = distributions.shuffle_slices
            elif axis is None:
                return keras_draw(**given, seed=_FixedSeed(state))
        if "shape" in given:
            given["shape"] = request.shape
            if request.name != "randint":
                given["dtype"] = _float_dtype(given["dtype"])
        bits = RandomBits(self.engine, state, self.first, self.num_rows, axis, self.extreme)
        return function(bits, **given)

    def _fact(self, request: DrawRequest) -> DrawFact:
        """Return the properties of the latest draw; all are unknown after an unexpected draw."""
        assert self.facts is not None
        if self._unexpected:
            return DrawFact(request.name, why="the objective drew otherwise before")
        shape = request.shape
        facts = [fact for fact in self.facts if fact.name == request.name]
        # A gradient draws in another order, and a function with a custom gradient draws once more.
        if not self.is_backward and len(self.requests) <= len(self.facts):
            fact = self.facts[len(self.requests) - 1]
            can_be = not fact.is_ours or fact.fits(shape, self.num_rows)
            if fact.name == request.name and can_be:
                return fact
        alike = [fact for fact in facts if fact.is_ours and fact.is_like(shape, self.num_rows)]
        if len({fact.axis for fact in alike}) == 1:
            return alike[0]
        self._unexpected.append(request)
        warn(_UNEXPECTED.format(f"keras.random.{request.name} of shape {shape}"))
        return self._fact(request)


def _is_typed_key(seed: object) -> bool:
    """Whether a seed is a typed key of JAX, which is no array of numbers."""
    return str(getattr(seed, "dtype", "")).startswith("key<")


class _FixedSeed(keras.random.SeedGenerator):
    """A seed generator that returns a given state."""

    def __init__(self, state: Tensor):
        self._fixed = state

    def next(self, ordered: bool = True) -> Tensor:
        """Return the state."""
        return self._fixed


def _apart(state: Tensor, first: Tensor | int) -> Tensor:
    """Return another seed for each microbatch, so that it does not repeat draws without rows."""
    first = ops.cast(first, state.dtype) * ops.cast(_APART, state.dtype)
    return state + ops.stack([first, ops.zeros_like(first)])


def _noise_shape(inputs: Tensor, noise_shape: Sequence | None) -> tuple:
    shape = tuple(ops.shape(inputs))
    pairs = zip(shape, shape if noise_shape is None else noise_shape, strict=True)
    return tuple(a if b is None else b for a, b in pairs)


def _request(name: str, given: dict[str, Any]) -> DrawRequest:
    """Return the request, with the reason if no random words of rows can answer it."""
    along = None
    why = ""
    if name == "dropout":
        shape = given["noise_shape"]
        why = "" if _is_number(given["rate"]) else "its rate is a tensor"
    elif name == "shuffle":
        shape = given["x"].shape
        along = given["axis"] % len(shape)
    elif name == "categorical":
        shape = given["logits"].shape
        why = "" if len(shape) == 2 else f"its logits have the shape {tuple(shape)}"
    else:
        shape = given["shape"]
        why = _why_unknown(name, given)
    return DrawRequest(name, _static(shape), along, why)


def _is_number(value: object) -> bool:
    """Whether a value is a number on the host."""
    return isinstance(value, int | float | np.number)


def _why_unknown(name: str, given: dict[str, Any]) -> str:
    if _is_typed_key(given["seed"]):
        return "its seed is a key of JAX"
    dtype = keras.backend.standardize_dtype(given["dtype"] or keras.config.floatx())
    if name == "randint":
        return _why_no_randint(given["minval"], given["maxval"], dtype)
    return "" if dtype in _FLOATS else f"its dtype is {dtype}"


def _why_no_randint(low: Any, high: Any, dtype: str) -> str:
    """Return why words of 32 bits cannot give the integers of [low, high); "" if they can."""
    if dtype in _SMALL_INTEGERS:
        return ""
    are_known = isinstance(low, int | np.integer) and isinstance(high, int | np.integer)
    if not are_known or dtype not in _INTEGERS:
        return f"its bounds are not known here, or its dtype ({dtype}) is not of whole numbers"
    if 0 < int(high) - int(low) < 2**32:
        return ""
    return "its bounds are 2**32 or more apart, or in the wrong order"


def _float_dtype(dtype: str | None) -> str:
    """Return the dtype of the result: floatx if None, and float32 where JAX has no 64 bits."""
    dtype = keras.backend.standardize_dtype(dtype or keras.config.floatx())
    if dtype != "float64":
        return dtype
    return keras.backend.standardize_dtype(ops.cast(0, dtype).dtype)


def _static(shape: Sequence) -> tuple[int, ...] | None:
    """Return a shape as numbers; None if it is known only when the program runs."""
    try:
        return tuple(int(size) for size in shape)
    except TypeError:
        return None


# ---- while an objective is traced ----

_CURRENT: ContextVar[Draws | None] = ContextVar("draws", default=None)
_KERAS_DRAWS: dict[str, Callable[..., Tensor]] = {}
_LOCK = threading.Lock()
_holders: list[Draws] = []


@contextmanager
def drawing(draws: Draws) -> Iterator[Draws]:
    """Let `draws` answer `keras.random` in this thread; other threads draw as in Keras.

    Replicas are traced in threads that take turns: the first to enter patches the functions, the
    last restores them.
    """
    with _LOCK:
        if not _holders:
            for name in _OURS:
                _KERAS_DRAWS[name] = getattr(seam, name)
                setattr(seam, name, _replacement(name, _KERAS_DRAWS[name]))
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
                for name, keras_draw in _KERAS_DRAWS.items():
                    setattr(seam, name, keras_draw)


@contextmanager
def drawing_as_keras() -> Iterator[None]:
    """Make `keras.random` draw as Keras does in this thread, inside `drawing` too."""
    token = _CURRENT.set(None)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def _replacement(name: str, keras_draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    signature = inspect.signature(keras_draw)

    @wraps(keras_draw)
    def draw(*args: Any, **kwargs: Any) -> Tensor:
        draws = _CURRENT.get()
        if draws is None:
            return keras_draw(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return draws.draw(name, keras_draw, dict(bound.arguments))

    return draw
