"""audit(): a loop runs under hooks, and a report names its faults; one that can be called runs on other rows too."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import keras
import numpy as np

from wholestep import tree
from wholestep.audit.causes import BY_NAME
from wholestep.audit.changes import Schedule
from wholestep.audit.found import Found, Likely, on_one_line, own_fault
from wholestep.audit.hooks import Hooks, room
from wholestep.audit.judge import Case
from wholestep.audit.log import Log
from wholestep.audit.meaning import NoLoss, meant, weighed
from wholestep.audit.replay import Replay, untrained, values
from wholestep.audit.report import Report
from wholestep.audit.steps import scheduled
from wholestep.audit.stop import COMMAND, Enough, Limit, over
from wholestep.data import class_weighted
from wholestep.engines import listener
from wholestep.errors import BatchError, SpecificationError, WholestepError, message
from wholestep.tree import Tree

_NO_WEIGHTS = Likely(
    "`fit` got sample weights, and the audit was given none: state them, `data=(x, y, sample_weight)`."
)


class _Unentered(AbstractContextManager):
    """The context of an audit, which begins in `with`; its text says so."""

    def __init__(self, begin: Callable[[], AbstractContextManager[Report]]):
        self._begin = begin

    def __enter__(self) -> Report:
        self._entered = self._begin()
        return self._entered.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.__exit__(*error)

    def __repr__(self) -> str:
        return "This audit has not begun: write `with ws.audit(model, data=(x, y), loss=...) as report:`."


class Audit:
    """`ws.audit(model, data, loss)`, to be used in a `with`, and `ws.audit.call(train, model, data, loss)`."""

    def __call__(
        self,
        model: keras.Model,
        data: Tree,
        loss: Any = None,
        *,
        learning_rate: float | Callable[[int], Any] | None = None,
        optimizer: keras.optimizers.Optimizer | None = None,
    ) -> AbstractContextManager[Report]:
        """Watch the user's own training loop, and report its faults, by name and with proof.

        A few updates are enough: two passes over a few batches show most. The first 40 updates are kept with all their
        numbers; of a model of more than 6e5 weights as many as fit in 100 MB, but at least five.

        Supported are loops that use `fit` or `train_on_batch` (also with a custom `train_step`),
        `tf.GradientTape` (eager, or in a `tf.function` whose first call is inside the `with`, also under a
        `tf.distribute.MirroredStrategy`), or JAX' `stateless_call` and `stateless_apply` (plain or jitted), with an
        optimizer of Keras.

        Args:
            model: the model that the loop trains.
            data: (x, y) or (x, y, sample_weight), arrays as the model gets them; row i of all belongs together.
            loss: the loss that is meant: a Keras loss, its name, a function (labels, outputs), a list or dict of them,
                one for each output, or an `Objective` over such batches; None for the compiled loss.
            learning_rate: the rate that is meant: a number, or a function (or Keras schedule) of the number of the
                update, from 0; None for the schedule of the optimizer, if it has one.
            optimizer: the optimizer that is meant. If the loop applies another one, both are compared; its schedule, if
                it has one, is the learning rate that is meant. None: the compiled one, compared in a note alone.

        Yields:
            A `Report`, complete after the `with`: print it, or read its `causes`.

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
        made = partial(case, model, data, loss, learning_rate=learning_rate, optimizer=optimizer)
        return _Unentered(partial(watched, model, made))

    def call(
        self,
        train: Callable[..., Any],
        model: keras.Model,
        data: Tree,
        loss: Any = None,
        *,
        learning_rate: float | Callable[[int], Any] | None = None,
        optimizer: keras.optimizers.Optimizer | None = None,
        updates: int = 40,
    ) -> Report:
        """Call a training loop under an audit, and again on some of the rows, to distinguish causes with equal numbers.

        On even batches several mistakes give one factor, and some give none; on an odd number of rows, and on uneven
        weights if there are weights, they differ. A fault that shows only there is a note. The model, its optimizer,
        the given optimizer and the data are restored; other state of the loop is not known here.

        Args:
            train: called with (model, x, y) or (model, x, y, sample_weight).
            model: as for the audit; it must be built.
            data, loss, learning_rate, optimizer: as for the audit.
            updates: a longer loop is ended after this many updates, if this is the main thread.

        Returns:
            The report.

        Raises:
            SpecificationError: the model, the data or the loss cannot be audited. Nothing has run.
        """
        given = {"loss": loss, "learning_rate": learning_rate, "optimizer": optimizer}
        return call(partial(self, model, **given), train, model, data, optimizer, updates)


