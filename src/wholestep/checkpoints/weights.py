"""The weights of a checkpoint, or of a Keras file, by name: also for a part of another model."""

import io
import os
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import ml_dtypes
import numpy as np

from wholestep.checkpoints.address import as_location
from wholestep.checkpoints.pieces import Numbers
from wholestep.checkpoints.resume import read_one
from wholestep.checkpoints.snapshot import Snapshot, plain, put
from wholestep.errors import CheckpointError, SpecificationError, message, shown
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
        listed = {
            "loaded": [one if one == two else f"{one} from {two}" for one, two in self.loaded.items()],
            "missing in the file": self.missing,
            "other shape": [f"{name}: {shapes}" for name, shapes in self.mismatched.items()],
            "unused in the file": self.unused,
        }
        return "\n".join(
            line for k, held in listed.items() for line in [f"{k}: {len(held)}", *(f"  {n}" for n in held)]
        )


def load_weights(
    model: keras.Layer, path: str | os.PathLike[str], *, rename: Rename | None = None, skip_mismatch: bool | str = False
) -> LoadedWeights:
    """Load the weights of a model, or of a part of it, from a checkpoint or a Keras file, by their names.

    Names are the paths of Keras' variables. Where names differ in the numbers that Keras appends, and equally many do
    so in the file, they are loaded in order. In a Keras file, a name is the layer's and an index; models around the
    layer may come first. The optimizer and seeds are not loaded. Nothing is changed if an error is raised.

    Args:
        model: a built model or layer, such as `model.get_layer("backbone")`.
        path: a folder of checkpoints or a single one, or a `.keras` or `.weights.h5` file.
        rename: {pattern: replacement}, for `re.sub`, of names in the file to names here; or a function of a name in the
            file that returns the name here, or None to leave it out.
        skip_mismatch: whether weights that the file lacks, or has in another shape, keep their values; or a pattern
            of the names here that may: all others are required.

    Returns:
        A record of names, which prints as a list: `loaded` {name here: name in the file}, `missing` in the file,
        `mismatched` {name here: both shapes}, and `unused` in the file.

    Raises:
        SpecificationError: an argument is not valid, or a required weight is missing or has another shape.
        CheckpointError: the file or the checkpoint cannot be read.

    >>> import keras, tempfile, wholestep as ws
    >>> def task(num_classes):
    ...     inputs = keras.Input((3,))
    ...     backbone = keras.Model(inputs, keras.layers.Dense(4, name="hidden")(inputs), name="backbone")
    ...     return keras.Model(inputs, keras.layers.Dense(num_classes, name="head")(backbone(inputs)))
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
    here = model.weights

    def match(saved: list[tuple[str, Any]], nums: list[int]) -> tuple[dict[int, int], LoadedWeights]:
        renamed = [_renamed(name, rename) for name, _ in saved]
        there = [f"{name}/{num}" if name and num else name for name, num in zip(renamed, nums, strict=True)]
        pairs = _pairs(here, there, is_nested=any(nums))
        unlike = {i: _unlike(here[i], saved[j][1]) for i, j in pairs.items()}
        fits = {i: j for i, j in pairs.items() if not unlike[i]}
        result = LoadedWeights(
            {here[i].path: saved[j][0] for i, j in fits.items()},
            [v.path for i, v in enumerate(here) if i not in pairs],
            {here[i].path: text for i, text in unlike.items() if text},
            [name for j, (name, _) in enumerate(saved) if j not in pairs.values()],
        )
        _check_required(result, path, skip_mismatch)
        return fits, result

    if str(path).endswith(_KERAS):
        saved, nums = _in_keras_file(Path(path))
    else:
        found = read_one(path, lambda snapshot: match(*_in_snapshot(snapshot)) and None)
        saved, nums = _in_snapshot(found.snapshot)
    fits, result = match(saved, nums)
    with Guard.of(model), uninterrupted():
        put([saved[j][1] for j in fits.values()], [here[i] for i in fits], {})
    return result


def _check(model: Any, path: Any, rename: Any, skip_mismatch: Any) -> None:
    if not isinstance(model, keras.Layer) or not model.built:
        must = "load_weights needs a built model or layer."
        received = f"an unbuilt {type(model).__name__}" if isinstance(model, keras.Layer) else shown(model)
        raise SpecificationError(message(must, received, "call it on a batch, or model.build(shape)."))
    if not isinstance(path, str | os.PathLike):
        raise SpecificationError(message("path must be a path.", shown(path), '"runs/a" or "model.keras".'))
    if os.path.isfile(path) and not str(path).endswith(_KERAS):
        must = "The weights must be in a folder of checkpoints, or in a .keras or .weights.h5 file."
        raise SpecificationError(message(must, str(path), "keras.models.load_model(path).save('model.keras')."))
    if not (rename is None or callable(rename) or isinstance(rename, Mapping)):
        must = "rename must be a dict of patterns, or a function of a name."
        raise SpecificationError(message(must, shown(rename), 'rename={"^encoder/": "backbone/"}.'))
    if not isinstance(skip_mismatch, bool | str):
        must = "skip_mismatch must be True, False, or a pattern of names."
        raise SpecificationError(message(must, shown(skip_mismatch), 'skip_mismatch="^head/".'))
    patterns = {**rename} if isinstance(rename, Mapping) else {}
    for pattern, replacement in [*patterns.items(), *([(skip_mismatch, "")] if isinstance(skip_mismatch, str) else [])]:
        try:
            re.compile(pattern).sub(replacement, "")
        except (re.error, TypeError, IndexError) as error:
            must = "A pattern of names must be a regular expression, and its replacement text."
            received = f"{pattern!r}: {replacement!r} ({error})"
            raise SpecificationError(message(must, received, '{"^encoder/": "backbone/"}.')) from error


def _renamed(name: str, rename: Rename | None) -> str | None:
    """Return the name here of a weight in the file; None to leave it out."""
    if not callable(rename):
        for pattern, replacement in (rename or {}).items():
            name = re.sub(pattern, replacement, name)
        return name
    found = rename(name)
    if not isinstance(found, str | None):
        must = "rename must return a name, or None for a weight to leave out."
        raise SpecificationError(message(must, f"{shown(found)} for {name!r}", "return name"))
    return found


def _check_required(result: LoadedWeights, path: Any, skip_mismatch: bool | str) -> None:
    """Refuse missing and mismatched weights that are required, and kernels without their LoRA weights."""
    refused = dict.fromkeys(result.missing, "missing") | result.mismatched
    if isinstance(skip_mismatch, str):
        refused = {name: why for name, why in refused.items() if not re.search(skip_mismatch, name)}
    if refused and skip_mismatch is not True:
        must = f"All weights of the model must be in {path}, in the same shape."
        received = f"{_first([f'{name} ({why})' for name, why in refused.items()])}; unused: {_first(result.unused)}"
        attempt = 'rename={"pattern": "replacement"}; or skip_mismatch=True, or a pattern of names that may differ.'
        raise SpecificationError(message(must, received, attempt))
    if not result.loaded:
        must = f"At least one weight of {path} must fit the model."
        attempt = "other names by rename={...}: print(ws.load_weights(...)) lists them once one fits."
        raise SpecificationError(message(must, f"none; in the file: {_first(result.unused)}", attempt))
    kernels = {re.sub(r"[^/]*$", "", name) for name in result.loaded.values()}
    if alone := [name for name in result.unused if _LORA.search(name) and _LORA.sub("", name) in kernels]:
        must = "A layer that was saved with LoRA must be loaded with its LoRA weights."
        attempt = "layer.enable_lora(rank) before; or load a .keras file, in which Keras merges them into the kernel."
        raise SpecificationError(message(must, f"{_first(alone)} without a weight here", attempt))


def _first(names: list[str]) -> str:
    rest = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return (", ".join(names[:_MOST]) or "none") + rest


# ---- the weights of a file, by name ----


def _in_snapshot(snapshot: Snapshot) -> tuple[list[tuple[str, Numbers]], list[int]]:
    """Return the weights of a snapshot, trainable or not, without seeds; and zeros, as names have no index."""
    named = [(k, i, path) for k in ("params", "buffers") for i, path in enumerate(snapshot.facts["paths"][k])]
    named = [each for each in named if not each[2].endswith("seed_generator_state")]
    return [(path, snapshot.arrays[f"{k}/{i}"]) for k, i, path in named], [0] * len(named)


def _in_keras_file(path: Path) -> tuple[list[tuple[str, Numbers]], list[int]]:
    """Return the weights of a .keras or .weights.h5 file, and how many the layer of each has.

    A name consists of the layers' names, from the outermost, and an index.
    """
    import h5py  # a dependency of Keras, imported where a file is read

    found: list[tuple[str, Numbers]] = []
    nums: list[int] = []

    def visit(group: Any, names: tuple[str, ...], source: str) -> None:
        values = group.get("vars")
        if values is not None:
            names = (*names, str(values.attrs.get("name", group.name.rsplit("/", 1)[1])))
        for key in sorted(group, key=_in_numbers):
            if key not in ("vars", "optimizer", "seed_generator") and isinstance(group[key], h5py.Group):
                visit(group[key], names, source)
        for key in sorted(values or (), key=_in_numbers):
            held = values[key]
            if held.file.filename != source or held.external or held.is_virtual:  # a forged file
                raise ValueError(f"{'/'.join((*names, key))} is not stored in this file")
            dtype = ml_dtypes.bfloat16 if held.attrs.get("dtype") == "bfloat16" else None
            found.append(("/".join((*names, key)), np.array(held, dtype)))
            nums.append(len(values))

    try:
        content: Any = path
        if path.suffix == ".keras":
            with zipfile.ZipFile(path) as archive:
                content = io.BytesIO(archive.read("model.weights.h5"))
        with h5py.File(content, "r") as file:
            visit(file, (), file.filename)
    except (OSError, KeyError, ValueError, RecursionError, zipfile.BadZipFile) as error:
        attempt = "the path of a file that Keras' model.save or save_weights has written on this machine."
        raise CheckpointError(message(f"The weights must be readable in {path}.", error, attempt)) from error
    return found, nums


def _in_numbers(key: str) -> tuple[tuple[int, str], ...]:
    """Return a sort key by which dense_10 comes after dense_9, as Keras numbers layers in their order."""
    return tuple((int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", key))


# ---- which weight takes which ----


def _unlike(variable: keras.Variable, array: Any) -> str:
    """Return the shapes if they differ, or the dtypes if only one is floating, as after `quantize`; otherwise ""."""
    shapes = tuple(array.shape), tuple(variable.shape)
    dtypes = keras.backend.standardize_dtype(array.dtype), variable.dtype
    are_alike = len(set(map(keras.backend.is_float_dtype, dtypes))) == 1
    there, here = shapes if shapes[0] != shapes[1] else dtypes
    return "" if shapes[0] == shapes[1] and are_alike else f"{there} in the file, {here} here"


def _pairs(here: list[keras.Variable], there: list[str | None], *, is_nested: bool) -> dict[int, int]:
    """Return for variables the places of their names in a file.

    Args:
        is_nested: whether names in the file end with an index and the number of weights of the layer, and may begin
            with the models around a layer.
    """
    names = _indexed(here) if is_nested else [v.path for v in here]
    endings: dict[str, list[int]] = {}
    for j, name in enumerate(there):
        parts = [] if name is None else plain(name).split("/")
        for i in range(len(parts) if is_nested else min(1, len(parts))):
            endings.setdefault("/".join(parts[i:]), []).append(j)
    groups: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        groups.setdefault(plain(name), []).append(i)
    pairs: dict[int, int] = {}
    taken: set[int] = set()
    for like, places in sorted(groups.items(), key=lambda group: -group[0].count("/")):  # the most exact names first
        free = [j for j in endings.get(like, ()) if j not in taken]
        equal = {(i, j) for i in places for j in free if f"/{there[j]}".endswith(f"/{names[i]}")}
        if len({i for i, _ in equal}) == len({j for _, j in equal}) == len(equal) == min(len(places), len(free)):
            found = dict(equal)  # all names of one side are names of the other
        elif len(places) == len(free):  # Keras numbers layers as they are made
            ordered = sorted(free, key=lambda j: _in_numbers(there[j] or ""))
            found = dict(zip(sorted(places, key=lambda i: _in_numbers(names[i])), ordered, strict=True))
        else:
            continue
        pairs |= found
        taken |= {*found.values()}
    return dict(sorted(pairs.items()))


def _indexed(here: list[keras.Variable]) -> list[str]:
    """Return names as in a Keras file: the layer, the index in it, and how many weights it has without LoRA's."""
    layers, indices, copies, nums = [], [], Counter[str](), Counter[tuple[str, int]]()
    for variable in here:
        layer = variable.path.rpartition("/")[0], copies[variable.path]  # one of several layers with one name
        layers.append(layer)
        indices.append(nums[layer])
        copies[variable.path] += 1
        nums[layer] += not variable.name.startswith("lora_")
    return [f"{layer[0]}/{i}/{nums[layer]}" for layer, i in zip(layers, indices, strict=True)]
