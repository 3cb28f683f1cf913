"""Checks of numbers: whole numbers of any library are counts, truth values are no numbers."""

import numbers
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from typing import ParamSpec, TypeGuard, TypeVar

from wholestep.errors import invalid, message, shown

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


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


def takes(must: str = "", attempt: str = "") -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Explain the TypeError of a call that passes a method other arguments than it takes.

    An unknown name is answered with the nearest one, or as one of the object itself.

    Args:
        must, attempt: of the error about other wrong arguments; "" leaves it to Python.
    """

    def around(method: Callable[P, R]) -> Callable[P, R]:
        @wraps(method)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return method(*args, **kwargs)
            except TypeError as error:
                # raised by the method
                if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                    raise
                text = _explained(method, args, list(map(str, kwargs)), must, attempt)
                if not text:
                    raise
                raise TypeError(text) from error

        return call

    return around


def made_with(must: str, attempt: str) -> Callable[[type[T]], type[T]]:
    """Explain wrong arguments of a class whose `__init__` Python writes; see `takes`."""

    def around(made: type[T]) -> type[T]:
        init = "__init__"
        setattr(made, init, takes(must, attempt)(getattr(made, init)))
        return made

    return around


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is spelt most like this one; None if none is.

    >>> nearest("val_los", ["loss", "val_loss"]), nearest("lr", ["loss", "val_loss"])
    ('val_loss', None)
    """
    return next(iter(get_close_matches(name, list(known), n=1)), None)


def _explained(
    method: Callable, values: tuple, names: list[str], must: str, attempt: str
) -> str | None:
    """Return the error of a call with these arguments, of which the first is the object; None if
    there is nothing to say.
    """
    known = _parameters(method)
    owner, _, own = method.__qualname__.rpartition(".")
    call = owner if own == "__init__" else own
    received = [type(value).__name__ for value in values[1:]]
    received += [f"{name}=..." for name in names]
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        meant = nearest(unknown, known)
        if unknown in _parameters(type(values[0]).__init__):
            meant = f"{owner}(..., {unknown}=...)"
        if meant or not must:
            must = f"{call} has no argument {unknown!r}."
            attempt = f"{meant or 'one of ' + ', '.join(known)}."
    return message(must, f"{call}({', '.join(received)})", attempt) if must else None


def _parameters(method: Callable) -> list[str]:
    return [name for name in signature(method).parameters if name != "self"]
