"""Fixtures of small integers: every partial sum is exact in float32, so any differing bit is a bug,
never rounding.

The weights of a batch sum to a power of two, so that dividing first is exact as well.
"""

import contextlib

import keras
import numpy as np

import wholestep as ws
from wholestep.data.weights import class_weighted

TIME = 4
FEATURES = 4
OUTPUTS = 4
WEIGHTINGS = ("none", "sample weights", "weighted mean", "masks", "class weights", "two outputs")
REGULARISERS = ("none", "l2", "activity")

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.5),
    "momentum": lambda: keras.optimizers.SGD(0.5, momentum=0.5, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.125),
    "adamw, clip, ema": lambda: keras.optimizers.AdamW(
        0.125, weight_decay=0.25, global_clipnorm=1.0, use_ema=True
    ),
    "lion": lambda: keras.optimizers.Lion(0.125),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.125), dynamic_growth_steps=1
    ),
}


def num_rows_of(case):
    """20 rows, to be cut into five, where nothing is divided by their number; else 16."""
    weighting, regulariser, _ = case
    return (
        20
        if weighting in ("weighted mean", "masks", "two outputs") and regulariser != "activity"
        else 16
    )


def integers(*shape, seed=0, low=-2, high=3):
    return np.random.default_rng([seed, *shape]).integers(low, high, shape).astype("float32")


def build(weighting, regulariser, optimizer):
    """Return a compiled model of integer weights."""
    model = (
        _two_outputs(regulariser)
        if weighting == "two outputs"
        else _one_output(weighting, regulariser)
    )
    for i, variable in enumerate(model.weights):
        variable.assign(integers(*variable.shape, seed=100 + i))
    reduction = "mean_with_sample_weight" if weighting == "weighted mean" else "sum_over_batch_size"
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    two = weighting == "two outputs"
    model.compile(
        OPTIMIZERS[optimizer](),
        [loss, keras.losses.MeanAbsoluteError()] if two else loss,
        loss_weights=[1.0, 2.0] if two else None,
        metrics=[["mae"], ["mae"]] if two else ["mae"],
        weighted_metrics=[["mse"], []] if two else ["mse"],
    )
    return model


def data(weighting, num_rows):
    """Return the (x, y[, sample_weight]) of a case and the class weights, if it has any."""
    if weighting == "masks":
        return (_masked(num_rows, 2, 1), integers(num_rows, TIME, OUTPUTS, seed=2)), None
    if weighting == "two outputs":
        x = [_masked(num_rows, 2, 1), _masked(num_rows, 1, 3)]
        return (x, [integers(num_rows, TIME, OUTPUTS, seed=s) for s in (2, 4)]), None
    x = integers(num_rows, FEATURES, seed=1)
    y = integers(num_rows, OUTPUTS, seed=2)
    if weighting == "class weights":
        return (x, (np.arange(num_rows)[:, None] % 3).astype("float32")), {0: 2.0, 1: 0.5}
    if weighting in ("sample weights", "weighted mean"):
        return (x, y, _weights(num_rows)), None
    return (x, y), None


def _weights(num_rows):
    """Whole weights, some of them 0, that sum to a power of two."""
    weights = np.resize(np.array([3, 0, 1, 0, 0, 2, 1, 1], "float32"), num_rows)
    weights[-1] += _power_of_two(weights.sum()) - weights.sum()
    return weights


def _power_of_two(total):
    return 2 ** int(np.ceil(np.log2(total)))


def _masked(num_rows, length, seed):
    """Sequences of uneven length, some of them empty; the rest is 0, which masks it. 2^n steps are
    not masked.
    """
    x = integers(num_rows, TIME, FEATURES, seed=seed, low=1, high=3)
    lengths = np.resize(np.array([length - 1, length + 1, 0, length]), num_rows)
    missing = 2 ** int(np.log2(TIME * num_rows * 0.7)) - lengths.sum()
    for i in range(missing):
        lengths[np.flatnonzero(lengths < TIME)[i % 3]] += 1
    x[np.arange(TIME)[None] >= lengths[:, None]] = 0
    return x


def _dense(regulariser):
    return keras.layers.Dense(
        OUTPUTS,
        kernel_regularizer=keras.regularizers.L2(0.25) if regulariser == "l2" else None,
        activity_regularizer=keras.regularizers.L2(0.0625) if regulariser == "activity" else None,
    )


def _one_output(weighting, regulariser):
    shape = (TIME, FEATURES) if weighting == "masks" else (FEATURES,)
    first = [keras.layers.Masking()] if weighting == "masks" else []
    last = [keras.layers.Dense(1)] if weighting == "class weights" else []
    return keras.Sequential(
        [keras.Input(shape), *first, _dense(regulariser), keras.layers.ReLU(), *last]
    )


def _two_outputs(regulariser):
    inputs = [keras.Input((TIME, FEATURES)), keras.Input((TIME, FEATURES))]
    shared = _dense(regulariser)
    outputs = [
        shared(keras.layers.Masking()(inputs[0])),
        keras.layers.ReLU()(shared(keras.layers.Masking()(inputs[1]))),
    ]
    return keras.Model(inputs, outputs)


def one_update(case, microbatch_size, *, num_rows=None, short=False, replicas=None):
    """Carry out one update and return everything it changed and said. `short`: the epoch's last
    batch, half as long.
    """
    weighting = case[0]
    num_rows = num_rows or num_rows_of(case)
    keras.utils.clear_session()
    with spread_over(replicas):
        model = build(*case)
    batch, class_weight = data(weighting, num_rows)
    transform = class_weighted(class_weight) if class_weight else None
    if short:
        batch = keras.tree.map_structure(
            lambda *parts: np.concatenate(parts), batch, data(weighting, num_rows // 2)[0]
        )
    batches = ws.Batches(batch, num_rows, shuffle=False, transform=transform)
    batches.seek(0, 1 if short else 0)
    trainer = ws.Trainer(model, microbatch_size=microbatch_size, replicas=replicas)
    (step,) = trainer.steps(batches)
    return snapshot(model) | step.logs | {"own loss": step.loss}, trainer


def spread_over(replicas):
    """Return the scope in which a model for `replicas` is built."""
    if replicas is None or keras.backend.backend() != "tensorflow":
        return contextlib.nullcontext()
    import tensorflow as tf

    # TensorFlow's collectives cannot change their number within a process, as the tests do.
    devices = [f"CPU:{i}" for i in range(replicas)]
    ops = tf.distribute.ReductionToOneDevice()
    return tf.distribute.MirroredStrategy(devices, cross_device_ops=ops).scope()


def snapshot(model):
    values = {v.path: keras.ops.convert_to_numpy(v) for v in model.variables}
    return values | {
        f"{i} {v.path}": keras.ops.convert_to_numpy(v)
        for i, v in enumerate(model.optimizer.variables)
    }


def differing(one, two):
    """Return the names whose bits differ."""
    assert one.keys() == two.keys()
    return [k for k in one if np.asarray(one[k]).tobytes() != np.asarray(two[k]).tobytes()]
