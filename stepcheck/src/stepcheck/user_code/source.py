"""The user's code: the lines that run, and in its source the line that computes the loss."""

import ast
import sys
import sysconfig
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache, cached_property
from importlib.util import find_spec
from inspect import getattr_static
from itertools import takewhile
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any, TypeVar

from stepcheck.command.stop import frames
from stepcheck.trace.log import Line
from stepcheck.trace.loops import LossCall

TRAINING = "fit", "train_on_batch", "gradient", "grad", "value_and_grad", "stateless_apply", "apply_gradients"
USING = "predict", "predict_on_batch", "evaluate", "save", "save_weights"
_LOOPS = ast.For, ast.AsyncFor, ast.While, ast.ListComp, ast.GeneratorExp, ast.SetComp, ast.DictComp
_UNKNOWN = object()
Node = TypeVar("Node", bound=ast.stmt | ast.expr)
_PLAIN = (
    *(ast.Name, ast.Attribute, ast.Constant, ast.Subscript, ast.Slice, ast.Tuple, ast.BinOp, ast.UnaryOp),
    *(ast.expr_context, ast.operator, ast.unaryop),
)
Place = tuple[str, int, int]  # where code has run: an instruction's column, or -1 for a line
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Module
_PACKAGE, _KERAS = Path(__file__).parent.parent, str(Path(getattr(find_spec("keras"), "origin", "")).parent)
_RUNNER = str(_PACKAGE / "command" / "script.py")
_TRAINER = Path(getattr(find_spec("wholestep"), "origin", None) or "").parent
_COMMAND = "cli.py", "__main__.py"  # from where wholestep runs a script
LIBRARIES = (
    str(Path(_KERAS).parent),
    str(_PACKAGE),
    str(_TRAINER),
    *map(sysconfig.get_path, ("purelib", "platlib", "stdlib")),
)


def line_of_user(stack: Iterable[tuple[str, int]]) -> Line | None:
    """Return the innermost line of a stack outside of Keras, the engine, Python's own library and this one."""
    line = _innermost_line(stack)
    main = threading.main_thread()
    is_of_keras = "keras" in sys.modules and threading.current_thread() is not main
    if line is None and is_of_keras:  # a replica's thread, for which the main one waits
        from stepcheck.user_code.stack import running

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
    return frame.f_code.co_name == "fit" and frame.f_code.co_filename.startswith(_KERAS)


def _innermost_line(stack: Iterable[tuple[str, int]]) -> Line | None:
    return next((Line(file, number) for file, number in stack if is_of_user(file)), None)


def place_of_loop(*, begins_fit: bool = False) -> tuple[tuple[Line, ...], bool]:
    """Return (the lines that lead to the script's outermost loop that runs, and its own; whether `fit` runs or begins).

    The lines of a `fit` lead to its call, if no loop is around it; for code outside of all loops there are none.
    """
    lines: list[Line] = []
    running = _frames_of_script()
    num = [*map(_is_fit, running), True].index(True)
    is_fit = begins_fit or num < len(running)
    for frame in running[:num]:
        if is_of_user(frame.f_code.co_filename):
            loop, _ = _loop_around(frame.f_code.co_filename, frame.f_lineno)
            lines.append(Line(frame.f_code.co_filename, loop or frame.f_lineno))
            if loop:
                return tuple(lines), is_fit
    return tuple(lines) if is_fit else (), is_fit


def calls_later(verbs: tuple[str, ...], others: frozenset[str] = frozenset()) -> bool:
    """Whether the script may call one of these after the statements that run now; `others` are modules of no script."""
    places: list[Line] = []
    running = [frame for frame in _frames_of_script() if is_of_user(frame.f_code.co_filename)]
    for file, number in [(f.f_code.co_filename, f.f_lineno) for f in running]:
        places.append(Line(file, _loop_around(file, number)[1] or number))
        if _loop_around(file, number)[1]:
            break
    own = ({*sys.modules} - others) | {"__main__"}
    files = (str(getattr(sys.modules.get(name), "__file__", None) or "<") for name in own)
    return _calls_later(verbs, tuple(places), tuple(sorted({*filter(is_of_user, files)})))


@cache
def _calls_later(verbs: tuple[str, ...], places: tuple[Line, ...], files: tuple[str, ...]) -> bool:
    given = [each for file in files for each in _given(file)]
    functions = {name for name, node in given if isinstance(node, ast.FunctionDef)}
    names = {*verbs, *(f".{verb}" for verb in verbs)}
    calling = [(name, _calls(node, functions)) for name, node in given]
    while more := {name for name, called in calling if called & names} - names:
        names |= more
    for file, number in places:
        home = _innermost(parsed(file) or ast.Module([], []), number)
        if any(_calls(node, functions) & names for node in _after(home, number)):
            return True
    return False


