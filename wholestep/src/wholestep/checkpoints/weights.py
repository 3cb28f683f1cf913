"""The weights of a checkpoint, or of a Keras file, by name: also for a part of another model."""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import keras

from wholestep.checkpoints.address import as_location
from wholestep.checkpoints.keras_file import in_numbers, opened_weights
from wholestep.checkpoints.resume import read_one
from wholestep.checkpoints.shards import Numbers
from wholestep.checkpoints.snapshot import Snapshot, dtype_of, plain, put
from wholestep.checkpoints.store import is_remote
from wholestep.errors import SpecificationError, message, shown
from wholestep.safety import Guard, uninterrupted

Rename = Mapping[str, str] | Callable[[str], str | None]
_KERAS = (".keras", ".weights.h5")
_LORA = re.compile(r"lora_\w+_a$")
_MOST = 5  # the most names in an error


@dataclass(frozen=True)
class LoadedWeights:
    """The result of `load_weights`. Its text lists all names."""

    loaded: dict[str, str]  # the name here, and the name in the file
    missing: list[str]  # names here for which the file has no weight, or several
    mismatched: dict[str, str]  # the name here, and both shapes
    unused: list[str]  # names in the file

    def __str__(self) -> str:
        lists = {
            "loaded": [
                name if name == saved else f"{name} from {saved}"
                for name, saved in self.loaded.items()
            ],
            "missing in the file": self.missing,
            "other shape": [f"{name}: {shapes}" for name, shapes in self.mismatched.items()],
            "unused in the file": self.unused,
        }
        lines = []
        for title, names in lists.items():
            lines += [f"{title}: {len(names)}", *(f"  {name}" for name in names)]
        return "\n".join(lines)


class _Saved(NamedTuple):
    """A weight in a file."""

    name: str
    array: Any
    num: int = 0  # of weights of its layer, in a Keras file


def load_weights(
    model: keras.Layer,
    path: str | os.PathLike[str],
    *,
    rename: Rename | None = None,
    skip_mismatch: bool | str = False,
) -> LoadedWeights:
    """Load the weights of a model, or of a part of it, from a checkpoint or a Keras file, by name.

    Names are the paths of Keras' variables. Where names differ in the numbers that Keras appends,
    and equally many do so in the file, they are loaded in order. In a Keras file, a name is the
    layer's and an index; models around the layer may come first. The optimizer and seeds are not
    loaded. Nothing is changed if an error is raised.

    Args:
        model: a built model or layer, such as `model.get_layer("backbone")`.
        path: a folder of checkpoints or a single one, or a `.keras` or `.weights.h5` file.
        rename: {pattern: replacement}, for `re.sub`, of names in the file to names here; or a
            function of a name in the file that returns the name here, or None to leave it out.
        skip_mismatch: whether weights that the file lacks, or has in another shape, keep their
            values; or a pattern of the names here that may: all others are required.

    Returns:
        A record of names, which prints as a list: `loaded` {name here: name in the file}, `missing`
        in the file, `mismatched` {name here: both shapes}, and `unused` in the file.

    Raises:
        SpecificationError: an argument is not valid, or a required weight is missing or has another
            shape.
        CheckpointError: the file or the checkpoint cannot be read.

    >>> import keras, tempfile, wholestep as ws
    >>> def task(num_classes):
    ...     inputs = keras.Input((3,))
    ...     hidden = keras.layers.Dense(4, name="hidden")(inputs)
    ...     backbone = keras.Model(inputs, hidden, name="backbone")
    ...     head = keras.layers.Dense(num_classes, name="head")
    ...     return keras.Model(inputs, head(backbone(inputs)))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     task(2).save(folder + "/task.keras")
    ...     print(ws.load_weights(task(5), folder + "/task.keras", skip_mismatch="^head/"))
    loaded: 2
      hidden/kernel from functional/backbone/hidden/0
      hidden/bias from functional/backbone/hidden/1
    missing in the file: 0
    other shape: 2
      head/kernel: (4, 2) in the file, (4, 5) here
      head/bias: (2,) in the file, (5,) here
    unused in the file: 0
    """
    path = as_location(path)
    _check(model, path, rename, skip_mismatch)
    match = partial(_matches, model.weights, rename=rename)
    arrays: list[Numbers]
    if _is_keras_file(path):
        with opened_weights(Path(path)) as index:
            pairs, result = match([_Saved(each.name, each, each.num) for each in index])
            _check_required(result, path, skip_mismatch)
            arrays = [index[j].read(dtype_of(variable)) for variable, j in pairs]
    else:

        def check(snapshot: Snapshot) -> None:
            _check_required(match(_in_snapshot(snapshot))[1], path, skip_mismatch)

        saved = _in_snapshot(read_one(path, check).snapshot)
        pairs, result = match(saved)
        arrays = [saved[j].array for _, j in pairs]
    with Guard.of(model), uninterrupted():
        put(arrays, [variable for variable, _ in pairs], {})
    return result


def _matches(
    here: list[keras.Variable], saved: list[_Saved], *, rename: Rename | None
) -> tuple[list[tuple[keras.Variable, int]], LoadedWeights]:
    """Return the variables with the places of their weights in a file, and the record of names."""
    names = [_name_here(each, rename) for each in saved]
    pairs = _pairs(here, names, is_nested=any(each.num for each in saved))
    unlike = {i: _unlike(here[i], saved[j].array) for i, j in pairs.items()}
    fits = [(here[i], j) for i, j in pairs.items() if not unlike[i]]
    used = {*pairs.values()}
    result = LoadedWeights(
        {variable.path: saved[j].name for variable, j in fits},
        [v.path for i, v in enumerate(here) if i not in pairs],
        {here[i].path: text for i, text in unlike.items() if text},
        [each.name for j, each in enumerate(saved) if j not in used],
    )
    return fits, result


def _is_keras_file(path: str | os.PathLike[str]) -> bool:
    return str(path).endswith(_KERAS) and not os.path.isdir(path)


def _check(model: Any, path: Any, rename: Any, skip_mismatch: Any) -> None:
    if not isinstance(model, keras.Layer) or not model.built:
        must = "load_weights needs a built model or layer."
        is_layer = isinstance(model, keras.Layer)
        received = f"an unbuilt {type(model).__name__}" if is_layer else shown(model)
        attempt = "call it on a batch, or model.build(shape)."
        raise SpecificationError(message(must, received, attempt))
    if not isinstance(path, str | os.PathLike):
        attempt = '"runs/a" or "model.keras".'
        raise SpecificationError(message("path must be a path.", shown(path), attempt))
    if is_remote(path) and _is_keras_file(path):
        must = "A Keras file must be on a local disk."
        attempt = "a local copy; or a folder of checkpoints at that address."
        raise SpecificationError(message(must, path, attempt))
    if os.path.isfile(path) and not _is_keras_file(path):
        must = "The weights must be in a folder of checkpoints, or in a .keras or .weights.h5 file."
        attempt = "keras.models.load_model(path).save('model.keras')."
        raise SpecificationError(message(must, str(path), attempt))
    _check_patterns(rename, skip_mismatch)


def _check_patterns(rename: Any, skip_mismatch: Any) -> None:
    if not (rename is None or callable(rename) or isinstance(rename, Mapping)):
        must = "rename must be a dict of patterns, or a function of a name."
        raise SpecificationError(message(must, shown(rename), 'rename={"^encoder/": "backbone/"}.'))
    if not isinstance(skip_mismatch, bool | str):
        must = "skip_mismatch must be True, False, or a pattern of names."
        raise SpecificationError(message(must, shown(skip_mismatch), 'skip_mismatch="^head/".'))
    patterns = list(rename.items()) if isinstance(rename, Mapping) else []
    if isinstance(skip_mismatch, str):
        patterns.append((skip_mismatch, ""))
    for pattern, replacement in patterns:
        try:
            re.compile(pattern).sub(replacement, "")
        except (re.error, TypeError, IndexError) as error:
            must = "A pattern of names must be a regular expression, and its replacement text."
            received = f"{pattern!r}: {replacement!r} ({error})"
            attempt = '{"^encoder/": "backbone/"}.'
            raise SpecificationError(message(must, received, attempt)) from error


def _name_here(saved: _Saved, rename: Rename | None) -> str:
    """Return the name here of a weight in the file, with its number; "" to leave it out."""
    name = _renamed(saved.name, rename)
    return f"{name}/{saved.num}" if name and saved.num else name or ""


def _renamed(name: str, rename: Rename | None) -> str | None:
    """Return the name here of a weight in the file; None to leave it out."""
    if not callable(rename):
        for pattern, replacement in (rename or {}).items():
            name = re.sub(pattern, replacement, name)
        return name
    renamed = rename(name)
    if not isinstance(renamed, str | None):
        must = "rename must return a name, or None for a weight to leave out."
        raise SpecificationError(message(must, f"{shown(renamed)} for {name!r}", "return name"))
    return renamed


