"""Every block of the README runs as it stands, and its commands exist."""

import re
from pathlib import Path

import keras
import pytest
from shares import on

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
AUDITED, FIRST = re.findall(r"```python\n(.*?)```", README, re.S)


def run(block):
    names: dict = {}
    exec(compile(block, "README.md", "exec"), names)
    return names


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="it is a loop of TensorFlow's")
def test_the_loop_that_is_audited():
    names = run(AUDITED)
    assert [cause.name for cause in names["report"].causes] == ["broadcast"]


@on("jax")
def test_the_first_program(capsys):
    names = run(FIRST)
    assert "60 rows in 10 microbatches (10 x 6 rows)" in capsys.readouterr().out
    assert names["history"].history["loss"][-1] < names["history"].history["loss"][0]


@pytest.mark.parametrize("command", sorted(set(re.findall(r"\bmake (\w+)    |`make (\w+)`", README))))
def test_the_commands_exist(command):
    assert re.search(rf"^{''.join(command)}:", (ROOT / "Makefile").read_text(), re.M)
