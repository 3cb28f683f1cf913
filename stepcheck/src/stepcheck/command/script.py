"""Runs a script as `python train.py` does, watched from the first forward pass on at which all names have values."""

import builtins
import signal
import sys
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from stepcheck import watch
from stepcheck.command.names import Names, Scope, kinds_of
from stepcheck.errors import SpecificationError
from stepcheck.report.report import Report
from stepcheck.trace.log import STEPPED, Log
from stepcheck.user_code.source import is_of_user
from stepcheck.user_code.stack import frames

_SOON, _AGAIN = 0.001, 10.0  # seconds; a script's own `finally` has the latter
_CALLING_BACK = "debugging.py", "callback.py", "script_ops.py"  # files of JAX and TensorFlow
_OF_MODELS = "train_on_batch", "evaluate", "predict", "test_on_batch", "predict_on_batch"


class Enough(BaseException):
    """Ends a script once enough updates were seen. No `except Exception` of the user's catches it."""


class Run:
    """One run of a script.

    Attributes:
        report: of what was watched; None if nothing was.
        how: how the script ended, in words; "" if it came to its end, or was ended here.
        why: why `stepcheck.watch` refused what was stated; "" if it did not.
        seen: the names of objects by argument, with the rows of arrays.
        has_passed: whether a model was called.
    """

    def __init__(self, names: Names, settings: dict[str, Any], num_updates: int):
        self.report: Report | None = None
        self.how, self.why = "", ""
        self.seen: dict[str, dict[str, int]] = defaultdict(dict)
        self.has_passed = False
        self._known: set[str] = set()  # names, at the first pass and at the end
        self._names, self._settings, self._num_updates = names, settings, num_updates
        self._main: dict[str, Any] = {}
        self._doors, self._watch = ExitStack(), ExitStack()
        self._opened: list[str] = []
        self._looking = threading.Lock()
        self._has_stopped = False

    def of(self, script: str, arguments: list[str]) -> None:
        """Run a script to its end, or until there were enough updates."""
        path = Path(script).resolve()
        main = ModuleType("__main__")
        self._main = vars(main)
        self._main.update(__file__=str(path), __builtins__=builtins, __spec__=None)
        with _as_main(main, [script, *arguments], str(path.parent)), self._doors, _alarm(self._end):
            self._await_frameworks()
            try:
                with self._watch:
                    self._execute(path)
            except BaseException as error:
                self._note(error, str(path))
        self._look_at(self._main)

    def missing(self) -> list[str]:
        """Return a message for each name that the script does not have."""
        return [*self._names.missing(self._known)]

    def _execute(self, path: Path) -> None:
        try:
            try:
                exec(compile(path.read_bytes(), str(path), "exec"), self._main)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except BaseException as error:
            is_well = isinstance(error, SystemExit) and not error.code
            if not is_well and not self._has_stopped:  # an engine may raise an error of its own for `Enough`
                raise

    def _note(self, error: BaseException, path: str) -> None:
        """Keep how a script has ended, and print its error as Python does."""
        self.how = f"the script ended with {type(error).__name__}"
        if isinstance(error, SystemExit):
            self.how = f"the script left with exit code {error.code}"
        elif not isinstance(error, KeyboardInterrupt):
            raised = error.__traceback__
            while raised and raised.tb_frame.f_code.co_filename != path:
                raised = raised.tb_next
            traceback.print_exception(type(error), error, raised)

    def _await_frameworks(self) -> None:
        """Open the doors of a framework once the script has imported it, and so has chosen the engine."""
        plain = builtins.__import__

        @wraps(plain)
        def imported(*arguments: Any, **others: Any) -> Any:
            module = plain(*arguments, **others)
            for name in _DOORS:
                found = sys.modules.get(name)
                if found and name not in self._opened and not getattr(found.__spec__, "_initializing", False):
                    self._opened.append(name)
                    _DOORS[name](self)
            return module

        builtins.__import__ = imported
        self._doors.callback(setattr, builtins, "__import__", plain)

    def open(self, owner: Any, name: str, fitted: Callable[..., dict | None] = lambda *_, **__: {}) -> None:
        """Look for the names before each call of a method; `fitted`: what it states itself, None for no pass."""
        method, is_own = getattr(owner, name), name in vars(owner)

        @wraps(method)
        def called(own: Any, *arguments: Any, **others: Any) -> Any:
            stated = fitted(own, *arguments, **others)
            if stated is None or not self._look(stated):
                return method(own, *arguments, **others)
            return getattr(own, name)(*arguments, **others)  # hooked by now

        setattr(owner, name, called)
        self._doors.callback(*(setattr, owner, name, method) if is_own else (delattr, owner, name))

    def _look(self, fitted: dict[str, Any]) -> bool:
        """Begin to watch if the names have values here; return whether it begins."""
        if not self._looking.acquire(blocking=False):
            return False
        try:
            scopes = [*_scopes(), self._main]
            if not self.has_passed:
                self.has_passed = True
                for scope in scopes:
                    self._look_at(scope)
            found = (values for scope in scopes if (values := self._names.values(scope)) is not None)
            values = next(found, None)
            return values is not None and self._begin(_joined(fitted, values))
        finally:
            self._looking.release()

    def _begin(self, stated: dict[str, Any]) -> bool:
        is_compiled = getattr(stated.get("model"), "compiled", False)
        if self.report is not None or not {"model", "data"} <= {*stated} or not ("loss" in stated or is_compiled):
            return False
        self._doors.close()
        token = STEPPED.set(self._count)
        try:
            self.report = self._watch.enter_context(watch(**stated, **self._settings))
        except SpecificationError as error:  # it may be right at a later pass
            self.why = str(error)
            for name in self._opened:
                _DOORS[name](self)
        finally:
            STEPPED.reset(token)
        return self.report is not None

    def _count(self, log: Log) -> None:
        """Close a log that has enough updates, and end the script soon, in its main thread."""
        if log.is_open and log.num_moves >= self._num_updates:
            log.is_open, log.is_cut, self._has_stopped = False, True, True
            signal.setitimer(signal.ITIMER_REAL, _SOON, _AGAIN)

    def _end(self, _: int, frame: FrameType | None) -> None:
        """End the script; not inside of a callback, in which an exception would be the engine's."""
        if any(each.f_code.co_filename.endswith(_CALLING_BACK) for each in frames(frame)):
            signal.setitimer(signal.ITIMER_REAL, _SOON, _AGAIN)
        else:
            raise Enough

    def _look_at(self, scope: Scope) -> None:
        self._known |= {*scope}
        for kind, name, num_rows in kinds_of(dict(scope)):
            self.seen[kind].setdefault(name, num_rows)


