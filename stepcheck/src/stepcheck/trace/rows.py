"""The stage of the rows: which rows of the data the updates were made of, in which order, and what replaced them."""

from collections.abc import Iterator
from itertools import pairwise, permutations
from typing import Literal

import numpy as np

from stepcheck.report.causes import BY_NAME
from stepcheck.report.found import Finding, Found, Likely, found, numbers_of, some
from stepcheck.trace.log import Log
from stepcheck.trace.measure import ROUNDED, SOLVED
from stepcheck.trace.readings import FEW_TWINS, doubled, in_order
from stepcheck.trace.windows import PAD, Piece, Rows, Update, Windows, passes

Origin = Literal["stated", "found", "as given"]
NUM_DRAWS, CHANCE = 20, 0.1  # a batch of few labels must be rarer than that in this many random orders
MOSTLY = 0.7  # of the neighbouring batches; the others are at the ends of passes
FEW, LEAST = 3, 4  # a batch of fewer labels is strange, if it has twice the latter of rows
UNSHUFFLED = "Every pass takes the rows in the order of the data: they are not shuffled."
UNSHUFFLED_SO_FAR = "So far the rows come in the order of the data: they are not shuffled."
NOTED = tuple(BY_NAME[n].explanation for n in ("shuffle window", "same batches every pass", "drawn with replacement"))
EQUAL_ROWS = "Rows of the data have equal inputs: which row was meant cannot be told, so their order is not judged."
FEW_PASSES = "Less than two whole passes over the data were seen: whether each has another order is not judged."
NUM_LOOKED, MOST_LEAVES = 6, 5  # forward passes that are compared; inputs of a model whose order is permuted
_NEARLY_ALL, _ALMOST_ALL, _SOME = 0.98, 0.9, 0.1
_TWICE = "Each update makes several forward passes on the same rows. Is that meant, as for several draws of dropout?"
_BY_CHANCE = 1e-6  # of the beginning of a pass whose rows are all shuffled
_MOST_COLUMNS = 64  # of inputs, by one of which the rows may be sorted
_MOST_ROWS, _LEAST_SHARE = 3000, 0.02  # of data whose pairs are tried, and of a row in a mixture
_OF_FIT = (
    "So does Keras' `fit` on TensorFlow once a seed is set (`keras.utils.set_random_seed`): to have another order in "
    "each pass, give it a dataset that is shuffled."
)


def order(
    windows: Windows, rows: Rows, log: Log, labels: np.ndarray | None = None, *, origin: Origin = "stated"
) -> list[Finding]:
    """Return the findings on the order of the rows.

    Args:
        labels: by row the number of its class, if the data have classes.
        origin: of the data. Found data may hold rows that the loop holds out; data as the model was given them have the
            order of the loop.
    """
    if told := _alike(windows):
        return [told]
    known = {piece.called.order: piece.rows for piece in windows.pieces if piece.is_known}
    if not known or rows.twins(np.concatenate([*known.values()])) > FEW_TWINS:
        return [EQUAL_ROWS] * bool(known)
    windows = in_order(windows, rows, are_given=origin == "as given")
    pieces = [piece for piece in windows.pieces if piece.called.order in known]
    twice = [_TWICE] * (2 * len(pieces) <= len(known))
    stream = _whole_stream(pieces)
    if not stream and any(len({*own}) < len(own) for own in (p.rows[p.rows != PAD].tolist() for p in pieces)):
        return [EQUAL_ROWS if origin == "as given" else BY_NAME["drawn with replacement"].explanation]
    for finding in () if stream else (_again(windows), _overlap(windows, pieces), _doubled(windows, rows.num)):
        if finding is not None:
            return [finding]
    findings = [*_passes(windows, rows, pieces, stream, log, origin, labels)]
    few, of_order = _few_labels(windows, pieces, labels), (*NOTED[1:2], UNSHUFFLED, UNSHUFFLED_SO_FAR)
    if few is not None and any(each in of_order for each in findings):
        findings = [few if each in of_order else each for each in findings]
    elif origin == "as given":
        findings = [each for each in findings if each != UNSHUFFLED_SO_FAR]
    elif log.has_fitted and not hasattr(log.fitted[0], "element_spec"):  # a dataset of TensorFlow shuffles itself
        causes = [each for each in findings if isinstance(each, Found) and each.name == "same order every pass"]
        findings = [f"{each.explanation} {_OF_FIT}" if each in causes else each for each in findings]
    return [*findings, *twice, *_carried(windows)]


