"""A read returns the written arrays or raises an error, also after damage and during writes."""

import json
import os
import random
import sys
import threading
import time
from functools import partial

import keras
import numpy as np
import pytest
import xxhash
from folders import NUMBERS, cut, equal, newest_in, once, some
from shares import later

import wholestep as ws
from wholestep import cli
from wholestep.checkpoints import safetensors, store
from wholestep.checkpoints.folder import Folder
from wholestep.checkpoints.resume import newest, read_one
from wholestep.checkpoints.shared_folder import SharedFolder
from wholestep.errors import DamagedError
from wholestep.processes import SingleProcess


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "runs").mkdir()
    return Folder(tmp_path / "runs")


STRANGE = (
    None,
    True,
    -1,
    0,
    1,
    7,
    2**31,
    2**63,
    1e308,
    "",
    "w",
    "../w",
    [],
    {},
    [0],
    [4, 6],
    [[1]],
    {"float": "nan"},
)


def changed(said, draw):
    """Return a manifest in which something, somewhere, is something else."""
    said = json.loads(json.dumps(said))
    at = said
    held = said
    while isinstance(held, dict | list) and held and (held is said or draw.random() < 0.8):
        at = held
        key = draw.choice(list(at) if isinstance(at, dict) else range(len(at)))
        held = at[key]
    how = draw.randrange(5)
    if how == 0:
        del at[key]
    elif how == 1 and isinstance(held, int) and not isinstance(held, bool):
        at[key] = held + draw.choice((-8, -1, 1, 8, 1 << 40))
    elif how == 2 and isinstance(held, str) and held:
        i = draw.randrange(len(held))
        at[key] = held[:i] + chr(draw.randrange(256)) + held[i + 1 :]
    elif how == 3 and isinstance(at, list):
        at.append(draw.choice(at))
    else:
        at[key] = draw.choice(STRANGE)
    return said


@pytest.mark.parametrize("times", [2000, *later([200_000])])
def test_a_manifest_that_was_changed_at_random_is_refused_or_says_the_same_of_the_arrays(
    folder, times, monkeypatch
):
    most = []

    def empty(shape, dtype):
        most.append(np.prod(shape, dtype=float) * np.dtype(dtype).itemsize)
        assert most[-1] < 1 << 20, "room for more than there is"
        return np.zeros(shape, dtype)

    kept = some(6) | {"w": cut(NUMBERS, [2], [3])}
    folder.write(1, kept, {"epoch": 3, "rate": 0.5})
    path = folder.path(1) / "manifest.json"
    draw = random.Random(times)
    said = json.loads(path.read_bytes().splitlines()[0])
    monkeypatch.setattr(safetensors.np, "empty", empty)
    num_refused = 0
    for _ in range(times):
        line = json.dumps(changed(said, draw)).encode()
        path.write_bytes(line + b"\n" + xxhash.xxh3_128_hexdigest(line).encode() + b"\n")
        try:
            manifest, arrays = folder.read(1)
            for name, array in arrays.items():
                assert (
                    is_renamed(manifest, said) or array[...].tobytes() == kept[name][...].tobytes()
                )
        except ws.CheckpointError:
            num_refused += 1
    assert times / 2 < num_refused < times


def is_renamed(manifest, said):
    """Whether arrays have other names or shapes of as many numbers than were written, which a model
    would refuse.
    """
    before = {leaf["name"]: (tuple(leaf["shape"]), leaf["dtype"]) for leaf in said["leaves"]}
    return {leaf.name: (leaf.shape, leaf.dtype) for leaf in manifest.leaves} != before


@pytest.mark.parametrize("times", [200])
def test_what_is_good_is_never_taken_for_damaged(folder, times):
    for step in (1, 2):
        folder.write(step, some(20) | {"w": cut(NUMBERS, [1], [])}, {"step": step})
    for _ in range(times):
        assert newest_in(folder).manifest.step == 2
    assert folder.bad() == []


