"""Two runs compared: the result, its text, and its data."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from fractions import Fraction
from itertools import groupby
from typing import Any

import numpy as np

from stepcheck.differences import (
    ComparedModel,
    ComparedUpdate,
    Difference,
    Judged,
    Kind,
    Part,
    Relation,
)
from stepcheck.report.schema import plain
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
}
_RELATIONS = {
    Relation.EQUAL: "equal",
    Relation.DIFFERS: "DIFFERS",
    Relation.NO_EFFECT: "differs, without effect",
    Relation.FOLLOWS: "follows",
    Relation.BY_ROUNDING: "equal",
    Relation.UNJUDGED: "not compared",
}
_PARTS = {part: part.value for part in Part} | {Part.STEP: "optimizer step"}


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
        """All differences of the model that differs first; those of others follow."""
        found = [
            model.differences for model in self.models if model.differences
        ]
        return [*min(found, key=lambda own: own[0].order, default=())]

    @property
    def first(self) -> Difference | None:
        """The first difference; None if there is none."""
        return next(iter(self.differences), None)

    @property
    def is_equal(self) -> bool:
        """Whether updates were compared, and nothing differs but by rounding."""
        return bool(self.compared) and not self.differences

    @property
    def compared(self) -> list[Part]:
        """The parts that were compared in an update at least."""
        known = (Relation.UNJUDGED, Relation.FOLLOWS)
        found = {
            part
            for part, judged in self._judged()
            if judged.relation not in known
        }
        return [part for part in Part if part in found]

    def _judged(self) -> Iterator[tuple[Part, Judged]]:
        for model in self.models:
            for update in model.updates:
                yield from update.parts.items()

    @property
    def first_line(self) -> str:
        """The summary."""
        first = self.first
        if first is not None:
            where = (
                f"from {_place(first)} on, first in the {_PARTS[first.part]}"
            )
            return f"The runs differ {where}: {_says(first)}."
        if not self.is_equal:
            return "Nothing was compared: no update of a model was seen in both runs."
        num = max(model.num_updates[0] for model in self.models)
        parts = ", ".join(_PARTS[part] for part in self.compared)
        largest = np.nanmax([judged.apart for _, judged in self._judged()])
        head = f"The runs are equal: {many(num, 'update')}, {parts}."
        return f"{head} Largest distance: {largest:.2g}."

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
        data = {
            "schema": SCHEMA,
            "is_equal": self.is_equal,
            "differences": [_difference(each) for each in self.differences],
            "models": [_model(each) for each in self.models],
            "unmatched": self.unmatched,
            "versions": self.versions,
        }
        return plain(data)

    def __str__(self) -> str:
        paragraphs = [self.first_line]
        for model in self.models:
            names = " / ".join(dict.fromkeys(model.names))
            title = f"{names}:\n\n" if len(self.models) > 1 else ""
            paragraphs += (
                [title + _table(model.updates)] if model.updates else []
            )
        paragraphs += [_told(each) for each in self.differences]
        return "\n\n".join(
            [*paragraphs, *filter(None, ["\n".join(_rest(self))])]
        )

    __repr__ = __str__


def _place(difference: Difference) -> str:
    return (
        f"update {difference.update}" if difference.update else "the beginning"
    )


def _says(difference: Difference) -> str:
    """Return what differs, in words."""
    counts, rows = difference.counts, difference.where.rows
    if difference.kind is Kind.MULTIPLE:
        return f"the gradient in a is {_count(counts[0])} times that in b"
    if difference.kind is not Kind.ROWS_COUNT:
        return _SAYS[difference.kind].format(*counts)
    if max(counts) - min(counts) <= 1e-3 * max(map(abs, counts)):
        which = f"each of the rows {listed(rows)}" if rows else "each row"
        return f"in a, {which} counts {_count(counts[0])} times what it counts in b"
    named = zip(rows or range(len(counts)), counts, strict=True)
    each = listed(
        tuple(f"row {row} {_count(count)}" for row, count in named), 4
    )
    return f"rows count otherwise, as multiples of what they count in b: {each}"


def _count(factor: float) -> str:
    """Return a factor as a fraction of small numbers, if it is one.

    >>> _count(0.25), _count(3.7123)
    ('1/4', '3.712')
    """
    if not math.isfinite(factor):
        return f"{factor:.4g}"
    near = Fraction(factor).limit_denominator(_MOST)
    is_near = (
        math.isclose(near, factor, rel_tol=1e-4)
        and abs(near.numerator) <= _MOST
    )
    return str(near) if is_near else f"{factor:.4g}"


def _aligned(rows: list[tuple[str, ...]]) -> str:
    """Return rows of cells as lines of columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            cell.ljust(width) for cell, width in zip(row, widths, strict=True)
        )
        for row in rows
    )
    return "\n".join(f"   {line.rstrip()}" for line in lines)


