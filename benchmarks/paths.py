"""The paths that people take: `fit` with what they give it, their own loop, and evaluation, against
the same in Keras.

Each path is one function of `Contest`: it returns what ours does and what Keras does, each a
function of no arguments that carries out all batches once and returns when the numbers are there.
"""

import importlib.util
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import keras
import numpy as np

import wholestep as ws
from benchmarks.speed import AT_ONCE, by_hand, single_by_hand
from benchmarks.works import WORKS

_ROUNDS_TO_WARM_UP = 2
_LARGE = 1024
_HAS_TF = importlib.util.find_spec("tensorflow") is not None

Run = Callable[[], Any]


class Contest:
    """One model, twice, and the data of work P."""

    def __init__(self, *, quick: bool):
        work = WORKS["P"]
        self.size = work.batch_size
        self.data = work.data(quick=quick)
        self.num_batches = len(self.data["y"]) // self.size
        self.trainer, self.model = ws.Trainer(work.model()), work.model()

    def arrays(self, **given: Any) -> tuple[Run, Run]:
        """`fit` on arrays."""
        return self._fit(**self.data, batch_size=self.size, **given)

    def arrays_at_once(self) -> tuple[Run, Run]:
        """`fit` on arrays, against Keras with the `steps_per_execution` of `AT_ONCE` that is
        fastest here.
        """
        theirs = {}
        found = {}
        for num in AT_ONCE:
            theirs[num] = partial(
                WORKS["P"].model(at_once=num).fit, **self.data, batch_size=self.size, verbose=0
            )
            for _ in range(_ROUNDS_TO_WARM_UP + 1):
                begin = time.perf_counter()
                theirs[num]()
                found[num] = time.perf_counter() - begin
        return self.arrays()[0], theirs[min(found, key=found.__getitem__)]

    def arrays_by_hand(self) -> tuple[Run, Run]:
        """`fit` on arrays, against a loop that one would write by hand."""
        bare = by_hand(WORKS["P"], self.data)
        return self.arrays()[0], lambda: bare(1)

    def validation(self) -> tuple[Run, Run]:
        """`fit` with as many rows to validate on."""
        return self.arrays(validation_data=(self.data["x"], self.data["y"]))

    def logs(self) -> tuple[Run, Run]:
        """`fit` with a callback that reads the loss of every batch, and may read the model."""
        return self.arrays(callbacks=[_ReadsLogs(reads_model=True)])

    def logs_alone(self) -> tuple[Run, Run]:
        """`fit` with a callback that reads the loss of every batch, and says that this is all."""
        return self.arrays(callbacks=[_ReadsLogs(reads_model=False)])

    def weights(self) -> tuple[Run, Run]:
        """`fit` with a callback that reads the weights after every 50th batch."""
        return self.arrays(callbacks=[_ReadsWeights()])

    def dataset(self, **given: Any) -> tuple[Run, Run]:
        """`fit` on a PyDataset."""
        return self._fit(Dataset(self.batches()), **given)

    def dataset_validated(self) -> tuple[Run, Run]:
        """`fit` on a PyDataset, with another to validate on."""
        return self.dataset(validation_data=Dataset(self.batches()))

    def dataset_logs(self) -> tuple[Run, Run]:
        """`fit` on a PyDataset with a callback that reads the loss of every batch, and may read the
        model.
        """
        return self.dataset(callbacks=[_ReadsLogs(reads_model=True)])

    def dataset_logs_alone(self) -> tuple[Run, Run]:
        """`fit` on a PyDataset with a callback that reads the loss of every batch, and says that
        this is all.
        """
        return self.dataset(callbacks=[_ReadsLogs(reads_model=False)])

    def dataset_loop(self) -> tuple[Run, Run]:
        """One's own loop on a PyDataset, against `fit` on it."""
        return self._loop(ws.Batches(Dataset(self.batches())), reads=False), self.dataset()[1]

    def generator(self) -> tuple[Run, Run]:
        """`fit` on a generator of ready batches."""
        batches = self.batches()
        options = {"steps_per_epoch": self.num_batches, "verbose": 0}
        return lambda: self.trainer.fit(_endless(batches), **options), lambda: self.model.fit(
            _endless(batches), **options
        )

    def tf_data(self) -> tuple[Run, Run]:
        """`fit` on a tf.data.Dataset that shuffles and batches."""
        import tensorflow as tf

        rows = tf.data.Dataset.from_tensor_slices((self.data["x"], self.data["y"]))
        return self._fit(rows.shuffle(1000).batch(self.size).prefetch(tf.data.AUTOTUNE))

    def loop(self) -> tuple[Run, Run]:
        """One's own loop that reads no loss, against `fit`."""
        return self._loop(self._rows(), reads=False), self.arrays()[1]

    def loop_reading(self) -> tuple[Run, Run]:
        """One's own loop that reads every loss, against `fit`."""
        return self._loop(self._rows(), reads=True), self.arrays()[1]

    def update(self) -> tuple[Run, Run]:
        """One update on a batch in hand, against `train_on_batch`."""
        batches = self.batches()

        def ours() -> None:
            for batch in batches:
                logs = self.trainer.update(batch)
            dict(logs)

        def theirs() -> None:
            for batch in batches:
                self.model.train_on_batch(*batch)

        return ours, theirs

    def update_by_hand(self) -> tuple[Run, Run]:
        """One update on a batch in hand, against one call of a compiled function."""
        return self.update()[0], single_by_hand(WORKS["P"], self.batches())

    def evaluate(self) -> tuple[Run, Run]:
        """`evaluate` on arrays."""
        given = {**self.data, "batch_size": self.size, "verbose": 0}
        return lambda: self.trainer.evaluate(**given), lambda: self.model.evaluate(**given)

    def predict(self, size: int | None = None) -> tuple[Run, Run]:
        """`predict` on arrays."""
        given = {"x": self.data["x"], "batch_size": size or self.size, "verbose": 0}
        return lambda: self.trainer.predict(**given), lambda: self.model.predict(**given)

    def predict_large(self) -> tuple[Run, Run]:
        """`predict` on arrays, in large batches."""
        return self.predict(_LARGE)

    def dataset_evaluated(self) -> tuple[Run, Run]:
        """`evaluate` on a PyDataset."""
        data = Dataset(self.batches())
        return lambda: self.trainer.evaluate(data, verbose=0), lambda: self.model.evaluate(
            data, verbose=0
        )

    def dataset_predicted(self) -> tuple[Run, Run]:
        """`predict` on a PyDataset."""
        data = Dataset(self.batches())
        return lambda: self.trainer.predict(data, verbose=0), lambda: self.model.predict(
            data, verbose=0
        )

    def test_on_batch(self) -> tuple[Run, Run]:
        """The numbers of one batch after the other."""
        batches = self.batches()

        def run(whose: Any) -> None:
            for batch in batches:
                whose.test_on_batch(*batch)

        return lambda: run(self.trainer), lambda: run(self.model)

    def batches(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the data in ready batches."""
        x = self.data["x"]
        y = self.data["y"]
        size = self.size
        return [
            (x[start : start + size], y[start : start + size]) for start in range(0, len(y), size)
        ]

    def _fit(self, *given: Any, **options: Any) -> tuple[Run, Run]:
        options["verbose"] = 0
        return lambda: self.trainer.fit(*given, **options), lambda: self.model.fit(
            *given, **options
        )

    def _rows(self) -> ws.Batches:
        return ws.Batches((self.data["x"], self.data["y"]), batch_size=self.size)

    def _loop(self, batches: ws.Batches, *, reads: bool) -> Run:
        def run() -> None:
            for step in self.trainer.steps(batches):
                if reads:
                    step.loss  # noqa: B018  the user looks at it
            step.loss  # noqa: B018  and all of them wait for the end

        return run


PATHS: dict[str, Callable[[Contest], tuple[Run, Run]]] = {
    "fit, arrays": Contest.arrays,
    "fit, arrays, against Keras with its best steps_per_execution": Contest.arrays_at_once,
    "fit, arrays, against a loop by hand": Contest.arrays_by_hand,
    "fit, validation_data": Contest.validation,
    "fit, a callback reads every batch's logs": Contest.logs,
    "fit, a callback reads every batch's logs alone": Contest.logs_alone,
    "fit, a callback reads the weights every 50 batches": Contest.weights,
    "fit, a PyDataset": Contest.dataset,
    "fit, a generator": Contest.generator,
    "fit, tf.data": Contest.tf_data,
    "steps(), against fit": Contest.loop,
    "steps(), every loss read, against fit": Contest.loop_reading,
    "update(), against train_on_batch": Contest.update,
    "update(), against a bare call": Contest.update_by_hand,
    "evaluate": Contest.evaluate,
    "predict, batch 60": Contest.predict,
    "predict, batch 1024": Contest.predict_large,
    "fit, a PyDataset, another to validate on": Contest.dataset_validated,
    "fit, a PyDataset, a callback reads every batch's logs": Contest.dataset_logs,
    "fit, a PyDataset, a callback reads every batch's logs alone": Contest.dataset_logs_alone,
    "steps() on a PyDataset, against fit": Contest.dataset_loop,
    "evaluate, a PyDataset": Contest.dataset_evaluated,
    "predict, a PyDataset": Contest.dataset_predicted,
    "test_on_batch": Contest.test_on_batch,
}


def measure(rounds: int, quick: bool, only: str = "") -> dict[str, dict[str, list[float]]]:
    """Return for each path the microseconds a batch takes, ours and in Keras, one for each round,
    in turns.
    """
    paths = {
        name: path
        for name, path in PATHS.items()
        if only in name and (path is not Contest.tf_data or _HAS_TF)
    }
    return in_turns(Contest, paths, rounds, quick)


def in_turns(
    contest_of: Callable[..., Contest], paths: dict[str, Callable], rounds: int, quick: bool
) -> dict[str, dict[str, list[float]]]:
    """Return for each path of a contest the microseconds a batch takes, as `measure`."""
    found = {}
    for name, path in paths.items():
        contest = contest_of(quick=quick)
        runs = dict(zip(("wholestep", "Keras"), path(contest), strict=True))
        times: dict[str, list[float]] = {who: [] for who in runs}
        for i in range(rounds + _ROUNDS_TO_WARM_UP):
            for who, run in runs.items():
                begin = time.perf_counter()
                run()
                seconds = time.perf_counter() - begin
                times[who] += (
                    [seconds / contest.num_batches * 1e6] if i >= _ROUNDS_TO_WARM_UP else []
                )
        found[name] = times
    return found


class _ReadsLogs(keras.callbacks.Callback):
    def __init__(self, *, reads_model: bool):
        super().__init__()
        self.reads_model = reads_model

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        assert logs is not None
        float(logs["loss"])


class _ReadsWeights(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        if batch % 50 == 0:
            self.model.get_weights()


class Dataset(keras.utils.PyDataset):
    """Ready batches of a list."""

    def __init__(self, batches: list, **how: Any):
        super().__init__(**how)
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, i: int) -> Any:
        return self.batches[i]


def _endless(batches: list) -> Iterator[Any]:
    while True:
        yield from batches
