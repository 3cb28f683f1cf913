"""The optimizer on TensorFlow: parameters and slots are updated in place, whole tables or touched rows."""

import numpy as np
import tensorflow as tf
from keras.optimizers import Optimizer

from wholestep.embeddings.tables import TableRows
from wholestep.engines.strategy import Replicas
from wholestep.engines.tensorflow_variables import TensorflowVariables
from wholestep.state import State
from wholestep.tree import Tensor


class TensorflowOptimizer(TensorflowVariables):
    """The methods of `wholestep.engines.protocol` for the optimizer, which updates the variables in place.

    Args:
        optimizer: the Keras optimizer; None for evaluation alone.
        replicas: the replicas that have the variables; None if there is only one.
    """

    def __init__(self, optimizer: Optimizer | None, replicas: Replicas | None):
        super().__init__()
        self.optimizer: Optimizer = optimizer
        self.replicas = replicas

    def loss_scale(self, state: State) -> Tensor:
        """Return the factor by which the optimizer scales the loss."""
        return self.optimizer.scale_loss(tf.ones((), "float32"))

    def apply(self, state: State, new: State, grads: list, ok: Tensor, assigned: dict[int, Tensor]) -> State:
        """Return `new` with one optimizer update applied where `ok`, to the `assigned` values; else `state`."""

        def update() -> State:
            for i, value in assigned.items():
                self._variables[i].value.assign(value, read_value=False)
            if self.replicas is None:
                self.optimizer.apply(grads, self._variables)
            else:
                self.replicas.apply(self.optimizer, grads, self._variables)
            return new

        return tf.cond(ok, update, lambda: state)

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
        for i, value in assigned.items():
            whole = self._variables[i].value
            whole.assign(tf.where(ok, value, whole), read_value=False)
        moves = []
        for table, rows, row_slots in touched:
            wholes = table.places(self._variables, self.optimizer.variables)
            pairs = zip(wholes, table.places(twin._trainable_variables, twin.variables), strict=True)
            moves += [(whole[i].value, few[i].value, rows, row_slots) for (whole, i), (few, _) in pairs]
        for whole, few, rows, _ in moves:
            few.assign(tf.gather(whole, rows))
        # Not a branch, which would copy the rows: with zero gradients such an optimizer changes nothing.
        twin.apply([tf.where(ok, g, tf.zeros_like(g)) for g in grads], twin._trainable_variables)
        twin.iterations.value.assign_sub(tf.cast(~ok, twin.iterations.dtype))
        for whole, few, rows, row_slots in moves:
            whole.scatter_update(tf.IndexedSlices(tf.gather(few, row_slots), rows))
        return tf.nest.map_structure(lambda n, o: n if n is o else tf.where(ok, n, o), new, state)

    def is_finite(self, values: list) -> Tensor:
        """Return whether all values are finite."""
        if not values:
            return tf.constant(True)
        return tf.reduce_all(tf.stack([_largest_bits(v) < _bits(tf.constant(np.inf, v.dtype)) for v in values]))


def _bits(value: tf.Tensor) -> tf.Tensor:
    """Return the bits of floats as integers of their size, without the sign: infinity is above all finite values."""
    whole = {2: tf.int16, 4: tf.int32, 8: tf.int64}[value.dtype.size]
    return tf.bitwise.bitwise_and(tf.bitcast(value, whole), whole.max)


def _largest_bits(value: tf.Tensor) -> tf.Tensor:
    """Return the maximum of the bits. Not of the values, as XLA ignores NaN in a maximum.

    Booleans would be correct, but XLA takes several times as long to reduce them.
    """
    return tf.reduce_max(_bits(value))
