"""A checkpoint in a store is complete or does not exist, and resumes with the same bits.

The store is fsspec's memory, and with s3fs and moto (`make remote`) a local server of S3's protocol.
"""

import json
import os
from itertools import pairwise
from pathlib import Path

import keras
import pytest
from folders import once
from runs import BATCHES, HOW, LAST, Tells, X, Y, check_same_bits, leaves, small
from small import count_calls
from stores import Memory, TwoProcesses, arrays, filled, fsspec, pushed, store
from threads import played

import wholestep as ws
from wholestep import cli
from wholestep.checkpoints.folder import Folder
from wholestep.checkpoints.manifest import Manifest
from wholestep.checkpoints.settings import to_remove
from wholestep.checkpoints.shared_folder import SharedFolder
from wholestep.errors import DamagedError


@pytest.fixture(params=["memory", "s3"])
def url(request, monkeypatch, tmp_path):
    """The address of an empty folder in a store; temporary folders of this test are in `tmp_path /
    "tmp"`.
    """
    if request.param == "s3":
        request.getfixturevalue("server")
    monkeypatch.setattr("wholestep.checkpoints.store._PAUSES", (0.0, 0.0))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    address = f"{request.param}://bucket/{tmp_path.name}"
    yield address
    files = fsspec.filesystem(request.param)
    files.invalidate_cache()
    if files.find(address):
        files.rm(address, recursive=True)


@pytest.fixture(scope="module")
def server():
    pytest.importorskip("s3fs")
    served = pytest.importorskip("moto.server").ThreadedMotoServer(port=0)
    served.start()
    host, port = served.get_host_and_port()
    names = {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            **names,
            "AWS_ACCESS_KEY_ID": "any",
            "AWS_SECRET_ACCESS_KEY": "any",
        }.items():
            patch.setenv(name, value)
        fsspec.filesystem("s3").mkdir("bucket")
        yield
    served.stop()


@pytest.fixture
def memory(url):
    """The address of a folder in memory alone, which some faults are easily put into."""
    if not url.startswith("memory:"):
        pytest.skip("in memory alone")
    return url


def files_of(url):
    """Return the objects below an address, by their names there."""
    files, root = fsspec.url_to_fs(url)
    files.invalidate_cache()
    return {path.removeprefix(f"{root}/"): path for path in files.find(root)}


def overwrite(url, name, change):
    files, path = fsspec.url_to_fs(f"{url}/{name}")
    files.pipe_file(path, change(files.cat_file(path)))


def flip(content):
    return content[:-1] + bytes([content[-1] ^ 1])


def equalize(folder, kept):
    store.pull(folder, kept)
    store.publish(folder, kept, "next")


# ---- a run ----


def test_a_run_in_a_store_goes_on_with_the_same_bits(url, tmp_path, capfd):
    whole = ws.Trainer(small())
    history = whole.fit(X, Y, **HOW).history
    asked = ws.Checkpoints(url, every_steps=2, every_seconds=None, keep=2)
    ws.Trainer(small()).fit(X, Y, checkpoints=asked, **HOW | {"epochs": 1})
    assert os.listdir(tmp_path / "tmp") == []
    resumed = ws.Trainer(small(1))
    assert resumed.fit(X, Y, checkpoints=asked, **HOW).history == history
    check_same_bits(leaves(whole.model), leaves(resumed.model))
    kept = store.Store(url)
    assert (kept.steps()[0], len(kept.steps())) == (LAST, 2)
    assert {kept.verify(step).step for step in kept.steps()} == {*kept.steps()}
    assert f"copied {url}/step-{BATCHES:08d} to {tmp_path}" in capfd.readouterr().err
    assert os.listdir(tmp_path / "tmp") == []


