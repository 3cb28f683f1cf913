"""Checkpoints: a run in files. Other packages import from here.

A name is imported on first use, as `wholestep checkpoint` needs no Keras, and a run knows its
values but not its saver.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wholestep.checkpoints.callbacks import (
        differing,
        go_on_with_file,
        made,
        paired,
        put_back,
        saved_in,
        starts_anew,
        state_of,
    )
    from wholestep.checkpoints.configuration import (
        batch_facts,
        code_facts,
        data_facts,
        own_variables,
        rates_of,
        value_facts,
    )
    from wholestep.checkpoints.data import advance_to, check_goes_on, note
    from wholestep.checkpoints.position import CallPosition, DataPosition, Stateful
    from wholestep.checkpoints.resume import Span, VerifiedCheckpoint, changed_since, read_one
    from wholestep.checkpoints.saver import Saver, Unsaved, save_once
    from wholestep.checkpoints.settings import Checkpoints
    from wholestep.checkpoints.shards import Numbers, own_copy
    from wholestep.checkpoints.snapshot import (
        FACTS,
        GROUPS,
        Assigned,
        RunFacts,
        Snapshot,
        assign_by_path,
        from_json,
        leaves_of,
        put,
        put_own,
        renamed,
        to_json,
    )
    from wholestep.checkpoints.weights import load_weights

_NAMES = {
    "callbacks": (
        "differing",
        "go_on_with_file",
        "made",
        "paired",
        "put_back",
        "saved_in",
        "starts_anew",
        "state_of",
    ),
    "configuration": (
        "batch_facts",
        "code_facts",
        "data_facts",
        "own_variables",
        "rates_of",
        "value_facts",
    ),
    "data": ("check_goes_on", "advance_to", "note"),
    "shards": ("Numbers", "own_copy"),
    "position": ("DataPosition", "Stateful", "CallPosition"),
    "resume": ("VerifiedCheckpoint", "Span", "changed_since", "read_one"),
    "saver": ("Saver", "Unsaved", "save_once"),
    "settings": ("Checkpoints",),
    "snapshot": (
        *(
            "FACTS",
            "GROUPS",
            "Assigned",
            "RunFacts",
            "Snapshot",
            "assign_by_path",
            "leaves_of",
            "put",
            "put_own",
        ),
        *("from_json", "renamed", "to_json"),
    ),
    "weights": ("load_weights",),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = [*_HOMES, "command"]


def __getattr__(name: str) -> Any:
    """Return a name of a module of this package."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
