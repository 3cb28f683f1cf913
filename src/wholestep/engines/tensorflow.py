"""The engine on TensorFlow: how data come to the devices, and what is done with them there."""

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
from wholestep.processes.single import SingleProcess
from wholestep.state import State
from wholestep.tree import Tensor, Tree

_ONE_OF_SEVERAL = "loop_body"  # the scope in which tf.vectorized_map calls its function once, for all rows
_BODIES = "WhileBodyFuncGraph", "WhileCondFuncGraph", "CondBranchFuncGraph"  # which nobody calls but the loop


class TensorflowEngine(TensorflowOptimizer, TensorflowPrograms, TensorflowSteps, TensorflowWords):
    """The verbs of `wholestep.engines.protocol` on TensorFlow."""

    name = "tensorflow"
    is_eager = False
    freezes_reads = False  # a program reads variables anew whenever it runs
    closes_over = True  # a function's gradient is traced where its value is
    keeps_assigned = True  # `keras.Model.fit` keeps what the forward pass assigns to a parameter

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

    # ---- Keras variables and values ----

    def params(self, state: State, apart: Collection[int] = ()) -> list:
        """Return the parameters as they are now; those `apart` as variables, which are not read as a whole."""
        return [v.value if i in apart else tf.convert_to_tensor(v.value) for i, v in enumerate(self._variables)]

    def place(self, data: Tree) -> Tree:
        """Put host arrays on the device, at once."""
        return tree.map_leaves(tensor_of, data)

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
        return tree.map_leaves(array_of, values)

    def is_ready(self, values: Tree) -> bool:
        """Whether to fetch the values would not wait: on the host, where programs end before they return."""
        flat = tf.nest.flatten(values, expand_composites=True)
        return all("CPU" in leaf.device for leaf in flat if leaf is not None)

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

    def is_kept(self, frame: object) -> bool:
        """Whether a `tf.function` is being traced inside of a frame: it may be called from anywhere afterwards."""
        graph, is_kept = self.frame(), False
        while graph is not frame and graph is not None:
            is_kept |= type(graph).__name__ not in _BODIES
            graph = getattr(graph, "outer_graph", None)
        return is_kept and graph is not None

    def tracing_anew(self) -> AbstractContextManager:
        """Return a context that changes nothing: every `tf.function` keeps its traces, whoever asked for them."""
        return nullcontext()

    def shapes(self, function: Callable, *arguments: Tree) -> Tree:
        """Return shapes and dtypes of what a traced function would return."""
        traced = function if hasattr(function, "get_concrete_function") else tf.function(function, autograph=False)
        return traced.get_concrete_function(*specs_of(arguments)).structured_outputs

    def gather(self, data: Tree, rows: Tensor) -> Tree:
        """Return these rows of every leaf; row numbers are in range."""
        return tree.map_leaves(lambda leaf: rows_of(leaf, rows), data)

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


def _set(all: tf.Tensor, i: Tensor, one: tf.Tensor) -> tf.Tensor:
    """Return an array with another part i."""
    return tf.tensor_scatter_nd_update(all, [[i]], [one])


def _dense(grad: tf.Tensor | tf.IndexedSlices, param: tf.Tensor) -> tf.Tensor:
    """Return a gradient as a tensor; that of a table in the table's static shape.

    `tf.convert_to_tensor` asks for the shape at run time. XLA needs it as a constant, and compiles anew for every value
    of the parameters that it seems to depend on.
    """
    if isinstance(grad, tf.IndexedSlices):
        return tf.math.unsorted_segment_sum(grad.values, grad.indices, param.shape[0])
    return tf.convert_to_tensor(grad)
