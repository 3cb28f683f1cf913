"""A folder of checkpoints shared by the processes of a run: process 0 locks and commits, each writes a part."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from wholestep.checkpoints.arrays import FileFacts, Leaf, check_dtype
from wholestep.checkpoints.files import Lock
from wholestep.checkpoints.folder import Folder
from wholestep.checkpoints.manifest import Manifest, as_said, parts
from wholestep.checkpoints.pieces import Deal, Numbers, Pieces, hollow, is_whole
from wholestep.checkpoints.snapshot import FACTS
from wholestep.checkpoints.together import Together
from wholestep.checkpoints.writer import Room
from wholestep.errors import CheckpointError, message
from wholestep.processes import Processes


class CommonFolder:
    """A folder of checkpoints shared by several processes.

    Args:
        folder: the same folder in all processes.
    """

    def __init__(self, folder: Folder, processes: Processes):
        self.folder = folder
        self.together = Together(processes)
        self._processes = processes
        self._lock: Lock | None = None
        self._aside = self.together
        self._owner = ""  # of the lock, as all processes have seen it
        self._token, self._num = "", 0  # of the lock, and the number of checkpoints begun since

    def lock(self) -> None:
        """Lock the folder until `release`, and remove the remains of interrupted writers.

        Raises:
            CheckpointError: another run holds it, or not all processes see the same folder.
        """
        try:
            self._owner = self.together.first(self._take, "locking the folder of checkpoints")
            self.together.all(self._check_held, "looking for the lock of checkpoints")
        except BaseException:
            self.release()
            raise
        self._token, self._num = json.loads(self._owner)["token"], 0
        self._aside = Together(self._processes.aside(self._token))

    def _take(self) -> str:
        self._lock = self.folder.lock()
        try:
            self.folder.clear()
        except BaseException:
            self.release()
            raise
        return self._lock.owner

    def _check_held(self) -> None:
        """Refuse to write to a folder that process 0 has not locked."""
        if self._lock is not None:
            self._lock.check()
        elif (seen := self.folder.owner()) != self._owner:
            must = f"All processes of a run must see one folder of checkpoints: {self.folder.folder}."
            attempt = "a folder on a file system that all hosts share."
            received = f"a folder locked by {seen or 'no process'}, not by {self._owner}"
            raise CheckpointError(message(must, received, attempt))

    def release(self) -> None:
        """Unlock the folder."""
        if self._lock is not None:
            self._lock.release()
        self._aside.close()

    def copies(self, room: Room) -> Callable[[str, Any], Numbers]:
        """Return the function that copies arrays into a room, in writing order; hollow if others write them."""
        deal = Deal(*self.together.share)

        def copied(name: str, value: Any) -> Numbers:
            is_others = self._processes.count > 1 and is_whole(value) and not deal.takes(value.nbytes)
            return hollow(value.shape, value.dtype) if is_others else room.copy(name, value)

        return copied

    def _own(self, arrays: Mapping[str, Numbers]) -> dict[str, Numbers]:
        """Return the arrays that this process writes: pieces, its share of full arrays, on process 0 the metadata."""
        deal = Deal(*self.together.share)

        def is_own(name: str, numbers: Numbers) -> bool:
            if isinstance(numbers, Pieces):
                return True
            return self.together.is_first if name.startswith(FACTS) else deal.takes(numbers.nbytes)

        return {name: numbers for name, numbers in arrays.items() if is_own(name, numbers)}

    def write(
        self,
        manifest: Manifest,
        arrays: Mapping[str, Numbers],
        then: Callable[[], None] = lambda: None,
        *,
        replaces: bool = False,
    ) -> None:
        """Write this process's part of a checkpoint; process 0 commits it when all processes have written.

        May be called in a thread. All processes call it, in the same order, while the lock is held.

        Args:
            manifest: without files.
            then: called in process 0 after the commit.

        Raises:
            CheckpointError: in all processes, if the checkpoint could not be written; or an error of `then`.
            PeerError: they save different steps.
        """
        folder, aside, what = self.folder, self._aside, f"saving the checkpoint of step {manifest.step}"
        self._num += 1
        token = f"{self._token}-{self._num}"
        known = {k: (v.shape, check_dtype(k, v.dtype)) for k, v in arrays.items() if not k.startswith(FACTS)}

        def fill() -> tuple[list[FileFacts], list[Leaf]]:
            self._check_held()
            return folder.fill(token, manifest.step, self._own(arrays), aside.share)

        def commit() -> None:
            self._check_held()
            whole = replace(manifest, files=[], leaves=[])
            for part in told:
                files, leaves = parts(part)
                whole.files.extend(files)
                whole.leaves.extend(leaves)
            if known != {name: of for name, of in whole.arrays.items() if not name.startswith(FACTS)}:
                raise CheckpointError(f"All arrays must be in the checkpoint of step {manifest.step}. They are not.")
            folder.commit(token, whole, replaces=replaces)
            then()

        try:
            files, leaves = aside.all(fill, what)
            told = aside.gather({"files": [*map(as_said, files)], "leaves": [*map(as_said, leaves)]}, what)
            aside.first(commit, what)
        except Exception:  # all processes raise it
            if aside.is_first:
                folder.discard(token)
            raise
