"""The table of the corpus: its rows, what counts as worse, and the page that sums it up."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from corpus.loops import ENGINES, FOLDER, Loop, Quantity

TABLE = FOLDER / "table.jsonl"
STAGES = "rows", "mode", "gradient", "step", "state"  # that are judged in a certified loop
SLACK = 5.0  # seconds


@dataclass(frozen=True)
class Found:
    """One finding of a report.

    Attributes:
        number: the relative distance from the update that was meant; None if it is not finite.
        line: in the loop's file; None if the finding has none.
        is_at_fault: whether the line is one of the fault's.
    """

    stage: str
    quantity: str
    error: str
    number: float | None
    line: int | None
    is_at_fault: bool


@dataclass(frozen=True)
class Row:
    """What stepcheck finds in one loop.

    Attributes:
        expected: the quantity of a fault; "" if it is none that is judged.
        also: the quantities of other faults of the same loop.
        findings: in the order of the stages; the first one counts.
        judged: the stages that were judged.
        seconds: of the processor, from the call to the verdict.
        not_run: why the loop could not be run here; "" if it could.
        failed: the error in which the loop or its judgement ended; "" if there was none.
    """

    name: str
    kind: str
    engine: str
    author: str
    expected: str
    findings: tuple[Found, ...] = ()
    judged: tuple[str, ...] = ()
    seconds: float = 0.0
    not_run: str = ""
    failed: str = ""
    also: tuple[str, ...] = ()

    @property
    def first(self) -> Found | None:
        """The finding that counts."""
        return self.findings[0] if self.findings else None

    @property
    def is_located(self) -> bool:
        """Whether the first finding has the stage and the quantity of the fault."""
        first = self.first
        if first is None or not self.expected:
            return False
        stage = Quantity[self.expected].stage
        return (first.stage, first.quantity) == (stage, self.expected)

    @property
    def is_at_fault(self) -> bool:
        """Whether it is located, at the line of the fault."""
        return self.is_located and self.findings[0].is_at_fault

    @property
    def found_beside(self) -> set[str]:
        """The quantities of other faults of the same loop that have a finding."""
        return {found.quantity for found in self.findings} & set(self.also)

    @property
    def is_certified(self) -> bool:
        """Whether a right loop has no finding, and all stages judged."""
        return self.kind == "right" and self._has_certificate

    @property
    def is_missed(self) -> bool:
        """Whether a fault that changes an update has no finding, though all stages were judged."""
        return bool(self.expected) and self._has_certificate

    @property
    def _has_certificate(self) -> bool:
        return not self.findings and set(STAGES) <= set(self.judged)

    @property
    def is_wrong(self) -> bool:
        """Whether a right loop has a finding, or a fault is located elsewhere."""
        first = self.first
        if first is None:
            return False
        is_known = first.quantity in (self.expected, *self.also)
        is_elsewhere = bool(self.expected) and not is_known
        return self.kind == "right" or is_elsewhere

    def __str__(self) -> str:
        first = self.first
        if self.not_run:
            told = f"not run: {self.not_run}"
        elif self.failed:
            told = f"failed: {self.failed}"
        elif first is None:
            told = "nothing found"
        else:
            place = "" if first.line is None else f"line {first.line}"
            number = "" if first.number is None else f"{first.number:g}"
            told = " ".join(filter(None, [first.stage, first.quantity, first.error, number, place]))
        judged = f"judged: {', '.join(self.judged) or 'no stage'}"
        parts = [self.name, self.kind, self.engine, told]
        parts += [] if self.not_run or self.failed else [judged, f"{self.seconds:.1f} s"]
        return " | ".join(parts)


def row(loop: Loop, found: dict) -> Row:
    """Return the row of a loop and what `corpus.present` found in it."""
    facts = dict(found)
    every = facts.pop("findings", ())
    places = [each["line"] in loop.fault_lines for each in every]
    findings = tuple(Found(**each, is_at_fault=at) for each, at in zip(every, places, strict=True))
    judged = tuple(facts.pop("judged", ()))
    expected = loop.quantity.name if loop.quantity else ""
    also = tuple(quantity.name for quantity in loop.also)
    known = (loop.name, loop.kind, loop.engine, loop.author, expected, findings, judged)
    return Row(*known, also=also, **facts)


def load(path: Path = TABLE) -> dict[str, Row]:
    """Return the rows of a table by name; none if there is no table."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = []
    for facts in map(json.loads, lines):
        findings = tuple(Found(**each) for each in facts.pop("findings"))
        several = {key: tuple(facts.pop(key)) for key in ("judged", "also")}
        rows.append(Row(findings=findings, **several, **facts))
    return {each.name: each for each in rows}


