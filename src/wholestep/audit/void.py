"""Optimizer steps whose results are thrown away until a window is full, as traced accumulation has them."""

from dataclasses import replace
from itertools import pairwise

from wholestep.audit.keeping import all_same, in_part
from wholestep.audit.windows import Update


def without_void(updates: list[Update]) -> list[Update]:
    """Return updates where each window is one: of its steps only the last is kept, and all windows are as long.

    So writes who selects by `jnp.where(is_full, new, old)`. Steps that are thrown away otherwise stay as they are.
    """
    known = [u for u in updates if u.applied.is_whole]
    kept = [i for i, (a, b) in enumerate(pairwise(known)) if not _is_void(a, b)]
    size = kept[0] + 1 if kept else 1
    is_regular = all(i + 1 == size * (n + 1) for n, i in enumerate(kept))
    if size < 2 or len(kept) < 2 or not is_regular or len(kept) < (len(known) - 1) // size:
        return updates
    windows = [updates[start : start + size] for start in range(0, len(updates) - size + 1, size)]
    return [
        replace(each[-1], number=n, pieces=[piece for u in each for piece in u.pieces])
        for n, each in enumerate(windows, start=1)
    ]


def _is_void(one: Update, two: Update) -> bool:
    """Whether the second step begins with what the first began with, which has made something else of it."""
    old, new = one.applied, two.applied
    is_again = all_same(in_part(old.params), in_part(new.params)) and all_same(old.slots, new.slots)
    return is_again and not all_same(in_part(old.params), in_part(old.params_after))
