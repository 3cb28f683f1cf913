"""The cases of a list that the suite of one engine runs, and the other's; all run in the larger runs.

`conftest.py` chooses by a hash of a case's id, so that a new case moves no other.
"""

from collections.abc import Iterable

import keras
import pytest

ENGINE = keras.backend.backend()


def share(cases: Iterable) -> list:
    """Return the cases, of which about a quarter runs on each engine, and half on neither."""
    return _marked(cases, pytest.mark.shared("jax", "tensorflow", "", ""))


def halves(cases: Iterable) -> list:
    """Return the cases, of which each runs on one of the engines."""
    return _marked(cases, pytest.mark.shared("jax", "tensorflow"))


def later(cases: Iterable) -> list:
    """Return cases for the larger runs alone: others of their kind are tried always."""
    return _marked(cases, pytest.mark.large)


def _marked(cases: Iterable, mark: pytest.MarkDecorator) -> list:
    parts = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*part, marks=mark) for part in parts]


def on(engine: str) -> pytest.MarkDecorator:
    """Return the mark of a test that only one engine's suite runs."""
    return pytest.mark.own if engine == ENGINE else pytest.mark.large
