"""A missing engine is an error of wholestep, before Keras is imported."""

import subprocess
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
    """Restore the state before Keras or a public name was imported."""
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
    with pytest.raises(ws.SpecificationError, match=r"pip install '\S*wholestep\[tensorflow\]'"):
        ws.Trainer  # noqa: B018
    assert "keras" not in sys.modules


@pytest.fixture
def without_engine(fresh, tmp_path):
    """Return the patches of an environment without JAX and TensorFlow."""
    for name in ("jax", "tensorflow"):
        fresh.setitem(sys.modules, name, None)
    fresh.setattr(backend, "_version", lambda name: "2.13" if name == "torch" else None)
    fresh.setenv("KERAS_HOME", str(tmp_path))
    fresh.delenv("KERAS_BACKEND")
    return fresh


@pytest.mark.parametrize(
    ("chosen", "engine"), [("", "jax"), ("torch", "jax"), ("tensorflow", "tensorflow")]
)
def test_without_an_engine_the_doctor_shows_what_is_there(without_engine, capsys, chosen, engine):
    without_engine.setenv("KERAS_BACKEND", chosen)
    assert cli.main(["doctor"]) == 1
    shown = capsys.readouterr()
    assert shown.out.startswith("packages: torch 2.13\nsystem: Python ")
    assert shown.err.startswith("JAX or TensorFlow must be installed")
    assert "Received: torch 2.13." in shown.err
    assert f"wholestep[{engine}]', and set the environment variable KERAS_BACKEND={engine}." in (
        shown.err
    )


@pytest.mark.parametrize("how", [["-n", "2"], []])
def test_processes_need_jax_and_no_other_engine(without_engine, capsys, tmp_path, how):
    script = tmp_path / "train.py"
    script.write_text("")
    assert cli.main(["launch", *how, str(script)]) == 2
    told = capsys.readouterr().err
    assert "Several processes need the JAX engine. Received: torch 2.13. Try: pip install" in told
    assert "ensor" not in told


def test_the_backend_of_a_keras_that_is_there_counts(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    backend.check()
    monkeypatch.setattr(keras.config, "backend", lambda: "torch")
    with pytest.raises(ws.SpecificationError, match="must be jax or tensorflow"):
        backend.check()


def test_the_doctor_shows_the_engine_and_what_is_slow(monkeypatch, capsys):
    name = keras.backend.backend()
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    monkeypatch.setattr(keras.config, "floatx", lambda: "float64")
    monkeypatch.setattr(backend.os, "cpu_count", lambda: 0)
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith(f"engine: {name} (from KERAS_BACKEND)") for line in lines)
    assert f"keras {keras.__version__}" in lines[0]
    slow = [line for line in lines if line.startswith("slow: ")]
    assert "slow: float64 is several times as slow as float32." in slow
    assert any("virtual devices share 1 cores" in line for line in slow) == (
        len(keras.distribution.list_devices()) > 1
    )
    # see conftest
    assert any(line.startswith("compiled programs: kept in") for line in lines) == (name == "jax")


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="these are flags of XLA on JAX")
@pytest.mark.parametrize("flags", ["", "--xla_gpu_deterministic_ops=true"])
def test_the_doctor_says_when_results_do_not_repeat_to_the_bit(monkeypatch, flags):
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert not any(fact.startswith("repeatable") for fact in backend.circumstances()[0])
    monkeypatch.setattr(keras.distribution, "list_devices", lambda: ["gpu:0"])
    assert any(
        fact.startswith("repeatable: not to the bit") for fact in backend.circumstances()[0]
    ) == (flags == "")


def test_the_doctor_refuses_a_backend_without_an_engine(fresh, capsys):
    fresh.setenv("KERAS_BACKEND", "torch")
    assert cli.main(["doctor"]) == 1
    assert "must be jax or tensorflow. Received: torch." in capsys.readouterr().err


def test_a_reader_that_ends_early_ends_the_command_without_a_traceback():
    command = [sys.executable, "-m", "wholestep", "doctor"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.close()
        told = process.stderr.read()
    assert (process.returncode, "Traceback" in told) == (141, False), told
