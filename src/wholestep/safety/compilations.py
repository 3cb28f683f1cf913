"""What a user is told while programs are compiled: one line where that takes long, one warning where it never ends."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from wholestep import tree
from wholestep.data.block import Batch
from wholestep.errors import message, warn

_LONG = 2.0  # seconds
_MANY = 5  # shapes, if at least every other batch so far brought a new one

Shape = tuple[tuple[str, tuple[int, ...]], ...]


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Compilations:
    """The shapes that programs were compiled for. `num_batches` counts the batches that asked for a program.

    Args:
        timer: makes the thread that calls a function in so many seconds, as `threading.Timer` does.
        tell: what is done with the line about a compilation that takes long.
        is_quiet: whether that is left out, as `verbose=0` asks. The warning comes in any case, once.
    """

    def __init__(self, timer: Callable = threading.Timer, tell: Callable[[str], None] = _print):
        self.is_quiet = False
        self.num_batches = 0
        self._timer = timer
        self._tell = tell
        self._shapes: list[Shape] = []
        self._has_warned = False

    @contextmanager
    def watched(self, batch: Batch, num_shapes: int = 0) -> Iterator[None]:
        """Compile the program for a batch in here.

        Args:
            num_shapes: how many shapes there are in all; 0 if nobody knows.
        """
        shape = _shape_of(batch)
        if shape not in self._shapes:
            self._shapes.append(shape)
        if batch.ids is None and not batch.is_resident:
            self._warn_of_many()
        number = self._shapes.index(shape) + 1
        of = f" of {num_shapes}" if number <= num_shapes else ""
        parts = ", ".join(f"{name} {size}" for name, size in shape)
        line = f"wholestep: compiling shape {number}{of} ({parts}), for more than {_LONG:g} seconds so far"
        timer = self._timer(_LONG, lambda: None if self.is_quiet else self._tell(line))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()

    def _warn_of_many(self) -> None:
        """Warn of ready-made batches whose shapes keep being new; a few that come again and again are the way out."""
        num = len(self._shapes)
        if self._has_warned or num < _MANY or 2 * num < self.num_batches:
            return
        self._has_warned = True
        told = message(
            "Batches should come in a few shapes: each new one compiles a program anew, for seconds.",
            f"{num} shapes in {self.num_batches} batches: {_differing(self._shapes)}",
            "pad them to a few lengths and numbers of rows, or give the rows to Batches(rows, tokens=..., length=...).",
        )
        warn(told)


def _shape_of(batch: Batch) -> Shape:
    rows = batch.num_rows
    return tuple((name, (rows, *map(int, leaf.shape[1:]))) for name, leaf in tree.named_leaves(batch.host))


def _differing(shapes: list[Shape]) -> str:
    """Return the shapes of what is not the same in all batches."""
    leaves: dict[str, list[tuple]] = {}
    for name, shape in (leaf for leaves in shapes for leaf in leaves):
        leaves.setdefault(name, [])
        if shape not in leaves[name]:
            leaves[name].append(shape)
    return "; ".join(f"{name} {', '.join(map(str, found))}" for name, found in leaves.items() if len(found) > 1)
