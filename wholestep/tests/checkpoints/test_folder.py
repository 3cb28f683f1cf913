"""A checkpoint is there as a whole or not at all, damage is found, and nothing but numbers is read.
Needs no engine.
"""

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from folders import LITTER, NUMBERS, RNG, cut, equal, newest_in, some

import wholestep as ws
from wholestep.checkpoints import safetensors
from wholestep.checkpoints.files import Lock
from wholestep.checkpoints.folder import Folder, locate
from wholestep.checkpoints.manifest import Manifest
from wholestep.checkpoints.resume import newest
from wholestep.checkpoints.shared_folder import SharedFolder
from wholestep.processes import SingleProcess


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "runs").mkdir()
    return Folder(tmp_path / "runs")


# ---- what comes back ----


def test_what_was_written_comes_back_to_the_bit(folder):
    assert folder.steps() == []
    kept = some()
    facts = {"best": float("-inf"), "epoch": 3, "names": ["a", None, True], "rate": 0.1}
    path = folder.write(500, kept, facts, {"time": 1.5})
    assert path.name == "step-00000500"
    manifest, arrays = folder.read(500)
    equal(arrays, kept)
    assert (manifest.step, manifest.facts, manifest.rest) == (500, facts, {"time": 1.5})
    assert sorted(p.name for p in folder.folder.iterdir()) == ["step-00000500"]


def test_arrays_that_do_not_lie_in_order_are_written_in_order(folder):
    kept = {
        "a": np.arange(12.0).reshape(3, 4).T,
        "b": np.arange(9)[::2],
        "c": np.arange(3, dtype=">i4"),
    }
    folder.write(1, kept, {})
    arrays = folder.read(1)[1]
    for name, array in kept.items():
        np.testing.assert_array_equal(arrays[name], array)


def test_many_bytes_go_in_several_files(folder, monkeypatch):
    monkeypatch.setattr(safetensors, "_MOST_BYTES", 100)
    kept = {str(i): np.full(i * 10, i, "uint8") for i in range(1, 16)}
    path = folder.write(1, kept, {})
    assert len(list(path.glob("*.safetensors"))) > 5
    equal(folder.read(1)[1], kept)


def test_other_tools_can_read_the_files(folder):
    kept = {"a": np.arange(6, dtype="float32").reshape(2, 3), "b": np.ones(2, ml_dtypes.bfloat16)}
    (file,) = folder.write(1, kept, {}).glob("*.safetensors")
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    assert size % 8 == 0
    assert header["a"] == {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    assert header["b"] == {"dtype": "BF16", "shape": [2], "data_offsets": [24, 28]}
    assert content[8 + size : 32 + size] == kept["a"].tobytes()


def test_what_is_not_known_is_kept_and_an_unknown_format_is_refused_by_name(folder):
    folder.write(1, some(), {"later": {"than": [1]}}, {"news": "of a later release"})
    manifest = folder.manifest(1)
    assert manifest.facts["later"] == {"than": [1]}
    assert manifest.rest["news"] == "of a later release"
    rewrite(folder, 1, format=3)
    with pytest.raises(ws.CheckpointError, match=r"must be of format 1 or 2\. Received: format 3"):
        newest_in(folder)
    assert (folder.steps(), folder.bad()) == ([1], [])  # it may be good


def test_numbers_that_no_file_holds_are_refused_before_anything_is_there(folder):
    folder.write(1, some(), {})
    with pytest.raises(ws.CheckpointError, match="must be of numbers that a file can hold"):
        folder.write(2, {"z": np.ones(2, complex)}, {})
    assert os.listdir(folder.folder) == ["step-00000001"]


def test_no_address_of_a_store_is_taken_for_a_folder():
    for path in ("gs://bucket/run", "memory://run", Path("gs://bucket/run")):
        with pytest.raises(ws.SpecificationError, match="file system"):
            Folder(path)
        with pytest.raises(ws.SpecificationError, match="file system"):
            locate(path)


# ---- damage ----


def rewrite(folder, at, /, **said):
    """Change what a manifest says, and its digest with it."""
    import xxhash

    path = folder.path(at) / "manifest.json"
    line = json.dumps(json.loads(path.read_text().splitlines()[0]) | said).encode()
    path.write_bytes(line + b"\n" + xxhash.xxh3_128_hexdigest(line).encode() + b"\n")


def truncated(path, folder):
    path.write_bytes(path.read_bytes()[: int(RNG.integers(0, path.stat().st_size))])


def bit_flipped(path, folder):
    content = bytearray(path.read_bytes())
    content[RNG.integers(len(content))] ^= 1 << int(RNG.integers(8))
    path.write_bytes(content)


def page_zeroed(path, folder):
    content = bytearray(path.read_bytes())
    start = int(RNG.integers(max(1, len(content) - 4096)))
    content[start : start + 4096] = bytes(len(content[start : start + 4096]))
    path.write_bytes(content)


def deleted(path, folder):
    path.unlink()


def extended(path, folder):
    path.write_bytes(path.read_bytes() + b"\0")


def stale(path, folder):
    path.write_bytes((folder.path(1) / path.name).read_bytes())


def swapped(path, folder):
    one, two = sorted(path.parent.glob("*.safetensors"))[:2]
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)


