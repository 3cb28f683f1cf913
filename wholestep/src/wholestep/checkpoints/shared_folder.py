"""A folder of checkpoints of all processes of a run: process 0 commits, each writes a part.

A single process does not communicate.
"""

import json
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from wholestep import errors
from wholestep.checkpoints.address import Location, as_location, is_remote
from wholestep.checkpoints.files import Lock, on_disk
from wholestep.checkpoints.folder import Arrays, Folder
from wholestep.checkpoints.manifest import Manifest, as_json, parts
from wholestep.checkpoints.paths import check_run_folder
from wholestep.checkpoints.safetensors import check_dtype
from wholestep.checkpoints.shards import Numbers, ShardedArray, hollow, is_whole
from wholestep.checkpoints.snapshot import FACTS
from wholestep.checkpoints.store import STORE, CheckpointFolder, Store, publish, pull, push
from wholestep.checkpoints.writer import CopyBuffers
from wholestep.errors import CheckpointError, SpecificationError, WholestepError, message
from wholestep.processes import Exchange, Processes

T = TypeVar("T")
_SECONDS = 1.0  # between two exchanges
_MOST = 1 << 6  # boundaries between two exchanges


class BoundaryFlags(NamedTuple):
    """The reasons to save at a boundary."""

    terminated: bool  # SIGTERM has come
    failed: bool  # the previous checkpoint could not be written
    late: bool  # `every_seconds` have passed


class Consensus:
    """Calls that all processes of a run make in the same order, and that fail in all if one fails.

    If a call fails, its process raises its error, and the others a WholestepError. `what` describes
    it; see `Exchange`.
    """

    def __init__(self, exchange: Exchange):
        self.exchange = exchange
        # the index of this process, and the number of processes
        self.share = exchange.index, exchange.count
        self._pauses: dict[str, _Pause] = {}

    def all(self, call: Callable[[], T], what: str) -> T:
        """Make a call in every process, and return this one's result."""
        if self.share[1] == 1:
            return call()
        try:
            result = call()
        except Exception as error:
            self.exchange.all_gather([type(error).__name__, str(error)], what)
            raise
        for i, failure in enumerate(self.exchange.all_gather(None, what)):
            if failure is not None:
                raise _error_of(i, *failure)
        return result

    def first(self, call: Callable[[], T], what: str) -> T:
        """Make a call in process 0, and return its JSON result in all processes."""
        result = self.all(call if self.exchange.index == 0 else lambda: None, what)
        return self.exchange.broadcast(result, what)  # type: ignore[return-value]

    def ask(self, boundary: str, flags: BoundaryFlags, *, now: bool = False) -> BoundaryFlags:
        """Return the flags that are set in any process; `late` is process 0's.

        Several processes exchange their flags about once a second, or `now`; in between, no flag is
        set.
        """
        if self.share[1] == 1:
            return flags
        pause = self._pauses.setdefault(boundary, _Pause())
        if not pause.is_over and not now:
            return BoundaryFlags(terminated=False, failed=False, late=False)
        since = time.monotonic() - pause.since
        what = f"asking for reasons to save {boundary}"
        answers = self.exchange.all_gather([*flags, since], what)
        pause.begin(answers[0][3])
        terminated = any(answer[0] for answer in answers)
        failed = any(answer[1] for answer in answers)
        return BoundaryFlags(terminated, failed, bool(answers[0][2]))


class _Pause:
    """The number of boundaries between two exchanges, the same in all processes."""

    def __init__(self) -> None:
        self.since = time.monotonic()
        self._num = 1
        self._gone = 0

    @property
    def is_over(self) -> bool:
        """Count a boundary, and return whether the processes exchange their signs there."""
        self._gone += 1
        return self._gone >= self._num

    def begin(self, seconds: float) -> None:
        """Begin anew; `seconds` is the time since the last exchange on process 0's clock."""
        by_time = self._gone * _SECONDS / max(seconds, 1e-6)
        self._num = int(min(max(1, by_time), 2 * self._num, _MOST))
        self._gone = 0
        self.since = time.monotonic()


