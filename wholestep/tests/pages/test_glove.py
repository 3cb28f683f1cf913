"""The parts of examples/glove.py: the table of pairs, however it is spilled; orders; files of
vectors.
"""

import tempfile
from collections import Counter
from pathlib import Path

import glove
import glove_pairs
import glove_vectors
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

TEXTS = st.lists(
    st.lists(st.sampled_from(["an", "apple", "Apple,", "be", "cat", "rare"]), max_size=12),
    max_size=8,
)
KEPT = {"an": 0, "apple": 1, "be": 2, "cat": 3}


def dense(text, window):
    """Return counts: (words, words), pair by pair."""
    kept = [word for line in text for word in glove_pairs.split([line]) if word in KEPT]
    counts = np.zeros((len(KEPT), len(KEPT)))
    for place, word in enumerate(kept):
        for distance in range(1, min(window, place) + 1):
            earlier = KEPT[kept[place - distance]]
            counts[earlier, KEPT[word]] += 1 / distance
            counts[KEPT[word], earlier] += 1 / distance
    return counts


def table(text, window, num_buffered):
    with tempfile.TemporaryDirectory() as folder:
        columns = glove_pairs.cooccurrences(
            text, KEPT, window, Path(folder), num_buffered=num_buffered
        )
        return [np.array(column) for column in columns], len(list(Path(folder).glob("run*")))


@given(TEXTS, st.integers(1, 5), st.integers(1, 60))
def test_a_table_is_the_dense_reference_however_it_is_spilled(words, window, num_buffered):
    text = [" ".join(line) for line in words]
    expected = dense(text, window)
    assume(expected.any())
    (focal, context, count), _ = table(text, window, num_buffered)
    rows, columns = np.nonzero(expected)
    np.testing.assert_array_equal((focal, context), (rows, columns))
    np.testing.assert_allclose(count, expected[rows, columns], rtol=1e-6)


def test_small_buffers_spill_many_runs_and_the_table_stays_the_same():
    text = ["an apple be cat"] * 10
    whole, one = table(text, 2, 1 << 20)
    cut, many = table(text, 2, 8)
    assert (one, many) == (1, 20)
    for ours, theirs in zip(cut, whole, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_merge_looks_at_no_more_of_a_run_than_it_may():
    class Watched(np.ndarray):
        longest = 0

        def __getitem__(self, key):
            if isinstance(key, slice) and key.stop is not None:
                Watched.longest = max(Watched.longest, key.stop - (key.start or 0))
            return super().__getitem__(key)

    runs = [
        np.array([(3 * key + i, 1) for key in range(50)], glove_pairs.PAIR).view(Watched)
        for i in range(3)
    ]
    merged = np.concatenate(list(glove_pairs.merge(runs, 4)))
    assert merged["key"].tolist() == list(range(150))
    assert Watched.longest == 4


@given(TEXTS)
def test_the_vocabulary_is_in_order_of_frequency(words):
    text = [" ".join(line) for line in words]
    counts = Counter(word.lower().strip(",") for line in words for word in line)
    kept = glove_pairs.vocabulary(text, 3, min_count=2)
    assert [counts[word] for word in kept] == [n for _, n in counts.most_common(3) if n >= 2]
    assert list(kept.values()) == list(range(len(kept)))


@given(st.integers(0, 200), st.integers(1, 50))
def test_a_shuffle_window_permutes_and_shows_no_row_before_its_time(num, window):
    order = glove_pairs.window_shuffled(num, window, seed=3)
    assert sorted(order.tolist()) == list(range(num))
    assert np.all(order < np.arange(num) + window)
    np.testing.assert_array_equal(order, glove_pairs.window_shuffled(num, window, seed=3))


@pytest.fixture
def few_rows():
    """Return a model whose output is the sum of its biases, and three rows ((focal, context),
    count).
    """
    model = glove.network(3, 2)
    for name in ("target", "other"):
        model.get_layer(name).set_weights([np.zeros((3, 2))])
    for name in ("target_bias", "other_bias"):
        model.get_layer(name).set_weights([np.array([[1.0], [2.0], [3.0]])])
    return model, (
        (np.array([0, 1, 2]), np.array([0, 0, 2])),
        np.array([0.5, 100, 1e6], np.float32),
    )


def test_as_written_every_pair_meets_every_count(few_rows):
    model, (pair, count) = few_rows
    prediction = np.array([2, 3, 6])
    weight = np.array([0.005**0.75, 1, 1])
    errors = prediction[:, None] - np.log(count)
    assert float(glove.as_written(model, pair, count)) == pytest.approx(np.mean(weight * errors**2))
    assert float(glove.mended(model, pair, count)) == pytest.approx(
        np.mean(weight * np.diag(errors) ** 2)
    )
    assert model.evaluate(pair, count, verbose=0) == pytest.approx(
        np.mean(weight * np.diag(errors) ** 2)
    )


@pytest.mark.parametrize("size", [2, 8])
def test_the_loss_over_all_pairs_is_that_of_evaluate(few_rows, size):
    model, data = few_rows
    model.get_layer("target").set_weights([np.arange(6).reshape(3, 2)])
    model.get_layer("other").set_weights([np.arange(6)[::-1].reshape(3, 2) / 8])
    assert glove_vectors.loss_of(model, data, size) == pytest.approx(
        model.evaluate(*data, verbose=0), rel=1e-5
    )


@pytest.mark.parametrize("header", [False, True])
def test_vectors_come_back_to_the_bit(tmp_path, header):
    vectors = np.random.default_rng(1).normal(size=(4, 5)).astype("float32") ** 9
    path = glove_vectors.save(tmp_path / "new" / "vectors.txt", KEPT, vectors, header=header)
    words, found = glove_vectors.load(path)
    assert words == list(KEPT)
    np.testing.assert_array_equal(found, vectors)
    assert path.read_text().startswith("4 5\nan " if header else "an ")


def test_neighbours_point_the_same_way():
    vectors = np.array([[1, 0], [0, 1], [5, 1], [-1, 0]], "float32")
    assert glove_vectors.nearest("an", list(KEPT), vectors, num=2) == ["be", "apple"]
