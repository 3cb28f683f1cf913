"""What an objective looks up in embedding tables: noted in its order, or answered from the rows in hand."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import keras
from keras import ops

from wholestep.embeddings.tables import Table
from wholestep.engines.protocol import Engine
from wholestep.state import Variables
from wholestep.tree import Tensor

_INT32 = 2**31 - 1


@dataclass
class Noted:
    """What was asked for, table by table, in one call of an objective.

    Args:
        calls: the row numbers of each lookup.
        inside: the tables that were looked up inside of a loop, of which nobody outside can tell.
    """

    calls: list[list[Tensor]]
    inside: set[int] = field(default_factory=set)


@dataclass(frozen=True, eq=False)
class Lookups:
    """What an objective looks up in tables, in the order of its calls. Without tables there need be no engine.

    Args:
        groups: the place in `counts` of each table; tables that are asked for the same rows share one.
        counts: how many rows a microbatch asks for.
    """

    tables: list[Table]
    engine: Engine | None = None
    groups: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()

    @property
    def sizes(self) -> list[int]:
        """The number of rows of each group's tables."""
        return [self.tables[self.groups.index(group)].num_rows for group in range(len(self.counts))]

    @property
    def _verbs(self) -> Engine:
        assert self.engine is not None, "there are tables, and no engine to look up in them"
        return self.engine

    @contextmanager
    def noting(self, params: list) -> Iterator[Noted]:
        """Note what is asked for; answer from the whole tables."""
        frame = self._verbs.frame() if self.tables else None
        noted = Noted([[] for _ in self.tables])

        def note(number: int, ids: Tensor) -> Tensor:
            table = self.tables[number]
            if hasattr(ids, "row_splits"):  # ragged: the layer reads its table, which is seen
                return type(table.layer).call(table.layer, ids)
            if not self._verbs.is_traced_in(frame, ids):
                noted.inside.add(number)
            else:
                noted.calls[number].append(ids)
            return self._found(table, params[table.param], from_end(_whole(ids), table.num_rows))

        with self._instead(note):
            yield noted

    def ids(self, noted: Noted) -> list[Tensor]:
        """Return the row numbers that each group asked for, int32 (count,); negative ones count from the end."""
        asked = self._asked(noted)
        flat = []
        for key in dict.fromkeys(asked):
            calls = noted.calls[asked.index(key)]
            flat.append(ops.concatenate([_narrow(ids) for ids in calls]) if calls else ops.zeros((0,), "int32"))
        return flat

    def learned(self, noted: Noted, read: set[int], variables: Variables) -> tuple["Lookups", list[str]]:
        """Return the same with groups and counts, and for each table why it must be had as a whole all the same.

        Args:
            read: the ids of the variables that were read.
        """
        asked = self._asked(noted)
        distinct = list(dict.fromkeys(asked))
        reasons = [self._why_whole(number, noted, read, variables) for number in range(len(self.tables))]
        counts = tuple(ids.shape[0] or 0 for ids in self.ids(noted))
        return replace(self, groups=tuple(distinct.index(key) for key in asked), counts=counts), reasons

    def _asked(self, noted: Noted) -> list[tuple[int, ...]]:
        """Return what tells tables apart that are not asked for the same rows."""
        return [(t.num_rows, *map(id, calls)) for t, calls in zip(self.tables, noted.calls, strict=True)]

    def _why_whole(self, number: int, noted: Noted, read: set[int], variables: Variables) -> str:
        reasons = {
            "it is looked up inside a loop": number in noted.inside,
            "it is used other than by looking up": id(variables.params[self.tables[number].param]) in read,
            "how many rows are asked for only the values tell": any(None in ids.shape for ids in noted.calls[number]),
            "nothing is looked up in it": not any(0 not in ids.shape for ids in noted.calls[number]),
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
        return ops.cast(ops.reshape(found, (*ops.shape(places), rows.shape[1])), table.layer.compute_dtype)

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
