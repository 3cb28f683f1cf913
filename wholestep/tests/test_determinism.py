"""The switch for results that repeat on a GPU is set in time, or refused."""

import subprocess
import sys

import pytest
from scripts import HERE, lean
from shares import ENGINE

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
    again = "model.compile('sgd', 'mse')\nws.Trainer(model)\nws.deterministic()\n"
    done = run("ws.deterministic()\n" + MODEL + again + SAY)
    assert done.stdout.strip() == SET
    assert run(SAY).stdout.strip() != SET


@pytest.mark.own
def test_called_too_late_it_is_refused():
    late = "model.compile('sgd', 'mse')\nws.Trainer(model)\n"
    done = run(MODEL + late + "ws.deterministic()\n")
    assert done.returncode == 1
    assert "must be called before the engine is in use" in done.stderr


@pytest.mark.skipif(ENGINE != "jax", reason="of XLA's flags")
def test_flags_that_are_set_stay():
    before = "--xla_force_host_platform_device_count=2"
    done = run(f"os.environ['XLA_FLAGS'] = '{before}'\nws.deterministic()\n{SAY}")
    assert done.stdout.strip() == f"{before} {FLAG}"
    # JAX has read its flags by then
    late = run(f"{MODEL}os.environ['XLA_FLAGS'] = '{FLAG}'\nws.deterministic()\n")
    assert "must be called before the engine is in use" in late.stderr
