"""The engine on TensorFlow: parameters and slots are updated in place, everything else is a value."""

import copy
import warnings
from collections.abc import Callable, Collection

import keras
import numpy as np
import tensorflow as tf
from keras.optimizers import Optimizer

from wholestep import tree
from wholestep.embeddings.tables import TableRows
from wholestep.engines.protocol import Engine
from wholestep.engines.strategy import Shares, find_replicas
from wholestep.engines.tensorflow_variables import TensorflowVariables
from wholestep.engines.xla import FlatCall, choose_xla, is_not_for_xla
from wholestep.processes.single import SingleProcess
from wholestep.state import State
from wholestep.tree import Tensor, Tree

_ONE_OF_SEVERAL = "loop_body"  # the scope in which tf.vectorized_map calls its function once, for all rows


class TensorflowEngine(TensorflowVariables):
    """The verbs of `wholestep.engines.protocol` on TensorFlow."""

    name = "tensorflow"
    freezes_reads = False  # a program reads variables anew whenever it runs
    keeps_assigned = True  # `keras.Model.fit` keeps what the forward pass assigns to a parameter

    def __init__(
        self,
        optimizer: Optimizer | None,
        model: keras.Model | None,
        replicas: int | str | None,
        jit_compile: bool | str,
    ):
        super().__init__()
        self.optimizer: Optimizer = optimizer
        self.replicas = find_replicas(model, replicas)
        self.processes = SingleProcess()
        self.waits = 0
        self.compilations = 0
        self.always_xla, self._why_no_xla = choose_xla(model, jit_compile)
        self._with_xla: list = []

    @property
    def num_replicas(self) -> int:
        """How many replicas share the rows of a batch."""
        return 1 if self.replicas is None else self.replicas.count

    @property
    def own_replicas(self) -> list[int]:
        """The replicas whose rows this process must load: all."""
        return list(range(self.num_replicas))

    @property
    def is_split(self) -> bool:
        """Whether every replica sees its own rows alone, rather than its part of an array of all."""
        return self.num_replicas > 1

    @property
    def can_split(self) -> bool:
        """Whether replicas may fold their own rows: they always do."""
        return self.is_split

    @property
    def coupling_layers(self) -> list:
        """The layers that couple rows, but over the rows of all replicas."""
        return [] if self.replicas is None else self.replicas.syncing

    def for_evaluation(self) -> Engine:
        """Return an engine of the same variables for one device: evaluation runs there."""
        engine = copy.copy(self)
        engine.replicas = None
        return engine

    def sharded(self, variables: list) -> list[str]:
        """Return which variables no device holds whole: none."""
        return []

    @property
    def loops_once(self) -> bool:
        """Whether single updates are compiled as a loop: where XLA is wanted, it takes nothing else."""
        return self.always_xla

    # ---- Keras variables and values ----

    def params(self, state: State, apart: Collection[int] = ()) -> list:
        """Return the parameters as they are now; those `apart` as variables, which are not read as a whole."""
        return [v.value if i in apart else tf.convert_to_tensor(v.value) for i, v in enumerate(self._variables)]

    def place(self, data: Tree) -> Tree:
        """Put host arrays on the device, at once."""
        return tree.map_leaves(tf.convert_to_tensor, data)

    def resident(self, data: Tree) -> Tree:
        """Put host arrays on the device, on each of several."""
        if self.replicas is None:
            return self.place(data)
        put = self.replicas.put
        return tree.map_leaves(lambda leaf: put(lambda _: leaf), data)

    def staged(self, data: Tree) -> Tree:
        """Return host arrays in the form that a program takes soonest."""
        return self.place(data)

    def shard(self, data: Tree, shares: np.ndarray) -> Shares:
        """Put the rows of host arrays on the replicas that work on them: int (replicas, rows of a replica)."""
        assert self.replicas is not None
        put = self.replicas.put
        return Shares(tree.map_leaves(lambda leaf: put(lambda i: leaf[shares[i]]), data))

    def fetch(self, values: Tree) -> Tree:
        """Return device values as numpy. The only place that waits."""
        self.waits += 1
        return tree.map_leaves(np.asarray, values)

    def is_ready(self, values: Tree) -> bool:
        """Whether to fetch the values would not wait: on the host, where programs end before they return."""
        return all("CPU" in leaf.device for leaf in tree.leaves(values))

    # ---- inside a program ----

    def traced(self, function: Callable) -> Callable:
        """Return the function, traced once for each shape of its arguments, wherever it is called."""
        if self.replicas is not None:  # a replica cannot talk to the others from inside of another function
            return function
        return tf.function(function, autograph=False)

    def inlined(self, function: Callable) -> Callable:
        """Return a traced function to be traced where it is called, as one must be whose gradient is taken.

        What the gradient needs as a constant (the axes of a transposition) would come out of a function of its own as a
        value, and XLA would compile anew for each value.
        """
        return getattr(function, "python_function", function)

    def frame(self) -> object:
        """Return what stands for the function that is being traced, or the body of a loop in it."""
        return tf.compat.v1.get_default_graph()

    def is_traced_in(self, frame: object, value: Tensor) -> bool:
        """Whether `frame` is being traced, and a value is one of its own, not of a row that stands for several."""
        scopes = tf.get_current_name_scope().split("/")
        return self.frame() is frame and not any(scope.startswith(_ONE_OF_SEVERAL) for scope in scopes)

    def shapes(self, function: Callable, *arguments: Tree) -> Tree:
        """Return shapes and dtypes of what a traced function would return."""
        traced = function if hasattr(function, "get_concrete_function") else tf.function(function, autograph=False)
        return traced.get_concrete_function(*_specs(arguments)).structured_outputs

    def gather(self, data: Tree, rows: Tensor) -> Tree:
        """Return these rows of every leaf; row numbers are in range."""
        return tree.map_leaves(lambda leaf: tf.gather(leaf, rows), data)

    def batch(self, data: Tree, rows: Tensor) -> Tree:
        """Return the rows of a (micro)batch, of a replica its part; of shares, by their places in them."""
        if self.replicas is None:
            return self.gather(data, rows)
        if self.replicas.index is None:
            return self.replicas.gather(data, rows)
        return self.gather(data.leaves if isinstance(data, Shares) else data, self.replica_slice(rows))

    def replica_slice(self, rows: Tensor) -> Tensor:
        """Return of a vector over the rows of a (micro)batch what belongs to the rows that `batch` returns."""
        return rows if self.replicas is None else rows[self.replicas.part(rows.shape[0])]

    def replica_start(self, size: int) -> int:
        """Return the place of the first row of so many that `batch` returns."""
        return 0 if self.replicas is None else self.replicas.part(size).start

    def replica_params(self, params: list) -> list:
        """Return the parameters as the replica that is being traced has them."""
        if self.replicas is None or self.replicas.index is None:
            return params
        return [tf.convert_to_tensor(v.value) for v in self._variables]

    def total(
        self, function: Callable, data: Tree, carried: Tree, given: Tree, *, split: bool, syncs: bool
    ) -> tuple[Tree, Tree, Tree]:
        """Run (data, carried, given) -> (sums, carried, alike) on every replica, and return the totals.

        Where it `syncs`, BatchNormalization takes its statistics over all replicas.
        """
        if not split or self.replicas is None:
            return function(data, carried, given)
        return self.replicas.total(lambda data, carried: function(data, carried, given), data, carried, syncs)

    def lookup(self, table: Tensor, places: Tensor) -> Tensor:
        """Return these rows of a table; NaN for places beyond the last."""
        num = table.shape[0]
        rows = tf.gather(table, tf.minimum(places, num - 1))
        return tf.where(places[:, None] < num, rows, tf.constant(float("nan"), rows.dtype))

    def differentiate(self, function: Callable, params: list) -> tuple[list, Tree]:
        """Return (gradients, auxiliary) of a function params -> (scalar, auxiliary)."""
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(params)
            value, auxiliary = function(params)
        grads = tape.gradient(value, params, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        return [_dense(g, p) for g, p in zip(grads, params, strict=True)], auxiliary

    def fold(self, function: Callable, carry: Tree, pieces: Tree, num: int) -> Tree:
        """Return function(... function(carry, piece 0) ..., piece num-1); pieces have a leading axis of length num."""

        def body(i: Tensor, carry: Tree) -> tuple:
            return i + 1, function(carry, tf.nest.map_structure(lambda leaf: leaf[i], pieces))

        if num == 1 or self.coupling_layers:  # replicas cannot talk to each other from inside of a loop
            for i in range(num):
                _, carry = body(i, carry)
            return carry
        return tf.while_loop(lambda i, _: i < num, body, (tf.constant(0), carry), parallel_iterations=1)[1]

    def repeat(self, function: Callable, num: Tensor, state: State, reports: Tree) -> tuple[State, Tree]:
        """Call (i, state) -> (state, report) for i < num, as long as the state is not stopped; keep the reports."""

        def body(i: Tensor, state: State, reports: Tree) -> tuple:
            state, report = function(i, state)
            return i + 1, state, tf.nest.map_structure(lambda all, one: _set(all, i, one), reports, report)

        def goes_on(i: Tensor, state: State, _: Tensor) -> Tensor:
            return (i < num) & (state.stopped == 0)

        return tf.while_loop(goes_on, body, (tf.constant(0), state, reports), parallel_iterations=1)[1:]

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

    # ---- programs ----

    def compile(self, function: Callable, examples: tuple, *, spends: bool = True, repeats: bool = False) -> Callable:
        """Compile the function for arguments such as `examples`; with XLA if it repeats a step many times.

        XLA takes seconds to compile and then halves the time of small steps. The choice depends on the program alone,
        never on a measurement: the same program must give the same bits again.

        Args:
            repeats: whether the function repeats a step as often as its last argument says, which is 0 in `examples`:
                then calling it compiles it, and does nothing.
        """
        self.compilations += 1
        specs = _specs(examples)
        graph = tf.function(function, autograph=False).get_concrete_function(*specs)
        if self.replicas is not None:
            return graph
        if not repeats or self._why_no_xla:
            return FlatCall(graph)
        if not self.always_xla and is_not_for_xla(graph):
            return FlatCall(graph)
        try:
            again = tf.function(lambda *given: graph(*given), autograph=False, jit_compile=True)  # not traced anew
            compiled = again.get_concrete_function(*specs)
            compiled(*examples)
        except (tf.errors.OpError, ValueError, NotImplementedError) as error:
            self._why_no_xla = f"XLA cannot compile it ({str(error).strip().splitlines()[0][:160]})"
            if self.always_xla:
                warnings.warn(f"jit_compile=True has no effect: {self._why_no_xla}.", UserWarning, stacklevel=2)
            return FlatCall(graph)
        self._with_xla.append(FlatCall(compiled))
        return self._with_xla[-1]

    def describe(self, program: Callable) -> str:
        """Return how a program is carried out, in plain words."""
        if any(program is compiled for compiled in self._with_xla):
            return "XLA compiles it."
        return f"TensorFlow runs it without XLA: {self._why_no_xla}." if self._why_no_xla else ""

    def memory(self, program: Callable) -> int | None:
        """Return None: TensorFlow does not tell what a program needs before it runs."""
        return None

    def device_bytes(self) -> int | None:
        """Return the device's own memory; None where it is the host's."""
        return None

    def loops_slowly(self, function: Callable, *arguments: Tree) -> bool:
        """Whether the function should not run inside a compiled loop: nothing known here."""
        return False


def _set(all: tf.Tensor, i: Tensor, one: tf.Tensor) -> tf.Tensor:
    """Return an array with another part i."""
    return tf.tensor_scatter_nd_update(all, [[i]], [one])


def _bits(value: tf.Tensor) -> tf.Tensor:
    """Return the bits of floats as integers of their size, without the sign: infinity is above all that is finite."""
    whole = {2: tf.int16, 4: tf.int32, 8: tf.int64}[value.dtype.size]
    return tf.bitwise.bitwise_and(tf.bitcast(value, whole), whole.max)


def _largest_bits(value: tf.Tensor) -> tf.Tensor:
    """Return the largest of the bits. The largest of the numbers would not do: XLA leaves out NaN there.

    Truth values would do, but XLA takes several times as long to reduce them.
    """
    return tf.reduce_max(_bits(value))


def _dense(grad: tf.Tensor | tf.IndexedSlices, param: tf.Tensor) -> tf.Tensor:
    """Return a gradient as a tensor; that of a table in the table's static shape.

    `tf.convert_to_tensor` asks for the shape at run time. XLA needs it as a constant, and compiles anew for every value
    of the parameters that it seems to depend on.
    """
    if isinstance(grad, tf.IndexedSlices):
        return tf.math.unsorted_segment_sum(grad.values, grad.indices, param.shape[0])
    return tf.convert_to_tensor(grad)


def _specs(arguments: Tree) -> Tree:
    def spec(value: Tensor | None) -> tf.TypeSpec | None:
        if value is None:
            return None
        if isinstance(value, tf.distribute.DistributedValues):
            return value._type_spec
        return tf.TensorSpec(value.shape, tf.as_dtype(value.dtype))

    return tf.nest.map_structure(spec, arguments)