def _table(updates: tuple[ComparedUpdate, ...]) -> str:
    """Return the relations of all parts; consecutive updates with the same ones in one
    column.
    """
    columns = [["update", *_PARTS.values()]]
    for relations, group in groupby(updates, _relations):
        numbers = [update.update for update in group]
        name = (
            f"{numbers[0]} to {numbers[-1]}"
            if len(numbers) > 1
            else f"{numbers[0]}"
        )
        columns.append([name, *relations])
    return _aligned([*zip(*columns, strict=True)])


def _relations(update: ComparedUpdate) -> list[str]:
    return [_RELATIONS[update.parts[part].relation] for part in Part]


def _told(difference: Difference) -> str:
    """Return the text of one difference: its numbers and its place."""
    lines = [
        f"{_PARTS[difference.part]}, {_place(difference)}: {_says(difference)}."
    ]
    if difference.numbers:
        rows = [
            (number(n), f"{n.observed:.6g}", f"{n.expected:.6g}")
            for n in difference.numbers
        ]
        lines.append(_aligned([("", "a", "b"), *rows]))
    where, lines_of = difference.where, difference.lines
    apart = f"{difference.apart:.2g}" if math.isfinite(difference.apart) else ""
    facts = [
        ("relative distance", apart),
        ("rows of the update", listed(where.rows)),
        ("in", listed(where.parameters)),
        ("outputs", listed(where.outputs)),
        ("code of a", str(lines_of[0] or "")),
        ("code of b", str(lines_of[1] or "")),
    ]
    lines += [f"   {name}: {value}" for name, value in facts if value]
    return "\n".join(lines)


def _rest(found: Comparison) -> Iterator[str]:
    """Yield the parts that were not compared, and other versions."""
    for model in found.models:
        if model.left:
            yield f"Not compared, as a part of them is kept: {listed(model.left)}."
        for update in model.updates:
            if any(
                e.relation is Relation.BY_ROUNDING
                for e in update.parts.values()
            ):
                number = update.update
                yield f"From update {number} on the runs are apart by rounding, which grows."
                break
    if found.unmatched:
        yield f"Trained in one run alone, and not compared: {listed(found.unmatched)}."
    yield from (
        f"{name}: {one} in a, {two} in b." for name, one, two in found.versions
    )


def _difference(each: Difference) -> dict[str, Any]:
    return {
        "part": each.part,
        "kind": each.kind,
        "update": each.update,
        "apart": each.apart,
        "rows": each.where.rows,
        "parameters": each.where.parameters,
        "outputs": each.where.outputs,
        "counts": each.counts,
        "numbers": [
            {
                "what": n.what.name.lower(),
                "of": n.of,
                "a": n.observed,
                "b": n.expected,
            }
            for n in each.numbers
        ],
        "lines": [line and (line.file, line.number) for line in each.lines],
        "text": _says(each),
    }


def _model(each: ComparedModel) -> dict[str, Any]:
    known = asdict(each)
    del known["differences"]
    return known
