"""Where in the user's source the loss is computed whose gradient is taken, as far as the source shows it."""

import ast
from collections.abc import Callable, Iterator, Mapping
from functools import cache, wraps
from pathlib import Path
from typing import Any, NamedTuple

from wholestep.audit.log import Line, is_of_user

_UNKNOWN = object()
_PLAIN = (
    *(ast.Name, ast.Attribute, ast.Constant, ast.Subscript, ast.Slice, ast.Tuple, ast.BinOp, ast.UnaryOp),
    *(ast.expr_context, ast.operator, ast.unaryop),
)
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


class LossCall(NamedTuple):
    """A call of a function of the user's that gets the model's outputs: the function, its arguments, their places."""

    function: Callable
    given: dict[int | str, Any]
    outputs: int | str

    def labels(self) -> int | str | None:
        """Return the place of the only argument that has rows; None if several have, or none."""
        places = [place for place, value in self.given.items() if len(getattr(value, "shape", None) or ())]
        return places[0] if len(places) == 1 else None

    def of(self, labels: int | str) -> Callable:
        """Return the function as one of labels and outputs, all other arguments as they are here."""
        given = {place: value for place, value in self.given.items() if place != labels}

        @wraps(self.function)
        def loss(y_true: Any, y_pred: Any) -> Any:
            every = {**given, labels: y_true, self.outputs: y_pred}
            places = sorted(place for place in every if isinstance(place, int))
            return self.function(
                *(every[i] for i in places), **{str(k): v for k, v in every.items() if not isinstance(k, int)}
            )

        return loss


def call_of_loss(called: Line | None, names: Mapping[str, Any]) -> LossCall | None:
    """Return the user's function of the model's outputs whose gradient is taken, of the line that calls the model.

    Args:
        names: what the function that calls the model knows. Only names, their parts and arithmetic are looked up.
    """
    line = line_of_loss(called)
    if called is None or line is None or (module := _parsed(called.file)) is None:
        return None
    home = _innermost(module, line.number)
    calls = [n for n in _own(home) if isinstance(n, ast.Call) and n.lineno <= line.number <= (n.end_lineno or 0)]
    earlier = [n for n in _own(home) if isinstance(n, ast.Call) and called.number <= n.lineno < line.number]
    for node in [*calls, *reversed(earlier)]:  # a loss may be scaled by a line of its own
        function = _looked_up(node.func, names)
        function = getattr(function, "python_function", function)
        code = getattr(function, "__code__", None)
        if code is None or not is_of_user(code.co_filename):
            continue
        given: dict[int | str, Any] = {**dict(enumerate(node.args)), **{str(k.arg): k.value for k in node.keywords}}
        outputs = [place for place, value in given.items() if _is_of_line(home, value, called.number)]
        others = {place: _looked_up(value, names) for place, value in given.items() if place not in outputs}
        if len(outputs) == 1 and all(value is not _UNKNOWN for value in others.values()):
            return LossCall(function, others, outputs[0])
    return None


def is_gone_over_again(file: str, name: str) -> bool:
    """Whether a file has a loop over this name inside of another loop, which does not give it another value."""
    for outer in ast.walk(_parsed(file) or ast.Module([], [])):
        if not isinstance(outer, ast.For | ast.While) or name in _set_in(outer):
            continue
        inner = [node for part in outer.body for node in ast.walk(part) if isinstance(node, ast.For)]
        if any(isinstance(n, ast.Name) and n.id == name for loop in inner for n in ast.walk(loop.iter)):
            return True
    return False


def _set_in(loop: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(loop) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _is_of_line(function: Function, value: ast.expr, number: int) -> bool:
    """Whether an argument is what the model returns that is called on this line, or the name that it was given."""
    if isinstance(value, ast.Name):
        return _assigned(function, value, True) == number
    return value.lineno <= number <= (value.end_lineno or 0) and any(isinstance(n, ast.Call) for n in ast.walk(value))


def _looked_up(value: ast.expr, names: Mapping[str, Any]) -> Any:
    """Return the value of an expression without calls; `_UNKNOWN` if it has none."""
    if not all(isinstance(node, _PLAIN) for node in ast.walk(value)):
        return _UNKNOWN
    try:
        return eval(compile(ast.Expression(value), "<the argument of a loss>", "eval"), {"__builtins__": {}}, names)
    except Exception:  # a name that is given its value later
        return _UNKNOWN


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
    """Return what the gradients are taken of: the first arguments of `tape.gradient`.

    One that is taken inside of another tape, as for a penalty of gradients, is a part of the loss.
    """
    calls = [node for node in _own(function) if isinstance(node, ast.Call) and _is_gradient(node.func)]
    around = [node for node in _own(function) if isinstance(node, ast.With) and _tapes(node)]
    inside = [
        c for c in calls for w in around if w.lineno < c.lineno <= (w.end_lineno or 0) and _of(c) not in _tapes(w)
    ]
    outer = [call for call in calls if not any(call is each for each in inside)]
    return [node.args[0] for node in outer or calls if node.args]


def _tapes(block: ast.With) -> set[str]:
    """Return the names of the tapes that a `with` opens."""
    opened = [item for item in block.items if isinstance(item.context_expr, ast.Call)]
    tapes = [i for i in opened if "GradientTape" in ast.dump(i.context_expr.func)]  # type: ignore[attr-defined]
    return {i.optional_vars.id for i in tapes if isinstance(i.optional_vars, ast.Name)}


def _of(call: ast.Call) -> str:
    """Return the name of the tape whose gradient a call takes."""
    return getattr(getattr(call.func, "value", None), "id", "")


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
