"""Steps on JAX, as functions of values: Keras' optimizer, of whole tables or of touched rows, and
custom steps.

Custom steps have Keras' signature (state, data) -> (results, state).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import keras
from keras.optimizers import Optimizer

from wholestep.engines.jax_devices import gather
from wholestep.engines.protocol import Found, Note
from wholestep.engines.shared import clip
from wholestep.errors import SpecificationError, message
from wholestep.state import State, TableRows, Variables
from wholestep.tree import Tensor, Tree


def select(is_first: Tensor, first: Callable[[], Tree], second: Callable[[], Tree]) -> Tree:
    """Return the results of one of two functions, like `jax.lax.cond`. Both are computed."""
    return _where(is_first, first(), second())


def _where(is_first: Tensor, first: Any, second: Any) -> Any:
    return jax.tree.map(
        lambda one, two: one if one is two else jnp.where(is_first, one, two), first, second
    )


class JaxOptimizer:
    """The part `optimizer` of the engine on JAX.

    Args:
        optimizer: the Keras optimizer; None for evaluation alone.
        branch: calls the first or second function, (is_first, first, second) -> their results.
    """

    # `keras.Model.fit` drops the parameter values that the forward pass assigns
    keeps_assigned = False

    def __init__(self, optimizer: Optimizer | None, branch: Callable):
        self.optimizer: Optimizer = optimizer
        self._branch = branch

    def clipped(self, grads: list) -> list:
        """Return the gradients as the optimizer clips them."""
        return clip(self.optimizer, grads)

    def apply(
        self,
        state: State,
        new: State,
        grads: list,
        ok: Tensor,
        assigned: dict[int, Tensor],
        touched: Sequence[TableRows] = (),
        twin: Optimizer | None = None,
    ) -> State:
        """Return `new` with one optimizer update applied where `ok`, else `state`; nothing is
        `assigned` here.
        """
        if twin is not None and touched:
            return self._apply_to_rows(state, new, grads, ok, touched, twin)

        def update() -> State:
            params, slots = self.optimizer.stateless_apply(state.slots, grads, state.params)
            return new._replace(params=params, slots=slots)

        return self._branch(ok, update, lambda: state)

    def _apply_to_rows(
        self,
        state: State,
        new: State,
        grads: list,
        ok: Tensor,
        touched: Sequence[TableRows],
        twin: Optimizer,
    ) -> State:
        """Apply an update that changes only the `touched` rows of their tables, by an optimizer
        made for these rows.
        """
        params = [*state.params]
        slots = [*state.slots]
        for table, rows, _ in touched:
            for values, i in table.places(params, slots):
                values[i] = gather(values[i], rows)
        # Not a branch, which would copy the rows: with zero gradients such an optimizer changes
        # nothing.
        grads = [jnp.where(ok, g, jnp.zeros_like(g)) for g in grads]
        params, slots = twin.stateless_apply(slots, grads, params)
        count = next(i for i, v in enumerate(twin.variables) if v is twin.iterations)
        slots[count] = jnp.where(ok, slots[count], state.slots[count])
        for table, rows, row_slots in touched:
            wholes = table.places(state.params, state.slots)
            for (values, i), (whole, _) in zip(table.places(params, slots), wholes, strict=True):
                values[i] = (
                    whole[i].at[rows].set(gather(values[i], row_slots), mode="promise_in_bounds")
                )
        parts = (new.buffers, new.metrics, new.sums), (state.buffers, state.metrics, state.sums)
        buffers, metrics, sums = _where(ok, *parts)
        return state._replace(
            params=params, slots=slots, buffers=buffers, metrics=metrics, sums=sums
        )


class JaxSteps:
    """The part `steps` of the engine on JAX.

    Args:
        around: makes a context for the call of a step.
    """

    def __init__(self, around: Callable[[], AbstractContextManager]):
        self._around = around

    def call(
        self,
        step: Callable,
        groups: Sequence[list],
        values: Sequence[list],
        num: int,
        data: Tree,
        note: Note,
    ) -> tuple[Tree, list[list]]:
        """Call a step with the values of the first `num` groups; return its results and all values
        after it.

        Values that a step returns unchanged may have been assigned instead.

        Raises:
            SpecificationError: the step assigns a variable of the last group, whose values are only
                read.
        """
        pairs = [
            pair
            for group, given in zip(groups, values, strict=True)
            for pair in zip(group, given, strict=True)
        ]
        with self._around(), _StepScope(pairs, note) as scope:
            found, after = _parts(step(tuple(values[:num]), data), values[:num])
            scope.refuse_assigned(groups[-1])
            after = [*after, *values[num:]]
            after = [
                [
                    scope.get_current_value(v) if new is old else new
                    for v, old, new in zip(*of_group, strict=True)
                ]
                for of_group in zip(groups, values, after, strict=True)
            ]
            return _with_values(found, groups, after), after

    def attempt(
        self,
        function: Callable[[State], tuple[State, Tensor, Found]],
        state: State,
        variables: Variables,
    ) -> tuple[State, Tensor, Found]:
        """Return the results of (state) -> (state, is_good, results), with the old state unless it
        is good.
        """
        new, ok, found = function(state)
        return _where(ok, new, state), ok, found


class _StepScope(keras.StatelessScope):
    """A scope that gives variables their values, and reports uses of variables without one."""

    def __init__(self, pairs: list, note: Note):
        super().__init__(pairs, collect_losses=True)
        self._note = note
        self._assigned: set[int] = set()

    def add_update(self, update: tuple[keras.Variable, Tensor]) -> None:
        variable, _ = update
        if id(variable) not in self.state_mapping:
            self._note(variable)
        self._assigned.add(id(variable))
        super().add_update(update)

    def get_current_value(self, variable: keras.Variable) -> Tensor | None:
        value = super().get_current_value(variable)
        if value is None:
            self._note(variable)
        return value

    def refuse_assigned(self, variables: list[keras.Variable]) -> None:
        """Refuse assignments to these variables.

        Raises:
            SpecificationError: there is one.
        """
        if paths := [v.path for v in variables if id(v) in self._assigned]:
            must = (
                "On JAX a custom step must assign only variables that the trainer keeps: other "
                "values would be lost."
            )
            attempt = (
                "make the variable, or its owner, an attribute of the model; a metric must be "
                "in `model.metrics`."
            )
            raise SpecificationError(message(must, ", ".join(paths), attempt))


def _with_values(found: Tree, groups: Sequence[list], after: list[list]) -> Tree:
    """Return the results of a step, with the new values in place of variables."""
    known = {
        id(v): value
        for of_group in zip(groups, after, strict=True)
        for v, value in zip(*of_group, strict=True)
    }

    def value_of(leaf: Tensor) -> Tensor:
        return known.get(id(leaf), leaf.value) if isinstance(leaf, keras.Variable) else leaf

    return keras.tree.map_structure(value_of, found)


def _parts(returned: Any, given: Sequence[list]) -> tuple[Tree, list[list]]:
    """Return the results of a step, and the state that it returns.

    Raises:
        SpecificationError: the returned state has another form than the given one.
    """
    is_pair = isinstance(returned, tuple | list) and len(returned) == 2
    state: Any = returned[1] if is_pair else None
    sizes = _sizes(state)
    known = _sizes(given)
    if sizes != known:
        must = (
            f"On JAX a custom step must return (results, state), the state as lists of {known} "
            "values."
        )
        received = (
            f"a state that is a {type(state).__name__}" if sizes is None else f"a state of {sizes}"
        )
        received = received if is_pair else type(returned).__name__
        raise SpecificationError(
            message(must, received, "return the state as Keras' own step does.")
        )
    return returned[0], [list(group) for group in state]


def _sizes(state: Any) -> str | None:
    """Return the sizes of the groups of a state as text; None if it has no groups."""
    if not isinstance(state, tuple | list):
        return None
    return ", ".join(
        str(len(s)) if isinstance(s, tuple | list) else type(s).__name__ for s in state
    )
