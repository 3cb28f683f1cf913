"""The audit: loops of public questions, as they were asked or answered, are told what is wrong with them."""

import keras
import pytest
from audit_questions import DATA, MODELS, QUESTIONS
from test_audit import trainer

import wholestep as ws

pytestmark = pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="questions on TensorFlow")


def audited(loop, text, folder):
    train, model, data = trainer(text, folder), MODELS[loop.model](), DATA[loop.model]
    with ws.audit(model, data=data, loss=loop.loss) as report:
        train(model, *data, None)
    return report


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question_is_answered(name, tmp_path):
    question = QUESTIONS[name]
    report = audited(question.loop, question.loop.text, tmp_path)
    assert tuple(cause.name for cause in report.causes) == question.causes, str(report)
    assert question.note in " ".join(report.notes)


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
