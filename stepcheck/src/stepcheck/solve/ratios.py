"""Numbers in words: coefficients that were solved for as fractions of known counts."""

from dataclasses import dataclass
from itertools import combinations

import numpy as np

_MULTIPLES = {1.0: "", -1.0: "minus ", 2.0: "twice ", 0.5: "half of "}
_MOST_COUNTS = 3  # in one fraction
_ROUNDING, _ROUGHLY, _TINY = 1e-9, 1e-3, 1e-30
MEANT = "what it should"
_WHOLE, _SAME = range(10, 5000), 1e-5  # numbers n of which 1 / n is written; a larger one may be close by chance
_MOST_KINDS, _LEAST_ROWS = 10, 4  # of rows: numbers that may be solved for, and numbers that each must stand for
_OWN_SUM, _UPDATE, _WEIGHT = "the sum of these", "the number of the update", "the row's own weight"


@dataclass(frozen=True)
class Reading:
    """Numbers in words.

    Attributes:
        cost: how much has to be supposed: 0 for the numbers that were meant, 1 for each count in a fraction.
        key: "right", "none", "number" where one is solved for, or the fraction.
        values: the numbers that the words give.
    """

    cost: float
    text: str
    key: str
    values: np.ndarray

    @property
    def is_right(self) -> bool:
        """Whether these are the numbers that were meant."""
        return self.key == "right"


def readings(
    values: np.ndarray, slack: np.ndarray, counts: dict[str, np.ndarray], right: np.ndarray, *, is_plain: bool
) -> list[Reading]:
    """Return what these numbers may be, the simplest first.

    Args:
        slack: by how much each may be off.
        counts: known counts, by name, one for each number.
        right: the numbers that were meant.
        is_plain: whether a constant multiple of the meant numbers comes before any fraction.
    """
    slack = np.maximum(slack, 1e-12)
    if np.all(np.abs(values - right) <= slack):
        return [Reading(0, "as meant", "right", right)]
    if np.all(np.abs(values) <= slack):
        return [Reading(1, "not at all", "none", np.zeros_like(values))]
    found = sorted(_fractions(values, slack, counts, right), key=lambda reading: reading.cost)[:5]
    base = right if np.all(right != 0) else np.ones_like(values)
    ratio, loose = values / base, np.max(slack / np.abs(base))
    if not is_plain or np.ptp(ratio) > loose:
        return found
    middle = float(np.median(ratio))
    near = min((1, 2, 3, 4, 5, 10, -1, 0.5), key=lambda number: abs(middle - number))
    is_near = abs(middle - near) <= max(loose, 1e-4 * abs(near))
    told = _written(near if is_near else middle) + (f" times {MEANT}" if base is right else "")
    key = f"{float(near)}:" if is_near else "number"
    return sorted([Reading(1, told, key, middle * base), *found[:2]], key=lambda reading: reading.cost)


def _written(number: float) -> str:
    """Return a number, or the fraction 1 / n that it is.

    >>> _written(0.25), _written(1 / 384), _written(0.0123)
    ('0.25', '1 / 384', '0.0123')
    """
    whole = round(1 / number) if number else 0
    is_fraction = whole in _WHOLE and abs(whole * number - 1) <= _SAME
    return f"1 / {whole}" if is_fraction else f"{number:.4g}"


def _fractions(
    values: np.ndarray, slack: np.ndarray, counts: dict[str, np.ndarray], right: np.ndarray
) -> list[Reading]:
    """Return the fractions of counts that these numbers are, times 1, -1, 2, 1/2 or one number that is solved for."""
    kept: dict[str, np.ndarray] = {}
    for name, column in counts.items():
        is_other = not any(np.allclose(column, other, rtol=_ROUNDING) for other in kept.values())
        if is_other and np.all(column > 0) and np.any(column != 1):
            kept[name] = column
    one: tuple[tuple[str, ...], np.ndarray] = (), np.ones_like(values)
    single = [((name,), column) for name, column in kept.items()]
    pairs = [(x + y, a * b) for (x, a), (y, b) in combinations(single, 2)]
    tops = [one, *single, *((name * 2, column**2) for name, column in single)]
    if np.all(right != 0):
        tops.append(((MEANT,), right))
    ways = [
        (top, low, above / below)
        for top, above in tops
        for low, below in [one, *single, *pairs]
        if not set(top) & set(low) and len(top) + len(low) <= _MOST_COUNTS
    ]
    shapes = np.stack([shape for *_, shape in ways])
    ratios, loose = values / shapes, slack / np.abs(shapes)
    middles = np.median(ratios, axis=1)
    fits = np.all(np.abs(ratios - middles[:, None]) <= loose + _ROUNDING * np.abs(middles[:, None]), axis=1)
    found = []
    for i in np.flatnonzero(fits):
        top, low, shape = ways[i]
        near = next((m for m in _MULTIPLES if np.all(np.abs(ratios[i] - m) <= loose[i] + _ROUNDING)), None)
        cost = sum(name != MEANT for name in top) + len(low) - 0.5 * (top == (MEANT,) and bool(low))
        cost += 2.5 if near is None else 0 if near == 1 else 1
        number = middles[i] if near is None else near
        below = f"({' x '.join(low)})" if len(low) > 1 else "".join(low)
        fraction = (" x ".join(top) or "1" * bool(low)) + (f" / {below}" if low else "")
        multiple = f"{number:.4g} x " if near is None else _MULTIPLES[near]
        key = "number" if near is None else f"{near}:{fraction}"
        text = f"{multiple}{fraction}" if fraction else _written(number)
        found.append(Reading(max(cost, 0.5), text, key, number * shape))
    return found


