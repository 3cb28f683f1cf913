"""Runs a script as `python train.py` does, watched, and ends it when enough was seen."""

import importlib.abc
import importlib.machinery
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NamedTuple

from stepcheck.command.stop import Enough, as_command, over

_BUILD = (
    "Keras' optimizer makes its variables at its first step, which may be too late under a strategy. Make it inside of "
    "`strategy.scope()`, and call `optimizer.build(model.trainable_variables)` there"
)


class Ran(NamedTuple):
    """How a script ended.

    Attributes:
        scout: what watched it; None if it did not import Keras.
        how: "" for a script that ended well or was ended here; else what happened, in words.
    """

    scout: Any
    how: str


def run(script: str, arguments: list[str], num_updates: int | None) -> Ran:
    """Run a script until it ends, or its loops have made `num_updates` updates; None for as many as are needed.

    Keras is watched from the moment on when the script imports it, so that the script still chooses the engine. An
    interrupt (Ctrl-C) ends the script; it is passed on if no update was made.
    """
    path = Path(script).resolve()
    main = ModuleType("__main__")
    main.__dict__.update(__file__=str(path), __builtins__=__builtins__, __spec__=None)
    scouts: list[Any] = []
    imported, how = frozenset(sys.modules), ""
    with ExitStack() as stack:
        stack.enter_context(_as_main(main, [script, *arguments], str(path.parent)))

        def watch() -> None:
            from stepcheck.keras.scout import Scout

            scout = Scout(num_updates, imported)
            stack.enter_context(scout.on())
            stack.enter_context(as_command(scout.limit))
            scouts.append(scout)

        stack.enter_context(_once_imported("keras", watch))
        try:
            try:
                exec(compile(path.read_bytes(), str(path), "exec"), main.__dict__)
            finally:
                for scout in scouts:
                    _end(scout)
        except Enough as enough:
            _look(scouts, enough.__traceback__)
        except SystemExit as left:
            _look(scouts, left.__traceback__)
            how = _said(left)
        except KeyboardInterrupt as interrupt:
            if not any(any(_num_seen(scout)[:2]) for scout in scouts):
                raise
            _look(scouts, interrupt.__traceback__)
            how = "the script was interrupted"
        except Exception as error:
            _look(scouts, error.__traceback__)
            if not any(scout.limit.has_stopped for scout in scouts):  # else an engine's error for `Enough`
                traceback.print_exception(type(error), error, _of_script(error.__traceback__, str(path)))
                how = _ended_with(error)
        for scout in scouts:
            scout.around.take(main.__dict__)
    return Ran(max(scouts, key=_num_seen, default=None), how)


def _num_seen(scout: Any) -> tuple[int, ...]:
    """Return how much a scout has seen: audits of the script's own, steps, forward passes, models."""
    steps, passes = (sum(len(getattr(each.log, name)) for each in scout.watched) for name in ("applied", "called"))
    return len(scout.limit.reports), steps, passes, len(scout.watched)


def _end(scout: Any) -> None:
    """Note that the script has ended, and wait for its computations; an engine's error is the script's."""
    try:
        over(scout.limit.has_come)
    finally:
        scout.settle()


def _look(scouts: list[Any], raised: TracebackType | None) -> None:
    for scout in scouts:
        scout.around.look(raised)


def _said(left: SystemExit) -> str:
    if left.code in (None, 0):
        return ""
    if not isinstance(left.code, int):
        print(left.code, file=sys.stderr)
    return f"the script left with exit code {left.code if isinstance(left.code, int) else 1}"


def _ended_with(error: Exception) -> str:
    told = f"the script ended with an error, {type(error).__name__}"
    if sys.modules.get("keras") is None or isinstance(error, SyntaxError):  # the script's, where it is compiled
        return told
    from stepcheck.report.found import own_fault

    if _is_of_an_unbuilt_optimizer(error):
        *_, last = (line.strip() for line in str(error).splitlines() if line.strip())
        return f"the script ended with its own error: {last}. {_BUILD}"
    return own_fault(error) or told


def _is_of_an_unbuilt_optimizer(error: Exception) -> bool:
    """Whether Keras' optimizer could not make its variables in a step under a strategy of TensorFlow."""
    lines = "".join(traceback.format_exception(error)).splitlines()
    builds = [line for line in lines if "optimizers" in line and line.rstrip(" *").endswith("in build")]
    return bool(builds) and any("tf.distribute" in line or "strategy.run" in line for line in lines)


def _of_script(raised: TracebackType | None, path: str) -> TracebackType | None:
    """Return the part of a traceback that begins in the script."""
    part = raised
    while part is not None and part.tb_frame.f_code.co_filename != path:
        part = part.tb_next
    return part or raised


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
def _once_imported(name: str, then: Callable[[], None]) -> Iterator[None]:
    """Call a function as soon as a module has been imported; now, if it has been."""
    if sys.modules.get(name) is not None:
        then()
        yield
        return
    finder = _Finder(name, then)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        finder.remove()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module as the other finders do, and is notified when it is imported, not by `find_spec` alone."""

    def __init__(self, name: str, then: Callable[[], None]):
        self._name, self._then = name, then
        self._is_asking = False

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != self._name or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._loaded)
        return spec

    def _loaded(self) -> None:
        self.remove()
        self._then()

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)


class _Loader(importlib.abc.Loader):
    """Loads a module as another does, and says so."""

    def __init__(self, loader: Any, then: Callable[[], None]):
        self._loader, self._then = loader, then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._then()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
