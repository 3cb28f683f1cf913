"""Runs a script as `python train.py` does, watched from the first forward pass on at which all names have values."""

import builtins
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any

from stepcheck import watch
from stepcheck.command.names import Names, Scope, imported
from stepcheck.errors import SpecificationError
from stepcheck.report.report import Report
from stepcheck.seams import replaced
from stepcheck.trace.log import STEPPED, Log
from stepcheck.user_code.source import is_of_user
from stepcheck.user_code.stack import frames

_DOORS = (  # methods of every loop, by their classes; inside of those of TensorFlow a pass has no numbers
    *("keras:layers.Layer.__call__", "keras:layers.Layer.stateless_call", "keras:Model.fit"),
    *(
        "keras:Model.train_on_batch",
        "keras:Model.evaluate",
        "keras:Model.predict",
        "torch:nn.Module.__call__",
    ),
    "tensorflow:GradientTape.__enter__",
    "tensorflow.python.eager.polymorphic_function.polymorphic_function:Function.__call__",
)
_SOON, _AGAIN = 0.001, 10.0  # seconds; a script's own `finally` has the latter
_CALLING_BACK = "debugging.py", "callback.py", "script_ops.py"  # files of JAX and TensorFlow


class Enough(BaseException):
    """Ends a script once enough updates were seen. No `except Exception` of the user's catches it."""


class Run:
    """One run of a script.

    Attributes:
        report: None if nothing was watched.
        how: how the script failed, in words; "" if it did not.
        scopes: the names that had values at the last call of a model; none without such a call.
    """

    def __init__(self, names: Names, learning_rate: float | None, num_updates: int):
        self.report: Report | None = None
        self.how = ""
        self.scopes: list[Scope] = []
        self._names, self._learning_rate, self._num_updates = names, learning_rate, num_updates
        self._doors, self._watch, self._opened = ExitStack(), ExitStack(), set[str]()
        self._looking, self._has_stopped, self._is_over = threading.Lock(), False, False

    def of(self, script: str, arguments: list[str]) -> None:
        """Run a script to its end, or until there were enough updates.

        Raises:
            SpecificationError: the stated objects cannot be watched; the script has ended there.
        """
        signal.signal(signal.SIGALRM, self._end)
        path = [str(Path(script).resolve().parent), *sys.path[1:]]
        with replaced(sys, "argv", [script, *arguments]), replaced(sys, "path", path), self._doors:
            self._doors.enter_context(
                replaced(builtins, "__import__", self._importing(builtins.__import__))
            )
            try:
                with self._watch:
                    self._execute(script)
            except SpecificationError:
                raise
            except BaseException as error:  # the script's, which is said
                self.how = f"the script ended with {type(error).__name__}: {error}"
                traceback.print_exc()

    def _execute(self, script: str) -> None:
        try:
            try:
                runpy.run_path(script, run_name="__main__")
            finally:
                self._is_over = True  # later updates that an engine reports end nothing
                signal.setitimer(signal.ITIMER_REAL, 0)
        except BaseException as error:
            has_exited = isinstance(error, SystemExit) and not error.code
            if (
                not has_exited and not self._has_stopped
            ):  # an engine may raise an error of its own for `Enough`
                raise

    def _importing(self, plain: Callable) -> Callable:
        """Return `__import__`, after which doors are opened: the script has chosen the engine by then."""

        def importing(*arguments: Any, **others: Any) -> Any:
            module = plain(*arguments, **others)
            for place in {*_DOORS} - self._opened:
                owner, _, name = place.rpartition(".")
                if (kind := imported(owner)) is not None:
                    self._opened.add(place)
                    self._doors.enter_context(
                        replaced(kind, name, self._looking_before(kind, name))
                    )
            return module

        return importing

    def _looking_before(self, owner: Any, name: str) -> Callable:
        """Return a method that looks for the names first; hooked by then, it is called as the hooks have it."""
        method = getattr(owner, name)

        @wraps(method)
        def called(own: Any, *arguments: Any, **others: Any) -> Any:
            fitted = _fitted(own, *arguments, **others) if name == "fit" else {}
            has_begun = self._looking.acquire(blocking=False) and self._begins(fitted)
            return (
                getattr(own, name)(*arguments, **others)
                if has_begun
                else method(own, *arguments, **others)
            )

        return called

    def _begins(self, fitted: dict[str, Any]) -> bool:
        """Begin to watch, if all has values here; return whether that is so. Else the next call looks again."""
        running = (each for each in frames(sys._getframe(1)) if is_of_user(each.f_code.co_filename))
        self.scopes = [
            *(each.f_globals | each.f_locals for each in running),
            vars(sys.modules["__main__"]),
        ]
        found = (
            values for scope in self.scopes if (values := self._names.values(scope)) is not None
        )
        values = next(found, {})
        stated = (
            fitted | values
            if values.get("model", fitted.get("model")) is fitted.get("model")
            else values
        )
        is_compiled = getattr(stated.get("model"), "compiled", False)
        if not {"model", "data"} <= {*stated} or not ("loss" in stated or is_compiled):
            self._looking.release()
            return False
        self._doors.close()
        token = STEPPED.set(self._count)
        try:
            self.report = self._watch.enter_context(
                watch(**stated, learning_rate=self._learning_rate)
            )
        finally:
            STEPPED.reset(token)
        return True

    def _count(self, log: Log) -> None:
        """Close a log that has enough updates, and end the script soon, in its main thread."""
        if log.is_open and log.num_moves >= self._num_updates:
            log.is_open, log.is_cut, self._has_stopped = False, True, True
            signal.setitimer(signal.ITIMER_REAL, _SOON, _AGAIN)

    def _end(self, _: int, frame: FrameType | None) -> None:
        """End the script; not inside of a callback, in which an exception would be the engine's."""
        if self._is_over:
            signal.setitimer(signal.ITIMER_REAL, 0)
            return
        if not any(each.f_code.co_filename.endswith(_CALLING_BACK) for each in frames(frame)):
            raise Enough
        signal.setitimer(signal.ITIMER_REAL, _SOON, _AGAIN)


def _fitted(
    model: Any,
    x: Any = None,
    y: Any = None,
    *_: Any,
    validation_split: float | None = None,
    sample_weight: Any = None,
    **__: Any,
) -> dict[str, Any]:
    """Return what `fit` states of a compiled model, if it is given arrays."""
    data = (x, y) if sample_weight is None else (x, y, sample_weight)
    if not getattr(model, "compiled", False) or not all(
        hasattr(part, "__array__") for part in data
    ):
        return {}
    num_rows = int(len(x) * (1.0 - (validation_split or 0.0)))
    return {"model": model, "data": tuple(part[:num_rows] for part in data)}
