"""How the rows of an update are shared out to microbatches: every place once, in order."""

from hypothesis import given
from hypothesis import strategies as st

from wholestep.cut import Cut

SECTIONS = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9)), min_size=1, max_size=3).map(
    tuple
)


@given(SECTIONS)
def test_the_pieces_are_all_places_one_after_the_other(sections):
    cut = Cut(sections, rows=1)
    covered = [place for start, size in cut.pieces for place in range(start, start + size)]
    assert covered == list(range(cut.places))
    assert len(cut.pieces) == cut.num_microbatches
    assert [size for _, size in cut.pieces] == [
        size for count, size in sections for _ in range(count)
    ]


def test_sections_of_uneven_microbatches_and_of_padding():
    uneven = Cut(((1, 4), (2, 3)), rows=10)
    assert uneven.pieces == [(0, 4), (4, 3), (7, 3)]
    padded = Cut(((2, 4),), rows=7, padded=True)
    assert (padded.places, padded.rows) == (8, 7)


def test_equal_cuts_are_one_key_of_a_program():
    assert {Cut(((2, 4),), 8): "program"}[Cut(((2, 4),), 8)] == "program"
    assert Cut(((2, 4),), 8) != Cut(((2, 4),), 8, split=True)
