"""A record cut into steps: the forward passes before each optimizer step, of all
replicas, with the step.
"""

from dataclasses import dataclass, replace

import numpy as np

from stepcheck.trace.log import Applied, Called, Event, Log, Other, joined
from stepcheck.trace.measure import in_part


@dataclass(frozen=True)
class Step:
    """Forward passes of all replicas, and the step after them: None at the end, or
    where it was skipped, or waits.
    """

    called: list[Called]
    applied: Applied | None
    is_complete: bool = True


def steps(log: Log) -> list[Step]:
    """Return the steps of a log in order; the last one holds the forward passes after
    the last optimizer step.
    """
    events: list[Event] = [*log.called, *log.applied, *log.scaled, *log.others]
    events.sort(key=lambda event: event.order)
    if log.is_stateless:
        events = _filled(events)
    own = {
        event.replica for event in events if not isinstance(event, Called)
    } or {0}  # one outside is that of all
    lanes = [
        _cut(
            [
                each
                for each in events
                if each.replica == replica or len(own) == 1
            ]
        )
        for replica in own
    ]
    by_step = [
        [lane[i] for lane in lanes if i < len(lane) - 1]
        for i in range(max(map(len, lanes)) - 1)
    ]
    merged = [
        _side_by_side(parts, adds_up=not (log.is_stateless or log.is_shared))
        for parts in by_step
    ]
    rest = [called for lane in lanes for called in lane[-1].called]
    return [
        *_side_by_side_optimizers(_accumulated(merged)),
        Step(sorted(rest, key=lambda called: called.order), None),
    ]


def _filled(events: list[Event]) -> list[Event]:
    """Return events where a stateless step of some variables has the others' values
    from the event before.

    Of the others it records the values that the model itself holds, which are the first
    ones.
    """
    last: list[np.ndarray] = []
    filled: list[Event] = []
    for event in events:
        if (
            isinstance(event, Applied)
            and event.built
            and len(last) == len(event.params) > len(event.built)
        ):
            after = [
                v if i in event.built else last[i]
                for i, v in enumerate(event.params_after)
            ]
            before = [
                v if i in event.built else last[i]
                for i, v in enumerate(event.params)
            ]
            event = replace(event, params=before, params_after=after)
        if isinstance(event, Called | Applied):
            last = (
                event.params_after
                if isinstance(event, Applied)
                else in_part(event.params)
            )
        filled.append(event)
    return filled


def _cut(events: list[Event]) -> list[Step]:
    """Cut the events of a replica at optimizer steps; passes before another model's
    step are that step's.
    """
    found, window, num_before = list[Step](), list[Called](), 0
    for event in events:
        if isinstance(event, Called):
            window.append(event)
        elif isinstance(event, Other):
            num_before = len(window)
        elif isinstance(event, Applied) or not event.is_finite:
            found.append(
                Step(
                    window[num_before:] or window,
                    event if isinstance(event, Applied) else None,
                )
            )
            window, num_before = [], 0
    return [*found, Step(window, None)]


def _side_by_side(parts: list[Step], *, adds_up: bool) -> Step:
    """Return the step of all replicas; `adds_up`: whether the optimizer adds up their
    gradients, or the loop did.
    """
    called = sorted(
        (each for part in parts for each in part.called),
        key=lambda event: event.order,
    )
    applied = [part.applied for part in parts if part.applied is not None]
    if not applied:
        return Step(called, None)
    if not all(each.is_whole for each in applied):
        alone = len(applied) == 1
        return Step(
            called,
            applied[0].emptied() if alone else _without_numbers(applied[0]),
        )
    grads = (
        _summed([each.grads for each in applied], 1)
        if adds_up
        else applied[0].grads
    )
    return Step(called, replace(applied[0], grads=grads))


def _without_numbers(step: Applied) -> Applied:
    """Return a step of several, with the outline of the weights alone: gradients are
    not known.
    """
    outlines = [
        own[:0] if i == 0 else own for i, own in enumerate(step.outlines)
    ]
    return replace(step.emptied(), outlines=outlines)


def _accumulated(found: list[Step]) -> list[Step]:
    """Return the steps, with the calls as one step that the optimizer itself
    accumulates to one update.
    """
    merged: list[Step] = []
    window: list[Step] = []
    for step in found:
        window.append(step)
        last = step.applied
        if last is None or (last.num_calls + 1) % last.accumulates:
            if last is None and len(window) == 1:
                merged.append(window.pop())
            continue
        parts = [each.applied for each in window if each.applied is not None]
        called = [each for part in window for each in part.called]
        window = []
        if last.accumulates == 1:
            merged.append(Step(called, last))
            continue
        made = replace(last, replica=0, accumulates=1, num_calls=0)
        if len(parts) == last.accumulates and all(
            each.is_whole for each in parts
        ):
            grads = _summed([each.grads for each in parts], len(parts))
            slots_of = parts[0].slots_of[0], last.slots_of[1]
            made = replace(
                made, grads=grads, params=parts[0].params, slots=parts[0].slots
            )
            made = replace(made, slots_of=slots_of)
        else:
            made = _without_numbers(made)
        merged.append(Step(called, made))
    return [
        *merged,
        *(
            Step(each.called, None, is_complete=each.applied is None)
            for each in window
        ),
    ]


def _side_by_side_optimizers(made: list[Step]) -> list[Step]:
    """Return the steps; consecutive steps of several optimizers, on different
    variables, become one.

    They follow each other without a forward pass, as an optimizer for an encoder and
    one for its head do.
    """
    merged: list[Step] = []
    for step in made:
        one, two = merged[-1].applied if merged else None, step.applied
        if (
            one is None
            or two is None
            or step.called
            or not _are_apart(one, two)
        ):
            merged.append(step)
            continue
        built = tuple(sorted({*one.built, *two.built}))
        grads = [
            b if a is None else a
            for a, b in zip(one.grads, two.grads, strict=True)
        ]
        slots = [*one.slots, *two.slots]
        after = [*one.slots_after, *two.slots_after]
        both = replace(
            one,
            optimizer=hash((one.optimizer, two.optimizer)),
            grads=grads,
            slots=slots,
            slots_after=after,
            slots_of=joined(one.slots_of, two.slots_of),
            rules=tuple(
                b or a for a, b in zip(one.rules, two.rules, strict=False)
            ),
        )
        merged[-1] = replace(
            merged[-1],
            applied=replace(both, params_after=two.params_after, built=built),
        )
    return merged


def _are_apart(one: Applied, two: Applied) -> bool:
    """Whether two optimizers move different variables. Without recorded numbers, their
    slots show which.
    """
    if one.optimizer == two.optimizer or one.is_whole != two.is_whole:
        return False
    if not one.is_whole:
        return bool(one.built and two.built) and {*one.built}.isdisjoint(
            two.built
        )
    pairs = zip(one.grads, two.grads, strict=True)
    return len(one.grads) == len(two.grads) and not any(
        a is not None and b is not None for a, b in pairs
    )


def _summed(
    grads: list[list[np.ndarray | None]], divisor: int
) -> list[np.ndarray | None]:
    if len(grads) == 1:
        return (
            [None if g is None else g / divisor for g in grads[0]]
            if divisor > 1
            else grads[0]
        )
    by_parameter = [
        [np.asarray(g, "float64") for g in each if g is not None]
        for each in zip(*grads, strict=False)
    ]
    return [
        np.sum(each, axis=0) / divisor if each else None
        for each in by_parameter
    ]
