"""State on TensorFlow: programs, the optimizer and custom steps read and write Keras variables in
place.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras.optimizers import Optimizer

from wholestep import tree
from wholestep.engines.protocol import Found, Note
from wholestep.engines.shared import clip
from wholestep.engines.tensorflow_devices import TensorflowReplicas, specs_of, tensor_of
from wholestep.keras_private import trainable_variables
from wholestep.slices import Gradient, Slices
from wholestep.state import State, TableRows, Variables
from wholestep.tree import Tensor, Tree


def build_optimizer(optimizer: Optimizer, params: list[keras.Variable]) -> None:
    """Create the variables of an optimizer."""
    optimizer.build(params)


def own_variables(owners: Mapping[str, Any]) -> dict[str, tf.Variable]:
    """Return the variables of TensorFlow, not of Keras, in the attributes of objects, also in lists
    and dicts.
    """
    found = {
        path: held
        for name, owner in owners.items()
        for path, held in _inside(name, getattr(owner, "__dict__", {}))
    }
    first = {id(held): path for path, held in reversed(found.items())}
    return {path: held for path, held in found.items() if first[id(held)] == path}


def _inside(path: str, value: Any) -> Iterator[tuple[str, tf.Variable]]:
    if isinstance(value, tf.Variable):
        yield path, value
    elif isinstance(value, tf.random.Generator):
        yield f"{path}/state", value.state
    elif isinstance(value, Mapping | list | tuple):
        for name, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _inside(f"{path}/{name}", each)


class TensorflowVariables:
    """The part `variables` of the engine on TensorFlow."""

    shows_changes = False  # a variable's value is always the same object

    def __init__(self, replicas: TensorflowReplicas):
        self._replicas = replicas
        self.bound = Variables([], [], [], [])  # the variables that were read last

    def read(self, variables: Variables) -> tuple[list, list, list]:
        """Return the values of (params, slots, buffers); the first two stay in their variables."""
        self.bound = variables
        return [], [], list(map(_value_of, variables.buffers))

    def values(self, variables: list) -> list:
        """Return the values of these variables."""
        return list(map(_value_of, variables))

    def captured(self, variables: list, state: State) -> list:
        """Return []: programs read variables that the trainer does not own themselves."""
        return []

    def params(self, state: State, apart: Collection[int] = ()) -> list:
        """Return the current parameters; those `apart` as variables, which are not read as a
        whole.
        """
        return [
            v.value if i in apart else tf.convert_to_tensor(v.value)
            for i, v in enumerate(self.bound.params)
        ]

    def replica_params(self, params: list) -> list:
        """Return the parameters of the replica that is being traced."""
        return (
            params
            if self._replicas.index is None
            else [tf.convert_to_tensor(v.value) for v in self.bound.params]
        )

    def are_current(self, variables: Variables, state: State) -> bool:
        """Return True: programs read the current values of the variables when they run."""
        return True

    def changed_outside(self, variables: list) -> list:
        """Return all variables: assignments by others are not visible."""
        return variables

    def between_programs(self, state: State) -> State:
        """Return the part of the state kept between programs: buffers stay in their variables."""
        return state._replace(buffers=[])

    def load_and_store(self, function: Callable, variables: Variables | None = None) -> Callable:
        """Return the function for a program that reads buffers from their variables, and writes
        them and metrics.

        Args:
            variables: those to write; then buffers are part of the state, and are not read. None:
                those read last.
        """
        # not in the call: an eager program is called after others were read
        bound = variables or self.bound

        def program(state: State, *given: Tree) -> tuple[State, Tree]:
            if variables is None:
                state = state._replace(
                    buffers=[tf.convert_to_tensor(v.value) for v in bound.buffers]
                )
            state, results = function(state, *given)
            self.assign(bound.buffers, state.buffers)
            self.assign(bound.metrics, state.metrics)
            return self.between_programs(state) if variables is None else state, results

        return program

    def write(self, variables: Variables, state: State) -> None:
        """Do nothing: the program has written the state to the Keras variables."""

    def assign(self, variables: list, values: list) -> None:
        """Write these values to these variables."""
        for variable, value in zip(variables, values, strict=True):
            variable.value.assign(value, read_value=False)

    def sharded(self, variables: list) -> list[str]:
        """Return []: every device holds all variables."""
        return []

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Return a context that restores the variables, as an eager step assigns them when it is
        called.
        """
        before = list(map(_value_of, self.bound.all))
        try:
            yield
        finally:
            self.assign(self.bound.all, before)


