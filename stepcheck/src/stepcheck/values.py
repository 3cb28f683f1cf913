"""The values that findings are made of. No sentence is here: `report.words` has the text of each."""

import linecache
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import NamedTuple

from stepcheck.faults import UNNAMED, Error, Fault, Quantity, Stage


class Known(Enum):
    """A count that is known of each row: the coefficient of its gradient may be a fraction of it."""

    WEIGHT_OF_UPDATE = auto()
    ROWS_OF_UPDATE = auto()
    ROWS_WITH_A_WEIGHT = auto()
    ROWS_WITH_PADDING = auto()
    PLACES_OF_UPDATE = auto()
    SUM_OF_SAMPLE_WEIGHTS = auto()
    MICROBATCHES = auto()
    MICROBATCHES_OF_FULL_WINDOW = auto()
    REPLICAS = auto()
    WEIGHT_OF_FULL_BATCH = auto()
    ROWS_OF_DATA = auto()
    NUMBER_OF_UPDATE = auto()
    WEIGHT_OF_LAST_UPDATE = auto()
    LOSS = auto()
    WEIGHT_OF_MICROBATCH = auto()
    ROWS_OF_MICROBATCH = auto()
    WEIGHT_OF_REPLICA = auto()
    NUMBER_OF_BATCH = auto()
    WEIGHT_OF_ROW = auto()
    SAMPLE_WEIGHT_OF_ROW = auto()
    MEANT = auto()


class Changed(Enum):
    """How a known count is changed before it is counted with: mistaken by one, or under a root."""

    PLUS_ONE = auto()
    MINUS_ONE = auto()
    ROOT = auto()


Counted = Known | tuple[Known, Changed]


class Group(Enum):
    """A set of the rows of an update."""

    LAST_MICROBATCH = auto()
    FIRST_MICROBATCH = auto()
    MICROBATCH = auto()
    MICROBATCHES_OF_LAST_PASS = auto()
    FIRST_ROW_OF_BATCH = auto()
    LAST_ROW_OF_BATCH = auto()
    FIRST_HALF_OF_BATCH = auto()
    EACH_NTH_ROW = auto()


class Level(Enum):
    """The vectors that get one coefficient each; `SHAPE`: the sum of an update's rows, each times a count."""

    UPDATE = auto()
    MICROBATCH = auto()
    ROW = auto()
    SHAPE = auto()


class Rows(NamedTuple):
    """Rows of an update: a group, with its numbers (the second microbatch; each third row from row 1 on)."""

    group: Group
    numbers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Count:
    """How much counts: a number times a fraction of known counts, perhaps for some rows alone.

    Attributes:
        above, below: the counts that the number is multiplied with, and divided by.
        rows: the rows that count so; None for all.
        others: how the other rows count; None if `rows` is.
        numbers: numbers that no fraction reproduces, the farthest from 1 first, of vectors of this `level`.
        instead: how it should count; None where `above` has the meant count, or nothing counts.
    """

    number: float = 1.0
    above: tuple[Counted, ...] = ()
    below: tuple[Counted, ...] = ()
    rows: Rows | None = None
    others: "Count | None" = None
    numbers: tuple[float, ...] = ()
    level: Level | None = None
    instead: "Count | None" = None

    def times(self, of_rows: "Count") -> "Count":
        """Return the product of a count of all rows with one that may be of some.

        >>> Count(2.0, below=(Known.LOSS,)).times(Count(0.5)).number
        1.0
        """
        number = self.number * of_rows.number
        fraction = (self.above + of_rows.above, self.below + of_rows.below) if number else ((), ())
        others = None if of_rows.others is None else self.times(of_rows.others)
        return replace(
            self,
            number=number,
            above=fraction[0],
            below=fraction[1],
            rows=of_rows.rows,
            others=others,
        )

    def uses(self, known: Known) -> bool:
        """Whether it, or the count of the other rows, is made with a known count."""
        is_in = any(
            known in (each, *(each if isinstance(each, tuple) else ()))
            for each in self.above + self.below
        )
        return is_in or (self.others is not None and self.others.uses(known))


