"""The command line: `stepcheck run`."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

from stepcheck import __version__
from stepcheck.errors import SpecificationError, message

RIGHT, WRONG, UNSEEN = 0, 1, 2  # the exit codes
_STATED = {
    "model": "the model that is trained, by its name in the script: net, trainer.model",
    "data": "its rows, by their names: x,y or x,y,w",
    "loss": "the loss that is meant, by its name; or a loss of Keras, such as mse",
    "optimizer": "the optimizer that is meant, by its name",
}
_ABOUT = (
    "Run a training script, unchanged, for a few updates, and say whether each was the one that was meant. A compiled "
    "Keras model and the arrays that `fit` gets need not be named. Arguments of the script stand after `--`. Exit "
    "codes: 0 if the updates are right, 1 if something was found, 2 if they were not judged, or too little was stated."
)
_MUST = "--model, --data and --loss must state what is meant, as the script does not."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    end = given.index("--") if "--" in given else len(given)
    try:
        return _run(_parser().parse_args(given[:end]), given[end + 1 :])
    except SpecificationError as error:
        print(error, file=sys.stderr)
        return UNSEEN


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stepcheck", description="gradcheck for a whole training step."
    )
    parser.add_argument("--version", action="version", version=f"stepcheck {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    run = commands.add_parser(
        "run", help="judge the updates of a training script", description=_ABOUT
    )
    run.add_argument("script", help="the Python script")
    for name, told in _STATED.items():
        run.add_argument(f"--{name}", metavar="NAME", help=told)
    run.add_argument("--learning-rate", type=float, metavar="RATE", help="the rate that is meant")
    run.add_argument(
        "--updates", type=int, default=40, help="updates after which the script ends (default: 40)"
    )
    run.add_argument(
        "--json", action="store_true", help="print JSON; what the script prints goes to stderr"
    )
    run.add_argument(
        "--html", type=Path, metavar="FILE", help="write the report with pictures, too"
    )
    return parser


def _run(own: argparse.Namespace, arguments: list[str]) -> int:
    from stepcheck.command.names import Names
    from stepcheck.command.script import Run
    from stepcheck.faults import Stage
    from stepcheck.report.page import assert_drawable

    if not Path(own.script).is_file():
        raise SpecificationError(
            message("The script must be a file.", own.script, "the path of a Python file.")
        )
    if own.html is not None:
        assert_drawable()
    stated = {name: text for name in _STATED if (text := getattr(own, name))}
    run = Run(Names(stated), own.learning_rate, own.updates)
    with redirect_stdout(sys.stderr) if own.json else nullcontext():
        run.of(own.script, arguments)
    if (report := run.report) is None:
        print("\n".join(_unwatched(own.script, stated, run)), file=sys.stderr)
        return UNSEEN
    print(json.dumps(report.as_json(), indent=1) if own.json else report)
    if own.html is not None:
        report.html(own.html)
    is_judged = Stage.GRADIENT in report.judged and not run.how and not report.failures
    return WRONG if report.findings else RIGHT if report.elsewhere or is_judged else UNSEEN


def _unwatched(script: str, stated: dict[str, str], run: Any) -> Iterator[str]:
    """Yield in lines why nothing was watched, and the command to run."""
    from stepcheck.command.names import Names, advice

    if not run.scopes:
        yield f"Nothing was watched: {run.how or 'the script calls no Keras model, and no module of PyTorch'}."
        return
    yield from Names(stated).missing(set().union(*run.scopes))
    received = " ".join(f"--{name} {text}" for name, text in stated.items())
    yield message(_MUST, received or "none of them", advice(script, stated, run.scopes))