@pytest.mark.parametrize("times", [10, *later([100])])
def test_whoever_reads_beside_a_writer_sees_whole_checkpoints(folder, times):
    seen = []
    errors = []
    is_over = threading.Event()

    def arrays(step):
        return {f"params/{i}": np.full(2000, step, "float32") for i in range(4)}

    def read():
        try:
            while not is_over.is_set() or len(seen) < times:
                found = newest(
                    SharedFolder(folder, SingleProcess()), lambda *_: None, sets_aside=False
                )
                assert found.aside == []
                equal(found.snapshot.arrays, arrays(found.manifest.step))
                seen.append(found.manifest.step)
        except BaseException as error:
            errors.append(error)

    folder.write(1, arrays(1), {})
    reader = threading.Thread(target=read)
    reader.start()
    step = 1
    while step < times or len(seen) < times:
        step += 1
        folder.write(step, arrays(step), {})
        folder.remove(step - 1)
        if errors:
            break
    is_over.set()
    reader.join()
    assert errors == []
    assert seen == sorted(seen)
    assert len(set(seen)) > 1


# ---- a writer that replaces or removes what is being read ----


def numbers(value):
    return {f"params/{i}": np.full(500, value, "float32") for i in range(3)}


def read_arrays(folder, tmp_path):
    manifest, arrays = folder.read(1)
    return manifest.facts["value"], arrays


def verify_all(folder, tmp_path):
    return folder.verify(1).facts["value"], None


def copy_one(folder, tmp_path):
    target = Folder(tmp_path / "target")
    target.lock().release()
    store.copy(folder, 1, target)
    return read_arrays(target, tmp_path)


def copy_by_command(folder, tmp_path):
    assert cli.main(["checkpoint", "copy", str(folder.folder), str(tmp_path / "target")]) == 0
    return read_arrays(Folder(tmp_path / "target"), tmp_path)


def verify_by_command(folder, tmp_path):
    assert cli.main(["checkpoint", "verify", str(folder.folder)]) == 0
    return verify_all(folder, tmp_path)


def restore_newest(folder, tmp_path):
    found = newest(SharedFolder(folder, SingleProcess()), lambda *_: None, sets_aside=False)
    assert found.aside == []
    return found.snapshot.facts["value"], found.snapshot.arrays


READERS = [read_arrays, verify_all, copy_one, copy_by_command, verify_by_command, restore_newest]


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_a_checkpoint_that_is_replaced_while_it_is_read_is_read_anew(
    reader, folder, tmp_path, monkeypatch
):
    """After its manifest was read, and before its arrays."""
    folder.write(1, numbers(1), {"value": 1})

    def replace():
        folder.write(1, numbers(2), {"value": 2}, replaces=True)

    once(monkeypatch, safetensors, "opened", replace)
    value, arrays = reader(folder, tmp_path)
    assert value == 2
    if arrays is not None:
        equal(arrays, numbers(2))


def test_a_checkpoint_that_is_replaced_at_every_read_is_an_error_in_the_end(folder, monkeypatch):
    folder.write(1, numbers(0), {"value": 0})
    real = safetensors.opened
    values = [0]
    is_writer = []

    def opened(*arguments, **options):
        if not is_writer:
            is_writer.append(1)
            values.append(values[-1] + 1)
            folder.write(1, numbers(values[-1]), {"value": values[-1]}, replaces=True)
            is_writer.clear()
        return real(*arguments, **options)

    monkeypatch.setattr(safetensors, "opened", opened)
    with pytest.raises(DamagedError, match="must have the digest"):
        folder.read(1)
    assert len(values) == 11


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_a_checkpoint_is_there_between_the_two_renames_of_its_replacement(
    reader, folder, tmp_path, monkeypatch
):
    folder.write(1, numbers(1), {"value": 1})
    real = os.rename
    in_gap = threading.Event()
    is_looking = threading.Event()

    def rename(old, new):
        if str(old).endswith("step-00000001"):
            real(old, new)
            in_gap.set()
            assert is_looking.wait(10)
        else:
            real(old, new)

    monkeypatch.setattr(os, "rename", rename)
    once(monkeypatch, time, "sleep", is_looking.set)
    replace = partial(folder.write, 1, numbers(2), {"value": 2}, replaces=True)
    writer = threading.Thread(target=replace)
    writer.start()
    assert in_gap.wait(10)
    value, _ = reader(folder, tmp_path)
    writer.join()
    assert value == 2