audit = Audit()


@contextmanager
def watched(model: keras.Model, case_of: Callable[[Log], Case]) -> Iterator[Report]:
    """Run the body of a `with` under hooks; see `Audit`."""
    command, log, report = COMMAND.get(), Log(), Report()
    made = case_of(log)
    log.room = room(model)
    log.begin(made.before)
    if command is not None:
        command.adopt(report, log)
    try:
        with Hooks(model, listener() if command is None else command.listener(), log, has_twins=True).on():
            yield report
    except Enough:  # for the command
        _close(report, made)
        raise
    except BaseException as error:
        if command is None or not command.has_stopped:  # else it is `Enough`, as an engine's program has passed it on
            log.unseen[f"the rest of the loop: it ended with {type(error).__name__}"] = None
        _close(report, made)
        if log.elsewhere and isinstance(error, Exception):
            raise SpecificationError(log.elsewhere) from error
        raise
    made.ended = None if log.is_cut else values(model)
    _close(report, made)


def _close(report: Report, made: Case) -> None:
    """Close a report with its case, of the weights that `fit` got if none were stated."""
    names, x = [each.name for each in getattr(made.model, "inputs", None) or []], made.data[0]
    if made.log.is_by_name and isinstance(x, list | tuple) and len(names) == len(x):
        made.data = (dict(zip(names, x, strict=True)), *made.data[1:])  # the order of a dict is that of its names
    (fitted, by_class, weight), (x, y, stated) = made.log.fitted, made.data
    if stated is None and by_class is not None:
        try:
            made.data = class_weighted(by_class)((x, y))
        except WholestepError:  # labels that are no classes, of a loop that has ended with an error
            made.objective = NoLoss()
    elif stated is None and weight is not None:
        own, given = tree.leaves(x), tree.leaves(fitted)
        if len(own) == len(given) and all(map(np.array_equal, own, given)):
            made.data = x, y, np.asarray(weight)
        else:
            made.log.notes[_NO_WEIGHTS], made.objective = None, NoLoss()
    try:  # after the loop: a function of the user's may have a state
        made.data, made.objective = weighed(made.model, made.data, made.objective)
    except Exception as error:
        made.log.unseen[f"the weights that the loss gives to rows: {on_one_line(error)}"] = None
    report.close(made)


def case(
    model: keras.Model,
    data: Tree,
    loss: Any,
    log: Log,
    *,
    learning_rate: float | Callable[[int], Any] | None = None,
    optimizer: keras.optimizers.Optimizer | None = None,
    before: list[np.ndarray] | None = None,
) -> Case:
    """Return the case of an audit, of the present data, and of the present weights unless `before` is given.

    Raises:
        SpecificationError: the model, the data or the loss cannot be audited.
    """
    given = _checked(model, data)
    objective = meant(model, loss, *given[:2])
    if optimizer is not None and not isinstance(optimizer, keras.optimizers.Optimizer):
        must, attempt = "optimizer must be an optimizer of Keras.", "the one that the loop applies, or leave it out."
        raise SpecificationError(message(must, type(optimizer).__name__, attempt))
    own = getattr(model, "optimizer", None) if optimizer is None else optimizer
    own = getattr(own, "inner_optimizer", own)  # the one that moves the weights
    schedule = _schedule(own, learning_rate)
    if before is None:
        now = values(model)
        before = now.params if now else []
    made = Case(Replay, model, given, objective, schedule, log, before, optimizer=own, is_told=optimizer is not None)
    if learning_rate is None and optimizer is None:
        made.compiled = id(own)
    return made