def a_link(path, folder):
    other = folder.folder / "elsewhere"
    path.rename(other)
    path.symlink_to(other)


def a_pipe(path, folder):
    path.unlink()
    os.mkfifo(path)


DAMAGES = [truncated, bit_flipped, page_zeroed, deleted, extended, stale, swapped, a_link, a_pipe]


@pytest.mark.parametrize("times", [4, pytest.param(40, marks=pytest.mark.large)])
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_every_damage_is_found_and_the_next_older_is_taken(folder, damage, times, monkeypatch):
    monkeypatch.setattr(safetensors, "_MOST_BYTES", 9000)
    kept = {step: {str(i): RNG.normal(size=(1000,)) + step for i in range(3)} for step in (1, 2)}
    for step, arrays in kept.items():
        folder.write(step, arrays, {"step": step})
    for num in range(times):
        files = sorted(folder.path(2).iterdir())
        damage(files[num % len(files)], folder)
        with pytest.raises(ws.CheckpointError, match=r"manifest|safetensors|file"):
            folder.verify(2)
        found = newest_in(folder)
        assert found.manifest.step == 1
        equal(found.snapshot.arrays, kept[1])
        (bad,) = folder.bad()
        assert bad.name == "bad-00000002-1"
        assert json.loads((bad / "why.json").read_text())["step"] == 2
        for file in bad.iterdir():
            file.unlink()
        bad.rmdir()
        folder.write(2, kept[2], {"step": 2})
    assert [folder.verify(step).step for step in folder.steps()] == [2, 1]
    assert folder.bad() == []


def nested(levels):
    return json.loads("[" * levels + "]" * levels)


