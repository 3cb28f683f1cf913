"""The intention of a script: its models, loss and optimizer; of a loss by hand those with its derivative first."""

from collections.abc import Iterator
from contextlib import suppress
from itertools import islice, product
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from stepcheck import tree
from stepcheck.keras import chain as chains
from stepcheck.keras.derived import Derived, Solved, as_narrow, by_pass, passes, solved
from stepcheck.keras.families import Function, Loss, averaging, is_unreduced, mean_of, name_of, usual
from stepcheck.keras.meaning import ByRow, NoLoss, Observed, WithWeights
from stepcheck.keras.meaning import outputs as symbols
from stepcheck.keras.replay import Replay
from stepcheck.keras.scout import Scout
from stepcheck.keras.searching import Meaning, UnknownError, labels_of, once, search
from stepcheck.keras.surroundings import Surroundings
from stepcheck.port import ByPass
from stepcheck.report.found import Likely
from stepcheck.trace.log import Called
from stepcheck.trace.loops import Asked, Loop, Watched
from stepcheck.trace.measure import is_padded, same
from stepcheck.trace.windows import PAD, Rows, packed
from stepcheck.tree import Tree

_SWAPPED = Likely(
    "The loss gets the model's outputs in place of the labels, `y_true`, which come first. Are its arguments swapped?"
)
_MOST_HEADS = 100  # combinations of losses and labels of several outputs


def subjects(scout: Scout) -> Iterator[tuple[Loop, Watched]]:
    """Yield the models that the loops train, with the loop; the script's own loops first, and its main models.

    Models that are trained as one are one. A model that is never called, as its parts are, is named by them.

    Raises:
        UnknownError: there is no model.
    """
    loops = sorted(scout.loops.values(), key=lambda loop: loop.is_fit)
    found = [(loop, each) for loop in loops for each in _trained(loop)]
    if not found and (others := [(loop, each) for loop in loops for each in loop.watched.values()]):
        found = [max(others, key=lambda pair: (id(pair[1].model) in pair[0].fitted, bool(pair[1].log.called)))]
    if not found:
        raise UnknownError("the model: no Keras model was called")
    yield from found


def _trained(loop: Loop) -> list[Watched]:
    joined = chains.joined(loop.trained)
    parts = {id(part) for each in joined if isinstance(each.model, chains.Chain) for part in each.model.parts}
    called = [each for each in joined if each.log.called and id(each.model) not in parts] or joined

    def num_seen(each: Watched) -> tuple[bool, int, int]:
        """Return whether a model was called itself, and not only its parts; its steps and its variables."""
        return bool(each.log.called), len(each.log.applied), len(each.model.trainable_variables)

    return sorted(called, key=num_seen, reverse=True)


def inquire(loop: Loop, watched: Watched) -> Meaning:
    """Return the intention of a loop that trains a model, or raise `UnknownError`."""
    model, log = watched.model, watched.log
    loss, asked, told = _loss(model, loop)
    calls = [c for c in log.called if c.differentiated is not False]
    own = [each for each in loop.losses.values() if each.is_own and each.calls]
    every = [(list(labels_of(calls, log.called, each)), each.is_own) for each in [*asked, *own]]
    labels, is_own = max(every, key=lambda found: len(found[0]), default=([], False))
    are_outputs = [bool(each.called.outputs) and same(each.label, each.called.outputs[0]) for each in labels]
    are_outputs_alone = bool(labels) and all(are_outputs)
    are_swapped = are_outputs_alone and not is_own  # a function of the script has its arguments in its own order
    labels = [] if are_outputs_alone else labels
    meaning = Meaning(watched, (), loss, _optimizer(watched, loop.scout.around), is_supposed=not told)
    if not told or loss is not None:
        meaning.called = [averaging(each.loss) for each in asked if not told or is_unreduced(each.loss)]
    meaning.notes = [_SWAPPED] * are_swapped
    meaning.own = [each.loss for each in own]
    of_loop = [f"loop: {loop.place}"] * (len(loop.scout.loops) > 1)
    meaning.told = [f"model: {_name(model)}", *of_loop, *([told] if told else [])]
    meaning.data = search(loop, meaning, calls, labels)
    return meaning


