"""The command line: `stepcheck run`, `stepcheck record` and `stepcheck diff`."""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

from stepcheck import __version__, diff
from stepcheck.errors import SpecificationError
from stepcheck.report import usage

RIGHT, WRONG, UNSEEN = 0, 1, 2  # the exit codes
_STATED = "model", "data", "loss", "optimizer"
_UPDATES: dict[str, Any] = {"metavar": "N", "type": int, "default": 40}
_FLAG: dict[str, Any] = {"action": "store_true"}
_OPTIONS: dict[str, dict[str, dict[str, Any]]] = {  # of argparse, by command
    "run": {
        "script": {},
        **{f"--{name}": {"metavar": "NAME"} for name in _STATED},
        "--learning-rate": {"metavar": "RATE", "type": float},
        "--rows": {"choices": ("once", "shuffled")},
        "--updates": _UPDATES,
        "--html": {"metavar": "FILE", "type": Path},
        "--json": _FLAG,
    },
    "record": {
        "script": {},
        "-o": {"metavar": "FILE", "required": True},
        "--updates": _UPDATES,
    },
    "diff": {
        "a": {},
        "b": {},
        "--bits": _FLAG,
        "--json": _FLAG,
    },
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    if "".join(given[:1]).endswith((".py", ".ipynb")):
        given.insert(0, "run")
    end = given.index("--") if "--" in given else len(given)
    try:
        own, misplaced = command_line().parse_known_args(given[:end])
        if misplaced:
            raise SpecificationError(usage.misplaced(own.command, misplaced))
        return {"run": _run, "record": _record, "diff": _diff}[own.command](
            own, given[end + 1 :]
        )
    except SpecificationError as error:
        print(error, file=sys.stderr)
        return UNSEEN


def command_line() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="stepcheck",
        description="gradcheck for a whole training step, for PyTorch and Keras: prove for each "
        "update whether it is the update that you state.",
        epilog="Keras models are trained by the package wholestep.",
    )
    parser.add_argument(
        "--version", action="version", version=f"stepcheck {__version__}"
    )
    commands = parser.add_subparsers(
        dest="command", title="commands", required=True
    )
    for name, options in _OPTIONS.items():
        command = commands.add_parser(
            name, help=usage.HELP[name], description=usage.ABOUT[name]
        )
        for option, known in options.items():
            command.add_argument(option, help=usage.HELP[option], **known)
    return parser


def _run(own: argparse.Namespace, arguments: list[str]) -> int:
    from stepcheck.command.names import Names
    from stepcheck.command.watching import Watched
    from stepcheck.faults import Stage
    from stepcheck.report.page import assert_drawable

    _assert_script(own.script)
    if own.html is not None:
        assert_drawable()
    names = Names(
        {name: text for name in _STATED if (text := getattr(own, name))}
    )
    more = {"learning_rate": own.learning_rate, "rows": own.rows}
    run = Watched(names, own.updates, **more)
    with redirect_stdout(sys.stderr) if own.json else nullcontext():
        run.of(own.script, arguments)
    if (report := run.result) is None:
        print(run.unwatched(own.script), file=sys.stderr)
        return UNSEEN
    print(json.dumps(report.as_json(), indent=1) if own.json else report)
    if own.html is not None:
        report.html(own.html)
    if report.findings:
        return WRONG
    is_judged = Stage.GRADIENT in report.judged and not report.failures
    is_over = is_judged and run.error is None
    return RIGHT if report.elsewhere or is_over else UNSEEN


def _record(own: argparse.Namespace, arguments: list[str]) -> int:
    from stepcheck.command.script import Recorded

    _assert_script(own.script)
    if not Path(own.o).parent.is_dir():
        raise SpecificationError(usage.no_folder(own.o))
    run = Recorded(own.updates)
    run.of(own.script, arguments)
    if run.result is None:
        print(usage.unwatched(run.error), file=sys.stderr)
        return UNSEEN
    run.result.save(own.o)
    print(f"{own.o}: {run.result!r}")
    return RIGHT if run.error is None and run.result.num_updates else UNSEEN


def _diff(own: argparse.Namespace, _: list[str]) -> int:
    compared = diff(own.a, own.b, bits=own.bits)
    print(json.dumps(compared.as_json(), indent=1) if own.json else compared)
    return (
        RIGHT
        if compared.is_equal
        else WRONG
        if compared.differences
        else UNSEEN
    )


def _assert_script(path: str) -> None:
    if not Path(path).is_file() or path.endswith(".ipynb"):
        raise SpecificationError(usage.not_a_script(path))
