"""Measured properties of a model and of the machine, by which updates are planned."""

from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from wholestep import tree
from wholestep.tree import Tree


@dataclass(frozen=True)
class Coupling:
    """The result of the probe: how the rows of a batch depend on each other.

    Args:
        couples: a row's value depends on the other rows.
        moves: the forward pass moves floating state, such as moving statistics.
        whole: a loss or a metric is a single number.
        extra: how the model's other losses add up over microbatches: "none", "sum", "mean", or "whole" (not at all).
        unknown: no row's value changed with its content, so nothing is known.
        keeps: a layer keeps a state for every row of the full batch (`stateful=True`), so the number of rows is fixed.
        draws: random draws depend on the cut, or change from one call to the next.
        custom: the name of the custom step that computes an update; "" if there is none.
    """

    couples: bool = False
    moves: bool = False
    whole: bool = False
    extra: str = "none"
    unknown: bool = False
    keeps: bool = False
    draws: bool = False
    custom: str = ""

    @property
    def cut_is_exact(self) -> bool:
        """Whether any cut of the batch gives the same update."""
        return self.cut_is_possible and not (self.couples or self.moves or self.unknown)

    @property
    def cut_is_possible(self) -> bool:
        """Whether a cut batch can be computed, even with another result than the full batch."""
        return not (self.whole or self.keeps or self.extra == "whole" or self.custom)

    @property
    def padding_is_exact(self) -> bool:
        """Whether rows of weight 0 change nothing."""
        return self.cut_is_exact and self.extra == "none"

    @property
    def why(self) -> str:
        """The reasons why the batch may not be cut, as text."""
        reasons = {
            "the rows of a batch see each other (as in BatchNormalization)": self.couples and self.moves,
            "the rows of a batch see each other, in a layer or in the loss": self.couples and not self.moves,
            "the forward pass moves statistics of the batch": self.moves and not self.couples,
            "whether the rows see each other could not be found out from these rows": self.unknown,
            "a loss or metric came as one number instead of one per row": self.whole,
            "a loss from add_loss is neither a sum nor a mean over rows": self.extra == "whole",
            f"the model's own {self.custom} is run whole": bool(self.custom),
            "a stateful layer keeps a state for every row of the whole batch": self.keeps,
        }
        return "; ".join(reason for reason, holds in reasons.items() if holds)

    @property
    def cut_means(self) -> str:
        """The effect of cutting such a batch, as text."""
        meets = "each row meets only the rows of its own microbatch"
        moves = "moving statistics move once per update, by the mean over the microbatches"
        known = f"If they do, {meets}." if self.unknown else f"{meets.capitalize()}."
        sentences = {known: self.couples or self.unknown, f"{moves.capitalize()}.": self.moves}
        return " ".join(sentence for sentence, holds in sentences.items() if holds)


@dataclass
class Findings:
    """Measurements of a run. They are saved with it, so that it resumes on another machine with the same bits.

    Args:
        coupling: the coupling of the rows; None if it is not measured yet.
        pads: whether every metric ignores rows of weight 0; None if it is not measured yet.
        adds: whether the states of the metrics are sums over rows; None if it is not measured yet.
        limit: the bytes that a program may use in addition to its arguments, unless the user sets them.
        room: the bytes that arrays resident on the device may take.
        why_no_xla: why programs are not compiled by XLA, though they could be; "" if they are.
        sizes: by the shapes of a row, the numbers of rows to which batches passed one at a time are padded.
        looped: the kinds of loaded batches with a program of several updates, on an engine with programs of one too.
    """

    coupling: Coupling | None = None
    pads: bool | None = None
    adds: bool | None = None
    limit: int | None = None
    room: int | None = None
    why_no_xla: str = ""
    sizes: dict[str, list[int]] = field(default_factory=dict)
    looped: list[str] = field(default_factory=list)

    def plans_as(self, other: "Findings") -> bool:
        """Whether both findings lead to the same plan of an update."""
        names = "coupling", "pads", "adds", "limit", "why_no_xla"
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def as_json(self) -> dict[str, Any]:
        """Return the findings as JSON."""
        return asdict(self)

    def rows_to_fill(self, host: Tree, count: int) -> int:
        """Return the number of rows to pad a batch of `count` rows to: the size of an earlier batch, or a power of two.

        So batches of many sizes need few programs.
        """
        shape = _text_of(tuple([(leaf.shape[1:], leaf.dtype) for leaf in tree.leaves(host)]))
        known, power = self.sizes.setdefault(shape, []), 1 << (count - 1).bit_length()
        fitting = [size for size in known if count <= size <= 2 * power]
        if not fitting:
            fitting = [power if known else count]
            known.extend(fitting)
        return min(fitting)


@lru_cache(maxsize=1024)
def _text_of(shapes: tuple[tuple[tuple[int, ...], np.dtype], ...]) -> str:
    return str([(shape, str(dtype)) for shape, dtype in shapes])
