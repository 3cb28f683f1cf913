"""The sentences of changes: the effect on which quantity, and by which count."""

from collections.abc import Iterable

from stepcheck.faults import Fault, Quantity
from stepcheck.values import (
    MEANT,
    Change,
    Count,
    Detail,
    Known,
    Level,
    Part,
    Setting,
    Unit,
)

_MULTIPLES = {1.0: "", -1.0: "minus ", 2.0: "twice ", 0.5: "half of "}
_WHOLE, _SAME = (
    range(10, 5000),
    1e-5,
)  # numbers n of which 1 / n is written; a larger one may be close by chance
_MOST_NUMBERS = 4
_SUM = {
    Unit.ROWS: "the number of rows",
    Unit.SAMPLE_WEIGHTS: "the sum of the sample weights",
    Unit.WEIGHTS: "the sum of the weights",
}
_PARTS = {
    Part.MICROBATCH: "microbatch",
    Part.REPLICA: "replica",
    Part.CALL: "microbatch",
}
_PLURALS = {
    Part.MICROBATCH: "microbatches",
    Part.REPLICA: "replicas",
    Part.CALL: "microbatches",
}
_KNOWN = {
    Known.WEIGHT_OF_UPDATE: "{sum} of the update",
    Known.ROWS_OF_UPDATE: "the number of rows of the update",
    Known.ROWS_WITH_PADDING: "the number of rows with those that fill up",
    Known.PLACES_OF_UPDATE: "the number of places of the update",
    Known.SUM_OF_SAMPLE_WEIGHTS: "the sum of the sample weights",
    Known.MICROBATCHES: "the number of {parts}",
    Known.MICROBATCHES_OF_FULL_WINDOW: "the {parts} of a full window",
    Known.REPLICAS: "the number of replicas",
    Known.WEIGHT_OF_FULL_BATCH: "{sum} of a full batch",
    Known.WEIGHT_OF_MICROBATCH: "{sum} of its {part}",
    Known.ROWS_OF_MICROBATCH: "the number of rows of its {part}",
    Known.WEIGHT_OF_REPLICA: "{sum} of its replica",
    Known.WEIGHT_OF_ROW: "the row's own weight",
    Known.MEANT: "what it should",
}
_LEVELS = {
    Level.UPDATE: "update by update",
    Level.MICROBATCH: "{part} by {part}",
    Level.ROW: "row by row",
}
_SUBJECTS = {
    Quantity.LABELS: "the labels",
    Quantity.WEIGHTS: "the sample weights",
    Quantity.LOSS_FORM: "the loss",
    Quantity.ROW_GRADIENTS: "each row's gradient",
    Quantity.PENALTY: "the penalty",
    Quantity.HANDED_GRADIENT: "the gradient",
    Quantity.STEP: "the optimizer",
}
_OF_FAULTS = {  # subjects
    Fault.PADDING_TRAINED_ON: "rows",
    Fault.MASK_IGNORED: "the mask",
    Fault.WEIGHTS_AVERAGED_APART: "the sample weights",
    Fault.BROADCAST: "each output",
    Fault.SOFTMAX_TWICE: "the outputs",
    Fault.OTHER_OUTPUTS: "the outputs",
    Fault.NOT_RESET: "the gradient handed over before",
    Fault.MOMENTUM_BY_HAND: "the gradient handed over before",
}
_OF_OUTPUTS = {
    Fault.BROADCAST,
    Fault.SOFTMAX_TWICE,
    Fault.OTHER_OUTPUTS,
}  # their subjects
_PREDICATES = {
    Fault.PADDING_TRAINED_ON: "that fill up a batch are trained on",
    Fault.WEIGHTS_IGNORED: "are left out",
    Fault.MASK_IGNORED: "is left out",
    Fault.WEIGHTS_SQUARED: "are squared",
    Fault.WEIGHTS_AVERAGED_APART: "are averaged over their batch",
    Fault.FROM_LOGITS: "takes from_logits the other way",
    Fault.CLIP_BEFORE_UNSCALE: "is clipped while it is scaled as the loss is",
    Fault.LOSS_UNLIKE: "is not the one that was meant: its derivative by the outputs differs",
    Fault.GRADIENT_UNLIKE: "is not that of the loss that was meant",
}
_SHIFTED = {
    Detail.OF_ROW_IN_BATCH: ("the row", "rows", " in the batch"),
    Detail.OF_ROW_IN_DATA: ("the row", "rows", " in the data"),
    Detail.PLACES_AFTER: ("the place", "places", ""),
}
_DETAILS = {
    Detail.IN_ORDER_OF_DATA: "are those in the order of the data",
    Detail.IN_REVERSE: "are those of the batch in reverse",
    Detail.ALL_PAIRS: (
        "meets the labels of all rows of its batch, as outputs (rows, 1) and labels "
        "(rows,) do"
    ),
    Detail.ALL_PAIRS_WITH_WEIGHTS: (
        "meets the labels and sample weights of all rows of its batch, as outputs "
        "(rows, 1) and both (rows,) do"
    ),
    Detail.OF_OTHER_ROWS: "are each those of some other row",
    Detail.FUNCTION_AGAIN: "go through one more {names}",
    Detail.CLIPPED_BY_NORM: "is clipped to the norm {0}",
    Detail.CLIPPED_IN_TURN: "is clipped to the norm {0} whenever a {part} is added",
    Detail.ADDED_BEFORE: "is added, times {count}",
    Detail.PLUS_WEIGHTS: (
        "is that of the loss that was meant plus {0} times the weights, as a penalty "
        "gives; the "
        "optimizer's weight_decay is {1}"
    ),
    Detail.NOT_FINITE: "is not finite; that of the loss that was meant is",
}


