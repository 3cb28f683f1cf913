"""Padding and masks: places that do not count, batches in buckets, and losses with weights of their own."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from small import by, by_hand, descend, faults, gradient_of

import stepcheck
from stepcheck.faults import Fault, Quantity, Stage

RNG = np.random.default_rng(0)
LENGTHS = np.tile([2, 3, 4, 5, 6], 8)
TOKENS = np.where(
    np.arange(6) < LENGTHS[:, None], RNG.integers(1, 9, size=(40, 6)), 0
)
TAGS = TOKENS % 4
MASK = (TOKENS != 0).astype("float32")
BY_WEIGHT = {"from_logits": True, "reduction": "mean_with_sample_weight"}


def tagger(width=6, **embedding):
    keras.utils.set_random_seed(0)
    parts = layers.Embedding(9, 6, **embedding), layers.Dense(4)
    model = keras.Sequential([keras.Input((width,), dtype="int32"), *parts])
    model.compile(
        keras.optimizers.SGD(0.1),
        keras.losses.SparseCategoricalCrossentropy(**BY_WEIGHT),
    )
    model.optimizer.build(model.trainable_variables)
    return model


def entropy(out, y, smoothing=0.0):
    hot = ops.one_hot(y, 4) * (1 - smoothing) + smoothing / 4
    return -ops.sum(hot * ops.log_softmax(out), axis=-1)


def by_mask(out, y, mask):
    return ops.sum(entropy(out, y) * mask) / ops.sum(mask)


def over_all_places(out, y, mask):
    return ops.mean(entropy(out, y) * mask)


def report_of(
    value,
    data=(TOKENS, TAGS, MASK),
    given=(TOKENS, TAGS, MASK),
    loss=None,
    move=None,
    **embedding,
):
    model = tagger(**embedding)
    with stepcheck.watch(model, data, loss=loss) as report:
        descend(model, value, given, 8, move or by(model.optimizer))
    return report


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (by_mask, []),
        (over_all_places, [Fault.PADDED_PLACES_COUNTED]),
        (lambda out, y, mask: ops.mean(entropy(out, y)), [Fault.MASK_IGNORED]),
    ],
)
def test_a_mask_that_is_stated_as_weights(value, found):
    report = report_of(value)
    assert faults(report) == found, str(report)
    assert found or report.is_right


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (by_mask, []),
        (lambda out, y, mask: ops.mean(entropy(out, y)), [Fault.MASK_IGNORED]),
    ],
)
def test_a_mask_that_the_model_makes(value, found):
    report = report_of(value, (TOKENS, TAGS), mask_zero=True)
    assert faults(report) == found, str(report)


def test_other_labels_behind_a_mask_that_the_model_makes_have_no_known_form():
    report = report_of(
        lambda out, y, w: ops.sum(entropy(out, y, 0.1) * w) / ops.sum(w),
        mask_zero=True,
    )
    assert faults(report) == [Fault.LOSS_UNLIKE], str(report)


def test_a_mask_that_begins_a_place_later_has_other_weights():
    later = (np.arange(6) < LENGTHS[:, None] + 1).astype("float32")
    (found,) = report_of(by_mask, given=(TOKENS, TAGS, later)).findings
    assert (found.quantity, found.stage) == (
        Quantity.WEIGHTS,
        Stage.GRADIENT,
    ), str(found)


def with_weights(y, out):
    return entropy(out, y), ops.cast(y != 0, "float32")


@pytest.mark.parametrize(
    ("is_masked", "has_more"), [(True, False), (True, True), (False, False)]
)
def test_a_loss_may_return_values_and_weights(is_masked, has_more):
    rows = (
        RNG.uniform(0.5, 2, len(TOKENS)).astype("float32")
        if has_more
        else np.ones(len(TOKENS), "float32")
    )

    def value(out, y, w):
        values, own = with_weights(y, out)
        own = (own if is_masked else 1.0) * ops.convert_to_tensor(w)[:, None]
        return ops.sum(values * own) / ops.sum(own + 0 * values)

    report = report_of(
        value,
        (TOKENS, TAGS, *[rows] * has_more),
        (TOKENS, TAGS, rows),
        with_weights,
    )
    ignored = Fault.MASK_IGNORED if has_more else Fault.ROWS_COUNTED_OTHERWISE
    assert faults(report) == [ignored] * (not is_masked), str(report)
    assert Stage.GRADIENT in report.judged


@pytest.mark.parametrize("parts", [1, 3])
def test_batches_in_buckets_are_as_wide_as_their_longest_rows_need(parts):
    model, rng = tagger(width=None), np.random.default_rng(1)
    gradient = gradient_of(model, by_mask)
    with stepcheck.watch(model, (TOKENS, TAGS, MASK)) as report:
        for width, shortest in ((4, 0), (6, 5), (4, 0), (6, 5)):
            rows = rng.permutation(
                np.flatnonzero((width >= LENGTHS) & (shortest <= LENGTHS))
            )
            cut = [TOKENS[own, :width] for own in np.array_split(rows, parts)]
            grads = [
                gradient(x, x % 4, (x != 0).astype("float32")) for x in cut
            ]
            sums = [
                sum(map(np.asarray, each)) / parts
                for each in zip(*grads, strict=True)
            ]
            by(model.optimizer)(model.trainable_variables, sums)
    assert faults(report) == [Fault.MEAN_OF_MEANS] * (parts > 1), str(report)
    assert Stage.GRADIENT in report.judged


def test_padded_places_by_which_a_step_by_hand_divides_are_known_by_the_stated_rate():
    model = tagger()
    with stepcheck.watch(
        model, (TOKENS, TAGS, MASK), optimizer=keras.optimizers.SGD(0.3)
    ) as report:
        descend(model, over_all_places, (TOKENS, TAGS, MASK), 8, by_hand(0.3))
    assert faults(report) == [Fault.PADDED_PLACES_COUNTED], str(report)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (lambda out, y, w: ops.sum((out[:, 0] - y) ** 2 * w) / ops.sum(w), []),
        (
            lambda out, y, w: ops.mean((out[:, 0] - y) ** 2),
            [Fault.PADDING_TRAINED_ON],
        ),
        (
            lambda out, y, w: ops.mean((out[:, 0] - y) ** 2 * w),
            [Fault.PADDING_COUNTED],
        ),
        (
            lambda out, y, w: ops.sum((out[:, 0] - y) ** 2 * w),
            [Fault.NEVER_DIVIDED],
        ),
    ],
)
def test_copies_of_a_row_that_fill_up_a_short_batch_do_not_count(value, found):
    x = RNG.normal(size=(22, 5)).astype("float32")
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((5,)), layers.Dense(4, "tanh"), layers.Dense(1)]
    )
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.optimizer.build(model.trainable_variables)
    gradient, rng = gradient_of(model, value), np.random.default_rng(1)
    with stepcheck.watch(model, (x, x[:, 0])) as report:
        for _ in range(2):
            order = rng.permutation(22)
            for start in (0, 8, 16):
                rows = order[start : start + 8]
                weights = (np.arange(8) < len(rows)).astype("float32")
                rows = np.append(rows, np.zeros(8 - len(rows), int))
                by(model.optimizer)(
                    model.trainable_variables,
                    gradient(x[rows], x[rows, 0], weights),
                )
    assert faults(report) == found, str(report)
