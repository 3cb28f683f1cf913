"""Notes on a loop's loss that no usual loss is: another axis, rows that count differently, NaN; and on its labels."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any

import numpy as np

from stepcheck import tree
from stepcheck.keras.derived import (
    Derived,
    are_even,
    are_weights,
    classes_of,
    factors_by,
    factors_of,
    is_single,
    of_other_labels,
)
from stepcheck.keras.usual import shares_of
from stepcheck.port import Port
from stepcheck.report.found import Finding, Found, Likely, many, some
from stepcheck.solve.evidence import Evidence
from stepcheck.trace.log import Applied, Log
from stepcheck.trace.measure import ENOUGH, SOLVED, distance
from stepcheck.trace.windows import Piece, Windows

_UNLIKE, _ALIKE = 0.1, 0.02  # weights of classes that differ, and shares that do not: of a part of the rows
_FEW_CLASSES = 20
_FEW_ROWS = 4  # of which two stay
_PADDED = 0.25  # of the rows: fewer may end so by chance
TURNS = Likely(
    "Each batch makes several steps of one optimizer, with another gradient each: are its losses applied one after the "
    "other? Add them up, and make one step, or give each an optimizer."
)
_HALVINGS = 15  # of the loss scale at which Keras begins: it is 1 then


def explains(verdict: Any) -> bool:
    """Whether the verdict of a supposed loss says that it was computed, perhaps with a fault that has a name."""
    is_named = all(cause.is_listed for cause in verdict.of_gradient)
    return bool(verdict.evidence) and (is_named or all(each.is_along for each in verdict.evidence))


def noted(finding: Found, loss: str, evidence: list[Evidence], width: int, *, is_likely: bool) -> str:
    """Return a finding on a supposed loss as a note: it may be meant.

    Args:
        width: the numbers of an output.
        is_likely: whether it is hardly meant.
    """
    told, near = (
        f"The gradient is that of {loss}, but: {finding.explanation}",
        evidence[0].meant.replay.tolerance.differs,
    )
    is_of_classes = "entropy" in loss.lower() and "binary" not in loss.lower()
    if is_of_classes and all(abs(e.share * width - 1) <= near for e in evidence):
        return Likely(f"{told} That is 1 / {width}, the number of classes: is the mean taken over the classes too?")
    if not is_of_classes and width > 1 and all(abs(e.share / width - 1) <= near for e in evidence):
        return (
            f"The gradient is that of {loss}, where the loss of a row is a sum over the {width} outputs, and no mean."
        )
    return Likely(f"{told} Is that meant?") if is_likely else f"{told} Is that meant?"


def of_a_number(finding: Finding, evidence: list[Evidence]) -> Finding:
    """Return a finding as a note if it is a number on the whole loss that the loop calls, the same in all updates."""
    differs = evidence[0].meant.replay.tolerance.differs if evidence else 0.0
    shares = [e.share for e in evidence if e.without > differs]
    is_one = bool(shares) and len(shares) == len(evidence) and np.ptp(shares) <= max(differs, SOLVED) * max(shares)
    if not isinstance(finding, Found) or finding.is_listed or not is_one or not all(e.is_along for e in evidence):
        return finding
    return f"The loop multiplies its loss by {shares[0]:.4g}. Is that meant?"


def notes_on(
    port: Port, derived: list[Derived], labels: dict[str, np.ndarray], beside: dict[str, np.ndarray]
) -> Iterator[str]:
    """Yield the first note on the derivatives of a loss by the one output.

    Args:
        labels: the arrays that may hold the labels, by name, a row for each row of the data.
        beside: other arrays with a row for each row of the data.
    """
    usual = [(loss, y) for y in labels.values() for loss in port.losses.usual([derived[0].output], y)]
    found = [of_other_labels(derived, *named) for named in labels.items() if len(labels) == 1]
    found += [normalised(derived), *(of_other_axis(derived, y) for y in labels.values())]
    found += [without_class(derived, *named) for named in (beside | labels).items()]
    found += [of_rows(port, derived, loss, y) for loss, y in usual]
    yield from islice((note for notes in found for note in notes), 1)


def of_other_axis(derived: list[Derived], y: np.ndarray) -> Iterator[str]:
    """Yield a note if the loss takes a softmax over the rows of the batch, or over places, and not over classes."""
    if derived[0].output.ndim > 2:
        yield from _over_places(derived, y)
        return
    for each in derived:
        labels = y[each.rows]
        if each.output.ndim != 2 or is_single(each.output):
            return
        if labels.shape != each.output.shape:
            if labels.dtype.kind not in "iu" or labels.size != len(each.rows):
                return
            labels = np.eye(each.output.shape[-1])[labels.reshape(-1) % each.output.shape[-1]]
        shares = shares_of(each.output, 0)
        found = factors_by(each.derivative, shares * labels.sum(0) - labels)
        if found is None or not are_even(found):
            return
    yield Likely("The softmax is taken over the rows of the batch, and not over the classes: `axis=-1` is meant.")


def _over_places(derived: list[Derived], y: np.ndarray) -> Iterator[str]:
    """Yield a note on any loss of a softmax over places: its derivative by the outputs adds up to 0 along their axis.

    A softmax stays the same if a number is added to all outputs along its axis.
    """
    for each in derived:
        is_of_classes = y.dtype.kind in "iu" and y.shape[1:] == each.output.shape[1:-1]
        if not (is_of_classes or y.shape[1:] == each.output.shape[1:]) or _is_flat(each.derivative, -1):
            return
    for axis in range(1, derived[0].output.ndim - 1):
        if all(_is_flat(each.derivative, axis) for each in derived):
            told = f"The loss is the same if a number is added to all outputs along axis {axis}, as after a softmax "
            yield Likely(f"{told}over it. The classes are the last axis: `axis=-1` is meant.")
            return


def normalised(derived: list[Derived]) -> Iterator[str]:
    """Yield a note if each output is divided by its length over the rows of a batch, and no row by its own.

    Then the loss is the same if an output is multiplied in all rows. Outputs that are also centred over the rows, as
    those of Barlow twins, are meant so.
    """
    moved = [(each.output * each.derivative, each.derivative) for each in derived if each.output.ndim == 2]
    if moved and all(_is_flat(m, 0) and not _is_flat(m, 1) and not _is_flat(d, 0) for m, d in moved):
        told = "The loss is the same if one of the outputs is multiplied by a number in all rows of a batch: outputs "
        told += "are divided by their length over the rows (`axis=0`), and not by that of each row (`axis=-1`)."
        yield Likely(told)


def _is_flat(derivative: np.ndarray, axis: int) -> bool:
    """Whether a derivative adds up to 0 along an axis, up to rounding."""
    most = np.abs(derivative).sum(axis).max()
    return bool(most > 0 and np.abs(derivative.sum(axis)).max() <= SOLVED * most)


def without_class(derived: list[Derived], name: str, y: np.ndarray) -> Iterator[str]:
    """Yield a note if labels lie outside of the classes that the outputs have, and their rows have no loss."""
    width, pairs = derived[0].output.shape[-1], classes_of(derived)
    if pairs is None or y.dtype.kind not in "iu" or y.size != len(y) or 0 <= y.min() <= y.max() < width:
        return
    used = np.concatenate([classes.reshape(-1) for _, classes in pairs])
    own = np.concatenate([y.reshape(-1)[rows] for rows, _ in pairs])
    is_class = (own >= 0) & (own < width)
    if (
        not is_class.all()
        and used.size == own.size
        and np.all(used[~is_class] < 0)
        and np.all(used[is_class] == own[is_class])
    ):
        told = f"The labels {name} go from {y.min()} to {y.max()}, and the outputs have classes up to {width - 1}: the "
        yield Likely(f"{told}rows of the other labels have no loss (`one_hot` gives zeros for them).")


def of_rows(port: Port, derived: list[Derived], loss: Any, y: np.ndarray) -> Iterator[str]:
    """Yield a note on the factors of the rows or places in the loss, if these are not equal."""
    factors = factors_of(port, derived, loss, y)
    if factors is None or all(map(are_even, factors)):
        return
    rows, is_zero = [each.rows for each in derived], np.asarray(y) == 0
    if is_zero.any() and are_weights(factors, rows, is_zero):
        yield Likely("The loss counts the places alone whose labels are 0. If that is padding, the mask is inverted.")
    elif by_class := _by_prediction(derived, factors):
        told = ", ".join(f"{number:.3g} for class {k}" for k, number in [*by_class.items()][:4])
        told = f"A row's loss is multiplied by a number that depends on the class that the model predicts ({told}), "
        yield Likely(f"{told}and not on the row's label. Is the weight of the label meant?")
    elif not is_single(derived[0].output):  # else every loss is another one times a factor
        least, most = (how([how(each[np.isfinite(each)]) for each in factors]) for how in (min, max))
        share = np.mean(np.concatenate([np.ravel(each) for each in factors]) <= SOLVED * most)
        lost = f"{share:.0%} count nothing" if share else f"they count from {least:.3g} to {most:.3g}"
        yield f"Rows or places do not count alike in the loss, which is {loss.name} otherwise: {lost}. Is that meant?"


def _by_prediction(derived: list[Derived], factors: list[np.ndarray]) -> dict[int, float]:
    """Return the factor of the rows by the class that the model predicts; nothing if it does not depend on that."""
    if any(each.output.ndim != 2 or is_single(each.output) for each in derived):
        return {}
    chosen = np.concatenate([np.argmax(each.output, axis=-1) for each in derived])
    values = np.concatenate([each / np.nanmax(each) for each in factors])
    by_class = {k: values[chosen == k] for k in np.unique(chosen).tolist()}
    is_of_class = len(by_class) > 1 and all(np.ptp(own) <= SOLVED for own in by_class.values())
    return {k: float(own[0]) for k, own in by_class.items()} if is_of_class else {}


def by_frequency(y: np.ndarray, weights: np.ndarray) -> Iterator[str]:
    """Yield a note if the rows' weights are those of their classes, and in proportion to the number of its rows."""
    if y.dtype.kind not in "iu" or y.size != len(y) or np.shape(weights) != (len(y),):
        return
    classes, place, counts = np.unique(y, return_inverse=True, return_counts=True)
    own = np.array([np.mean(weights[place.reshape(-1) == i]) for i in range(len(classes))])
    is_of_class = len(classes) <= _FEW_CLASSES and np.allclose(own[place.reshape(-1)], weights, rtol=SOLVED)
    for power, told in ((1.0, "the number of its rows"), (0.5, "the root of the number of its rows")):
        shares = own / counts**power
        if is_of_class and np.ptp(own) > _UNLIKE * own.max() and np.ptp(shares) <= _ALIKE * shares.max():
            told = (
                f"The weight of a class grows with {told}: {counts.max()} rows have {own.max() / own.min():.3g} times "
            )
            yield Likely(
                f"{told}the weight of {counts.min()}. Rare classes get the large weights: divide by the counts."
            )


