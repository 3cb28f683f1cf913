"""The values of a script's names while it trains, the Python numbers that its traced functions read, its places."""

import ast
import inspect
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from dis import get_instructions
from itertools import islice, takewhile
from traceback import walk_tb
from types import CodeType, FrameType, GeneratorType, ModuleType, TracebackType
from typing import Any, NamedTuple

import keras
import numpy as np

from stepcheck.command.stop import frames
from stepcheck.errors import message
from stepcheck.report.found import Likely
from stepcheck.user_code.source import LIBRARIES, is_of_user, parsed

_NO_CODE = (lambda: None).__code__
_NUM_INSIDE = 64  # the most values of a container or an object, two levels deep
_NUM_FRAMES, _NUM_BESIDE = 3, 8  # functions whose names hold a batch, and values of it
_MOST_COLUMNS = 8  # of an array, each of which may be an input
_LOADS = "LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST", "LOAD_DEREF"
_TRACING = "pjit.py", "polymorphic_function.py"  # files of JAX and TensorFlow in which a trace begins


class Named(NamedTuple):
    """A value under its name; `home` tells namespaces apart."""

    home: int
    name: str
    value: Any


class Surroundings:
    """Collects the script's arrays, datasets, optimizers and generators."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, str, int], Named] = {}

    def look(self, traceback: TracebackType | None = None) -> None:
        """Look at the names of the script's functions that run now, or that an error came through."""
        for each in [*frames(sys._getframe(1)), *(frame for frame, _ in walk_tb(traceback))]:
            if is_of_user(each.f_code.co_filename):
                self.take(each.f_globals)
                if each.f_locals is not each.f_globals:
                    self.take(dict(each.f_locals), home=id(each))

    def take(self, names: Mapping[str, Any], home: int | None = None) -> None:
        """Look at the values of a namespace."""
        home = id(names) if home is None else home
        for name, value in list(names.items()):
            if not name.startswith("__"):
                self._take(home, name, value, 2)

    def arrays(self) -> list[Named]:
        """Return everything with rows, those found first at the front, as numpy arrays; equal ones once."""
        found: list[Named] = []
        seen: set[tuple[int, int]] = set()
        for named in self._found.values():
            array = _array(named.value)
            if array is None or (named.home, id(named.value)) in seen:
                continue
            seen.add((named.home, id(named.value)))
            found.append(Named(named.home, named.name, array))
        return found

    def named(self, kind: type) -> list[Named]:
        """Return the values of a type, with their names."""
        return [named for named in self._found.values() if isinstance(named.value, kind)]

    def loss_weights(self, names: list[str], num: int) -> Iterator[tuple[str, list[float]]]:
        """Yield (name, numbers) of the script's dicts with these keys, and of its lists of `num` numbers."""
        for each in (n for kind in (dict, list, tuple) for n in self.named(kind)):
            if not isinstance(each.value, dict) and len(each.value) == num:
                yield each.name, list(each.value)
            elif isinstance(each.value, dict) and sorted(each.value) == names:
                yield each.name, [each.value[name] for name in names]

    def of(self, kind: type | tuple[type, ...]) -> list[Any]:
        """Return the different values of a type."""
        return list({id(n.value): n.value for n in self._found.values() if isinstance(n.value, kind)}.values())

    def _take(self, home: int, name: str, value: Any, depth: int) -> None:
        if isinstance(value, ModuleType | type) or callable(value):
            return
        kinds = keras.optimizers.Optimizer | GeneratorType | keras.utils.PyDataset
        if _has_rows(value) or isinstance(value, kinds) or is_stream(value) or _are_loss_weights(name, value):
            self._found.setdefault((home, name, id(value)), Named(home, name, value))
        elif depth:
            for inner, part in _inside(value):
                self._take(home, f"{name}{inner}", part, depth - 1)


def names_of_user() -> dict[str, Any]:
    """Return the names of the innermost running function of the script, also as AutoGraph has converted it."""
    return next(({**frame.f_globals, **frame.f_locals} for frame in _of_script()), {})


def _of_script() -> Iterator[FrameType]:
    """Yield the frames of the running functions of the script, also as AutoGraph has converted them."""
    for frame in frames(sys._getframe(1)):
        file = frame.f_code.co_filename
        if is_of_user(file) or "__autograph_generated" in file:
            yield frame


def of_batch(inputs: list[Any]) -> dict[str, Any]:
    """Return the tensors, of as many rows as the inputs, that the running functions of the script name."""
    found: dict[str, Any] = {}
    for frame in islice(_of_script(), _NUM_FRAMES):
        for name, value in list(frame.f_locals.items()) if frame.f_locals is not frame.f_globals else ():
            for inner, part in [("", value), *(_inside(value) if isinstance(value, list | tuple | dict) else ())]:
                if _is_beside(part, inputs):
                    found.setdefault(f"{name}{inner}", part)
    return dict(list(found.items())[:_NUM_BESIDE])


