"""The scope in which an objective runs: variables have the given values; reads and assignments are recorded."""

import keras
from keras import ops

from wholestep.errors import SpecificationError, message
from wholestep.model.facts import Notes
from wholestep.state import Variables
from wholestep.tree import Tensor


class Scope(keras.StatelessScope):
    """A pure function's view of variables.

    Args:
        mapping: pairs (variable, value).
        variables: the variables of the state.
        notes: the collector of a trace; None outside of one.
        apart: the ids of parameters that have no value here, and must not be read.
        keeps_assigned: whether an assignment to a parameter persists.
        tells_reads: whether the read of a variable without a value is recorded, or refused outside of a trace.
    """

    def __init__(
        self,
        mapping: list,
        variables: Variables,
        notes: Notes | None,
        apart: set[int],
        *,
        keeps_assigned: bool,
        tells_reads: bool,
    ):
        super().__init__(mapping, collect_losses=True)
        self.read: set[int] = set()
        self._variables = variables
        self._notes = notes
        self._apart = apart
        self._keeps_assigned = keeps_assigned
        self._tells_reads = tells_reads

    def get_current_value(self, variable: keras.Variable) -> Tensor | None:
        """Return the variable's value in this scope; None if it has none.

        Raises:
            SpecificationError: the read is new since the trace, and the program would freeze the current value; or a
                metric's result or a regulariser reads the model's variables.
        """
        assert id(variable) not in self._apart, f"{variable.path} is read, but only some of its rows are here"
        self.read.add(id(variable))
        value = super().get_current_value(variable)
        if value is None and self._tells_reads:
            if self._notes is None:
                must = "An objective must read the same variables for batches of any number of rows."
                attempt = "read them in every call, whatever the batch."
                raise SpecificationError(message(must, f"{variable.path}, which it did not read before", attempt))
            self._notes.note_read(variable, self._variables)
        return value

    def add_update(self, update: tuple[keras.Variable, Tensor]) -> None:
        """Assign a variable within this scope.

        Raises:
            SpecificationError: the variable is the optimizer's.
        """
        variable, value = update
        own = self._variables
        if any(variable is known for known in own.slots):
            must = "An objective must not assign the optimizer's variables, which the update computes."
            raise SpecificationError(message(must, variable.path, "assign it between updates, or in a callback."))
        place = next((i for i, known in enumerate(own.params) if known is variable), None)
        if place is None and self._notes is not None:
            self._notes.note_written(variable, own)
        if place is not None and self._keeps_assigned:
            if self._notes is not None and place not in self._notes.assigned:
                self._notes.assigned.append(place)
            # The gradient passes through the assigned value to the parameter, as in Keras on TensorFlow.
            current = self.state_mapping[id(variable)]
            value = ops.stop_gradient(ops.cast(value, current.dtype)) + (current - ops.stop_gradient(current))
        super().add_update((variable, value))
