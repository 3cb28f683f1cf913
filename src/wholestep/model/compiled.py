"""The losses, metrics and logs of a compiled Keras model, as `keras.Model.fit` uses them.

This module and `wholestep.model.losses` read private attributes of Keras: `keras.Model.compile` keeps its arguments
there.
"""

from collections.abc import Mapping

import keras

from wholestep.errors import SpecificationError, message
from wholestep.tree import Tensor, Tree


def unpack(batch: Tree) -> tuple[Tree, Tree, Tree]:
    """Return (x, y, sample_weight) of a batch; None for a missing part."""
    parts = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    if len(parts) > 3:
        must = "A batch must be x, (x, y) or (x, y, sample_weight)."
        raise SpecificationError(message(must, f"{len(parts)} parts", "nest several inputs in x."))
    return (*parts, None, None, None)[:3]


def without_labels(model: keras.Model, batch: Tree) -> str | None:
    """Return the message of an error for a batch without labels; None if it has them, or the model needs none."""
    x, y, _ = unpack(batch)
    if y is not None or model._compile_loss is None:
        return None
    received = "a batch without y"
    if isinstance(x, dict) and "y" in x:
        received = f"a dict of {', '.join(map(str, x))}, which are all inputs, without y"
    attempt = "the tuple (x, y) or (x, y, sample_weight) as a batch, Batches((x, y), batch_size=32), or fit(x, y); "
    attempt += "or compile without a loss."
    return message("A model that was compiled with a loss needs labels.", received, attempt)


def takes_labels(model: keras.Model) -> bool:
    """Whether a model was compiled with a loss."""
    return getattr(model, "_compile_loss", None) is not None


def layers(model: keras.Model) -> list[keras.layers.Layer]:
    """Return the model and all layers in it."""
    return list(model._flatten_layers())


def is_overridden(model: keras.Model, name: str) -> bool:
    """Whether a model overrides a method of Keras."""
    return getattr(getattr(model, name), "__func__", None) is not getattr(keras.Model, name)


def metrics_of(model: keras.Model) -> list[keras.metrics.Metric]:
    """Return the metrics to carry: all except the loss trackers, which our sums replace.

    The trackers of single losses are carried if a custom `compute_loss` may update them.
    """
    trackers = loss_trackers(model).values()
    return [m for m in model.metrics if not any(m is t for t in trackers)]


def loss_trackers(model: keras.Model) -> dict[str, keras.metrics.Mean]:
    """Return the metrics that our sums replace, by their names in the logs."""
    if not model.compiled:
        return {}
    has_own = is_overridden(model, "compute_loss") or model._compile_loss is None
    losses = [] if has_own else model._compile_loss.metrics
    return {"loss": model._loss_tracker, **dict(zip(distinct([m.name for m in losses]), losses, strict=True))}


def resets_on_the_host(metric: keras.metrics.Metric) -> bool:
    """Whether a metric, or a metric nested in it, has a custom `reset_state`, which may do anything."""
    own = type(metric).reset_state.__module__.split(".")[0] != "keras"
    return own or any(map(resets_on_the_host, getattr(metric, "metrics", ())))


def tracked(model: keras.Model, numbers: Mapping[str, Tensor | float]) -> list[tuple[keras.Variable, Tensor | float]]:
    """Return the variables of the loss trackers, and their values for these logs of an epoch."""
    found = [(tracker, numbers[name]) for name, tracker in loss_trackers(model).items() if name in numbers]
    return [pair for tracker, number in found for pair in ((tracker.total, number), (tracker.count, 1))]


def own_results(model: keras.Model) -> dict[str, Tensor]:
    """Return the current results of a custom `get_metrics_result`; {} if the model has none."""
    return dict(model.get_metrics_result()) if is_overridden(model, "get_metrics_result") else {}


def order_of(model: keras.Model) -> list[str]:
    """Return the names of the logs in the order of the model's metrics, by which `keras.Model.evaluate` lists them."""
    trackers = [] if model._compile_loss is None else model._compile_loss.metrics
    renamed = dict(zip(map(id, trackers), distinct([m.name for m in trackers]), strict=True))
    names = []
    for metric in model.metrics:
        parts = metric.metrics if metric is model._compile_metrics else [metric]
        names += [renamed.get(id(part), part.name) for part in parts]
    return names


def made_of(model: keras.Model, extra: list) -> list:
    """Return the objects that compiled programs depend on. Not their ids, which Python may reuse."""
    compiled = [getattr(model, name, None) for name in ("optimizer", "_compile_loss", "_compile_metrics")]
    flags = [part for layer in layers(model) for part in (layer, layer.trainable)]
    carried = [v for metric in (*metrics_of(model), *extra) for v in metric.variables]
    return [*compiled, *model.trainable_variables, *carried, *flags, model.run_eagerly]


def are_same(one: list, two: list) -> bool:
    """Whether two lists hold the same objects."""
    return len(one) == len(two) and all(a is b for a, b in zip(one, two, strict=True))


def known_metrics(model: keras.Model, extra: list) -> list[keras.metrics.Metric] | None:
    """Return the compiled metrics and `extra`; None if layers update further metrics themselves."""
    compiled = model._compile_metrics
    if any(m is not compiled and not any(m is k for k in extra) for m in metrics_of(model)):
        return None
    return [*(compiled.metrics if compiled is not None else []), *extra]


def distinct(names: list[str]) -> list[str]:
    """Number repeated names, as Keras does with metrics.

    >>> distinct(["mse_loss", "mse_loss", "a_loss"])
    ['mse_loss', 'mse_loss_1', 'a_loss']
    """
    counts = [names[:i].count(name) for i, name in enumerate(names)]
    return [f"{name}_{count}" if count else name for name, count in zip(names, counts, strict=True)]