def beside_labels(evidence: list[Evidence]) -> Iterator[Likely]:
    """Yield the notes on inputs beside their labels."""
    yield from _predicted(evidence[0])
    yield from _frozen_noise(evidence)
    yield from _padded(evidence)


def _predicted(e: Evidence) -> Iterator[Likely]:
    """Yield a note if the labels are the inputs, which can be copied, or the next inputs, which the model sees.

    An autoencoder has the inputs for labels too, but each of its outputs depends on all places.
    """
    piece = e.update.pieces[0]
    (x, *others), leaves = piece.called.inputs, tree.leaves(e.meant.replay.batch(piece)[1])
    y = np.asarray(leaves[0])
    if others or len(leaves) > 1 or not {x.dtype.kind, y.dtype.kind} <= {*"iu"} or x.ndim != 2 or y.size != x.size:
        return
    y = y.reshape(x.shape)
    if not (is_copy := np.array_equal(x, y)) and not np.array_equal(x[:, 1:], y[:, :-1]):
        return
    given = x.copy()
    given[:, -1] = x.min() + x.max() - x[:, -1]
    one, two = _outputs(e.meant.replay, piece, [given], order=-1)
    if one.shape[1:2] != x.shape[1:] and one.shape[-1:] == x.shape[1:]:  # classes before places, as in PyTorch
        one, two = (np.moveaxis(out, -1, 1) for out in (one, two))
    if one.shape[:2] != x.shape:
        return
    same = e.meant.replay.tolerance.fits
    if distance(one[:, -1], two[:, -1]) <= same:
        return
    is_causal = distance(one[:, :-1], two[:, :-1]) <= same
    if is_copy and is_causal:
        told = "The labels are the inputs, in every row and at every place, and no output depends on a later place: "
        yield Likely(f"{told}there is nothing to predict. Are the labels to be the next ones, `x[:, 1:]`?")
    elif not is_copy and not is_causal:
        told = "The labels are the next inputs, and outputs depend on later places: the model sees what it is to "
        yield Likely(f"{told}predict. Is a causal mask missing?")


