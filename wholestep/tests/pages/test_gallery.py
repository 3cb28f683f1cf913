"""The pictures of the gallery and of the README: made by code that is on the page, and small."""

import importlib.util
import json
from pathlib import Path

import digits
import pytest
from shares import on

DOCS = Path(__file__).parents[2] / "docs"
TOP = DOCS.parents[1]
GALLERY = ["report.png", "run.png", "progress.png"]
SHOWN = [*(DOCS / name for name in GALLERY), DOCS / "train.png", TOP / "stepcheck/docs/loop.png"]


@pytest.fixture(scope="module")
def pictures():
    spec = importlib.util.spec_from_file_location("pictures", DOCS / "pictures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@on("jax")
def test_a_picture_is_drawn_from_the_code_above_it(pictures):
    setup, *blocks = pictures.programs()
    assert len(blocks) == len(GALLERY)
    for name, block in zip(GALLERY, blocks, strict=True):
        assert pictures.drawn_from(DOCS / name) == setup + block  # or run docs/pictures.py
        assert len(block.splitlines()) <= 3
    assert len((DOCS / "gallery.md").read_text().split()) <= 300


@on("jax")
@pytest.mark.slow
def test_the_gallery_can_be_drawn(pictures, tmp_path):
    names = pictures.draw_gallery(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(GALLERY)
    (finding,) = names["report"].findings
    assert finding.fault.id == "gradient.weights-ignored"
    assert str(names["page"]).startswith("80 updates, 20 epochs")


@on("jax")
def test_the_picture_of_training_has_every_run_of_the_example(pictures, tmp_path):
    told = json.loads(pictures.drawn_from(DOCS / "train.png"))
    assert [*told] == [*digits._RUNS][1:]  # or run docs/pictures.py
    *ours, by_keras, accumulated = told.values()
    assert ours[-1] == 0.0
    assert max(*ours, by_keras) < 2e-5
    assert accumulated > 1e-3
    pictures.draw_train(tmp_path / "train.png", dict.fromkeys(told, (0.0, 1e-3)))
    assert (tmp_path / "train.png").exists()


@on("jax")
@pytest.mark.parametrize("path", SHOWN, ids=lambda path: path.name)
def test_a_picture_is_small(path):
    assert path.stat().st_size < 150_000
