"""What an audit concludes from its log: stage by stage, the first one that differs first."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby

import keras
import numpy as np

from wholestep import tree
from wholestep.audit.clips import otherwise
from wholestep.audit.ends import Ended, ends
from wholestep.audit.evidence import Evidence, Meant
from wholestep.audit.found import DIFFERS, Found, Likely
from wholestep.audit.gradients import gradients
from wholestep.audit.handing import frozen, left_out
from wholestep.audit.inputs import altered, beside
from wholestep.audit.keeping import all_same
from wholestep.audit.log import Applied, Called, Log
from wholestep.audit.meaning import LossObjective
from wholestep.audit.modes import Modes, evaluations, second_passes, state
from wholestep.audit.on_replicas import on_replicas
from wholestep.audit.order import FEW_PASSES, classes, order
from wholestep.audit.printed import printed
from wholestep.audit.readings import read
from wholestep.audit.replay import Replay
from wholestep.audit.steps import INSIDE, Schedule, accumulated_twice, apply, away, between, idle, rates, repeated
from wholestep.audit.supposing import NoLoss, apart, constant, misfits
from wholestep.audit.trainable import as_then
from wholestep.audit.void import without_void
from wholestep.audit.windows import Rows, Update, Windows, windows
from wholestep.model import Objective
from wholestep.tree import Tree

CARRIED, DROPPED = "window carried over the epoch", "last window dropped"
LEAST = 3  # updates after the last change of what is trainable
_LONGEST = 200  # letters of an error in a report
_JUDGED = "judged is what comes after the last change."


@dataclass
class Verdict:
    """What was concluded.

    Attributes:
        causes: what is wrong, in the order of the stages.
        notes: what is no cause, or may be meant.
        unseen: what could not be looked at.
        looked_at: what was, in words.
        has_loss: whether it is known, or can be supposed, which loss is meant.
        unjudged: why no gradient was judged, in words; "" if some were.
        seen: the updates and passes; None before they were looked for.
        evidence: the updates whose gradients could be computed again.
    """

    causes: list[Found] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    looked_at: str = ""
    has_seen: bool = False
    has_loss: bool = True
    unjudged: str = ""
    seen: Windows | None = None
    evidence: list[Evidence] = field(default_factory=list)

    def add(self, result: tuple[list[Found], list[str]]) -> None:
        """Take what a stage concludes."""
        self.causes += result[0]
        self.notes += result[1]

    def look(self, name: str, check: Callable[[], tuple[list[Found], list[str]]]) -> tuple[list[Found], list[str]]:
        """Return what a side check concludes; one that fails is not looked at, in one line."""
        try:
            return check()
        except Exception as error:  # what the loop does is not known beforehand
            what = " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST]
            self.unseen.append(f"{name}: {what}")
            return [], []

    @property
    def judged(self) -> list[str]:
        """The stages that were judged."""
        if not self.has_seen or self.seen is None:
            return []
        stages = ["rows"] * (FEW_PASSES not in self.notes) + ["mode"] + ["gradient"] * (not self.unjudged)
        is_own = self.seen.is_by_hand and not self.seen.is_rated
        return [*stages, *["step"] * (not is_own), "state"]


@dataclass
class Case:
    """All that a verdict is made from.

    Args:
        data: (x, y, sample_weight) as they were when the loop began.
        schedule: the learning rate that is meant, if it is known.
        before: the model's weights when the loop began.
        optimizer: the one that was meant, if it is known.
        is_told: whether the user said that it is.
        supposed: what the loss is called, if nobody said which one is meant.
        is_late: whether the log begins where more variables were set to be trained.
        ended: what the model has after the loop; None if it was ended before its time, or is not known.
        is_found: whether the data are what an audit has found among a script's names: it may hold out some of them.
        compiled: the optimizer whose schedule it is, by its id, if nobody said that it is the one that was meant.
    """

    model: keras.Model
    data: tuple[Tree, Tree, Tree]
    objective: Objective
    schedule: Schedule | None
    log: Log
    before: list[np.ndarray]
    printed: list[float] = field(default_factory=list)
    compiled: int | None = None
    optimizer: keras.optimizers.Optimizer | None = None
    is_told: bool = False
    supposed: str = ""
    is_found: bool = False
    ended: Ended | None = None
    is_late: bool = False

    def judge(self) -> Verdict:
        """Return the verdict, with the layers set to be trained that were so while the loop ran."""
        num = next((len(each.params) for each in reversed(self.log.called) if each.is_whole), None)
        is_other = num is not None and num != len(self.model.trainable_variables)
        with as_then(self.model, self.log.flags.get(num or 0, []) if is_other else []):
            return self._judge()

    def _judge(self) -> Verdict:
        if self.compiled is not None and any(step.optimizer != self.compiled for step in self.log.applied):
            self.schedule = None  # the compiled optimizer's, which is not the loop's
        self._begin_late()
        has_loss, rows = not isinstance(self.objective, NoLoss), Rows(self.data[0])
        verdict = Verdict(unseen=list(self.log.unseen), has_loss=has_loss)
        verdict.seen = windows(self.log, rows)
        verdict.seen = replace(verdict.seen, updates=without_void(verdict.seen.updates))
        self._say_what_was_seen(verdict, verdict.seen)
        if self._trainable_changes():
            verdict.has_seen = False
            verdict.unseen.append("the updates: which variables are trainable changes inside of the loop")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Keras' about a loss that is a hypothesis, not the user's
            if verdict.has_seen:
                self._say_how_it_ran(verdict, verdict.seen)
                self._go_through_the_stages(verdict, verdict.seen, rows)
        return verdict

    def _begin_late(self) -> None:
        """Take the log from where the variables are trainable that are so in the end, if few updates go before."""
        num = [len(each.params) for each in self.log.called if each.is_whole]
        if len(list(groupby(num))) not in (2, 3) or num[-1] != len(self.model.trainable_variables):
            return
        events: list[Called | Applied] = [*self.log.called, *self.log.applied]
        late = self.log.since(max(e.order for e in events if e.is_whole and len(e.params) != num[-1]))
        if len(late.applied) >= LEAST:
            late.notes[f"Which variables are trainable changes inside of the loop; {_JUDGED}"] = None
            first = next(each for each in late.called if each.is_whole)
            self.log, self.before, self.printed, self.is_late = late, first.params, [], True

    def _trainable_changes(self) -> bool:
        called = {len(each.params) for each in self.log.called if each.is_whole}
        return len(called | {len(each.params) for each in self.log.applied if each.is_whole}) > 1

    def _go_through_the_stages(self, verdict: Verdict, seen: Windows, rows: Rows) -> None:
        replay, modes, twice = Replay(self.model, self.data), Modes(), repeated(seen.updates)
        for update in seen.updates:
            if update.is_known and update.number not in twice:
                modes.note(replay, update)
        is_scaled = bool(self.log.scaled)
        seen = read(Meant(replay, self.objective, modes, seen.place, is_scaled, self.optimizer), seen, rows, self.data)
        verdict.seen, verdict.notes = seen, [*verdict.notes, *_by_hand(seen)]
        optimizer = None if seen.is_by_hand else self.optimizer
        meant = Meant(replay, self.objective, modes, seen.place, is_scaled, optimizer)
        known = self._computable(verdict, seen, rows, twice)

        look = verdict.look
        rows_of = partial(order, seen, rows, self.log, classes(self.data[1]), is_found=self.is_found)
        verdict.add(look("the order of the rows", rows_of))
        self._judge_modes(verdict, modes)
        steps = [step for u in seen.updates for step in seen.idle.get(u.number, [u])]
        moved = look("what moves between updates", lambda: self._moved([_bare(u, seen) for u in steps]))
        like = self._like(verdict, known, modes, moved[0])
        self._judge_gradients(verdict, seen, meant, like)
        is_told = any(cause.stage == "gradient" for cause in verdict.causes)
        if not is_told and verdict.has_loss:  # so the loss got these outputs
            verdict.add(look("the outputs", lambda: ([], self._of_outputs(verdict))))
            verdict.add(look("variables without a gradient", lambda: self._left_out(replay, seen)))
        verdict.add(look("the optimizer steps", lambda: self._judge_steps(verdict, seen, steps)))
        verdict.add(moved)
        verdict.add(look("statistics and seeds", lambda: (state(replay, modes, like), [])))
        verdict.add(again := look("second forward passes", lambda: (second_passes(self.log, seen), [])))
        if not again[0]:
            verdict.add(look("evaluations", lambda: ([], evaluations(replay, self.log, seen))))
        if (ended := self.ended) is not None:
            causes, notes = look("the end", lambda: ends(self.model, self.before, ended, seen))
            verdict.add((causes, [] if any(moved) else notes))
        if self.printed:
            is_whole = len(verdict.evidence) + len(twice) == len(seen.updates) and not seen.rest
            verdict.add(look("the printed loss", lambda: printed(verdict.evidence, self.printed, is_whole)))

    def _of_outputs(self, verdict: Verdict) -> list[str]:
        outputs = [called.outputs[0] for called in self.log.called if len(called.outputs) == 1]
        is_of_loss = bool(verdict.evidence) and isinstance(self.objective, LossObjective)
        more = misfits(self.objective.given, outputs) if is_of_loss else []  # type: ignore[attr-defined]
        return [*constant(outputs), *more]

    def _say_how_it_ran(self, verdict: Verdict, seen: Windows) -> None:
        if seen.stale:
            told = "The gradients of several batches are taken at the same weights, and applied one after the other: "
            told += f"{len(seen.stale)} of {len(seen.updates)} updates are stale. Apply each before the next is taken."
            verdict.notes.append(Likely(told))
        verdict.notes += self.log.notes
        if seen.num_skipped:
            num = _many(seen.num_skipped, "optimizer step was", "optimizer steps were")
            verdict.notes.append(f"{num} skipped: the gradient was not finite at this loss scale.")
        if shapes := sorted({shape for shape, _ in self.log.targets if np.prod(shape) > 1}):
            verdict.notes.append(f"A gradient is taken of losses of shape {shapes[0]}: the engine adds them up.")

    def _judge_modes(self, verdict: Verdict, modes: Modes) -> None:
        verdict.causes += modes.causes()
        if modes.unlike:
            numbers = ", ".join(map(str, modes.unlike[:6]))
            told = f"the outputs of updates {numbers} are not those of the model in either mode: what comes after them"
            verdict.unseen.append(f"{told} (draws outside of Keras' seeds? code outside of the model?)")

    def _moved(self, steps: list[Update]) -> tuple[list[Found], list[str]]:
        """Return (causes, notes) of weights that moved by no optimizer step."""
        own = self.optimizer if steps and all(u.applied.optimizer == id(self.optimizer) for u in steps) else None
        return between(steps, getattr(own, "weight_decay", None))

    def _left_out(self, replay: Replay, seen: Windows) -> tuple[list[Found], list[str]]:
        """Return (causes, notes) of trainable variables that nothing moves, and of frozen ones that something does."""
        given = replay, self.objective, seen.updates, self.log.applied, self.before
        has_others = self.log.has_others or len({step.optimizer for step in self.log.applied}) > 1
        causes, notes = left_out(*given, is_thawed=self.is_late, has_others=has_others)
        moved, told = frozen(replay, self.objective, seen.updates, has_others)
        return [*causes, *moved], [*notes, *told]

    def _like(self, verdict: Verdict, known: list[Update], modes: Modes, moved: list[Found]) -> list[Update]:
        """Return the updates whose forward passes are the model's, and whose weights stay while they are summed up."""
        moving = {number for cause in moved if cause.name in INSIDE for number in cause.updates} | {*away(known)}
        if moving:
            verdict.unseen.append(f"the gradient of {_many(len(moving), 'update')}: the weights move inside the window")
        return [u for u in known if u.number not in modes.unlike and u.number not in moving]

    def _judge_gradients(self, verdict: Verdict, seen: Windows, meant: Meant, like: list[Update]) -> None:
        if not verdict.has_loss:
            verdict.unjudged = "the loss that is meant is not known"
        elif seen.is_by_hand and not seen.is_rated:
            verdict.unjudged = "the optimizer step is your own"
            told = "the weights do not move by a rate times the gradient that was meant (another gradient?"
            told = f"the gradients: {told} momentum? another optimizer?), and which it is cannot be told"
            verdict.unseen.append(told)
        else:
            self._compare_gradients(verdict, seen, meant, like)
        verdict.causes = [c for c in verdict.causes if c.name != CARRIED or _is_proven(c, verdict)]

    def _compare_gradients(self, verdict: Verdict, seen: Windows, meant: Meant, like: list[Update]) -> None:
        causes, notes, verdict.evidence = gradients(meant, like) if like else ([], [], [])
        if not (verdict.evidence or causes):
            verdict.unjudged = "no gradient of an update could be computed again"
        verdict.has_loss = bool(verdict.evidence or causes or not like)
        causes = on_replicas(causes, verdict.evidence)
        if self.supposed:
            causes, more = apart(causes, self.supposed, verdict.evidence)
            notes = [*notes, *more]
        verdict.add((causes, notes))
        if self.is_told and not causes and verdict.evidence and not seen.is_by_hand:
            clips = verdict.look("the optimizer's clips", lambda: (otherwise(verdict.evidence, self.optimizer), []))
            verdict.add(clips)

    def _judge_steps(self, verdict: Verdict, seen: Windows, steps: list[Update]) -> tuple[list[Found], list[str]]:
        if not seen.is_by_hand:
            causes, notes = apply(steps, self.schedule)
            twice = accumulated_twice(seen, self.log.applied)
            verdict.causes = [c for c in verdict.causes if not twice or c.name != CARRIED]
            return [*causes, *idle(seen), *twice], notes
        if seen.is_rated and self.schedule is not None:
            return rates(seen.updates, self.schedule, DIFFERS)
        return [], []

    def _say_what_was_seen(self, verdict: Verdict, seen: Windows) -> None:
        num = sum(piece.is_known for piece in seen.pieces)
        verdict.looked_at = f"{_many(len(seen.updates), 'update')} of {_many(num, 'batch', 'batches')} of the data"
        verdict.has_seen = bool(seen.updates) and num > 0
        if seen.updates and not seen.pieces:
            told = "the updates: no forward pass of this model was seen before them (are its layers called one by one?)"
            verdict.unseen.append(told)
            verdict.add(self._left_out(Replay(self.model, self.data), seen))
        elif seen.updates and not num:
            told = (
                "the updates: the model's inputs are no rows of `data`, bit for bit (changed on the way to the model?)"
            )
            told += "".join(verdict.look("the inputs", lambda: ([], [beside(Rows(self.data[0]), seen.pieces)]))[1])
            verdict.add(altered(Rows(self.data[0]), [np.asarray(y) for y in tree.leaves(self.data[1])], seen.pieces))
            verdict.unseen.append(told)
        elif seen.foreign:
            verdict.unseen.append(
                f"{_many(seen.foreign, 'forward pass', 'forward passes')} on other inputs than `data`"
            )
        if not seen.updates and not verdict.unseen:
            now = [np.asarray(keras.ops.convert_to_numpy(v)) for v in self.model.trainable_variables]
            has_moved = bool(self.before) and not all_same(self.before, now)
            how = (
                "the weights moved, but no optimizer step of Keras was seen. A `tf.function` that was traced before "
                "the audit cannot be opened: call the audit before its first step. Nor are updates seen that no "
                "forward pass of this model has begun"
            )
            verdict.unseen.append(how if has_moved else "any update: no optimizer step was made, and no weight moved")

    def _computable(self, verdict: Verdict, seen: Windows, rows: Rows, twice: list[int]) -> list[Update]:
        known = [u for u in seen.updates if u.is_known and u.number not in twice]
        clear = [u for u in known if u.number in seen.settled or not self._is_ambiguous(rows, u)]
        if len(clear) < len(known):
            told = "rows with equal inputs and different labels or weights"
            verdict.unseen.append(f"the gradient of {_many(len(known) - len(clear), 'update')}: {told}")
        if (late := sum(not u.applied.is_whole for u in seen.updates)) > 0:
            verdict.unseen.append(
                f"the numbers of {_many(late, 'update')}, mostly the last: the log keeps {self.log.room}"
            )
        bare = [u for u in seen.updates if not u.pieces and u.number not in twice]
        if bare:
            verdict.unseen.append(f"the gradient of {_many(len(bare), 'update')} without a forward pass that was seen")
        return clear

    def _is_ambiguous(self, rows: Rows, update: Update) -> bool:
        return rows.twins(update.rows) and not rows.agree(update.rows, self.data[1:])