def by_kind(
    values: np.ndarray, slack: np.ndarray, counts: dict[str, np.ndarray], kinds: dict[str, np.ndarray]
) -> list[Reading]:
    """Return what these factors of rows, each with its weight, may be if all rows of a kind should have one weight.

    Args:
        values, slack, counts: as in `readings`.
        kinds: the kind of each row, by name, such as its label.
    """
    found, own_weights = list[Reading](), counts[_WEIGHT]
    if not np.all(own_weights):
        return []
    values, slack = values * own_weights, slack * np.abs(own_weights)
    for name, kind in kinds.items():
        single, at, nums = np.unique(kind, return_inverse=True, return_counts=True)
        if not 1 < len(single) <= min(_MOST_KINDS, len(values) // _LEAST_ROWS):
            continue
        some = [at == i for i in range(len(single))]
        should = [np.unique(own_weights[own].round(6)) for own in some]
        divisors = {below: counts[below] for below in ("its rows", "the weight of the update")}
        if (own := _own_sum(values, counts, kind == single[nums.argmax()])) is not None:
            divisors[_OWN_SUM] = own
        for below, divisor in {"": np.ones_like(values), **divisors}.items():
            scaled, loose = values * divisor, slack * np.abs(divisor)
            weights = np.array([np.median(scaled[own]) for own in some])
            if np.ptp(weights) <= _SAME or np.any(np.abs(scaled - weights[at]) > loose + _SAME * np.abs(weights[at])):
                continue
            is_known = all(len(each) == 1 for each in should)
            if below == _OWN_SUM:  # the scale is free
                scale = np.max(should) / weights.max() if is_known else 1 / weights.max()
                weights, divisor = weights * scale, divisor * scale
            told = ", ".join(f"{w:.4g} for {name} {k:g}" for w, k in zip(weights, single, strict=True))
            told += f" (should: {', '.join(f'{each[0]:.4g}' for each in should)})" * is_known
            told += f", divided by {below}" * bool(below)
            size = abs(np.log(max(np.abs(weights).max(), _TINY) / own_weights.max()))  # of several divisors
            cost = 2 + 0.25 * len(single) + 0.5 * bool(below) + min(1.0, size)
            found.append(Reading(cost, told, f"by {name}", weights[at] / divisor / own_weights))
    return sorted(found, key=lambda reading: reading.cost)


def _own_sum(values: np.ndarray, counts: dict[str, np.ndarray], is_usual: np.ndarray) -> np.ndarray | None:
    """Return the sum of the weights of each update, up to a factor; None if the numbers are not divided by it."""
    sums, updates = np.zeros_like(values), counts[_UPDATE]
    for own in (updates == each for each in np.unique(updates)):
        if not np.any(own & is_usual) or abs(values[own].sum() - 1) > _ROUGHLY:
            return None
        sums[own] = 1 / np.median(values[own & is_usual])
    return sums


def farthest_first(ratios: np.ndarray) -> np.ndarray:
    """Return each number once, the farthest from 1 first; nothing if all are 1.

    >>> farthest_first(np.array([1.0, 1.0, 0.5, 3.0, 0.5])).tolist()
    [3.0, 0.5, 1.0]
    """
    single = np.array([*dict.fromkeys(float(f"{ratio:.4g}") for ratio in ratios)])
    return single[np.argsort(-np.abs(single - 1), kind="stable")] if np.any(single != 1) else single[:0]


def least(columns: list[np.ndarray], wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (the coefficients of columns whose sum is nearest, by how much each may be off for a unit of error).

    >>> least([np.array([2.0, 0.0]), np.array([0.0, 4.0])], np.array([2.0, 2.0]))
    (array([1. , 0.5]), array([0.5 , 0.25]))
    """
    basis = np.stack(columns, axis=1)
    if not (np.all(np.isfinite(basis)) and np.all(np.isfinite(wanted))):
        return np.full(len(columns), np.nan), np.zeros(len(columns))
    sizes = np.linalg.norm(basis, axis=0)
    sizes = np.where(sizes == 0, 1, sizes)
    q, r = np.linalg.qr(basis / sizes)
    u, s, vt = np.linalg.svd(r, full_matrices=False)
    inverse = vt.T * np.where(s > 1e-6 * s[0], 1 / np.where(s == 0, 1, s), 0)
    return inverse @ (u.T @ (q.T @ wanted)) / sizes, np.linalg.norm(inverse, axis=1) / sizes
