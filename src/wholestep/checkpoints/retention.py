"""The choice of checkpoints to keep: the newest, and the best."""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from wholestep.checkpoints.folder import Folder
from wholestep.checkpoints.manifest import Manifest
from wholestep.errors import DamagedError

_WATCHED = "watched"  # an entry of a manifest


class Value(NamedTuple):
    """The metric by which checkpoints are compared.

    Args:
        number: its value in the checkpoint's epoch.
        mode: "min" if less is better, else "max".
    """

    number: float
    mode: str


def best_first(values: Mapping[int, Value]) -> list[int]:
    """Return the steps, the best first, and the earlier of equal steps first; NaNs are left out.

    >>> best_first({4: Value(0.5, "min"), 8: Value(0.3, "min"), 12: Value(0.3, "min"), 16: Value(float("nan"), "min")})
    [8, 12, 4]
    >>> best_first({4: Value(0.5, "max"), 8: Value(0.3, "max")})
    [4, 8]
    """
    known = [(number if mode == "min" else -number, step) for step, (number, mode) in values.items()]
    return [step for number, step in sorted(known) if not math.isnan(number)]


def to_remove(steps: Iterable[int], keep: int, values: Mapping[int, Value], num_best: int) -> list[int]:
    """Return the steps to remove: all but the `keep` newest and the `num_best` best.

    >>> to_remove([1, 2, 3, 4], 1, {1: Value(0.1, "min"), 2: Value(0.2, "min")}, 1)
    [2, 3]
    """
    known = sorted(steps)
    stay = {*known[-keep:], *best_first({step: values[step] for step in known if step in values})[:num_best]}
    return [step for step in known if step not in stay]


def as_told(name: str, value: Value) -> dict:
    """Return the manifest entry of a checkpoint's value."""
    return {_WATCHED: {"name": name, "number": value.number, "mode": value.mode}}


def value_in(manifest: Manifest, name: str | None = None) -> Value | None:
    """Return the value in a manifest; None if there is none of this name."""
    told = manifest.rest.get(_WATCHED)
    if not isinstance(told, dict) or (name is not None and told.get("name") != name):
        return None
    number, mode = told.get("number"), told.get("mode")
    if not isinstance(number, int | float) or mode not in ("min", "max"):
        return None
    return Value(float(number), mode)


def values_of(folder: Folder, name: str) -> dict[int, Value]:
    """Return the values of a folder's checkpoints by step, without damaged checkpoints.

    Raises:
        CheckpointError: a checkpoint, which may be the best, cannot be read now.
    """
    values = {}
    for step in folder.steps():
        try:
            value = value_in(folder.manifest(step), name)
        except DamagedError:
            continue
        if value is not None:
            values[step] = value
    return values
