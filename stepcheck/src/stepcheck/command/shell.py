"""`stepcheck run`: the faults of the training loop of a script. Needs no Keras until the script does."""

import argparse
import json
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

from stepcheck.errors import SpecificationError, message, notify_if_long
from stepcheck.report.page import assert_drawable

CLEAN, CAUSES, UNSEEN = 0, 1, 2  # the exit codes
PATIENCE = 5.0  # seconds
_JUDGING = "stepcheck: the loop was seen; its updates are computed again and judged, which may take minutes."
_OF_KERAS = "any update: the script imports no Keras, whose models alone state what is meant"

_ADD = """Add to {script} what the audit has to know, and run it as ever, or with `stepcheck run` once more:

    import stepcheck
    with stepcheck.watch(model, data=(x, y), loss="mse") as report:  # arrays; the loss that you mean
        ...  # your loop, unchanged
    print(report)"""


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add `run SCRIPT`."""
    text = (
        "Run a training script, unchanged, for a few updates, and say what is wrong with its loop. The exit code is 0 "
        "if nothing was found, 1 if something was, 2 if not enough could be seen. Everything after the script's name "
        "is its own; `--` may stand before it."
    )
    parser = commands.add_parser("run", help="say what is wrong with a script's training loop", description=text)
    _add_options(parser)
    parser.add_argument("script", help="the Python script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments").required = False
    parser.set_defaults(command=lambda arguments: _run(*_options(arguments)))


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--updates",
        type=_count,
        help="watch a loop for so many updates (default: 30, or twice its data)",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the report with pictures, too")
    parser.add_argument("--json", action="store_true", help="print JSON; what the script prints goes to stderr")


def _options(arguments: argparse.Namespace) -> tuple[argparse.Namespace, list[str]]:
    """Return our options and the script's arguments: ours may follow its name, up to a `--`."""
    given = list(arguments.arguments)
    place = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(prog="stepcheck run", add_help=False, allow_abbrev=False)
    _add_options(parser)
    own, unknown = parser.parse_known_args(given[:place], arguments)
    return own, [*unknown, *given[place + 1 :]]


def _run(own: argparse.Namespace, script: list[str]) -> int:
    if not Path(own.script).is_file():
        print(message("The script must be a file.", own.script, "the path of a Python file."), file=sys.stderr)
        return UNSEEN
    if own.html is not None and not own.html.resolve().parent.is_dir():
        print(message("The folder of --html must exist.", str(own.html), "another FILE."), file=sys.stderr)
        return UNSEEN
    try:
        if own.html is not None:
            assert_drawable()
    except SpecificationError as error:  # before the script has run
        print(error, file=sys.stderr)
        return UNSEEN
    from stepcheck.command.script import run

    with redirect_stdout(sys.stderr) if own.json else nullcontext():
        try:
            ran = run(own.script, script, own.updates)
        except SpecificationError as error:
            return _say_unseen(own, [str(error)])
    if ran.scout is None:
        return _say_unseen(own, [ran.how or _OF_KERAS])
    from stepcheck.report.progress import shown

    with notify_if_long(_JUDGING, PATIENCE), shown():
        return _conclude(own, ran)


def _conclude(own: argparse.Namespace, ran: Any) -> int:
    from stepcheck.keras.conclusion import conclude
    from stepcheck.keras.searching import UnknownError
    from stepcheck.port import quiet

    if ran.scout.elsewhere and not any(each.log.applied for each in ran.scout.watched):
        return _say_unseen(own, [ran.scout.elsewhere, ran.how])
    if not ran.how and _is_by_own_trainer(ran.scout):
        return _say_own(own)
    try:
        with quiet():
            reports = conclude(ran)
    except UnknownError as unknown:
        return _say_unseen(own, [str(unknown), ran.how], is_asking=bool(ran.scout.watched) and not ran.how)
    except SpecificationError as error:
        return _say_unseen(own, [str(error), ran.how])
    except Exception as error:
        return _say_failed(own, ran, error)
    return _say(own, ran, reports)


def _say(own: argparse.Namespace, ran: Any, reports: list) -> int:
    from stepcheck.report.report import write_html

    if any(report.elsewhere for report in reports):
        print(reports[0], file=sys.stderr)
        return CLEAN
    if own.json:
        told = [report.as_json() for report in reports]
        print(json.dumps(told[0] if len(told) == 1 else told, indent=1))
    else:
        print("\n\n".join(map(str, reports)))
    try:
        if own.html is not None:
            write_html(reports, own.html)
    except OSError as error:
        print(message("--html must be a file that can be written.", str(error), "another FILE."), file=sys.stderr)
    if any(report.causes or report.has_likely for report in reports):
        return CAUSES
    is_clean = all(report.is_judged for report in reports) and not ran.how
    return CLEAN if is_clean else UNSEEN


_UNSEEN = "The audit could not see enough"


def _is_by_own_trainer(scout: Any) -> bool:
    """Whether no updates were made but by this library's own trainer."""
    from stepcheck.trace.log import OWN_TRAINER

    logs = [*(each.log for each in scout.watched), *(log for _, log in scout.limit.reports)]
    return any(OWN_TRAINER in log.unseen for log in logs) and not any(log.applied for log in logs)


def _say_own(own: argparse.Namespace) -> int:
    from stepcheck.trace.log import OWN_TRAINER

    print(_unseen_json(f"{OWN_TRAINER}.", [f"{OWN_TRAINER}."], []) if own.json else f"{OWN_TRAINER}.")
    return CLEAN


def _say_failed(own: argparse.Namespace, ran: Any, error: Exception) -> int:
    """Say that the audit is at fault, or a function of the script that it has called again: the script has run."""
    from stepcheck.report.found import own_fault

    traceback.print_exc()
    of_script = f"the audit called a function of the script again, and it raised {type(error).__name__}"
    return _say_unseen(own, [own_fault(error) or of_script, ran.how])


def _say_unseen(
    own: argparse.Namespace, reasons: list[str], *, is_asking: bool = False, notes: Sequence[str] = ()
) -> int:
    from stepcheck.report.found import Likely

    notes = sorted(notes, key=lambda note: not isinstance(note, Likely))
    reasons = [reason for reason in reasons if reason]
    if own.json:
        print(_unseen_json(next((n for n in notes if isinstance(n, Likely)), f"{_UNSEEN}."), notes, reasons))
    else:
        print("\n".join([*notes, *[""] * bool(notes), f"{_UNSEEN}:", *(f"  - {each}" for each in reasons)]))
    if is_asking:
        print("\n" + _ADD.format(script=own.script), file=sys.stderr if own.json else sys.stdout)
    return CAUSES if any(isinstance(note, Likely) for note in notes) else UNSEEN


def _unseen_json(first_line: str, notes: Sequence[str], reasons: list[str]) -> str:
    """Return the JSON of a report without an update, with all keys of `Report.as_json`."""
    told = {"has_seen": False, "has_loss": False, "judged": [], "looked_at": "", "engine": None}
    told |= {"first_line": first_line, "causes": [], "notes": [*notes], "unseen": reasons, "taken": []}
    return json.dumps(told, indent=1)


def _count(text: str) -> int:
    """Return an integer of at least 1, or raise argparse's error."""
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1. Received: {text}")
    return number
