"""The values that findings are made of. No sentence is here: `report.words` has the text of each."""

import linecache
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum, auto
from typing import NamedTuple


class Stage(StrEnum):
    """A stage of an update, in the order in which they are judged."""

    ROWS = auto()
    MODE = auto()
    GRADIENT = auto()
    STEP = auto()
    STATE = auto()
    PRINTED = auto()


class Quantity(StrEnum):
    """A quantity of an update, in which a loop and the update that was meant differ."""

    ROWS = auto()
    MODE = auto()
    LABELS = auto()
    WEIGHTS = auto()
    LOSS_FORM = auto()
    ROW_GRADIENTS = auto()
    PENALTY = auto()
    HANDED_GRADIENT = auto()
    RATE = auto()
    STEP = auto()
    STATE = auto()
    PRINTED = auto()

    @property
    def stage(self) -> Stage:
        """The stage that judges it."""
        return _STAGE_OF.get(self, Stage.GRADIENT)


_STAGE_OF = {
    Quantity.ROWS: Stage.ROWS,
    Quantity.MODE: Stage.MODE,
    Quantity.RATE: Stage.STEP,
    Quantity.STEP: Stage.STEP,
    Quantity.STATE: Stage.STATE,
    Quantity.PRINTED: Stage.PRINTED,
}


class Error(StrEnum):
    """What happens to a quantity."""

    LEFT_OUT = auto()
    COUNTED = auto()
    TWICE = auto()
    ANOTHER_INDEX = auto()
    FROZEN = auto()
    ANOTHER_FORM = auto()
    MIXED_WITH_LAST = auto()
    UNLIKE = auto()


