"""Numbers in words: coefficients that were solved for as fractions of known counts; and the numbers of a script."""

import ast
import operator
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import combinations, islice, product
from pathlib import Path

import numpy as np

from wholestep.audit.log import Line

_MULTIPLES = {1.0: "", -1.0: "minus ", 2.0: "twice ", 0.5: "half of "}
_MOST_COUNTS = 3  # in one fraction
_ROUNDING = 1e-9
MEANT = "what it should"
_OPERATORS = {ast.Mult: operator.mul, ast.Div: operator.truediv, ast.Pow: operator.pow}
_DEEPEST = 3  # names that stand for others
_MOST_VALUES = 100  # of one expression
_OF_A_RATE = re.compile(r"(^|_)(lr|rate|step_size|eta|alpha)$", re.IGNORECASE)


@dataclass(frozen=True)
class Reading:
    """Numbers in words.

    Attributes:
        cost: how much has to be supposed: 0 for the numbers that were meant, 1 for each count in a fraction.
        key: "right", "none", "number" where one is solved for, or the fraction.
        values: the numbers that the words give.
    """

    cost: float
    text: str
    key: str
    values: np.ndarray

    @property
    def is_right(self) -> bool:
        """Whether these are the numbers that were meant."""
        return self.key == "right"


def readings(
    values: np.ndarray, slack: np.ndarray, counts: dict[str, np.ndarray], right: np.ndarray, *, is_plain: bool
) -> list[Reading]:
    """Return what these numbers may be, the simplest first.

    Args:
        slack: by how much each may be off.
        counts: known counts, by name, one for each number.
        right: the numbers that were meant.
        is_plain: whether a constant multiple of the meant numbers comes before any fraction.
    """
    slack = np.maximum(slack, 1e-12)
    if np.all(np.abs(values - right) <= slack):
        return [Reading(0, "as meant", "right", right)]
    if np.all(np.abs(values) <= slack):
        return [Reading(1, "not at all", "none", np.zeros_like(values))]
    found = sorted(_fractions(values, slack, counts, right), key=lambda reading: reading.cost)[:5]
    base = right if np.all(right != 0) else np.ones_like(values)
    ratio, loose = values / base, np.max(slack / np.abs(base))
    if not is_plain or np.ptp(ratio) > loose:
        return found
    middle = float(np.median(ratio))
    near = min((1, 2, 3, 4, 5, 10, -1, 0.5), key=lambda number: abs(middle - number))
    is_near = abs(middle - near) <= max(loose, 1e-4 * abs(near))
    told = f"{near if is_near else middle:.4g}" + (f" times {MEANT}" if base is right else "")
    key = f"{float(near)}:" if is_near else "number"
    return sorted([Reading(1, told, key, middle * base), *found[:2]], key=lambda reading: reading.cost)


def _fractions(
    values: np.ndarray, slack: np.ndarray, counts: dict[str, np.ndarray], right: np.ndarray
) -> list[Reading]:
    """Return the fractions of counts that these numbers are, times 1, -1, 2, 1/2 or one number that is solved for."""
    kept: dict[str, np.ndarray] = {}
    for name, column in counts.items():
        is_other = not any(np.allclose(column, other, rtol=_ROUNDING) for other in kept.values())
        if is_other and np.all(column > 0) and np.any(column != 1):
            kept[name] = column
    one: tuple[tuple[str, ...], np.ndarray] = (), np.ones_like(values)
    single = [((name,), column) for name, column in kept.items()]
    pairs = [(x + y, a * b) for (x, a), (y, b) in combinations(single, 2)]
    tops = [one, *single, *((name * 2, column**2) for name, column in single)]
    if np.all(right != 0):
        tops.append(((MEANT,), right))
    ways = [
        (top, low, above / below)
        for top, above in tops
        for low, below in [one, *single, *pairs]
        if not set(top) & set(low) and len(top) + len(low) <= _MOST_COUNTS
    ]
    shapes = np.stack([shape for *_, shape in ways])
    ratios, loose = values / shapes, slack / np.abs(shapes)
    middles = np.median(ratios, axis=1)
    fits = np.all(np.abs(ratios - middles[:, None]) <= loose + _ROUNDING * np.abs(middles[:, None]), axis=1)
    found = []
    for i in np.flatnonzero(fits):
        top, low, shape = ways[i]
        near = next((m for m in _MULTIPLES if np.all(np.abs(ratios[i] - m) <= loose[i] + _ROUNDING)), None)
        cost = sum(name != MEANT for name in top) + len(low) - 0.5 * (top == (MEANT,) and bool(low))
        cost += 2.5 if near is None else 0 if near == 1 else 1
        number = middles[i] if near is None else near
        below = f"({' x '.join(low)})" if len(low) > 1 else "".join(low)
        fraction = (" x ".join(top) or "1" * bool(low)) + (f" / {below}" if low else "")
        multiple = f"{number:.4g} x " if near is None else _MULTIPLES[near]
        key = "number" if near is None else f"{near}:{fraction}"
        text = f"{multiple}{fraction}" if fraction else f"{number:.4g}"
        found.append(Reading(max(cost, 0.5), text, key, number * shape))
    return found


def farthest_first(ratios: np.ndarray) -> np.ndarray:
    """Return each number once, the farthest from 1 first; nothing if all are 1.

    >>> farthest_first(np.array([1.0, 1.0, 0.5, 3.0, 0.5])).tolist()
    [3.0, 0.5, 1.0]
    """
    single = np.array([*dict.fromkeys(float(f"{ratio:.4g}") for ratio in ratios)])
    return single[np.argsort(-np.abs(single - 1), kind="stable")] if np.any(single != 1) else single[:0]


def least(columns: list[np.ndarray], wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (the coefficients of columns whose sum is nearest, by how much each may be off for a unit of error).

    >>> least([np.array([2.0, 0.0]), np.array([0.0, 4.0])], np.array([2.0, 2.0]))
    (array([1. , 0.5]), array([0.5 , 0.25]))
    """
    basis = np.stack(columns, axis=1)
    if not (np.all(np.isfinite(basis)) and np.all(np.isfinite(wanted))):
        return np.full(len(columns), np.nan), np.zeros(len(columns))
    sizes = np.linalg.norm(basis, axis=0)
    sizes = np.where(sizes == 0, 1, sizes)
    q, r = np.linalg.qr(basis / sizes)
    u, s, vt = np.linalg.svd(r, full_matrices=False)
    inverse = vt.T * np.where(s > 1e-6 * s[0], 1 / np.where(s == 0, 1, s), 0)
    return inverse @ (u.T @ (q.T @ wanted)) / sizes, np.linalg.norm(inverse, axis=1) / sizes


def arguments() -> Iterator[float]:
    """Yield the numbers in the arguments of the script."""
    for argument in sys.argv[1:]:
        with suppress(ValueError):
            yield float(argument.rpartition("=")[2])


@cache
def written(file: str) -> list[tuple[float, Line | None]]:
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
