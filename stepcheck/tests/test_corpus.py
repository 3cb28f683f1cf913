"""The corpus: headers that are read without running a loop, what counts as worse, and the command."""

import ast
import os
import subprocess
import sys
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import keras
import pytest
from shares import on

from corpus import __main__ as command
from corpus import present, workers
from corpus.edits import EditError, edited
from corpus.loops import (
    FAULT,
    FOLDER,
    HeaderError,
    Quantity,
    edits_path,
    loops,
    read,
    with_edits,
)
from corpus.present import _with_audit, answer, finding, restored
from corpus.table import STAGES, Found, Row, load, page, row, save, worse
from stepcheck import faults
from stepcheck.trace.log import Line
from stepcheck.values import Change, Finding, Where

ENGINE = keras.backend.backend()
LOOPS = {loop.name: loop for loop in loops()}
FILES = {name: loop for name, loop in LOOPS.items() if not loop.edit}
AT_FAULT = Found("gradient", "HANDED_GRADIENT", "ANOTHER_FORM", 0.97, 31, True)
FAULTY = Row(
    "clip",
    "faulty",
    "jax",
    "first",
    "HANDED_GRADIENT",
    (AT_FAULT,),
    STAGES,
    2.0,
)
RIGHT = Row("scan", "right", "jax", "first", "", (), STAGES, 2.0)
HEADER = """\
\"\"\"A title

kind: faulty
engine: jax
needs: optax, flax
author: first
changes: update
quantity: ROW_GRADIENTS
says: One sentence,
    on two lines.
meant: def loss(y, p):
        return (y - p) ** 2
call: model, data=(x, y),
    loss=loss
\"\"\"
raise RuntimeError("it was run")
# ---- training ----
step(
    x,  # fault
)
"""


def written(folder: Path, text: str = HEADER, kind: str = "faulty") -> Path:
    path = folder / kind / "loop.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def test_every_file_has_a_header():
    assert (
        len(FILES) == len(list(FOLDER.glob("*/*.py"))) > 90
    )  # names are no two files'


def test_edits_are_beside_a_right_loop():
    edits = set(FOLDER.glob("*/*.toml"))
    assert edits <= {
        edits_path(loop.path) for loop in LOOPS.values() if loop.kind == "right"
    }
    assert len(LOOPS) == len(loops())  # no name twice


@pytest.mark.parametrize("loop", FILES.values(), ids=FILES)
def test_a_loop_states_its_engine_and_its_call(loop):
    source = loop.source
    sets_backend = f'os.environ["KERAS_BACKEND"] = "{loop.engine}"' in source
    assert sets_backend == (loop.engine != "torch")
    ast.parse(loop.meant)
    assert loop.call == "none" or ast.parse(f"audit({loop.call})", mode="eval")
    ast.parse(f"printed({loop.printed})", mode="eval")
    assert loop.says[-1] in ".!"


def test_a_header_is_read_and_not_run(tmp_path):
    loop = read(written(tmp_path))
    assert (loop.title, loop.kind, loop.engine, loop.needs) == (
        "A title",
        "faulty",
        "jax",
        ("optax", "flax"),
    )
    assert (loop.changes, loop.quantity, loop.author) == (
        "update",
        Quantity.ROW_GRADIENTS,
        "first",
    )
    assert loop.says == "One sentence, on two lines."
    assert loop.meant == "def loss(y, p):\n    return (y - p) ** 2"
    assert loop.call == "model, data=(x, y),\nloss=loss"
    assert loop.fault_lines == {18, 19, 20}  # the whole statement


def test_the_fault_of_a_compound_statement_is_its_head(tmp_path):
    text = HEADER.replace(
        f"step(\n    x,  {FAULT}\n)", f"for x in data:  {FAULT}\n    step(x)"
    )
    assert read(written(tmp_path, text)).fault_lines == {18}


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("kind: faulty", "kind: right", "as the folder"),
        ("engine: jax", "engine: caffe", "an engine of"),
        ("author: first\n", "", "none of ['author']"),
        ("author: first", "writer: first", "none of ['author']"),
        ("changes: update", "changes: nothing", "changes of"),
        ("changes: update", "changes: data", "exactly if an update changes"),
        ("ROW_GRADIENTS", "GRADIENTS", "a quantity of"),
        ("author: first", "author: first\nalso: RATE, RATES", "a quantity of"),
        ("# ---- training ----", "", "one line"),
        ("author: first", "author: first\nprocess: all", "process: own"),
        ("changes: update", "changes: report", "PRINTED with"),
        (FAULT, "", "on a line of each fault"),
        ("A title\n\n", "", "a docstring with a title"),
    ],
)
def test_a_header_out_of_form(tmp_path, old, new, told):
    with pytest.raises(HeaderError) as raised:
        read(written(tmp_path, HEADER.replace(old, new)))
    assert told in str(raised.value)


