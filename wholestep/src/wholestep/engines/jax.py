"""The engine on JAX, where all state is values: its programs, and the operations inside them."""

import ctypes
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr
from keras.optimizers import Optimizer

from wholestep.engines.jax_cpu import elementwise
from wholestep.engines.jax_devices import JaxDevices, MeshLayout, find_replicas, gather
from wholestep.engines.jax_eager import EagerJaxOperations, unreadable_named
from wholestep.engines.jax_steps import JaxOptimizer, JaxSteps, select
from wholestep.engines.jax_variables import JaxVariables
from wholestep.engines.protocol import (
    Carried,
    Compiled,
    Engine,
    Found,
    Function,
    Operations,
    Programs,
)
from wholestep.engines.shared import EagerPrograms
from wholestep.errors import warn
from wholestep.jax_private import current_trace, trace_of
from wholestep.keras_private import resolve_auto_jit
from wholestep.processes import Processes, group
from wholestep.state import State
from wholestep.tree import Tensor, Tree

_TRACED_FOR = jax.make_user_context(None)
_SMALL = 4096  # numbers of an array


def make_engine(
    optimizer: Optimizer | None,
    model: keras.Model | None,
    replicas: int | str | None,
    jit_compile: bool | str,
    *,
    is_eager: bool,
) -> Engine:
    """Return the engine on JAX; an eager one has one device, and calls no `jax.jit`."""
    is_off = jit_compile is False or (
        jit_compile == "auto" and getattr(model, "compiled", False) and _is_off(model)
    )
    if is_off and not is_eager:
        text = (
            "on JAX an update is always compiled, unless the model is compiled with "
            "run_eagerly=True."
        )
        warn(f"jit_compile=False has no effect: {text}")
    several = find_replicas(model, replicas)
    processes = group.connect()
    layout = several.layout
    programs: Programs = EagerPrograms(nullcontext) if is_eager else JaxPrograms(layout, processes)
    compiled = JaxOperations(is_sharded=layout is not None)
    ops: Operations = EagerJaxOperations(compiled) if is_eager else compiled
    return Engine(
        variables=JaxVariables(layout),
        optimizer=JaxOptimizer(optimizer, _branch_of(is_eager=is_eager)),
        steps=JaxSteps(unreadable_named if is_eager else nullcontext),
        programs=programs,
        traces=JaxTraces(),
        ops=ops,
        random=JaxRandom(is_eager=is_eager),
        devices=JaxDevices(layout, processes, is_eager=is_eager),
        replicas=several,
        processes=processes,
    )


def _branch_of(*, is_eager: bool) -> Callable:
    """Return the function (is_first, first, second) -> results of the first or second, as fast as
    the device has it.

    On a CPU a selection keeps old and new values together and copies both: 1.5 times the time. A
    GPU waits for a branch until the host has read which: 1.3 times the time (measured).
    """
    if is_eager:
        return lambda is_first, first, second: first() if is_first else second()
    return jax.lax.cond if _is_on_cpu() else select


def _is_on_cpu() -> bool:
    return jax.local_devices()[0].platform == "cpu"


class JaxPrograms:
    """The part `programs` of the engine on JAX: each program is one XLA computation, compiled
    before its first call.
    """

    is_eager = False
    always_xla = False  # XLA is not a choice on JAX
    why_no_xla = ""  # XLA compiles every program
    # XLA on CPU gives small kernels to threads, except in a loop: half the time (measured)
    loops_once = True

    def __init__(self, layout: MeshLayout | None, processes: Processes):
        self.layout = layout
        self.processes = processes

    def compile(
        self, function: Callable, examples: tuple, *, spends: bool = True, repeats: bool = False
    ) -> Compiled:
        """Compile the function for arguments such as `examples`."""
        options: dict[str, Any] = {"donate_argnums": (0,) if spends else ()}
        if self.layout is not None:
            # Spent arguments keep their placement for the next call; every host can read the other
            # results.
            results = jax.tree.map(
                lambda _: self.layout.everywhere, jax.eval_shape(function, *examples)
            )
            kept = jax.tree.map(lambda leaf: leaf.sharding, examples[0]) if spends else None
            options["out_shardings"] = (kept, results[1]) if spends else results
        jitted = jax.jit(function, **options)
        with elementwise():
            lowered = jitted.trace(*examples).lower()
        if self.processes.count > 1:
            self.processes.check_equal(
                {"the program": f"{zlib.crc32(lowered.as_text().encode()):08x}"}
            )
        # cached for the function's first call; later calls are dispatched in C++
        compiled = lowered.compile()
        needs = compiled.memory_analysis()
        return Compiled(
            call=jitted if self.layout is None else compiled,
            memory=None if needs is None else int(needs.temp_size_in_bytes),
        )

    def loops_slowly(self, function: Callable, *arguments: Tree) -> bool:
        """Whether the function should not run inside a compiled loop.

        XLA on CPU runs convolutions several times slower inside a loop than outside (measured: 4x).
        """
        return _is_on_cpu() and "conv_general_dilated" in _primitives(
            jax.make_jaxpr(function)(*arguments).jaxpr
        )

    def traced(self, function: Function) -> Function:
        """Return the function, traced once for each shape of its arguments."""
        return jax.jit(function)

    def inlined(self, function: Function) -> Function:
        """Return a traced function unchanged: its gradient may be taken anywhere."""
        return function

    def shapes(self, function: Callable[..., Found], *arguments: Tree) -> Found:
        """Return the shapes and dtypes of a traced function's results."""
        return jax.eval_shape(function, *arguments)


