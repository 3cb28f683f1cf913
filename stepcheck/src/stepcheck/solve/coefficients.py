"""Coefficients of known vectors that make a gradient: solved for in each update, and read over all of them.

handed = sum_s a_s g_s + b p + q before, with s a whole update, its pieces or its rows.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np

from stepcheck.report.found import listed
from stepcheck.solve.basis import MOST_ROWS, Basis
from stepcheck.solve.evidence import Evidence
from stepcheck.solve.forms import BASE, Error, Form
from stepcheck.solve.ratios import MEANT, Reading, by_kind, farthest_first, least, readings
from stepcheck.trace.measure import SOLVED

SPARE, RAW = 4, 8.0  # numbers beyond the unknowns of a solution; the cost of numbers without words
SAME = 2 * SOLVED  # of factors of rows, and of norms to which gradients are clipped
_REST, _REPLICAS = "microbatches of the last pass", "the number of replicas"
_LEAST_SCALE = 24.0  # a factor that no count of a small loop is: loss scales are larger
_RIGHT = Reading(0, "", "right", np.zeros(0))
_WHOSE = {"the update": "update by update", "each microbatch": "microbatch by microbatch", "rows": "row by row"}
_ZERO, _KNOWN = 1e-4, 0.05  # of the largest factor: rounding; of a factor: by how much it may be off, to be told
_CUT = " (is the loss of some rows masked, or cut to a range?)"
_BLOCK_OF = {"the penalty": "penalty", "the gradient handed over before": "before"}
_BEFORE: tuple[Callable[[Evidence], np.ndarray], ...] = (
    lambda e: e.handed,
    lambda e: e.handed - e.penalty,
    lambda e: e.reference,
)


class Level(NamedTuple):
    """A choice of vectors that get one coefficient each.

    `columns`: the vectors of an update, as they should count; `at`: of each a row that tells its counts. `words`:
    factors of the rows that are in the columns, `by_row`. `is_inside`: the model's own losses are in the columns too.
    """

    name: str
    form: Form
    columns: Callable[[Basis], list[np.ndarray]]
    at: Callable[[Basis], np.ndarray]
    words: str = ""
    by_row: Callable[[Basis], np.ndarray] | None = None
    is_inside: bool = False


class _Block(NamedTuple):
    """Vectors of one quantity in one update: the row of each in the counts, the meant and the solved coefficients."""

    vectors: list[np.ndarray]
    at: np.ndarray
    meant: np.ndarray
    numbers: np.ndarray = np.zeros(0)
    slack: np.ndarray = np.zeros(0)


class _Solved(NamedTuple):
    """The solution of one update; `fixed` is the part of the gradient without a coefficient."""

    basis: Basis
    fixed: np.ndarray
    blocks: dict[str, _Block]


class Said(NamedTuple):
    """Errors, their cost and the gradients that they make; `rests`: as in `Explanation`."""

    errors: list[Error]
    cost: float
    made: list[np.ndarray | None]
    rests: list[list[np.ndarray | None]]


def solve(level: Level, bases: list[Basis], fits: float) -> Iterator[Said]:
    """Yield what makes the gradients of all these updates, with as little else in the sum as does."""
    has_penalty = any(basis.has_penalty for basis in bases)
    if has_penalty and level.name in ("the update", "each microbatch") and not level.is_inside:
        yield from solve(level._replace(is_inside=True), bases, fits)
    befores = (None, *_BEFORE) if any(basis.before for basis in bases) else (None,)
    for before, with_penalty in product(befores, (False, True) if has_penalty and not level.is_inside else (False,)):
        solved = []
        for basis in bases:
            if (own := _solved(level, basis, fits, before, with_penalty)) is None:
                break
            solved.append(own)
        else:
            known = [each for each in solved if before is None or "before" in each.blocks]
            at = {id(each.basis): i for i, each in enumerate(known)}
            places = [at.get(id(basis)) for basis in bases]
            for said in _said(level, known) if before is None or len(known) > 1 else ():
                made, *rests = ([None if i is None else own[i] for i in places] for own in (said.made, *said.rests))
                yield said._replace(made=made, rests=rests)
            return


def _solved(
    level: Level, basis: Basis, fits: float, before: Callable[[Evidence], np.ndarray] | None, with_penalty: bool
) -> _Solved | None:
    e, at = basis.e, level.at(basis)
    meant = np.full(len(at), basis.unit) * (basis.counts["the row's own weight"] != 0 if level.name == "rows" else 1)
    columns, share = level.columns(basis), np.zeros(len(at))
    if level.is_inside:  # each piece's loss has its part of it
        share = basis.counts["the weight of the own microbatch"][at] / (e.whole[0] or 1) if len(at) > 1 else np.ones(1)
    vectors = [(column + own * e.penalty) / basis.unit for column, own in zip(columns, share, strict=True)]
    blocks = {"rows": _Block(vectors, at, meant)}
    if with_penalty and basis.has_penalty:
        blocks["penalty"] = _Block([e.penalty], np.zeros(1, int), np.ones(1))
    if before is not None and basis.before is not None:
        blocks["before"] = _Block([before(basis.before)], np.zeros(1, int), np.zeros(1))
    fixed = np.zeros_like(e.penalty) if level.is_inside or "penalty" in blocks else e.penalty
    vectors = [vector for block in blocks.values() for vector in block.vectors]
    if len(vectors) > MOST_ROWS + 2 or len(vectors) + SPARE > len(e.handed):
        return None
    numbers, loose = least(vectors, e.handed - fixed)
    if not np.all(np.isfinite(numbers)) or e.apart(fixed + numbers @ np.stack(vectors)) > fits:
        return None
    slack = fits * max(float(np.linalg.norm(e.handed)), e.scale) * loose
    ends = np.cumsum([len(block.vectors) for block in blocks.values()])[:-1]
    found = zip(blocks.items(), np.split(numbers, ends), np.split(slack, ends), strict=True)
    return _Solved(basis, fixed, {n: block._replace(numbers=own, slack=off) for (n, block), own, off in found})


class _Series(NamedTuple):
    """The coefficients of one quantity in all updates that have it, with what may be known of them."""

    numbers: np.ndarray
    slack: np.ndarray
    meant: np.ndarray
    counts: dict[str, np.ndarray]
    sets: dict[str, np.ndarray]
    kinds: dict[str, np.ndarray]

    def read(self, *, is_plain: bool) -> list[Reading]:
        """Return these numbers in words."""
        return readings(self.numbers, self.slack, self.counts, self.meant, is_plain=is_plain)

    def of(self, some: np.ndarray) -> "_Series":
        """Return some of them."""
        numbers, columns = self[:3], [{name: own[some] for name, own in each.items()} for each in self[3:]]
        return _Series(*(own[some] for own in numbers), *columns)


def _series(solved: list[_Solved], quantity: str) -> _Series:
    own = [(each.basis, each.blocks[quantity]) for each in solved if quantity in each.blocks]

    def joined(name: str) -> dict[str, np.ndarray]:
        every = [{n: column[block.at] for n, column in getattr(basis, name).items()} for basis, block in own]
        return {n: np.concatenate([each[n] for each in every]) for n in every[0] if all(n in each for each in every)}

    numbers, slack, meant = (np.concatenate([block[i] for _, block in own]) for i in (3, 4, 2))
    return _Series(numbers, slack, meant, *map(joined, ("counts", "sets", "kinds")))


def _said(level: Level, solved: list[_Solved]) -> Iterator[Said]:
    """Yield the coefficients in words: of the rows, of the penalty, of the gradient before."""
    series = _series(solved, "rows")
    rows, penalties, befores = _of_rows(level, series), [_RIGHT], [_RIGHT]
    if any("penalty" in each.blocks for each in solved):
        own = _series(solved, "penalty")
        penalties = own.read(is_plain=True) or [Reading(2.5, listed(own.numbers), "number", own.numbers)]
    has_before = "before" in solved[0].blocks
    if has_before:
        own = _series(solved, "before")
        some = np.abs(own.numbers) > own.slack  # not where a sum begins anew
        befores = own.of(some).read(is_plain=True) if some.sum() > 1 else []
    for said in product(rows[:3], penalties[:2], befores[:2]):
        yield _combined(level, solved, *said)
    if has_before or (rows and rows[0].cost <= 2):
        return
    yield from _clipped(level, solved, series, penalties[0])
    num_levels = len(set(np.round(series.numbers / np.abs(series.numbers).max(), 2)))
    is_few = level.name != "rows" or num_levels <= max(2, len(series.numbers) // 10)
    ratios = np.divide(series.numbers, series.meant, out=np.ones_like(series.meant), where=series.meant != 0)
    is_known = (series.meant != 0) & (series.slack <= _KNOWN * np.abs(series.meant))  # others have hardly a gradient
    ratios = np.where(np.abs(ratios) < _ZERO * np.abs(ratios[is_known]).max(initial=0.0), 0.0, ratios)
    in_order, differing = ratios[: len(solved[0].blocks["rows"].numbers)], farthest_first(ratios[is_known])
    if not rows and is_few and len(differing) and level.form == BASE and level.name in _WHOSE:
        shown = in_order if level.name == "each microbatch" and len(in_order) <= 4 else differing
        told = f"{listed(shown)} times {MEANT}, {_WHOSE[level.name]}{_CUT * (level.name == 'rows' and 0 in differing)}"
        raw = Reading(RAW + 0.5 * (level.name != "the update"), told, "number", series.numbers)
        yield _combined(level, solved, raw, penalties[0], _RIGHT)


def _of_rows(level: Level, series: _Series) -> list[Reading]:
    """Return the rows' factors in words: one fraction for all of them, or another one for some."""
    found = series.read(is_plain=level.name != "rows")
    if (found and found[0].cost <= 2) or level.name in ("the update", "shape"):
        return found
    for name, some in series.sets.items():
        if some.all() or not some.any() or (level.name != "rows" and "row" in name):
            continue
        inside, outside = (series.of(own).read(is_plain=True) for own in (some, ~some))
        for a, b in product(inside[:2], outside[:1]):
            if a.key != b.key:
                both = np.zeros_like(series.numbers)
                both[some], both[~some] = a.values, b.values
                told = f"{a.text} for {name}, {b.text} for the others"
                found.append(Reading(1 + 0.5 * (a.cost + b.cost), told, f"{a.key} | {b.key}", both))
    by_row = by_kind(*series[:2], series.counts, series.kinds) if level.name == "rows" and level.form == BASE else []
    return sorted(found or by_row, key=lambda reading: reading.cost)


