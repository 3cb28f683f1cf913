"""The values of a script's names while it trains, and the arrays among them that hold the model's inputs."""

import inspect
import itertools
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sized
from types import FrameType, GeneratorType, ModuleType, TracebackType
from typing import Any, NamedTuple

import keras
import numpy as np

from wholestep import tree
from wholestep.audit.source import LIBRARIES, is_of_user
from wholestep.audit.windows import PAD, Rows
from wholestep.errors import message

_NO_CODE = (lambda: None).__code__
_NUM_INSIDE = 64  # the most values of a container or an object, two levels deep
_NUM_FRAMES, _NUM_BESIDE = 3, 8  # functions whose names hold a batch, and values of it
_SECONDS, _ROWS = 30.0, 200_000  # the most for reading a dataset once more


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
        frames: list[FrameType] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        while traceback is not None:
            frames.append(traceback.tb_frame)
            traceback = traceback.tb_next
        for each in frames:
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

    def of(self, kind: type | tuple[type, ...]) -> list[Any]:
        """Return the different values of a type."""
        return list({id(n.value): n.value for n in self._found.values() if isinstance(n.value, kind)}.values())

    def _take(self, home: int, name: str, value: Any, depth: int) -> None:
        if isinstance(value, ModuleType | type) or callable(value):
            return
        kinds = keras.optimizers.Optimizer | GeneratorType
        if _has_rows(value) or isinstance(value, kinds) or _is_dataset(value):
            self._found.setdefault((home, name, id(value)), Named(home, name, value))
        elif depth:
            for inner, part in _inside(value):
                self._take(home, f"{name}{inner}", part, depth - 1)


