"""The engine on JAX, where all state is values: placement of data, and the operations inside a program."""

import ctypes
import os
import sys
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager

import jax
import jax.numpy as jnp
import keras
import numpy as np
from keras.optimizers import Optimizer

from wholestep.engines.jax_optimizer import JaxOptimizer
from wholestep.engines.jax_programs import JaxPrograms
from wholestep.engines.jax_steps import JaxSteps
from wholestep.engines.jax_variables import JaxVariables
from wholestep.engines.jax_words import JaxWords
from wholestep.engines.mesh import Shares, find_layout
from wholestep.engines.protocol import Engine
from wholestep.errors import BatchError, message, warn
from wholestep.processes import group
from wholestep.state import State
from wholestep.tree import Tensor, Tree

_INT32 = np.iinfo(np.int32)
_ALWAYS_COMPILED = (
    "jit_compile=False has no effect: on JAX an update is always compiled, unless the model is compiled with "
    "run_eagerly=True."
)
_TRACED_FOR = jax.make_user_context(None)


class JaxEngine(JaxVariables, JaxOptimizer, JaxPrograms, JaxSteps, JaxWords):
    """The methods of `wholestep.engines.protocol` on JAX."""

    name = "jax"
    is_eager = False

    def __init__(
        self,
        optimizer: Optimizer | None,
        model: keras.Model | None,
        replicas: int | str | None,
        jit_compile: bool | str,
    ):
        if jit_compile is False or (jit_compile == "auto" and getattr(model, "compiled", False) and _is_eager(model)):
            warn(_ALWAYS_COMPILED)
        layout = find_layout(replicas)
        JaxVariables.__init__(self, layout)
        JaxOptimizer.__init__(self, optimizer)
        JaxPrograms.__init__(self, layout, group.connect())
        self.waits = 0

    @property
    def num_replicas(self) -> int:
        """The number of replicas that share the rows of a batch."""
        return 1 if self.layout is None else self.layout.num_replicas

    is_split = False  # arrays are global, unless an update is better split

    @property
    def can_split(self) -> bool:
        """Whether replicas may fold their rows separately. Layers under ModelParallel may name the axis of the rows."""
        distribution = None if self.layout is None else self.layout.distribution
        return self.num_replicas > 1 and not isinstance(distribution, keras.distribution.ModelParallel)

    coupling_layers: tuple = ()
    freezes_reads = True  # a value that a traced function reads is a constant of the program
    closes_over = False  # in the gradient of a loop, or of a separately compiled function
    keeps_assigned = False  # `keras.Model.fit` drops the parameter values that the forward pass assigns

    def for_evaluation(self) -> Engine:
        """Return the engine for evaluation: this one."""
        return self

    @property
    def own_replicas(self) -> list[int]:
        """The replicas whose rows this process must load."""
        return [0] if self.layout is None else self.layout.own_replicas

    def sharded(self, variables: list) -> list[str]:
        """Return the sharded variables, each with the axes of the mesh along which it is cut."""
        if self.layout is None:
            return []
        specs = [(v.path, tuple(self.layout.of(v).spec)) for v in variables]
        return [f"{path} {spec}" for path, spec in specs if any(axis is not None for axis in spec)]

    # ---- Keras variables and values ----

    def params(self, state: State, apart: Collection[int] = ()) -> list:
        """Return the parameters of the state."""
        return state.params

    def place(self, data: Tree) -> Tree:
        """Put host arrays on the device immediately; with several devices, on each."""
        data = jax.tree.map(_narrow, data)
        if self.layout is None:
            return jax.device_put(data)
        return jax.tree.map(lambda leaf: self.layout.put(leaf, self.layout.everywhere), data)

    resident = place

    def staged(self, data: Tree) -> Tree:
        """Return host arrays in the form that is fastest for a program: unchanged on a single device."""
        return jax.tree.map(_narrow, data) if self.layout is None else self.place(data)

    def shard(self, data: Tree, shares: np.ndarray) -> Shares:
        """Put the rows of host arrays on the replicas that work on them: int (replicas, rows of a replica)."""
        assert self.layout is not None
        return Shares(jax.tree.map(lambda leaf: self.layout.spread(_narrow(leaf), shares), data))

    def fetch(self, values: Tree) -> Tree:
        """Return device values as numpy. The only place that waits."""
        self.waits += 1
        with self.processes.waiting("computing"):
            return jax.tree.map(np.asarray, values)

    def is_ready(self, values: Tree) -> bool:
        """Whether the values can be fetched without waiting for a device."""
        return all(leaf.is_ready() for leaf in jax.tree.leaves(values))

    # ---- inside a program ----

    def traced(self, function: Callable) -> Callable:
        """Return the function, traced once for each shape of its arguments."""
        return jax.jit(function)

    def inlined(self, function: Callable) -> Callable:
        """Return a traced function unchanged: its gradient may be taken anywhere."""
        return function

    def frame(self) -> object:
        """Return the identity of the current trace, which is another one in the body of a loop."""
        return getattr(jnp.zeros(()), "_trace", None)

    def is_traced_in(self, frame: object, value: Tensor) -> bool:
        """Whether `frame` is being traced, and the value belongs to it, not to one row under `vmap`."""
        return self.frame() is frame and getattr(value, "_trace", frame) is frame

    def is_kept(self, frame: object) -> bool:
        """Return False: traces in `tracing_anew` are not reused elsewhere."""
        return False

    def tracing_anew(self) -> AbstractContextManager:
        """Return a context in which separately compiled functions are traced for this context alone."""
        return _TRACED_FOR(object())

    def shapes(self, function: Callable, *arguments: Tree) -> Tree:
        """Return the shapes and dtypes of a traced function's results."""
        return jax.eval_shape(function, *arguments)

    def gather(self, data: Tree, rows: Tensor) -> Tree:
        """Return these rows of every leaf; row numbers are in range."""
        return jax.tree.map(lambda leaf: leaf.at[rows].get(mode="promise_in_bounds"), data)

    def batch(self, data: Tree, rows: Tensor) -> Tree:
        """Return the rows of a (micro)batch, spread evenly over replicas; for `Shares`, `rows` index the shares."""
        if self.layout is None:
            return self.gather(data, rows)
        if self.layout.is_inside:
            return self.gather(data.leaves if isinstance(data, Shares) else data, self.replica_slice(rows))
        if isinstance(data, Shares):
            each = -(-rows.shape[0] // self.num_replicas)
            places = jnp.resize(rows, (self.num_replicas, each))
            found = jax.vmap(self.gather)(data.leaves, places)
            batch = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[: rows.shape[0]], found)
        else:
            batch = self.gather(data, rows)
        return jax.lax.with_sharding_constraint(batch, self.layout.rows)

    def replica_slice(self, rows: Tensor) -> Tensor:
        """Return the part of a vector over a (micro)batch that belongs to the rows that `batch` returns."""
        if self.layout is None or not self.layout.is_inside:
            return rows
        each = rows.shape[0] // self.num_replicas
        return jax.lax.dynamic_slice_in_dim(rows, self.replica_start(rows.shape[0]), each)

    def replica_start(self, size: int) -> Tensor | int:
        """Return the index of the first row that `batch` returns of a (micro)batch of `size` rows."""
        if self.layout is None or not self.layout.is_inside:
            return 0
        return jax.lax.axis_index(self.layout.axis) * (size // self.num_replicas)

    def replica_params(self, params: list) -> list:
        """Return the parameters unchanged: every device has them."""
        return params

    def total(
        self, function: Callable, data: Tree, carried: Tree, given: Tree, *, split: bool, syncs: bool
    ) -> tuple[Tree, Tree, Tree]:
        """Run (data, carried, given) -> (sums, carried, alike), and return the totals over all replicas.

        Unless split, arrays are global, and every sum is a total; but XLA reduces the gradient of each microbatch.
        """
        if not split or self.layout is None:
            return function(data, carried, given)
        return self.layout.total(function, data, carried, given)

    def lookup(self, table: Tensor, places: Tensor) -> Tensor:
        """Return these rows of a table; NaN for places beyond the last."""
        return table.at[places].get(mode="fill")

    def differentiate(self, function: Callable, params: list) -> tuple[list, Tree]:
        """Return (gradients, auxiliary) of a function params -> (scalar, auxiliary)."""
        return jax.grad(function, has_aux=True)(params)

    def fold(self, function: Callable, carry: Tree, pieces: Tree, num: int) -> Tree:
        """Return function(... function(carry, piece 0) ..., piece num-1); pieces have a leading axis of length num."""
        if num == 1:
            return function(carry, jax.tree.map(lambda leaf: leaf[0], pieces))
        return jax.lax.scan(lambda c, piece: (function(c, piece), None), carry, pieces)[0]

    def repeat(self, function: Callable, num: Tensor, state: State, reports: Tree) -> tuple[State, Tree]:
        """Call (i, state) -> (state, report) for i < num, as long as the state is not stopped; keep the reports."""

        def body(carry: tuple) -> tuple:
            i, state, reports = carry
            state, report = function(i, state)
            return i + 1, state, jax.tree.map(lambda all, one: all.at[i].set(one), reports, report)

        def goes_on(carry: tuple) -> Tensor:
            return (carry[0] < num) & (carry[1].stopped == 0)

        return jax.lax.while_loop(goes_on, body, (jnp.zeros_like(num), state, reports))[1:]


def _is_eager(model: keras.Model) -> bool:
    """Whether a model was compiled with jit_compile=False, for another reason than run_eagerly."""
    return not model.jit_compile and not model.run_eagerly and model._resolve_auto_jit_compile()


def _narrow(leaf: Tensor) -> np.ndarray | jax.Array:
    """Convert 64-bit integers to 32 bits as JAX would, but refuse values that would wrap around."""
    array = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
    if array.dtype not in (np.int64, np.uint64) or jax.config.jax_enable_x64:
        return array
    if array.size and (array.max() > _INT32.max or array.min() < _INT32.min):
        raise BatchError(
            message(
                "Integers must fit in 32 bits on this engine.",
                f"values from {array.min()} to {array.max()}",
                "enable 64-bit integers with jax.config.update('jax_enable_x64', True), or renumber them.",
            )
        )
    return array.astype(np.int32)


def _keep_in_child() -> None:
    """Let a forked process end: JAX' clients and pools would wait for threads that a fork has not."""
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] in ("jax", "jaxlib")]
    kept = [list(vars(module).values()) for module in modules]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))  # never given back: what is in there is never destroyed


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_in_child)
