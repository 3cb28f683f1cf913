"""The losses, metrics and logs of a compiled Keras model, as `keras.Model.fit` uses them.

This module and `wholestep.model.losses` read private attributes of Keras: `keras.Model.compile`
keeps its arguments there.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import keras

from wholestep.data import Data, classify
from wholestep.errors import SpecificationError, message
from wholestep.keras_private import (
    compile_loss,
    compile_metrics,
    flatten_layers,
    functional,
    loss_tracker,
    struct_of,
    takes_training,
)
from wholestep.tree import Tensor, Tree


def unpack(batch: Tree) -> tuple[Tree, Tree, Tree]:
    """Return (x, y, sample_weight) of a batch; None for a missing part."""
    parts = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    if len(parts) > 3:
        must = "A batch must be x, (x, y) or (x, y, sample_weight)."
        raise SpecificationError(message(must, f"{len(parts)} parts", "nest several inputs in x."))
    return (*parts, None, None, None)[:3]


def outputs_of(model: keras.Model, x: Tree, *, training: bool) -> Any:
    """Call a model, in training or inference mode if it has modes."""
    return model(x, training=training) if takes_training(model) else model(x)


def without_labels(model: keras.Model, batch: Tree) -> str | None:
    """Return the error message for a batch that lacks labels; None if it lacks none."""
    x, y, _ = unpack(batch)
    if y is not None or not takes_labels(model):
        return None
    received = "a batch without y"
    if isinstance(x, dict) and "y" in x:
        received = f"a dict of {', '.join(map(str, x))}, which are all inputs, without y"
    attempt = (
        "the tuple (x, y) or (x, y, sample_weight) as a batch, Batches((x, y), batch_size=32), "
        "or fit(x, y), not fit((x, y)); or compile without a loss."
    )
    return message("A model that was compiled with a loss needs labels.", received, attempt)


def takes_labels(model: keras.Model) -> bool:
    """Whether a model was compiled with a loss."""
    return compile_loss(model) is not None


def layers(model: keras.Model) -> list[keras.layers.Layer]:
    """Return the model and all layers in it."""
    return list(flatten_layers(model)())


def is_overridden(model: keras.Model, name: str) -> bool:
    """Whether a model overrides a method of Keras."""
    function = getattr(getattr(model, name), "__func__", None)
    return function is not getattr(keras.Model, name)


def metrics_of(model: keras.Model) -> list[keras.metrics.Metric]:
    """Return the metrics to carry: all except the loss trackers, which our sums replace.

    The trackers of single losses are carried if a custom `compute_loss` may update them.
    """
    trackers = {id(tracker) for tracker in loss_trackers(model).values()}
    return [metric for metric in model.metrics if id(metric) not in trackers]


def loss_trackers(model: keras.Model) -> dict[str, keras.metrics.Mean]:
    """Return the metrics that our sums replace, by their names in the logs."""
    if not model.compiled:
        return {}
    trackers = {"loss": loss_tracker(model)}
    if takes_labels(model) and not is_overridden(model, "compute_loss"):
        losses = compile_loss(model).metrics
        names = distinct([m.name for m in losses])
        trackers |= dict(zip(names, losses, strict=True))
    return trackers


# whose `reset_state` only empties variables
_OF_METRICS = "keras.src.metrics", "keras.src.trainers.compile_utils"


def resets_on_the_host(metric: keras.metrics.Metric) -> bool:
    """Whether a metric, or one nested in it, has a `reset_state` that may do anything."""
    module = type(
        metric
    ).reset_state.__module__  # a class of Keras' package may be one of its tests
    nested = getattr(metric, "metrics", ())
    return not module.startswith(_OF_METRICS) or any(map(resets_on_the_host, nested))


def tracked(
    model: keras.Model, numbers: Mapping[str, Tensor | float]
) -> list[tuple[keras.Variable, Tensor | float]]:
    """Return the variables of the loss trackers, and their values for these logs of an epoch."""
    pairs: list[tuple[keras.Variable, Tensor | float]] = []
    for name, tracker in loss_trackers(model).items():
        if name in numbers:
            pairs.append((tracker.total, numbers[name]))
            pairs.append((tracker.count, 1))
    return pairs


def own_results(model: keras.Model) -> dict[str, Tensor]:
    """Return the current results of a custom `get_metrics_result`; {} if the model has none."""
    return dict(model.get_metrics_result()) if is_overridden(model, "get_metrics_result") else {}


def order_of(model: keras.Model) -> list[str]:
    """Return the names of the logs in the order in which `keras.Model.evaluate` lists them."""
    trackers = compile_loss(model).metrics if takes_labels(model) else []
    unique = distinct([m.name for m in trackers])
    renamed = dict(zip(map(id, trackers), unique, strict=True))
    names = []
    for metric in model.metrics:
        is_compiled = metric is compile_metrics(model)
        parts = metric.metrics if is_compiled else [metric]
        names += [renamed.get(id(part), part.name) for part in parts]
    return names


def made_of(model: keras.Model, extra: list) -> list:
    """Return the objects that programs depend on; not their ids, which Python may reuse."""
    compiled = compile_loss(model), compile_metrics(model)
    made_of = [
        getattr(model, "optimizer", None),
        *compiled,
        *model.trainable_variables,
        model.run_eagerly,
    ]
    for metric in (*metrics_of(model), *extra):
        made_of += metric.variables
    for layer in layers(model):
        made_of += [layer, layer.trainable]
    return made_of


def are_same(one: list, two: list) -> bool:
    """Whether two lists hold the same objects."""
    return list(map(id, one)) == list(map(id, two))


def known_metrics(model: keras.Model, extra: list) -> list[keras.metrics.Metric] | None:
    """Return the compiled metrics and `extra`; None if layers update further metrics themselves."""
    compiled = compile_metrics(model)
    known = set(map(id, [compiled, *extra]))
    if not known.issuperset(map(id, metrics_of(model))):
        return None
    metrics = [] if compiled is None else compiled.metrics
    return [*metrics, *extra]


def distinct(names: list[str]) -> list[str]:
    """Number repeated names, as Keras does with metrics.

    >>> distinct(["mse_loss", "mse_loss", "a_loss"])
    ['mse_loss', 'mse_loss_1', 'a_loss']
    """
    unique = []
    for i, name in enumerate(names):
        count = names[:i].count(name)
        unique.append(f"{name}_{count}" if count else name)
    return unique


_LABELS = "label", "labels", "target", "y"
_WEIGHT = "sample_weight"


@dataclass(frozen=True)
class Columns:
    """The roles of a dataset's columns: inputs, labels and sample weights.

    Columns named like the model's inputs, or like the keys of its dict of inputs, are the inputs.
    Columns named like its outputs are the labels; for a single output also `label`, `labels`,
    `target` or `y`. `sample_weight` weights the rows. A model without named inputs, or with one
    input that no column matches, takes the remaining columns.

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
        return _flat((self.inputs, self.labels, self.weight))

    def __call__(self, batch: dict[str, Any]) -> tuple:
        """Return (x,), (x, y) or (x, y, sample_weight) of a batch of columns."""
        parts = [self.inputs]
        if self.labels is not None or self.weight:
            parts.append(self.labels)
        if self.weight:
            parts.append(self.weight)
        return tuple(keras.tree.map_structure(batch.__getitem__, part) for part in parts)


