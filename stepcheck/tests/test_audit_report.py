"""What a report says: in text, as a page, as data; and what a second call of the loop tells."""

import itertools
import json
import re

import keras
import numpy as np
import pytest
from audit_loops import MODELS, RIGHT, X, Y
from audit_mutants import JAX_MEAN, MEAN, MUTANTS
from keras import ops
from scripts import Tags
from test_audit import audited, trainer

import stepcheck
from stepcheck.keras.hooks import room
from stepcheck.report import page
from stepcheck.report.causes import BY_NAME

ENGINE = keras.backend.backend()
LOOP = RIGHT["accumulated"]
SUM_TO_MEAN = {"tensorflow": MEAN, "jax": JAX_MEAN}[ENGINE]


def edited(*edits, text=LOOP.text):
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    return text


def in_a_notebook(told):
    return told._repr_html_()


@pytest.fixture(scope="module")
def wrong(tmp_path_factory):
    """Return the report of a loop whose microbatches' means are averaged."""
    text = edited(SUM_TO_MEAN, ("t / len(rows) + o", "t / len(parts) + o"))
    return audited(LOOP, text, tmp_path_factory.mktemp("wrong"))


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    return audited(LOOP, LOOP.text, tmp_path_factory.mktemp("right"))


# ---- the text ----


def test_the_text_has_the_numbers_three_times(wrong):
    (cause,) = wrong.causes
    length, *weights = cause.proof.lines
    assert length.yours == pytest.approx(length.changed, rel=1e-5)
    assert length.yours != pytest.approx(length.reference, rel=1e-2)
    assert len(weights) == 3
    for line in weights:
        assert line.yours == pytest.approx(line.changed, rel=1e-5)
        assert line.yours != line.reference
    text = str(wrong)
    number = "the number of microbatches x the number of rows of its microbatch"
    first = f"Mean of means. Each row's gradient counts 1 / ({number})"
    assert text.splitlines()[0].startswith(first)
    assert re.search(r"update 3: +yours +reference +reference with this fault", text)
    assert f"{length.yours:.6g}" in text
    assert "effect on the weights: the step of update 3 is off by" in text


def test_the_weights_after_the_step_are_those_of_keras(wrong):
    """With the change, the optimizer's own step leads to the very weights that the loop came to."""
    (cause,) = wrong.causes
    after = [line for line in cause.proof.lines if line.what.endswith("afterwards")]
    assert len(after) == 3
    assert cause.proof.step > 0.05


def test_an_optimizer_that_hides_a_factor_is_said_to(tmp_path):
    tens = ("range(0, len(x), 12)", "range(0, len(x), 10)"), ("start + 12", "start + 10")
    report = audited(LOOP, edited(*tens, ("t / len(rows) + o", "t + 10 * o")), tmp_path)
    (cause,) = report.causes
    assert cause.name == "never divided"
    assert cause.without > 0.89
    assert cause.proof.step < 1e-3
    assert "effect on the weights: hardly any" in str(report)
    assert all("afterwards" not in line.what for line in cause.proof.lines)


# ---- as data ----


EVERY = {"engine", "has_seen", "has_loss", "first_line", "judged", "looked_at", "causes", "notes", "unseen", "taken"}


def test_the_same_as_data(wrong, right):
    told = json.loads(json.dumps(wrong.as_json(), allow_nan=False))
    assert set(told) == EVERY
    (cause,) = told["causes"]
    assert (cause["name"], cause["twins"]) == ("mean of means", [])
    assert cause["with_change"] <= 1e-4 < cause["without"]
    assert {name for name, *_ in cause["proof"]["parameters"]} == {v.path for v in _trainable(wrong)}
    assert (told["has_loss"], right.as_json()["causes"]) == (True, [])


def _trainable(report):
    names = [name for name, *_ in report.causes[0].proof.parameters]
    return [type("Named", (), {"path": name}) for name in names]


# ---- as a page ----

APPLY = {
    "tensorflow": (
        "optimizer.apply_gradients(zip(final, variables))",
        "optimizer.apply_gradients(zip(final, variables))  # <b>&`$x^{",
    ),
    "jax": (
        "optimizer.stateless_apply(ov, final, tv)",
        "optimizer.stateless_apply(ov, final, tv)  # <b>&`$x^{",
    ),
}[ENGINE]


def test_the_page_is_one_file_without_scripts(wrong, right, tmp_path):
    for report, num in ((wrong, 4), (right, 4)):
        report.html(tmp_path / "audit.html")
        text = (tmp_path / "audit.html").read_text(encoding="utf-8")
        tags = Tags(text)
        assert tags.tags.count("img") == text.count("data:image/png;base64,") == num
        assert "script" not in tags.tags
        assert "http" not in text.split("base64")[0]
        assert str(report).splitlines()[0] in "".join(tags.words)
    assert "100%" in text