def test_by_hand_and_the_best(url, tmp_path, monkeypatch):
    asked = ws.Checkpoints(url, keep=1, keep_best=("good", 1, "max"))
    ws.Trainer(small()).fit(X, Y, checkpoints=asked, callbacks=[Tells(0.5, 0.9, 0.2)], **HOW)
    asked = ws.Checkpoints(url, keep=1, keep_best=("good", 1, "max"))
    puts = count_calls(monkeypatch, store.Store, "put")
    ws.Trainer(small(1)).fit(
        X, Y, checkpoints=asked, callbacks=[Tells(*[0.1] * 5)], **HOW | {"epochs": 5}
    )
    assert len(puts) == 1  # at the end: no epoch was the best
    assert store.Store(url).steps() == [5 * BATCHES, 2 * BATCHES]
    trainer = ws.Trainer(small(1))
    plain = ws.Trainer(small())
    trainer.restore(asked.best, only="weights")
    plain.fit(X, Y, **HOW | {"epochs": 2})
    check_same_bits(plain.model.get_weights(), trainer.model.get_weights())
    saved = plain.save(f"{url}/by-hand")
    assert saved == f"{url}/by-hand/step-{2 * BATCHES:08d}"
    with pytest.raises(ws.CheckpointError, match="must be the first of its step"):
        plain.save(f"{url}/by-hand")
    for path in (saved, f"{url}/by-hand"):
        trainer.restore(path)
        assert trainer.run.number == 2 * BATCHES
    model = small(1)
    assert ws.load_weights(model, asked.best).missing == []
    check_same_bits(plain.model.get_weights(), model.get_weights())
    with pytest.raises(ws.CheckpointError, match=f"none in {url}/nothing"):
        trainer.restore(f"{url}/nothing")
    with pytest.raises(
        ws.CheckpointError,
        match=f"no step-00000099 in {url}/by-hand, which has the steps {2 * BATCHES}",
    ):
        trainer.restore(f"{url}/by-hand/step-00000099")
    assert os.listdir(tmp_path / "tmp") == []


@pytest.mark.parametrize("why", ["missing", "full"])
def test_a_remote_checkpoint_needs_a_temporary_folder_and_says_so(
    why, memory, tmp_path, monkeypatch
):
    trainer = ws.Trainer(small())
    trainer.fit(X, Y, batch_size=8, verbose=0)
    trainer.save(f"{memory}/by-hand")
    if why == "full":
        full = type("Usage", (), {"free": 1})
        monkeypatch.setattr("shutil.disk_usage", lambda _: full)
    else:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    for call in (trainer.restore, lambda path: ws.load_weights(trainer.model, path)):
        with pytest.raises(
            ws.CheckpointError,
            match=r"in a temporary folder.*Try: set TMPDIR.*checkpoint copy memory",
        ):
            call(f"{memory}/by-hand")


def test_a_new_run_needs_an_empty_store(url):
    ws.Trainer(small()).fit(X, Y, checkpoints=url, **HOW)
    with pytest.raises(
        ws.CheckpointError,
        match=f"resume=False begins anew in an empty folder.*1 checkpoints in {url}",
    ):
        ws.Trainer(small()).fit(X, Y, checkpoints=ws.Checkpoints(url, resume=False), **HOW)


class Unsavable:
    def get_state(self):
        return object()

    def set_state(self, state):
        raise AssertionError


class Starts(keras.callbacks.Callback):
    """Starts another run at the end of the first epoch."""

    def __init__(self, begin):
        super().__init__()
        self.begin = begin

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0:
            with pytest.raises(
                ws.WholestepError, match=r"resume=False begins anew|holds another run"
            ):
                self.begin()


@pytest.mark.parametrize("how", [{"resume": False}, {}])
def test_a_start_that_is_refused_does_not_stop_the_run_that_writes(how, memory, tmp_path):
    def begin():
        ws.Trainer(small()).fit(X + 1, Y, checkpoints=ws.Checkpoints(memory, **how), **HOW)

    asked = ws.Checkpoints(memory, every_steps=2, every_seconds=None)
    ws.Trainer(small()).fit(X, Y, checkpoints=asked, callbacks=[Starts(begin)], **HOW)
    assert store.Store(memory).steps()[0] == LAST
    assert os.listdir(tmp_path / "tmp") == []


def test_a_start_that_is_refused_writes_nothing_to_the_store(url, tmp_path):
    ws.Trainer(small()).fit(X + 1, Y, checkpoints=url, **HOW | {"epochs": 1})
    files = files_of(url)
    read = fsspec.url_to_fs(url)[0].cat_file
    before = {name: read(path) for name, path in files.items()}
    ws.Trainer(small()).fit(X, Y, checkpoints=tmp_path / "other", **HOW)
    for how in ({"resume": False}, {"local": tmp_path / "other"}):
        with pytest.raises(ws.WholestepError):
            ws.Trainer(small()).fit(X + 1, Y, checkpoints=ws.Checkpoints(url, **how), **HOW)
        assert {name: read(path) for name, path in files_of(url).items()} == before
    assert Folder(tmp_path / "other").steps() == [LAST]
    for how, match in [
        ({"also": {"name": Unsavable()}}, "object"),
        ({"keep_best": ("val_thing", 1)}, "where Keras does not know"),
    ]:
        with pytest.raises(ws.WholestepError, match=match):
            ws.Trainer(small()).fit(X + 1, Y, checkpoints=ws.Checkpoints(url, **how), **HOW)
        assert {name: read(path) for name, path in files_of(url).items()} == before


