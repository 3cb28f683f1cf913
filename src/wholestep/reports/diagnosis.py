"""Diagnosis of an update that was not applied: the rows, terms or earlier weights that are not finite."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from wholestep.embeddings.rows import Lookups
from wholestep.engines import Engine
from wholestep.errors import NonFiniteError, message
from wholestep.reports.report import Report
from wholestep.state import State, Values, Variables
from wholestep.tree import Tensor, Tree
from wholestep.update import Update


def diagnose(update: Update, state: State, report: Report, i: int) -> NonFiniteError:
    """Return the error that explains why update i of a dispatch was not applied.

    Args:
        state: the state before update i.
    """
    engine, block, number = update.engine, report.block, report.first + i
    forward = block.program.forward
    names = block.names(i)
    count = len(names)
    terms, after = _by_piece(update, state, report, i)
    before = _fetched(engine, lambda state: look(engine, forward.variables, state), state)
    reasons, bad = [], np.zeros((0,), int)
    for label, (values, weights) in terms.items():
        rows_of_term = np.flatnonzero(~np.isfinite(values)) if len(values) == count else np.zeros((0,), int)
        bad = np.union1d(bad, rows_of_term)
        name = f"term {label!r}" if label else "the loss"
        if rows_of_term.size:
            reasons.append(f"{name} is not finite in rows {_few(_numbers(names, rows_of_term))}")
        elif forward.facts.terms[label].is_mean and np.sum(weights) == 0:
            reasons.append(f"the weights of {name} sum to zero")
    if not reasons and after:
        reasons = [f"{_few(after)} would not be finite after it, though every row's loss is: inputs may be too large"]
    reasons = reasons or ["the gradient is not finite, though every row's loss is"]
    attempt = 'look at these rows, lower the learning rate, clip gradients, or pass Trainer(on_nonfinite="skip").'
    if paths := unsound(forward.variables, before, are_rows_left=bad.size < count):
        verb = "is" if len(paths) == 1 else "are"
        reasons, bad = [f"{_few(paths)} {verb} not finite, before this update already: no row is to blame"], bad[:0]
        attempt = "check the source of these weights: a file, an assignment, a learning rate that is too high."
    told = message(
        f"Update {number} must have a finite loss and gradient. It was not applied; the weights are those after "
        f"update {number - 1}.",
        "; ".join(reasons),
        attempt,
    )
    return NonFiniteError(told, number, tuple(_numbers(names, bad.astype(int))))


def _by_piece(update: Update, state: State, report: Report, i: int) -> tuple[dict[str, tuple], list[str]]:
    """Return each row's values and weights by term, computed by microbatch, and the buffers that become non-finite."""
    engine, block = update.engine, report.block
    forward, cut = block.program.forward, block.program.cut
    count, table = len(block.names(i)), block.table.rows[block.first + i]
    lookups = Lookups(update.row_planner.tables, engine)

    def piece(state: State, data: Tree, rows: Tensor, first: Tensor) -> tuple:
        batch = engine.replicas.batch(data, rows)
        values = Values(engine.variables.params(state), state.buffers, state.metrics)
        found = forward.rows(values, batch, first, lookups=lookups)
        floats = [_floating(forward.variables, buffers) for buffers in (state.buffers, found.buffers)]
        return found.values, [[engine.ops.is_finite([buffer]) for buffer in buffers] for buffers in floats]

    paths = [variable.path for variable in _floating(forward.variables, forward.variables.buffers)]
    programs: dict[int, Callable] = {}
    terms: dict[str, list[tuple]] = {}
    spoiled: dict[str, None] = {}
    for start, size in cut.pieces:
        if start < count:
            arguments = state, block.data, *engine.devices.place((table[start : start + size], np.int32(start)))
            if size not in programs:
                programs[size] = engine.programs.compile(piece, arguments, spends=False).call
            found, (before, after) = engine.devices.fetch(programs[size](*arguments))
            for label, values in found.items():
                own = min(size, count - start) if len(values[0]) == size else None
                terms.setdefault(label, []).append(tuple(part[:own] for part in values))
            spoiled |= {path: None for path, was, is_good in zip(paths, before, after, strict=True) if was > is_good}
    return {label: tuple(map(np.concatenate, zip(*parts, strict=True))) for label, parts in terms.items()}, [*spoiled]


def _fetched(engine: Engine, function: Callable, state: State) -> Any:
    return engine.devices.fetch(engine.programs.compile(function, (state,), spends=False).call(state))


def look(engine: Engine, variables: Variables, state: State) -> list[tuple[Tensor, Tensor]]:
    """Return (is finite, has NaN) of every parameter, then of every floating buffer."""
    values = [*engine.variables.params(state), *_floating(variables, state.buffers)]
    return [(engine.ops.is_finite([value]), keras.ops.any(value != value)) for value in values]


def unsound(variables: Variables, found: list[tuple], *, are_rows_left: bool) -> list[str]:
    """Return the paths of non-finite variables.

    A buffer may be infinite on purpose, as masks are: it counts only if it has NaN, or no row is finite.
    """
    known = [*variables.params, *_floating(variables, variables.buffers)]
    paths = []
    for i, (variable, (is_finite, has_nan)) in enumerate(zip(known, found, strict=True)):
        if not is_finite and (i < len(variables.params) or has_nan or not are_rows_left):
            paths.append(variable.path)
    return paths


def _floating(variables: Variables, buffers: list) -> list:
    return [buffer for buffer, is_float in zip(buffers, variables.floats, strict=True) if is_float]


def _numbers(names: np.ndarray, places: np.ndarray) -> list[int]:
    """Return the user's row numbers at these places of an update; a packed row has several."""
    return [int(row) for place in places for row in np.atleast_1d(names[place])]


def _few(names: list) -> str:
    shown = ", ".join(str(name) for name in names[:8])
    return shown + (f" and {len(names) - 8} more" if len(names) > 8 else "")
