"""What each replica did, side by side, and the optimizer's calls that are one update."""

from dataclasses import dataclass, replace

import keras
import numpy as np

from wholestep.audit.keeping import in_part
from wholestep.audit.log import Applied, Called, Log, Scaled


@dataclass(frozen=True)
class Step:
    """Forward passes of all replicas, and the optimizer step after them: None at the end, or where it was skipped."""

    called: list[Called]
    applied: Applied | None
    is_skipped: bool = False


def steps(log: Log) -> list[Step]:
    """Return the steps of a log in order, the last one for what comes after the last optimizer step."""
    events: list[Called | Applied | Scaled] = [*log.called, *log.applied, *log.scaled]
    events.sort(key=lambda event: event.order)
    if keras.backend.backend() == "jax":
        events = _filled(events)
    lanes: dict[int, list[Step]] = {event.replica: [] for event in events} or {0: []}
    for replica, lane in lanes.items():
        lane += _cut([event for event in events if event.replica == replica])
    num = max(map(len, lanes.values()))
    merged = [_side_by_side([lane[i] for lane in lanes.values() if i < len(lane) - 1]) for i in range(num - 1)]
    rest = [called for lane in lanes.values() for called in lane[-1].called]
    return [*_accumulated(merged), Step(sorted(rest, key=lambda called: called.order), None)]


def _filled(events: list[Called | Applied | Scaled]) -> list[Called | Applied | Scaled]:
    """Return events where a stateless step of some variables has the others' values from the event before.

    It is told no values of them but those that the model itself holds, which are the first ones.
    """
    last: list[np.ndarray] = []
    filled: list[Called | Applied | Scaled] = []
    for event in events:
        if isinstance(event, Applied) and event.built and len(last) == len(event.params) > len(event.built):
            after = [v if i in event.built else last[i] for i, v in enumerate(event.params_after)]
            before = [v if i in event.built else last[i] for i, v in enumerate(event.params)]
            event = replace(event, params=before, params_after=after)
        if not isinstance(event, Scaled):
            last = event.params_after if isinstance(event, Applied) else in_part(event.params)
        filled.append(event)
    return filled


def _cut(events: list[Called | Applied | Scaled]) -> list[Step]:
    found, window = [], []
    for event in events:
        if isinstance(event, Called):
            window.append(event)
        elif isinstance(event, Applied) or not event.is_finite:
            is_step = isinstance(event, Applied)
            found.append(Step(window, event if is_step else None, not is_step))  # type: ignore[arg-type]
            window = []
    return [*found, Step(window, None)]


def _side_by_side(parts: list[Step]) -> Step:
    """Return the step of all replicas: the optimizer adds up what each hands over."""
    called = sorted((each for part in parts for each in part.called), key=lambda event: event.order)
    applied = [part.applied for part in parts if part.applied is not None]
    if not applied:
        return Step(called, None, is_skipped=True)
    if not all(each.is_whole for each in applied):
        return Step(called, replace(applied[0], grads=[], params=[], slots=[], params_after=[], slots_after=[]))
    return Step(called, replace(applied[0], grads=_summed([each.grads for each in applied], 1)))


def _accumulated(found: list[Step]) -> list[Step]:
    """Return the steps with those as one of which the optimizer itself makes one update."""
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
        is_whole = len(parts) == last.accumulates and all(each.is_whole for each in parts)
        grads = _summed([each.grads for each in parts], len(parts)) if is_whole else []
        first = parts[0] if is_whole else replace(parts[0], params=[], slots=[])
        after = (last.params_after, last.slots_after) if is_whole else ([], [])
        made = replace(last, grads=grads, params=first.params, slots=first.slots, replica=0, accumulates=1, num_calls=0)
        merged.append(Step(called, replace(made, params_after=after[0], slots_after=after[1])))
    return [*merged, *(Step(each.called, None, is_skipped=True) for each in window)]


def _summed(grads: list[list[np.ndarray | None]], divisor: int) -> list[np.ndarray | None]:
    """Return sums, parameter by parameter, divided by a number."""
    if len(grads) == 1:
        return [None if g is None else g / divisor for g in grads[0]] if divisor > 1 else grads[0]
    by_parameter = [[np.asarray(g, "float64") for g in each if g is not None] for each in zip(*grads, strict=False)]
    return [np.sum(each, axis=0) / divisor if each else None for each in by_parameter]
