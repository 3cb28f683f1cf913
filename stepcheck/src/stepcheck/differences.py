"""The values of a comparison of two runs; `report.difference` has the text of each."""

from dataclasses import dataclass, field
from enum import StrEnum, auto

from stepcheck.values import Line, Number, Where


class Part(StrEnum):
    """A part of an update, in the order in which two runs are compared."""

    ROWS = auto()
    MODE = auto()
    OUTPUTS = auto()
    GRADIENT = auto()
    STEP = auto()
    STATE = auto()


class Relation(StrEnum):
    """How a part of an update is in two runs.

    `NO_EFFECT`: another mode, with equal numbers. `FOLLOWS`: it differs or not, after
    an earlier difference. `BY_ROUNDING`: it is apart as far as rounding explains it,
    which grows from update to update.
    """

    EQUAL = auto()
    DIFFERS = auto()
    NO_EFFECT = auto()
    FOLLOWS = auto()
    BY_ROUNDING = auto()
    UNJUDGED = auto()


class Kind(StrEnum):
    """What differs."""

    OTHER_ORDER = auto()  # the same rows in all, in other updates
    OTHER_CUT = auto()  # counts: the numbers of rows of the update
    OTHER_ROWS = auto()
    FEWER_UPDATES = auto()  # counts: the numbers of updates
    OTHER_MODE = auto()
    OTHER_DRAWS = auto()
    OTHER_OUTPUTS = auto()
    # counts: of each row, how much of the other run's it counts
    ROWS_COUNT = auto()
    OTHER_LOSS = auto()
    # the derivative by the outputs is equal; counts: the gradient, if it is a multiple
    AFTER_LOSS = auto()
    MULTIPLE = auto()  # counts: the gradient as a multiple of the other run's
    OTHER_GRADIENT = auto()
    NO_GRADIENT = auto()
    OTHER_RATE = auto()
    OTHER_STEP = auto()
    OTHER_WEIGHTS = auto()  # before the first update
    WRITTEN = auto()  # weights moved after the update, before the next one
    OTHER_STATISTICS = auto()


@dataclass(frozen=True)
class Difference:
    """A difference of two runs.

    Attributes:
        update: from 1; 0 for what differs before the first one.
        apart: the relative distance; infinite where no distance is defined.
        where: rows are numbered in their update, from 0.
        numbers: of the first run (`observed`) and of the second (`expected`).
        order: of all differences of a comparison; later ones may follow.
        lines: of both runs, where the user's code makes it.
    """

    part: Part
    kind: Kind
    update: int
    apart: float
    where: Where = field(default_factory=Where)
    numbers: tuple[Number, ...] = ()
    counts: tuple[float, ...] = ()
    order: int = 0
    lines: tuple[Line | None, Line | None] = (None, None)


@dataclass(frozen=True)
class Judged:
    """A part of an update: its relation, and the relative distance; NaN where none was
    computed.
    """

    relation: Relation
    apart: float = float("nan")


@dataclass(frozen=True)
class ComparedUpdate:
    """An update of two runs, by part."""

    update: int
    parts: dict[Part, Judged]
    num_rows: tuple[int, int]


@dataclass(frozen=True)
class ComparedModel:
    """A model in two runs.

    Attributes:
        left: names of parameters that were not compared.
    """

    names: tuple[str, str]
    updates: tuple[ComparedUpdate, ...]
    differences: tuple[Difference, ...]
    num_updates: tuple[int, int]
    left: tuple[str, ...] = ()