def _calls(node: ast.AST, functions: set[str]) -> set[str]:
    """Return the names that are called in a node, and those of functions that are passed to a call."""
    calls = [inner for inner in ast.walk(node) if isinstance(inner, ast.Call)]
    return {_dotted(call.func) for call in calls} | {_dotted(each) for call in calls for each in call.args} & functions


def _dotted(node: ast.expr) -> str:
    """Return a name, with a dot before the name of an attribute."""
    return f"{'.' * isinstance(node, ast.Attribute)}{_name_of(node)}"


def _frames_of_script() -> list[FrameType]:
    """Return the frames of the main thread that the script has, the outermost first."""
    every = frames(sys._current_frames().get(threading.main_thread().ident or 0))
    return [*takewhile(lambda frame: frame.f_code.co_filename != _RUNNER, every)][::-1]


@cache
def _loop_around(file: str, number: int) -> tuple[int, int]:
    """Return the first and the last line of the outermost loop of a function that holds a line; zeros without one."""
    home = _innermost(parsed(file) or ast.Module([], []), number)
    loops = [(n.lineno, n.end_lineno or 0) for n in _own(home) if isinstance(n, _LOOPS)]
    return min(((a, b) for a, b in loops if a <= number <= b), default=(0, 0))


@cache
def _given(file: str) -> list[tuple[str, ast.AST]]:
    """Return the names that a file gives to functions and values, with their definitions; attributes have a dot."""
    found: list[tuple[str, ast.AST]] = []
    for node in ast.walk(parsed(file) or ast.Module([], [])):
        if isinstance(node, ast.FunctionDef):
            found += [(node.name, node), (f".{node.name}", node)]
        elif isinstance(node, ast.Assign):
            own = [t for t in ast.walk(node) if isinstance(t, ast.Name | ast.Attribute)]
            found += [(_dotted(t), node) for t in own if isinstance(t.ctx, ast.Store)]
    return found


def _after(node: ast.AST, number: int) -> Iterator[ast.AST]:
    """Yield the statements of a function, of its inner blocks too, that come after a line."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.stmt | ast.excepthandler) and not isinstance(inner, ast.FunctionDef | ast.ClassDef):
            if inner.lineno > number:
                yield inner
            elif number <= (inner.end_lineno or 0):
                yield from _after(inner, number)


def _name_of(node: ast.expr) -> str:
    return str(getattr(node, "id", getattr(node, "attr", "")))


def line_of_loss(called: Line | None, ran: Collection[Place] | None = None, *, is_penalty: bool = False) -> Line | None:
    """Return the line on which the loss is computed, from the one on which the model is called.

    It is the last line that assigns the target of `tape.gradient` or, without a tape, the function's result. If that
    line adds to another name (`full = loss + sum(model.losses)`), and the penalty is not asked for, it is the line that
    assigns this name. None where it cannot be read.
    """
    if called is None or (module := parsed(called.file)) is None:
        return None
    home = _innermost(module, called.number)
    targets = [node for node in _asked_of_tapes(home) if node.lineno >= called.number]
    for function in [] if targets else _called(module, home, called.number):
        targets += _asked_of_tapes(function)
        home = function if targets else home
    executed = _PartsThatRan(home, None if ran is None else [place for place in ran if place[0] == called.file])
    targets = targets or executed.of([*_returned(home, called.number)])
    if not targets:
        return None
    return Line(called.file, _assigned(home, min(targets, key=lambda node: node.lineno), is_penalty, executed.of))


def line_of_step(taken: Line, ran: Collection[Place]) -> Line:
    """Return the line that uses gradients to change variables; the line that takes them if the file cannot be read.

    It is the first that assigns names which the gradients are taken of, calls `assign`, or returns; else the first use.
    """
    home = _innermost(parsed(taken.file) or ast.Module([], []), taken.number)
    around = [n for n in _own(home) if isinstance(n, ast.Assign) and n.lineno <= taken.number <= (n.end_lineno or 0)]
    if not around:
        return taken
    target = around[0].targets[0]
    last = target.elts[-1] if isinstance(target, ast.Tuple) else target  # of (value, gradients)
    names = {node.id for node in ast.walk(last) if isinstance(node, ast.Name)}
    later = [n for n in _own(home) if isinstance(n, ast.stmt) and n.lineno > (around[0].end_lineno or 0)]
    using = [node for node in later if any(isinstance(n, ast.Name) and n.id in names for n in _of_statement(node))]
    executed = _PartsThatRan(home, [place for place in ran if place[0] == taken.file]).of(using)
    read = {node.id for node in ast.walk(around[0].value) if isinstance(node, ast.Name)}
    steps = [node for node in executed if any(_changes(each, read) for each in ast.walk(node))]
    return Line(taken.file, min((node.lineno for node in steps or executed), default=taken.number))


def _changes(node: ast.AST, names: set[str]) -> bool:
    """Whether a node assigns one of these names, calls `assign` or `apply` of something, or returns."""
    is_stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in names
    is_called = isinstance(node, ast.Attribute) and node.attr.startswith(("assign", "apply"))
    return is_stored or is_called or isinstance(node, ast.Return)


def _of_statement(node: ast.stmt) -> Iterator[ast.AST]:
    """Yield the parts of a statement, without the statements in it."""
    for part in ast.iter_child_nodes(node):
        if not isinstance(part, ast.stmt | ast.excepthandler):
            yield from ast.walk(part)


class _PartsThatRan:
    """Which nodes of a function have run: all may have if no places are known (None)."""

    def __init__(self, function: Function, ran: Collection[Place] | None):
        self._ran = ran
        branches = [part for node in _own(function) if isinstance(node, ast.If) for part in (*node.body, *node.orelse)]
        self._in_branches = {id(inner) for part in branches for inner in ast.walk(part)}

    def of(self, nodes: list[Node]) -> list[Node]:
        """Return the nodes that have run; nothing if the branch is not known."""
        if self._ran is None:
            return nodes
        known = [node for node in nodes if any(_is_in(node, place) for place in self._ran)]
        return known or [node for node in nodes if not self._in_branches & {*map(id, nodes)}]


def _is_in(node: ast.stmt | ast.expr, place: Place) -> bool:
    """Whether a place is inside of a node; an operation of a trace has a line alone."""
    _, number, column = place
    start, end = (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)
    return start[0] <= number <= end[0] if column < 0 else start <= (number, column) <= end


def call_of_loss(called: Line | None, names: Mapping[str, Any]) -> LossCall | None:
    """Return the user's function of the model's outputs whose gradient is taken; `names`: of the caller, by name."""
    line = line_of_loss(called)
    if called is None or line is None or (module := parsed(called.file)) is None:
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


def _is_of_line(function: Function, value: ast.expr, number: int) -> bool:
    """Whether an argument is the output of the model that is called on this line, or its name."""
    if isinstance(value, ast.Name):
        return _assigned(function, value, True) == number
    return value.lineno <= number <= (value.end_lineno or 0) and any(isinstance(n, ast.Call) for n in ast.walk(value))


def _looked_up(value: ast.expr, names: Mapping[str, Any]) -> Any:
    """Return the value of an expression without calls; `_UNKNOWN` if it has none, or runs code of the user's."""
    parts = [node for node in ast.walk(value) if isinstance(node, ast.Subscript | ast.Attribute)]
    if not all(isinstance(node, _PLAIN) for node in ast.walk(value)):
        return _UNKNOWN
    if any(_runs_code(_looked_up(node.value, names), node) for node in parts):  # the script's own call runs it too
        return _UNKNOWN
    try:
        return eval(compile(ast.Expression(value), "<the argument of a loss>", "eval"), {"__builtins__": {}}, names)
    except Exception:  # a name that is given its value later
        return _UNKNOWN


