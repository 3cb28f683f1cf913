"""The verdict on a recorded loop: a table of checks, by stage, one after another."""

import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np

from stepcheck.faults import Fault, Stage
from stepcheck.port import ByPass, NoLoss, Port, quiet
from stepcheck.progress import NOW
from stepcheck.solve.changes import Schedule, otherwise
from stepcheck.solve.evidence import Evidence, Meant
from stepcheck.solve.modes import Modes, rare
from stepcheck.solve.optimizers import stated
from stepcheck.solve.readings import read, without_void
from stepcheck.stages.facts import Facts, facts, written
from stepcheck.stages.gradients import gradients
from stepcheck.stages.moves import MOVED_INSIDE, between
from stepcheck.stages.passes import mode, state
from stepcheck.stages.printed import printed
from stepcheck.stages.rows import Use, across, order
from stepcheck.stages.steps import of_steps, repeated
from stepcheck.stages.variables import left_out, lost_statistics
from stepcheck.trace.log import Applied, Called, Log, Values
from stepcheck.trace.measure import all_same, are_finite, classes
from stepcheck.trace.windows import Rows, Update, Windows, windows
from stepcheck.values import Finding, Reason, Unjudged

LEAST = 3  # updates after the last change of what is trainable
REQUIRED = tuple(stage for stage in Stage if stage is not Stage.PRINTED)
_NOTHING = Windows([], [], 0, set(), {})
Judged = Iterable[Finding | Unjudged]


@dataclass
class Verdict:
    """The findings of a loop, and the stages that were judged.

    Attributes:
        findings: the differences from the update that was meant, in the order of the
            stages.
        unjudged: the parts that were not judged, and why.
        failures: tracebacks of errors of our own, by the stage that has ended in one.
        seen: the updates.
        evidence: the updates whose gradients were computed again.
        facts: those of the loop, without a judgement; None without updates.
    """

    findings: list[Finding] = field(default_factory=list)
    unjudged: list[Unjudged] = field(default_factory=list)
    failures: dict[Stage, str] = field(default_factory=dict)
    seen: Windows = _NOTHING
    evidence: list[Evidence] = field(default_factory=list)
    facts: Facts | None = None

    @property
    def has_seen(self) -> bool:
        """Whether at least one update on rows of the data was seen."""
        return self.num_updates > 0 and self.num_batches > 0

    @property
    def num_updates(self) -> int:
        """The number of updates."""
        return len(self.seen.updates)

    @property
    def num_batches(self) -> int:
        """The number of forward passes on rows of the data; those of all replicas are
        one.
        """
        return sum(
            each.is_known and not each.called.replica
            for each in self.seen.pieces
        )

    @property
    def judged(self) -> list[Stage]:
        """The stages that were judged, of one update at least."""
        num = self.num_updates
        left = {each.stage for each in self.unjudged if each.is_of_all(num)}
        if not self.has_seen or None in left:
            return []
        return [
            each for each in REQUIRED if each not in {*left, *self.failures}
        ]

    def of(self, stage: Stage) -> list[Finding]:
        """Return the findings of a stage."""
        return [finding for finding in self.findings if finding.stage is stage]


@dataclass
class Case:
    """A recorded loop, and the update that was meant.

    Attributes:
        data: (x, y, sample_weight) as they were when the loop began.
        schedule: the learning rate that is meant, if it is known.
        before: the weights when the loop began.
        printed: the losses that the loop prints.
        compiled: the id of the compiled optimizer, if the schedule is taken from it by
            default.
        optimizer: the optimizer whose steps can be made again; `stated`: the one that
            the user states.
        is_given: whether the data are the rows that the model was given: their order is
            the loop's own.
        ended: the model's values after the loop; None if it was ended early, or they
            are not known.
        by_pass: the labels by the order of a pass; None if they belong to the rows.
        use: how the passes over the data use the rows, if the user states it.
    """

    port: type[Port]
    model: Any
    data: tuple[Any, Any, Any]
    objective: Any
    schedule: Schedule | None
    log: Log
    before: list[np.ndarray]
    printed: list[float] = field(default_factory=list)
    compiled: int | None = None
    optimizer: Any = None
    stated: Any = None
    is_given: bool = False
    ended: Values | None = None
    by_pass: ByPass | None = None
    use: Use | None = None

    def judge(self) -> Verdict:
        """Return the verdict, with the layers set to be trained as they were while the
        loop ran.
        """
        with self.port.as_then(self.model, self.log), quiet():
            return _judged(self)


