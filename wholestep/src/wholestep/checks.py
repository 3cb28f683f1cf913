"""Checks of numbers: whole numbers of any library are counts, truth values are no numbers."""

import numbers
from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import ParamSpec, TypeGuard, TypeVar

from wholestep.errors import invalid, message, shown

P = ParamSpec("P")
R = TypeVar("R")


def is_number(value: object) -> TypeGuard[float]:
    """Whether this is a real number, of Python or numpy."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_count(value: object, least: int = 1) -> TypeGuard[int]:
    """Whether this is a whole number of at least `least`."""
    return isinstance(value, numbers.Integral) and is_number(value) and int(value) >= least


def count(name: str, value: object, attempt: str, *, least: int = 1, otherwise: str = "") -> int:
    """Return a count as a Python number.

    Raises:
        SpecificationError: it is no whole number of at least `least`.
    """
    if is_count(value, least):
        return int(value)
    if is_number(value) and value == value // 1 and value >= least:
        attempt = f"{name}={int(value)}."
    must = f"{name} must be {otherwise}a whole number of at least {least}."
    raise invalid(must, shown(value), attempt)


def takes(must: str, attempt: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Explain the TypeError of a call that passes a method other arguments than it takes."""

    def around(method: Callable[P, R]) -> Callable[P, R]:
        @wraps(method)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return method(*args, **kwargs)
            except TypeError as error:
                # raised by the method
                if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                    raise
                unknown = [name for name in kwargs if name not in signature(method).parameters]
                first = f"{method.__name__} has no argument {unknown[0]!r}." if unknown else must
                received = [type(value).__name__ for value in args[1:]]
                received += [f"{name}=..." for name in kwargs]
                name = method.__qualname__.removesuffix(".__init__")
                text = message(first, f"{name}({', '.join(received)})", attempt)
                raise TypeError(text) from error

        return call

    return around
