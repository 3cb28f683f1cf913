"""A loop runs under PyTorch's hooks, and a report says of each stage whether it is
meant.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from inspect import Parameter, signature
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer

from stepcheck import tree
from stepcheck.errors import SpecificationError, attempt, message
from stepcheck.faults import Stage
from stepcheck.judge import Case
from stepcheck.objective import Objective as Stated
from stepcheck.port import ByPass
from stepcheck.report.report import Report
from stepcheck.solve.changes import Schedule
from stepcheck.stages.rows import stated_use
from stepcheck.stages.steps import scheduled
from stepcheck.torch.beside import Beside
from stepcheck.torch.calls import Calls
from stepcheck.torch.data import as_given, weighed
from stepcheck.torch.device import device_of, devices, on
from stepcheck.torch.hooks import Watcher
from stepcheck.torch.losses import Function, Loss, ModelsOwn, NoLoss, Objective, meant
from stepcheck.torch.objective import OfModel, joined
from stepcheck.torch.processes import Group
from stepcheck.torch.replay import Replay
from stepcheck.torch.state import bare, trained, untouched, values
from stepcheck.trace.log import Called, Log, room
from stepcheck.trace.windows import Piece
from stepcheck.values import Reason, Unjudged

_LABELS = {
    "labels",
    "targets",
    "target",
}  # names of an argument by which a model computes its own loss


class UnfitError(Exception):
    """The form of the loss is not known, for a reason."""

    def __init__(self, reason: Reason, told: str = ""):
        super().__init__(reason, told)
        self.reason, self.told = reason, told


@contextmanager
def watched(
    model: nn.Module,
    data: Any,
    loss: Any,
    *,
    learning_rate: float | Callable[[int], Any] | None = None,
    optimizer: Optimizer | None = None,
    rows: str | None = None,
) -> Iterator[Report]:
    """Run the body of a `with` under hooks; see `stepcheck.watch`."""
    model = bare(model)
    _check(model)
    _check_optimizer(optimizer)
    stated = _stated(loss)
    _check_intention(model, data, stated)
    given = None if data is None else weighed(data, stated)
    schedule = None if learning_rate is None else scheduled(learning_rate)
    use = stated_use(rows)
    log, report = Log(), Report()
    before = values(model).params
    log.room = room(sum(p.numel() for _, p in trained(model)))
    log.begin(before)
    calls_of = stated.given.calls if isinstance(stated, OfModel) else 1
    leaves = [] if given is None else tree.leaves(given[0])
    like = [leaf.shape[1:] for leaf in leaves[: len(leaves) // calls_of]]
    group = Group.now()
    order = itertools.count() if group is None else group.orders()
    watcher = Watcher(model, log, len(like) or None, order, like=like)
    if isinstance(stated, OfModel):
        watcher.beside = Beside(model)
        stated.modules = watcher.beside.modules
    calls = Calls(watcher)

    def finish(*, has_failed: bool) -> None:
        elsewhere = (
            "" if group is None else group.gather(watcher, calls, has_failed=has_failed)
        )
        if elsewhere:
            report.elsewhere = elsewhere
            return
        case = close(report, watcher, calls, given, before, stated, schedule)
        case.stated, case.use = optimizer, use
        case.ended = None if has_failed else values(model)

    try:
        with ExitStack() as stack:
            stack.enter_context(watcher.on())
            stack.enter_context(calls.on())
            if watcher.beside is not None:
                stack.enter_context(watcher.beside.on(watcher.harmless))
            yield report
    except BaseException as error:
        log.unjudged.append(
            Unjudged(Reason.ENDED, updates=log.num_updates, told=type(error).__name__)
        )
        attempt(lambda: finish(has_failed=True))  # an error here would hide the loop's
        raise
    finish(has_failed=False)
    attempt(
        lambda: report.findings
    )  # before the module is changed; an error is raised where the report is read


def close(
    report: Report,
    watcher: Watcher,
    calls: Calls,
    data: tuple | None,
    before: list[np.ndarray],
    stated: Loss | Function | OfModel | None,
    schedule: Schedule | None,
) -> Case:
    """Close a report with its case, and return it.

    Args:
        data: None for the rows that the module was given.
        stated: the loss that is meant; None for the one that the model computes itself.
        schedule: the learning rate that is meant, if it is known.
    """
    model, log = watcher.module, watcher.log
    by_pass: ByPass | None = None
    is_given = data is None
    if isinstance(stated, OfModel):
        log.called[:] = joined(log, stated.given.calls)
    if data is None and isinstance(stated, OfModel):
        nothing: Any = ((),)  # no label
        given = as_given(log, {each.order: np.zeros(0) for each in log.called})
        data, by_pass = given.data, dict.fromkeys(given.by_pass or (), nothing)
        stated.is_given = True
    elif data is None:
        labels = (
            calls.targets
            if stated is not None
            else {order: own.labels for order, own in watcher.own.items()}
        )
        given = as_given(log, labels)
        data, by_pass = given.data, given.by_pass
    _try(model, data, log)
    objective: Any = NoLoss()
    with untouched(), on(device_of(model)):
        try:
            if is_given and by_pass is None:
                raise UnfitError(Reason.LOSS_WITHOUT_LABELS)
            objective = _objective(stated, data, watcher, by_pass)
        except UnfitError as error:
            log.leave(error.reason, Stage.GRADIENT, error.told)
    used = [*log.optimizers.values()]
    own = used[0] if len(used) == 1 else None
    case = Case(
        Replay,
        model,
        data,
        objective,
        schedule,
        log,
        before,
        optimizer=own,
        by_pass=by_pass,
    )
    case.is_given = is_given
    report.close(case)
    return case


def _objective(
    stated: Loss | Function | OfModel | None,
    data: tuple,
    watcher: Watcher,
    by_pass: ByPass | None,
) -> Any:
    """Return the objective, after a trial on the passes that were seen.

    Raises:
        UnfitError: the form of the loss is not known.
    """
    whole = [
        each
        for each in watcher.log.called
        if each.is_whole and (by_pass is None or each.order in by_pass)
    ]
    if stated is None:
        return _models_own(whole, watcher)
    if isinstance(stated, OfModel):
        _try_of_model(
            stated, Replay(watcher.module, data, by_pass=by_pass), whole, watcher.log
        )
        return stated
    if not whole:
        return Objective(stated)
    called = whole[0]
    if not all(
        _has_rows_first(each) for each in whole if each is called or each.derivatives
    ):
        raise UnfitError(Reason.LOSS_OF_OTHER_AXIS)
    if isinstance(stated, Loss) and len(called.outputs) > 1:
        raise UnfitError(Reason.LOSS_OF_ONE_OUTPUT)
    _, error = attempt(lambda: _tried(stated, data, called, by_pass))
    if isinstance(error, UnfitError):
        raise error
    if error is not None:  # of the user's function, or of a loss of other shapes
        raise UnfitError(
            Reason.LOSS_FAILED, f"{type(error).__name__}: {error}"
        ) from error
    packed = called.setting.output if len(called.outputs) == 1 else None
    return Objective(stated, packed)


def _try_of_model(
    stated: OfModel, replay: Replay, whole: list[Called], log: Log
) -> None:
    """Call a stated function once, on a pass of which a gradient was taken."""
    fits = (each for each in whole if each.trained == replay.trained and each.inputs)
    called = next((each for each in fits if each.differentiated is not False), None)
    if called is None:
        return
    piece = Piece(called, np.arange(len(called.inputs[0])) % replay.num_rows)
    with Replay.as_then(replay.model, log):
        _, error = attempt(lambda: replay.terms(piece, stated, None, training=True))
    if error is not None:
        told = f"{type(error).__name__}: {error}"
        raise UnfitError(Reason.LOSS_FAILED, told) from error


def _has_rows_first(called: Called) -> bool:
    """Whether the first axis of a pass's outputs has the rows, as that of its inputs."""
    if not called.inputs:
        return False
    outputs = [called.outputs[i] for i in called.derivatives] or called.outputs
    rows = called.inputs[0].shape[:1]
    return all(out.shape[:1] == rows for out in outputs if out.ndim)


