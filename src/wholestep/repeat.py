"""Several updates, or batches of an evaluation, as one program: how many of a table's is known only when it runs.

So one program serves a whole epoch, its tail and a user's own loop: how updates are grouped into dispatches cannot
change a bit of them.
"""

from collections.abc import Callable

import keras
import numpy as np
from keras import ops

from wholestep.engines.protocol import Engine
from wholestep.state import State
from wholestep.tree import Tensor, Tree

NONE = np.zeros((3,), np.int32)

Each = Callable[..., tuple[State, Tree]]


def span(first: int, num: int, *, begins: bool) -> np.ndarray:
    """Return which updates of a table a program carries out, int32 (3,), and whether an epoch begins with them.

    >>> span(2, 5, begins=True).tolist()
    [2, 5, 1]
    """
    return np.array([first, num, begins], np.int32)


def several(engine: Engine, each: Each, found: Tree | None, length: int) -> Callable:
    """Return the program (state, given, data, rows, counts, span) -> (state, what was found of each).

    Args:
        each: (state, given, data, rows, count, begins) -> (state, what was found): one update.
        found: shapes and dtypes of what is found of one; None for a program of one update, without a loop.
        length: how many updates a table names, and how many at most are carried out.
    """

    def program(state: State, given: Tree, data: Tree, rows: Tensor, counts: Tensor, which: Tensor) -> tuple:
        def one(i: Tensor, state: State) -> tuple[State, Tree]:
            own = engine.gather((rows, counts), which[0] + i)
            return each(state, given, data, *own, (i == 0) & (which[2] > 0))

        if found is None:
            state, alone = one(ops.zeros((), "int32"), state)
            return state, keras.tree.map_structure(lambda leaf: leaf[None], alone)
        empty = keras.tree.map_structure(lambda leaf: ops.zeros((length, *leaf.shape), leaf.dtype), found)
        return engine.repeat(one, which[1], state, empty)

    return program


def begun(state: State, begins: Tensor, sums: tuple, metrics: list[np.ndarray]) -> State:
    """Return the state with these sums and metrics if an epoch begins, else as it is."""

    def or_empty(value: Tensor, empty: np.ndarray) -> Tensor:
        return ops.where(begins, ops.cast(empty, value.dtype), value)

    metrics = [or_empty(value, empty) for value, empty in zip(state.metrics, metrics, strict=True)]
    return state._replace(sums=tuple(map(or_empty, state.sums, sums)), metrics=metrics)
