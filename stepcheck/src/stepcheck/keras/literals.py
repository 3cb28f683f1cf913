"""The numbers in a script, and rates that are such a number times a count."""

import ast
import operator
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import islice, product
from pathlib import Path

import numpy as np

from stepcheck.report.found import Likely
from stepcheck.solve.evidence import Evidence
from stepcheck.trace.log import Line
from stepcheck.trace.measure import FINE

_OPERATORS = {ast.Mult: operator.mul, ast.Div: operator.truediv, ast.Pow: operator.pow}
_DEEPEST = 3  # names that stand for others
_MOST_VALUES = 100  # of one expression
_OF_A_RATE = re.compile(r"(^|_)(lr|rate|step_size|eta|alpha)$", re.IGNORECASE)
_SUMS = {  # of what a factor on the rate is the number: the words, and the causes that say the same
    "rows": (
        "the loss is a sum over the rows, where a mean is meant: divide it by the number of rows",
        "never divided",
    ),
    "microbatches": ("the gradients of microbatches are added up: divide by their number", "summed over microbatches"),
    "replicas": ("the gradients of replicas are added up: divide by their number", "summed over replicas"),
}
_OF_ROWS = re.compile(r"\blen\(|shape|size")
_LITERAL = re.compile(r"(?<![\w.])\d*\.?\d+(?:e-?\d+)?(?![\w.\[\]])")


def counted(evidence: list[Evidence], rates: np.ndarray, *, is_finite: bool) -> tuple[list[float], list[str]]:
    """Return (the rates that are meant, a note), if rates are a rate of the script times a count, and no such number.

    A count is the number of rows, microbatches or replicas of an update. A rate of the script has the name of a
    rate, or stands in the line of the step. Of others only a note is returned, if they have fewer digits.
    """
    counts = np.array([(e.whole[0], len(e.update.pieces), e.num_replicas) for e in evidence]).T
    lines = [piece.called.line for e in evidence for piece in e.update.pieces]
    numbers = [
        number for file in sorted({line.file for line in lines if line is not None}) for number in numbers_in(file)
    ]
    step = evidence[-1].meant.replay.line_of_step(evidence[-1].update)
    is_scaled = step is not None and _OF_ROWS.search(step.text) is not None  # by the loop, on purpose
    if step is not None:
        numbers += [(float(number), step) for number in _LITERAL.findall(step.text)]
    most = float(rates.max())
    own = float(np.asarray(getattr(evidence[0].meant.optimizer, "learning_rate", 0.0)))
    known = own, *numbers_of_command(), *(number for number, _ in numbers)
    if is_scaled or (is_even(rates) and any(_is_near(most, each) for each in known)):
        return [], []
    for (name, (told, cause)), num in zip(_SUMS.items(), counts, strict=True):
        if num.max() <= 1 or num.min() < 1 or not is_even(rates / num):
            continue
        rate = float((rates / num)[0])
        words = f"{most:.4g} is {num[rates.argmax()]:.0f} {name} times {rate:.4g}"
        if (line := next((line for n, line in numbers if line is not None and _is_near(rate, n)), None)) is not None:
            note = f"The rate {words}, a number of the script ({line}): {told}."
            return (rates / num).tolist(), [Likely(note).of(cause)]
        if name == "rows" and np.ptp(num) == 0 and _digits(rate) < _digits(most):
            hint = f"{words}: does the loop take the sum of its rows' losses?"
            return [], [hint if is_finite else Likely(f"The weights explode. {hint}")]
    return [], []


def _is_near(one: float, two: float) -> bool:
    return abs(one - two) <= FINE.differs * abs(one)


def is_even(numbers: np.ndarray, *others: float) -> bool:
    """Whether all numbers are equal, up to rounding."""
    return not len(numbers) or float(np.ptp([*numbers, *others])) <= FINE.differs * float(np.max(np.abs(numbers)))


def _digits(rate: float) -> int:
    """Return how many digits a rate has, up to rounding."""
    return next(num for num in range(1, 8) if num == 7 or abs(rate - float(f"{rate:.{num}g}")) <= FINE.fits * abs(rate))


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
