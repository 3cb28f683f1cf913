"""The position of a call and of its data, and other state of a run."""

from dataclasses import dataclass, field
from typing import Any, Protocol


class Keeps(Protocol):
    """State that is saved with a run: callbacks, and the objects of a custom loop."""

    def get_state(self) -> dict[str, Any]:
        """Return nested numbers, strings and arrays."""

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore such a state."""


class Watch(Protocol):
    """The callbacks of a call."""

    @property
    def unknown(self) -> list[str]:
        """The callbacks whose state cannot be saved: they start anew in a resumed run."""

    def changes(self, state: dict[str, Any] | None) -> list[str]:
        """Describe the callbacks that differ from a saved state, or in their settings."""


@dataclass
class Place:
    """The position of a call of `fit` or `steps`.

    Args:
        call: "fit" or "steps"; empty between calls.
        epoch: the call's epoch.
        done: the number of updates of the epoch so far.
        began: the epoch of the data at its start.
        is_open: whether callbacks have received its start.
        logs: the logs for callbacks at its end, after all its updates and its validation.
        told: the number of callbacks that have received these logs.
        latest: the logs of the last update, if a snapshot was taken after it.
    """

    call: str = ""
    epoch: int = 0
    done: int = 0
    began: int = 0
    is_open: bool = False
    logs: dict[str, Any] | None = None
    told: int = 0
    latest: dict[str, Any] = field(default_factory=dict)


@dataclass
class DataPlace:
    """The position of a run in its data.

    Args:
        position: the epoch and the number of the next batch in it.
        largest: by row shapes, the most rows of a ready-made batch so far.
        num_batches: the number of batches in an epoch, if known.
        layout: a description of the rows and batches; see `wholestep.data.facts`.
        last: a digest of the last ready-made batch used; empty if it is not to be compared.
        state: the stream's state after that batch, if the stream has one.
    """

    position: tuple[int, int] = (0, 0)
    largest: dict[str, int] = field(default_factory=dict)
    num_batches: int | None = None
    layout: dict[str, str] = field(default_factory=dict)
    last: str = ""
    state: Any = None
