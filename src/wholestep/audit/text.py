"""The text of a report."""

import math
from collections.abc import Iterable, Iterator

from wholestep.audit.found import Found, Likely
from wholestep.audit.judge import Verdict
from wholestep.audit.log import OWN_TRAINER
from wholestep.audit.proof import HIDDEN, Proof

WITH_FAULT = "reference with this fault"


def first(verdict: Verdict) -> str:
    """Return the first line: a cause; a note that is very likely the fault; what was not judged; or what was."""
    if verdict.causes:
        cause = verdict.causes[0]
        name = cause.name if cause.is_known else f"not known, but in the stage: {cause.stage}"
        return f"{name[0].upper()}{name[1:]}. {cause.explanation}"
    if likely := [note for note in verdict.notes if isinstance(note, Likely)]:
        return likely[0]
    if not verdict.has_seen:
        own = [f"{OWN_TRAINER}."] if OWN_TRAINER in verdict.unseen else []
        return own[0] if own else "Nothing can be said: no update on rows of the data was seen."
    num = len(verdict.seen.updates) if verdict.seen is not None else 0
    found = f"othing found in {num} update{'s' * (num != 1)}: {', '.join(verdict.judged)} were judged."
    return f"Not judged: {verdict.unjudged}. N{found}" if verdict.unjudged else f"N{found}"


def told(number: int, cause: Found) -> str:
    """Return what is said of one cause."""
    lines = [f"{number}. {cause.stage}: {cause.name}"]
    lines += [
        f"   {line}" for line in ([cause.explanation] if number > 1 else []) + ([cause.detail] if cause.detail else [])
    ]
    if cause.proof is not None:
        lines += ["", *(f"   {line}".rstrip() for line in table(cause.proof)), ""]
    lines.append(f"   {apart(cause)}")
    lines += [f"   {name}: {value}" for name, value in facts(cause)]
    return "\n".join(lines)


def apart(cause: Found) -> str:
    """Return both distances in words."""
    end = f"from the {WITH_FAULT} {cause.with_change:.2g}" if cause.is_known else "no known fault reproduces it"
    return f"distance from the reference {cause.without:.2g}; {end}"


def facts(cause: Found) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of what else is known of a cause."""
    yield "updates", some(map(str, cause.updates))
    if cause.line is not None:
        yield "your code", str(cause.line)
    yield "fix", cause.fix
    if cause.proof is not None and (effect := _effect(cause, cause.proof)):
        yield "effect on the weights", effect


def some(parts: Iterable[str], num: int = 8) -> str:
    """Return the first ones."""
    parts = list(parts)
    return ", ".join(parts[:num]) + (", ..." if len(parts) > num else "")


def _effect(cause: Found, proof: Proof) -> str:
    if math.isnan(proof.step):
        return ""
    size = f"the step of {proof.where} is off by {proof.step:.2g} of its length"
    if proof.step < HIDDEN < cause.without:
        why = "the optimizer divides the gradient by its own size, which hides a factor on it"
        return f"hardly any in {proof.where} ({proof.step:.2g} of the step's length): {why}"
    return size


def table(proof: Proof) -> list[str]:
    """Return the numbers of a proof in three columns."""
    rows: list[tuple[str, ...]] = [(f"{proof.where}:", "yours", "reference", WITH_FAULT)]
    rows += [(line.what, *map(number, (line.yours, line.reference, line.changed))) for line in proof.lines]
    if all(math.isnan(line.changed) for line in proof.lines):
        rows = [row[:3] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]


def number(value: float) -> str:
    """Return a number of a proof in words; NaN is none."""
    return "-" if math.isnan(value) else f"{value:.6g}"