RIGHT_LOOP = HEADER.replace("kind: faulty", "kind: right").replace(
    FAULT, "# no fault"
)
RIGHT_LOOP = RIGHT_LOOP.replace(
    "changes: update\nquantity: ROW_GRADIENTS\n", ""
)
EDIT = """\
[[edit]]
name = "penalty_forgotten"
says = "No penalty."
changes = "update"
quantity = "PENALTY"
also = ["RATE"]
author = "second"
replace = [["step(\\n", "stop(\\n"], ["stop(", "leap("]]
"""


def made(folder: Path, text: str = EDIT):
    path = written(folder, RIGHT_LOOP, "right")
    edits_path(path).write_text(text)
    return list(with_edits(read(path)))


def test_an_edit_is_a_loop(tmp_path):
    right, loop = made(tmp_path)
    assert (right.name, right.kind, right.fault_lines) == (
        "loop",
        "right",
        frozenset(),
    )
    assert (loop.name, loop.kind, loop.engine, loop.author) == (
        "loop+penalty_forgotten",
        "faulty",
        "jax",
        "second",
    )
    assert (loop.quantity, loop.also, loop.says) == (
        Quantity.PENALTY,
        (Quantity.RATE,),
        "No penalty.",
    )
    assert loop.source == right.source.replace("step(", "leap(")
    assert (loop.call, loop.fault_lines) == (right.call, {16, 17, 18})


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('name = "penalty_forgotten"\n', "", "none of ['name']"),
        ("penalty_forgotten", "Penalty", "snake_case"),
        ("author =", "writer =", "no other keys, got ['writer']"),
        ("PENALTY", "PENALTIES", "a quantity of"),
        ("RATE", "RATES", "a quantity of"),
        ('quantity = "PENALTY"\n', "", "exactly if an update changes"),
        ('"stop(",', '"halt(",', "'halt(', which occurs 0 times"),
        ('"stop(",', '"ra",', "'ra', which occurs 2 times"),
        ('"leap("', '"stop("', "replaced by another"),
        ('"leap("', '"leap)("', "unmatched ')'"),
        ("[[edit]]", "[[edits]]", "tables [[edit]] alone"),
    ],
)
def test_an_edit_out_of_form(tmp_path, old, new, told):
    assert EDIT.count(old) == 1
    with pytest.raises(HeaderError) as raised:
        made(tmp_path, EDIT.replace(old, new))
    assert told in str(raised.value)


TEXT = '"""A title"""\nif a:\n    b = c + d\n    e()\nf()\n'


@pytest.mark.parametrize(
    ("replacements", "text", "lines"),
    [
        ([("c + d", "c")], "    b = c\n    e()\nf()\n", [3]),
        ([("    b = c + d\n", "")], "    e()\nf()\n", [3]),
        ([("    e()\n", "")], "    b = c + d\nf()\n", [4]),
        (
            [("    b = c", "    g()\n    b = c")],
            "    g()\n    b = c + d\n    e()\nf()\n",
            [3],
        ),
        (
            [("e()", "e()\n    g()")],
            "    b = c + d\n    e()\n    g()\nf()\n",
            [5],
        ),
        (
            [("e()", "g()\n    e()"), (" + d", "")],
            "    b = c\n    g()\n    e()\nf()\n",
            [3, 4],
        ),
        ([("    e()", "e()")], "    b = c + d\ne()\nf()\n", [4]),
        ([("title", "name")], None, None),
        ([("()", "")], None, None),
    ],
)
def test_the_lines_of_an_edit(replacements, text, lines):
    if text is None:
        with pytest.raises(EditError):
            edited(TEXT, replacements)
        return
    assert edited(TEXT, replacements) == (
        f'"""A title"""\nif a:\n{text}',
        lines,
    )


