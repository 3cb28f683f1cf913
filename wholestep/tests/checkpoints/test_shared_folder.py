"""A folder of checkpoints that several processes use together: all are there or none, and all say
the same.
"""

import errno
import json
import os
from functools import partial

import numpy as np
import pytest
from folders import NUMBERS, cut
from threads import played

import wholestep as ws
from wholestep.checkpoints import shared_folder
from wholestep.checkpoints.folder import Folder
from wholestep.checkpoints.manifest import Manifest
from wholestep.checkpoints.resume import newest
from wholestep.checkpoints.shards import ShardedArray
from wholestep.checkpoints.shared_folder import BoundaryFlags, Consensus, SharedFolder

COUNTS = (1, 2, 3)
NOTHING = BoundaryFlags(terminated=False, failed=False, late=False)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs"


def kept(step):
    return {f"params/{i}": np.full((i + 1, 3), step + i, "float32") for i in range(5)} | {
        "facts/also": np.ones(2)
    }


def mine(seat, step):
    """Return the arrays of a process: all full ones, and its pieces of a sharded one."""
    own = cut(
        NUMBERS + step,
        range(1, seat.count) if seat.count > 1 else [],
        [],
        own=lambda i: i == seat.index,
    )
    return kept(step) | {"params/w": own}


def write(seat, path, step, **how):
    common = SharedFolder(Folder(path), seat)
    common.lock()
    try:
        common.write(Manifest(step, [], [], {"step": step}, {}), mine(seat, step), **how)
    finally:
        common.release()


def read(seat, path, **how):
    found = newest(
        SharedFolder(Folder(path), seat),
        how.pop("check", lambda *_: None),
        **{"sets_aside": True} | how,
    )
    whole = {name: array[...] for name, array in found.snapshot.arrays.items()}
    return found.manifest.step, found.aside, {name: array.tolist() for name, array in whole.items()}


def said(step):
    return {
        name: array.tolist() for name, array in (kept(step) | {"params/w": NUMBERS + step}).items()
    }


# ---- writing and reading ----


@pytest.mark.parametrize("read_by", COUNTS)
@pytest.mark.parametrize("written_by", COUNTS)
def test_whoever_reads_has_what_was_written_however_many_they_are(written_by, read_by, path):
    assert played(written_by, partial(write, path=path, step=4)) == [None] * written_by
    assert sorted(p.name for p in path.iterdir()) == ["lock", "step-00000004"]
    for step, aside, arrays in played(read_by, partial(read, path=path)):
        assert (step, aside, arrays) == (4, [], said(4))