def test_the_local_folder_of_another_run_is_refused(url, tmp_path):
    how = HOW | {"epochs": 1}
    ws.Trainer(small()).fit(X, Y, checkpoints=tmp_path / "plain", **HOW)
    ws.Trainer(small()).fit(
        X, Y, checkpoints=ws.Checkpoints(f"{url}/a", local=tmp_path / "a"), **how
    )
    ws.Trainer(small()).fit(
        X, Y, checkpoints=ws.Checkpoints(f"{url}/b", local=tmp_path / "b"), **how
    )
    held = {name: store.Store(f"{url}/{name}").manifest(BATCHES) for name in "ab"}
    assert {name: manifest.rest["store"] for name, manifest in held.items()} == {
        name: f"{url}/{name}" for name in "ab"
    }
    for local, match in [
        ("a", f"its step {BATCHES}, of a run in {url}/a"),
        ("plain", "of a run in that folder alone"),
    ]:
        with pytest.raises(
            ws.CheckpointError, match=f"must be of the run in {url}/b. Received: .*{match}"
        ):
            ws.Trainer(small()).fit(
                X, Y, checkpoints=ws.Checkpoints(f"{url}/b", local=tmp_path / local, keep=1), **HOW
            )
        kept = store.Store(f"{url}/b")
        assert (kept.steps(), kept.verify(BATCHES)) == ([BATCHES], held["b"])
    # also if the store is empty
    with pytest.raises(ws.CheckpointError, match=f"of a run in {url}/a"):
        ws.Trainer(small()).fit(
            X, Y, checkpoints=ws.Checkpoints(f"{url}/c", local=tmp_path / "a"), **HOW
        )
    assert store.Store(f"{url}/c").steps() == []
    ws.Trainer(small()).fit(
        X, Y, checkpoints=ws.Checkpoints(f"{url}/d", local=tmp_path / "plain"), **HOW
    )
    assert cli.main(["checkpoint", "copy", str(tmp_path / "a"), f"{url}/e"]) == 0
    ws.Trainer(small()).fit(
        X, Y, checkpoints=ws.Checkpoints(f"{url}/e", local=tmp_path / "a"), **HOW
    )
    kept = store.Store(f"{url}/e")
    assert [kept.manifest(step).rest["store"] for step in kept.steps()] == [f"{url}/e", f"{url}/a"]


def test_a_password_is_not_in_a_checkpoint():
    assert store.Store("memory://me:secret@host/a").folder == "memory://host/a"
    assert store.Store("memory://container@account/a/").folder == "memory://container@account/a"


def test_no_run_begins_while_another_publishes(url, tmp_path):
    local, kept = pushed(url, tmp_path, 1)
    store.pull(other := filled(tmp_path / "other"), kept)
    local.write(2, arrays(2), {})
    store.push(local, 2, store.Store(url))
    with pytest.raises(
        ws.CheckpointError, match=r"No other run may write to .*\[2\], which was \[1\] before"
    ):
        store.publish(other, kept, "second")


def test_an_upload_that_fails_loses_nothing(memory, tmp_path, monkeypatch):
    opened = Memory._open

    def refuse(self, path, mode="rb", **how):
        if f"step-{LAST:08d}" in path and "w" in mode:
            raise OSError("the network is gone")
        return opened(self, path, mode, **how)

    monkeypatch.setattr(Memory, "_open", refuse)
    with pytest.raises(
        ws.CheckpointError,
        match=r"could not be copied to memory:.*the network is gone.*complete in",
    ):
        ws.Trainer(small()).fit(
            X, Y, checkpoints=ws.Checkpoints(memory, every_steps=BATCHES), **HOW
        )
    assert store.Store(memory).steps() == [2 * BATCHES, BATCHES]
    (left,) = (tmp_path / "tmp").iterdir()
    assert Folder(left).verify(LAST).step == LAST
    monkeypatch.setattr(Memory, "_open", opened)
    # it had ended
    ws.Trainer(small(1)).fit(X, Y, checkpoints=ws.Checkpoints(memory, local=left), **HOW)
    assert store.Store(memory).verify(LAST).step == LAST
    assert left.exists()


def test_an_upload_that_fails_twice_succeeds(memory, tmp_path, monkeypatch):
    opened = Memory._open
    left = [2]

    def refuse(self, path, mode="rb", **how):
        if "w" in mode and path.endswith("safetensors") and left[0]:
            left[0] -= 1
            raise TimeoutError("no answer")
        return opened(self, path, mode, **how)

    monkeypatch.setattr(Memory, "_open", refuse)
    _, kept = pushed(memory, tmp_path, 1)
    assert (kept.verify(1).step, left) == (1, [0])


