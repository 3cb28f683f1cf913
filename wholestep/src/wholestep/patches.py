"""Attributes that have other values for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(*owners: Any, **values: Any) -> Iterator[None]:
    """Context in which attributes of objects have these values, set past their `__setattr__`.

    >>> class Thing:
    ...     size = 1
    >>> thing = Thing()
    >>> with replaced(thing, size=2):
    ...     thing.size
    2
    >>> thing.size, vars(thing)
    (1, {})
    """
    before = [
        {name: vars(owner)[name] for name in values if name in vars(owner)} for owner in owners
    ]
    for owner in owners:
        vars(owner).update(values)
    try:
        yield
    finally:
        for owner, attributes in zip(owners, before, strict=True):
            for name in values:
                vars(owner).pop(name, None)
            vars(owner).update(attributes)
