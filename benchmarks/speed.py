"""The time of an epoch: every contestant in one process, taking turns."""

import time
from collections.abc import Callable
from typing import Any

import keras

import wholestep as ws
from benchmarks.works import WORKS, Work

_SECONDS = 1.5  # about how long one turn takes
_MOST_EPOCHS = 10
_PARTS = 10

Run = Callable[[int], Any]  # trains for so many epochs and returns when they are done


def measure(work: str, rounds: int, quick: bool) -> dict:
    """Return the epoch's number of updates, and for each contestant its seconds per epoch, one for each round."""
    chosen = WORKS[work]
    data = chosen.data(quick=quick)
    runs = _with_accumulation(chosen, data) if work == "A" else _whole(chosen, data)
    epochs = {name: _epochs(run) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(_seconds(run, epochs[name]) / epochs[name])
    return {"updates": len(data[0]) // chosen.batch_size, "times": times}


def _whole(work: Work, data: tuple) -> dict[str, Run]:
    return {"wholestep": _ours(work, data, "auto"), "Keras fit": _keras(work.model(), data, work.batch_size)}


def _with_accumulation(work: Work, data: tuple) -> dict[str, Run]:
    part = work.batch_size // _PARTS
    accumulating = work.model(gradient_accumulation_steps=_PARTS)
    runs = {
        f"wholestep, microbatch_size={part}": _ours(work, data, part),
        'wholestep, "auto"': _ours(work, data, "auto"),
        f"Keras fit, {_PARTS} x {part} accumulated": _keras(accumulating, data, part),
        f"Keras fit, batch {work.batch_size}": _keras(work.model(), data, work.batch_size),
    }
    if keras.backend.backend() == "jax":
        from benchmarks.bare import scan

        runs[f"hand-written scan, {_PARTS} x {part}"] = scan(work.model(), data, work.batch_size, _PARTS)
        runs["hand-written scan, whole"] = scan(work.model(), data, work.batch_size, 1)
    return runs


def _ours(work: Work, data: tuple, microbatch_size: int | str) -> Run:
    trainer = ws.Trainer(work.model(), microbatch_size=microbatch_size)
    return lambda epochs: trainer.fit(*data, batch_size=work.batch_size, epochs=epochs, verbose=0)


def _keras(model: keras.Model, data: tuple, batch_size: int) -> Run:
    return lambda epochs: model.fit(*data, batch_size=batch_size, epochs=epochs, verbose=0)


def _epochs(run: Run) -> int:
    """Return how many epochs make a turn long enough to time, after one epoch to warm up."""
    run(1)
    return max(1, min(_MOST_EPOCHS, round(_SECONDS / _seconds(run, 1))))


def _seconds(run: Run, epochs: int) -> float:
    begin = time.perf_counter()
    run(epochs)
    return time.perf_counter() - begin