def test_a_store_that_does_not_answer_is_not_taken_for_an_empty_one(memory, monkeypatch, capsys):
    def refuse(*_, **__):
        raise PermissionError(13, "Access Denied")

    monkeypatch.setattr(Memory, "ls", refuse)
    with pytest.raises(
        ws.CheckpointError, match=r"must be accessible\. Received: PermissionError.*Access Denied"
    ):
        ws.Trainer(small()).fit(X, Y, checkpoints=memory, **HOW)
    assert cli.main(["checkpoint", "ls", memory]) == 1
    assert "Access Denied" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["safetensors", "manifest.json"])
def test_an_object_that_reads_back_otherwise_is_not_published(name, memory, tmp_path, monkeypatch):
    read = Memory.cat_file

    def change(self, path, **how):
        return flip(read(self, path, **how)) if path.endswith(name) else read(self, path, **how)

    monkeypatch.setattr(Memory, "cat_file", change)
    with pytest.raises(ws.CheckpointError, match="reads back otherwise than written"):
        pushed(memory, tmp_path, 1)
    monkeypatch.setattr(Memory, "cat_file", read)
    assert Folder(tmp_path / "local").verify(1).step == 1
    assert name == "manifest.json" or store.Store(memory).steps() == []


# ---- whole or not at all ----


class Killed(BaseException):
    pass


def copied_until_killed(folder, kept):
    """Copy two checkpoints, the second one twice, and remove the first; return what was begun."""
    begun = []
    try:
        kept.claim("first")
        for step in (1, 2, 2):
            begun.append(step)
            store.copy(folder, step, kept)
        kept.remove(1)
    except Killed:
        return begun, True
    return begun, False


def test_a_writer_that_is_killed_at_any_change_leaves_a_good_checkpoint(
    memory, tmp_path, monkeypatch
):
    opened = Memory._open
    removed = Memory._rm
    left = [0]
    folder = filled(tmp_path / "local", 1, 2)

    def count():
        left[0] -= 1
        if left[0] == 0:
            raise Killed

    def opens(self, path, mode="rb", **how):
        if "w" in mode:
            count()
        return opened(self, path, mode, **how)

    def removes(self, path):
        count()
        removed(self, path)

    monkeypatch.setattr(Memory, "_open", opens)
    monkeypatch.setattr(Memory, "_rm", removes)
    seen = set()
    for num in range(1, 100):
        kept, left[0] = store.Store(f"{memory}/{num}"), num
        begun, is_killed = copied_until_killed(folder, kept)
        other, left[0] = store.Store(f"{memory}/{num}"), 0
        steps = other.steps()
        for step in steps:
            assert folder.manifest(step) == other.verify(step)
        assert begun[-1:] in ([], [1]) or steps[:1] in ([1], [2])
        seen.add(tuple(steps))
        other.claim("second")
        names = {name.split("/")[0] for name in files_of(f"{memory}/{num}")} - {"lock"}
        assert len(names) == len(files_of(f"{memory}/{num}")) // 2
        assert {int(name.split("-")[1]) for name in names} == {*steps}
        if not is_killed:
            break
    assert seen == {(), (1,), (2, 1), (2,)}
    assert num > 10


def test_an_older_version_does_not_come_back_while_a_checkpoint_is_removed(
    memory, tmp_path, monkeypatch
):
    pushed(memory, tmp_path, 1)
    files, root = fsspec.url_to_fs(memory)
    removed = Memory._rm
    left = [0]

    def removes(self, path):
        left[0] -= 1
        if left[0] == 0:
            raise Killed
        removed(self, path)

    monkeypatch.setattr(Memory, "_rm", removes)
    for num in range(1, 5):
        for name, path in files_of(memory).items():
            for version in ("", "-2"):
                files.copy(path, f"{root}-{num}/step-00000001{version}/{name.split('/')[1]}")
        left[0] = num
        with pytest.raises(Killed):
            store.Store(f"{memory}-{num}").remove(1)
        found = store.Store(f"{memory}-{num}")
        assert found.steps() == [] or found.path(1).endswith("step-00000001-2")


