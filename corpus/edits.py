"""Edits of a loop's text, and the lines that they change."""

from collections.abc import Sequence

_QUOTES = '"""'


class EditError(ValueError):
    """An edit does not fit the text that it is of."""


def edited(source: str, replacements: Sequence[Sequence[str]]) -> tuple[str, list[int]]:
    """Return a loop's text in which old parts are replaced, one after the other, by new ones.

    The header stays as it is. Each old part must occur exactly once in the rest, in which earlier
    replacements are done.

    Returns:
        The new text, and the numbers of its lines that have new text, or that come where text was
        taken away.

    Raises:
        EditError: an old part does not occur once, or a replacement changes nothing.
    """
    begins = source.index(_QUOTES, len(_QUOTES)) + len(_QUOTES)
    header = source[:begins]
    text = source[begins:]
    is_new = [False] * len(text)
    for old, new in replacements:
        count = text.count(old) if old else 0
        if count != 1 or old == new:
            told = f"Expected a part that occurs once and is replaced by another, got {old!r}"
            raise EditError(f"{told}, which occurs {count} times; try a longer part.")
        at = text.index(old)
        start, kept = _kept(old, new)
        marks = _marks(new[start : len(new) - kept])
        first = at + start
        last = at + len(old) - kept
        text = text[:first] + new[start : len(new) - kept] + text[last:]
        is_new[first:last] = marks
        if True not in marks:
            is_new[_left(text, first)] = True
    numbers = (header + text[:i] for i, mark in enumerate(is_new) if mark)
    return header + text, sorted({before.count("\n") + 1 for before in numbers})


def _kept(old: str, new: str) -> tuple[int, int]:
    """Return how many letters two texts share at the beginning, and at the end of the rest."""
    start = _shared(old, new)
    return start, _shared(old[start:][::-1], new[start:][::-1])


def _shared(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    shortest = min(len(one), len(other))
    return next((i for i, (a, b) in pairs if a != b), shortest)


def _left(text: str, at: int) -> int:
    """Return a letter of the line in which text was taken away; of the next, if none is left."""
    before = text[:at].rpartition("\n")[2]
    if before.strip():
        return at - 1
    rest = text[at:]
    return min(at + len(rest) - len(rest.lstrip()), len(text) - 1)


def _marks(text: str) -> list[bool]:
    """Return for each letter whether its line counts as changed; white space does not."""
    return [not letter.isspace() for letter in text]
