"""Sparse data: rows stay sparse on the host, and every batch is the dense one."""

import keras
import numpy as np
import pytest
import scipy.sparse
from shares import on, share

import wholestep as ws
from wholestep.data.sparse import SparseRows, dense

ROWS = 20
COLUMNS = 6
draw = np.random.default_rng(0)
DENSE = (draw.normal(size=(ROWS, COLUMNS)) * (draw.uniform(size=(ROWS, COLUMNS)) < 0.3)).astype(
    "float32"
)
Y = draw.normal(size=(ROWS, 2)).astype("float32")


def tensorflow_sparse(array):
    tf = pytest.importorskip("tensorflow")
    return tf.sparse.from_dense(array)


def bcoo(array, nse=None):
    from jax.experimental import sparse

    return sparse.BCOO.fromdense(array, nse=nse)


KINDS = {
    "csr": scipy.sparse.csr_matrix,
    "coo array": scipy.sparse.coo_array,
    "csc": scipy.sparse.csc_matrix,
    "tensorflow": tensorflow_sparse,
    "jax": bcoo,
    "jax with room": lambda array: bcoo(array, nse=np.count_nonzero(array) + 5),
}


def network(sparse=False):
    inputs = keras.Input((COLUMNS,), sparse=sparse)
    layer = keras.layers.Dense(2, kernel_initializer="ones")
    model = keras.Model(inputs, layer(inputs))
    model.compile(keras.optimizers.Adam(0.1), "mse", metrics=["mae"])
    return model


def run(x, y=None, **given):
    """Return all that a training, an evaluation and a prediction say and leave behind."""
    model = network(sparse=True)
    trainer = ws.Trainer(model, seed=3)
    history = trainer.fit(x, y, epochs=2, verbose=0, **given).history
    size = {} if "batch_size" not in given else {"batch_size": 7}
    look = x if callable(getattr(x, "__len__", None)) or y is not None else None
    told = (
        []
        if look is None or y is None
        else [trainer.evaluate(x, y, verbose=0, **size), trainer.predict(x, verbose=0)]
    )
    return [*history.values(), *told, *model.get_weights()]


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("kind", share(KINDS))
def test_no_bit_differs_from_the_dense_arrays(kind):
    given = {"batch_size": 8, "validation_split": 0.25}
    assert_same(run(KINDS[kind](DENSE), Y, **given), run(DENSE, Y, **given))


def test_a_nest_that_is_sparse_in_parts():
    batches = ws.Batches({"x": scipy.sparse.csr_matrix(DENSE), "y": Y}, 8, seed=1)
    expected = ws.Batches({"x": DENSE, "y": Y}, 8, seed=1)
    for one, other in zip(batches, expected, strict=True):
        np.testing.assert_array_equal(one["x"], other["x"])
        np.testing.assert_array_equal(one["y"], other["y"])
    assert batches.position == (1, 0)


@pytest.mark.parametrize("kind", share(KINDS))
@pytest.mark.slow
def test_batches_of_a_generator_may_be_sparse(kind):
    def draw(make):
        for i in range(0, ROWS, 5):
            yield make(DENSE[i : i + 5]), Y[i : i + 5]

    assert_same(run(draw(KINDS[kind]), steps_per_epoch=2), run(draw(np.array), steps_per_epoch=2))


@on("tensorflow")
def test_tensors_of_a_tf_data_set_may_be_sparse():
    tf = pytest.importorskip("tensorflow")
    of = lambda x: tf.data.Dataset.from_tensor_slices((x, Y)).batch(5)  # noqa: E731
    assert_same(run(of(tensorflow_sparse(DENSE))), run(of(DENSE)))


def test_entries_at_one_place_are_added_and_rows_may_be_empty():
    twice = scipy.sparse.coo_matrix(([1.0, 2.0, 4.0], ([1, 1, 3], [0, 0, 2])), (5, 3))
    rows = SparseRows.of(twice)
    np.testing.assert_array_equal(dense(twice), twice.toarray())
    np.testing.assert_array_equal(rows.load(np.array([3, 0, 1, 1])), twice.toarray()[[3, 0, 1, 1]])
    np.testing.assert_array_equal(rows[1:4].load(np.arange(3)), twice.toarray()[1:4])
    assert rows[4:2].shape == (0, 3)


@pytest.mark.parametrize("shape", [(4,), (4, 3, 2)])
def test_any_rank(shape):
    array = np.arange(np.prod(shape)).reshape(shape) % 3
    rows = SparseRows.of(bcoo(array))
    np.testing.assert_array_equal(rows.load(np.array([2, 0])), array[[2, 0]])


def test_rows_beside_sparse_ones_must_be_as_many():
    with pytest.raises(ws.BatchError, match="same number of rows"):
        ws.Trainer(network()).fit(scipy.sparse.csr_matrix(DENSE), Y[:-1], verbose=0)