def _combined(level: Level, solved: list[_Solved], rows: Reading, penalty: Reading, before: Reading) -> Said:
    """Return the errors of these readings, their cost, and the gradients that they make."""
    errors, bases = list(level.form.errors), [each.basis for each in solved]
    cost = rows.cost + penalty.cost + before.cost + len(errors) + bool(level.words)
    of_rows = np.split(rows.values, np.cumsum([len(each.blocks["rows"].vectors) for each in solved])[:-1])
    counted = []
    for basis, own in zip(bases, of_rows, strict=True):
        by_row = (
            own * np.ones(sum(basis.sizes)) if level.name != "each microbatch" else basis.by_row(level.at(basis), own)
        )
        counted.append(by_row if level.by_row is None else by_row * level.by_row(basis))
    if not rows.is_right or level.words:
        names, before_it = _names_of_rows(bases, counted), list[Error]()
        if not names and (names := _names_of_rows(bases, counted, is_of_last=True)):
            before_it = [Error("the microbatches of the pass before", "are left out", ("last window dropped",))]
        ratios = np.concatenate([own / basis.unit for own, basis in zip(of_rows, bases, strict=True)])
        names = names or (_names_of_scale(bases, ratios) if level.name == "the update" else ())
        is_full = rows.is_right or rows.key == "none" or MEANT in rows.text or " for " in rows.text
        right = "" if is_full else f" instead of {'1 / the weight of the update' if bases[0].is_divided else '1'}"
        told = "" if rows.is_right else rows.text + right
        told = bases[0].worded(", ".join(each for each in (told, level.words) if each))
        if errors and not names:  # a number of the form
            errors[-1] = replace(errors[-1], number=f"{errors[-1].number} and counts {told}".strip())
        else:
            errors += [Error("each row's gradient", "counts", names, told), *before_it]
        is_even = not level.words and np.ptp(ratios) <= SOLVED * np.abs(ratios).max()
        cost += is_even and not names and rows.key not in ("none", "number")  # a fraction may be it by chance
    if not penalty.is_right and _is_in_rows(bases, counted, penalty.values):
        cost -= penalty.cost
    elif not penalty.is_right:
        names = _names_of_penalty([each.basis for each in solved if "penalty" in each.blocks], penalty.values)
        told = penalty.text.replace(f"{MEANT} /", "1 /")
        errors.append(Error("the penalty", f"counts {told} instead of once", names))
    if not before.is_right:
        is_sum = before.key.startswith("1.0:")
        errors = errors if is_sum else [*level.form.errors]  # of a moving average its own rows' number is a part
        names = ("not reset",) if is_sum else ("momentum by hand",)
        errors.append(Error("the gradient handed over before", "is added, times", names, before.text))
    blocks = [_BLOCK_OF.get(error.quantity, "rows") for error in errors]
    are_apart = 1 < len(errors) == len({*blocks})
    made, rests, at = list[np.ndarray | None](), [list[np.ndarray | None]() for _ in errors if are_apart], 0
    for each, own in zip(solved, of_rows, strict=True):
        numbers = {"rows": own, "penalty": penalty.values[at : at + 1]}
        at += "penalty" in each.blocks
        numbers |= {"before": each.blocks["before"].numbers} if "before" in each.blocks else {}
        parts = {name: numbers[name] @ np.stack(block.vectors) for name, block in each.blocks.items()}
        made.append(whole := sum(parts.values(), each.fixed))
        once, reference = each.basis.e.penalty, each.basis.e.reference
        should = {"rows": reference - (0 if level.is_inside else once), "penalty": once, "before": 0 * once}
        for rest, block in zip(rests, blocks, strict=False):
            rest.append(whole + (should[block] - parts[block] if block in parts else 0))
    return Said(errors, cost, made, rests)


