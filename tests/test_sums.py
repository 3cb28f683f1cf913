"""What was minimised is what is reported: the sums of an epoch are divided once, when read."""

import numpy as np
import pytest
from small import ROWS, X, Y, model

import wholestep as ws
from wholestep.reports.report import ReportLayout


@pytest.mark.slow
def test_the_loss_of_an_epoch_is_the_mean_over_its_rows_not_over_its_batches():
    made = model(optimizer="sgd")
    made.optimizer.learning_rate = 0.0
    whole = made.evaluate(X, Y, verbose=0)
    for size in (3, 7, 16):  # none divides the 20 rows: a mean of batches' means would differ
        history = ws.Trainer(made).fit(X, Y, batch_size=size, verbose=0).history
        assert history["loss"][0] == pytest.approx(whole[0], rel=1e-6)
        assert history["accuracy"][0] == pytest.approx(whole[1], rel=1e-6)


def test_a_layout_packs_and_unpacks():
    told = {"a": np.float32(1), "b": np.arange(4, dtype="float32").reshape(2, 2)}
    layout = ReportLayout.of(told)
    packed = layout.pack(told)
    logs = layout.unpack(np.asarray(packed))
    assert logs["a"] == 1
    np.testing.assert_array_equal(logs["b"], [[0, 1], [2, 3]])
    assert ROWS
