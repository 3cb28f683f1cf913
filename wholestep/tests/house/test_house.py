"""The house: floors, public names, files that stay small, and docstrings whose examples run."""

import ast
import doctest
import importlib
import io
import pkgutil
import re
import tokenize
import tomllib
from functools import cache
from itertools import accumulate
from pathlib import Path

import keras
import pytest
from shares import on

import wholestep as ws

SOURCE = Path(ws.__file__).parent
TESTS = sorted(Path(__file__).parents[1].rglob("*.py"))
COUNTED = "NAME", "OP", "NUMBER"  # outside of strings
OF_JAX = ("group.py", "store.py", "jax_private.py")
MOST_TOKENS = 4_000  # of a file
FLOORS = [  # from the ground up; a package counts as one, unless its modules are named
    {"errors"},
    {"checks", "reports.page", "aliases", "patches", "keras_private", "jax_private"},
    {
        "backend",
        "safety",
        "tree",
        "cut",
        "processes.protocol",
        "processes.__init__",
        "checkpoints.shards",
    },
    {"processes"},
    {"state", "slices"},
    {"nonfinite"},
    {"engines"},
    {"data", "embeddings", "determinism"},
    {"model", "schedules"},
    {"checkpoints"},
    {"sums", "logged"},
    {"reports.report"},
    {"program"},
    {"run"},
    {"processes.fingerprint"},
    {"embeddings.rows", "joins"},
    {"update"},
    {"plan", "reports.compile_notices"},
    {"custom"},
    {
        "context",
        "evaluation",
        "reports.update_ledger",
        "reports.run_report",
        "reports.explanation",
        "dispatcher",
    },
    {"executor", "checkpoints.configuration", "checkpoints.callbacks"},
    {"callbacks", "arguments", "checkpoints.resume"},
    {"checkpoints.saver", "checkpoints.weights"},
    {"drive", "steps", "setup"},
    {"fit", "padding"},
    {
        *("trainer", "cli", "__main__", "__init__"),
        *("checkpoints.__init__", "reports.__init__"),
    },
]
# the same inside of the package, where one module may use another of its floor only by name
FLOORS_OF_DATA = [
    {"sparse", "workers", "order", "shapes", "sizes", "weights"},
    {"leaves"},
    {"stream", "kinds"},
    {"source"},
    {"sequences"},
    {"buckets"},
    {"packing"},
    {"sampler"},
    {"batches", "block"},
    {"feed", "fingerprint", "opening"},
    {"__init__"},
]
FLOORS_OF_MODEL = [
    {"compiled", "objective"},
    {"distributions", "graph"},
    {"draws", "losses"},
    {"misfit", "trace"},
    {"forward"},
    {"coupling"},
    {"__init__"},
]
ENGINE_OF = dict.fromkeys(
    ("group.py", "store.py", *(p.name for p in SOURCE.glob("*/jax*.py"))), "jax"
)
ENGINE_OF |= dict.fromkeys((p.name for p in SOURCE.glob("*/tensorflow*.py")), "tensorflow")
PACKAGES = {"wholestep", *(f"wholestep.{p.parent.name}" for p in SOURCE.glob("*/__init__.py"))}
MODULES = sorted(p for p in SOURCE.rglob("*.py"))
ROOMS = ("checkpoints", "data", "engines", "model", "processes")  # entered by their doors only


def names_in(door):
    """Return the modules of the names that a package's `__init__` imports."""
    parts = ast.walk(ast.parse((SOURCE / door / "__init__.py").read_text()))
    found = [
        node
        for node in parts
        if isinstance(node, ast.ImportFrom) and node.module.startswith(f"wholestep.{door}.")
    ]
    return {alias.name: node.module for node in found for alias in node.names}


OF_STEPCHECK = {  # names that only the package stepcheck takes: losses before their reduction
    "model": {
        "LossCall",
        "ObjectiveOutput",
        "ScalarTerm",
        "Term",
        "checked",
        "mask_of",
        "read",
        "uncast",
        "unreduced",
        "with_mask_of",
    }
}
DOORS = {f"wholestep.{room}": names_in(room) for room in ROOMS}