def hostile(said):
    leaf = dict(said["leaves"][0])
    file = dict(said["files"][0])
    return {
        "a path that leaves the folder": {"files": [file | {"name": "../../etc/passwd"}]},
        "an absolute path": {"files": [file | {"name": "/etc/passwd"}]},
        "a name with a backslash": {"files": [file | {"name": "a\\b"}]},
        "an empty name": {"files": [file | {"name": ""}]},
        "a name of bytes": {"files": [file | {"name": "a\0b"}]},
        "a negative offset": {"leaves": [leaf | {"offset": -8}]},
        "an offset in the header's length": {"leaves": [leaf | {"offset": 4}]},
        "an offset beyond the file": {"leaves": [leaf | {"offset": 1 << 40}]},
        "an offset beyond all files": {"leaves": [leaf | {"offset": 1 << 63}]},
        "an offset of a word": {"leaves": [leaf | {"offset": "8"}]},
        "an offset of a truth": {"leaves": [leaf | {"offset": True}]},
        "a shape that overflows": {"leaves": [leaf | {"shape": [1 << 33, 1 << 33]}]},
        "a shape of less than nothing": {"leaves": [leaf | {"shape": [-1]}]},
        "a shape of many axes": {"leaves": [leaf | {"shape": [1] * 99}]},
        "a shape that fills the memory": {"leaves": [leaf | {"shape": [1 << 50]}]},
        "a shape that is no list": {"leaves": [leaf | {"shape": None}]},
        "objects": {"leaves": [leaf | {"dtype": "O"}]},
        "a dtype of a class": {"leaves": [leaf | {"dtype": {"__class__": "os.system"}}]},
        "a leaf twice": {"leaves": [*said["leaves"], leaf]},
        "leaves that overlap": {"leaves": [leaf, leaf | {"name": "other"}]},
        "a file twice": {"files": [*said["files"], file]},
        "a leaf in no file": {"leaves": [leaf | {"file": "99999-of-00001-00.safetensors"}]},
        "a leaf in the manifest": {"leaves": [leaf | {"file": "manifest.json"}]},
        "a file of less than nothing": {"files": [file | {"nbytes": -1}]},
        "a digest of words": {"files": [file | {"digest": "no"}]},
        "no files": {"files": None},
        "no leaves": {"leaves": {}},
        "a leaf that is a list": {"leaves": [[1, 2]]},
        "facts that are a list": {"facts": []},
        "facts of many levels": {"facts": {"also": nested(600)}},
        "another step": {"step": 7},
        "a step of a word": {"step": "1"},
        "no step": {"step": None},
        "a run of a word": {"run": "jax"},
        "content of numbers": {"content": {"rows": 8}},
        "settings that are a list": {"settings": [1]},
        "rates of words": {"rates": {"optimizer": "0.1"}},
        "a store that is a dict": {"store": {"url": "s3://a"}},
        "an entry of many levels": {"news": nested(600)},
    }


def test_what_no_writer_says_is_refused_before_room_is_made(folder):
    folder.write(1, some(), {})
    path = folder.path(1) / "manifest.json"
    good = path.read_bytes()
    said = json.loads(good.splitlines()[0])
    for what, change in hostile(said).items():
        path.write_bytes(good)
        rewrite(folder, 1, **change)
        with pytest.raises(ws.CheckpointError):
            pytest.fail(f"{what}: {folder.read(1)}")
    import xxhash

    for line in (
        b"[" * 100_000,
        b'{"format": 1, "format": 1}',
        b'{"format": NaN}',
        b"[]",
        b"null",
        b"",
        b"\xff",
        b'{"format": 1}',
    ):
        path.write_bytes(line + b"\n" + xxhash.xxh3_128_hexdigest(line).encode() + b"\n")
        with pytest.raises(ws.CheckpointError):
            pytest.fail(f"{line[:40]!r}: {folder.read(1)}")


def test_the_full_shapes_of_pieces_are_found_once(folder, monkeypatch):
    """Not once for each array: 4,000 arrays in pieces took 8 seconds."""
    kept = {f"params/{i}": cut(NUMBERS, [2], []) for i in range(20)}
    folder.write(1, kept, {})
    whole = Manifest.arrays.fget
    calls = []
    monkeypatch.setattr(
        Manifest, "arrays", property(lambda manifest: calls.append(1) or whole(manifest))
    )
    arrays = folder.read(1)[1]
    assert {name: array[...].tobytes() for name, array in arrays.items()} == dict.fromkeys(
        kept, NUMBERS.tobytes()
    )
    assert len(calls) == 1


