"""A loop of Keras runs under hooks, and each of its stages is compared with the meant
one.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from stepcheck import tree
from stepcheck.errors import SpecificationError, attempt, message
from stepcheck.faults import Stage
from stepcheck.judge import Case
from stepcheck.keras.hooks import Hooks
from stepcheck.keras.listener import listener
from stepcheck.keras.meaning import NoLoss, meant
from stepcheck.keras.objective import OfModel, as_given
from stepcheck.keras.replay import Replay
from stepcheck.keras.state import room, values
from stepcheck.objective import Objective as Stated
from stepcheck.report.report import Report
from stepcheck.solve.changes import Schedule
from stepcheck.stages.rows import stated_use
from stepcheck.stages.steps import scheduled
from stepcheck.trace.log import Log
from stepcheck.trace.windows import Piece
from stepcheck.tree import Tree
from stepcheck.values import Reason, Unjudged
from wholestep.data import class_weighted
from wholestep.errors import WholestepError


@contextmanager
def watched(
    model: keras.Model,
    data: Tree,
    loss: Any = None,
    *,
    learning_rate: float | Callable[[int], Any] | None = None,
    optimizer: keras.optimizers.Optimizer | None = None,
    rows: str | None = None,
) -> Iterator[Report]:
    """Run the body of a `with` under hooks; see `stepcheck.watch`."""
    log, report = Log(room=room(model)), Report()
    try:
        made = case(model, data, loss, log, learning_rate, optimizer, rows)
    except WholestepError as error:  # of an `Objective`
        raise SpecificationError(str(error)) from error
    log.begin(made.before)
    try:
        with Hooks(
            model, listener(), log, getattr(made.objective, "beside", None)
        ).on():
            yield report
    except BaseException as error:
        log.unjudged.append(
            Unjudged(Reason.ENDED, updates=log.num_updates, told=type(error).__name__)
        )
        attempt(lambda: _close(report, made))  # an error here would hide the loop's
        raise
    made.ended = None if log.is_cut else values(model)
    _close(report, made)


def _close(report: Report, made: Case) -> None:
    """Close a report with its case, of the data and the loss as the loop has shown
    them.
    """
    if isinstance(made.objective, OfModel):
        made.objective.join(made.log)
        if made.is_given:
            made.data, made.by_pass = as_given(made.log)
    else:
        _complete(made)
    _try(made)
    report.close(made)


def _try(made: Case) -> None:
    """Call the loss once, on a pass: without a loss if it fails."""
    whole = (each for each in made.log.called if each.is_whole)
    is_stated = isinstance(made.objective, OfModel)
    called = next((each for each in whole if each.setting or not is_stated), None)
    if called is None:
        return
    replay = Replay(made.model, made.data, by_pass=made.by_pass)
    piece = Piece(called, np.arange(len(called.inputs[0])) % replay.num_rows)
    with Replay.as_then(made.model, made.log):
        _, error = attempt(lambda: replay.settle(made.objective, [piece]))
    if error is not None:
        told = f"{type(error).__name__}: {error}"
        made.log.leave(Reason.LOSS_FAILED, Stage.GRADIENT, told)
        made.objective = NoLoss()


def _complete(made: Case) -> None:
    """Take the names of inputs, and the weights of rows, that the loop has given."""
    x, y, stated = made.data
    names = [each.name for each in getattr(made.model, "inputs", None) or []]
    if made.log.is_by_name and isinstance(x, list | tuple) and len(names) == len(x):
        x = dict(zip(names, x, strict=True))  # the order of a dict is that of its names
        made.data = x, y, stated
    fitted, by_class, weight = made.log.fitted
    if stated is not None or (by_class is None and weight is None):
        return
    own, given = tree.leaves(x), tree.leaves(fitted)
    is_same = len(own) == len(given) and all(map(np.array_equal, own, given))
    if by_class is not None:
        # An error: of labels that are no classes.
        found, _ = attempt(lambda: class_weighted(by_class)((x, y)))
    else:
        found = (x, y, np.asarray(weight)) if is_same else None
    if found is None:
        made.log.leave(Reason.WEIGHTS_NOT_STATED, Stage.GRADIENT)
        made.objective = NoLoss()
    else:
        made.data = found


def case(
    model: keras.Model,
    data: Tree,
    loss: Any,
    log: Log,
    learning_rate: float | Callable[[int], Any] | None,
    optimizer: keras.optimizers.Optimizer | None,
    rows: str | None,
) -> Case:
    """Return the case of a loop that begins with the present data and weights.

    Raises:
        SpecificationError: the model, the data or the loss cannot be judged.
    """
    given, objective = _intention(model, data, loss)
    if optimizer is not None and not isinstance(optimizer, keras.optimizers.Optimizer):
        must, attempt = (
            "optimizer must be an optimizer of Keras.",
            "the one that the loop applies, or leave it out.",
        )
        raise SpecificationError(message(must, type(optimizer).__name__, attempt))
    own = getattr(model, "optimizer", None) if optimizer is None else optimizer
    own = getattr(own, "inner_optimizer", own)  # the one that moves the weights
    schedule = _schedule(own, learning_rate)
    now = values(model)
    before = now.params if now else []
    made = Case(
        Replay,
        model,
        given,
        objective,
        schedule,
        log,
        before,
        optimizer=own,
        stated=None if optimizer is None else own,
        is_given=data is None,
        use=stated_use(rows),
    )
    if learning_rate is None and optimizer is None:
        made.compiled = id(own)
    return made


def _intention(
    model: keras.Model, data: Any, loss: Any
) -> tuple[tuple[Tree, Tree, Tree], Any]:
    """Return (data, objective); of a function of model and batch the other parts are
    labels.
    """
    if not isinstance(loss, Stated):
        x, y, *rest = _arrays(data, (2, 3), "(x, y) or (x, y, sample_weight)")
        return (x, y, rest[0] if rest else None), meant(model, loss, x, y)
    if data is None:
        return (np.zeros((1, 1)), (), None), OfModel(loss, model)
    x, *rest = _arrays(data, range(1, 100), "(x,), (x, y) or more parts")
    return (x, tuple(rest), None), OfModel(loss, model)


def _arrays(data: Any, lengths: Sequence[int], expected: str) -> list[Tree]:
    """Return copies of the parts of the data."""
    if not isinstance(data, tuple | list) or len(data) not in lengths:
        received = (
            f"{len(data)} parts"
            if isinstance(data, tuple | list)
            else type(data).__name__
        )
        attempt = "pass arrays, e.g. data=(x_train, y_train)."
        raise SpecificationError(
            message(f"data must be {expected}.", received, attempt)
        )
    for leaf in tree.leaves(tuple(data)):
        if not hasattr(leaf, "shape") or not hasattr(leaf, "__array__"):
            attempt = (
                "collect a dataset's rows in arrays: `np.concatenate(list(dataset))`."
            )
            raise SpecificationError(
                message("data must hold arrays.", type(leaf).__name__, attempt)
            )
    parts = [tree.map_leaves(lambda leaf: np.array(leaf), part) for part in data]
    tree.num_rows(tuple(part for part in parts if part is not None), "data")
    return parts


def _schedule(
    optimizer: keras.optimizers.Optimizer | None, learning_rate: Any
) -> Schedule | None:
    """Return the learning rate that is meant, by update; None if it is not known."""
    if learning_rate is None:
        learning_rate = getattr(optimizer, "_learning_rate", None)
        if not isinstance(
            learning_rate, keras.optimizers.schedules.LearningRateSchedule
        ):
            return None
    return scheduled(learning_rate)
