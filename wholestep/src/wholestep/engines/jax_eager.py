"""Operations on JAX where nothing is compiled: the user's code sees values."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from wholestep.engines.protocol import Carried, Found, Operations
from wholestep.errors import SpecificationError, message
from wholestep.state import State
from wholestep.tree import Tensor, Tree


class EagerJaxOperations:
    """The part `ops` of the eager engine on JAX: Python's loops.

    While a gradient is computed, JAX passes values in tracers. They print, branch and convert to a
    Python number by `item()`; numpy gets the numbers by `keras.ops.stop_gradient`.
    """

    def __init__(self, ops: Operations):
        self.has_slices = ops.has_slices
        self._differentiate = ops.differentiate
        self.gather, self.lookup, self.is_finite = ops.gather, ops.lookup, ops.is_finite

    def differentiate(
        self,
        function: Callable[[list], tuple[Tensor, Found]],
        params: list,
        *,
        slices: bool = False,
    ) -> tuple[list, Found]:
        """Return (gradients, auxiliary) of a function params -> (scalar, auxiliary), all dense."""
        with unreadable_named():
            return self._differentiate(function, params)

    def fold(
        self, function: Callable[[Carried, Any], Carried], carry: Carried, pieces: Tree, num: int
    ) -> Carried:
        """Return function(... function(carry, piece 0) ..., piece num-1); pieces: (num, ...)."""
        for i in range(num):
            carry = function(carry, jax.tree.map(lambda leaf, i=i: leaf[i], pieces))
        return carry

    def repeat(
        self,
        function: Callable[[Any, State], tuple[State, Found]],
        num: Tensor,
        state: State,
        reports: Found,
    ) -> tuple[State, Found]:
        """Call (i, state) -> (state, report) for i < num until a state is stopped."""
        i = 0
        while i < int(num) and int(state.stopped) == 0:
            state, report = function(jnp.int32(i), state)
            reports = jax.tree.map(lambda all, one, i=i: all.at[i].set(one), reports, report)
            i += 1
        return state, reports


@contextmanager
def unreadable_named() -> Iterator[None]:
    """Context in which reading a value whose gradient is taken raises an error that names the way.

    Raises:
        SpecificationError: numpy or Python read a tracer.
    """
    try:
        yield
    except Exception as error:
        # Keras fails to rebuild JAX' error with the layer's arguments: JAX' is its context.
        if not (_is_unreadable(error) or _is_unreadable(error.__context__)):
            raise
        must = "On JAX, numpy and float() cannot read a value whose gradient is taken."
        attempt = "np.asarray(keras.ops.stop_gradient(x)) to read it; keras.ops to compute with it."
        received = "a tracer, under run_eagerly=True"
        raise SpecificationError(message(must, received, attempt)) from error


def _is_unreadable(error: BaseException | None) -> bool:
    return isinstance(error, jax.errors.JAXTypeError) or "Tracer.__format__" in str(error)
