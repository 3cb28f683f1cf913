"""The audit: loops of public questions, as they were asked or answered, are told what is wrong with them."""

import keras
import pytest
from audit_questions import DATA, MODELS, QUESTIONS
from shares import later
from test_audit import trainer

import stepcheck

pytestmark = pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="questions on TensorFlow")


def audited(loop, text, folder):
    train, model, data = trainer(text, folder), MODELS[loop.model](), DATA[loop.model]
    with stepcheck.watch(model, data=data, loss=loop.loss) as report:
        train(model, *data, None)
    return report


SAME = "a translator on replicas"  # the test below asks more of it


@pytest.mark.parametrize("name", [*(name for name in QUESTIONS if name != SAME), *later([SAME])])
@pytest.mark.slow
def test_a_question_is_answered(name, tmp_path):
    question = QUESTIONS[name]
    report = audited(question.loop, question.loop.text, tmp_path)
    assert tuple(cause.name for cause in report.causes) == question.causes, str(report)
    assert question.note in " ".join(report.notes)


IN_WORDS = {
    "the means": ((), "mean of means", "Each replica divides by its own weights"),
    "sums": (
        (" * strategy.num_replicas_in_sync", ""),
        "summed over replicas",
        "Each replica divides by its own weights",
    ),
}


@pytest.mark.parametrize("name", IN_WORDS)
@pytest.mark.slow
def test_replicas_are_told_to_add_up_their_weights(name, tmp_path):
    edit, cause, part = IN_WORDS[name]
    loop = QUESTIONS["a translator on replicas"].loop
    (found,) = audited(loop, loop.text.replace(*edit) if edit else loop.text, tmp_path).causes
    assert (found.name, part in found.explanation) == (cause, True)
    assert 'all_reduce("SUM", tf.reduce_sum(weights))' in found.fix
    assert "compute_average_loss" not in found.fix
    assert "loss_function(tar, model(inp, training=True))" in found.line.text


@pytest.mark.large
@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question_that_is_mended_has_no_cause(name, tmp_path):
    question = QUESTIONS[name]
    text = question.loop.text
    for before, after in question.mended:
        assert text.count(before) == 1
        text = text.replace(before, after)
    report = audited(question.loop, text, tmp_path)
    assert (report.causes, report.has_seen) == ([], True), str(report)
    assert not question.note or question.note not in " ".join(report.notes)
