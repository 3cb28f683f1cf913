"""Attributes of others that are replaced for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_GONE = object()
_HELD: dict[
    tuple[int, str], list[list]
] = {}  # by an attribute, of each value [it, the one before it]


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute inside of a `with`; several may end in any order.

    >>> class Owner:
    ...     word = "before"
    >>> with replaced(Owner, "word", "inside"):
    ...     Owner.word
    'inside'
    >>> Owner.word
    'before'
    """
    held = _HELD.setdefault((id(owner), name), [])
    own = [value, vars(owner).get(name, _GONE)]
    held.append(own)
    setattr(owner, name, value)
    try:
        yield
    finally:
        held[:] = [each for each in held if each is not own]
        later = next((each for each in held if each[1] is value), None)
        if later is not None:
            later[1] = own[1]
        elif own[1] is _GONE:
            delattr(owner, name)
        else:
            setattr(owner, name, own[1])
        if not held:
            del _HELD[id(owner), name]