def _is_beside(value: Any, inputs: list[Any]) -> bool:
    """Whether a value has the rows of a batch, is none of its inputs, and is traced as these are."""
    if isinstance(value, keras.Variable | keras.KerasTensor) or any(value is each for each in inputs):
        return False
    rows = _rows(value)
    return bool(rows) and rows == _rows(inputs[0]) and _trace(value) == _trace(inputs[0])


def _rows(value: Any) -> tuple[int | None, ...]:
    """Return the shape of a value's first axis; () without one, as of a name that a traced function has not set."""
    shape: Any = getattr(value, "shape", None)
    is_known = isinstance(shape, Sized) and getattr(shape, "rank", 0) is not None
    return tuple(shape)[:1] if is_known else ()


def _trace(value: Any) -> tuple[Any, bool]:
    return getattr(value, "graph", None), type(value).__name__.endswith("Tracer")


def tape_elsewhere(model: keras.Model) -> str:
    """Return in words that a `tf.GradientTape` is around a model of another engine, or in its step; "" if none is."""
    engine = keras.backend.backend()
    if engine == "tensorflow" or "tensorflow" not in sys.modules:
        return ""
    own = [each for each in frames(sys._getframe(1)) if not each.f_code.co_filename.startswith(LIBRARIES)]
    in_step = getattr(inspect.unwrap(type(model).train_step), "__code__", _NO_CODE).co_names
    kinds = {type(value) for each in own for value in list(each.f_locals.values())}
    has_tape = any(kind.__name__ == "GradientTape" and kind.__module__.startswith("tensorflow.") for kind in kinds)
    if "GradientTape" not in in_step and not has_tape:
        return ""
    must = "The loop must take its gradients by the engine of its model."
    received = f"a tf.GradientTape, which cannot record a model on the {engine} engine"
    attempt = f"KERAS_BACKEND=tensorflow, set before Keras is imported, or a loop written for {engine}."
    return message(must, received, attempt)


def _has_rows(value: Any) -> bool:
    shape = getattr(value, "shape", None)
    return (hasattr(value, "__array__") and isinstance(shape, tuple | list)) or type(value).__name__ == "EagerTensor"


def cut(arrays: list[Named], shape: tuple[int, ...]) -> list[Named]:
    """Return the arrays without their last place and without their first, where that leaves the shape of the inputs.

    A model of the next token gets a sequence without its last place, and its loss the same without the first.
    """
    longer = [a for a in arrays if a.value.ndim == len(shape) > 1 and a.value.shape[1] == shape[1] + 1]
    parts = {"[:, :-1]": np.s_[:, :-1], "[:, 1:]": np.s_[:, 1:]}
    return [Named(a.home, a.name + name, a.value[part]) for a in longer for name, part in parts.items()]


def columns(arrays: list[Named]) -> list[Named]:
    """Return the columns of arrays of a few, each of which may be an input."""
    few = [a for a in arrays if a.value.ndim == 2 and 1 < a.value.shape[1] <= _MOST_COLUMNS]
    return [Named(a.home, f"{a.name}[:, {i}]", a.value[:, i]) for a in few for i in range(a.value.shape[1])]


def is_stream(value: Any) -> bool:
    """Whether it is a `tf.data.Dataset`."""
    return any(each.__name__ == "DatasetV2" for each in type(value).__mro__)


def _are_loss_weights(name: str, value: Any) -> bool:
    """Whether these are numbers by output, and by name weights: a list's name says of losses too."""
    is_named = isinstance(value, Mapping)
    numbers = list(value.values()) if is_named else value if isinstance(value, list | tuple) else []
    words = ["weight", *["loss"] * (not is_named)]
    return bool(numbers) and all(type(n) in (int, float) for n in numbers) and all(w in name.lower() for w in words)


