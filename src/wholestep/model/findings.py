"""What was found out by trying, of a model and of the machine: it decides how updates are carried out."""

from dataclasses import asdict, dataclass, field
from typing import Any

from wholestep import tree
from wholestep.tree import Tree


@dataclass(frozen=True)
class Coupling:
    """What the probe found.

    Args:
        couples: a row's value depends on the other rows.
        moves: the forward pass moves floating state, such as moving statistics.
        whole: a loss or a metric came as one number.
        extra: how the model's other losses add up over microbatches: "none", "sum", "mean", or "whole" (not at all).
        unknown: other rows' values could not be moved either, so nothing is known.
        keeps: a layer keeps a state for every row of a whole batch (`stateful=True`), and takes no other number.
        draws: random draws were seen to depend on the cut, or to move from one call to the next.
        custom: the name of the model's own step that is an update, if one is.
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
        """Whether a cut has a meaning at all, if another one than the whole batch's."""
        return not (self.whole or self.keeps or self.extra == "whole" or self.custom)

    @property
    def padding_is_exact(self) -> bool:
        """Whether rows of weight 0 change nothing."""
        return self.cut_is_exact and self.extra == "none"

    @property
    def why(self) -> str:
        """Why the batch may not be cut, in plain words."""
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
        """What cutting such a batch means, in plain words."""
        meets = "each row meets only the rows of its own microbatch"
        moves = "moving statistics move once per update, by the mean over the microbatches"
        known = f"If they do, {meets}." if self.unknown else f"{meets.capitalize()}."
        sentences = {known: self.couples or self.unknown, f"{moves.capitalize()}.": self.moves}
        return " ".join(sentence for sentence, holds in sentences.items() if holds)


@dataclass
class Findings:
    """What was found out by trying. A run that goes on elsewhere goes on with it, and so with the same bits.

    Args:
        coupling: what couples the rows; None if that must be tried.
        pads: whether every metric can be told to leave rows out; None if that must be tried.
        adds: whether the states of the metrics are sums over rows; None if that must be tried.
        limit: the bytes that a program may use beside its arguments, where the user does not say.
        room: the bytes that arrays may take which stay on the device.
        why_no_xla: why programs are not compiled by XLA, though they might be; nothing if they are.
        sizes: by the shapes of a row, to how many rows batches in hand are filled up.
        looped: the kinds of loaded batches of which several updates are one program, where an update may also be one.
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
        """Whether a plan of an update by these findings is the plan by the other ones."""
        names = "coupling", "pads", "adds", "limit", "why_no_xla"
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def as_json(self) -> dict[str, Any]:
        """Return the same as JSON."""
        return asdict(self)

    def rows_to_fill(self, host: Tree) -> int:
        """Return to how many rows a batch in hand may be filled up: to those of one before it, or to a power of two.

        So batches of ever other sizes are few programs.
        """
        count = tree.num_rows(host)
        shape = str([(tuple(leaf.shape[1:]), str(leaf.dtype)) for leaf in tree.leaves(host)])
        known, power = self.sizes.setdefault(shape, []), 1 << (count - 1).bit_length()
        fitting = [size for size in known if count <= size <= 2 * power]
        if not fitting:
            fitting = [power if known else count]
            known.extend(fitting)
        return min(fitting)
