"""Two runs compared: the result, its text, and its data."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby
from typing import Any

from stepcheck.differences import (
    ComparedModel,
    ComparedUpdate,
    Difference,
    Kind,
    Part,
    Relation,
)
from stepcheck.report.words import listed, many, number

SCHEMA = 1
_MOST = 64  # in a fraction
_ORDER = "pass shuffle=False in both, or set one seed before each"
_SEED = "set one seed before each run (keras.utils.set_random_seed, torch.manual_seed)"
_SAYS = {
    Kind.OTHER_ORDER: f"both runs use the same rows, in other updates. To compare them, {_ORDER}",
    Kind.OTHER_CUT: "it has {0:g} rows in a, and {1:g} in b",
    Kind.OTHER_ROWS: "it has other rows",
    Kind.FEWER_UPDATES: "a has {0:g} updates, and b has {1:g}",
    Kind.OTHER_MODE: "the model is called in another mode (training or inference)",
    Kind.OTHER_DRAWS: f"the passes draw other random numbers. To compare the runs, {_SEED}",
    Kind.OTHER_OUTPUTS: "the outputs differ, for the same rows and weights",
    Kind.OTHER_LOSS: "the outputs are equal, and the loss of them is another one (its function, "
    "its labels or its weights)",
    Kind.AFTER_LOSS: "the derivative of the loss by the outputs is equal, and the gradient is not: "
    "more is added to it, or it is changed before the step",
    Kind.OTHER_GRADIENT: "the gradient differs",
    Kind.NO_GRADIENT: "some parameters have a gradient in one run alone",
    Kind.OTHER_RATE: "the learning rate differs",
    Kind.OTHER_STEP: "the gradient is the same, and the weights move otherwise",
    Kind.OTHER_WEIGHTS: "the runs begin with other weights. To compare them, give both models the "
    "same weights",
    Kind.WRITTEN: "the weights are changed after the step, otherwise in each run",
    Kind.OTHER_STATISTICS: "the statistics of layers differ afterwards",
    Kind.OTHER_SLOTS: "the optimizer's state differs afterwards",
}
_RELATIONS = {
    Relation.EQUAL: "equal",
    Relation.DIFFERS: "DIFFERS",
    Relation.NO_EFFECT: "differs, without effect",
    Relation.FOLLOWS: "follows",
    Relation.BY_ROUNDING: "apart by rounding",
    Relation.UNJUDGED: "not compared",
}
_PARTS = {
    Part.ROWS: "rows",
    Part.MODE: "mode",
    Part.OUTPUTS: "outputs",
    Part.GRADIENT: "gradient",
    Part.STEP: "optimizer step",
    Part.STATE: "state",
}


@dataclass(frozen=True)
class Comparison:
    """Where two runs begin to differ: print it.

    Attributes:
        models: the comparison of each model that both runs train.
        unmatched: names of models that one run trains alone.
        versions: of packages that have another version in each run, both.
    """

    models: tuple[ComparedModel, ...]
    unmatched: tuple[str, ...] = ()
    versions: tuple[tuple[str, str, str], ...] = ()

    @property
    def differences(self) -> list[Difference]:
        """All differences, the earliest first; those of other models after it follow."""
        found = [each for model in self.models for each in model.differences]
        first = min(found, key=lambda each: each.order, default=None)
        owner = next(
            (model for model in self.models if first in model.differences), None
        )
        return [] if owner is None else [*owner.differences]

    @property
    def first(self) -> Difference | None:
        """The first difference; None if there is none."""
        return next(iter(self.differences), None)

    @property
    def first_line(self) -> str:
        """The summary."""
        return _first_line(self)

    @property
    def is_equal(self) -> bool:
        """Whether updates were compared, and nothing differs but by rounding."""
        return bool(self.models) and not self.differences and bool(self.compared)

    @property
    def compared(self) -> list[Part]:
        """The parts that were compared in an update at least."""
        known = (Relation.UNJUDGED, Relation.FOLLOWS)
        found = {
            part
            for model in self.models
            for update in model.updates
            for part, judged in update.parts.items()
            if judged.relation not in known
        }
        return [part for part in Part if part in found]

    def require(self) -> None:
        """Raise unless both runs are equal: for a test.

        Raises:
            AssertionError: something differs, or no update was compared; its text says
                what.
        """
        if not self.is_equal:
            raise AssertionError(str(self))

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as data: dicts, lists, strings, numbers and None."""
        return {
            "schema": SCHEMA,
            "is_equal": self.is_equal,
            "differences": [_difference(each) for each in self.differences],
            "models": [_model(each) for each in self.models],
            "unmatched": [*self.unmatched],
            "versions": [[*each] for each in self.versions],
        }

    def __str__(self) -> str:
        return "\n\n".join(_paragraphs(self))

    __repr__ = __str__


