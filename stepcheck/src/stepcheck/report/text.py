"""A report as text, and as one page of HTML."""

import math
from collections.abc import Iterator
from html import escape

from stepcheck.faults import Error
from stepcheck.judge import REQUIRED, Case, Verdict
from stepcheck.report import facts, words
from stepcheck.report.page import can_draw, figure, part_of_page
from stepcheck.report.pictures import pictures
from stepcheck.values import Finding, Proof


def first_line(verdict: Verdict) -> str:
    """Return the verdict in a line: the first finding, or the stages that were judged."""
    if verdict.findings:
        found = verdict.findings[0]
        name = words.name(found.fault)
        return f"{name[0].upper()}{name[1:]}. {words.sentence(found)}"
    if not verdict.has_seen:
        reasons = [words.reason(each) for each in verdict.unjudged]
        return f"Nothing was judged: {reasons[0] if reasons else 'no update was seen'}."
    num = words.many(verdict.num_updates, "update")
    judged = ", ".join(map(words.stage, verdict.judged)) or "nothing"
    left = [
        words.stage(stage) for stage in REQUIRED if stage not in verdict.judged
    ]
    if left:
        told = f"Nothing found in {num}. Judged: {judged}. Not judged: {', '.join(left)}"
    else:
        where = " where they were judged" if verdict.unjudged else ""
        told = f"{num}, all as meant{where}: {judged}"
    return f"{told}.{_largest(verdict)}"


def _largest(verdict: Verdict) -> str:
    """Return the largest distance of a gradient that is as meant, in words."""
    tolerances = [e.meant.replay.tolerance for e in verdict.evidence]
    pairs = zip(verdict.evidence, tolerances, strict=True)
    apart = [e.without for e, own in pairs if e.without <= own.differs]
    if not apart:
        return ""
    num = words.many(len(apart), "gradient")
    return (
        f" Largest distance of {num} from what was meant: {max(apart):.2g} "
        f"(rounding: up to {tolerances[0].fits:g})."
    )


def text(case: Case, verdict: Verdict) -> str:
    """Return a report as text."""
    return "\n\n".join([first_line(verdict), *_blocks(case, verdict)])


def html(case: Case, verdict: Verdict) -> str:
    """Return a report as a part of a page; without pictures if matplotlib is not
    installed.
    """
    title = f"<h1>{escape(first_line(verdict))}</h1>"
    body = [f"<pre>{escape(block)}</pre>" for block in _blocks(case, verdict)]
    if not can_draw():
        body.append(
            "<p>The pictures need matplotlib: pip install matplotlib.</p>"
        )
    elif verdict.has_seen:
        body += map(figure, pictures(case, verdict))
    return part_of_page([title, *body])


def _blocks(case: Case, verdict: Verdict) -> Iterator[str]:
    """Yield the parts of a report after its first line."""
    framework = case.port.engine()
    for i, finding in enumerate(verdict.findings, start=1):
        yield "\n".join(_told(i, finding, framework))
    if verdict.unjudged:
        reasons = dict.fromkeys(map(words.reason, verdict.unjudged))
        yield "\n  - ".join(["Not judged:", *reasons])
    failed = [
        f" An error in the stage {words.stage(each)}: see as_json()."
        for each in verdict.failures
    ]
    num = words.many(verdict.num_updates, "update")
    batches = words.many(verdict.num_batches, "batch", "batches")
    looked_at = f"Looked at {num} of {batches} of the data, on {framework}."
    yield "".join([looked_at, *failed])
    if verdict.facts is not None:
        yield "\n  ".join(["Facts:", *facts.aligned(verdict.facts)])


def _told(number: int, finding: Finding, framework: str) -> Iterator[str]:
    """Yield the lines of one finding; the sentence of the first is the report's first
    line.
    """
    where = finding.where
    yield f"{number}. {words.stage(finding.stage)}: {words.name(finding.fault)}"
    if number > 1:
        yield f"   {words.sentence(finding)}"
    if finding.proof is not None:
        yield from ["", *_table(finding.proof), ""]
    told = f"distance from what was meant {finding.apart:.2g}"
    if not math.isnan(finding.with_error):
        told = f"{told}; from that with this error {finding.with_error:.2g}"
    elif finding.error is Error.UNLIKE:
        told = f"{told}; no known error reproduces it"
    yield f"   {told}"
    pairs = (
        ("in updates", words.listed(where.updates)),
        ("your code", where.line and str(where.line)),
        ("fix", words.fix(finding.change, framework)),
    )
    yield from (f"   {name}: {value}" for name, value in pairs if value)


def _table(proof: Proof) -> Iterator[str]:
    """Yield the lines of a table of a proof's numbers; without the last column if it is
    empty.
    """
    names = (
        f"update {proof.update}:",
        "yours",
        "meant",
        "meant, with this error",
    )
    rows: list[tuple[str, ...]] = [names]
    for number in proof.numbers:
        values = number.observed, number.expected, number.with_error
        columns = [
            "-" if math.isnan(value) else f"{value:.6g}" for value in values
        ]
        rows.append((words.number(number), *columns))
    if all(math.isnan(number.with_error) for number in proof.numbers):
        rows = [row[:3] for row in rows]
    first, *others = (
        max(map(len, column)) for column in zip(*rows, strict=True)
    )
    for name, *columns in rows:
        cells = map(str.rjust, columns, others)
        yield f"   {name.ljust(first)}  {'  '.join(cells)}"
