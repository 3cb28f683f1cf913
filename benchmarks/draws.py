"""The time of an update of models that draw at random: draws that belong to rows, against the
engine's own.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import keras
import numpy as np
from keras import layers

import wholestep as ws
from benchmarks.speed import epochs_of_a_turn, seconds
from benchmarks.works import WORKS, Work
from wholestep.model.draws import DrawFact

_PARTS = 4


def _augmented(x: Any) -> Any:
    """Images that are turned over, turned and zoomed, and the least of a model behind them."""
    for layer in (
        layers.RandomFlip(seed=1),
        layers.RandomRotation(0.1, seed=2),
        layers.RandomZoom(0.1, seed=3),
    ):
        x = layer(x)
    return layers.Dense(10)(layers.GlobalAveragePooling2D()(x))


_WORKS = {
    "D, dropout": replace(WORKS["D"], dropout=0.1),
    "augmentation": Work(
        _augmented,
        (32, 32, 3),
        keras.optimizers.SGD,
        batch_size=128,
        num_rows=128 * 8,
        quick_rows=128 * 2,
    ),
}


def measure(work: str, rounds: int, quick: bool) -> dict:
    """Return the updates of an epoch, and for each contestant the seconds of it: one for each
    round.
    """
    made = _WORKS[work]
    data = made.data(quick=quick)
    part = made.batch_size // _PARTS
    runs = {
        "wholestep": _run(made, data, "auto"),
        "wholestep, again": _run(made, data, "auto"),
        "wholestep, the engine's draws": _run(made, data, "auto", as_ever=True),
        f"wholestep, microbatch_size={part}": _run(made, data, part),
        f"wholestep, microbatch_size={part}, the engine's draws": _run(
            made, data, part, as_ever=True
        ),
    }
    epochs = {name: epochs_of_a_turn(run) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds):
        order = list(runs) if number % 2 else list(reversed(runs))
        for name in order:
            times[name].append(seconds(runs[name], epochs[name]) / epochs[name])
    return {"updates": len(data["y"]) // made.batch_size, "times": times}


def _run(
    work: Any, data: dict[str, np.ndarray], microbatch_size: int | str, *, as_ever: bool = False
) -> Any:
    trainer = ws.Trainer(work.model(), microbatch_size=microbatch_size)
    with _as_ever() if as_ever else contextlib.nullcontext():
        trainer.fit(**data, batch_size=work.batch_size, verbose=0)
    fit = partial(trainer.fit, **data, batch_size=work.batch_size, verbose=0)
    return lambda epochs: fit(epochs=epochs)


@contextlib.contextmanager
def _as_ever() -> Iterator[None]:
    """Let the engine's own generator draw while a program is made, for each microbatch from a seed
    of its own.

    From one seed for all, XLA would draw once for all microbatches, and do what follows once.
    """
    ours = DrawFact.is_ours
    DrawFact.is_ours = property(lambda fact: False)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        DrawFact.is_ours = ours  # type: ignore[method-assign]
