"""The values that findings are made of. No sentence is here: `report.words` has the
text of each.
"""

import linecache
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from stepcheck.faults import UNNAMED, Error, Fault, Quantity, Stage


class Known(Enum):
    """A count that is known of each row: the coefficient of its gradient may be a
    fraction of it.
    """

    WEIGHT_OF_UPDATE = auto()
    ROWS_OF_UPDATE = auto()
    ROWS_WITH_PADDING = auto()
    PLACES_OF_UPDATE = auto()
    SUM_OF_SAMPLE_WEIGHTS = auto()
    MICROBATCHES = auto()
    MICROBATCHES_OF_FULL_WINDOW = auto()
    REPLICAS = auto()
    WEIGHT_OF_FULL_BATCH = auto()
    WEIGHT_OF_MICROBATCH = auto()
    ROWS_OF_MICROBATCH = auto()
    WEIGHT_OF_REPLICA = auto()
    WEIGHT_OF_ROW = auto()
    MEANT = auto()


class Level(Enum):
    """The vectors that get one coefficient each."""

    UPDATE = auto()
    MICROBATCH = auto()
    ROW = auto()


@dataclass(frozen=True)
class Count:
    """How much counts: a number times a fraction of known counts.

    Attributes:
        above, below: the counts that the number is multiplied with, and divided by.
        numbers: numbers that no fraction reproduces, the farthest from 1 first, of
            vectors of this `level`.
        instead: how it should count; None where `above` has the meant count, or nothing
            counts.
    """

    number: float = 1.0
    above: tuple[Known, ...] = ()
    below: tuple[Known, ...] = ()
    numbers: tuple[float, ...] = ()
    level: Level | None = None
    instead: "Count | None" = None


MEANT = Count(above=(Known.MEANT,))
NOTHING = Count(0.0)


class Detail(Enum):
    """The kind of a change, where its fault alone does not say it."""

    PLACES_AFTER = auto()  # numbers: places, or minus places before
    ALL_PAIRS = auto()
    ALL_PAIRS_WITH_WEIGHTS = auto()
    SMOOTHED = auto()  # numbers: the smoothing, and the one that was meant
    FUNCTION_AGAIN = auto()  # names: the activation
    # numbers: of each output, then those that were meant; names: the outputs
    TERMS_COUNT = auto()
    CLIPPED_BY_NORM = auto()  # numbers: the bound
    CLIPPED_IN_TURN = auto()
    ADDED_BEFORE = auto()
    PLUS_WEIGHTS = auto()  # numbers: the factor, and the optimizer's decay
    NOT_FINITE = auto()


class Part(Enum):
    """The kind of an update's microbatches: of the loop, of replicas, or of calls of an
    accumulating optimizer.
    """

    MICROBATCH = auto()
    REPLICA = auto()
    CALL = auto()


class Unit(Enum):
    """The kind of the rows' weights: 1 each, sample weights of the user, or others, as
    of a mask.
    """

    ROWS = auto()
    SAMPLE_WEIGHTS = auto()
    WEIGHTS = auto()


class Setting(NamedTuple):
    """The updates in which a change was seen: its words and its mend depend on them."""

    part: Part = Part.MICROBATCH
    unit: Unit = Unit.WEIGHTS


_UNTOLD = Setting()


@dataclass(frozen=True)
class Change:
    """A change of a quantity.

    Attributes:
        fault: its name; one of `UNNAMED` where nothing known reproduces it.
        names: of parameters, outputs or losses, as `detail` says.
        outputs: whose losses have it, if a model has several.
    """

    fault: Fault
    detail: Detail | None = None
    numbers: tuple[float, ...] = ()
    names: tuple[str, ...] = ()
    count: Count | None = None
    outputs: tuple[str, ...] = ()
    setting: Setting = _UNTOLD

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
    """The place of a finding: updates from 1, rows of the data, parameters, outputs,
    the line of the user's code.
    """

    updates: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    parameters: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    line: Line | None = None


class Shown(Enum):
    """The kind of a number of a proof."""

    GRADIENT_LENGTH = auto()
    GRADIENT = auto()
    OUTPUT = auto()
    RATE = auto()
    LOSS = auto()
    DERIVATIVE = auto()
    WEIGHT = auto()
    MOVE = auto()
    STATE = auto()


class Number(NamedTuple):
    """A number of a proof; NaN where there is none.

    `of`: a parameter with its index, the index of an output, or a row of the data with
    that of its output.
    """

    what: Shown
    of: str
    observed: float
    expected: float
    with_error: float


@dataclass(frozen=True)
class Proof:
    """The numbers of one update, three times: of the loop, as they were meant, and as
    they were meant but for an error.

    Attributes:
        parameters: of a gradient, by parameter: the distance from the meant one, and
            from it with the error.
    """

    update: int
    numbers: tuple[Number, ...]
    parameters: tuple[tuple[str, float, float], ...] = ()


@dataclass(frozen=True)
class Finding:
    """A difference from the update that was meant, proved.

    Attributes:
        apart: the relative distance of the loop's numbers from those that were meant.
        with_error: their distance from those that were meant but for this error; NaN
            where these were not computed.
    """

    change: Change
    apart: float
    with_error: float = float("nan")
    where: Where = field(default_factory=Where)
    proof: Proof | None = None

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

    NO_UPDATE = auto()
    OUTLINED = auto()
    DATA_AS_GIVEN = auto()
    NO_FORWARD_PASS = auto()
    OTHER_INPUTS = auto()
    OWN_STEP = auto()
    STEP_UNKNOWN = auto()
    SEVERAL_STEPS = auto()
    OWN_TRAINER = auto()
    FEW_PASSES = auto()
    BY_CHANCE = auto()
    WRITTEN = auto()
    NOT_HANDED = auto()
    SKIPPED = auto()
    EQUAL_ROWS = auto()
    UNLIKE_OUTPUTS = auto()
    RARE_SHAPES = auto()
    NOT_KEPT = auto()
    NO_GRADIENT = auto()
    COUPLED = auto()
    IN_TURN = auto()
    MOVING = auto()
    THAWED = auto()
    REMADE = auto()
    NOT_FINITE = auto()
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
    CLIPPED_BY_HAND = auto()
    PRINTED_UNLIKE = auto()
    ROUNDED = auto()


@dataclass(frozen=True)
class Unjudged:
    """A part that was not judged, and why.

    Attributes:
        stage: None for all stages.
        updates: how many, or 0 where it concerns all; without a stage, those before it.
        told: of the framework or the user's code: the kind of an error, the name of a
            function.
    """

    reason: Reason
    stage: Stage | None = None
    updates: int = 0
    told: str = ""

    def is_of_all(self, num_updates: int) -> bool:
        """Whether nothing of its stage is known of a loop with this number of updates.

        Gradients that are clipped by hand are the meant ones but for their length.
        Updates before other variables are trained are not among those that were
        seen.

        >>> Unjudged(Reason.NOT_KEPT, Stage.STEP, 3).is_of_all(3)
        True
        """
        others = Reason.CLIPPED_BY_HAND, Reason.THAWED
        is_known = self.reason in others
        is_all = (
            self.stage is not None
            and self.updates >= num_updates
            and not is_known
        )
        return not self.updates or is_all
