"""What one engine's suite takes of a list while the other's takes the rest; the larger runs have all of it on both."""

from collections.abc import Iterable

import keras
import pytest

ENGINE = keras.backend.backend()


def share(cases: Iterable, *, other: bool = False) -> list:
    """Return the cases; those that the other engine has are for the larger runs alone.

    TensorFlow, which takes two to three times as long for one, has every third, from the second on (`other`: from the
    first on), and JAX has the others.
    """
    given = _parts(cases)
    owners = ["tensorflow" if i % 3 == (0 if other else 1) else "jax" for i in range(len(given))]
    return [
        pytest.param(*case, marks=[] if owner == ENGINE else pytest.mark.large)
        for case, owner in zip(given, owners, strict=True)
    ]


def _parts(cases: Iterable) -> list[tuple]:
    return [case if isinstance(case, tuple) else (case,) for case in cases]


def later(cases: Iterable) -> list:
    """Return cases for the larger runs alone: others of their kind are tried always."""
    return [pytest.param(*case, marks=pytest.mark.large) for case in _parts(cases)]


def on(engine: str) -> pytest.MarkDecorator:
    """Return the mark of a test that the suite runs on this engine alone; the larger runs have it on both."""
    return pytest.mark.own if engine == ENGINE else pytest.mark.large
