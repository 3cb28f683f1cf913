"""The engine on TensorFlow: programs are traced functions, which XLA compiles where it is
faster.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import keras
import tensorflow as tf
from keras.optimizers import Optimizer

from wholestep.engines.protocol import Carried, Compiled, Engine, Found, Function, Programs
from wholestep.engines.shared import EagerPrograms
from wholestep.engines.tensorflow_devices import (
    TensorflowDevices,
    TensorflowReplicas,
    find_replicas,
    gather,
    specs_of,
)
from wholestep.engines.tensorflow_variables import (
    TensorflowOptimizer,
    TensorflowSteps,
    TensorflowVariables,
    as_function,
)
from wholestep.errors import warn
from wholestep.keras_private import flatten_layers, resolve_auto_jit
from wholestep.processes import SingleProcess
from wholestep.slices import Slices
from wholestep.state import State
from wholestep.tree import Tensor, Tree

# the scope in which tf.vectorized_map calls its function once, for all rows
_ONE_OF_SEVERAL = "loop_body"
# called by the loop alone
_BODIES = "WhileBodyFuncGraph", "WhileCondFuncGraph", "CondBranchFuncGraph"
# XLA's convolutions on CPU are many times slower than TensorFlow's (measured: 20x); sizes that
# depend on values fail in the middle of a run; operations in Python cannot be judged by the graph.
# All others are compiled on trial.
_NOT_FOR_XLA = ("Conv", "Depthwise", "Unique", "Where", "PyFunc", "EagerPyFunc")


def make_engine(
    optimizer: Optimizer | None,
    model: keras.Model | None,
    replicas: int | str | None,
    jit_compile: bool | str,
    *,
    is_eager: bool,
) -> Engine:
    """Return the engine on TensorFlow; an eager one has one device, and no `tf.function`."""
    several = find_replicas(model, replicas)
    variables = TensorflowVariables(several)

    def engine(replicas: TensorflowReplicas, evaluation: Engine | None) -> Engine:
        programs: Programs = TensorflowPrograms(model, replicas, jit_compile)
        return Engine(
            variables=variables,
            optimizer=TensorflowOptimizer(optimizer, replicas, variables),
            steps=TensorflowSteps(),
            programs=EagerPrograms(variables.undone) if is_eager else programs,
            traces=TensorflowTraces(),
            ops=TensorflowOperations(replicas),
            random=TensorflowRandom(),
            devices=TensorflowDevices(replicas),
            replicas=replicas,
            processes=SingleProcess(),
            evaluation=evaluation,
        )

    return engine(several, engine(TensorflowReplicas(), None))  # evaluation runs on one device


class TensorflowPrograms:
    """The part `programs` of the engine on TensorFlow.

    Args:
        model: the model, whose layers and `compile` may rule out XLA; None if there is none.
        jit_compile: whether the user wants XLA; "auto" leaves the choice to the program.
    """

    is_eager = False

    def __init__(
        self, model: keras.Model | None, replicas: TensorflowReplicas, jit_compile: bool | str
    ):
        self._is_split = replicas.is_split
        self.always_xla, self.why_no_xla = choose_xla(model, jit_compile)
        self.loops_once = self.always_xla  # XLA compiles loops only

    def compile(
        self, function: Callable, examples: tuple, *, spends: bool = True, repeats: bool = False
    ) -> Compiled:
        """Compile the function for arguments such as `examples`; with XLA if it repeats a step many
        times.

        XLA takes seconds to compile and then halves the time of small steps. The choice depends on
        the program alone, never on a measurement: the same program must give the same bits again.
        If it `repeats`, the last argument is the number of repetitions, 0 in `examples`: a call
        with them only compiles.
        """
        specs = specs_of(examples)
        graph = tf.function(function, autograph=False).get_concrete_function(*specs)
        if not repeats or self.why_no_xla or self._is_split:
            return self._without_xla(graph)
        if why := _why_not_for_xla(graph, specs):
            return self._without_xla(graph, why)
        if not self.always_xla and _is_not_for_xla(graph):
            return self._without_xla(graph)
        try:
            # not traced anew
            again = tf.function(lambda *given: graph(*given), autograph=False, jit_compile=True)
            compiled = again.get_concrete_function(*specs)
            compiled(*examples)
        except (tf.errors.OpError, ValueError, NotImplementedError) as error:
            why = f"XLA cannot compile it ({str(error).strip().splitlines()[0][:160]})"
            return self._without_xla(graph, why)
        return Compiled(FlatCall(compiled), how="XLA compiles it.")

    def _without_xla(
        self, graph: tf.types.experimental.ConcreteFunction, why: str = ""
    ) -> Compiled:
        if why and self.always_xla:
            warn(f"jit_compile=True has no effect: {why}.")
        self.why_no_xla = why or self.why_no_xla
        how = f"TensorFlow runs it without XLA: {self.why_no_xla}." if self.why_no_xla else ""
        return Compiled(graph if self._is_split else FlatCall(graph), how=how)

    def loops_slowly(self, function: Callable, *arguments: Tree) -> bool:
        """Return False: no function is known to be slower inside a compiled loop."""
        return False

    def traced(self, function: Function) -> Function:
        """Return the function, traced once for each shape of its arguments."""
        if self._is_split:  # replicas cannot communicate from inside a nested function
            return function
        return tf.function(function, autograph=False)

    def inlined(self, function: Function) -> Function:
        """Return a traced function's Python function, to be traced inline if its gradient is taken.

        Constants of the gradient (the axes of a transposition) would come out of a nested function
        as values, and XLA would compile anew for each value.
        """
        return getattr(function, "python_function", function)

    def shapes(self, function: Callable[..., Found], *arguments: Tree) -> Found:
        """Return the shapes and dtypes of a traced function's results."""
        return as_function(function).get_concrete_function(*specs_of(arguments)).structured_outputs


