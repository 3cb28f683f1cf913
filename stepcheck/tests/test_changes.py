"""What a report proposes: the printed change names what an edit took away, and the line is the one that is wrong."""

import inspect
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import audit_mutants
import audit_route_mutants
import keras
import numpy as np
import pytest
from audit_loops import X, Y
from audit_routes import LOOPS
from shares import on
from test_audit import audited, edited

import stepcheck
from stepcheck.keras.replay import Replay
from stepcheck.report.causes import ACCUMULATING, BY_NAME
from stepcheck.report.found import found
from stepcheck.solve.modes import rare
from stepcheck.trace.log import Applied, Called, Line, Log
from stepcheck.trace.measure import NUM_PLACES, all_same, in_part, once, places
from stepcheck.user_code.source import line_of_loss

ENGINE = keras.backend.backend()
PAGE = Path(__file__).parents[1] / "docs/audit.md"
MUTANTS = [*audit_mutants.MUTANTS, *audit_route_mutants.MUTANTS]
PLAIN = {"_", "for", "in", "if", "is", "or", "not", "a", "and", "with", "of", "like", "by", "the", "first", "to"}
WORD = re.compile(r"[A-Za-z_]\w*|\*\*")


def words(text):
    return Counter(part for word in WORD.findall(text) for part in {word, *word.split("_")} if part)


def names_of(mutant):
    """Return the names that one of the right loop and the mutant has and the other lacks; or all, if numbers differ."""
    changed, both = Counter(), Counter()
    for old, new in mutant.edits:
        changed |= (words(old) - words(new)) | (words(new) - words(old))
        both |= words(old)
    return set(changed or both) - PLAIN


def fix_of(name):
    return Replay.said(found(name, 1.0, None, [1])).fix


def test_the_printed_change_names_what_the_edit_took_away():
    fixes = [fix_of(m.cause) + BY_NAME[m.cause].fix.partition(ACCUMULATING)[2] for m in MUTANTS]
    named = [bool(set(words(fix)) & names_of(m)) for m, fix in zip(MUTANTS, fixes, strict=True)]
    assert len(named) > 50
    assert np.mean(named) >= 0.9
    text = " ".join(PAGE.read_text().split())
    told = re.search(r"for (\d+ of \d+) edits on TensorFlow and (\d+ of \d+) on JAX", text)
    assert told[1 if ENGINE == "tensorflow" else 2] == f"{sum(named)} of {len(named)}"


OF_OTHERS = {
    "tensorflow": r"JAX|jnp|jax\.|stateless_|return_losses|\b(tv|ntv|ov)\b",
    "jax": r"JAX|\btf\.|\btape\b|num_replicas_in_sync|model\.losses|apply_gradients|On JAX",
}


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_a_fix_is_in_the_words_of_the_engine(name):
    assert fix_of(name)
    assert not re.search(OF_OTHERS[ENGINE], fix_of(name))


WEIGHED = {
    "tensorflow": (
        "loss_fn(y[rows], output, sample_weight=w[rows])",
        "tf.reduce_mean(w[rows] * (y[rows] - output) ** 2)",
    ),
    "jax": ("jnp.sum(c * (b - output[:, 0]) ** 2) / jnp.sum(c)", "jnp.mean(c * (b - output) ** 2) / jnp.mean(c)"),
}


def test_sample_weights_get_the_rank_of_the_outputs_too(tmp_path):
    (cause,) = audited(LOOPS["weighted"], edited("weighted", [WEIGHED[ENGINE]]), tmp_path).causes
    assert (cause.name, "sample weights" in cause.fix) == ("broadcast", True)


TEXT = """
def train(model, x, y):
    @tf.function
    def step(a, b):
        with tf.GradientTape() as tape:
            output = model(a, training=True)
            loss = mean((b - output) ** 2)
            full = loss + sum(model.losses)
        grads = tape.gradient(full, model.trainable_variables)
        return loss
    for i in range(3):
        step(x, y)
    return model

def value_at(tv, ntv, a, b):
    output, ntv = model.stateless_call(tv, ntv, a)
    error = mean((b - output) ** 2)
    error += sum(model.losses)
    return error, ntv

def direct(tv, a, b):
    output = model.stateless_call(tv, [], a)[0]
    return mean((b - output) ** 2)

def by_layers(model, x):
    for part in x:
        output = model(part)
    return output
"""