def _is_in_rows(bases: list[Basis], counted: list[np.ndarray], penalty: np.ndarray) -> bool:
    """Whether the penalty has the factor of the rows: then both are parts of one loss."""
    weights = [basis.counts["the row's own weight"] for basis in bases]
    own = [
        np.sum(each * weight) if basis.is_divided else np.mean(each[weight != 0])
        for each, weight, basis in zip(counted, weights, bases, strict=True)
    ]
    return len(own) == len(penalty) and bool(np.all(np.abs(np.array(own) - penalty) <= 1e-2 * np.abs(penalty)))


def _clipped(level: Level, solved: list[_Solved], series: _Series, penalty: Reading) -> Iterator[Said]:
    """Yield that each vector is shortened to one norm, if the longer ones are."""
    is_plain = level.name == "the update"
    if level.name not in ("the update", "each microbatch") or (is_plain and level.form == BASE and penalty.is_right):
        return
    blocks = [(each.basis, each.blocks["rows"]) for each in solved]
    whole = series.counts["the weight of the update"]
    share = 1 if is_plain else series.counts["the weight of the own microbatch"] / whole
    parts = np.array([np.linalg.norm(vector) for _, block in blocks for vector in block.vectors]) * series.meant
    even = np.concatenate([np.full(len(b.vectors), basis.unit / len(b.vectors)) for basis, b in blocks]) / share
    # A mean, in a sum by rows or a mean of the pieces' means; a part of the update's gradient; a sum, divided at last.
    for base, by in ((series.meant, share), (even, share), (series.meant, 1), (series.meant, 1 / whole)):
        ratios, norms = series.numbers / base, parts / by
        is_cut = ratios < 1 - SOLVED
        if is_cut.sum() < 2 or np.any(ratios > 1 + SOLVED) or np.any(ratios <= 0):
            continue
        lengths = ratios * norms
        bound = float(np.median(lengths[is_cut]))
        if np.ptp(lengths[is_cut]) > SAME * bound or np.any(lengths > bound * (1 + SAME)):
            continue
        cut = Reading(0, "", "right", np.minimum(1.0, bound / norms) * base)
        errors, cost, made, _ = _combined(level, solved, cut, penalty, _RIGHT)
        if is_plain and not errors:  # the clip alone, which may be meant: `clips` has it
            continue
        if is_plain:
            told = f"{errors[-1].number} and the gradient is clipped to the norm {bound:.4g}".strip()
            errors[-1] = replace(errors[-1], number=told)
        else:
            of = f"the gradient of {blocks[0][0].worded(level.name)}"
            errors.append(Error(of, "is clipped to the norm", ("clip per microbatch",), f"{bound:.4g}"))
        yield Said(errors, cost + 1.2, made, [])
        return


