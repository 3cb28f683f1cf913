"""What a script holds while it trains: the values of its functions' names, and those of its modules."""

import inspect
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import FrameType, GeneratorType, ModuleType, TracebackType
from typing import Any, NamedTuple

import keras
import numpy as np

from wholestep.errors import message

_PATHS = sysconfig.get_paths()
_LIBRARIES = (_PATHS["purelib"], _PATHS["platlib"], _PATHS["stdlib"], str(Path(__file__).parent.parent))
_NO_CODE = (lambda: None).__code__
_NUM_INSIDE = 64  # so many values of a container or an object are looked at, two levels deep


class Named(NamedTuple):
    """A value under its name; `home` tells namespaces apart."""

    home: int
    name: str
    value: Any


class Surroundings:
    """Collects what may be data, the optimizers and the metrics."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, str, int], Named] = {}

    def look(self, traceback: TracebackType | None = None) -> None:
        """Look at the names of the script's functions that run now, or that an error came through."""
        frames: list[FrameType] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        while traceback is not None:
            frames.append(traceback.tb_frame)
            traceback = traceback.tb_next
        for each in frames:
            if _is_of_user(each):
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

    def of(self, kind: type | tuple[type, ...]) -> list[Any]:
        """Return the different values of a type."""
        return list({id(n.value): n.value for n in self._found.values() if isinstance(n.value, kind)}.values())

    def _take(self, home: int, name: str, value: Any, depth: int) -> None:
        if isinstance(value, ModuleType | type) or (callable(value) and not isinstance(value, keras.metrics.Metric)):
            return
        kinds = keras.optimizers.Optimizer | keras.metrics.Metric | GeneratorType
        if _has_rows(value) or isinstance(value, kinds) or _is_dataset(value):
            self._found.setdefault((home, name, id(value)), Named(home, name, value))
        elif depth:
            for inner, part in _inside(value):
                self._take(home, f"{name}{inner}", part, depth - 1)


def names_of_user() -> dict[str, Any]:
    """Return what the innermost function of the script knows that runs now, also as AutoGraph has made it anew."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not (_is_of_user(frame) or "__autograph_generated" in frame.f_code.co_filename):
        frame = frame.f_back
    return {} if frame is None else {**frame.f_globals, **frame.f_locals}


def tape_elsewhere(model: keras.Model) -> str:
    """Return in words that a `tf.GradientTape` is around a model of another engine, or in its step; "" if none is."""
    engine = keras.backend.backend()
    if engine == "tensorflow" or "tensorflow" not in sys.modules:
        return ""
    frame: FrameType | None = sys._getframe(1)
    has_one = "GradientTape" in getattr(inspect.unwrap(type(model).train_step), "__code__", _NO_CODE).co_names
    while frame is not None and not has_one:
        is_library = frame.f_code.co_filename.startswith(_LIBRARIES)
        has_one = not is_library and any(map(_is_tape, list(frame.f_locals.values())))
        frame = frame.f_back
    if not has_one:
        return ""
    must = "The loop must take its gradients by the engine of its model."
    received = f"a tf.GradientTape for a model on the {engine} engine, of which it sees nothing"
    attempt = f"KERAS_BACKEND=tensorflow, set before Keras is imported, or a loop written for {engine}."
    return message(must, received, attempt)


def _is_tape(value: Any) -> bool:
    return type(value).__name__ == "GradientTape" and type(value).__module__.startswith("tensorflow.")


def _is_of_user(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return not (file.startswith((*_LIBRARIES, "<")) or "__autograph_generated" in file)


def _has_rows(value: Any) -> bool:
    shape = getattr(value, "shape", None)
    return (hasattr(value, "__array__") and isinstance(shape, tuple | list)) or type(value).__name__ == "EagerTensor"


def _is_dataset(value: Any) -> bool:
    return isinstance(value, keras.utils.PyDataset) or is_stream(value)


def is_stream(value: Any) -> bool:
    """Whether it is a `tf.data.Dataset`."""
    return any(each.__name__ == "DatasetV2" for each in type(value).__mro__)


def _inside(value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", part) for key, part in list(value.items())[:_NUM_INSIDE]]
    if isinstance(value, list | tuple) and len(value) <= _NUM_INSIDE:
        return [(f"[{i}]", part) for i, part in enumerate(value)]
    if isinstance(value, keras.layers.Layer | keras.losses.Loss | keras.metrics.Metric | keras.Variable):
        return []
    of = sys.modules.get(type(value).__module__)
    is_of_user = of is not None and not str(getattr(of, "__file__", None) or _LIBRARIES[0]).startswith(_LIBRARIES)
    return (
        [(f".{name}", part) for name, part in vars(value).items()] if is_of_user and hasattr(value, "__dict__") else []
    )


def _array(value: Any) -> np.ndarray | None:
    if not _has_rows(value) or isinstance(value, keras.Variable):
        return None
    try:
        array = np.asarray(value)
    except Exception:  # a tracer, an array whose room was given away
        return None
    return array if array.ndim and len(array) > 1 and array.dtype != object else None
