"""What an audit concludes from its log: stage by stage, the first one that differs first."""

from dataclasses import dataclass, field

import keras
import numpy as np

from wholestep.audit.evidence import Evidence, Meant
from wholestep.audit.found import Found
from wholestep.audit.gradients import gradients
from wholestep.audit.log import Log, all_same
from wholestep.audit.modes import Modes, state
from wholestep.audit.order import order
from wholestep.audit.printed import printed
from wholestep.audit.replay import Replay
from wholestep.audit.steps import INSIDE, Schedule, apply, between, repeated
from wholestep.audit.windows import Rows, Update, Windows, windows
from wholestep.model.objective import Objective
from wholestep.tree import Tree


@dataclass
class Verdict:
    """What was concluded.

    Attributes:
        causes: what is wrong, in the order of the stages.
        notes: what is no cause, or may be meant.
        unseen: what could not be looked at.
        looked_at: what was, in words.
        seen: the updates and passes; None before they were looked for.
        evidence: the updates whose gradients could be computed again.
    """

    causes: list[Found] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    looked_at: str = ""
    has_seen: bool = False
    seen: Windows | None = None
    evidence: list[Evidence] = field(default_factory=list)

    def add(self, result: tuple[list[Found], list[str]]) -> None:
        """Take what a stage concludes."""
        self.causes += result[0]
        self.notes += result[1]


@dataclass
class Case:
    """All that a verdict is made from.

    Args:
        data: (x, y, sample_weight) as they were when the loop began.
        schedule: the learning rate that is meant, if it is known.
        before: the model's weights when the loop began.
        optimizer: the one that was meant, if it is known.
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

    def judge(self) -> Verdict:
        """Return the verdict."""
        if self.compiled is not None and any(step.optimizer != self.compiled for step in self.log.applied):
            self.schedule = None  # the compiled optimizer's, which is not the loop's
        verdict = Verdict(unseen=list(self.log.unseen))
        rows = Rows(self.data[0])
        verdict.seen = seen = windows(self.log, rows)
        self._say_what_was_seen(verdict, seen)
        if not verdict.has_seen:
            return verdict
        verdict.notes += self.log.notes
        if seen.num_skipped:
            num = _many(seen.num_skipped, "optimizer step was", "optimizer steps were")
            verdict.notes.append(f"{num} skipped: the gradient was not finite at this loss scale.")
        if shapes := sorted({shape for shape, _ in self.log.targets if np.prod(shape) > 1}):
            verdict.notes.append(f"A gradient is taken of losses of shape {shapes[0]}: the engine adds them up.")
        verdict.add(order(seen, rows, self.log.has_evaluated))
        replay, modes = Replay(self.model, self.data), Modes()
        twice = repeated(seen.updates)
        known = self._computable(verdict, seen, rows, twice)
        for update in known:
            modes.note(replay, update)
        verdict.causes += modes.causes()
        if modes.unlike:
            numbers = ", ".join(map(str, modes.unlike[:6]))
            told = f"the outputs of updates {numbers} are not those of the model in either mode: what comes after them"
            verdict.unseen.append(f"{told} (draws outside of Keras' seeds? code outside of the model?)")
        moved = between(seen.updates)
        moving = {number for cause in moved[0] if cause.name in INSIDE for number in cause.updates}
        if moving:
            verdict.unseen.append(f"the gradient of {_many(len(moving), 'update')}: the weights move inside the window")
        like = [u for u in known if u.number not in modes.unlike and u.number not in moving]
        if like:
            meant = Meant(replay, self.objective, modes, seen.place, bool(self.log.scaled), self.optimizer)
            causes, notes, verdict.evidence = gradients(meant, like)
            verdict.add((causes, notes))
            if any(cause.name == "last window dropped" for cause in causes):  # so nothing of it is carried over
                verdict.causes = [cause for cause in verdict.causes if cause.name != "window carried over the epoch"]
        verdict.add(apply(seen.updates, self.schedule))
        verdict.add(moved)
        verdict.causes += state(replay, modes, like)
        if self.printed:
            is_whole = len(verdict.evidence) + len(twice) == len(seen.updates) and not seen.rest
            verdict.add(printed(verdict.evidence, self.printed, is_whole))
        return verdict

    def _say_what_was_seen(self, verdict: Verdict, seen: Windows) -> None:
        num = sum(piece.is_known for piece in seen.pieces)
        verdict.looked_at = f"{_many(len(seen.updates), 'update')} of {_many(num, 'batch', 'batches')} of the data"
        verdict.has_seen = bool(seen.updates) and num > 0
        if seen.updates and not num:
            told = (
                "the updates: the model's inputs are no rows of `data`, bit for bit (changed on the way to the model?)"
            )
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
                "the audit cannot be opened: call the audit before its first step. Steps without an optimizer of "
                "Keras are not seen yet"
            )
            verdict.unseen.append(how if has_moved else "any update: no optimizer step was made, and no weight moved")

    def _computable(self, verdict: Verdict, seen: Windows, rows: Rows, twice: list[int]) -> list[Update]:
        known = [u for u in seen.updates if u.is_known and u.number not in twice]
        clear = [u for u in known if not self._is_ambiguous(rows, u)]
        if len(clear) < len(known):
            told = "rows with equal inputs and different labels or weights"
            verdict.unseen.append(f"the gradient of {_many(len(known) - len(clear), 'update')}: {told}")
        if (late := sum(not u.applied.is_whole for u in seen.updates)) > 0:
            verdict.unseen.append(f"the numbers of the last {_many(late, 'update')}: the log keeps {self.log.room}")
        bare = [u for u in seen.updates if not u.pieces and u.number not in twice]
        if bare:
            verdict.unseen.append(f"the gradient of {_many(len(bare), 'update')} without a forward pass that was seen")
        return clear

    def _is_ambiguous(self, rows: Rows, update: Update) -> bool:
        return rows.twins(update.rows) and not rows.agree(update.rows, self.data[1:])


def _many(num: int, one: str, more: str = "") -> str:
    return f"{num} {one if num == 1 else more or one + 's'}"