def _few_labels(windows: Windows, pieces: list[Piece], labels: np.ndarray | None) -> Found | None:
    """Find batches of one or two labels, where the data have many and random batches have more."""
    num = 0 if labels is None else len(np.unique(labels))
    if labels is None or not 1 < num <= len(labels) // LEAST:
        return None
    whole = [piece for piece in pieces if np.count_nonzero(piece.rows != PAD) >= 2 * LEAST]
    most = FEW - 1 if num > FEW else 1

    def num_few(labels: np.ndarray) -> int:
        return sum(len(np.unique(labels[piece.rows[piece.rows != PAD]])) <= most for piece in whole)

    few, draw = num_few(labels), np.random.default_rng(0)
    by_chance = float(np.median([num_few(draw.permutation(labels)) for _ in range(NUM_DRAWS)]))
    if 2 * few <= len(pieces) or by_chance >= CHANCE * len(pieces):
        return None
    detail = f"{few} of {len(pieces)} batches hold at most {most} of {num} labels."
    return found("batches of few labels", few / len(pieces), None, windows.numbers, detail)


def _alike(windows: Windows) -> str:
    num = [len({piece.called.replica for piece in u.pieces}) for u in windows.updates]
    same = [len({piece.rows.tobytes() for piece in u.pieces}) == 1 < len(u.pieces) for u in windows.updates]
    if not num or min(num) < 2 or not all(same) or len(windows.updates) < 2:
        return ""
    told = f"Each of the {max(num)} replicas gets the same rows, so an update is of one replica's rows, computed "
    how = "`strategy.experimental_distribute_dataset(dataset)`, in PyTorch by a `DistributedSampler`"
    return Likely(f"{told}{max(num)} times: give each its own, by {how}.")


def _carried(windows: Windows) -> list[Found]:
    """Find updates of microbatches of two passes, if their gradient is of all of them."""
    shared = [u for u in windows.updates if len({windows.place[p.called.order][0] for p in u.pieces}) > 1]
    shared = [u for u in shared if len({frozenset(p.rows.tolist()) for p in u.pieces}) == len(u.pieces)]  # no row twice
    known = [piece for piece in windows.pieces if piece.called.order in windows.place]
    first = {row for piece in known if not windows.place[piece.called.order][0] for row in piece.rows.tolist()}
    early = {u.number: _num_early(windows, u) for u in shared}
    sizes = {len(u.pieces) - early.get(u.number, 0) for u in windows.updates[:-1]}  # if counted anew in each pass
    are_even = 1 in (len(sizes), len({len(u.pieces) for u in windows.updates[:-1]}))  # else they are the author's
    if not shared or not are_even or len(first) < _NEARLY_ALL * len({r for p in known for r in p.rows.tolist()}):
        return []  # rows come again by chance
    update = shared[0]
    num, whole = early[update.number], len(update.pieces)
    detail = f"Update {update.number} has {num} of its {whole} microbatches from the pass before."
    return [found("window carried over the epoch", num / whole, update.applied.line, [*early], detail)]


def _num_early(windows: Windows, update: Update) -> int:
    """Return the number of an update's microbatches from the pass before its last."""
    numbers = [windows.place[piece.called.order][0] for piece in update.pieces]
    return sum(number < numbers[-1] for number in numbers)


def _again(windows: Windows) -> Found | None:
    """Find batches that make two updates in a row, in the midst of a pass, where others make one."""
    updates = [update for update in windows.updates if update.pieces]
    again = [b for a, b in pairwise(updates) if np.array_equal(a.rows, b.rows)]
    once = [update for update in updates if all(update is not other for other in again)]
    cuts = [[sum(len(u.rows) for u in cut) for cut in passes(each)][:-1] for each in (updates, once)]
    if not again or len(set(cuts[1])) > 1 or len(set(cuts[0])) < 2:
        return None
    detail = f"{len(again)} of {len(updates)} updates repeat the batch before."
    share, numbers = len(again) / len(updates), [u.number for u in again]
    return found("batch trained on twice", share, again[0].applied.line, numbers, detail)