def _loss(model: keras.Model, loop: Loop) -> tuple[Any, list[Asked], str]:
    """Return (the loss that is meant, the losses that get its labels, the loss in words); "" if it is not known."""
    known = [each for each in loop.losses.values() if not each.is_own]
    asked = [each for each in known if each.calls] or known
    is_for_fit = loop.is_beside_fit and bool(asked)
    if getattr(model, "compiled", False) and model._compile_loss is not None and not is_for_fit:
        same = [each for each in asked if each.loss is model.loss or len(asked) == 1]
        return None, same, f"loss: {name_of(model.loss)}, as the model is compiled"
    if len(asked) == 1:
        told = "as the script calls it: whether it fits the model is not judged"
        return averaging(asked[0].loss), asked, f"loss: {name_of(asked[0].loss)}, {told}"
    return None, asked, ""


def _name(model: keras.Model) -> str:
    num = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    if isinstance(model, chains.Chain):
        return f"{', '.join(repr(part.name) for part in model.parts)}, one after the other, {num:,} weights"
    return f"{type(model).__name__} {model.name!r}, {num:,} weights"


def _optimizer(watched: Watched, around: Surroundings) -> keras.optimizers.Optimizer | None:
    used = {step.optimizer for step in watched.log.applied}
    own = getattr(watched.model, "optimizer", None)
    known = [getattr(o, "inner_optimizer", o) for o in [own, *around.of(keras.optimizers.Optimizer)]]
    return next((o for o in known if o is not None and id(o) in used), None)


class Supposed(NamedTuple):
    """A possible intention; `told` describes a supposed one in words, and is empty for a known one.

    `has_weights`: whether its loss weights are those of the script.
    """

    data: tuple
    loss: Any
    told: str = ""
    is_called: bool = False
    by_pass: ByPass | None = None
    note: str = ""
    has_weights: bool = False


def stated(meaning: Meaning) -> Iterator[Supposed]:
    """Yield the known intention, if there is one; of a loss that Keras sums, its mean too: the loop may divide."""
    if meaning.is_supposed:
        return
    yield Supposed(meaning.data, meaning.loss)
    loss = getattr(meaning.watched.model, "loss", None) if meaning.loss is None else meaning.loss
    if isinstance(loss, Loss) and loss.reduction == "sum":
        yield Supposed(meaning.data, mean_of(loss, by_weight=len(meaning.data) > 2))
        yield Supposed(meaning.data, ByRow(loss))


def possible(meaning: Meaning, around: Surroundings) -> Iterator[Supposed]:
    """Yield the possible intentions: losses with the derivative of the script's, then the most usual ones."""
    x, y, *weight = meaning.data
    called = [each for each in meaning.watched.log.called if each.outputs]
    outputs = called[0].outputs if called else []
    labels = meaning.labels or ({"": y} if meaning.has_labels else {})
    if len(tree.leaves(y)) > 1:
        leaves = {name: np.asarray(leaf) for name, leaf in tree.named_leaves(y, "labels")}
        meaning.beside = leaves | meaning.beside
    if (meaning.is_supposed or not meaning.called) and _reconstructs(tree.leaves(x), called):
        labels["the inputs"] = tree.leaves(x)[0]
    if len(outputs) > 1:
        yield from _of_heads(meaning, outputs, around)
        return
    single = {"": next(iter(labels.values()))} if len(labels) == 1 and meaning.has_labels else labels
    for one in _derived(meaning, single, 0) if outputs else ():
        given = (x, one.labels) if one.weights is None else (x, one.labels, one.weights)
        same = [each for each in meaning.called if _is_same(each, one.loss)]
        told = one.told.replace(one.loss.name, name_of(same[0])) if same else one.told
        yield Supposed(given, same[0] if same and one.weights is None else one.loss, told, note=one.note)
    yield from _by_pass(meaning)
    if not meaning.is_supposed and not meaning.called:
        return
    for of, array in labels.items():
        named = f" of {of} as labels" if of and (len(labels) > 1 or not meaning.has_labels) else ""
        likely = usual(outputs, array) if meaning.is_supposed else ()
        for loss in (*meaning.called, *likely):
            yield Supposed((x, array, *weight), loss, f"{name_of(loss)}{named}")
        for loss in meaning.own * meaning.is_supposed:
            yield Supposed((x, array), loss, f"{name_of(loss)} of the script{named}")


