"""The user's code: the line that runs, and in its source the line that computes the loss."""

import ast
import sys
import sysconfig
import threading
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

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
    *(str(folder) for folder in (_KERAS and _KERAS.parent, _TRAINER, _PACKAGE) if folder),
    *map(sysconfig.get_path, ("purelib", "platlib", "stdlib")),
)


def line_of_user(stack: Iterable[tuple[str, int]]) -> Line | None:
    """Return the innermost line of a stack outside of Keras, the engine, Python's own library and this one."""
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
    return frame.f_code.co_name == "fit" and _KERAS is not None and file.is_relative_to(_KERAS)


def _innermost_line(stack: Iterable[tuple[str, int]]) -> Line | None:
    return next((Line(file, number) for file, number in stack if is_of_user(file)), None)


def _dotted(node: ast.expr) -> str:
    """Return a name, with a dot before the name of an attribute."""
    return f"{'.' * isinstance(node, ast.Attribute)}{_name_of(node)}"


def _name_of(node: ast.expr) -> str:
    return str(getattr(node, "id", getattr(node, "attr", "")))


def line_of_loss(called: Line | None, *, is_penalty: bool = False) -> Line | None:
    """Return the line on which the loss is computed, from the one on which the model is called.

    It is the last line that assigns the target of `tape.gradient` or, without a tape, the function's result. If that
    line adds to another name (`full = loss + sum(model.losses)`), and the penalty is not asked for, it is the line that
    assigns this name. None where it cannot be read, or where only a branch could tell.
    """
    if called is None or (module := parsed(called.file)) is None:
        return None
    home = _innermost(module, called.number)
    targets = [node for node in _asked_of_tapes(home) if node.lineno >= called.number]
    for function in [] if targets else _called(module, home, called.number):
        targets += _asked_of_tapes(function)
        home = function if targets else home
    if not targets:
        targets = [*_returned(home, called.number)]
        targets = (
            targets if len(targets) == 1 else []
        )  # of several results, which one came is not known
    if not targets:
        return None
    return Line(
        called.file, _assigned(home, min(targets, key=lambda node: node.lineno), is_penalty)
    )


@cache
def parsed(file: str) -> ast.Module | None:
    """Return the tree of a file's source, if it can be read."""
    try:
        return ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None


def _functions(module: ast.Module) -> Iterator[Function]:
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _innermost(module: ast.Module, number: int) -> Function:
    around = [f for f in _functions(module) if f.lineno <= number <= (f.end_lineno or 0)]  # type: ignore[union-attr]
    return max(around, key=lambda f: f.lineno, default=module)  # type: ignore[union-attr]


def _called(module: ast.Module, home: Function, number: int) -> Iterator[Function]:
    names = set()
    for node in _own(home):
        if isinstance(node, ast.Call) and node.lineno <= number <= (node.end_lineno or 0):
            names.add(_name_of(node.func))
    yield from (f for f in _functions(module) if getattr(f, "name", "") in names)


def _own(function: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            yield node
            yield from _own(node)


def _asked_of_tapes(function: Function) -> list[ast.expr]:
    """Return the targets of the gradients: the first arguments of `tape.gradient`.

    A gradient that is taken inside of another tape, as for a penalty of gradients, is a part of the loss.
    """
    calls = [
        node
        for node in _own(function)
        if isinstance(node, ast.Call) and _dotted(node.func) == ".gradient"
    ]
    around = [node for node in _own(function) if isinstance(node, ast.With) and _tapes(node)]

    def is_inside(call: ast.Call, block: ast.With) -> bool:
        return block.lineno < call.lineno <= (block.end_lineno or 0) and _of(call) not in _tapes(
            block
        )

    outer = [call for call in calls if not any(is_inside(call, block) for block in around)]
    return [node.args[0] for node in outer or calls if node.args]


def _tapes(block: ast.With) -> set[str]:
    """Return the names of the tapes that a `with` opens."""
    opened = [item for item in block.items if isinstance(item.context_expr, ast.Call)]
    tapes = [i for i in opened if "GradientTape" in ast.dump(i.context_expr.func)]  # type: ignore[attr-defined]
    return {i.optional_vars.id for i in tapes if isinstance(i.optional_vars, ast.Name)}


def _of(call: ast.Call) -> str:
    return getattr(getattr(call.func, "value", None), "id", "")


def _returned(function: Function, number: int) -> Iterator[ast.expr]:
    """Yield the results of a function whose gradient is taken: it does not call the model in a loop."""
    loops = [
        node for node in _own(function) if isinstance(node, ast.For | ast.While | ast.AsyncFor)
    ]
    if isinstance(function, ast.Module) or any(
        loop.lineno <= number <= (loop.end_lineno or 0) for loop in loops
    ):
        return
    for node in _own(function):
        if isinstance(node, ast.Return) and node.value is not None and node.lineno >= number:
            yield (
                node.value.elts[0]
                if isinstance(node.value, ast.Tuple) and node.value.elts
                else node.value
            )


def _assigned(function: Function, target: ast.expr, is_penalty: bool) -> int:
    """Return the line before a target on which its name gets its value, or the target's own."""
    given = [
        node
        for node in _own(function)
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign)
    ]
    branches = [node for node in _own(function) if isinstance(node, ast.If | ast.Match)]
    wanted, line = target, target.lineno
    while isinstance(wanted, ast.Name):
        before = [node for node in given if node.lineno < line and wanted.id in _names(node)]
        if not before:
            break
        last = max(before, key=lambda node: node.lineno)
        is_added = isinstance(last, ast.AugAssign)
        if not is_added and any(
            each.lineno < last.lineno <= (each.end_lineno or 0) < line for each in branches
        ):
            break  # perhaps another branch ran
        value, line = last.value, last.lineno
        is_sum = isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add)
        if is_penalty or not (is_added or is_sum):
            break
        wanted = wanted if is_added or not isinstance(value, ast.BinOp) else value.left
    return line


def _names(given: ast.Assign | ast.AugAssign | ast.AnnAssign) -> set[str]:
    targets = given.targets if isinstance(given, ast.Assign) else [given.target]
    return {
        node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)
    }


def line_here() -> Line | None:
    """Return the innermost line of the user's code that runs."""
    return line_of_user(
        (each.f_code.co_filename, each.f_lineno) for each in frames(sys._getframe(1))
    )
