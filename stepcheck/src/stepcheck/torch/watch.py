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
from stepcheck.torch.data import Data, as_given, weighed
from stepcheck.torch.device import devices
from stepcheck.torch.hooks import Watcher, listening
from stepcheck.torch.losses import Function, Loss, Objective, meant, models_own
from stepcheck.torch.nests import packed
from stepcheck.torch.objective import OfModel, joined
from stepcheck.torch.processes import Group
from stepcheck.torch.replay import Replay
from stepcheck.torch.state import LABELS, bare, tensor, trained, values
from stepcheck.trace.log import Called, Log, room
from stepcheck.trace.windows import Piece
from stepcheck.values import Reason, Unjudged

Meant = Loss | Function | OfModel | None


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
    stated: Meant = (
        OfModel(loss) if isinstance(loss, Stated) else loss and meant(loss)
    )
    _check_intention(model, data, stated)
    given = None if data is None else weighed(data, stated)
    schedule = None if learning_rate is None else scheduled(learning_rate)
    use, group, report, before = (
        stated_use(rows),
        Group.now(),
        Report(),
        values(model),
    )
    log = Log(room=room(sum(p.numel() for _, p in trained(model))))
    log.begin(before.params)
    num_inputs = None if given is None else len(tree.leaves(given[0]))
    order = itertools.count() if group is None else group.orders()
    watcher = Watcher(model, log, num_inputs, order)
    if isinstance(stated, OfModel):
        watcher.num_inputs = num_inputs and num_inputs // stated.given.calls
        watcher.beside = Beside(model)
        stated.modules = watcher.beside.modules

    def finish(*, has_failed: bool) -> None:
        if group is not None:
            report.elsewhere = group.gather(watcher, has_failed=has_failed)
        if not report.elsewhere:
            case = close(watcher, given, before.params, stated, schedule)
            case.stated, case.use = optimizer, use
            case.ended = None if has_failed else values(model)
            report.close(case)

    try:
        with listening([watcher]), Calls(watcher).on():
            yield report
    except BaseException as error:
        told = type(error).__name__
        log.unjudged.append(
            Unjudged(Reason.ENDED, updates=log.num_updates, told=told)
        )
        # an error would hide the loop's
        attempt(partial(finish, has_failed=True))
        raise
    finish(has_failed=False)
    # Before the module is changed; an error is raised where the report is read.
    attempt(lambda: report.findings)


