"""Loading ahead: a thread draws from an iterator that takes its time; a quick iterator needs no thread."""

import atexit
import queue
import threading
import time
from collections.abc import Iterator

from wholestep.safety.interrupts import uninterrupted

_AHEAD = 2
_TRIES = 4  # the middle one of them counts: the first may be waiting already, or open a file
_LONG = 2e-3  # seconds: a thread costs a tenth of that
_PATIENCE = 2.0  # seconds at the end of a script, for a load that never returns

_END = object()


class Ahead:
    """What an iterator gives, in its order; from the fifth item on by a thread, if it takes long.

    An error in the iterator is raised where its item would have come.

    Args:
        items: the iterator; nobody else may draw from it.

    >>> list(Ahead(iter("abc")))
    ['a', 'b', 'c']
    """

    def __init__(self, items: Iterator):
        self._items = items
        self._ready: queue.Queue = queue.Queue(_AHEAD)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._in_hand: list = []

    def __iter__(self) -> Iterator:
        takes = []
        for _ in range(_TRIES):
            begin = time.perf_counter()
            item = next(self._items, _END)
            if item is _END:
                return
            takes.append(time.perf_counter() - begin)
            yield item
        if sorted(takes)[_TRIES // 2] < _LONG:
            yield from self._items
            return
        self._thread = threading.Thread(target=self._work, name="wholestep-feed", daemon=True)
        self._thread.start()
        atexit.register(self._leave)
        while (item := self._ready.get()) is not _END:
            if isinstance(item, BaseException):
                raise item
            yield item

    def close(self) -> list:
        """End the thread, and return what it has drawn that nobody got."""
        self._stop.set()
        if self._thread is None:
            return []
        atexit.unregister(self._leave)
        drawn: list = []
        try:
            self._thread.join()
        finally:  # also after a second Ctrl-C, of somebody who does not want to wait for the thread
            with uninterrupted():
                drawn += [*self._drain(), *self._in_hand]
        return drawn

    def _work(self) -> None:
        try:
            for item in self._items:
                if not self._put(item):
                    self._in_hand.append(item)
                    return
            self._put(_END)
        except BaseException as error:  # handed to the loop, which raises it
            self._put(error)

    def _put(self, item: object) -> bool:
        while not self._stop.is_set():
            try:
                self._ready.put(item, timeout=0.05)
                return True
            except queue.Full:
                continue
        return False

    def _drain(self) -> list:
        items = []
        while not self._ready.empty():
            items.append(self._ready.get_nowait())
        return [item for item in items if item is not _END and not isinstance(item, BaseException)]

    def _leave(self) -> None:
        """Stop when the script ends inside the loop: the interpreter may abort if it ends before its threads."""
        assert self._thread is not None
        self._stop.set()
        self._thread.join(timeout=_PATIENCE)
