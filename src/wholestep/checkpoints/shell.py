"""`wholestep checkpoint`: list, verify and show checkpoints. Needs no Keras."""

import argparse
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from wholestep.checkpoints.files import read_all
from wholestep.checkpoints.folder import Folder, locate
from wholestep.checkpoints.manifest import Manifest, finite
from wholestep.checkpoints.settings import value_in
from wholestep.errors import CheckpointError, SpecificationError, message


def add_commands(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add `checkpoint ls|verify|show PATH`."""
    text = "Look at checkpoints. The exit code is 1 if anything is bad."
    parser = commands.add_parser("checkpoint", help="list, verify and show checkpoints", description=text)
    kinds = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (text, call) in {
        "ls": ("list the checkpoints of a folder, also damaged ones", partial(_each, Folder.manifest)),
        "verify": ("read every byte of the checkpoints, and compare the digests", partial(_each, Folder.verify)),
        "show": ("show the content of the newest, or of the named, checkpoint", _show),
    }.items():
        own = kinds.add_parser(name, help=text, description=f"{text.capitalize()}.")
        own.add_argument("path", help="a folder of checkpoints, or a single checkpoint in it")
        own.add_argument("--json", action="store_true", help="print JSON")
        own.set_defaults(command=lambda arguments, call=call: _run(arguments, call))


def _run(arguments: argparse.Namespace, call: Callable[..., Any]) -> int:
    try:
        folder, step = locate(arguments.path)
        steps = folder.steps() if step is None else [step]
        if not steps and not folder.bad():
            must = "The path must hold a checkpoint."
            raise CheckpointError(message(must, f"none in {arguments.path}", "another path."))
        told, is_good, lines = call(folder, steps)
    except (CheckpointError, SpecificationError) as error:
        print(error, file=sys.stderr)
        return 1
    _say(json.dumps(finite(told), indent=1) if arguments.json else "\n".join(lines))
    return 0 if is_good else 1


def _say(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # closed by a reader such as `head`; the flush at exit must not fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _each(read: Callable[[Folder, int], Manifest], folder: Folder, steps: list[int]) -> tuple[Any, bool, list[str]]:
    """Return a description of each checkpoint, also damaged ones, as JSON and as lines."""
    told = []
    for step in steps:
        one: dict[str, Any] = {"name": folder.path(step).name, "step": step}
        try:
            manifest = read(folder, step)
        except CheckpointError as error:
            if os.path.lexists(folder.path(step)):  # a writer may have removed it meanwhile
                told.append(one | {"bad": str(error)})
            continue
        value = value_in(manifest)
        facts = {"time": manifest.rest.get("time"), "bytes": manifest.nbytes, "arrays": len(manifest.arrays)}
        told.append(one | facts | ({} if value is None else {"watched": manifest.rest["watched"]}))
    told += [{"name": path.name, "bad": _why(path)} for path in folder.bad()]
    return told, not any("bad" in one for one in told), [_line(one) for one in told]


def _line(one: dict[str, Any]) -> str:
    if "bad" in one:
        return f"{one['name']}  BAD: {one['bad']}"
    watched = one.get("watched")
    words = "" if watched is None else f"  {watched['name']} {watched['number']:.6g}"
    return f"{one['name']}  {one['time']}  {one['bytes']} bytes in {one['arrays']} arrays{words}"


def _why(path: Path) -> str:
    try:
        return str(json.loads(read_all(path / "why.json", 1 << 16))["why"])
    except (OSError, CheckpointError, ValueError, KeyError, TypeError, RecursionError):
        return "set aside"


def _show(folder: Folder, steps: list[int]) -> tuple[Any, bool, list[str]]:
    if not steps:
        raise CheckpointError(f"There must be a checkpoint to show. Received: only damaged ones in {folder.folder}.")
    manifest = folder.manifest(steps[0])
    arrays = {name: {"shape": list(shape), "dtype": dtype} for name, (shape, dtype) in manifest.arrays.items()}
    files = {file.name: file.nbytes for file in manifest.files}
    told = {"step": manifest.step, **manifest.rest, "facts": manifest.facts, "files": files, "arrays": arrays}
    lines = [f"{folder.path(manifest.step)}", *_indented({**manifest.rest, **manifest.facts}), "files"]
    lines += [f"  {name}  {nbytes} bytes" for name, nbytes in files.items()]
    lines += ["arrays", *(f"  {name}  {one['dtype']} {one['shape']}" for name, one in arrays.items())]
    return told, True, lines


def _indented(value: dict[str, Any], depth: int = 0) -> list[str]:
    lines = []
    for name, part in value.items():
        if isinstance(part, dict) and part:
            lines += [f"{'  ' * depth}{name}", *_indented(part, depth + 1)]
        else:
            lines.append(f"{'  ' * depth}{name}: {json.dumps(finite(part))}")
    return lines
