"""The text of the facts: a name and a line each."""

from collections.abc import Iterator

from stepcheck.report.words import listed, many
from stepcheck.stages.facts import Facts, Span

Fact = tuple[str, str]


def _span(span: Span) -> str:
    least, most = f"{span.least:.4g}", f"{span.most:.4g}"
    return least if least == most else f"{least} to {most}"


def _rows(facts: Facts) -> Iterator[Fact]:
    use = facts.use
    times = "" if use.times is None else f", each {_span(use.times)} times"
    yield "rows", f"{use.rows - use.unused} of {use.rows} used{times}"
    order = facts.order
    yield (
        "passes over the data",
        f"{order.passes}, of {listed(facts.passes)} rows",
    )
    counts = (
        (order.same, "in the order of the pass before"),
        (order.same_batches, "with the batches of the pass before"),
        (order.as_data, "in the order of the data"),
    )
    parts = [f"{num} {line}" for num, line in counts if num]
    if parts or order.passes > 1:
        yield "their order", "; ".join(parts) or "new in each pass"
    if order.across:
        yield "updates with rows of two passes", f"{order.across}"


def _updates(facts: Facts) -> Iterator[Fact]:
    rows = "" if facts.rows is None else f", of {_span(facts.rows)} rows"
    calls, more = facts.microbatches, ""
    if calls is not None and calls.most > 1:
        more = f" in {_span(calls)} forward passes"
    replicas = (
        f" on each of {facts.replicas} replicas" if facts.replicas > 1 else ""
    )
    padded = f"; {many(facts.padded, 'row')} of padding" if facts.padded else ""
    yield "updates", f"{facts.updates}{rows}{more}{replicas}{padded}"
    passes = facts.calls
    yield (
        "forward passes",
        f"{passes.used} in updates, {passes.without_gradient} others",
    )
    named = (
        ("with the outputs of inference mode", passes.inferring),
        ("steps skipped, not finite", passes.skipped_steps),
        ("variables in no step", facts.without_gradient),
        ("variables that never moved", facts.unmoved),
        ("frozen variables that moved", facts.frozen_moved),
    )
    for name, found in named:
        if found:
            yield (
                name,
                listed(found) if isinstance(found, tuple) else f"{found}",
            )


def _values(facts: Facts) -> Iterator[Fact]:
    if (rate := facts.rate) is not None:
        every = {name: f"{number:.4g}" for name, number in vars(rate).items()}
        told = ", ".join(f"{number} {name}" for name, number in every.items())
        is_one = len({*every.values()}) == 1
        yield "learning rate", every["first"] if is_one else told
    if facts.written:
        yield "weights or slots written before updates", listed(facts.written)
    state = facts.state
    if state.passes:
        yield (
            "statistics and seeds",
            f"moved by {state.passes} passes, kept after {state.kept}",
        )
    if facts.labels is not None:
        yield "labels in a batch", f"{_span(facts.labels)} of {facts.classes}"


def aligned(facts: Facts) -> list[str]:
    """Return the facts as lines of a table."""
    every = [*_rows(facts), *_updates(facts), *_values(facts)]
    width = max(len(name) for name, _ in every)
    return [f"{name.ljust(width)}  {line}" for name, line in every]