def sentence(change: Change) -> str:
    """Return a change in a sentence.

    >>> sentence(Change(Fault.LABELS_SHIFTED, Detail.OF_ROW_IN_BATCH, (-2,)))
    'The labels are those 2 rows before in the batch.'
    """
    told = " ".join(part for part in (_subject(change), _predicate(change)) if part)
    return f"{told[0].upper()}{told[1:]}."


def _optimizer(names: tuple[str, ...], numbers: tuple[float, ...]) -> str:
    """Return how two optimizers differ: (the loop's class, the meant one, arguments),
    and two numbers of each one.
    """
    own, meant, *arguments = names
    if not arguments:
        return f"is {own}, and {meant} was meant"
    pairs = zip(arguments, numbers[::2], numbers[1::2], strict=True)
    told = [
        f"{name}={one:.4g}, and {other:.4g} was meant" for name, one, other in pairs
    ]
    return f"has {'; '.join(told)}"


def _subject(change: Change) -> str:
    fault, names = change.fault, change.names
    subject = _OF_FAULTS.get(fault, _SUBJECTS.get(fault.quantity, ""))
    if fault is Fault.CLIP_PER_MICROBATCH and change.detail is Detail.CLIPPED_BY_NORM:
        subject = f"the gradient of each {_PARTS[change.setting.part]}"
    if change.detail is Detail.TERMS_COUNT:
        subject = f"the losses of {', '.join(names)}"
    outputs = ", ".join(change.outputs)
    word = "" if fault in _OF_OUTPUTS else _many("output", len(change.outputs))
    return f"{subject} ({word} {outputs})".replace("( ", "(") if outputs else subject


def _many(word: str, num: int) -> str:
    return word if num == 1 else f"{word}s"


