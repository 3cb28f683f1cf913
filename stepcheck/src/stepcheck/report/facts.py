"""The text of the facts: a name and a line each."""

from collections.abc import Iterator

from stepcheck.report.words import listed, many
from stepcheck.stages.facts import Facts, Span

Fact = tuple[str, str]


def told(facts: Facts) -> list[Fact]:
    """Return the facts as (name, line)."""
    every = _rows, _passes, _updates, _calls, _variables, _rate, _between, _labels
    return [fact for part in every for fact in part(facts)]


def _span(span: Span) -> str:
    least, most = f"{span.least:.4g}", f"{span.most:.4g}"
    return least if least == most else f"{least} to {most}"


def _rows(facts: Facts) -> Iterator[Fact]:
    use = facts.use
    times = "" if use.times is None else f", each {_span(use.times)} times"
    yield "rows", f"{use.rows - use.unused} of {use.rows} used{times}"


def _passes(facts: Facts) -> Iterator[Fact]:
    order = facts.order
    yield "passes over the data", f"{order.passes}, of {listed(facts.passes)} rows"
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
    calls = facts.microbatches
    more = (
        f" in {_span(calls)} forward passes"
        if calls is not None and calls.most > 1
        else ""
    )
    replicas = f" on each of {facts.replicas} replicas" if facts.replicas > 1 else ""
    padded = f"; {many(facts.padded, 'row')} of padding" if facts.padded else ""
    yield "updates", f"{facts.updates}{rows}{more}{replicas}{padded}"


def _calls(facts: Facts) -> Iterator[Fact]:
    calls = facts.calls
    told = f"{calls.used} in updates, {calls.without_gradient} others"
    yield "forward passes", told
    if calls.inferring:
        yield "with the outputs of inference mode", f"{calls.inferring}"
    if calls.skipped_steps:
        yield "steps skipped, not finite", f"{calls.skipped_steps}"


def _variables(facts: Facts) -> Iterator[Fact]:
    named = (
        ("variables without a gradient", facts.without_gradient),
        ("variables that never moved", facts.unmoved),
        ("frozen variables that moved", facts.frozen_moved),
    )
    yield from ((name, listed(names)) for name, names in named if names)


def _rate(facts: Facts) -> Iterator[Fact]:
    if (rate := facts.rate) is not None:
        names = "first", "last", "least", "most"
        each = [f"{getattr(rate, name):.4g}" for name in names]
        told = ", ".join(
            f"{number} {name}" for number, name in zip(each, names, strict=True)
        )
        yield "learning rate", each[0] if len({*each}) == 1 else told


def _between(facts: Facts) -> Iterator[Fact]:
    if facts.written:
        yield "weights written before updates", listed(facts.written)
    state = facts.state
    if state.passes:
        yield (
            "statistics and seeds",
            f"moved by {state.passes} passes, kept after {state.kept}",
        )


def _labels(facts: Facts) -> Iterator[Fact]:
    if facts.labels is not None:
        yield "labels in a batch", f"{_span(facts.labels)} of {facts.classes}"


def aligned(facts: Facts) -> list[str]:
    """Return the facts as lines of a table."""
    every = told(facts)
    width = max(len(name) for name, _ in every)
    return [f"{name.ljust(width)}  {line}" for name, line in every]