def test_the_manifest_is_removed_before_the_files(memory, tmp_path, monkeypatch):
    _, kept = pushed(memory, tmp_path, 1)
    removed = Memory.rm
    seen = []

    def removes(self, path, recursive=False):
        seen.append([name.split("/")[1] for name in files_of(memory)])
        removed(self, path, recursive=recursive)

    monkeypatch.setattr(Memory, "rm", removes)
    kept.remove(1)
    file = "00000-of-00001-00.safetensors"
    assert (seen, files_of(memory)) == ([[file, "manifest.json"], [file]], {})


def test_half_a_checkpoint_is_never_used(url, tmp_path):
    _, kept = pushed(url, tmp_path, 1, 2)
    files, path = fsspec.url_to_fs(f"{url}/step-00000002/manifest.json")
    files.rm_file(path)
    assert store.Store(url).steps() == [1]
    other = filled(tmp_path / "other")
    equalize(other, kept)
    assert other.steps() == [1]
    kept.claim("next")
    assert {name.split("/")[0] for name in files_of(url)} == {"lock", "step-00000001"}


@pytest.mark.parametrize("name", ["00000-of-00001-00.safetensors", "manifest.json"])
@pytest.mark.parametrize(
    "change", [flip, lambda content: content[:-1], lambda content: content + b"\n"]
)
def test_a_damaged_checkpoint_is_not_used_and_is_written_again(name, change, url, tmp_path, capsys):
    local, kept = pushed(url, tmp_path, 1, 2)
    overwrite(url, f"step-00000002/{name}", change)
    kept = store.Store(url)
    other = filled(tmp_path / "other")
    with pytest.raises(ws.CheckpointError):
        kept.verify(2)
    equalize(other, kept)
    assert other.steps() == [1]
    assert f"{url}/step-00000002 is damaged, and is not used" in capsys.readouterr().err
    assert to_remove(kept, ws.Checkpoints(url, keep=1), 1) == []  # the newest good one
    store.push(local, 2, kept)
    assert store.Store(url).verify(2) == local.manifest(2)
    assert {*files_of(url)} >= {"step-00000002-2/manifest.json"}
    assert not [name for name in files_of(url) if name.startswith("step-00000002/")]
    for step in (1, 2):
        overwrite(url, f"step-0000000{step}{'-2' * (step - 1)}/manifest.json", flip)
    with pytest.raises(
        ws.CheckpointError, match=r"must be good\. Received: steps \[2, 1\], all damaged"
    ):
        equalize(filled(tmp_path / "third"), store.Store(url))


@pytest.mark.parametrize("verb", ["verify", "copy", "fetch"])
def test_a_checkpoint_that_is_replaced_while_it_is_read_is_read_anew(
    verb, memory, tmp_path, monkeypatch, capsys
):
    folder, writer = pushed(memory, tmp_path, 1)
    before = folder.manifest(1)

    def replace():
        folder.write(1, arrays(2), {"step": "new"}, replaces=True)
        store.push(folder, 1, writer)

    other = filled(tmp_path / "other")
    reader = store.Store(memory)
    once(monkeypatch, Memory, "info", replace)  # after the manifest was read, before the arrays
    if verb == "verify":
        found = reader.verify(1)
    elif verb == "copy":
        store.copy(reader, 1, other)
        found = other.verify(1)
    else:
        assert store.fetch(reader, reader.steps, other) == 1
        found = other.verify(1)
    assert found == folder.manifest(1) != before
    assert "damaged" not in capsys.readouterr().err


def test_if_a_checkpoint_is_removed_while_it_is_read_the_newest_is_read(
    memory, tmp_path, monkeypatch, capsys
):
    folder, writer = pushed(memory, tmp_path, 1, 2)

    def go_on():
        folder.write(3, arrays(3), {})
        store.push(folder, 3, writer)
        writer.remove(2)

    other = filled(tmp_path / "other")
    reader = store.Store(memory)
    once(monkeypatch, Memory, "info", go_on)
    store.pull(other, reader)
    assert other.steps() == [3]  # not the older 1, which is good
    assert "damaged" not in capsys.readouterr().err


def test_the_manifest_of_another_step_is_damage(url, tmp_path):
    local, _ = pushed(url, tmp_path, 1, 2)
    overwrite(
        url, "step-00000002/manifest.json", lambda _: (local.path(1) / "manifest.json").read_bytes()
    )
    for verb in (store.Store(url).manifest, store.Store(url).verify):
        with pytest.raises(DamagedError, match=r"must name its step\. It names 1"):
            verb(2)


def test_a_folder_by_its_address(tmp_path):
    _, kept = pushed(f"file://{tmp_path}/new/store", tmp_path, 1, 2)
    kept.remove(1)
    assert (kept.steps(), kept.verify(2).step) == ([2], 2)
    assert os.listdir(tmp_path / "new" / "store") == ["step-00000002"]


