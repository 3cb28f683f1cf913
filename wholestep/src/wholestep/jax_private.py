"""All that this library reads of JAX' private side. Tried with JAX 0.8 to 0.12.

Where JAX has the name no longer, a run is slower or refused. A test runs without each.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from wholestep.errors import SpecificationError, message


def store_client() -> Any:
    """Return the key-value store of `jax.distributed`, which has no public name.

    Raises:
        SpecificationError: JAX has no such name; several processes cannot exchange anything.
    """
    try:
        from jax._src.distributed import global_state

        return global_state.client
    except (ImportError, AttributeError) as error:
        raise _refusal("jax._src.distributed.global_state", "several processes") from error


def lowering(primitive: Any) -> Callable | None:
    """Return XLA's rule for an operation on CPUs; None if JAX does not tell.

    Without it the operations of `engines.jax_cpu` are not used, which are faster than XLA's.
    """
    try:
        from jax.interpreters import mlir

        rules = mlir._platform_specific_lowerings["cpu"]
        return (rules.get(primitive) or mlir._lowerings[primitive]).rule
    except (ImportError, AttributeError, KeyError):
        return None


def has_backends() -> bool:
    """Whether JAX has started: later changes of XLA's flags have no effect.

    Raises:
        SpecificationError: JAX does not tell.
    """
    try:
        from jax._src.xla_bridge import backends_are_initialized

        return backends_are_initialized()
    except ImportError as error:
        name = "jax._src.xla_bridge.backends_are_initialized"
        raise _refusal(name, "wholestep.deterministic()") from error


def trace_of(value: Any) -> object:
    """Return the trace of a value, by which random draws know a loop's body; None outside of one.

    Raises:
        SpecificationError: JAX does not tell; draws of a loop could repeat.
    """
    trace = getattr(value, "_trace", None)
    if trace is None and isinstance(value, jax.core.Tracer):
        raise _refusal("jax.core.Tracer._trace", "random draws")
    return trace


def current_trace() -> object:
    """Return the current trace; None outside of one."""
    return trace_of(jnp.zeros(()))


def _refusal(name: str, use: str) -> SpecificationError:
    must = f"JAX must have {name}, for {use}."
    attempt = "a version of JAX in the range of wholestep's requirements."
    return SpecificationError(message(must, f"JAX {jax.__version__} without it", attempt))