class _Context:
    """All that the checks of one loop read; the verdict so far."""

    def __init__(self, case: Case):
        self.case, self.verdict = case, Verdict()
        used = {case.compiled, *(step.optimizer for step in case.log.applied)}
        if case.compiled is not None and len(used) > 1:
            # the compiled optimizer's, which is not the loop's
            case.schedule = None
        self.log = _last_part(case.log)
        self.is_late = self.log is not case.log
        self.before = _first_params(self.log) if self.is_late else case.before
        self.replay = case.port(case.model, case.data, by_pass=case.by_pass)
        self.rows = Rows(case.data[0])
        seen = windows(self.log, self.rows, case.schedule)
        self.verdict.seen = replace(seen, updates=without_void(seen.updates))
        self.objective = case.objective
        self.verdict.unjudged += self.log.unjudged
        if num := len(case.log.applied) - len(self.log.applied):
            self.verdict.unjudged.append(
                Unjudged(Reason.THAWED, Stage.GRADIENT, num)
            )

    @property
    def seen(self) -> Windows:
        """The updates."""
        return self.verdict.seen

    @cached_property
    def modes(self) -> Modes:
        """The modes of the forward passes of all updates that can be computed again."""
        modes = Modes(rare(self.seen.updates, self.replay.most_shapes))
        for update in self.seen.updates:
            if modes.knows(update) and update.number not in self.twice:
                modes.note(self.replay, update)
        return modes

    @cached_property
    def twice(self) -> list[int]:
        """The updates that apply the gradient of the update before once more."""
        return repeated(self.seen.updates)

    def meant(self, optimizer: Any) -> Meant:
        """Return the update that was meant."""
        known = self.replay, self.objective, self.modes, self.seen.place
        return Meant(*known, self.log.scaled, optimizer)

    @cached_property
    def steps(self) -> list[Update]:
        """The optimizer steps; those of zeros apart, and stale ones without a forward
        pass of their own.
        """
        seen = self.seen
        windows = (seen.idle.get(u.number, [u]) for u in seen.updates)
        every = (step for window in windows for step in window)
        return [
            replace(step, pieces=[]) if step.number in seen.stale else step
            for step in every
        ]

    @cached_property
    def moved(self) -> list[Finding]:
        """The findings on what moves between updates, unless a pass itself moves
        weights.
        """
        if self.replay.moves_weights:
            return []
        optimizer = self.case.optimizer
        is_own = all(
            step.applied.optimizer == id(optimizer) for step in self.steps
        )
        decay = self.replay.decay(optimizer) if is_own else None
        return [*between(self.steps, decay, self.replay.names)]

    @cached_property
    def known(self) -> list[Update]:
        """The updates whose gradients can be computed again."""
        left, found = Counter[Reason](), []
        for update in self.seen.updates:
            if update.number in self.twice:
                continue
            if (reason := self._unknown(update)) is not None:
                left[reason] += 1
            elif self.modes.knows(update):
                found.append(update)
        self.verdict.unjudged += [
            Unjudged(reason, Stage.GRADIENT, num)
            for reason, num in left.items()
        ]
        return found

    def _unknown(self, update: Update) -> Reason | None:
        """Return why the gradient of an update cannot be computed again, or compared."""
        loss = getattr(self.objective, "loss", None)
        is_coupled = getattr(loss, "is_coupled", False)
        others = self.case.data[1:]
        is_clear = update.number in self.seen.settled
        inside = (each for each in self.moved if each.fault in MOVED_INSIDE)
        reasons = {
            Reason.NOT_KEPT: not update.applied.is_whole,
            Reason.NO_FORWARD_PASS: not update.pieces,
            Reason.RARE_SHAPES: update.number in self.modes.left,
            Reason.MOVING: any(
                update.number in each.where.updates for each in inside
            ),
            Reason.COUPLED: is_coupled and len(update.pieces) > 1,
            Reason.EQUAL_ROWS: not (
                is_clear or self.rows.agree(update.rows, others)
            ),
        }
        return next(
            (reason for reason, is_so in reasons.items() if is_so), None
        )


