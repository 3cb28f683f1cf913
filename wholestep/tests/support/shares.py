"""What one engine's suite takes of a list while the other's takes the rest; the larger runs have
all of it on both.
"""

from collections.abc import Iterable

import keras
import pytest

ENGINE = keras.backend.backend()


def share(cases: Iterable, *, other: bool = False) -> list:
    """Return the cases; those that the other engine has, or neither, are for the larger runs alone.

    Of four, JAX has the first and TensorFlow the second (`other`: the other way round).
    """
    owners = ("tensorflow", "jax", "", "") if other else ("jax", "tensorflow", "", "")
    return [
        pytest.param(*case, marks=pytest.mark.own if owners[i % 4] == ENGINE else pytest.mark.large)
        for i, case in enumerate(_parts(cases))
    ]


def halves(cases: Iterable) -> list:
    """Return the cases, each for one engine's suite: JAX has the first, TensorFlow the second. None
    is left out.
    """
    return [
        pytest.param(
            *case,
            marks=pytest.mark.own if ("jax", "tensorflow")[i % 2] == ENGINE else pytest.mark.large,
        )
        for i, case in enumerate(_parts(cases))
    ]


def _parts(cases: Iterable) -> list[tuple]:
    return [case if isinstance(case, tuple) else (case,) for case in cases]


def later(cases: Iterable) -> list:
    """Return cases for the larger runs alone: others of their kind are tried always."""
    return [pytest.param(*case, marks=pytest.mark.large) for case in _parts(cases)]


def on(engine: str) -> pytest.MarkDecorator:
    """Return the mark of a test that the suite runs on this engine alone; the larger runs have it
    on both.
    """
    return pytest.mark.own if engine == ENGINE else pytest.mark.large
