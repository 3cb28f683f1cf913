"""The cut: the distribution of one update's rows over microbatches."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Cut:
    """The cut of one update's rows into microbatches.

    Args:
        sections: (number of microbatches, rows in each), in order.
        rows: the number of rows in the user's batch; further rows of the sections are padding, at
            the end.
        padded: whether places beyond the real rows must have weight 0.
        extra: how losses of `add_loss` and activity regularisers add up over microbatches: "sum" or
            "mean".
        split: whether each replica folds its rows of every microbatch, with one sum at the end;
            else arrays are global.
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
    def has_parts(self) -> bool:
        """Whether an update adds up the sums of several microbatches or replicas."""
        return self.split or self.num_microbatches > 1

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """The first place and the number of places of each microbatch."""
        sizes = [size for count, size in self.sections for _ in range(count)]
        return [(sum(sizes[:i]), size) for i, size in enumerate(sizes)]

    @property
    def places(self) -> int:
        """The number of rows that the sections hold, padding included."""
        return sum(count * size for count, size in self.sections)

    def __str__(self) -> str:
        """Return the cut as text.

        >>> str(Cut(((1, 60),), 60)), str(Cut(((10, 6),), 60))
        ('60 rows at once', '60 rows in 10 microbatches (10 x 6 rows)')
        """
        if self.num_microbatches == 1:
            return f"{self.rows} rows at once"
        parts = " and ".join(f"{num} x {size} rows" for num, size in self.sections)
        return f"{self.rows} rows in {self.num_microbatches} microbatches ({parts})"