class Fault(Enum):
    """A fault with a name: what happens to which quantity."""

    quantity: Quantity
    error: Error

    def __new__(cls, quantity: Quantity, error: Error) -> "Fault":
        """Return a member: many have the same quantity and error."""
        made = object.__new__(cls)
        made._value_ = len(cls.__members__)
        made.quantity, made.error = quantity, error
        return made

    @property
    def id(self) -> str:
        """Its stable name, for programs.

        >>> Fault.MEAN_OF_MEANS.id
        'gradient.mean-of-means'
        """
        return f"{self.quantity.stage}.{self.name.lower().replace('_', '-')}"

    @property
    def has_name(self) -> bool:
        """Whether the field has a name for it: else it is told by its numbers, or by its place."""
        return self not in UNNAMED and self not in _BY_NUMBERS

    # rows
    ROWS_NEVER_USED = Quantity.ROWS, Error.LEFT_OUT
    SAME_ORDER_EVERY_PASS = Quantity.ROWS, Error.ANOTHER_INDEX
    BATCHES_OF_FEW_LABELS = Quantity.ROWS, Error.ANOTHER_INDEX
    WINDOW_CARRIED_OVER = Quantity.ROWS, Error.MIXED_WITH_LAST
    BATCH_TRAINED_ON_TWICE = Quantity.ROWS, Error.TWICE
    ROWS_TWICE_IN_A_PASS = Quantity.ROWS, Error.TWICE
    BATCHES_OVERLAP = Quantity.ROWS, Error.TWICE
    # mode
    INFERENCE_MODE = Quantity.MODE, Error.ANOTHER_FORM
    INPUTS_SWAPPED = Quantity.MODE, Error.ANOTHER_INDEX
    LABELS_AMONG_THE_INPUTS = Quantity.MODE, Error.ANOTHER_INDEX
    # labels and weights
    LABELS_SHIFTED = Quantity.LABELS, Error.ANOTHER_INDEX
    LABELS_OF_OTHER_ROWS = Quantity.LABELS, Error.ANOTHER_INDEX
    OTHER_LABELS = Quantity.LABELS, Error.UNLIKE
    SMOOTHING_MISSING = Quantity.LABELS, Error.ANOTHER_FORM
    SMOOTHING_NOT_DIVIDED = Quantity.LABELS, Error.ANOTHER_FORM
    SMOOTHING_TWICE = Quantity.LABELS, Error.ANOTHER_FORM
    WEIGHTS_IGNORED = Quantity.WEIGHTS, Error.LEFT_OUT
    WEIGHTS_SQUARED = Quantity.WEIGHTS, Error.TWICE
    WEIGHTS_AVERAGED_APART = Quantity.ROW_GRADIENTS, Error.COUNTED
    WEIGHTS_OF_OTHER_ROWS = Quantity.WEIGHTS, Error.ANOTHER_INDEX
    OTHER_WEIGHTS = Quantity.WEIGHTS, Error.UNLIKE
    # the form of the loss
    BROADCAST = Quantity.LOSS_FORM, Error.ANOTHER_INDEX
    FROM_LOGITS = Quantity.LOSS_FORM, Error.ANOTHER_FORM
    SOFTMAX_TWICE = Quantity.LOSS_FORM, Error.ANOTHER_FORM
    OTHER_OUTPUTS = Quantity.LOSS_FORM, Error.ANOTHER_FORM
    ANOTHER_LOSS = Quantity.LOSS_FORM, Error.ANOTHER_FORM
    OUTPUT_LEFT_OUT = Quantity.LOSS_FORM, Error.LEFT_OUT
    LOSS_WEIGHTS_IGNORED = Quantity.LOSS_FORM, Error.COUNTED
    OTHER_LOSS_WEIGHTS = Quantity.LOSS_FORM, Error.COUNTED
    LOSS_UNLIKE = Quantity.LOSS_FORM, Error.UNLIKE
    # how much each row's gradient counts
    PADDING_TRAINED_ON = Quantity.ROW_GRADIENTS, Error.COUNTED
    MASK_IGNORED = Quantity.ROW_GRADIENTS, Error.COUNTED
    MEAN_OF_MEANS = Quantity.ROW_GRADIENTS, Error.COUNTED
    SUMMED_OVER_MICROBATCHES = Quantity.ROW_GRADIENTS, Error.COUNTED
    PADDING_COUNTED = Quantity.ROW_GRADIENTS, Error.COUNTED
    PADDED_PLACES_COUNTED = Quantity.ROW_GRADIENTS, Error.COUNTED
    DIVIDED_BY_A_FULL_WINDOW = Quantity.ROW_GRADIENTS, Error.COUNTED
    DIVIDED_BY_THE_FULL_BATCH = Quantity.ROW_GRADIENTS, Error.COUNTED
    NEVER_DIVIDED = Quantity.ROW_GRADIENTS, Error.COUNTED
    SUMMED_OVER_REPLICAS = Quantity.ROW_GRADIENTS, Error.COUNTED
    DIVIDED_BY_THE_REPLICAS_TWICE = Quantity.ROW_GRADIENTS, Error.COUNTED
    DIVIDED_TWICE = Quantity.ROW_GRADIENTS, Error.COUNTED
    MEAN_OF_ROW_MEANS = Quantity.ROW_GRADIENTS, Error.COUNTED
    DIVIDED_BY_THE_WEIGHTS = Quantity.ROW_GRADIENTS, Error.COUNTED
    DIVIDED_BY_THE_ROWS = Quantity.ROW_GRADIENTS, Error.COUNTED
    ASCENT = Quantity.ROW_GRADIENTS, Error.COUNTED
    ROWS_COUNTED_OTHERWISE = Quantity.ROW_GRADIENTS, Error.COUNTED
    LAST_WINDOW_DROPPED = Quantity.ROW_GRADIENTS, Error.LEFT_OUT
    ONLY_THE_LAST_MICROBATCH = Quantity.ROW_GRADIENTS, Error.LEFT_OUT
    ONLY_THE_FIRST_MICROBATCH = Quantity.ROW_GRADIENTS, Error.LEFT_OUT
    FIRST_MICROBATCH_LOST = Quantity.ROW_GRADIENTS, Error.LEFT_OUT
    LAST_MICROBATCH_LOST = Quantity.ROW_GRADIENTS, Error.LEFT_OUT
    PASSES_LEFT_OUT = Quantity.ROW_GRADIENTS, Error.LEFT_OUT
    # the penalty of the model
    PENALTY_FORGOTTEN = Quantity.PENALTY, Error.LEFT_OUT
    PENALTY_ONCE_PER_MICROBATCH = Quantity.PENALTY, Error.COUNTED
    PENALTY_ONCE_PER_REPLICA = Quantity.PENALTY, Error.COUNTED
    PENALTY_ADDED_TWICE = Quantity.PENALTY, Error.TWICE
    PENALTY_DIVIDED = Quantity.PENALTY, Error.COUNTED
    PENALTY_COUNTED_OTHERWISE = Quantity.PENALTY, Error.COUNTED
    DECAYED_TWICE = Quantity.PENALTY, Error.TWICE
    # the gradient that the optimizer gets
    NOT_RESET = Quantity.HANDED_GRADIENT, Error.MIXED_WITH_LAST
    MOMENTUM_BY_HAND = Quantity.HANDED_GRADIENT, Error.MIXED_WITH_LAST
    STALE_GRADIENTS = Quantity.HANDED_GRADIENT, Error.MIXED_WITH_LAST
    CLIP_PER_MICROBATCH = Quantity.HANDED_GRADIENT, Error.ANOTHER_FORM
    CLIP_BEFORE_UNSCALE = Quantity.HANDED_GRADIENT, Error.ANOTHER_FORM
    CLIP_FORGOTTEN = Quantity.HANDED_GRADIENT, Error.ANOTHER_FORM
    CLIPPED_OTHERWISE = Quantity.HANDED_GRADIENT, Error.ANOTHER_FORM
    GRADIENT_CHANGED = Quantity.HANDED_GRADIENT, Error.ANOTHER_FORM
    GRADIENTS_SWAPPED = Quantity.HANDED_GRADIENT, Error.ANOTHER_INDEX
    LOSS_NOT_SCALED = Quantity.HANDED_GRADIENT, Error.COUNTED
    LOSS_SCALE_LEFT_IN = Quantity.HANDED_GRADIENT, Error.COUNTED
    LOSS_SCALE_FROZEN_IN_A_TRACE = Quantity.HANDED_GRADIENT, Error.COUNTED
    VARIABLE_LEFT_OUT = Quantity.HANDED_GRADIENT, Error.LEFT_OUT
    FROZEN_VARIABLE_TRAINED = Quantity.HANDED_GRADIENT, Error.LEFT_OUT
    GRADIENT_UNLIKE = Quantity.HANDED_GRADIENT, Error.UNLIKE
    # the step of the optimizer
    SCHEDULE_FROZEN = Quantity.RATE, Error.FROZEN
    RATE_FROZEN_IN_A_TRACE = Quantity.RATE, Error.FROZEN
    SCHEDULE_BY_MICROBATCH = Quantity.RATE, Error.ANOTHER_INDEX
    SCHEDULE_ONE_AHEAD = Quantity.RATE, Error.ANOTHER_INDEX
    RATE_UNLIKE = Quantity.RATE, Error.UNLIKE
    APPLIED_TWICE = Quantity.STEP, Error.TWICE
    VARIABLE_UPDATED_TWICE = Quantity.STEP, Error.TWICE
    ACCUMULATED_TWICE = Quantity.STEP, Error.TWICE
    OPTIMIZER_RE_CREATED = Quantity.STEP, Error.LEFT_OUT
    OPTIMIZER_STATE_THROWN_AWAY = Quantity.STEP, Error.LEFT_OUT
    STEPS_OF_ZEROS = Quantity.STEP, Error.COUNTED
    STEP_UNLIKE = Quantity.STEP, Error.UNLIKE
    # what stays between updates
    UPDATE_THROWN_AWAY = Quantity.STATE, Error.LEFT_OUT
    DECAY_BY_MICROBATCH = Quantity.STATE, Error.TWICE
    WEIGHTS_MOVED_INSIDE_A_WINDOW = Quantity.STATE, Error.UNLIKE
    REPLICAS_DRIFT_APART = Quantity.STATE, Error.UNLIKE
    AVERAGE_BY_MICROBATCH = Quantity.STATE, Error.UNLIKE
    STATISTICS_THROWN_AWAY = Quantity.STATE, Error.LEFT_OUT
    SEEDS_THROWN_AWAY = Quantity.STATE, Error.LEFT_OUT
    STATE_OF_ONE_MICROBATCH = Quantity.STATE, Error.LEFT_OUT
    STATISTICS_NEVER_WRITTEN_BACK = Quantity.STATE, Error.LEFT_OUT
    SECOND_PASS_IN_TRAINING_MODE = Quantity.STATE, Error.TWICE
    # what is printed
    PRINTED_MEAN_OF_MEANS = Quantity.PRINTED, Error.COUNTED
    PRINTED_LAST_BATCH = Quantity.PRINTED, Error.LEFT_OUT
    PRINTED_NOT_RESET = Quantity.PRINTED, Error.MIXED_WITH_LAST
    PRINTED_SUM = Quantity.PRINTED, Error.COUNTED
    PRINTED_MEANS_OVER_ROWS = Quantity.PRINTED, Error.COUNTED
    PRINTED_SUMMED_OVER_MICROBATCHES = Quantity.PRINTED, Error.COUNTED
    PRINTED_WITHOUT_PENALTY = Quantity.PRINTED, Error.LEFT_OUT


