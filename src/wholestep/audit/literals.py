"""The numbers that a script writes, and those of its command line."""

import ast
import operator
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import islice, product
from pathlib import Path

from wholestep.audit.log import Line

_OPERATORS = {ast.Mult: operator.mul, ast.Div: operator.truediv, ast.Pow: operator.pow}
_DEEPEST = 3  # names that stand for others
_MOST_VALUES = 100  # of one expression
_OF_A_RATE = re.compile(r"(^|_)(lr|rate|step_size|eta|alpha)$", re.IGNORECASE)


def numbers_of_command() -> Iterator[float]:
    """Yield the numbers in the arguments of the script."""
    for argument in sys.argv[1:]:
        with suppress(ValueError):
            yield float(argument.rpartition("=")[2])


@cache
def numbers_in(file: str) -> list[tuple[float, Line | None]]:
    """Return the numbers of a file: rates by their name, with their lines, and all results of its expressions."""
    try:
        nodes = [*ast.walk(ast.parse(Path(file).read_text(encoding="utf-8")))]
    except (OSError, SyntaxError, ValueError):
        return []
    named: dict[str, list[ast.expr]] = {}
    for name, node in (pair for each in nodes for pair in _named_in(each) if pair[0]):
        named.setdefault(name, []).append(node)

    def values(node: ast.expr | None, depth: int) -> set[float]:
        if isinstance(node, ast.Constant):
            with suppress(OverflowError):
                return {float(node.value)} if isinstance(node.value, int | float) else set()
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            found, pairs = set(), product(values(node.left, depth), values(node.right, depth))
            for pair in islice(pairs, _MOST_VALUES):
                with suppress(ArithmeticError, TypeError, ValueError):
                    found.add(float(_OPERATORS[type(node.op)](*pair)))
            return found
        if isinstance(node, ast.UnaryOp):
            return values(node.operand, depth)
        others = (each for own in named.get(_name(node), []) * (depth > 0) for each in values(own, depth - 1))
        return {*islice(others, _MOST_VALUES)}

    own = [node for name, nodes in named.items() if _OF_A_RATE.search(name) for node in nodes]
    found = [(v, Line(file, n.lineno)) for n in own for v in values(n, _DEEPEST)]
    made = {value for n in nodes if isinstance(n, ast.expr) for value in values(n, _DEEPEST)}
    return [*found, *((value, None) for value in made)]


def _named_in(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield (a name, its value) of an assignment, a default, an argument by name, or an entry of a dict."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            parts = [each.elts if isinstance(each, ast.Tuple) else [each] for each in (target, node.value)]
            yield from ((_name(one), value) for one, value in zip(*parts, strict=False))
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        yield _name(node.target), node.value
    elif isinstance(node, ast.arguments):
        yield from zip((a.arg for a in [*node.posonlyargs, *node.args][::-1]), node.defaults[::-1], strict=False)
        yield from ((a.arg, d) for a, d in zip(node.kwonlyargs, node.kw_defaults, strict=True) if d is not None)
    elif isinstance(node, ast.keyword):
        yield node.arg or "", node.value
    elif isinstance(node, ast.Dict):
        yield from ((_name(key), value) for key, value in zip(node.keys, node.values, strict=True))
    elif isinstance(node, ast.Call) and node.args:  # parser.add_argument("--rate", default=0.1)
        yield from ((_name(node.args[0]), each.value) for each in node.keywords if each.arg == "default")


def _name(node: ast.expr | None) -> str:
    """Return the last part of a name, the key of an entry, or an option of a command; "" for anything else."""
    if isinstance(node, ast.Subscript):
        return _name(node.slice)
    key = node.value if isinstance(node, ast.Constant) else ""
    name = getattr(node, "id", getattr(node, "attr", key))
    return name.lstrip("-").replace("-", "_") if isinstance(name, str) else ""
