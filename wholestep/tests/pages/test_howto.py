"""Every section of the page by task runs unchanged, and does what it says."""

import importlib
import re
from pathlib import Path

import keras
import numpy as np
import pytest

TEXT = (Path(__file__).parents[2] / "docs" / "howto.md").read_text()
START, *SECTIONS = TEXT.split("\n## ")
TASKS = {section.split("\n")[0]: section for section in SECTIONS}


def cook(title):
    """Return the names that a section leaves behind."""
    names: dict = {}
    for text in (START, TASKS[title]):
        (block,) = re.findall(r"```python\n(.*?)```", text, re.S)
        exec(compile(block, "howto.md", "exec"), names)
    return names


def files(folder, kind):
    return [*Path(folder).rglob(kind)]


def test_every_section_is_tested():
    assert set(re.findall(r'= cook\("(.*?)"\)', Path(__file__).read_text())) == set(TASKS)


def test_half_precision_has_a_loss_scale():
    names = cook("Mixed precision")
    model = names["half"]
    assert {layer.compute_dtype for layer in model.layers} == {"float16"}
    assert {v.dtype for v in model.trainable_variables} == {"float32"}
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert names["history"]["loss_scale"] == [2.0**15] * 2
    assert names["history"]["loss"][1] < names["history"]["loss"][0]


def test_rates_are_those_that_are_set():
    names = cook("Learning rates")
    assert names["rates"] == pytest.approx([0.005, 0.0025])
    assert float(names["paced"].optimizer.learning_rate) == pytest.approx(0.01 / 8)


def test_batches_grow_while_the_rate_counts_rows():
    names = cook("Batches that grow")
    falls, sizes = names["falls"], names["sizes"]
    rate = names["growing"].optimizer.learning_rate
    last = 16 * 8 + 6 * 32  # of the rows of 22 updates; the rate is that of the next one
    assert float(rate) == pytest.approx(float(falls(last)), abs=1e-6)
    assert sizes[0] == (0, 8)


def test_classes_weigh_in_fit_what_their_rows_weigh_in_a_loop():
    names = cook("Class weights")
    counts, weights = names["counts"], names["weights"]
    assert counts[0] > 3 * counts[1] > 0
    assert counts[0] * weights[0] == pytest.approx(counts[1] * weights[1])
    losses = names["history"].history["loss"]
    assert losses[1] < losses[0]
    by_rows = names["ws"].Trainer(names["rare"]).evaluate(names["rows"], verbose=0)
    logits = names["rare"].predict(names["x"], verbose=0)
    terms = keras.losses.sparse_categorical_crossentropy(names["labels"], logits, from_logits=True)
    rows = np.where(names["labels"] == 1, weights[1], weights[0])
    assert by_rows == pytest.approx(np.sum(rows * np.asarray(terms)) / len(rows), rel=1e-4)


def test_weights_are_their_moving_average_in_the_end_and_in_validation():
    names = cook("Moving averages of weights")
    model = names["averaged"]
    averages = model.optimizer._model_variables_moving_average
    for weight, average in zip(model.trainable_variables, averages, strict=True):
        np.testing.assert_array_equal(weight.numpy(), average.numpy())
    found = names["trainer"].evaluate(names["x"], names["y"], verbose=0)
    assert model.history.history["val_loss"][-1] == pytest.approx(found, rel=1e-5)


def test_norms_are_logged_where_they_are_asked_for():
    names = cook("Norms in the logs, and a bound of skips")
    assert {*names["names"], "loss"} == set(names["history"])
    assert names["norms"][0] > names["norms"][-1] > 0


def test_a_board_has_the_metrics_and_the_numbers_that_are_logged():
    pytest.importorskip("tensorflow")
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    names = cook("TensorBoard")
    tags = []
    for part in ("train", "validation"):
        found = events.EventAccumulator(f"{names['folder']}/board/{part}")
        tags.append({*found.Reload().Tags()["tensors"]})
    assert {"epoch_loss", "epoch_gradient_norm"} <= tags[0]
    assert "epoch_loss" in tags[1]


def test_a_profile_is_written():
    names = cook("Profiling")
    assert files(names["folder"] + "/profile", "*.xplane.pb")


def test_what_is_frozen_stays_and_moves_when_it_is_not():
    names = cook("Transfer learning")
    for before, frozen, after in zip(
        names["before"], names["frozen"], names["base"].get_weights(), strict=True
    ):
        np.testing.assert_array_equal(before, frozen)
        assert np.any(after != frozen)


def test_the_file_and_the_served_model_answer_as_the_trained_one():
    pytest.importorskip("tensorflow")
    names = cook("Export and serve")
    wanted = names["trained"].predict(names["x"], verbose=0)
    np.testing.assert_array_equal(names["loaded"].predict(names["x"], verbose=0), wanted)
    served = importlib.import_module("tensorflow").saved_model.load(names["folder"] + "/served")
    np.testing.assert_allclose(served.serve(names["x"]).numpy(), wanted, atol=1e-5)


def test_a_run_that_was_stopped_goes_on():
    names = cook("Stop, and resume in another process")
    assert names["numbers"] == [4]
    whole = names["begin"]()
    steps = list(whole.steps((names["x"], names["y"]), epochs=2))
    assert len(steps) == 4
    for ours, theirs in zip(
        names["second"].model.get_weights(), whole.model.get_weights(), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
