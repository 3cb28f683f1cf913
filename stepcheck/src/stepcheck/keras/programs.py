"""Programs of the reference: each runs a few times, so it is compiled quickly rather
than well.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import keras
from keras import ops

from stepcheck.errors import attempt
from stepcheck.keras.meaning import LossObjective
from stepcheck.tree import Tensor, Tree
from wholestep.engines import choose
from wholestep.model import Mean, Reading, Term, Whole, checked, read
from wholestep.program import ProgramCache

_QUICK = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
_MOST = 128
_OF_LOSSES = ProgramCache(_MOST)  # for all replays: a search tries the same losses anew


class Kind(NamedTuple):
    """A term of a loss: its name, its factor, and whether it is divided by its weights."""

    name: str
    coefficient: float
    is_divided: bool


def traced(function: Callable) -> Callable:
    """Return the function as a program, compiled once for each shape of its arguments."""
    if keras.backend.backend() != "jax":
        return choose().programs.traced(function)
    import jax

    return jax.jit(function, compiler_options=_options())


@cache
def _options() -> dict[str, Any] | None:
    """Return XLA's options for a processor; None on other devices, or if it does not
    know them.
    """
    import jax

    if jax.default_backend() != "cpu":
        return None
    program = jax.jit(lambda number: number, compiler_options=_QUICK)
    made, _ = attempt(lambda: program.lower(0.0).compile())
    return _QUICK if made is not None else None


def kinds_of(outcome: Reading) -> list[Kind]:
    """Return the terms of an outcome. A custom `compute_loss` returns the mean of its
    batch.
    """
    return [
        Kind(
            str(name),
            float(term.coefficient),
            outcome.is_complete or isinstance(term, Mean),
        )
        for name, term in outcome.terms.items()
    ]


def by_term(outcome: Reading, num: int) -> tuple[Tensor, Tensor]:
    """Return (values times weights, weights) of an outcome, both (terms, rows)."""
    terms = checked(outcome.terms, num).values()
    values, weights = zip(*(_by_row(term, num) for term in terms), strict=True)
    return ops.stack(values), ops.stack(weights)


def _by_row(term: Term, num: int) -> tuple[Tensor, Tensor]:
    """Return (values times weights, weights) of every row, both (rows,).

    A loss of one number is its first row's.
    """
    if isinstance(term, Whole):
        first = ops.cast(ops.arange(num) == 0, "float32")
        return first * ops.cast(term.values, "float32"), first
    values, weights = term.values, term.weights
    weights = (
        ops.ones_like(values) if weights is None else ops.cast(weights, values.dtype)
    )
    missing = len(values.shape) - len(weights.shape)
    weights = ops.reshape(weights, tuple(weights.shape) + (1,) * missing)
    weights = ops.broadcast_to(weights, values.shape)
    values = ops.where(weights == 0, ops.zeros_like(values), values) * weights
    by_row = (
        ops.reshape(ops.cast(each, "float32"), (num, -1)) for each in (values, weights)
    )
    values, weights = (ops.sum(each, axis=1) for each in by_row)
    return values, weights


def counted(values: Tensor, factors: Tensor) -> Tensor:
    """Return the sum of values times factors; a value of factor 0 may be NaN."""
    return ops.sum(ops.where(factors == 0, ops.zeros_like(values), values) * factors)


def at_outputs(
    objective: LossObjective, num: int, *, is_once: bool = False
) -> tuple[Callable, list[Kind]]:
    """Return (a function of outputs, labels, weights and factors, the kinds of its
    terms).

    It returns the values and weights by term, and the derivative of the values times
    their factors by the outputs. Keras' losses of one configuration share a program.
    The kinds are complete once the function was called.

    Args:
        num: the rows of a batch.
        is_once: whether it is called a few times only, and not worth a program.
    """
    key = _key_of(objective) or id(objective)
    if (key, num) in _OF_LOSSES and _OF_LOSSES[key, num][-1] in (objective, None):
        return _OF_LOSSES[key, num][:2]
    kinds: list[Kind] = []
    function = partial(_at_outputs, objective, kinds, num)
    if is_once and _key_of(objective) is None:
        return function, kinds
    owner = (
        None if _key_of(objective) else objective
    )  # kept, so that no other has its id
    _OF_LOSSES[key, num] = traced(function), kinds, owner
    return _OF_LOSSES[key, num][:2]


def _at_outputs(
    objective: LossObjective,
    kinds: list[Kind],
    num: int,
    outputs: Tensor,
    labels: Tree,
    weights: Tree,
    factors: Tensor,
) -> tuple:
    def total(given: list) -> tuple:
        outcome = read(objective.of(labels, given[0], weights), {})
        kinds[:] = kinds_of(outcome)
        values, own = by_term(outcome, num)
        return counted(values, factors), (values, own)

    found: Any
    (derivative,), found = choose().ops.differentiate(total, [outputs])
    return *found, derivative


def changed(change: Callable) -> Callable:
    """Return a function of outputs and factors: (derivative, changed outputs)."""

    def run(outputs: Tensor, factors: Tensor) -> tuple:
        def total(given: list) -> tuple:
            made = ops.cast(change(given[0]), "float32")
            return ops.sum(made * factors), made

        made: Any
        (derivative,), made = choose().ops.differentiate(total, [outputs])
        return derivative, made

    return run


def _key_of(objective: LossObjective) -> tuple | None:
    """Return the key of a Keras loss; None for other objectives."""
    loss: Any = objective.loss
    kind = type(loss)
    is_wrapper = kind.__name__ == "LossFunctionWrapper"  # of any function
    if is_wrapper or not kind.__module__.startswith("keras.src."):
        return None
    config = repr(sorted(loss.get_config().items()))
    set_now = keras.config.epsilon(), keras.config.floatx()
    return kind, objective.is_masked, str(loss.dtype), config, *set_now
