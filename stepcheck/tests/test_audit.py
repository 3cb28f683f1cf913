"""The audit: right loops have no cause, an edit that makes one wrong is named, and nothing is left behind."""

import importlib.util
import itertools
import re
from functools import partial
from pathlib import Path

import keras
import numpy as np
import pytest
from audit_loops import JAX_LOOPS, MODELS, RATE, TF_LOOPS
from audit_mutants import ALL, JAX, MUTANTS, TF
from audit_route_mutants import ALL as MORE_OF_ALL
from audit_route_mutants import JAX as MORE_JAX
from audit_route_mutants import JAX_PAIRS, PAIRS, TF_PAIRS, UNKNOWN
from audit_route_mutants import MUTANTS as MORE_MUTANTS
from audit_route_mutants import TF as MORE_TF
from audit_routes import JAX_MORE, LOOPS, TF_MORE
from keras import ops
from shares import later

import stepcheck
from stepcheck.faults import Fault
from stepcheck.report.causes import BY_NAME, CAUSES, STAGES, table

COUNTED = ([*TF_LOOPS, *TF_MORE], [*JAX_LOOPS, *JAX_MORE]), ([*TF, *MORE_TF], [*JAX, *MORE_JAX])
EDITED = [*MUTANTS, *MORE_MUTANTS]
OWN_PAIRS = {"tensorflow": TF_PAIRS, "jax": JAX_PAIRS}[keras.backend.backend()]
NUMBERS = itertools.count()
DOCS = Path(__file__).parents[1] / "docs"


def engine():
    if keras.backend.backend() == "jax":
        import jax

        return {"jax": jax, "jnp": jax.numpy}
    import tensorflow as tf

    return {"tf": tf}


def trainer(text, folder):
    """Return `train` of a text, from a file of its own: engines read the source of what they trace."""
    path = folder / f"loop{next(NUMBERS)}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    vars(module).update(engine(), np=np, keras=keras, ops=ops, partial=partial, rate=lambda step: float(RATE(step)))
    spec.loader.exec_module(module)
    return module.train