def _doubled(windows: Windows, num_rows: int) -> Found | None:
    """Find passes that all end with a batch some of whose rows were already used."""
    again = doubled(windows.updates, num_rows)
    if len(again) < 2:
        return None
    last = next(update for update in windows.updates if update.number in again)
    num = min(int(np.count_nonzero(part)) for part in again.values())
    detail = f"The last batch of a pass has {num} rows of batches before it."
    return found("rows twice in a pass", num / num_rows, last.applied.line, again, detail)


def _overlap(windows: Windows, pieces: list[Piece]) -> Found | None:
    """Find batches that begin with the last rows of the batch before, mostly the same number of rows."""
    shared = [_shared(a.rows, b.rows) for a, b in pairwise(pieces)]
    sizes, counts = np.unique([num for num in shared if num] or [0], return_counts=True)
    usual = int(sizes[np.argmax(counts)])
    if not usual or counts.max() < max(2, MOSTLY * len(shared)):
        return None
    detail = f"{usual} rows of each batch are in the next one too."
    return found("batches overlap", usual / len(pieces[0].rows), None, windows.numbers, detail)


def _shared(one: np.ndarray, two: np.ndarray) -> int:
    """Return how many rows at the end of one batch begin the next, less than all."""
    return max((n for n in range(1, min(len(one), len(two))) if np.array_equal(one[-n:], two[:n])), default=0)


def _passes(
    windows: Windows, rows: Rows, pieces: list[Piece], stream: list, log: Log, origin: Origin, labels: np.ndarray | None
) -> Iterator[Finding]:
    lists = stream or [[row for piece in cut for row in piece.rows.tolist() if row != PAD] for cut in passes(pieces)]
    whole = lists if len(lists[-1]) == len(lists[0]) else lists[:-1]
    if _is_drawn(lists[:-1], rows.num):
        yield BY_NAME["drawn with replacement"].explanation
        return
    if len(whole) < 2 or len({len(each) for each in whole}) > 1:
        yield from _beginning(lists[0], rows, labels)
        yield FEW_PASSES
        return
    if all(len(np.unique(u.rows[u.rows != PAD])) == rows.num for u in windows.updates if u.pieces):
        return  # each update has all rows: they have no order
    first = whole[0]
    unused = sorted(set(range(rows.num)) - set().union(*whole) - windows.seen)
    window = 1 + max(row - place for each in whole for place, row in enumerate(each))
    are_same = all(set(each) == set(first) for each in whole)
    if unused and are_same and origin != "as given":  # such data have no row that was not trained on
        are_last = unused == list(range(rows.num - len(unused), rows.num))
        size = max(len(piece.rows) for piece in pieces)
        detail = f"{len(unused)} of {rows.num} rows{', the last ones' if are_last else ''}: {some(unused)}."
        if windows.foreign:
            told = f"Never used unchanged: {detail} {windows.foreign} forward passes had inputs that are no rows of "
            yield f"{told}`data`: are rows changed on the way to the model (augmented, normalised)?"
        elif (
            log.has_evaluated  # or it will be, after the audit: more than a batch of last rows is no remainder
            or (are_last and len(unused) > size)
            or (origin != "stated" and (len(unused) >= size or (are_last and first != sorted(first))))
        ):
            yield f"Held out, or forgotten? Never used: {detail}"
        else:
            yield found("rows never used", len(unused) / rows.num, None, windows.numbers, detail)
    elif not unused and window <= rows.num // 2 and first != sorted(first):
        yield _of_window(window, rows, labels)
    elif len(first) < rows.num * (_NEARLY_ALL if origin == "as given" else 1) and not are_same:
        if windows.in_training[0]:  # the rest may be in the passes without a gradient
            return
        told = f"A pass has {len(first)} of the {rows.num} rows, each pass others. If the rest is held out, it is "
        yield f"{told}trained on in other passes: split the data before they are shuffled, or shuffle once."
    is_one_order = all(each == first for each in whole)
    if is_one_order and first == sorted(first):
        yield UNSHUFFLED
    elif is_one_order and len(first) > 3:
        detail = f"The passes begin with the rows {some(first)}."
        yield found("same order every pass", 1.0, None, windows.numbers, detail)
    cut = [sorted(tuple(sorted(p.rows.tolist())) for p in each) for each in passes(pieces)][: len(whole)]
    is_mixed = not (stream or is_one_order) and len(cut[0]) > 1 and max(map(len, cut[0])) > 1
    if is_mixed and all(each == cut[0] for each in cut):
        yield BY_NAME["same batches every pass"].explanation


