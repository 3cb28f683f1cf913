"""The loops of the corpus: their headers and edits, read without running the files."""

import ast
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum, auto
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from corpus.edits import EditError, edited

FOLDER = Path(__file__).parent
KINDS = "right", "faulty"
ENGINES = "jax", "tensorflow", "torch"
CHANGES = "update", "data", "report"
NO_CALL = "none"
BEGINS = "# ---- training ----"
FAULT = "# fault"
_OWN = "own"
_REQUIRED = {"kind", "engine", "author", "says", "call"}
_OPTIONAL = {"needs", "meant", "process", "printed"}
_OF_FAULTY = {"changes", "quantity", "also"}
_OF_EDIT = {"name", "says", "changes", "replace"}
_OPTIONAL_OF_EDIT = {"author", "quantity", "also", "printed"}


class Quantity(StrEnum):
    """A quantity of an update, in which a loop and the update that was meant differ."""

    ROWS = auto()
    MODE = auto()
    LABELS = auto()
    WEIGHTS = auto()
    LOSS_FORM = auto()
    ROW_GRADIENTS = auto()
    PENALTY = auto()
    HANDED_GRADIENT = auto()
    RATE = auto()
    STEP = auto()
    STATE = auto()
    PRINTED = auto()

    @property
    def stage(self) -> str:
        """The stage that judges it."""
        return _STAGES.get(self, "gradient")


_STAGES = {
    Quantity.ROWS: "rows",
    Quantity.MODE: "mode",
    Quantity.RATE: "step",
    Quantity.STEP: "step",
    Quantity.STATE: "state",
    Quantity.PRINTED: "printed",
}


class HeaderError(ValueError):
    """A file of the corpus is not in its form."""


@dataclass(frozen=True)
class Loop:
    """One loop of the corpus.

    Attributes:
        path: of its file; of the right loop, if it is an edit of one.
        source: its text.
        quantity: the first quantity that a fault changes; None if no update changes.
        also: those that other faults of the same loop change.
        is_alone: whether it must have a process of its own.
        fault_lines: all lines of the marked statements; the head alone of a compound one.
        edit: the name of the edit that makes it of a right loop; "" for a file of its own.
    """

    path: Path
    source: str
    title: str
    kind: str
    engine: str
    author: str
    says: str
    call: str
    needs: tuple[str, ...] = ()
    meant: str = ""
    printed: str = ""
    changes: str = ""
    quantity: Quantity | None = None
    also: tuple[Quantity, ...] = ()
    is_alone: bool = False
    fault_lines: frozenset[int] = frozenset()
    edit: str = ""

    @property
    def name(self) -> str:
        """Its name in the table."""
        return f"{self.path.stem}+{self.edit}" if self.edit else self.path.stem

    @property
    def is_stated(self) -> bool:
        """Whether the intention can be stated in a call of `stepcheck.watch`."""
        return self.call != NO_CALL


def loops(patterns: tuple[str, ...] = ("*",), engines: tuple[str, ...] = ENGINES) -> list[Loop]:
    """Return the loops of these engines whose names match one of the patterns, sorted by name."""
    every = [each for path in FOLDER.glob("*/*.py") for each in with_edits(read(path))]
    of_engines = [loop for loop in every if loop.engine in engines]
    chosen = [loop for loop in of_engines if any(fnmatch(loop.name, each) for each in patterns)]
    return sorted(chosen, key=lambda loop: loop.name)


def named(name: str) -> Loop:
    """Return the loop of this name."""
    stem = name.partition("+")[0]
    (path,) = FOLDER.glob(f"*/{stem}.py")
    return next(loop for loop in with_edits(read(path)) if loop.name == name)


def with_edits(loop: Loop) -> Iterator[Loop]:
    """Yield a loop, and the faulty loops that edits make of it."""
    yield loop
    path = edits_path(loop.path)
    if not path.exists():
        return
    tables = tomllib.loads(path.read_text())
    _must(path, set(tables) == {"edit"}, "tables [[edit]] alone", str(sorted(tables)))
    for table in tables["edit"]:
        yield _edited(loop, path, table)


def edits_path(path: Path) -> Path:
    """Return the file of the edits of a right loop, which stands beside it."""
    return path.with_suffix(".edits.toml")


def _edited(loop: Loop, path: Path, table: dict[str, Any]) -> Loop:
    missing = _OF_EDIT - set(table)
    unknown = set(table) - _OF_EDIT - _OPTIONAL_OF_EDIT
    _must(path, not missing, f"the keys {sorted(_OF_EDIT)}", f"none of {sorted(missing)}")
    _must(path, not unknown, "no other keys", str(sorted(unknown)))
    name = table["name"]
    _must(path, name.isidentifier() and name.islower(), "a name in snake_case", name)
    try:
        source, changed = edited(loop.source, table["replace"])
        fault_lines = frozenset(_statement_lines(ast.parse(source), changed))
    except (EditError, SyntaxError) as error:
        told = f"{path.parent.name}/{path.name}, {name}: {error}"
        raise HeaderError(told) from error
    return replace(
        loop,
        source=source,
        kind="faulty",
        author=table.get("author", loop.author),
        says=table["says"],
        changes=table["changes"],
        quantity=_quantity(path, {"kind": "faulty"} | table),
        printed=table.get("printed", loop.printed),
        also=_named_all(path, table.get("also", ())),
        fault_lines=fault_lines,
        edit=name,
    )