def test_stages_of_quantities():
    stages = {quantity.stage for quantity in Quantity}
    assert stages == {*STAGES, "printed"}
    assert Quantity.PENALTY.stage == "gradient"


def test_quantities_are_those_of_stepcheck():
    assert {each.name: each.stage for each in Quantity} == {
        each.name: each.stage for each in faults.Quantity
    }


def test_nothing_is_worse():
    slower = replace(RIGHT, seconds=6.9)  # more than twice, within the slack
    other = replace(
        FAULTY,
        findings=(replace(AT_FAULT, error="UNLIKE", number=0.5), AT_FAULT),
    )
    missing = replace(
        FAULTY,
        name="lightning",
        findings=(),
        judged=(),
        not_run="lightning not installed",
    )
    before = {
        each.name: each
        for each in (FAULTY, RIGHT, replace(FAULTY, name="lightning"))
    }
    assert list(worse(before, [slower, other, missing])) == []


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        (FAULTY, replace(FAULTY, findings=()), "no longer located"),
        (
            FAULTY,
            replace(FAULTY, findings=(replace(AT_FAULT, quantity="PENALTY"),)),
            "no longer located",
        ),
        (
            FAULTY,
            replace(
                FAULTY, findings=(replace(AT_FAULT, stage="step"), AT_FAULT)
            ),
            "no longer located",
        ),
        (
            FAULTY,
            replace(FAULTY, findings=(replace(AT_FAULT, is_at_fault=False),)),
            "line of the fault",
        ),
        (
            FAULTY,
            replace(FAULTY, findings=(), failed="ValueError"),
            "ValueError",
        ),
        (
            RIGHT,
            replace(RIGHT, findings=(AT_FAULT,)),
            "a finding on a right loop",
        ),
        (RIGHT, replace(RIGHT, judged=STAGES[:-1]), "no longer judged: state"),
        (RIGHT, replace(RIGHT, seconds=7.1), "7.1 s"),
    ],
)
def test_what_is_worse(before, now, told):
    (complaint,) = worse({before.name: before}, [now])
    assert told in complaint


def test_one_of_two_faults_is_not_found_any_more():
    of_rate = Found("step", "RATE", "FROZEN", 0.5, 40, True)
    before = replace(FAULTY, also=("RATE",), findings=(AT_FAULT, of_rate))
    (complaint,) = worse(
        {"clip": before}, [replace(before, findings=(AT_FAULT,))]
    )
    assert complaint == "clip: no longer found: RATE"
    assert not replace(before, findings=(of_rate,)).is_wrong
    assert replace(before, also=(), findings=(of_rate,)).is_wrong


def test_a_fault_outside_of_updates_is_not_located():
    outside = replace(FAULTY, expected="", findings=())
    assert not outside.is_located
    assert list(worse({"clip": outside}, [outside])) == []


def test_a_table_is_written_and_read(tmp_path):
    path = tmp_path / "table.jsonl"
    save([RIGHT, FAULTY], path)
    save(
        [
            replace(FAULTY, seconds=3.0),
            replace(RIGHT, judged=(), not_run="jax not installed"),
        ],
        path,
    )
    assert load(path) == {"clip": replace(FAULTY, seconds=3.0), "scan": RIGHT}


def test_a_row_knows_the_line_of_the_fault():
    loop = LOOPS["clip_each_microbatch"]
    (line,) = loop.fault_lines
    found = {
        "stage": "gradient",
        "quantity": "HANDED_GRADIENT",
        "error": "ANOTHER_FORM",
        "number": 0.9,
        "line": line,
    }
    facts = {"findings": [found], "judged": [*STAGES], "seconds": 1.0}
    assert row(loop, facts).is_at_fault
    assert not row(
        loop, facts | {"findings": [found | {"line": line + 1}]}
    ).is_at_fault


