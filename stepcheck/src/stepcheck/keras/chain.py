"""Several models of one loop: models in a row, which are one model with one log; adversaries; unmoved models."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, permutations, product
from operator import attrgetter
from typing import Any

import keras
import numpy as np

from stepcheck.keras.replay import Replay, untrained
from stepcheck.keras.searching import nested
from stepcheck.report.found import Likely
from stepcheck.stages.modes import in_training
from stepcheck.stages.steps import as_vector
from stepcheck.trace.log import Applied, Called, Log
from stepcheck.trace.loops import Loop, Watched
from stepcheck.trace.measure import SOLVED, all_same, distance, in_part
from stepcheck.tree import Tree

_CALL = attrgetter("optimizer", "iterations", "num_calls", "replica", "line")  # the same where one call moves both
_LEAST, _MOSTLY = 4, 0.8  # passes that show a way, and the share that goes it
_ROUNDING = 4e-7  # of a move, for a unit of the weights


class Chain(keras.Model):
    """Calls the second model with the outputs of the first."""

    def __init__(self, first: keras.Model, second: keras.Model):
        super().__init__(name=f"{first.name}_{second.name}")
        self.first, self.second = first, second
        self.built = True

    @property
    def parts(self) -> list[keras.Model]:
        """The models that it calls, one after the other."""
        both = (self.first, self.second)
        return [part for each in both for part in (each.parts if isinstance(each, Chain) else [each])]

    def call(self, inputs: Tree, training: bool | None = None) -> Tree:
        """Return the second model's outputs."""
        for model in (self.first, self.second):
            inputs = model(inputs, training=training) if model._call_has_training_arg else model(inputs)
        return inputs


def allied(two: Watched, others: list[Watched]) -> Iterator[str]:
    """Yield a note if two models move the outputs of a discriminator on generated rows in the same direction.

    A generator and its discriminator want the outputs on generated rows to go opposite ways: the derivatives of their
    losses by these outputs have other signs.
    """
    own = {step.order for step in two.log.applied}
    for one in others:
        steps = sorted(own | {step.order for step in one.log.applied})
        given = _made([one])
        ways: dict[bool, list[float]] = {True: [], False: []}
        for called in two.log.called:
            taken, step = called.derivatives.get(0, []), next((order for order in steps if order > called.order), None)
            made = [row.tobytes() in given for row in called.inputs[0]] if len(taken) == 1 and step else []
            if any(made) and taken[0].shape[:1] == (len(made),):
                ways[step in own].append(float(np.sign(np.mean(taken[0][made]))))
        means = [float(np.mean(way)) for way in ways.values() if len(way) >= _LEAST]
        if len(means) == 2 and min(map(abs, means)) >= _MOSTLY and means[0] * means[1] > 0:
            ours, theirs = two.model.name, one.model.name
            told = f"The steps of {theirs!r} move the outputs of {ours!r} on rows that the latter made the same way "
            told += f"as the steps of {ours!r}: the loss has the same labels in both, as it seems. "
            yield Likely(f"{told}Give the loss of {theirs!r} the labels of real rows.")


def averages(slow: Watched, fast: Watched) -> Iterator[str]:
    """Yield a note if a model follows another one's weights, after each step by the same large share of the way."""
    shares: list[float] = []
    for one, two in pairwise(called for called in slow.log.called if called.params or called.buffers):
        steps = [step for step in fast.log.applied if step.is_whole and one.order < step.order < two.order]
        made = steps[0].params_after if len(steps) == 1 else []
        before, after = _like(one, made), _like(two, made)
        if not before or not after:
            continue
        old, new, newest = as_vector(before), as_vector(after), as_vector(made)
        way, moved = newest - old, new - old
        if not way.any():
            continue
        share = float(way @ moved / (way @ way))
        length = max(float(np.linalg.norm(moved)), 1e-30)
        near = max(SOLVED, _ROUNDING * float(np.linalg.norm(new)) / length)
        if distance(moved, share * way) > near:
            return
        shares.append(share)
    if len(shares) >= _LEAST and np.ptp(shares) <= SOLVED and 0.5 + SOLVED < shares[0] < 1 - SOLVED:
        told = f"The weights of {slow.model.name!r} are an average of those of {fast.model.name!r}, which takes "
        told += f"{shares[0]:.4g} of the newest after each step, and keeps {1 - shares[0]:.4g}: it forgets all but the "
        yield Likely(f"{told}last update. Are its two factors swapped?")


def teachers(loop: Loop, watched: Watched, own: set[int]) -> Iterator[str]:
    """Yield notes of models that no step moves, and that are called in training mode."""
    for each in loop.watched.values():
        if not each.log.applied and each is not watched:
            yield from averages(each, watched)
        called = [one for one in each.log.called if one.outputs and one.inputs and one.inputs[0].ndim]
        if not called or each.log.applied or id(each.model) in own:
            continue
        replay = Replay(each.model, (nested(each, called[0].inputs), np.zeros(1), None))
        if (first := in_training(replay, called)) is not None:
            told = f"The model {each.model.name!r}, which no step moves, is called in training mode: dropout drops, "
            told += "and BatchNormalization takes the batch's statistics, and moves its own. Is that meant?"
            yield f"{told}{first[1]}"


