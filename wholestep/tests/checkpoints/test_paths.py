"""A path that is not the folder of a run is refused before a write; the error names the folder."""

import shutil

import keras
import pytest
from runs import HOW, X, Y, check_same_bits, leaves, small
from shares import on

import wholestep as ws
from wholestep.checkpoints.folder import Folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder with runs, and with everything that is taken for one."""
    root = tmp_path_factory.mktemp("whole")
    trainer = ws.Trainer(small())
    trainer.fit(X, Y, checkpoints=root / "runs" / "a", **HOW)
    step = Folder(root / "runs" / "a").path(trainer.run.number)
    shutil.copytree(step, root / "renamed")
    bad = shutil.copytree(step, root / "damaged" / "bad-00000004-1")
    (bad / "why.json").write_text("{}")
    trainer.model.save(root / "model.keras")
    (root / "notes.txt").write_text("a note")
    return root


@pytest.fixture
def root(whole, tmp_path):
    held = shutil.copytree(whole, tmp_path / "held")
    (held / "link").symlink_to(held / "runs" / "a" / "step-00000018")
    return held


STEP = "runs/a/step-00000018"
# the kind, the advice in the error of `fit`, and in that of `restore` (None for a checkpoint)
OTHERS = {
    STEP: ("a checkpoint", "runs/a, to resume that run; or another folder.", None),
    f"{STEP}/": ("a checkpoint", "runs/a, to resume that run; or another folder.", None),
    "link": ("a checkpoint", "runs/a, to resume that run", f"{STEP}."),
    "runs/a/step-00000099": (
        "a checkpoint",
        "runs/a, to resume that run",
        "the folder that was passed to fit.",
    ),
    "damaged/bad-00000004-1": (
        "a damaged checkpoint, which was set aside",
        "damaged, to resume",
        "damaged.",
    ),
    "renamed": (
        "a checkpoint under another name than that of its step",
        'a folder: "runs/a".',
        "name it as it was",
    ),
    f"{STEP}/manifest.json": (f"a part of ROOT/{STEP}", "runs/a, to resume that run", f"{STEP}."),
    f"{STEP}/new/run": (f"a part of ROOT/{STEP}", "runs/a, to resume that run", f"{STEP}."),
    "model.keras": (
        "a Keras file",
        'a folder: "runs/a".',
        "ws.load_weights(model, path) for its weights.",
    ),
    "new.weights.h5": (
        "a Keras file",
        'a folder: "runs/a".',
        "ws.load_weights(model, path) for its weights.",
    ),
    "notes.txt": ("a file", 'a folder: "runs/a".', "the folder that was passed to fit."),
}


def files_in(root):
    return {path: path.stat().st_mtime_ns for path in root.rglob("*")}


def calls(trainer, path):
    """Return the calls that write checkpoints to a path."""
    data = ws.Batches((X, Y), 4)
    return {
        "fit": lambda: trainer.fit(X, Y, checkpoints=path, **HOW),
        "fit, with rules": lambda: trainer.fit(
            X, Y, checkpoints=ws.Checkpoints(path, keep=1), **HOW
        ),
        "steps": lambda: next(trainer.steps(data, checkpoints=str(path))),
        "save": lambda: trainer.save(path),
    }


@pytest.mark.parametrize("name", OTHERS)
def test_a_path_that_is_no_folder_of_a_run_is_refused_before_anything_is_written(name, root):
    what, way, _ = OTHERS[name]
    trainer = ws.Trainer(small(1))
    path = f"{root}/{name}"
    trainer.update((X[:4], Y[:4]))
    before = leaves(trainer.model)
    files = files_in(root)
    for call in calls(trainer, path).values():
        with pytest.raises(ws.SpecificationError) as caught:
            call()
        received = f"Received: {path.rstrip('/')}, {what.replace('ROOT', str(root))}. Try: "
        assert f"need a folder of their own. {received}" in str(caught.value)
        assert way in str(caught.value)
        assert files_in(root) == files
    check_same_bits(before, leaves(trainer.model))


@pytest.mark.parametrize("name", [name for name, (*_, way) in OTHERS.items() if way])
def test_nothing_is_restored_from_it_and_the_error_names_what_was_meant(name, root):
    (*_, way), files = OTHERS[name], files_in(root)
    with pytest.raises(ws.CheckpointError) as caught:
        ws.Trainer(small(1)).restore(root / name)
    assert way in str(caught.value).partition("Try: ")[2]
    if not name.endswith((".keras", ".h5", ".txt", ".json")):  # others are read as files
        with pytest.raises(ws.CheckpointError) as also:
            ws.load_weights(small(1), root / name)
        assert str(also.value) == str(caught.value)
    assert files_in(root) == files


@on("jax")
def test_runs_in_subfolders_are_named_where_a_run_begins_or_none_is_found(root, capfd):
    with pytest.raises(
        ws.CheckpointError,
        match=rf"{root}/runs, which has no checkpoint itself. Try: {root}/runs/a\.",
    ):
        ws.Trainer(small(1)).restore(root / "runs")
    for expected in (1, 0):
        capfd.readouterr()
        ws.Trainer(small(1)).fit(X, Y, checkpoints=root / "runs", **HOW)
        line = f"wholestep: begins anew in {root}/runs; other runs are in {root}/runs/a\n"
        assert capfd.readouterr().err.count(line) == expected


@pytest.mark.parametrize(
    "name", ["step-00000018", "step-00000018-2", "step-00000018/new", "bad-00000018-1", "m.keras"]
)
def test_an_address_that_is_no_folder_of_a_run_is_refused_and_nothing_is_written(name):
    store = pytest.importorskip("fsspec").filesystem("memory")
    with pytest.raises(ws.SpecificationError, match="need a folder of their own") as caught:
        ws.Trainer(small()).fit(X, Y, checkpoints=f"memory://paths/{name}", **HOW)
    assert ("Try: memory://paths, to resume" in str(caught.value)) == (name != "m.keras")
    assert not store.exists("/paths")


def test_a_local_folder_of_an_address_is_checked_too(root):
    pytest.importorskip("fsspec")
    with pytest.raises(ws.SpecificationError, match="step-00000018, a checkpoint"):
        ws.Trainer(small()).fit(
            X, Y, checkpoints=ws.Checkpoints("memory://paths/b", local=root / STEP), **HOW
        )


def test_a_folder_of_the_users_is_the_folder_of_a_run_whatever_else_it_holds(tmp_path):
    (tmp_path / "manifest.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]).save(tmp_path / "model.keras")
    for folder in (tmp_path, tmp_path / "step-1", tmp_path / "steps"):
        ws.Trainer(small()).fit(X, Y, checkpoints=folder, **HOW)
        assert Folder(folder).steps() == [18]