class TensorflowTraces:
    """The part `traces` of the engine on TensorFlow."""

    freezes_reads = False  # a program reads variables anew whenever it runs
    closes_over = True  # a function's gradient is traced in the same graph as its value

    def frame(self, value: Tensor | None = None) -> object:
        """Return the identity of the current trace: another one in a loop's body, or for one row of
        a map.
        """
        scopes = () if value is None else tf.get_current_name_scope().split("/")
        is_one = any(scope.startswith(_ONE_OF_SEVERAL) for scope in scopes)
        return object() if is_one else tf.compat.v1.get_default_graph()

    def is_kept(self, frame: object) -> bool:
        """Whether a `tf.function` is being traced inside a frame: later it may be called from
        anywhere.
        """
        graph = self.frame()
        is_kept = False
        while graph is not frame and graph is not None:
            is_kept |= type(graph).__name__ not in _BODIES
            graph = getattr(graph, "outer_graph", None)
        return is_kept and graph is not None

    def tracing_anew(self) -> AbstractContextManager:
        """Return an empty context: every `tf.function` keeps its traces for all callers."""
        return nullcontext()


class TensorflowOperations:
    """The part `ops` of the engine on TensorFlow."""

    has_slices = True
    gather = staticmethod(gather)

    def __init__(self, replicas: TensorflowReplicas):
        self._unrolls = bool(replicas.coupling_layers)  # no communication from inside a loop

    def differentiate(
        self,
        function: Callable[[list], tuple[Tensor, Found]],
        params: list,
        *,
        slices: bool = False,
    ) -> tuple[list, Found]:
        """Return (gradients, auxiliary) of a function params -> (scalar, auxiliary).

        With `slices`, the gradient of a parameter whose rows are only looked up is one of lookups.
        If it is used in another way too, TensorFlow makes it dense.
        """
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(params)
            value, auxiliary = function(params)
        grads = tape.gradient(value, params, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        as_found = _slices if slices else _dense
        return [as_found(g, p) for g, p in zip(grads, params, strict=True)], auxiliary

    def fold(
        self, function: Callable[[Carried, Any], Carried], carry: Carried, pieces: Tree, num: int
    ) -> Carried:
        """Return function(... function(carry, piece 0) ..., piece num-1); pieces have a leading
        axis of length num.
        """

        def body(i: Tensor | int, carry: Carried) -> tuple:
            return i + 1, function(carry, tf.nest.map_structure(lambda leaf: leaf[i], pieces))

        if num == 1 or self._unrolls:
            for i in range(num):
                _, carry = body(i, carry)
            return carry
        return tf.while_loop(
            lambda i, _: i < num, body, (tf.constant(0), carry), parallel_iterations=1
        )[1]

    def repeat(
        self,
        function: Callable[[Any, State], tuple[State, Found]],
        num: Tensor,
        state: State,
        reports: Found,
    ) -> tuple[State, Found]:
        """Call (i, state) -> (state, report) for i < num, as long as the state is not stopped; keep
        the reports.
        """

        def body(i: Tensor, state: State, reports: Tree) -> tuple:
            state, report = function(i, state)
            return (
                i + 1,
                state,
                tf.nest.map_structure(lambda all, one: _set(all, i, one), reports, report),
            )

        def goes_on(i: Tensor, state: State, _: Tensor) -> Tensor:
            return (i < num) & (state.stopped == 0)

        return tf.while_loop(
            goes_on, body, (tf.constant(0), state, reports), parallel_iterations=1
        )[1:]

    def lookup(self, table: Tensor, places: Tensor) -> Tensor:
        """Return these rows of a table; NaN for places beyond the last."""
        num = table.shape[0]
        rows = tf.gather(table, tf.minimum(places, num - 1))
        return tf.where(places[:, None] < num, rows, tf.constant(float("nan"), rows.dtype))

    def is_finite(self, values: list) -> Tensor:
        """Return whether all values are finite."""
        if not values:
            return tf.constant(True)
        return tf.reduce_all(tf.stack([tf.reduce_all(tf.math.is_finite(v)) for v in values]))


def _set(all: tf.Tensor, i: Tensor, one: tf.Tensor) -> tf.Tensor:
    """Return an array with part i replaced."""
    return tf.tensor_scatter_nd_update(all, [[i]], [one])


def _dense(grad: tf.Tensor | tf.IndexedSlices, param: tf.Tensor) -> tf.Tensor:
    """Return a gradient as a dense tensor; a sparse one gets the table's static shape.

    `tf.convert_to_tensor` reads the shape at run time. XLA needs a constant, and would compile anew
    for every value of the parameters on which the shape seems to depend.
    """
    if isinstance(grad, tf.IndexedSlices):
        return tf.math.unsorted_segment_sum(grad.values, grad.indices, param.shape[0])
    return tf.convert_to_tensor(grad)


def _slices(grad: tf.Tensor | tf.IndexedSlices, param: tf.Tensor) -> tf.Tensor | Slices:
    """Return a gradient by lookups as `Slices`; any other unchanged.

    TensorFlow concatenates those of several lookups. In a graph they are taken before it, so that
    the lookups of a cut batch have the order of the full batch. Eagerly all count as one lookup:
    sums may differ by rounding, and a cut is refused where one of them grows with the rows and
    another does not.
    """
    if not isinstance(grad, tf.IndexedSlices):
        return _dense(grad, param)
    parts = [_before_concatenation(part) for part in (grad.values, grad.indices)]
    return (
        Slices(*parts)
        if len(parts[0]) == len(parts[1])
        else Slices((grad.values,), (grad.indices,))
    )


def _before_concatenation(value: tf.Tensor) -> tuple[tf.Tensor, ...]:
    if tf.is_symbolic_tensor(value) and value.op.type == "ConcatV2":
        return tuple(value.op.inputs)[:-1]
    return (value,)


# ---- the choice of XLA, and the call of programs ----


def choose_xla(model: keras.Model | None, asked: bool | str) -> tuple[bool, str]:
    """Return (whether every program must be compiled by XLA, why none may be); (False, "") to try
    each program.
    """
    if model is not None and not all(layer.supports_jit for layer in flatten_layers(model)()):
        return False, "a layer does not support XLA (supports_jit=False)"
    if model is not None and asked == "auto" and getattr(model, "compiled", False):
        if model.jit_compile:
            return True, ""
        # Keras resolves "auto" in `compile` already: without a GPU to False, which is then not the
        # user's choice.
        asked = "auto" if not resolve_auto_jit(model)() else False
    return asked is True, "" if asked else "jit_compile=False"


def _is_not_for_xla(graph: tf.types.experimental.ConcreteFunction) -> bool:
    """Whether a traced function holds an operation for which XLA is known to be slow or to fail."""
    definition = graph.graph.as_graph_def()
    functions = [node for function in definition.library.function for node in function.node_def]
    return any(node.op.startswith(_NOT_FOR_XLA) for node in [*definition.node, *functions])


def _why_not_for_xla(graph: tf.types.experimental.ConcreteFunction, specs: Tree) -> str:
    """Return why XLA cannot compile a traced function of such arguments; "" if it may."""
    leaves = [spec for spec in tf.nest.flatten(specs) if spec is not None]
    if any(isinstance(spec, tf.RaggedTensorSpec) for spec in leaves):
        return "it takes ragged rows, whose lengths are not static"
    if any(getattr(spec, "dtype", None) == tf.string for spec in leaves):
        return "it takes text, which XLA does not support"
    for function in graph.graph.as_graph_def().library.function:
        # A length that a loop pops off another list, as in the gradient of a second recurrent
        # layer: XLA would say so in hundreds of lines of TensorFlow's log.
        kinds = {node.name: node.op for node in function.node_def}
        reserves = (node for node in function.node_def if node.op == "TensorListReserve")
        if any(
            kinds.get(node.input[1].partition(":")[0]) == "TensorListPopBack" for node in reserves
        ):
            return (
                "XLA cannot compile it (the gradient of a loop makes lists whose length is not "
                "known)"
            )
    return ""


class FlatCall:
    """A traced function that is called with its flat tensors.

    TensorFlow's handling of nested arguments takes as long as a small update at every call.

    >>> function = tf.function(lambda pair: {"sum": pair[0] + pair[1]})
    >>> traced = function.get_concrete_function((tf.TensorSpec(()), tf.TensorSpec(())))
    >>> float(FlatCall(traced)((tf.constant(1.0), tf.constant(2.0)))["sum"])
    3.0
    """

    def __init__(self, traced: tf.types.experimental.ConcreteFunction):
        self.traced = traced
        self._function = traced.inference_fn
        self._captured = traced.captured_inputs
        given = tf.nest.flatten(traced.structured_input_signature)
        self._has_ragged = any(isinstance(spec, tf.RaggedTensorSpec) for spec in given)
        results = traced.structured_outputs
        # Keras packs trees 20 times as fast; it can be used only if it orders the leaves alike.
        is_same = all(
            one is two
            for one, two in zip(keras.tree.flatten(results), tf.nest.flatten(results), strict=True)
        )
        self._pack = partial((keras.tree if is_same else tf.nest).pack_sequence_as, results)

    def __call__(self, *arguments: Tree) -> Tree:
        """Return the function's results, in their nesting."""
        flat = tf.nest.flatten(arguments, expand_composites=self._has_ragged)
        tensors = [tensor for tensor in flat if tensor is not None]
        return self._pack(self._function.call_flat(*tensors, *self._captured))


_PHILOX = 1


class TensorflowRandom:
    """The part `random` of the engine on TensorFlow."""

    shuffles_slices = True  # `keras.random.shuffle` moves whole slices: all rows in one order

    def words(
        self, seed: Tensor, stream: Tensor | int, first: Tensor | int, num_rows: int, num_words: int
    ) -> Tensor:
        """Return the words of each row by its place: (rows, words), by Philox-4x32-10, see
        `jax_random`.
        """
        num = -(-num_words // 4)
        one, two = tf.unstack(tf.bitwise.bitwise_and(tf.cast(seed, tf.int64), 0xFFFFFFFF))
        key = tf.bitwise.bitwise_or(one, tf.bitwise.left_shift(two, tf.constant(32, tf.int64)))
        counter = tf.stack([tf.cast(first, tf.int64) * num, tf.cast(stream, tf.int64)])
        drawn = tf.raw_ops.StatelessRandomUniformFullIntV2(
            shape=[num_rows * num * 4],
            key=tf.bitcast(key[None], tf.uint64),
            counter=tf.bitcast(counter, tf.uint64),
            alg=_PHILOX,
            dtype=tf.uint32,
        )
        # No transposition: oneDNN logs that it cannot transpose integers.
        blocks = tf.unstack(tf.reshape(drawn, (num_rows, num, 4)), axis=2)
        return tf.concat(blocks, axis=1)[:, :num_words]

    def gamma_slope(self, alpha: Tensor, sample: Tensor) -> Tensor:
        """Return the derivative of a gamma sample by its parameter."""
        return tf.raw_ops.RandomGammaGrad(alpha=alpha, sample=sample)