def _check_required(result: LoadedWeights, path: Any, skip_mismatch: bool | str) -> None:
    """Refuse a result without required weights, and kernels without their LoRA weights."""
    refused = dict.fromkeys(result.missing, "missing") | result.mismatched
    if isinstance(skip_mismatch, str):
        refused = {name: why for name, why in refused.items() if not re.search(skip_mismatch, name)}
    if refused and skip_mismatch is not True:
        must = f"All weights of the model must be in {path}, in the same shape."
        lacking = _first([f"{name} ({why})" for name, why in refused.items()])
        received = f"{lacking}; unused: {_first(result.unused)}"
        attempt = (
            'rename={"pattern": "replacement"}; or skip_mismatch=True, or a pattern of names '
            "that may differ."
        )
        raise SpecificationError(message(must, received, attempt))
    if not result.loaded:
        must = f"At least one weight of {path} must fit the model."
        received = f"none; in the file: {_first(result.unused)}"
        attempt = (
            "other names by rename={...}: print(ws.load_weights(...)) lists them once one fits."
        )
        raise SpecificationError(message(must, received, attempt))
    kernels = {re.sub(r"[^/]*$", "", name) for name in result.loaded.values()}
    of_lora = [name for name in result.unused if _LORA.search(name)]
    if alone := [name for name in of_lora if _LORA.sub("", name) in kernels]:
        must = "A layer that was saved with LoRA must be loaded with its LoRA weights."
        attempt = (
            "layer.enable_lora(rank) before; or load a .keras file, in which Keras merges them "
            "into the kernel."
        )
        raise SpecificationError(message(must, f"{_first(alone)} without a weight here", attempt))


def _first(names: list[str]) -> str:
    rest = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return (", ".join(names[:_MOST]) or "none") + rest


def _in_snapshot(snapshot: Snapshot) -> list[_Saved]:
    """Return the weights of a snapshot, trainable or not, without seeds."""
    return [
        _Saved(path, snapshot.arrays[f"{group}/{i}"])
        for group in ("params", "buffers")
        for i, path in enumerate(snapshot.facts["paths"][group])
        if not path.endswith("seed_generator_state")
    ]


# ---- which weight takes which ----


def _unlike(variable: keras.Variable, array: Any) -> str:
    """Return the shapes, or the dtypes where one is floating and one is not, if they differ."""
    shapes = tuple(array.shape), tuple(variable.shape)
    if array.dtype == object:
        return f"no numbers in the file, {variable.dtype} here"
    dtypes = keras.backend.standardize_dtype(array.dtype), variable.dtype
    are_alike = len(set(map(keras.backend.is_float_dtype, dtypes))) == 1
    there, here = shapes if shapes[0] != shapes[1] else dtypes
    return "" if shapes[0] == shapes[1] and are_alike else f"{there} in the file, {here} here"


def _pairs(here: list[keras.Variable], there: list[str], *, is_nested: bool) -> dict[int, int]:
    """Return for variables the places of their names in a file.

    Args:
        is_nested: whether names in the file end with an index and the number of weights of the
            layer, and may begin with the models around a layer.
    """
    names = _indexed(here) if is_nested else [v.path for v in here]
    groups = defaultdict[str, list[int]](list)
    for i, name in enumerate(names):
        groups[plain(name)].append(i)
    depth = max((like.count("/") + 1 for like in groups), default=0)
    endings = defaultdict[str, list[int]](list)
    for j, name in enumerate(there):
        for ending in _endings(plain(name), depth) if is_nested else [plain(name)]:
            endings[ending].append(j)
    pairs: dict[int, int] = {}
    used: set[int] = set()
    # the most exact names first
    for like, group in sorted(groups.items(), key=lambda item: -item[0].count("/")):
        free = [j for j in endings[like] if j not in used]
        matched = _matched({i: names[i] for i in group}, {j: there[j] for j in free})
        pairs |= matched
        used |= {*matched.values()}
    return dict(sorted(pairs.items()))


def _endings(name: str, depth: int) -> list[str]:
    """Return a name without its first parts, of at most `depth` parts."""
    parts = name.split("/")
    return ["/".join(parts[i:]) for i in range(max(0, len(parts) - depth), len(parts))]


def _matched(here: dict[int, str], there: dict[int, str]) -> dict[int, int]:
    """Pair names that differ in numbers only: equal endings, or all in order, or none."""
    equal = [
        (i, j)
        for i, name in here.items()
        for j, other in there.items()
        if f"/{other}".endswith(f"/{name}")
    ]
    num = min(len(here), len(there))
    if len(equal) == len({i for i, _ in equal}) == len({j for _, j in equal}) == num:
        return dict(equal)  # all names of one side are names of the other
    if len(here) != len(there):
        return {}
    # Keras numbers layers as they are made
    ordered = [sorted(names, key=lambda i: in_numbers(names[i])) for names in (here, there)]
    return dict(zip(*ordered, strict=True))


def _indexed(here: list[keras.Variable]) -> list[str]:
    """Return names as in a Keras file: layer, index in it, number of its weights without LoRA's."""
    layers = []
    indices = []
    copies = Counter[str]()
    nums = Counter[tuple[str, int]]()
    for variable in here:
        # one of several layers with one name
        layer = variable.path.rpartition("/")[0], copies[variable.path]
        layers.append(layer)
        indices.append(nums[layer])
        copies[variable.path] += 1
        nums[layer] += not variable.name.startswith("lora_")
    return [f"{layer[0]}/{i}/{nums[layer]}" for layer, i in zip(layers, indices, strict=True)]
