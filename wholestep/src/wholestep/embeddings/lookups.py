"""The lookups of an objective in embedding tables: recorded in order, or answered from gathered
rows.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import keras
from keras import ops

from wholestep.engines import Engine
from wholestep.state import EmbeddingTable, Variables
from wholestep.tree import Tensor

_INT32 = 2**31 - 1


@dataclass
class Noted:
    """The lookups of one call of an objective.

    Args:
        calls: for each table, the row numbers of each lookup.
        inside: the tables with a lookup inside of a loop, whose row numbers are unknown outside.
    """

    calls: list[list[Tensor]]
    inside: set[int] = field(default_factory=set)


@dataclass(frozen=True, eq=False)
class Lookups:
    """The lookups of an objective, in the order of its calls. Without tables, no engine is needed.

    Args:
        groups: the index of each table's group; tables with the same lookups share a group.
        counts: the number of lookups of a microbatch in each group.
    """

    tables: list[EmbeddingTable]
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
        """Record lookups, and answer them from the full tables."""
        frame = self._verbs.traces.frame() if self.tables else None
        noted = Noted([[] for _ in self.tables])

        def note(number: int, ids: Tensor) -> Tensor:
            table = self.tables[number]
            if hasattr(ids, "row_splits"):  # ragged: the layer reads its table, which is recorded
                return type(table.layer).call(table.layer, ids)
            if self._verbs.traces.frame(ids) is not frame:
                noted.inside.add(number)
            else:
                noted.calls[number].append(ids)
            return self._found(table, params[table.param], from_end(_whole(ids), table.num_rows))

        with self._instead(note):
            yield noted

    def ids(self, noted: Noted) -> list[Tensor]:
        """Return the row numbers of each group's lookups, int32 (count,); negative numbers count
        from the end.
        """
        asked = self._asked(noted)
        flat = []
        for key in dict.fromkeys(asked):
            calls = noted.calls[asked.index(key)]
            flat.append(
                ops.concatenate([_narrow(ids) for ids in calls])
                if calls
                else ops.zeros((0,), "int32")
            )
        return flat

    def learned(
        self, noted: Noted, read: set[int], variables: Variables
    ) -> tuple["Lookups", list[str]]:
        """Return the lookups with groups and counts, and for each table the reason to update all
        its rows, or "".

        Args:
            read: the ids of the variables that were read.
        """
        asked = self._asked(noted)
        distinct = list(dict.fromkeys(asked))
        reasons = [
            self._why_whole(number, noted, read, variables) for number in range(len(self.tables))
        ]
        counts = tuple(ids.shape[0] or 0 for ids in self.ids(noted))
        return replace(
            self, groups=tuple(distinct.index(key) for key in asked), counts=counts
        ), reasons

    def _asked(self, noted: Noted) -> list[tuple[int, ...]]:
        """Return for each table a key that is equal for tables with the same lookups."""
        return [
            (t.num_rows, *map(id, calls)) for t, calls in zip(self.tables, noted.calls, strict=True)
        ]

    def _why_whole(self, number: int, noted: Noted, read: set[int], variables: Variables) -> str:
        reasons = {
            "it is looked up inside a loop": number in noted.inside,
            "it is used outside of lookups": id(variables.params[self.tables[number].param])
            in read,
            "the number of lookups depends on values": any(
                None in ids.shape for ids in noted.calls[number]
            ),
            "nothing is looked up in it": not any(
                0 not in ids.shape for ids in noted.calls[number]
            ),
        }
        return next((why for why, holds in reasons.items() if holds), "")

    @contextmanager
    def answering(self, params: list, places: Sequence[Tensor]) -> Iterator[None]:
        """Answer lookups from the gathered rows in `params`; `places` (by group) are their indices
        there.
        """
        starts = [0] * len(self.tables)

        def answer(number: int, ids: Tensor) -> Tensor:
            table = self.tables[number]
            start = starts[number]
            starts[number] = stop = start + math.prod(ids.shape)
            own = places[self.groups[number]][start:stop]
            return self._found(table, params[table.param], ops.reshape(own, ids.shape))

        with self._instead(answer):
            yield

    def _found(self, table: EmbeddingTable, rows: Tensor, places: Tensor) -> Tensor:
        """Return the result of the layer: NaN for a row that does not exist."""
        found = self._verbs.ops.lookup(rows, ops.reshape(places, (-1,)))
        return ops.cast(
            ops.reshape(found, (*ops.shape(places), rows.shape[1])), table.layer.compute_dtype
        )

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
    """Return row numbers counted from 0: negative ones count from the end; rows before the first
    become `size`.
    """
    asked = ops.where(ids < 0, ids + size, ids)
    return ops.where(asked < 0, ops.full_like(asked, size), asked)


def _whole(ids: Tensor) -> Tensor:
    """Return integers, as `keras.layers.Embedding` casts them."""
    return (
        ids
        if keras.backend.standardize_dtype(ids.dtype) in ("int32", "int64")
        else ops.cast(ids, "int32")
    )


def _narrow(ids: Tensor) -> Tensor:
    """Return row numbers as an int32 vector; numbers beyond int32 stay outside of every table."""
    ids = ops.reshape(_whole(ids), (-1,))
    if keras.backend.standardize_dtype(ids.dtype) == "int64":
        ids = ops.clip(ids, -_INT32, _INT32)
    return ops.cast(ids, "int32")
