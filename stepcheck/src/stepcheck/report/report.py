"""The report of an audit: causes as values, as text, and as one page of HTML."""

import math
import os
from collections.abc import Iterator
from dataclasses import asdict
from html import escape
from typing import Any

import numpy as np

from stepcheck.errors import SpecificationError, message, notify_if_long
from stepcheck.report.found import Found, Likely, Proof, many, some
from stepcheck.report.page import assert_drawable, can_draw, figure, part_of_page, write_page
from stepcheck.report.pictures import pictures
from stepcheck.report.progress import shown
from stepcheck.stages.gradients import HIDDEN
from stepcheck.stages.judge import Case, Verdict
from stepcheck.trace.log import OWN_TRAINER
from stepcheck.trace.rows import FEW_PASSES, NOTED

PATIENCE = 5.0  # seconds
REFERENCE, WITH_FAULT = "reference", "reference with this fault"
WITH_OTHERS, WITH_ALL = "reference with the other faults", "with this fault too"  # where a cause is one of several


class Report:
    """The findings of an audit; complete once its `with` has ended.

    >>> from stepcheck.report.report import Report
    >>> print(Report())
    The audit is not over: read its report after the `with`.
    """

    def __init__(self) -> None:
        self._case: Case | None = None
        self._verdict: Verdict | None = None
        self._printed: list[float] = []
        self.taken: list[str] = []
        self.unreached = ""
        self.elsewhere = ""  # in words, where the report is, if another process judges the loop

    @property
    def is_over(self) -> bool:
        """Whether the loop has ended, so that the report can be read."""
        return self._case is not None or bool(self.elsewhere)

    @property
    def causes(self) -> list[Found]:
        """The faults, the first stage that differs first; empty if nothing was found in the updates that were seen."""
        return self._judged().causes

    @property
    def notes(self) -> list[str]:
        """Observations that are no fault, or may be intended."""
        return self._judged().notes

    @property
    def unseen(self) -> list[str]:
        """Everything that the audit could not check."""
        return self._judged().unseen

    @property
    def has_seen(self) -> bool:
        """Whether at least one update on rows of the data was seen."""
        return self._judged().has_seen

    @property
    def is_judged(self) -> bool:
        """Whether the gradients of updates were judged, and no loop of the script after these was left out."""
        verdict = self._judged()
        return verdict.has_seen and verdict.has_loss and not verdict.unjudged and not self.unreached

    @property
    def has_likely(self) -> bool:
        """Whether a note is very likely the fault; the report begins with it if there is no cause."""
        return any(isinstance(note, Likely) for note in self.notes)

    @property
    def first_line(self) -> str:
        """The report in a line: a cause; a note that is very likely the fault; or the stages that were judged."""
        verdict = self._judged()
        if self.elsewhere:
            return self.elsewhere
        if verdict.causes:
            cause = verdict.causes[0]
            name = cause.name if cause.is_known else f"not known, but in the stage: {cause.stage}"
            return f"{name[0].upper()}{name[1:]}. {cause.explanation}"
        if self.has_likely:
            return next(note for note in verdict.notes if isinstance(note, Likely))
        if not verdict.has_seen or verdict.seen is None:
            why = verdict.unjudged or "no update on rows of the data was seen"
            return f"{OWN_TRAINER}." if OWN_TRAINER in verdict.unseen else f"Nothing can be said: {why}."
        num, judged = len(verdict.seen.updates), ", ".join(verdict.judged)
        why = "; ".join(each for each in (verdict.unjudged, self.unreached) if each)
        unjudged = f"Not judged: {why}. " if why else ""
        if not judged:
            return f"{unjudged}No stage was judged."
        some = f" (gradients of {len(verdict.evidence)})" if 0 < len(verdict.evidence) < num else ""
        of = "the other stages of " if verdict.unjudged else ""
        few = ", with a note on the rows" if any(note.startswith(NOTED) for note in verdict.notes) else ""
        few = ", but not the order of the rows, which takes two whole passes" if FEW_PASSES in verdict.notes else few
        others = sum(not all(piece.is_known for piece in update.pieces) for update in verdict.seen.updates)
        rest = f" Not judged: {others} of {many(num, 'update')}, whose rows are not in `data`." if others else ""
        num_asked = sum("?" in note for note in verdict.notes)
        asked = f" {many(num_asked, 'note asks', 'notes ask')} whether something is meant." if num_asked else ""
        judged += " were judged" if len(verdict.judged) > 1 or judged == "rows" else " was judged"
        found, first = ("Nothing else found", f"{verdict.unused} ") if verdict.unused else ("Nothing found", "")
        return f"{first}{unjudged}{found} in {of}{many(num, 'update')}{some}: {judged}{few}.{asked}{rest}"

    def printed(self, *, loss: object) -> None:
        """Pass the losses that the loop prints to the audit: of each pass over the data, or of the last one.

        Raises:
            SpecificationError: these are no numbers.
        """
        try:
            numbers = np.ravel(np.asarray(loss, "float64")).tolist()
        except (TypeError, ValueError) as error:
            must = "loss must be a number, or one for each pass over the data."
            raise SpecificationError(message(must, type(loss).__name__, "report.printed(loss=[0.7, 0.5]).")) from error
        if not numbers or not np.all(np.isfinite(numbers)):
            must, attempt = "Printed losses must be finite numbers.", "leave out the others."
            raise SpecificationError(message(must, loss, attempt))
        self._printed = numbers
        if self._case is not None:
            self._case.printed, self._verdict = numbers, None

    def close(self, case: Case, verdict: Verdict | None = None) -> None:
        """Take the case to judge, once the loop has ended, and the verdict, if it is known."""
        self._case, self._verdict = case, verdict
        case.printed = self._printed

    def _judged(self) -> Verdict:
        if self._verdict is None:
            if self.elsewhere:
                return Verdict(unseen=[self.elsewhere])
            if self._case is None:
                must, attempt = "A report is read after its audit.", "read it after the `with`."
                raise SpecificationError(message(must, "one inside its `with`", attempt))
            num = self._case.log.num_updates
            updates = many(num, "update") if num else "the updates"
            line = f"stepcheck: judging {updates} of the loop, which may take minutes."
            with notify_if_long(line, PATIENCE), shown():
                self._verdict = self._case.judge()
        return self._verdict

    def as_json(self) -> dict[str, Any]:
        """Return the report as data: dicts, lists, strings, numbers and None, as docs/audit.md lists them."""
        verdict = self._judged()
        lines = [cause.line and cause.line._asdict() | {"text": cause.line.text} for cause in verdict.causes]
        causes = [asdict(cause) | {"line": line} for cause, line in zip(verdict.causes, lines, strict=True)]
        facts = {name: getattr(verdict, name) for name in ("has_seen", "has_loss", "judged", "looked_at")}
        facts |= {"engine": self._case and self._case.port.engine(), "first_line": self.first_line, "causes": causes}
        return _plain(facts | {"notes": verdict.notes, "unseen": verdict.unseen, "taken": self.taken})

    def html(self, path: str | os.PathLike[str]) -> None:
        """Write the report with pictures to a file: one page, without scripts.

        Raises:
            SpecificationError: matplotlib is not installed, or the audit is not over.
        """
        write_html([self], path)

    def _repr_html_(self) -> str:
        """Return the report for a notebook; without pictures if matplotlib is not installed."""
        return self._html() if self._case is not None else f"<p>{self}</p>"

    def _html(self) -> str:
        verdict = self._judged()
        assert self._case is not None
        parts = [f"<h1>{escape(self.first_line)}</h1>"]
        parts += [_cause(i, cause) for i, cause in enumerate(verdict.causes, start=1)]
        parts += map(figure, pictures(self._case, verdict) if can_draw() and verdict.has_seen else [])
        for title, lines in self._lists():
            parts.append(f"<h2>{title}</h2><ul>{''.join(f'<li>{_words(line)}</li>' for line in lines)}</ul>")
        missing = "" if can_draw() else " The pictures need matplotlib: pip install 'stepcheck[pictures]'."
        parts.append(f"<footer><p>{escape(self._looked_at() + missing)}</p></footer>")
        return part_of_page(parts)

    def _lists(self) -> list[tuple[str, list[str]]]:
        notes = [note for note in self.notes if not self.first_line.startswith(note)]
        every = ("Taken as meant", self.taken), ("Notes", notes), ("Not looked at", self.unseen)
        return [(title, lines) for title, lines in every if lines]

    def _looked_at(self) -> str:
        verdict = self._judged()
        assert self._case is not None
        return f"Looked at {verdict.looked_at}, on {self._case.port.engine()}."

    def __str__(self) -> str:
        if self._case is None:
            return self.elsewhere or "The audit is not over: read its report after the `with`."
        parts = [self.first_line]
        parts += [told(i, cause) for i, cause in enumerate(self.causes, start=1)]
        parts += ["\n".join([f"{title}:", *(f"  - {line}" for line in lines)]) for title, lines in self._lists()]
        return "\n\n".join([*parts, self._looked_at()])

    __repr__ = __str__


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