def close(
    watcher: Watcher,
    data: Data | None,
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
    if isinstance(stated, OfModel):
        log.called[:] = joined(log, stated.given.calls)
        watcher.labels = dict.fromkeys((each.order for each in log.called), ())
        stated.is_given = is_given
    if data is None:
        data, by_pass = as_given(log, watcher.labels)
    with Replay.as_then(model, log):
        replay = Replay(model, data, by_pass=by_pass)
        _try(replay, log)
        if is_given and by_pass is None:
            objective = _unfit(log, Reason.LOSS_WITHOUT_LABELS)
        else:
            objective = _objective(stated, replay, watcher)
    case = Case(Replay, model, data, objective, schedule, log, before)
    case.by_pass, case.is_given = by_pass, is_given
    used = [*log.optimizers.values()]
    case.optimizer = used[0] if len(used) == 1 else None
    return case


def _try(replay: Replay, log: Log) -> None:
    """Leave out the record if a pass cannot be run again, or moves the module itself."""
    called = next(
        (each for each in reversed(log.called) if each.is_whole), None
    )
    if called is None:
        return
    piece, training = Piece(called, np.zeros(0, int)), any(called.mode)
    buffers = [*replay.model.buffers()]
    before = [buffer.detach().clone() for buffer in buffers]
    _, error = attempt(lambda: replay.outputs(piece, training=training))
    has_moved = not all(map(torch.equal, buffers, before))
    for buffer, value in zip(buffers, before, strict=True):
        # a `forward` may be bound to the module itself
        buffer.data.copy_(value)
    if error is not None or has_moved:
        log.leave(Reason.NOT_REPLAYED, told=_told(error))


def _unfit(log: Log, reason: Reason, told: str = "") -> NoLoss:
    """Return no objective, for a reason that the form of the loss is not known."""
    log.leave(reason, Stage.GRADIENT, told)
    return NoLoss()


def _objective(stated: Meant, replay: Replay, watcher: Watcher) -> Any:
    """Return the objective, after a trial on the passes of which a gradient was taken."""
    log = watcher.log
    whole = [each for each in log.called if each.is_whole and each.inputs]
    if replay.by_pass is not None:
        whole = [each for each in whole if each.order in replay.by_pass]
    if stated is None:
        return _models_own(whole, watcher)
    fits = [each for each in whole if each.trained == replay.trained]
    taken = [each for each in fits if each.differentiated is not False]
    objective: Any = stated
    if isinstance(stated, OfModel):
        taken = taken[:1]
    else:
        if not all(map(_has_rows_first, taken)):
            return _unfit(log, Reason.LOSS_OF_OTHER_AXIS)
        forms = [
            each.setting.output for each in taken if len(each.outputs) == 1
        ]
        if isinstance(stated, Loss) and len(forms) < len(taken):
            return _unfit(log, Reason.LOSS_OF_ONE_OUTPUT)
        objective = Objective(stated, next(iter(forms), None))
    trial = partial(_has_parameters, objective, replay)
    found, error = attempt(lambda: any([*map(trial, taken)]))
    if (
        error is not None
    ):  # of the user's function, or of a loss of other shapes
        return _unfit(log, Reason.LOSS_FAILED, _told(error))
    return _unfit(log, Reason.LOSS_WITH_PARAMETERS) if found else objective


def _has_parameters(objective: Any, replay: Replay, called: Called) -> bool:
    """Let a loss run on the outputs of a pass, which may show that it is one of a whole
    batch; return whether it has parameters, which may move.
    """
    piece = Piece(called, np.arange(len(called.inputs[0])) % replay.num_rows)
    if isinstance(objective, OfModel):
        replay.terms(piece, objective, None, training=True)
        return False
    with torch.enable_grad():
        loss = objective.of(_outputs(called), *replay.batch(piece)[1:])
    return bool(loss.values.requires_grad)


def _told(error: Exception | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"


def _has_rows_first(called: Called) -> bool:
    """Whether the first axis of a pass's outputs has the rows, as that of its inputs."""
    outputs = [called.outputs[i] for i in called.derivatives] or called.outputs
    rows = called.inputs[0].shape[:1]
    return all(out.shape[:1] == rows for out in outputs if out.ndim)


def _outputs(called: Called) -> Any:
    return packed(called.setting.output, list(map(tensor, called.outputs)))


def _models_own(whole: list[Called], watcher: Watcher) -> Any:
    """Return the loss that the model computes itself of its logits and the labels it is
    given.
    """
    for called in [each for each in whole if each.order in watcher.own][:1]:
        labels, own = watcher.labels[called.order], watcher.own[called.order]
        if (found := models_own(_outputs(called), labels, *own)) is not None:
            return found
    return _unfit(watcher.log, Reason.LOSS_OF_MODEL)


def _check(model: nn.Module, optimizer: Any) -> None:
    """Refuse what cannot be watched."""
    kind, parts = type(model), [*model.parameters(), *model.modules()]
    homes = sorted(map(str, devices(model)))
    kinds = {type(part).__name__ for part in parts}
    checks = (
        (
            getattr(kind, "forward", None) is nn.Module.forward,
            "stepcheck watches one module, which the loop calls.",
            f"{kind.__name__}, which cannot be called",
            "stepcheck.watch(model['part']).",
        ),
        (
            any(map(is_lazy, [*model.parameters(), *model.buffers()])),
            "The model must have all its parameters.",
            "one with lazy layers",
            "call it once before the `with`, on a batch.",
        ),
        (
            len(homes) > 1 or "meta" in homes,
            "stepcheck watches modules on one device.",
            f"one on {', '.join(homes)}",
            "model.to('cpu').",
        ),
        (
            bool(kinds & {"DTensor", "FullyShardedDataParallel"}),
            "Each process must have the whole model.",
            "one whose parameters are sharded",
            "`DistributedDataParallel` for the time of the `with`.",
        ),
        (
            not trained(model),
            "The model must have parameters to train.",
            "none that requires a gradient",
            "watch the module that the optimizer trains.",
        ),
        (
            not isinstance(optimizer, Optimizer | None),
            "optimizer must be an optimizer of PyTorch.",
            type(optimizer).__name__,
            "torch.optim.Adam(model.parameters()), or leave it out.",
        ),
    )
    for is_wrong, *told in checks:
        if is_wrong:
            raise SpecificationError(message(*told))


def _check_intention(model: nn.Module, data: Any, stated: Any) -> None:
    """Refuse a loop whose update is not stated: stepcheck does not guess it."""
    if stated is None and not _computes_loss(model):
        must = (
            "loss must be stated for a model that computes none of its labels."
        )
        way = "loss=nn.CrossEntropyLoss(), or loss=lambda outputs, labels: ..."
        raise SpecificationError(message(must, "loss=None", way))
    if data is None and isinstance(stated, Function):
        must = "data must be stated with a loss that is a function."
        raise SpecificationError(message(must, "data=None", "data=(x, y)."))


def _computes_loss(model: nn.Module) -> bool:
    """Whether a model may be given labels, as those of Transformers are, and returns
    its loss.
    """
    named = signature(model.forward).parameters
    has_all = any(each.kind is Parameter.VAR_KEYWORD for each in named.values())
    return has_all or not named.keys().isdisjoint(LABELS)
