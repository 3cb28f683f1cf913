"""The kind of a user's data, which `classify` finds once, where data enter."""

from dataclasses import dataclass
from enum import Enum
from inspect import isroutine
from typing import Any

import keras
import numpy as np

from wholestep import tree
from wholestep.data.leaves import is_array, text_as_arrays, without_none
from wholestep.tree import Tree

Position = tuple[int, int]


class KeepsPosition:
    """The base class of `Batches`: data whose position outlasts a call.

    A prepared form has the same position.
    """

    _at: list[int]  # the epoch, the batch in it, and the number of moves; changed in place

    @property
    def position(self) -> Position:
        """The epoch and the number of the next batch in it."""
        return self._at[0], self._at[1]

    @position.setter
    def position(self, position: Position) -> None:
        self._at[:2] = position

    @property
    def num_moves(self) -> int:
        """The number of moves by `seek` and new loops; an earlier loop then raises an error."""
        return self._at[2]

    def note_move(self) -> None:
        """Count a move."""
        self._at[2] += 1


class Kind(Enum):
    """How the rows of data are reached."""

    BATCHES = "Batches, which keep their position"
    NUMBERED = "ready-made batches by number"
    STREAM = "ready-made batches, one after the other"
    ARRAYS = "nested arrays, which may be a list of rows"
    ROWS = "rows by number"
    SHARED = "a data set that a strategy has shared out"
    FUNCTION = "a function or class that makes data"
    UNKNOWN = "no data"


@dataclass(frozen=True)
class Data:
    """A user's data and their kind.

    Args:
        content: the data; lists of strings in them are arrays.
        has_columns: whether they are a Hugging Face dataset, or a mapping of names to datasets.
        prefetches: whether a stream draws its batches ahead of their use, so that none depends on
            earlier updates.

    >>> classify({"x": np.zeros(3)}).kind.name, classify(iter([np.zeros(3)])).kind.name
    ('ARRAYS', 'STREAM')
    """

    content: Any
    kind: Kind
    has_columns: bool = False
    prefetches: bool = False

    @property
    def keeps_position(self) -> bool:
        """Whether the user made `Batches` of them."""
        return self.kind is Kind.BATCHES

    @property
    def are_arrays(self) -> bool:
        """Whether they are an array, or a nest of arrays alone (None aside)."""
        return self.kind is Kind.ARRAYS

    @property
    def are_ready(self) -> bool:
        """Whether they come in batches already."""
        return self.kind in (Kind.BATCHES, Kind.NUMBERED, Kind.STREAM)

    def with_labels(self, y: Tree, sample_weight: Tree) -> "Data":
        """Return arrays as the inputs of (x, y, sample_weight), without the parts that are None."""
        parts = self.content, text_as_arrays(y), text_as_arrays(sample_weight)
        are_arrays = self.are_arrays and all(map(is_array, tree.leaves(parts[1:])))
        return Data(without_none(parts), Kind.ARRAYS if are_arrays else Kind.ROWS)

    def is_list_of_rows(self, by_length: bool) -> bool:
        """Whether a list holds a nested item for each row, rather than an array for each leaf.

        A list of arrays and nests of arrays with the same number of rows, such as a model's inputs,
        holds leaves. A vector as a leaf holds a number for each row, which has no length; so with
        `by_length`, vectors are rows.
        """
        items = self.content
        if not isinstance(items, list):
            return False
        if by_length and all(is_array(item) and len(item.shape) == 1 for item in items):
            return True
        nested = [isinstance(item, dict | list | tuple) for item in items]
        if not any(nested):
            return False
        lengths = {np.shape(leaf)[:1] for leaf in tree.leaves(items)}
        return all(nested) or len(lengths) > 1


def classify(source: object) -> Data:
    """Return the data with their kind; data that are classified already are returned unchanged."""
    if isinstance(source, Data):
        return source
    if isinstance(source, KeepsPosition):
        return Data(source, Kind.BATCHES)
    if isinstance(source, keras.utils.PyDataset):
        return Data(source, Kind.NUMBERED)
    source = text_as_arrays(source)
    module = type(source).__module__
    is_of_datasets = module.split(".")[0] == "datasets" and hasattr(source, "__getitem__")
    has_columns = is_of_datasets and hasattr(source, "column_names")
    is_loader = _is_loader(source, module)
    prefetches = is_loader or module.startswith("grain.")
    return Data(source, _kind_of(source, module, is_loader), has_columns, prefetches)


def _kind_of(source: object, module: str, is_loader: bool) -> Kind:
    if is_nest_of_arrays(source):
        return Kind.ARRAYS
    if module.startswith("tensorflow.python.distribute"):
        return Kind.SHARED
    if isinstance(source, type) or isroutine(source):
        return Kind.FUNCTION
    if hasattr(source, "__getitem__") and hasattr(source, "__len__") and not is_loader:
        return Kind.ROWS
    return Kind.STREAM if hasattr(source, "__iter__") else Kind.UNKNOWN


def is_nest_of_arrays(source: object) -> bool:
    """Whether this is an array, or nested dicts, lists and tuples of arrays alone (None aside)."""
    if not isinstance(source, dict | list | tuple):
        return is_array(source)
    leaves = tree.leaves(source)
    return bool(leaves) and all(map(is_array, leaves))


def _is_loader(source: object, module: str) -> bool:
    """Whether this loads batches: a `tf.data.Dataset`, torch's `DataLoader`, or grain's."""
    is_torch = module.startswith("torch.utils.data.dataloader")
    return hasattr(source, "element_spec") or is_torch or _is_batched(source)


def _is_batched(source: object) -> bool:
    """Whether this is a grain.MapDataset whose items are batches."""
    if not type(source).__module__.startswith("grain."):
        return False
    parents = getattr(source, "parents", ())
    return type(source).__name__ == "BatchMapDataset" or any(map(_is_batched, parents))