def placed(name):
    """Return the name that has a place on the floors: the module's own, or its package's."""
    return name if any(name in modules for modules in FLOORS) else name.split(".")[0]


def module_of(path):
    return placed(".".join(path.relative_to(SOURCE).with_suffix("").parts))


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.module not in PACKAGES:
                yield node.module
            homes = DOORS.get(node.module, {})
            found = [
                f"{node.module}.{alias.name}" for alias in node.names if node.module in PACKAGES
            ]
            yield from (homes.get(name.rsplit(".", 1)[1], name) for name in found)


def floor(module, floors=FLOORS):
    found = [i for i, modules in enumerate(floors) if module in modules]
    assert len(found) == 1, (
        f"{module} must have one floor, not {len(found)}: add it to the floors in this file."
    )
    return found[0]


@pytest.mark.parametrize(
    "path", [p for p in MODULES if p.parent.name in ("data", "model")], ids=lambda p: p.name
)
def test_imports_go_down_the_floors_of_a_package(path):
    package = path.parent.name
    floors = {"data": FLOORS_OF_DATA, "model": FLOORS_OF_MODEL}[package]
    here = floor(path.stem, floors)
    for name in imports(path):
        if name.startswith(f"wholestep.{package}."):
            assert floor(name.split(".")[2], floors) < here, f"{path.name} imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_go_down_the_floors(path):
    here = floor(module_of(path))
    for name in imports(path):
        if name.startswith("wholestep.") and not name.endswith("__version__"):
            assert floor(placed(name.removeprefix("wholestep."))) <= here, (
                f"{path.name} imports {name}"
            )
        if name.split(".")[0] in ("jax", "tensorflow", "torch"):
            assert module_of(path) == "engines" or path.name in OF_JAX
        if name.startswith("keras.src"):
            assert path.name == "keras_private.py"


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_is_entered_by_its_door(room):
    door = importlib.import_module(f"wholestep.{room}")
    others = [path for path in MODULES if path.parent.name != room]
    imported = [node for path in others for node in nodes(path) if is_import(node, room)]
    assert {node.module for node in imported} == {f"wholestep.{room}"}
    read = {node.attr for path in others for node in nodes(path) if is_read(node, room)}
    used = read & {*door.__all__} | {alias.name for node in imported for alias in node.names}
    assert used | OF_STEPCHECK.get(room, set()) == {*door.__all__}


@cache
def nodes(path):
    return list(ast.walk(ast.parse(path.read_text())))


def is_read(node, room):
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == room
    )


def is_import(node, room):
    return isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"wholestep.{room}.")


