"""Checks of the numbers that users pass: whole numbers of any library are counts, and truth values are no numbers."""

import numbers
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeGuard, TypeVar

from wholestep.errors import SpecificationError, message, shown

P = ParamSpec("P")
R = TypeVar("R")


def is_number(value: object) -> TypeGuard[float]:
    """Whether this is a real number, of Python or numpy."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_count(value: object, least: int = 1) -> TypeGuard[int]:
    """Whether this is a whole number of at least `least`."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= least


def count(name: str, value: object, attempt: str, *, least: int = 1, otherwise: str = "") -> int:
    """Return a count as a Python number.

    Raises:
        SpecificationError: it is no whole number of at least `least`.
    """
    if not is_count(value, least):
        must = f"{name} must be {otherwise}a whole number of at least {least}."
        if is_number(value) and value == value // 1 and value >= least:
            attempt = f"{name}={int(value)}."
        raise SpecificationError(message(must, shown(value), attempt))
    return int(value)


def with_note(note: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Add a note to the error of a call that gives a function other arguments than it takes."""

    def around(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                if error.__traceback__ is not None and error.__traceback__.tb_next is None:
                    error.add_note(note)
                raise

        return call

    return around
