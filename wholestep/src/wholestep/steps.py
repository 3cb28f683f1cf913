"""Custom loops: one update after the other, or an update on a single batch."""

import atexit
import os
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from functools import cached_property
from typing import Any
from weakref import WeakSet

import keras

from wholestep import arguments, tree
from wholestep.checkpoints import Saver, Snapshot, Unsaved
from wholestep.data import Batches, class_weighted, classify, dense, is_sparse, numpy_batch
from wholestep.drive import step_epoch
from wholestep.engines import connect
from wholestep.executor import Executor
from wholestep.reports.report import Report
from wholestep.run import Run
from wholestep.safety import Guard
from wholestep.tree import Tree


class Step:
    """One update of `Trainer.steps`.

    Args:
        number: the update's number, from 1: the optimizer's `iterations` plus the number of skipped
            updates. It is counted without waiting for the device: updates by Keras or another
            trainer between two steps are included from the next step on JAX, from the next epoch on
            TensorFlow; updates that a dynamic loss scale leaves out are subtracted at the next
            epoch.
        epoch: the epoch of the data, from 0.
        batch: the index of the batch in its epoch, from 0.

    >>> import keras, numpy as np, wholestep as ws
    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> data = ws.Batches((np.ones((8, 3)), np.zeros((8, 1))), batch_size=4)
    >>> [(step.number, step.epoch, step.batch) for step in ws.Trainer(model).steps(data, epochs=2)]
    [(1, 0, 0), (2, 0, 1), (3, 1, 0), (4, 1, 1)]
    """

    def __init__(self, number: int, epoch: int, batch: int, report: Report):
        self.number = number
        self.epoch = epoch
        self.batch = batch
        self._report = report

    def __repr__(self) -> str:
        # no loss, which waits for the device
        return f"<Step {self.number}: batch {self.batch} of epoch {self.epoch}>"

    @cached_property
    def logs(self) -> dict[str, Any]:
        """The loss and the metrics over the epoch so far, as a callback of `fit` receives them.
        Waits for the device.

        Until the next step, the model's `get_metrics_result()` returns the same. An `update` or a
        `fit` between two steps resets them.
        """
        return self._report.logs(0)

    @property
    def loss(self) -> float:
        """The loss of this update alone. Waits for the device: on JAX, if updates are short, once
        for several.

        With a custom `train_step`, the first of its numbers whose name ends with `loss`; NaN if
        there is none.
        """
        return self._report.loss(0)


def run_steps(
    executor: Executor,
    run: Run,
    batches: Batches,
    epochs: int,
    guard: Guard,
    saver: Saver | Unsaved,
    resumed: Snapshot | None,
) -> Iterator[Step]:
    """Run one update after the other, for a custom loop.

    The variables' values are read anew for every update, so `guard` is released in between, and any
    thread may use the trainer then.

    Args:
        saver: saves the run before the next update, if a save is due, with the changes made by the
            loop's body.
        resumed: the snapshot from which the loop resumes, if any.
    """
    saver.check([])
    if resumed is not None:
        run.restore_also(resumed)
    feed = executor.feed(run, batches, singly=True)
    for epoch in range(run.place.epoch, epochs):
        with guard:
            executor.ledger.raise_pending_failure(run)
            if resumed is None:
                run.begin_epoch(epoch, batches.position)
                executor.begin_epoch(run)
            executor.ledger.sync_update_count(run)
            run.has_resumed()
        # no update of the saved epoch is left
        if resumed is not None and batches.position[0] != run.place.began:
            resumed = None
            continue
        resumed = None
        with closing(batches), closing(step_epoch(executor, run, feed, saver, guard)) as reports:
            for report in reports:
                yield Step(report.first, *report.block.start, report)
        executor.barrier_at_position(feed)
    with guard:
        saver.finish()
        run.end_call()


_unfinished: "WeakSet[Generator[Step, None, None]]" = WeakSet()
_process = os.getpid()


def closed_at_exit(steps: Generator[Step, None, None]) -> Iterator[Step]:
    """Return a loop that is closed at the script's end, if it is left unfinished: later, its
    modules would be empty.
    """
    _unfinished.add(steps)
    return steps


@atexit.register
def _close() -> None:
    for steps in list(_unfinished) if os.getpid() == _process else []:
        steps.close()


class Logs(Mapping):
    """The loss and the metrics of one update, by name. Reading them waits for the device; nothing
    else does.

    `dict(logs)` is a plain dict. Until the next update, the model's `get_metrics_result()` returns
    the same.
    """

    def __init__(self, executor: Executor, run: Run, report: Report):
        self._executor = executor
        self._run = run
        self._report: Report | None = report

    @cached_property
    def _values(self) -> dict[str, Any]:
        report = self._report
        assert report is not None
        self._executor.ledger.raise_pending_failure(self._run, report)
        if report.error is not None:
            raise report.error
        self._report = None  # it holds the batch
        return report.logs(0)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return repr(self._values)


