"""A loop that can be called is called again, on rows that distinguish causes with equal numbers."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Any

import keras
import numpy as np

from wholestep import tree
from wholestep.audit.causes import BY_NAME
from wholestep.audit.found import Found
from wholestep.audit.log import Log
from wholestep.audit.report import Report
from wholestep.audit.source import own_fault
from wholestep.audit.stop import COMMAND, Enough, Limit, over
from wholestep.errors import SpecificationError, message
from wholestep.tree import Tree


def call(
    audit: Callable[..., AbstractContextManager[Report]],
    train: Callable[..., Any],
    model: keras.Model,
    data: Tree,
    optimizer: keras.optimizers.Optimizer | None,
    num_updates: int,
) -> Report:
    """Return the report of a loop on the data, made clearer by calls on probes; restore model and optimizers.

    Args:
        audit: makes an audit of the model on data that it is called with.
    """
    if not model.built:
        must, attempt = "The model must be built, for its weights to be restored.", "model.build(shape) before."
        raise SpecificationError(message(must, "a model that is not built", attempt))
    give_back = _giver(model, optimizer)
    try:
        report, log = _run(audit, train, model, data, num_updates)
        for name, rows in _probes(data, log):
            give_back()
            try:
                other, _ = _run(audit, train, model, rows, num_updates)
            except Exception as error:
                told = f"the loop ends with an error, {type(error).__name__}: {error}"
                report.notes.append(f"On {name} {own_fault(error) or told}")
            else:
                _learn(report, other, name)
    finally:
        give_back()
    if (command := COMMAND.get()) is not None:
        command.adopt(report, log)
    return report


def _run(audit: Callable, train: Callable, model: keras.Model, data: Any, num_updates: int) -> tuple[Report, Log]:
    limit = Limit(num_updates, can_end=threading.current_thread() is threading.main_thread())
    token = COMMAND.set(limit)
    try:
        with suppress(Enough), audit(data=data):
            try:
                train(model, *tree.map_leaves(np.array, tuple(data)))
            finally:
                over(limit.has_come)
    except Exception:
        if not limit.has_stopped:  # else an engine's error for `Enough`
            raise
    finally:
        COMMAND.reset(token)
    return limit.reports[0]


def _giver(model: keras.Model, optimizer: keras.optimizers.Optimizer | None) -> Callable[[], None]:
    """Return a function that restores model and optimizers as they are now."""
    optimizers = [o for o in (getattr(model, "optimizer", None), optimizer) if o is not None]
    built = [o for o in optimizers if o.built]
    variables = [*model.variables, *(v for o in built for v in o.variables)]
    values = [np.array(keras.ops.convert_to_numpy(v)) for v in variables]
    configs = [o.get_config() for o in optimizers]

    def give_back() -> None:
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
        for each, config in zip(optimizers, configs, strict=True):
            if each not in built and each.built:  # as it was before its first step
                fresh = type(each).from_config(config)
                vars(each).clear()
                vars(each).update(vars(fresh))

    return give_back


def _probes(data: Any, log: Log) -> Iterator[tuple[str, tuple]]:
    """Yield (in words, data): an odd number of rows, with short last batches; uneven weights with a zero among them."""
    num = len(tree.leaves(tuple(data))[0])
    sizes = [len(c.inputs[0]) for c in log.called if c.inputs and c.inputs[0].ndim and c.differentiated is not False]
    if not sizes or not log.applied or num < 3:
        return
    piece = max(sizes)
    window = max(piece, round(sum(sizes) / len(log.applied)))
    few = 2 * window + (piece if window > piece else 0) + max(1, piece // 2)
    odd = next((n for n in (few | 1, num - 1 + num % 2, num - 3 + num % 2) if 2 < n <= num and n % piece), 0)
    if odd:
        yield f"{odd} rows", tree.map_leaves(lambda leaf: np.asarray(leaf)[:odd], tuple(data))
    if len(data) == 3 and data[2] is not None:
        draw = np.random.default_rng(0)

        def uneven(leaf: Any) -> np.ndarray:
            weights = draw.uniform(0.5, 2.0, np.shape(leaf)).astype(np.asarray(leaf).dtype)
            weights[0] = 0
            return weights

        yield "other sample weights", (data[0], data[1], tree.map_leaves(uneven, data[2]))


def _learn(report: Report, other: Report, name: str) -> None:
    """Settle twins of causes by another report, of the same loop on other rows."""
    theirs = [cause for cause in other.causes if cause.stage == "gradient"]  # of rows in another order
    for i, cause in enumerate(report.causes):
        both = [(their, names) for their in theirs if (names := _names(cause) & _names(their))]
        if cause.twins and both:
            report.causes[i] = _settled(cause, *both[0], name)
    known = set[str]().union(*map(_names, report.causes))
    for cause in theirs:
        if not _names(cause) & known:
            told = f"On {name}, and not on the data themselves: {cause.name}. {cause.explanation}"
            report.notes.append(f"{told} Change: {cause.fix}")


def _names(cause: Found) -> set[str]:
    return {cause.name, *cause.twins}


def _settled(cause: Found, other: Found, names: set[str], probe: str) -> Found:
    """Return a cause by a name that it shares with the fault on other rows."""
    first = cause.name if cause.name in names else min(names)
    twins, gone = sorted(names - {first}), sorted(_names(cause) - names)
    detail = f"A call on {probe} tells it from: {', '.join(gone)}." if gone else cause.detail
    detail += f" These updates cannot tell it from: {', '.join(twins)}." if gone and twins else ""
    of = cause if first == cause.name else other
    fix = BY_NAME[first].fix
    return replace(cause, name=first, explanation=of.explanation, fix=fix, detail=detail, twins=tuple(twins))
