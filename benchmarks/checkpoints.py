"""What checkpoints cost: a loop that saves against one that does not, and each part against the
least it could take.
"""

import importlib.util
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import keras
import numpy as np
import xxhash

import wholestep as ws
from wholestep.checkpoints.folder import Folder
from wholestep.checkpoints.writer import CopyBuffers, Writer

_EVERY = 50  # updates between two checkpoints
# a disk, which the folder for temporary files need not be
_OUT = Path(__file__).parent.parent / "out"


def measure(rounds: int, quick: bool) -> dict[str, dict[str, list[float]]]:
    """
    Return seconds, by what was measured and by contestant.

    Args:
        quick: small states, whose figures mean nothing.
    """
    width, rows, updates = (50, 8, 20) if quick else (1000, 256, 2 * _EVERY)
    trainer = _trainer(width)
    data = ws.Batches(_rows(width, rows * 4), rows)
    next(trainer.steps(data))
    _OUT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_OUT) as folder:
        at = Path(folder)
        contestants: dict[str, dict[str, Callable[[int], float]]] = {
            "updates": {
                "saving": lambda i: _updates(trainer, data, updates, at / f"run-{i}"),
                "not saving": lambda i: _updates(trainer, data, updates, None),
            },
            "hold": _hold(trainer),
            "load": _load(at / "large", 200, 1 << (10 if quick else 20)),
            "small": _small(at / "small"),
            "digest": _digest(1 << (20 if quick else 28)),
        }
        found: dict[str, dict[str, list[float]]] = {}
        for work, each in contestants.items():
            found[work] = {name: [] for name in each}
            for i in range(rounds):
                for name, seconds in each.items():
                    found[work][name].append(seconds(i))
        return found | _against_others(at, rounds, 50 if quick else 2040)


def _trainer(width: int) -> ws.Trainer:
    layers = [keras.layers.Dense(width, activation="tanh") for _ in range(8)]
    model = keras.Sequential([keras.Input((width,)), *layers, keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return ws.Trainer(model)


def _rows(width: int, num: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(num, width)).astype("float32"), rng.normal(size=(num, 1)).astype(
        "float32"
    )


def _updates(trainer: ws.Trainer, data: ws.Batches, num: int, folder: Path | None) -> float:
    """Return the seconds of so many updates; the last checkpoint is written when they are over."""
    asked = (
        None
        if folder is None
        else ws.Checkpoints(folder, every_steps=num // 2, every_seconds=None, keep=1)
    )
    data.seek(0)
    begin = 0.0
    for i, step in enumerate(trainer.steps(data, epochs=num, checkpoints=asked)):
        if i in (0, num):
            _ = step.loss  # waits for the device
            begin = time.perf_counter() - begin
        if i == num:
            break
    return begin


def _hold(trainer: ws.Trainer) -> dict[str, Callable[[int], float]]:
    """A snapshot into room that is kept, against a copy into arrays that have been touched."""
    room = CopyBuffers()
    held = list(trainer.run.snapshot(room.copy).arrays.values())
    copies = [array.copy() for array in held]
    return {
        "snapshot": lambda i: _timed(lambda: trainer.run.snapshot(room.copy)),
        "copy": lambda i: _timed(
            lambda: [np.copyto(to, array) for to, array in zip(copies, held, strict=True)]
        ),
    }


def _load(path: Path, num: int, size: int) -> dict[str, Callable[[int], float]]:
    """A verified read, against a read of the same bytes into fresh arrays, both from a warm
    cache.
    """
    path.mkdir()
    folder = Folder(path)
    folder.write(1, {f"params/{i}": np.ones(size * 5 // 4, "float32") for i in range(num)}, {})
    files = sorted(folder.path(1).glob("*.safetensors"))

    def plain() -> list[np.ndarray]:
        return [np.fromfile(file, np.uint8) for file in files]

    plain()
    return {"verified": lambda i: _timed(lambda: folder.read(1)), "plain": lambda i: _timed(plain)}


def _small(path: Path) -> dict[str, Callable[[int], float]]:
    """A whole save of 10 MB in 200 leaves, against one write and fsync of as many bytes."""
    path.mkdir()
    folder = Folder(path)
    arrays = {f"params/{i}": np.ones(12_500, "float32") for i in range(200)}
    content = np.ones(200 * 12_500, "float32")

    def plain() -> None:
        with open(path / "plain", "wb") as file:
            file.write(content.data)
            file.flush()
            os.fsync(file.fileno())

    steps = iter(range(1, 1000))
    return {
        "save": lambda i: _timed(lambda: folder.write(next(steps), arrays, {})),
        "plain write": lambda i: _timed(plain),
    }


def _digest(nbytes: int) -> dict[str, Callable[[int], float]]:
    content = np.ones(nbytes, np.uint8)
    seconds = nbytes / 2e9
    return {
        "xxh3_128": lambda i: _timed(lambda: xxhash.xxh3_128_hexdigest(content)),
        "2 GB/s": lambda i: seconds,
    }


def _timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _against_others(path: Path, rounds: int, width: int) -> dict[str, dict[str, list[float]]]:
    """Return seconds of saving and reading one state by three libraries: 400 MB under Adam, if
    `width` is 2040.

    "hold" is how long the loop waits, "total" ends when the save is complete, "read" when a model
    holds the values. Each round writes a new checkpoint, of which each library keeps the newest.
    ModelCheckpoint does not fsync.
    """
    saves = {
        "wholestep": _save_ours(path / "ours", width),
        "ModelCheckpoint": _save_by_keras(path, width),
    }
    if importlib.util.find_spec("orbax") is not None:
        saves["OrbaxCheckpoint"] = _save_by_orbax(path / "orbax", width)
    found: dict[str, dict[str, list[float]]] = {
        f"400 MB, {part}": {name: [] for name in saves} for part in ("hold", "total", "read")
    }
    for i in range(rounds + 1):  # the first round touches the memory that is kept
        for name, (begin, end, read) in saves.items():
            hold = _timed(partial(begin, i + 1))
            seconds = hold, hold + _timed(end), _timed(read)
            for times, value in zip(found.values(), seconds, strict=True):
                times[name] += [value] if i else []
    return found


Save = tuple[Callable[[int], object], Callable[[], object], Callable[[], object]]


def _trained(width: int) -> ws.Trainer:
    trainer = _trainer(width)
    trainer.update(_rows(width, 8))
    return trainer


def _save_ours(path: Path, width: int) -> Save:
    trainer = _trained(width)
    other = _trained(width)
    path.mkdir()
    folder = Folder(path)
    room = CopyBuffers()
    writer = Writer()

    def begin(i: int) -> None:
        snapshot = trainer.run.snapshot(room.copy)
        writer.start(partial(write, i, snapshot))

    def write(i: int, snapshot) -> None:
        folder.write(i, snapshot.arrays, snapshot.facts)
        for old in folder.steps()[1:]:
            folder.remove(old)

    return begin, writer.wait, lambda: other.restore(path)


def _save_by_keras(path: Path, width: int) -> Save:
    file = path / "model.keras"
    callback = keras.callbacks.ModelCheckpoint(file)
    callback.set_model(_trained(width).model)
    return (
        (lambda i: callback.on_epoch_end(i, {})),
        lambda: None,
        lambda: keras.saving.load_model(file),
    )


def _save_by_orbax(path: Path, width: int) -> Save:
    callback = keras.callbacks.OrbaxCheckpoint(path)
    callback.set_model(_trained(width).model)
    return (
        lambda i: callback.on_epoch_end(i, {}),
        lambda: [future.result() for future in callback._async_futures],
        lambda: keras.saving.load_model(path),
    )
