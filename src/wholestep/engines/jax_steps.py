"""Custom steps on JAX: functions of values with Keras' signature (state, data) -> (results, state)."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import keras

from wholestep.errors import SpecificationError, message
from wholestep.state import State, Variables
from wholestep.tree import Tensor, Tree

Note = Callable[[keras.Variable], None]


class JaxSteps:
    """The methods of `wholestep.engines.protocol` for custom steps."""

    def call_step(
        self, step: Callable, groups: Sequence[list], values: Sequence[list], num: int, data: Tree, note: Note
    ) -> tuple[Tree, list[list]]:
        """Call a step with the values of the first `num` groups; return its results and all values after it.

        Values that a step returns unchanged may have been assigned instead.
        """
        pairs = [pair for group, given in zip(groups, values, strict=True) for pair in zip(group, given, strict=True)]
        with _StepScope(pairs, note) as scope:
            found, after = _parts(step(tuple(values[:num]), data), values[:num])
            after = [*after, *values[num:]]
            after = [
                [scope.get_current_value(v) if new is old else new for v, old, new in zip(*of_group, strict=True)]
                for of_group in zip(groups, values, after, strict=True)
            ]
            return _with_values(found, groups, after), after

    def trying(self, variables: Variables) -> AbstractContextManager:
        """Return an empty context: a step assigns in a stateless scope."""
        return nullcontext()

    def attempt(
        self, function: Callable[[State], tuple[State, Tensor, Tree]], state: State, variables: Variables
    ) -> tuple[State, Tensor, Tree]:
        """Return the results of (state) -> (state, is_good, results), with the old state unless it is good."""
        new, ok, found = function(state)
        return jax.tree.map(lambda n, o: n if n is o else jnp.where(ok, n, o), new, state), ok, found


class _StepScope(keras.StatelessScope):
    """A scope that gives variables their values, and reports reads of variables without one."""

    def __init__(self, pairs: list, note: Note):
        super().__init__(pairs, collect_losses=True)
        self._note = note

    def get_current_value(self, variable: keras.Variable) -> Tensor | None:
        value = super().get_current_value(variable)
        if value is None:
            self._note(variable)
        return value


def _with_values(found: Tree, groups: Sequence[list], after: list[list]) -> Tree:
    """Return the results of a step, with the new values in place of variables."""
    known = {id(v): value for of_group in zip(groups, after, strict=True) for v, value in zip(*of_group, strict=True)}

    def value_of(leaf: Tensor) -> Tensor:
        return known.get(id(leaf), leaf.value) if isinstance(leaf, keras.Variable) else leaf

    return keras.tree.map_structure(value_of, found)


def _parts(returned: Tree, given: Sequence[list]) -> tuple[Tree, list[list]]:
    """Return the results of a step, and the state that it returns.

    Raises:
        SpecificationError: the returned state has another form than the given one.
    """
    is_pair = isinstance(returned, tuple | list) and len(returned) == 2
    state: Any = returned[1] if is_pair else None
    if not _fits(state, given):
        sizes = ", ".join(str(len(group)) for group in given)
        must = f"On JAX a custom step must return (results, state), the state as lists of {sizes} values."
        received = _described(state) if is_pair else type(returned).__name__
        raise SpecificationError(message(must, received, "return the state as Keras' own step does."))
    return returned[0], [list(group) for group in state]


def _fits(state: Tree, given: Sequence[list]) -> bool:
    if not isinstance(state, tuple | list) or len(state) != len(given):
        return False
    pairs = zip(state, given, strict=True)
    return all(isinstance(one, tuple | list) and len(one) == len(two) for one, two in pairs)


def _described(state: Tree) -> str:
    if not isinstance(state, tuple | list):
        return f"a state that is a {type(state).__name__}"
    return f"a state of {', '.join(str(len(s)) if isinstance(s, tuple | list) else type(s).__name__ for s in state)}"