@pytest.mark.slow
def test_words_of_the_user_are_escaped(tmp_path):
    line = "final = [t / len(rows) + 0 * o for t, o in zip(total, own)]  # <b>&`$x^{"
    text = edited(("final = [t / len(rows) + o for t, o in zip(total, own)]", "pass; " + line))
    text = text.replace(*APPLY)
    report = audited(LOOP, text, tmp_path)
    report.taken.append("<script>alert(1)</script> `a` $x^{")
    tags = Tags(in_a_notebook(report))
    assert {"script", "b"}.isdisjoint(tags.tags)
    assert any("<b>&`$x^{" in word for word in tags.words)
    assert any("<script>" in word for word in tags.words)


def test_without_matplotlib_a_notebook_has_the_words_and_a_page_says_what_to_install(wrong, tmp_path, monkeypatch):
    monkeypatch.setattr(page, "find_spec", lambda name: None)
    text = in_a_notebook(wrong)
    assert "img" not in Tags(text).tags
    assert "pip install" in text
    with pytest.raises(stepcheck.SpecificationError, match="matplotlib"):
        wrong.html(tmp_path / "audit.html")
    assert not (tmp_path / "audit.html").exists()


def test_a_notebook_sees_that_an_audit_is_not_over():
    with stepcheck.watch(MODELS["plain"](), data=(X, Y)) as report:
        assert "not over" in in_a_notebook(report)


# ---- a loop that is called again ----


# ---- options ----

NAME_OF_CONSTANT = "schedule frozen"


def test_the_schedule_of_a_given_optimizer_is_the_one_that_was_meant(tmp_path):
    from audit_loops import RATE

    loop = RIGHT["scheduled"]
    model, other = MODELS["plain"](), keras.optimizers.SGD(RATE)
    train = trainer(edited(("model.optimizer", "model.other"), text=loop.text), tmp_path)
    vars(model)["other"] = keras.optimizers.SGD(0.05)
    with stepcheck.watch(model, data=(X, Y), optimizer=other) as report:
        train(model, X, Y, None)
    (cause,) = report.causes
    assert (cause.stage, cause.name) == ("apply", NAME_OF_CONSTANT)
    with (
        pytest.raises(stepcheck.SpecificationError, match="optimizer must be"),
        stepcheck.watch(model, data=(X, Y), optimizer="sgd"),
    ):
        pass


def test_of_a_large_model_fewer_updates_are_kept():
    assert room(keras.Sequential([keras.Input((2_500_000,)), keras.layers.Dense(1, use_bias=False)])) == 10


# ---- following the report ----

ONE_LOOP = [m for m in MUTANTS if m.loop == "accumulated"]
PAIRS = [
    (a, b)
    for a, b in itertools.combinations(ONE_LOOP, 2)
    if BY_NAME[a.cause].stage != BY_NAME[b.cause].stage and not {e[0] for e in a.edits} & {e[0] for e in b.edits}
]


@pytest.mark.large
def test_whoever_makes_the_changes_that_are_printed_ends_with_a_clean_loop(tmp_path):
    """Two faults at once: what is named is mended (its edit is not made), and the loop is audited again."""
    done = []
    for pair in PAIRS[:: max(1, len(PAIRS) // 20)]:
        planted = list(pair)
        for _ in range(len(pair) + 1):
            text = edited(*(edit for mutant in planted for edit in mutant.edits))
            names = {cause.name for cause in audited(LOOP, text, tmp_path).causes}
            if not names:
                break
            planted = [mutant for mutant in planted if mutant.cause not in names]
        done.append(not planted and not names)
    assert len(done) >= 15
    assert sum(done) >= 0.9 * len(done), [pair for pair, is_done in zip(PAIRS, done, strict=False) if not is_done]


def test_an_audit_without_with_says_how_to_write_it():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    report = stepcheck.watch(model, data=(np.ones((8, 3)), np.ones((8, 1))), loss="mse")
    assert "with stepcheck.watch(model, data=(x, y), loss=...) as report:" in str(report)


@pytest.mark.parametrize("patience", [0.0, 1000.0])
def test_a_report_that_takes_long_says_on_the_error_output_what_it_does(patience, monkeypatch, capsys):
    monkeypatch.setattr("stepcheck.report.report.PATIENCE", patience)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.ones((24, 5), "float32")
    with stepcheck.watch(model, (x, x[:, :1])) as report:
        model.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0)
    str(report)
    told = "stepcheck: judging 6 updates of the loop, which may take minutes.\n"
    assert capsys.readouterr().err == told * (patience == 0)


def test_all_numbers_of_a_proof_are_those_of_the_loop(tmp_path):
    """Also where the optimizer's step cannot be made of the summed gradient, as of sparse ones on TensorFlow."""
    random, labels = np.random.default_rng(0), np.arange(12, dtype="float32")
    x = random.integers(0, 12, 48)
    layers = [keras.layers.Embedding(12, 2), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((), dtype="int32"), *layers])
    model.compile(keras.optimizers.Adam(0.01), lambda y, out: (y - ops.reshape(out, (1, -1))) ** 2)
    with stepcheck.watch(model, (x, labels[x][:, None]), loss="mse") as report:
        model.fit(x, labels[x][:, None], batch_size=16, epochs=2, verbose=0)
    (cause,) = report.causes
    for line in cause.proof.lines:
        assert line.yours == pytest.approx(line.changed, rel=1e-3), line
