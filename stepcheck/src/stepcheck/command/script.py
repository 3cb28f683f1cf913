"""Runs a script as `python train.py` does, under hooks from a call of a framework on."""

import builtins
import runpy
import signal
import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from stepcheck import record
from stepcheck.command.names import imported
from stepcheck.errors import SpecificationError
from stepcheck.seams import replaced
from stepcheck.trace.log import STEPPED, Log
from stepcheck.user_code.stack import frames

FIT, TRAINER = "keras:Model.fit", "transformers.trainer:Trainer.train"
STEPS = {"keras:optimizers.Optimizer.apply", "torch:Tensor.backward"}
_DOORS = {  # methods of every loop; inside of those of TensorFlow a pass has no numbers
    FIT,
    TRAINER,
    *STEPS,
    "torch:nn.Module.__call__",
    "keras:layers.Layer.__call__",
    "keras:layers.Layer.stateless_call",
    "keras:Model.train_on_batch",
    "keras:Model.evaluate",
    "keras:Model.predict",
    "tensorflow:GradientTape.__enter__",
    "tensorflow.python.eager.polymorphic_function.polymorphic_function:Function.__call__",
}
_SOON, _AGAIN = 0.001, 10.0  # seconds; a script's own `finally` has the latter
# files of JAX and TensorFlow
_CALLING_BACK = "debugging.py", "callback.py", "script_ops.py"
# packages that an engine's machine code calls
_ENGINES = {
    "jax",
    "jaxlib",
    "keras",
    "numpy",
    "stepcheck",
    "tensorflow",
    "torch",
}


class Enough(BaseException):
    """Ends a script once enough updates were seen. No `except Exception` catches it."""


class Call(NamedTuple):
    """A call of a framework: the door, the class and object whose method it is, the
    arguments.
    """

    door: str
    owner: Any
    own: Any
    arguments: tuple
    others: dict[str, Any]


class Run(ABC):
    """One run of a script.

    Attributes:
        result: of the hooks, a report or a trace; None if they did not begin.
        error: the script's, if it failed.
    """

    def __init__(self, num_updates: int):
        self.result: Any = None
        self.error: BaseException | None = None
        self._num_updates = num_updates
        self._has_stopped = False
        self._is_over = False
        self._doors = ExitStack()
        self._hooks = ExitStack()
        self._opened = set[str]()
        self._looking = threading.Lock()

    @abstractmethod
    def hooks(self, call: Call) -> AbstractContextManager | None:
        """Return the hooks to begin with before a call; None to look again before the
        next one.
        """

    def of(self, script: str, arguments: list[str]) -> None:
        """Run a script to its end, or until there were enough updates.

        Raises:
            SpecificationError: the hooks cannot begin; the script has ended there.
        """
        signal.signal(signal.SIGALRM, self._end)
        path = [str(Path(script).resolve().parent), *sys.path[1:]]
        importing = self._importing(builtins.__import__)
        token = STEPPED.set(self._count)
        with (
            replaced(sys, "argv", [script, *arguments]),
            replaced(sys, "path", path),
            self._doors,
        ):
            self._doors.enter_context(
                replaced(builtins, "__import__", importing)
            )
            try:
                with self._hooks:
                    self._execute(script)
            except SpecificationError:
                raise
            except BaseException as error:  # the script's, which is said
                self.error = error
                traceback.print_exc()
            finally:
                STEPPED.reset(token)

    def stop(self) -> None:
        """End the script soon, in its main thread."""
        self._has_stopped = True
        signal.setitimer(signal.ITIMER_REAL, _SOON, _AGAIN)

    def _execute(self, script: str) -> None:
        tracer = sys.gettrace()
        try:
            try:
                runpy.run_path(script, run_name="__main__")
            finally:
                # later updates that an engine reports end nothing
                self._is_over = True
                signal.setitimer(signal.ITIMER_REAL, 0)
                sys.settrace(tracer)
        except BaseException as error:
            has_exited = isinstance(error, SystemExit) and not error.code
            # An engine may raise another error for `Enough`.
            if not has_exited and not self._has_stopped:
                raise

    def _importing(self, plain: Callable) -> Callable:
        """Return `__import__`, after which doors are opened: the engine is chosen by
        then.
        """

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
        """Return a method that may begin the hooks; it is called as these have it then."""
        method = getattr(owner, name)

        @wraps(method)
        def called(own: Any, *arguments: Any, **others: Any) -> Any:
            if self._begins(Call(place, owner, own, arguments, others)):
                return getattr(own, name)(*arguments, **others)
            return method(own, *arguments, **others)

        return called

    def _begins(self, call: Call) -> bool:
        """Begin the hooks, if that is possible here, and return whether it was."""
        if not self._looking.acquire(blocking=False):
            return False
        hooks = self.hooks(call)
        if hooks is None:
            self._looking.release()
            return False
        self._doors.close()
        self.result = self._hooks.enter_context(hooks)
        return True

    def _count(self, log: Log) -> None:
        """Close a log that has enough updates, and end the script soon."""
        if log.is_open and log.num_moves >= self._num_updates:
            log.is_open, log.is_cut = False, True
            self.stop()

    def _end(self, _: int, frame: FrameType | None) -> None:
        """End the script where a loop runs: here, or if an engine runs here on the
        loop's next line.

        Machine code of an engine calls Python, and may take an exception for an answer:
        TensorFlow does so for the `len` of a shape, and writes past its memory. In a
        callback an exception would be the engine's.
        """
        python = sys.stdlib_module_names
        own = [each for each in frames(frame) if _package(each) not in python]
        if self._is_over:
            signal.setitimer(signal.ITIMER_REAL, 0)
        elif any(
            each.f_code.co_filename.endswith(_CALLING_BACK) for each in own
        ):
            signal.setitimer(signal.ITIMER_REAL, _SOON, _AGAIN)
        elif _may_end(own[0]):
            raise Enough
        else:
            for each in filter(_may_end, own):
                each.f_trace = _ended
            sys.settrace(lambda *_: None)  # without one no frame is traced


def _ended(_: FrameType, event: str, __: object) -> Callable:
    """End the script on the next line of a frame whose trace this is."""
    if event == "line":
        raise Enough
    return _ended


def _may_end(frame: FrameType) -> bool:
    """Whether a script may end in a frame, as no engine's machine code calls it."""
    return frame.f_code.co_name == "fit" or _package(frame) not in _ENGINES


def _package(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]


class Recorded(Run):
    """A run that is recorded from its first call of a framework on."""

    def hooks(self, call: Call) -> AbstractContextManager:
        """Return the hooks of the record."""
        return record()
