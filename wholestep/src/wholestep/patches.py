"""Attributes that have other values for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(*owners: Any, **values: Any) -> Iterator[None]:
    """Context in which attributes of objects have these values. Keras does not track them.

    >>> class Thing:
    ...     size = 1
    >>> thing = Thing()
    >>> with replaced(thing, size=2):
    ...     thing.size
    2
    >>> thing.size, vars(thing)
    (1, {})
    """
    before = [dict(vars(owner)) for owner in owners]
    for owner in owners:
        vars(owner).update(values)
    try:
        yield
    finally:
        for owner, attributes in zip(owners, before, strict=True):
            for name in values:
                if name in attributes:
                    vars(owner)[name] = attributes[name]
                else:
                    del vars(owner)[name]