def _frozen_noise(evidence: list[Evidence]) -> Iterator[Likely]:
    """Yield a note if inputs are the labels with noise, added or in place of numbers, which is the same in each update.

    It differs from row to row of a batch: an offset of all rows may be meant, as may a hole in all.
    """
    pieces = [e.update.pieces[0] for e in evidence[:_FEW_ROWS]]
    replay = evidence[0].meant.replay
    labels = [tree.leaves(replay.batch(piece)[1]) for piece in pieces]
    pairs = [(p.called.inputs[0], np.asarray(y[0])) for p, y in zip(pieces, labels, strict=True) if len(y) == 1]
    if len(pairs) < _FEW_ROWS or len({leaf.shape for pair in pairs for leaf in pair}) > 1:
        return
    x, y = (np.stack(leaves) for leaves in zip(*pairs, strict=True))
    if x.dtype.kind != "f" or x[0].size < ENOUGH or not np.ptp(y, axis=0).any():
        return
    noise, lost, kept = x - y, np.equal(x, 0) & np.not_equal(y, 0), np.not_equal(x, 0)
    (fits, differs), first = replay.tolerance, np.broadcast_to(noise[0], noise.shape)
    is_added = distance(noise, first) <= fits and distance(first, np.broadcast_to(noise[0, 0], noise.shape)) > differs
    is_dropped = not np.any(lost.any(0) & kept.any(0)) and np.any(lost.any((0, 1)) & kept.any((0, 1)))
    if is_added or is_dropped:
        told = "The inputs are the labels with noise, and the noise is the same in every update: it is drawn once "
        yield Likely(f"{told}(with one key or seed, or by numpy while a function is traced). Draw it anew for each.")


