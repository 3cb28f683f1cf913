"""The data of a loop as its module and its loss were given them."""

from collections import Counter
from typing import NamedTuple

import numpy as np

from wholestep.audit.derived import as_wide
from wholestep.audit.log import Called, Log
from wholestep.audit.port import ByPass
from wholestep.tree import Tree


class Data(NamedTuple):
    """The data of a loop: inputs, labels, the labels by pass where they belong to no row, and all in words.

    `beside`: the arrays of as many rows that are no inputs, by name.
    """

    x: Tree
    y: np.ndarray
    by_pass: ByPass | None
    told: str
    beside: dict[str, np.ndarray] = {}

    @property
    def has_labels(self) -> bool:
        """Whether labels are known."""
        return self.by_pass is not None or bool(self.y.size)


def by_pass_of(called: list[Called], targets: dict[int, np.ndarray]) -> ByPass | None:
    """Return the labels by pass, if all passes have some."""
    whole = [c.order for c in called if c.is_whole]
    return {order: (targets[order],) for order in whole} if whole and all(o in targets for o in whole) else None


def called_for(log: Log) -> list[Called]:
    """Return the passes on rows of which a gradient was taken, or all if it is not known."""
    called = [each for each in log.called if each.differentiated is not False] or log.called
    return [each for each in called if each.inputs and each.inputs[0].ndim]


def as_given(called: list[Called], targets: dict[int, np.ndarray]) -> Data:
    """Return the rows that a module was given, each once, with the labels of the passes."""
    if not called:
        return Data(np.zeros((1, 1)), np.zeros((1, 0)), None, "data: none, as the model is not called")
    num = len(called[0].inputs)
    alike = [c for c in called if len(c.inputs) == num and all(leaf.ndim for leaf in c.inputs)]
    ends = Counter(tuple(leaf.shape[2:] for leaf in c.inputs) for c in alike)
    if not ends:
        return Data(np.zeros((1, 1)), np.zeros((1, 0)), None, "data: none, as the model is given no rows")
    usual = ends.most_common(1)[0][0]
    alike = [c for c in alike if tuple(leaf.shape[2:] for leaf in c.inputs) == usual]
    leaves = [np.concatenate(as_wide([c.inputs[i] for c in alike])) for i in range(num)]
    firsts = {b"".join(leaf[i].tobytes() for leaf in leaves): i for i in reversed(range(len(leaves[0])))}
    kept = sorted(firsts.values())
    leaves = [leaf[kept] for leaf in leaves]
    told = f"data: the {len(kept)} rows that the model is given, and the labels that its loss is given"
    by_pass = by_pass_of(called, targets)
    y = np.zeros(len(kept)) if by_pass else np.zeros((len(kept), 0))
    return Data(leaves[0] if num == 1 else tuple(leaves), y, by_pass, told)