def test_the_page_counts():
    elsewhere = replace(
        FAULTY, name="other", findings=(replace(AT_FAULT, quantity="PENALTY"),)
    )
    unjudged = replace(RIGHT, name="vae", judged=("rows",), author="second")
    missed = replace(FAULTY, name="missed", findings=())
    lines = page([FAULTY, elsewhere, missed, RIGHT, unjudged]).splitlines()
    assert (
        lines[-1] == "| all (5) | 1 of 3 (1) | 1 of 2 | 1 | 1 | 1 | 2.0, 2.0 |"
    )
    assert (
        "| second author (1) | 0 of 0 (0) | 0 of 1 | 0 | 1 | 0 | 2.0, 2.0 |"
        in lines
    )


def test_the_table_is_of_these_loops():
    rows = load()
    assert set(rows) == set(LOOPS)
    for name, each in rows.items():
        loop = LOOPS[name]
        expected = loop.quantity.name if loop.quantity else ""
        assert (each.kind, each.engine, each.expected) == (
            loop.kind,
            loop.engine,
            expected,
        )


def test_the_page_is_made_from_the_table():
    assert command.PAGE.read_text() == page(
        load().values()
    )  # or run python -m corpus --page


def test_no_loop_of_that_name(capsys):
    with pytest.raises(SystemExit):
        command.main(["no_such_loop"])
    assert (
        "Expected a name of a loop, got no_such_loop" in capsys.readouterr().err
    )


