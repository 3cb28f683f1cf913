"""A script is watched once its names, or a call of a framework, state its update."""

import sys
from collections import ChainMap
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from stepcheck import watch
from stepcheck.command.names import Names, Scope, seen
from stepcheck.command.script import FIT, STEPS, TRAINER, Call, Run
from stepcheck.report import usage
from stepcheck.user_code.source import is_of_user
from stepcheck.user_code.stack import frames

_NEEDED = {"model", "data", "loss"}


class Watched(Run):
    """A run that is watched, once all is stated.

    Args:
        more: arguments of `stepcheck.watch` that are no names.
    """

    def __init__(self, names: Names, num_updates: int, **more: Any):
        super().__init__(num_updates)
        self._names, self._more = names, more
        self._scope: Scope = {}
        self._has_missed, self._files = False, set[str]()

    def hooks(self, call: Call) -> AbstractContextManager | None:
        """Return the watch, if all has values here."""
        callers = frames(sys._getframe(1))
        running = [
            each for each in callers if is_of_user(each.f_code.co_filename)
        ]
        scopes: list[Scope] = [
            each.f_globals | each.f_locals for each in running
        ]
        scopes.append(vars(sys.modules["__main__"]))
        self._scope = ChainMap(*map(dict, scopes))
        named = next(filter(None, map(self._names.values, scopes)), {})
        stated = _stated_by(call)
        if named.get("model", stated.get("model")) is stated.get("model"):
            named = stated | named
        if getattr(named.get("model"), "compiled", False):
            named.setdefault("loss", None)
        if {*named} >= _NEEDED:
            return watch(**named, **self._more)
        self._files |= {each.f_code.co_filename for each in running}
        if call.door in STEPS and not self._has_missed:
            self._has_missed = True
            sources = "".join(Path(file).read_text() for file in self._files)
            may_begin = {*self._names.texts} >= _NEEDED
            if not may_begin or not self._names.are_written(sources):
                self.stop()  # the names will get no values
        return None

    def unwatched(self, script: str) -> str:
        """Return in words why nothing was watched, and the command to run."""
        if not self._scope:
            return usage.unwatched(self.error)
        lines = [
            usage.unknown(*each) for each in self._names.unknown(self._scope)
        ]
        lines += usage.understated(script, self._names.texts, seen(self._scope))
        return "\n".join(lines)


def _stated_by(call: Call) -> dict[str, Any]:
    """Return the update that a framework states by a call."""
    if call.door == FIT:
        from stepcheck.keras.fitted import stated_by_fit

        return stated_by_fit(call.own, *call.arguments, **call.others)
    if call.door == TRAINER:
        from stepcheck.torch.trainers import stated_by_trainer

        return stated_by_trainer(call.own, call.owner)
    return {}
