"""A report as data, for programs: its schema is documented in docs/json.md, and has a
version.
"""

import math
from dataclasses import asdict
from enum import Enum
from typing import Any

from stepcheck.judge import Case, Verdict
from stepcheck.report import words
from stepcheck.values import Finding, Line

VERSION = "stepcheck.report/2"


def as_json(case: Case, verdict: Verdict) -> dict[str, Any]:
    """Return a report as dicts, lists, strings, numbers and None."""
    framework = case.port.engine()
    report = {
        "schema": VERSION,
        "framework": framework,
        "updates": verdict.num_updates,
        "batches": verdict.num_batches,
        "judged": verdict.judged,
        "findings": [_finding(each, framework) for each in verdict.findings],
        "unjudged": [asdict(each) for each in verdict.unjudged],
        "facts": verdict.facts and asdict(verdict.facts),
        "failures": {
            str(stage): told for stage, told in verdict.failures.items()
        },
    }
    return plain(report)


def _finding(finding: Finding, framework: str) -> dict[str, Any]:
    change, where = finding.change, finding.where
    proof = finding.proof
    return {
        "id": finding.fault.id,
        "stage": finding.stage,
        "quantity": finding.quantity,
        "error": finding.error,
        "name": words.name(finding.fault),
        "sentence": words.sentence(finding),
        "fix": words.fix(change, framework),
        "detail": change.detail,
        "numbers": change.numbers,
        "names": change.names,
        "count": change.count and asdict(change.count),
        "apart": finding.apart,
        "with_error": finding.with_error,
        "updates": where.updates,
        "rows": where.rows,
        "parameters": where.parameters,
        "outputs": where.outputs or change.outputs,
        "line": _line(where.line),
        "proof": proof
        and {
            **asdict(proof),
            "numbers": [each._asdict() for each in proof.numbers],
        },
    }


def _line(line: Line | None) -> dict[str, Any] | None:
    return line and {**line._asdict(), "text": line.text}


def plain(value: Any) -> Any:
    """Return a value as JSON has it: an enum by its name, None for a number that is not
    finite.
    """
    if isinstance(value, Enum):
        return str(value) if isinstance(value, str) else value.name.lower()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [*map(plain, value)]
    return value