def _predicate(change: Change) -> str:
    fault, detail, numbers, names = (
        change.fault,
        change.detail,
        change.numbers,
        change.names,
    )
    counted = "" if change.count is None else count(change.count, change.setting, fault)
    if fault is Fault.ANOTHER_OPTIMIZER:
        return _optimizer(names, numbers)
    if fault is Fault.PASSES_LEFT_OUT:
        *passed, num_passes = numbers
        return f"has no part of forward pass {_list(passed)} of its {num_passes:.0f}"
    if fault is Fault.CLIPPED_OTHERWISE:
        stated = (
            f"{name}={bound:.4g}" for name, bound in zip(names, numbers, strict=True)
        )
        return f"is clipped otherwise: the optimizer that was meant has {', '.join(stated)}"
    if detail in _SHIFTED:
        one, many, where = _SHIFTED[detail]
        (by,) = numbers
        some = f"of {one}" if abs(by) == 1 else f"{abs(by):.0f} {many}"
        told = f"are those {some} {'after' if by > 0 else 'before'}{where}"
    elif detail in _DETAILS:
        fields = _fields(change.setting) | {"names": ", ".join(names), "count": counted}
        told = _DETAILS[detail].format(
            *(f"{number:.4g}" for number in numbers), **fields
        )
        counted = "" if detail is Detail.ADDED_BEFORE else counted
    elif detail is not None:
        told = _with_numbers(change)
    else:
        told = _PREDICATES.get(fault, "")
    more = f"counts {counted}" if counted else ""
    return " and ".join(part for part in (told, more) if part)


def _with_numbers(change: Change) -> str:
    numbers = change.numbers
    if change.detail is Detail.TERMS_COUNT:
        half = len(numbers) // 2
        these, those = _list(numbers[:half]), _list(numbers[half:])
        return f"count {these}, and not {those}"
    by, of_loss = numbers  # the smoothing
    return f"are smoothed by {by:.3g} instead of {of_loss:.3g}"


def _fields(setting: Setting) -> dict[str, str]:
    part = setting.part
    return {"sum": _SUM[setting.unit], "part": _PARTS[part], "parts": _PLURALS[part]}


def count(own: Count, setting: Setting, fault: Fault | None = None) -> str:
    """Return how much counts, and how much should."""
    is_penalty = fault is not None and fault.quantity is Quantity.PENALTY
    told = _one(own, setting, is_one=is_penalty)
    if is_penalty:
        return f"{told} instead of once"
    return f"{told} instead of {_one(own.instead, setting)}" if own.instead else told


def _one(own: Count, setting: Setting, *, is_one: bool = False) -> str:
    """Return a count of all rows; `is_one`: once is meant."""
    if own.numbers:
        return _numbers(own, setting)
    if own == MEANT:
        return "as meant"
    if not own.number:
        return "not at all"
    if own.above == MEANT.above and not own.below:
        return f"{_number(own.number)} times {_KNOWN[Known.MEANT]}"
    above = () if is_one and own.above == MEANT.above else own.above
    if not above and not own.below:
        return _number(own.number)
    top, low = (
        " x ".join(known(each, setting) for each in part) for part in (above, own.below)
    )
    below = f" / ({low})" if len(own.below) > 1 else f" / {low}" * bool(low)
    multiple = _MULTIPLES.get(own.number, f"{own.number:.4g} x ")
    return f"{multiple}{top or 1}{below}"


def known(each: Known, setting: Setting) -> str:
    """Return the name of a known count."""
    return _KNOWN[each].format(**_fields(setting))


def _number(number: float) -> str:
    """Return a number, or the fraction 1 / n that it is.

    >>> _number(0.25), _number(1 / 384), _number(0.0123)
    ('0.25', '1 / 384', '0.0123')
    """
    whole = round(1 / number) if number else 0
    is_fraction = whole in _WHOLE and abs(whole * number - 1) <= _SAME
    return f"1 / {whole}" if is_fraction else f"{number:.4g}"


def _numbers(own: Count, setting: Setting) -> str:
    told = _list(own.numbers)
    if own.level is None:
        return told
    level = _LEVELS[own.level].format(**_fields(setting))
    return f"{told} times {_KNOWN[Known.MEANT]}, {level}"


def _list(numbers: Iterable[float]) -> str:
    told = [f"{number:.4g}" for number in numbers]
    more = ", ..." if len(told) > _MOST_NUMBERS else ""
    return f"{', '.join(told[:_MOST_NUMBERS])}{more}"
