"""Rows of the data, found by the bytes of the inputs."""

from collections import Counter
from typing import NamedTuple

import numpy as np

from stepcheck import tree
from stepcheck.tree import Tree

PAD = -1


def keys(leaves: list[np.ndarray]) -> list[bytes]:
    """Return the bytes of each row of some arrays of as many rows."""
    num = len(leaves[0])
    return [
        b"".join(_bytes(leaf[row : row + 1]) for leaf in leaves)
        for row in range(num)
    ]


def _bytes(part: np.ndarray) -> bytes:
    """Return the bytes of an array, or of its text."""
    if part.dtype.kind not in "OSU":
        return part.tobytes()
    texts = part.ravel().tolist()
    return b"\0".join(
        each if isinstance(each, bytes) else str(each).encode()
        for each in texts
    )


class _Kind(NamedTuple):
    """The form in which a model is given a leaf of the data: its dtype, and perhaps its
    width.
    """

    dtype: np.dtype
    width: tuple[int, ...]

    def cut(self, leaf: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (a leaf in this form, the columns that are cut off)."""
        if not self.width or leaf.ndim < 2:
            return leaf.astype(self.dtype), leaf[:, None][:, :0]
        return leaf[:, : self.width[0]].astype(self.dtype), leaf[
            :, self.width[0] :
        ]


class Rows:
    """Finds rows of the data by the inputs, in their dtype; a batch may be narrower."""

    def __init__(self, inputs: Tree):
        self.leaves = [np.asarray(leaf) for leaf in tree.leaves(inputs)]
        self.num = len(self.leaves[0])
        self._tables: dict[tuple[_Kind, ...], dict[bytes, list[int]]] = {}
        self._equal: dict[
            int, list[int]
        ] = {}  # by row, the rows of the same inputs that were met
        self._passed = set[
            int
        ]()  # rows of this pass over the data that have no equal
        self._uses = Counter[int]()  # of those that have

    def find(self, inputs: list[np.ndarray]) -> np.ndarray:
        """Return the number of each row, `PAD` for inputs not in the data.

        Of equal rows a pass over the data uses each once.
        """
        if len(inputs) != len(self.leaves) or not inputs[0].ndim:
            return np.array([], int)
        found = np.full(len(inputs[0]), PAD)
        if any(
            leaf.shape[:1] != found.shape for leaf in inputs
        ):  # one time step beside the rows
            return found
        table = self._table(
            tuple(_Kind(leaf.dtype, leaf.shape[1:2]) for leaf in inputs)
        )
        for place, key in enumerate(keys(inputs)):
            if equal := table.get(key):
                found[place] = self._used(equal)
        return found

    def _used(self, equal: list[int]) -> int:
        """Return the one of some equal rows that this pass over the data has used
        least.
        """
        row = min(equal, key=self._uses.__getitem__)
        if len(equal) > 1:
            self._uses[row] += 1
            self._equal |= dict.fromkeys(equal, equal)
            return row
        if row in self._passed:  # a new pass
            self._passed.clear()
            self._uses.clear()
        self._passed.add(row)
        return row

    def twins(self, rows: np.ndarray) -> float:
        """Return the share of these rows that have the inputs of other rows of the
        data.
        """
        return sum(row in self._equal for row in rows.tolist()) / max(
            1, len(rows)
        )

    def equal(self, row: int) -> list[int]:
        """Return the rows of the data with the same inputs, this row among them."""
        return self._equal.get(row, [row])

    def agree(self, rows: np.ndarray, others: Tree) -> bool:
        """Whether all rows with equal inputs have the same labels and weights too."""
        groups = [
            self._equal[row] for row in set(rows.tolist()) & set(self._equal)
        ]
        leaves = [np.asarray(leaf) for leaf in tree.leaves(others)]

        def is_one(leaf: np.ndarray, group: list[int]) -> bool:
            return len({leaf[row].tobytes() for row in group}) == 1

        return all(is_one(leaf, group) for group in groups for leaf in leaves)

    def _table(self, kinds: tuple[_Kind, ...]) -> dict[bytes, list[int]]:
        """Return the rows of each key: those that lose nothing where the batch is
        narrower, if any.

        A batch of inputs without their last token may cut the last token of its longest
        rows.
        """
        if kinds in self._tables:
            return self._tables[kinds]
        pairs = [
            kind.cut(leaf)
            for leaf, kind in zip(self.leaves, kinds, strict=True)
        ]
        lost = [
            rest[:, 1:].reshape(self.num, -1).any(axis=1) for _, rest in pairs
        ]
        is_cut = np.any(lost, axis=0)
        whole, cut = dict[bytes, list[int]](), dict[bytes, list[int]]()
        for row, key in enumerate(keys([leaf for leaf, _ in pairs])):
            table = cut if is_cut[row] else whole
            table.setdefault(key, []).append(row)
        self._tables[kinds] = cut | whole
        return self._tables[kinds]
