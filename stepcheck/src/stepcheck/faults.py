"""What can be wrong: the faults, each the error of a quantity, which a stage judges."""

from enum import Enum, StrEnum, auto


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
        name = self.name.removeprefix("PRINTED_").lower().replace("_", "-")
        return f"{self.quantity.stage}.{name}"

    @property
    def has_name(self) -> bool:
        """Whether the field has a name for it: else its numbers or its place say it."""
        return self not in UNNAMED and self not in _BY_NUMBERS

    # rows
    ROWS_NEVER_USED = Quantity.ROWS, Error.LEFT_OUT
    SAME_ORDER_EVERY_PASS = Quantity.ROWS, Error.ANOTHER_INDEX
    SAME_BATCHES_EVERY_PASS = Quantity.ROWS, Error.ANOTHER_INDEX
    WINDOW_CARRIED_OVER = Quantity.ROWS, Error.MIXED_WITH_LAST
    ROWS_TWICE_IN_A_PASS = Quantity.ROWS, Error.TWICE
    # mode
    INFERENCE_MODE = Quantity.MODE, Error.ANOTHER_FORM
    # labels and weights
    LABELS_SHIFTED = Quantity.LABELS, Error.ANOTHER_INDEX
    LABELS_OF_OTHER_ROWS = Quantity.LABELS, Error.ANOTHER_INDEX
    OTHER_LABELS = Quantity.LABELS, Error.UNLIKE
    WEIGHTS_IGNORED = Quantity.WEIGHTS, Error.LEFT_OUT
    WEIGHTS_SQUARED = Quantity.WEIGHTS, Error.TWICE
    WEIGHTS_AVERAGED_APART = Quantity.ROW_GRADIENTS, Error.COUNTED
    OTHER_WEIGHTS = Quantity.WEIGHTS, Error.UNLIKE
    # the form of the loss
    BROADCAST = Quantity.LOSS_FORM, Error.ANOTHER_INDEX
    FROM_LOGITS = Quantity.LOSS_FORM, Error.ANOTHER_FORM
    SOFTMAX_TWICE = Quantity.LOSS_FORM, Error.ANOTHER_FORM
    OTHER_OUTPUTS = Quantity.LOSS_FORM, Error.ANOTHER_FORM
    OUTPUT_LEFT_OUT = Quantity.LOSS_FORM, Error.LEFT_OUT
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
    CLIP_PER_MICROBATCH = Quantity.HANDED_GRADIENT, Error.ANOTHER_FORM
    CLIP_BEFORE_UNSCALE = Quantity.HANDED_GRADIENT, Error.ANOTHER_FORM
    CLIPPED_OTHERWISE = Quantity.HANDED_GRADIENT, Error.ANOTHER_FORM
    LOSS_NOT_SCALED = Quantity.HANDED_GRADIENT, Error.COUNTED
    LOSS_SCALE_LEFT_IN = Quantity.HANDED_GRADIENT, Error.COUNTED
    VARIABLE_LEFT_OUT = Quantity.HANDED_GRADIENT, Error.LEFT_OUT
    GRADIENT_UNLIKE = Quantity.HANDED_GRADIENT, Error.UNLIKE
    # the step of the optimizer
    SCHEDULE_FROZEN = Quantity.RATE, Error.FROZEN
    RATE_FROZEN_IN_A_TRACE = Quantity.RATE, Error.FROZEN
    SCHEDULE_BY_MICROBATCH = Quantity.RATE, Error.ANOTHER_INDEX
    SCHEDULE_ONE_AHEAD = Quantity.RATE, Error.ANOTHER_INDEX
    RATE_UNLIKE = Quantity.RATE, Error.UNLIKE
    APPLIED_TWICE = Quantity.STEP, Error.TWICE
    VARIABLE_UPDATED_TWICE = Quantity.STEP, Error.TWICE
    OPTIMIZER_RE_CREATED = Quantity.STEP, Error.LEFT_OUT
    OPTIMIZER_STATE_THROWN_AWAY = Quantity.STEP, Error.LEFT_OUT
    STEPS_OF_ZEROS = Quantity.STEP, Error.COUNTED
    ANOTHER_OPTIMIZER = Quantity.STEP, Error.ANOTHER_FORM
    STEP_UNLIKE = Quantity.STEP, Error.UNLIKE
    # what stays between updates
    UPDATE_THROWN_AWAY = Quantity.STATE, Error.LEFT_OUT
    DECAY_BY_MICROBATCH = Quantity.STATE, Error.TWICE
    WEIGHTS_MOVED_INSIDE_A_WINDOW = Quantity.STATE, Error.UNLIKE
    REPLICAS_DRIFT_APART = Quantity.STATE, Error.UNLIKE
    STATISTICS_THROWN_AWAY = Quantity.STATE, Error.LEFT_OUT
    SEEDS_THROWN_AWAY = Quantity.STATE, Error.LEFT_OUT
    STATE_OF_ONE_MICROBATCH = Quantity.STATE, Error.LEFT_OUT
    STATISTICS_NEVER_WRITTEN_BACK = Quantity.STATE, Error.LEFT_OUT
    # the printed loss
    PRINTED_MEAN_OF_MEANS = Quantity.PRINTED, Error.COUNTED
    PRINTED_LAST_BATCH = Quantity.PRINTED, Error.LEFT_OUT
    PRINTED_NOT_RESET = Quantity.PRINTED, Error.MIXED_WITH_LAST
    PRINTED_SUM = Quantity.PRINTED, Error.COUNTED
    PRINTED_MEANS_OVER_ROWS = Quantity.PRINTED, Error.COUNTED
    PRINTED_SUMMED_OVER_MICROBATCHES = Quantity.PRINTED, Error.COUNTED


_BY_NUMBERS = frozenset(
    {
        Fault.OTHER_LABELS,
        Fault.OTHER_WEIGHTS,
        Fault.OTHER_OUTPUTS,
        Fault.ROWS_COUNTED_OTHERWISE,
        Fault.PENALTY_COUNTED_OTHERWISE,
    }
)
UNNAMED = frozenset(
    {
        Fault.LOSS_UNLIKE,
        Fault.GRADIENT_UNLIKE,
        Fault.RATE_UNLIKE,
        Fault.STEP_UNLIKE,
    }
)