def test_damage_here_is_mended_from_there_and_the_newer_wins(url, tmp_path, capsys):
    folder, kept = pushed(url, tmp_path, 1, 2)
    for step in (2, 1):
        (file,) = folder.path(step).glob("*.safetensors")
        file.write_bytes(flip(file.read_bytes()))
    equalize(folder, kept)
    assert (folder.steps(), len(folder.bad())) == ([2], 2)
    assert "set aside" in capsys.readouterr().err
    own = {"store": url}
    folder.write(3, arrays(3), {}, own)
    equalize(folder, kept)
    assert kept.steps() == [3, 2, 1]
    new = {"time": "later"} | own
    folder.write(3, arrays(3), {}, new, replaces=True)
    equalize(folder, kept)
    assert kept.manifest(3).rest == new


def test_a_run_that_began_later_stops_an_earlier_one(url, tmp_path):
    folder = filled(tmp_path / "local", 1, 2)
    first = store.Store(url)
    second = store.Store(url)
    first.claim("first")
    store.push(folder, 1, first)
    second.claim("second")
    with pytest.raises(
        ws.CheckpointError, match=r"could not be copied.*One run at a time.*began later: second"
    ):
        store.push(folder, 2, first)
    store.push(folder, 2, second)
    assert second.verify(2).step == 2


def test_many_chunks(url, tmp_path, monkeypatch):
    monkeypatch.setattr("wholestep.checkpoints.store._CHUNK", 7)
    folder, kept = pushed(url, tmp_path, 3)
    other = filled(tmp_path / "other")
    store.copy(kept, 3, other)
    for file in folder.path(3).iterdir():
        assert file.read_bytes() == (other.path(3) / file.name).read_bytes()
    assert sum(1 for file in kept.manifest(3).files for _ in kept.chunks(3)(file)) > 10


# ---- several processes ----


def test_several_processes_publish_one_checkpoint(memory, tmp_path, monkeypatch):
    def work(seat):
        common = SharedFolder.of(memory, seat, tmp_path / "shared")
        common.lock()
        try:
            common.pull()
            common.publish()
            common.write(Manifest(5, [], [], {}, {}), arrays(5))
        finally:
            common.release()

    assert played(3, work) == [None] * 3
    assert store.Store(memory).verify(5).step == 5
    # of two processes, as there are two arrays
    assert len(store.Store(memory).manifest(5).files) == 2
    for found in played(2, lambda seat: SharedFolder.of(memory, seat)):
        assert isinstance(found, ws.SpecificationError)
        assert "need a local folder that all hosts see" in str(found)
    monkeypatch.setattr("wholestep.checkpoints.resume.connect", TwoProcesses)
    with pytest.raises(
        ws.SpecificationError,
        match=r"restore from a folder that all hosts see.*checkpoint copy memory:",
    ):
        ws.Trainer(small()).restore(memory)


def test_if_nothing_can_be_published_all_processes_are_told(memory, tmp_path, monkeypatch):
    monkeypatch.setattr(Memory, "pipe_file", lambda *_, **__: 1 / 0)

    def work(seat):
        common = SharedFolder.of(memory, seat, tmp_path / "shared")
        common.lock()
        try:
            common.write(Manifest(5, [], [], {}, {}), arrays(5))
        finally:
            common.release()

    for error in played(2, work):
        assert isinstance(error, ws.CheckpointError)
        assert "ZeroDivisionError" in str(error)
    assert Folder(tmp_path / "shared").verify(5).step == 5


# ---- which are kept ----


def test_a_checkpoint_stays_if_any_rule_keeps_it(url, tmp_path):
    def rest(step):
        value = {"name": "loss", "number": float(abs(step - 4)), "mode": "min"}
        return {"watched": value, "time": f"2026-01-01T00:00:{step:02d}+0000"}

    folder, kept = pushed(url, tmp_path, *range(1, 13), rest=rest)
    cases = [
        ({}, {12}),
        ({"keep": 3}, {10, 11, 12}),
        ({"keep_period": 5}, {5, 10, 12}),
        ({"keep_seconds": 2.5}, {10, 11, 12}),
        ({"keep_best": ("loss", 2)}, {4, 3, 12}),
        ({"keep_best": ("other", 2)}, {12}),
        (
            {"keep": 2, "keep_period": 6, "keep_seconds": 3, "keep_best": ("loss", 1)},
            {4, 6, 9, 10, 11, 12},
        ),
    ]
    for how, stays in cases:
        for one in (folder, kept):
            asked = ws.Checkpoints(tmp_path, **{"keep": 1, **how})
            assert {*range(1, 13)} - {*to_remove(one, asked, 12)} == stays, how
    # newer ones may be damaged
    assert to_remove(kept, ws.Checkpoints(tmp_path, keep=2), 5) == [1, 2, 3]


