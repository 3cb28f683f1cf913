"""Columns of a Hugging Face dataset as the inputs and labels of a compiled model, matched by name."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import keras

from wholestep.data import Data, classify
from wholestep.errors import SpecificationError, message
from wholestep.model.compiled import takes_labels
from wholestep.tree import Tree

_LABELS = "label", "labels", "target", "y"
_WEIGHT = "sample_weight"


@dataclass(frozen=True)
class Columns:
    """The roles of a dataset's columns: inputs, labels and sample weights.

    Columns named like the model's inputs, or like the keys of its dict of inputs, are the inputs. Columns named like
    its outputs are the labels; for a single output also `label`, `labels`, `target` or `y`. `sample_weight` weights
    the rows. A model without named inputs, or with one input that no column matches, takes the remaining columns.

    Args:
        inputs: a column for each input; a single name for a single array.
        labels: the same for the outputs; None if there are none.
        weight: the column of sample weights, if there is one.

    >>> columns = Columns({"left": "left", "right": "right"}, "label")
    >>> columns({"left": 1, "right": 2, "label": 3})
    ({'left': 1, 'right': 2}, 3)
    """

    inputs: Tree
    labels: Tree = None
    weight: str | None = None

    @property
    def names(self) -> list[str]:
        """The names of the columns that are used."""
        return [name for name in keras.tree.flatten((self.inputs, self.labels, self.weight)) if name is not None]

    def __call__(self, batch: dict[str, Any]) -> tuple:
        """Return (x,), (x, y) or (x, y, sample_weight) of a batch of columns."""
        parts = [self.inputs, self.labels, self.weight]
        parts = parts[: 3 if self.weight else 1 if self.labels is None else 2]
        return tuple(keras.tree.map_structure(lambda name: batch[name], part) for part in parts)


def open_columns(data: Data, model: keras.Model, **how: bool) -> tuple[Data, Callable[[Any], tuple]]:
    """Return a dataset of the columns that a model uses, and the function that makes batches of them.

    Raises:
        SpecificationError: the role of a column does not follow from its name.
    """
    source = data.content
    if isinstance(source.column_names, dict):
        must = "A model is trained, or evaluated, on one dataset."
        received = f"several: {', '.join(source.column_names)}"
        raise SpecificationError(message(must, received, "pass one dataset, as in dataset['train']."))
    if not hasattr(source, "__len__"):
        must = "A dataset must have its rows by number."
        attempt = "yield (x, y) from a generator over dataset.batch(32)."
        raise SpecificationError(message(must, f"an {type(source).__name__}", attempt))
    columns = find(model, source.column_names, **how)
    return classify(_Rows(source.select_columns(columns.names))), columns


class _Rows:
    """The rows of a dataset, read in groups by column: much faster than row by row."""

    def __init__(self, dataset: Any):
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self._dataset[row]

    def __getitems__(self, rows: list[int]) -> dict[str, Any]:
        return self._dataset[rows]


def find(
    model: keras.Model, names: Collection[str], *, inputs_only: bool = False, is_prepared: bool = False
) -> Columns:
    """Return the roles of columns with these names. A preprocessor (`is_prepared`) names no inputs.

    Raises:
        SpecificationError: as `open_columns`.
    """
    wanted, outputs = None if is_prepared else _names_of(model, "input"), _names_of(model, "output")
    weight = _WEIGHT if _WEIGHT in names and _WEIGHT not in _flat(wanted) else None
    are_named = bool(_flat(wanted)) and all(name in names for name in _flat(wanted))
    rest = [name for name in names if name != weight and not (are_named and name in _flat(wanted))]
    labels = _labels(outputs, rest)
    if labels is None and (takes_labels(model) or weight) and not inputs_only:
        raise _unclear(model, names, "which column is the label")
    weight = None if inputs_only or labels is None else weight
    if are_named:
        return Columns(wanted, None if inputs_only else labels, weight)
    rest = [name for name in rest if name not in _flat(labels)]
    if len(_flat(wanted)) > 1 or not rest or (len(rest) > 1 and wanted is not None):
        raise _unclear(model, names, "which columns are the inputs")
    inputs = rest[0] if len(rest) == 1 else {name: name for name in rest}
    return Columns(inputs, None if inputs_only else labels, weight)


def _labels(outputs: Tree, rest: list[str]) -> Tree:
    if _flat(outputs) and all(name in rest for name in _flat(outputs)):
        return outputs
    known = [name for name in _LABELS if name in rest]
    return known[0] if len(known) == 1 and len(_flat(outputs)) < 2 else None


def _names_of(model: keras.Model, kind: str) -> Tree:
    """Return the names of the inputs or outputs, nested as labels would be; None for a model without names."""
    struct = getattr(model, f"_{kind}s_struct", None)
    if isinstance(struct, dict):
        return {key: key for key in struct}
    names = [tensor.name for tensor in getattr(model, "inputs", None) or []]
    told = getattr(model, "_functional", None) or model  # a Sequential has the names of its outputs nowhere else
    names = names if kind == "input" else list(getattr(told, "output_names", None) or [])
    if len(names) < 2:
        return names[0] if names else None
    return {name: name for name in names} if kind == "input" else names


def _flat(names: Tree) -> list[str]:
    return [name for name in keras.tree.flatten(names) if name is not None]


def _unclear(model: keras.Model, names: Collection[str], what: str) -> SpecificationError:
    inputs, outputs = (", ".join(_flat(_names_of(model, kind))) or "no names" for kind in ("input", "output"))
    must = f"The names of the columns must show {what}: the model has the inputs {inputs} and the outputs {outputs}."
    attempt = "name an Input as its column, keras.Input(..., name='image'), and the label 'label'; or "
    attempt += "ws.Batches(dataset, 32, transform=lambda columns: (columns['image'], columns['label']))."
    return SpecificationError(message(must, f"the columns {', '.join(names)}", attempt))
