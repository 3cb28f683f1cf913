"""A process that ends at once prints the reason, also after its reader has closed."""

import os

import pytest

from wholestep.processes import group


@pytest.mark.parametrize("code", [1, 143])
def test_the_last_words_come_before_the_end(code, capsys, monkeypatch):
    left = []
    monkeypatch.setattr(os, "_exit", lambda code: left.append((code, capsys.readouterr().err)))
    group.end("Process 1 is lost.", code)
    assert left == [(code, "wholestep: Process 1 is lost.\n")]


def test_nobody_need_be_there_to_read(monkeypatch):
    class Closed:
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr("sys.stderr", Closed())
    group.tell("Process 1 is lost.")
