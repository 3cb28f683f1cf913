"""The verdict on a recorded loop: a table of stages, judged one after another."""

import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from stepcheck import tree
from stepcheck.faults import Error, Fault, Quantity, Stage
from stepcheck.port import ByPass, NoLoss, Port, quiet
from stepcheck.progress import NOW
from stepcheck.solve.changes import Schedule, otherwise
from stepcheck.solve.evidence import Evidence, Meant
from stepcheck.solve.modes import Modes, rare
from stepcheck.solve.optimizers import stated
from stepcheck.solve.outputs import are_in_turn
from stepcheck.solve.readings import read, without_void
from stepcheck.stages.facts import Facts, facts, written
from stepcheck.stages.gradients import Judged as OfGradients
from stepcheck.stages.gradients import gradients
from stepcheck.stages.moves import between
from stepcheck.stages.passes import mode, second_passes, state
from stepcheck.stages.printed import printed
from stepcheck.stages.rows import Use, across, altered, order
from stepcheck.stages.steps import of_steps, repeated
from stepcheck.stages.variables import left_out, lost_statistics
from stepcheck.trace.log import Applied, Called, Log, Values
from stepcheck.trace.measure import all_same, are_finite, classes
from stepcheck.trace.windows import Rows, Update, Windows, windows
from stepcheck.values import Finding, Line, Reason, Unjudged

LEAST = 3  # updates after the last change of what is trainable
_MOVED_INSIDE = {
    Fault.DECAY_BY_MICROBATCH,
    Fault.WEIGHTS_MOVED_INSIDE_A_WINDOW,
    Fault.REPLICAS_DRIFT_APART,
}
_CARRIED = frozenset({Fault.WINDOW_CARRIED_OVER})
IMPLIES = {  # faults of the same numbers
    Fault.ACCUMULATED_TWICE: _CARRIED,
    Fault.ROWS_NEVER_USED: _CARRIED,
    Fault.ROWS_TWICE_IN_A_PASS: _CARRIED,
}
Judged = Iterable[Finding | Unjudged]


