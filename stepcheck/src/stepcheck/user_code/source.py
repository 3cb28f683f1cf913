"""The user's code: the line that runs, and in its source the line that computes the
loss.
"""

import ast
import sys
import sysconfig
import threading
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from stepcheck.trace.log import Line
from stepcheck.user_code.stack import frames, running

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Module
_FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef
_PACKAGE = Path(__file__).parent.parent


def _folder(package: str) -> Path | None:
    """Return where a package lies; None if it is not installed."""
    found = find_spec(package)
    return Path(found.origin).parent if found and found.origin else None


_KERAS, _TRAINER = _folder("keras"), _folder("wholestep")
_COMMAND = "cli.py", "__main__.py"  # from where wholestep runs a script
LIBRARIES = (
    *(
        str(folder)
        for folder in (_KERAS and _KERAS.parent, _TRAINER, _PACKAGE)
        if folder
    ),
    *map(sysconfig.get_path, ("purelib", "platlib", "stdlib")),
)


def line_of_user(stack: Iterable[tuple[str, int]]) -> Line | None:
    """Return the innermost line of a stack outside of the frameworks and Python's own
    library.
    """
    line = _innermost_line(stack)
    main = threading.main_thread()
    is_of_keras = (
        "keras" in sys.modules and threading.current_thread() is not main
    )
    if (
        line is None and is_of_keras
    ):  # a replica's thread, for which the main one waits
        line = _innermost_line(
            running(sys._current_frames().get(main.ident or 0))
        )
    return line


def is_of_user(file: str) -> bool:
    """Whether a file holds the user's code: not a library's, and not generated."""
    return not (
        file.startswith((*LIBRARIES, "<")) or "__autograph_generated" in file
    )


def is_in_trainer() -> bool:
    """Whether a step of wholestep's trainer runs here."""
    files = (Path(each.f_code.co_filename) for each in frames(sys._getframe()))
    return any(
        file.parent == _TRAINER and file.name not in _COMMAND for file in files
    )


def is_in_fit() -> bool:
    """Whether the `fit` of some Keras model runs here."""
    codes = (frame.f_code for frame in frames(sys._getframe()))
    fits = (Path(code.co_filename) for code in codes if code.co_name == "fit")
    return _KERAS is not None and any(
        file.is_relative_to(_KERAS) for file in fits
    )


def _innermost_line(stack: Iterable[tuple[str, int]]) -> Line | None:
    return next(
        (Line(file, number) for file, number in stack if is_of_user(file)), None
    )


def line_of_loss(
    called: Line | None, *, is_penalty: bool = False
) -> Line | None:
    """Return the line on which the loss is computed, from the one on which the model is
    called.

    It is the last line that assigns the target of `tape.gradient` or, without a tape,
    the function's result. If that line adds to another name (`full = loss +
    sum(model.losses)`), and the penalty is not asked for, it is the line that assigns
    this name. None where it cannot be read, or where only a branch could tell.
    """
    module = None if called is None else parsed(called.file)
    if called is None or module is None:
        return None
    nodes = [each for each in ast.walk(module) if isinstance(each, _FUNCTIONS)]
    around = [each for each in nodes if _has(each, called.number)]
    home = around[-1] if around else module  # an inner one is walked later
    calls = (node for node in _own(home, ast.Call) if _has(node, called.number))
    names = {*map(_name_of, calls)}
    for function in (home, *(each for each in nodes if each.name in names)):
        asked = [
            node.args[0]
            for node in _own(function, ast.Call)
            if _name_of(node) == "gradient" and node.args
        ]
        later = [each for each in asked if each.lineno >= called.number]
        for target in (later if function is home else asked)[
            -1:
        ]:  # the outer tape's
            return Line(called.file, _assigned(function, target, is_penalty))
    results = [*_returned(home, called.number)]
    if len(results) != 1:  # of several results, which one came is not known
        return None
    return Line(called.file, _assigned(home, results[0], is_penalty))


def _name_of(call: ast.Call) -> str:
    """Return the name of a function or method that is called."""
    return str(getattr(call.func, "id", getattr(call.func, "attr", "")))


@cache
def parsed(file: str) -> ast.Module | None:
    """Return the tree of a file's source, if it can be read."""
    try:
        return ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None


def _has(node: ast.AST, number: int) -> bool:
    """Whether a line is one of a node's."""
    return node.lineno <= number <= (node.end_lineno or 0)  # type: ignore[attr-defined]


def _own(function: ast.AST, *kinds: type) -> Iterator[Any]:
    """Yield the nodes of some kinds in a function, but not in functions inside of it."""
    for node in ast.iter_child_nodes(function):
        if isinstance(node, (*_FUNCTIONS, ast.Lambda, ast.ClassDef)):
            continue
        if isinstance(node, kinds):
            yield node
        yield from _own(node, *kinds)


def _returned(function: Function, number: int) -> Iterator[ast.expr]:
    """Yield the results of a function whose gradient is taken: it calls the model in no
    loop.
    """
    loops = _own(function, ast.For, ast.While, ast.AsyncFor)
    if isinstance(function, ast.Module) or any(
        _has(loop, number) for loop in loops
    ):
        return
    for node in _own(function, ast.Return):
        if node.value is not None and node.lineno >= number:
            is_tuple = isinstance(node.value, ast.Tuple) and node.value.elts
            yield node.value.elts[0] if is_tuple else node.value


def _assigned(function: Function, target: ast.expr, is_penalty: bool) -> int:
    """Return the line before a target on which its name gets its value, or the target's
    own.
    """
    given = [*_own(function, ast.Assign, ast.AugAssign, ast.AnnAssign)]
    branches = [*_own(function, ast.If, ast.Match)]
    wanted, line = target, target.lineno
    while isinstance(wanted, ast.Name):
        before = [
            node
            for node in given
            if node.lineno < line and wanted.id in _names(node)
        ]
        if not before:
            break
        last = max(before, key=lambda node: node.lineno)
        is_added = isinstance(last, ast.AugAssign)
        ended = [
            each
            for each in branches
            if _has(each, last.lineno) and not _has(each, line)
        ]
        if ended and not is_added:
            break  # perhaps another branch ran
        value, line = last.value, last.lineno
        is_sum = isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add)
        if is_penalty or not (is_added or is_sum):
            break
        wanted = (
            wanted
            if is_added or not isinstance(value, ast.BinOp)
            else value.left
        )
    return line


def _names(given: ast.Assign | ast.AugAssign | ast.AnnAssign) -> set[str]:
    targets = given.targets if isinstance(given, ast.Assign) else [given.target]
    nodes = [node for target in targets for node in ast.walk(target)]
    return {node.id for node in nodes if isinstance(node, ast.Name)}


def line_here() -> Line | None:
    """Return the innermost line of the user's code that runs."""
    return line_of_user(running(sys._getframe(1)))
