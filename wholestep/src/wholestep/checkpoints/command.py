"""`wholestep checkpoint`: list, verify, show, copy and remove checkpoints, without Keras."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from wholestep.checkpoints.address import as_location
from wholestep.checkpoints.files import read_all
from wholestep.checkpoints.folder import Folder
from wholestep.checkpoints.manifest import finite, rendered
from wholestep.checkpoints.settings import RULES, Checkpoints, to_remove, value_in, values_of
from wholestep.checkpoints.store import CheckpointFolder, copy, find
from wholestep.errors import (
    CheckpointError,
    DamagedError,
    GoneError,
    SpecificationError,
    message,
    printable,
    tell,
)

Report = tuple[Any, bool, list[str]]  # JSON, whether all is good, and lines
Description = dict[str, Any]  # of a checkpoint: JSON, with the key "bad" if it is damaged


def add_commands(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add `checkpoint ls|verify|show|copy|prune PATH`."""
    names = "ls, verify, show, copy or prune"
    description = (
        f"Look at checkpoints, copy or remove them: {names}. The exit code is 1 if anything is bad."
    )
    parser = commands.add_parser("checkpoint", help=f"{names} checkpoints", description=description)
    kinds = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    calls: dict[str, tuple[Callable[..., Report], str]] = {
        "ls": (_each, "list the checkpoints of a folder, also damaged ones"),
        "verify": (
            partial(_each, verifies=True),
            "read every byte of the checkpoints, and compare the digests",
        ),
        "show": (_show, "show the content of the newest, or of the named, checkpoint"),
        "copy": (_copy, "copy the checkpoints that TARGET lacks, and verify every byte"),
        "prune": (_prune, "remove the checkpoints that no rule keeps, if the newest is good"),
    }
    codes = "Exit codes: 0 if all is good, 1 if anything is bad or missing."
    for name, (call, text) in calls.items():
        command = kinds.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}. {codes}"
        )
        single = "" if name == "prune" else ", or a single checkpoint in it"
        text = f"a folder of checkpoints{single}; or s3://bucket/runs/a"
        command.add_argument("path", type=as_location, help=text)
        if name == "copy":
            text = "the folder, or address, to copy to"
            command.add_argument("target", type=as_location, help=text)
        if name == "prune":
            _add_rules(command)
        command.add_argument("--json", action="store_true", help="print JSON")
        command.set_defaults(command=partial(_run, call))


def _add_rules(parser: argparse.ArgumentParser) -> None:
    """Add the rules of `Checkpoints`."""
    text = "keep this number of newest checkpoints"
    parser.add_argument("--keep", type=int, required=True, help=text)
    text = "keep the first checkpoint at or after each multiple of this"
    parser.add_argument("--keep-period", type=int, help=text)
    text = "keep those at most this much older than the newest"
    parser.add_argument("--keep-seconds", type=float, help=text)
    text = "keep the best by this metric, as in val_loss:2"
    parser.add_argument("--keep-best", type=_best, metavar="NAME:NUMBER", help=text)
    parser.add_argument("--dry-run", action="store_true", help="list, and remove nothing")


def _best(text: str) -> tuple[str, int]:
    name, _, number = text.rpartition(":")
    if not name or not number.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}, which must be NAME:NUMBER, such as val_loss:2")
    return name, int(number)


def _run(call: Callable[..., Report], arguments: argparse.Namespace) -> int:
    try:
        folder, step = find(arguments.path)
        steps = folder.steps() if step is None else [step]
        if not steps and not folder.bad():
            received = f"{arguments.path}, in which none was written yet"
            attempt = "again after the first save of a run, or another path."
            if isinstance(folder, Folder) and not folder.folder.is_dir():
                received = f"no folder {arguments.path}"
                attempt = "another path."
            raise CheckpointError(message("The path must hold a checkpoint.", received, attempt))
        values, is_good, lines = call(arguments, folder, steps)
    except (CheckpointError, SpecificationError) as error:
        tell(str(error))
        return 1
    as_json = json.dumps(finite(values), indent=1) if arguments.json else ""
    _say(as_json or "\n".join(map(printable, lines)))
    return 0 if is_good else 1


def _say(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except BrokenPipeError:  # closed by a reader such as `head`; the flush at exit must not fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _each(
    _: argparse.Namespace, folder: CheckpointFolder, steps: list[int], *, verifies: bool = False
) -> Report:
    """Describe each checkpoint, also damaged ones."""
    described = []
    for step in steps:
        description: Description = {"name": os.path.basename(folder.path(step)), "step": step}
        try:
            manifest = folder.verify(step) if verifies else folder.manifest(step)
        except GoneError:
            continue
        except CheckpointError as error:
            described.append(description | {"bad": str(error)})
            continue
        description["time"] = manifest.rest.get("time")
        description["bytes"] = manifest.nbytes
        description["arrays"] = len(manifest.arrays)
        if verifies:
            description["good"] = True
        if value_in(manifest) is not None:
            description["watched"] = manifest.rest["watched"]
        described.append(description)
    described += [{"name": path.name, "bad": _why(path)} for path in folder.bad()]
    return _report(described)


