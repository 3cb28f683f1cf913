"""The number that divides a loss over places: the table of docs/sequences.md."""

import keras
import numpy as np
import pytest
from shares import halves

import wholestep as ws

X = np.array([[1, 2, 3, 0], [4, 5, 0, 0]])  # 5 real tokens of 8 places
WEIGHTS = np.array([[1, 2, 1, 0], [1, 1, 0, 0]], "float32")  # 6
MEAN = "sum_over_batch_size"
WEIGHTED = "mean_with_sample_weight"


@pytest.mark.parametrize(
    ("mask", "weights", "reduction", "divisor"),
    halves(
        [
            (True, None, MEAN, 5),
            (False, None, MEAN, 8),
            (True, WEIGHTS, MEAN, 5),
            (False, WEIGHTS, MEAN, 8),
            (True, WEIGHTS, WEIGHTED, 6),
            (False, WEIGHTS, WEIGHTED, 6),
        ]
    ),
)
def test_the_loss_of_microbatches_is_divided_as_the_table_says(mask, weights, reduction, divisor):
    layers = [keras.layers.Embedding(9, 6, mask_zero=mask), keras.layers.Dense(9)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    model.compile(keras.optimizers.SGD(0.0), loss)
    logs = keras.ops.convert_to_numpy(keras.ops.log_softmax(model(X)))
    places = np.take_along_axis(-logs, X[..., None], -1)[..., 0] * (
        1 if weights is None else weights
    )
    total = float((places * (X != 0 if mask else 1)).sum())
    history = (
        ws.Trainer(model, microbatch_size=1)
        .fit(X, X, sample_weight=weights, batch_size=2, verbose=0)
        .history
    )
    assert history["loss"][0] == pytest.approx(total / divisor, rel=1e-5)
    assert model.evaluate(X, X, sample_weight=weights, batch_size=2, verbose=0) == pytest.approx(
        total / divisor, rel=1e-5
    )