def _models_own(whole: list[Called], watcher: Watcher) -> ModelsOwn:
    """Return the loss that the model computes itself of its logits and the labels it is
    given.
    """
    called = next((each for each in whole if each.order in watcher.own), None)
    if called is not None:
        own = watcher.own[called.order]
        outputs = called.setting.output(list(map(torch.as_tensor, called.outputs)))
        objective = ModelsOwn.of_pass(outputs, own.labels, own.loss, own.num)
        if objective is not None:
            return objective
    raise UnfitError(Reason.LOSS_OF_MODEL)


def _tried(
    stated: Loss | Function, data: tuple, called: Called, by_pass: ByPass | None
) -> None:
    """Try a loss on the outputs of a pass."""
    outputs = called.setting.output(list(map(torch.as_tensor, called.outputs)))
    num = len(called.inputs[0])
    width = called.outputs[0].shape[1:2]

    def cut(leaf: np.ndarray) -> np.ndarray:
        """Return the labels of as many rows, no wider than the outputs are."""
        is_wider = leaf.ndim > 1 and width and leaf.shape[1] > width[0]
        return leaf[:num, : width[0]] if is_wider else leaf[:num]

    _, y, weights = data
    labels = tree.map_leaves(cut, y) if by_pass is None else by_pass[called.order][0]
    if isinstance(stated, Function) and stated.has_parameters(outputs, labels):
        raise UnfitError(Reason.LOSS_WITH_PARAMETERS)
    stated.of(outputs, labels, None if weights is None else weights[:num])


