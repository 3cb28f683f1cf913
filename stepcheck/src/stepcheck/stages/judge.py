"""The verdict of an audit on its log, stage by stage; the first stage that differs comes first."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np

from stepcheck import tree
from stepcheck.port import ByPass, NoLoss, Observed, OneLoss, Port, quiet
from stepcheck.report.bridge import found_of, unjudged_of
from stepcheck.report.found import Finding, Found, Likely, many, on_one_line, some
from stepcheck.report.progress import NOW
from stepcheck.solve.changes import Schedule, otherwise
from stepcheck.solve.evidence import Evidence, Meant
from stepcheck.stages.gradients import Judged, gradients
from stepcheck.stages.modes import Modes, across, carried, constant, evaluations, follows, rare, second_passes, state
from stepcheck.stages.optimizers import AT_FIRST, OWN_STEP, UNMOVED, by_hand
from stepcheck.stages.printed import printed
from stepcheck.stages.stated import stated
from stepcheck.stages.steps import INSIDE, anew_in_each_pass, between, of_steps, repeated
from stepcheck.stages.unsolved import (
    TURNS,
    beside_labels,
    elsewhere,
    mixed,
    noted,
    of_a_number,
    skipped,
    unused,
    without_update,
)
from stepcheck.stages.variables import ends, frozen, left_out, unconstrained, unmoved
from stepcheck.trace.log import Applied, Called, Log, Values
from stepcheck.trace.measure import all_same, classes
from stepcheck.trace.readings import choose, read, stays, without_void
from stepcheck.trace.rows import EQUAL_ROWS, FEW_PASSES, Origin, altered, beside, order
from stepcheck.trace.windows import Rows, Update, Windows, windows

_STAGES = "rows", "mode", "gradient", "backward pass", "step", "state"
_STAGE_OF = {"the order of the rows": "rows", "the optimizer steps": "step", "statistics and seeds": "state"}


@dataclass
class Verdict:
    """The findings of an audit.

    Attributes:
        causes: the faults, in the order of the stages.
        notes: observations that are no fault, or may be intended.
        unseen: everything that could not be checked.
        looked_at: the updates that were seen, in words.
        has_loss: whether the loss that is meant is known, or can be supposed.
        unjudged: why no gradient was judged, in words; "" if some were.
        has_backward: whether the gradients follow from the loop's loss, of unknown form.
        seen: the updates and passes; None before they were looked for.
        evidence: the updates whose gradients could be computed again.
        failed: the error in which a stage has ended.
        broken: the stages whose checks have ended in an error, or had nothing to look at.
    """

    causes: list[Found] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    looked_at: str = ""
    has_seen: bool = False
    has_loss: bool = True
    unjudged: str = ""
    has_backward: bool = False
    seen: Windows | None = None
    evidence: list[Evidence] = field(default_factory=list)
    failed: Exception | None = None
    broken: set[str] = field(default_factory=set)

    def add(self, findings: Iterable[Finding]) -> list[Finding]:
        """Add the findings of a stage, and return them."""
        findings = list(findings)
        self.causes += [each for each in findings if isinstance(each, Found)]
        self.notes += [each for each in findings if isinstance(each, str)]
        return findings

    def look(self, name: str, check: Callable[..., Iterable[Finding]], *arguments: Any) -> list[Finding]:
        """Return the findings of a check; a check that fails is reported as not done, in one line."""
        NOW.stage = name
        try:
            return list(check(*arguments))
        except Exception as error:  # the loop may do anything
            self._note_failure(name, error)
            return []

    def attempt(self, name: str, stage: Callable[..., Any], *arguments: Any) -> None:
        """Go through a stage; if it fails, keep its error: no gradient was judged."""
        NOW.stage = name
        try:
            stage(*arguments)
        except Exception as error:
            self._note_failure(name, error)
            self.failed = error
            self.unjudged = self.unjudged or "no gradient of an update could be computed again"

    def _note_failure(self, name: str, error: Exception) -> None:
        self.unseen.append(f"{name}: {on_one_line(error)}")
        self.broken.add(_STAGE_OF.get(name, name))

    def check(self, name: str, check: Callable[..., Iterable[Finding]], *arguments: Any) -> list[Finding]:
        """Add the findings of a check, and return them."""
        return self.add(self.look(name, check, *arguments))

    def make_note(self, name: str, note: str) -> None:
        """Replace the causes of a name by a note."""
        others = [cause for cause in self.causes if cause.name != name]
        self.notes += [note] * (len(others) < len(self.causes))
        self.causes = others

    @property
    def unused(self) -> str:
        """The forward passes in training mode that gave no gradient, in words; "" for none."""
        return unused(self.seen) if self.has_seen and self.seen is not None else ""

    @property
    def judged(self) -> list[str]:
        """The stages that were judged."""
        if not self.has_seen or self.seen is None or "the stages after it" in self.broken:
            return []
        has_rows = {FEW_PASSES, EQUAL_ROWS}.isdisjoint(self.notes) and not self.unused
        is_own = self.seen.is_by_hand
        known = has_rows, True, not self.unjudged, self.has_backward, self.seen.is_rated or not is_own, True
        return [name for name, is_known in zip(_STAGES, known, strict=True) if is_known and name not in self.broken]

    @property
    def of_gradient(self) -> list[Found]:
        """The causes in the gradient."""
        return [cause for cause in self.causes if cause.stage == "gradient"]


CARRIED, DROPPED, ALONE = "window carried over the epoch", "last window dropped", "output left out"
LEAST = 3  # updates after the last change of what is trainable
_CHANGES = "Which variables are trainable changes inside of the loop; judged is what comes after the last change."
_THAWED = "which variables are trainable changes inside of the loop"
_REMADE = "the model has other variables than when the updates were made"
_OF_BATCHES = "the gradient of {}: each has several batches, and the loss of one is not the mean of its rows' losses"
_STILL = "any update: no optimizer step was made, and no weight moved"
_NO_PASS = "the updates: no forward pass of this model was seen before them (layers called one by one? `tf.gradients`?)"
_OTHER = "the gradient: it is not that of a loss of the outputs and of the model's losses (a penalty or clip by hand?)"
# Errors of a supposed loss that are a matter of scale or padding: the author may have meant them.
_MAY_BE_MEANT = (
    *("never divided", "divided by the full batch", "divided twice", "mean of row means", "divided by the rows"),
    *("divided by the weights", "padding counted", "padded places counted"),
)
# Errors of the gradient that show without the form of the loss.
_WITHOUT_A_FORM = (
    *("stale gradients", "gradients swapped", "ascent", "only the last microbatch", "only the first microbatch"),
    *("first microbatch lost", "last microbatch lost", "not reset", "momentum by hand", "clip before unscale"),
    *("penalty forgotten", "penalty added twice", "penalty once per microbatch", "penalty once per replica"),
)
# The same for several outputs; an output that is left out is a fault if the script calls its loss.
_OF_HEADS = "loss weights ignored", "other loss weights"


@dataclass
class Case:
    """The input of a verdict.

    Args:
        data: (x, y, sample_weight) as they were when the loop began.
        schedule: the learning rate that is meant, if it is known.
        is_told: whether the user passed it.
        is_called: whether the script calls this loss, or these losses.
        is_late: whether the log begins where more variables were set to be trained.
        has_weights: whether the supposed losses have the loss weights that the script holds.
        ended: the model's values after the loop; None if it was ended early, or they are not known.
        by_pass: the labels by pass, as of `Replay`; None if they belong to the rows.
        origin: of the data: stated, found among a script's names, or taken as the model was given them.
        is_heard: whether the loss is recorded where the loop calls it; the loop may multiply it by a number.
        compiled: the id of the compiled optimizer, if the schedule is taken from it by default.
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
    is_told: bool = False
    supposed: str = ""
    is_called: bool = False
    origin: Origin = "stated"
    is_heard: bool = False
    ended: Values | None = None
    is_late: bool = False
    has_weights: bool = False
    by_pass: ByPass | None = None

    def judge(self) -> Verdict:
        """Return the verdict, with the layers set to be trained as they were while the loop ran."""
        with self.port.as_then(self.model, self.log), quiet():
            return self._judge()

    def _judge(self) -> Verdict:
        if self.compiled is not None and any(step.optimizer != self.compiled for step in self.log.applied):
            self.schedule = None  # the compiled optimizer's, which is not the loop's
        rows = Rows(self.data[0])
        is_observing = isinstance(self.objective, Observed)
        replay = self.port(self.model, self.data, is_observing=is_observing, by_pass=self.by_pass)
        self._begin_late()
        verdict = Verdict(unseen=list(self.log.unseen), has_loss=not isinstance(self.objective, NoLoss))
        seen = windows(self.log, rows, self.schedule)
        verdict.seen = seen = replace(seen, updates=without_void(seen.updates))
        self._say_what_was_seen(verdict, seen, replay, rows)
        self.objective = replay.unmasked(self.objective, seen.pieces)
        verdict.look("the rows of the loss", self._settle, replay, seen)
        if why := self._why_not_replayed(replay):
            verdict.has_seen, verdict.unjudged = False, why
            verdict.unseen.append(f"the updates: {why}")
        if verdict.has_seen:
            verdict.attempt("the stages after it", self._go_through_the_stages, verdict, seen, replay, rows)
        else:
            verdict.notes += [note for note in self.log.notes if isinstance(note, Likely)]
        verdict.causes = [self.port.said(replace(c, line=self.log.lines.get(c.name, c.line))) for c in verdict.causes]
        names = {cause.name for cause in verdict.causes}
        notes = [note for note in verdict.notes if not (isinstance(note, Likely) and names & {*note.names})]
        verdict.notes = [a for a in notes if not any(a != b and b.startswith(a) for b in notes)]
        return verdict

    def _settle(self, replay: Port, seen: Windows) -> list[Finding]:
        replay.settle(self.objective, seen.pieces)
        return []

    def _events(self) -> list[Called | Applied]:
        events: list[Called | Applied] = [*self.log.called, *self.log.applied]
        return [each for each in events if each.is_whole]

    def _begin_late(self) -> None:
        """Drop the first part of the log if the trainable variables change after a few updates."""
        trained = [each.trained for each in self.log.called if each.is_whole]
        if len(list(groupby(trained))) not in (2, 3):
            return
        late = self.log.since(max(each.order for each in self._events() if each.trained != trained[-1]))
        if len(late.applied) >= LEAST:
            late.notes[_CHANGES] = None
            first = next((each.params for each in late.called if each.is_whole), [])
            self.log, self.before, self.is_late = late, first, True

    def _why_not_replayed(self, replay: Port) -> str:
        """Return why the recorded values are not all of the model's present variables; "" if they are."""
        trained = {each.trained for each in self._events() if each.trained}
        if len(trained) > 1:
            return _THAWED
        last = next((each for each in reversed(self.log.called) if each.is_whole), None)
        num = 0 if last is None else len(replay.names_of_others)
        is_same = last is None or (trained <= {replay.trained} and len(last.buffers) == num)
        return "" if is_same else _REMADE

    def _go_through_the_stages(self, verdict: Verdict, seen: Windows, replay: Port, rows: Rows) -> None:
        verdict.notes += self._how_it_ran(seen)
        modes, twice, scaled = Modes(rare(seen.updates, replay.most_shapes)), repeated(seen.updates), self.log.scaled
        for update in seen.updates:
            if modes.knows(update) and update.number not in twice:
                modes.note(replay, update)
        verdict.broken |= modes.unlooked(seen.updates)
        meant = Meant(replay, self.objective, modes, seen.place, scaled, self.optimizer)
        verdict.seen = seen = read(meant, seen, rows, self.data, self.schedule)
        verdict.notes += by_hand(seen, replay.framework)
        verdict.check("the rates of the passes", anew_in_each_pass, seen)
        optimizer = None if seen.is_by_hand else self.optimizer
        meant = Meant(replay, self.objective, modes, seen.place, scaled, optimizer)
        known = self._computable(verdict, seen, rows, twice, modes)

        of_rows = partial(order, seen, rows, self.log, classes(self.data[1]), origin=self.origin)
        following = follows(replay, seen.pieces)
        if not any(following):  # else the rows come in the order of their sequences, in each pass
            verdict.check("the order of the rows", of_rows)
        if not verdict.check("the outputs of a batch", across, self._outputs):
            verdict.check("the rows of a batch", mixed, replay, seen.pieces)
        verdict.add(modes.findings())
        if modes.unlike:
            told = f"the outputs of updates {some(modes.unlike, 6)} are not those of the model in either mode: what "
            verdict.unseen.append(f"{told}comes after them ({replay.maybe_unlike})")
        steps = [step for u in seen.updates for step in seen.idle.get(u.number, [u])]
        bare = [replace(u, pieces=[]) if u.number in seen.stale else u for u in steps]
        is_own = bool(bare) and all(u.applied.optimizer == id(self.optimizer) for u in bare)
        decay = replay.decay(self.optimizer) if is_own else None
        of_all = partial(between, bare, decay, replay.names, moves_weights=replay.moves_weights)
        moved = verdict.look("what moves between updates", of_all)
        inside = [each for each in moved if isinstance(each, Found) and each.name in INSIDE]
        moving = {number for cause in inside for number in cause.updates}
        moved = [each for each in moved if not (replay.moves_weights and each in inside)]  # SpectralNormalization does
        if moving:
            verdict.unseen.append(f"the gradient of {many(len(moving), 'update')}: the weights move in the window")
        like = [u for u in known if u.number not in moving]
        verdict.attempt("the gradients", self._judge_gradients, verdict, seen, meant, like)
        if not verdict.of_gradient and verdict.has_loss:  # so the loss got these outputs
            verdict.check("the outputs", self._of_outputs, verdict)
            if verdict.evidence and isinstance(self.objective, OneLoss):
                verdict.check("inputs and labels", beside_labels, verdict.evidence)
            verdict.check("variables without a gradient", self._left_out, replay, seen)
        schedule = self.schedule or (stated(self.optimizer, seen) if self.is_told else None)
        verdict.check("the optimizer steps", of_steps, seen, steps, self.log, schedule, self.optimizer, self.is_told)
        verdict.check("the constraints", unconstrained, replay, seen.updates)
        if any(cause.name == "accumulated twice" for cause in verdict.causes):
            verdict.causes = [cause for cause in verdict.causes if cause.name != CARRIED]
        verdict.add(moved)
        verdict.check("statistics and seeds", state, replay, modes, like)
        verdict.check("recurrent states", carried, following)
        if not verdict.check("second forward passes", second_passes, self.log, seen):
            verdict.check("evaluations", evaluations, replay, self.log, seen)
        if self.ended is not None:
            ending = partial(ends, averages=bool(getattr(self.optimizer, "use_ema", False)))
            at_end = verdict.look("the end", ending, replay, self.before, self.ended, seen)
            verdict.add(each for each in at_end if isinstance(each, Found) or not moved)
        if self.printed and not self.is_late:
            verdict.check("the printed loss", printed, verdict.evidence, self.printed, seen, len(twice))

    @property
    def _outputs(self) -> list[np.ndarray]:
        return [called.outputs[0] for called in self.log.called if len(called.outputs) == 1]

    def _of_outputs(self, verdict: Verdict) -> Iterator[Finding]:
        yield from constant(self._outputs)
        yield from unmoved(verdict.evidence)
        if verdict.evidence and isinstance(self.objective, OneLoss):
            yield from verdict.evidence[0].meant.replay.misfits(self.objective, self._outputs)

    def _how_it_ran(self, seen: Windows) -> Iterator[str]:
        if seen.stale:
            told = f"{len(seen.stale)} of {len(seen.updates)} updates are stale. Apply each before the next is taken."
            yield Likely(f"The gradients of several batches are taken at the same weights, and applied in turn: {told}")
        yield from self.log.notes
        yield from without_update(seen, self.log)
        if shapes := [shape for shape, _ in self.log.targets if any(num != 1 for num in shape)]:
            yield f"A gradient is taken of losses of shape {min(shapes, key=str)}: the engine adds them up."

    def _left_out(self, replay: Port, seen: Windows) -> Iterator[Finding]:
        """Yield the findings on variables that nothing moves, and on frozen ones that something does."""
        given = replay, self.objective, seen.updates
        has_others = self.log.has_others or len({step.optimizer for step in self.log.applied}) > 1
        yield from left_out(*given, self.log.applied, self.before, is_thawed=self.is_late, has_others=has_others)
        yield from frozen(*given, has_others)

    def _judge_gradients(self, verdict: Verdict, seen: Windows, meant: Meant, like: list[Update]) -> None:
        if not verdict.has_loss:
            verdict.unjudged = "the loss that is meant is not known"
        elif seen.is_by_hand and not seen.is_rated:
            verdict.unjudged, verdict.unseen = "the optimizer step is your own", [*verdict.unseen, OWN_STEP]
        if verdict.has_loss and (not verdict.unjudged or seen.is_of_loss):
            if meant.replay.is_observing:
                choose(meant, like)
            judged = gradients(meant, like) if like else Judged([], [], [])
            findings: list[Finding] = [found_of(each, self.port) for each in judged.findings]
            verdict.evidence = judged.evidence
            verdict.unseen += map(unjudged_of, judged.unjudged)
            if meant.replay.is_observing:
                findings = self._of_observed(verdict, findings)
            is_listed = all(each.is_listed for each in findings if isinstance(each, Found))
            if seen.rule is not None and seen.rule.is_stated and not is_listed:
                verdict.seen, verdict.evidence = replace(seen, rule=None), []
                self._judge_gradients(verdict, verdict.seen, meant, like)
                return
            if not verdict.evidence and not any(isinstance(each, Found) for each in findings):
                verdict.unjudged = "no gradient of an update could be computed again"
                verdict.has_loss = not like
            findings = [self._meant(each, verdict.evidence) for each in findings]
            has_causes = any(isinstance(each, Found) for each in verdict.add(findings))
            if self.is_told and not has_causes and verdict.evidence:
                clips = [*otherwise(verdict.evidence, self.optimizer)]
                verdict.add(found_of(each, self.port) for each in clips)
        verdict.causes = [c for c in verdict.causes if c.name != CARRIED or _is_proven(c, verdict)]
        verdict.causes = [c for c in verdict.causes if c.name != ALONE or TURNS not in verdict.notes]

    def _of_observed(self, verdict: Verdict, findings: list[Finding]) -> list[Finding]:
        """Return the findings on the gradient of a loss of which nothing but its derivative by the outputs is known."""
        verdict.unjudged = "the form of the loss is not known"
        verdict.has_backward = bool(verdict.evidence) and all(e.is_along for e in verdict.evidence)
        if verdict.has_backward:
            return []
        known = [each for each in findings if isinstance(each, Found) and each.name in _WITHOUT_A_FORM]
        if not known:
            verdict.unseen.append(_OTHER)
        return [*known]

    def _meant(self, finding: Finding, evidence: list[Evidence]) -> Finding:
        """Return a finding on a loss that is supposed, or that the loop calls: a note if the fault may be intended."""
        if not self.supposed or not isinstance(finding, Found):
            return of_a_number(finding, evidence) if self.is_heard else finding
        of_heads = (*_OF_HEADS[self.has_weights :], *["output left out"] * (not self.is_called))
        is_along = (self.by_pass or not finding.is_listed) and all(e.is_along for e in evidence)
        if finding.name not in (*_MAY_BE_MEANT, *of_heads) and not is_along:
            return finding
        width = next((np.shape(called.outputs[0])[-1] for called in self.log.called if called.outputs), 1)
        return noted(finding, self.supposed, evidence, width, is_likely=finding.name == "padded places counted")

    def _say_what_was_seen(self, verdict: Verdict, seen: Windows, replay: Port, rows: Rows) -> None:
        num = sum(piece.is_known and not piece.called.replica for piece in seen.pieces)
        verdict.looked_at = f"{many(len(seen.updates), 'update')} of {many(num, 'batch', 'batches')} of the data"
        verdict.has_seen = bool(seen.updates) and num > 0
        if seen.updates and not seen.pieces:
            verdict.unseen.append(_NO_PASS)
            verdict.check("variables without a gradient", self._left_out, replay, seen)
        elif seen.updates and not num:
            told = "the updates: the model's inputs are no rows of `data`, bit for bit (changed on their way to it?)"
            near = verdict.look("the inputs", lambda: [beside(rows, seen.pieces)])
            verdict.check("the inputs", altered, rows, list(map(np.asarray, tree.leaves(self.data[1]))), seen.pieces)
            verdict.unseen.append("".join([told, *map(str, near)]))
        elif seen.foreign:
            verdict.unseen.append(f"{many(seen.foreign, 'forward pass', 'forward passes')} on other inputs than `data`")
            verdict.add(elsewhere(seen))
        if not verdict.add(skipped(seen)) and not seen.updates and not verdict.unseen:
            now = replay.values()
            has_moved = bool(self.before) and now is not None and not all_same(self.before, now.params)
            verdict.unseen.append(self.port.outlined if has_moved else _STILL)
            if stays(seen.pieces) and (has_moved or replay.framework == "Keras"):  # PyTorch's optimizers say why
                verdict.notes.append(AT_FIRST if has_moved else UNMOVED)

    def _computable(self, verdict: Verdict, seen: Windows, rows: Rows, twice: list[int], modes: Modes) -> list[Update]:
        known = [u for u in seen.updates if modes.knows(u) and u.number not in twice]
        clear = seen.settled | {u.number for u in known if not rows.twins(u.rows) or rows.agree(u.rows, self.data[1:])}
        alike, lost = sum(u.number not in clear for u in known), sum(not u.applied.is_whole for u in seen.updates)
        bare = sum(not u.pieces and u.number not in twice for u in seen.updates)
        is_coupled = bool(getattr(getattr(self.objective, "loss", None), "is_coupled", False))
        apart = {u.number for u in known if is_coupled and len(u.pieces) > 1}
        unseen = (
            (_OF_BATCHES, len(apart)),
            ("the gradient of {}: rows with equal inputs and different labels or weights", alike),
            (f"the gradient of {{}}, mostly the last: the numbers of {self.log.room} are kept, to spare memory", lost),
            ("the gradient of {} without a forward pass that was seen", bare),
            ("the gradient of {}, whose batches have shapes that few others have", len(modes.left)),
        )
        verdict.unseen += [told.format(many(num, "update")) for told, num in unseen if num]
        return [u for u in known if u.number in clear - apart]


def _is_proven(carried: Found, verdict: Verdict) -> bool:
    """Whether the judged gradients have all the microbatches, perhaps with a fault that has a name."""
    causes = verdict.of_gradient
    tried, named = ({n for c in some for n in c.updates} for some in (causes, [c for c in causes if c.is_known]))
    differs = verdict.evidence[0].meant.replay.tolerance.differs if verdict.evidence else 0.0
    have_all = named | {e.update.number for e in verdict.evidence if e.is_along or e.without <= differs}
    own, is_dropped = {*carried.updates}, any(cause.name == DROPPED for cause in causes)
    return not is_dropped and bool(own & have_all) and own & tried <= have_all