def _paragraphs(found: Comparison) -> Iterator[str]:
    yield _first_line(found)
    for model in found.models:
        if len(found.models) > 1:
            yield f"{' / '.join(dict.fromkeys(model.names))}:"
        if model.updates:
            yield _table(model.updates)
    yield from (_told(each) for each in found.differences)
    rest = [*_rest(found)]
    if rest:
        yield "\n".join(rest)


def _first_line(found: Comparison) -> str:
    first = found.first
    if first is not None:
        where = f"from {_place(first)} on, first in the {_PARTS[first.part]}"
        return f"The runs differ {where}: {_says(first)}."
    nums = [model.num_updates[0] for model in found.models]
    if not found.is_equal:
        return "Nothing was compared: no update of a model was seen in both runs."
    apart = [
        judged.apart
        for model in found.models
        for update in model.updates
        for judged in update.parts.values()
        if judged.relation in (Relation.EQUAL, Relation.BY_ROUNDING)
    ]
    largest = max((each for each in apart if not math.isnan(each)), default=0.0)
    parts = ", ".join(_PARTS[part] for part in found.compared)
    num = many(max(nums), "update")
    return f"The runs are equal: {num}, {parts}. Largest distance: {largest:.2g}."


def _place(difference: Difference) -> str:
    return f"update {difference.update}" if difference.update else "the beginning"


def _says(difference: Difference) -> str:
    """Return what differs, in words."""
    counts, rows = difference.counts, difference.where.rows
    if difference.kind is Kind.MULTIPLE:
        return f"the gradient in a is {_count(counts[0])} times that in b"
    if difference.kind is not Kind.ROWS_COUNT:
        return _SAYS[difference.kind].format(*counts)
    if max(counts) - min(counts) <= 1e-3 * max(map(abs, counts)):
        return f"in a, {_which(rows)} {_count(counts[0])} times what it counts in b"
    named = zip(rows or range(len(counts)), counts, strict=True)
    each = listed(tuple(f"row {row} {_count(count)}" for row, count in named), 4)
    return f"rows count otherwise, as multiples of what they count in b: {each}"


def _which(rows: tuple[int, ...]) -> str:
    return f"each of the rows {listed(rows)} counts" if rows else "each row counts"


def _count(factor: float) -> str:
    """Return a factor as a fraction of small numbers, if it is one.

    >>> _count(0.25), _count(3.7123)
    ('1/4', '3.712')
    """
    near = (
        Fraction(factor).limit_denominator(_MOST)
        if math.isfinite(factor)
        else Fraction(0)
    )
    is_near = (
        abs(float(near) - factor) <= 1e-4 * abs(factor) and abs(near.numerator) <= _MOST
    )
    return str(near) if is_near else f"{factor:.4g}"


