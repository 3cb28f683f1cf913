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
    """The verbs of `wholestep.engines.protocol` that speak of the optimizer; it updates the variables where they are.

    Args:
        optimizer: Keras' own; who only evaluates needs none.
        replicas: the replicas that have the variables; None if there is but one.
    """

    def __init__(self, optimizer: Optimizer | None, replicas: Replicas | None):
        super().__init__()
        self.optimizer: Optimizer = optimizer
        self.replicas = replicas

    def loss_scale(self, state: State) -> Tensor:
        """Return what the optimizer multiplies the loss by."""
        return self.optimizer.scale_loss(tf.ones((), "float32"))

    def apply(self, state: State, new: State, grads: list, ok: Tensor, assigned: dict[int, Tensor]) -> State:
        """Return `new` with one optimizer update applied where `ok`, to what is `assigned`; else `state` as it is."""

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
        """Do the same, of the tables in `touched` for these rows only, by an optimizer that was made for them."""
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
        # Not a branch, which would copy the rows: such an optimizer leaves alone what has no gradient.
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
    """Return the bits of floats as integers of their size, without the sign: infinity is above all that is finite."""
    whole = {2: tf.int16, 4: tf.int32, 8: tf.int64}[value.dtype.size]
    return tf.bitwise.bitwise_and(tf.bitcast(value, whole), whole.max)


def _largest_bits(value: tf.Tensor) -> tf.Tensor:
    """Return the largest of the bits. The largest of the numbers would not do: XLA leaves out NaN there.

    Truth values would do, but XLA takes several times as long to reduce them.
    """
    return tf.reduce_max(_bits(value))