def _scopes() -> Iterator[Scope]:
    """Yield the names of the user's functions that run, the innermost first."""
    for frame in frames(sys._getframe(1)):
        if is_of_user(frame.f_code.co_filename):
            yield frame.f_globals | frame.f_locals


def _joined(fitted: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return what is stated by name, and for the rest by the `fit` of that model."""
    is_other = "model" in values and values["model"] is not fitted.get("model")
    return values if is_other else fitted | values


def _of_fit(
    model: Any,
    x: Any = None,
    y: Any = None,
    *_: Any,
    validation_split: float = 0.0,
    sample_weight: Any = None,
    **__: Any,
) -> dict[str, Any]:
    """Return what `fit` states of a compiled model, if it is given arrays."""
    data = (x, y) if sample_weight is None else (x, y, sample_weight)
    if not getattr(model, "compiled", False) or not all(hasattr(part, "__array__") for part in data):
        return {}
    num_rows = int(len(x) * (1.0 - (validation_split or 0.0)))
    return {"model": model, "data": tuple(part[:num_rows] for part in data)}


def _of_call(layer: Any, *arguments: Any, **_: Any) -> dict | None:
    """Return nothing for the pass of a model; None for a call that only builds one, or of a layer alone."""
    is_model = isinstance(layer, sys.modules["keras"].Model)
    is_symbol = any(type(each).__name__ == "KerasTensor" for each in arguments)
    return None if is_symbol or not is_model else {}


def _open_keras(run: Run) -> None:
    keras = sys.modules["keras"]
    run.open(keras.layers.Layer, "__call__", _of_call)
    run.open(keras.layers.Layer, "stateless_call")
    run.open(keras.Model, "fit", _of_fit)
    for name in _OF_MODELS:
        run.open(keras.Model, name)
    if keras.backend.backend() == "tensorflow":  # a pass inside of these has tensors without values
        tf = sys.modules["tensorflow"]
        run.open(type(tf.function(lambda: None)), "__call__")
        run.open(tf.GradientTape, "__enter__")


def _open_torch(run: Run) -> None:
    run.open(sys.modules["torch"].nn.Module, "__call__")


_DOORS: dict[str, Callable[[Run], None]] = {"keras": _open_keras, "torch": _open_torch}


@contextmanager
def _as_main(main: ModuleType, argv: list[str], folder: str) -> Iterator[None]:
    """Let a module be what `python train.py` makes of a script."""
    before = sys.modules["__main__"], sys.argv, list(sys.path)
    sys.modules["__main__"], sys.argv = main, argv
    sys.path[:1] = [folder]
    try:
        yield
    finally:
        sys.modules["__main__"], sys.argv, sys.path[:] = before


@contextmanager
def _alarm(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)
