"""Runs a script as `python train.py` does, watched from the first call on at which all is stated."""

import builtins
import runpy
import signal
import sys
import threading
import traceback
from collections import ChainMap
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any

from stepcheck import watch
from stepcheck.command.names import Names, Scope, imported, seen
from stepcheck.errors import SpecificationError
from stepcheck.report import usage
from stepcheck.report.report import Report
from stepcheck.seams import replaced
from stepcheck.trace.log import STEPPED, Log
from stepcheck.user_code.source import is_of_user
from stepcheck.user_code.stack import frames

_FIT, _TRAINER = "keras:Model.fit", "transformers.trainer:Trainer.train"  # which state the update
_STEPS = {"keras:optimizers.Optimizer.apply", "torch:Tensor.backward"}
_DOORS = {  # methods of every loop; inside of those of TensorFlow a pass has no numbers
    *(_FIT, _TRAINER, *_STEPS, "torch:nn.Module.__call__"),
    *("keras:layers.Layer.__call__", "keras:layers.Layer.stateless_call"),
    *("keras:Model.train_on_batch", "keras:Model.evaluate", "keras:Model.predict"),
    "tensorflow:GradientTape.__enter__",
    "tensorflow.python.eager.polymorphic_function.polymorphic_function:Function.__call__",
}
_SOON, _AGAIN = 0.001, 10.0  # seconds; a script's own `finally` has the latter
_CALLING_BACK = "debugging.py", "callback.py", "script_ops.py"  # files of JAX and TensorFlow
_NEEDED = {"model", "data", "loss"}


class Enough(BaseException):
    """Ends a script once enough updates were seen. No `except Exception` of the user's catches it."""


class Run:
    """One run of a script.

    Attributes:
        report: None if nothing was watched.
        error: the script's, if it failed.
        scope: the names that had values at the last call of a model; empty without such a call.
    """

    def __init__(self, names: Names, learning_rate: float | None, num_updates: int):
        self.report: Report | None = None
        self.error: BaseException | None = None
        self.scope: Scope = {}
        self._names, self._learning_rate, self._num_updates = names, learning_rate, num_updates
        self._has_missed, self._has_stopped, self._is_over = False, False, False
        self._doors, self._watch, self._opened = ExitStack(), ExitStack(), set[str]()
        self._files: set[str] = set()
        self._looking = threading.Lock()

    def of(self, script: str, arguments: list[str]) -> None:
        """Run a script to its end, or until there were enough updates.

        Raises:
            SpecificationError: the stated objects cannot be watched; the script has ended there.
        """
        signal.signal(signal.SIGALRM, self._end)
        path = [str(Path(script).resolve().parent), *sys.path[1:]]
        importing = self._importing(builtins.__import__)
        with replaced(sys, "argv", [script, *arguments]), replaced(sys, "path", path), self._doors:
            self._doors.enter_context(replaced(builtins, "__import__", importing))
            try:
                with self._watch:
                    self._execute(script)
            except SpecificationError:
                raise
            except BaseException as error:  # the script's, which is said
                self.error = error
                traceback.print_exc()

    def unwatched(self, script: str) -> str:
        """Return in words why nothing was watched, and the command to run."""
        if not self.scope:
            return usage.unwatched(self.error)
        lines = [usage.unknown(*each) for each in self._names.unknown(self.scope)]
        lines += usage.understated(script, self._names.texts, seen(self.scope))
        return "\n".join(lines)

    def _execute(self, script: str) -> None:
        try:
            try:
                runpy.run_path(script, run_name="__main__")
            finally:
                self._is_over = True  # later updates that an engine reports end nothing
                signal.setitimer(signal.ITIMER_REAL, 0)
        except BaseException as error:
            has_exited = isinstance(error, SystemExit) and not error.code
            # An engine may raise an error of its own for `Enough`.
            if not has_exited and not self._has_stopped:
                raise

    def _importing(self, plain: Callable) -> Callable:
        """Return `__import__`, after which doors are opened: the script has chosen the engine by then."""

        def importing(*arguments: Any, **others: Any) -> Any:
            module = plain(*arguments, **others)
            for place in _DOORS - self._opened:
                owner, _, name = place.rpartition(".")
                if (kind := imported(owner)) is not None:
                    self._opened.add(place)
                    looking = self._looking_before(place, kind, name)
                    self._doors.enter_context(replaced(kind, name, looking))
            return module

        return importing

    def _looking_before(self, place: str, owner: Any, name: str) -> Callable:
        """Return a method that looks for the names first; hooked by then, it is called as the hooks have it."""
        method = getattr(owner, name)

        @wraps(method)
        def called(own: Any, *arguments: Any, **others: Any) -> Any:
            stated = _stated_by(place, owner, own, *arguments, **others)
            if self._looking.acquire(blocking=False):
                if self._begins(stated):
                    return getattr(own, name)(*arguments, **others)
                self._looking.release()
                if place in _STEPS:
                    self._miss()
            return method(own, *arguments, **others)

        return called

    def _begins(self, stated: dict[str, Any]) -> bool:
        """Begin to watch, if all has values here; return whether that is so. Else the next call looks again."""
        running = [each for each in frames(sys._getframe(1)) if is_of_user(each.f_code.co_filename)]
        self._files |= {each.f_code.co_filename for each in running}
        scopes = [each.f_globals | each.f_locals for each in running]
        scopes.append(vars(sys.modules["__main__"]))
        self.scope = ChainMap(*scopes)
        named = next(filter(None, map(self._names.values, scopes)), {})
        if named.get("model", stated.get("model")) is stated.get("model"):
            named = stated | named
        if getattr(named.get("model"), "compiled", False):
            named.setdefault("loss", None)
        if not {*named} >= _NEEDED:
            return False
        self._doors.close()
        token = STEPPED.set(self._count)
        try:
            watched = watch(**named, learning_rate=self._learning_rate)
            self.report = self._watch.enter_context(watched)
        finally:
            STEPPED.reset(token)
        return True

    def _miss(self) -> None:
        """End the script at its first step, if its names do not state the update, and cannot later."""
        if not self._has_missed:
            self._has_missed = True
            sources = "".join(Path(file).read_text() for file in self._files)
            if not ({*self._names.texts} >= _NEEDED and self._names.are_written(sources)):
                self._stop()

    def _count(self, log: Log) -> None:
        """Close a log that has enough updates, and end the script soon."""
        if log.is_open and log.num_moves >= self._num_updates:
            log.is_open, log.is_cut = False, True
            self._stop()

    def _stop(self) -> None:
        self._has_stopped = True
        signal.setitimer(signal.ITIMER_REAL, _SOON, _AGAIN)

    def _end(self, _: int, frame: FrameType | None) -> None:
        """End the script; not inside of a callback, in which an exception would be the engine's."""
        if self._is_over:
            signal.setitimer(signal.ITIMER_REAL, 0)
            return
        if not any(each.f_code.co_filename.endswith(_CALLING_BACK) for each in frames(frame)):
            raise Enough
        signal.setitimer(signal.ITIMER_REAL, _SOON, _AGAIN)


def _stated_by(place: str, owner: type, own: Any, *arguments: Any, **others: Any) -> dict[str, Any]:
    """Return the update that a framework states by a call."""
    if place == _FIT:
        from stepcheck.keras.fitted import stated_by_fit

        return stated_by_fit(own, *arguments, **others)
    if place == _TRAINER:
        from stepcheck.torch.trainers import stated_by_trainer

        return stated_by_trainer(own, owner)
    return {}
