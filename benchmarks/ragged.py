"""The time of an epoch of texts of many lengths: in buckets, or padded as one would for Keras
fit.
"""

import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import wholestep as ws
from benchmarks.works import WORKS

_TOKENS = 2048
_WORK = "D"

Text = tuple[np.ndarray, np.ndarray, np.ndarray]


class _Padded(keras.utils.PyDataset):
    """Batches of texts in one random order, each padded to its longest text or to `length`."""

    def __init__(self, texts: list[Text], batch_size: int, length: int | None = None):
        super().__init__()
        order = np.random.default_rng(1).permutation(len(texts))
        self.batches = [
            [texts[row] for row in order[start : start + batch_size]]
            for start in range(0, len(texts), batch_size)
        ]
        self.length = length

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int) -> tuple[np.ndarray, ...]:
        texts = self.batches[number]
        length = self.length or max(len(x) for x, *_ in texts)
        columns = zip(*texts, strict=True)
        return tuple(
            np.stack([np.pad(part, (0, length - len(part))) for part in column])
            for column in columns
        )


def measure(rounds: int, quick: bool) -> dict:
    """
    Return the real tokens of an epoch, and for each contestant the seconds of its first epoch,
    compilation included, and of later ones, in which every shape has been seen: one for each round.
    """
    runs, tokens = _contestants(quick)
    first = {name: [_seconds(run)] for name, run in runs.items()}
    later: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            later[name].append(_seconds(run))
    return {"tokens": tokens, "first": first, "later": later}


def _contestants(quick: bool) -> tuple[dict[str, Callable[[], Any]], int]:
    work = WORKS[_WORK]
    texts = work.texts(quick=quick)
    lengths = np.array([len(x) for x, *_ in texts])
    batches = ws.Batches(texts, tokens=_TOKENS, length=lengths, seed=1)
    trainer = ws.Trainer(work.model())
    # as many rows to an update as ours have on average
    batch_size = round(len(texts) / len(batches))
    return {
        f"wholestep, tokens={_TOKENS}": lambda: trainer.fit(batches, verbose=0),
        "Keras fit, each batch padded": _keras(work.model(), _Padded(texts, batch_size)),
        "Keras fit, padded to the longest": _keras(
            work.model(), _Padded(texts, batch_size, int(lengths.max()))
        ),
    }, int(lengths.sum())


def _keras(model: keras.Model, data: _Padded) -> Callable[[], Any]:
    return lambda: model.fit(data, verbose=0)


def _seconds(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin
