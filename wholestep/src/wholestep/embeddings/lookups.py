"""Lookups of an objective in embedding tables, recorded in order or answered from gathered rows."""

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
        firsts = [self.groups.index(group) for group in range(len(self.counts))]
        return [self.tables[first].num_rows for first in firsts]

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
            if self._verbs.traces.frame(ids) is frame:
                noted.calls[number].append(ids)
            else:
                noted.inside.add(number)
            rows = from_end(_as_integers(ids), table.num_rows)
            return self._result(table, params[table.param], rows)

        with self._called_instead(note):
            yield noted

    def ids(self, noted: Noted) -> list[Tensor]:
        """Return the row numbers of each group's lookups, int32 (count,); -1 is the last row."""
        by_group = dict(zip(self._keys(noted), noted.calls, strict=True))
        none = [ops.zeros((0,), "int32")]
        flat = [list(map(_narrow, calls)) for calls in by_group.values()]
        return [ops.concatenate(numbers or none) for numbers in flat]

    def learned(
        self, noted: Noted, read: set[int], variables: Variables
    ) -> tuple["Lookups", list[str]]:
        """Return the lookups with their groups, and why all rows of a table are updated, or "".

        Args:
            read: the ids of the variables that were read.
        """
        keys = self._keys(noted)
        distinct = list(dict.fromkeys(keys))
        groups = tuple(map(distinct.index, keys))
        counts = tuple(ids.shape[0] or 0 for ids in self.ids(noted))
        reasons = []
        for number, (table, calls) in enumerate(zip(self.tables, noted.calls, strict=True)):
            shapes = [ids.shape for ids in calls]
            why = {
                "it is looked up inside a loop": number in noted.inside,
                "it is used outside of lookups": id(variables.params[table.param]) in read,
                "the number of lookups depends on values": any(None in shape for shape in shapes),
                "nothing is looked up in it": all(0 in shape for shape in shapes),
            }
            reasons.append(first_reason(why))
        return replace(self, groups=groups, counts=counts), reasons

    def _keys(self, noted: Noted) -> list[tuple[int, ...]]:
        """Return for each table a key that is equal for tables with the same lookups."""
        calls = zip(self.tables, noted.calls, strict=True)
        return [(table.num_rows, *map(id, ids)) for table, ids in calls]

    @contextmanager
    def answering(self, params: list, places: Sequence[Tensor]) -> Iterator[None]:
        """Answer lookups from the gathered rows in `params`.

        Args:
            places: by group, the index of each lookup's row among the gathered rows.
        """
        starts = [0] * len(self.tables)

        def answer(number: int, ids: Tensor) -> Tensor:
            table = self.tables[number]
            start = starts[number]
            stop = start + math.prod(ids.shape)
            starts[number] = stop
            rows = places[self.groups[number]][start:stop]
            return self._result(table, params[table.param], ops.reshape(rows, ids.shape))

        with self._called_instead(answer):
            yield

    def _result(self, table: EmbeddingTable, params: Tensor, rows: Tensor) -> Tensor:
        """Return the result of the layer: NaN for a row that does not exist."""
        flat = self._verbs.ops.lookup(params, ops.reshape(rows, (-1,)))
        result = ops.reshape(flat, (*ops.shape(rows), params.shape[1]))
        return ops.cast(result, table.layer.compute_dtype)

    @contextmanager
    def _called_instead(self, function: Callable[[int, Tensor], Tensor]) -> Iterator[None]:
        """Call a function of (table number, ids) in place of the layers."""
        for number, table in enumerate(self.tables):
            vars(table.layer)["call"] = lambda inputs, number=number: function(number, inputs)
        try:
            yield
        finally:
            for table in self.tables:
                del vars(table.layer)["call"]


def first_reason(reasons: dict[str, bool]) -> str:
    """Return the first reason that holds; "" if none does."""
    return next((why for why, holds in reasons.items() if holds), "")


def from_end(ids: Tensor, size: int) -> Tensor:
    """Return row numbers from 0: negative ones count from the end; `size` where there is no row."""
    rows = ops.where(ids < 0, ids + size, ids)
    return ops.where(rows < 0, ops.full_like(rows, size), rows)


def _as_integers(ids: Tensor) -> Tensor:
    """Return integers, as `keras.layers.Embedding` casts them."""
    is_integer = keras.backend.standardize_dtype(ids.dtype) in ("int32", "int64")
    return ids if is_integer else ops.cast(ids, "int32")


def _narrow(ids: Tensor) -> Tensor:
    """Return row numbers as an int32 vector; numbers beyond int32 stay outside of every table."""
    ids = ops.reshape(_as_integers(ids), (-1,))
    if keras.backend.standardize_dtype(ids.dtype) == "int64":
        ids = ops.clip(ids, -_INT32, _INT32)
    return ops.cast(ids, "int32")