def _checked(model: Any, data: Any) -> tuple[Tree, Tree, Tree]:
    if not isinstance(model, keras.Model):
        must, attempt = "The audit needs a Keras model.", "ws.audit(model, data=(x, y))."
        raise SpecificationError(message(must, type(model).__name__, attempt))
    if not isinstance(data, tuple | list) or len(data) not in (2, 3):
        received = f"{len(data)} parts" if isinstance(data, tuple | list) else type(data).__name__
        must, attempt = "data must be (x, y) or (x, y, sample_weight).", "pass arrays, e.g. data=(x_train, y_train)."
        raise SpecificationError(message(must, received, attempt))
    for leaf in tree.leaves(tuple(data)):
        if not hasattr(leaf, "shape") or not hasattr(leaf, "__array__"):
            attempt = "collect a dataset's rows in arrays: `np.concatenate(list(dataset))`."
            raise SpecificationError(message("data must hold arrays.", type(leaf).__name__, attempt))
    x, y, *rest = (tree.map_leaves(lambda leaf: np.array(leaf), part) for part in data)
    weight = rest[0] if rest else None
    try:
        tree.num_rows(tuple(part for part in (x, y, weight) if part is not None), "data")
    except BatchError as error:
        raise SpecificationError(str(error)) from error
    return x, y, weight


def _schedule(optimizer: keras.optimizers.Optimizer | None, learning_rate: Any) -> Schedule | None:
    """Return the learning rate that is meant, by update; None if it is not known."""
    if learning_rate is None:
        learning_rate = getattr(optimizer, "_learning_rate", None)
        if not isinstance(learning_rate, keras.optimizers.schedules.LearningRateSchedule):
            return None
    return scheduled(learning_rate)


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
    optimizers = [o for o in (getattr(model, "optimizer", None), optimizer) if o is not None]
    built = [o for o in optimizers if o.built]
    kept = [*model.variables, *untrained(model), *model.metrics_variables, *(v for o in built for v in o.variables)]
    variables = list({id(v): v for v in kept}.values())
    values = [np.array(keras.ops.convert_to_numpy(v)) for v in variables]
    try:
        blank = [(o, type(o).from_config(o.get_config())) for o in optimizers if not o.built]
    except Exception as error:
        must, attempt = "An optimizer must be built, or be one that `from_config` makes anew.", "optimizer.build(...)."
        raise SpecificationError(message(must, error, attempt)) from error

    def give_back() -> None:
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
        for each, fresh in blank:
            if each.built:  # as it was before its first step
                vars(each).clear()
                vars(each).update(vars(type(fresh).from_config(fresh.get_config())))

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
            report.causes[i] = Replay.said(_settled(cause, *both[0], name))
    known = set[str]().union(*map(_names, report.causes))
    for cause in theirs:
        if not _names(cause) & known:
            told = f"On {name}, and not on the data themselves: {cause.name}. {cause.explanation}"
            report.notes.append(f"{told} Change: {cause.fix}")


def _names(cause: Found) -> set[str]:
    return {cause.name, *cause.twins}


def _settled(cause: Found, other: Found, names: set[str], probe: str) -> Found:
    first = cause.name if cause.name in names else min(names)
    twins, gone = sorted(names - {first}), sorted(_names(cause) - names)
    detail = f"A call on {probe} tells it from: {', '.join(gone)}." if gone else cause.detail
    detail += f" These updates cannot tell it from: {', '.join(twins)}." if gone and twins else ""
    of = cause if first == cause.name else other
    fix = BY_NAME[first].fix
    return replace(cause, name=first, explanation=of.explanation, fix=fix, detail=detail, twins=tuple(twins))