_BY_NUMBERS = frozenset(
    {
        Fault.OTHER_LABELS,
        Fault.OTHER_WEIGHTS,
        Fault.OTHER_OUTPUTS,
        Fault.ANOTHER_LOSS,
        Fault.ROWS_COUNTED_OTHERWISE,
        Fault.PENALTY_COUNTED_OTHERWISE,
        Fault.GRADIENT_CHANGED,
    }
)
UNNAMED = frozenset(
    {
        Fault.LOSS_UNLIKE,
        Fault.PASSES_LEFT_OUT,
        Fault.GRADIENT_UNLIKE,
        Fault.RATE_UNLIKE,
        Fault.STEP_UNLIKE,
    }
)


class Known(Enum):
    """A count that is known of each row: what the coefficient of its gradient may be a fraction of."""

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
        instead: how it should count; None where `above` has what was meant, or nothing counts.
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
        return replace(self, number=number, above=fraction[0], below=fraction[1], rows=of_rows.rows, others=others)

    def uses(self, known: Known) -> bool:
        """Whether it, or the count of the other rows, is made with a known count."""
        is_in = any(known in (each, *(each if isinstance(each, tuple) else ())) for each in self.above + self.below)
        return is_in or (self.others is not None and self.others.uses(known))


MEANT = Count(above=(Known.MEANT,))
NOTHING = Count(0.0)


