"""Writes docs/command-line.md of both packages from the parsers of their commands.

python wholestep/docs/commands.py
"""

import argparse
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import stepcheck.cli
import wholestep.cli

TOP = Path(__file__).parents[2]
GLUE = "\N{NO-BREAK SPACE}"
PARSERS = {
    "wholestep": wholestep.cli.command_line,
    "stepcheck": stepcheck.cli.command_line,
}
HEADS = {
    "wholestep": """\
`wholestep`, or `python -m wholestep`, is installed with the package; `wholestep --version` prints
its version. The commands on checkpoints run without Keras: [Stop and resume](resume.md).""",
    "stepcheck": """\
`stepcheck`, or `python -m stepcheck`, is installed with the package; `stepcheck --version` prints
its version. More: [a script, unchanged](index.md#5-a-script-unchanged), [two runs](diff.md), and the
[JSON of a report](json.md).""",
}
EXAMPLES = {  # by command
    "wholestep launch": "wholestep launch -n 4 train.py --epochs 3",
    "wholestep checkpoint ls": "wholestep checkpoint ls runs/a",
    "wholestep checkpoint verify": "wholestep checkpoint verify s3://bucket/runs/a",
    "wholestep checkpoint show": "wholestep checkpoint show runs/a/step-812 --json",
    "wholestep checkpoint copy": "wholestep checkpoint copy runs/a s3://bucket/runs/a",
    "wholestep checkpoint prune": "wholestep checkpoint prune runs/a --keep 3 --dry-run",
    "wholestep audit": "wholestep audit train.py --model net --data x,y --loss criterion",
    "wholestep doctor": "wholestep doctor",
    "stepcheck run": "stepcheck run train.py --model net --data x,y --loss criterion -- --epochs 3",
    "stepcheck record": "stepcheck record train.py -o before.trace",
    "stepcheck diff": "stepcheck diff before.trace after.trace",
}


def page(package: str) -> str:
    """Return the page on the commands of a package."""
    commands = [*leaves(PARSERS[package]())]
    shown = [f"    {EXAMPLES[parser.prog]}" for parser in commands]
    lines = ["# The command line", "", *shown, "", HEADS[package], ""]
    for parser in commands:
        lines += section(parser)
    return "\n".join(lines)


def leaves(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parser of each command that has no commands below it, in their order."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from [*leaves(command)] or [command]


def section(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the lines on one command: its usage, its description, and its arguments."""
    actions = [each for each in parser._actions if not isinstance(each, argparse._HelpAction)]
    options = [each for each in actions if each.option_strings]
    others = [each for each in actions if not each.option_strings]
    names = [each.replace(" ", GLUE) for each in map(used, [*options, *others])]
    first, *rest = wrapped(" ".join(names), 84 - len(parser.prog)) or [""]
    usage = [f"    {parser.prog} {first}", *(" " * (5 + len(parser.prog)) + line for line in rest)]
    about = re.sub("`[^`]*`", lambda code: code[0].replace(" ", GLUE), parser.description or "")
    yield from [f"## {parser.prog}", "", *usage, ""]
    for paragraph in about.replace(" Exit codes: ", "\nExit codes: ").splitlines():
        yield from [*wrapped(paragraph), ""]
    explained = [each for each in [*others, *options] if each.help]
    if explained:
        yield from ["| argument | |", "|---|---|"]
        yield from (f"| `{spelled(each)}` | {each.help} |" for each in explained)
        yield ""


def used(action: argparse.Action) -> str:
    """Return an argument as a line of usage has it."""
    if not action.option_strings:
        name = action.metavar or action.dest
        return f"[{name} ...]" if action.nargs == argparse.REMAINDER else str(name)
    text = " ".join(filter(None, [action.option_strings[0], value(action)]))
    return text if action.required else f"[{text}]"


def spelled(action: argparse.Action) -> str:
    """Return an argument with all its names, and its value."""
    names = ", ".join(action.option_strings) or action.metavar or action.dest
    return " ".join(filter(None, [names, value(action)]))


def value(action: argparse.Action) -> str:
    """Return the placeholder of an option's value; empty for a flag or a positional argument."""
    if action.nargs == 0 or not action.option_strings:
        return ""
    if action.choices is not None:
        return f"{{{','.join(action.choices)}}}"
    return str(action.metavar or action.dest.upper())


def wrapped(text: str, width: int = 120) -> list[str]:
    """Return a text in lines."""
    lines = textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)
    return [line.replace(GLUE, " ") for line in lines]


def path(package: str) -> Path:
    """Return the file of a page."""
    return TOP / package / "docs" / "command-line.md"


if __name__ == "__main__":
    for name in PARSERS:
        path(name).write_text(page(name))
