"""A disk that fails at any call, and strangers' entries in the folder: an error that says so, and
nothing is lost.
"""

import errno
import fcntl
import os
import shutil
import socket
import stat
import warnings
from collections import Counter

import numpy as np
import pytest
from folders import LITTER, NUMBERS, cut, newest_in

import wholestep as ws
from wholestep import cli
from wholestep.checkpoints import settings
from wholestep.checkpoints.folder import Folder
from wholestep.checkpoints.manifest import Manifest
from wholestep.checkpoints.shared_folder import SharedFolder
from wholestep.errors import DamagedError
from wholestep.processes import SingleProcess

CALLS = """close fstat fsync ftruncate listdir lstat mkdir open pread preadv pwrite read readv rename rmdir scandir stat
statvfs unlink write"""
ERRORS = [
    errno.EIO,
    errno.ENOSPC,
    errno.EMFILE,
    errno.EACCES,
    errno.ESTALE,
    errno.EROFS,
    errno.ENAMETOOLONG,
]


def arrays(step):
    return {"params/0": np.full((3, 2), step, "float32"), "params/1": cut(NUMBERS + step, [2], [])}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a folder as a run may find it: a good checkpoint, a damaged one, one half replaced,
    and litter.
    """
    folder = Folder(tmp_path_factory.mktemp("made"))
    for step in (1, 2, 3):
        folder.write(
            step,
            arrays(step),
            {"step": step},
            {"watched": {"name": "loss", "number": 1.0, "mode": "min"}},
        )
    (file, *_) = sorted(folder.path(3).glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    shutil.copytree(folder.path(3), folder.folder / "bad-00000003-1")
    folder.path(2).rename(folder.folder / ".replaced-00000002")
    shutil.copytree(folder.path(1), folder.folder / LITTER[0])
    (folder.folder / ".old-photos").mkdir()
    (folder.folder / ".old-photos" / "photo").write_bytes(b"a stranger's")
    return folder.folder


def live(path):
    """Do in a folder all that a run does there."""
    common = SharedFolder(Folder(path), SingleProcess())
    common.lock()
    try:
        found = newest_in(common.folder)
        assert found.snapshot.arrays["params/1"][1:].shape == NUMBERS[1:].shape
        assert settings.values_of(common.folder, "loss")
        for replaces in (False, True):
            common.write(Manifest(4, [], [], {"step": 4}, {}), arrays(4), replaces=replaces)
        for step in settings.to_remove(common.folder, ws.Checkpoints(path, keep=2), 4):
            common.folder.remove(step)
    finally:
        common.release()


def look(path):
    """Say what is there, as the command does."""
    for command in ("ls", "verify", "show"):
        cli.main(["checkpoint", command, str(path)])


def make_anew(path):
    Folder(path / "a" / "b").lock().release()


class Disk:
    """A file system whose `at`-th call of this name fails; calls elsewhere than below a root do not
    count.
    """

    def __init__(self, monkeypatch, root, name="", at=0, number=0):
        self.seen = Counter()
        self._root = str(root)
        self._failing = (name, at, number)
        for call in CALLS.split():
            monkeypatch.setattr(os, call, self._wrapped(call, getattr(os, call)))
        monkeypatch.setattr(fcntl, "flock", self._wrapped("flock", fcntl.flock))

    def _wrapped(self, call, real):
        def wrapped(on, *arguments, **options):
            if (
                not isinstance(on, int)
                and options.get("dir_fd") is None
                and not os.fspath(on).startswith(self._root)
            ):
                return real(on, *arguments, **options)
            self.seen[call] += 1
            name, at, number = self._failing
            if (call, self.seen[call]) == (name, at):
                if call == "close":
                    real(on)  # the system closes what it complains of
                raise OSError(number, os.strerror(number))
            return real(on, *arguments, **options)

        return wrapped


NUM_FAULTS = {live: 200, look: 50, make_anew: 15}
ERRORS_OF_OURS = (ws.CheckpointError, DamagedError)


def raised(does, path):
    try:
        does(path)
    except Exception as error:
        return error
    return None


def copied(made, to):
    shutil.copytree(made, to)
    return to


@pytest.mark.parametrize("does", [live, look, make_anew], ids=lambda does: does.__name__)
@pytest.mark.slow
def test_a_disk_that_fails_at_any_call_is_an_error_that_names_the_folder_and_loses_nothing(
    made, does, tmp_path, capsys
):
    does(copied(made, tmp_path / "imports"))
    path = copied(made, tmp_path / "good")
    with pytest.MonkeyPatch.context() as patched:
        disk = Disk(patched, path)
        does(path)
        num_calls = dict(disk.seen)
    outcomes = Counter()
    faults = [(call, at) for call, num in num_calls.items() for at in range(1, num + 1)]
    for i, (call, at) in enumerate(faults):
        path = copied(made, tmp_path / f"{call}-{at}")
        with pytest.MonkeyPatch.context() as patched:
            disk = Disk(patched, path, call, at, ERRORS[i % len(ERRORS)])
            with warnings.catch_warnings():
                # which some file systems refuse
                warnings.filterwarnings("ignore", ".*cannot sync folders")
                error = raised(does, path)
            assert error is None or (type(error) in ERRORS_OF_OURS and str(path) in str(error)), (
                call,
                at,
                error,
            )
            assert disk.seen[call] >= at, (call, at)
        outcomes[error is None] += 1
        assert (path / ".old-photos" / "photo").read_bytes() == b"a stranger's"
        common = SharedFolder(Folder(path), SingleProcess())
        common.lock()
        found = newest_in(common.folder)
        common.release()
        step = found.manifest.step
        assert step in (2, 4)
        np.testing.assert_array_equal(found.snapshot.arrays["params/0"], arrays(step)["params/0"])
        np.testing.assert_array_equal(found.snapshot.arrays["params/1"][...], NUMBERS + step)
        shutil.rmtree(path)
    assert len(faults) >= NUM_FAULTS[does]
    assert outcomes[False] > len(faults) / 4 or does is look  # the command prints the error


# ---- entries of others ----

DIGITS = "\N{ARABIC-INDIC DIGIT ONE}" * 8
NAMES = [
    *(
        "step-5",
        "step-00000005x",
        "step-099999999",
        f"step-{DIGITS}",
        "step-" + "9" * 19,
        "step-",
        "step--0000001",
        "STEP-00000005",
    ),
    *(
        "bad-idea.txt",
        "bad-00000005",
        "bad-00000005-0",
        "bad-00000005-1x",
        f"bad-{DIGITS}-1",
        "bad-",
        "bad",
    ),
    *(
        ".new-photos",
        ".old-photos",
        ".new-",
        ".old-0123456789AB",
        ".new-0123456789abc",
        ".replaced-files",
        ".replaced-5",
        "." * 3,
    ),
    *("manifest.json", "lock.txt", ".lock", "photos", "\N{SNOWMAN}"),
]
OURS = [
    "step-00000005",
    "step-99999999",
    "bad-00000001-1",
    ".replaced-00000005",
    ".new-0123456789ab",
    ".old-0123456789ab-3",
]


def make_file(path):
    path.write_text("a stranger's")


def make_folder(path):
    path.mkdir()
    (path / "photo").write_text("a stranger's")


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


KINDS = {
    "file": make_file,
    "folder": make_folder,
    "fifo": os.mkfifo,
    "link": lambda path: path.symlink_to(path.parent.parent / "elsewhere"),
    "dead link": lambda path: path.symlink_to("nowhere"),
    "socket": make_socket,
}


def facts_of(path):
    """Return the kind of an entry, its target and its contents."""
    kind = stat.S_IFMT(path.lstat().st_mode)
    content = (
        path.read_text()
        if stat.S_ISREG(kind)
        else sorted(os.listdir(path))
        if stat.S_ISDIR(kind)
        else None
    )
    return kind, os.readlink(path) if stat.S_ISLNK(kind) else None, content


@pytest.mark.parametrize("kind", KINDS)
def test_entries_of_others_stop_no_start_and_stay_as_they_are(kind, tmp_path, monkeypatch):
    make_folder(tmp_path / "elsewhere")
    for i, name in enumerate([*NAMES, *OURS]):
        folder = Folder(tmp_path / str(i))
        folder.lock().release()
        folder.write(3, arrays(3), {})
        monkeypatch.chdir(folder.folder)
        KINDS[kind](folder.folder / name)
        before = facts_of(folder.folder / name)
        common = SharedFolder(folder, SingleProcess())
        common.lock()
        assert newest_in(folder).manifest.step == 3, name
        if name != "step-00000005":  # there no checkpoint can be written
            common.write(Manifest(5, [], [], {}, {}), arrays(5))
            assert newest_in(folder).manifest.step == 5, name
            folder.remove(5)
        common.release()
        assert folder.bad() == []
        assert facts_of(folder.folder / name) == before, name
    assert sorted(os.listdir(tmp_path / "elsewhere")) == ["photo"]
