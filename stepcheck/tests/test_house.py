"""The house: floors, doors, public names, values in place of sentences, and docstrings whose examples run."""

import ast
import doctest
import importlib
import io
import re
import tokenize
from functools import cache
from itertools import accumulate
from pathlib import Path

import keras
import pytest
from shares import on

import stepcheck
from stepcheck.faults import Fault, Stage
from stepcheck.report import words
from stepcheck.values import Reason, Shown

SOURCE = Path(stepcheck.__file__).parent
FLOORS = [  # from the ground up; a room counts as one, unless its modules are named
    {"errors", "faults", "objective", "seams", "values", "differences"},
    {"tree", "progress", "batches", "steps"},
    {"trace"},
    {"user_code"},
    {"port"},
    {"solve"},
    {"stages"},
    {"judge", "compare"},
    {"report"},
    {"probe"},
    {"keras", "torch"},
    {"recording"},
    {"__init__"},
    {"command"},
    {"cli"},
    {"__main__"},
]
ROOM_OF = {
    "keras": "keras",
    "wholestep": "keras",
    "jax": "keras",
    "tensorflow": "keras",
    "torch": "torch",
}
ENGINE_OF = {"jax_listener.py": "jax", "tensorflow_listener.py": "tensorflow"}
MODULES = sorted(SOURCE.rglob("*.py"))
# of the package; it may only become less, as may the next
MOST_TOKENS = 116_700
MOST_TOKENS_OF_A_FILE = 3_600
MOST_BROAD = 5


@cache
def nodes(path):
    return list(ast.walk(ast.parse(path.read_text())))


def name_of(path):
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts)


def imports(path):
    """Yield the modules that a module imports, with `a.b` for `from a import b`."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def floor(module):
    room = module.split(".")[0]
    found = [i for i, modules in enumerate(FLOORS) if room in modules]
    assert len(found) == 1, (
        f"{module} must have one floor, not {len(found)}: add it to the floors in this file."
    )
    return found[0]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_go_down_the_floors(path):
    here = floor(name_of(path))
    deferred = {
        "__init__",
        "cli",
    }  # which import a framework's room when it is asked for
    for name in imports(path):
        parts = name.split(".")
        is_own = parts[0] == "stepcheck" and len(parts) > 1
        if (
            is_own
            and (SOURCE / parts[1]).exists()
            | (SOURCE / f"{parts[1]}.py").exists()
        ):
            assert floor(parts[1]) <= here or path.stem in deferred, (
                f"{name_of(path)} imports {name}"
            )


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_framework_is_imported_in_its_own_room(path):
    room = path.parent.name
    for name in imports(path):
        owner = ROOM_OF.get(name.split(".")[0])
        assert owner is None or owner == room, f"{name_of(path)} imports {name}"


def broad(path):
    """Yield the handlers of a file that catch every error, and go on."""
    for node in nodes(path):
        kinds = ("Exception", "BaseException")
        if (
            isinstance(node, ast.ExceptHandler)
            and getattr(node.type, "id", None) in kinds
        ):
            is_raised = any(
                isinstance(each, ast.Raise) for each in ast.walk(node)
            )
            if not is_raised:
                yield node


def test_few_handlers_catch_every_error_and_each_has_its_reason():
    found = [(path, node) for path in MODULES for node in broad(path)]
    assert len(found) <= MOST_BROAD, [
        f"{name_of(path)}:{node.lineno}" for path, node in found
    ]
    for path, node in found:
        line = path.read_text().splitlines()[node.lineno - 1]
        assert "#" in line, f"{name_of(path)}:{node.lineno} has no reason"


@cache
def num_tokens(path):
    """Return how many names, operators and numbers a file has, outside of strings."""
    counted = "NAME", "OP", "NUMBER"
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    kinds = [tokenize.tok_name[token.type] for token in tokens]
    # Python 3.11 has no tokens inside of an f-string
    depths = accumulate(
        kind.endswith("STRING_START") - kind.endswith("STRING_END")
        for kind in kinds
    )
    return sum(
        kind in counted and not depth
        for kind, depth in zip(kinds, depths, strict=True)
    )


def test_the_package_does_not_grow():
    num = sum(num_tokens(path) for path in MODULES)
    assert 0.9 * MOST_TOKENS < num <= MOST_TOKENS


def test_every_value_has_its_words():
    assert {fault.id for fault in Fault} == {*words._texts()}
    assert {*Reason} == {*words._REASONS}
    assert {*Stage} == {*words._STAGES}
    assert {*Shown} == {*words._SHOWN}


def test_ids_are_stable_and_differ():
    ids = [fault.id for fault in Fault]
    assert len({*ids}) == len(ids)
    assert all(
        re.fullmatch(r"(rows|mode|gradient|step|state|printed)\.[a-z-]+", each)
        for each in ids
    )


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_files_hold_one_idea(path):
    assert num_tokens(path) <= MOST_TOKENS_OF_A_FILE


def test_public_names_are_frozen():
    assert stepcheck.__all__ == [
        "Objective",
        "SpecificationError",
        "diff",
        "load",
        "probe",
        "record",
        "watch",
    ]


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(
            p, marks=on(ENGINE_OF[p.name]) if p.name in ENGINE_OF else ()
        )
        for p in MODULES
    ],
    ids=name_of,
)
def test_examples_in_docstrings_run(path):
    if (
        ENGINE_OF.get(path.name, keras.backend.backend())
        != keras.backend.backend()
    ):
        return
    if path.parent.name == "torch":
        pytest.importorskip("torch")
    module = importlib.import_module(
        f"stepcheck.{name_of(path)}".removesuffix(".__init__")
    )
    failed, _ = doctest.testmod(module)
    assert failed == 0