def read(path: Path) -> Loop:
    """Return the loop of a file, which is not run.

    Raises:
        HeaderError: the header or a marker is missing or wrong.
    """
    source = path.read_text()
    tree = ast.parse(source)
    title, fields = _header(path, ast.get_docstring(tree) or "")
    kind = fields["kind"]
    marked = [i for i, line in enumerate(source.splitlines(), start=1) if line.endswith(FAULT)]
    fault_lines = frozenset(_statement_lines(tree, marked))
    _must(path, kind == path.parent.name, f"kind: {path.parent.name}, as the folder", kind)
    _must(path, fields["engine"] in ENGINES, f"an engine of {ENGINES}", fields["engine"])
    _must(path, source.count(BEGINS) == 1, f"one line {BEGINS!r}", str(source.count(BEGINS)))
    process = fields.get("process", _OWN)
    _must(path, process == _OWN, f"process: {_OWN}, or no such field", process)
    is_marked = bool(fault_lines) == (kind == "faulty")
    _must(path, is_marked, f"{FAULT!r} on a line of each fault, and in no right loop", kind)
    return Loop(
        path=path,
        source=source,
        title=title,
        kind=kind,
        engine=fields["engine"],
        author=fields["author"],
        says=" ".join(fields["says"].split()),
        call=fields["call"],
        needs=tuple(fields.get("needs", "").replace(",", " ").split()),
        meant=fields.get("meant", ""),
        printed=fields.get("printed", ""),
        changes=fields.get("changes", ""),
        quantity=_quantity(path, fields),
        also=_named_all(path, fields.get("also", "").replace(",", " ").split()),
        is_alone="process" in fields,
        fault_lines=fault_lines,
    )


def _header(path: Path, docstring: str) -> tuple[str, dict[str, str]]:
    title, _, rest = docstring.partition("\n\n")
    _must(path, bool(title) and "\n" not in title, "a docstring with a title", title)
    fields: dict[str, str] = {}
    name = ""
    for line in rest.splitlines():
        if line.startswith("    "):
            fields[name] += "\n" + line.removeprefix("    ")
            continue
        name, colon, value = line.partition(":")
        _must(path, bool(colon), "lines of the form `field: value`", line)
        fields[name] = value.strip()
    required = _REQUIRED | ({"changes"} if fields.get("kind") == "faulty" else set())
    missing = required - set(fields)
    unknown = set(fields) - required - _OPTIONAL - _OF_FAULTY
    _must(path, not missing, f"the fields {sorted(required)}", f"none of {sorted(missing)}")
    _must(path, not unknown, "no other fields", str(sorted(unknown)))
    return title, {name: value.strip("\n") for name, value in fields.items()}


def _quantity(path: Path, fields: dict[str, str]) -> Quantity | None:
    changes = fields.get("changes", "")
    given = fields.get("quantity", "")
    if fields["kind"] == "right":
        surplus = changes or given or fields.get("also", "")
        _must(path, not surplus, "no changes and no quantity of a right loop", surplus)
        return None
    _must(path, changes in CHANGES, f"changes of {CHANGES}", changes)
    is_printed = given == Quantity.PRINTED.name
    is_fit = is_printed if changes == "report" and given else bool(given) == (changes == "update")
    expected = "a quantity exactly if an update changes, or PRINTED with `changes: report`"
    _must(path, is_fit, expected, given)
    return _named(path, given) if given else None


def _named_all(path: Path, names: Iterable[str]) -> tuple[Quantity, ...]:
    return tuple(_named(path, name) for name in names)


def _named(path: Path, name: str) -> Quantity:
    names = list(Quantity.__members__)
    _must(path, name in names, f"a quantity of {names}", name)
    return Quantity[name]


def _statement_lines(tree: ast.Module, marked: Iterable[int]) -> Iterator[int]:
    """Yield the lines of the innermost statements of marked lines; the head of a compound one."""
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    for number in marked:
        over = [node for node in statements if node.lineno <= number <= (node.end_lineno or 0)]
        if not over:
            continue
        innermost = max(over, key=lambda node: node.lineno)
        body = getattr(innermost, "body", None)
        end = body[0].lineno - 1 if body else innermost.end_lineno or number
        yield from range(innermost.lineno, end + 1)


def _must(path: Path, holds: bool, expected: str, got: str) -> None:
    if not holds:
        told = f"{path.parent.name}/{path.name}: Expected {expected}, got {got or 'nothing'}"
        raise HeaderError(f"{told}; try the header of another loop, which `corpus` explains.")