def _whole_stream(pieces: list[Piece]) -> list[list[int]]:
    """Return whole passes, one after the other, that are cut into batches across their ends; [] if they are not."""
    rows = [row for piece in pieces for row in piece.rows.tolist() if row != PAD]
    num = len(set(rows))
    lists = [rows[start : start + num] for start in range(0, len(rows), num)] if num else []
    are_across = len(lists) > 1 and num not in np.cumsum([np.count_nonzero(piece.rows != PAD) for piece in pieces])
    return lists if are_across and all(len({*each}) == len(each) for each in lists) else []


def _beginning(first: list[int], rows: Rows, labels: np.ndarray | None) -> Iterator[str]:
    """Yield a note on a pass, or the beginning of one, whose rows are not shuffled, or inside of a window.

    If all rows up to the last one so far were shuffled, a row would be in the window with a known probability.
    """
    window = 1 + max(row - place for place, row in enumerate(first))
    left = 1 + max(first) - np.arange(len(first))  # rows that may come next
    chance = float(np.prod(np.minimum(1.0, window / left)))
    if first == [*range(len(first))] and chance <= _BY_CHANCE:
        yield UNSHUFFLED_SO_FAR
    elif window <= rows.num // 2 and chance <= _BY_CHANCE and first != sorted(first):
        yield _of_window(window, rows, labels)


def _of_window(window: int, rows: Rows, labels: np.ndarray | None) -> str:
    told = f"{BY_NAME['shuffle window'].explanation} It is of {window} of {rows.num} rows."
    if (by := _sorted_by(rows, labels)) is None:
        return told
    return Likely(f"{told} The data are sorted by {by}, so that a batch has neighbours alone: shuffle all rows.")


def _sorted_by(rows: Rows, labels: np.ndarray | None) -> str | None:
    """Return in words by which number of a row the data are sorted; None if they are by none."""
    leaves = [leaf.reshape(len(leaf), -1) for leaf in rows.leaves if leaf.dtype.kind in "iuf"]
    columns = [(f"input {i + 1}", leaf[:, k]) for i, leaf in enumerate(leaves) for k in range(leaf.shape[1])]
    columns = [each for each in columns[:_MOST_COLUMNS] if len(np.unique(each[1])) > FEW]
    every = [*([] if labels is None else [("their labels", labels)]), *columns]
    return next((n for n, v in every if v[0] != v[-1] and (np.all(v[1:] >= v[:-1]) or np.all(v[1:] <= v[:-1]))), None)


def _is_drawn(lists: list[list[int]], num_rows: int) -> bool:
    """Whether rows come again, sooner or later, before most others have come."""
    sizes = [len(each) for each in lists]
    return len(sizes) > 2 and len(set(sizes)) > 1 and 2 * float(np.median(sizes)) <= num_rows