def test_arrays_that_are_not_wanted_are_refused_before_they_are_read(folder, monkeypatch):
    folder.write(1, some(), {})
    monkeypatch.setattr(safetensors, "read", lambda *_: pytest.fail("an array was read"))

    def refuse(manifest):
        raise ws.SpecificationError(f"not these {len(manifest.leaves)}")

    with pytest.raises(ws.SpecificationError, match="not these 12"):
        folder.read(1, refuse)


# ---- interrupted writers ----

STOPPED = """
import json, os, sys
import numpy as np
from wholestep.checkpoints.shared_folder import SharedFolder
from wholestep.checkpoints.folder import Folder
from wholestep.checkpoints.resume import newest
from wholestep.processes import SingleProcess

folder = Folder(sys.argv[1])
arrays = [{str(i): np.full(100, step * 10 + i, "float32") for i in range(3)} for step in range(3)]
folder.write(1, arrays[1], {})
CALLS = ("open", "write", "pwrite", "mkdir", "rename", "fsync", "unlink", "rmdir", "close", "ftruncate")
outcomes = []
for stop in range(1, 10_000):
    child = os.fork()
    if child == 0:
        left = [stop]
        def stopping(call):
            def stopped(*arguments, **options):
                left[0] -= 1
                if left[0] == 0:
                    os._exit(9)  # before the call: the one before it was the last
                return call(*arguments, **options)
            return stopped
        for name in CALLS:
            setattr(os, name, stopping(getattr(os, name)))
        folder.clear()
        folder.write(2, arrays[2], {})
        folder.remove(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    found = folder.steps()
    good = newest(SharedFolder(folder, SingleProcess()), lambda *_: None, sets_aside=True)
    step, kept = good.manifest.step, good.snapshot.arrays
    same = all(np.array_equal(kept[k], arrays[step][k]) for k in kept) and len(kept) == 3
    litter = [p.name for p in folder.folder.iterdir() if p.name.startswith(".")]
    outcomes.append([found, step, bool(same), len(litter), len(folder.bad())])
    for step in folder.steps():
        if step == 2:
            folder.remove(2)
    if 1 not in folder.steps():
        folder.write(1, arrays[1], {})
    if os.waitstatus_to_exitcode(status) == 0:
        break
print(json.dumps(outcomes))
"""


@pytest.mark.slow
def test_a_writer_that_is_stopped_before_any_call_leaves_whole_checkpoints(tmp_path):
    command = [sys.executable, "-c", STOPPED, str(tmp_path)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(ws.__file__).parent.parent)])
    }
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    assert len(outcomes) > 25
    assert all(same and not bad for _, _, same, _, bad in outcomes)
    steps = [newest for _, newest, *_ in outcomes]
    assert steps == sorted(steps)  # once the new one is there, it stays
    assert {1, 2} == set(steps)
    assert outcomes[-1][:2] == [[2], 2]
    assert max(litter for *_, litter, _ in outcomes) <= 1


FAULTS = ["open", "write", "mkdir", "rename", "fsync"]


@pytest.mark.parametrize("call", FAULTS)
@pytest.mark.parametrize("number", [28, 5, 30, 24], ids=["ENOSPC", "EIO", "EROFS", "EMFILE"])
def test_a_disk_that_fails_leaves_the_checkpoint_before(folder, call, number, monkeypatch):
    kept = some()
    folder.write(1, kept, {})
    real = getattr(os, call)
    seen = []

    def fails(*arguments, **options):
        seen.append(arguments)
        if len(seen) == 2 or call in ("mkdir", "rename"):  # a first mkdir is of what is there
            raise OSError(number, os.strerror(number))
        return real(*arguments, **options)

    monkeypatch.setattr(os, call, fails)
    with pytest.raises(ws.CheckpointError, match=rf"step 2 .*{os.strerror(number)}") as caught:
        folder.write(2, kept, {})
    monkeypatch.undo()
    assert str(folder.folder) in str(caught.value)
    assert os.listdir(folder.folder) == ["step-00000001"]
    equal(newest_in(folder).snapshot.arrays, kept)