def test_a_check_of_loops_that_were_not_run_fails(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(workers, "ROOT", tmp_path)
    assert command.main(["--check", "zero_grad_each_microbatch"]) == 1
    assert "no loop was run" in capsys.readouterr().err


def test_libraries_that_are_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(workers, "ROOT", tmp_path)
    (told,) = workers.rows([LOOPS["zero_grad_each_microbatch"]])
    assert told.not_run == ".venv-torch is missing: make corpus"


class Process:
    """Stands for a process that runs loops: fails on some names after the first loop, and always on `broken`."""

    made: ClassVar[list] = []

    def __init__(self, loop):
        self.kind, self.num_loops, self.names, self.is_closed = (
            workers._kind(loop),
            0,
            [],
            False,
        )
        self.made.append(self)

    def answer(self, loop):
        self.num_loops += 1
        self.names.append(loop.name)
        has_failed = loop.name == "broken" or (
            loop.name == "unruly" and self.num_loops > 1
        )
        return (
            {"failed": "ValueError"} if has_failed else {"judged": list(STAGES)}
        )

    def close(self):
        self.is_closed = True


@pytest.fixture
def run(monkeypatch):
    """Return a function that runs loops of these engines and names; and gives their rows, and names by process."""
    monkeypatch.setattr(workers, "Worker", Process)
    monkeypatch.setattr(workers, "_python", lambda loop: Path(sys.executable))
    monkeypatch.setattr(Process, "made", [])
    loop = LOOPS["clip_each_microbatch"]

    def rows(*named, alone=(), **options):
        made = [
            replace(
                loop,
                path=Path(f"{name}.py"),
                engine=engine,
                is_alone=name in alone,
            )
            for engine, name in named
        ]
        found = list(workers.rows(made, **options))
        assert all(process.is_closed for process in Process.made)
        return [row.name for row in found if not row.failed], [
            process.names for process in Process.made
        ]

    return rows


def test_one_process_runs_the_loops_of_an_engine(run):
    named = [("jax", "a"), ("tensorflow", "b"), ("jax", "c")]
    assert run(*named) == (["a", "c", "b"], [["a", "c"], ["b"]])
    assert run(*named, is_alone=True)[1][2:] == [["a"], ["c"], ["b"]]
    assert run(*named, alone="a")[1][5:] == [["a"], ["c"], ["b"]]


def test_a_process_ends_after_many_loops(run, monkeypatch):
    monkeypatch.setattr(workers, "MOST", 2)
    assert run(("jax", "a"), ("jax", "b"), ("jax", "c"))[1] == [
        ["a", "b"],
        ["c"],
    ]


def test_a_loop_that_fails_is_run_again_by_itself(run):
    named = [("jax", name) for name in ("a", "unruly", "c", "broken", "d")]
    processes = [["a", "unruly"], ["unruly", "c", "broken"], ["broken"], ["d"]]
    assert run(*named) == (["a", "unruly", "c", "d"], processes)


def test_loops_run_at_once(run):
    assert sorted(run(("jax", "a"), ("jax", "b"), jobs=2)[0]) == ["a", "b"]


def test_what_a_loop_sets_is_restored(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main = sys.modules["__main__"]
    with suppress(ZeroDivisionError), restored(ENGINE):
        keras.config.set_dtype_policy("mixed_float16")
        keras.config.set_floatx("float64")
        os.environ["KERAS_OF_THE_LOOP"] = "1"
        sys.modules["__main__"] = ast
        assert Path.cwd() != tmp_path
        1 / 0  # noqa: B018
    assert (keras.config.dtype_policy().name, keras.config.floatx()) == (
        "float32",
        "float32",
    )
    assert "KERAS_OF_THE_LOOP" not in os.environ
    assert (sys.modules["__main__"], Path.cwd()) == (main, tmp_path)


SOME = {
    "tensorflow": [
        "tf_function",
        "tf_accumulated+mean_of_means",
        "tf_by_hand+printed_sum",
    ],
    "jax": [
        "jax_jitted",
        "jax_accumulated+mean_of_means",
        "jax_by_hand+printed_last_batch",
    ],
}[ENGINE]


@pytest.mark.own
@pytest.mark.parametrize("name", SOME)
def test_a_loop_is_judged(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    judged = row(LOOPS[name], answer(name))
    assert judged.is_certified or judged.is_located, str(judged)
    assert not judged.is_wrong


def test_a_loop_that_ends_in_an_error(monkeypatch):
    def watched(loop):
        raise SystemExit(loop.name)

    monkeypatch.setattr(present, "watched", watched)
    assert answer(SOME[0]) == {"failed": f"SystemExit: {SOME[0]}"}


@pytest.mark.slow
@on("jax")
@pytest.mark.parametrize(
    "name", ["clip_each_microbatch", "class_weights_by_hand"]
)
def test_the_command(name, capsys):
    assert command.main([name, "--check"]) == 0
    told = capsys.readouterr().out
    (each,) = told.splitlines()
    assert each.startswith(
        f"{name} | {LOOPS[name].kind} | {LOOPS[name].engine} | "
    )
    assert ("HANDED_GRADIENT" in each) == (LOOPS[name].kind == "faulty")
    assert "judged: rows, mode, gradient, step, state" in each


@pytest.mark.slow
@on("jax")
def test_a_loop_runs_by_itself():
    path = LOOPS["clip_each_microbatch"].path
    done = subprocess.run(
        [sys.executable, path], capture_output=True, text=True, check=True
    )
    assert len(done.stdout.splitlines()) == 4  # epochs


def test_the_rest_of_a_block_is_audited(tmp_path):
    loop = "    # ---- training ----\n    step(x)  # fault\n    after()\n"
    main = f"def main():\n    x = 3\n{loop}    return x\n"
    text = HEADER[: HEADER.index("raise")] + main + "seen.append(main())\n"
    seen = []

    @contextmanager
    def audited(scope):
        seen.append(scope["x"])
        yield
        seen.append("over")

    scope = {
        "_audited": audited,
        "seen": seen,
        "step": lambda x: seen.append("step"),
        "after": lambda: None,
    }
    code = _with_audit(read(written(tmp_path, text)))
    exec(compile(code, "loop.py", "exec"), scope)
    assert seen == [3, "step", "over", 3]
    (step,) = (
        node.lineno
        for node in ast.walk(code)
        if isinstance(node, ast.Name) and node.id == "step"
    )
    assert text.splitlines()[step - 1] == "    step(x)  # fault"


def test_findings_are_of_the_loops_file():
    change = Change(faults.Fault.CLIP_PER_MICROBATCH)
    found = Finding(
        change, 0.97321, where=Where(line=Line("/elsewhere/clip.py", 31))
    )
    expected = {
        "stage": "gradient",
        "quantity": "HANDED_GRADIENT",
        "error": "ANOTHER_FORM",
        "number": 0.973,
        "line": 31,
    }
    assert finding(found, FOLDER / "faulty" / "clip.py") == expected
    assert finding(found, FOLDER / "faulty" / "other.py") == expected | {
        "line": None
    }
    assert finding(replace(found, apart=float("inf")), FOLDER)["number"] is None