def _judged(case: Case) -> Verdict:
    context = _Context(case)
    verdict = context.verdict
    _run(context, Stage.ROWS, _seen)
    if verdict.has_seen and all(e.stage or e.updates for e in verdict.unjudged):
        for stage, check in CHECKS:
            _run(context, stage, check)
    if context.seen.updates:
        verdict.facts = _facts(context)
    verdict.findings.sort(key=lambda finding: [*Stage].index(finding.stage))
    return verdict


def _run(
    context: _Context, stage: Stage, check: Callable[[_Context], Judged]
) -> None:
    """Add the results of a check to the verdict, or the traceback of its error."""
    NOW.stage = stage
    verdict = context.verdict
    try:
        found = [*check(context)]
    except Exception:  # the loop may do anything: what was found so far is kept
        verdict.failures[stage] = traceback.format_exc()
        return
    verdict.unjudged += [each for each in found if isinstance(each, Unjudged)]
    for each in found:
        if isinstance(each, Finding):
            line = context.log.lines.get(each.fault, each.where.line)
            where = replace(each.where, line=line)
            verdict.findings.append(replace(each, where=where))


def _last_part(log: Log) -> Log:
    """Return the log from the last change of the trainable variables on, if a few
    updates come after it.
    """
    trained = [each.trained for each in log.called if each.is_whole]
    if len(list(groupby(trained))) not in (2, 3):
        return log
    others = [
        each.order for each in _events(log) if each.trained != trained[-1]
    ]
    late = log.since(max(others))
    return late if len(late.applied) >= LEAST else log


def _events(log: Log) -> list[Called | Applied]:
    events: list[Called | Applied] = [*log.called, *log.applied]
    return [each for each in events if each.is_whole]


def _first_params(log: Log) -> list[np.ndarray]:
    return next((each.params for each in log.called if each.is_whole), [])


# ---- the checks ----


def _seen(context: _Context) -> Judged:
    """Yield why no update on rows of the data was seen, or why the recorded values
    cannot be used.
    """
    seen, replay = context.seen, context.replay
    if not seen.updates:
        now, before = replay.values(), context.before
        has_moved = bool(before) and now and not all_same(before, now.params)
        yield Unjudged(Reason.OUTLINED if has_moved else Reason.NO_UPDATE)
    elif not seen.pieces:
        yield Unjudged(Reason.NO_FORWARD_PASS)
    elif not context.verdict.num_batches:
        yield Unjudged(Reason.OTHER_INPUTS)
    elif seen.foreign:
        yield Unjudged(Reason.OTHER_INPUTS, Stage.ROWS, seen.foreign)
    num_lost = sum(not are_finite(piece.called.params) for piece in seen.pieces)
    if seen.is_by_hand and num_lost:
        yield Unjudged(Reason.NOT_FINITE, Stage.GRADIENT, num_lost)
    trained = {each.trained for each in _events(context.log) if each.trained}
    whole = [each for each in context.log.called if each.is_whole]
    is_one = trained <= {replay.trained}
    is_alike = {len(each.buffers) for each in whole[-1:]} <= {
        len(replay.names_of_others)
    }
    if len(trained) > 1:
        yield Unjudged(Reason.THAWED)
    elif whole and not (is_one and is_alike):
        yield Unjudged(Reason.REMADE)


def _rows(context: _Context) -> Judged:
    case = context.case
    context.verdict.seen = read(
        context.meant(case.optimizer),
        context.seen,
        context.rows,
        case.data,
        case.schedule,
    )
    if case.is_given:
        yield Unjudged(Reason.DATA_AS_GIVEN, Stage.ROWS)
    elif context.seen.in_training[0]:
        yield Unjudged(Reason.SKIPPED, Stage.ROWS)
    elif case.use is not None and context.is_late:
        yield Unjudged(Reason.THAWED, Stage.ROWS)


def _mode(context: _Context) -> Judged:
    modes = context.modes
    yield from mode(modes)
    for stage in modes.unlooked(context.seen.updates):
        yield Unjudged(Reason.UNLIKE_OUTPUTS, stage)
    if modes.unlike:
        yield Unjudged(Reason.UNLIKE_OUTPUTS, Stage.GRADIENT, len(modes.unlike))