def test_a_full_disk_is_found_before_anything_is_written(folder, monkeypatch):
    folder.write(1, some(), {})
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 100}))
    with pytest.raises(ws.CheckpointError, match="100 bytes free"):
        folder.write(2, {"a": np.zeros(10_000)}, {})
    assert folder.steps() == [1]


def syncs_no_folders(number, fsync=os.fsync):
    """Return an fsync that fails for folders, as on some FUSE and SMB mounts."""

    def fails(file):
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(file)

    return fails


@pytest.mark.parametrize("number", [22, 95, 9, 13], ids=["EINVAL", "ENOTSUP", "EBADF", "EACCES"])
def test_a_file_system_that_cannot_sync_folders_warns_once(number, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", syncs_no_folders(number))
    folder = Folder(tmp_path / "a" / "b")
    with pytest.warns(
        UserWarning, match=f"{folder.folder} cannot sync folders .{os.strerror(number)}"
    ) as warned:
        folder.lock()
    assert len(warned) == 1
    for step in (1, 2):
        folder.write(step, some(), {})  # a second warning would be an error
    folder.set_aside(1, "damage")
    assert Folder(folder.folder).verify(2).step == 2
    with pytest.warns(UserWarning, match="cannot sync folders"):  # another folder
        Folder(tmp_path / "c").lock().release()


def test_a_file_system_that_reports_no_free_bytes_warns_once_and_a_full_one_fails(
    folder, monkeypatch
):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 0}))
    with pytest.warns(
        UserWarning, match=f"{folder.folder} reports 0 free bytes.*without looking for room"
    ):
        folder.write(1, some(), {})
    folder.write(2, some(), {})  # a second warning would be an error
    assert folder.verify(2).step == 2

    def fails(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", fails)
    with pytest.raises(ws.CheckpointError, match=r"step 3 .*No space left"):
        folder.write(3, some(), {})
    assert sorted(os.listdir(folder.folder)) == ["step-00000001", "step-00000002"]


# ---- other processes ----


def test_one_writes_and_a_second_is_told_who(tmp_path):
    lock = Lock(tmp_path)
    with pytest.raises(ws.CheckpointError, match="a loop of this very process is saving"):
        Lock(tmp_path)
    script = (
        "import sys; from pathlib import Path; from wholestep.checkpoints.files import Lock; "
        "Lock(Path(sys.argv[1]))"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(ws.__file__).parent.parent)}
    command = [sys.executable, "-c", script, str(tmp_path)]
    told = subprocess.run(command, env=environment, capture_output=True, text=True).stderr
    assert f'a folder in use by {{"pid": {os.getpid()}, "host": ' in told
    lock.release()
    lock.release()
    Lock(tmp_path).release()


def test_a_lock_ends_with_its_process(tmp_path):
    source = str(Path(ws.__file__).parent.parent)
    script = (
        "import os, sys; from pathlib import Path; from wholestep.checkpoints.files import Lock\n"
    )
    script += "lock = Lock(Path(sys.argv[1])); os.kill(os.getpid(), 9)"
    environment = os.environ | {"PYTHONPATH": source}
    assert (
        subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=environment).returncode
        == -9
    )
    Lock(tmp_path).release()


def test_a_lock_is_not_held_by_who_was_forked(tmp_path):
    source = str(Path(ws.__file__).parent.parent)
    script = (
        "import os, sys, time; from pathlib import Path; from wholestep.checkpoints.files "
        "import Lock\n"
    )
    script += "lock = Lock(Path(sys.argv[1]))\nif os.fork() == 0: time.sleep(30); os._exit(0)\n"
    script += "time.sleep(0.2); {}"
    environment = os.environ | {"PYTHONPATH": source}
    for end in ("os.kill(os.getpid(), 9)", "lock.release(); Lock(Path(sys.argv[1])).release()"):
        command = [sys.executable, "-c", script.format(end), str(tmp_path)]
        code = subprocess.run(command, env=environment, stderr=subprocess.DEVNULL).returncode
        assert code == (-9 if "kill" in end else 0)
        Lock(tmp_path).release()


