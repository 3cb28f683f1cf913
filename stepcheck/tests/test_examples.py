"""The examples run at a reduced size and show what they say."""

import importlib.util
from pathlib import Path

import keras
import pytest
from shares import on
from small import faults

from stepcheck.faults import Fault

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@on("tensorflow")
@pytest.mark.filterwarnings("default")
@pytest.mark.slow
def test_audit(capsys, tmp_path):
    written, mended = load("audit").main(["--out", str(tmp_path)])
    (page,) = tmp_path.iterdir()
    assert "<img" in page.read_text()
    assert faults(written) == [Fault.BROADCAST]
    assert mended.is_right
    assert "all as meant" in capsys.readouterr().out


@on("tensorflow")
@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="the loops call TensorFlow"
)
def test_diff_loops(capsys):
    glove, norm = load("diff_loops").main()
    assert (glove.first.part, glove.first.update) == ("gradient", 1)
    assert glove.first.kind == "other_loss"
    assert (norm.first.part, norm.first.update) == ("mode", 1)
    assert len(glove.differences) == len(norm.differences) == 1
    assert "differs, without effect" in capsys.readouterr().out


OF_JAX = pytest.mark.skipif(
    keras.backend.backend() != "jax", reason="the loop calls JAX"
)


@OF_JAX
@on("jax")
@pytest.mark.filterwarnings("default")
@pytest.mark.slow
def test_guide_loop(monkeypatch, capsys):
    module = load("guide_loop")
    monkeypatch.setattr(module, "NUM_EPOCHS", 1)
    monkeypatch.setattr(module, "NUM_TRAINED", 352)
    (written, mended), _ = module.main()
    assert faults(written) == [
        Fault.ROWS_NEVER_USED,
        Fault.INFERENCE_MODE,
        Fault.PRINTED_LAST_BATCH,
    ]
    assert mended.findings == []
    assert "32 of 352 rows" in capsys.readouterr().out


@OF_JAX
@pytest.mark.large
@pytest.mark.filterwarnings("default")
def test_the_guides_loop_classifies_worse_than_fit(capsys):
    _, accuracies = load("guide_loop").main()
    assert accuracies["as written"] < 0.8
    assert min(accuracies["with the changes"], accuracies["fit"]) > 0.87