def _padded(evidence: list[Evidence]) -> Iterator[Likely]:
    """Yield a note if the ends of rows count in the loss where the input is one id, and the label one class.

    The derivative of the loop's own loss shows which places count.
    """
    replay = evidence[0].meant.replay
    places = [_places(piece, replay.batch(piece)[1]) for e in evidence for piece in e.update.pieces]
    known = [each for each in places if each is not None]
    if not known or len(known) < len(places):
        return
    values, counts = np.unique(np.concatenate([x[:, -1] for x, *_ in known]), return_counts=True)
    last = values[counts.argmax()]
    ends = [np.cumprod((x == last)[:, ::-1], axis=1)[:, ::-1] > 0 for x, *_ in known]
    lengths = np.concatenate([np.sum(~end, axis=1) for end in ends])
    has_ends = np.concatenate([end.any(axis=1) for end in ends])
    x, y, is_counted, is_end = (np.concatenate([np.ravel(e) for e in p]) for p in (*zip(*known, strict=True), ends))
    # Another id may be a state that is not left, and rows of two lengths may end in a mark or not.
    are_ids = last == 0 and np.array_equal(x == last, is_end) and len(np.unique(x)) > 2 < len(np.unique(lengths))
    if not are_ids or np.mean(has_ends) < _PADDED or len(np.unique(y[is_end])) > 1 or not np.any(y != y[is_end][0]):
        return
    if is_counted[is_end].all():
        told = f"The loss counts the padding: {is_end.mean():.0%} of the places, at the ends of rows, have the input "
        told += f"{last} and the label {y[is_end][0]:g}. Leave them out: multiply the loss by `labels != "
        yield Likely(f"{told}{y[is_end][0]:g}`, and divide its sum by the sum of this mask.")


