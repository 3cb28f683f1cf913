"""The stage of the rows: which rows of the data the updates were made of, and in which order."""

from itertools import pairwise

import numpy as np

from wholestep.audit.causes import BY_NAME
from wholestep.audit.found import Found, Likely, found
from wholestep.audit.log import Log
from wholestep.audit.windows import PAD, Piece, Rows, Windows, doubled, passes
from wholestep.tree import Tree

NUM_DRAWS, CHANCE = 20, 0.1  # rows in so many orders have such batches less often than that
MOSTLY = 0.7  # of the neighbours, where the others are those of two passes
FEW, LEAST = 3, 4  # labels that make batches of fewer ones strange, and half the rows that such a batch has
UNSHUFFLED = "Every pass takes the rows in the order of the data: they are not shuffled."
FEW_PASSES = "Less than two whole passes over the data were seen: their order is not judged."
_OF_FIT = (
    "So does Keras' `fit` on TensorFlow once a seed is set (`keras.utils.set_random_seed`): to have another order in "
    "each pass, give it a dataset that is shuffled."
)


def order(
    windows: Windows, rows: Rows, log: Log, labels: np.ndarray | None = None, *, is_found: bool = False
) -> tuple[list[Found], list[str]]:
    """Return (causes, notes) of the order of the rows.

    Args:
        labels: by row the number of its class, where there are any.
        is_found: whether nobody said that the loop is to train on all these rows.
    """
    pieces = [piece for piece in windows.pieces if piece.is_known]
    if told := _alike(windows):
        return [], [told]
    if not pieces or any(rows.twins(piece.rows) for piece in pieces):
        note = "Rows of the data have equal inputs: which row was meant cannot be told, so their order is not judged."
        return [], [note] if pieces else []
    if any(len(set(own)) < len(own) for own in (piece.rows[piece.rows != PAD].tolist() for piece in pieces)):
        return [], [BY_NAME["drawn with replacement"].explanation]
    if (again := _again(windows)) is not None:
        return [again], []
    for look in (_overlap(windows, pieces), _doubled(windows, rows.num)):
        if look is not None:
            return [look], []
    causes, notes = _passes(windows, rows, pieces, log.has_evaluated, is_found)
    few, told = _few_labels(windows, pieces, labels), BY_NAME["same batches every pass"].explanation
    if few and (told in notes or UNSHUFFLED in notes):
        return [*causes, *few, *_carried(windows)], [note for note in notes if note not in (told, UNSHUFFLED)]
    if log.has_fitted and (same := [cause for cause in causes if cause.name == "same order every pass"]):
        notes.append(f"{same[0].explanation} {_OF_FIT}")
        causes = [cause for cause in causes if cause is not same[0]]
    carried = _carried(windows)
    return [*causes, *carried], notes


def classes(y: Tree) -> np.ndarray | None:
    """Return the number of each row's class; None where the labels are no classes.

    >>> classes(np.array([[0, 1], [1, 0]])).tolist()
    [1, 0]
    """
    if not hasattr(y, "shape"):
        return None
    values = np.asarray(y)
    is_one_hot = values.ndim == 2 and values.shape[1] > 1 and set(np.unique(values)) == {0, 1}
    if is_one_hot and np.all(values.sum(axis=1) == 1):
        return np.argmax(values, axis=1)
    is_column = values.size == len(values)
    return values.reshape(-1) if is_column and np.array_equal(values, np.round(values)) else None


