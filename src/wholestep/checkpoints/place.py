"""Where a call and its data stand, and what else goes with a run."""

from dataclasses import dataclass, field, is_dataclass
from types import UnionType
from typing import Any, Protocol, get_args, get_origin, get_type_hints


class Keeps(Protocol):
    """Whatever goes with a run: callbacks, and what a loop of one's own has."""

    def get_state(self) -> dict[str, Any]:
        """Return nested numbers, words and arrays."""

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from there."""


class Watch(Protocol):
    """The callbacks of a call."""

    @property
    def unknown(self) -> list[str]:
        """The callbacks of which nobody knows a state: they start anew where a run goes on."""

    def changes(self, state: dict[str, Any] | None) -> list[str]:
        """Return which callbacks are other ones than those of a state, or set otherwise, in words."""


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


def parsed(kind: Any, said: Any) -> Any:
    """Return JSON as a value of a type. Names that a dataclass lacks, as of a later release, are left out.

    >>> parsed(DataPlace, {"position": [0, 3], "num_batches": None, "news": 1}).position
    (0, 3)

    Raises:
        TypeError: it is of another type.
    """
    origin, of, is_record = get_origin(kind), get_args(kind), is_dataclass(kind)
    if kind is Any or (origin is UnionType and said is None):
        return said
    if origin is UnionType:  # of a type and None
        return parsed(of[0], said)
    json: Any = dict if is_record else list if origin is tuple else origin or kind
    if type(said) is not json:
        raise TypeError(f"{getattr(kind, '__name__', kind)} expected, not {str(said)[:40]!r}")
    if is_record:
        return kind(**{name: parsed(of, said[name]) for name, of in get_type_hints(kind).items() if name in said})
    if origin is dict:
        return {key: parsed(of[1], value) for key, value in said.items()}
    if origin is None:
        return said
    kinds = [of[0]] * len(said) if origin is list or of[-1] is ... else of
    return origin(parsed(kind, value) for kind, value in zip(kinds, said, strict=True))