@dataclass
class Verdict:
    """The findings of a loop, and the stages that were judged.

    Attributes:
        findings: the differences from the update that was meant, in the order of the
            stages.
        unjudged: the parts that were not judged, and why.
        failures: tracebacks of errors of our own, by the stage that has ended in one.
        seen: the updates; None before they were looked for.
        evidence: the updates whose gradients were computed again.
        facts: those of the loop, without a judgement; None without updates.
    """

    findings: list[Finding] = field(default_factory=list)
    unjudged: list[Unjudged] = field(default_factory=list)
    failures: dict[Stage, str] = field(default_factory=dict)
    seen: Windows | None = None
    evidence: list[Evidence] = field(default_factory=list)
    facts: Facts | None = None

    @property
    def has_seen(self) -> bool:
        """Whether at least one update on rows of the data was seen."""
        return (
            self.seen is not None and bool(self.seen.updates) and self.num_batches > 0
        )

    @property
    def num_batches(self) -> int:
        """The number of forward passes on rows of the data; those of all replicas are
        one.
        """
        pieces = self.seen.pieces if self.seen is not None else []
        return sum(piece.is_known and not piece.called.replica for piece in pieces)

    @property
    def judged(self) -> list[Stage]:
        """The stages that were judged, of one update at least."""
        num = len(self.seen.updates if self.seen is not None else ())
        whole = {each.stage for each in self.unjudged if each.is_of_all(num)}
        if not self.has_seen or None in whole:
            return []
        return [
            each
            for each in Stage
            if each not in {*whole, *self.failures, Stage.PRINTED}
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


class Check(NamedTuple):
    """One check of a stage.

    Attributes:
        run: yields its findings.
        is_of_updates: whether it needs updates on rows of the data.
    """

    stage: Stage
    run: Callable[["_Context"], Judged]
    is_of_updates: bool = True


class _Context:
    """All that the checks of one loop read; the verdict so far."""

    def __init__(self, case: Case):
        self.case, self.verdict = case, Verdict()
        if case.compiled is not None and any(
            step.optimizer != case.compiled for step in case.log.applied
        ):
            case.schedule = None  # the compiled optimizer's, which is not the loop's
        self.log, self.is_late = _late(case.log)
        self.before = case.before if not self.is_late else _first_params(self.log)
        self.replay = case.port(case.model, case.data, by_pass=case.by_pass)
        self.rows = Rows(case.data[0])
        seen = windows(self.log, self.rows, case.schedule)
        self.seen = self.verdict.seen = replace(
            seen, updates=without_void(seen.updates)
        )
        self.objective = self.replay.unmasked(case.objective, self.seen.pieces)
        self.verdict.unjudged += self.log.unjudged
        if self.is_late:
            num = len(case.log.applied) - len(self.log.applied)
            self.verdict.unjudged.append(Unjudged(Reason.THAWED, Stage.GRADIENT, num))

    @property
    def has_loss(self) -> bool:
        """Whether the loss that is meant is known."""
        return not isinstance(self.objective, NoLoss)

    @cached_property
    def modes(self) -> Modes:
        """The modes of the forward passes of all updates that can be computed again."""
        modes = Modes(rare(self.seen.updates, self.replay.most_shapes))
        for update in self.seen.updates:
            if modes.knows(update) and update.number not in self.twice:
                modes.note(self.replay, update)
        return modes

    @cached_property
    def is_in_turn(self) -> bool:
        """Whether updates apply the losses of several outputs one after another."""
        return are_in_turn(self.seen.updates)

    @cached_property
    def twice(self) -> list[int]:
        """The updates that apply the gradient of the update before once more."""
        return repeated(self.seen.updates)

    @cached_property
    def meant(self) -> Meant:
        """The update that was meant."""
        own = None if self.seen.is_by_hand else self.case.optimizer
        return Meant(
            self.replay,
            self.objective,
            self.modes,
            self.seen.place,
            self.log.scaled,
            own,
        )

    def read(self) -> None:
        """Choose the open facts of the log so that they make the gradients."""
        case = self.case
        meant = Meant(
            self.replay,
            self.objective,
            self.modes,
            self.seen.place,
            self.log.scaled,
            case.optimizer,
        )
        self.seen = self.verdict.seen = read(
            meant, self.seen, self.rows, case.data, case.schedule
        )

    @cached_property
    def steps(self) -> list[Update]:
        """The optimizer steps; those of zeros apart, and stale ones without a forward
        pass of their own.
        """
        seen = self.seen
        steps = [
            step
            for update in seen.updates
            for step in seen.idle.get(update.number, [update])
        ]
        return [
            replace(step, pieces=[]) if step.number in seen.stale else step
            for step in steps
        ]

    @cached_property
    def moved(self) -> list[Finding]:
        """The findings on what moves between updates."""
        optimizer = self.case.optimizer
        is_own = bool(self.steps) and all(
            step.applied.optimizer == id(optimizer) for step in self.steps
        )
        decay = self.replay.decay(optimizer) if is_own else None
        moves = self.replay.moves_weights
        found = [*between(self.steps, decay, self.replay.names, moves_weights=moves)]
        return [each for each in found if not (moves and each.fault in _MOVED_INSIDE)]

    @cached_property
    def known(self) -> list[Update]:
        """The updates whose gradients can be computed again."""
        moving = {
            n
            for each in self.moved
            if each.fault in _MOVED_INSIDE
            for n in each.where.updates
        }
        known = [
            u
            for u in self.seen.updates
            if self.modes.knows(u) and u.number not in self.twice
        ]
        clear = self.seen.settled | {u.number for u in known if self._is_clear(u)}
        loss = getattr(self.objective, "loss", None)
        coupled = {
            u.number
            for u in known
            if getattr(loss, "is_coupled", False) and len(u.pieces) > 1
        }
        left = {
            Reason.COUPLED: len(coupled),
            Reason.EQUAL_ROWS: sum(u.number not in clear for u in known),
            Reason.NOT_KEPT: sum(not u.applied.is_whole for u in self.seen.updates),
            Reason.NO_FORWARD_PASS: sum(
                not u.pieces for u in self.seen.updates if u.number not in self.twice
            ),
            Reason.RARE_SHAPES: len(self.modes.left),
            Reason.MOVING: len(moving),
        }
        found = [
            Unjudged(reason, Stage.GRADIENT, num) for reason, num in left.items() if num
        ]
        self.verdict.unjudged += found
        return [u for u in known if u.number in clear - coupled - moving]

    def _is_clear(self, update: Update) -> bool:
        return not self.rows.twins(update.rows) or self.rows.agree(
            update.rows, self.case.data[1:]
        )


def _judged(case: Case) -> Verdict:
    context = _Context(case)
    verdict = context.verdict
    for check in CHECKS:
        if check.is_of_updates and not _has_updates(context):
            continue
        NOW.stage = check.stage
        try:
            found = [*check.run(context)]
        except Exception:  # the loop may do anything: what was found so far is kept
            verdict.failures[check.stage] = traceback.format_exc()
            continue
        findings = [each for each in found if isinstance(each, Finding)]
        verdict.unjudged += [each for each in found if isinstance(each, Unjudged)]
        verdict.findings += findings
    implied = {
        fault for each in verdict.findings for fault in IMPLIES.get(each.fault, ())
    }
    left = [each for each in verdict.findings if each.fault not in implied]
    left = [_at_line(each, case.log.lines.get(each.fault)) for each in left]
    if verdict.seen is not None and verdict.seen.updates:
        verdict.facts = _facts(context)
    stages = [*Stage]
    verdict.findings = sorted(left, key=lambda finding: stages.index(finding.stage))
    return verdict


def _at_line(finding: Finding, line: Line | None) -> Finding:
    return (
        finding
        if line is None
        else replace(finding, where=replace(finding.where, line=line))
    )


def _has_updates(context: _Context) -> bool:
    return context.verdict.has_seen and all(
        each.stage or each.updates for each in context.verdict.unjudged
    )


def _late(log: Log) -> tuple[Log, bool]:
    """Return the last part of the log if the trainable variables change after a few
    updates, and whether they do.
    """
    trained = [each.trained for each in log.called if each.is_whole]
    if len(list(groupby(trained))) not in (2, 3):
        return log, False
    late = log.since(
        max(each.order for each in _events(log) if each.trained != trained[-1])
    )
    return (late, True) if len(late.applied) >= LEAST else (log, False)


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
    replay.settle(context.objective, seen.pieces)
    if not seen.updates:
        now = replay.values()
        has_moved = (
            bool(context.before)
            and now is not None
            and not all_same(context.before, now.params)
        )
        yield Unjudged(Reason.OUTLINED if has_moved else Reason.NO_UPDATE)
    elif not seen.pieces:
        yield Unjudged(Reason.NO_FORWARD_PASS)
    elif not context.verdict.num_batches:
        yield Unjudged(Reason.OTHER_INPUTS)
        labels = [np.asarray(leaf) for leaf in tree.leaves(context.case.data[1])]
        yield from altered(context.rows, labels, seen.pieces)
    elif seen.foreign:
        yield Unjudged(Reason.OTHER_INPUTS, Stage.ROWS, seen.foreign)
    if seen.is_by_hand and (
        lost := sum(not are_finite(piece.called.params) for piece in seen.pieces)
    ):
        yield Unjudged(Reason.NOT_FINITE, Stage.GRADIENT, lost)
    trained = {each.trained for each in _events(context.log) if each.trained}
    if len(trained) > 1:
        yield Unjudged(Reason.THAWED)
        return
    last = next((each for each in reversed(context.log.called) if each.is_whole), None)
    if last is not None and not (
        trained <= {replay.trained} and _has_all(replay, last)
    ):
        yield Unjudged(Reason.REMADE)


def _has_all(replay: Port, last: Called) -> bool:
    return len(last.buffers) == len(replay.names_of_others)


def _rows(context: _Context) -> Judged:
    context.read()
    use = context.case.use
    if context.is_in_turn:
        yield Unjudged(Reason.IN_TURN, Stage.ROWS)
        return
    if context.case.is_given:
        yield Unjudged(Reason.DATA_AS_GIVEN, Stage.ROWS)
    elif context.seen.in_training[0]:
        yield Unjudged(Reason.NO_GRADIENT, Stage.ROWS)
    elif use is not None and context.is_late:
        yield Unjudged(Reason.THAWED, Stage.ROWS)
    elif use is not None:
        yield from order(use, context.seen, context.rows)


def _mode(context: _Context) -> Judged:
    modes = context.modes
    yield from mode(modes)
    yield from (
        Unjudged(Reason.UNLIKE_OUTPUTS, stage)
        for stage in modes.unlooked(context.seen.updates)
    )
    if modes.unlike:
        yield Unjudged(Reason.UNLIKE_OUTPUTS, Stage.GRADIENT, len(modes.unlike))


def _gradient(context: _Context) -> Judged:
    seen, verdict = context.seen, context.verdict
    if context.is_in_turn:
        yield Unjudged(Reason.IN_TURN, Stage.GRADIENT)
        return
    if not context.has_loss:
        yield Unjudged(Reason.NO_LOSS, Stage.GRADIENT)
        return
    if seen.is_by_hand and not seen.is_rated and not seen.is_of_loss:
        yield Unjudged(Reason.OWN_STEP, Stage.GRADIENT)
        return
    known = context.known
    judged = gradients(context.meant, known) if known else OfGradients([], [], [])
    if context.replay.moves_weights and not all(
        each.change.is_known for each in judged.findings
    ):
        yield Unjudged(
            Reason.MOVING, Stage.GRADIENT
        )  # TensorFlow's gradient is by the weights as they were moved
        return
    verdict.evidence = judged.evidence
    if not judged.evidence and not judged.findings:
        yield Unjudged(Reason.NO_GRADIENT, Stage.GRADIENT)
    skipped = [each for each in judged.findings if _skips(each, seen.updates)]
    for each in skipped:
        yield Unjudged(Reason.SKIPPED, Stage.GRADIENT, len(each.where.updates))
    yield from (each for each in judged.findings if each not in skipped)
    yield from judged.unjudged
    if context.case.stated is not None and not judged.findings and judged.evidence:
        yield from otherwise(judged.evidence, context.case.stated)


def _skips(finding: Finding, updates: list[Update]) -> bool:
    """Whether passes before an update's one batch are left out, as where steps are
    skipped: most updates have one.
    """
    counts = [
        len(u.pieces) / len({p.called.replica for p in u.pieces})
        for u in updates
        if u.pieces
    ]
    return finding.fault is Fault.PASSES_LEFT_OUT and float(np.median(counts)) == 1


def _window(context: _Context) -> Judged:
    verdict = context.verdict
    if context.case.use is not None and Stage.ROWS in verdict.judged:
        yield from across(context.seen, context.rows, _with_all_rows(verdict))


def _with_all_rows(verdict: Verdict) -> set[int]:
    """Return the updates whose gradients have the rows of all their forward passes,
    perhaps with a known error.
    """
    differs = (
        verdict.evidence[0].meant.replay.tolerance.differs if verdict.evidence else 0.0
    )
    right = {
        e.update.number for e in verdict.evidence if e.is_along or e.without <= differs
    }
    found = verdict.of(Stage.GRADIENT)
    left = {n for each in found if _leaves_out(each) for n in each.where.updates}
    return (right | {n for each in found for n in each.where.updates}) - left


def _leaves_out(finding: Finding) -> bool:
    is_left_out = (
        finding.quantity is Quantity.ROW_GRADIENTS and finding.error is Error.LEFT_OUT
    )
    return is_left_out or not finding.change.is_known


def _variables(context: _Context) -> Judged:
    if context.verdict.of(Stage.GRADIENT) or not context.has_loss:
        return
    log, updates = context.log, context.seen.updates
    given = context.replay, context.objective, updates, log.applied, context.before
    yield from left_out(*given, is_thawed=context.is_late)


def _step(context: _Context) -> Judged:
    case, seen = context.case, context.seen
    if seen.is_by_hand and not seen.is_rated:
        yield Unjudged(Reason.OWN_STEP, Stage.STEP)
    schedule = case.schedule or stated(case.stated, seen)
    given = seen, context.steps, context.log, schedule
    yield from of_steps(context.replay, *given, case.stated)


def _state(context: _Context) -> Judged:
    yield from context.moved
    if not context.moved and not context.replay.moves_weights:
        yield from _written(context)
    yield from state(context.replay, context.modes, context.known)
    yield from second_passes(context.log, context.seen)
    if context.case.ended is not None and context.log.is_stateless:
        yield from lost_statistics(context.replay, context.case.ended, context.seen)


def _written(context: _Context) -> Judged:
    """Yield that the state is not judged, if weights were written outside of the
    optimizer steps.
    """
    if written(context.steps):
        yield Unjudged(Reason.WRITTEN, Stage.STATE)


def _facts(context: _Context) -> Facts:
    case, modes = (
        context.case,
        vars(context).get("modes", Modes()),
    )  # if passes could run again
    by_row = classes(case.data[1]) if case.by_pass is None else None
    return facts(context.replay, context.log, context.seen, context.rows, modes, by_row)


def _printed(context: _Context) -> Judged:
    case = context.case
    if case.printed and not context.is_late:
        yield from printed(
            context.verdict.evidence, case.printed, context.seen, len(context.twice)
        )


CHECKS = (
    Check(Stage.ROWS, _seen, is_of_updates=False),
    Check(Stage.ROWS, _rows),
    Check(Stage.MODE, _mode),
    Check(Stage.GRADIENT, _gradient),
    Check(Stage.GRADIENT, _variables),
    Check(Stage.ROWS, _window),
    Check(Stage.STEP, _step),
    Check(Stage.STATE, _state),
    Check(Stage.PRINTED, _printed),
)
