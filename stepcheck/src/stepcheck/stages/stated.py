"""The optimizer that is stated, beside the one of the loop: its numbers, and steps by hand."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from inspect import signature
from typing import Any

import numpy as np

from stepcheck.keras.literals import is_even
from stepcheck.report.found import Likely
from stepcheck.solve.changes import CLIPS, Schedule
from stepcheck.trace.measure import FINE
from stepcheck.trace.windows import Rule, Update, Windows

ADDED_UP = Likely(
    "Each step has the gradients of all updates before it, undiminished: is the gradient not set to zero after a step?"
)
GROWN = (
    "Each update makes the weights grow by the share {:.3g}, beside its step. A decay takes that off them: is its sign "
    "wrong, as after a scaling by minus the rate?"
)
_RATE = "learning_rate"
_BESIDE = *CLIPS, "name", _RATE, "loss_scale_factor", "gradient_accumulation_steps"  # judged elsewhere
_SAME_MOMENTUM = 5e-4  # 0.999 and 0.9999 are two; solved for from steps in float32
_NO_STEP = "use_ema", "ema_momentum", "ema_overwrite_frequency"


def unlike(optimizer: Any, used: list[Any], updates: list[Update], *, is_told: bool) -> Iterator[str]:
    """Yield a note if the loop's one optimizer is another than the stated one, or has other numbers.

    A model may be compiled for its loss and metrics alone: a compiled optimizer of the same kind is compared, no rates.
    """
    if len(used) != 1 or used[0] is optimizer or optimizer is None or not updates:
        return
    meant, own = (_numbers(each, getattr(used[0], "_trainable_variables", [])) for each in (optimizer, used[0]))
    kinds = [type(each).__name__ for each in (used[0], optimizer)]
    others = [key for key in meant if key in own and own[key] != meant[key] and key != _RATE]
    rates, rate = {update.applied.learning_rate for update in updates}, meant.get(_RATE)
    if is_told and rate is not None and len(rates) == 1 and abs(rate - max(rates)) > FINE.differs * rate:
        others, own[_RATE] = [*others, _RATE], max(rates)
    told, those = (", ".join(f"{key}={_told(of[key])}" for key in others) for of in (own, meant))
    if kinds[0] != kinds[1] and {*kinds} != {"Adam", "AdamW"}:  # which differ in their decay alone
        yield from [Likely(f"The optimizer of the loop is {kinds[0]}, and {kinds[1]} was meant.")] * is_told
    elif others and not is_told:
        yield f"The {kinds[0]} of the loop has {told}, and the compiled {kinds[1]} has {those}. Is that meant?"
    elif others:
        differs = f"The {kinds[0]} of the loop has {told}, and {those} was meant."
        may_be_by_hand = others == ["weight_decay"] and not own["weight_decay"]
        yield f"{differs} Does the loop decay the weights itself?" if may_be_by_hand else Likely(differs)


def _numbers(optimizer: Any, variables: list[Any]) -> dict[str, Any]:
    """Return the arguments of an optimizer that change a step of variables, whose values may be deleted."""
    names = [name for name in signature(type(optimizer)).parameters if name not in (*_BESIDE, *_NO_STEP)]
    found = {name: getattr(optimizer, name) for name in names if hasattr(optimizer, name)}
    if found.get("weight_decay") and hasattr(optimizer, "_use_weight_decay"):  # of Keras
        found["decayed variables"] = sum(map(optimizer._use_weight_decay, variables))
    return found | {_RATE: rate_of(optimizer)}


def rate_of(optimizer: Any) -> float | None:
    """Return the present rate of an optimizer; None if it has a schedule, or if a step of JAX has taken it."""
    rate = getattr(optimizer, "_learning_rate", None)
    with suppress(RuntimeError):
        return None if rate is None or callable(rate) else float(np.asarray(rate))
    return None


def _told(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def as_stated(optimizer: Any, schedule: Schedule | None, seen: Windows, updates: list[Update]) -> Windows | None:
    """Return updates by hand with the gradients that steps of the stated SGD would have taken; None for others."""
    if type(optimizer).__name__ != "SGD" or optimizer.nesterov:
        return None
    rates = [schedule(u.number - 1) if schedule else float(np.asarray(optimizer.learning_rate)) for u in updates]
    moves = [[fall for fall in update.applied.grads if fall is not None] for update in updates]
    if min(rates) <= 0 or any(len(own) < len(update.applied.grads) for own, update in zip(moves, updates, strict=True)):
        return None
    found, before = [], [0 * fall for fall in moves[0]]
    for update, falls, rate in zip(updates, moves, rates, strict=True):
        grads = [(fall - optimizer.momentum * last) / rate for fall, last in zip(falls, before, strict=True)]
        found.append(replace(update, applied=replace(update.applied, grads=[*grads], learning_rate=rate)))
        before = falls
    return replace(seen, updates=found, rule=Rule(rates, "", is_stated=True))


def steps_otherwise(optimizer: Any, rule: Rule) -> Iterator[Likely]:
    """Yield a note if steps by hand have other momenta, or another decay, than the optimizer that is stated."""
    names = {1: ("momentum",), 2: ("beta_1", "beta_2")}.get(len(rule.momenta), ())
    kind = type(optimizer).__name__
    stated: list[Any] = [getattr(optimizer, name, None) for name in names]
    if names and len(rule.rates) > 2 and kind in ("SGD", "Adam", "AdamW"):
        if None in stated:
            yield Likely(f"The steps are those of {'Adam' if len(names) == 2 else 'SGD'}, and {kind} was meant.")
        elif any(abs(a - b) > _SAME_MOMENTUM for a, b in zip(rule.momenta, stated, strict=True)):
            pairs = [zip(names, of, strict=True) for of in (rule.momenta, stated)]
            told, those = (", ".join(f"{name}={number:.4g}" for name, number in each) for each in pairs)
            yield Likely(f"The steps have {told}, and {those} was meant.")
    meant, (own, least) = float(getattr(optimizer, "weight_decay", None) or 0.0), rule.decay
    if abs(own - meant) > max(least, FINE.differs * abs(meant)):
        decays = f"decay by {own:.4g} times the rate" if own else "do not decay"
        yield Likely(f"The weights {decays}, and weight_decay={meant:.4g} was meant.")


def stated(optimizer: Any, seen: Windows) -> Schedule | None:
    """Return the constant rate of an optimizer that the user states, for a loop by hand with a constant rate."""
    rate = getattr(optimizer, "learning_rate", None)
    is_constant = seen.is_by_hand and seen.rule is not None and is_even(np.array(seen.rule.rates))
    return (lambda number: float(np.asarray(rate))) if is_constant and rate is not None else None
