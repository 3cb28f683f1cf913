"""Python numbers that a traced step reads: they stay as they were when it was traced."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from dis import get_instructions
from types import CodeType, FrameType
from typing import Any

from wholestep.audit.found import Likely
from wholestep.audit.source import is_of_user

_TRACING = "pjit.py", "polymorphic_function.py"  # files of JAX and TensorFlow in which a trace begins


@dataclass
class _Read:
    """A number of the script that a traced function reads; `home`: the namespace that holds it."""

    home: dict[str, Any]
    function: str
    values: set[float] = field(default_factory=set)


class FrozenNumbers:
    """Collects the numbers that functions of the script read while they are traced."""

    def __init__(self) -> None:
        self._read: dict[tuple[int, str], _Read] = {}

    def look(self) -> None:
        """Look at the functions of the script that are being traced, if some are."""
        frame: FrameType | None = sys._getframe(1)
        inside = []
        while frame is not None and not frame.f_code.co_filename.endswith(_TRACING):
            inside.append(frame)
            frame = frame.f_back
        for each in inside if frame is not None else ():
            if is_of_user(file := each.f_code.co_filename) or "__autograph_generated" in file:
                self._take(each)

    def findings(self) -> Iterator[str]:
        """Yield a note for each number that has another value by now than in the traced function."""
        for (_, name), read in self._read.items():
            now = read.home.get(name)
            if len(read.values) == 1 and _is_number(now) and now not in read.values:
                (value,), function = read.values, read.function
                told = f"`{name}` is {value:g} in each call of `{function}`, and {now:g} by now: a Python number is "
                told += "read once, when the function is traced. Pass it as an argument, or hold it in a variable."
                yield Likely(told)

    def _take(self, frame: FrameType) -> None:
        codes = [*_codes(frame.f_code)]
        names = {name for code in codes for name in code.co_names} - {name for code in codes for name in _stored(code)}
        owners = [frame.f_globals, *(vars(v) for v in frame.f_locals.values() if _is_of_script(v))]
        for home in owners:
            for name in names & home.keys():
                if _is_number(home[name]):
                    read = _Read(home, frame.f_code.co_name.removeprefix("tf__"))
                    self._read.setdefault((id(home), name), read).values.add(home[name])


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function, and of the functions inside of it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)


def _stored(code: CodeType) -> set[str]:
    """Return the globals and attributes that a function assigns itself."""
    return {each.argval for each in get_instructions(code) if each.opname in ("STORE_ATTR", "STORE_GLOBAL")}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_of_script(value: Any) -> bool:
    """Whether it is an object of a class of the script."""
    file = getattr(sys.modules.get(type(value).__module__), "__file__", None)
    return file is not None and hasattr(value, "__dict__") and is_of_user(file)
