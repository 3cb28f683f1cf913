"""The command line: `stepcheck run`."""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path

from stepcheck import __version__
from stepcheck.errors import SpecificationError

RIGHT, WRONG, UNSEEN = 0, 1, 2  # the exit codes
_STATED = "model", "data", "loss", "optimizer"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    end = given.index("--") if "--" in given else len(given)
    try:
        own, misplaced = _parser().parse_known_args(given[:end])
        return _run(own, misplaced, given[end + 1 :])
    except SpecificationError as error:
        print(error, file=sys.stderr)
        return UNSEEN


def _parser() -> argparse.ArgumentParser:
    from stepcheck.report.usage import HELP, RUN

    parser = argparse.ArgumentParser(
        prog="stepcheck", description="gradcheck for a whole training step."
    )
    parser.add_argument("--version", action="version", version=f"stepcheck {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    run = commands.add_parser("run", help=HELP["run"], description=RUN)
    run.add_argument("script", help=HELP["script"])
    for name in _STATED:
        run.add_argument(f"--{name}", metavar="NAME", help=HELP[name])
    kinds = {"learning-rate": ("RATE", float), "updates": ("N", int), "html": ("FILE", Path)}
    for name, (metavar, kind) in kinds.items():
        run.add_argument(f"--{name}", metavar=metavar, type=kind, help=HELP[name])
    run.set_defaults(updates=40)
    run.add_argument("--json", action="store_true", help=HELP["json"])
    return parser


def _run(own: argparse.Namespace, misplaced: list[str], arguments: list[str]) -> int:
    from stepcheck.command.names import Names
    from stepcheck.command.script import Run
    from stepcheck.faults import Stage
    from stepcheck.report import usage
    from stepcheck.report.page import assert_drawable

    if misplaced:
        raise SpecificationError(usage.misplaced(own.script, misplaced))
    if not Path(own.script).is_file() or own.script.endswith(".ipynb"):
        raise SpecificationError(usage.not_a_script(own.script))
    if own.html is not None:
        assert_drawable()
    names = Names({name: text for name in _STATED if (text := getattr(own, name))})
    run = Run(names, own.learning_rate, own.updates)
    with redirect_stdout(sys.stderr) if own.json else nullcontext():
        run.of(own.script, arguments)
    if (report := run.report) is None:
        print(run.unwatched(own.script), file=sys.stderr)
        return UNSEEN
    print(json.dumps(report.as_json(), indent=1) if own.json else report)
    if own.html is not None:
        report.html(own.html)
    is_judged = Stage.GRADIENT in report.judged and run.error is None and not report.failures
    return WRONG if report.findings else RIGHT if report.elsewhere or is_judged else UNSEEN
