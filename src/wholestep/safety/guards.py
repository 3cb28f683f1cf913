"""Guards of the trainers of a model: one thread at a time, in a process with a working engine."""

import os
import threading
from weakref import WeakValueDictionary

from wholestep.errors import SpecificationError, message

_taking = threading.Lock()
_first_process: int | None = None
_guards: WeakValueDictionary[int, "Guard"] = WeakValueDictionary()  # by the id of a model, which a trainer keeps alive


def check_process() -> None:
    """Refuse a process that was forked after the engine was used; the first call records the engine's process."""
    global _first_process
    if _first_process is None:
        _first_process = os.getpid()
    if os.getpid() != _first_process:
        must = "A forked process cannot train, evaluate or predict if the engine was in use before the fork: "
        must += "the engine's threads are not copied, and it would wait for them for ever."
        received = f"process {os.getpid()}, forked after process {_first_process} had made a trainer"
        attempt = 'start it with multiprocessing.get_context("spawn"), or make models and trainers in it alone.'
        raise SpecificationError(message(must, received, attempt))


class Guard:
    """Refuses a second thread while one is inside of `with`; the same thread may enter again.

    >>> guard = Guard()
    >>> with guard, guard:
    ...     print("inside")
    inside
    """

    def __init__(self) -> None:
        self._owner: threading.Thread | None = None
        self._depth = 0

    @classmethod
    def of(cls, model: object) -> "Guard":
        """Return the guard that all trainers of a model share."""
        with _taking:
            return _guards.setdefault(id(model), cls())

    def __enter__(self) -> None:
        check_process()
        me = threading.current_thread()
        with _taking:
            if self._owner not in (None, me):
                must = "One thread at a time may be in the trainers of a model: an update spends the arrays of the "
                must += "one before it."
                received = f"thread {me.name!r}, while thread {self._owner.name!r} is in it"
                attempt = "let one wait for the other, or use a separate model and trainer in each."
                raise SpecificationError(message(must, received, attempt))
            self._owner = me
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        with _taking:
            self._depth -= 1
            if self._depth == 0:
                self._owner = None
