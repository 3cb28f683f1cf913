"""`wholestep checkpoint`: list, verify, show, copy and remove checkpoints, here or in a store.
Needs no Keras.
"""

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

Told = tuple[Any, bool, list[str]]  # a description as JSON, whether all is good, and the lines


def add_commands(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add `checkpoint ls|verify|show|copy|prune PATH`."""
    names = "ls, verify, show, copy or prune"
    text = (
        f"Look at checkpoints, copy or remove them: {names}. The exit code is 1 if anything is bad."
    )
    parser = commands.add_parser("checkpoint", help=f"{names} checkpoints", description=text)
    kinds = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (text, call) in {
        "ls": (
            "list the checkpoints of a folder, also damaged ones",
            partial(_each, verifies=False),
        ),
        "verify": (
            "read every byte of the checkpoints, and compare the digests",
            partial(_each, verifies=True),
        ),
        "show": ("show the content of the newest, or of the named, checkpoint", _show),
        "copy": ("copy the checkpoints that TARGET lacks, and verify every byte", _copy),
        "prune": ("remove the checkpoints that no rule keeps, if the newest is good", _prune),
    }.items():
        own = kinds.add_parser(name, help=text, description=f"{text.capitalize()}.")
        single = "" if name == "prune" else ", or a single checkpoint in it"
        text = f"a folder of checkpoints{single}; or s3://bucket/runs/a"
        own.add_argument("path", type=as_location, help=text)
        if name == "copy":
            own.add_argument("target", type=as_location, help="the folder, or address, to copy to")
        if name == "prune":
            _add_rules(own)
        own.add_argument("--json", action="store_true", help="print JSON")
        own.set_defaults(command=lambda arguments, call=call: _run(arguments, call))


def _add_rules(parser: argparse.ArgumentParser) -> None:
    """Add the rules of `Checkpoints`."""
    parser.add_argument(
        "--keep", type=int, required=True, help="keep this number of newest checkpoints"
    )
    parser.add_argument(
        "--keep-period",
        type=int,
        help="keep the first checkpoint at or after each multiple of this",
    )
    parser.add_argument(
        "--keep-seconds", type=float, help="keep those at most this much older than the newest"
    )
    text = "keep the best by this metric, as in val_loss:2"
    parser.add_argument("--keep-best", type=_best, metavar="NAME:NUMBER", help=text)
    parser.add_argument("--dry-run", action="store_true", help="list, and remove nothing")


def _best(text: str) -> tuple[str, int]:
    name, _, number = text.rpartition(":")
    if not name or not number.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}, which must be NAME:NUMBER, such as val_loss:2")
    return name, int(number)


def _run(arguments: argparse.Namespace, call: Callable[..., Any]) -> int:
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
        told, is_good, lines = call(arguments, folder, steps)
    except (CheckpointError, SpecificationError) as error:
        tell(str(error))
        return 1
    _say(json.dumps(finite(told), indent=1) if arguments.json else "\n".join(map(printable, lines)))
    return 0 if is_good else 1


def _say(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except BrokenPipeError:  # closed by a reader such as `head`; the flush at exit must not fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _each(
    _: argparse.Namespace, folder: CheckpointFolder, steps: list[int], *, verifies: bool
) -> Told:
    """Return a description of each checkpoint, also damaged ones, as JSON and as lines."""
    told = []
    for step in steps:
        one: dict[str, Any] = {"name": os.path.basename(folder.path(step)), "step": step}
        try:
            manifest = folder.verify(step) if verifies else folder.manifest(step)
        except GoneError:
            continue
        except CheckpointError as error:
            told.append(one | {"bad": str(error)})
            continue
        value = value_in(manifest)
        facts = {
            "time": manifest.rest.get("time"),
            "bytes": manifest.nbytes,
            "arrays": len(manifest.arrays),
        }
        facts |= {"good": True} if verifies else {}
        told.append(one | facts | ({} if value is None else {"watched": manifest.rest["watched"]}))
    told += [{"name": path.name, "bad": _why(path)} for path in folder.bad()]
    return told, not any("bad" in one for one in told), [_line(one) for one in told]


def _copy(arguments: argparse.Namespace, source: CheckpointFolder, steps: list[int]) -> Told:
    """Copy checkpoints, the oldest first; a damaged one is described as bad, and the others are
    copied.
    """
    target = _whole(arguments.target, "TARGET")

    def attempt(step: int) -> str:
        if step not in target.steps():
            copy(source, step, target)
            return "copied"
        if rendered(source.manifest(step)) != rendered(target.manifest(step)):
            must = f"{target.path(step)} must be missing, or equal to {source.path(step)}."
            raise CheckpointError(
                message(must, "another checkpoint of this step", "another folder.")
            )
        return "exists already"

    with contextlib.ExitStack() as stack:
        if isinstance(target, Folder):
            stack.callback(target.lock().release)
        told = [_attempted(source, step, attempt) for step in reversed(steps)]
    return told, not any("bad" in one for one in told), [_line(one) for one in told]


def _whole(path: str, name: str) -> CheckpointFolder:
    """Return the folder of a path; refuse a single checkpoint."""
    folder, step = find(path)
    if step is not None:
        must = f"{name} must be a folder of checkpoints."
        raise CheckpointError(message(must, f"the checkpoint {path}", "the folder that holds it."))
    return folder


def _prune(arguments: argparse.Namespace, folder: CheckpointFolder, steps: list[int]) -> Told:
    """Remove the checkpoints that no rule keeps; damaged ones above the newest good one stay, and
    are bad.
    """
    _whole(arguments.path, "PATH")
    asked = Checkpoints(folder.folder, **{rule: getattr(arguments, rule) for rule in RULES})
    if asked.keep_best and not values_of(folder, asked.keep_best[0]):
        must = (
            f"--keep-best needs a checkpoint with {asked.keep_best[0]}. Nothing has been removed."
        )
        way = f"the metric in the lines of `wholestep checkpoint ls {arguments.path}`."
        raise SpecificationError(message(must, f"none in {arguments.path}", way))
    told: list[dict[str, Any]] = []

    def remove(step: int) -> str:
        if not arguments.dry_run:
            folder.remove(step)
        return "would be removed" if arguments.dry_run else "removed"

    with contextlib.ExitStack() as stack:
        if isinstance(folder, Folder) and not arguments.dry_run:
            stack.callback(folder.lock().release)
        for step in folder.steps():
            told.append(
                _attempted(
                    folder,
                    step,
                    lambda step: "is the newest good one" if folder.verify(step) else "",
                )
            )
            if "bad" not in told[-1]:
                told += [_attempted(folder, old, remove) for old in to_remove(folder, asked, step)]
                break
    return told, not any("bad" in one for one in told), [_line(one) for one in told]


def _attempted(folder: CheckpointFolder, step: int, call: Callable[[int], str]) -> dict[str, Any]:
    """Return a description of a checkpoint with the result of a call; it is bad if the call finds
    damage.
    """
    one = {"name": os.path.basename(folder.path(step)), "step": step}
    try:
        return one | {"result": call(step)}
    except DamagedError as error:
        return one | {"bad": str(error)}


def _line(one: dict[str, Any]) -> str:
    if "bad" in one:
        return f"{one['name']}  BAD: {one['bad']}"
    if "result" in one:
        return f"{one['name']}  {one['result']}"
    watched = one.get("watched")
    words = "" if watched is None else f"  {watched['name']} {watched['number']:.6g}"
    good = "  good" if "good" in one else ""
    return (
        f"{one['name']}{good}  {one['time']}  {one['bytes']} bytes in {one['arrays']} arrays{words}"
    )


def _why(path: Path) -> str:
    try:
        return str(json.loads(read_all(path / "why.json", 1 << 16))["why"])
    except (OSError, CheckpointError, ValueError, KeyError, TypeError, RecursionError):
        return "set aside"


def _show(_: argparse.Namespace, folder: CheckpointFolder, steps: list[int]) -> Told:
    if not steps:
        raise CheckpointError(
            f"There must be a checkpoint to show. Received: only damaged ones in {folder.folder}."
        )
    manifest = folder.manifest(steps[0])
    arrays = {
        name: {"shape": list(shape), "dtype": dtype}
        for name, (shape, dtype) in manifest.arrays.items()
    }
    files = {file.name: file.nbytes for file in manifest.files}
    told = {
        "step": manifest.step,
        **manifest.rest,
        "facts": manifest.facts,
        "files": files,
        "arrays": arrays,
    }
    lines = [
        f"{folder.path(manifest.step)}",
        *_indented({**manifest.rest, **manifest.facts}),
        "files",
    ]
    lines += [f"  {name}  {nbytes} bytes" for name, nbytes in files.items()]
    lines += [
        "arrays",
        *(f"  {name}  {one['dtype']} {one['shape']}" for name, one in arrays.items()),
    ]
    return told, True, lines


def _indented(value: dict[str, Any], depth: int = 0) -> list[str]:
    lines = []
    for name, part in value.items():
        if isinstance(part, dict) and part:
            lines += [f"{'  ' * depth}{name}", *_indented(part, depth + 1)]
        else:
            lines.append(f"{'  ' * depth}{name}: {json.dumps(finite(part))}")
    return lines
