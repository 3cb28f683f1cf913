"""Whether what an update starts from is finite: if not, no row is to blame."""

import keras

from wholestep.engines.protocol import Engine
from wholestep.state import State, Variables
from wholestep.tree import Tensor


def look(engine: Engine, variables: Variables, state: State) -> list[tuple[Tensor, Tensor]]:
    """Return of every parameter, then of every floating buffer, whether all of it is finite, and whether it has NaN."""
    values = [*engine.params(state), *_floating(variables, state.buffers)]
    return [(engine.is_finite([value]), keras.ops.any(value != value)) for value in values]


def unsound(variables: Variables, found: list[tuple], *, are_rows_left: bool) -> list[str]:
    """Return the paths of what was not finite.

    A buffer may be infinite on purpose, as masks are: it counts only if it is NaN, or no row is left that is finite.
    """
    known = [*variables.params, *_floating(variables, variables.buffers)]
    paths = []
    for i, (variable, (is_finite, has_nan)) in enumerate(zip(known, found, strict=True)):
        if not is_finite and (i < len(variables.params) or has_nan or not are_rows_left):
            paths.append(variable.path)
    return paths


def _floating(variables: Variables, buffers: list) -> list:
    return [buffer for buffer, is_float in zip(buffers, variables.floats, strict=True) if is_float]