def still(loop: Loop, watched: Watched) -> Iterator[str]:
    """Yield notes of other models that are called for a gradient, and that nothing moves."""
    for each in loop.watched.values():
        is_used = any(called.differentiated for called in each.log.called)
        if each is not watched and is_used and not each.log.applied and each.model.trainable_variables:
            num = len(each.model.trainable_variables)
            told = f"The {num} trainable variables of the model {each.model.name!r} are moved by no step"
            if all(id(v) in loop.scout.cut for v in each.model.trainable_variables):
                told = f"{told}, though a gradient of them is asked for. There is none: the loss is cut off from them"
                yield Likely(f"{told} (by `numpy()`, `stop_gradient`, a new variable?).")
            else:
                yield f"{told}, and a gradient is taken of a function of its outputs. Are they meant to stay?"


def _like(called: Called, wanted: list[np.ndarray]) -> list[np.ndarray]:
    """Return the values of a pass that have these shapes, in this order, or none; a frozen model has no parameters."""
    left = iter([*called.params, *called.buffers])
    found = [next((leaf for leaf in left if leaf.shape == each.shape), None) for each in wanted]
    return [leaf for leaf in found if leaf is not None] if all(leaf is not None for leaf in found) else []


def divergence(one: Watched, two: Watched) -> Iterator[str]:
    """Yield, of an encoder and its decoder, how often the KL divergence counts; it is likely a fault if it is a mean.

    With z = mu + exp(v / 2) e, the reconstruction moves v by (z - mu) / 2 times the number by which it moves mu. The
    rest is the derivative of the divergence from a standard normal distribution, summed over its dimensions.
    """
    counts, sums, last = list[float](), list[float](), dict[int, Called]()
    for place, called in _in_order(one.log.called, two.log.called):
        if place == 0:
            last[called.replica] = called
        elif (first := last.pop(called.replica, None)) is not None and first.is_whole and called.is_whole:
            counts.append(_of_divergence(first, called.inputs))
            sums.append(_of_reconstruction(first.inputs, called))
    if len(counts) < _LEAST or not np.ptp(counts) <= SOLVED * abs(counts[0]):
        return
    width, count, is_sum = two.log.called[0].inputs[0].shape[-1], counts[0], min(sums) >= 0.5 - SOLVED
    told = f"the KL divergence of {one.model.name!r}: {count:.4g} times its sum over {width} dimensions"
    yield f"{told}, beside a sum over the outputs" * is_sum or told
    if is_sum and width > 1 and abs(width * count - 1) <= SOLVED:
        told = f"The KL divergence is a mean over its {width} dimensions, and the reconstruction is a sum over the "
        yield Likely(f"{told}outputs: the divergence counts 1 / {width} of what the lower bound has. Sum both.")


def _of_divergence(called: Called, drawn: list[np.ndarray]) -> float:
    """Return how often a KL divergence counts in the derivatives by an encoder's outputs; NaN if there is none."""
    given = [(out, called.derivatives.get(i, [])) for i, out in enumerate(called.outputs)]
    if not all(len(taken) == 1 and out.ndim == 2 for out, taken in given) or len(drawn) != 1:
        return float("nan")
    out, moved = (
        np.concatenate(part, axis=1, dtype="float64") for part in zip(*((o, d[0]) for o, d in given), strict=True)
    )
    if out.shape[1] != 2 * drawn[0].shape[-1] or len(out) != len(drawn[0]):
        return float("nan")
    halves = np.split(out, 2, axis=1), np.split(moved, 2, axis=1)
    for i, power in product((0, 1), (0.5, 1.0)):  # the second half is the logarithm of the variance, or of its root
        (mean, log), (by_mean, by_log) = (part[:: 1 - 2 * i] for part in halves)
        noise = power * (drawn[0] - mean)
        expected = (power * (np.exp(2 * power * log) - 1) - noise * mean) / len(out)
        rest = by_log - noise * by_mean
        count = float(np.sum(expected * rest) / max(np.sum(expected**2), 1e-30))
        if distance(rest, count * expected) <= SOLVED and count > 0:
            return count
    return float("nan")


def _of_reconstruction(inputs: list[np.ndarray], called: Called) -> float:
    """Return how often the errors of a decoder's outputs count in the sum of a row; 0 if they do not."""
    out, taken = called.outputs[0].astype("float64"), called.derivatives.get(0, [])
    if len(taken) != 1 or inputs[0].shape != out.shape:
        return 0.0
    with np.errstate(all="ignore"):
        ways = [1 / (1 + np.exp(-out)) - inputs[0], out - inputs[0], (out - inputs[0]) / (out * (1 - out))]
    for way in ways:
        count = float(np.sum(way * taken[0]) / max(np.sum(way**2), 1e-30)) * len(out)
        if distance(taken[0], count * way / len(out)) <= SOLVED:
            return count
    return 0.0


