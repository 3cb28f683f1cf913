"""The position of a call and of its data, and other state of a run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from wholestep.errors import SpecificationError, message


class Stateful(Protocol):
    """State that is saved with a run: callbacks, and the objects of a custom loop."""

    def get_state(self) -> dict[str, Any]:
        """Return nested numbers, strings and arrays."""

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore such a state."""


def other_run(source: str, why: str, received: object, way: str) -> SpecificationError:
    """Return the error about a saved run that this call cannot resume.

    Args:
        source: the folder of the run; "" for a snapshot in memory.
        why: the difference.
        way: the way to resume the saved run.
    """
    subject = f"{source} holds another run" if source else "The restored run is another one"
    attempt = f"another folder; or, to resume that run, {way}" if source else way
    return SpecificationError(message(f"{subject}: {why}.", received, attempt))


@dataclass
class CallPosition:
    """The position of a call of `fit` or `steps`."""

    call: str = ""  # "fit" or "steps"; empty between calls
    epoch: int = 0  # the call's epoch
    done: int = 0  # the number of updates of the epoch so far
    began: int = 0  # the epoch of the data at its start
    is_open: bool = False  # whether callbacks have received its start
    # the logs for callbacks at its end, after all its updates and its validation
    logs: dict[str, Any] | None = None
    told: int = 0  # the number of callbacks that have received these logs
    # of the last update, if a snapshot was taken after it
    latest: dict[str, Any] = field(default_factory=dict)


@dataclass
class DataPosition:
    """The position of a run in its data."""

    position: tuple[int, int] = (0, 0)  # the epoch and the number of the next batch in it
    # by row shapes, the most rows of a ready-made batch so far
    largest: dict[str, int] = field(default_factory=dict)
    num_batches: int | None = None  # the number of batches in an epoch, if known
    # of the rows and batches; see `wholestep.data.layout_of`
    layout: dict[str, str] = field(default_factory=dict)
    last: str = ""  # a digest of the last ready-made batch used; empty if it is not to be compared
    state: Any = None  # the stream's state after that batch, if the stream has one


def changed_keys(before: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Return the keys that have another value here, or are missing on one side."""
    return [key for key in {**before, **here} if before.get(key) != here.get(key)]
