"""The report of a run: the numbers of every update, across restarts, on one page without
scripts.
"""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
from scripts import Tags
from shares import on
from small import X, Y, model

import wholestep as ws
from wholestep import engines
from wholestep.callbacks import CallbackRunner
from wholestep.reports.run_report import RunReport

HOW = {"batch_size": 5, "epochs": 3, "verbose": 0}
NUMBER = 0
UPDATES = 1
LOSS = 3
ROWS = 6
SKIPPED = 9


def column(report, at):
    return report.get_state()["lines"][:, at].tolist()


def test_the_losses_are_those_of_the_updates_alone(tmp_path):
    report = ws.RunReport(tmp_path / "run.html")
    ws.Trainer(model()).fit(X, Y, callbacks=[report], **HOW)
    alone = [
        step.loss for step in ws.Trainer(model()).steps(ws.Batches((X, Y), batch_size=5), epochs=3)
    ]
    assert column(report, LOSS) == alone
    assert column(report, NUMBER) == [*range(1, 13)]
    assert column(report, ROWS) == [5] * 12
    assert str(report) == "12 updates, 3 epochs, 60 rows, 0 restarts; 0 not applied"
    tags = Tags((tmp_path / "run.html").read_text())
    assert tags.tags.count("img") == 4
    assert "script" not in tags.tags
    assert "5 rows at once" in "".join(tags.words)


class Interrupt(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations) == 7:
            raise KeyboardInterrupt


@pytest.mark.slow
def test_a_resumed_run_has_all_updates_and_a_mark(tmp_path, capsys):
    whole = ws.RunReport()
    last = ws.RunReport(tmp_path / "run.html")
    ws.Trainer(model()).fit(X, Y, callbacks=[whole], validation_data=(X, Y), **HOW)
    saves = ws.Checkpoints(tmp_path / "run", every_steps=2, every_seconds=None)
    with pytest.raises(KeyboardInterrupt):
        ws.Trainer(model()).fit(
            X,
            Y,
            callbacks=[ws.RunReport(), Interrupt()],
            validation_data=(X, Y),
            checkpoints=saves,
            **HOW,
        )
    capsys.readouterr()
    ws.Trainer(model()).fit(
        X, Y, callbacks=[last], validation_data=(X, Y), checkpoints=saves, **HOW
    )
    for at in (NUMBER, LOSS, ROWS):
        assert column(last, at) == column(whole, at)
    assert last.get_state()["restarts"] == [6]
    np.testing.assert_array_equal(last.get_state()["epochs"], whole.get_state()["epochs"])
    assert "RunReport" not in capsys.readouterr().err
    assert "restart after update 6" in (tmp_path / "run.html").read_text()


@pytest.mark.filterwarnings("ignore:Update 2 .*was skipped")
def test_skipped_updates_cuts_and_a_schedule(tmp_path):
    x = X.copy()
    x[7] = np.nan
    made = model()
    report = ws.RunReport()
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    made.compile(keras.optimizers.SGD(schedule), made.loss)
    trainer = ws.Trainer(made, on_nonfinite="skip", microbatch_size=3)
    trainer.fit(x, Y, callbacks=[report], shuffle=False, **HOW | {"epochs": 1})
    assert column(report, SKIPPED) == [0, 1, 0, 0]
    assert np.isfinite(column(report, LOSS)).all()
    assert str(report).endswith("1 not applied")
    report.html(tmp_path / "run.html")
    page = (tmp_path / "run.html").read_text()
    assert "5 rows in 2 microbatches (2 x 3 rows)" in page
    assert "The optimizer&#x27;s schedule." in page


def test_it_reads_no_state():
    known = {"verbose": 0, "epochs": 1, "steps": 4, "history": True, "engine": engines.choose()}
    runner = CallbackRunner(model(), [RunReport()], **known)
    assert not runner.has_hooks
    assert not runner.needs_state
    assert runner.unknown == []


def sent(first, num):
    """Return a report of `num` updates of 3 rows from `first` on; the loss of an update is its
    number.
    """
    values = np.stack([first + np.arange(num), np.ones(num)], axis=1)
    columns = {"+loss": values[:, 0], "+applied": values[:, 1]}
    return SimpleNamespace(
        first=first,
        column=lambda name: columns.get(name, np.full(num, np.nan)),
        block=SimpleNamespace(program=SimpleNamespace(cut="3 rows at once", memory=None)),
        values=values,
        row_counts=lambda num: np.full(num, 3),
    )


@on("jax")
def test_many_updates_are_merged_to_a_few_lines_whose_sums_are_exact():
    report = ws.RunReport()
    first = 1
    for num in [1, 7, 256] * 200:
        report.note(sent(first, num), num)
        first += num
    lines = report.get_state()["lines"]
    num = 200 * 264
    assert len(lines) <= 4096
    assert lines[:, UPDATES].sum() == num
    assert lines[:, LOSS].sum() == num * (num + 1) // 2
    assert lines[:, ROWS].sum() == 3 * num
    assert (lines[1:, NUMBER] == lines[:-1, NUMBER] + lines[:-1, UPDATES]).all()
    assert lines[:, UPDATES].max() <= 32


def test_bad_input(tmp_path):
    with pytest.raises(ws.SpecificationError, match="path of the HTML file"):
        ws.RunReport(3)
    for path in (tmp_path, tmp_path / "none" / "run.html", ""):
        with pytest.raises(ws.SpecificationError, match="a file in a folder that exists"):
            ws.RunReport(path)
    with pytest.raises(ws.SpecificationError, match="needs its updates"):
        ws.RunReport().html(tmp_path / "run.html")
    with pytest.warns(UserWarning, match="RunReport has seen no update"):
        model().fit(X, Y, callbacks=[ws.RunReport(tmp_path / "run.html")], verbose=0)
    assert not (tmp_path / "run.html").exists()


def test_a_page_that_cannot_be_written_ends_no_run(tmp_path):
    (tmp_path / "a").mkdir()
    report = ws.RunReport(tmp_path / "a" / "run.html")
    (tmp_path / "a").rmdir()
    with pytest.warns(UserWarning, match="run.html is not written: .*No such file"):
        history = ws.Trainer(model()).fit(X, Y, callbacks=[report], verbose=0)
    assert history.history["loss"]


def test_the_report_of_another_trainer_begins_anew(tmp_path):
    report = ws.RunReport()
    for epochs in (3, 2):
        ws.Trainer(model()).fit(X, Y, epochs=epochs, callbacks=[report], verbose=0)
    assert " 2 epochs" in str(report)