def _try(model: nn.Module, data: tuple, log: Log) -> None:
    """Leave out the record if a pass cannot be run again."""
    called = next((each for each in reversed(log.called) if each.is_whole), None)
    if called is None:
        return
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]

    def again() -> None:
        with Replay.as_then(model, log):
            Replay(model, data).outputs(
                Piece(called, np.zeros(0, int)), training=any(called.setting.modes)
            )

    _, error = attempt(again)
    moved = [
        (buffer, before)
        for buffer, before in buffers
        if not torch.equal(buffer, before)
    ]
    for buffer, before in moved:  # its `forward` is bound to the module itself
        buffer.data.copy_(before)
    if error is not None or moved:
        log.leave(
            Reason.NOT_REPLAYED,
            told="" if error is None else f"{type(error).__name__}: {error}",
        )
        log.called.clear()
        log.applied.clear()


def _check(model: nn.Module) -> None:
    """Refuse what cannot be watched."""
    if getattr(type(model), "forward", None) is nn.Module.forward:
        received = f"{type(model).__name__}, which cannot be called"
        raise _refused(
            "stepcheck watches one module, which the loop calls",
            received,
            "stepcheck.watch(model['part'])",
        )
    if any(map(is_lazy, [*model.parameters(), *model.buffers()])):
        attempt = "call it once before the `with`, on a batch"
        raise _refused(
            "The model must have all its parameters", "one with lazy layers", attempt
        )
    found = {str(each) for each in devices(model)}
    if len(found) > 1 or "meta" in found:
        received = f"one on {', '.join(sorted(found))}"
        raise _refused(
            "stepcheck watches modules on one device", received, "model.to('cpu')"
        )
    kinds = {type(part).__name__ for part in [*model.parameters(), *model.modules()]}
    if kinds & {"DTensor", "FullyShardedDataParallel"}:
        attempt = "`DistributedDataParallel` for the time of the `with`"
        raise _refused(
            "Each process must have the whole model",
            "one whose parameters are sharded",
            attempt,
        )
    if not trained(model):
        attempt = "watch the module that the optimizer trains"
        raise _refused(
            "The model must have parameters to train",
            "none that requires a gradient",
            attempt,
        )


def _stated(loss: Any) -> Loss | Function | OfModel | None:
    if isinstance(loss, Stated):
        return OfModel(loss)
    return None if loss is None else meant(loss)


def _check_optimizer(optimizer: Any) -> None:
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        attempt = "torch.optim.Adam(model.parameters()), or leave it out"
        raise _refused(
            "optimizer must be an optimizer of PyTorch",
            type(optimizer).__name__,
            attempt,
        )


def _check_intention(model: nn.Module, data: Any, stated: Any) -> None:
    """Refuse a loop whose update is not stated: stepcheck does not guess it."""
    if stated is None and not _computes_loss(model):
        must = (
            "loss must be stated for a model that computes none of its own from labels"
        )
        raise _refused(
            must,
            "loss=None",
            "loss=nn.CrossEntropyLoss(), or loss=lambda outputs, labels: ...",
        )
    if data is None and isinstance(stated, Function):
        must = "data must be stated with a loss that is a function"
        raise _refused(must, "data=None", "data=(x, y)")


def _computes_loss(model: nn.Module) -> bool:
    """Whether a model may be given labels, as those of Transformers are, and returns
    its loss.
    """
    parameters = signature(model.forward).parameters.values()
    has_all = any(each.kind is Parameter.VAR_KEYWORD for each in parameters)
    return has_all or not _LABELS.isdisjoint(each.name for each in parameters)


def _refused(must: str, received: str, attempt: str) -> SpecificationError:
    return SpecificationError(message(f"{must}.", received, f"{attempt}."))
