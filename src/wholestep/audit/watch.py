"""audit(): a loop runs under hooks, and a report says what is wrong with it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from wholestep import tree
from wholestep.audit.hooks import Hooks
from wholestep.audit.judge import Case
from wholestep.audit.log import Log
from wholestep.audit.meaning import meant
from wholestep.audit.report import Report
from wholestep.audit.steps import Schedule
from wholestep.engines import listener
from wholestep.errors import SpecificationError, message
from wholestep.tree import Tree


@contextmanager
def audit(
    model: keras.Model,
    data: Tree,
    loss: Any = None,
    *,
    learning_rate: float | Callable[[int], Any] | None = None,
) -> Iterator[Report]:
    """Watch the user's own training loop, and say what is wrong with it, by name and with proof.

    A few updates are enough: two passes over a few batches show most. The first 40 updates are kept with all their
    numbers, so the memory is that of so many copies of the weights. Loops are looked at that use `fit` or
    `train_on_batch` (also with a `train_step` of their own), `tf.GradientTape` (eager, or in a `tf.function` whose
    first call is inside the `with`, also under a `tf.distribute.MirroredStrategy`), or JAX' `stateless_call` and
    `stateless_apply` (plain or jitted), with an optimizer of Keras.

    Args:
        model: the model that the loop trains.
        data: (x, y) or (x, y, sample_weight), arrays as the model gets them; row i of all belongs together.
        loss: what was meant: a Keras loss, its name, a function (labels, outputs), or an `Objective` over such batches;
            None for what the model was compiled with.
        learning_rate: what was meant: a number, or a function (or Keras schedule) of the number of the update, from 0;
            None for the schedule of the compiled optimizer, if it has one.

    Yields:
        A `Report`, to be read after the `with`. It is printed, or its `causes` are looked at.

    Raises:
        SpecificationError: the model, the data or the loss cannot be audited. Nothing has been hooked.

    >>> import keras, numpy as np, wholestep as ws
    >>> x, y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    >>> with ws.audit(model, data=(x, y), loss="mse") as report:
    ...     pass  # the loop
    >>> report.has_seen, report.causes
    (False, [])
    """
    given = _checked(model, data)
    optimizer = getattr(model, "optimizer", None)
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # the one that moves the weights
    objective, schedule = meant(model, loss), _schedule(model, learning_rate)
    before = [np.array(keras.ops.convert_to_numpy(v)) for v in model.trainable_variables]
    log, report = Log(), Report()
    try:
        with Hooks(model, listener(), log).on():
            yield report
    except BaseException:
        report.fail()
        raise
    if learning_rate is None and any(step.optimizer != id(optimizer) for step in log.applied):
        schedule = None  # the compiled optimizer's, which is not the loop's
    report.close(Case(model, given, objective, schedule, log, before))


def _checked(model: Any, data: Any) -> tuple[Tree, Tree, Tree]:
    """Return (x, y, sample_weight) as copies, or say what is wrong with them."""
    if not isinstance(model, keras.Model):
        must, attempt = "The audit needs a Keras model.", "ws.audit(model, data=(x, y))."
        raise SpecificationError(message(must, type(model).__name__, attempt))
    if not isinstance(data, tuple | list) or len(data) not in (2, 3):
        received = f"{len(data)} parts" if isinstance(data, tuple | list) else type(data).__name__
        must, attempt = "data must be (x, y) or (x, y, sample_weight).", "pass arrays, e.g. data=(x_train, y_train)."
        raise SpecificationError(message(must, received, attempt))
    for leaf in tree.leaves(tuple(data)):
        if not hasattr(leaf, "shape") or not hasattr(leaf, "__array__"):
            must, attempt = (
                "data must hold arrays.",
                "collect a dataset's rows in arrays: `np.concatenate(list(dataset))`.",
            )
            raise SpecificationError(message(must, type(leaf).__name__, attempt))
    x, y, *rest = (tree.map_leaves(lambda leaf: np.array(leaf), part) for part in data)
    weight = rest[0] if rest else None
    try:
        tree.num_rows(tuple(part for part in (x, y, weight) if part is not None), "data")
    except Exception as error:
        must, attempt = "All arrays of data must have the same number of rows.", "pass the arrays that the loop cuts."
        raise SpecificationError(message(must, str(error), attempt)) from error
    return x, y, weight


def _schedule(model: keras.Model, learning_rate: Any) -> Schedule | None:
    """Return the learning rate that was meant, by update; None if nobody said."""
    if learning_rate is None:
        optimizer = getattr(model, "optimizer", None)
        learning_rate = getattr(getattr(optimizer, "inner_optimizer", optimizer), "_learning_rate", None)
        if not isinstance(learning_rate, keras.optimizers.schedules.LearningRateSchedule):
            return None
    if callable(learning_rate):
        return lambda number: float(learning_rate(number))
    if not isinstance(learning_rate, int | float):
        must, attempt = "learning_rate must be a number or a function of the update.", "learning_rate=schedule."
        raise SpecificationError(message(must, type(learning_rate).__name__, attempt))
    return lambda number: float(learning_rate)
