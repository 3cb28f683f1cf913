"""What the audit says of the model after the loop, and of what a loop leaves to nobody's optimizer."""

from dataclasses import replace

import numpy as np
import pytest
from audit_routes import ENGINE, LOOPS
from test_audit import audited, edited
from test_audit_changes import step

from stepcheck.solve.readings import without_void
from stepcheck.trace.windows import Update

ONLY_JAX = pytest.mark.skipif(ENGINE != "jax", reason="on TensorFlow the loop trains the model's own variables")
KEPT = "middle = model.get_weights() if (epoch, start) == (0, 16) else middle if epoch or start else None"
ENDINGS = {
    "of no update": ("model.set_weights([w + 1 for w in model.get_weights()])", "not those of its last update."),
    "earlier": ("model.set_weights(middle)", "they become those before update 3 again"),
}


@ONLY_JAX
def test_weights_that_never_come_back_to_the_model_are_a_note(tmp_path):
    text = LOOPS["accumulated"].text
    report = audited(LOOPS["accumulated"], text[: text.index("    for variables, values in")], tmp_path)
    assert report.causes == []
    (note,) = report.notes
    assert "never come back to the model" in note


@ONLY_JAX
def test_a_loop_that_gives_the_models_values_away_is_judged_all_the_same(tmp_path):
    text = LOOPS["clipped"].text
    assert "donate_argnums" in text
    report = audited(LOOPS["clipped"], text[: text.index("    for variables, values in")], tmp_path)
    assert (report.causes, report.has_seen) == ([], True)


@pytest.mark.parametrize("name", ENDINGS)
@pytest.mark.slow
def test_other_weights_after_the_loop_are_a_note(name, tmp_path):
    ending, part = ENDINGS[name]
    text = edited("on batch", [("            rows =", f"            {KEPT}\n            rows =")])
    report = audited(replace(LOOPS["on batch"], model="plain"), f"{text}    {ending}\n", tmp_path)
    assert report.causes == []
    (note,) = report.notes
    assert part in note


@ONLY_JAX
def test_the_rate_of_updates_by_hand_is_told(tmp_path):
    edits = [
        (
            "tv, ov = optimizer.stateless_apply(ov, grads, tv)",
            "rate = rates.pop(); tv = [v - rate * g for v, g in zip(tv, grads)]",
        ),
        ("    printed = []", "    printed, rates = [], [0.1, 0.1, 0.2, 0.2]"),
        ("return printed", "return None"),
    ]
    report = audited(LOOPS["simple"], edited("simple", edits), tmp_path)
    assert report.causes == []
    assert any("here by 0.2 times the gradient first, by 0.1 times last" in note for note in report.notes)


def test_inputs_that_are_scaled_are_a_note(tmp_path):
    report = audited(LOOPS["on batch"], edited("on batch", [("x[rows]", "x[rows] / 255")]), tmp_path)
    assert (report.causes, report.has_seen) == ([], False)
    assert any("times 0.0039216. Is that meant?" in note for note in report.notes)


def made(*kept):
    """Return steps, of which those that are kept lead on to the next one's state."""
    updates, now = [], 0
    for order, is_kept in enumerate(kept):
        values = ([[float(n)] for n in (now, now, now + 1, now + 1)], order)
        params, slots, params_after, slots_after = ([np.array(v)] for v in values[0])
        given = {"params": params, "slots": slots, "params_after": params_after, "slots_after": slots_after}
        updates.append(Update(order + 1, [], replace(step(order), **given)))
        now += is_kept
    return updates


@pytest.mark.parametrize(
    ("kept", "numbers"),
    [
        ((0, 1, 0, 1, 0, 1), [1, 3, 5]),  # orders of the steps that are left
        ((0, 0, 1, 0, 0, 1, 0), [2, 5]),
        ((1, 1, 1, 1), [0, 1, 2, 3]),
        ((0, 0, 0, 0), [0, 1, 2, 3]),  # thrown away, all of them
        ((0, 1, 1, 0, 1, 0), [0, 1, 2, 3, 4, 5]),  # now and then, as a step back when the loss has risen
    ],
)
def test_steps_that_are_selected_are_the_windows_last_ones(kept, numbers):
    found = without_void(made(*kept))
    assert [update.applied.order for update in found] == numbers
    assert [update.number for update in found] == list(range(1, len(found) + 1))
