"""What one engine's suite takes of a list while the other's takes the rest; the larger runs have all of it on both."""

from collections.abc import Callable, Iterable

import keras
import pytest

ENGINE = keras.backend.backend()


def half(cases: Iterable, *, other: bool = False) -> list:
    """Return the cases, every second of which is for the larger runs alone: those that the other engine has.

    `other`: give each engine the other half.
    """
    given = [case if isinstance(case, tuple) else (case,) for case in cases]
    own = (ENGINE == "jax") is not other
    return [pytest.param(*case, marks=[] if (i + own) % 2 else pytest.mark.large) for i, case in enumerate(given)]


def on(engine: str) -> Callable:
    """Let a test run on one engine in the suite; the larger runs have it on both."""
    return (lambda test: test) if engine == ENGINE else pytest.mark.large