def open_columns(
    data: Data, model: keras.Model, **how: bool
) -> tuple[Data, Callable[[Any], tuple]]:
    """Return a dataset of a model's columns, and the function that makes batches of them.

    Raises:
        SpecificationError: the role of a column does not follow from its name.
    """
    source = data.content
    if isinstance(source.column_names, dict):
        must = "A model is trained, or evaluated, on one dataset."
        received = f"several: {', '.join(source.column_names)}"
        attempt = "pass one dataset, as in dataset['train']."
        raise SpecificationError(message(must, received, attempt))
    if not hasattr(source, "__len__"):
        must = "A dataset must have its rows by number."
        attempt = "yield (x, y) from a generator over dataset.batch(32)."
        raise SpecificationError(message(must, f"an {type(source).__name__}", attempt))
    columns = find(model, source.column_names, **how)
    return classify(_ColumnRows(source.select_columns(columns.names))), columns


class _ColumnRows:
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
    model: keras.Model,
    names: Collection[str],
    *,
    inputs_only: bool = False,
    is_prepared: bool = False,
) -> Columns:
    """Return the roles of columns with these names.

    Args:
        is_prepared: whether a preprocessor follows, which names no inputs.

    Raises:
        SpecificationError: as `open_columns`.
    """
    inputs = None if is_prepared else _names_of(model, "input")
    wanted = _flat(inputs)
    weight = _WEIGHT if _WEIGHT in names and _WEIGHT not in wanted else None
    are_named = bool(wanted) and all(name in names for name in wanted)
    used = [weight, *wanted] if are_named else [weight]
    rest = [name for name in names if name not in used]
    labels = _labels(_names_of(model, "output"), rest)
    if labels is None and (takes_labels(model) or weight) and not inputs_only:
        raise _unclear(model, names, "which column is the label")
    if not are_named:
        rest = [name for name in rest if name not in _flat(labels)]
        are_too_many = inputs is not None and len(rest) > 1
        if len(wanted) > 1 or not rest or are_too_many:
            raise _unclear(model, names, "which columns are the inputs")
        inputs = rest[0] if len(rest) == 1 else {name: name for name in rest}
    if inputs_only or labels is None:
        return Columns(inputs)
    return Columns(inputs, labels, weight)


def _labels(outputs: Tree, rest: list[str]) -> Tree:
    wanted = _flat(outputs)
    if wanted and all(name in rest for name in wanted):
        return outputs
    if len(wanted) > 1:
        return None
    known = [name for name in _LABELS if name in rest]
    return known[0] if len(known) == 1 else None


def _names_of(model: keras.Model, kind: str) -> Tree:
    """Return the names of the inputs or outputs, nested as labels would be; None without names."""
    struct = struct_of(model, kind)
    if isinstance(struct, dict):
        return {key: key for key in struct}
    if kind == "input":
        tensors = getattr(model, "inputs", None) or []
        names = [tensor.name for tensor in tensors]
    else:
        # a Sequential has the names of its outputs nowhere else
        built = functional(model) or model
        names = list(getattr(built, "output_names", None) or [])
    if len(names) < 2:
        return names[0] if names else None
    return {name: name for name in names} if kind == "input" else names


def _flat(names: Tree) -> list[str]:
    return [name for name in keras.tree.flatten(names) if name is not None]


def _unclear(model: keras.Model, names: Collection[str], what: str) -> SpecificationError:
    inputs = ", ".join(_flat(_names_of(model, "input"))) or "no names"
    outputs = ", ".join(_flat(_names_of(model, "output"))) or "no names"
    must = (
        f"The names of the columns must show {what}: the model has the inputs {inputs} and the "
        f"outputs {outputs}."
    )
    attempt = (
        "name an Input as its column, keras.Input(..., name='image'), and the label 'label'; or "
        "ws.Batches(dataset, 32, transform=lambda columns: (columns['image'], columns['label']))."
    )
    return SpecificationError(message(must, f"the columns {', '.join(names)}", attempt))