def _report(described: list[Description]) -> Report:
    is_good = not any("bad" in each for each in described)
    return described, is_good, [_line(each) for each in described]


def _copy(arguments: argparse.Namespace, source: CheckpointFolder, steps: list[int]) -> Report:
    """Copy the checkpoints that are good, the oldest first."""
    target = _whole(arguments.target, "TARGET")

    def attempt(step: int) -> str:
        if step not in target.steps():
            copy(source, step, target)
            return "copied"
        if rendered(source.manifest(step)) != rendered(target.manifest(step)):
            must = f"{target.path(step)} must be missing, or equal to {source.path(step)}."
            received = "another checkpoint of this step"
            raise CheckpointError(message(must, received, "another folder."))
        return "exists already"

    with contextlib.ExitStack() as stack:
        if isinstance(target, Folder):
            stack.callback(target.lock().release)
        return _report([_attempted(source, step, attempt) for step in reversed(steps)])


def _whole(path: str, name: str) -> CheckpointFolder:
    """Return the folder of a path; refuse a single checkpoint."""
    folder, step = find(path)
    if step is not None:
        must = f"{name} must be a folder of checkpoints."
        raise CheckpointError(message(must, f"the checkpoint {path}", "the folder that holds it."))
    return folder


def _prune(arguments: argparse.Namespace, folder: CheckpointFolder, steps: list[int]) -> Report:
    """Remove the checkpoints that no rule keeps; damaged ones above the newest good one stay."""
    _whole(arguments.path, "PATH")
    rules = Checkpoints(folder.folder, **{rule: getattr(arguments, rule) for rule in RULES})
    if rules.keep_best and not values_of(folder, rules.keep_best[0]):
        must = (
            f"--keep-best needs a checkpoint with {rules.keep_best[0]}. Nothing has been removed."
        )
        way = f"the metric in the lines of `wholestep checkpoint ls {arguments.path}`."
        raise SpecificationError(message(must, f"none in {arguments.path}", way))
    described: list[Description] = []

    def check(step: int) -> str:
        folder.verify(step)
        return "is the newest good one"

    def remove(step: int) -> str:
        if not arguments.dry_run:
            folder.remove(step)
        return "would be removed" if arguments.dry_run else "removed"

    with contextlib.ExitStack() as stack:
        if isinstance(folder, Folder) and not arguments.dry_run:
            stack.callback(folder.lock().release)
        for step in folder.steps():
            newest = _attempted(folder, step, check)
            described.append(newest)
            if "bad" not in newest:
                older = to_remove(folder, rules, step)
                described += [_attempted(folder, old, remove) for old in older]
                break
    return _report(described)


def _attempted(folder: CheckpointFolder, step: int, call: Callable[[int], str]) -> Description:
    """Describe a checkpoint with the result of a call; it is bad if the call finds damage."""
    description = {"name": os.path.basename(folder.path(step)), "step": step}
    try:
        return description | {"result": call(step)}
    except DamagedError as error:
        return description | {"bad": str(error)}


def _line(description: Description) -> str:
    name = description["name"]
    if "bad" in description:
        return f"{name}  BAD: {description['bad']}"
    if "result" in description:
        return f"{name}  {description['result']}"
    good = "  good" if "good" in description else ""
    line = f"{name}{good}  {description['time']}  {description['bytes']} bytes in"
    line += f" {description['arrays']} arrays"
    if watched := description.get("watched"):
        line += f"  {watched['name']} {watched['number']:.6g}"
    return line


def _why(path: Path) -> str:
    try:
        return str(json.loads(read_all(path / "why.json", 1 << 16))["why"])
    except (OSError, CheckpointError, ValueError, KeyError, TypeError, RecursionError):
        return "set aside"


def _show(_: argparse.Namespace, folder: CheckpointFolder, steps: list[int]) -> Report:
    if not steps:
        must = "There must be a checkpoint to show."
        raise CheckpointError(f"{must} Received: only damaged ones in {folder.folder}.")
    manifest = folder.manifest(steps[0])
    files = {file.name: file.nbytes for file in manifest.files}
    arrays = {
        name: {"shape": list(shape), "dtype": dtype}
        for name, (shape, dtype) in manifest.arrays.items()
    }
    values = {"step": manifest.step, **manifest.rest, "facts": manifest.facts}
    values |= {"files": files, "arrays": arrays}
    lines = [
        f"{folder.path(manifest.step)}",
        *_indented({**manifest.rest, **manifest.facts}),
        "files",
        *(f"  {name}  {nbytes} bytes" for name, nbytes in files.items()),
        "arrays",
        *(f"  {name}  {array['dtype']} {array['shape']}" for name, array in arrays.items()),
    ]
    return values, True, lines


def _indented(value: dict[str, Any], depth: int = 0) -> list[str]:
    lines = []
    for name, part in value.items():
        if isinstance(part, dict) and part:
            lines += [f"{'  ' * depth}{name}", *_indented(part, depth + 1)]
        else:
            lines.append(f"{'  ' * depth}{name}: {json.dumps(finite(part))}")
    return lines