def save(rows: Iterable[Row], path: Path = TABLE) -> None:
    """Write rows into a table, sorted by name; a loop that was not run keeps its row."""
    kept = load(path)
    new = {each.name: each for each in rows if not each.not_run or each.name not in kept}
    every = kept | new
    path.write_text("".join(json.dumps(asdict(every[name])) + "\n" for name in sorted(every)))


def worse(before: dict[str, Row], now: Iterable[Row]) -> Iterator[str]:
    """Yield a line for each loop that is judged worse than before, if it was run.

    Names and sentences of findings are not compared. A fault that changes no update is not located,
    and only its seconds count.
    """
    for new in now:
        if new.not_run:
            continue
        if new.failed:
            yield f"{new.name}: {new.failed}"
            continue
        if new.kind == "right" and new.findings:
            yield f"{new.name}: a finding on a right loop ({new.findings[0].quantity})"
        old = before.get(new.name)
        if old is not None and not old.not_run and not old.failed:
            yield from (f"{new.name}: {change}" for change in _losses(old, new))


def _losses(old: Row, new: Row) -> Iterator[str]:
    """Yield what a loop's row has no longer."""
    if old.is_located and not new.is_located:
        yield f"no longer located ({new.expected})"
    elif old.is_at_fault and not new.is_at_fault:
        yield "no longer at the line of the fault"
    if missed := sorted(old.found_beside - new.found_beside):
        yield f"no longer found: {', '.join(missed)}"
    fewer = [stage for stage in STAGES if stage in old.judged and stage not in new.judged]
    if new.kind == "right" and fewer:
        yield f"no longer judged: {', '.join(fewer)}"
    if new.seconds > 2 * old.seconds and new.seconds > old.seconds + SLACK:
        yield f"{new.seconds:.1f} s of the processor, which were {old.seconds:.1f}"


def page(rows: Iterable[Row]) -> str:
    """Return the page that sums up a table, by engine and by author."""
    every = list(rows)
    groups = {engine: [row for row in every if row.engine == engine] for engine in ENGINES}
    for author in sorted({row.author for row in every}):
        groups[f"{author} author"] = [row for row in every if row.author == author]
    groups["all"] = every
    lines = [_sums(name, chosen) for name, chosen in groups.items()]
    return _PAGE + "\n".join(lines) + "\n"


_PAGE = """\
# The corpus

`corpus/` has training loops, right and faulty: by authors who did not know stepcheck, as posted in
public questions, and those of the test suite.
`python -m corpus` runs each under stepcheck, with the update stated that its author meant.
This page is made from its table by `python -m corpus --page`.

- *Located*: faults that change an update, or losses that are printed, and whose first finding has
  the right stage and quantity; in brackets those with the line of the fault, too.
- *Certified*: of the right loops, those without a finding, with all five stages judged.
- *Missed*: faulty loops that got a certificate, too.
- *Not judged*: loops whose gradients, or whose intention, could not be judged, without a finding.
- *Wrong*: right loops with a finding, and faults that are located elsewhere.
- *Seconds*: of the processor, of a loop and its judgement, the median and the longest.

| loops | located | certified | missed | not judged | wrong | seconds |
|---|---|---|---|---|---|---|
"""


def _sums(name: str, chosen: list[Row]) -> str:
    faulty = [row for row in chosen if row.expected]
    right = [row for row in chosen if row.kind == "right"]
    located = sum(row.is_located for row in faulty)
    at_fault = sum(row.is_at_fault for row in faulty)
    certified = sum(row.is_certified for row in right)
    not_judged = sum("gradient" not in row.judged and not row.findings for row in faulty + right)
    wrong = sum(row.is_wrong for row in faulty + right)
    seconds = sorted(row.seconds for row in chosen if not row.not_run) or [0.0]
    median = seconds[len(seconds) // 2]
    cells = (
        f"{name} ({len(chosen)})",
        f"{located} of {len(faulty)} ({at_fault})",
        f"{certified} of {len(right)}",
        str(sum(row.is_missed for row in faulty)),
        str(not_judged),
        str(wrong),
        f"{median:.1f}, {seconds[-1]:.1f}",
    )
    return f"| {' | '.join(cells)} |"
