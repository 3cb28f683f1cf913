"""The facts: what was seen of a loop, in the text, the page and the data of its report."""

from dataclasses import asdict

import keras
import numpy as np
import pytest
from small import NUM, SIZE, X, Y, gradient_of, network, train

import stepcheck
from stepcheck.faults import Stage
from stepcheck.report.facts import aligned
from stepcheck.stages.facts import Span
from stepcheck.values import Reason


def facts_of(report):
    return report._judged().facts


def watched(model=None, data=(X, Y), **given):
    model = model or network()
    with stepcheck.watch(model, data=data) as report:
        train(model, **given)
    return report


def on_batches(model, batches, after=lambda model: None, labels=Y):
    with stepcheck.watch(model, data=(X, labels)) as report:
        for rows in batches:
            model.train_on_batch(X[rows], labels[rows])
            after(model)
    return report


def in_passes(*orders):
    return [
        order[start : start + SIZE]
        for order in orders
        for start in range(0, len(order), SIZE)
    ]


def shuffled(seed):
    return np.random.default_rng(seed).permutation(NUM)


def test_the_facts_of_a_right_loop():
    report = watched(passes=3)
    facts = facts_of(report)
    assert report.is_right
    assert asdict(facts.use) == {
        "rows": 24,
        "unused": 0,
        "times": {"least": 3.0, "most": 3.0},
    }
    assert facts.passes == (24, 24, 24)
    assert asdict(facts.order) == {
        "passes": 3,
        "same": 0,
        "same_batches": 0,
        "as_data": 0,
        "across": 0,
    }
    assert (facts.updates, facts.rows, facts.microbatches) == (
        9,
        Span(8, 8),
        Span(1, 1),
    )
    assert (
        facts.calls.used,
        facts.calls.inferring,
        facts.calls.without_gradient,
    ) == (
        9,
        0,
        0,
    )
    assert asdict(facts.rate) == pytest.approx(
        dict.fromkeys(("first", "last", "least", "most"), 0.05)
    )
    assert (
        facts.without_gradient,
        facts.unmoved,
        facts.frozen_moved,
        facts.written,
    ) == ((),) * 4


@pytest.mark.parametrize(
    ("batches", "passes", "counts"),
    [
        (in_passes(shuffled(0), shuffled(1)), (24, 24), (0, 0, 0, 0)),
        (in_passes(shuffled(0), shuffled(0)), (24, 24), (1, 1, 0, 0)),
        (in_passes(np.arange(24), np.arange(24)), (24, 24), (1, 1, 2, 0)),
        (
            [*in_passes(shuffled(0)), *in_passes(shuffled(0))[::-1]],
            (24, 24),
            (0, 1, 0, 0),
        ),
        (
            [shuffled(0)[:16], np.append(shuffled(0)[16:], shuffled(1)[:8])],
            (24, 8),
            (0, 0, 0, 1),
        ),
    ],
)
def test_the_order_of_passes_is_a_fact(batches, passes, counts):
    report = on_batches(network(), batches)
    assert report.findings == [], str(report)
    facts = facts_of(report)
    order = facts.order
    assert facts.passes == passes
    assert (
        order.same,
        order.same_batches,
        order.as_data,
        order.across,
    ) == counts


def test_rows_that_are_never_used_are_a_fact():
    facts = facts_of(
        on_batches(network(), in_passes(np.arange(16), np.arange(16)))
    )
    assert (facts.use.unused, facts.use.times) == (8, Span(2, 2))


def test_labels_in_a_batch_are_a_fact():
    labels = np.repeat([0, 1, 2], 8)
    report = on_batches(network(), in_passes(np.arange(24)), labels=labels)
    facts = facts_of(report)
    assert (facts.labels, facts.classes) == (Span(1, 1), 3)


def test_weights_that_are_written_between_updates_leave_the_state_unjudged():
    def write(model):
        model.set_weights([weight + 0.3 for weight in model.get_weights()])

    report = on_batches(network(), in_passes(shuffled(0)), after=write)
    assert facts_of(report).written == (2, 3)
    assert [each.reason for each in report.unjudged] == [Reason.WRITTEN]
    assert (report.findings, Stage.STATE in report.judged, report.is_right) == (
        [],
        False,
        False,
    )
    with pytest.raises(AssertionError, match="weights or slots were written"):
        report.require("state")


@pytest.mark.parametrize("is_rate", [False, True])
def test_slots_that_are_written_between_updates_leave_the_state_unjudged(
    is_rate,
):
    model = network(keras.optimizers.Adam(0.01))

    def write(_):
        optimizer = model.optimizer
        slots = [optimizer._learning_rate] if is_rate else optimizer._momentums
        for slot in slots:
            slot.assign(slot * 0.5)

    report = on_batches(model, in_passes(shuffled(0)), after=write)
    assert report.findings == [], str(report)
    written = [] if is_rate else [Reason.WRITTEN]
    assert [each.reason for each in report.unjudged] == written, str(report)


def test_weights_that_are_written_and_written_back_are_as_they_were():
    def write(model):
        weights = model.get_weights()
        model.set_weights([weight + 0.3 for weight in weights])
        model.predict_on_batch(X)
        model.set_weights(weights)

    report = on_batches(network(), in_passes(shuffled(0)), after=write)
    assert facts_of(report).written == ()
    assert report.is_right, str(report)


def test_a_variable_that_no_step_gets_is_a_fact_and_is_said():
    model = network()
    model.layers[0].trainable = False
    optimizer = keras.optimizers.SGD(0.05)
    optimizer.build(model.trainable_variables)
    gradient = gradient_of(
        model, lambda outputs, labels: keras.ops.mean((outputs - labels) ** 2)
    )
    model.layers[0].trainable = True
    with stepcheck.watch(model, data=(X, Y)) as report:
        for rows in in_passes(shuffled(0), shuffled(1)):
            grads = [
                keras.ops.array(each) for each in gradient(X[rows], Y[rows])[2:]
            ]
            optimizer.apply(grads, model.layers[-1].trainable_variables)
    names = tuple(
        variable.path for variable in model.layers[0].trainable_variables
    )
    facts = facts_of(report)
    assert (facts.without_gradient, facts.unmoved) == (names, names)
    assert report.findings == [], str(report)
    assert [(each.reason, each.told) for each in report.unjudged] == [
        (Reason.NOT_HANDED, ", ".join(names))
    ]


def test_the_facts_are_in_the_text_the_page_and_the_data():
    report = watched()
    text = str(report)
    lines = text[text.index("\nFacts:\n") :].splitlines()[2:]
    assert [line.strip() for line in lines] == aligned(facts_of(report))
    assert "  rows                  24 of 24 used, each 2 times" in lines
    assert all(line.strip() in report._repr_html_() for line in lines)
    data = report.as_json()
    assert data["schema"] == "stepcheck.report/2"
    assert data["facts"]["passes"] == [24, 24]
    assert data["facts"]["rate"]["first"] == pytest.approx(0.05)


def test_no_facts_without_updates():
    with stepcheck.watch(network(), data=(X, Y)) as report:
        pass
    assert facts_of(report) is None
    assert report.as_json()["facts"] is None