def test_a_run_keeps_its_periods(url, tmp_path):
    asked = ws.Checkpoints(
        url, local=tmp_path / "runs", every_steps=1, every_seconds=None, keep=1, keep_period=4
    )
    ws.Trainer(small()).fit(X, Y, checkpoints=asked, **HOW)
    wanted = sorted({*range(4, LAST + 1, 4), LAST}, reverse=True)
    assert store.Store(url).steps() == Folder(tmp_path / "runs").steps() == wanted


class Counts(keras.callbacks.Callback):
    """Records the numbers of checkpoints in the temporary folder."""

    def __init__(self, folder):
        super().__init__()
        self.folder, self.seen = folder, set()

    def on_train_batch_end(self, batch, logs=None):
        self.seen.add(len([*self.folder.glob("wholestep-*/step-*")]))


def test_a_temporary_folder_keeps_the_newest_checkpoint(url, tmp_path):
    counts = Counts(tmp_path / "tmp")
    asked = ws.Checkpoints(url, every_steps=1, every_seconds=None, keep=1, keep_period=1)
    ws.Trainer(small()).fit(X, Y, checkpoints=asked, callbacks=[counts], **HOW)
    assert len(store.Store(url).steps()) == LAST
    # the newest, and the one before until the newest is verified
    assert counts.seen - {0, 1} <= {2}


def test_requests_do_not_grow_with_the_number_of_checkpoints(memory, tmp_path, monkeypatch):
    calls = count_calls(monkeypatch, Memory, "ls")
    folder = filled(tmp_path / "local", *range(1, 31))
    kept = store.Store(memory)
    asked = ws.Checkpoints(memory, keep_period=1)
    seen = []
    for step in range(1, 31):
        calls.clear()
        store.push(folder, step, kept)
        assert to_remove(kept, asked, step) == []
        seen.append(len(calls))
    assert seen[-1] == seen[5]
    calls.clear()
    for step in to_remove(kept, ws.Checkpoints(memory), 30):
        kept.remove(step)
    assert len(calls) <= 2 * 27 + 1
    assert store.Store(memory).steps() == [30, 29, 28]


# ---- the command ----


