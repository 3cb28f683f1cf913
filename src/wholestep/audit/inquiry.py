"""What a script's loop is to be compared with: its model, the data and the loss, as far as they can be found out."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from wholestep.audit.chain import Chain, joined
from wholestep.audit.log import Called
from wholestep.audit.scout import Asked, Scout, Watched
from wholestep.audit.searching import Labels, Meaning, UnknownError, search
from wholestep.audit.supposing import averaging, is_unreduced, name_of
from wholestep.audit.surroundings import Surroundings


def inquire(scout: Scout) -> Meaning:
    """Return what the loop of a script is to be compared with.

    Raises:
        UnknownError: it cannot be found out.
    """
    watched = _trained(scout)
    model, log = watched.model, watched.log
    loss, asked, told = _loss(model, scout)
    calls = [c for c in log.called if c.differentiated is not False]
    own = [each for each in scout.losses.values() if each.is_own and each.calls]
    labels = max((list(_labels(calls, log.called, each)) for each in [*asked, *own]), key=len, default=[])
    meaning = Meaning(watched, (), loss, _optimizer(watched, scout.around), is_supposed=not told)
    if not told or loss is not None:
        meaning.called = [averaging(each.loss) for each in asked if not told or is_unreduced(each.loss)]
    meaning.own = [each.loss for each in own]
    meaning.told = [f"model: {_name(model)}", *([told] if told else [])]
    meaning.data = search(scout, meaning, calls, labels)
    return meaning


def _trained(scout: Scout) -> Watched:
    trained = joined([each for each in scout.watched.values() if each.log.applied])
    if not scout.watched:
        raise UnknownError("the model: no Keras model was called")
    if trained:
        return max(trained, key=lambda each: (len(each.log.applied), len(each.model.trainable_variables)))
    if scout.fitted:
        return scout.watched[next(iter(scout.fitted))]
    moved = [each for each in scout.watched.values() if each.log.called]
    return moved[0] if moved else next(iter(scout.watched.values()))


def _loss(model: keras.Model, scout: Scout) -> tuple[Any, list[Asked], str]:
    """Return (the loss that is meant, those that get its labels, the same in words); no words if it is not known."""
    known = [each for each in scout.losses.values() if not each.is_own]
    asked = [each for each in known if each.calls] or known
    if getattr(model, "compiled", False) and model._compile_loss is not None:
        same = [each for each in asked if each.loss is model.loss or len(asked) == 1]
        return None, same, f"loss: {name_of(model.loss)}, as the model is compiled"
    if len(asked) == 1:
        told = "as the script calls it: whether it fits the model is not judged"
        return averaging(asked[0].loss), asked, f"loss: {name_of(asked[0].loss)}, {told}"
    return None, asked, ""


def _name(model: keras.Model) -> str:
    num = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    if isinstance(model, Chain):
        return f"{', '.join(repr(part.name) for part in model.parts)}, one after the other, {num:,} weights"
    return f"{type(model).__name__} {model.name!r}, {num:,} weights"


def _labels(calls: list[Called], every: list[Called], asked: Asked) -> Iterator[Labels]:
    """Yield each forward pass with what the loss after it got."""
    if not calls:
        return
    orders = sorted(c.order for c in every)
    wanted = {c.order: c for c in calls}
    for order, y, weight in sorted(asked.calls, key=lambda call: call[0]):
        before = int(np.searchsorted(orders, order)) - 1
        called = wanted.get(orders[before]) if before >= 0 else None
        if called is not None and called.inputs and y.ndim and len(y) == len(called.inputs[0]):
            fits = weight is not None and weight.ndim and len(weight) == len(y)
            yield Labels(called, y, weight if fits else None)


def _optimizer(watched: Watched, around: Surroundings) -> keras.optimizers.Optimizer | None:
    used = {step.optimizer for step in watched.log.applied}
    own = getattr(watched.model, "optimizer", None)
    known = [getattr(o, "inner_optimizer", o) for o in [own, *around.of(keras.optimizers.Optimizer)]]
    return next((o for o in known if o is not None and id(o) in used), None)