def _reconstructs(x: list[np.ndarray], calls: list[Called]) -> bool:
    """Whether a model's outputs may be meant to be its inputs, by their shapes."""
    outputs = next((c.outputs for c in calls if c.outputs), [])
    return len(x) == len(outputs) == 1 and x[0].ndim > 1 and x[0].shape[1:] == outputs[0].shape[1:]


def _is_same(one: Any, two: Loss) -> bool:
    """Whether two losses differ at most in their name and reduction."""
    configs = [each.get_config() | {"name": "", "reduction": ""} for each in (one, two) if isinstance(each, Loss)]
    return len(configs) == 2 and type(one) is type(two) and configs[0] == configs[1]


def _derived(meaning: Meaning, labels: dict[str, Any], i: int) -> Iterator[Solved]:
    """Yield the losses with the derivative that the script's loss has by the i-th output."""
    x, watched = meaning.data[0], meaning.watched
    if found := passes(watched.log, Rows(x), i):
        own, leaves = labels | meaning.beside, [*map(np.asarray, tree.leaves(x))]
        padded = {"inputs": leaves[0]} if len(leaves) == 1 and is_padded(leaves[0]) else {}
        beside = meaning.weights | meaning.beside | padded
        losses = [loss for loss in map(Function, meaning.own) if i == 0 and _is_by_row(loss, found[0], labels)]
        yield from solved(Replay(watched.model, (x, np.zeros(len(found[0].rows)), None)), found, own, beside, losses)


def _is_by_row(loss: Function, one: Derived, labels: dict[str, Any]) -> bool:
    """Whether a function of the script has a number for each row or place, of some of these labels."""
    for y in labels.values():
        with suppress(Exception):  # it does not take such labels
            own = as_narrow(np.asarray(y)[one.rows], one.output[..., 0])
            given = [ops.convert_to_tensor(each) for each in (own, one.output)]
            return len(loss.whole(*given).shape) > 0
    return False


def _by_pass(meaning: Meaning) -> Iterator[Supposed]:
    """Yield the losses with the derivative of the script's, of labels that belong to a pass and to no row."""
    called = [each for each in meaning.watched.log.called if each.is_whole and set(each.derivatives) == {0}]
    named = {name: [own[c.order] for c in called if c.order in own] for name, own in meaning.by_pass.items()}
    values = {name: np.concatenate(own) for name, own in named.items() if own and _are_as(own, called)}
    if not values:
        return
    x, is_whole = _given(meaning, called)
    if is_whole:
        table, arrays = Rows(x), meaning.labels | meaning.beside
        rows = np.concatenate([table.anew().find(each.inputs) for each in called])
        values = {name: np.asarray(y)[rows] for name, y in (arrays or {"the data": meaning.data[1]}).items()} | values
    nothing = np.zeros(sum(len(each.outputs[0]) for each in called))
    for one, own in by_pass(Replay(meaning.watched.model, (nothing, nothing, None)), called, values):
        yield Supposed((x, np.zeros(len(tree.leaves(x)[0]))), one.loss, one.told, by_pass=own, note=one.note)


def _are_as(values: list[np.ndarray], called: list[Called]) -> bool:
    """Whether there are values for each pass, a row for each of its rows, and of one shape and kind."""
    are_all = len(values) == len(called) and len({(each.shape[1:], each.dtype) for each in values}) == 1
    return are_all and all(len(v) == len(c.outputs[0]) for v, c in zip(values, called, strict=True))


