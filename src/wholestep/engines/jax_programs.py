"""Programs on JAX: each is one XLA computation, compiled before its first call."""

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

from wholestep.engines.mesh import MeshLayout
from wholestep.processes import Processes
from wholestep.tree import Tree


class JaxPrograms:
    """The methods of `wholestep.engines.protocol` for programs.

    Args:
        layout: the placement of arrays on several devices; None for one.
        processes: the processes of the run, all of which must compile the same.
    """

    always_xla = False  # XLA is not a choice on JAX
    why_no_xla = ""  # XLA compiles every program
    loops_once = True  # XLA on CPU gives small kernels to threads, except in a loop: half the time (measured)

    def __init__(self, layout: MeshLayout | None, processes: Processes):
        self.layout = layout
        self.processes = processes
        self.compilations = 0
        self._calling_out: list[Callable] = []

    def compile(self, function: Callable, examples: tuple, *, spends: bool = True, repeats: bool = False) -> Callable:
        """Compile the function for arguments such as `examples`."""
        self.compilations += 1
        options: dict[str, Any] = {"donate_argnums": (0,) if spends else ()}
        if self.layout is not None:
            # Spent arguments keep their placement for the next call; every host can read the other results.
            results = jax.tree.map(lambda _: self.layout.everywhere, jax.eval_shape(function, *examples))
            kept = jax.tree.map(lambda leaf: leaf.sharding, examples[0]) if spends else None
            options["out_shardings"] = (kept, results[1]) if spends else results
        jitted = jax.jit(function, **options)
        traced = jitted.trace(*examples)
        lowered = traced.lower()
        if self.processes.count > 1:
            self.processes.check_equal({"the program": f"{zlib.crc32(lowered.as_text().encode()):08x}"})
        jitted.compiled = lowered.compile()  # cached for the function's first call; later calls are dispatched in C++
        program = jitted if self.layout is None else jitted.compiled
        if traced.jaxpr.effects or any("callback" in name for name in _primitives(traced.jaxpr.jaxpr)):
            self._calling_out.append(program)
        return program

    def again(self, program: Callable) -> Callable | None:
        """Return the program in a form that JAX never retraces; None if it prints or calls the host otherwise."""
        return None if program in self._calling_out else getattr(program, "compiled", program)

    def describe(self, program: Callable) -> str:
        """Return "": on JAX there is one way to execute a program."""
        return ""

    def memory(self, program: Callable) -> int | None:
        """Return the bytes that the program needs in addition to its arguments and results."""
        compiled: jax.stages.Compiled = getattr(program, "compiled", program)
        analysis = compiled.memory_analysis()
        return None if analysis is None else int(analysis.temp_size_in_bytes)

    def device_bytes(self) -> int | None:
        """Return the bytes of the device's memory; None where it is the host's."""
        stats = jax.local_devices()[0].memory_stats() or {}
        return stats.get("bytes_limit")

    def loops_slowly(self, function: Callable, *arguments: Tree) -> bool:
        """Whether the function should not run inside a compiled loop.

        XLA on CPU runs convolutions several times slower inside a loop than outside (measured: 4x).
        """
        on_cpu = jax.local_devices()[0].platform == "cpu"
        return on_cpu and "conv_general_dilated" in _primitives(jax.make_jaxpr(function)(*arguments).jaxpr)


def _primitives(jaxpr: Jaxpr) -> set[str]:
    found = set()
    for equation in jaxpr.eqns:
        found.add(equation.primitive.name)
        for inner in _jaxprs_in(equation.params):
            found |= _primitives(inner)
    return found


def _jaxprs_in(params: dict[str, Any]) -> Iterator[Jaxpr]:
    """Yield the programs nested in an equation. JAX has a function for it only after version 0.8."""
    for value in params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, ClosedJaxpr):
                yield each.jaxpr
            elif isinstance(each, Jaxpr):
                yield each
