"""Fingerprints of the code, values and data that must be equal in all processes of a run."""

import inspect
import platform
import sys
import zlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import keras
import numpy as np

from wholestep import tree
from wholestep.data.batches import Batches
from wholestep.model.compiled import layers
from wholestep.model.objective import Objective

_PACKAGES = ("wholestep", "keras", "jax", "numpy")


def code_facts(
    model: keras.Model, objective: Objective, optimizer: keras.optimizers.Optimizer, options: object
) -> dict[str, str]:
    """Return a description of the program: versions, script, model, objective, optimizer, options."""
    script = Path(sys.argv[0])
    return {
        "the version of python": platform.python_version(),
        **{f"the version of {package}": _version(package) for package in _PACKAGES},
        "the script": _digest(script.read_bytes()) if script.is_file() else script.name,
        "the model": _digest(_described(*layers(model))),
        "the objective": f"{type(objective).__qualname__} {_digest(_source(type(objective)))}",
        "the optimizer": _digest(_described(optimizer)),
        "the options": str(options),
    }


def value_facts(variables: list) -> dict[str, str]:
    """Return digests of the values of variables, by their paths."""
    return {
        f"{v.path} ({'x'.join(map(str, v.shape))} {v.dtype})": _digest(np.ascontiguousarray(v.value).tobytes())
        for v in variables
        if getattr(v.value, "is_fully_replicated", True)
    }


def data_facts(batches: Batches) -> dict[str, str]:
    """Return a description of the data: number of batches, position, next rows, and digests of their content.

    The digests are of full arrays; if rows are loaded, of a first batch.
    """
    facts = {"the number of batches": str(batches.num_batches), "the place in the data": str(batches.position)}
    if not batches.is_ready:
        facts["the order of the rows"] = _digest(batches.rows(*batches.position).tobytes())
    whole = batches.arrays is not None
    leaves = tree.named_leaves(batches.arrays if whole else batches.example(), "data" if whole else "the first batch")
    return facts | {label: _digest(np.ascontiguousarray(leaf).tobytes()) for label, leaf in leaves}


def _digest(content: bytes | str) -> str:
    return f"{zlib.crc32(content.encode() if isinstance(content, str) else content):08x}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _described(*things: object) -> str:
    """Return the classes of things and their attributes that are plain values or functions.

    Keras' own `get_config` imports TensorFlow to serialise anything. Other differences show in the program.
    """
    kept = [{k: _word(v) for k, v in getattr(t, "__dict__", {}).items() if not k.startswith("_")} for t in things]
    return str([(type(t).__qualname__, sorted(own.items())) for t, own in zip(things, kept, strict=True)])


def _word(value: object) -> str:
    if isinstance(value, list | tuple):
        return str([_word(part) for part in value])
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    return getattr(value, "__qualname__", type(value).__qualname__)


def _source(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return ""
