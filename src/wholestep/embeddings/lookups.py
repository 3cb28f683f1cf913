"""What an objective looks up in embedding tables: noted in its order, or answered from the rows in hand."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import keras
from keras import ops

from wholestep.embeddings.tables import Table
from wholestep.engines.protocol import Engine
from wholestep.state import Variables
from wholestep.tree import Tensor

_INT32 = 2**31 - 1


@dataclass(eq=False)
class Lookups:
    """What an objective looks up in tables, in the order of its calls.

    `groups` (the place in `counts` of each table; tables that are asked for the same rows share one), `counts` (how
    many rows a microbatch asks for) and `reasons` (why a table must be had as a whole all the same; nothing if it need
    not) are valid once `ids` has been called. Without tables there need be no engine.
    """

    tables: list[Table]
    engine: Engine | None = None
    groups: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    _inside: set[int] = field(default_factory=set)

    @property
    def sizes(self) -> list[int]:
        """The number of rows of each group's tables."""
        return [self.tables[self.groups.index(group)].num_rows for group in range(len(self.counts))]

    @property
    def _verbs(self) -> Engine:
        assert self.engine is not None, "there are tables, and no engine to look up in them"
        return self.engine

    @contextmanager
    def noting(self, noted: list[list[Tensor]], params: list) -> Iterator[None]:
        """Note in `noted`, table by table, what is asked for; answer from the whole tables."""
        frame, self._inside = self._verbs.frame() if self.tables else None, set()

        def note(number: int, ids: Tensor) -> Tensor:
            table = self.tables[number]
            if not self._verbs.is_traced_in(frame, ids):  # what a loop asks for cannot be told from outside of it
                self._inside.add(number)
            else:
                noted[number].append(ids)
            return self._found(table, params[table.param], from_end(_whole(ids), table.num_rows))

        with self._instead(note):
            yield

    def ids(self, noted: list[list[Tensor]], read: set[int], variables: Variables) -> list[Tensor]:
        """Return the row numbers that each group asked for, int32 (count,); negative ones count from the end."""
        asked = [(t.num_rows, *map(id, calls)) for t, calls in zip(self.tables, noted, strict=True)]
        distinct = list(dict.fromkeys(asked))
        self.groups = [distinct.index(key) for key in asked]
        self.reasons = [self._why_whole(number, noted[number], read, variables) for number in range(len(noted))]
        flat = []
        for key in distinct:
            calls = noted[asked.index(key)]
            flat.append(ops.concatenate([_narrow(ids) for ids in calls]) if calls else ops.zeros((0,), "int32"))
        self.counts = [ids.shape[0] for ids in flat]
        return flat

    def _why_whole(self, number: int, calls: list[Tensor], read: set[int], variables: Variables) -> str:
        reasons = {
            "it is looked up inside a loop": number in self._inside,
            "it is used other than by looking up": id(variables.params[self.tables[number].param]) in read,
            "nothing is looked up in it": not any(math.prod(ids.shape) for ids in calls),
        }
        return next((why for why, holds in reasons.items() if holds), "")

    @contextmanager
    def answering(self, params: list, places: Sequence[Tensor]) -> Iterator[None]:
        """Answer from the rows in hand: `params` hold them, `places` (by group) say where each lookup finds its own."""
        starts = [0] * len(self.tables)

        def answer(number: int, ids: Tensor) -> Tensor:
            table, start = self.tables[number], starts[number]
            starts[number] = stop = start + math.prod(ids.shape)
            own = places[self.groups[number]][start:stop]
            return self._found(table, params[table.param], ops.reshape(own, ids.shape))

        with self._instead(answer):
            yield

    def _found(self, table: Table, rows: Tensor, places: Tensor) -> Tensor:
        """Return what the layer returns: NaN where there is no such row."""
        found = self._verbs.lookup(rows, ops.reshape(places, (-1,)))
        return ops.cast(ops.reshape(found, (*places.shape, rows.shape[1])), table.layer.compute_dtype)

    @contextmanager
    def _instead(self, function: Callable[[int, Tensor], Tensor]) -> Iterator[None]:
        for number, table in enumerate(self.tables):
            vars(table.layer)["call"] = lambda inputs, number=number: function(number, inputs)
        try:
            yield
        finally:
            for table in self.tables:
                del vars(table.layer)["call"]


def from_end(ids: Tensor, size: int) -> Tensor:
    """Negative row numbers count from the end; those before the first row become `size`, which is no row either."""
    asked = ops.where(ids < 0, ids + size, ids)
    return ops.where(asked < 0, ops.full_like(asked, size), asked)


def _whole(ids: Tensor) -> Tensor:
    """Return whole numbers, as `keras.layers.Embedding` casts them."""
    return ids if keras.backend.standardize_dtype(ids.dtype) in ("int32", "int64") else ops.cast(ids, "int32")


def _narrow(ids: Tensor) -> Tensor:
    """Return row numbers as a vector of int32; those beyond stay outside of every table."""
    ids = ops.reshape(_whole(ids), (-1,))
    if keras.backend.standardize_dtype(ids.dtype) == "int64":
        ids = ops.clip(ids, -_INT32, _INT32)
    return ops.cast(ids, "int32")
