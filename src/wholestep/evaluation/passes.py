"""The loops of `evaluate` and `predict` over a data set, with their callbacks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import keras

from wholestep.callbacks import CallbackRunner
from wholestep.dispatch.repeat import MOST_UPDATES
from wholestep.errors import BatchError, message, warn
from wholestep.evaluation.evaluate import Pass, join
from wholestep.executor import Executor
from wholestep.run import Run
from wholestep.tree import Tensor


def run_evaluation(
    executor: Executor,
    run: Run,
    through: Pass,
    steps: int | None,
    watch: CallbackRunner,
    look: Callable[[], None] = lambda: None,
) -> dict:
    """Return the logs over `steps` batches (None: all).

    Args:
        look: called after each dispatch; its exceptions end the evaluation.
    """
    told, at, logs = watch.callbacks, through.run, None
    executor.model.stop_evaluating = False
    told.on_test_begin()
    executor.begin_evaluation(through)
    size = (lambda: 1) if through.look.one_by_one else (lambda: MOST_UPDATES)
    for found, block in through.updates(executor.evaluation, steps, size, lambda: watch.test.begin(at.number)):
        look()
        logs = partial(executor.show_evaluation, found, block)
        watch.test.end(at.number - 1, logs() if watch.has_test_hooks else None)
        if executor.model.stop_evaluating:
            break
    else:
        _note_missing(at.number, steps)
    watch.test.close()
    if logs is None:
        raise BatchError(message("There must be at least one batch.", "none", "pass data that are not exhausted."))
    shown = logs()
    executor.engine.processes.barrier(f"evaluated {at.number} batches")
    told.on_test_end(shown)
    return shown


def run_prediction(executor: Executor, run: Run, through: Pass, steps: int | None, watch: CallbackRunner) -> Any:
    """Return the outputs for the rows of `steps` batches (None: all)."""
    told, at = watch.callbacks, through.run
    outputs: list = []
    executor.model.stop_predicting = False
    told.on_predict_begin()
    executor.begin_evaluation(through)
    size = (lambda: 1) if through.look.one_by_one else (lambda: MOST_UPDATES)
    for found, block in through.updates(executor.evaluation, steps, size, lambda: watch.predict.begin(at.number)):
        outputs.append(keras.tree.map_structure(lambda leaf, num=block.num: _rows(leaf, num), found))
        several = outputs[len(outputs) - 1 - (at.number - 1) % watch.each :] if watch.has_predict_hooks else []
        watch.predict.end(at.number - 1, {"outputs": keras.tree.map_structure(_joined, *several)} if several else None)
        if executor.model.stop_predicting:
            break
    else:
        _note_missing(at.number, steps)
    watch.predict.close()
    told.on_predict_end()
    executor.engine.processes.barrier(f"predicted {at.number} batches")
    return join(executor.engine.fetch(outputs))


def _rows(found: Tensor, num: int) -> Tensor:
    """Return the outputs of the first `num` batches as one array of rows."""
    return keras.ops.reshape(found[:num], (num * found.shape[1], *found.shape[2:]))


def _joined(*outputs: Tensor) -> Tensor:
    return outputs[0] if len(outputs) == 1 else keras.ops.concatenate(outputs)


def _note_missing(num: int, steps: int | None) -> None:
    if num and steps is not None and num < steps:
        warn(f"The data ended after {num} of {steps} batches.")
