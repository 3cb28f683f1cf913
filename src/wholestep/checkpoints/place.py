"""Where a call and its data stand, and what else goes with a run."""

from dataclasses import dataclass, field, fields
from typing import Any, Protocol


class Keeps(Protocol):
    """Whatever goes with a run: callbacks, and what a loop of one's own has."""

    def get_state(self) -> dict[str, Any]:
        """Return nested numbers, words and arrays."""

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from there."""


@dataclass
class Place:
    """Where a call of `fit` or `steps` stands.

    Args:
        call: which of them; nothing between calls.
        epoch: the call's epoch.
        done: how many updates of it have been carried out.
        began: the epoch of the data in which it began.
        is_open: whether callbacks have been told that it begins.
        logs: what callbacks are told at its end, once all its updates and its validation have been carried out.
        told: how many callbacks have been told so.
        latest: the numbers of the last update, where a snapshot was taken after it.
    """

    call: str = ""
    epoch: int = 0
    done: int = 0
    began: int = 0
    is_open: bool = False
    logs: dict[str, Any] | None = None
    told: int = 0
    latest: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of_json(cls, facts: dict[str, Any]) -> "Place":
        """Return what was made JSON of; what a later release may have added is left out."""
        return cls(**_known(cls, facts))


@dataclass
class DataPlace:
    """Where the data of a run stand.

    Args:
        position: the epoch and the number of the next batch in it.
        largest: by the shapes of a row, the most rows that a ready-made batch has had.
        num_batches: the batches of an epoch, if that is known.
        layout: which rows make which batch, in words; see `wholestep.data.facts`.
        last: a digest of the last batch that was used, of ready-made ones; none if that is not to be looked at.
        state: where a stream stood after that batch, if the stream can tell.
    """

    position: tuple[int, int] = (0, 0)
    largest: dict[str, int] = field(default_factory=dict)
    num_batches: int | None = None
    layout: dict[str, str] = field(default_factory=dict)
    last: str = ""
    state: Any = None

    @classmethod
    def of_json(cls, facts: dict[str, Any]) -> "DataPlace":
        """Return what was made JSON of."""
        epoch, step = facts["position"]
        return cls(**{**_known(cls, facts), "position": (int(epoch), int(step))})


def _known(kind: type, facts: dict[str, Any]) -> dict[str, Any]:
    return {field.name: facts[field.name] for field in fields(kind) if field.name in facts}