class JaxTraces:
    """The part `traces` of the engine on JAX."""

    freezes_reads = True  # a value that a traced function reads is a constant of the program
    closes_over = False  # in the gradient of a loop, or of a separately compiled function

    def frame(self, value: Tensor | None = None) -> object:
        """Return the identity of the current trace: another one in a loop's body, or for one row
        under `vmap`.
        """
        frame = current_trace()
        is_inside = value is None or trace_of(value) in (None, frame)
        return frame if is_inside else object()

    def is_kept(self, frame: object) -> bool:
        """Return False: traces in `tracing_anew` are not reused elsewhere."""
        return False

    def tracing_anew(self) -> AbstractContextManager:
        """Return a context in which separately compiled functions are traced for this context
        alone.
        """
        return _TRACED_FOR(object())


class JaxOperations:
    """The part `ops` of the engine on JAX."""

    has_slices = False
    gather = staticmethod(gather)

    def __init__(self, *, is_sharded: bool):
        self._is_sharded = is_sharded

    def differentiate(
        self,
        function: Callable[[list], tuple[Tensor, Found]],
        params: list,
        *,
        slices: bool = False,
    ) -> tuple[list, Found]:
        """Return (gradients, auxiliary) of a function params -> (scalar, auxiliary), all dense."""
        return jax.grad(function, has_aux=True)(params)

    def fold(
        self, function: Callable[[Carried, Any], Carried], carry: Carried, pieces: Tree, num: int
    ) -> Carried:
        """Return function(... function(carry, piece 0) ..., piece num-1); pieces have a leading
        axis of length num.
        """
        if num == 1:
            return function(carry, jax.tree.map(lambda leaf: leaf[0], pieces))
        return jax.lax.scan(lambda c, piece: (function(c, piece), None), carry, pieces)[0]

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

        def body(carry: tuple) -> tuple:
            i, state, reports = carry
            state, report = function(i, state)
            return i + 1, state, jax.tree.map(lambda all, one: all.at[i].set(one), reports, report)

        def goes_on(carry: tuple) -> Tensor:
            return (carry[0] < num) & (carry[1].stopped == 0)

        return jax.lax.while_loop(goes_on, body, (jnp.zeros_like(num), state, reports))[1:]

    def lookup(self, table: Tensor, places: Tensor) -> Tensor:
        """Return these rows of a table; NaN for places beyond the last."""
        return jnp.asarray(table).at[places].get(mode="fill")

    def is_finite(self, values: list) -> Tensor:
        """Return whether all values are finite."""
        # Small ones as one array: to compile a reduction of each takes a tenth of the time to the
        # first update. Sharded ones would be gathered for it.
        most = 0 if self._is_sharded else _SMALL
        small = [jnp.ravel(v) for v in values if v.size <= most]
        parts = [v for v in values if v.size > most]
        if small:
            parts.append(jnp.concatenate(small))
        # Not by a maximum: XLA's of large arrays on a CPU drops NaN (jaxlib 0.10.2).
        return jnp.isfinite(sum(jnp.sum(part * 0) for part in parts))


def _is_off(model: keras.Model) -> bool:
    """Whether a model was compiled with jit_compile=False, for another reason than run_eagerly."""
    return not model.jit_compile and not model.run_eagerly and resolve_auto_jit(model)()