def test_what_cannot_be_read_now_is_not_set_aside(folder, monkeypatch):
    folder.write(1, some(), {})
    folder.write(2, some(), {})
    real = os.open

    def fails(path, *arguments, **named):
        if str(path).endswith("safetensors"):
            raise OSError(errno.EMFILE, "Too many open files")
        return real(path, *arguments, **named)

    monkeypatch.setattr(os, "open", fails)
    with pytest.raises(ws.CheckpointError, match="Too many open files"):
        newest_in(folder)
    monkeypatch.undo()
    assert (folder.steps(), folder.bad()) == ([2, 1], [])


def test_a_checkpoint_that_takes_the_place_of_another_and_is_damaged_gives_it_back(
    folder, monkeypatch
):
    kept = some(3)
    folder.write(5, kept, {})

    def damages(step):
        file = next(folder.path(step).glob("*.safetensors"))
        file.write_bytes(file.read_bytes()[:-1])
        raise ws.CheckpointError("read back otherwise than written")

    monkeypatch.setattr(folder, "verify", damages)
    with pytest.raises(ws.CheckpointError, match="read back"):
        folder.write(5, some(2), {}, replaces=True)
    monkeypatch.undo()
    folder.clear()
    equal(folder.read(5)[1], kept)
    assert [path.name for path in folder.bad()] == ["bad-00000005-1"]


def test_what_stopped_writers_left_is_cleared(folder):
    folder.write(1, some(), {})
    for name in LITTER:
        (folder.folder / name).mkdir()
        (folder.folder / name / "00000-of-00001-00.safetensors").touch()
    (folder.folder / ".new-000000000000-1").mkdir()
    folder.clear()
    assert os.listdir(folder.folder) == ["step-00000001"]


def test_a_checkpoint_takes_the_place_of_one_of_its_step_or_that_one_stays(folder, monkeypatch):
    old = some(2)
    new = some(3)
    folder.write(5, old, {"at": "first"})
    folder.write(5, new, {"at": "last"}, replaces=True)
    equal(folder.read(5)[1], new)
    assert os.listdir(folder.folder) == ["step-00000005"]
    real = os.rename
    seen = []

    def stops(*paths):
        seen.append(paths)
        if len(seen) == 2:
            raise KeyboardInterrupt
        real(*paths)

    monkeypatch.setattr(os, "rename", stops)
    with pytest.raises(KeyboardInterrupt):
        folder.write(5, old, {}, replaces=True)
    monkeypatch.undo()
    assert folder.steps() == []
    folder.clear()  # by whoever holds the lock next
    equal(folder.read(5)[1], new)
    assert os.listdir(folder.folder) == ["step-00000005"]


def test_a_checkpoint_that_cannot_take_the_place_of_another_leaves_that_one(folder, monkeypatch):
    kept = some(3)
    folder.write(5, kept, {})
    real = os.rename
    seen = []

    def fails(*paths):
        seen.append(paths)
        if len(seen) == 2:
            raise OSError(5, "EIO")
        real(*paths)

    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(ws.CheckpointError, match="EIO"):
        folder.write(5, some(2), {}, replaces=True)
    equal(folder.read(5)[1], kept)
    assert os.listdir(folder.folder) == ["step-00000005"]


def test_an_older_one_that_cannot_be_removed_is_told(folder, monkeypatch):
    folder.write(1, some(), {})

    def fails(*paths):
        raise OSError(13, "EACCES")

    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(
        ws.CheckpointError, match=r"must be removed: .*step-00000001\. Received: EACCES"
    ):
        folder.remove(1)
    assert folder.steps() == [1]


# ---- where the folder is ----