@contextmanager
def slowly(processes: Processes) -> Iterator[None]:
    """Keep this process from counting as lost while it writes or reads a checkpoint."""
    before = processes.doing
    processes.set_status("saving, or reading a checkpoint")
    try:
        yield
    finally:
        processes.set_status(before)


def _error_of(process: int, kind: str, text: str) -> WholestepError:
    """Return the error of another process."""
    text = text if hasattr(errors, kind) else f"{kind}: {text}"
    is_of_user = kind == SpecificationError.__name__
    error = SpecificationError if is_of_user else CheckpointError
    return error(f"Process {process}: {text}")


class WriteShares:
    """Assign each array that all processes hold to the one with the fewest bytes to write so far.

    >>> first, second = WriteShares(0, 2), WriteShares(1, 2)
    >>> [(first.takes(nbytes), second.takes(nbytes)) for nbytes in (10, 4, 4, 8)]
    [(True, False), (False, True), (False, True), (False, True)]
    """

    def __init__(self, index: int, count: int):
        self._index = index
        self._dealt = [0] * count

    def takes(self, nbytes: int) -> bool:
        """Assign the next array, in the order of all; return whether this process writes it."""
        least = self._dealt.index(min(self._dealt))
        self._dealt[least] += nbytes
        return least == self._index