def run_update(executor: Executor, run: Run, host: Tree) -> Logs:
    """Run one update on a batch, numpy arrays of shape (rows, ...)."""
    if not executor.ledger.is_counted:
        executor.ledger.sync_update_count(run)
    if run.restored is not None:  # the interrupted call is not resumed
        run.end_call()
    executor.begin_update(run)
    feed, block = executor.single(run, host)  # while the device computes the last update
    executor.ledger.raise_pending_failure(run)
    report = executor.dispatcher.send(run, feed, block, in_call=False)
    executor.ledger.defer_report(run, report)
    return Logs(executor, run, report)


class OnBatch(ABC):
    """The methods of `keras.Model` for a single batch, with the same arguments and results."""

    model: keras.Model
    run: Run

    @property
    @abstractmethod
    def executor(self) -> Executor | None:
        """The compiled programs of the current model."""

    @abstractmethod
    def update(self, batch: Tree) -> Mapping[str, Any]:
        """Run one update on a single batch."""

    @abstractmethod
    def _evaluate_single(self, batch: Tree) -> dict[str, Any]:
        """Return the loss and the metrics of a single batch."""

    @abstractmethod
    def predict(self, x: Tree, *, steps: int | None = None, verbose: int | str) -> Any:
        """Return the model's outputs for all rows."""

    def train_on_batch(
        self,
        x: Tree,
        y: Tree = None,
        sample_weight: Tree = None,
        class_weight: dict | None = None,
        return_dict: bool = False,
    ) -> Any:
        """Run one update, with the arguments of `keras.Model.train_on_batch`. Waits for the device.

        `update(batch)` runs the same update without waiting.

        Args:
            x, y, sample_weight: the batch, nested arrays of shape (rows, ...).
            class_weight: as of `fit`.
            return_dict: whether to return the numbers by name.

        Returns:
            The numbers of this batch alone: the loss, a list in the order of `model.metrics_names`,
                or a dict.

        Raises:
            SpecificationError, BatchError: the arguments or the batch are not valid.
            NonFiniteError: the loss, gradient or a moving statistic was not finite, and the update
                not applied.

        >>> import keras, numpy as np, wholestep as ws
        >>> layer = keras.layers.Dense(1, kernel_initializer="zeros")
        >>> model = keras.Sequential([keras.Input((3,)), layer])
        >>> model.compile("sgd", "mse", metrics=["mae"])
        >>> trainer, x, y = ws.Trainer(model), np.ones((8, 3)), np.full((8, 1), 2.0)
        >>> trainer.train_on_batch(x, y)
        [4.0, 2.0]
        """
        arguments.check_data(classify(x), y, sample_weight)
        batch = _batch(x, y, sample_weight)
        if class_weight is not None:
            names = getattr(self.model, "output_names", ())
            batch = class_weighted(class_weight, names)(numpy_batch(batch))
        return self._results(dict(self.update(batch)), return_dict)

    def test_on_batch(
        self, x: Tree, y: Tree = None, sample_weight: Tree = None, return_dict: bool = False
    ) -> Any:
        """Return the loss and the metrics of one batch, as `keras.Model.test_on_batch` does."""
        arguments.check_data(classify(x), y, sample_weight)
        return self._results(self._evaluate_single(_batch(x, y, sample_weight)), return_dict)

    def _results(self, logs: dict[str, Any], return_dict: bool) -> Any:
        assert self.executor is not None
        return self.executor.context.results(logs, return_dict=return_dict)

    def predict_on_batch(self, x: Tree) -> Any:
        """Return the model's outputs for one batch as numpy arrays; a single process calls the
        model's own method.

        After a restore the trainer computes them: the model may not be built yet, and have no
        weights to assign to.
        """
        if connect().count > 1 or self.run.restored is not None:
            return self.predict(iter([(x,)]), verbose=0, steps=1)
        return self.model.predict_on_batch(
            tree.map_leaves(lambda leaf: dense(leaf) if is_sparse(leaf) else leaf, x)
        )


def _batch(*parts: Tree) -> Tree:
    """Return (x, y, sample_weight) without missing parts at the end; a single dict unchanged, for
    an objective.
    """
    num = max((i + 1 for i, part in enumerate(parts) if part is not None), default=1)
    return parts[0] if num == 1 and isinstance(parts[0], dict) else parts[:num]
