"""A loop runs under PyTorch's hooks, and a report says of each stage whether it is
meant.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
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
from stepcheck.port import NoLoss
from stepcheck.report.report import Report
from stepcheck.solve.changes import Schedule
from stepcheck.stages.rows import stated_use
from stepcheck.stages.steps import scheduled
from stepcheck.torch.beside import Beside
from stepcheck.torch.calls import Calls
from stepcheck.torch.data import as_given, weighed
from stepcheck.torch.device import devices
from stepcheck.torch.hooks import Watcher, listening
from stepcheck.torch.losses import ByRow, Function, Loss, Objective, meant, models_own
from stepcheck.torch.nests import packed
from stepcheck.torch.objective import OfModel, joined
from stepcheck.torch.processes import Group
from stepcheck.torch.replay import Replay
from stepcheck.torch.state import LABELS, bare, tensor, trained, values
from stepcheck.trace.log import Called, Log, room
from stepcheck.trace.windows import Piece
from stepcheck.values import Reason, Unjudged

Meant = Loss | Function | OfModel | None


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
    _check(model, optimizer)
    stated: Meant = OfModel(loss) if isinstance(loss, Stated) else loss and meant(loss)
    _check_intention(model, data, stated)
    given = None if data is None else weighed(data, stated)
    schedule = None if learning_rate is None else scheduled(learning_rate)
    use, group, report, before = stated_use(rows), Group.now(), Report(), values(model)
    log = Log(room=room(sum(p.numel() for _, p in trained(model))))
    log.begin(before.params)
    num_inputs = None if given is None else len(tree.leaves(given[0]))
    order = itertools.count() if group is None else group.orders()
    watcher = Watcher(model, log, num_inputs, order)
    if isinstance(stated, OfModel):
        watcher.num_inputs = num_inputs and num_inputs // stated.given.calls
        watcher.beside = Beside(model)
        stated.modules = watcher.beside.modules
    calls = Calls(watcher)

    def finish(*, has_failed: bool) -> None:
        if group is not None:
            report.elsewhere = group.gather(watcher, calls, has_failed=has_failed)
        if not report.elsewhere:
            case = close(watcher, calls, given, before.params, stated, schedule)
            case.stated, case.use = optimizer, use
            case.ended = None if has_failed else values(model)
            report.close(case)

    try:
        with listening([watcher]), calls.on():
            yield report
    except BaseException as error:
        told = type(error).__name__
        log.unjudged.append(Unjudged(Reason.ENDED, updates=log.num_updates, told=told))
        attempt(partial(finish, has_failed=True))  # an error would hide the loop's
        raise
    finish(has_failed=False)
    # Before the module is changed; an error is raised where the report is read.
    attempt(lambda: report.findings)


def close(
    watcher: Watcher,
    calls: Calls,
    data: tuple | None,
    before: list[np.ndarray],
    stated: Meant,
    schedule: Schedule | None,
) -> Case:
    """Return the case of a loop that has ended.

    Args:
        data: None for the rows that the module was given.
        stated: the loss that is meant; None for the one that the model computes itself.
        schedule: the learning rate that is meant, if it is known.
    """
    model, log = watcher.module, watcher.log
    is_given, by_pass = data is None, None
    labels: dict[int, Any] = calls.targets
    if stated is None:
        labels = {order: own.labels for order, own in watcher.own.items()}
    if isinstance(stated, OfModel):
        log.called[:] = joined(log, stated.given.calls)
        labels = dict.fromkeys((each.order for each in log.called), ())
        stated.is_given = is_given
    if data is None:
        data, by_pass = as_given(log, labels)
    objective: Any = NoLoss()
    with Replay.as_then(model, log):
        replay = Replay(model, data, by_pass=by_pass)
        _try(replay, log)
        try:
            if is_given and by_pass is None:
                raise UnfitError(Reason.LOSS_WITHOUT_LABELS)
            objective = _objective(stated, replay, watcher)
        except UnfitError as error:
            log.leave(error.reason, Stage.GRADIENT, error.told)
    used = [*log.optimizers.values()]
    own = used[0] if len(used) == 1 else None
    given = model, data, objective, schedule, log, before
    case = Case(Replay, *given, optimizer=own, by_pass=by_pass)
    case.is_given = is_given
    return case


def _try(replay: Replay, log: Log) -> None:
    """Leave out the record if a pass cannot be run again, or moves the module itself."""
    called = next((each for each in reversed(log.called) if each.is_whole), None)
    if called is None:
        return
    piece, training = Piece(called, np.zeros(0, int)), any(called.mode)
    buffers = [*replay.model.buffers()]
    before = [buffer.detach().clone() for buffer in buffers]
    _, error = attempt(lambda: replay.outputs(piece, training=training))
    has_moved = not all(map(torch.equal, buffers, before))
    for buffer, value in zip(buffers, before, strict=True):
        buffer.data.copy_(value)  # a `forward` may be bound to the module itself
    if error is not None or has_moved:
        log.leave(Reason.NOT_REPLAYED, told=_told(error))


def _objective(stated: Meant, replay: Replay, watcher: Watcher) -> Any:
    """Return the objective, after a trial on a pass of which a gradient was taken.

    Raises:
        UnfitError: the form of the loss is not known.
    """
    by_pass = replay.by_pass
    whole = [
        each
        for each in watcher.log.called
        if each.is_whole and (by_pass is None or each.order in by_pass)
    ]
    if stated is None:
        return _models_own(whole, watcher)
    fits = [each for each in whole if each.inputs and each.trained == replay.trained]
    taken = [each for each in fits if each.differentiated is not False]
    called = next(iter(taken), None)
    if called is None:
        return stated if isinstance(stated, OfModel) else Objective(stated)
    piece = Piece(called, np.arange(len(called.inputs[0])) % replay.num_rows)
    if isinstance(stated, OfModel):
        objective: Any = stated
        trial: Any = partial(replay.terms, piece, stated, None, training=True)
    else:
        if not all(map(_has_rows_first, taken)):
            raise UnfitError(Reason.LOSS_OF_OTHER_AXIS)
        is_one = len(called.outputs) == 1
        if isinstance(stated, Loss) and not is_one:
            raise UnfitError(Reason.LOSS_OF_ONE_OUTPUT)
        objective = Objective(stated, called.setting.output if is_one else None)
        trial = partial(_tried, objective, replay, piece)
    found, error = attempt(trial)
    if error is not None:  # of the user's function, or of a loss of other shapes
        raise UnfitError(Reason.LOSS_FAILED, _told(error)) from error
    if isinstance(found, ByRow) and found.values.requires_grad:
        raise UnfitError(Reason.LOSS_WITH_PARAMETERS)
    return objective


def _told(error: Exception | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"


def _has_rows_first(called: Called) -> bool:
    """Whether the first axis of a pass's outputs has the rows, as that of its inputs."""
    outputs = [called.outputs[i] for i in called.derivatives] or called.outputs
    rows = called.inputs[0].shape[:1]
    return all(out.shape[:1] == rows for out in outputs if out.ndim)