def _is_proven(carried: Found, verdict: Verdict) -> bool:
    """Whether gradients that were judged are those of all the microbatches, be it with a fault that has a name."""
    told = [cause for cause in verdict.causes if cause.stage == "gradient"]
    if any(cause.name == DROPPED for cause in told):  # so nothing of it is carried over
        return False
    of_known = {number for cause in told if cause.is_known for number in cause.updates}
    own = [e for e in verdict.evidence if e.update.number in carried.updates]
    differs = own[0].meant.replay.tolerance.differs if own else 0.0
    return bool(own) and all(e.without <= differs or e.update.number in of_known for e in own)


def _bare(update: Update, seen: Windows) -> Update:
    """Return an update without its forward passes, if they were at weights of before: that is said by itself."""
    return replace(update, pieces=[]) if update.number in seen.stale else update


def _by_hand(seen: Windows) -> list[str]:
    """Return a note if no optimizer of Keras moves the weights, with the rate if it is known."""
    if not seen.is_by_hand:
        return []
    rates = [u.applied.learning_rate for u in seen.updates]
    least, most = min(rates), max(rates)
    same = f"{most:.4g} times the gradient in each"
    told = same if most - least <= DIFFERS * most else f"{rates[0]:.4g} times the gradient first, {rates[-1]:.4g} last"
    told = f", here {told}" if seen.is_rated else ""
    return [f"The weights are moved by no optimizer of Keras: an update is whatever moves them{told}."]


def _many(num: int, one: str, more: str = "") -> str:
    return f"{num} {one if num == 1 else more or one + 's'}"
