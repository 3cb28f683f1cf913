"""Messages about compilations: a line if one takes long, a warning if new shapes keep coming."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from wholestep import tree
from wholestep.data import Batch
from wholestep.errors import message, warn

_LONG = 2.0  # seconds
_MANY = 5  # shapes, if at least every other batch so far had a new shape

Shape = tuple[tuple[str, tuple[int, ...]], ...]


class Compilations:
    """The shapes for which programs were compiled. `num_batches` counts the batches that needed a program.

    Args:
        timer: makes the thread that calls a function after a delay, like `threading.Timer`.
        tell: is called with the line about a long compilation.
        is_quiet: whether to omit this line, as with `verbose=0`. The warning is always shown, once.
    """

    def __init__(
        self,
        timer: Callable = threading.Timer,
        tell: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
    ):
        self.is_quiet = False
        self.num_batches = 0
        self._timer = timer
        self._tell = tell
        self._shapes: list[Shape] = []
        self._has_warned = False

    @contextmanager
    def watched(self, batch: Batch, num_shapes: int = 0) -> Iterator[None]:
        """Context in which the program for a batch is compiled.

        Args:
            num_shapes: the number of shapes in all; 0 if unknown.
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
        """Warn of ready-made batches that keep having new shapes, instead of a few repeated shapes."""
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
    """Return the shapes of the leaves whose shapes differ between batches."""
    leaves: dict[str, list[tuple]] = {}
    for name, shape in (leaf for leaves in shapes for leaf in leaves):
        leaves.setdefault(name, [])
        if shape not in leaves[name]:
            leaves[name].append(shape)
    return "; ".join(f"{name} {', '.join(map(str, found))}" for name, found in leaves.items() if len(found) > 1)
