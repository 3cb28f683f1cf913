"""An engine that is not there is told in our words, before Keras is asked."""

import sys

import keras
import pytest

import wholestep as ws
from wholestep import backend, cli


@pytest.mark.parametrize(
    ("said", "file", "expected"),
    [
        ("jax", '{"backend": "torch"}', "jax"),
        ("", '{"backend": "torch"}', "torch"),
        ("", '{"epsilon": 1e-7}', "tensorflow"),
        ("", "{", "tensorflow"),
        ("", None, "tensorflow"),
    ],
)
def test_the_backend_is_the_one_that_keras_will_take(monkeypatch, tmp_path, said, file, expected):
    monkeypatch.setenv("KERAS_BACKEND", said)
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    if file is not None:
        (tmp_path / "keras.json").write_text(file)
    assert backend.configured() == expected


@pytest.fixture
def fresh(monkeypatch):
    """Let it look as if nobody had imported Keras or a public name."""
    monkeypatch.delitem(sys.modules, "keras")
    monkeypatch.delitem(vars(ws), "Trainer", raising=False)
    return monkeypatch


def test_torch_is_refused_before_keras_looks_for_it(fresh):
    fresh.setenv("KERAS_BACKEND", "torch")
    with pytest.raises(ws.SpecificationError, match=r"must be jax or tensorflow\. Received: torch"):
        from wholestep import Trainer  # noqa: F401
    assert "keras" not in sys.modules


def test_an_engine_that_is_not_installed_is_named_with_the_way_to_install_it(fresh):
    fresh.setenv("KERAS_BACKEND", "tensorflow")
    fresh.delitem(sys.modules, "tensorflow", raising=False)
    fresh.setattr(backend, "find_spec", lambda name: None)
    with pytest.raises(ws.SpecificationError, match=r"pip install 'wholestep\[tensorflow\]'"):
        ws.Trainer  # noqa: B018
    assert "keras" not in sys.modules


def test_the_demo_says_so_too(fresh, capsys):
    fresh.setenv("KERAS_BACKEND", "torch")
    assert cli.main(["demo"]) == 1
    assert "must be jax or tensorflow. Received: torch" in capsys.readouterr().err
    assert "keras" not in sys.modules


def test_the_backend_of_a_keras_that_is_there_counts(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    backend.check()
    monkeypatch.setattr(keras.config, "backend", lambda: "torch")
    with pytest.raises(ws.SpecificationError, match="must be jax or tensorflow"):
        backend.check()
