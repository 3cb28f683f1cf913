"""The switch for results that repeat on a GPU is set in time, or refused."""

import subprocess
import sys

import pytest
from scripts import HERE, lean
from shares import ENGINE

import wholestep as ws

START = "import os, keras, wholestep as ws\n"
MODEL = "model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])\n"
SAY = {
    "jax": "print(os.environ['XLA_FLAGS'])",
    "tensorflow": "from tensorflow.python.framework import config\n"
    "print(config.is_op_determinism_enabled())",
}[ENGINE]
FLAG = "--xla_gpu_deterministic_ops=true"
SET = {"jax": FLAG, "tensorflow": "True"}[ENGINE]


def run(script, **variables):
    return subprocess.run(
        [sys.executable, "-c", START + script],
        env=lean(HERE, XLA_FLAGS="", **variables),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.own
def test_called_first_it_is_set():
    done = run("ws.deterministic()\n" + MODEL + SAY)
    assert done.stdout.strip() == SET
    assert "results repeat to the bit on a GPU" in done.stderr
    assert run(SAY).stdout.strip() != SET


@pytest.mark.own
def test_called_too_late_it_is_refused():
    late = "model.compile('sgd', 'mse')\nws.Trainer(model)\n"
    done = run(MODEL + late + "ws.deterministic()\n")
    assert done.returncode == 1
    assert "must be called before the engine is in use" in done.stderr


@pytest.mark.skipif(ENGINE != "jax", reason="of XLA's flags")
def test_flags_that_are_set_stay(monkeypatch):
    before = "--xla_force_host_platform_device_count=2"
    monkeypatch.setenv("XLA_FLAGS", f"{before} {FLAG}")
    ws.deterministic()  # in the environment since the start: never too late
    done = run(f"os.environ['XLA_FLAGS'] = '{before}'\nws.deterministic()\n{SAY}")
    assert done.stdout.strip() == f"{before} {FLAG}"
