"""Reports: as text, as a page, as data for programs, and as the assertion of a test."""

import json
import linecache
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scripts import Tags
from small import NUM, X, Y, mean, network, train

import stepcheck
from stepcheck.faults import Error, Fault, Quantity, Stage
from stepcheck.report import changes, page, schema, words
from stepcheck.report.report import Report
from stepcheck.values import Change, Finding, Reason, Unjudged, Where

PAGE = Path(__file__).parents[1] / "docs" / "json.md"


def watched(value=mean, y=Y, **intention):
    model = network()
    with stepcheck.watch(model, data=(X, Y), **intention) as report:
        train(model, value, y)
    return report


def total(labels, outputs):
    return mean(labels, outputs) * len(labels)


@pytest.fixture(scope="module")
def right():
    return watched()


@pytest.fixture(scope="module")
def wrong():
    return watched(total)


def test_a_right_loop_gets_a_certificate(right):
    assert right.is_right
    assert right.findings == right.unjudged == []
    found = re.fullmatch(
        r"6 updates, all as meant: rows, forward pass, gradient, optimizer step, state\. "
        r"Largest distance of 6 gradients from what was meant: (\S+) \(rounding: up to 0\.0001\)\.",
        right.first_line,
    )
    assert float(found[1]) < 1e-5
    right.require()
    right.require("rows", "mode", "gradient", "step", "state")


def test_a_finding_is_a_value(wrong):
    (found,) = wrong.findings
    assert (found.fault, found.stage) == (Fault.NEVER_DIVIDED, Stage.GRADIENT)
    assert (found.quantity, found.error) == (
        Quantity.ROW_GRADIENTS,
        Error.COUNTED,
    )
    assert found.where.updates == (1, 2, 3, 4, 5, 6)
    assert found.where.line.file == __file__ or found.where.line.file.endswith(
        "small.py"
    )
    assert found.apart > 0.5
    assert found.with_error < 1e-4
    length = next(number for number in found.proof.numbers)
    assert (
        length.observed
        == pytest.approx(length.with_error, rel=1e-4)
        != pytest.approx(length.expected, rel=1e-2)
    )


def test_a_report_in_a_test_raises(wrong):
    with pytest.raises(AssertionError, match="Never divided"):
        wrong.require()
    with pytest.raises(AssertionError):
        wrong.require("gradient")
    wrong.require("rows", "mode", "step")
    with pytest.raises(
        stepcheck.SpecificationError,
        match="Stages must be of rows, mode, gradient, step, state",
    ):
        wrong.require("optimizer")


def test_what_was_not_judged_raises_too():
    model = network()
    with stepcheck.watch(model, data=(X, Y), rows="shuffled") as report:
        train(model, passes=1)
    assert [each.reason for each in report.unjudged] == [Reason.FEW_PASSES]
    assert Stage.ROWS not in report.judged
    assert not report.is_right
    report.require("gradient", "step")
    with pytest.raises(AssertionError, match="too few whole passes"):
        report.require("rows")


def test_the_text_shows_numbers_three_times_and_the_line(wrong):
    text = str(wrong)
    assert text.startswith("Never divided. ")
    assert re.search(
        r"^ +update \d+: +yours +meant +meant, with this error$", text, re.M
    )
    assert re.search(r"^ +length of the gradient( +[\d.e-]+){3}$", text, re.M)
    assert re.search(r"your code: .*small\.py:\d+: ", text)
    assert "fix: take the mean" in text


def test_a_page_is_html_with_pictures(wrong, tmp_path):
    wrong.html(tmp_path / "a.html")
    written = Tags((tmp_path / "a.html").read_text())
    assert written.tags.count("img") == 4
    assert "script" not in written.tags
    assert "never divided" in " ".join(written.words).lower()
    assert "meant, with this error" in " ".join(written.words)


def test_words_of_the_user_are_escaped(wrong, monkeypatch):
    line = "loss = a < b  # <b>&`$x^{"
    monkeypatch.setattr(linecache, "getline", lambda *_: line)
    tags = Tags(wrong._repr_html_())
    assert "b" not in tags.tags
    assert any("<b>&`$x^{" in word for word in tags.words)


def test_without_matplotlib_a_notebook_has_the_words_and_a_page_says_what_to_install(
    wrong, tmp_path, monkeypatch
):
    monkeypatch.setattr(page, "find_spec", lambda name: None)
    text = wrong._repr_html_()
    assert "img" not in Tags(text).tags
    assert "pip install" in text
    with pytest.raises(stepcheck.SpecificationError, match="matplotlib"):
        wrong.html(tmp_path / "a.html")
    assert not (tmp_path / "a.html").exists()


@pytest.mark.parametrize("patience", [0.0, 1000.0])
def test_a_report_that_takes_long_says_on_the_error_output_what_it_does(
    patience, monkeypatch, capsys
):
    monkeypatch.setattr("stepcheck.report.report.PATIENCE", patience)
    str(watched())
    told = "stepcheck: judging 6 updates of the loop, which may take a while.\n"
    assert capsys.readouterr().err == told * (patience == 0)


