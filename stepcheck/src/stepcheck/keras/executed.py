"""The places of the user's code that run after forward passes."""

import sys
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from types import CodeType, FrameType
from typing import Any

from stepcheck.command.stop import frames
from stepcheck.trace.log import Line
from stepcheck.user_code.source import Place, is_of_user, line_of_user

_DIFFERENTIATING = "value_and_grad_f"  # a function of JAX
_MOST_OPCODES = 20_000  # after a forward pass
_MOST_PASSES = 3  # on a line: what runs after them is known


class Executed:
    """The places of the user's code that run after forward passes.

    Attributes:
        ran: the places.
        takes: by the line of a forward pass, the line that takes the gradient.
    """

    def __init__(self) -> None:
        self.ran: set[Place] = set()
        self.takes: dict[Line, Line] = {}
        self._is_own: dict[int, tuple[CodeType, bool]] = {}  # by identity: a code's hash goes over all of it
        self._seen: set[tuple[int, int]] = set()
        self._passes = Counter[Line]()
        self._left, self._is_over = 0, False
        self._last: Line | None = None

    def begin(self, line: Line | None) -> None:
        """Note what runs in this thread from here on, after the forward pass on a line, unless a debugger does so."""
        other = getattr(sys.gettrace(), "__self__", None)
        if line is None:
            return
        self._passes[line] += 1
        is_debugged = sys.gettrace() is not None and not isinstance(other, Executed)
        if is_debugged or self._passes[line] > _MOST_PASSES:
            self._release()
            return
        if other is not None and other is not self:  # of another model in the same loop
            other.ran |= self.ran
            self.ran = other.ran
        self._left, self._last, taking = _MOST_OPCODES, line, False
        for frame in frames(sys._getframe(1)):
            taking |= frame.f_code.co_name == _DIFFERENTIATING
            if self._is_of_user(frame.f_code):
                if taking:
                    self.takes.setdefault(line, Line(frame.f_code.co_filename, frame.f_lineno))
                taking, frame.f_trace, frame.f_trace_opcodes = False, self._traced, True
        sys.settrace(self._entered)

    def take(self, line: Line | None, stacks: Iterable[Iterable[tuple[str, int]]]) -> None:
        """Note that a line takes a gradient, after operations with these stacks."""
        self.ran |= {(*own, -1) for own in map(line_of_user, stacks) if own is not None}
        if line is not None and self._last is not None:
            self.takes.setdefault(self._last, line)

    def end(self) -> None:
        """Note nothing more."""
        self._is_over = True
        self._release()

    def _release(self) -> None:
        """Leave the frames that run to a debugger."""
        if _is_of(sys.gettrace(), self):
            sys.settrace(None)
        for frame in frames(sys._getframe(1)):
            if self._is_of_user(frame.f_code):
                frame.f_trace_opcodes = False
                frame.f_trace = None if _is_of(frame.f_trace, self) else frame.f_trace

    def _is_of_user(self, code: CodeType) -> bool:
        if id(code) not in self._is_own:
            self._is_own[id(code)] = code, is_of_user(code.co_filename)
        return self._is_own[id(code)][1]

    def _entered(self, frame: FrameType, event: str, given: Any) -> Any:
        if self._is_over or not self._is_of_user(frame.f_code):
            return None
        frame.f_trace_opcodes = True
        return self._traced

    def _traced(self, frame: FrameType, event: str, given: Any) -> Any:
        self._left -= 1
        if self._is_over or self._left < 0:
            self._release()
            return None
        if event == "opcode" and (key := (id(frame.f_code), frame.f_lasti)) not in self._seen:
            self._seen.add(key)
            number, _, column, _ = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
            if number is not None and column is not None:
                self.ran.add((frame.f_code.co_filename, number, column))
        return self._traced


def _is_of(trace: Any, executed: Executed) -> bool:
    return getattr(trace, "__self__", None) is executed