def _table(updates: tuple[ComparedUpdate, ...]) -> str:
    """Return the relations of all parts; consecutive updates with the same ones in one
    column.
    """
    columns = [["update", *(_PARTS[part] for part in Part)]]
    for relations, group in groupby(_sticky(updates), lambda each: each[1]):
        own = [number for number, _ in group]
        name = f"{own[0]} to {own[-1]}" if len(own) > 1 else str(own[0])
        columns.append([name, *relations])
    widths = [max(map(len, column)) for column in columns]
    lines = (
        "  ".join(
            cell.ljust(width) for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in zip(*columns, strict=True)
    )
    return "\n".join(f"   {line}" for line in lines)


def _sticky(updates: tuple[ComparedUpdate, ...]) -> Iterator[tuple[int, list[str]]]:
    """Yield (number, relations) of each update; a part that is apart by rounding stays
    so.
    """
    apart: set[Part] = set()
    for update in updates:
        relations = {part: update.parts[part].relation for part in Part}
        apart |= {
            part for part, each in relations.items() if each is Relation.BY_ROUNDING
        }
        for part in apart:
            if relations[part] is Relation.EQUAL:
                relations[part] = Relation.BY_ROUNDING
        yield update.number, [_RELATIONS[each] for each in relations.values()]


def _told(difference: Difference) -> str:
    """Return the text of one difference: its numbers and its place."""
    lines = [f"{_PARTS[difference.part]}, {_place(difference)}: {_says(difference)}."]
    if difference.numbers:
        rows = [("", "a", "b")]
        rows += [
            (number(n), f"{n.observed:.6g}", f"{n.expected:.6g}")
            for n in difference.numbers
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += [
            f"   {name.ljust(widths[0])}  {a.rjust(widths[1])}  {b.rjust(widths[2])}".rstrip()
            for name, a, b in rows
        ]
    lines += [f"   {name}: {value}" for name, value in _facts(difference)]
    return "\n".join(lines)


def _facts(difference: Difference) -> Iterator[tuple[str, str]]:
    where = difference.where
    if math.isfinite(difference.apart):
        yield "relative distance", f"{difference.apart:.2g}"
    if where.rows:
        yield "rows of the update", listed(where.rows)
    if where.parameters:
        yield "in", listed(where.parameters)
    if where.outputs:
        yield "outputs", listed(where.outputs)
    for side, line in zip("ab", difference.lines, strict=True):
        if line is not None:
            yield f"code of {side}", str(line)


def _rest(found: Comparison) -> Iterator[str]:
    """Yield the parts that were not compared, and other versions."""
    for model in found.models:
        if model.left:
            yield f"Not compared, as a part of them is kept: {listed(model.left)}."
        updates = [
            each.number
            for each in model.updates
            if Relation.BY_ROUNDING
            in {judged.relation for judged in each.parts.values()}
        ]
        if updates:
            yield f"From update {updates[0]} on the runs are apart by rounding, which grows."
    if found.unmatched:
        yield f"Trained in one run alone, and not compared: {listed(found.unmatched)}."
    yield from (f"{name}: {one} in a, {two} in b." for name, one, two in found.versions)


def _difference(each: Difference) -> dict[str, Any]:
    return {
        "part": each.part.value,
        "kind": each.kind.value,
        "update": each.update,
        "apart": _finite(each.apart),
        "rows": [*each.where.rows],
        "parameters": [*each.where.parameters],
        "outputs": [*each.where.outputs],
        "counts": [*map(_finite, each.counts)],
        "numbers": [
            {
                "what": n.what.name.lower(),
                "of": n.of,
                "a": _finite(n.observed),
                "b": _finite(n.expected),
            }
            for n in each.numbers
        ],
        "lines": [
            None if line is None else [line.file, line.number] for line in each.lines
        ],
        "text": _says(each),
    }


def _model(each: ComparedModel) -> dict[str, Any]:
    return {
        "names": [*each.names],
        "num_updates": [*each.num_updates],
        "left": [*each.left],
        "updates": [
            {
                "update": update.number,
                "num_rows": [*update.num_rows],
                "parts": {
                    part.value: {
                        "relation": judged.relation.value,
                        "apart": _finite(judged.apart),
                    }
                    for part, judged in update.parts.items()
                },
            }
            for update in each.updates
        ],
    }


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
