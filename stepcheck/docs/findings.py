"""Writes docs/findings.md: all findings, by stage, from their texts.

python docs/findings.py
"""

import tomllib
from pathlib import Path

from stepcheck.faults import Fault, Stage
from stepcheck.report import changes, words

HERE = Path(__file__).parent
_HEAD = """\
# Findings

All errors that a report names, by stage, with what to do about each. `id` is stable: see [a report as data](json.md).
An error of the gradient is solved for, and its sentence is made of the numbers that were found; a difference that no
known error reproduces is said with its place alone. [How to read a report](report.md) explains the stages.
"""


def page() -> str:
    """Return the page."""
    texts = tomllib.loads(
        (Path(changes.__file__).with_name("faults.toml")).read_text()
    )
    lines = [_HEAD]
    for stage in Stage:
        lines += [
            f"## {words.stage(stage).capitalize()}",
            "",
            "| id | name | what to do | met in |",
            "|---|---|---|---|",
        ]
        for fault in (each for each in Fault if each.quantity.stage is stage):
            fixes = list(texts[fault.id].get("fix", {}).values())
            told = " Or: ".join(dict.fromkeys(fixes)).replace("|", "\\|")
            lines.append(
                f"| {fault.id} | {words.name(fault)} | {told} | "
                f"{texts[fault.id].get('met_in', '')} |"
            )
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    (HERE / "findings.md").write_text(page())