class TensorflowOptimizer:
    """The part `optimizer` of the engine on TensorFlow, which updates the variables in place."""

    # `keras.Model.fit` keeps the parameter values that the forward pass assigns
    keeps_assigned = True

    def __init__(
        self,
        optimizer: Optimizer | None,
        replicas: TensorflowReplicas,
        variables: TensorflowVariables,
    ):
        self.optimizer: Optimizer = optimizer
        self._replicas = replicas
        self._variables = variables
        # Traced once for all programs: batches of other shapes differ in the number of lookups
        # alone.
        self._apply: Callable | None = None

    def clipped(self, grads: list) -> list:
        """Return the gradients, dense, as the optimizer clips them."""
        given = _for_keras(grads, self._variables.bound.params)
        return list(map(tf.convert_to_tensor, clip(self.optimizer, given)))

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
        """Return `new` with one optimizer update applied where `ok`, to the `assigned` values; else
        `state`.
        """
        if twin is not None and touched:
            return self._apply_to_rows(state, new, grads, ok, assigned, touched, twin)

        def update() -> State:
            params = self._variables.bound.params
            for i, value in assigned.items():
                params[i].value.assign(value, read_value=False)
            given = _for_keras(grads, params)
            if self._replicas.is_split:
                self._replicas.apply(self.optimizer, given, params)
            elif tf.executing_eagerly():
                self.optimizer.apply(given, params)
            else:
                self._apply = self._apply or tf.function(
                    lambda grads: self.optimizer.apply(grads, params),
                    autograph=False,
                    reduce_retracing=True,
                )
                self._apply(given)
            return new

        return tf.cond(ok, update, lambda: state)

    def _apply_to_rows(
        self,
        state: State,
        new: State,
        grads: list,
        ok: Tensor,
        assigned: dict[int, Tensor],
        touched: Sequence[TableRows],
        twin: Optimizer,
    ) -> State:
        """Apply an update that changes only the `touched` rows of their tables, by an optimizer
        made for these rows.
        """
        params = self._variables.bound.params
        for i, value in assigned.items():
            whole = params[i].value
            whole.assign(tf.where(ok, value, whole), read_value=False)
        moves = []
        for table, rows, row_slots in touched:
            wholes = table.places(params, self.optimizer.variables)
            pairs = zip(
                wholes, table.places(trainable_variables(twin), twin.variables), strict=True
            )
            moves += [
                (whole[i].value, few[i].value, rows, row_slots) for (whole, i), (few, _) in pairs
            ]
        for whole, few, rows, _ in moves:
            few.assign(tf.gather(whole, rows))
        # Not a branch, which would copy the rows: with zero gradients such an optimizer changes
        # nothing.
        where_good = [_where(ok, grad) for grad in grads]
        few_params = trainable_variables(twin)
        twin.apply(_for_keras(where_good, few_params), few_params)
        twin.iterations.value.assign_sub(tf.cast(~ok, twin.iterations.dtype))
        for whole, few, rows, row_slots in moves:
            whole.scatter_update(tf.IndexedSlices(tf.gather(few, row_slots), rows))
        return tf.nest.map_structure(lambda n, o: n if n is o else tf.where(ok, n, o), new, state)


def _for_keras(grads: list, params: list) -> list:
    """Return gradients as `keras.Model.fit` hands them to an optimizer: those by lookups as
    `tf.IndexedSlices`.
    """
    return [
        _indexed(g, p) if isinstance(g, Slices) else g for g, p in zip(grads, params, strict=True)
    ]


def _indexed(grad: Slices, param: keras.Variable) -> tf.IndexedSlices:
    values = tf.concat(grad.values, 0)
    indices = tf.concat(grad.indices, 0)
    return tf.IndexedSlices(values, indices, tf.constant(tuple(param.shape), tf.int64))


def _where(ok: tf.Tensor, grad: Gradient) -> Gradient:
    """Return a gradient where `ok`, else zero."""
    values = grad.values if isinstance(grad, Slices) else grad
    values = tf.nest.map_structure(lambda value: tf.where(ok, value, tf.zeros_like(value)), values)
    return grad._replace(values=values) if isinstance(grad, Slices) else values


class TensorflowSteps:
    """The part `steps` of the engine on TensorFlow: functions of data, with Keras' signature, that
    assign variables.
    """

    def call(
        self,
        step: Callable,
        groups: Sequence[list],
        values: Sequence[list],
        num: int,
        data: Tree,
        note: Note,
    ) -> tuple[Tree, list[list]]:
        """Call a step; return its results, and the values of the groups that are passed as
        values.
        """
        carried = [(group, given) for group, given in zip(groups, values, strict=True) if given]
        for group, given in carried:
            for variable, value in zip(group, given, strict=True):
                variable.value.assign(value, read_value=False)
        found = step(data)
        after = zip(groups, values, strict=True)
        return found, [
            [tf.convert_to_tensor(v.value) for v in group] if given else []
            for group, given in after
        ]

    def attempt(
        self,
        function: Callable[[State], tuple[State, Tensor, Found]],
        state: State,
        variables: Variables,
    ) -> tuple[State, Tensor, Found]:
        """Return the results of (state) -> (state, is_good, results); unless good, restore state
        and variables.
        """
        held = [*variables.params, *variables.slots, *variables.buffers]
        before = [tf.convert_to_tensor(v.value) for v in held]
        new, ok, found = function(state)

        def go_back() -> tf.Tensor:
            pairs = zip([*held, *variables.metrics], [*before, *state.metrics], strict=True)
            for variable, value in pairs:
                variable.value.assign(value, read_value=False)
            return tf.constant(False)

        tf.cond(ok, lambda: tf.constant(True), go_back)
        return (
            tf.nest.map_structure(lambda n, o: n if n is o else tf.where(ok, n, o), new, state),
            ok,
            found,
        )


def _value_of(variable: keras.Variable) -> tf.Tensor:
    """Return the present value of a variable. Reading the resource takes a third of the time of
    `tf.identity`.
    """
    value = variable.value
    is_mirrored = isinstance(value, tf.distribute.DistributedValues)
    return (
        tf.identity(value)
        if is_mirrored
        else tf.raw_ops.ReadVariableOp(resource=value.handle, dtype=value.dtype)
    )


def as_function(step: Callable) -> Any:
    """Return a step as a function that is traced once for each shape, and creates variables in its
    first trace.
    """
    return step if hasattr(step, "get_concrete_function") else tf.function(step, autograph=False)


def make_variables(function: Any, batch: Tree) -> None:
    """Create the variables of a function for such a batch. Nothing is computed."""
    as_function(function).get_concrete_function(*specs_of((tree.map_leaves(tensor_of, batch),)))