def has_generated(two: Watched, others: list[Watched]) -> bool:
    """Whether a model is called on rows that another one has made, as a discriminator is."""
    given, inputs = _made(others), [leaf for called in two.log.called for leaf in called.inputs[:1] if leaf.ndim]
    return any(row.tobytes() in given for leaf in inputs for row in leaf)


def _made(models: list[Watched]) -> set[bytes]:
    outputs = [leaf for one in models for called in one.log.called for leaf in called.outputs if leaf.ndim]
    return {row.tobytes() for leaf in outputs for row in leaf}


def joined(models: list[Watched]) -> list[Watched]:
    """Return the models, with a chain in place of two, if the second is trained on outputs of the first alone."""
    for one, two in permutations([each for each in models if each.log.applied], 2):
        made = _joined(one, two)
        if made is not None:
            return joined([made, *(each for each in models if each is not one and each is not two)])
    return models


def _joined(one: Watched, two: Watched) -> Watched | None:
    called = _passes(one.log, two.log)
    if not any(each.is_whole for each in called):
        return None
    model = Chain(one.model, two.model)

    def variables(*models: keras.Model) -> list[list[int]]:
        every = [(each.trainable_variables, untrained(each)) for each in models]
        return [[id(v) for own in kind for v in own] for kind in zip(*every, strict=True)]

    if variables(one.model, two.model) != variables(model):
        return None  # they share some
    log = replace(one.log, called=called, applied=_steps(one, two), _last={})
    for name in ("notes", "unseen"):
        setattr(log, name, getattr(one.log, name) | getattr(two.log, name))
    log.has_others &= two.log.has_others
    before = [*one.before, *two.before] if one.before and two.before else []  # none where they were met in a trace
    return Watched(model, log, before, one.like)


def _passes(one: Log, two: Log) -> list[Called]:
    last: dict[int, Called] = {}
    found = []
    for place, called in _in_order(one.called, two.called):
        first = last.get(called.replica)
        if place == 0:
            last[called.replica] = called
        elif first is not None and _follows(first, called):
            found.append(_through(first, called))
        elif called.differentiated is not False:
            return []
    return found


def _through(one: Called, two: Called) -> Called:
    known = one.differentiated if two.differentiated is None else two.differentiated
    trained = (*one.trained, *two.trained)
    both = replace(two, inputs=one.inputs, differentiated=known, trained=trained)
    if not (one.is_whole and two.is_whole):
        return replace(both, outputs=[], params=[], buffers=[])
    return replace(both, params=[*one.params, *two.params], buffers=[*one.buffers, *two.buffers])


def _in_order(one: list, two: list) -> list[tuple[int, Any]]:
    return sorted([*((0, event) for event in one), *((1, event) for event in two)], key=lambda e: e[1].order)


def _follows(first: Called, called: Called) -> bool:
    """Whether a pass is on another one's outputs; where these were not kept, whether it is on as many rows."""
    if first.is_whole:
        return all_same(first.outputs, called.inputs)
    return bool(first.inputs and called.inputs) and first.inputs[0].shape[:1] == called.inputs[0].shape[:1]


def _steps(one: Watched, two: Watched) -> list[Applied]:
    """Return the optimizer steps of both; a call that moves both is recorded for each."""
    size = len(one.model.trainable_variables), len(two.model.trainable_variables)
    now = [in_part(next(c.params for c in each.log.called if c.is_whole)) for each in (one, two)]
    found: list[Applied] = []
    waiting: dict[int, Applied] = {}  # by the place of its model, a step that may be half of one
    for place, applied in _in_order(one.log.applied, two.log.applied):
        other = waiting.pop(1 - place, None)
        if other is not None and _CALL(other) == _CALL(applied):
            found.pop()
        else:
            values = now[1 - place]
            other = replace(applied, grads=[None] * size[1 - place], params=values, params_after=values)
            other = replace(other, built=(), lost=())
            waiting = {place: applied}
        first, second = (other, applied) if place else (applied, other)
        found.append(_both(first, second, size[0]))
        if applied.is_whole:
            now[place] = applied.params_after
    return found


def _both(one: Applied, two: Applied, size: int) -> Applied:
    if not (one.is_whole and two.is_whole):
        return one.emptied()
    values: dict[str, Any] = {}
    for name in ("grads", "params", "params_after"):
        values[name] = [*getattr(one, name), *getattr(two, name)]
    for name in ("built", "lost"):
        values[name] = (*getattr(one, name), *(size + i for i in getattr(two, name)))
    return replace(one, order=max(one.order, two.order), trained=(), **values)
