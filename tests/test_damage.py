"""What is read is what was written, or an error: a manifest changed at random, a writer beside, again and again."""

import json
import random
import sys
import threading

import keras
import numpy as np
import pytest
import xxhash
from shares import later
from test_folder import equal, newest_in, some
from test_pieces import NUMBERS, cut

import wholestep as ws
from wholestep.checkpoints import arrays as carrier
from wholestep.checkpoints.common import CommonFolder
from wholestep.checkpoints.folder import Folder
from wholestep.checkpoints.resume import newest, read_one
from wholestep.processes import SingleProcess


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "runs").mkdir()
    return Folder(tmp_path / "runs")


STRANGE = (None, True, -1, 0, 1, 7, 2**31, 2**63, 1e308, "", "w", "../w", [], {}, [0], [4, 6], [[1]], {"float": "nan"})


def changed(said, draw):
    """Return a manifest in which something, somewhere, is something else."""
    said = json.loads(json.dumps(said))
    at, held = said, said
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
def test_a_manifest_that_was_changed_at_random_is_refused_or_says_the_same_of_the_arrays(folder, times, monkeypatch):
    most = []

    def empty(shape, dtype):
        most.append(np.prod(shape, dtype=float) * np.dtype(dtype).itemsize)
        assert most[-1] < 1 << 20, "room for more than there is"
        return np.zeros(shape, dtype)

    kept = some(6) | {"w": cut(NUMBERS, [2], [3])}
    folder.write(1, kept, {"epoch": 3, "rate": 0.5})
    path, draw = folder.path(1) / "manifest.json", random.Random(times)
    said = json.loads(path.read_bytes().splitlines()[0])
    monkeypatch.setattr(carrier.np, "empty", empty)
    num_refused = 0
    for _ in range(times):
        line = json.dumps(changed(said, draw)).encode()
        path.write_bytes(line + b"\n" + xxhash.xxh3_128_hexdigest(line).encode() + b"\n")
        try:
            manifest, arrays = folder.read(1)
            for name, array in arrays.items():
                assert is_renamed(manifest, said) or array[...].tobytes() == kept[name][...].tobytes()
        except ws.CheckpointError:
            num_refused += 1
    assert times / 2 < num_refused < times


def is_renamed(manifest, said):
    """Whether arrays have other names or shapes of as many numbers than were written, which a model would refuse."""
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
    seen, errors, is_over = [], [], threading.Event()

    def arrays(step):
        return {f"params/{i}": np.full(2000, step, "float32") for i in range(4)}

    def read():
        try:
            while not is_over.is_set() or len(seen) < times:
                found = newest(CommonFolder(folder, SingleProcess()), lambda *_: None, sets_aside=False)
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


EVENTS, RUNS = (
    set(),
    {"exec", "compile", "import", "marshal.loads", "pickle.find_class", "os.system", "subprocess.Popen"},
)


def test_reading_a_checkpoint_runs_nothing(tmp_path):
    """Also docs/security.md says so. An audit hook of Python cannot be removed: it only notes names of events."""
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