def _gradient(context: _Context) -> Judged:
    case, seen, verdict = context.case, context.seen, context.verdict
    is_own_step = seen.is_by_hand and not seen.is_rated and not seen.is_of_loss
    if is_own_step:
        yield Unjudged(Reason.OWN_STEP, Stage.GRADIENT)
    if is_own_step or isinstance(context.objective, NoLoss):  # the log has why
        return
    meant = context.meant(None if seen.is_by_hand else case.optimizer)
    evidence, judged = gradients(meant, context.known)
    findings = [each for each in judged if isinstance(each, Finding)]
    if context.replay.moves_weights and not all(
        e.change.is_known for e in findings
    ):
        # the gradient is by moved ones
        yield Unjudged(Reason.MOVING, Stage.GRADIENT)
        return
    verdict.evidence = evidence
    if not evidence and not judged:
        yield Unjudged(Reason.NO_GRADIENT, Stage.GRADIENT)
    yield from (_skipped(each, seen.updates) for each in judged)
    if case.stated is not None and not findings and evidence:
        yield from otherwise(evidence, case.stated)


def _skipped(
    found: Finding | Unjudged, updates: list[Update]
) -> Finding | Unjudged:
    """Return that passes before an update's one batch are of skipped steps, if most
    updates have one.
    """
    if isinstance(found, Unjudged) or found.fault is not Fault.PASSES_LEFT_OUT:
        return found
    replicas = [[piece.called.replica for piece in u.pieces] for u in updates]
    num_usual = np.median([each.count(each[0]) for each in replicas if each])
    left = Unjudged(Reason.SKIPPED, Stage.GRADIENT, len(found.where.updates))
    return left if num_usual == 1 else found


def _use(context: _Context) -> Judged:
    """Yield the findings on the order of the rows, and on updates with rows of two
    passes.
    """
    use, verdict = context.case.use, context.verdict
    if any(each.reason is Reason.IN_TURN for each in verdict.unjudged):
        yield Unjudged(Reason.IN_TURN, Stage.ROWS)
    elif use is not None and Stage.ROWS in verdict.judged:
        found = [*order(use, context.seen, context.rows)]
        unknown = [
            each
            for each in verdict.of(Stage.GRADIENT)
            if each.fault is Fault.PASSES_LEFT_OUT or not each.change.is_known
        ]
        whole = {e.update.number for e in verdict.evidence if not unknown}
        yield from found or across(context.seen, context.rows, whole)


def _variables(context: _Context) -> Judged:
    is_known = not isinstance(context.objective, NoLoss)
    if is_known and not context.verdict.of(Stage.GRADIENT):
        steps, is_thawed = context.log.applied, context.is_late
        known = context.replay, context.objective, context.seen.updates
        yield from left_out(*known, steps, is_thawed=is_thawed)


def _step(context: _Context) -> Judged:
    case, seen = context.case, context.seen
    if seen.is_by_hand and not seen.is_rated:
        yield Unjudged(Reason.OWN_STEP, Stage.STEP)
    schedule = case.schedule or stated(case.stated, seen)
    optimizers = context.log.optimizers
    yield from of_steps(
        context.replay, seen, context.steps, optimizers, schedule, case.stated
    )


def _state(context: _Context) -> Judged:
    yield from context.moved
    found = [*context.moved, *context.verdict.of(Stage.STEP)]
    is_still = not found and not context.replay.moves_weights
    if is_still and written(context.steps):
        yield Unjudged(Reason.WRITTEN, Stage.STATE)
    yield from state(context.replay, context.modes, context.known)
    if context.case.ended is not None and context.log.is_stateless:
        yield from lost_statistics(
            context.replay, context.case.ended, context.seen
        )


def _printed(context: _Context) -> Judged:
    case = context.case
    if case.printed and not context.is_late:
        yield from printed(context.verdict.evidence, case.printed, context.seen)


def _facts(context: _Context) -> Facts:
    case = context.case
    modes = vars(context).get("modes", Modes())  # if passes could run again
    by_row = classes(case.data[1]) if case.by_pass is None else None
    return facts(
        context.replay, context.log, context.seen, context.rows, modes, by_row
    )


CHECKS = (
    (Stage.ROWS, _rows),
    (Stage.MODE, _mode),
    (Stage.GRADIENT, _gradient),
    (Stage.GRADIENT, _variables),
    (Stage.ROWS, _use),
    (Stage.STEP, _step),
    (Stage.STATE, _state),
    (Stage.PRINTED, _printed),
)
"""Of updates on rows of the data: the checks of each stage, one after another."""