def _names_of_rows(bases: list[Basis], counted: list[np.ndarray], *, is_of_last: bool = False) -> tuple[str, ...]:
    """Return the field's names for these factors; `is_of_last`: rows of the pass before the last are in no update."""
    tables = [_known(basis, bases, is_of_last) for basis in bases]
    used = [basis.counts["the row's own weight"] > 0 for basis in bases]
    if is_of_last:
        rests = [basis.sets[f"the {_REST}"] for basis in bases]
        if all(map(np.all, rests)) or any(np.any(own[~rest]) for own, rest in zip(counted, rests, strict=True)):
            return ()
        used = [own & rest for own, rest in zip(used, rests, strict=True)]

    def is_so(name: str, way: int) -> bool:
        every = zip(counted, tables, used, strict=True)
        return all(np.allclose(own[rows], table[name][way][rows], rtol=SAME, atol=0) for own, table, rows in every)

    num_ways = {name: min(len(table.get(name, [])) for table in tables) for name in tables[0]}
    return tuple(name for name, num in num_ways.items() if any(is_so(name, way) for way in range(num)))


def _known(basis: Basis, bases: list[Basis], is_of_last: bool) -> dict[str, list[np.ndarray]]:
    """Return the factors of the rows by each cause that is possible here: one array for each way to write it."""
    counts, sets = basis.counts, basis.sets
    whole, own = counts["the weight of the update"], counts["the weight of the own microbatch"]
    num, full = counts["the number of microbatches"], counts["the weight of a full batch"]
    usual = counts["the microbatches of a full window"]
    last, first, rest = (sets[f"the {n}"].astype(float) for n in ("last microbatch", "first microbatch", _REST))
    weight, lane = counts["the row's own weight"], counts["the weight of the own replica"] * counts[_REPLICAS]
    has_windows = bases[0].e.meant.usual > max(each.e.num_replicas for each in bases)
    if is_of_last:
        whole = np.full_like(whole, (weight * rest).sum())
        num = np.full_like(num, rest[basis.starts].sum())
    with np.errstate(divide="ignore", invalid="ignore"):
        found = {
            "mean of means": [1 / (own * num), 1 / lane, *[1 / (own * np.minimum(num, usual))] * bool(np.ptp(own))],
            "padding counted": [1 / (whole + sum(basis.e.pads))],
            **({"divided by a full window": [1 / (own * usual)]} if has_windows else {}),
            "divided by the full batch": [1 / full],
            "never divided": [np.ones_like(whole)],
            "mean of row means": [1 / (counts["the rows with a weight"] * weight)],
            "divided by the rows": [1 / counts["its rows"]],
            "ascent": [-1 / whole],
        }
        if any(len(each.sizes) > each.e.num_replicas for each in bases):
            found |= {
                "summed over microbatches": [1 / own],
                "divided twice": [1 / (whole * num)],
                "only the last microbatch": [last / own, last / (own * num), last / whole],
                "only the first microbatch": [first / own, first / whole],
                "first microbatch lost": [(1 - first) / (own * num), (1 - first) / whole],
                "last microbatch lost": [(1 - last) / (own * num), (1 - last) / whole],
            }
        if any(each.e.num_replicas > 1 for each in bases):
            found["summed over replicas"] = [counts[_REPLICAS] / each for each in (lane, whole)]
            found["divided by the replicas twice"] = [1 / (whole * counts[_REPLICAS])]
        if not all(each.sets[f"the {_REST}"].all() for each in bases):
            found["last window dropped"] = [rest / (weight * rest).sum(), rest / full]
        if basis.e.meant.replay.data[2] is not None:
            found["divided by the weights"] = [1 / counts["the sum of the sample weights"]]
        if counts["its places"][0]:
            found["padded places counted"] = [1 / counts["its places"]]
    return found


