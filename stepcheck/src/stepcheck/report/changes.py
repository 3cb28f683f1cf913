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

# numbers n of which 1 / n is written; a larger one may be close by chance
_WHOLE, _SAME = (
    range(10, 5000),
    1e-5,
)
_MOST_NUMBERS = 4
_SUM = {
    Unit.ROWS: "the number of rows",
    Unit.SAMPLE_WEIGHTS: "the sum of the sample weights",
    Unit.WEIGHTS: "the sum of the weights",
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
_PREDICATES = {
    Fault.PADDING_TRAINED_ON: "that fill up a batch are trained on",
    Fault.LABELS_OF_OTHER_ROWS: "are each those of some other row",
    Fault.WEIGHTS_IGNORED: "are left out",
    Fault.MASK_IGNORED: "is left out",
    Fault.WEIGHTS_SQUARED: "are squared",
    Fault.WEIGHTS_AVERAGED_APART: "are averaged over their batch",
    Fault.FROM_LOGITS: "takes from_logits the other way",
    Fault.CLIP_BEFORE_UNSCALE: "is clipped while it is scaled as the loss is",
    Fault.LOSS_UNLIKE: "is not the one that was meant: its derivative by the outputs differs",
    Fault.GRADIENT_UNLIKE: "is not that of the loss that was meant",
}
_DETAILS = {
    Detail.PLACES_AFTER: "are those {0} places after",
    Detail.ALL_PAIRS: (
        "meets the labels of all rows of its batch, as outputs (rows, 1) and labels "
        "(rows,) do"
    ),
    Detail.ALL_PAIRS_WITH_WEIGHTS: (
        "meets the labels and sample weights of all rows of its batch, as outputs "
        "(rows, 1) and both (rows,) do"
    ),
    Detail.SMOOTHED: "are smoothed by {0} instead of {1}",
    Detail.FUNCTION_AGAIN: "go through one more {names}",
    Detail.CLIPPED_BY_NORM: "of each {part} is clipped to the norm {0}",
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

    >>> sentence(Change(Fault.LABELS_SHIFTED, Detail.PLACES_AFTER, (-2,)))
    'The labels are those -2 places after.'
    """
    told = " ".join(
        part for part in (_subject(change), _predicate(change)) if part
    )
    return f"{told[0].upper()}{told[1:]}."


def _subject(change: Change) -> str:
    fault = change.fault
    subject = _OF_FAULTS.get(fault, _SUBJECTS.get(fault.quantity, ""))
    if change.detail is Detail.TERMS_COUNT:
        subject = f"the losses of {', '.join(change.names)}"
    outputs = ", ".join(change.outputs)
    return f"{subject} (of {outputs})" if outputs else subject


def _predicate(change: Change) -> str:
    fault, detail, numbers = change.fault, change.detail, change.numbers
    counted = (
        ""
        if change.count is None
        else count(change.count, change.setting, fault)
    )
    told = _PREDICATES.get(fault, "")
    if fault is Fault.PASSES_LEFT_OUT:
        *passed, num = numbers
        told = f"has no part of forward pass {_list(passed)} of its {num:.0f}"
    elif fault is Fault.ANOTHER_OPTIMIZER:
        own, meant, *names = change.names
        pairs = zip(names, numbers[::2], numbers[1::2], strict=True)
        values = [
            f"{name}={a:.4g}, and {b:.4g} was meant" for name, a, b in pairs
        ]
        told = (
            f"has {'; '.join(values)}"
            if names
            else f"is {own}, and {meant} was meant"
        )
    elif fault is Fault.CLIPPED_OTHERWISE:
        bounds = zip(change.names, numbers, strict=True)
        stated = ", ".join(f"{name}={bound:.4g}" for name, bound in bounds)
        told = (
            f"is clipped otherwise: the optimizer that was meant has {stated}"
        )
    elif detail is Detail.TERMS_COUNT:
        half = len(numbers) // 2
        told = f"count {_list(numbers[:half])}, and not {_list(numbers[half:])}"
    elif detail in _DETAILS:
        fields = _fields(change.setting) | {"names": ", ".join(change.names)}
        shown = [f"{number:.4g}" for number in numbers]
        told = _DETAILS[detail].format(*shown, **fields, count=counted)
    more = (
        f"counts {counted}"
        if counted and detail is not Detail.ADDED_BEFORE
        else ""
    )
    return " and ".join(part for part in (told, more) if part)


def _fields(setting: Setting) -> dict[str, str]:
    is_replica = setting.part is Part.REPLICA
    part, parts = (
        ("replica", "replicas")
        if is_replica
        else ("microbatch", "microbatches")
    )
    return {"sum": _SUM[setting.unit], "part": part, "parts": parts}


def count(own: Count, setting: Setting, fault: Fault | None = None) -> str:
    """Return how much counts, and how much should."""
    is_penalty = fault is not None and fault.quantity is Quantity.PENALTY
    told = _one(own, setting, is_one=is_penalty)
    if is_penalty:
        return f"{told} instead of once"
    return (
        f"{told} instead of {_one(own.instead, setting)}"
        if own.instead
        else told
    )


def _one(own: Count, setting: Setting, *, is_one: bool = False) -> str:
    """Return a count of all rows; `is_one`: once is meant."""
    if own.numbers:
        told = _list(own.numbers)
        level = own.level and _LEVELS[own.level].format(**_fields(setting))
        return f"{told} times {_KNOWN[Known.MEANT]}, {level}" if level else told
    if own == MEANT:
        return "as meant"
    if not own.number:
        return "not at all"
    is_multiple = own.above == MEANT.above
    if is_multiple and not own.below:
        return f"{_number(own.number)} times {_KNOWN[Known.MEANT]}"
    above = () if is_one and is_multiple else own.above
    if not above and not own.below:
        return _number(own.number)
    top, low = (
        " x ".join(known(each, setting) for each in part)
        for part in (above, own.below)
    )
    low = f"({low})" if len(own.below) > 1 else low
    multiple = "" if own.number == 1 else f"{own.number:.4g} x "
    return " / ".join(filter(None, [f"{multiple}{top or 1}", low]))


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


def _list(numbers: Iterable[float]) -> str:
    told = [f"{number:.4g}" for number in numbers]
    return ", ".join(
        [*told[:_MOST_NUMBERS], *["..."] * (len(told) > _MOST_NUMBERS)]
    )
