"""A loop runs under PyTorch's hooks, and a report names its faults."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from stepcheck import tree
from stepcheck.errors import SpecificationError, message
from stepcheck.port import ByPass
from stepcheck.report.found import Likely, on_one_line
from stepcheck.report.report import Report
from stepcheck.solve.changes import Schedule
from stepcheck.stages.judge import Case
from stepcheck.stages.steps import scheduled
from stepcheck.torch.calls import Calls
from stepcheck.torch.data import as_given, called_for, rows_of, weighed
from stepcheck.torch.flow import Flow
from stepcheck.torch.hooks import Watcher
from stepcheck.torch.losses import Function, LoopsOwn, Loss, Objective, meant
from stepcheck.torch.processes import Group
from stepcheck.torch.replay import Replay
from stepcheck.torch.state import bare, trained, untouched, values
from stepcheck.torch.supposing import ModelsOwn
from stepcheck.torch.words import CUT, OF_OTHERS, STEPLESS
from stepcheck.trace.log import Called, Log, room
from stepcheck.trace.rows import Origin
from stepcheck.trace.windows import Piece, Rows

_MORE = "the form of the loss: the loop's gradient is not of {} alone. Pass the loss that is meant: loss=..."
_OTHER_AXIS = "the form of the loss: the rows are not the first axis of the outputs, as they are of the inputs"
_UNFIT = (
    "the form of the loss: it does not take the outputs and labels of a pass ({}); labels of several parts are a tuple"
)
_MANY = (
    "the form of the loss: the loop calls several. Pass the one that is meant, or a function of the outputs and labels "
    "that adds them: stepcheck.watch(..., loss=...)"
)
_NONE = (
    "the form of the loss: no call of a loss of PyTorch's of outputs and labels was seen. Pass a function: "
    "loss=lambda outputs, labels: ..."
)
_OF_MODEL = "the form of the loss: the model computes it, and it is none that is known of its logits and labels"
_SHARED = "the form of the loss: the losses of another module's steps go through this one. Pass its own: loss=..."
_SHIFTED = Likely(
    "The model is trained to predict the place after the next one: the labels are moved by two places. Are they moved "
    "in the model, and once more in its loss?"
)
_SEVERAL = (
    "the form of the loss: the model returns several outputs, and which the loss gets was not seen. Pass a function: "
    "loss=lambda outputs, labels: ..."
)
_OWN = "the form of the loss: it has parameters of its own, which may move"


@contextmanager
def watched(
    model: nn.Module, data: Any, loss: Any, *, learning_rate: float | Callable[[int], Any] | None = None
) -> Iterator[Report]:
    """Run the body of a `with` under hooks; see `stepcheck.torch`."""
    model = bare(model) if isinstance(model, nn.Module) else model
    _check(model)
    told = None if loss is None else meant(loss)
    given = None if data is None else weighed(rows_of(data), told)
    schedule = None if learning_rate is None else scheduled(learning_rate)
    log, report = Log(), Report()
    before = values(model).params
    log.room = room(sum(p.numel() for _, p in trained(model)))
    log.begin(before)
    like = [] if given is None else [leaf.shape[1:] for leaf in tree.leaves(given[0])]
    group = Group.now()
    order = itertools.count() if group is None else group.orders()
    watcher = Watcher(model, log, len(like) or None, order, like=like)
    calls, flow = Calls(watcher), Flow()
    try:
        with watcher.on(), calls.on(), flow.on():
            yield report
    except (Exception, KeyboardInterrupt) as error:
        log.unseen[f"the rest of the loop: it ended with {type(error).__name__}"] = None
        for note in (CUT, STEPLESS, OF_OTHERS):  # of loops that came to their end
            log.notes.pop(note, None)
        with suppress(Exception):  # else it would hide the loop's error
            flow.share([watcher])
            if group is not None and (elsewhere := group.gather(watcher, calls, has_failed=True)):
                report.elsewhere = elsewhere
            else:
                close(report, watcher, calls, given, before, told, schedule)
        raise
    flow.share([watcher])
    if group is not None and (elsewhere := group.gather(watcher, calls)):
        report.elsewhere = elsewhere
        return
    close(report, watcher, calls, given, before, told, schedule).ended = values(model)
    with suppress(Exception):  # else it is raised where the report is read
        _ = report.causes  # before the module is changed


def close(
    report: Report,
    watcher: Watcher,
    calls: Calls,
    data: tuple | None,
    before: list[np.ndarray],
    loss: Loss | Function | None = None,
    schedule: Schedule | None = None,
    *,
    by_pass: ByPass | None = None,
    why_unknown: str = "",
) -> Case:
    """Close a report with its case, and return it.

    Args:
        data: None for the rows that the module was given.
        loss: the loss that is meant; None for the one that the loop calls, or that the model computes itself.
        schedule: the learning rate that is meant; None for that of the loop's schedule.
        by_pass: the labels by the order of a pass.
        why_unknown: why the labels of the loss are not known; "" if they are.
    """
    model, log = watcher.module, watcher.log
    origin: Origin = "stated"
    if data is None or (loss is None and watcher.is_shared):  # some rows are another module's
        labels_of = {order: each.labels for order, each in watcher.own.items()} or calls.targets
        given = as_given(called_for(log), labels_of)
        data, by_pass, origin = (given.x, given.y, None), given.by_pass, given.origin
        why_unknown = why_unknown or ("" if given.has_labels else _NONE)
        report.taken.append(given.told)
    _try(model, data, log)
    log.notes.update(dict.fromkeys(watcher.beside.carried(log, Rows(data[0]))))
    with untouched():
        data, objective = _objective(report, watcher, calls, data, loss, by_pass, why_unknown)
    schedule = schedule or calls.schedules.rates()
    own = watcher.optimizers[0] if len(watcher.optimizers) == 1 else None

    def case_of(objective: Any) -> Case:
        labels = None if isinstance(objective, LoopsOwn) else by_pass
        how: dict[str, Any] = {"optimizer": own, "by_pass": labels}
        return Case(Replay, model, data, objective, schedule, log, before, **how)

    case = _divided(report, case_of(objective), case_of, loss)
    case.origin = origin
    report.close(case)
    return case


def _objective(
    report: Report,
    watcher: Watcher,
    calls: Calls,
    data: tuple,
    loss: Loss | Function | None,
    by_pass: ByPass | None,
    why_unknown: str,
) -> tuple[tuple, Any]:
    """Return (the data, the objective): the stated loss, the model's own, or the loop's."""
    if why_unknown:
        watcher.log.unseen[why_unknown] = None
        return data, LoopsOwn()
    if loss is None and watcher.own:
        return data, _models_own(watcher, report)
    if loss is None and watcher.is_shared:
        watcher.log.unseen[_SHARED] = None
        return data, LoopsOwn()
    return _known(loss, data, calls, report, by_pass)


def _divided(report: Report, case: Case, case_of: Callable[[Any], Case], loss: Loss | Function | None) -> Case:
    """Return the case whose loss is divided as the gradients show: by the rows, or by their weights."""
    objective = case.objective
    if loss is None and isinstance(objective, Objective) and getattr(objective.given, "reduction", "") == "sum":
        mean = Objective(objective.loss.averaged())  # a loop may divide the gradient by itself
        case, is_other = _fitting(case, case_of(mean))
        report.taken += ["the sums of this loss are divided by the rows"] * is_other
    elif isinstance(objective, Objective) and isinstance(objective.loss, Loss) and case.data[2] is not None:
        case, is_other = _fitting(case, case_of(Objective(objective.loss.other(objective.given, is_by_rows=True))))
        report.taken.append(f"the rows' losses times their weights, divided by the {'rows' if is_other else 'weights'}")
    return case


def _fitting(case: Case, other: Case) -> tuple[Case, bool]:
    """Return a case, or the other one and True if the gradients fit that one alone."""
    is_other = bool(case.judge().of_gradient) and not other.judge().of_gradient
    return (other, True) if is_other else (case, False)


def _models_own(watcher: Watcher, report: Report) -> Any:
    """Return the loss that the model computes itself of its logits and the labels it is given."""
    log = watcher.log
    called = next((each for each in log.called if each.is_whole and each.order in watcher.own), None)
    if called is not None:
        own = watcher.own[called.order]
        outputs = called.setting.output(list(map(torch.as_tensor, called.outputs)))
        if (objective := ModelsOwn.of_pass(outputs, own.labels, own.loss, own.num)) is not None:
            report.taken.append(f"loss: {objective.told}, as the model computes it")
            if objective.shift > 1:
                log.notes[_SHIFTED] = None
            return objective
    log.unseen[_OF_MODEL] = None
    return LoopsOwn()


def _try(model: nn.Module, data: tuple, log: Log) -> None:
    """Leave out the record if a pass cannot be run again, and say why."""
    called = next((each for each in reversed(log.called) if each.is_whole), None)
    if called is None:
        return
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        with Replay.as_then(model, log):
            Replay(model, data).outputs(Piece(called, np.zeros(0, int)), training=any(called.setting.modes))
        moved = [(buffer, before) for buffer, before in buffers if not torch.equal(buffer, before)]
        for buffer, before in moved:
            buffer.data.copy_(before)
        if moved:
            raise RuntimeError("its `forward` is bound to the module itself")
    except Exception as error:  # the model's own
        log.unseen[f"the updates: a copy of the model does not run a pass again ({on_one_line(error)})"] = None
        log.called.clear()
        log.applied.clear()


def _known(
    loss: Loss | Function | None, data: tuple, calls: Calls, report: Report, by_pass: ByPass | None
) -> tuple[tuple, Any]:
    """Return (the data with the weights that the loss shows, the objective), from the passes that were seen."""
    log, called = calls.log, next((each for each in calls.log.called if each.is_whole), None)
    own = [] if called is None else [called.outputs[i] for i in called.derivatives or range(len(called.outputs))]
    rows = called.inputs[0].shape[:1] if called is not None and called.inputs else None
    if called is not None and (rows is None or any(out.shape[:1] != rows for out in own if out.ndim)):
        log.unseen[_OTHER_AXIS] = None
        return data, LoopsOwn()
    own_places = calls.outputs - {None}
    if isinstance(loss, Loss) and called is not None and len(called.outputs) > 1:
        if len(own_places) != 1:
            log.unseen[_SEVERAL] = None
            return data, LoopsOwn()
        (loss.at,) = own_places
    if isinstance(loss, Loss):
        loss.has_last |= any(
            isinstance(each, Loss) and each.has_last for each in calls.losses.values() if each.name == loss.name
        )
    if loss is None:
        found = [*calls.losses.values()]
        if len(found) != 1:
            log.unseen[_MANY if found else _NONE] = None
            return data, LoopsOwn()
        if len(own_places) > 1 or (loss := calls.meant(found[0])) is None:
            log.unseen[_MORE.format(found[0].name)] = None
            return data, LoopsOwn()
        how = "" if loss is found[0] else ", the sums divided by the rows"
        report.taken.append(f"loss: {found[0].given}, as the loop calls it{how}")
    if called is None:
        return data, Objective(loss)
    try:
        return _tried(loss, data, called, log, by_pass)
    except Exception as error:  # the user's function, or a loss of other shapes
        log.unseen[_UNFIT.format(on_one_line(error))] = None
        return data, LoopsOwn()


def _tried(loss: Loss | Function, data: tuple, called: Called, log: Log, by_pass: ByPass | None) -> tuple[tuple, Any]:
    """Return (the data with the weights that the loss shows, the objective), after a trial on the rows of a pass."""
    outputs = called.setting.output(list(map(torch.as_tensor, called.outputs)))
    num = len(called.inputs[0])
    width = called.outputs[0].shape[1:2]

    def cut(leaf: np.ndarray) -> np.ndarray:
        """Return the labels of as many rows, no wider than the outputs are."""
        is_wider = leaf.ndim > 1 and width and leaf.shape[1] > width[0]
        return leaf[:num, : width[0]] if is_wider else leaf[:num]

    labels = tree.map_leaves(cut, data[1]) if by_pass is None else by_pass[called.order][0]
    weights = None if data[2] is None else data[2][:num]
    if not isinstance(loss, Function) or loss.has_sample_weights:
        loss.of(outputs, labels, weights)
        return data, Objective(loss)
    if loss.has_parameters(outputs, labels):
        log.unseen[_OWN] = None
        return data, LoopsOwn()
    if isinstance(outputs, Tensor) and (weights := loss.shares(data[1], outputs.shape[1:])) is not None:
        loss.of(outputs, labels, weights[:num])
        loss.is_coupled |= not weights[:num].any()
        loss.has_own_weights = not loss.is_coupled
        return (*data[:2], None if loss.is_coupled else weights), Objective(loss)
    return data, Objective(loss)


def _check(model: Any) -> None:
    """Refuse what cannot be watched."""
    if not isinstance(model, nn.Module):
        must, attempt = "stepcheck.watch needs a PyTorch module.", "stepcheck.watch(model, data=(x, y), loss=loss_fn)."
        raise SpecificationError(message(must, type(model).__name__, attempt))
    if getattr(type(model), "forward", None) is nn.Module.forward:
        must, attempt = (
            "The audit watches one module, which the loop calls.",
            "stepcheck.watch(model['part'], data=...).",
        )
        raise SpecificationError(message(must, f"{type(model).__name__}, which cannot be called", attempt))
    if any(map(is_lazy, [*model.parameters(), *model.buffers()])):
        must, attempt = "The model must have all its parameters.", "call it once before the audit, on a batch."
        raise SpecificationError(message(must, "one with lazy layers", attempt))
    devices = {str(value.device) for value in [*model.parameters(), *model.buffers()]} - {"cpu"}
    if devices:
        must, attempt = "The audit of PyTorch looks at modules on the CPU.", "model.to('cpu')."
        raise SpecificationError(message(must, f"one on {', '.join(sorted(devices))}", attempt))
    kinds = {type(part).__name__ for part in [*model.parameters(), *model.modules()]}
    if kinds & {"DTensor", "FullyShardedDataParallel"}:
        must, attempt = (
            "Each process must have the whole model.",
            "`DistributedDataParallel` for the time of the audit.",
        )
        raise SpecificationError(message(must, "one whose parameters are sharded", attempt))
    if not trained(model):
        must, attempt = "The model must have parameters to train.", "audit the module that the optimizer trains."
        raise SpecificationError(message(must, "none that requires a gradient", attempt))