def names_of_user() -> dict[str, Any]:
    """Return the names of the innermost running function of the script, also as AutoGraph has converted it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_of_user(file) or "__autograph_generated" in file:
            break
        frame = frame.f_back
    return {} if frame is None else {**frame.f_globals, **frame.f_locals}


def of_batch(inputs: list[Any]) -> dict[str, Any]:
    """Return the tensors of as many rows that the running functions of the script name beside the inputs."""
    frame: FrameType | None = sys._getframe(1)
    found: dict[str, Any] = {}
    num_frames = 0
    while frame is not None and num_frames < _NUM_FRAMES:
        file = frame.f_code.co_filename
        if is_of_user(file) or "__autograph_generated" in file:
            num_frames += 1
            for name, value in list(frame.f_locals.items()) if frame.f_locals is not frame.f_globals else ():
                for inner, part in [("", value), *(_inside(value) if isinstance(value, list | tuple | dict) else ())]:
                    if _is_beside(part, inputs):
                        found.setdefault(f"{name}{inner}", part)
        frame = frame.f_back
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
    frame: FrameType | None = sys._getframe(1)
    has_one = "GradientTape" in getattr(inspect.unwrap(type(model).train_step), "__code__", _NO_CODE).co_names
    while frame is not None and not has_one:
        is_library = frame.f_code.co_filename.startswith(LIBRARIES)
        has_one = not is_library and any(map(_is_tape, list(frame.f_locals.values())))
        frame = frame.f_back
    if not has_one:
        return ""
    must = "The loop must take its gradients by the engine of its model."
    received = f"a tf.GradientTape, which cannot record a model on the {engine} engine"
    attempt = f"KERAS_BACKEND=tensorflow, set before Keras is imported, or a loop written for {engine}."
    return message(must, received, attempt)


def _is_tape(value: Any) -> bool:
    return type(value).__name__ == "GradientTape" and type(value).__module__.startswith("tensorflow.")


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


def holding(arrays: list[Named], inputs: list[list[np.ndarray]]) -> list[Named] | None:
    """Return the smallest arrays that hold all rows of all these inputs, a leaf each."""
    widths = [int(np.prod(leaf.shape[1:])) for leaf in inputs[0]]
    fitting = [
        [a for a in arrays if int(np.prod(a.value.shape[1:])) == width and _has_row(a.value, leaf[0])]
        for leaf, width in zip(inputs[0], widths, strict=True)
    ]
    found = []
    for choice in itertools.islice(itertools.product(*fitting), 200):
        if len({len(named.value) for named in choice}) > 1:
            continue
        rows = Rows([named.value for named in choice])
        held = [rows.find(leaves) for leaves in inputs if len(leaves) == len(choice)]
        share = np.mean([np.mean(each != PAD) for each in held if len(each)])
        found.append((share, -len(choice[0].value), list(choice)))
    if not found:
        return None
    share, _, best = max(found, key=lambda each: each[:2])
    return best if share > 0.5 else None


def cut(arrays: list[Named], shape: tuple[int, ...]) -> list[Named]:
    """Return the arrays without their last place and without their first, where that leaves the shape of the inputs.

    A model of the next token gets a sequence without its last place, and its loss the same without the first.
    """
    longer = [a for a in arrays if a.value.ndim == len(shape) > 1 and a.value.shape[1] == shape[1] + 1]
    parts = {"[:, :-1]": np.s_[:, :-1], "[:, 1:]": np.s_[:, 1:]}
    return [Named(a.home, a.name + name, a.value[part]) for a in longer for name, part in parts.items()]


def _has_row(array: np.ndarray, row: np.ndarray) -> bool:
    flat = array.reshape(len(array), -1)
    with np.errstate(all="ignore"):
        wanted = row.reshape(-1)
        few = np.flatnonzero(flat[:, 0].astype(wanted.dtype) == wanted[0]) if wanted.size else np.arange(len(flat))
    return any(flat[i].astype(wanted.dtype).tobytes() == wanted.tobytes() for i in few[:10_000])


def agrees(array: np.ndarray, pairs: list[tuple[np.ndarray, Any]]) -> bool:
    """Whether an array has the values that were seen at these rows."""
    for rows, values in pairs:
        known = rows != PAD
        if array[rows[known]].size != values[known].size:
            return False
        with np.errstate(all="ignore"):
            if not np.array_equal(array[rows[known]].reshape(-1).astype(values.dtype), values[known].reshape(-1)):
                return False
    return True


def assembled(num: int, pairs: list[tuple[np.ndarray, Any]], fill: float = 0.0) -> np.ndarray | None:
    """Return an array of the values that were seen at these rows; None if a row had several."""
    whole = np.full((num, *pairs[0][1].shape[1:]), fill, pairs[0][1].dtype)
    for rows, values in pairs:
        known = rows != PAD
        if values.shape[1:] != whole.shape[1:]:
            return None
        whole[rows[known]] = values[known]
    return whole if agrees(whole, pairs) else None


def joined(parts: Iterable[np.ndarray]) -> np.ndarray:
    """Return arrays one after the other; batches of several widths are padded with zeros.

    >>> joined([np.array([[1, 2]]), np.array([[3]])]).tolist()
    [[1, 2], [3, 0]]
    """
    parts = list(parts)
    width = max((part.shape[1] for part in parts if part.ndim > 1), default=0)

    def filled(part: np.ndarray) -> np.ndarray:
        more = width - part.shape[1] if part.ndim > 1 else 0
        return np.pad(part, [(0, 0), (0, more), *[(0, 0)] * (part.ndim - 2)]) if more else part

    return np.concatenate(list(map(filled, parts)))


def different(arrays: Iterable[Named]) -> list[Named]:
    """Return those whose values differ."""
    return list({(n.value.shape, n.value.dtype.str, n.value.tobytes()): n for n in arrays}.values())


def read(dataset: Any, inputs: list[list[np.ndarray]]) -> tuple | None:
    """Return (x, y[, sample_weight]) of a dataset that holds most of these inputs; None if it does not.

    A shuffled dataset without its last, shorter batch leaves out other rows in each pass: it is read until it has all
    inputs, or until a pass has no new rows.
    """
    until, known = time.monotonic() + _SECONDS, None
    while True:
        num = 0 if known is None else len(tree.leaves(known)[0])
        if (found := _pass(dataset, until)) is None:
            return None
        known = found if known is None else _united(known, found)
        rows = Rows(known[0])
        share = np.mean([np.mean(rows.find(leaves) != PAD) for leaves in inputs])
        if share == 1 or share <= 0.5 or len(tree.leaves(known)[0]) == num or time.monotonic() > until:
            return known if share > 0.5 else None


def _united(known: tuple, more: tuple) -> tuple:
    """Return the rows of two passes over one dataset; equal rows as often as in the pass that has most of them."""
    num = len(tree.leaves(known)[0])
    both = [joined(pair) for pair in zip(tree.leaves(known), tree.leaves(more), strict=True)]
    keys = [b"".join(leaf[row].tobytes() for leaf in both) for row in range(len(both[0]))]
    counts = Counter(keys[:num])
    chosen = list(range(num))
    for row, key in enumerate(keys[num:], start=num):
        counts[key] -= 1
        if counts[key] < 0:
            chosen.append(row)
    whole = iter([leaf[chosen] for leaf in both])
    return tree.map_leaves(lambda _: next(whole), known)


def _pass(dataset: Any, until: float) -> tuple | None:
    """Return the batches of one pass, joined."""
    num, parts = 0, []
    seen: set[int] = set()
    for batch in (dataset[i] for i in range(len(dataset))) if not is_stream(dataset) else dataset:
        if not isinstance(batch, tuple) or len(batch) not in (2, 3):
            return None
        batch = tree.map_leaves(np.asarray, batch)
        leaves = tree.leaves(batch)
        if not all(leaf.ndim for leaf in leaves):
            return None
        key = hash(b"".join(leaf.tobytes() for leaf in leaves))
        num += len(leaves[0])
        if key in seen or num > _ROWS or time.monotonic() > until:  # it repeats, or is too long
            break
        seen.add(key)
        parts.append(batch)
    if not parts:
        return None
    flat = [tree.leaves(part) for part in parts]
    whole = iter([joined(each) for each in zip(*flat, strict=True)])
    return tree.map_leaves(lambda _: next(whole), parts[0])


def is_padded(labels: np.ndarray) -> bool:
    """Whether rows of whole numbers end with zeros, and are of more than one length.

    >>> is_padded(np.array([[3, 1, 0], [2, 0, 0]])), is_padded(np.array([[0, 1, 3], [2, 0, 1]]))
    (True, False)
    """
    if labels.ndim < 2 or labels.dtype.kind not in "iu":
        return False
    used = np.reshape(labels, (len(labels), -1)) != 0
    lengths = used.sum(axis=1)
    return len(np.unique(lengths)) > 1 and bool(np.all(used == (np.arange(used.shape[1]) < lengths[:, None])))