def _given(meaning: Meaning, called: list[Called]) -> tuple[Tree, bool]:
    """Return (the data's inputs, whether they hold all inputs of these passes; else these inputs, each row once)."""
    x = meaning.data[0]
    table = Rows(x)
    is_whole = all(np.all(table.anew().find(each.inputs) != PAD) for each in called)
    return (x if is_whole else once(meaning.watched, [each.inputs for each in called])[0]), is_whole


def _of_heads(meaning: Meaning, outputs: list[np.ndarray], around: Surroundings) -> Iterator[Supposed]:
    """Yield a loss for each output, by the loss weights that the script holds, or else without."""
    labels, called = meaning.beside.items(), {type(loss) for loss in meaning.called}
    heads: list[list[tuple[str, Any, Any]]] = []
    for i, out in enumerate(outputs):
        found = list[Solved]()
        for one in _derived(meaning, meaning.beside, i):
            if not found or type(one.loss) in called:
                found = [one]
            if not called or type(one.loss) in called:
                break
        own = [(one.told, one.labels, one.loss) for one in found]
        likely = [(f"{loss.name} of {of} as labels", y, loss) for of, y in labels for loss in usual([out], y)]
        heads.append([each for each in own if each[2].reduction != "mean_with_sample_weight"] or likely)
    like = symbols(meaning.watched.model, meaning.data[0])
    if not meaning.is_supposed and meaning.loss is None:
        yield from _as_compiled(meaning, [[y for _, y, _ in head] for head in heads], like)
    given = list(around.loss_weights(sorted(like) if isinstance(like, dict) else [], len(outputs)))
    for chosen, (named, weights) in islice(product(product(*heads), [*given, ("", None)]), _MOST_HEADS):
        if len({id(y) for _, y, _ in chosen}) == len(chosen):
            data, every = (meaning.data[0], packed([y for _, y, _ in chosen], like)), [loss for *_, loss in chosen]
            told = ", ".join(told for told, *_ in chosen) + f", by the loss weights {named}" * bool(named)
            loss = packed(every, like) if weights is None else WithWeights(packed(every, like), packed(weights, like))
            is_called = {type(loss) for loss in every} <= called
            yield Supposed(data, loss, told, is_called=is_called, has_weights=bool(named))


def _as_compiled(meaning: Meaning, heads: list[list[Any]], like: Tree) -> Iterator[Supposed]:
    """Yield the compiled losses of several outputs, with their loss weights, on possible labels of each output."""
    of = {id(y): name for name, y in meaning.beside.items()}
    for labels in islice(product(*heads), _MOST_HEADS):
        if len({*map(id, labels)}) == len(labels) and all(id(y) in of for y in labels):
            names = " and ".join(of[id(y)] for y in labels)
            told = f"{name_of(meaning.watched.model.loss)}, as the model is compiled, of {names} as labels"
            yield Supposed((meaning.data[0], packed([*labels], like)), None, told)


def observed(meaning: Meaning) -> Supposed:
    """Return the loop's own loss, by its derivatives, on rows of the data, or else of all inputs that were given."""
    called = [each for each in meaning.watched.log.called if each.is_whole and each.derivatives]
    x, is_whole = _given(meaning, called)
    if not is_whole:
        meaning.unseen.append("the order of the rows, and whether all are used: some inputs are no rows of the data")
    return Supposed((x, np.zeros(len(tree.leaves(x)[0]))), Observed() if called else NoLoss())


def why_unknown(meaning: Meaning) -> str:
    """Return why a loss that has to be supposed is not known."""
    why = "the model is not compiled with a loss, "
    if not meaning.called:
        return f"{why}the script calls none of Keras, and none gives its gradients"
    names = ", ".join(sorted(map(name_of, meaning.called)))
    return f"{why}and of those that the script calls ({names}) none gives its gradients"