def altered(rows: Rows, labels: list[np.ndarray], pieces: list[Piece]) -> Iterator[Finding]:
    """Yield the finding on inputs that are no rows of the data: in another order, labels among them, or scaled."""
    shapes = [leaf.shape[1:] for leaf in pieces[0].called.inputs] if pieces else []
    looked = [piece for piece in pieces if [leaf.shape[1:] for leaf in piece.called.inputs] == shapes][:NUM_LOOKED]
    if not looked or len(shapes) != len(rows.leaves):
        return
    for name, detail, leaves in _ways(rows.leaves, labels, looked[0]):
        if _share(Rows(leaves), looked) >= _ALMOST_ALL:
            every = range(1, len(pieces) + 1)
            yield found(name, 1.0, looked[0].called.line, every, detail) if name else Likely(detail)
            return
    if (share := _share(rows, looked)) > _SOME:
        told = f"Of the rows that the model gets {share:.0%} are rows of `data`, and the others are none: "
        if _are_moved(rows, looked):
            yield f"{told}they are rows whose numbers stand elsewhere (flipped, rolled, turned?)."
        else:
            yield f"{told}are they augmented, or is it trained on more than `data`, as on rows that are held out?"
    elif (line_of := _scaled(rows, looked)) is not None:
        scale, offset = line_of
        more = f", plus {offset:.5g}" if abs(offset) > ROUNDED else ""
        yield f"The model's inputs are the rows of `data` times {scale:.5g}{more}. Is that meant?"


def mixed(x: np.ndarray, y: np.ndarray, given: list[tuple[list[np.ndarray], np.ndarray]]) -> Iterator[Finding]:
    """Yield a note if the model gets mixtures of two rows: whether the loss gets the same mixtures of their labels.

    Args:
        given: the inputs of forward passes, and the labels that the loss got.
    """
    if len(y) > _MOST_ROWS or y.shape[1:] != (given[0][1].shape[1:] if given else None):
        return
    x = x.reshape(len(y), -1).astype("float64")
    products = x @ x.T
    rows = [(v, own) for (v, *_), label in given[:NUM_LOOKED] for v, own in [*zip(v, label, strict=False)][:LEAST]]
    rows = [(v, own) for v, own in rows if v.size == x.shape[1] and own.shape == y.shape[1:]]
    found = [(_mixture(x, products, v.reshape(-1).astype("float64")), own) for v, own in rows]
    known = [(*each, own) for each, own in found if each is not None]
    others = [(i, j, a, own) for i, j, a, own in known if np.abs(a * y[i] + (1 - a) * y[j] - own).max() > SOLVED]
    if len(known) < LEAST:
        return
    told = f"The model gets mixtures of two rows of the data, in {len(known)} of {len(found)} rows that were looked at"
    if 2 * len(others) <= len(known):
        yield f"{told}; the loss gets the same mixture of their labels in {len(known) - len(others)} of them."
        return
    i, j, a, own = others[0]
    told += f", and the loss gets other labels in {len(others)} of them: of {a:.3g} x row {i} + {1 - a:.3g} x row {j} "
    told += f"it gets {numbers_of(own)}, and not {numbers_of(a * y[i] + (1 - a) * y[j])}. "
    yield Likely(f"{told}Mix labels by the rows and factors of the inputs.")


def _mixture(x: np.ndarray, products: np.ndarray, v: np.ndarray) -> tuple[int, int, float] | None:
    """Return (i, j, a) for which v is a x[i] + (1 - a) x[j]; None if it is no mixture of two rows."""
    sizes, own = np.diag(products), x @ v
    apart = np.maximum(sizes[:, None] + sizes - 2 * products, 1e-30)
    along = own[:, None] - own - products + sizes
    rest = v @ v - 2 * own + sizes - along**2 / apart
    i, j = divmod(int(np.argmin(np.where(apart > ROUNDED * v @ v, rest, np.inf))), len(x))
    a = float(along[i, j] / apart[i, j])
    left = float(np.linalg.norm(a * x[i] + (1 - a) * x[j] - v))
    return (i, j, a) if _LEAST_SHARE < a < 1 - _LEAST_SHARE and left <= SOLVED * np.sqrt(v @ v) else None