def some(cases, every, first=0):
    """Return the cases, all but every so many of them for the larger runs; each engine has others."""
    first += {"tensorflow": 0, "jax": every // 2}[keras.backend.backend()]
    given = [case if type(case) is tuple else (case,) for case in cases]
    return [
        pytest.param(*case, marks=pytest.mark.own) if i % every == first else later([case])[0]
        for i, case in enumerate(given)
    ]


def seeded(loop, seed):
    """Return the data of a loop, and its weights' factors, by a seed; 1 leaves them as they are."""
    if seed == 1:
        return loop.data, lambda values: values
    draw = np.random.default_rng(seed)
    rows = draw.permutation(20)
    return keras.tree.map_structure(lambda leaf: leaf[rows], loop.data), lambda values: [
        (v * draw.uniform(0.7, 1.3, v.shape)).astype(v.dtype) for v in values
    ]


def audited(loop, text, folder, seed=1):
    """Return the report of a loop."""
    train, model = trainer(text, folder), MODELS[loop.model]()
    data, moved = seeded(loop, seed)
    for variable, value in zip(
        model.trainable_variables, moved([v.numpy() for v in model.trainable_variables]), strict=True
    ):
        variable.assign(value)
    x, y, *weights = data
    with stepcheck.watch(model, data=data, loss=loop.loss, **loop.options) as report:
        printed = train(model, x, y, *(weights or [None]))
        if printed is not None:
            report.printed(loss=printed)
    return report


def edited(name, edits):
    """Return the text of a right loop with these edits."""
    text = LOOPS[name].text
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    return text


def is_right(name, folder, seed):
    report = audited(LOOPS[name], LOOPS[name].text, folder, seed)
    assert [(cause.name, cause.without) for cause in report.causes] == []
    assert report.has_seen
    assert [told for told in report.unseen if "rows with equal inputs" not in told] == []  # random words
    first = "Half of the model is never trained: 2 of 4" if name == "last layer" else "Nothing found in "
    assert str(report).startswith(first)
    assert len(report.notes) <= 1


@pytest.mark.parametrize("name", some(LOOPS, 10))
def test_a_right_loop_has_no_cause(name, tmp_path):
    is_right(name, tmp_path, 1)


@pytest.mark.large
@pytest.mark.parametrize("seed", [2, 3])
@pytest.mark.parametrize("name", LOOPS)
def test_a_right_loop_has_no_cause_whatever_its_data(name, seed, tmp_path):
    is_right(name, tmp_path, seed)


@pytest.mark.parametrize("mutant", some(EDITED, 18, 1), ids=lambda m: f"{m.cause} in {m.loop}")
def test_an_edit_that_makes_a_loop_wrong_is_named_with_proof(mutant, tmp_path):
    report = audited(LOOPS[mutant.loop], edited(mutant.loop, mutant.edits), tmp_path)
    if BY_NAME[mutant.cause].is_note:
        assert report.causes == []
        assert [BY_NAME[mutant.cause].explanation in note for note in report.notes].count(True) == 1
        return
    assert [cause.name for cause in report.causes] == [mutant.cause], str(report)
    (cause,) = report.causes
    is_half = "float16" in MODELS[LOOPS[mutant.loop].model]().compute_dtype
    assert cause.with_change <= (1e-3 if is_half else 1e-4)
    assert cause.without >= 10 * cause.with_change
    assert cause.without > 0
    assert cause.stage == BY_NAME[cause.name].stage
    assert cause.stage in ("rows", "report") or "loop" in Path(cause.line.file).name
    assert cause.name in str(report).lower()


@pytest.mark.parametrize("pair", some(((pair,) for pair in [*PAIRS, *OWN_PAIRS]), 20, 2), ids=str)
def test_two_causes_of_different_stages_are_both_named(pair, tmp_path):
    name, *causes = pair
    edits = [next(m.edits for m in EDITED if (m.loop, m.cause) == (name, cause)) for cause in causes]
    report = audited(LOOPS[name], edited(name, [edit for each in edits for edit in each]), tmp_path)
    assert {cause.name for cause in report.causes} == set(causes)


OF_GRADIENT = [case for case in UNKNOWN if case[1] == "gradient"]  # `TOLD` below has such faults, too


@pytest.mark.parametrize(
    ("name", "stage", "edits"), [*later(OF_GRADIENT), *(case for case in UNKNOWN if case not in OF_GRADIENT)]
)
def test_a_fault_that_nothing_explains_is_told_in_its_stage_and_by_no_name(name, stage, edits, tmp_path):
    report = audited(LOOPS[name], edited(name, edits), tmp_path)
    assert [(cause.name, cause.stage, cause.is_known) for cause in report.causes] == [("not known", stage, False)]
    assert np.isnan(report.causes[0].with_change)


def test_every_cause_has_a_row_a_mutant_and_a_right_twin():
    assert {mutant.cause for mutant in [*ALL, *MORE_OF_ALL]} == set(BY_NAME)
    assert all(mutant.loop in LOOPS for mutant in EDITED)
    assert len(BY_NAME) == len(CAUSES)
    assert [cause.stage for cause in CAUSES] == sorted((cause.stage for cause in CAUSES), key=STAGES.index)


def test_the_page_holds_the_table_of_causes():
    assert table() in (DOCS / "findings.md").read_text()


def test_the_page_counts_what_is_tested():
    text = " ".join((DOCS / "notes" / "blind-tests.md").read_text().split())
    loops, mutants = (f"{len(tf)} of {len(tf)}.*?TensorFlow, {len(jax)} of {len(jax)}" for tf, jax in COUNTED)
    assert re.search(f"{loops} on JAX.*{mutants} on JAX", text)


ERROR = {"tensorflow": "(y[rows][:, None] - output)", "jax": "(b[:, None] - output)"}[keras.backend.backend()]
TOLD = {
    "one variable": (
        "accumulated",
        ("t / len(rows) + o", "(t + 3 * ops.abs(t) ** 0.5 if t.shape == (4, 1) else t) / len(rows) + o"),
        "kernel",
    ),
    "loss": (
        "deep",
        (f"{ERROR} ** 2", f"ops.abs({ERROR}) ** 1.5"),
        "",
    ),
}


@pytest.mark.parametrize("name", TOLD)
@pytest.mark.slow
def test_what_can_be_told_of_a_fault_that_is_not_known_is_told(name, tmp_path):
    loop, edit, part = TOLD[name]
    (cause,) = audited(LOOPS[loop], edited(loop, [edit]), tmp_path).causes
    assert (cause.name, cause.stage, cause.is_known) == ("not known", "gradient", False)
    assert np.isnan(cause.with_change)
    where = cause.finding.where
    assert cause.finding.fault is (Fault.GRADIENT_UNLIKE if part else Fault.LOSS_UNLIKE)
    assert [part in name for name in where.parameters] == [True] * bool(part)
    assert bool(where.rows) is not bool(part)