def test_every_process_writes_a_part_and_nothing_is_written_twice(path):
    played(3, partial(write, path=path, step=1))
    manifest = Folder(path).verify(1)
    by_process = {}
    for file in manifest.files:
        by_process.setdefault(file.name[:5], []).append(file.nbytes)
    assert sorted(by_process) == ["00000", "00001", "00002"]
    assert sum(leaf.nbytes for leaf in manifest.leaves) == sum(
        a.nbytes for a in (*kept(1).values(), NUMBERS)
    )
    assert {leaf.file[:5] for leaf in manifest.leaves if leaf.name == "params/w"} == set(by_process)
    assert {leaf.file[:5] for leaf in manifest.leaves if leaf.name == "facts/also"} == {"00000"}


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_if_one_cannot_write_nothing_is_committed_and_all_are_told(failing, path, monkeypatch):
    played(3, partial(write, path=path, step=1))
    real = Folder.fill

    def fill(self, token, step, arrays, share=(0, 1)):
        if share[0] == failing:
            raise ws.CheckpointError(f"No space left for {step}.")
        return real(self, token, step, arrays, share)

    monkeypatch.setattr(Folder, "fill", fill)
    errors = played(3, partial(write, path=path, step=2))
    told = [
        "No space left for 2." if i == failing else f"Process {failing}: No space left for 2."
        for i in range(3)
    ]
    assert [str(error) for error in errors] == told
    assert all(type(error) is ws.CheckpointError for error in errors)
    assert sorted(p.name for p in path.iterdir()) == ["lock", "step-00000001"]


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_disk_that_fails_in_the_commit_leaves_the_checkpoint_before(call, path, monkeypatch):
    played(2, partial(write, path=path, step=1))

    def fails(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def commit(self, token, manifest, *, replaces):
        with monkeypatch.context() as patched:
            patched.setattr(os, call, fails)
            return real(self, token, manifest, replaces=replaces)

    real = Folder.commit
    monkeypatch.setattr(Folder, "commit", commit)
    errors = played(2, partial(write, path=path, step=2))
    assert all("No space left on device" in str(error) for error in errors)
    assert str(errors[1]).startswith("Process 0: The checkpoint of step 2 ")
    assert sorted(p.name for p in path.iterdir()) == ["lock", "step-00000001"]


def test_what_comes_after_the_commit_comes_once_and_its_error_is_everybodys(path):
    came = []
    played(3, partial(write, path=path, step=1, then=lambda: came.append(1)))
    assert came == [1]

    def fails():
        raise ws.CheckpointError("An older checkpoint must be removed.")

    errors = played(3, partial(write, path=path, step=2, then=fails))
    assert [str(error)[:10] for error in errors] == ["An older c", "Process 0:", "Process 0:"]
    assert Folder(path).steps() == [2, 1]  # which was written


def test_one_run_at_a_time_also_if_it_has_several_processes(path):
    lock = Folder(path).lock()
    errors = played(2, partial(write, path=path, step=1))
    assert all("One run at a time" in str(error) for error in errors)
    assert [str(error).startswith("Process 0:") for error in errors] == [False, True]
    lock.release()
    assert played(2, partial(write, path=path, step=1)) == [None, None]


def test_processes_that_do_not_see_one_folder_are_told_so(tmp_path):
    def work(seat):
        write(seat, tmp_path / str(seat.index), 1)

    errors = played(2, work)
    assert all("must see one folder of checkpoints" in str(error) for error in errors)
    assert "a folder locked by no process" in str(errors[1])
    assert str(errors[0]).startswith("Process 1:")
    Folder(tmp_path / "0").lock().release()  # nobody holds it


def test_a_folder_that_another_run_left_is_not_taken_for_one_that_is_shared(tmp_path):
    for i in range(2):
        Folder(tmp_path / str(i)).lock().release()
    errors = played(2, lambda seat: write(seat, tmp_path / str(seat.index), 1))
    assert all("must see one folder of checkpoints" in str(error) for error in errors)


# ---- failures of a single process ----


def test_damage_that_one_process_finds_is_damage_for_all(path):
    for step in (1, 2):
        played(2, partial(write, path=path, step=step))
    last = max(Folder(path).path(2).glob("*.safetensors"))
    last.write_bytes(last.read_bytes()[:-1] + b"x")
    found = played(2, partial(read, path=path))
    assert [(step, len(aside), arrays) for step, aside, arrays in found] == [(1, 1, said(1))] * 2
    (bad,) = Folder(path).bad()
    assert last.name in json.loads((bad / "why.json").read_text())["why"]
    assert Folder(path).steps() == [1]


def test_who_only_reads_sets_nothing_aside(path):
    for step in (1, 2):
        played(2, partial(write, path=path, step=step))
    (Folder(path).path(2) / "manifest.json").write_bytes(b"{}")
    found = played(2, partial(read, path=path, sets_aside=False))
    assert [step for step, *_ in found] == [1, 1]
    assert Folder(path).steps() == [2, 1]
    errors = played(2, partial(read, path=path, sets_aside=False, step=2))
    assert all("must have the digest" in str(error) for error in errors)


def test_another_model_in_one_process_is_an_error_of_all(path):
    played(2, partial(write, path=path, step=1))

    def check(seat, snapshot):
        if seat.index == 1:
            raise ws.SpecificationError(f"Another model than {snapshot.facts['step']}.")

    errors = played(
        2, lambda seat: read(seat, path, check=lambda snapshot, _: check(seat, snapshot))
    )
    assert [str(error) for error in errors] == [
        "Process 1: Another model than 1.",
        "Another model than 1.",
    ]
    assert all(type(error) is ws.SpecificationError for error in errors)
    assert Folder(path).steps() == [1]


def test_a_checkpoint_that_one_process_cannot_open_now_is_not_set_aside(path, monkeypatch):
    played(2, partial(write, path=path, step=1))
    real = Folder.read

    def fails(self, step, check, share):
        if share[0] == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(self, step, check, share)

    monkeypatch.setattr(Folder, "read", fails)
    errors = played(2, partial(read, path=path))
    assert [str(error).startswith("Process 1:") for error in errors] == [True, False]
    assert (Folder(path).steps(), Folder(path).bad()) == ([1], [])


def test_no_process_reads_pieces_that_it_does_not_ask_for(path):
    played(3, partial(write, path=path, step=1))

    def work(seat):
        found = newest(SharedFolder(Folder(path), seat), lambda *_: None, sets_aside=False)
        return found.snapshot.arrays["params/w"]

    for pieces in played(3, work):
        assert isinstance(pieces, ShardedArray)
        for other in (Folder(path).path(1)).glob("*-01.safetensors"):
            other.unlink(missing_ok=True)
        np.testing.assert_array_equal(pieces[1:], NUMBERS[1:] + 1)


# ---- at a boundary ----


def test_one_process_asks_nobody(monkeypatch):
    def work(seat):
        monkeypatch.setattr(
            seat.exchange, "all_gather", lambda *_: pytest.fail("somebody was asked")
        )
        together = Consensus(seat)
        assert [together.ask("a", NOTHING._replace(late=True)).late for _ in range(3)] == [True] * 3

    assert played(1, work) == [None]


def test_what_is_on_in_one_process_is_on_in_all_but_the_time_is_the_firsts():
    def work(seat):
        together = Consensus(seat)
        return [
            together.ask(
                "a", BoundaryFlags(seat.index == 1, failed=False, late=seat.index == 1), now=True
            ),
            together.ask(
                "a",
                BoundaryFlags(terminated=False, failed=seat.index == 2, late=seat.index == 0),
                now=True,
            ),
        ]

    first = NOTHING._replace(terminated=True)
    second = BoundaryFlags(terminated=False, failed=True, late=True)
    assert played(3, work) == [[first, second]] * 3


def test_they_ask_about_once_a_second_and_all_at_the_same_boundaries(monkeypatch):
    class Clock:
        now = 0.0

        @classmethod
        def monotonic(cls):
            return cls.now

    monkeypatch.setattr(shared_folder, "time", Clock)

    def work(seat):
        together = Consensus(seat)
        asked = []
        at = []
        gather = seat.all_gather
        monkeypatch.setattr(
            seat, "all_gather", lambda value, what: (asked.append(1), gather(value, what))[1]
        )
        for i in range(400):
            seat.shared.barrier.wait(20)
            if seat.index == 0:
                Clock.now = i * 0.02 if i < 300 else 6.0 + (i - 300) * 0.5
            seat.shared.barrier.wait(20)
            before = len(asked)
            together.ask("update", NOTHING)
            # another kind of boundary, another pause
            together.ask("validation", NOTHING, now=i == 7)
            if len(asked) > before:
                at.append(i)
        return at

    first, second = played(2, work)
    assert first == second
    assert first[:5] == [0, 2, 6, 7, 14]
    assert 6 <= len([i for i in first if 100 < i < 290]) <= 9  # two kinds, in 3.8 seconds
    assert np.diff(first)[-1] <= 4  # when each takes longer, they ask more often again


# ---- processes that do not do the same ----


def test_processes_that_save_different_steps_commit_neither(path):
    errors = played(3, lambda seat: write(seat, path, step=7 if seat.index < 2 else 8))
    words = (
        "process 0 is saving the checkpoint of step 7; process 2 is saving the checkpoint of step 8"
    )
    assert all(type(error) is ws.PeerError and words in str(error) for error in errors)
    assert sorted(p.name for p in path.iterdir()) == ["lock"]


@pytest.mark.parametrize("odd", [0, 1])
def test_processes_that_have_other_arrays_commit_nothing(odd, path):
    def work(seat):
        common = SharedFolder(Folder(path), seat)
        common.lock()
        more = {"params/x": np.ones(500)} if seat.index == odd else {}
        try:
            common.write(Manifest(1, [], [], {}, {}), more | kept(1))
        finally:
            common.release()

    errors = played(2, work)
    assert all(isinstance(error, ws.CheckpointError) for error in errors)
    assert sorted(p.name for p in path.iterdir()) == ["lock"]


def test_one_that_saves_while_another_reads_is_told_so(path):
    played(2, partial(write, path=path, step=1))
    errors = played(
        2, lambda seat: write(seat, path, 2) if seat.index else read(seat, path, sets_aside=False)
    )
    assert all(type(error) is ws.PeerError for error in errors)
    assert "process 0 is reading checkpoints" in str(errors[0])
    assert "process 1 is locking the folder" in str(errors[0])


@pytest.mark.parametrize(
    "error", [MemoryError("none left"), OSError(5, "Input/output error"), KeyError("w")]
)
def test_any_error_of_one_is_an_error_of_all(error, path, monkeypatch):
    real = Folder.fill

    def fill(self, token, step, arrays, share=(0, 1)):
        if share[0] == 1:
            raise error
        return real(self, token, step, arrays, share)

    monkeypatch.setattr(Folder, "fill", fill)
    told, own = played(2, partial(write, path=path, step=1))
    assert own is error
    assert type(told) is ws.CheckpointError
    assert str(told) == f"Process 1: {type(error).__name__}: {error}"
    assert sorted(p.name for p in path.iterdir()) == ["lock"]


def test_what_was_read_in_pieces_can_be_saved_again_by_any_number(path, tmp_path):
    played(3, partial(write, path=path, step=1))

    def again(seat):
        found = newest(SharedFolder(Folder(path), seat), lambda *_: None, sets_aside=False)
        common = SharedFolder(Folder(tmp_path / str(seat.count)), seat)
        common.lock()
        common.write(Manifest(1, [], [], {"step": 1}, {}), found.snapshot.arrays)
        common.release()

    for count in COUNTS:
        assert played(count, again) == [None] * count
        assert played(1, partial(read, path=tmp_path / str(count))) == [(1, [], said(1))]


def test_nothing_is_left_of_what_processes_told_each_other(path):
    def work(seat):
        left = []
        for step in range(1, 9):
            write(seat, path, step)
            seat.all_gather(None, "resting")
            seat.all_gather(None, "resting")
            seat.shared.barrier.wait(20)
            left.append(len(seat.shared.values))
            seat.shared.barrier.wait(20)
        return left

    first, second = played(2, work)
    assert first == second == first[:1] * 8