MEANT = Count(above=(Known.MEANT,))
NOTHING = Count(0.0)


class Detail(Enum):
    """The kind of a change, where its fault alone does not say it."""

    OF_ROW_IN_BATCH = auto()  # numbers: rows after (or before, if negative)
    OF_ROW_IN_DATA = auto()
    IN_ORDER_OF_DATA = auto()
    IN_REVERSE = auto()
    PLACES_AFTER = auto()
    ALL_PAIRS = auto()
    ALL_PAIRS_WITH_WEIGHTS = auto()
    INVERTED = auto()
    ROOT = auto()
    OF_OTHER_ROWS = auto()
    SMOOTHED = auto()  # numbers: the smoothing, and the one that was meant
    SCALED = auto()  # numbers: a factor beside the labels, and what is added to the labels
    ADDED = auto()  # numbers: what
    FUNCTION_AGAIN = auto()  # names: the activation
    ARGUMENTS_SWAPPED = auto()
    OTHER_FUNCTION = auto()  # names: the function, and the one that was meant
    TERMS_COUNT = auto()  # numbers: of each output, then those that were meant; names: the outputs
    CLIPPED_BY_NORM = auto()  # numbers: the bound
    CLIPPED_BY_VALUE = auto()
    CLIPPED_IN_TURN = auto()
    CENTRED = auto()
    SIGN = auto()
    TIMES = auto()
    OF_OTHER_VARIABLE = auto()
    UPDATES_BEFORE = auto()  # numbers: how many
    BATCHES_BEFORE = auto()
    ADDED_BEFORE = auto()
    PLUS_WEIGHTS = auto()  # numbers: the factor, and the optimizer's decay
    NOT_FINITE = auto()
    ADDED_UP_TWICE = auto()  # numbers: of the replicas


class Part(Enum):
    """The kind of an update's microbatches: of the loop, of replicas, or of calls of an accumulating optimizer."""

    MICROBATCH = auto()
    REPLICA = auto()
    CALL = auto()


class Unit(Enum):
    """The kind of the rows' weights: 1 each, sample weights of the user, or others, as of a mask."""

    ROWS = auto()
    SAMPLE_WEIGHTS = auto()
    WEIGHTS = auto()


class Setting(NamedTuple):
    """The updates in which a change was seen: its words and its mend depend on them.

    `num_rows`: of each update, if all have as many and each row has the weight 1; else 0.
    """

    part: Part = Part.MICROBATCH
    unit: Unit = Unit.WEIGHTS
    num_rows: int = 0


_UNTOLD = Setting()


@dataclass(frozen=True)
class Change:
    """A change of a quantity.

    Attributes:
        fault: its name; one of `UNNAMED` where nothing known reproduces it.
        names: of parameters, outputs or losses, as `detail` says.
        bound: the norm to which the gradient is clipped besides; 0 for none.
        outputs: whose losses have it, if a model has several.
        twins: other faults that reproduce the same numbers.
    """

    fault: Fault
    detail: Detail | None = None
    numbers: tuple[float, ...] = ()
    names: tuple[str, ...] = ()
    count: Count | None = None
    bound: float = 0.0
    outputs: tuple[str, ...] = ()
    setting: Setting = _UNTOLD
    twins: tuple[Fault, ...] = ()

    @property
    def is_known(self) -> bool:
        """Whether it says how the quantity was changed, and not only where."""
        return self.fault not in UNNAMED


class Line(NamedTuple):
    """A line of the user's code."""

    file: str
    number: int

    @property
    def text(self) -> str:
        """The source of the line, if it can be read."""
        return linecache.getline(self.file, self.number).strip()

    def __str__(self) -> str:
        return f"{self.file}:{self.number}: {self.text}".rstrip(": ")


@dataclass(frozen=True)
class Where:
    """The place of a finding: updates from 1, rows of the data, parameters, outputs, the line of the user's code."""

    updates: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    parameters: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    line: Line | None = None