def _places(piece: Piece, labels: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Return (ids, labels, whether they count in the loss) by row and place; None if the pass has no such ids."""
    leaves, derivatives = tree.leaves(labels), piece.called.derivatives
    if len(leaves) != 1 or {*derivatives} != {0}:
        return None
    y, derivative = np.asarray(leaves[0]), np.asarray(derivatives[0][-1])
    y = np.asarray(y.argmax(-1)) if y.ndim > 2 and y.shape[-1] > 1 else y
    for x in (x for x in piece.called.inputs if x.ndim == 2 and x.dtype.kind in "iu" and x.size == y.size):
        if derivative.shape[:2] == x.shape:
            return x, y.reshape(x.shape), np.any(derivative.reshape(*x.shape, -1), axis=-1)
        if derivative.shape[::2] == x.shape:  # classes before places, as in PyTorch
            return x, y.reshape(x.shape), np.any(derivative, axis=1)
    return None


def mixed(replay: Port, pieces: list[Piece]) -> Iterator[Likely]:
    """Yield a note if the output of a row depends on the other rows of its batch, in inference too."""
    known = [each for each in pieces if each.is_known and each.called.is_whole]
    known = [each for each in known if _FEW_ROWS <= len(each.rows) < replay.num_rows]
    if not known or replay.mixes_rows:  # all rows at once may be a graph's, as may inputs of (rows, rows)
        return
    piece = known[-1]  # whose weights are trained most
    (num,), shapes = piece.rows.shape, [leaf.shape[:2] for leaf in piece.called.inputs]
    if any(shape[:1] != (num,) or shape[1:] == (num,) for shape in shapes):
        return
    others, odd = np.arange(num), np.arange(1, num, 2)
    others[::2] = np.resize(np.roll(odd, -1), others[::2].shape)
    one, two = _outputs(replay, piece, [leaf[others] for leaf in piece.called.inputs], order=-2)
    if len(one) == len(others) and distance(one[odd], two[odd]) > replay.tolerance.differs:
        told = "The output of a row depends on the other rows of its batch, in inference too: is an axis taken for "
        told += "another (`view` or `reshape` in place of a transpose, a softmax over rows, a recurrent layer that "
        yield Likely(f"{told}takes rows for time)?")


def _outputs(replay: Port, piece: Piece, inputs: list[np.ndarray], *, order: int) -> list[np.ndarray]:
    """Return the first outputs of a pass in inference, with its own inputs and with others, as a pass that was not."""
    changed = replace(piece, called=replace(piece.called, inputs=inputs, order=order))
    return [replay.outputs(each, training=False)[0][0] for each in (piece, changed)]


def elsewhere(seen: Windows) -> Iterator[Finding]:
    """Yield a note on updates whose inputs are no rows of the data, if they are few.

    Passes whose outputs were not kept are left out: data found in the loop hold the rows of kept passes alone.
    """
    whole = [u for u in seen.updates if u.pieces and all(piece.called.is_whole for piece in u.pieces)]
    foreign = [u.number for u in whole if not any(piece.is_known for piece in u.pieces)]
    if 0 < 4 * len(foreign) <= len(whole):
        told = f"{len(foreign)} of {len(whole)} updates are made on other rows than those of the data: updates "
        yield Likely(f"{told}{some(foreign, 6)}. Does a validation, or another step beside the loop, train the model?")


def skipped(seen: Windows) -> Iterator[str]:
    """Yield the finding on steps that are skipped, as their gradients are not finite at any loss scale."""
    if (num := seen.num_skipped_at_end) > _HALVINGS:
        yield Likely(
            f"The last {num} optimizer steps were skipped: at no loss scale was the gradient finite. Is the loss NaN?"
        )


def _is_part(one: Applied, two: Applied) -> bool:
    """Whether two calls of one optimizer in turn have gradients of other variables, and its count of both matters."""
    pairs = [(a is not None, b is not None) for a, b in zip(one.grads, two.grads, strict=False)]
    is_apart = not any(a and b for a, b in pairs) and all(map(any, zip(*pairs, strict=True)))
    counts = "dam" in two.kind or one.learning_rate != two.learning_rate
    return is_apart and counts and one.optimizer == two.optimizer and two.iterations == one.iterations + 1


def _is_other(one: Applied, two: Applied) -> bool:
    """Whether two calls of one optimizer in turn have another gradient each, of the same variables."""
    pairs = [(g, h) for g, h in zip(one.grads, two.grads, strict=False) if g is not None and h is not None]
    is_one = one.optimizer == two.optimizer and one.replica == two.replica  # each replica makes the step
    return is_one and any(not np.array_equal(g, h) for g, h in pairs)


def unused(seen: Windows) -> str:
    """Return in words how many forward passes in training mode gave no gradient; "" if all did."""
    num, num_all = seen.in_training
    return f"{num} of {num_all} forward passes in training mode gave no gradient." if num else ""


def without_update(seen: Windows, log: Log) -> Iterator[str]:
    """Yield the notes on calls of the optimizer that make no update, or not a whole one."""
    called, made = [each.order for each in log.called], [each for each in log.applied if each.is_whole]
    in_turn = [(a, b) for a, b in pairwise(made) if not any(a.order < order < b.order for order in called)]
    if 3 * sum(_is_part(a, b) for a, b in in_turn) > len(made):
        told = "One optimizer is called several times in an update, for other variables each time: its count of steps, "
        told += "by which it corrects moments and reads a schedule, grows too fast. Hand it all gradients in one call, "
        yield Likely(f"{told}or give each part of the variables an optimizer.")
    num_with_pass = len(made) - 1 - len(in_turn)  # none if the model's layers are called one by one
    if not seen.stale and 3 * sum(_is_other(a, b) for a, b in in_turn) > len(made) <= 5 * num_with_pass:
        yield TURNS
    handed = [[g for g in u.applied.grads if g is not None] for u in seen.updates if u.applied.is_whole]
    if len(handed) > 1 and all(handed) and not any(np.any(g) for grads in handed for g in grads):
        told = (
            f"The gradient is 0 in all {len(handed)} updates, for every variable: nothing is trained. Is the loss cut "
        )
        yield Likely(f"{told}off from the model, by a `stop_gradient`, `detach` or numpy?")
    if told := unused(seen):
        yield told
    if seen.num_skipped:
        steps = many(seen.num_skipped, "optimizer step was", "optimizer steps were")
        yield f"{steps} skipped: the gradient was not finite at this loss scale."
    if seen.num_waiting:
        yield f"{many(seen.num_waiting, 'gradient')} at the end made no update: the optimizer waits for more of them."