def _runs_code(owner: Any, part: ast.Subscript | ast.Attribute) -> bool:
    """Whether reading a part of an object runs the user's code: an item of a dataset, or a property."""
    kind = type(owner)
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    if file is None or not is_of_user(file):
        return False
    if isinstance(part, ast.Subscript):
        return isinstance(getattr_static(kind, "__getitem__", None), FunctionType)
    return isinstance(getattr_static(owner, part.attr, property()), property | cached_property)


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
    calls = [node for node in _own(function) if isinstance(node, ast.Call) and _dotted(node.func) == ".gradient"]
    around = [node for node in _own(function) if isinstance(node, ast.With) and _tapes(node)]

    def is_inside(call: ast.Call, block: ast.With) -> bool:
        return block.lineno < call.lineno <= (block.end_lineno or 0) and _of(call) not in _tapes(block)

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
    loops = [node for node in _own(function) if isinstance(node, ast.For | ast.While | ast.AsyncFor)]
    if isinstance(function, ast.Module) or any(loop.lineno <= number <= (loop.end_lineno or 0) for loop in loops):
        return
    for node in _own(function):
        if isinstance(node, ast.Return) and node.value is not None and node.lineno >= number:
            yield node.value.elts[0] if isinstance(node.value, ast.Tuple) and node.value.elts else node.value


def _assigned(function: Function, target: ast.expr, is_penalty: bool, executed: Callable[[list], list] = list) -> int:
    """Return the line before a target on which its name gets its value, or the target's own."""
    given = [node for node in _own(function) if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign)]
    wanted, line = target, target.lineno
    while isinstance(wanted, ast.Name):
        before = executed([node for node in given if node.lineno < line and wanted.id in _names(node)])
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
    targets = given.targets if isinstance(given, ast.Assign) else [given.target]
    return {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}


def line_here() -> Line | None:
    """Return the innermost line of the user's code that runs."""
    return line_of_user((each.f_code.co_filename, each.f_lineno) for each in frames(sys._getframe(1)))