def targets(node):
    """Return what a statement assigns to."""
    found = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [part for target in found for part in getattr(target, "elts", [target])]


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_a_run_has_one_writer(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and path.name != "run.py":
            for target in targets(node):
                owner = (
                    ast.unparse(target.value).split(".")
                    if isinstance(target, ast.Attribute)
                    else []
                )
                is_of_a_run = {"run", "_run"} & {*owner[:2]}
                assert not is_of_a_run or path.name == "evaluation.py", (
                    f"{path.name}: {ast.unparse(node)}"
                )


ALONE = {  # modules with one importer outside of doors, each an idea of its own
    # commands
    *(
        "wholestep.cli",
        "wholestep.processes.launch",
        "wholestep.checkpoints.command",
    ),
    # behind public names
    *("wholestep.trainer", "wholestep.fit", "wholestep.backend"),
    "wholestep.schedules",
    "wholestep.determinism",
    "wholestep.padding",
    "wholestep.reports.explanation",
    *(
        "wholestep.checkpoints.weights",
        "wholestep.checkpoints.keras_file",
        "wholestep.checkpoints.hdf5",
    ),
    "wholestep.reports.run_report",
    "wholestep.joins",
    *(f"wholestep.engines.{name}" for name in ("jax", "jax_cpu", "jax_eager", "jax_steps")),
    *("wholestep.engines.jax_variables", "wholestep.engines.tensorflow"),
    *(
        "wholestep.engines.tensorflow_variables",
        "wholestep.processes.store",
        "wholestep.processes.watchdog",
    ),
    *(
        "wholestep.checkpoints.callbacks",
        "wholestep.data.workers",
        "wholestep.data.packing",
        "wholestep.dispatcher",
    ),
    *("wholestep.model.graph", "wholestep.reports.page", "wholestep.aliases"),
}


def test_a_module_has_several_importers_or_stands_in_its_importer():
    named = {
        ".".join(("wholestep", *p.relative_to(SOURCE).with_suffix("").parts)): p for p in MODULES
    }
    importers = {name: set() for name in named if not name.endswith(("__init__", "__main__"))}
    for name, path in named.items():
        for module in importers.keys() & {*imports(path)} if path.name != "__init__.py" else ():
            importers[module].add(name)
    assert {module for module, found in importers.items() if len(found) < 2} == ALONE


def test_the_type_checker_is_strict_with_modules_that_exist():
    tables = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text())[
        "tool"
    ]["mypy"]["overrides"]
    own = [name for table in tables for name in table["module"] if name.startswith("wholestep")]
    assert own
    assert [name for name in own if importlib.util.find_spec(name.removesuffix(".*")) is None] == []


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_files_hold_one_idea(path):
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    kinds = [tokenize.tok_name[token.type] for token in tokens]
    # Python 3.11 has no tokens inside of an f-string
    depths = accumulate(
        kind.endswith("STRING_START") - kind.endswith("STRING_END") for kind in kinds
    )
    counted = (kind in COUNTED and not depth for kind, depth in zip(kinds, depths, strict=True))
    assert sum(counted) <= MOST_TOKENS


def test_public_names_are_frozen():
    assert ws.__all__ == [
        "BatchError",
        "Batches",
        "CheckpointError",
        "Checkpoints",
        "Mean",
        "NonFiniteError",
        "Objective",
        "PeerError",
        "RowSchedule",
        "RunReport",
        "Skip",
        "SpecificationError",
        "Step",
        "Sum",
        "Trainer",
        "Whole",
        "WholestepError",
        "audit",
        "deterministic",
        "load_weights",
    ]
    assert dir(ws) == ws.__all__


@pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=on(ENGINE_OF[p.name]) if p.name in ENGINE_OF else ()) for p in MODULES],
    ids=lambda p: str(p.relative_to(SOURCE)),
)
def test_examples_in_docstrings_run(path):
    name = ".".join(("wholestep", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(
        ".__init__"
    )
    if ENGINE_OF.get(path.name, keras.backend.backend()) != keras.backend.backend():
        return
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0


ARCHITECTURE = (SOURCE.parents[1] / "docs" / "architecture.md").read_text()


def named_in(text):
    """Return the modules, classes and functions that a text names in full, as `module.name`."""
    return re.findall(r"`((?:[a-z]+\.)+[A-Z_a-z]\w*(?:\.\w+)?)`", text)


def test_the_walk_names_real_functions_and_is_short():
    walk = ARCHITECTURE.split("## The way of a batch")[1].split("`fit`, `steps`")[0]
    steps = re.findall(r"^\d+\. `([\w.]+)`", walk, flags=re.MULTILINE)
    assert len(steps) == len(re.findall(r"^\d+\. ", walk, flags=re.MULTILINE)) <= 10
    for name in named_in(ARCHITECTURE):
        found = pkgutil.resolve_name(f"wholestep.{name}")
        assert found.__doc__ or found.__name__.startswith("_"), name


def test_every_word_has_one_meaning():
    words = re.findall(
        r"^\| ([a-z, ]+) \| [a-z]", ARCHITECTURE.split("## Words")[1], flags=re.MULTILINE
    )[1:]
    assert len(words) == len(set(words)) <= 25


@pytest.mark.parametrize("path", TESTS, ids=lambda p: p.name)
def test_no_test_reaches_into_a_trainer(path):
    owners = "trainer|executor|planner|feed|batches|step|report|engine"
    assert re.findall(rf"\b(?:{owners})\._[a-z]\w*", path.read_text()) == []