def told(number: int, cause: Found) -> str:
    """Return the text of one cause."""
    lines = [f"{number}. {cause.stage}: {cause.name}"]
    lines += [f"   {line}" for line in sentences(number, cause)]
    if cause.proof is not None:
        rows = table(cause.proof, columns(cause))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        padded = ("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)
        lines += ["", *(f"   {line}".rstrip() for line in padded), ""]
    lines.append(f"   {apart(cause)}")
    lines += [f"   {name}: {value}" for name, value in facts(cause)]
    return "\n".join(lines)


def sentences(number: int, cause: Found) -> list[str]:
    """Return the sentences under the heading of a cause; the first explanation is the report's first line."""
    return [line for line in (cause.explanation if number > 1 else "", cause.detail) if line]


def columns(cause: Found) -> tuple[str, str]:
    """Return the names of both references of a cause."""
    return (WITH_OTHERS, WITH_ALL) if cause.is_beside else (REFERENCE, WITH_FAULT)


def table(proof: Proof, names: tuple[str, str] = (REFERENCE, WITH_FAULT)) -> list[tuple[str, ...]]:
    """Return the numbers of a proof as rows of three columns, after their names; "-" for NaN."""
    rows: list[tuple[str, ...]] = [(f"{proof.where}:", "yours", *names)]
    for line in proof.lines:
        numbers = line.yours, line.reference, line.changed
        rows.append((line.what, *("-" if math.isnan(number) else f"{number:.6g}" for number in numbers)))
    has_fault = not all(math.isnan(line.changed) for line in proof.lines)
    return rows if has_fault else [row[:3] for row in rows]


def apart(cause: Found) -> str:
    """Return both distances in words."""
    one, two = columns(cause)
    two = two if cause.is_beside else f"from the {two}"
    end = f"{two} {cause.with_change:.2g}" if cause.is_known else "no known fault reproduces it"
    return f"distance from the {one} {cause.without:.2g}; {end}"


def facts(cause: Found) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of the other facts of a cause."""
    yield "compared in updates", some(cause.updates)
    if cause.line is not None:
        yield "your code", str(cause.line)
    yield "fix", cause.fix
    proof = cause.proof
    if proof is None or math.isnan(proof.step):
        return
    if proof.step < HIDDEN < cause.without / 2:  # the gradient of the update that is shown is off by more
        why = "the optimizer divides the gradient by its own size, which hides a factor on it"
        yield "effect on the weights", f"hardly any in {proof.where} ({proof.step:.2g} of the step's length): {why}"
    else:
        yield "effect on the weights", f"the step of {proof.where} is off by {proof.step:.2g} of its length"


def _cause(number: int, cause: Found) -> str:
    parts = [f"<h2>{number}. {escape(cause.stage)}: {escape(cause.name)}</h2>"]
    parts += [f"<p>{_words(each)}</p>" for each in sentences(number, cause)]
    if cause.proof is not None:
        head, *rows = table(cause.proof, columns(cause))
        body = "".join(f"<tr>{_cells('td', row)}</tr>" for row in rows)
        parts.append(f"<table><thead><tr>{_cells('th', head)}</tr></thead><tbody>{body}</tbody></table>")
    parts.append(f"<p>{escape(apart(cause)).capitalize()}.</p><dl>")
    for name, value in facts(cause):
        shown = f"<code>{escape(value)}</code>" if name == "your code" else _words(value)
        parts.append(f"<dt>{escape(name)}</dt><dd>{shown}</dd>")
    return f"{''.join(parts)}</dl>"


def _cells(tag: str, texts: tuple[str, ...]) -> str:
    return "".join(f"<{tag}>{escape(text)}</{tag}>" for text in texts)


def _words(line: str) -> str:
    """Escape a line, and set the parts between backticks as code."""
    parts = escape(line).split("`")
    return "".join(f"<code>{part}</code>" if i % 2 and len(parts) % 2 else part for i, part in enumerate(parts))


def write_html(reports: list[Report], path: str | os.PathLike[str]) -> None:
    """Write reports with pictures to a file, as `Report.html`; in the process that has them."""
    assert_drawable()
    if any(report.elsewhere for report in reports):
        return
    write_page(path, "Audit of a training loop", (report._html() for report in reports))