def _outputs(called: Called) -> Any:
    return packed(called.setting.output, list(map(tensor, called.outputs)))


def _tried(objective: Objective, replay: Replay, piece: Piece) -> Any:
    """Return the loss of the outputs of a pass."""
    with torch.enable_grad():
        return objective.of(_outputs(piece.called), *replay.batch(piece)[1:])


def _models_own(whole: list[Called], watcher: Watcher) -> Function:
    """Return the loss that the model computes itself of its logits and the labels it is
    given.
    """
    called = [each for each in whole if each.order in watcher.own][:1]
    found = [models_own(_outputs(each), watcher.own[each.order]) for each in called]
    if not found or found[0] is None:
        raise UnfitError(Reason.LOSS_OF_MODEL)
    return found[0]


def _check(model: nn.Module, optimizer: Any) -> None:
    """Refuse what cannot be watched."""
    kind = type(model)
    if getattr(kind, "forward", None) is nn.Module.forward:
        received = f"{kind.__name__}, which cannot be called"
        must = "stepcheck watches one module, which the loop calls"
        raise _refused(must, received, "stepcheck.watch(model['part'])")
    if any(map(is_lazy, [*model.parameters(), *model.buffers()])):
        must = "The model must have all its parameters"
        way = "call it once before the `with`, on a batch"
        raise _refused(must, "one with lazy layers", way)
    found = {str(each) for each in devices(model)}
    if len(found) > 1 or "meta" in found:
        received = f"one on {', '.join(sorted(found))}"
        must = "stepcheck watches modules on one device"
        raise _refused(must, received, "model.to('cpu')")
    kinds = {type(part).__name__ for part in [*model.parameters(), *model.modules()]}
    if kinds & {"DTensor", "FullyShardedDataParallel"}:
        way = "`DistributedDataParallel` for the time of the `with`"
        must = "Each process must have the whole model"
        raise _refused(must, "one whose parameters are sharded", way)
    if not trained(model):
        way = "watch the module that the optimizer trains"
        must = "The model must have parameters to train"
        raise _refused(must, "none that requires a gradient", way)
    if not isinstance(optimizer, Optimizer | None):
        must = "optimizer must be an optimizer of PyTorch"
        way = "torch.optim.Adam(model.parameters()), or leave it out"
        raise _refused(must, type(optimizer).__name__, way)


def _check_intention(model: nn.Module, data: Any, stated: Any) -> None:
    """Refuse a loop whose update is not stated: stepcheck does not guess it."""
    if stated is None and not _computes_loss(model):
        must = "loss must be stated for a model that computes none of its labels"
        way = "loss=nn.CrossEntropyLoss(), or loss=lambda outputs, labels: ..."
        raise _refused(must, "loss=None", way)
    if data is None and isinstance(stated, Function):
        must = "data must be stated with a loss that is a function"
        raise _refused(must, "data=None", "data=(x, y)")


def _computes_loss(model: nn.Module) -> bool:
    """Whether a model may be given labels, as those of Transformers are, and returns
    its loss.
    """
    named = signature(model.forward).parameters
    has_all = any(each.kind is Parameter.VAR_KEYWORD for each in named.values())
    return has_all or not named.keys().isdisjoint(LABELS)


def _refused(must: str, received: str, way: str) -> SpecificationError:
    return SpecificationError(message(f"{must}.", received, f"{way}."))