def keys(told):
    """Return the keys that the page lists, by heading."""
    parts = re.split(r"^## (.+)$", told, flags=re.M)[1:]
    return {
        title: re.findall(r"^\| `(\w+)` \|", text, re.M)
        for title, text in zip(parts[::2], parts[1::2], strict=True)
    }


def test_the_schema_is_the_one_of_its_page(wrong, right):
    listed = keys(PAGE.read_text())
    report = wrong.as_json()
    assert report == json.loads(json.dumps(report))
    assert report["schema"] == schema.VERSION
    assert [*report] == listed["The report"] == [*right.as_json()]
    (found,) = report["findings"]
    assert [*found] == listed["A finding"]
    assert [*found["proof"]] == listed["A proof"]
    assert [*found["line"]] == listed["A line"]
    assert (found["id"], found["stage"], found["error"]) == (
        "gradient.never-divided",
        "gradient",
        "counted",
    )
    assert report["judged"] == ["rows", "mode", "gradient", "step", "state"]
    assert report["updates"] == 6


def test_a_stage_that_fails_is_no_finding_and_its_traceback_is_kept(
    monkeypatch, verdicts
):
    def broken(*_):
        raise ZeroDivisionError("of our own")

    monkeypatch.setattr("stepcheck.judge.state", broken)
    report = watched()
    assert report.findings == []
    assert report.judged == [Stage.ROWS, Stage.MODE, Stage.GRADIENT, Stage.STEP]
    assert "of our own" in report.as_json()["failures"]["state"]
    assert "An error in the stage state" in str(report)
    assert not report.is_right
    verdicts.clear()  # it was planted


def test_sentences_change_no_verdict(monkeypatch, wrong):
    """All text is made anew from other words: the same findings are found."""
    scrambled = {
        name: {"says": "x", "name": "y", "fix": {}} for name in words._texts()
    }
    monkeypatch.setattr(words, "_texts", lambda: scrambled)
    monkeypatch.setattr(words, "_REASONS", dict.fromkeys(Reason, "z"))
    monkeypatch.setattr(changes, "sentence", lambda change: "another sentence")
    other = watched(total)
    assert [each.change for each in other.findings] == [
        each.change for each in wrong.findings
    ]
    assert other.judged == wrong.judged
    assert str(other).startswith("Y. x")


def test_printed_losses_are_judged():
    model, losses = network(), []
    with stepcheck.watch(model, data=(X, Y)) as report:
        train(model)
        losses += [1.0, 2.0]
    with pytest.raises(stepcheck.SpecificationError, match="finite numbers"):
        report.printed(loss=[float("nan")])
    report.printed(loss=losses)
    assert report.findings == []  # no known error makes these numbers


def test_a_report_is_read_after_its_loop():
    model = network()
    with stepcheck.watch(model, data=(X, Y)) as report:
        assert not report.is_over
        with pytest.raises(
            stepcheck.SpecificationError, match="after the `with`"
        ):
            _ = report.findings
        assert "is not over" in str(report)


def test_a_loop_without_an_update_says_so():
    model = network()
    with stepcheck.watch(model, data=(X, Y)) as report:
        pass
    assert (
        report.first_line
        == "Nothing was judged: the updates: no optimizer step was made, and no weight moved."
    )
    assert not report.is_right
    assert len(np.unique(X, axis=0)) == NUM


@pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.id)
def test_every_fault_has_a_name_a_sentence_and_a_fix_in_each_framework(fault):
    change = Change(
        fault, numbers=(2.0, 3.0, 4.0, 5.0), names=("a", "b", "c", "d")
    )
    found = Finding(
        change, 1.0, where=Where(rows=(1, 2), parameters=("kernel",))
    )
    told = words.sentence(found)
    assert told[0] == told[0].upper()
    assert told.endswith(".")
    assert "{" not in told
    assert words.name(fault)
    for framework in ("jax", "tensorflow", "torch"):
        has_one = bool(words.fix(change, framework))
        assert has_one == change.is_known or fault is Fault.PASSES_LEFT_OUT


def _with(report, **given):
    """Return a report with another verdict: of the same updates, and with this beside."""
    other = Report()
    other._case = report._case
    other._verdict = replace(report._judged(), **given)
    return other


RIGHT_STAGES = "rows", "mode", "gradient", "step", "state"


@pytest.mark.parametrize("reason", Reason, ids=lambda reason: reason.name)
def test_nothing_that_was_not_judged_passes_a_test(right, reason):
    right.require()
    for stage in map(Stage, RIGHT_STAGES):
        report = _with(right, unjudged=[Unjudged(reason, stage)])
        others = [each for each in RIGHT_STAGES if each != stage]
        report.require(*others)
        assert not report.is_right
        for wanted in ((), (stage,)):
            with pytest.raises(AssertionError):
                report.require(*wanted)
    nothing = _with(right, unjudged=[Unjudged(reason)])
    for stage in RIGHT_STAGES:
        with pytest.raises(AssertionError):
            nothing.require(stage)
    assert not nothing.is_right


@pytest.mark.parametrize("stage", RIGHT_STAGES)
def test_a_stage_that_has_failed_is_not_judged(right, stage):
    report = _with(right, failures={Stage(stage): "Traceback"})
    assert Stage(stage) not in report.judged
    with pytest.raises(AssertionError, match="An error in the stage"):
        report.require(stage)