def _ways(
    leaves: list[np.ndarray], labels: list[np.ndarray], piece: Piece
) -> Iterator[tuple[str, str, list[np.ndarray]]]:
    """Yield (the cause, or "" if it has no name, its detail, the data as the model would have received them)."""
    num = range(len(leaves))
    for order in permutations(num) if 1 < len(leaves) <= MOST_LEAVES else ():
        moved = [(i, j) for i, j in enumerate(order) if i != j]
        if moved and all(leaves[i].shape == leaves[j].shape for i, j in moved):
            told = ", ".join(f"input {i + 1} gets what is meant for input {j + 1}" for i, j in moved)
            yield "inputs swapped", f"{told[0].upper()}{told[1:]}.", [leaves[j] for j in order]
    for i in num:
        if set(np.unique(leaves[i])) == {0, 1}:
            told = f"Input {i + 1} of the model is inverted: it is 1 where that of `data` is 0, and 0 where it is 1."
            yield "", told, [1 - leaf if j == i else leaf for j, leaf in enumerate(leaves)]
        for label in labels:
            if label.shape[1:] == piece.called.inputs[i].shape[1:] and label.ndim > 1:
                detail = f"Input {i + 1} of {len(leaves)} gets the labels of its rows."
                yield "labels among the inputs", detail, [label if j == i else leaf for j, leaf in enumerate(leaves)]


def _are_shaped(leaves: list[np.ndarray], given: list[np.ndarray]) -> bool:
    return len(leaves) == len(given) and all(a.shape[1:] == b.shape[1:] for a, b in zip(leaves, given, strict=True))


def _share(rows: Rows, pieces: list[Piece]) -> float:
    if not _are_shaped(rows.leaves, pieces[0].called.inputs):
        return 0.0
    held = np.concatenate([rows.find(piece.called.inputs) for piece in pieces])
    return float(np.mean(held != PAD)) if len(held) else 0.0


def beside(rows: Rows, pieces: list[Piece]) -> str:
    """Return in words a row that the model got, and the nearest one of the data, of the first input that differs."""
    given = next((piece.called.inputs for piece in pieces if piece.called.inputs), [])
    if not _are_shaped(rows.leaves, given):
        return ""
    data, got = ([leaf.reshape(len(leaf), -1).astype("float64") for leaf in own] for own in (rows.leaves, given))
    near = int(np.argmin(np.linalg.norm(data[0] - got[0][0], axis=1)))
    i = next((i for i, leaf in enumerate(got) if np.any(leaf[0] != data[i][near])), 0)
    one, two, of = got[i][0], data[i][near], f" as input {i + 1}" if i else ""
    told = f": the model got {numbers_of(one)}{of}, and row {near} of `data`, the nearest, is {numbers_of(two)}"
    if numbers_of(one) != numbers_of(two):
        return told
    place = int(np.argmax(one != two))
    return f"{told}, but for {one[place]:.8g} and {two[place]:.8g} at place {place} of the row"


def _are_moved(rows: Rows, pieces: list[Piece]) -> bool:
    """Whether the input rows that are not in the data hold the numbers of a row in another order."""

    def sorted_rows(leaf: np.ndarray) -> list[bytes]:
        return [row.tobytes() for row in np.sort(leaf.reshape(len(leaf), -1), axis=1)]

    known = set(sorted_rows(rows.leaves[0].astype(pieces[0].called.inputs[0].dtype)))
    others = [key for p in pieces for key in sorted_rows(p.called.inputs[0][rows.find(p.called.inputs) == PAD])]
    return bool(others) and sum(key in known for key in others) >= _ALMOST_ALL * len(others)


def _scaled(rows: Rows, pieces: list[Piece]) -> tuple[float, float] | None:
    """Return (scale, offset) if the model's inputs are rows of the data times a scale plus an offset."""
    (data, *more), given = rows.leaves, np.concatenate([piece.called.inputs[0] for piece in pieces])
    if more or data.shape[1:] != given.shape[1:] or data.dtype.kind not in "fiu" or given.dtype.kind != "f":
        return None
    one, two = (leaf.reshape(len(leaf), -1).astype("float64") for leaf in (data, given))
    if one.shape[1] < 3:
        return None
    mates = one[np.argmax(np.abs(_directions(two) @ _directions(one).T), axis=1)]
    scale, offset = (float(number) for number in np.polyfit(mates.ravel(), two.ravel(), 1))
    rest = float(np.linalg.norm(two - scale * mates - offset))
    return (scale, offset) if rest <= ROUNDED * float(np.linalg.norm(two)) else None


def _directions(rows: np.ndarray) -> np.ndarray:
    rows = rows - rows.mean(axis=1, keepdims=True)
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)