def _few_labels(windows: Windows, pieces: list[Piece], labels: np.ndarray | None) -> list[Found]:
    """Find batches of one or two of the labels, where the data have many and rows by chance have more in a batch."""
    num = 0 if labels is None else len(np.unique(labels))
    if labels is None or not 1 < num <= len(labels) // LEAST:
        return []
    whole = [piece for piece in pieces if np.count_nonzero(piece.rows != PAD) >= 2 * LEAST]
    most = FEW - 1 if num > FEW else 1

    def num_few(labels: np.ndarray) -> int:
        return sum(len(np.unique(labels[piece.rows[piece.rows != PAD]])) <= most for piece in whole)

    few, draw = num_few(labels), np.random.default_rng(0)
    by_chance = float(np.median([num_few(draw.permutation(labels)) for _ in range(NUM_DRAWS)]))
    if 2 * few <= len(pieces) or by_chance >= CHANCE * len(pieces):
        return []
    detail = f"{few} of {len(pieces)} batches hold at most {most} of {num} labels."
    numbers = [update.number for update in windows.updates]
    return [found(BY_NAME["batches of few labels"], few / len(pieces), 0.0, pieces[0].called.line, numbers, detail)]


def _alike(windows: Windows) -> str:
    """Return in words that in all updates all replicas get the same rows; "" if they do not."""
    num = [len({piece.called.replica for piece in u.pieces}) for u in windows.updates]
    same = [len({piece.rows.tobytes() for piece in u.pieces}) == 1 < len(u.pieces) for u in windows.updates]
    if not num or min(num) < 2 or not all(same) or len(windows.updates) < 2:
        return ""
    told = f"Each of the {max(num)} replicas gets the same rows, so an update is of one replica's rows, computed "
    return Likely(f"{told}{max(num)} times: give each its own, `strategy.experimental_distribute_dataset(dataset)`.")


def _carried(windows: Windows) -> list[Found]:
    """Find updates of microbatches of two passes, if their gradient is of all of them."""
    shared = [u for u in windows.updates if len({windows.place[p.called.order][0] for p in u.pieces}) > 1]
    if not shared:
        return []
    update = shared[0]
    numbers = [windows.place[piece.called.order][0] for piece in update.pieces]
    early = sum(number < numbers[-1] for number in numbers)
    detail = f"Update {update.number} has {early} of its {len(numbers)} microbatches from the pass before."
    line, updates = update.applied.line, [u.number for u in shared]
    return [found(BY_NAME["window carried over the epoch"], early / len(numbers), 0.0, line, updates, detail)]


def _window(lists: list[list[int]]) -> int:
    """Return how many rows ahead of its place in the data a row comes at most, and one more."""
    return max(row - place for each in lists for place, row in enumerate(each)) + 1


def _again(windows: Windows) -> Found | None:
    """Find batches that make two updates in a row, in the midst of a pass, where others make one."""
    updates = [update for update in windows.updates if update.pieces]
    again = [b for a, b in pairwise(updates) if np.array_equal(a.rows, b.rows)]
    once = [update for update in updates if all(update is not other for other in again)]
    cuts = [[sum(len(u.rows) for u in cut) for cut in passes(each)][:-1] for each in (updates, once)]
    if not again or len(set(cuts[1])) > 1 or len(set(cuts[0])) < 2:
        return None
    detail = f"So it is with {len(again)} of {len(updates)} updates."
    share, numbers = len(again) / len(updates), [u.number for u in again]
    return found(BY_NAME["batch trained on twice"], share, 0.0, again[0].applied.line, numbers, detail)


def _doubled(windows: Windows, num_rows: int) -> Found | None:
    """Find passes that all end with a batch some of whose rows they have had."""
    again = doubled(windows.updates, num_rows)
    if len(again) < 2:
        return None
    last = [update for update in windows.updates if update.number in again]
    num = min(int(np.count_nonzero(part)) for part in again.values())
    detail = f"The last batch of a pass has {num} rows of batches before it."
    return found(BY_NAME["rows twice in a pass"], num / num_rows, 0.0, last[0].applied.line, [*again], detail)