def _inside(value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", part) for key, part in list(value.items())[:_NUM_INSIDE]]
    if isinstance(value, list | tuple) and len(value) <= _NUM_INSIDE:
        return [(f"[{i}]", part) for i, part in enumerate(value)]
    if isinstance(value, keras.layers.Layer | keras.losses.Loss | keras.metrics.Metric | keras.Variable):
        return []
    of = sys.modules.get(type(value).__module__)
    is_own = of is not None and not str(getattr(of, "__file__", None) or LIBRARIES[0]).startswith(LIBRARIES)
    return [(f".{name}", part) for name, part in vars(value).items()] if is_own and hasattr(value, "__dict__") else []


def _array(value: Any) -> np.ndarray | None:
    if not _has_rows(value) or isinstance(value, keras.Variable):
        return None
    try:
        array = np.asarray(value)
    except Exception:  # a tracer, an array whose room was given away
        return None
    return array if array.ndim and len(array) > 1 and array.dtype != object else None


@dataclass
class _Read:
    """A number of the script that a traced function reads; `home`: the namespace that holds it."""

    home: dict[str, Any]
    function: str
    values: set[float] = field(default_factory=set)


class FrozenNumbers:
    """Collects the numbers that functions of the script read, or draw by numpy, while they are traced."""

    def __init__(self) -> None:
        self._read: dict[tuple[int, str], _Read] = {}
        self._drawn: dict[tuple[str, str], None] = {}  # the calls, each with its function

    def look(self) -> None:
        """Look at the functions of the script that are being traced, if some are."""
        every = [*frames(sys._getframe(1))]
        begins = [i for i, each in enumerate(every) if each.f_code.co_filename.endswith(_TRACING)]
        for each in every[: begins[0]] if begins else ():
            if is_of_user(file := each.f_code.co_filename) or "__autograph_generated" in file:
                self._take(each)

    def findings(self) -> Iterator[str]:
        """Yield a note for each number that was drawn, or has another value by now than in the traced function."""
        for call, function in self._drawn:
            told = (
                f"`{call}` in `{function}` is drawn once, when the function is traced: each call has the same numbers. "
            )
            yield Likely(f"{told}Draw them by `keras.random`, `tf.random` or `jax.random`, or before the call.")
        for (_, name), read in self._read.items():
            now = read.home.get(name)
            if len(read.values) == 1 and _is_number(now) and now not in read.values:
                (value,), function = read.values, read.function
                told = f"`{name}` is {value:g} in each call of `{function}`, and {now:g} by now: a Python number is "
                told += "read once, when the function is traced. Pass it as an argument, or hold it in a variable."
                yield Likely(told)

    def _take(self, frame: FrameType) -> None:
        function = frame.f_code.co_name.removeprefix("tf__")
        self._drawn |= dict.fromkeys((call, function) for call in _draws(frame))
        codes = [*_codes(frame.f_code)]
        names = {name for code in codes for name in code.co_names} - {name for code in codes for name in _stored(code)}
        owners = [frame.f_globals, *(vars(v) for v in frame.f_locals.values() if _is_of_script(v))]
        for home in owners:
            for name in names & home.keys():
                if _is_number(home[name]):
                    read = _Read(home, function)
                    self._read.setdefault((id(home), name), read).values.add(home[name])


_GENERATORS = np.random.Generator, np.random.RandomState, random.Random
_NO_DRAWS = {"seed", "get_state", "set_state", "getstate", "setstate", "bit_generator", "spawn"}
_DRAWS = {name for kind in _GENERATORS for name in dir(kind) if name[0].islower()} - _NO_DRAWS


def _draws(frame: FrameType) -> Iterator[str]:
    """Yield the calls of random numbers of numpy or Python in the code of a frame.

    Those of its inner functions and conditional ones are left out: whether they run is not known.
    """
    steps = [each for each in get_instructions(frame.f_code) if "CALL" not in each.opname]
    over = [(each.offset, each.argval) for each in steps if "JUMP" in each.opname]
    scope = frame.f_globals | frame.f_locals
    for i, first in enumerate(steps):
        if first.opname not in _LOADS or any(begin < first.offset < end for begin, end in over):
            continue
        value, path = scope.get(first.argval), first.argval
        for step in takewhile(lambda each: each.opname in ("LOAD_ATTR", "LOAD_METHOD"), steps[i + 1 : i + 4]):
            path = f"{path}.{step.argval}"
            is_drawn = value is np.random or value is random or isinstance(value, _GENERATORS)
            if is_drawn and step.argval in _DRAWS:
                yield path
            value = vars(value).get(step.argval) if hasattr(value, "__dict__") else None


_BRANCHES = "if_body", "else_body"  # of AutoGraph: it is not known which of them a trace goes through


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType) and inner.co_name not in _BRANCHES:
            yield from _codes(inner)


def _stored(code: CodeType) -> set[str]:
    """Return the globals and attributes that a function assigns itself."""
    return {each.argval for each in get_instructions(code) if each.opname in ("STORE_ATTR", "STORE_GLOBAL")}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_of_script(value: Any) -> bool:
    file = getattr(sys.modules.get(type(value).__module__), "__file__", None)
    return file is not None and hasattr(value, "__dict__") and is_of_user(file)


def is_gone_over_again(file: str, name: str) -> bool:
    """Whether a file has a loop over this name inside of another loop, which does not give it another value."""
    for outer in ast.walk(parsed(file) or ast.Module([], [])):
        nodes = [n for n in ast.walk(outer) if isinstance(n, ast.Name) and n.id == name]
        if not isinstance(outer, ast.For | ast.While) or any(isinstance(n.ctx, ast.Store) for n in nodes):
            continue
        inner = [node for part in outer.body for node in ast.walk(part) if isinstance(node, ast.For)]
        if any(isinstance(n, ast.Name) and n.id == name for loop in inner for n in ast.walk(loop.iter)):
            return True
    return False