class Shown(Enum):
    """The kind of a number of a proof."""

    GRADIENT_LENGTH = auto()
    GRADIENT = auto()
    WEIGHT_AFTER = auto()
    OUTPUT = auto()
    RATE = auto()
    LOSS = auto()
    DERIVATIVE = auto()
    WEIGHT = auto()
    MOVE = auto()
    STATE = auto()


class Number(NamedTuple):
    """A number of a proof; NaN where there is none.

    `of`: a parameter with its index, the index of an output, or a row of the data with that of its output.
    """

    what: Shown
    of: str
    observed: float
    expected: float
    with_error: float


@dataclass(frozen=True)
class Proof:
    """The numbers of one update, three times: of the loop, as they were meant, and as they were meant but for an error.

    Attributes:
        step: the distance of the weights' step from the one that was meant; NaN if it was not computed again.
        parameters: of a gradient, by parameter: the distance from the meant one, and from it with the error.
    """

    update: int
    numbers: tuple[Number, ...]
    step: float = float("nan")
    parameters: tuple[tuple[str, float, float], ...] = ()


@dataclass(frozen=True)
class Finding:
    """A difference from the update that was meant, proved.

    Attributes:
        apart: the relative distance of the loop's numbers from those that were meant.
        with_error: their distance from those that were meant but for this error; NaN where these were not computed.
        is_beside: whether the meant gradient has the other errors, in the distances and in the proof.
    """

    change: Change
    apart: float
    with_error: float = float("nan")
    where: Where = field(default_factory=Where)
    proof: Proof | None = None
    is_beside: bool = False

    @property
    def fault(self) -> Fault:
        """The name of its change."""
        return self.change.fault

    @property
    def quantity(self) -> Quantity:
        """The quantity that differs."""
        return self.fault.quantity

    @property
    def error(self) -> Error:
        """What happens to the quantity."""
        return self.fault.error

    @property
    def stage(self) -> Stage:
        """The stage that judges the quantity."""
        return self.quantity.stage


class Reason(Enum):
    """Why something was not judged."""

    NO_LOSS = auto()
    NO_UPDATE = auto()
    OUTLINED = auto()
    DATA_AS_GIVEN = auto()
    NO_FORWARD_PASS = auto()
    OTHER_INPUTS = auto()
    OWN_STEP = auto()
    OWN_TRAINER = auto()
    FEW_PASSES = auto()
    EQUAL_ROWS = auto()
    UNLIKE_OUTPUTS = auto()
    RARE_SHAPES = auto()
    NOT_KEPT = auto()
    NO_GRADIENT = auto()
    COUPLED = auto()
    MOVING = auto()
    THAWED = auto()
    REMADE = auto()
    NOT_FINITE = auto()
    OUT_OF_TIME = auto()
    ENDED = auto()
    OTHER_WEIGHTS = auto()
    WEIGHTS_NOT_STATED = auto()
    LOSS_FAILED = auto()
    LOSS_OF_OTHER_AXIS = auto()
    LOSS_WITHOUT_LABELS = auto()
    LOSS_OF_MODEL = auto()
    LOSS_OF_ONE_OUTPUT = auto()
    LOSS_WITH_PARAMETERS = auto()
    NOT_REPLAYED = auto()
    OTHER_WEIGHTS_OF_MODEL = auto()
    CLOSURE = auto()
    NO_TENSOR = auto()
    PROCESS_MISSING = auto()
    PROCESSES_APART = auto()
    CUT = auto()
    FAILED = auto()
    BLIND = auto()
    PENALTY_BY_HAND = auto()
    CHANGED_BY_HAND = auto()
    PRINTED_UNLIKE = auto()


@dataclass(frozen=True)
class Unjudged:
    """A part that was not judged, and why.

    Attributes:
        stage: None for all stages.
        updates: how many, or 0 where it concerns all; without a stage, those before it.
        told: of the framework or the user's code: the kind of an error, the name of a function.
    """

    reason: Reason
    stage: Stage | None = None
    updates: int = 0
    told: str = ""
