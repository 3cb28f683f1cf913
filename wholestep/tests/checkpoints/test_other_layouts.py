"""A checkpoint goes on elsewhere: cut otherwise, on more or fewer devices, on the other engine."""

import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from exact import spread_over
from runs import BATCHES, NO_XLA, SIZE, X, Y, carried, leaves, made, small
from scripts import HERE, TESTS, lean
from shares import on

import wholestep as ws
from wholestep.checkpoints.folder import Folder
from wholestep.checkpoints.snapshot import Snapshot

JAX = keras.backend.backend() == "jax"
OTHER = "tensorflow" if JAX else "jax"


def close(one, two, atol):
    for a, b in zip(one, two, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)


def loop(trainer, folder=None, num=None):
    """Run two epochs, or `num` updates; return the numbers of their batches."""
    told = []
    asked = None if folder is None else ws.Checkpoints(folder, every_steps=1)
    for step in trainer.steps(ws.Batches((X, Y), SIZE, seed=3), epochs=2, checkpoints=asked):
        told.append((step.number, step.epoch, step.batch))
        if len(told) == num:
            break
    return told


@pytest.mark.slow
def test_a_run_goes_on_with_other_cuts_and_devices(tmp_path, capfd):
    plain = ws.Trainer(small())
    told = []
    expected = loop(plain)
    for seed, (replicas, cut, num) in enumerate(
        [(1, "auto", 4), (2, "auto", 4), (4, 1, 2), (1, 3, None)]
    ):
        with spread_over(replicas if replicas > 1 else None):
            model = small(seed)
        trainer = ws.Trainer(
            model, replicas=replicas if JAX and replicas > 1 else None, microbatch_size=cut
        )
        # the last one was not saved
        told += loop(trainer, tmp_path, num)[: None if num is None else -1]
        said = capfd.readouterr().err
        assert ("from here not bit for bit" in said) is (seed > 0)
        assert seed == 0 or f"replicas {replicas} (" in said
    assert told == expected
    close(leaves(plain.model), leaves(trainer.model), 2e-6)


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import conftest
import numpy as np
import wholestep as ws
from test_other_layouts import go_on
go_on({run!r}, {out!r})
"""


def go_on(run, out):
    """Resume from a folder in this process; return its checkpoint and the results."""
    trainer = ws.Trainer(made(seed=1), **NO_XLA)
    trainer.restore(run)
    found = [np.asarray(v).copy() for v in trainer.model.variables]
    history = trainer.fit(X, Y, batch_size=SIZE, epochs=3, verbose=0).history
    came = leaves(trainer.model)
    named = {f"found/{i}": v for i, v in enumerate(found)} | {
        f"came/{i}": v for i, v in enumerate(came)
    }
    np.savez(out, loss=history["loss"], **named)


@on("jax")
@pytest.mark.slow
def test_a_run_goes_on_with_the_other_engine(tmp_path):
    trainer = ws.Trainer(made(), **NO_XLA)
    run = tmp_path / "run"
    out = tmp_path / "out.npz"
    trainer.fit(X, Y, batch_size=SIZE, epochs=2, verbose=0)
    trainer.save(run)
    saved = [np.asarray(v).copy() for v in trainer.model.variables]
    source = SCRIPT.format(tests=str(TESTS), run=str(run), out=str(out))
    environment = lean(HERE, Path(__file__).parent, KERAS_BACKEND=OTHER)
    done = subprocess.run(
        [sys.executable, "-c", source], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    with np.load(out) as held:
        there = dict(held)
    for i, value in enumerate(saved):
        np.testing.assert_array_equal(there[f"found/{i}"], value)
    history = trainer.fit(X, Y, batch_size=SIZE, epochs=3, verbose=0).history
    np.testing.assert_allclose(there["loss"], history["loss"], rtol=1e-4)
    for i, value in enumerate(leaves(trainer.model)):
        np.testing.assert_allclose(there[f"came/{i}"], value, rtol=0, atol=2e-4)


def test_whole_numbers_that_do_not_fit_are_refused(tmp_path):
    whole = ws.Trainer(made())
    other = ws.Trainer(made(1))
    whole.fit(X, Y, batch_size=SIZE, verbose=0)
    taken = carried(whole.run.snapshot())
    name = next(
        name
        for name, array in taken.arrays.items()
        if array.dtype.kind in "iu" and name.startswith("buffers")
    )
    for number, fits in (
        (7, True),
        (1 << 40 if JAX else -(1 << 62), not JAX),
        (-1 if JAX else 3, not JAX),
    ):
        arrays = taken.arrays | {name: np.full(taken.arrays[name].shape, number, "int64")}
        before = leaves(other.model)
        if fits:
            other.run.restore(Snapshot(arrays, taken.facts))
            continue
        with pytest.raises(ws.SpecificationError, match="resume with the same engine"):
            other.run.restore(Snapshot(arrays, taken.facts))
        close(before, leaves(other.model), 0)


@on("jax")
def test_other_floats_are_told(tmp_path, capfd):
    whole = ws.Trainer(small())
    whole.fit(X, Y, batch_size=SIZE, epochs=1, verbose=0, checkpoints=tmp_path)
    keras.config.set_dtype_policy("mixed_bfloat16")
    other = ws.Trainer(small(1))
    other.fit(X, Y, batch_size=SIZE, epochs=1, verbose=0, checkpoints=tmp_path)
    assert "float policy mixed_bfloat16" in capfd.readouterr().err
    assert Folder(tmp_path).steps() == [BATCHES]
    close(
        [np.asarray(v) for v in whole.model.variables],
        [np.asarray(v) for v in other.model.variables],
        0,
    )


@pytest.mark.parametrize(
    "release",
    sorted(path.name for path in (Path(__file__).parent / "golden").iterdir() if path.is_dir()),
)
@pytest.mark.slow
def test_a_checkpoint_of_every_release_goes_on(release):
    golden = Folder(Path(__file__).parent / "golden" / release)
    manifest, arrays = golden.read(8)
    trainer = ws.Trainer(small(1))
    trainer.restore(golden.folder)
    for i, value in enumerate(trainer.model.get_weights()):
        np.testing.assert_array_equal(value, arrays[f"params/{i}"])
    history = trainer.fit(X, Y, batch_size=SIZE, epochs=3, verbose=0)
    told = dict(manifest.facts["also"]["callbacks"]["told"])["History"]["history"]
    assert (trainer.run.number, history.epoch) == (3 * BATCHES, [0, 1, 2])
    assert history.history["loss"][:1] == told["loss"]
