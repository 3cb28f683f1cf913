"""A loop of Keras runs under hooks, and each of its stages is compared with the meant
one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from stepcheck import tree
from stepcheck.errors import SpecificationError, attempt, message
from stepcheck.faults import Stage
from stepcheck.judge import Case
from stepcheck.keras.hooks import Hooks, listening
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
        given, objective = _intention(model, data, loss)
    except WholestepError as error:  # of an `Objective`
        raise SpecificationError(str(error)) from error
    own = _optimizer(model, optimizer)
    now = values(model)
    made = Case(
        Replay,
        model,
        given,
        objective,
        _schedule(own, learning_rate),
        log,
        now.params if now else [],
        optimizer=own,
        stated=None if optimizer is None else own,
        is_given=data is None,
        use=stated_use(rows),
    )
    if learning_rate is None and optimizer is None:
        made.compiled = id(own)
    log.begin(made.before)
    engine = listener()
    hooks = Hooks(model, engine, log, getattr(objective, "beside", None))
    try:
        with listening(engine, [hooks]):
            yield report
    except BaseException as error:
        told, num = type(error).__name__, log.num_updates
        log.unjudged.append(Unjudged(Reason.ENDED, updates=num, told=told))
        # an error here would hide the loop's
        attempt(lambda: _close(report, made))
        raise
    made.ended = None if log.is_cut else values(model)
    _close(report, made)


def _intention(
    model: keras.Model, data: Any, loss: Any
) -> tuple[tuple[Tree, Tree, Tree], Any]:
    """Return (data, objective); of a function of model and batch the other parts are
    labels.
    """
    if not isinstance(loss, Stated):
        x, y, *rest = _arrays(data, 2, 3)
        return (x, y, rest[0] if rest else None), meant(model, loss, x, y)
    if data is None:
        return (np.zeros((1, 1)), (), None), OfModel(loss, model)
    x, *rest = _arrays(data, 1, 100)
    return (x, tuple(rest), None), OfModel(loss, model)


def _arrays(data: Any, least: int, most: int) -> list[Tree]:
    """Return copies of the parts of the data."""
    num = len(data) if isinstance(data, tuple | list) else 0
    leaves = tree.leaves(tuple(data)) if num else [data]
    others = [leaf for leaf in leaves if not hasattr(leaf, "__array__")]
    if others or not least <= num <= most:
        must = "data must be (x, y) or (x, y, sample_weight)."
        received = (
            ", ".join(type(each).__name__ for each in others) or f"{num} parts"
        )
        advice = (
            "arrays; of a dataset its rows: `np.concatenate(list(dataset))`."
        )
        raise SpecificationError(message(must, received, advice))
    parts = [
        tree.map_leaves(lambda leaf: np.array(leaf), part) for part in data
    ]
    tree.num_rows(tuple(part for part in parts if part is not None), "data")
    return parts


def _optimizer(model: keras.Model, stated: Any) -> Any:
    """Return the optimizer that moves the weights."""
    if stated is not None and not isinstance(
        stated, keras.optimizers.Optimizer
    ):
        must = "optimizer must be an optimizer of Keras."
        advice = "the one that the loop applies, or leave it out."
        raise SpecificationError(message(must, type(stated).__name__, advice))
    own = getattr(model, "optimizer", None) if stated is None else stated
    return getattr(own, "inner_optimizer", own)


def _schedule(optimizer: Any, learning_rate: Any) -> Schedule | None:
    """Return the learning rate that is meant, by update; None if it is not known."""
    if learning_rate is not None:
        return scheduled(learning_rate)
    own = getattr(optimizer, "_learning_rate", None)
    is_known = isinstance(own, keras.optimizers.schedules.LearningRateSchedule)
    return scheduled(own) if is_known else None


def _close(report: Report, made: Case) -> None:
    """Close a report with its case, of the data and the loss as the loop has shown
    them.
    """
    if isinstance(made.objective, OfModel):
        made.objective.join(made.log)
        if made.is_given:
            made.data, made.by_pass = as_given(made.log)
    else:
        _weigh(made)
    _try(made)
    report.close(made)


def _weigh(made: Case) -> None:
    """Take the weights of classes that `fit` got, if none were stated."""
    x, y, stated = made.data
    by_class, weight = made.log.fitted
    if stated is not None or (by_class is None and weight is None):
        return
    # An error: of weights of rows, or labels that are no classes.
    found, _ = attempt(lambda: class_weighted(by_class)((x, y)))
    if found is not None:
        made.data = found
        return
    made.log.leave(Reason.WEIGHTS_NOT_STATED, Stage.GRADIENT)
    made.objective = NoLoss()


def _try(made: Case) -> None:
    """Call the loss once, on a pass: without a loss if it fails."""
    whole = (each for each in made.log.called if each.is_whole)
    is_stated = isinstance(made.objective, OfModel)
    called = next(
        (each for each in whole if each.setting or not is_stated), None
    )
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
