"""The weights of a checkpoint, or of a Keras file, by name: also for a part of another model."""

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
        listed = {
            "loaded": [
                one if one == two else f"{one} from {two}" for one, two in self.loaded.items()
            ],
            "missing in the file": self.missing,
            "other shape": [f"{name}: {shapes}" for name, shapes in self.mismatched.items()],
            "unused in the file": self.unused,
        }
        return "\n".join(
            line
            for k, held in listed.items()
            for line in [f"{k}: {len(held)}", *(f"  {n}" for n in held)]
        )


def load_weights(
    model: keras.Layer,
    path: str | os.PathLike[str],
    *,
    rename: Rename | None = None,
    skip_mismatch: bool | str = False,
) -> LoadedWeights:
    """Load the weights of a model, or of a part of it, from a checkpoint or a Keras file, by their
    names.

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
    here = model.weights

    def match(
        saved: list[tuple[str, Any]], nums: list[int]
    ) -> tuple[dict[int, int], LoadedWeights]:
        renamed = [_renamed(name, rename) for name, _ in saved]
        there = [
            f"{name}/{num}" if name and num else name
            for name, num in zip(renamed, nums, strict=True)
        ]
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

    saved: list[tuple[str, Any]]
    arrays: list[Numbers]
    if _is_keras_file(path):
        with opened_weights(Path(path)) as index:
            saved = [(each.name, each) for each in index]
            fits, result = match(saved, [each.num for each in index])
            arrays = [index[j].read(dtype_of(here[i])) for i, j in fits.items()]
    else:
        found = read_one(path, lambda snapshot: match(*_in_snapshot(snapshot)) and None)
        saved, nums = _in_snapshot(found.snapshot)
        fits, result = match(saved, nums)
        arrays = [saved[j][1] for j in fits.values()]
    with Guard.of(model), uninterrupted():
        put(arrays, [here[i] for i in fits], {})
    return result


def _is_keras_file(path: str | os.PathLike[str]) -> bool:
    return str(path).endswith(_KERAS) and not os.path.isdir(path)


def _check(model: Any, path: Any, rename: Any, skip_mismatch: Any) -> None:
    if not isinstance(model, keras.Layer) or not model.built:
        must = "load_weights needs a built model or layer."
        received = (
            f"an unbuilt {type(model).__name__}" if isinstance(model, keras.Layer) else shown(model)
        )
        raise SpecificationError(
            message(must, received, "call it on a batch, or model.build(shape).")
        )
    if not isinstance(path, str | os.PathLike):
        raise SpecificationError(
            message("path must be a path.", shown(path), '"runs/a" or "model.keras".')
        )
    if is_remote(path) and _is_keras_file(path):
        must = "A Keras file must be on a local disk."
        attempt = "a local copy; or a folder of checkpoints at that address."
        raise SpecificationError(message(must, path, attempt))
    if os.path.isfile(path) and not _is_keras_file(path):
        must = "The weights must be in a folder of checkpoints, or in a .keras or .weights.h5 file."
        raise SpecificationError(
            message(must, str(path), "keras.models.load_model(path).save('model.keras').")
        )
    if not (rename is None or callable(rename) or isinstance(rename, Mapping)):
        must = "rename must be a dict of patterns, or a function of a name."
        raise SpecificationError(message(must, shown(rename), 'rename={"^encoder/": "backbone/"}.'))
    if not isinstance(skip_mismatch, bool | str):
        must = "skip_mismatch must be True, False, or a pattern of names."
        raise SpecificationError(message(must, shown(skip_mismatch), 'skip_mismatch="^head/".'))
    patterns = {**rename} if isinstance(rename, Mapping) else {}
    for pattern, replacement in [
        *patterns.items(),
        *([(skip_mismatch, "")] if isinstance(skip_mismatch, str) else []),
    ]:
        try:
            re.compile(pattern).sub(replacement, "")
        except (re.error, TypeError, IndexError) as error:
            must = "A pattern of names must be a regular expression, and its replacement text."
            received = f"{pattern!r}: {replacement!r} ({error})"
            raise SpecificationError(
                message(must, received, '{"^encoder/": "backbone/"}.')
            ) from error


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
    """Refuse missing and mismatched weights that are required, and kernels without their LoRA
    weights.
    """
    refused = dict.fromkeys(result.missing, "missing") | result.mismatched
    if isinstance(skip_mismatch, str):
        refused = {name: why for name, why in refused.items() if not re.search(skip_mismatch, name)}
    if refused and skip_mismatch is not True:
        must = f"All weights of the model must be in {path}, in the same shape."
        received = (
            f"{_first([f'{name} ({why})' for name, why in refused.items()])}; unused: "
            f"{_first(result.unused)}"
        )
        attempt = (
            'rename={"pattern": "replacement"}; or skip_mismatch=True, or a pattern of names '
            "that may differ."
        )
        raise SpecificationError(message(must, received, attempt))
    if not result.loaded:
        must = f"At least one weight of {path} must fit the model."
        attempt = (
            "other names by rename={...}: print(ws.load_weights(...)) lists them once one fits."
        )
        raise SpecificationError(
            message(must, f"none; in the file: {_first(result.unused)}", attempt)
        )
    kernels = {re.sub(r"[^/]*$", "", name) for name in result.loaded.values()}
    if alone := [
        name for name in result.unused if _LORA.search(name) and _LORA.sub("", name) in kernels
    ]:
        must = "A layer that was saved with LoRA must be loaded with its LoRA weights."
        attempt = (
            "layer.enable_lora(rank) before; or load a .keras file, in which Keras merges them "
            "into the kernel."
        )
        raise SpecificationError(message(must, f"{_first(alone)} without a weight here", attempt))


def _first(names: list[str]) -> str:
    rest = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return (", ".join(names[:_MOST]) or "none") + rest


# ---- the weights of a file, by name ----


def _in_snapshot(snapshot: Snapshot) -> tuple[list[tuple[str, Numbers]], list[int]]:
    """Return the weights of a snapshot, trainable or not, without seeds; and zeros, as names have
    no index.
    """
    named = [
        (k, i, path)
        for k in ("params", "buffers")
        for i, path in enumerate(snapshot.facts["paths"][k])
    ]
    named = [each for each in named if not each[2].endswith("seed_generator_state")]
    return [(path, snapshot.arrays[f"{k}/{i}"]) for k, i, path in named], [0] * len(named)


# ---- which weight takes which ----


def _unlike(variable: keras.Variable, array: Any) -> str:
    """Return the shapes if they differ, or the dtypes if only one is floating, as after `quantize`;
    otherwise "".
    """
    shapes = tuple(array.shape), tuple(variable.shape)
    if array.dtype == object:
        return f"no numbers in the file, {variable.dtype} here"
    dtypes = keras.backend.standardize_dtype(array.dtype), variable.dtype
    are_alike = len(set(map(keras.backend.is_float_dtype, dtypes))) == 1
    there, here = shapes if shapes[0] != shapes[1] else dtypes
    return "" if shapes[0] == shapes[1] and are_alike else f"{there} in the file, {here} here"


def _pairs(
    here: list[keras.Variable], there: list[str | None], *, is_nested: bool
) -> dict[int, int]:
    """Return for variables the places of their names in a file.

    Args:
        is_nested: whether names in the file end with an index and the number of weights of the
            layer, and may begin with the models around a layer.
    """
    names = _indexed(here) if is_nested else [v.path for v in here]
    groups: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        groups.setdefault(plain(name), []).append(i)
    most = max((like.count("/") + 1 for like in groups), default=0)
    endings: dict[str, list[int]] = {}
    for j, name in enumerate(there):
        parts = [] if name is None else plain(name).split("/")
        first = max(0, len(parts) - most) if is_nested else 0
        for i in range(first, len(parts) if is_nested else min(1, len(parts))):
            endings.setdefault("/".join(parts[i:]), []).append(j)
    pairs: dict[int, int] = {}
    taken: set[int] = set()
    # the most exact names first
    for like, places in sorted(groups.items(), key=lambda group: -group[0].count("/")):
        free = [j for j in endings.get(like, ()) if j not in taken]
        equal = {(i, j) for i in places for j in free if f"/{there[j]}".endswith(f"/{names[i]}")}
        if (
            len({i for i, _ in equal})
            == len({j for _, j in equal})
            == len(equal)
            == min(len(places), len(free))
        ):
            found = dict(equal)  # all names of one side are names of the other
        elif len(places) == len(free):  # Keras numbers layers as they are made
            ordered = sorted(free, key=lambda j: in_numbers(there[j] or ""))
            found = dict(
                zip(sorted(places, key=lambda i: in_numbers(names[i])), ordered, strict=True)
            )
        else:
            continue
        pairs |= found
        taken |= {*found.values()}
    return dict(sorted(pairs.items()))


def _indexed(here: list[keras.Variable]) -> list[str]:
    """Return names as in a Keras file: the layer, the index in it, and how many weights it has
    without LoRA's.
    """
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
