"""The changes of the reference gradient that an audit tries, those with the fewest things wrong first."""

from collections.abc import Iterator

from wholestep.audit import by_row, candidates, solved
from wholestep.audit.candidates import Hypothesis
from wholestep.audit.causes import BY_NAME, WEIGHTED
from wholestep.audit.evidence import Evidence, Meant
from wholestep.audit.meaning import is_masked, mistaken
from wholestep.audit.weightings import of_last_pass as of_last_pass_of
from wholestep.audit.weightings import places_counted, right
from wholestep.model.objective import Objective

_OF_REPLICAS = ("summed over replicas", "divided by the replicas twice", "penalty once per replica")
_OF_WEIGHTS = ("divided by the weights",)
_OF_PLACES = ("padded places counted",)
_OF_PASSES = ("last window dropped",)
_OF_MICROBATCHES = (
    "summed over microbatches",
    "divided twice",
    "only the last microbatch",
    "only the first microbatch",
    "first microbatch lost",
    "last microbatch lost",
    "penalty once per microbatch",
    "penalty divided",
)


def hypotheses(meant: Meant, chosen: list[Evidence]) -> Iterator[Hypothesis]:
    """Yield all hypotheses on these updates, the simple ones first."""
    for hypothesis in _all(meant, chosen):
        if not _is_idle(hypothesis, chosen):
            yield hypothesis


def _is_idle(hypothesis: Hypothesis, chosen: list[Evidence]) -> bool:
    """Whether it speaks of replicas, of the microbatches of one, or of two passes, where there are none."""
    replicas = max(e.num_replicas for e in chosen)
    is_split = any(len(e.update.pieces) > e.num_replicas for e in chosen)
    names = {cause.name for cause in hypothesis.causes}
    is_of_two = any(len(set(e.window.passes)) > 1 for e in chosen)
    idle = {
        *(() if _has_weights(chosen) else _OF_WEIGHTS),
        *(() if chosen[0].window.places else _OF_PLACES),
        *(_OF_REPLICAS if replicas == 1 else ()),
        *(() if is_split else _OF_MICROBATCHES),
        *(() if is_of_two else _OF_PASSES),
    }
    return bool(names & idle)


def _has_weights(chosen: list[Evidence]) -> bool:
    return chosen[0].meant.replay.data[2] is not None


def _all(meant: Meant, chosen: list[Evidence]) -> Iterator[Hypothesis]:
    if meant.replay.is_half:
        yield from solved.scales(chosen)
    for name, factors in candidates.PENALTIES.items():
        yield Hypothesis((BY_NAME[name],), candidates.penalised(right, factors))
    others = _other_losses(meant)
    for name, (other, weigh) in others.items():
        ways = (places_counted, right) if name == "mask ignored" else (right,)
        yield Hypothesis((BY_NAME[name],), candidates.other(other, weigh, ways))
    for cause in WEIGHTED:
        yield Hypothesis((cause,), candidates.weighed(cause.weigh))
    yield Hypothesis((BY_NAME["ascent"],), candidates.ascending)
    yield Hypothesis((BY_NAME["not reset"],), candidates.not_reset((right,)), is_free=True)
    yield Hypothesis((BY_NAME["broadcast"],), candidates.broadcast)
    yield Hypothesis((BY_NAME["padding trained on"],), candidates.filled_up)
    yield from solved.of_outputs(chosen)
    if _has_weights(chosen):
        yield Hypothesis((BY_NAME["weights averaged apart"],), candidates.averaged_apart)
    yield Hypothesis((BY_NAME["labels shifted"],), candidates.shifted)
    yield Hypothesis((BY_NAME["labels of other rows"],), candidates.unshuffled)
    yield Hypothesis((BY_NAME["stale gradients"],), candidates.stale, is_free=True)
    yield from solved.momentum(chosen)
    yield from solved.clip_of_each(chosen)
    yield from solved.swap(chosen)
    yield from by_row.of_others(chosen)
    if not meant.replay.is_half:
        yield from solved.scales(chosen)
    for cause in WEIGHTED:
        of_last_pass = tuple(of_last_pass_of(way) for way in cause.weigh)
        yield Hypothesis((cause, BY_NAME["last window dropped"]), candidates.weighed(of_last_pass))
        yield Hypothesis((cause, BY_NAME["penalty forgotten"]), candidates.without_penalty(cause.weigh))
        yield Hypothesis((cause, BY_NAME["not reset"]), candidates.not_reset(cause.weigh), is_free=True)
        for name, (other, weigh) in others.items():
            yield Hypothesis((BY_NAME[name], cause), candidates.other(other, weigh, cause.weigh))


def _other_losses(meant: Meant) -> dict[str, tuple[Objective | None, str]]:
    """Return the losses that stand in for the one meant, and how their batches are weighed."""
    masked = is_masked(meant.replay.model)
    others = mistaken(meant.objective, is_masked=masked).items()
    found: dict[str, tuple[Objective | None, str]] = {name: (other, "") for name, other in others}
    has_own = getattr(getattr(meant.objective, "loss", None), "has_own_weights", False)
    if meant.replay.data[2] is not None and not has_own:
        found |= {"weights ignored": (None, "none"), "weights squared": (None, "squared")}
    return found
