"""The engine on TensorFlow: placement of data, and the operations inside a program."""

import copy
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext

import keras
import numpy as np
import tensorflow as tf
from keras.optimizers import Optimizer

from wholestep import tree
from wholestep.engines.protocol import Engine
from wholestep.engines.strategy import Shares, find_replicas
from wholestep.engines.tensorflow_leaves import array_of, rows_of, tensor_of
from wholestep.engines.tensorflow_optimizer import TensorflowOptimizer
from wholestep.engines.tensorflow_programs import TensorflowPrograms, specs_of
from wholestep.engines.tensorflow_steps import TensorflowSteps
from wholestep.engines.tensorflow_words import TensorflowWords
from wholestep.processes import SingleProcess
from wholestep.state import State
from wholestep.tree import Tensor, Tree

_ONE_OF_SEVERAL = "loop_body"  # the scope in which tf.vectorized_map calls its function once, for all rows
_BODIES = "WhileBodyFuncGraph", "WhileCondFuncGraph", "CondBranchFuncGraph"  # called by the loop alone


class TensorflowEngine(TensorflowOptimizer, TensorflowPrograms, TensorflowSteps, TensorflowWords):
    """The methods of `wholestep.engines.protocol` on TensorFlow."""

    name = "tensorflow"
    is_eager = False
    freezes_reads = False  # a program reads variables anew whenever it runs
    closes_over = True  # a function's gradient is traced in the same graph as its value
    keeps_assigned = True  # `keras.Model.fit` keeps the parameter values that the forward pass assigns

    def __init__(
        self,
        optimizer: Optimizer | None,
        model: keras.Model | None,
        replicas: int | str | None,
        jit_compile: bool | str,
    ):
        mirrored = find_replicas(model, replicas)
        TensorflowOptimizer.__init__(self, optimizer, mirrored)
        TensorflowPrograms.__init__(self, model, mirrored, jit_compile)
        self.processes = SingleProcess()
        self.waits = 0

    @property
    def num_replicas(self) -> int:
        """The number of replicas that share the rows of a batch."""
        return 1 if self.replicas is None else self.replicas.count

    @property
    def own_replicas(self) -> list[int]:
        """The replicas whose rows this process must load: all."""
        return list(range(self.num_replicas))

    @property
    def is_split(self) -> bool:
        """Whether every replica sees its rows alone, rather than a part of a global array."""
        return self.num_replicas > 1

    @property
    def can_split(self) -> bool:
        """Whether replicas may fold their rows separately: they always do."""
        return self.is_split

    @property
    def coupling_layers(self) -> list:
        """The layers that couple the rows of all replicas."""
        return [] if self.replicas is None else self.replicas.syncing

    def for_evaluation(self) -> Engine:
        """Return an engine with the same variables for one device, where evaluation runs."""
        engine = copy.copy(self)
        engine.replicas = None
        return engine

    def sharded(self, variables: list) -> list[str]:
        """Return []: every device holds all variables."""
        return []

    # ---- Keras variables and values ----

    def params(self, state: State, apart: Collection[int] = ()) -> list:
        """Return the current parameters; those `apart` as variables, which are not read as a whole."""
        return [v.value if i in apart else tf.convert_to_tensor(v.value) for i, v in enumerate(self._variables)]

    def place(self, data: Tree) -> Tree:
        """Put host arrays on the device immediately."""
        return tree.map_leaves(tensor_of, data)

    def resident(self, data: Tree) -> Tree:
        """Put host arrays on the device; with several devices, on each."""
        if self.replicas is None:
            return self.place(data)
        put = self.replicas.put
        return tree.map_leaves(lambda leaf: put(lambda _: leaf), data)

    def staged(self, data: Tree) -> Tree:
        """Return host arrays in the form that is fastest for a program: on the device."""
        return self.place(data)

    def shard(self, data: Tree, shares: np.ndarray) -> Shares:
        """Put the rows of host arrays on the replicas that work on them: int (replicas, rows of a replica)."""
        assert self.replicas is not None
        put = self.replicas.put
        return Shares(tree.map_leaves(lambda leaf: put(lambda i: leaf[shares[i]]), data))

    def fetch(self, values: Tree) -> Tree:
        """Return device values as numpy. The only place that waits."""
        self.waits += 1
        return tree.map_leaves(array_of, values)

    def is_ready(self, values: Tree) -> bool:
        """Whether the values can be fetched without waiting: on a CPU, where calls return after the computation."""
        flat = tf.nest.flatten(values, expand_composites=True)
        return all("CPU" in leaf.device for leaf in flat if leaf is not None)

    # ---- inside a program ----

    def traced(self, function: Callable) -> Callable:
        """Return the function, traced once for each shape of its arguments."""
        if self.replicas is not None:  # replicas cannot communicate from inside a nested function
            return function
        return tf.function(function, autograph=False)

    def inlined(self, function: Callable) -> Callable:
        """Return a traced function's Python function, to be traced inline if its gradient is taken.

        Constants of the gradient (the axes of a transposition) would come out of a nested function as values, and XLA
        would compile anew for each value.
        """
        return getattr(function, "python_function", function)

    def frame(self) -> object:
        """Return the identity of the current trace, which is another one in the body of a loop."""
        return tf.compat.v1.get_default_graph()

    def is_traced_in(self, frame: object, value: Tensor) -> bool:
        """Whether `frame` is being traced, and not for one row under `tf.vectorized_map`."""
        scopes = tf.get_current_name_scope().split("/")
        return self.frame() is frame and not any(scope.startswith(_ONE_OF_SEVERAL) for scope in scopes)

    def is_kept(self, frame: object) -> bool:
        """Whether a `tf.function` is being traced inside a frame: later it may be called from anywhere."""
        graph, is_kept = self.frame(), False
        while graph is not frame and graph is not None:
            is_kept |= type(graph).__name__ not in _BODIES
            graph = getattr(graph, "outer_graph", None)
        return is_kept and graph is not None

    def tracing_anew(self) -> AbstractContextManager:
        """Return an empty context: every `tf.function` keeps its traces for all callers."""
        return nullcontext()

    def shapes(self, function: Callable, *arguments: Tree) -> Tree:
        """Return the shapes and dtypes of a traced function's results."""
        traced = function if hasattr(function, "get_concrete_function") else tf.function(function, autograph=False)
        return traced.get_concrete_function(*specs_of(arguments)).structured_outputs

    def gather(self, data: Tree, rows: Tensor) -> Tree:
        """Return these rows of every leaf; row numbers are in range."""
        return tree.map_leaves(lambda leaf: rows_of(leaf, rows), data)

    def batch(self, data: Tree, rows: Tensor) -> Tree:
        """Return the rows of a (micro)batch, and to a replica its part; for `Shares`, `rows` index the shares."""
        if self.replicas is None:
            return self.gather(data, rows)
        if self.replicas.index is None:
            return self.replicas.gather(data, rows)
        return self.gather(data.leaves if isinstance(data, Shares) else data, self.replica_slice(rows))

    def replica_slice(self, rows: Tensor) -> Tensor:
        """Return the part of a vector over a (micro)batch that belongs to the rows that `batch` returns."""
        return rows if self.replicas is None else rows[self.replicas.part(rows.shape[0])]

    def replica_start(self, size: int) -> int:
        """Return the index of the first row that `batch` returns of a (micro)batch of `size` rows."""
        return 0 if self.replicas is None else self.replicas.part(size).start

    def replica_params(self, params: list) -> list:
        """Return the parameters of the replica that is being traced."""
        if self.replicas is None or self.replicas.index is None:
            return params
        return [tf.convert_to_tensor(v.value) for v in self._variables]

    def total(
        self, function: Callable, data: Tree, carried: Tree, given: Tree, *, split: bool, syncs: bool
    ) -> tuple[Tree, Tree, Tree]:
        """Run (data, carried, given) -> (sums, carried, alike) on every replica, and return the totals.

        With `syncs`, BatchNormalization computes its statistics over all replicas.
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

        if num == 1 or self.coupling_layers:  # replicas cannot communicate from inside a loop
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


def _set(all: tf.Tensor, i: Tensor, one: tf.Tensor) -> tf.Tensor:
    """Return an array with part i replaced."""
    return tf.tensor_scatter_nd_update(all, [[i]], [one])


def _dense(grad: tf.Tensor | tf.IndexedSlices, param: tf.Tensor) -> tf.Tensor:
    """Return a gradient as a dense tensor; a sparse one gets the table's static shape.

    `tf.convert_to_tensor` reads the shape at run time. XLA needs a constant, and would compile anew for every value of
    the parameters on which the shape seems to depend.
    """
    if isinstance(grad, tf.IndexedSlices):
        return tf.math.unsorted_segment_sum(grad.values, grad.indices, param.shape[0])
    return tf.convert_to_tensor(grad)
