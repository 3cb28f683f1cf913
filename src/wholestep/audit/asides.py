"""What a script does beside its updates, and may mean: a note each."""

from collections.abc import Sequence
from types import GeneratorType

import keras
import numpy as np

from wholestep import tree
from wholestep.audit.counted import running
from wholestep.audit.found import Likely
from wholestep.audit.judge import Case
from wholestep.audit.meaning import is_masked
from wholestep.audit.modes import in_training
from wholestep.audit.replay import Replay
from wholestep.audit.scout import Scout, Watched
from wholestep.audit.searching import nested
from wholestep.audit.source import is_gone_over_again
from wholestep.audit.supposing import is_padded
from wholestep.audit.windows import Windows


def padded(made: Case) -> list[str]:
    """Return a note if the ends of rows count whose inputs and labels are 0."""
    x, y, weight = made.data
    leaves = [leaf for leaf in tree.leaves(x) if np.shape(leaf) == np.shape(y)]
    if weight is not None or is_masked(made.model) or not isinstance(y, np.ndarray) or not is_padded(y):
        return []
    if not any(np.array_equal(leaf == 0, y == 0) for leaf in leaves):
        return []
    told = f"Rows end with inputs and labels of 0, {np.mean(y == 0):.0%} of all places, which count in the loss as any "
    return [f"{told}other. Are they padding?"]


def teachers(scout: Scout, own: set[int]) -> list[str]:
    """Return notes of models that no step moves, and that are called in training mode."""
    notes = []
    for each in scout.watched.values():
        called = [one for one in each.log.called if one.is_whole and one.inputs and one.inputs[0].ndim]
        if not called or each.log.applied or id(each.model) in own:
            continue
        replay = Replay(each.model, (nested(each, called[0].inputs), np.zeros(1), None))
        if (line := in_training(replay, called)) is not None:
            told = f"The model {each.model.name!r}, which no step moves, is called in training mode: dropout drops, "
            told += "and BatchNormalization takes the batch's statistics, and moves its own. Is that meant?"
            notes.append(f"{told}{line}")
    return notes


def counting_on(scout: Scout, watched: Watched, seen: Windows | None) -> list[str]:
    """Return a note of the metrics, among the script's names or the model's, that never begin anew."""
    if seen is None:
        return []
    metrics = [*scout.around.of(keras.metrics.Metric), *watched.model.metrics]
    return running({id(metric): metric for metric in metrics}.values(), watched.log, seen)


def used_up(scout: Scout, watched: Watched, seen: Windows | None) -> Sequence[str]:
    """Return a note of a generator that a loop of epochs goes over, and that was empty after the first."""
    line = next((each.line for each in reversed(watched.log.called) if each.line is not None), None)
    if seen is None or line is None or scout.has_stopped or len({number for number, _ in seen.place.values()}) > 1:
        return []
    generators = [n.name for n in scout.around.named(GeneratorType) if n.value.gi_frame is None]
    told = "The generator {!r} is used up after the first epoch: the others have no batch. Make it in each."
    return [Likely(told.format(name)) for name in generators if is_gone_over_again(line.file, name)][:1]


def still(scout: Scout, watched: Watched) -> Sequence[str]:
    """Return notes of other models that are called for a gradient, and that nothing moves."""
    notes = []
    for each in scout.watched.values():
        is_used = any(called.differentiated for called in each.log.called)
        if each is not watched and is_used and not each.log.applied and each.model.trainable_variables:
            num = len(each.model.trainable_variables)
            told = f"The {num} trainable variables of the model {each.model.name!r} are moved by no step"
            notes.append(f"{told}, and a gradient is taken of what comes of its outputs. Are they meant to stay?")
    return notes