def test_if_a_checkpoint_is_removed_while_it_is_read_the_newest_is_read(folder, monkeypatch):
    for step in (1, 2):
        folder.write(step, numbers(step), {"value": step})

    def go_on():
        folder.write(3, numbers(3), {"value": 3})
        folder.remove(2)

    once(monkeypatch, safetensors, "opened", go_on)
    found = newest(SharedFolder(folder, SingleProcess()), lambda *_: None, sets_aside=False)
    assert (found.manifest.step, found.aside) == (3, [])  # not the older 1, which is good
    equal(found.snapshot.arrays, numbers(3))


def test_a_listed_checkpoint_that_is_removed_is_not_told_as_bad(folder, monkeypatch, capsys):
    for step in (1, 2):
        folder.write(step, numbers(step), {})
    once(monkeypatch, safetensors, "opened", lambda: folder.remove(2))
    assert cli.main(["checkpoint", "verify", str(folder.folder)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["step-00000001"]


@pytest.mark.parametrize("times", [40, *later([2000])])
def test_whoever_reads_beside_a_writer_that_replaces_sees_whole_checkpoints(folder, times):
    seen = []
    errors = []
    is_over = threading.Event()

    def read():
        while not is_over.is_set():
            try:
                value, arrays = restore_newest(folder, None)
                equal(arrays, numbers(value))
                seen.append(value)
            except BaseException as error:
                errors.append(error)

    folder.write(1, numbers(0), {"value": 0})
    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    value = 0
    while (value < times or len(seen) < times) and not errors:
        value += 1
        folder.write(1, numbers(value), {"value": value}, replaces=True)
    is_over.set()
    for reader in readers:
        reader.join()
    assert errors == []
    assert len({*seen}) > 1


EVENTS = set()
RUNS = {
    "exec",
    "compile",
    "import",
    "marshal.loads",
    "pickle.find_class",
    "os.system",
    "subprocess.Popen",
}


def test_reading_a_checkpoint_runs_nothing(tmp_path):
    """Also docs/security.md says so. An audit hook of Python cannot be removed: it only notes names
    of events.
    """
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("adam", "mse")
    trainer = ws.Trainer(model)
    asked = ws.Checkpoints(tmp_path / "run")
    stops = [keras.callbacks.EarlyStopping("loss")]
    trainer.fit(np.ones((8, 3)), np.ones((8, 2)), callbacks=stops, checkpoints=asked, verbose=0)
    read_one(tmp_path / "run", lambda snapshot: None)  # later reads import nothing
    here = threading.get_ident()
    sys.addaudithook(lambda event, _: EVENTS.add(event) if threading.get_ident() == here else None)
    EVENTS.clear()
    found = read_one(tmp_path / "run", lambda snapshot: None)
    seen = set(EVENTS)
    assert "open" in seen
    assert not seen & RUNS
    assert found.snapshot.facts["number"] == 1
    EVENTS.clear()
    exec("")
    assert EVENTS & RUNS  # the hook sees it


def test_a_damaged_checkpoint_that_is_passed_over_is_named(tmp_path, capsys):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    trainer = ws.Trainer(model)
    asked = ws.Checkpoints(tmp_path / "runs", every_steps=1, keep=9)
    trainer.fit(np.ones((4, 2)), np.ones(4), batch_size=2, verbose=0, checkpoints=asked)
    newest_one = tmp_path / "runs" / "step-00000002"
    arrays = next(newest_one.glob("*.safetensors"))
    content = bytearray(arrays.read_bytes())
    content[-1] ^= 1
    arrays.write_bytes(content)
    for read in (
        trainer.restore,
        partial(trainer.restore, only="weights"),
        partial(ws.load_weights, model),
    ):
        capsys.readouterr()
        read(tmp_path / "runs")
        line = capsys.readouterr().err
        assert "reads" in line
        assert "step-00000001; newer ones are damaged: step-00000002 (" in line
    assert newest_one.exists()
