"""Losses of tokens: the weights of a batch differ from step to step, and parts of it may weigh
nothing at all.
"""

import keras
import numpy as np
import pytest
from exact import differing, integers, snapshot
from shares import share

import wholestep as ws
from wholestep.sums import EpochSums

ROWS = 12
LENGTH = 5
WORDS = 4
TOKENS = integers(ROWS, LENGTH, seed=3, low=0, high=WORDS).astype("int32")

WEIGHTS = {
    "some tokens": np.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) % 3 == 0,
    "whole rows masked": np.arange(ROWS)[:, None] % 4 == 0,
    "whole microbatches masked": (np.arange(ROWS)[:, None] < 3) | (np.arange(ROWS)[:, None] == 11),
}


class Tokens(ws.Objective):
    """A squared error for every token, and the share of tokens without an error."""

    def __call__(self, model, batch, training):
        error = model(batch["tokens"], training=training)[..., 0] - 1.0
        hit = keras.ops.cast(error == 0.0, "float32")
        return ws.Mean(error**2, batch["weight"]), {"hits": ws.Mean(hit, batch["weight"])}


def weights_of(kind):
    """Whole weights of which the sum is a power of two."""
    weight = np.broadcast_to(WEIGHTS[kind], (ROWS, LENGTH)).astype("float32")
    weight[tuple(np.argwhere(weight)[0])] += 2 ** np.ceil(np.log2(weight.sum())) - weight.sum()
    return weight


def updated(weight, microbatch_size="auto", **arguments):
    keras.utils.clear_session()
    model = keras.Sequential(
        [keras.Input((LENGTH,), dtype="int32"), keras.layers.Embedding(WORDS, 2)]
    )
    model.add(keras.layers.Dense(1))
    for i, variable in enumerate(model.weights):
        variable.assign(integers(*variable.shape, seed=50 + i))
    optimizer = keras.optimizers.SGD(0.5)
    optimizer.build(model.trainable_variables)
    trainer = ws.Trainer(
        model, Tokens(), optimizer=optimizer, microbatch_size=microbatch_size, **arguments
    )
    logs = trainer.update({"tokens": TOKENS, "weight": weight})
    return snapshot(model) | dict(logs), trainer


@pytest.mark.parametrize(
    ("kind", "sizes"), share(zip(WEIGHTS, [(1, 6), (3, 5), (3, 1)], strict=True))
)
@pytest.mark.slow
def test_no_bit_differs_between_cuts(kind, sizes):
    whole, _ = updated(weights_of(kind))
    assert np.isfinite(whole["loss"])
    for size in sizes:
        assert differing(whole, updated(weights_of(kind), size)[0]) == []


@pytest.mark.large
@pytest.mark.parametrize("kind", WEIGHTS)
def test_no_bit_differs_between_any_cuts(kind):
    test_no_bit_differs_between_cuts(kind, (1, 3, 5, 6))


def test_a_mean_of_means_is_caught(monkeypatch):
    weight = weights_of("some tokens")
    whole, _ = updated(weight)
    honest = EpochSums.loss

    def mean_of_means(epoch_sums, sums, once, weights=None):
        return honest(epoch_sums, sums, once, {k: w * 2 for k, (_, w) in sums.items()})

    monkeypatch.setattr(EpochSums, "loss", mean_of_means)
    assert "sequential/dense/kernel" in differing(whole, updated(weight, 6)[0])


@pytest.mark.parametrize("size", ["auto", 5])
def test_a_batch_that_weighs_nothing_is_refused_before_the_update(size):
    nothing = np.zeros((ROWS, LENGTH), "float32")
    with pytest.raises(
        ws.NonFiniteError, match=r"Update 1 .* not applied.*the weights of the loss sum to zero"
    ):
        updated(nothing, size)


@pytest.mark.parametrize("size", ["auto", 5])
def test_a_batch_that_weighs_nothing_can_be_left_out(size):
    nothing = np.zeros((ROWS, LENGTH), "float32")
    skipped, trainer = updated(nothing, size, on_nonfinite="skip")
    assert trainer.num_skipped == 1
    assert all(np.all(np.isfinite(v)) for k, v in skipped.items() if k not in ("loss", "hits"))
    assert skipped["0 sgd/iteration"] == 0


def test_masked_padding_weighs_nothing_in_a_compiled_loss():
    rows = [(np.arange(1, 1 + n) % WORDS, np.arange(n) % 2) for n in (3, 9, 5, 2)]
    losses = {}
    for masks in (True, False):
        model = keras.Sequential(
            [keras.layers.Embedding(WORDS + 1, 2, mask_zero=masks), keras.layers.Dense(2)]
        )
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        model.build((None, None))
        for width in (9, 20):
            data = ws.Batches(
                [(1 + words, labels) for words, labels in rows],
                tokens=80,
                length=lambda row: len(row[0]),
                boundaries=[width],
            )
            losses[masks, width] = ws.Trainer(model).evaluate(data, verbose=0)
    assert losses[True, 9] == pytest.approx(losses[True, 20], rel=1e-6)
    assert losses[False, 9] != pytest.approx(losses[False, 20], rel=1e-3)