@pytest.mark.parametrize(
    ("called", "is_penalty", "found"),
    [
        ("output = model(a, training=True)", False, "loss = mean((b - output) ** 2)"),
        ("output = model(a, training=True)", True, "full = loss + sum(model.losses)"),
        ("step(x, y)", False, "loss = mean((b - output) ** 2)"),
        ("output, ntv = model.stateless_call(tv, ntv, a)", False, "error = mean((b - output) ** 2)"),
        ("output, ntv = model.stateless_call(tv, ntv, a)", True, "error += sum(model.losses)"),
        ("output = model.stateless_call(tv, [], a)[0]", False, "return mean((b - output) ** 2)"),
        ("output = model(part)", False, ""),
    ],
)
def test_the_line_of_a_loss_is_read_off_the_source(called, is_penalty, found, tmp_path):
    path = tmp_path / "loop.py"
    path.write_text(TEXT)
    number = [line.strip() for line in TEXT.splitlines()].index(called) + 1
    line = line_of_loss(Line(str(path), number), is_penalty=is_penalty)
    assert (line.text if line else "") == found
    assert line_of_loss(Line(str(tmp_path / "none.py"), 3)) is None


@on("tensorflow")
@pytest.mark.slow
def test_a_fault_in_the_loss_is_shown_where_the_loss_is_computed(tmp_path):
    mutant = next(m for m in audit_mutants.MUTANTS if m.cause == "broadcast")
    (cause,) = audited(LOOPS[mutant.loop], edited(mutant.loop, mutant.edits), tmp_path).causes
    assert mutant.edits[0][1] in cause.line.text


@pytest.mark.slow
def test_the_audit_is_one_thing_whatever_was_imported_before():
    text = """
import stepcheck
first = ws.audit
import stepcheck.trace.log as log, stepcheck.keras.watch as watch
import stepcheck
assert ws.audit is first is stepcheck
assert ws.audit.log is log and ws.audit.watch is watch
assert callable(ws.audit) and callable(ws.audit.call)
"""
    assert subprocess.run([sys.executable, "-c", text], capture_output=True, check=False).returncode == 0
    assert list(inspect.signature(stepcheck.watch).parameters)[:3] == ["model", "data", "loss"]
    with pytest.raises(stepcheck.SpecificationError, match="model must be"), stepcheck.watch(None, data=(X, Y)):
        pass


def test_what_has_not_moved_is_kept_once_and_of_what_is_large_some_numbers():
    large, small = np.arange(NUM_PLACES + 5.0), np.arange(3.0)
    kept = once([large, small], [])
    assert not any(np.shares_memory(a, b) for a, b in zip(kept, [large, small], strict=True))
    again = once([large, small + 1], kept)
    assert again[0] is kept[0]
    assert again[1] is not kept[1]
    assert all_same(in_part([large, small]), [large[places(large.size)], small])
    assert not all_same([large], [np.nextafter(large, 1e9)])


def step(order, replica=0, accumulates=1, num_calls=0, num=3):
    states = [[np.full(num, float(order))] for _ in range(5)]
    return Applied(order, 1, *states, 0.1, order, None, replica, accumulates, num_calls)


def test_calls_that_make_one_update_count_as_one():
    log = Log()
    for order in range(6):
        log.add(step(order, replica=order % 2, accumulates=3, num_calls=order // 2))
    assert (len(log.applied), log.num_updates) == (6, 1)


def test_beyond_its_room_a_log_keeps_the_first_batch_of_another_size():
    log = Log(room=1)
    for order, num in enumerate((8, 8, 5, 8, 5)):
        inputs = [np.zeros((num, 2))]
        is_kept = log.wants(inputs)
        numbers = ([np.zeros(1)], [np.full(3, float(order))], []) if is_kept else ([], [], [])
        log.add(Called(2 * order, inputs, *numbers, True, None))
        assert log.wants_step(0) is is_kept
        log.add(step(2 * order + 1))
    assert [called.is_whole for called in log.called] == [True, False, True, False, False]


def test_updates_whose_batches_have_rare_shapes_are_left():
    shapes = [(8, 5), (8, 5), (8, 6), (8, 7), (8, 7), (8, 9), (3, 9), (8, 5)]
    updates = [
        SimpleNamespace(
            number=i, is_known=i != 2, pieces=[SimpleNamespace(called=SimpleNamespace(inputs=[np.zeros(each)]))]
        )
        for i, each in enumerate(shapes)
    ]
    assert rare(updates, None) == []
    assert rare(updates, 2) == [5]  # the one of fewest rows is kept, and what cannot be judged is not counted
    assert rare(updates, 1) == [3, 4, 5]
    assert rare([], 1) == []
