"""The contract of an update: however the batch is cut, zero bits differ."""

import itertools

import keras
import numpy as np
import pytest
from exact import (
    OPTIMIZERS,
    REGULARISERS,
    WEIGHTINGS,
    differing,
    integers,
    num_rows_of,
    one_update,
    snapshot,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from shares import later, on, share

import wholestep as ws
from wholestep.sums import EpochSums
from wholestep.update import ObjectiveUpdate

PARTS = (2, 3, 5, 1000)  # 1000: every row alone
# Every weighting with every regulariser, in such an order that JAX' half has all of both, and all
# optimizers.
CASES = [
    (
        weighting,
        REGULARISERS[(i + j) % len(REGULARISERS)],
        list(OPTIMIZERS)[(i + 2 * j) % len(OPTIMIZERS)],
    )
    for i, weighting in enumerate(WEIGHTINGS)
    for j in range(len(REGULARISERS))
]
ALL = list(itertools.product(WEIGHTINGS, REGULARISERS, OPTIMIZERS))


def check_every_cut(case, parts=PARTS):
    whole, _ = one_update(case, "auto")
    assert all(np.all(np.isfinite(v)) for v in whole.values())
    for num in parts:
        size = -(-num_rows_of(case) // num)
        cut, trainer = one_update(case, size)
        program = list(trainer.executor.planner.programs.values())[-1]
        assert program.cut.num_microbatches > 1, trainer.explain()
        assert differing(whole, cut) == [], f"microbatches of {size}"


@pytest.mark.parametrize(
    ("case", "num"), share((c, PARTS[i // 2 % len(PARTS)]) for i, c in enumerate(CASES)), ids=str
)
def test_no_bit_differs_between_cuts(case, num):
    check_every_cut(case, [num])


@pytest.mark.large
@pytest.mark.parametrize("case", ALL, ids=" / ".join)
def test_no_bit_differs_between_cuts_of_all_cases(case):
    check_every_cut(case)


@pytest.mark.parametrize(
    ("weighting", "size"), share(zip(WEIGHTINGS, (6, 6, 1, 1, 6, 1), strict=True))
)
@pytest.mark.slow
def test_no_bit_differs_between_cuts_of_a_short_batch(weighting, size):
    case = (weighting, "l2", "adam")
    whole, _ = one_update(case, "auto", short=True)
    assert differing(whole, one_update(case, size, short=True)[0]) == []


def test_a_short_batch_that_is_padded_is_the_batch_alone():
    case = ("sample weights", "l2", "adam")
    padded, trainer = one_update(case, "auto", short=True)
    alone, _ = one_update(case, "auto", num_rows=num_rows_of(case) // 2)
    assert "filled up" in trainer.explain()
    assert differing(padded, alone) == []


class Nest(ws.Objective):
    """A line through all numbers of a row, wherever they are nested, with a weight for every
    value.
    """

    def __call__(self, model, batch, training):
        leaves = [
            keras.ops.reshape(leaf, (leaf.shape[0], -1)) for leaf in keras.tree.flatten(batch["x"])
        ]
        error = model(keras.ops.concatenate(leaves, axis=1), training=training) - 1.0
        return ws.Mean(error**2, batch["weight"])


SHAPES = st.lists(st.integers(1, 3), max_size=2).map(tuple)
NESTS = st.recursive(
    SHAPES.map(lambda shape: {"leaf": shape}),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=2).map(tuple)
        | st.dictionaries(st.text("ab"), inner, min_size=1)
    ),
    max_leaves=4,
)


def filled(nest, num_rows):
    """Return the nest with integer arrays of its shapes."""
    if isinstance(nest, tuple):
        return tuple(filled(part, num_rows) for part in nest)
    if (
        "leaf" in nest
        and isinstance(nest["leaf"], tuple)
        and all(isinstance(n, int) for n in nest["leaf"])
    ):
        return integers(num_rows, *nest["leaf"])
    return {k: filled(part, num_rows) for k, part in nest.items()}


@settings(max_examples=3)
@given(NESTS, st.integers(1, 7), st.data())
@pytest.mark.slow
def test_no_bit_differs_between_cuts_of_nested_batches(nest, size, draw):
    weight = np.array(draw.draw(st.lists(st.integers(0, 3), min_size=7, max_size=7)), "float32")
    batch = {"x": filled(nest, 8), "weight": np.append(weight, 32 - weight.sum()).astype("float32")}
    width = sum(leaf[0].size for leaf in keras.tree.flatten(batch["x"]))

    def updated(microbatch_size):
        keras.utils.clear_session()
        made = keras.Sequential(
            [keras.Input((width,)), keras.layers.Dense(1, kernel_initializer="ones")]
        )
        trainer = ws.Trainer(
            made, Nest(), optimizer=keras.optimizers.SGD(0.5), microbatch_size=microbatch_size
        )
        return dict(trainer.update(batch)) | snapshot(made)

    assert differing(updated("auto"), updated(size)) == []


def mean_of_means(epoch_sums, sums, once, weights=None):
    """The mutant: each microbatch divides by its own weight, and the parts are averaged."""
    num = 1 if weights is None else mean_of_means.num
    own = {k: weight * num for k, (_, weight) in sums.items()}
    return EpochSums.honest_loss(epoch_sums, sums, once, own)


@on("jax")
@pytest.mark.parametrize("weighting", [*WEIGHTINGS[1::2], *later(WEIGHTINGS[::2])])
def test_a_mean_of_means_is_caught(weighting, monkeypatch):
    case = (weighting, "none", "sgd")
    whole, _ = one_update(case, "auto")
    monkeypatch.setattr(EpochSums, "honest_loss", EpochSums.loss, raising=False)
    monkeypatch.setattr(EpochSums, "loss", mean_of_means)
    for size, num in ((6, 3), (3, 6)):
        mean_of_means.num = num
        assert any("kernel" in name for name in differing(whole, one_update(case, size)[0]))


def test_regularisation_counted_per_microbatch_is_caught(monkeypatch):
    case = ("none", "l2", "sgd")
    whole, _ = one_update(case, "auto")
    honest = ObjectiveUpdate._regularise

    def twice(step, params, grads, scale, captured):
        return honest(
            step, params, honest(step, params, grads, scale, captured)[0], scale, captured
        )

    monkeypatch.setattr(ObjectiveUpdate, "_regularise", twice)
    assert differing(whole, one_update(case, 8)[0])


def frozen(size, num=64):
    """Return a trainer with microbatches, and its model with a frozen kernel in which a number is
    -0.0.
    """
    keras.utils.set_random_seed(0)
    base = keras.layers.Dense(num, use_bias=False, name="base")
    model = keras.Sequential([keras.Input((num,)), base, keras.layers.Dense(1)])
    kernel = integers(num, num)
    kernel[0, 0] = -0.0
    base.kernel.assign(kernel)
    base.trainable = False
    model.compile("sgd", "mse")
    trainer = ws.Trainer(model, microbatch_size=size)
    trainer.fit(integers(8, num), integers(8, 1), batch_size=8, verbose=0)
    return trainer, kernel.tobytes() == keras.ops.convert_to_numpy(base.kernel).tobytes()


@pytest.mark.own
def test_no_bit_of_frozen_weights_changes_under_microbatches():
    assert frozen(size=2)[1]


@pytest.mark.skipif(
    keras.backend.backend() != "jax", reason="TensorFlow does not tell a program's memory"
)
def test_microbatches_make_no_copy_of_frozen_weights():
    trainer, _ = frozen(size=2, num=512)
    (program,) = trainer.executor.planner.programs.values()
    assert program.cut.num_microbatches == 4
    assert program.memory < 512 * 512 * 4