class SharedFolder:
    """A folder of checkpoints, the same in all processes, and a store of copies, if any."""

    def __init__(
        self,
        folder: Folder,
        processes: Processes,
        store: Store | None = None,
        *,
        is_temporary: bool = False,
    ):
        self.folder = folder
        self.store = store
        self.is_temporary = is_temporary
        self.together = Consensus(processes)
        self._processes = processes
        self._lock: Lock | None = None
        self._aside = self.together
        self._owner = ""  # of the lock, as all processes have seen it
        self._token = ""
        self._num = 0  # of the lock, and the number of checkpoints begun since

    @classmethod
    def of(
        cls, path: Location, processes: Processes, local: Location | None = None
    ) -> "SharedFolder":
        """Return the folder of a path; of an address, a local folder with copies in the store."""
        path = as_location(path)
        if not is_remote(path):
            return cls(Folder(path), processes)
        if local is None and processes.count > 1:
            must = (
                "Several processes need a local folder that all hosts see, from which checkpoints "
                "are copied."
            )
            raise SpecificationError(message(must, path, f'Checkpoints("{path}", local="runs/a").'))
        must = f"Checkpoints in {path} are written to a temporary folder first."
        attempt = f'Checkpoints("{path}", local="runs/a"); or set TMPDIR to a folder with room.'
        with on_disk(must, attempt):
            temporary = Path(tempfile.gettempdir(), f"wholestep-{uuid.uuid4().hex[:12]}")
        return cls(Folder(local or temporary), processes, Store(path), is_temporary=local is None)

    @property
    def folders(self) -> list[CheckpointFolder]:
        """The folder, and the store, if there is one."""
        return [self.folder] if self.store is None else [self.folder, self.store]

    def lock(self) -> None:
        """Lock the folder until `release`, and remove the remains of interrupted writers."""
        try:
            self._owner = self.together.first(self._take, "locking the folder of checkpoints")
            self.together.all(self._check_held, "looking for the lock of checkpoints")
        except BaseException:
            self.release()
            raise
        self._token = json.loads(self._owner)["token"]
        self._num = 0
        self._aside = Consensus(self._processes.aside(self._token))

    def _take(self) -> str:
        for each in self.folders:
            check_run_folder(each.folder)
        if self.is_temporary:
            path = self.folder.folder
            with on_disk(f"{path} must be made, for temporary copies of checkpoints."):
                path.mkdir(mode=0o700)
        self._lock = self.folder.lock()
        self.folder.clear()
        return self._lock.owner

    def _check_held(self) -> None:
        """Refuse to write to a folder that process 0 has not locked."""
        if self._lock is not None:
            self._lock.check()
        elif (seen := self.folder.owner()) != self._owner:
            path = self.folder.folder
            must = f"All processes of a run must see one folder of checkpoints: {path}."
            attempt = "a folder on a file system that all hosts share."
            received = f"a folder locked by {seen or 'no process'}, not by {self._owner}"
            raise CheckpointError(message(must, received, attempt))

    def release(self) -> None:
        """Unlock the folder, and remove it if it is temporary and all of it is in the store."""
        if self._lock is not None:
            self._lock.release()
        if self.is_temporary:
            shutil.rmtree(self.folder.folder, ignore_errors=True)
        self._aside.exchange.close()

    def pull(self) -> None:
        """Copy the newest good checkpoint of the store, if there is one, to the folder."""
        if (store := self.store) is not None:
            call = partial(pull, self.folder, store)
            self.together.first(call, f"copying checkpoints from {store.folder}")

    def publish(self) -> None:
        """Become the run that writes to the store, if any, and copy the newest checkpoint to it."""
        if (store := self.store) is not None:
            call = partial(publish, self.folder, store, self._owner)
            self.together.first(call, f"copying checkpoints to {store.folder}")

    def copies(self, room: CopyBuffers) -> Callable[[str, Any], Numbers]:
        """Return the function that copies arrays into a room, in writing order.

        It returns a hollow array for an array that another process writes.
        """
        shares = WriteShares(*self.together.share)
        is_alone = self._processes.count == 1

        def copied(name: str, value: Any) -> Numbers:
            if is_alone or not is_whole(value) or shares.takes(value.nbytes):
                return room.copy(name, value)
            return hollow(value.shape, value.dtype)

        return copied

    def _own(self, arrays: Arrays) -> dict[str, Numbers]:
        """Return the arrays that this process writes.

        These are its pieces, its share of the full arrays, and on process 0 those of the facts.
        """
        shares = WriteShares(*self.together.share)
        own: dict[str, Numbers] = {}
        for name, numbers in arrays.items():
            if isinstance(numbers, ShardedArray):
                is_own = True
            elif name.startswith(FACTS):
                is_own = self._processes.index == 0
            else:
                is_own = shares.takes(numbers.nbytes)
            if is_own:
                own[name] = numbers
        return own

    def _commit(self, token: str, manifest: Manifest, arrays: Arrays, *, replaces: bool) -> None:
        """Commit a checkpoint of these arrays, and copy it to the store, if there is one."""
        self._check_held()
        expected = {name: (v.shape, check_dtype(name, v.dtype)) for name, v in arrays.items()}
        if manifest.arrays != expected:
            must = f"All arrays must be in the checkpoint of step {manifest.step}."
            raise CheckpointError(f"{must} They are not.")
        store = {} if self.store is None else {STORE: str(self.store.folder)}
        manifest = replace(manifest, rest=manifest.rest | store)
        self.folder.commit(token, manifest, replaces=replaces)
        if self.store is not None:
            was_temporary = self.is_temporary
            self.is_temporary = False  # after an error, the folder stays
            push(self.folder, manifest.step, self.store)
            self.is_temporary = was_temporary

    def write(
        self,
        manifest: Manifest,
        arrays: Arrays,
        then: Callable[[], None] = lambda: None,
        *,
        replaces: bool = False,
    ) -> None:
        """Write this process's part of a checkpoint; when all have written, process 0 commits it.

        May be called in a thread. All processes call it, in the same order, while the lock is held,
        and all raise an error if the checkpoint could not be written.

        Args:
            manifest: without files.
            then: called in process 0 after the commit.
        """
        aside = self._aside
        what = f"saving the checkpoint of step {manifest.step}"
        self._num += 1
        token = f"{self._token}-{self._num}"

        def fill() -> dict[str, Any]:
            self._check_held()
            written = self.folder.fill(token, manifest.step, self._own(arrays), aside.share)
            files, leaves = ([as_json(part) for part in of] for of in written)
            return {"files": files, "leaves": leaves}

        def commit() -> None:
            files, leaves = (
                list(chain(*part)) for part in zip(*map(parts, everyones), strict=True)
            )
            complete = replace(manifest, files=files, leaves=leaves)
            self._commit(token, complete, arrays, replaces=replaces)
            then()

        try:
            everyones = aside.exchange.all_gather(aside.all(fill, what), what)
            aside.first(commit, what)
        except BaseException:  # all processes raise an Exception
            if self._processes.index == 0:
                self.folder.discard(token)
            raise
