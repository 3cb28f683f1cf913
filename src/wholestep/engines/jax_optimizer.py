"""The optimizer on JAX: compute new parameters and slots, of whole tables or of touched rows."""

import jax
import jax.numpy as jnp
import keras
from keras.optimizers import Optimizer

from wholestep.embeddings.tables import TableRows
from wholestep.state import State
from wholestep.tree import Tensor


class JaxOptimizer:
    """The methods of `wholestep.engines.protocol` for the optimizer.

    Args:
        optimizer: the Keras optimizer; None for evaluation alone.
    """

    def __init__(self, optimizer: Optimizer | None):
        self.optimizer: Optimizer = optimizer

    def loss_scale(self, state: State) -> Tensor:
        """Return the factor by which the optimizer scales the loss."""
        with keras.StatelessScope(list(zip(self.optimizer.variables, state.slots, strict=True))):
            return self.optimizer.scale_loss(jnp.ones((), "float32"))

    def apply(self, state: State, new: State, grads: list, ok: Tensor, assigned: dict[int, Tensor]) -> State:
        """Return `new` with one optimizer update applied where `ok`, else `state`; nothing is `assigned` here."""

        def update() -> State:
            params, slots = self.optimizer.stateless_apply(state.slots, grads, state.params)
            return new._replace(params=params, slots=slots)

        # A branch, not a selection: a selection keeps old and new alive together and copies both (1.5x the time).
        return jax.lax.cond(ok, update, lambda: state)

    def apply_to_rows(
        self,
        state: State,
        new: State,
        grads: list,
        ok: Tensor,
        assigned: dict[int, Tensor],
        touched: list[TableRows],
        twin: Optimizer,
    ) -> State:
        """Apply an update that changes only the `touched` rows of their tables, by an optimizer made for these rows."""
        params, slots = [*state.params], [*state.slots]
        for table, rows, _ in touched:
            for values, i in table.places(params, slots):
                values[i] = _rows(values[i], rows)
        # Not a branch, which would copy the rows: with zero gradients such an optimizer changes nothing.
        grads = [jnp.where(ok, g, jnp.zeros_like(g)) for g in grads]
        params, slots = twin.stateless_apply(slots, grads, params)
        count = next(i for i, v in enumerate(twin.variables) if v is twin.iterations)
        slots[count] = jnp.where(ok, slots[count], state.slots[count])
        for table, rows, row_slots in touched:
            wholes = table.places(state.params, state.slots)
            for (values, i), (whole, _) in zip(table.places(params, slots), wholes, strict=True):
                values[i] = whole[i].at[rows].set(_rows(values[i], row_slots), mode="promise_in_bounds")
        parts = (new.buffers, new.metrics, new.sums), (state.buffers, state.metrics, state.sums)
        buffers, metrics, sums = jax.tree.map(lambda n, o: n if n is o else jnp.where(ok, n, o), *parts)
        return state._replace(params=params, slots=slots, buffers=buffers, metrics=metrics, sums=sums)

    def is_finite(self, values: list) -> Tensor:
        """Return whether all values are finite."""
        # One reduction for all values: compiling one kernel each would take half of the extra time to the first update.
        largest = [jnp.max(jnp.abs(v)) for v in values if v.size]
        return jnp.isfinite(jnp.max(jnp.stack(largest))) if largest else jnp.array(True)


def _rows(values: jax.Array, rows: Tensor) -> jax.Array:
    """Return these rows; row numbers are in range."""
    return values.at[rows].get(mode="promise_in_bounds")