def _names_of_scale(bases: list[Basis], factors: np.ndarray) -> tuple[str, ...]:
    """Return the cause of a factor on a whole gradient in half precision, or with a scaled loss."""
    middle, meant = float(np.median(factors)), bases[0].e.meant
    if meant.scales:
        at = {"loss scale left in": middle, "loss not scaled": 1 / middle if middle else 0.0}
        fits = meant.replay.tolerance.differs
        return tuple(name for name, factor in at.items() if any(abs(factor / s - 1) <= fits for s in meant.scales))
    is_scaled = meant.is_scaled or (meant.replay.is_half and not meant.replay.hears_scales)
    if not is_scaled or middle <= 0:
        return ()
    if not 1 / _LEAST_SCALE < middle < _LEAST_SCALE:
        return ("loss scale left in" if middle > 1 else "loss not scaled",)
    power = np.log2(middle)
    return ("loss scale frozen in a trace",) * bool(meant.is_scaled and abs(power - np.round(power)) < 0.05)


def _names_of_penalty(bases: list[Basis], counted: np.ndarray) -> tuple[str, ...]:
    """Return the field's names for these factors of the model's own losses."""
    own = [(basis, number) for basis, number in zip(bases, counted, strict=True) if basis.has_penalty]
    replicas = max(basis.e.num_replicas for basis in bases)
    ways = {
        "penalty forgotten": lambda basis: 0.0,
        "penalty once per replica": lambda basis: float(basis.e.num_replicas if replicas > 1 else 1),
        "penalty once per microbatch": lambda basis: float(len(basis.sizes) if replicas == 1 else 1),
        "penalty added twice": lambda basis: 2.0,
        "penalty divided": lambda basis: 1 / (len(basis.sizes) if replicas == 1 else 1),
    }

    def is_so(way: Callable[[Basis], float]) -> bool:
        is_other = any(way(basis) != 1 for basis, _ in own)
        return is_other and all(abs(way(basis) - number) < 1e-2 for basis, number in own)

    return tuple(name for name, way in ways.items() if is_so(way))
