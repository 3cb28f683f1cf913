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
from types import FrameType
from typing import Any

from stepcheck.trace.log import Line
from stepcheck.user_code.stack import frames, running

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Module
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
    is_of_keras = "keras" in sys.modules and threading.current_thread() is not main
    if line is None and is_of_keras:  # a replica's thread, for which the main one waits
        line = _innermost_line(running(sys._current_frames().get(main.ident or 0)))
    return line


def is_of_user(file: str) -> bool:
    """Whether a file holds the user's code: not a library's, and not generated."""
    return not (file.startswith((*LIBRARIES, "<")) or "__autograph_generated" in file)


def is_in_trainer() -> bool:
    """Whether a step of wholestep's trainer runs here."""
    files = (Path(each.f_code.co_filename) for each in frames(sys._getframe()))
    return any(file.parent == _TRAINER and file.name not in _COMMAND for file in files)


def is_in_fit() -> bool:
    """Whether the `fit` of some Keras model runs here."""
    return any(map(_is_fit, frames(sys._getframe())))


def _is_fit(frame: FrameType) -> bool:
    file = Path(frame.f_code.co_filename)
    return (
        frame.f_code.co_name == "fit"
        and _KERAS is not None
        and file.is_relative_to(_KERAS)
    )


def _innermost_line(stack: Iterable[tuple[str, int]]) -> Line | None:
    return next(
        (Line(file, number) for file, number in stack if is_of_user(file)), None
    )


def _name_of(node: ast.expr) -> str:
    """Return a name, or that of an attribute."""
    return str(getattr(node, "id", getattr(node, "attr", "")))


def line_of_loss(called: Line | None, *, is_penalty: bool = False) -> Line | None:
    """Return the line on which the loss is computed, from the one on which the model is
    called.

    It is the last line that assigns the target of `tape.gradient` or, without a tape,
    the function's result. If that line adds to another name (`full = loss +
    sum(model.losses)`), and the penalty is not asked for, it is the line that assigns
    this name. None where it cannot be read, or where only a branch could tell.
    """
    if called is None or (module := parsed(called.file)) is None:
        return None
    home = _innermost(module, called.number)
    targets = [node for node in _asked_of_tapes(home) if node.lineno >= called.number]
    for function in [] if targets else _called(module, home, called.number):
        targets += _asked_of_tapes(function)
        home = function if targets else home
    results = [] if targets else [*_returned(home, called.number)]
    if len(results) == 1:  # of several results, which one came is not known
        targets = results
    if not targets:
        return None
    first = min(targets, key=lambda node: node.lineno)
    return Line(called.file, _assigned(home, first, is_penalty))


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


def _functions(module: ast.Module) -> Iterator[Function]:
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _innermost(module: ast.Module, number: int) -> Function:
    around = [function for function in _functions(module) if _has(function, number)]
    return around[-1] if around else module  # an inner one is walked later


def _called(module: ast.Module, home: Function, number: int) -> Iterator[Function]:
    calls = [node for node in _own(home, ast.Call) if _has(node, number)]
    names = {_name_of(call.func) for call in calls}
    yield from (f for f in _functions(module) if getattr(f, "name", "") in names)


def _own(function: ast.AST, *kinds: type) -> Iterator[Any]:
    """Yield the nodes of some kinds in a function, but not in functions inside of it."""
    for node in ast.iter_child_nodes(function):
        if isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
        ):
            continue
        if isinstance(node, kinds):
            yield node
        yield from _own(node, *kinds)


def _asked_of_tapes(function: Function) -> list[ast.expr]:
    """Return the targets of the gradients: the first arguments of `tape.gradient`.

    A gradient that is taken inside of another tape, as for a penalty of gradients, is a
    part of the loss.
    """
    attributes = [
        node
        for node in _own(function, ast.Call)
        if isinstance(node.func, ast.Attribute)
    ]
    calls = [node for node in attributes if node.func.attr == "gradient" and node.args]
    blocks = [(block, _tapes(block)) for block in _own(function, ast.With)]
    inner = [
        call
        for call in calls
        for block, tapes in blocks
        if tapes and block.lineno < call.lineno and _has(block, call.lineno)
        if _name_of(call.func.value) not in tapes
    ]
    return [
        call.args[0] for call in calls if call not in inner or len(inner) == len(calls)
    ]


def _tapes(block: ast.With) -> set[str]:
    """Return the names of the tapes that a `with` opens."""
    opened = [item for item in block.items if isinstance(item.context_expr, ast.Call)]
    tapes = [
        item for item in opened if "GradientTape" in ast.unparse(item.context_expr)
    ]
    return {
        tape.optional_vars.id
        for tape in tapes
        if isinstance(tape.optional_vars, ast.Name)
    }


def _returned(function: Function, number: int) -> Iterator[ast.expr]:
    """Yield the results of a function whose gradient is taken: it calls the model in no
    loop.
    """
    loops = _own(function, ast.For, ast.While, ast.AsyncFor)
    if isinstance(function, ast.Module) or any(_has(loop, number) for loop in loops):
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
            node for node in given if node.lineno < line and wanted.id in _names(node)
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
        wanted = wanted if is_added or not isinstance(value, ast.BinOp) else value.left
    return line


def _names(given: ast.Assign | ast.AugAssign | ast.AnnAssign) -> set[str]:
    targets = given.targets if isinstance(given, ast.Assign) else [given.target]
    nodes = [node for target in targets for node in ast.walk(target)]
    return {node.id for node in nodes if isinstance(node, ast.Name)}


def line_here() -> Line | None:
    """Return the innermost line of the user's code that runs."""
    return line_of_user(running(sys._getframe(1)))
