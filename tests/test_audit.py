"""The audit: right loops have no cause, an edit that makes one wrong is named, and nothing is left behind."""

import importlib.util
import itertools
import re
from functools import partial
from pathlib import Path

import keras
import numpy as np
import pytest
from audit_loops import JAX_LOOPS, MODELS, RATE, RIGHT, TF_LOOPS
from audit_mutants import ALL, JAX, MUTANTS, TF
from keras import ops
from shares import share

import wholestep as ws
from wholestep.audit.causes import BY_NAME, CAUSES, STAGES, table

COUNTED = (TF_LOOPS, JAX_LOOPS), (TF, JAX)
NUMBERS = itertools.count()
PAGE = (Path(__file__).parent.parent / "docs" / "audit.md").read_text()


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


def audited(loop, text, folder):
    """Return the report of a loop."""
    train, model = trainer(text, folder), MODELS[loop.model]()
    x, y, *weights = loop.data
    with ws.audit(model, data=loop.data, loss=loop.loss, **loop.options) as report:
        printed = train(model, x, y, *(weights or [None]))
        if printed is not None:
            report.printed(loss=printed)
    return report


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_loop_has_no_cause(name, tmp_path):
    report = audited(RIGHT[name], RIGHT[name].text, tmp_path)
    assert [(cause.name, cause.without) for cause in report.causes] == []
    assert report.has_seen
    assert report.unseen == []
    assert str(report).startswith("No cause found.")


@pytest.mark.parametrize("mutant", share((mutant,) for mutant in MUTANTS), ids=lambda m: f"{m.cause} in {m.loop}")
def test_an_edit_that_makes_a_loop_wrong_is_named_with_proof(mutant, tmp_path):
    text = RIGHT[mutant.loop].text
    for old, new in mutant.edits:
        assert old in text
        text = text.replace(old, new)
    report = audited(RIGHT[mutant.loop], text, tmp_path)
    assert [cause.name for cause in report.causes] == [mutant.cause], str(report)
    (cause,) = report.causes
    assert cause.with_change <= 1e-4
    assert cause.without >= 10 * cause.with_change
    assert cause.without > 0
    assert cause.stage == BY_NAME[cause.name].stage
    assert "loop" in Path(cause.line.file).name
    assert cause.name in str(report).lower()


def test_every_cause_has_a_row_a_mutant_and_a_right_twin():
    assert {mutant.cause for mutant in ALL} == set(BY_NAME)
    assert all(mutant.loop in RIGHT for mutant in MUTANTS)
    assert len(BY_NAME) == len(CAUSES)
    assert [cause.stage for cause in CAUSES] == sorted((cause.stage for cause in CAUSES), key=STAGES.index)


def test_the_page_holds_the_table_of_causes():
    assert table() in PAGE


def test_the_page_counts_what_is_tested():
    text = " ".join(PAGE.split())
    loops, mutants = (f"{len(tf)} of {len(tf)}.*?TensorFlow, {len(jax)} of {len(jax)}" for tf, jax in COUNTED)
    assert re.search(f"{loops} on JAX.*{mutants} on JAX", text)


def test_the_page_runs():
    names: dict = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "audit.md", "exec"), names)
        assert not names.pop("report").has_seen


LOOP = {"tensorflow": "accumulated", "jax": "accumulated"}[keras.backend.backend()]
UNKNOWN = [
    ("final = [t / len(rows) + o", "final = [t / len(rows) + 0.3 * abs(t) ** 0.5 + o"),
    ("final = [t / len(rows) + o", "final = [(3.7 if t.shape == (4, 1) else 1) * t / len(rows) + o"),
]


@pytest.mark.parametrize("edit", UNKNOWN, ids=["added", "one variable"])
def test_a_fault_that_is_not_known_is_named_as_none(edit, tmp_path):
    text = RIGHT[LOOP].text.replace(*edit)
    assert text != RIGHT[LOOP].text
    (cause,) = audited(RIGHT[LOOP], text, tmp_path).causes
    assert (cause.name, cause.stage, cause.is_known) == ("not known", "gradient", False)
    assert np.isnan(cause.with_change)
    assert "kernel" in cause.explanation


def test_a_penalty_that_counts_otherwise_is_told_with_its_factor(tmp_path):
    text = RIGHT[LOOP].text.replace("t / len(rows) + o", "t / len(rows) + 2.5 * o")
    (cause,) = audited(RIGHT[LOOP], text, tmp_path).causes
    assert cause.name == "not known"
    assert "the model's own losses count 2.5 times instead of once" in cause.explanation


def test_rows_that_count_otherwise_are_told_with_their_factors(tmp_path):
    text = RIGHT[LOOP].text.replace(
        "ops.sum(error)", "ops.sum(error * (1 + 2 * ops.cast(ops.arange(len(error)) == 0, 'float32'))[:, None])"
    )
    (cause,) = audited(RIGHT[LOOP], text, tmp_path).causes
    assert cause.name == "not known"
    assert "0.08333 x 9, 0.25 x 3 instead of 0.08333 x 12" in cause.explanation.replace("0.0833 ", "0.08333 ")
