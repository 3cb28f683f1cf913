"""Programs of the reference: each runs a few times, so it is compiled quickly rather
than well.
"""

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import keras
from keras import ops

from stepcheck.errors import attempt
from stepcheck.keras.meaning import LossObjective
from stepcheck.tree import Tensor, Tree
from wholestep.engines import choose
from wholestep.model import (
    Mean,
    ObjectiveOutput,
    ScalarTerm,
    Sum,
    Term,
    Whole,
    checked,
    read,
)

_QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
}
_MOST = 128


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

    program = jax.jit(lambda number: number, compiler_options=_QUICK)
    is_known = attempt(lambda: program.lower(0.0).compile())[1] is None
    return _QUICK if is_known and jax.default_backend() == "cpu" else None


def by_term(outcome: ObjectiveOutput, num: int) -> tuple[Tensor, ...]:
    """Return (values times weights, weights), both (terms, rows), the factors of the
    terms, and whether each is divided by its weights.

    A custom `compute_loss` returns the mean of its batch.
    """
    terms = [*map(_computed, checked(outcome.terms, num).values())]
    values, weights = zip(*(_by_row(term, num) for term in terms), strict=True)
    factors = [float(term.coefficient) for term in terms]
    divided = [outcome.is_complete or isinstance(term, Mean) for term in terms]
    made = map(ops.convert_to_tensor, (factors, divided))
    return ops.stack(values), ops.stack(weights), *made


def _computed(term: Term) -> Mean | Sum | ScalarTerm:
    """Return a term; that of all rows together as one number."""
    if not isinstance(term, Whole):
        return term
    total, weight = term.sums()
    return ScalarTerm(total / weight, term.coefficient)


def _by_row(term: Mean | Sum | ScalarTerm, num: int) -> list[Tensor]:
    """Return values times weights, and weights, of every row, both (rows,).

    A loss of one number is its first row's.
    """
    values = ops.cast(term.values, "float32")
    if isinstance(term, ScalarTerm):
        first = ops.cast(ops.arange(num) == 0, "float32")
        return [first * values, first]
    weights = ops.ones_like(values)
    if term.weights is not None:
        missing = len(values.shape) - len(term.weights.shape)
        shape = (*ops.shape(term.weights), *[1] * missing)
        weights = weights * ops.cast(
            ops.reshape(term.weights, shape), "float32"
        )
    values = ops.where(weights == 0, ops.zeros_like(values), values) * weights
    return [
        ops.sum(ops.reshape(each, (num, -1)), axis=1)
        for each in (values, weights)
    ]


def counted(values: Tensor, factors: Tensor) -> Tensor:
    """Return the sum of values times factors; a value of factor 0 may be NaN."""
    return ops.sum(
        ops.where(factors == 0, ops.zeros_like(values), values) * factors
    )


@lru_cache(_MOST)  # for all replays: a search tries the same losses anew
def at_outputs(
    objective: LossObjective, num: int, change: Callable | None = None
) -> Callable:
    """Return a program of outputs, labels, weights and factors, for batches of `num`
    rows.

    It returns the terms, and the derivative of their values times factors by the
    outputs, which may go through a change before the loss.
    """

    def run(
        outputs: Tensor, labels: Tree, weights: Tree, factors: Tensor
    ) -> tuple:
        def total(given: list) -> tuple:
            made = given[0] if change is None else change(given[0])
            terms = by_term(read(objective.of(labels, made, weights), {}), num)
            return counted(terms[0], factors), terms

        found: Any
        (derivative,), found = choose().ops.differentiate(total, [outputs])
        return found, derivative

    return traced(run)