def _overlap(windows: Windows, pieces: list[Piece]) -> Found | None:
    """Find batches that begin with the last rows of the one before."""
    shared = [_shared(a.rows, b.rows) for a, b in pairwise(pieces)]
    sizes, counts = np.unique([num for num in shared if num] or [0], return_counts=True)
    usual = int(sizes[np.argmax(counts)])
    if not usual or counts.max() < max(2, MOSTLY * len(shared)):  # but where a pass ends
        return None
    numbers = [update.number for update in windows.updates]
    without = usual / len(pieces[0].rows)
    detail = f"{usual} rows of each batch are in the next one too."
    return found(BY_NAME["batches overlap"], without, 0.0, pieces[0].called.line, numbers, detail)


def _shared(one: np.ndarray, two: np.ndarray) -> int:
    """Return how many rows at the end of one batch begin the next, less than all."""
    return max((n for n in range(1, min(len(one), len(two))) if np.array_equal(one[-n:], two[:n])), default=0)


def _passes(
    windows: Windows, rows: Rows, pieces: list[Piece], has_evaluated: bool, is_found: bool
) -> tuple[list[Found], list[str]]:
    lists = [[row for piece in cut for row in piece.rows.tolist() if row != PAD] for cut in passes(pieces)]
    whole = lists if len(lists[-1]) == len(lists[0]) else lists[:-1]
    if _is_drawn(lists[:-1], rows.num):
        return [], [BY_NAME["drawn with replacement"].explanation]
    if len(whole) < 2 or len({len(each) for each in whole}) > 1:
        return [], [FEW_PASSES]
    notes, causes = [], []
    numbers = [update.number for update in windows.updates]
    line = pieces[0].called.line
    unused = sorted(set(range(rows.num)) - set().union(*whole) - windows.seen)
    are_same = all(set(each) == set(whole[0]) for each in whole)
    if unused and are_same:
        are_last = unused == list(range(rows.num - len(unused), rows.num))
        detail = f"{len(unused)} of {rows.num} rows{', the last ones' if are_last else ''}: {_some(unused)}."
        if windows.foreign:
            told = f"Never used as they are: {detail} {windows.foreign} forward passes had inputs that are no rows of "
            notes.append(f"{told}`data`: are rows changed on the way to the model (augmented, normalised)?")
        elif has_evaluated or (is_found and len(unused) >= max(len(piece.rows) for piece in pieces)):
            notes.append(f"Held out, or forgotten? Never used are {detail}")
        else:
            causes.append(found(BY_NAME["rows never used"], len(unused) / rows.num, 0.0, line, numbers, detail))
    elif not unused and _window(whole) <= rows.num // 2 and whole[0] != sorted(whole[0]):
        size = _window(whole)
        notes.append(f"{BY_NAME['shuffle window'].explanation} It is of {size} of {rows.num} rows.")
    elif len(whole[0]) < rows.num and not are_same:
        notes.append(f"A pass has {len(whole[0])} of the {rows.num} rows, each pass others.")
    if all(each == whole[0] for each in whole):
        if whole[0] == sorted(whole[0]):
            notes.append(UNSHUFFLED)
        elif len(whole[0]) > 3:
            detail = f"The passes begin with the rows {_some(whole[0])}."
            causes.append(found(BY_NAME["same order every pass"], 1.0, 0.0, line, numbers, detail))
    cut = [sorted(tuple(sorted(p.rows.tolist())) for p in each) for each in passes(pieces)][: len(whole)]
    is_mixed = any(each != whole[0] for each in whole) and len(cut[0]) > 1 and max(map(len, cut[0])) > 1
    if is_mixed and all(each == cut[0] for each in cut):
        notes.append(BY_NAME["same batches every pass"].explanation)
    return causes, notes


def _is_drawn(lists: list[list[int]], num_rows: int) -> bool:
    """Whether rows come again, sooner or later, before most others have come."""
    sizes = [len(each) for each in lists]
    return len(sizes) > 2 and len(set(sizes)) > 1 and 2 * float(np.median(sizes)) <= num_rows


def _some(rows: list[int]) -> str:
    return ", ".join(map(str, rows[:8])) + (", ..." if len(rows) > 8 else "")
