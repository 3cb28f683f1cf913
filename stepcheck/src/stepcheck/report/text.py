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

EXPECTED, WITH_ERROR = "meant", "meant, with this error"
Row = tuple[str, ...]


def first_line(verdict: Verdict) -> str:
    """Return the verdict in a line: the first finding, or the stages that were judged."""
    if verdict.findings:
        return heading(verdict.findings[0])
    if not verdict.has_seen or verdict.seen is None:
        reasons = [words.reason(each) for each in verdict.unjudged]
        return f"Nothing was judged: {reasons[0] if reasons else 'no update was seen'}."
    num = words.many(len(verdict.seen.updates), "update")
    left = [words.stage(stage) for stage in REQUIRED if stage not in verdict.judged]
    if not left:
        judged = ", ".join(map(words.stage, REQUIRED))
        where = " where they were judged" if verdict.unjudged else ""
        return f"{num}, all as meant{where}: {judged}.{_largest(verdict)}"
    judged = ", ".join(map(words.stage, verdict.judged)) or "nothing"
    return (
        f"Nothing found in {num}. Judged: {judged}. Not judged: "
        f"{', '.join(left)}.{_largest(verdict)}"
    )


def _largest(verdict: Verdict) -> str:
    """Return the largest distance of a gradient that is as meant, in words."""
    if not verdict.evidence:
        return ""
    fits, differs = verdict.evidence[0].meant.replay.tolerance
    apart = [e.without for e in verdict.evidence if e.without <= differs]
    largest, num = max(apart, default=0.0), words.many(len(apart), "gradient")
    return (
        f" Largest distance of {num} from what was meant: {largest:.2g} (rounding: up "
        f"to {fits:g})."
    )


def heading(finding: Finding) -> str:
    """Return a finding's name and its sentence."""
    name = words.name(finding.fault)
    return f"{name[0].upper()}{name[1:]}. {words.sentence(finding)}"


def text(case: Case, verdict: Verdict) -> str:
    """Return a report as text."""
    framework = case.port.engine()
    parts = [first_line(verdict)]
    parts += [
        _told(i, each, framework) for i, each in enumerate(verdict.findings, start=1)
    ]
    if verdict.unjudged:
        parts.append(
            "\n".join(["Not judged:", *(f"  - {each}" for each in _unjudged(verdict))])
        )
    parts.append(_looked_at(verdict, framework))
    if verdict.facts is not None:
        parts.append(
            "\n".join(
                ["Facts:", *(f"  {line}" for line in facts.aligned(verdict.facts))]
            )
        )
    return "\n\n".join(parts)


def _unjudged(verdict: Verdict) -> list[str]:
    return list(dict.fromkeys(map(words.reason, verdict.unjudged)))


def _looked_at(verdict: Verdict, framework: str) -> str:
    num = len(verdict.seen.updates) if verdict.seen is not None else 0
    batches = words.many(verdict.num_batches, "batch", "batches")
    failed = "".join(
        f" An error in the stage {words.stage(each)}: see as_json()."
        for each in verdict.failures
    )
    return (
        f"Looked at {words.many(num, 'update')} of {batches} of the data, on "
        f"{framework}.{failed}"
    )


def _told(number: int, finding: Finding, framework: str) -> str:
    """Return the text of one finding; the sentence of the first is the report's first
    line.
    """
    lines = [f"{number}. {words.stage(finding.stage)}: {words.name(finding.fault)}"]
    lines += [f"   {words.sentence(finding)}"] if number > 1 else []
    if finding.proof is not None:
        rows = _table(finding.proof, (EXPECTED, WITH_ERROR))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        padded = (
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
            for row in rows
        )
        lines += ["", *(f"   {line}".rstrip() for line in padded), ""]
    lines.append(f"   {_apart(finding)}")
    lines += [f"   {name}: {value}" for name, value in _more(finding, framework)]
    return "\n".join(lines)


def _table(proof: Proof, names: tuple[str, str]) -> list[Row]:
    """Return the numbers of a proof as rows of columns, after their names; without the
    last one if it is empty.
    """
    rows: list[Row] = [(f"update {proof.update}:", "yours", *names)]
    for number in proof.numbers:
        values = number.observed, number.expected, number.with_error
        rows.append(
            (
                words.number(number),
                *("-" if math.isnan(each) else f"{each:.6g}" for each in values),
            )
        )
    is_explained = not all(math.isnan(number.with_error) for number in proof.numbers)
    return rows if is_explained else [row[:3] for row in rows]


def _apart(finding: Finding) -> str:
    """Return both distances in words."""
    if math.isnan(finding.with_error):
        unknown = (
            "; no known error reproduces it" if finding.error is Error.UNLIKE else ""
        )
        return f"distance from what was meant {finding.apart:.2g}{unknown}"
    meant = f"distance from what was meant {finding.apart:.2g}"
    return f"{meant}; from that with this error {finding.with_error:.2g}"


def _more(finding: Finding, framework: str) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of the other facts of a finding."""
    where, change = finding.where, finding.change
    if where.updates:
        yield "in updates", words.listed(where.updates)
    if where.line is not None:
        yield "your code", str(where.line)
    if proposed := words.fix(change, framework):
        yield "fix", proposed


def html(case: Case, verdict: Verdict) -> str:
    """Return a report as a part of a page; without pictures if matplotlib is not
    installed.
    """
    framework = case.port.engine()
    parts = [f"<h1>{escape(first_line(verdict))}</h1>"]
    parts += [
        _section(i, each, framework) for i, each in enumerate(verdict.findings, start=1)
    ]
    parts += map(
        figure, pictures(case, verdict) if can_draw() and verdict.has_seen else []
    )
    if verdict.unjudged:
        items = "".join(f"<li>{_coded(line)}</li>" for line in _unjudged(verdict))
        parts.append(f"<h2>Not judged</h2><ul>{items}</ul>")
    if verdict.facts is not None:
        body = "".join(_pair(*fact) for fact in facts.told(verdict.facts))
        parts.append(f"<h2>Facts</h2><dl>{body}</dl>")
    missing = (
        "" if can_draw() else " The pictures need matplotlib: pip install matplotlib."
    )
    parts.append(
        f"<footer><p>{escape(_looked_at(verdict, framework) + missing)}</p></footer>"
    )
    return part_of_page(parts)


def _section(number: int, finding: Finding, framework: str) -> str:
    title = f"{number}. {words.stage(finding.stage)}: {words.name(finding.fault)}"
    parts = [f"<h2>{escape(title)}</h2>"]
    parts += [f"<p>{_coded(words.sentence(finding))}</p>"] if number > 1 else []
    if finding.proof is not None:
        head, *rows = _table(finding.proof, (EXPECTED, WITH_ERROR))
        body = "".join(f"<tr>{_cells('td', row)}</tr>" for row in rows)
        parts.append(
            f"<table><thead><tr>{_cells('th', head)}</tr></thead><tbody>{body}</tbody></table>"
        )
    parts.append(f"<p>{escape(_apart(finding)).capitalize()}.</p><dl>")
    parts += [_pair(*each) for each in _more(finding, framework)]
    return f"{''.join(parts)}</dl>"


def _pair(name: str, value: str) -> str:
    return f"<dt>{escape(name)}</dt><dd>{_coded(value)}</dd>"


def _cells(tag: str, texts: Row) -> str:
    return "".join(f"<{tag}>{escape(each)}</{tag}>" for each in texts)


def _coded(line: str) -> str:
    """Escape a line, and set the parts between backticks as code."""
    parts = escape(line).split("`")
    if len(parts) % 2 == 0:
        return escape(line)
    return "".join(
        f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts)
    )