def run(capsys, *arguments):
    code = cli.main(["checkpoint", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_checkpoints_are_copied_between_any_two_places(url, tmp_path, capsys):
    local, _ = pushed(url, tmp_path, 1, 2)
    places = [url, tmp_path / "a", f"{url}/b", f"{url}/c"]
    for source, target in pairwise(places):
        for word in ("copied", "exists already"):
            code, out, _ = run(capsys, "copy", source, target)
            assert (code, out.splitlines()) == (
                0,
                [f"step-0000000{step}  {word}" for step in (1, 2)],
            )
    files = files_of(f"{url}/c")
    assert len(files) == 4
    for name, path in files.items():
        assert fsspec.url_to_fs(url)[0].cat_file(path) == (local.folder / name).read_bytes()
    assert run(capsys, "copy", f"{url}/step-00000001", tmp_path / "one")[:2] == (
        0,
        "step-00000001  copied\n",
    )
    filled(tmp_path / "other", 2, rest=lambda step: {"news": 1})
    code, _, err = run(capsys, "copy", tmp_path / "other", url)
    assert (code, "must be missing, or equal to" in err) == (1, True)
    code, _, err = run(capsys, "copy", url, local.path(1))
    assert (code, "TARGET must be a folder of checkpoints" in err) == (1, True)


@pytest.mark.parametrize("there", [True, False])
def test_a_damaged_one_is_not_copied(there, url, tmp_path, capsys):
    local, _ = pushed(url, tmp_path, 1, 2)
    (file,) = local.path(1).glob("*.safetensors")
    file.write_bytes(flip(file.read_bytes()))
    overwrite(url, f"step-00000001/{file.name}", flip)
    source, target = (url, tmp_path / "new") if there else (local.folder, f"{url}/new")
    code, out, _ = run(capsys, "copy", source, target, "--json")
    one, two = json.loads(out)
    assert (code, two["result"]) == (1, "copied")
    assert "must have the digest" in one["bad"]
    assert run(capsys, "ls", target)[1].split()[0] == "step-00000002"


@pytest.mark.parametrize("there", [True, False])
def test_what_no_rule_keeps_is_removed(there, url, tmp_path, capsys):
    local, kept = pushed(url, tmp_path, *range(1, 8))
    folder, path = (kept, url) if there else (local, local.folder)
    newest = f"step-00000007/{kept.manifest(7).files[0].name}"
    if there:
        overwrite(url, newest, flip)
    else:
        (local.folder / newest).write_bytes(flip((local.folder / newest).read_bytes()))
    for word in ("would be removed", "removed"):
        dry = ["--dry-run"] if "would" in word else []
        code, out, _ = run(capsys, "prune", path, "--keep", 1, "--keep-period", 3, *dry)
        lines = out.splitlines()
        assert (code, "step-00000007  BAD" in lines[0]) == (1, True)
        assert lines[1:] == [
            "step-00000006  is the newest good one",
            *(f"step-0000000{i}  {word}" for i in (1, 2, 4, 5)),
        ]
        assert len(folder.steps()) == (7 if dry else 3)
    assert folder.steps() == [7, 6, 3]
    assert folder.verify(3).step == 3
    with pytest.raises(SystemExit):
        run(capsys, "prune", path)
    assert "--keep" in capsys.readouterr().err
    assert (
        "keep must be a whole number of at least 1. Received: 0. Try: keep=3."
        in run(capsys, "prune", path, "--keep", 0)[2]
    )


def test_a_choice_that_would_remove_too_much_is_refused(url, tmp_path, capsys):
    watched = {"watched": {"name": "val_loss", "number": 0.25, "mode": "min"}}
    local, kept = pushed(url, tmp_path, 1, 2, 3, rest=lambda step: watched)
    for folder in (local, kept):
        for path, best, match in [
            (
                folder.path(3),
                "val_loss:1",
                "PATH must be a folder of checkpoints. Received: the checkpoint",
            ),
            (
                folder.folder,
                "val_lose:1",
                "--keep-best needs a checkpoint with val_lose. Nothing has been removed.",
            ),
        ]:
            code, out, err = run(capsys, "prune", path, "--keep", 1, "--keep-best", best)
            assert (code, out, match in err, folder.steps()) == (1, "", True, [3, 2, 1])
    for best in ("val_loss", "val_loss:", ":2", "val_loss:two"):
        with pytest.raises(SystemExit):
            run(capsys, "prune", url, "--keep", 1, "--keep-best", best)
        assert f"{best!r}, which must be NAME:NUMBER, such as val_loss:2" in capsys.readouterr().err
    assert run(capsys, "prune", url, "--keep", 1, "--keep-best", "val_loss:1")[0] == 0
    assert kept.steps() == [3, 1]


def test_a_folder_in_use_is_not_pruned(tmp_path, capsys):
    folder = filled(tmp_path / "runs", 1, 2)
    lock = folder.lock()
    code, _, err = run(capsys, "prune", folder.folder, "--keep", 1)
    lock.release()
    assert (code, folder.steps()) == (1, [2, 1])
    assert "One run at a time" in err


# ---- settings ----


def test_what_cannot_be_a_store_is_refused(tmp_path, monkeypatch):
    for how, match in [
        (
            {"folder": tmp_path, "local": tmp_path},
            "local is the local folder of checkpoints with a remote address",
        ),
        ({"folder": "memory://a", "local": "memory://b"}, "file system"),
        ({"folder": Path("s3://a")}, "file system"),
        ({"folder": tmp_path, "keep_period": 0}, "keep_period must be a whole number"),
        ({"folder": tmp_path, "keep_seconds": 0}, "keep_seconds must be above 0"),
    ]:
        with pytest.raises(ws.SpecificationError, match=match):
            ws.Checkpoints(**how)
    with pytest.raises(
        ws.SpecificationError, match=r"needs fsspec.*Protocol not known.*wholestep\[remote\]"
    ):
        ws.Trainer(small()).fit(X, Y, checkpoints="elsewhere://a/b", **HOW)
    for path in ("memory://", "memory:///"):
        with pytest.raises(
            ws.SpecificationError, match=f"An address must name a folder. Received: {path}. Try"
        ):
            ws.Trainer(small()).fit(X, Y, checkpoints=path, **HOW)
    monkeypatch.setitem(__import__("sys").modules, "fsspec.core", None)
    with pytest.raises(
        ws.SpecificationError, match=r"needs fsspec.*pip install '\S*wholestep\[remote\]'"
    ):
        ws.Trainer(small()).fit(X, Y, checkpoints="memory://a/b", **HOW)
