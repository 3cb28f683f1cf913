"""The time of an epoch: every contestant in one process, taking turns."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import keras

import wholestep as ws
from benchmarks.language import Language
from benchmarks.works import WORKS, Pairs, Work

_SECONDS = 1.5  # about how long one turn takes
_MOST_EPOCHS = 10
_PARTS = 10
AT_ONCE = (1, 16, 64)  # updates in one execution of Keras
_LARGE_BATCH = 2048
_MANY_WORDS = 400_000

Run = Callable[[int], Any]  # trains for so many epochs and returns when they are done


class Contestant(NamedTuple):
    """Who trains, and on how much."""

    run: Run
    num_rows: int
    batch_size: int


def measure(work: str, rounds: int, quick: bool) -> dict:
    """Return for each contestant the rows and updates of its epoch, and the seconds it takes, one
    for each round.
    """
    name, _, replica = work.partition(", ")
    contestants = (_with_replica if replica else _CONTESTANTS.get(name, _whole))(WORKS[name], quick)
    epochs = {name: epochs_of_a_turn(contestant.run) for name, contestant in contestants.items()}
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, contestant in contestants.items():
            times[name].append(seconds(contestant.run, epochs[name]) / epochs[name])
    return {
        name: {"rows": c.num_rows, "updates": c.num_rows // c.batch_size, "times": times[name]}
        for name, c in contestants.items()
    }


def _whole(work: Work | Language, quick: bool) -> dict[str, Contestant]:
    data = work.data(quick=quick)
    return {
        "wholestep": _ours(work, data),
        "Keras fit": _keras(work.model(), data, work.batch_size),
    }


def _with_accumulation(work: Work, quick: bool) -> dict[str, Contestant]:
    data = work.data(quick=quick)
    part = work.batch_size // _PARTS
    accumulating = work.model(gradient_accumulation_steps=_PARTS)
    contestants = {
        f"wholestep, microbatch_size={part}": _ours(work, data, part),
        'wholestep, "auto"': _ours(work, data),
        f"Keras fit, {_PARTS} x {part} accumulated": _keras(accumulating, data, part),
        **{
            f"Keras fit, batch {work.batch_size}, {num} at once": _keras(
                work.model(at_once=num), data, work.batch_size
            )
            for num in AT_ONCE
        },
    }
    for name, parts in {
        f"hand-written loop, {_PARTS} x {part}": _PARTS,
        "hand-written loop, whole": 1,
    }.items():
        if run := by_hand(work, data, parts):
            contestants[name] = Contestant(run, len(data["y"]), work.batch_size)
    return contestants


def by_hand(work: Work, data: dict, parts: int = 1) -> Run | None:
    """Return the loop that one would write by hand for this work; None if there is none of so many
    parts.
    """
    if keras.backend.backend() == "jax":
        from benchmarks.bare import scan

        return scan(work.model(), data, work.batch_size, parts)
    from benchmarks.bare_tensorflow import loop

    return loop(work.model(), data, work.batch_size) if parts == 1 else None


def single_by_hand(work: Work, batches: list) -> Callable[[], None]:
    """Return single updates as one would write them by hand: a compiled function, called for each
    batch.
    """
    if keras.backend.backend() == "jax":
        from benchmarks.bare import single
    else:
        from benchmarks.bare_tensorflow import single
    return single(work.model(), batches)


def _pairs(work: Pairs, quick: bool) -> dict[str, Contestant]:
    """Keras fit gets an eighth of the pairs: it takes long, and rates are compared."""
    fewer = replace(work, num_rows=work.num_rows // 8)
    large = replace(work, batch_size=_LARGE_BATCH)
    larger = replace(work, num_words=_MANY_WORDS)
    return {
        "wholestep, 20 000 words": _ours(work, work.data(quick=quick)),
        f"wholestep, 20 000 words, batch {_LARGE_BATCH}": _ours(large, large.data(quick=quick)),
        "wholestep, 400 000 words": _ours(larger, larger.data(quick=quick)),
        "Keras fit, 20 000 words": _keras(work.model(), fewer.data(quick=quick), work.batch_size),
    }


def _with_replica(work: Work, quick: bool) -> dict[str, Contestant]:
    """A model of one replica: under keras.distribution, or in the scope of a strategy."""
    data = work.data(quick=quick)
    alone = _ours(work, data)
    if keras.backend.backend() == "jax":
        one = keras.distribution.DataParallel(devices=keras.distribution.list_devices()[:1])
        keras.distribution.set_distribution(one)
        replica = ws.Trainer(work.model())
    else:
        import tensorflow as tf

        with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
            replica = ws.Trainer(work.model())

    def run(epochs: int) -> None:
        replica.fit(**data, batch_size=work.batch_size, epochs=epochs, verbose=0)

    return {
        "wholestep": alone,
        "wholestep, one replica": Contestant(run, len(data["y"]), work.batch_size),
    }


_CONTESTANTS: dict[str, Callable[[Any, bool], dict[str, Contestant]]] = {
    "A": _with_accumulation,
    "C": _pairs,
}


def _ours(
    work: Work | Pairs | Language, data: dict, microbatch_size: int | str = "auto"
) -> Contestant:
    trainer = ws.Trainer(work.model(), microbatch_size=microbatch_size)
    return _contestant(trainer.fit, data, work.batch_size)


def _keras(model: keras.Model, data: dict, batch_size: int) -> Contestant:
    return _contestant(model.fit, data, batch_size)


def _contestant(fit: Callable, data: dict, batch_size: int) -> Contestant:
    def run(epochs: int) -> None:
        fit(**data, batch_size=batch_size, epochs=epochs, verbose=0)

    return Contestant(run, len(data["y"]), batch_size)


def epochs_of_a_turn(run: Run) -> int:
    """Return how many epochs make a turn long enough to time, after one epoch to warm up."""
    run(1)
    return max(1, min(_MOST_EPOCHS, round(_SECONDS / seconds(run, 1))))


def seconds(run: Run, epochs: int) -> float:
    begin = time.perf_counter()
    run(epochs)
    return time.perf_counter() - begin