def locked(folder):
    common = SharedFolder(folder, SingleProcess())
    common.lock()
    return common


def save(common, step):
    common.write(Manifest(step, [], [], {}, {}), some())


@pytest.mark.parametrize("wrong", ["", "a\0b", "a\ud800b", b"runs", 5], ids=repr)
def test_what_is_no_path_is_refused(wrong):
    with pytest.raises(ws.SpecificationError, match="file system"):
        Folder(wrong)


def test_a_folder_stays_where_it_was_when_the_working_directory_changes(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    asked = ws.Checkpoints("runs", keep_best=("loss", 1))
    common = locked(Folder("runs"))
    monkeypatch.chdir(tmp_path / "elsewhere")
    rest = {"watched": {"name": "loss", "number": 1.0, "mode": "min"}}
    common.write(Manifest(1, [], [], {}, rest), some())
    common.release()
    assert asked.best == tmp_path / "runs" / "step-00000001"
    assert os.listdir(tmp_path / "elsewhere") == []


def removed(path):
    shutil.rmtree(path)


def renamed(path):
    path.rename(path.with_name("other"))


def replaced(path):
    path.rename(path.with_name("other"))
    Folder(path).lock().release()


def unlocked(path):
    (path / "lock").unlink()


@pytest.mark.parametrize(
    "change", [removed, renamed, replaced, unlocked], ids=lambda change: change.__name__
)
def test_nothing_is_written_to_another_folder_than_the_one_that_was_locked(change, tmp_path):
    path = tmp_path / "runs"
    common = locked(Folder(path))
    save(common, 1)
    change(path)
    before = sorted(os.listdir(path)) if path.exists() else None
    with pytest.raises(
        ws.CheckpointError, match=f"{path} must stay the folder that this run locked"
    ):
        save(common, 2)
    assert (sorted(os.listdir(path)) if path.exists() else None) == before
    common.release()


def test_every_folder_that_is_made_is_synced_into_the_one_above(tmp_path, monkeypatch):
    real = os.fsync
    synced = []

    def fsync(file):
        synced.append(os.readlink(f"/proc/self/fd/{file}"))
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    Folder(tmp_path / "a" / "b" / "c").lock().release()
    assert synced == [str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")]


def test_a_file_of_others_called_lock_is_left_as_it_is(tmp_path):
    (tmp_path / "lock").write_text("a stranger's")
    with pytest.raises(ws.CheckpointError, match="must be the lock of a folder of checkpoints"):
        Folder(tmp_path).lock()
    assert (tmp_path / "lock").read_text() == "a stranger's"


# ---- damage, and every other error ----


@pytest.mark.parametrize(
    "error", [KeyError("x"), TypeError("x"), ValueError("x"), OSError(5, "x"), RecursionError("x")]
)
def test_an_error_of_what_checks_a_checkpoint_sets_nothing_aside(folder, error):
    for step in (1, 2):
        folder.write(step, some(), {})

    def check(*_):
        raise error

    with pytest.raises(type(error)) as caught:
        newest(SharedFolder(folder, SingleProcess()), check, sets_aside=True)
    assert caught.value is error
    assert (folder.steps(), folder.bad()) == ([2, 1], [])


def test_checkpoints_that_are_listed_and_cannot_be_found_are_no_beginning(folder, monkeypatch):
    monkeypatch.setattr(folder, "steps", lambda: [7])
    with pytest.raises(ws.CheckpointError, match=r"steps \[7\], all gone"):
        newest_in(folder)


def test_a_link_in_a_damaged_checkpoint_is_not_written_through(folder, tmp_path):
    folder.write(1, some(), {})
    folder.write(2, some(), {})
    (folder.path(2) / "manifest.json").unlink()
    (folder.path(2) / "why.json").symlink_to(tmp_path / "outside")
    assert newest_in(folder).manifest.step == 1
    assert not (tmp_path / "outside").exists()
    assert len(folder.bad()) == 1
