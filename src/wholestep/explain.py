"""A description of how updates run, as text."""

import keras

from wholestep.cut import Cut
from wholestep.engines import Engine
from wholestep.model import Coupling, Forward
from wholestep.plan import Planner

_UNSEEN = "behind Keras' back, as tf.random, jax.random and numpy do, or in a tf.function of its own"


def explain(planner: Planner, sharded: list[str], data: str, unlike_keras: str) -> str:
    """Return a description of how an update runs.

    Args:
        sharded: the sharded variables.
        data: the place of the data, as text.
        unlike_keras: the differences from Keras' update, as text.
    """
    engine, coupling, program = planner.engine, planner.findings.coupling, list(planner.programs.values())[-1]
    cut = program.cut
    several = len(planner.programs)
    lines = [
        *([f"{several} programs for updates of several shapes; the last one made:"] if several > 1 else []),
        f"One update takes {cut}.",
        *_spread(cut, engine),
        _padding(cut, planner.pads_short),
        *([data] if data else []),
        f"Up to {program.most} updates go to the device in one dispatch ({keras.backend.backend()})."
        if program.most > 1
        else f"Each update is a separate dispatch ({keras.backend.backend()}).",
    ]
    lines += [program.how] if program.how else []
    if sharded:
        lines.append(f"Sharded, never gathered for the update: {', '.join(sharded)}.")
    if program.memory is not None:
        needs, limit = program.memory / 2**20, planner.limit / 2**20
        lines.append(f"Besides data and weights, the program needs {needs:.1f} MiB, of {limit:.0f} it may use.")
    lines += program.tables
    drawn = _drawn(coupling, program.forward)
    if coupling is not None and not (coupling.cut_is_exact and drawn):
        lines.append(
            "Cutting changes nothing in this model." if coupling.cut_is_exact else f"Not cut freely: {coupling.why}."
        )
    if coupling is not None and coupling.custom:
        lines.append(
            "The model's step is run unchanged: without microbatches, replicas or padding, whose exactness cannot be "
            "guaranteed for it. Its losses and the weights are checked afterwards."
        )
    return "\n".join([*lines, *drawn, *([unlike_keras] if unlike_keras else [])])


def _drawn(coupling: Coupling | None, forward: Forward) -> list[str]:
    """Return a line about random draws that do not belong to rows, if there are any."""
    facts = forward.facts.draws
    unknown = [f"keras.random.{fact.name} ({fact.why})" for fact in facts if fact.why]
    if unknown:
        return [f"Random draws differ between cuts: {'; '.join(dict.fromkeys(unknown))}."]
    if coupling is None or not coupling.draws:
        return []
    reasons = {
        "an axis that is a multiple of the rows does not hold them outermost": any(f.axis is not None for f in facts),
        "rows take parts of a draw whose shape does not grow with them": any(f.axis is None for f in facts),
        f"something draws {_UNSEEN}": True,
    }
    why = ", or ".join(reason for reason, may_be in reasons.items() if may_be)
    return [f"Random draws differ between cuts: {why}."]


def _spread(cut: Cut, engine: Engine) -> list[str]:
    """Return lines about the spread of rows over hosts and replicas, if there are several."""
    replicas, hosts = engine.devices.num_replicas, engine.processes.count
    if replicas == 1:
        return []
    shares = " and ".join(f"{num} microbatches x {-(-size // replicas)} rows" for num, size in cut.sections)
    many = f"{hosts} {'host' if hosts == 1 else 'hosts'} x {replicas / hosts:g} replicas"
    lines = [f"{cut.places} places = {many} x {shares}."]
    if cut.split:
        return [*lines, "Each replica sums over its own rows; the sums of all go over the wire once an update."]
    return [*lines, "Arrays are global: every replica sees the statistics of all rows."]


def _padding(cut: Cut, pads_short: bool | None) -> str:
    extra = cut.places - cut.rows
    lines = [f"The last {extra} places are padding of weight 0."] if extra else []
    if not cut.padded:
        return "".join(lines) or "No row is padding."
    shorter = {
        True: "Shorter batches are filled up with rows of weight 0.",
        False: "Shorter batches run in their own shape, as padding would count.",
        None: "Whether shorter batches can be filled up with rows of weight 0 is tried when one comes.",
    }
    return " ".join([*lines, shorter[pads_short]])
