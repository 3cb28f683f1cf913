"""Rename the metrics of a snapshot to their names in this process: Keras numbers repeated names."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from wholestep.checkpoints.snapshot import Snapshot, plain

_BEFORE = re.compile(r"=?(?:val_)?")  # prefixes of names: of values that the model computes, and of validation


def renamed(snapshot: Snapshot, here: Iterable[str]) -> Snapshot:
    """Return a snapshot with the metrics in its logs and its History renamed to their names here.

    Args:
        here: the names of the metrics and losses of this model.
    """
    facts = snapshot.facts
    names = paired((name for name, _ in facts["layout"] or ()), here)
    if not names:
        return snapshot
    place, also = facts["place"], facts["also"]
    logs = None if place["logs"] is None else _called(place["logs"], names)
    told = {
        "layout": [[_name(name, names), shape] for name, shape in facts["layout"]],
        "place": {**place, "latest": _called(place["latest"], names), "logs": logs},
    }
    if "callbacks" in also:
        known = also["callbacks"]
        seen = [[kind, _of_callback(kind, state, names)] for kind, state in known["told"]]
        told["also"] = {**also, "callbacks": {**known, "told": seen}}
    return replace(snapshot, facts=facts | told)


def paired(before: Iterable[str], here: Iterable[str]) -> dict[str, str]:
    """Return the changed names, from before to here; names that differ only in numbers are paired in order.

    >>> paired(["loss", "auc", "auc_1", "kl_1"], ["loss", "auc_1", "auc_2"])
    {'auc': 'auc_1', 'auc_1': 'auc_2'}
    >>> paired(["top_1", "top_5"], ["top_5", "top_1"])
    {}
    """
    names: dict[str, str] = {}
    by_words = _by_words(here)
    for words, known in _by_words(before).items():
        found = by_words.get(words, [])
        if len(found) == len(known) and set(found) != set(known):
            names |= dict(zip(known, found, strict=True))
    return names


def _by_words(names: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in dict.fromkeys(_BEFORE.sub("", name, count=1) for name in names):
        found.setdefault(plain(name), []).append(name)
    return found


def _name(name: str, names: Mapping[str, str]) -> str:
    before = _BEFORE.match(name)
    assert before is not None, "a pattern that matches anywhere"
    return before[0] + names.get(name[before.end() :], name[before.end() :])


def _called(numbers: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {_name(name, names): value for name, value in numbers.items()}


def _of_callback(kind: str, state: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    is_history = kind == "History" and "history" in state
    return {**state, "history": _called(state["history"], names)} if is_history else dict(state)
