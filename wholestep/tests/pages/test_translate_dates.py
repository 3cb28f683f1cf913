"""The parts of the example that turns dates into ISO 8601: its loss, schedule, data and masks."""

import random

import numpy as np
import pytest
import translate_dates
import translate_dates_data
import translate_dates_model
from keras import ops
from shares import on


@pytest.fixture(scope="module")
def model():
    return translate_dates_model.transformer(num_tokens=20, width=16, num_layers=2)


# ---- the loss ----


def smoothed(num_tokens, wanted):
    """Return the distribution that is aimed at: 0.9 on one token, 0.1 shared by the others."""
    target = np.full((num_tokens,), 0.1 / (num_tokens - 1))
    target[wanted] = 0.9
    return target


def test_loss_is_the_cross_entropy_less_the_entropy():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, 5, 11)).astype("float32")
    wanted = rng.integers(0, 11, (3, 5), np.int32)
    log_probabilities = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    target = np.array([[smoothed(11, token) for token in row] for row in wanted])
    expected = -(target * log_probabilities).sum(axis=-1) + (target * np.log(target)).sum(axis=-1)
    np.testing.assert_allclose(
        translate_dates_model.smoothed_cross_entropy(wanted, logits), expected, rtol=1e-5
    )


def test_lowest_loss_is_zero():
    best = np.log(smoothed(11, 4)).astype("float32")
    near = best + np.random.default_rng(0).normal(size=(100, 11)).astype("float32")
    wanted = np.full((101,), 4, np.int32)
    losses = np.asarray(
        translate_dates_model.smoothed_cross_entropy(wanted, np.vstack([best, near]))
    )
    assert abs(losses[0]) < 1e-6
    assert losses[1:].min() > 1e-3


# ---- the learning rate ----


def test_rate_rises_for_the_warm_up_and_then_falls():
    rate = translate_dates_model.WarmUp(width=64, num_warmup=100)
    assert float(rate(0)) == pytest.approx(1 / 8 / 1000)
    assert float(rate(49)) == pytest.approx(float(rate(99)) / 2)
    assert float(rate(99)) == pytest.approx(1 / 8 / 10)
    assert float(rate(399)) == pytest.approx(float(rate(99)) / 2)


# ---- the data ----


def test_held_out_dates_are_never_trained_on():
    rng = random.Random(1)
    days, held_out = translate_dates_data.split_days(rng)
    assert len(days) + len(held_out) == 36_525
    assert not set(days) & set(held_out)
    trained, held = (
        translate_dates_data.write_dates(2000, some, translate_dates_data.LANGUAGES[:2], rng)
        for some in (days, held_out)
    )
    trained, held = ({iso for _, iso in pairs} for pairs in (trained, held))
    assert not trained & held
    whole = {day for iso in trained for day in iso.split("/") if len(day) == 10}
    assert not whole & {day for iso in held for day in iso.split("/")}
    assert {len(iso) for iso in held} == {7, 10, 21}


def test_every_text_means_one_date():
    rng = random.Random(1)
    days = [
        day for some in translate_dates_data.split_days(rng) for day in some if day.year == 2023
    ]
    meanings = {}
    for text, iso in translate_dates_data.write_dates(
        30_000, days, translate_dates_data.LANGUAGES, rng
    ):
        assert meanings.setdefault(text, iso) == iso


def test_every_text_fits_in_the_longest_shape():
    rng = random.Random(1)
    days = [day for some in translate_dates_data.split_days(rng) for day in some]
    pairs = translate_dates_data.write_dates(20_000, days, translate_dates_data.LANGUAGES, rng)
    characters = translate_dates_data.Characters(text for pair in pairs for text in pair)
    for pair in pairs:
        row = characters.row(*pair)
        assert all(
            length <= translate_dates_data.LONGEST[name]
            for name, length in translate_dates_data.lengths(row).items()
        )
        assert characters.decode(row["target"][1:]) == pair[1]


# ---- the masks; on JAX each operation of each shape would be compiled ----


def tokens(*shape):
    return np.random.default_rng(0).integers(4, 19, shape, np.int32)


def losses(model, source, target):
    batch = {"source": ops.convert_to_tensor(source), "target": ops.convert_to_tensor(target)}
    mean = translate_dates.Translation()(model, batch, training=True)[0]
    return np.asarray(mean.values), np.asarray(mean.weights)


def padded(row, length):
    return np.pad(row, [(0, 0), (0, length - row.shape[1])])


@on("tensorflow")
def test_padding_changes_no_loss(model):
    source = tokens(2, 6)
    target = tokens(2, 5)
    values, weights = losses(model, source, target)
    more_values, more_weights = losses(model, padded(source, 9), padded(target, 8))
    assert weights.all()
    np.testing.assert_array_equal(more_weights, padded(weights, 7))
    np.testing.assert_allclose(more_values[:, :4], values, rtol=1e-4)


@on("tensorflow")
def test_no_place_sees_what_it_is_to_write(model):
    source = tokens(1, 6)
    target = tokens(1, 5)
    other = np.concatenate([target[:, :3], target[:, 3:] + 1], axis=1)
    ours, theirs = (np.asarray(model([source, given])) for given in (target, other))
    np.testing.assert_array_equal(ours[:, :3], theirs[:, :3])
    assert (ours[:, 3:] != theirs[:, 3:]).any()


@on("tensorflow")
def test_every_character_of_the_source_is_seen(model):
    source = tokens(1, 6)
    target = tokens(1, 5)
    before = losses(model, source, target)[0]
    for place in range(6):
        source[0, place] += 1
        assert (losses(model, source, target)[0] != before).all()
        source[0, place] -= 1
