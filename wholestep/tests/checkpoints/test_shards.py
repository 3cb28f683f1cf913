"""Any part of an array in pieces equals the part of the array, wherever its pieces are saved."""

import json
from dataclasses import replace

import numpy as np
import pytest
from folders import NUMBERS, cut
from hypothesis import given
from hypothesis import strategies as st

import wholestep as ws
from wholestep.checkpoints import manifest as manifests
from wholestep.checkpoints.folder import Folder
from wholestep.checkpoints.shards import copied, is_whole, on_host
from wholestep.checkpoints.shared_folder import WriteShares


@given(st.data())
def test_every_part_of_an_array_in_pieces_is_that_of_the_array(data):
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    numbers = np.arange(np.prod(shape)).reshape(shape)
    places = [
        sorted(data.draw(st.sets(st.integers(1, size - 1)))) if size > 1 else [] for size in shape
    ]
    index = tuple(data.draw(st.slices(size).filter(lambda s: (s.step or 1) == 1)) for size in shape)
    pieces = cut(numbers, *places)
    np.testing.assert_array_equal(pieces[index], numbers[index])
    np.testing.assert_array_equal(pieces[...], numbers)
    assert pieces[...].dtype == numbers.dtype


def test_a_piece_that_is_not_at_hand_is_an_error_only_where_it_is_asked_for():
    pieces = cut(NUMBERS, [2], [3])
    half = replace(pieces, shards=pieces.shards[:2])
    np.testing.assert_array_equal(half[:2], NUMBERS[:2])
    with pytest.raises(ws.CheckpointError, match="3 numbers of 9 are missing"):
        half[:3, 3:]


def test_copies_keep_what_is_written_here_or_all_that_is_held():
    pieces = cut(NUMBERS, [2], [], own=lambda i: i == 0)
    seen = []

    def copy(name, array):
        seen.append(name)
        return array.copy()

    assert [piece.begin for piece in copied(pieces, copy, are_own=True).shards] == [(0, 0)]
    kept = copied(pieces, copy, are_own=False)
    np.testing.assert_array_equal(kept[...], NUMBERS)
    assert seen == ["[0, 0]", "[0, 0]", "[2, 0]"]


class Spread:
    """An array over several processes, as JAX has them: this process holds the upper half, on two
    devices.
    """

    is_fully_addressable = is_fully_replicated = False
    shape = NUMBERS.shape
    dtype = NUMBERS.dtype

    class Shard:
        def __init__(self, rows, replica_id):
            self.index, self.data, self.replica_id = (
                (slice(*rows), slice(None)),
                NUMBERS[slice(*rows)],
                replica_id,
            )

    def __init__(self, *shards):
        self.addressable_shards = [self.Shard(*shard) for shard in shards]


def test_the_pieces_of_an_array_over_processes_are_those_that_this_process_holds_each_once():
    assert is_whole(NUMBERS)
    assert on_host(NUMBERS) is NUMBERS
    held = on_host(Spread(((0, 2), 1), ((0, 2), 0), ((2, 3), 1)))
    assert [(piece.begin, piece.is_own) for piece in held.shards] == [
        ((0, 0), True),
        ((2, 0), False),
    ]
    np.testing.assert_array_equal(held[:3], NUMBERS[:3])


@given(st.integers(1, 5), st.lists(st.integers(0, 100), max_size=40))
def test_every_array_is_dealt_to_one_process_and_none_has_much_more_than_another(count, sizes):
    deals = [WriteShares(index, count) for index in range(count)]
    taken = [[deal.takes(nbytes) for deal in deals] for nbytes in sizes]
    assert all(sum(row) == 1 for row in taken)
    nbytes = [
        sum(size for size, row in zip(sizes, taken, strict=True) if row[i]) for i in range(count)
    ]
    assert max(nbytes) - min(nbytes) <= max([0, *sizes])


# ---- in files ----


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "runs").mkdir()
    return Folder(tmp_path / "runs")


def test_pieces_are_read_back_where_they_belong_and_stay_when_the_checkpoint_goes(folder):
    folder.write(
        3, {"w": cut(NUMBERS, [1, 2], [4]), "b": np.ones(3), "v": cut(NUMBERS[0], [5])}, {}
    )
    folder.verify(3)
    manifest, arrays = folder.read(3)
    assert manifest.arrays == {"b": ((3,), "F64"), "v": ((6,), "F32"), "w": ((4, 6), "F32")}
    assert sorted(path.name for path in folder.path(3).iterdir()) == [
        "00000-of-00001-00.safetensors",
        "00000-of-00001-01.safetensors",
        "manifest.json",
    ]
    folder.remove(3)
    np.testing.assert_array_equal(arrays["w"][1:3, 3:], NUMBERS[1:3, 3:])
    np.testing.assert_array_equal(arrays["v"][...], NUMBERS[0])
    assert isinstance(arrays["b"], np.ndarray)


def test_another_release_reads_what_has_no_pieces(folder):
    def format_of(step):
        return json.loads((folder.path(step) / manifests.NAME).read_bytes().splitlines()[0])[
            "format"
        ]

    folder.write(1, {"w": NUMBERS}, {})
    folder.write(2, {"w": cut(NUMBERS, [2], [])}, {})
    assert (format_of(1), format_of(2)) == (1, 2)


def test_damage_of_pieces_is_found_when_all_is_verified_and_when_one_is_read(folder):
    folder.write(1, {"w": cut(NUMBERS, [2], [])}, {})
    arrays = folder.read(1)[1]
    (path,) = folder.path(1).glob("*.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    with path.open("r+b") as file:
        file.write(content)
    with pytest.raises(ws.CheckpointError, match="must have the digest"):
        folder.read(1)
    with pytest.raises(ws.CheckpointError, match="must have the digest"):
        arrays["w"][2:]
    np.testing.assert_array_equal(arrays["w"][:2], NUMBERS[:2])


def hostile(leaves):
    one, two, three, four = leaves
    return {
        "two overlap": [one, replace(two, begin=(0, 2)), three, four],
        "one comes twice": [one, one, three, four],
        "one is missing": [one, two, three],
        "one is out of bounds": [one, two, three, replace(four, begin=(3, 3))],
        "one has another axis": [one, two, three, replace(four, begin=(2, 3, 0))],
        "one is of another array": [one, two, three, replace(four, whole=(4, 7))],
        "one is of other numbers": [one, two, three, replace(four, dtype="I32")],
        "one is whole": [one, two, three, replace(four, begin=None, whole=None)],
        "no shape is said": [replace(leaf, whole=None) for leaf in leaves],
        "no place is said": [replace(leaf, begin=None) for leaf in leaves],
        "the first rows are missing": [
            replace(leaf, begin=(leaf.begin[0] + 1, leaf.begin[1])) for leaf in leaves
        ],
    }


@pytest.mark.parametrize(
    "what", list(hostile([manifests.Leaf("w", (2, 3), "F32", "f", 8, "", (4, 6), (0, 0))] * 4))
)
def test_pieces_that_do_not_fill_their_array_once_are_refused(folder, what):
    folder.write(1, {"w": cut(NUMBERS, [2], [3])}, {})
    manifest = folder.manifest(1)
    leaves = hostile(manifest.leaves)[what]
    (folder.path(1) / manifests.NAME).unlink()
    manifests.write(folder.path(1), replace(manifest, leaves=leaves))
    with pytest.raises(
        ws.CheckpointError, match=r"must (be of one array|fill|follow|end|have a unique name)"
    ):
        folder.read(1)
