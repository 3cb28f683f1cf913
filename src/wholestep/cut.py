"""Cut: how the rows of one update are shared out to microbatches."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Cut:
    """How the rows of one update are cut into microbatches.

    Args:
        sections: (number of microbatches, rows in each), one after the other.
        rows: what the user's batch holds; the sections may hold more, the last ones then being padding.
        padded: whether places beyond the number of real rows must weigh nothing.
        extra: how the losses that `add_loss` and activity regularisers made on a microbatch add up: "sum" or "mean".
        split: whether each replica folds its own rows of every microbatch, to be summed once; else arrays are global.
    """

    sections: tuple[tuple[int, int], ...]
    rows: int
    padded: bool = False
    extra: str = "sum"
    split: bool = False

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches in an update."""
        return sum(count for count, _ in self.sections)

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """The first place and the number of places of each microbatch."""
        sizes = [size for count, size in self.sections for _ in range(count)]
        return [(sum(sizes[:i]), size) for i, size in enumerate(sizes)]

    @property
    def places(self) -> int:
        """The number of rows that the sections hold, padding included."""
        return sum(count * size for count, size in self.sections)
