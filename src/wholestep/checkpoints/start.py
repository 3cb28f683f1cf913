"""The start of a call: the newest checkpoint of its folder, a manually restored one, or the beginning."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras

from wholestep.checkpoints.common import CommonFolder
from wholestep.checkpoints.configuration import Settings, changes, differences, rate_variable, rates_of, value_of
from wholestep.checkpoints.data import check_goes_on, unlike
from wholestep.checkpoints.manifest import Manifest
from wholestep.checkpoints.place import Watch
from wholestep.checkpoints.reading import Found, newest
from wholestep.checkpoints.settings import Checkpoints
from wholestep.checkpoints.snapshot import RunFacts, Snapshot, put_together
from wholestep.data.batches import Batches
from wholestep.data.facts import content_of
from wholestep.errors import CheckpointError, SpecificationError, message
from wholestep.run import Run

Check = Callable[[Snapshot], None]
_WHAT = "looking for the checkpoint to resume from"


@dataclass
class Start:
    """The point from which a call of `fit` or `steps` starts or resumes.

    Args:
        check: raises a SpecificationError for a snapshot of another model.
        found: the checkpoint from which it resumes, if any.
        content: digests of the call's data.
        rates: the learning rates that the scripts of the run set, by the names of the optimizers.
    """

    asked: Checkpoints
    run: Run
    common: CommonFolder
    call: str
    batches: Batches
    model: keras.Model
    check: Check
    found: Found | None = None
    content: dict[str, str] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    _words_of_rates: list[str] = field(default_factory=list)
    _given_up: int = 0  # updates of this process that are in no checkpoint

    def find(self) -> int:
        """Restore the run to its starting point, and return the step of that checkpoint, 0 for a beginning."""
        self.content, self.rates = content_of(self.batches), rates_of(self.model)
        if self.asked.learning_rate is not None and "optimizer" not in self.rates:
            must = "learning_rate needs an optimizer with a constant learning rate."
            raise SpecificationError(message(must, "a schedule, or no optimizer", "change the schedule itself."))
        step = self._find()
        if (rate := self.asked.learning_rate) is not None and rate != self._given.get("optimizer"):
            variable = rate_variable(self.model.optimizer)
            assert variable is not None
            self._words_of_rates = [f"learning rate {rate}, as asked ({value_of(variable)} before)"]
            variable.assign(rate)
            self.rates["optimizer"] = rate
        return step

    def _find(self) -> int:
        run, together = self.run, self.common.together
        if not self.asked.resume:
            together.all(self._check_empty, _WHAT)
            return 0
        if run.restored is not None:  # by hand: it resumes from there
            together.all(self._check_restored, _WHAT)
            return run.number
        self.found = found = newest(self.common, self._check_found, sets_aside=True)
        if found is None:
            return 0
        self._given_up = run.number - found.snapshot.facts["number"]
        run.restore(found.snapshot)
        now = rates_of(self.model)
        here = {n: r for n, r in self.rates.items() if n != "optimizer" or self.asked.learning_rate is None}
        others = {n: r for n, r in here.items() if r not in (self._given.get(n, r), now[n])}
        self._words_of_rates = [_unused(name, rate, now[name]) for name, rate in others.items()]
        self.rates |= self._given
        return found.manifest.step

    def _check_empty(self) -> None:
        folder = self.common.folder
        if folder.steps() or folder.bad():
            must = "resume=False begins anew in an empty folder."
            attempt = "another folder; or leave resume out, to resume."
            raise CheckpointError(message(must, f"{len(folder.steps())} checkpoints in {folder.folder}", attempt))

    def _check_restored(self) -> None:
        steps, number = self.common.folder.steps(), self.run.number
        if steps and steps[0] != number:
            must = "A manually restored run must save to a folder without other checkpoints."
            received = f"update {number}, and step {steps[0]} in {self.asked.folder}"
            raise SpecificationError(message(must, received, "another folder; or do not restore by hand."))

    def _check_found(self, snapshot: Snapshot, manifest: Manifest) -> None:
        """Refuse other data, another optimizer and another model, before anything changes."""
        facts = RunFacts.of(snapshot)
        if facts.place.call:
            check_goes_on(facts.place, facts.data, self.call, self.batches)
            if differing := unlike(manifest.rest.get("content") or self.content, self.content):
                must = f"A run must resume from {self.asked.folder} on the same data."
                attempt = "pass the same data; or resume on changed data with trainer.restore(path)."
                raise SpecificationError(message(must, "; ".join(differing), attempt))
        kind = type(getattr(self.model, "optimizer", None)).__name__
        if (before := (manifest.rest.get("settings") or {}).get("optimizer", kind)) != kind:
            must = f"A run must resume from {self.asked.folder} with the same optimizer."
            attempt = f'{before}; or another folder, after trainer.restore("{self.asked.folder}", only="weights").'
            raise SpecificationError(message(must, f"{kind} (saved: {before})", attempt))
        self.check(snapshot)

    @property
    def _given(self) -> dict[str, float]:
        """The learning rates that the script of the saved run set."""
        return {} if self.found is None else self.found.manifest.rest.get("rates") or {}

    def told(self, environment: dict[str, Any], settings: Settings, watch: Watch | None) -> str:
        """Return the line with the checkpoint from which the run resumes, and the differences to the saved run."""
        found, place = self.found, self.run.place
        assert found is not None
        told = [f"wholestep: resumes from {found.path}, after update {self.run.number}"]
        told[0] += f" (epoch {place.epoch + 1}, batch {place.done})" if place.call else ""
        told += [f"discarded: {self._given_up} later updates"] if self._given_up > 0 else []
        told += [f"set aside: {', '.join(found.aside)}"] if found.aside else []
        otherwise = differences(found.manifest.rest.get("run") or {}, environment)
        told += [f"changed environment: {otherwise}"] if otherwise else []
        kept = found.snapshot.facts["also"]
        told += self._words_of_rates
        changed = changes(found.manifest.rest.get("settings") or settings, settings)
        changed += [] if watch is None else watch.changes(put_together(kept.get("callbacks"), found.snapshot.arrays))
        told += [f"changed settings: {', '.join(changed)}"] if changed else []
        anew = [name for name in self.asked.also or () if name not in kept]
        anew += [] if watch is None else watch.unknown
        return "; ".join([*told, f"starts anew: {', '.join(anew)}"] if anew else told)


def _unused(name: str, rate: float, now: float) -> str:
    """Return the line that says that the script's learning rate is not used."""
    is_main = name == "optimizer"
    told = f"learning rate{'' if is_main else f' of {name}'} {now}, as saved"
    way = f"pass Checkpoints(folder, learning_rate={rate})" if is_main else "assign it in on_train_begin"
    return f"{told} (here: {rate}, which is not used; to use it, {way})"
