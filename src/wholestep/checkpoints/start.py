"""From where a call goes on: the newest checkpoint of its folder, what the user restored by hand, or its beginning."""

from collections.abc import Callable
from typing import Any

from wholestep.checkpoints.common import CommonFolder
from wholestep.checkpoints.data import check_goes_on, unlike
from wholestep.checkpoints.facts import differences
from wholestep.checkpoints.manifest import Manifest
from wholestep.checkpoints.reading import Found, newest
from wholestep.checkpoints.settings import Checkpoints
from wholestep.checkpoints.snapshot import RunFacts, Snapshot
from wholestep.data.batches import Batches
from wholestep.data.facts import content_of
from wholestep.errors import CheckpointError, SpecificationError, message
from wholestep.run import Run

Check = Callable[[Snapshot], None]
_WHAT = "looking from where the run goes on"


class Start:
    """From where a call of `fit` or `steps` goes on.

    Args:
        check: raises a SpecificationError if a snapshot is another model's.

    Attributes:
        found: the checkpoint from which it goes on; None if there is none.
        content: what tells the call's data from others.
    """

    def __init__(self, asked: Checkpoints, run: Run, common: CommonFolder, call: str, batches: Batches, check: Check):
        self.found: Found | None = None
        self.content: dict[str, str] = {}
        self._asked, self._run, self._common = asked, run, common
        self._call, self._batches, self._check = call, batches, check
        self._given_up = 0  # updates of this process that the folder does not know of

    def find(self) -> int:
        """Let the run stand where it goes on, and return the step by which that is called, 0 for a beginning.

        Raises:
            SpecificationError: the run cannot go on so; nothing has been changed.
            CheckpointError: the folder holds what it must not, or all in it is damaged.
        """
        run, together = self._run, self._common.together
        self.content = content_of(self._batches)
        if not self._asked.resume:
            together.all(self._check_empty, _WHAT)
            return 0
        if run.restored is not None:  # by hand, and that is where it goes on
            together.all(self._check_restored, _WHAT)
            return run.number
        self.found = found = newest(self._common, self._check_found, sets_aside=True)
        if found is None:
            return 0
        self._given_up = run.number - found.snapshot.facts["number"]
        run.restore(found.snapshot)
        return found.manifest.step

    def _check_empty(self) -> None:
        folder = self._common.folder
        if folder.steps() or folder.bad():
            must = "resume=False begins anew in an empty folder."
            attempt = "another folder; or leave resume out, to go on."
            raise CheckpointError(message(must, f"{len(folder.steps())} checkpoints in {folder.folder}", attempt))

    def _check_restored(self) -> None:
        steps, number = self._common.folder.steps(), self._run.number
        if steps and steps[0] != number:
            must = "A run that was restored by hand saves in a folder without other checkpoints."
            received = f"update {number}, and step {steps[0]} in {self._asked.folder}"
            raise SpecificationError(message(must, received, "another folder; or do not restore by hand."))

    def _check_found(self, snapshot: Snapshot, manifest: Manifest) -> None:
        """Refuse other data and another model, before anything changes."""
        facts = RunFacts.of(snapshot)
        if facts.place.call:
            check_goes_on(facts.place, facts.data, self._call, self._batches)
            if differing := unlike(manifest.rest.get("content") or self.content, self.content):
                must = f"A run goes on from {self._asked.folder} with the data that it had."
                attempt = "pass the same data; trainer.restore(path) goes on with data that were mended."
                raise SpecificationError(message(must, "; ".join(differing), attempt))
        self._check(snapshot)

    def told(self, facts: dict[str, Any], unknown: list[str]) -> str:
        """Return the line that says from where the run goes on, and what is otherwise than it was.

        Args:
            facts: the circumstances as they are now.
            unknown: the callbacks whose state nobody knows.
        """
        found, place = self.found, self._run.place
        assert found is not None
        told = [f"wholestep: goes on from {found.path}, after update {self._run.number}"]
        told[0] += f" (epoch {place.epoch + 1}, batch {place.done})" if place.call else ""
        told += [f"given up: {self._given_up} updates since then"] if self._given_up > 0 else []
        told += [f"set aside: {', '.join(found.aside)}"] if found.aside else []
        otherwise = differences(found.manifest.rest.get("run") or {}, facts)
        told += [f"otherwise than before: {otherwise}"] if otherwise else []
        kept = found.snapshot.facts["also"]
        anew = [*(name for name in self._asked.also or () if name not in kept), *unknown]
        return "; ".join([*told, f"starts anew: {', '.join(anew)}"] if anew else told)