def _primitives(jaxpr: Jaxpr) -> set[str]:
    found = set()
    for equation in jaxpr.eqns:
        found.add(equation.primitive.name)
        for inner in _jaxprs_in(equation.params):
            found |= _primitives(inner)
    return found


def _jaxprs_in(params: dict[str, Any]) -> Iterator[Jaxpr]:
    """Yield the programs nested in an equation. JAX has a function for it only after version
    0.8.
    """
    for value in params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, ClosedJaxpr):
                yield each.jaxpr
            elif isinstance(each, Jaxpr):
                yield each


def _keep_in_child() -> None:
    """Let a forked process end: JAX' clients and pools would wait for threads that a fork has
    not.
    """
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in ("jax", "jaxlib")
    ]
    kept = [list(vars(module).values()) for module in modules]
    # a reference that is never released: these objects are never destroyed
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_in_child)


_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
# up to here in a loop: XLA would fuse words into their use, and recompute them per pixel
_FEW_BLOCKS = 1 << 14


class JaxRandom:
    """The part `random` of the engine on JAX.

    Args:
        is_eager: whether to compile the words apart, as they call no user function.
    """

    shuffles_slices = False  # `jax.random.permutation(independent=True)`: every vector separately

    def __init__(self, *, is_eager: bool):
        self._is_eager = is_eager

    def words(
        self, seed: Tensor, stream: Tensor | int, first: Tensor | int, num_rows: int, num_words: int
    ) -> Tensor:
        """Return the words of each row by its place: (rows, words), by Philox-4x32-10."""
        return (_compiled if self._is_eager else _words)(seed, stream, first, num_rows, num_words)

    def gamma_slope(self, alpha: Tensor, sample: Tensor) -> Tensor:
        """Return the derivative of a gamma sample by its parameter."""
        return jax.lax.random_gamma_grad(alpha, sample)


def _words(
    seed: Tensor, stream: Tensor | int, first: Tensor | int, num_rows: int, num_words: int
) -> Tensor:
    # Of the 128-bit counter, the lower 64 bits number the blocks of four words of all rows, the
    # next 32 the stream. The first words of a row's blocks come first, then the second words, and
    # so on.
    num = -(-num_words // 4)
    places = jnp.asarray(first).astype(jnp.uint32) + jnp.arange(num_rows, dtype=jnp.uint32)
    high, start = _multiplied(places, num)
    low = start[:, None] + jnp.arange(num, dtype=jnp.uint32)
    high = high[:, None] + (low < start[:, None]).astype(jnp.uint32)
    streams = jnp.broadcast_to(jnp.asarray(stream).astype(jnp.uint32), low.shape)
    seed = jnp.asarray(seed).astype(jnp.uint32)
    found = _philox([low, high, streams, jnp.zeros_like(low)], [seed[0], seed[1]])
    return jnp.concatenate(found, axis=1)[:, :num_words]


_compiled = jax.jit(_words, static_argnums=(3, 4))


def _philox(counter: list, key: list) -> list:
    """Return four words of each counter (of four words, the lowest first)."""
    if counter[0].size <= _FEW_BLOCKS:
        return jax.lax.fori_loop(0, _ROUNDS, _next_round, (counter, key))[0]
    for _ in range(_ROUNDS):
        counter, key = _round(counter, key)
    return counter


def _next_round(_: Tensor, both: tuple[list, list]) -> tuple[list, list]:
    return _round(*both)  # no lambda: outside `jit`, JAX would compile each one anew


def _round(counter: list, key: list) -> tuple[list, list]:
    one, two, three, four = counter
    (high_one, low_one), (high_three, low_three) = map(_multiplied, (one, three), _MULTIPLIERS)
    counter = [high_three ^ two ^ key[0], low_three, high_one ^ four ^ key[1], low_one]
    return counter, [k + np.uint32(weyl) for k, weyl in zip(key, _WEYL, strict=True)]


def _multiplied(words: jax.Array, by: int) -> tuple[jax.Array, jax.Array]:
    """Return the upper and the lower 32 bits of products.

    Not by `jax.lax.mulhi`: XLA does not compile it where arrays lie on several devices (JAX 0.10).
    """
    with jax.enable_x64(True):
        products = words.astype(jnp.uint64) * np.uint64(by)
        return (products >> np.uint64(32)).astype(jnp.uint32), products.astype(jnp.uint32)
