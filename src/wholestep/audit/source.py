"""Where in the user's source the loss is computed whose gradient is taken, as far as the source shows it."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from wholestep.audit.log import Line

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Module


def line_of_loss(called: Line | None, *, is_penalty: bool = False) -> Line | None:
    """Return the line on which the loss is computed, from the one on which the model is called.

    It is the last one that gives what `tape.gradient` is asked for its name or, where there is no tape, what the
    function returns; if that adds something to another name (`full = loss + sum(model.losses)`), and it is not the
    penalty that is asked for, the line of that one. None where it cannot be read.
    """
    if called is None or (module := _parsed(called.file)) is None:
        return None
    home = _innermost(module, called.number)
    targets = [node for node in _asked_of_tapes(home) if node.lineno >= called.number]
    for function in [] if targets else _called(module, home, called.number):
        targets += _asked_of_tapes(function)
        home = function if targets else home
    targets = targets or list(_returned(home, called.number))
    if not targets:
        return None
    return Line(called.file, _assigned(home, min(targets, key=lambda node: node.lineno), is_penalty))


@cache
def _parsed(file: str) -> ast.Module | None:
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
    """Yield the file's functions that this line calls: a step that is traced shows no line of its own."""
    names = set()
    for node in _own(home):
        if isinstance(node, ast.Call) and node.lineno <= number <= (node.end_lineno or 0):
            names.add(getattr(node.func, "id", getattr(node.func, "attr", "")))
    yield from (f for f in _functions(module) if getattr(f, "name", "") in names)


def _own(function: ast.AST) -> Iterator[ast.AST]:
    """Yield what a function itself does, without the functions inside of it."""
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            yield node
            yield from _own(node)


def _asked_of_tapes(function: Function) -> list[ast.expr]:
    """Return what the gradients are taken of: the first arguments of `tape.gradient`."""
    calls = [node for node in _own(function) if isinstance(node, ast.Call) and _is_gradient(node.func)]
    return [node.args[0] for node in calls if node.args]


def _returned(function: Function, number: int) -> Iterator[ast.expr]:
    """Yield what a function returns of which the gradient is taken: one that calls the model in no loop of its own."""
    loops = [node for node in _own(function) if isinstance(node, ast.For | ast.While | ast.AsyncFor)]
    if isinstance(function, ast.Module) or any(loop.lineno <= number <= (loop.end_lineno or 0) for loop in loops):
        return
    for node in _own(function):
        if isinstance(node, ast.Return) and node.value is not None and node.lineno >= number:
            yield node.value.elts[0] if isinstance(node.value, ast.Tuple) and node.value.elts else node.value


def _is_gradient(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and function.attr == "gradient"


def _assigned(function: Function, target: ast.expr, is_penalty: bool) -> int:
    """Return the line before a target on which its name gets its value, or the target's own."""
    given = [node for node in _own(function) if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign)]
    wanted, line = target, target.lineno
    while isinstance(wanted, ast.Name):
        before = [node for node in given if node.lineno < line and wanted.id in _names(node)]
        if not before:
            break
        last = max(before, key=lambda node: node.lineno)
        value, line = last.value, last.lineno
        is_added = isinstance(last, ast.AugAssign)
        is_sum = isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add)
        if is_penalty or not (is_added or is_sum):
            break
        wanted = wanted if is_added or not isinstance(value, ast.BinOp) else value.left
    return line


def _names(given: ast.Assign | ast.AugAssign | ast.AnnAssign) -> set[str]:
    """Return the names that get a value."""
    targets = given.targets if isinstance(given, ast.Assign) else [given.target]
    return {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}