class Detail(Enum):
    """What a change does, where its fault alone does not say it."""

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
    PERHAPS_ADDED_UP_TWICE = auto()


class Part(Enum):
    """What a microbatch of an update is: one of the loop, of a replica, or of a call of an accumulating optimizer."""

    MICROBATCH = auto()
    REPLICA = auto()
    CALL = auto()


class Unit(Enum):
    """What the weights of rows are: 1 each, sample weights of the user, or others, as of a mask."""

    ROWS = auto()
    SAMPLE_WEIGHTS = auto()
    WEIGHTS = auto()


class Setting(NamedTuple):
    """The updates in which a change was seen: by it a change and its mend are told.

    `num_rows`: of each update, if all have as many and each row has the weight 1; else 0.
    """

    part: Part = Part.MICROBATCH
    unit: Unit = Unit.WEIGHTS
    num_rows: int = 0


_UNTOLD = Setting()


@dataclass(frozen=True)
class Change:
    """What is done to a quantity.

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
        """Whether it says what was done, and not only where."""
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
    """What a number of a proof is."""

    GRADIENT_LENGTH = auto()
    GRADIENT = auto()
    WEIGHT_AFTER = auto()
    OUTPUT = auto()
    RATE = auto()
    LOSS = auto()
    DERIVATIVE = auto()


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
        parameters: of a gradient, by parameter: the distance from what was meant, and from it with the error.
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
        with_error: their distance from those that were meant but for this error; NaN if nothing known reproduces them.
        is_beside: whether what was meant has the other errors of the gradient, in the distances and in the proof.
    """

    change: Change
    apart: float
    with_error: float = 0.0
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
    CUT = auto()
    FAILED = auto()
    BLIND = auto()


@dataclass(frozen=True)
class Unjudged:
    """What was not judged, and why.

    Attributes:
        stage: None for all stages.
        updates: how many, or 0 where it concerns all.
        told: of the framework or the user's code: the kind of an error, the name of a function.
    """

    reason: Reason
    stage: Stage | None = None
    updates: int = 0
    told: str = ""
