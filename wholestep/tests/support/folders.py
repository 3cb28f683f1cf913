"""Arrays in pieces, and folders of checkpoints with files that are damaged or not theirs."""

import itertools
from functools import partial

import ml_dtypes
import numpy as np

from wholestep.checkpoints.resume import newest
from wholestep.checkpoints.shards import Shard, ShardedArray
from wholestep.checkpoints.shared_folder import SharedFolder
from wholestep.processes import SingleProcess

NUMBERS = np.arange(24, dtype="float32").reshape(4, 6)


def cut(numbers, *places, own=lambda i: True):
    """Return an array in pieces, cut along every axis at these places."""
    bounds = [
        list(itertools.pairwise([0, *at, size]))
        for at, size in zip(places, numbers.shape, strict=True)
    ]
    cells = []
    for i, cell in enumerate(itertools.product(*bounds)):
        part = numbers[tuple(slice(*span) for span in cell)]
        begin = tuple(first for first, _ in cell)
        cells.append(Shard(begin, part.shape, partial(np.array, part), own(i)))
    return ShardedArray(numbers.shape, numbers.dtype, cells)


RNG = np.random.default_rng(0)


DTYPES = (
    "float64",
    "float32",
    "float16",
    "int64",
    "int32",
    "int8",
    "uint32",
    "uint8",
    "bool",
    ml_dtypes.bfloat16,
)


def some(num=12):
    """Return arrays of every kind and shape that a state may hold."""
    shapes = [(), (3,), (0, 4), (2, 3, 5), (7, 1)]
    return {
        f"params/{i}": RNG.integers(0, 2, shapes[i % 5]).astype(DTYPES[i % len(DTYPES)])
        for i in range(num)
    }


def equal(one, two):
    assert list(one) == list(two)
    for name, array in one.items():
        assert array.dtype == two[name].dtype
        assert array.shape == two[name].shape
        assert array.tobytes() == two[name].tobytes()


def newest_in(folder):
    return newest(SharedFolder(folder, SingleProcess()), lambda *_: None, sets_aside=True)


LITTER = (".new-0123456789ab", ".new-0123456789ab-3", ".old-ba9876543210")


def once(monkeypatch, owner, name, act, *, after=False):
    """Let something happen once, before or after the first call of a function."""
    real = getattr(owner, name)
    left = [act]

    def called(*arguments, **options):
        if left and not after:
            left.pop()()
        result = real(*arguments, **options)
        if left:
            left.pop()()
        return result

    monkeypatch.setattr(owner, name, called)
